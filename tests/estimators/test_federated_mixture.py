# SPDX-License-Identifier: Apache-2.0
"""`FederatedMixture`: scikit-learn's manners, results in the columns' own units, and rows in the order given."""

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import adjusted_rand_score, r2_score
from sklearn.mixture import GaussianMixture
from sklearn.utils.validation import check_is_fitted

from coterie import FederatedMixture
from coterie.algorithms.fedgrem import fedgrem
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.config import options
from coterie.data.readers import from_arrays
from coterie.errors import ConfigError, DataError
from coterie.estimators.base import options_of
from coterie.methods.mixture.fit import fit_mixture
from planted import planted
from planted_mixtures import clusters, lines

ROWS, LINES = clusters(outlier=True), lines()


def mixture(n_components: int | None = 3, **parameters: Any) -> FederatedMixture:
    quick = {"c_lambda": 2.0, "restarts": 5, "iterations": 15, "rounds": 60, "tol": 1e-4}
    return FederatedMixture(n_components, **{**quick, **parameters})


@pytest.fixture(scope="module")
def model() -> FederatedMixture:
    return mixture().fit(ROWS.x, groups=ROWS.groups)


@pytest.fixture(scope="module")
def regression() -> FederatedMixture:
    return mixture(2).fit(LINES.x, LINES.y, groups=LINES.groups)


def place(model: FederatedMixture, groups: np.ndarray) -> np.ndarray:
    """[N] where each row's client stands in the results."""
    return np.searchsorted(model.client_names_, groups)


def joint(
    model: FederatedMixture, x: np.ndarray, means: np.ndarray, weights: np.ndarray, covariance: np.ndarray | None = None
) -> np.ndarray:
    """[N, R] log of weight times density, by scipy, row after row.  means [N, R, D], weights [N, R]"""
    covariance = model.covariance_ if covariance is None else covariance
    density = [
        [multivariate_normal(mean, covariance).logpdf(row) for mean in own] for row, own in zip(x, means, strict=True)
    ]
    return np.array(density) + np.log(np.maximum(weights, 1e-12))


# -- scikit-learn's manners -------------------------------------------------------------------------------------------
def test_constructor_stores_every_parameter_as_it_is_and_nothing_else() -> None:
    names = [name for name in inspect.signature(FederatedMixture.__init__).parameters if name != "self"]
    markers = {name: object() for name in names}
    made = FederatedMixture(**markers)  # type: ignore[arg-type]
    assert vars(made) == markers
    assert made.get_params(deep=False) == markers


def test_defaults_are_those_of_the_options() -> None:
    assert options_of(FederatedMixture()) == options({"method": "mixture", "baselines": False})


def test_defaults_are_those_of_the_algorithm() -> None:
    chosen, (fitted, algorithm) = options().mixture, map(inspect.signature, (fit_mixture, fedgrem))
    names = {name for name in type(chosen).model_fields if name in algorithm.parameters}
    further = {"c_eta", "kappa", "together", "robust", "share_weights", "batch_size", "penalty", "sparse", "neighbours"}
    assert further <= names
    for name in names - set(fitted.parameters):
        assert algorithm.parameters[name].default == getattr(chosen, name), name
    for name in ("rounds", "tol", "reject"):
        assert fitted.parameters[name].default == getattr(chosen, name), name
    start = MixtureStart(chosen.restarts, chosen.iterations)
    assert start == fitted.parameters["start"].default == algorithm.parameters["start"].default


def test_every_option_of_a_mixture_is_a_parameter() -> None:
    names = set(inspect.signature(FederatedMixture.__init__).parameters)
    assert set(type(options().mixture).model_fields) <= names


def test_clone_repr_and_set_params(model: FederatedMixture) -> None:
    check_is_fitted(model)
    twin = clone(model)
    assert twin.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        check_is_fitted(twin)
    assert twin.set_params(n_components=4).n_components == 4
    assert repr(FederatedMixture(3, c_lambda=0.5)) == "FederatedMixture(c_lambda=0.5, n_components=3)"


@pytest.mark.parametrize("call", ["predict", "predict_proba", "score", "bic", "assign"])
def test_an_unfitted_model_says_so(call: str) -> None:
    with pytest.raises(NotFittedError, match="this FederatedMixture is not fitted: call fit first"):
        getattr(FederatedMixture(), call)(ROWS.x)


def test_bad_parameters_are_told_when_fitting() -> None:
    with pytest.raises(ConfigError, match=r"mixture\.n_components is 0"):
        FederatedMixture(0).fit(ROWS.x, groups=ROWS.groups)
    with pytest.raises(ConfigError, match=r"mixture\.c_lambda is 'much': give a number"):
        FederatedMixture(3, c_lambda="much").fit(ROWS.x, groups=ROWS.groups)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="fit needs to know the client of each row"):
        FederatedMixture(3).fit(ROWS.x)


def test_estimates_that_still_move_are_a_convergence_warning() -> None:
    with pytest.warns(ConvergenceWarning, match="not converged after 1 rounds") as told:
        mixture(rounds=1, tol=1e-14).fit(ROWS.x, groups=ROWS.groups)
    assert told[0].filename == __file__  # points at the call of fit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixture().fit(ROWS.x, groups=ROWS.groups)


def test_random_state_decides_everything() -> None:
    def means(seed: int) -> np.ndarray:
        return mixture(batch_size=8, rounds=3, random_state=seed).fit(ROWS.x, groups=ROWS.groups).means_

    assert np.array_equal(means(3), means(3))
    assert not np.array_equal(means(3), means(4))


# -- results ----------------------------------------------------------------------------------------------------------
def test_results_have_the_documented_shapes(model: FederatedMixture, regression: FederatedMixture) -> None:
    assert model.client_names_.tolist() == ROWS.names
    assert (model.weights_.shape, model.means_.shape, model.centre_.shape) == ((8, 3), (8, 3, 2), (3, 2))
    assert (model.covariance_.shape, model.outlier_score_.shape) == ((2, 2), (8,))
    assert (regression.means_.shape, regression.centre_.shape) == ((8, 2, 3), (2, 3))  # the intercept is last
    assert regression.covariance_.shape == (1, 1)
    assert (model.n_components_, model.c_lambda_, model.choice_) == (3, 2.0, None)
    assert model.components_choice_ is None
    assert model.scores_.keys() == {"mixture"}
    assert [r.round for r in model.history_] == list(range(len(model.history_)))


def test_the_outlier_is_found(model: FederatedMixture) -> None:
    assert model.outliers_ == ["s07"]
    assert int(model.outlier_score_.argmax()) == 7
    assert model.outlier_score_[:7].max() < 3.5


def test_infinity_is_the_word_common() -> None:
    models = [
        mixture(c_lambda=value, rounds=5, tol=0).fit(ROWS.x, groups=ROWS.groups) for value in (math.inf, "common")
    ]
    assert np.array_equal(models[0].means_, models[1].means_)
    assert models[0].c_lambda_ == math.inf


def test_components_and_penalty_are_chosen_when_they_are_not_given() -> None:
    made = clusters(6)
    found = mixture(None, c_lambda=None, max_components=4).fit(made.x, groups=made.groups)
    assert found.n_components_ == 3
    assert found.components_choice_.value == 3.0
    assert found.c_lambda_ == found.choice_.value


def test_one_client_is_an_ordinary_mixture() -> None:
    made = clusters(1, 200)
    found = mixture(rounds=500, tol=1e-7).fit(made.x, groups=made.groups)
    there = GaussianMixture(3, covariance_type="tied", random_state=0, tol=1e-8, max_iter=500).fit(made.x)
    assert found.score(made.x, groups=made.groups) == pytest.approx(there.score(made.x), abs=1e-3)
    assert adjusted_rand_score(found.predict(made.x, groups=made.groups), there.predict(made.x)) > 0.99


# -- rows -------------------------------------------------------------------------------------------------------------
def test_predictions_stand_in_the_order_of_the_rows(model: FederatedMixture) -> None:
    good = ROWS.groups != "s07"
    component = model.predict(ROWS.x, groups=ROWS.groups)
    assert component.shape == (240,)
    assert adjusted_rand_score(component[good], ROWS.component[good]) > 0.99  # eight deviations apart
    probability = model.predict_proba(ROWS.x, groups=ROWS.groups)
    assert np.array_equal(probability.argmax(1), component)
    at = place(model, ROWS.groups)
    log = joint(model, ROWS.x, model.means_[at], model.weights_[at])
    expected = np.exp(log - np.logaddexp.reduce(log, axis=1, keepdims=True))
    np.testing.assert_allclose(probability, expected, atol=1e-9)
    assert model.score(ROWS.x, groups=ROWS.groups) == pytest.approx(np.logaddexp.reduce(log, axis=1).mean())


def test_bic_counts_what_is_free(model: FederatedMixture) -> None:
    good = ROWS.groups != "s07"
    at = place(model, ROWS.groups[good])
    log = joint(model, ROWS.x[good], model.means_[at], model.weights_[at])
    likelihood = np.logaddexp.reduce(log, axis=1).sum()
    free = 3 * 2 + float(model.mixtures_.fit.freedom[:7].sum()) * 2 + 7 * 2 + 3  # centres, own, proportions, covariance
    expected = -2 * likelihood + free * math.log(good.sum())
    assert model.bic(ROWS.x, groups=ROWS.groups) == pytest.approx(expected)


def test_a_stranger_is_served_by_the_centre_with_mean_proportions_and_wider_scatter() -> None:
    shift = {name: 3 * i for i, name in enumerate(ROWS.names)}  # clients differ
    x = ROWS.x + np.array([[shift[name], 0.0] for name in ROWS.groups])
    model = mixture(c_lambda=0).fit(x, groups=ROWS.groups)
    good = ~np.isin(model.client_names_, model.outliers_)
    mine = np.isin(ROWS.groups, model.client_names_[good])
    gamma, away = model.predict_proba(x[mine], groups=ROWS.groups[mine]), x[mine, None] - model.centre_  # [N, R, D]
    covariance = np.einsum("nr,nrd,nre->de", gamma, away, away) / mine.sum()
    made = clusters(1, 20, seed=3, prefix="new")
    weights = np.tile(model.weights_[good].mean(0), (20, 1))
    log = joint(model, made.x, np.tile(model.centre_, (20, 1, 1)), weights, covariance)
    assert np.array_equal(model.predict(made.x, groups=made.groups), log.argmax(1))
    # variances are kept away from zero by a millionth of their mean
    assert model.score(made.x, groups=made.groups) == pytest.approx(np.logaddexp.reduce(log, axis=1).mean(), rel=1e-4)
    assert covariance[0, 0] > 4 * model.covariance_[0, 0]


def test_targets_are_expectations_and_components_show_in_targets(regression: FederatedMixture) -> None:
    at = place(regression, LINES.groups)
    ones = np.column_stack([LINES.x, np.ones(len(LINES.x))])
    lines_ = np.einsum("nrp,np->nr", regression.means_[at], ones)
    weights = regression.weights_[at]
    made = regression.predict(LINES.x, groups=LINES.groups)
    np.testing.assert_allclose(made, (weights * lines_).sum(1))
    assert r2_score(LINES.y, made) == pytest.approx(regression.scores_["mixture"].train_r2)
    log = np.log(weights) + norm(lines_, regression.covariance_[0, 0] ** 0.5).logpdf(LINES.y[:, None])
    probability = regression.predict_proba(LINES.x, LINES.y, groups=LINES.groups)
    np.testing.assert_allclose(probability, np.exp(log - np.logaddexp.reduce(log, axis=1, keepdims=True)), atol=1e-9)
    assert adjusted_rand_score(probability.argmax(1), LINES.component) > 0.95
    found = regression.score(LINES.x, LINES.y, groups=LINES.groups)
    assert found == pytest.approx(np.logaddexp.reduce(log, axis=1).mean())


def test_regressions_need_targets_where_components_matter(regression: FederatedMixture) -> None:
    for call in (regression.predict_proba, regression.score, regression.bic, regression.assign):
        with pytest.raises(DataError, match="there are no targets, and components are regressions of the target"):
            call(LINES.x, groups=LINES.groups)


def test_whole_numbers_are_targets_of_a_regression() -> None:
    y = LINES.component.astype(int)  # two values: any other method takes them for classes
    found = mixture(2, rounds=5, tol=0).fit(LINES.x, y, groups=LINES.groups)
    assert found.predict(LINES.x, groups=LINES.groups).dtype == np.float64


def test_clients_and_arrays_give_the_same(model: FederatedMixture) -> None:
    clients = ROWS.clients(test_size=0.0)
    other = mixture().fit(clients)
    assert np.array_equal(other.means_, model.means_)
    order = np.argsort(ROWS.groups, kind="stable")  # of a Clients, client after client
    expected = model.predict(ROWS.x, groups=ROWS.groups)[order]
    assert np.array_equal(other.predict(clients), expected)


def test_assign_estimates_the_proportions_of_new_clients(model: FederatedMixture) -> None:
    made = clusters(3, 100, outlier=True, seed=9, prefix="new")
    found = model.assign(made.x, groups=made.groups)
    assert found.names.tolist() == ["new00", "new01", "new02"]
    assert found.fits.tolist() == [True, True, False]
    share = np.bincount(made.component[made.groups == "new00"], minlength=3) / 100
    np.testing.assert_allclose(np.sort(found.weights[0]), np.sort(share), atol=0.02)


def test_missing_groups_and_other_features_are_refused(model: FederatedMixture) -> None:
    with pytest.raises(DataError, match="the client of each row is not given"):
        model.predict(ROWS.x)
    with pytest.raises(DataError, match=r"X has 3 features, but it is expecting 2 features"):
        model.predict(np.ones((2, 3)), groups=["a", "b"])
    with pytest.raises(DataError, match="other features or category levels"):
        model.predict(planted(4, 10).clients())


def test_missing_values_become_the_mean(model: FederatedMixture) -> None:
    x = ROWS.x[:5].copy()
    filled = x.copy()
    x[2, 1] = np.nan
    filled[2, 1] = float(model.mixtures_.scaling.fill[1])
    got, expected = (model.predict_proba(rows, groups=ROWS.groups[:5]) for rows in (x, filled))
    np.testing.assert_allclose(got, expected)


def test_single_precision_is_taken_as_double() -> None:
    x = ROWS.x.astype(np.float32)
    made = mixture(rounds=3, tol=0).fit(x, groups=ROWS.groups)
    assert made.mixtures_.fit.theta.dtype == torch.float64
    assert made.score(x, groups=ROWS.groups) == made.score(from_arrays(x, None, ROWS.groups, test_size=0.0))
