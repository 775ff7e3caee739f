# SPDX-License-Identifier: Apache-2.0
"""Networks in `coterie compare`: groups that no linear model can tell apart, and what is said and written of them."""

import json
import math
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
import torch

from command import coterie, refused
from coterie.config import DataOptions, options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError, DataError
from coterie.evaluate import Measured
from coterie.methods.fit import fit
from coterie.methods.linear.task import Task
from coterie.methods.session import Session
from coterie.models import Dense
from coterie.runs import auto
from coterie.runs.folder import read_options
from coterie.selection import Comparison, compare, networks
from coterie.selection.networks import Networks
from coterie.selection.networks_fit import Shared
from coterie.selection.text import answer, fit_command

NOISE, N_CLIENTS, ROWS = 0.3, 16, 40
ASKED = ("--client", "site", "--target", "y", "--hidden", "8")


def drawn(n_groups: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y = 1.5 |x_0| or, in a second group, -1.5 |x_0|, centred: no linear model is better than a constant."""
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(N_CLIENTS), ROWS)
    x = draw.normal(size=(len(owner), 2))
    y = np.where(owner % n_groups == 0, 1.5, -1.5) * (np.abs(x[:, 0]) - 0.8) + NOISE * draw.normal(size=len(owner))
    return x, y, np.array([f"s{i:02d}" for i in owner])


def clients_of(n_groups: int, *, classes: bool = False, **more: Any) -> Clients:
    x, y, names = drawn(n_groups)
    y = np.where(y > 0, "high", "low") if classes else 5.0 + 10.0 * y  # units of its own
    return from_arrays(x, y, names, task="classification" if classes else "regression", **more)


@pytest.fixture(scope="module")
def clients() -> Clients:
    return clients_of(2, new_clients=0.25)


@pytest.fixture(scope="module")
def groups(clients: Clients) -> Comparison:
    return compare(clients, hidden=(8,), quick=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, y, names = drawn(2)
    path = tmp_path_factory.mktemp("data") / "bent.csv"
    pc.write_csv(pa.table({"site": names, "a": x[:, 0], "b": x[:, 1], "y": y}), path)
    return path


# -- what is found ----------------------------------------------------------------------------------------------------
def test_groups_that_differ_by_a_bend_are_found(groups: Comparison) -> None:
    assert groups.chosen == "clusters"
    assert groups["clusters"].setting == {"n_clusters": 2}
    assert groups.grouping is not None
    truth = np.array([int(name[1:]) % 2 for name in groups.names])
    agree = groups.grouping.labels == truth
    assert agree.all() or not agree.any()
    assert groups.grouping.stability == 1.0
    assert (groups.grouping.margin > 0).all()


def test_errors_are_in_the_targets_units_and_near_the_noise(groups: Comparison) -> None:
    found, plain = groups["clusters"].test_metric, groups["global"].test_metric
    assert found is not None
    assert plain is not None
    assert 10 * NOISE * 0.8 < found < 10 * NOISE * 1.6  # noise of 3 was planted, and networks are fitted to few rows
    assert plain > 2.5 * found


def test_linear_models_do_not_see_the_groups(clients: Clients, groups: Comparison) -> None:
    linear = compare(clients, quick=True, structures=("clusters",))
    assert linear["clusters"].score < groups["clusters"].score - 0.5
    assert linear.settings["folds"] == 5
    assert groups.settings["folds"] == 3
    assert groups.settings["hidden"] == [8]


def test_new_clients_take_the_group_that_their_five_rows_suit(groups: Comparison) -> None:
    ours, plain = groups["clusters"], groups["global"]
    assert ours.new_metric is not None
    assert plain.new_metric is not None
    assert ours.new_metric < 0.6 * plain.new_metric
    for one in groups.structures:
        assert one.client_new_metric is not None
        assert np.isfinite(one.client_new_metric).all()
        assert len(one.client_new_metric) == N_CLIENTS - len(groups.names)


def test_mixtures_are_left_out_and_a_note_says_so(groups: Comparison) -> None:
    assert [one.name for one in groups.structures] == ["global", "clusters", "local", "shrunk", "representation"]
    assert "mixtures are left out" in answer(groups).doubts[-1]


def test_one_network_is_enough_where_clients_do_not_differ() -> None:
    found = compare(clients_of(1, classes=True), hidden=(8,), quick=True, structures=("clusters", "local", "shrunk"))
    assert found.chosen == "global"
    assert found.metric == "accuracy"
    tested = found["global"].test_metric
    assert tested is not None
    assert tested > 0.8  # a constant is right in half of the rows
    assert found["global"].new_metric is None


def test_without_test_rows_nothing_is_said_of_them() -> None:
    found = compare(clients_of(2, test_size=0.0), hidden=(4,), quick=True, structures=("local",))
    assert found["local"].test_metric is None
    assert math.isfinite(found["local"].metric)
    assert found.grouping is None


def test_heads_say_what_clients_share(groups: Comparison) -> None:
    unrepeated = tuple(replace(one, chosen_share=None) for one in groups.structures)
    headline = answer(replace(groups, chosen="representation", structures=unrepeated)).headline
    assert headline.startswith("Clients share features but map them to different outcomes")


# -- how it is judged -------------------------------------------------------------------------------------------------
def small(clients: Clients, **changes: Any) -> Networks:
    model = Dense((2, 2, 1), "squared", dtype=torch.float32)
    made = Networks(Task.of(Session(), clients, 3, 5), model, (2,), rounds=(1,), starts=1, max_clusters=2)
    return replace(made, **changes)


def test_no_fit_sees_the_rows_that_judge_it(clients: Clients) -> None:
    made = small(clients)
    *folds, (every, test) = made.sides
    assert len(folds) == 3
    for part, held in folds:
        assert held is not None
        assert torch.equal(part.counts + held.counts, every.counts)
        rows, judges = (set(map(tuple, side.client(0).x[0].tolist())) for side in (part, held))
        assert not rows & judges
    assert torch.equal(sum(held.counts for _, held in folds if held is not None), every.counts)
    assert test is not None
    assert clients.test is not None
    assert torch.equal(test.counts, clients.test.counts)


def test_new_clients_choose_by_their_rows_alone() -> None:
    """Two networks made by hand, |x| and -|x|: whoever has shown two rows is predicted without error."""
    model = Dense((1, 2, 1), "squared", intercept=False)
    theta = torch.tensor([[1.0, -1.0, 1.0, 1.0], [1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    x = torch.tensor([[[-1.0], [2.0]], [[3.0], [-0.5]]], dtype=torch.float64)  # [C, N, D]
    sign = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    support = Ragged.from_blocks(x, sign * x[..., 0].abs())
    query = Ragged.from_blocks(2 * x, sign * 2 * x[..., 0].abs())
    fit = Shared(Session(), model, theta, support)
    assert fit.on_new(support, query).metric.tolist() == [0.0, 0.0]
    one = Shared(Session(), model, theta[:1], support)  # 2 |x| off for the first client: the mean of 16 and 64
    assert one.on_new(support, query).metric.tolist() == [40.0, 0.0]


def test_network_that_diverged_is_worst_and_not_infinite() -> None:
    bad = Measured(torch.tensor([torch.nan, torch.inf, 1.0]), torch.tensor([torch.nan, torch.inf, 0.5]), torch.ones(3))
    for regression in (True, False):
        got = networks._values([[bad]], regression)
        loss = got["loss"][:, 0, 0]
        assert bool(loss.isfinite().all())
        assert float(loss[:2].min()) >= 5e5
        assert float(loss[2]) == (0.25 if regression else 1.0)


def test_large_clients_are_thinned_and_a_note_says_so(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(small(clients).notes("global")) == 1
    monkeypatch.setattr(networks, "_ROWS", 20)
    made = small(clients)
    assert int(made.trainer.rows.counts.max()) == 20
    assert made.notes("global")[1] == "Networks were trained on at most 20 rows of a client."


def test_clusters_stop_growing_when_more_are_no_better(groups: Comparison) -> None:
    tried = [trial.setting["n_clusters"] for trial in groups["clusters"].trials]
    scores = [trial.score for trial in groups["clusters"].trials]
    assert tried == list(range(2, 2 + len(tried)))
    assert len(tried) == 3 or scores[-1] <= max(scores[:-1])


# -- what is advised --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["global", "representation"])
def test_advised_fit_is_what_was_compared(clients: Clients, groups: Comparison, name: str) -> None:
    advice, tree = groups[name].fit, dict[str, Any](method=groups[name].fit.method, baselines=False)
    for key, value in advice.options.items():
        group, option = key.split(".")
        tree.setdefault(group, {})[option] = value
    fitted = fit(clients, options(tree))
    assert fitted.scores[0].test == pytest.approx(groups[name].test_overall, rel=0.02)  # float32, rows in another order


def test_fine_tuning_is_advised_as_what_is_nearest_and_networks_alone_not_at_all(
    clients: Clients, groups: Comparison
) -> None:
    shrunk = groups["shrunk"]
    assert shrunk.fit.method == "maml"
    assert shrunk.fit.options["personal.tune_steps"] == shrunk.setting["steps"]
    assert "MAML" in small(clients).notes("shrunk")[-1]
    assert fit_command(DataOptions(path="x.csv"), groups["local"].fit, seed=0) is None


# -- the command line -------------------------------------------------------------------------------------------------
def test_command_writes_document_report_and_a_next_command_that_works(
    data: Path, tmp_path: Path, groups: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("coterie.runs.comparison.compare", lambda _, **how: (asked.update(how), groups)[1])  # as above
    done = coterie("compare", data, *ASKED, "--quick", "--json", "--out", tmp_path / "found")
    assert done.code == 0, done.err
    assert (asked["hidden"], asked["quick"]) == ((8,), True)
    found = json.loads(done.out)
    assert found["chosen"] == "clusters"
    assert found["settings"]["clusters"] == {"n_clusters": 2}
    assert [list(trial["setting"]) for trial in found["rows"][0]["trials"]] == [["rounds"]] * 2
    assert all(row["fit"]["options"]["model.hidden"] == [8] for row in found["rows"])
    assert found["grouping"]["profile"] is None
    page = (tmp_path / "found" / "report.html").read_text()
    assert "How often each client is in the same group" in page
    assert "score by number of clusters" in page
    assert "Map of the clients" not in page
    assert "Where the groups" not in page
    name, *words = shlex.split(found["fit"])
    assert name == "coterie"
    assert words[words.index("--hidden") + 1] == "8"
    run = coterie(*words, "--out", tmp_path / "run", "--no-baselines")
    assert run.code == 0, run.err
    assert re.search("clients per cluster: (6, 7|7, 6)", run.out)  # 3 of 16 are held out, as in the comparison


def test_auto_fits_the_network_that_was_chosen(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "compare", partial(compare, quick=True, structures=("clusters",), max_clusters=2))
    done = coterie("fit", data, *ASKED, "--method", "auto", "--no-baselines", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert done.out.startswith("Clients fall into 2 groups")
    chosen = read_options(tmp_path / "run")
    assert (chosen.method, chosen.model.hidden, chosen.clusters.n_clusters) == ("ifca", (8,), 2)
    assert chosen.training.momentum == 0.9


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--target", "y", "--hidden", "x"), "'x' is not a list of layer sizes"),
        (("--target", "y", "--hidden", "0"), "model.hidden.0 is 0"),
        (("--target", "y", "--hidden", "8,-1"), "model.hidden.1 is -1"),
        (("--hidden", "8"), "networks need a target"),
    ],
)
def test_bad_layers_are_refused_and_nothing_is_written(
    data: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    said, hint = refused("compare", data, "--client", "site", *words, "--out", tmp_path / "a")
    assert sentence in said
    assert hint
    assert not (tmp_path / "a").exists()


def test_bad_layers_are_refused_in_python(clients: Clients) -> None:
    with pytest.raises(ConfigError, match=r"model\.hidden\.0 is 0"):
        compare(clients, hidden=(0,))
    x, _, names = drawn(2)
    with pytest.raises(DataError, match="networks need a target"):
        compare(from_arrays(x, None, names), hidden=(8,))
