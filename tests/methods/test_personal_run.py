# SPDX-License-Identifier: Apache-2.0
"""Personal models from options: the fit, the estimators, the run folder, the commands, and what is refused."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from command import coterie, refused
from coterie import FedRep, LGFedAvg, from_arrays, load
from coterie.cli import commands as cli
from coterie.config import options
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.engines.in_process import Finished, Round
from coterie.engines.screening import ClientWarning
from coterie.errors import ConfigError
from coterie.estimators import MAML, Personalised
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.methods.session import Session
from coterie.participation import Exponential, VirtualClock
from helpers import KilledError

M, N, D = 12, 30, 4
SMALL: dict[str, Any] = {"hidden": (6,), "rounds": 12, "step_size": 0.05, "random_state": 0}
FEW = [
    "--client", "site", "--target", "y", "--hidden", "6", "--rounds", 6, "--set", "training.step_size=0.05",
]  # fmt: skip
STAGES = [
    "--stragglers",
    "srpfl",
    "--clock",
    "exponential",
    "--set",
    "personal.n0=3",
    "--set",
    "personal.stage_rounds=2",
]


def rows(n_clients: int = M) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two directions that all clients share, and weights of them that are each one's own."""
    draw = np.random.default_rng(0)
    site = np.repeat(np.arange(n_clients), N)
    x = draw.normal(size=(n_clients * N, D))
    weight = np.stack([np.cos(np.arange(n_clients)), np.sin(np.arange(n_clients))], 1) * 2
    return x, (x[:, :2] * weight[site]).sum(1) + 0.1 * draw.normal(size=len(x)), np.array([f"s{i:02d}" for i in site])


@pytest.fixture(scope="module")
def clients() -> Clients:
    return from_arrays(*rows(), test_size=0.3, new_clients=0.2, seed=0)


@pytest.fixture(scope="module")
def fitted(clients: Clients) -> FedRep:
    return FedRep(**SMALL, baselines=True).fit(clients)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, y, site = rows()
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    pc.write_csv(pa.table({"site": site, **{f"x{d}": x[:, d] for d in range(D)}, "y": y}), path)
    return path


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "rows"
    said = coterie("fit", data, "--method", "fedrep", *FEW, *STAGES, "--out", folder)
    assert said.code == 0, said.err
    assert all(word in said.out for word in ("SRPFL", "one model each", "worst tenth", "virtual time"))
    return folder


def personal(clients: Clients, *, training: Any = None, **more: Any) -> Fitted:
    tree = {
        "method": "fedrep",
        "baselines": False,
        "model": {"hidden": (6,)},
        "training": training or {"rounds": 6},
        "personal": more,
    }
    return fit(clients, options(tree))


# -- fitting ----------------------------------------------------------------------------------------------------------
def test_own_heads_beat_one_model_for_all(fitted: FedRep) -> None:
    ours, common = fitted.scores_["fedrep"].test_r2, fitted.scores_["global"].test_r2
    assert ours is not None
    assert common is not None
    assert ours > 0.8
    assert common < 0.5
    assert fitted.spread_["fedrep"].worst_decile < fitted.spread_["global"].mean


def test_a_client_is_served_by_the_part_that_it_kept(fitted: FedRep, clients: Clients) -> None:
    """The prediction is the shared layer, a rectifier, and the client's own head, by hand."""
    found, block = fitted.personal_, fitted.prepared(clients.train).client(3)
    (first, last) = (found.theta, found.own[3])
    weight, bias = first[: 6 * D].view(6, D), first[6 * D :]
    hidden = (block.x[0] @ weight.T + bias).relu()
    expected = fitted.scaling_.back(hidden @ last[:6] + last[6])
    x, _, site = rows()
    name = str(found.names[3])
    mine = site == name
    made = fitted.predict(x[mine], site[mine])
    by_row = {tuple(np.round(row, 5)): value for row, value in zip(x[mine].tolist(), made, strict=True)}
    kept = clients.train.client(3).x[0]
    told = [by_row[tuple(np.round(row, 5))] for row in kept.tolist()]
    np.testing.assert_allclose(told, expected.double().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("clock", [None, "exponential", "dynamic", "lognormal", "trace"])
def test_rounds_are_counted_as_clients_counted_their_visits(
    clock: str | None, share: float, clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took part is drawn again afterwards; clients themselves have counted."""
    kept: list[Any] = []
    real = Session.run

    def run(self: Session, phase: str | None, rows: Ragged, *more: Any, **options: Any) -> Finished:
        done = real(self, phase, rows, *more, **options)
        kept.extend([self.engine(rows).private] if phase == "fit" else [])
        return done

    monkeypatch.setattr(Session, "run", run)
    more: dict[str, Any] = {} if clock is None else {"clock": clock, "stragglers": "srpfl", "n0": 1, "stage_rounds": 2}
    if clock == "trace":
        more["trace"] = str(tmp_path / "trace.csv")
        lines = [f"{name},{r},{(7 * i + 5 * r) % 11}\n" for i, name in enumerate(clients.names) for r in range(3)]
        (tmp_path / "trace.csv").write_text("client,round,seconds\n" + "".join(lines))
    made = personal(clients, training={"rounds": 6, "participation": share}, **more)
    assert torch.equal(made.per_client["rounds"], kept[0][0]["visits"])
    told = [r for r in made.rounds if "loss" in r.info]
    assert int(made.per_client["rounds"].sum()) == sum(r.participants for r in told)
    assert ("seconds" in made.per_client) == (clock is not None)


def test_the_number_of_clients_in_stages_and_who_was_left_out_are_told(clients: Clients) -> None:
    made = personal(clients, stragglers="srpfl", clock="dynamic", n0=2, stage_rounds=2)
    told = [r for r in made.rounds if "loss" in r.info]
    assert [r.info["enough"] for r in told] == [2, 2, 4, 4, 8, 8]
    assert any("never took part" in said for said in made.warnings) == bool((made.per_client["rounds"] == 0).any())
    assert any("training ended with the fastest 8 of 10" in said for said in made.warnings)
    assert made.extra["virtual_time"] == told[-1].time > 0


def test_stages_take_less_time_than_everyone(clients: Clients) -> None:
    staged = personal(clients, stragglers="srpfl", clock="exponential", n0=2, stage_rounds=2)
    everyone = personal(clients, clock="exponential")
    assert staged.extra["virtual_time"] is not None
    assert everyone.extra["virtual_time"] is not None
    assert staged.extra["virtual_time"] < everyone.extra["virtual_time"]
    slowest = float(everyone.per_client["seconds"].max())
    assert everyone.extra["virtual_time"] == pytest.approx(
        6 * slowest
    )  # speeds are fixed, and a round's work is the unit
    late = personal(clients, clock="exponential", communication=10.0)
    assert late.extra["virtual_time"] == pytest.approx(everyone.extra["virtual_time"] + 60)


@pytest.mark.parametrize(
    ("hidden", "classes", "given", "step_size"),
    [((6,), False, None, 0.01), ((6,), True, None, 0.1), ((6,), False, 0.2, 0.2), ((), False, 0.2, 0.2)],
)
def test_steps_are_short_where_errors_are_squared_and_mamls_inner_step_is_as_long(
    hidden: tuple[int, ...], classes: bool, given: float | None, step_size: float
) -> None:
    x, y, site = rows()
    made = MAML(hidden=hidden, rounds=1, step_size=given, participation=0.2).fit(x, y > 0 if classes else y, site)
    assert made.personal_.fit.step_size == step_size  # alpha, which clients go on with
    other = MAML(hidden=hidden, rounds=1, step_size=given, participation=0.2, alpha=0.003)
    assert other.fit(x, y > 0 if classes else y, site).personal_.fit.step_size == 0.003


def test_wide_networks_learn_numbers_without_diverging() -> None:
    """Skewed features and heads of 64 units: with steps of 0.1 this ends in infinity."""
    draw = np.random.default_rng(0)
    x, site = draw.lognormal(sigma=1.5, size=(600, 20)), np.repeat(np.arange(20), 30)
    y = x @ draw.normal(size=20) + draw.normal(size=20)[site]
    kept = FedRep(hidden=(64,), rounds=5).fit(x, y, site)
    assert bool(kept.theta_.isfinite().all())
    assert kept.score(x, y, site) > 0.5
    with pytest.warns(ClientWarning, match="left out"):  # for whom it does; others go on
        FedRep(hidden=(64,), rounds=5, step_size=0.1).fit(x, y, site)


def test_one_client_is_served_and_told_that_it_shares_nothing() -> None:
    x, y, site = rows(1)
    made = personal(from_arrays(x, y, site))
    assert made.warnings == ["there is only one client, so nothing is shared: check the client column"]


def test_measuring_on_the_way_changes_nothing(clients: Clients) -> None:
    bare = Clients(clients.schema, clients.train, None, None)
    with_test, without = personal(clients), personal(bare)
    assert torch.equal(with_test.models.theta, without.models.theta)
    assert torch.equal(with_test.models.own, without.models.own)
    assert "test_metric" in with_test.rounds[-1].info
    assert "test_metric" not in without.rounds[-1].info
    assert with_test.rounds[-1].info["test_metric"] == pytest.approx(with_test.scores[0].test)


# -- estimators -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [FedRep, LGFedAvg, MAML])
def test_estimators_have_scikit_learns_manners(kind: type[Personalised], clients: Clients) -> None:
    x, y, site = rows()
    made = kind(hidden=(6,), rounds=3, step_size=0.02, participation=0.5)
    assert clone(made).get_params() == made.get_params()
    with pytest.raises(NotFittedError):
        made.predict(x, site)
    made.fit(x, y, site)
    assert made.predict(x, site).shape == y.shape
    assert np.isfinite(made.score(x, y, site))
    scores = made.client_scores(x, y, site)
    assert list(scores) == made.client_names_.tolist() == sorted(set(site))
    order = np.random.default_rng(1).permutation(len(y))
    np.testing.assert_allclose(made.predict(x[order], site[order]), made.predict(x, site)[order], rtol=1e-4, atol=1e-5)
    assert made.score(x, y, site) == kind(**made.get_params()).fit(x, y, site).score(x, y, site)


def test_new_clients_fit_their_part_and_nobody_elses_changes(clients: Clients) -> None:
    model = FedRep(**SMALL).fit(clients)
    theta, own = model.theta_.clone(), model.personal_.own.clone()
    x, y, site = rows()
    new = np.isin(site, clients.newcomers.names if clients.newcomers is not None else [])
    own_part, heads = model.personal_.fit.start, model.personal_.own.mean(0)
    assert not torch.equal(own_part, heads)
    mean = model.personal_.outputs(
        model.prepared(clients.newcomers), heads.expand(int(clients.newcomers.n_clients), -1)
    )
    np.testing.assert_allclose(  # without targets, by the mean of all heads
        np.sort(model.predict(x[new], site[new])), np.sort(model.decided(mean)), rtol=1e-5
    )
    found = model.assign(x[new], y[new], site[new])
    assert not bool(found.known.any())
    assert torch.equal(model.personal_.own, own)
    model.adopt(x[new], y[new], site[new])
    assert torch.equal(model.theta_, theta)
    assert torch.equal(model.personal_.of(clients.names)[0], own)
    assert torch.equal(model.personal_.of(found.names)[0], found.own)
    assert model.score(x[new], y[new], site[new]) > 0.5
    assert len(model.predict(x[new], site[new])) == new.sum()


def test_a_clock_of_ones_own_is_used_as_it_is(clients: Clients) -> None:
    unit = 10 * 7 / 37 + 5  # a round's work: passes with the head, which has 7 of 37 parameters, and with the rest
    own = FedRep(**SMALL | {"rounds": 2}, clock=VirtualClock(Exponential(), unit=unit)).fit(clients)
    named = FedRep(**SMALL | {"rounds": 2}, clock="exponential").fit(clients)
    assert own.fitted_.extra["virtual_time"] == pytest.approx(named.fitted_.extra["virtual_time"])


def test_a_model_that_diverges_is_told_of(clients: Clients) -> None:
    with pytest.warns(ConvergenceWarning, match="diverged"):
        FedRep(**SMALL | {"step_size": 1e6, "rounds": 3}).fit(clients)


def test_classes_are_predicted_by_their_own_names() -> None:
    x, y, site = rows()
    word = np.where(y > 0, "high", "low")
    model = FedRep(**SMALL | {"step_size": 0.2}).fit(x, word, site)
    assert set(model.predict(x, site)) == {"high", "low"}
    assert model.score(x, word, site) > 0.9


# -- the run folder and the commands ----------------------------------------------------------------------------------
def table(text: str) -> pa.Table:
    return pc.read_csv(io.BytesIO(text.encode()))


def test_the_run_says_what_it_found(run: Path) -> None:
    found = json.loads((run / "run.json").read_text())
    assert (found["status"], found["method"], found["data"]["metric"]) == ("finished", "fedrep", "rmse")
    results = found["results"]
    assert [score["method"] for score in results["methods"]] == ["fedrep", "global", "local"]
    assert set(results["spread"]) == {"fedrep", "global", "local"}
    assert (results["layers"], results["rounds"]) == (["1"], 6)
    rounds = pq.read_table(run / "rounds.parquet")
    assert rounds["enough"].to_pylist() == [3, 3, 6, 6, 12, 12]
    assert rounds["virtual_time"].to_pylist() == sorted(rounds["virtual_time"].to_pylist())
    assert rounds["virtual_time"][-1].as_py() == results["virtual_time"]
    told = pq.read_table(run / "clients.parquet")
    assert {"rounds", "seconds", "metric", "metric_global", "metric_local"} <= set(told.column_names)


def test_a_loaded_run_predicts_as_the_run_did(run: Path, data: Path, tmp_path: Path) -> None:
    model = load(run)
    assert isinstance(model, FedRep)
    assert (model.stragglers, model.clock, model.n0) == ("srpfl", "exponential", 3)
    out = tmp_path / "made.parquet"
    assert coterie("predict", run, data, "--out", out).code == 0
    x, _, site = rows()
    np.testing.assert_allclose(pq.read_table(out)["prediction"].to_numpy(), model.predict(x, site), rtol=1e-5)


def test_a_new_client_is_served_from_its_labelled_rows(run: Path, data: Path, tmp_path: Path) -> None:
    text = data.read_text().replace('"s00"', '"new"')
    (tmp_path / "new.csv").write_text(text)
    made = table(coterie("predict", run, tmp_path / "new.csv").out)
    assert set(made.filter(pa.compute.invert(made["known"]))["client"].to_pylist()) == {"new"}
    fitted = table(coterie("assign", run, tmp_path / "new.csv").out)
    assert fitted.column_names == ["client", "known", "loss", "rmse", "rows"]
    assert fitted.num_rows == M
    lines = [line.rpartition(",")[0] + "," if line.startswith('"new"') else line for line in text.splitlines()]
    (tmp_path / "blank.csv").write_text("\n".join(lines) + "\n")
    told = coterie("predict", run, tmp_path / "blank.csv")
    assert told.err == "warning: 1 new client has no labelled rows, and the model for all is used\n"
    blank, mine = table(told.out), np.asarray(made["client"].to_pylist()) == "new"
    before, after = (one["prediction"].to_numpy() for one in (made, blank))
    np.testing.assert_allclose(after[~mine], before[~mine])
    assert not np.isclose(after[mine], before[mine]).any()


def test_the_report_shows_time_and_who_took_part(run: Path) -> None:
    page = (run / "report.html").read_text()
    for words in ("Personal models", "by virtual time", "How often each client took part", "worst tenth"):
        assert words in page


def test_a_killed_run_resumes_bit_equal(run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(phase: str, done: Round, total: int) -> None:
        if phase == "fit" and done.round == 4:
            raise KilledError

    class Deadly:
        def __enter__(self) -> Any:
            return die

        def __exit__(self, *_: object) -> None:
            pass

    folder = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(cli, "progress", Deadly)
        with pytest.raises(KilledError):
            coterie("fit", data, "--method", "fedrep", *FEW, *STAGES, "--out", folder, "--checkpoint-seconds", 0)
    assert coterie("resume", folder).code == 0
    a, b = load(run), load(folder)
    assert isinstance(a, FedRep)
    assert isinstance(b, FedRep)
    assert torch.equal(a.theta_, b.theta_)
    assert torch.equal(a.personal_.own, b.personal_.own)
    columns = ["loss", "virtual_time", "test_metric"]
    assert pq.read_table(run / "rounds.parquet", columns=columns) == pq.read_table(
        folder / "rounds.parquet", columns=columns
    )


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (["--method", "fedrep", "--hidden", ""], "this model has one layer", "--hidden"),
        (["--method", "lg-fedavg", "--hidden", ""], "this model has one layer", "--hidden"),
        (["--method", "fedrep", "--layers", "9"], "no layer '9'", "its layers are"),
        (["--method", "fedrep", "--layers", "0,1"], "all of the model's layers", "choose some"),
        (["--method", "fedrep", "--stragglers", "srpfl"], "which needs a clock", "--clock exponential"),
        (["--method", "fedrep", "--communication", "1"], "there is no clock", "--clock"),
        (["--method", "fedrep", "--set", "personal.n0=2"], "there are no stages", "--stragglers srpfl"),
        (["--method", "fedrep", *STAGES, "--set", "personal.n0=13"], "12 clients take part", "at most 12"),
        (["--method", "fedrep", "--clock", "sundial"], "personal.clock is 'sundial'", "coterie fit --help"),
        (["--method", "fedrep", "--trace", "nowhere.csv"], "there is no trace", "CSV or Parquet"),
        (["--method", "fedrep", "--clock", "dynamic", "--trace", "a.csv"], "clock=trace needs a trace file", "--help"),
        (["--method", "fedrep", "--set", "personal.alpha=0.1"], "fedrep has no use for it", "it is for --method maml"),
        (["--method", "maml", "--layers", "1"], "maml has no use for it", "it is for --method fedrep or lg-fedavg"),
        (["--method", "maml", "--set", "training.momentum=0.5"], "maml has no use for it", "plain gradient steps"),
        (["--method", "fedrep", "--set", "training.local_steps=3"], "fedrep has no use for it", "body_epochs"),
        (["--method", "fedrep", "--clusters", "3"], "fedrep has no use for it", "for --method ifca or moment-descent"),
        (["--method", "ifca", "--clock", "exponential"], "ifca has no use for it", "--method fedrep"),
        (["--method", "mixture", "--clock", "exponential"], "mixture has no use for it", "it is for --method fedrep"),
    ],
)
def test_what_cannot_work_is_refused(words: list[object], sentence: str, hint: str, data: Path, tmp_path: Path) -> None:
    said = refused("fit", data, *FEW, *words, "--out", tmp_path / "run")
    assert sentence in said[0]
    assert hint in said[1]
    assert not (tmp_path / "run").exists()


def test_a_trace_needs_its_clock() -> None:
    with pytest.raises(ConfigError, match="needs a trace file"):
        options({"method": "fedrep", "personal": {"clock": "trace"}})
