# SPDX-License-Identifier: Apache-2.0
"""Moment descent as users meet it: options, a whole fit, its estimator, and runs that are read back."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics import r2_score
from torch import nn

import coterie
from command import coterie as run_command
from coterie import IFCA, FedAvg, MixedRegression
from coterie.config import FitOptions, options
from coterie.data.clients import Clients
from coterie.data.readers import from_arrays
from coterie.engines.in_process import Round
from coterie.errors import CoterieError
from coterie.estimators.base import options_of
from coterie.evaluate import adjusted_rand
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.models import linear_regression
from coterie.report import write_report
from coterie.runs.folder import begin_run, finish_run
from helpers import KilledError


@dataclass(frozen=True)
class Sites:
    """Clients of a few regressions, rows interleaved, and the group of each client in the order of names."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray
    truth: list[int]

    def clients(self, **how: Any) -> Clients:
        return from_arrays(self.x, self.y, self.groups, **how)

    def write(self, path: Path) -> Path:
        columns = {f"x{i}": self.x[:, i] for i in range(self.x.shape[1])}
        pc.write_csv(pa.table({"site": self.groups, **columns, "y": self.y}), path)
        return path


def sites(n_clients: int = 45, rows: int = 30, d: int = 5, *, k: int = 3, square: bool = False, seed: int = 0) -> Sites:
    """Slopes far apart (distances above 2, noise 0.2); with `square` the target depends on products of features."""
    draw = np.random.default_rng(seed)
    owner = draw.permutation(np.repeat(np.arange(n_clients), rows))
    x = draw.normal(size=(len(owner), d))
    seen = np.stack([x[:, i] * x[:, (i + 1) % d] for i in range(d)], 1) if square else x
    slopes = 2 * np.linalg.qr(draw.normal(size=(d, k)))[0].T  # orthogonal: distances 2 sqrt(2)
    y = (seen * slopes[owner % k]).sum(1) + 0.2 * draw.normal(size=len(owner))
    names = np.array([f"c{i:02d}" for i in range(n_clients)])
    return Sites(x, 7 + 3 * y, names[owner], [i % k for i in range(n_clients)])


SITES = sites()


def chosen(*words: str, **tree: Any) -> FitOptions:
    return options({"method": "moment-descent", "training": {"rounds": 20}, **tree}, sets=words)


def score(fitted: Fitted, method: str) -> Any:
    return next(s for s in fitted.scores if s.method == method)


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(SITES.clients(), chosen())


# -- a whole fit ------------------------------------------------------------------------------------------------------
def test_groups_and_their_number_are_found_without_being_told(fitted: Fitted) -> None:
    assert len(fitted.models.theta) == 3
    assert adjusted_rand(fitted.models.placed.label, SITES.truth) == 1
    assert fitted.extra["counted"] == "3 clusters: this many stand out among the anchors, and others fit no better"
    assert fitted.warnings == []
    assert [s.label for s in fitted.scores] == [
        "moment descent, 3 clusters", "one model for all (ridge)", "one model each",
    ]  # fmt: skip


def test_models_are_the_least_squares_fits_of_the_groups(fitted: Fitted) -> None:
    # Within a cluster, 10 local steps and means by rows end where least squares of the cluster's rows does, nearly:
    # clients differ in their covariances, and local steps drift.
    train = SITES.clients().train
    for k in range(3):
        rows = [train.client(i) for i in range(45) if fitted.models.placed.label[i] == k]
        x = np.concatenate(
            [(r.x[0].numpy() - fitted.models.scaling.mean.numpy()) / fitted.models.scaling.scale.numpy() for r in rows]
        )
        y = np.concatenate([fitted.models.scaling.target(r.target[0]).numpy() for r in rows])
        want = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
        np.testing.assert_allclose(fitted.models.theta[k], want, atol=0.01)


def test_rounds_tell_of_both_phases(fitted: Fitted) -> None:
    first = [r for r in fitted.rounds if "movement" in r.info]
    second = [r for r in fitted.rounds if "loss" in r.info]
    assert [r.round for r in first] == [0, 1, 2, 3, 4]
    assert [r.round for r in second] == list(range(6, 26))  # round 5 groups the anchors
    assert {len(r.info["movement"]) for r in first} == {30}  # 10 for each cluster
    assert {len(r.info["spectrum"]) for r in first} == {6}
    assert "30 anchors make 3 clusters" in next(r for r in fitted.rounds if r.round == 5).info["events"][0]
    assert sum(second[-1].info["sizes"]) == 45


def test_options_of_both_phases_reach_the_algorithm() -> None:
    asked = chosen(
        "clusters.n_clusters=3", "moments.iterations=3", "moments.anchors=9", "moments.oversampling=1",
        "training.rounds=4", "training.participation=0.8", "moments.max_clusters=4",
    )  # fmt: skip
    made = fit(SITES.clients(), asked)
    first = [r for r in made.rounds if "movement" in r.info]
    assert len(first) == 3
    assert len(first[0].info["movement"]) == 9
    assert len(first[0].info["spectrum"]) == 4
    assert {r.participants for r in made.rounds if "loss" in r.info} == {36}
    assert made.models.descended is not None
    assert len(made.models.descended.anchors) == 9
    assert made.models.descended.theta.shape == (9, 6)
    assert set(made.models.descended.anchors) <= set(made.models.names)


def test_a_model_moves_by_its_clusters_share_or_by_all_of_it() -> None:
    # After one round of Phase 2 from the same models, Lemma 1's average has moved by the share of the cluster's rows.
    clients = SITES.clients(test_size=0.0)
    words = ("clusters.n_clusters=3", "moments.further=false")
    start, one = (fit(clients, chosen(*words, f"training.step_size={s}", "training.rounds=1")) for s in (1e-30, 0.05))
    by_share = fit(
        clients, chosen(*words, "training.step_size=0.05", "training.rounds=1", "clusters.average_over=everyone")
    )
    first, share = start.models.theta, torch.bincount(start.models.placed.label, minlength=3).double()[:, None] / 45
    moved = by_share.models.theta - first  # clients have equally many rows
    torch.testing.assert_close(moved, share * (one.models.theta - first), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "words",
    [
        ("training.exact=true", "training.proximal=0.5"), ("clusters.soft=true",), ("clusters.averaging=gradient",),
        ("moments.subspace=orthogonal",), ("moments.estimator=halves",), ("moments.noise=0.1",),
        ("model.intercept=false",), ("data.standardise=false",), ("moments.delta=0.5",),
    ],
)  # fmt: skip
def test_variants_find_the_groups_too(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.keys.new_secret", lambda: "s")  # else the noise is another one each time
    made = fit(SITES.clients(), chosen(*words))
    assert adjusted_rand(made.models.placed.label, SITES.truth) == 1
    assert score(made, "moment-descent").test_r2 > 0.95


def test_all_anchors_begin_where_they_are_told() -> None:
    far = torch.full((6,), 3.0, dtype=torch.float64)
    made = fit(SITES.clients(), chosen("clusters.n_clusters=3"), start=far)
    assert adjusted_rand(made.models.placed.label, SITES.truth) == 1
    first = next(r for r in made.rounds if "movement" in r.info)
    assert min(first.info["movement"]) > 1  # sqrt(6) * 3 away


def test_clients_of_one_row_and_none_take_part() -> None:
    made = sites(30, 30)
    small = np.isin(made.groups, ["c00", "c01", "c02"])
    first = np.array([np.flatnonzero(made.groups == name)[0] for name in ("c00", "c01", "c02")])
    keep = np.union1d(np.flatnonzero(~small), first)
    clients = from_arrays(made.x[keep], made.y[keep], made.groups[keep], test_size=0.0)
    found = fit(clients, chosen())
    assert adjusted_rand(found.models.placed.label, made.truth) == 1
    assert found.models.descended is not None
    assert not set(found.models.descended.anchors) & {"c00", "c01", "c02"}


def test_one_group_is_one_cluster_and_said() -> None:
    made = fit(sites(k=1).clients(), chosen())
    assert len(made.models.theta) == 1
    assert made.extra["counted"] == "1 cluster: chosen on held-out rows, since no groups stand out among the anchors"
    assert score(made, "moment-descent").label == "moment descent, 1 cluster"
    assert score(made, "moment-descent").test == pytest.approx(score(made, "global").test, rel=0.01)


def test_fewer_anchors_than_clusters_are_said() -> None:
    made = sites(6, 30, k=2)
    groups = np.where(np.isin(made.groups, ["c00", "c01"]), made.groups, [f"{g}{i}" for i, g in enumerate(made.groups)])
    found = fit(from_arrays(made.x, made.y, groups, test_size=0.0), chosen("clusters.n_clusters=3", baselines=False))
    assert len(found.models.theta) == 2
    assert "found 2 clusters instead of 3: too few clients can be anchors" in found.warnings


# -- scores -----------------------------------------------------------------------------------------------------------
def test_r2_stands_beside_the_error_and_is_that_of_the_predictions() -> None:
    clients = SITES.clients(new_clients=0.2)
    model = MixedRegression(3, rounds=20, baselines=True).fit(clients)
    assert clients.test is not None
    y = np.concatenate([clients.test.client(i).target[0] for i in range(clients.n_clients)])
    own = model.scores_["moment-descent"]
    assert own.test_r2 == pytest.approx(r2_score(y, model.predict(clients)), rel=1e-9)
    assert own.test_r2 == pytest.approx(model.score(clients), rel=1e-12)
    assert own.test_r2 == pytest.approx(1 - own.test**2 / y.var(), rel=1e-9)
    assert own.train_r2 > 0.98
    assert own.new_clients_r2 > 0.98
    assert model.scores_["global"].test_r2 < 0.6
    assert model.scores_["local"].new_clients_r2 is None


def test_classes_have_no_r2() -> None:
    clients = from_arrays(SITES.x, np.where(SITES.y > 7, "up", "down"), SITES.groups)
    made = fit(clients, options({"training": {"rounds": 2}}))
    assert {(s.train_r2, s.test_r2) for s in made.scores} == {(None, None)}


# -- feature maps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["moment-descent", "ifca", "fedavg"])
def test_a_feature_map_sees_products(method: str) -> None:
    made = sites(d=3, k=1 if method == "fedavg" else 2, square=True)
    plain, squared = (fit(made.clients(), chosen(f"model.degree={d}", method=method)) for d in (1, 2))
    assert squared.models.theta.shape[1] == 10  # 3 features, 6 products, an intercept
    assert score(plain, method).test_r2 < 0.2
    assert score(squared, method).test_r2 > 0.95
    if method != "fedavg":
        assert adjusted_rand(squared.models.placed.label, made.truth) == 1


def test_a_feature_map_before_hidden_layers() -> None:
    made = fit(sites(d=3, square=True).clients(), chosen("model.degree=2", "model.hidden=[4]", method="ifca"))
    assert made.models.model.layers["0.weight"] == slice(0, 36)


def test_too_many_products_are_refused() -> None:
    clients = from_arrays(np.eye(60)[:, :40], np.arange(60.0), np.arange(60) % 6)
    said = refused(clients, "model.degree=3")
    assert said == "40 features have 12,340 products up to degree 3; the limit is 5,000"
    assert fit(clients, chosen("model.degree=2", "training.rounds=1", method="fedavg")).models.theta.shape == (1, 861)


# -- the estimator ----------------------------------------------------------------------------------------------------
def test_the_estimator_knows_its_anchors() -> None:
    model = MixedRegression(rounds=10, anchors=12, max_clusters=4, oversampling=0).fit(SITES.clients())
    assert model.n_clusters_ == 3
    assert model.anchors_.shape == (12,)
    assert model.anchor_models_.shape == (12, 6)
    assert model.spectrum_.shape == (3,)
    label = dict(zip(model.client_names_, model.labels_, strict=True))
    near = torch.cdist(model.anchor_models_, model.theta_).argmin(1)
    assert near.tolist() == [label[name] for name in model.anchors_]  # every anchor was led to its own group
    assert model.certain_.all()
    assert set(model.scores_) == {"moment-descent"}


def test_clone_keeps_every_parameter() -> None:
    model = MixedRegression(4, degree=2, estimator="halves", descent_step_size=0.5, min_rows=7, average_over="cluster")
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    made = options_of(model)
    assert (made.method, made.n_clusters, made.model.degree) == ("moment-descent", 4, 2)
    assert (made.moments.estimator, made.moments.step_size, made.moments.min_rows) == ("halves", 0.5, 7)
    assert (made.training.step_size, made.training.weighting) == (None, "rows")
    assert (made.clusters.average_over, made.clusters.n_init) == ("cluster", 1)


def test_known_clients_are_predicted_and_new_ones_placed() -> None:
    some = np.isin(SITES.groups, ["c00", "c01", "c02"])
    clients = from_arrays(SITES.x[~some], SITES.y[~some], SITES.groups[~some], test_size=0.0)
    model = MixedRegression(3, rounds=20, degree=2).fit(clients)
    made = model.predict(SITES.x[~some], groups=SITES.groups[~some])
    assert r2_score(SITES.y[~some], made) > 0.98
    found = model.assign(SITES.x[some], SITES.y[some], groups=SITES.groups[some])
    assert found.label.tolist() == model.labels_[:3].tolist()  # c03 to c05 are of the same groups as c00 to c02
    assert found.certain.all()


# -- runs -------------------------------------------------------------------------------------------------------------
def written(folder: Path, clients: Clients, asked: FitOptions) -> Fitted:
    begin_run(folder, asked, "test", clients)
    made = fit(clients, asked, folder=folder, every=0.0)
    finish_run(folder, made)
    return made


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    asked = chosen("model.degree=2", "moments.step_size=0.9", "moments.anchors=20", "clusters.n_clusters=3")
    made = written(tmp_path / "run", SITES.clients(), asked)
    loaded = coterie.load(tmp_path / "run")
    assert isinstance(loaded, MixedRegression)
    assert (loaded.degree, loaded.descent_step_size, loaded.anchors, loaded.step_size) == (2, 0.9, 20, None)
    fresh = clone(loaded).fit(SITES.clients())
    assert torch.equal(loaded.theta_, fresh.theta_)
    assert np.array_equal(loaded.predict(SITES.clients()), fresh.predict(SITES.clients()))
    assert loaded.scores_ == fresh.scores_ == {s.method: s for s in made.scores}
    assert loaded.anchors_.tolist() == fresh.anchors_.tolist()
    assert torch.equal(loaded.anchor_models_, fresh.anchor_models_)
    assert torch.equal(loaded.spectrum_, fresh.spectrum_)
    assert loaded.n_clusters_ == 3


def test_models_alone_are_enough_to_predict(tmp_path: Path) -> None:
    written(tmp_path / "run", SITES.clients(), chosen())
    (tmp_path / "run" / "state.safetensors").unlink()
    loaded = coterie.load(tmp_path / "run")
    assert not hasattr(loaded, "anchors_")
    assert loaded.score(SITES.clients()) > 0.98


@pytest.mark.parametrize(
    ("model", "method"),
    [(IFCA(2, degree=2, average_over="everyone", proximal=0.2, exact=True), "ifca"), (FedAvg(degree=2), "fedavg")],
)
def test_other_estimators_with_the_new_options_come_back_too(tmp_path: Path, model: Any, method: str) -> None:
    model.set_params(rounds=3)
    made = written(tmp_path / "run", SITES.clients(), options_of(model))
    loaded = coterie.load(tmp_path / "run")
    assert made.options.method == method
    assert loaded.get_params() == model.get_params()
    assert np.array_equal(loaded.predict(SITES.clients()), clone(model).fit(SITES.clients()).predict(SITES.clients()))


def test_the_tables_of_a_run_hold_both_phases(tmp_path: Path) -> None:
    made = written(tmp_path / "run", SITES.clients(), chosen())
    rows = pq.read_table(tmp_path / "run" / "rounds.parquet").to_pylist()
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, *range(6, 26)]
    assert [row["movement"] is not None for row in rows] == [True] * 5 + [False] * 20
    assert [row["loss"] is None for row in rows] == [True] * 5 + [False] * 20
    assert made.models.descended is not None
    assert rows[4]["spectrum"] == made.models.descended.spectrum.tolist()
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert '<section id="descent">' in page
    assert '<p class="event">3 clusters: this many stand out among the anchors' in page
    assert '<p class="event">30 anchors make 3 clusters: their tree is cut at the number asked for' in page


def test_profiles_name_products(tmp_path: Path) -> None:
    written(tmp_path / "run", sites(d=2, k=2, square=True).clients(), chosen("model.degree=2"))
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "<bdi>x0*x1</bdi>" in page
    assert "<bdi>x1^2</bdi>" in page


def test_a_fit_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    clients = SITES.clients()
    asked = chosen("training.rounds=6", "training.participation=0.7", "model.degree=2", "moments.iterations=3")
    whole = fit(clients, asked)
    calls, times = 0, 0

    def killed_every_seventh(phase: str, done: Round, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:  # four numbers of clusters advance side by side: one round of all is kept in between
            raise KilledError

    while True:
        try:
            again = fit(clients, asked, folder=tmp_path, every=0.0, watch=killed_every_seventh)
            break
        except KilledError:
            times += 1
    assert times >= 4
    assert torch.equal(again.models.theta, whole.models.theta)
    assert again.scores == whole.scores
    assert [replace(r, seconds=0) for r in again.rounds] == [replace(r, seconds=0) for r in whole.rounds]


# -- the command line -------------------------------------------------------------------------------------------------
def test_fit_predict_assign_and_report_from_the_shell(tmp_path: Path) -> None:
    data = SITES.write(tmp_path / "sites.csv")
    words = ("--client", "site", "--target", "y", "--method", "moment-descent", "--rounds", 10)
    said = run_command("fit", data, *words, "--out", tmp_path / "run")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert any(line.startswith("│ moment descent, 3 clusters ") for line in lines)
    assert "R²" in lines[3]
    assert any(line.startswith("3 clusters: this many stand out") for line in lines)
    assert "clients per cluster: 15, 15, 15" in lines
    assert max(map(len, lines[:-1])) <= 80
    assert run_command("predict", tmp_path / "run", data).out.count("\n") == 1351
    assert run_command("assign", tmp_path / "run", data).out.count(",true,") == 45
    assert run_command("report", tmp_path / "run").code == 0
    assert run_command("resume", tmp_path / "run").code == 0


# -- what is refused --------------------------------------------------------------------------------------------------
def refused(clients: Clients, *words: str, **more: Any) -> str:
    with pytest.raises(CoterieError) as caught:
        fit(clients, chosen(*words), **more)
    assert caught.value.hint
    return caught.value.message


def test_what_moment_descent_cannot_do_is_refused() -> None:
    clients = SITES.clients()
    classes = from_arrays(SITES.x, np.where(SITES.y > 7, "up", "down"), SITES.groups)
    assert refused(classes) == "moment-descent is for regression, and target 'target' has classes"
    assert refused(clients, "model.hidden=[4]") == "model.hidden is set, and moment-descent has no use for it"
    assert refused(clients, module=nn.Linear(5, 1)) == "moment-descent needs a linear model"
    assert refused(clients, "clusters.n_init=3") == "clusters.n_init is set, and moment-descent has no use for it"
    assert refused(clients, "clusters.init=random") == "clusters.init is set, and moment-descent has no use for it"
    assert refused(clients, "clusters.n_clusters=3", "moments.anchors=2") == "2 anchors are too few for 3 clusters"
    assert refused(clients, "clusters.n_clusters=46") == "46 clusters are more than the 45 clients"
    assert refused(clients, start=torch.zeros(3, 6)) == "start has shape (3, 6)"
    assert refused(from_arrays(SITES.x, None, SITES.groups)) == "moment-descent needs a target to learn"
    one_each = from_arrays(SITES.x[:30], SITES.y[:30], np.arange(30))
    assert refused(one_each) == "no client has two training rows, and anchors need two"
    assert "only one client" in refused(from_arrays(SITES.x, SITES.y, np.zeros(len(SITES.y))))


def test_nobody_to_descend_from_is_told() -> None:
    # One client of 30 has rows enough, and the two that are asked in the first round are others.
    owner = np.where(np.arange(60) < 31, 0, np.arange(60) - 30)
    clients = from_arrays(SITES.x[:60], SITES.y[:60], owner, test_size=0.0)
    assert "no participating client has two training rows" in refused(clients, "training.participation=0.07")


def test_an_own_linear_model_may_be_given() -> None:
    own = linear_regression(5, intercept=False)
    assert fit(SITES.clients(), chosen("training.rounds=2"), module=own).models.model is own
    assert "your own model is given" in refused(SITES.clients(), "model.degree=2", module=own)


@pytest.mark.parametrize("method", ["ifca", "fedavg"])
def test_exact_steps_are_for_linear_regression(method: str) -> None:
    words = ("training.exact=true", "training.proximal=1.0")
    with pytest.raises(CoterieError, match=r"training\.exact works only for linear regression"):
        fit(SITES.clients(), chosen(*words, "model.hidden=[3]", method=method))
    groups = ["clusters.n_clusters=3"] * (method == "ifca")
    made = fit(SITES.clients(), chosen(*words, *groups, method=method))
    assert made.models.theta.isfinite().all()


def test_exact_steps_and_gradients_do_not_go_together() -> None:
    words = ("training.exact=true", "training.proximal=1.0", "clusters.averaging=gradient")
    assert "training.exact needs local training" in refused(SITES.clients(), *words)
