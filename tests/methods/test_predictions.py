# SPDX-License-Identifier: Apache-2.0
"""What predictions are worth: probabilities against scikit-learn, intervals against planted noise, new clients apart."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score

import coterie
from coterie.algorithms.intervals import least_rows, pooled_quantiles
from coterie.algorithms.probabilities import BINS, ranked
from coterie.config import options
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.readers import from_arrays
from coterie.errors import ConfigError
from coterie.estimators.base import estimator_of
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.methods.intervals import Intervals, client_noise, normal_quantile
from coterie.methods.probabilities import Resampled, share_interval
from coterie.runs.folder import begin_run, finish_run

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "ifca": {"clusters": {"n_clusters": 2}},
    "shrunk": {"prior": {"spread": "intercept"}},
    "local": {"prior": {"penalty": 1.0}},
    "fedrep": {"model": {"hidden": [4]}, "training": {"rounds": 5}},
    "maml": {"training": {"rounds": 10}},
}


@cache
def classified(classes: int, seed: int = 0, n_clients: int = 24) -> Clients:
    """Clients with intercepts of their own; of two classes the second is rarer. The last client is of one class only."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(n_clients), 80)
    x = rng.normal(size=(len(group), 4))
    scores = x @ rng.normal(size=(4, classes)) + rng.normal(size=(n_clients, classes))[group]
    scores[:, 0] += 1.5
    y = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    y[group == n_clients - 1] = 0
    names = np.array([f"c{i:02d}" for i in group])
    return from_arrays(x, np.array(["a", "b", "c", "d"])[y], names, test_size=0.4, new_clients=0.2, seed=0)


@cache
def fitted(method: str, classes: int) -> Fitted:
    return fit(classified(classes), options({"method": method, "seed": 0, **METHODS[method]}))


def estimator(found: Fitted) -> Any:
    made = estimator_of(found.options)
    made._restore(found)
    return made


def in_order(rows: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """[N] targets and owners, in the order of `predict`: that of storage."""
    return np.asarray(rows.y), rows.owners


# -- probabilities ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_measures_are_those_of_scikit_learn(method: str, classes: int) -> None:
    found, clients = fitted(method, classes), classified(classes)
    p = estimator(found).predict_proba(clients)
    assert p.shape == (clients.test.layout.n_rows, classes)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)
    y, _ = in_order(clients.test)
    said = found.extra["probabilities"]["test"]
    views = [1] if classes == 2 else range(classes)
    area = np.mean([roc_auc_score(y == k, p[:, k]) for k in views])
    average = np.mean([average_precision_score(y == k, p[:, k]) for k in views])
    assert said["auroc"]["value"] == pytest.approx(area, abs=1e-3)
    assert abs(said["auroc"]["value"] - area) <= said["auroc"]["within"] + 1e-9
    assert said["average_precision"]["value"] == pytest.approx(average, abs=1e-3)
    assert said["log_loss"]["value"] == pytest.approx(log_loss(y, p, labels=range(classes)), rel=1e-5)
    one_hot = np.eye(classes)[y]
    brier = brier_score_loss(y, p[:, 1]) if classes == 2 else ((p - one_hot) ** 2).sum(1).mean()
    assert said["brier"]["value"] == pytest.approx(brier, rel=1e-5)
    assert said["accuracy"]["value"] == pytest.approx((p.argmax(1) == y).mean(), abs=1e-6)
    assert said["base_rate"]["value"] == pytest.approx(np.bincount(y).max() / len(y))
    for name in ("auroc", "average_precision", "log_loss", "brier", "accuracy"):
        assert said[name]["low"] < said[name]["value"] < said[name]["high"]


@pytest.mark.parametrize("method", ["fedavg", "shrunk", "fedrep"])
def test_clients_own_measures_are_exact_and_one_class_alone_has_none(method: str) -> None:
    found, clients = fitted(method, 2), classified(2)
    p = estimator(found).predict_proba(clients)[:, 1]
    y, owner = in_order(clients.test)
    per = {name: value.numpy() for name, value in found.per_client.items()}
    alone = 0
    for i in range(clients.n_clients):
        mine = owner == i
        assert per["log_loss"][i] == pytest.approx(log_loss(y[mine], p[mine], labels=[0, 1]), rel=1e-4)
        assert per["brier"][i] == pytest.approx(brier_score_loss(y[mine], p[mine]), rel=1e-4)
        assert per["base_rate"][i] == pytest.approx(np.bincount(y[mine]).max() / mine.sum())
        assert per["metric_low"][i] < per["metric"][i] + 1e-9
        if len(set(y[mine])) == 1:
            alone += 1
            assert np.isnan([per["auroc"][i], per["auroc_low"][i], per["average_precision"][i]]).all()
            continue
        assert per["auroc"][i] == pytest.approx(roc_auc_score(y[mine], p[mine]))
        assert per["average_precision"][i] == pytest.approx(average_precision_score(y[mine], p[mine]))
        assert 0 < per["auroc_low"][i] <= per["auroc"][i] <= per["auroc_high"][i] <= 1
    assert alone == int("c23" in clients.names)


def test_calibration_is_that_of_scikit_learn() -> None:
    found, clients = fitted("fedavg", 2), classified(2)
    p, (y, _) = estimator(found).predict_proba(clients)[:, 1], in_order(clients.test)
    observed, predicted = calibration_curve(y, p, n_bins=10, strategy="quantile")
    groups = found.extra["probabilities"]["test"]["calibration"]["groups"]
    assert sum(group["rows"] for group in groups) == len(y)
    # a fine bin at the edge of a tenth may fall to either side, with one or two of some sixty rows
    np.testing.assert_allclose([group["predicted"] for group in groups], predicted, atol=0.01)
    np.testing.assert_allclose([group["observed"] for group in groups], observed, atol=0.06)
    assert all(group["low"] < group["observed"] < group["high"] for group in groups if 0 < group["observed"] < 1)


def test_areas_from_bins_by_hand() -> None:
    counts = torch.zeros(2, BINS, dtype=torch.float64)
    counts[0, [10, 20, 30]] = torch.tensor([3.0, 2.0, 1.0]).double()
    counts[1, [20, 40]] = torch.tensor([2.0, 2.0]).double()
    found = ranked(counts)
    assert float(found.auroc) == pytest.approx((2 * (3 + 1) + 2 * 6) / 24)  # two ties of 2 count half: 3 + 2 / 2
    assert float(found.within) == pytest.approx(4 / 24 / 2)
    assert float(found.average_precision) == pytest.approx((2 * 1 + 2 * 4 / 7) / 4)
    scores, y = [10] * 3 + [20] * 2 + [30] + [20] * 2 + [40] * 2, [0] * 6 + [1] * 4
    assert float(found.auroc) == pytest.approx(roc_auc_score(y, scores))
    assert float(found.average_precision) == pytest.approx(average_precision_score(y, scores))
    assert bool(ranked(torch.zeros(2, BINS)).auroc.isnan())


def test_clients_influence_foretells_what_comes_of_leaving_them_out() -> None:
    """The first-order change of area and average precision, against computing them again without the client."""
    found, clients = fitted("fedavg", 2), classified(2)
    p, (y, owner) = estimator(found).predict_proba(clients)[:, 1], in_order(clients.test)
    said = found.extra["probabilities"]["test"]
    draws = np.random.default_rng(0).integers(clients.n_clients, size=(300, clients.n_clients))
    rows = [np.flatnonzero(owner == i) for i in range(clients.n_clients)]
    for name, measure in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
        again = [measure(y[at], p[at]) for draw in draws if len(at := np.concatenate([rows[i] for i in draw]))]
        low, high = np.quantile(again, [0.025, 0.975])
        assert said[name]["high"] - said[name]["low"] == pytest.approx(high - low, rel=0.35)


def test_resampling_clients_is_seeded_and_needs_two() -> None:
    rows, values = torch.tensor([10.0, 20.0, 0.0, 30.0]).double(), torch.tensor([0.1, 0.5, torch.nan, 0.9]).double()
    first, again = (Resampled(rows, 3).mean(values) for _ in range(2))
    assert first == again
    assert first["value"] == pytest.approx((1 + 10 + 27) / 60)
    assert 0.1 <= first["low"] < first["value"] < first["high"] <= 0.9
    assert Resampled(rows[:1], 3).mean(values[:1]) == {"value": pytest.approx(0.1)}
    assert share_interval(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)  # Wilson (1927)


@pytest.mark.parametrize("method", ["fedavg", "ifca", "shrunk"])
def test_new_clients_without_labels_have_the_population_model(method: str) -> None:
    found = fitted(method, 2)
    said = found.extra["probabilities"]
    assert said["unlabelled"]["rows"] == said["new"]["rows"]
    assert found.scores[0].new_clients_unlabelled == pytest.approx(said["unlabelled"]["accuracy"]["value"])
    if method == "fedavg":  # one model for all knows no difference
        assert said["unlabelled"]["log_loss"]["value"] == pytest.approx(said["new"]["log_loss"]["value"])


# -- class weights and thresholds -------------------------------------------------------------------------------------
def test_class_weights_are_those_of_scikit_learn() -> None:
    clients = classified(2)
    x = torch.cat([block.x[block.real] for block in clients.train.blocks()]).numpy()
    y = torch.cat([block.target[block.real] for block in clients.train.blocks()]).numpy()
    for given, theirs in (("balanced", "balanced"), ({"a": 1.0, "b": 5.0}, {0: 1.0, 1: 5.0})):
        chosen = {"method": "fedavg", "baselines": False, "predictions": {"class_weights": given}}
        chosen |= {"training": {"rounds": 1500, "local_steps": 1, "tol": 0.0}}
        made = estimator(fit(clients, options(chosen)))
        want = LogisticRegression(C=1e6, class_weight=theirs, max_iter=1000).fit(x, y).predict_proba(x)
        np.testing.assert_allclose(made.predict_proba(x), want, atol=2e-3)


def test_class_weights_of_random_effects_move_probabilities() -> None:
    plain, heavy = (
        fit(classified(2), options({"method": "shrunk", "prior": {"spread": "intercept"}, "predictions": given}))
        for given in ({}, {"class_weights": {"a": 1.0, "b": 4.0}})
    )
    (before, after) = (estimator(one).predict_proba(classified(2))[:, 1].mean() for one in (plain, heavy))
    assert after > before + 0.1
    assert (
        heavy.extra["probabilities"]["test"]["decisions"]["sensitivity"]
        > (plain.extra["probabilities"]["test"]["decisions"]["sensitivity"])
    )


def test_a_threshold_decides_predictions_and_accuracy() -> None:
    clients = classified(2)
    found = fit(clients, options({"method": "fedavg", "predictions": {"threshold": 0.2}}))
    made, (y, _) = estimator(found), in_order(clients.test)
    p = made.predict_proba(clients)[:, 1]
    assert made.predict(clients).tolist() == np.where(p >= 0.2, "b", "a").tolist()
    assert made.predict(clients, threshold=0.6).tolist() == np.where(p >= 0.6, "b", "a").tolist()
    assert found.scores[0].test == pytest.approx(((p >= 0.2) == y).mean())
    decisions = found.extra["probabilities"]["test"]["decisions"]
    assert decisions["threshold"] == 0.2
    assert decisions["sensitivity"] == pytest.approx((p >= 0.2)[y == 1].mean())
    assert decisions["specificity"] == pytest.approx((p < 0.2)[y == 0].mean())
    assert decisions["precision"] == pytest.approx(y[p >= 0.2].mean())


@pytest.mark.parametrize(
    ("given", "classes", "said"),
    [
        ({"threshold": 0.3}, 3, "predictions.threshold is for two classes, and there are 3"),
        ({"class_weights": {"a": 1.0}}, 2, "predictions.class_weights has a, and classes are a, b"),
        ({"coverage": 0.9}, 2, "predictions.coverage is for numbers"),
    ],
)
def test_what_predictions_cannot_have_is_refused(given: dict[str, Any], classes: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(classified(classes), options({"method": "fedavg", "predictions": given}))


# -- intervals --------------------------------------------------------------------------------------------------------
@cache
def measured(seed: int = 0, n_clients: int = 60, rows: int = 60) -> Clients:
    """Clients with intercepts and noise of their own; every sixth has few rows."""
    rng = np.random.default_rng(seed)
    group = np.concatenate([np.full(10 if i % 6 == 0 else rows, i) for i in range(n_clients)])
    x = rng.normal(size=(len(group), 3))
    noise = rng.uniform(0.5, 2.0, size=n_clients)[group] * rng.standard_t(4, size=len(group))
    y = x @ [1.0, -1.0, 0.5] + rng.normal(size=n_clients)[group] + noise
    return from_arrays(x, 10 * y, np.array([f"c{i:02d}" for i in group]), test_size=0.3, new_clients=0.3, seed=seed)


@cache
def covering(method: str, seed: int = 0) -> Fitted:
    chosen = {"method": method, "predictions": {"coverage": 0.9}, **METHODS[method]}
    return fit(measured(seed), options(chosen))


@pytest.mark.parametrize("method", METHODS)
def test_conformal_intervals_cover_what_they_say(method: str) -> None:
    """Held-out rows, new clients, and new clients without labels: hundreds of rows each, 90 % of them inside.

    Rows of a client fall together, so that shares scatter by about 2 % of rows; clients' own quantiles err to the safe side.
    """
    said = covering(method).extra["coverage"]
    assert said["level"] == 0.9
    assert said["pooled"] > 0  # the small clients have 5 calibration rows at most, and 9 are needed
    assert said["calibrated"] + said["pooled"] == measured().n_clients
    for side in ("test", "new", "unlabelled"):
        most = 1.0 if side == "new" else 0.97  # a model of one's own, with intervals that would do without
        assert 0.84 < said["conformal"][side]["value"] < most, side
        assert said["conformal"][side]["low"] < said["conformal"][side]["value"] < said["conformal"][side]["high"]
    assert said["conformal"]["unlabelled"]["length"] == pytest.approx(said["conformal"]["new"]["length"])


def test_intervals_from_the_model_cover_normal_rows() -> None:
    rng = np.random.default_rng(1)
    group = np.repeat(np.arange(60), 40)
    x = rng.normal(size=(len(group), 2))
    y = x @ [1.0, 2.0] + rng.normal(size=60)[group] + rng.normal(size=len(group))
    clients = from_arrays(x, y, group.astype(str), test_size=0.3, new_clients=0.3, seed=0)
    found = fit(clients, options({"method": "shrunk", "prior": {"spread": "intercept"}}))
    said = found.extra["coverage"]
    assert "conformal" not in said
    for side in ("test", "new", "unlabelled"):
        assert 0.85 < said["model"][side]["value"] < 0.96, side
    z = normal_quantile(0.9)
    assert said["model"]["test"]["length"] == pytest.approx(2 * z * (1 + 1 / 28) ** 0.5, rel=0.1)  # noise 1, 28 rows
    assert said["model"]["unlabelled"]["length"] == pytest.approx(
        2 * z * 2**0.5, rel=0.25
    )  # and clients that differ by 1


@pytest.mark.parametrize("method", ["shrunk", "ifca", "local", "fedrep"])
def test_intervals_that_are_predicted_are_those_that_were_measured(method: str, tmp_path: Path) -> None:
    clients, found = measured(), covering(method)
    begin_run(tmp_path, found.options, "test", clients)
    finish_run(tmp_path, found)
    y, _ = in_order(clients.test)
    y = y.astype(float)
    for made in (estimator(found), coterie.load(tmp_path)):
        for how in ("conformal", "model"):
            ends = made.predict_interval(clients, coverage=0.9, how=how)
            inside = (ends[:, 0] <= y) & (y <= ends[:, 1])
            said = found.extra["coverage"][how]["test"]
            assert inside.mean() == pytest.approx(said["value"], abs=2e-3)  # networks: a row at an end, in float32
            assert (ends[:, 1] - ends[:, 0]).mean() == pytest.approx(said["length"], rel=1e-4)
        new = clients.newcomers
        wide = made.predict_interval(np.asarray(new.client(0).x[0]), np.repeat(new.names[0], int(new.counts[0])))
        middle = made.predict(np.asarray(new.client(0).x[0]), np.repeat(new.names[0], int(new.counts[0])))
        length = (wide[:, 1] - wide[:, 0])[0]
        assert length == pytest.approx(found.extra["coverage"]["conformal"]["unlabelled"]["length"], rel=1e-6)
        np.testing.assert_allclose(wide.mean(1), middle, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"coverage 0.7 were not calibrated"):
        made.predict_interval(clients, coverage=0.7)
    assert (made.predict_interval(clients, coverage=0.95)[:, 1] >= ends[:, 1] - 1e9).all()


def test_calibration_rows_are_not_trained_on() -> None:
    clients = measured()
    rest, apart = clients.train.split(0.2, seed=0, purpose="calibration")
    alone = fit(Clients(clients.schema, rest, clients.test), options({"method": "shrunk", **METHODS["shrunk"]}))
    with_ = covering("shrunk")
    np.testing.assert_allclose(with_.models.own, alone.models.own, rtol=1e-9)
    assert with_.per_client["rows_calibration"].tolist() == apart.counts.tolist()


def test_pooled_quantiles_by_hand() -> None:
    """Two clients: one with residuals 1 and 3, one with 2. Every client counts 1/3, and one more as never covered."""
    from coterie.algorithms.intervals import _edges

    edges, shares = _edges(), torch.zeros(2048, dtype=torch.float64)
    for value, share in ((1.0, 0.5), (3.0, 0.5), (2.0, 1.0)):
        shares[torch.searchsorted(edges, torch.tensor(value).double())] += share
    found = pooled_quantiles(shares, 2.0, (0.1, 0.4, 0.5, 0.66, 0.7))
    np.testing.assert_allclose(found.tolist(), [1.0, 2.0, 2.0, 3.0, np.inf], rtol=0.01)
    assert [least_rows(level) for level in (0.5, 0.9, 0.95)] == [1, 9, 19]


def test_noise_of_clients_is_drawn_to_the_common_one(tmp_path: Path) -> None:
    noise = client_noise(torch.tensor([4.0, 1.0]).double(), torch.tensor([10.0, 0.0]).double(), 2.0)
    assert noise.tolist() == [3.0, 2.0]  # 10 rows of one's own beside 10 of all
    made = Intervals(np.array(["a", "b"]), noise, 5.0)
    z = normal_quantile(0.95)
    assert z == pytest.approx(1.959964, abs=1e-6)
    widths = made.widths(np.array(["b", "zz", "a"]), 0.95, "model")
    assert widths.tolist() == pytest.approx([z * 2**0.5, z * 5**0.5, z * 3**0.5])
    (tmp_path / "models").mkdir()
    made.save(tmp_path)
    again = Intervals.load(tmp_path)
    assert again is not None
    assert again.widths(np.array(["b", "zz", "a"]), 0.95, "model").tolist() == widths.tolist()


# -- scores of new clients --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["local", "shrunk", "ifca", "fedrep"])
def test_scores_of_new_clients_do_not_fit_on_the_rows_they_score(method: str) -> None:
    """Targets are noise: a model that had seen them would do better than nothing, and one that has not cannot."""
    rng = np.random.default_rng(0)
    x, y, group = rng.normal(size=(600, 12)), rng.normal(size=600), np.repeat(np.arange(20), 30)
    chosen = METHODS[method] | ({"prior": {"penalty": 1e-3}} if method == "local" else {})
    made = estimator(fit(from_arrays(x, y, group.astype(str), test_size=0.0), options({"method": method, **chosen})))
    x, y, new = rng.normal(size=(600, 12)), rng.normal(size=600), np.char.add("new", group.astype(str))
    assert made.score(x, y, new) < 0.02
    predicted = made.predict(from_arrays(x, y, new, test_size=0.0))
    y_sorted = y[np.argsort(new, kind="stable")]
    assert np.corrcoef(predicted, y_sorted)[0, 1] < 0.15
    mean = 1 - ((y_sorted - predicted) ** 2).mean() / y.var()
    assert made.score(x, y, new) == pytest.approx(mean, abs=1e-5)  # they are the same predictions


# -- real data --------------------------------------------------------------------------------------------------------
def test_probabilities_of_landmines_are_those_of_scikit_learn(shared_data: Path) -> None:
    path = shared_data / "landmine_29fields.csv.gz"
    clients = coterie.read(path, client="field", target="mine", test_size=0.3, new_clients=0.2)
    found = fit(clients, options({"method": "fedavg", "training": {"rounds": 50}}))
    p, (y, _) = estimator(found).predict_proba(clients)[:, 1], in_order(clients.test)
    said = found.extra["probabilities"]["test"]
    assert said["auroc"]["value"] == pytest.approx(roc_auc_score(y, p), abs=1e-3)
    assert said["average_precision"]["value"] == pytest.approx(average_precision_score(y, p), abs=1e-3)
    assert said["log_loss"]["value"] == pytest.approx(log_loss(y, p), rel=1e-9)
    assert said["brier"]["value"] == pytest.approx(brier_score_loss(y, p), rel=1e-9)
    assert said["base_rate"]["value"] > 0.92  # accuracy alone would say that all is well


def test_intervals_of_exam_scores_cover_what_they_say(shared_data: Path) -> None:
    """2,400 held-out rows of 111 schools, and 1,600 rows of 28 schools that were not there."""
    path = shared_data / "school_exam_139schools.csv.gz"
    clients = coterie.read(path, client="school", target="score", new_clients=0.2)
    chosen = {"method": "shrunk", "prior": {"spread": "intercept"}, "predictions": {"coverage": 0.9}}
    said = fit(clients, options(chosen)).extra["coverage"]
    for side in ("test", "new", "unlabelled"):
        assert 0.86 < said["conformal"][side]["value"] < 0.95, side
        assert 0.84 < said["model"][side]["value"] < 0.95, side
