# SPDX-License-Identifier: Apache-2.0
"""From clients and options to mixtures: what is found, in which units, beside which baselines, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from coterie.config import FitOptions, options
from coterie.data.clients import Clients
from coterie.data.readers import from_arrays
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.methods.base import Fitted
from coterie.methods.fit import check, fit
from coterie.methods.mixture.scores import MixtureScore
from coterie.models.mixtures import Gaussian, Regression
from helpers import KilledError
from planted import planted
from planted_mixtures import CENTRES, LINES, ORIGIN, UNITS, clusters, lines

QUICK = {"n_components": 3, "c_lambda": 2.0, "restarts": 5, "iterations": 15, "rounds": 60, "tol": 1e-4}


def chosen(*words: str, **mixture: Any) -> FitOptions:
    return options({"method": "mixture", "mixture": {**QUICK, **mixture}}, sets=words)


def score(fitted: Fitted, method: str) -> MixtureScore:
    return next(s for s in fitted.scores if s.method == method)


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(clusters(outlier=True).clients(), chosen())


@pytest.fixture(scope="module")
def regression() -> Fitted:
    return fit(lines().clients(), chosen(n_components=2))


def by_rows(rows: Any) -> list[np.ndarray]:
    return [rows.client(i).x[0].numpy() for i in range(rows.n_clients)]


# -- what is found ----------------------------------------------------------------------------------------------------
def test_centres_are_found_in_the_columns_own_units(fitted: Fitted) -> None:
    centre = fitted.models.raw(fitted.models.fit.centre).numpy()
    order = np.argsort(((centre - ORIGIN) / UNITS) @ [1.0, 2.0])  # 0, 8, 16
    # 7 good clients with 24 rows: a centre has about 34 rows at least, so errors of 0.2 are one standard error
    assert np.abs((centre[order] - ORIGIN) / UNITS - CENTRES).max() < 0.6
    deviation = np.sqrt(np.diag(fitted.models.covariance.numpy())) / UNITS
    assert np.abs(deviation - 1).max() < 0.15


def test_the_outlier_is_named_and_has_no_part_in_mean_weights(fitted: Fitted) -> None:
    own = fitted.models.fit
    assert fitted.models.names[own.outliers.numpy()].tolist() == ["s07"]
    assert fitted.warnings == ["1 of 8 clients is an outlier: 's07'"]
    torch.testing.assert_close(fitted.models.mean_weights, own.weights[:7].mean(0))


def test_log_likelihoods_are_those_of_the_rows_as_they_are(fitted: Fitted) -> None:
    clients, mixtures = clusters(outlier=True).clients(), fitted.models
    theta, covariance = mixtures.raw(mixtures.fit.theta).numpy(), mixtures.covariance.numpy()
    # no proportion counts as less than 1e-12
    for rows, name in ((clients.train, "train_log_likelihood"), (clients.test, "metric")):
        by_hand = []
        for k, x in enumerate(by_rows(rows)):
            parts = [
                multivariate_normal(theta[k, r], covariance).logpdf(x)
                + math.log(max(float(mixtures.fit.weights[k, r]), 1e-12))
                for r in range(3)
            ]
            by_hand.append(np.logaddexp.reduce(parts).mean())
        np.testing.assert_allclose(fitted.per_client[name], by_hand, rtol=1e-9)
    assert score(fitted, "mixture").test == pytest.approx(np.mean(by_hand))  # clients have as many rows each


def test_standardising_changes_starts_but_not_what_is_measured() -> None:
    made = clusters()
    first, other = (fit(made.clients(), chosen(f"data.standardise={word}")) for word in ("true", "false"))
    assert score(first, "mixture").test == pytest.approx(score(other, "mixture").test, abs=1e-2)


def test_unit_covariance_is_meant_in_the_columns_own_units() -> None:
    made = clusters()
    plain = from_arrays((made.x - ORIGIN) / UNITS, None, made.groups)
    fitted = fit(plain, chosen(covariance="unit"))
    assert fitted.models.fit.family == Gaussian(2, "unit")
    assert torch.equal(fitted.models.covariance, torch.eye(2, dtype=torch.float64))
    assert fitted.models.shift == 0.0
    free = fit(plain, chosen())
    assert score(fitted, "mixture").test == pytest.approx(score(free, "mixture").test, abs=0.05)


def test_regressions_are_found_in_the_columns_own_units(regression: Fitted) -> None:
    centre = regression.models.raw(regression.models.fit.centre).numpy()
    truth = np.column_stack([LINES[:, :2] / UNITS, LINES[:, 2] - (LINES[:, :2] / UNITS) @ ORIGIN])
    order = np.argsort(-centre[:, 0])
    np.testing.assert_allclose(centre[order, :2] * UNITS, LINES[:, :2], atol=0.2)  # noise 0.5, 64 rows at least
    np.testing.assert_allclose(centre[order] @ [5.0, -300.0, 1.0], LINES[:, 2], atol=0.25)
    np.testing.assert_allclose(centre[order, 2], truth[:, 2], atol=1.0)
    assert float(regression.models.covariance) ** 0.5 == pytest.approx(0.5, abs=0.05)
    assert regression.models.mean_weights[order].tolist() == pytest.approx([0.75, 0.25], abs=0.05)


def test_targets_are_predicted_by_a_clients_own_proportions(regression: Fitted) -> None:
    clients, mixtures = lines().clients(), regression.models
    theta, errors, spread = mixtures.raw(mixtures.fit.theta).numpy(), [], []
    for k, x in enumerate(by_rows(clients.test)):
        line = mixtures.fit.weights[k].numpy() @ theta[k]
        y = clients.test.client(k).target[0].numpy()
        errors.append((y - x @ line[:2] - line[2]) ** 2)
        spread.append(y)
    np.testing.assert_allclose(regression.per_client["rmse"], [e.mean() ** 0.5 for e in errors], rtol=1e-9)
    found = score(regression, "mixture")
    assert found.test_rmse == pytest.approx(np.mean(errors) ** 0.5)
    assert found.test_r2 == pytest.approx(1 - np.mean(errors) / np.var(spread))


def test_a_unit_variance_is_that_of_the_target_itself() -> None:
    made = lines(rows=100)
    twice = fit(replace(made, y=2 * made.y).clients(), chosen(n_components=2, variance="unit"))  # noise is 1 now
    assert twice.models.fit.family == Regression(2, True, "unit")
    assert float(twice.models.covariance) == 1.0
    assert float(twice.models.scaling.y_scale) == 1.0
    free = fit(replace(made, y=2 * made.y).clients(), chosen(n_components=2))
    assert score(twice, "mixture").test == pytest.approx(score(free, "mixture").test, abs=0.1)


def test_without_an_intercept_lines_go_through_the_origin() -> None:
    made = lines()
    x = (made.x - ORIGIN) / UNITS
    clients = from_arrays(x * UNITS, (x * LINES[made.component, :2]).sum(1), made.groups, task="regression")
    fitted = fit(clients, chosen("model.intercept=false", n_components=2))
    centre = fitted.models.raw(fitted.models.fit.centre).numpy()
    assert centre.shape == (2, 2)
    np.testing.assert_allclose(centre[np.argsort(-centre[:, 0])] * UNITS, LINES[:, :2], atol=1e-3)  # there is no noise
    assert fitted.models.scaling.mean.tolist() == [0.0, 0.0]


# -- choices ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("by", ["held-out", "bic"])
def test_the_number_of_components_and_the_penalty_are_chosen(by: str) -> None:
    fitted = fit(clusters().clients(), chosen(n_components=None, max_components=4, c_lambda=None, choose_by=by))
    own = fitted.models.fit
    assert fitted.extra["counted"] is not None
    assert own.choice is not None
    assert fitted.extra["counted"].values == (1.0, 2.0, 3.0, 4.0)
    assert len(own.centre) == fitted.extra["counted"].value == 3
    assert own.c_lambda == own.choice.value
    assert own.choice.value >= 1.0  # clients are alike
    if by == "held-out":  # on the scale of the table: a few rows less to learn from
        assert fitted.extra["counted"].scores[2] == pytest.approx(score(fitted, "mixture").test, abs=0.5)
    assert own.choice.scores[own.choice.best] == pytest.approx(score(fitted, "mixture").test, abs=0.5)


def test_words_stand_for_what_has_no_end() -> None:
    fitted = fit(clusters(4).clients(), chosen(c_lambda="common", reject="nobody", rounds=20))
    assert fitted.models.fit.c_lambda == math.inf
    assert (fitted.models.fit.theta == fitted.models.fit.centre).all()
    assert (fitted.models.fit.freedom == 0).all()


def test_all_options_reach_the_algorithm() -> None:
    words = ("mixture.share_weights=3.0", "mixture.batch_size=8", "mixture.penalty=norm", "mixture.c_eta=0.5",
             "mixture.robust=0.1", "mixture.neighbours=1", "mixture.together=0",
             "mixture.iterations=3", "training.participation=0.6")  # fmt: skip
    clients = clusters(outlier=True).clients()

    def found(*some: str) -> Tensor:
        return fit(clients, chosen("baselines=false", *some, rounds=4, tol=0)).models.fit.theta

    pairs = [((word,), ()) for word in words]
    pairs += [(("mixture.penalty=norm", "mixture.kappa=0.6"), ("mixture.penalty=norm",))]  # the norm's schedule has it
    base = {without: found(*without) for _, without in pairs}
    for given, without in pairs:
        other = found(*given)
        assert other.isfinite().all()
        assert not torch.equal(other, base[without]), given
    assert found().equal(base[()])


def test_a_sparse_centre_needs_columns_that_are_not_mixed() -> None:
    clients = clusters().clients()
    for kind in ("diagonal", "unit"):
        found = fit(clients, chosen("baselines=false", rounds=4, c_lambda=2.0, sparse=1e6, covariance=kind))
        assert (found.models.fit.centre == 0).all()
    with pytest.raises(ConfigError, match=r"mixture\.sparse") as raised:
        fit(clients, chosen("baselines=false", sparse=1.0))
    assert "diagonal" in raised.value.hint


# -- baselines and new clients ----------------------------------------------------------------------------------------
def test_baselines_are_one_mixture_for_all_and_one_each(fitted: Fitted) -> None:
    assert [(s.method, s.label) for s in fitted.scores] == [
        ("mixture", "FedGrEM, 3 components"), ("global", "one mixture for all"), ("local", "one mixture each"),
    ]  # fmt: skip
    assert {"metric", "metric_global", "metric_local"} <= fitted.per_client.keys()
    mean = float((fitted.per_client["metric_local"] * fitted.per_client["rows_test"]).sum() / (8 * 6))
    assert score(fitted, "local").test == pytest.approx(mean)
    assert [s.method for s in fit(clusters(4).clients(), chosen("baselines=false")).scores] == ["mixture"]


def test_more_of_its_own_makes_training_rows_likelier() -> None:
    # Without an outlier, which would widen the units in which a local covariance has one further row of variance one.
    made = fit(clusters().clients(), chosen(c_lambda=0.0))
    common = fit(clusters().clients(), chosen(c_lambda="common"))
    assert score(made, "mixture").train > score(common, "mixture").train > score(common, "global").train


def test_new_clients_find_their_proportions_by_half_of_their_rows() -> None:
    clients = clusters(10, 120).clients(new_clients=0.3)
    fitted = fit(clients, chosen())
    found = score(fitted, "mixture")
    assert clients.newcomers.n_clients == 3
    assert found.new_clients == pytest.approx(
        found.test, abs=0.3
    )  # drawn alike; a row's deviation is 1.3, and there are 180 rows
    assert score(fitted, "global").new_clients is not None
    assert score(fitted, "local").new_clients is None


def test_without_held_out_rows_there_are_no_held_out_scores() -> None:
    fitted = fit(clusters(4).clients(test_size=0.0), chosen())
    assert all(s.test is None for s in fitted.scores)
    assert not {"metric", "metric_local", "rows_test"} & fitted.per_client.keys()


# -- proportions of clients, old or new -------------------------------------------------------------------------------
def test_adopted_proportions_are_the_likeliest(fitted: Fitted) -> None:
    made = clusters(3, 60, seed=5, prefix="new")
    mixtures = fitted.models
    rows = mixtures.prepared(made.clients(test_size=0.0).train)
    found = mixtures.adopt(rows)
    assert found.fits.all()
    assert found.rows.tolist() == [60, 60, 60]
    np.testing.assert_allclose(found.weights.sum(1), 1.0)
    best = replace(mixtures, fit=replace(mixtures.of(rows.names), weights=found.weights), names=rows.names)
    np.testing.assert_allclose(best.log_likelihood(rows), found.log_likelihood)
    for r in range(3):  # moving a hundredth elsewhere is no better
        moved = 0.99 * found.weights + 0.01 * torch.eye(3, dtype=torch.float64)[r]
        other = replace(best, fit=replace(best.fit, weights=moved))
        assert (other.log_likelihood(rows) <= found.log_likelihood + 1e-9).all()


def test_strangers_do_not_fit(fitted: Fitted) -> None:
    far = clusters(3, 20, outlier=True, seed=6, prefix="new").clients(test_size=0.0)
    found = fitted.models.adopt(fitted.models.prepared(far.train))
    assert found.fits.tolist() == [True, True, False]
    assert found.misfit[2] > 100


# -- rounds, seeds, resuming ------------------------------------------------------------------------------------------
def test_rounds_are_those_of_the_fit_and_unsettled_estimates_are_told() -> None:
    fitted = fit(clusters(4).clients(), chosen(rounds=2, tol=1e-12))
    assert [r.round for r in fitted.rounds] == [0, 1, 2]  # the start comes first
    assert not fitted.extra["settled"]
    assert fitted.warnings == ["not converged after 2 rounds: raise mixture.rounds or mixture.tol"]


def test_the_seed_decides_everything() -> None:
    clients = clusters(4).clients()
    asked = [chosen(f"seed={seed}", "mixture.batch_size=5", rounds=5) for seed in (3, 3, 4)]
    first, again, other = (fit(clients, one).models.fit.theta for one in asked)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_fit_that_is_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    clients = clusters(5, outlier=True).clients()
    asked = chosen("training.participation=0.8", n_components=None, max_components=3, c_lambda=None, rounds=12)
    whole = fit(clients, asked)
    told, calls, times = set(), 0, 0

    def killed_every_so_often(phase: str, done: Any, total: int) -> None:
        nonlocal calls
        calls += 1
        told.add(phase)
        if calls % 23 == 0:
            raise KilledError

    while True:
        try:
            again = fit(clients, asked, folder=tmp_path, every=0.0, watch=killed_every_so_often)
            break
        except KilledError:
            times += 1
    assert times >= 3
    assert told == {"prepare", "choose components", "choose C_lambda", "fit", "baselines"}
    for name in ("theta", "weights", "centre", "scale", "outlier_score"):
        assert torch.equal(getattr(again.models.fit, name), getattr(whole.models.fit, name)), name
    assert again.scores == whole.scores
    assert (again.extra["counted"], again.models.fit.choice) == (whole.extra["counted"], whole.models.fit.choice)
    assert [replace(r, seconds=0) for r in again.rounds] == [replace(r, seconds=0) for r in whole.rounds]
    assert again.traffic == whole.traffic


# -- what is refused --------------------------------------------------------------------------------------------------
def refusal(clients: Clients, asked: FitOptions) -> CoterieError:
    with pytest.raises((ConfigError, DataError)) as caught:
        check(clients, asked)
    assert caught.value.hint
    return caught.value


def test_classes_are_refused() -> None:
    error = refusal(planted(4, 10, classes=True).clients(), chosen())
    assert error.message == "a mixture needs a numeric target, and 'target' has classes"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("clusters.n_clusters=3", "did you mean mixture.n_components?"),
        ("clusters.n_init=3", "did you mean mixture.restarts?"),
        ("training.rounds=3", "did you mean mixture.rounds?"),
        ("training.batch_size=3", "did you mean mixture.batch_size?"),
        ("model.hidden=[3]", "it is for --method ifca or fedrep or lg-fedavg"),
        ("model.degree=2", "it is for --method ifca or moment-descent or fedrep"),
        ("moments.iterations=3", "did you mean mixture.iterations?"),
    ],
)
def test_options_of_other_methods_are_refused(word: str, hint: str) -> None:
    error = refusal(clusters(4).clients(), chosen(word))
    assert error.message == f"{word.partition('=')[0]} is set, and mixture has no use for it"
    assert error.hint == hint


def test_images_are_refused() -> None:
    images = from_arrays(np.zeros((8, 2, 2)), None, ["a", "b"] * 4)
    assert refusal(images, chosen()).message == "rows of shape (2, 2) are not feature vectors"


def test_too_few_rows_are_refused() -> None:
    few = clusters(2, 2).clients(test_size=0.0)
    assert refusal(few, chosen(n_components=5)).message == "5 components are more than the 4 training rows"
    error = refusal(few, chosen(n_components=1, c_lambda=None))
    assert error.message == "no client has 3 training rows, and mixture.c_lambda is chosen on held-out rows"
    assert error.hint == "give it, like --set mixture.c_lambda=1"
    check(few, chosen(n_components=1))
    check(few, chosen(n_components=None, choose_by="bic"))


def test_small_and_constant_data_give_finite_answers() -> None:
    x = np.column_stack([np.arange(7.0), np.ones(7)])  # a constant column, and clients of 1, 1 and 5 rows
    clients = from_arrays(x, None, ["a", "b", *"ccccc"])
    fitted = fit(clients, chosen(n_components=2, rounds=5))
    assert fitted.models.fit.theta.isfinite().all()
    assert all(value is None or math.isfinite(value) for s in fitted.scores for value in (s.train, s.test))
    alone = fit(from_arrays(x, None, ["a"] * 7), chosen(n_components=2, c_lambda=None, rounds=5))
    assert alone.models.fit.outlier_score.tolist() == [0.0]  # one client is a mixture like any other
