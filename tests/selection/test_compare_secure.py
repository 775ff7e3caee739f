# SPDX-License-Identifier: Apache-2.0
"""Comparisons with secure sums: the same choice and scores as without, and nothing that is said of a single client."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import coterie
from command import coterie as command
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.engines.flower.messages import Reply
from coterie.engines.flower.strategies import compare as compare_nodes
from coterie.engines.flower.wire import from_records
from coterie.errors import ConfigError
from coterie.methods.linear.structures import Effort
from coterie.selection import Comparison, compare
from coterie.selection.text import answer
from coterie.studies.data.planted import planted_structure
from flower_grid import MemoryGrid, connected, dealt
from planted import planted

SMALL = Effort(rounds=8, mixture_rounds=12, steps=8, starts=2, max_clusters=3, max_rank=2, max_components=2, drawn=True)
TRUTHS = ("global", "clusters", "local", "representation", "shrunk", "levels")


def clients_of(truth: Any, *, classes: bool = False, **more: Any) -> Clients:
    levels = truth == "levels"
    how: dict[str, Any] = {"n_clients": 16, "rows": 24, "n_features": 3, "noise": 0.3, "seed": 0, **more}
    made = planted_structure("global" if levels else truth, 2 if truth == "clusters" else 1, **how)
    x, y, owner = np.asarray(made.x), np.asarray(made.y), made.names[made.owners]
    if levels:
        y = y + np.random.default_rng(0).normal(size=made.n_clients)[made.owners]
    target = np.where(y > np.median(y), "high", "low") if classes else y
    kind: Any = "classification" if classes else "regression"
    return from_arrays(x, target, owner, task=kind, test_size=0.25, new_clients=0.2)


def same(one: Comparison, other: Comparison) -> None:
    assert one.chosen == other.chosen
    for ours in one.structures:
        theirs = other[ours.name]
        assert (ours.setting, ours.chosen_share, ours.as_good) == (theirs.setting, theirs.chosen_share, theirs.as_good)
        for name in ("score", "stderr", "metric", "test_metric", "test_stderr", "test_r2", "new_metric", "df"):
            value, expected = getattr(ours, name), getattr(theirs, name)
            assert (value is None) == (expected is None), name
            assert value is None or value == pytest.approx(expected, rel=1e-6, abs=1e-6), name
        for name in ("versus_global", "versus_chosen", "test_versus_global", "new_versus_global"):
            gap, want = getattr(ours, name), getattr(theirs, name)
            assert (gap is None) == (want is None)
            assert gap is None or (gap.mean, gap.low) == pytest.approx((want.mean, want.low), rel=1e-6, abs=1e-6)
    assert (one.n_judged, one.n_outliers, one.n_absent) == (other.n_judged, other.n_outliers, other.n_absent)
    assert (one.held_out, one.on_test) == (other.held_out, other.on_test)
    if one.grouping is not None and other.grouping is not None:
        assert one.grouping.sizes.tolist() == other.grouping.sizes.tolist()
        assert one.grouping.stability == pytest.approx(other.grouping.stability)


@pytest.mark.parametrize("truth", TRUTHS)
def test_the_choice_and_the_scores_are_those_without(truth: str) -> None:
    clients = clients_of(truth)
    plain, found = (compare(clients, effort=SMALL, seed=1, secure=secure) for secure in (False, True))
    same(found, plain)
    assert found.traffic.messages == plain.traffic.messages


@pytest.mark.parametrize("truth", ["clusters", "levels"])
def test_of_classes_too(truth: str) -> None:
    clients = clients_of(truth, classes=True, rows=40)
    same(*(compare(clients, effort=SMALL, seed=1, secure=secure) for secure in (True, False)))


def test_outliers_are_set_aside_by_themselves() -> None:
    clients = clients_of("global", outliers=0.15, n_clients=24)
    plain, found = (compare(clients, effort=SMALL, seed=1, secure=secure) for secure in (False, True))
    same(found, plain)
    assert plain.n_outliers == len(plain.outliers) > 0
    assert found.outliers == ()
    assert "their nodes can tell" in " ".join(answer(found).doubts)
    assert all(name in " ".join(answer(plain).doubts) for name in plain.outliers[:3])


def test_planted_groups_are_found_from_drawn_models() -> None:
    plain = compare(clients_of("clusters"), effort=SMALL, seed=1)
    assert plain.chosen == "clusters"
    assert plain.grouping is not None
    assert plain.grouping.stability == 1.0


@pytest.fixture(scope="module")
def groups() -> Comparison:
    return compare(clients_of("clusters"), effort=SMALL, seed=1, secure=True)


def test_nothing_is_said_of_single_clients(groups: Comparison) -> None:
    for name in ("judged", "outlier_score", "gain"):
        assert getattr(groups, name) is None
    assert groups.outliers == groups.worse_off == groups.absent == ()
    for one in groups.structures:
        assert one.client_score is one.client_test_metric is one.client_test_score is one.client_new_metric is None
    assert groups.grouping is not None
    assert groups.grouping.labels is groups.grouping.agreement is groups.grouping.margin is groups.grouping.map is None
    assert groups.document()["protocol"]["secure"]["sums"] > 10
    assert "groups" in repr(groups)
    assert groups["clusters"].fit.options["clusters.init"] == "balanced"
    assert groups["mixture"].fit.method is None


def test_on_nodes_the_same_is_found_and_only_masked_parts_are_sent(tmp_path: Path) -> None:
    rows = planted(16, 24).clients(test_size=0.0).train
    clients, grid = connected(rows, tmp_path, nodes=4, test_size=0.2, new_clients=0.2, seed=3)
    how: dict[str, Any] = {"effort": SMALL, "seed": 3, "structures": ("clusters", "shrunk")}
    found = compare(clients, secure=True, **how)
    replies = [said for one in grid.replied if isinstance(said := from_records(one.content), Reply)]
    assert not any(any(answers.parts.values()) for reply in replies for answers in reply.answers)
    again, _ = connected(rows, tmp_path / "plain", nodes=4, test_size=0.2, new_clients=0.2, seed=3)
    same(found, compare(again, **how))


def test_a_federation_is_compared_securely(tmp_path: Path) -> None:
    rows = planted(16, 24).clients(test_size=0.0).train
    grid = MemoryGrid(dealt(rows, tmp_path, nodes=4))
    found = compare_nodes(grid, nodes=4, effort=SMALL, seed=3, secure=True)
    assert isinstance(found, Comparison)
    assert found.gain is None
    assert found.settings["secure"]["nodes"] == 4


def test_the_command_writes_a_folder_without_clients_values(tmp_path: Path) -> None:
    data, folder = planted(12, 20).write(tmp_path / "a.csv"), tmp_path / "run"
    words = ("--client", "site", "--target", "y", "--secure", "--quick", "--new-clients", "0")
    done = command("compare", str(data), *words, "--out", str(folder))
    assert done.code == 0, done.err
    assert set(pq.read_table(folder / "clients.parquet").column_names) == {"client", "rows"}
    document = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    assert document["fit"] is None or "--secure" in document["fit"]
    assert document["outliers"] == document["worse_off"] == []
    assert (folder / "report.html").exists()


def test_auto_fits_what_was_chosen_securely(tmp_path: Path) -> None:
    data, run = planted(12, 20).write(tmp_path / "a.csv"), tmp_path / "run"
    words = ("--client", "site", "--target", "y", "--secure", "--method", "auto")
    done = command("fit", str(data), *words, "--out", str(run))
    assert done.code == 0, done.err
    document = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert document["results"]["secure"]["sums"] > 0
    assert document["results"]["why"]["chosen"] in ("clusters", "shrunk", "representation")
    assert set(pq.read_table(run / "clients.parquet").column_names) <= {"client", "rows_train", "rows_test", "rounds"}


@pytest.mark.parametrize(
    ("how", "clients", "why"),
    [
        ({"hidden": (4,)}, lambda: clients_of("global"), "networks"),
        ({}, lambda: from_arrays(np.zeros((80, 2)), None, np.repeat(np.arange(8), 10)), "mixtures of rows"),
    ],
)
def test_what_needs_clients_own_values_is_refused(how: dict[str, Any], clients: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        coterie.compare(clients(), secure=True, **how)
    assert "leave secure out" in error.value.hint
