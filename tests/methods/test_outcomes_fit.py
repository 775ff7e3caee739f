# SPDX-License-Identifier: Apache-2.0
"""Linear models of counts, skewed numbers and ordered classes: against statsmodels, and against quadrature."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import coterie
from coterie.config import options
from coterie.data.arrays import from_arrays
from coterie.errors import ConfigError, DataError
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.models.outcomes import OUTCOMES
from outcomes import ALL, NUMBERS, clients, drawn, rows

SAME = 1e-6  # what statsmodels converges to


def fitted(outcome: str, method: str = "fedavg", **more: Any) -> Fitted:
    chosen = options({"method": method, "baselines": False, "data": {"standardise": False}, **more})
    return fit(clients(outcome), chosen)


def parameters(found: Fitted, k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Intercept and weights; extra parameters."""
    weight, bias = found.models.model.unpack(found.models.theta[k])[0]
    assert not bool(weight[1:].any())  # no feature changes the extra outputs
    return np.concatenate([bias[:1].numpy(), weight[0].numpy()]), bias[1:].numpy()


def log_likelihood(found: Fitted, outcome: str) -> float:
    made = clients(outcome)
    loss = found.per_client["train_loss"] * found.per_client["rows_train"]
    assert int(found.per_client["rows_train"].sum()) == int(made.train.counts.sum())
    return -float(loss.sum())


# -- one model for all ------------------------------------------------------------------------------------------------
def test_counts_have_the_coefficients_and_the_likelihood_of_statsmodels() -> None:
    api = pytest.importorskip("statsmodels.api")
    x, y, _ = rows("poisson")
    theirs = api.Poisson(y, api.add_constant(x)).fit(disp=0, tol=1e-12)
    found = fitted("poisson")
    np.testing.assert_allclose(parameters(found)[0], theirs.params, atol=SAME)
    assert log_likelihood(found, "poisson") == pytest.approx(theirs.llf, abs=1e-6)


def test_overdispersed_counts_have_the_dispersion_of_statsmodels() -> None:
    api = pytest.importorskip("statsmodels.api")
    x, y, _ = rows("negative-binomial")
    theirs = api.NegativeBinomial(y, api.add_constant(x)).fit(disp=0, method="bfgs", maxiter=500, gtol=1e-8)
    found = fitted("negative-binomial")
    own, extra = parameters(found)
    np.testing.assert_allclose(own, theirs.params[:-1], atol=SAME)
    assert float(np.exp(extra[0])) == pytest.approx(theirs.params[-1], abs=SAME)
    assert log_likelihood(found, "negative-binomial") == pytest.approx(theirs.llf, abs=1e-6)


def test_gamma_models_have_the_coefficients_of_statsmodels_and_the_best_shape() -> None:
    api = pytest.importorskip("statsmodels.api")
    from scipy import stats

    x, y, _ = rows("gamma")
    family = api.families.Gamma(api.families.links.Log())
    theirs = api.GLM(y, api.add_constant(x), family=family).fit(tol=1e-12)
    found = fitted("gamma")
    own, extra = parameters(found)
    np.testing.assert_allclose(own, theirs.params, atol=SAME)

    def worse(log_shape: np.ndarray) -> float:
        shape = float(np.exp(log_shape[0]))
        return -float(stats.gamma.logpdf(y, shape, scale=theirs.fittedvalues / shape).sum())

    best = minimize(worse, [0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-9})
    assert float(extra[0]) == pytest.approx(float(best.x[0]), abs=1e-5)
    assert log_likelihood(found, "gamma") == pytest.approx(-best.fun, abs=1e-6)


def test_log_normal_models_are_regressions_of_the_logarithm() -> None:
    api = pytest.importorskip("statsmodels.api")
    x, y, _ = rows("log-normal")
    theirs = api.OLS(np.log(y), api.add_constant(x)).fit()
    found = fitted("log-normal")
    own, extra = parameters(found)
    np.testing.assert_allclose(own, theirs.params, atol=SAME)
    assert float(np.exp(2 * extra[0])) == pytest.approx(float(np.mean(theirs.resid**2)), abs=SAME)
    jacobian = -float(np.log(y).sum())  # so that the likelihood is that of the target, not of its logarithm
    assert log_likelihood(found, "log-normal") == pytest.approx(theirs.llf + jacobian, abs=1e-6)


def test_ordered_classes_have_the_slopes_and_thresholds_of_statsmodels() -> None:
    ordered = pytest.importorskip("statsmodels.miscmodels.ordinal_model")
    x, y, _ = rows("ordinal")
    theirs = ordered.OrderedModel(y, x, distr="logit").fit(method="bfgs", disp=0, gtol=1e-8)
    found = fitted("ordinal")
    own, extra = parameters(found)  # theirs: slopes, the first threshold, logarithms of the distances of the others
    np.testing.assert_allclose(own[1:], theirs.params[:3], atol=SAME)
    np.testing.assert_allclose([-own[0], *extra], theirs.params[3:], atol=SAME)
    assert log_likelihood(found, "ordinal") == pytest.approx(theirs.llf, abs=1e-6)


def test_scaled_features_give_the_same_predictions() -> None:
    x, y, groups = rows("poisson")
    plain, scaled = (
        coterie.FedAvg(outcome="poisson", standardise=how).fit(100 * x + 7, y, groups).predict(100 * x + 7, groups)
        for how in (False, True)
    )
    np.testing.assert_allclose(plain, scaled, rtol=1e-6)


# -- models of clients' own ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("outcome", ALL)
def test_random_intercepts_are_near_the_maximum_of_the_likelihood(outcome: str) -> None:
    """By quadrature over clients' intercepts, with as good as no approximation."""
    draw = np.random.default_rng(3)
    groups, x = np.repeat(np.arange(50), 20), draw.normal(size=(1000, 2))
    y = drawn(outcome, 0.7 + x @ [0.4, -0.3] + (0.5 * draw.normal(size=50))[groups], 5)
    chosen = {"method": "shrunk", "baselines": False, "data": {"standardise": False}, "prior": {"spread": "intercept"}}
    prior = fit(from_arrays(x, y, groups, outcome=outcome, test_size=0.0), options(chosen)).models.fit.prior
    ours = np.array([*prior.mean[0, 0].tolist(), np.log(abs(float(prior.root[0, 0, 2, 2])))])

    nodes, weights = np.polynomial.hermite_e.hermegauss(25)
    target = torch.from_numpy(y).long() if outcome == "ordinal" else torch.from_numpy(y)

    def loss(at: np.ndarray) -> float:
        extra = np.tile(at[3:-1], (len(y), 1))
        each = []
        for node in nodes:
            eta = x @ at[:2] + at[2] + np.exp(at[-1]) * node
            rows_ = OUTCOMES[outcome].loss(torch.from_numpy(np.column_stack([eta, extra])), target).numpy()
            each.append(np.bincount(groups, -rows_))
        stacked = np.stack(each)
        most = stacked.max(0)
        return -float((most + np.log((weights[:, None] * np.exp(stacked - most)).sum(0) / weights.sum())).sum())

    best = minimize(loss, ours, method="BFGS", options={"gtol": 1e-3})
    assert loss(ours) - best.fun < 0.15  # of a likelihood ratio of which 1.92 would be significant
    np.testing.assert_allclose(ours[:-1], best.x[:-1], atol=0.03)
    assert np.exp(ours[-1]) == pytest.approx(np.exp(best.x[-1]), rel=0.06)


@pytest.mark.parametrize("outcome", ALL)
def test_clusters_find_the_planted_groups(outcome: str) -> None:
    draw = np.random.default_rng(0)
    groups, x = np.repeat(np.arange(20), 60), draw.normal(size=(1200, 2))
    truth = np.arange(20) % 2
    slope = np.where(truth[groups] == 0, 1.0, -1.0)
    y = drawn(outcome, 0.5 + slope * x[:, 0] * 0.8, 1)
    model = coterie.IFCA(2, outcome=outcome).fit(x, y, groups)  # type: ignore[arg-type]
    found = dict(zip(model.client_names_.tolist(), model.labels_.tolist(), strict=True))
    same = np.mean([(found[str(i)] == found["0"]) == (truth[i] == truth[0]) for i in range(20)])
    assert same >= 0.95


def test_a_local_model_is_the_penalised_fit_of_its_client() -> None:
    """By hand: Newton's method in numpy for the mode of a Poisson likelihood times a normal prior on the weights."""
    x, y, groups = rows("poisson")
    chosen = {"method": "local", "baselines": False, "data": {"standardise": False}, "prior": {"penalty": 2.0}}
    made = from_arrays(x, y, groups, outcome="poisson", test_size=0.0)
    found = fit(made, options(chosen)).models
    common = float(found.fit.prior.mean[0, 0, -1])
    for name in ("0", "7"):
        mine = groups == int(name)
        z, target = np.column_stack([x[mine], np.ones(mine.sum())]), y[mine]
        ridge, centre, theta = np.diag([2.0, 2.0, 2.0, 0.01]), np.array([0, 0, 0, common]), np.array([0, 0, 0, common])
        for _ in range(50):
            mean = np.exp(z @ theta)
            slope = z.T @ (mean - target) + ridge @ (theta - centre)
            theta = theta - np.linalg.solve(z.T @ (z * mean[:, None]) + ridge, slope)
        own = found.own[found.names.tolist().index(name)].numpy()
        np.testing.assert_allclose(own, theta, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "ifca", "local", "shrunk", "representation"])
@pytest.mark.parametrize("outcome", ["negative-binomial", "ordinal"])
def test_every_method_measures_beside_baselines(outcome: str, method: str) -> None:
    made = clients(outcome, test_size=0.3, new_clients=0.2)
    found = fit(made, options({"method": method, "data": {"outcome": outcome}}))
    assert found.metric == ("accuracy" if outcome == "ordinal" else "rmse")
    assert all(np.isfinite([score.train, score.test]).all() for score in found.scores)
    assert len(found.scores) == (2 if method in ("fedavg", "local") else 3)


def test_a_fit_that_is_continued_is_the_same(tmp_path: Path) -> None:
    for method in ("fedavg", "ifca"):
        chosen = options({"method": method})
        (tmp_path / method).mkdir()
        first = fit(clients("poisson"), chosen, folder=tmp_path / method)
        again = fit(clients("poisson"), chosen, folder=tmp_path / method)  # from the last checkpoint
        assert torch.equal(first.models.theta, again.models.theta)
        assert first.scores == again.scores


# -- predictions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [coterie.FedAvg, coterie.IFCA, coterie.Local, coterie.RandomEffects, coterie.LowRank])
def test_estimators_predict_in_the_targets_units(kind: Any) -> None:
    for outcome in NUMBERS:
        x, y, groups = rows(outcome)
        model = kind(outcome=outcome).fit(x, y, groups)
        made = model.predict(x, groups)
        assert made.shape == y.shape
        assert np.all(made > 0)
        assert abs(made.mean() / y.mean() - 1) < 0.1
        assert 0 < model.score(x, y, groups) < 1  # share of the deviance


def test_the_explained_deviance_is_that_of_statsmodels() -> None:
    api = pytest.importorskip("statsmodels.api")
    x, y, groups = rows("poisson")
    theirs = api.GLM(y, api.add_constant(x), family=api.families.Poisson()).fit(tol=1e-12)
    ours = coterie.FedAvg(outcome="poisson").fit(x, y, groups).score(x, y, groups)
    assert ours == pytest.approx(1 - theirs.deviance / theirs.null_deviance, abs=1e-8)


@pytest.mark.parametrize("outcome", ALL)
def test_measures_tell_the_likelihood_and_the_metric(outcome: str) -> None:
    x, y, groups = rows(outcome)
    model = coterie.FedAvg(outcome=outcome, standardise=False).fit(x, y, groups)  # type: ignore[arg-type]
    found = model.measures(x, y, groups)
    assert found["log_likelihood"] * len(y) == pytest.approx(log_likelihood(fitted(outcome), outcome), rel=1e-9)
    if outcome == "ordinal":
        assert found["accuracy"] == model.score(x, y, groups)
    else:
        assert found["rmse"] == pytest.approx(np.sqrt(np.mean((model.predict(x, groups) - y) ** 2)), rel=1e-9)
        assert found["deviance_explained"] == model.score(x, y, groups)


def test_the_ranked_probability_score_is_that_of_a_loop() -> None:
    x, y, groups = rows("ordinal")
    model = coterie.FedAvg(outcome="ordinal", standardise=False).fit(x, y, groups)
    weight, bias = model.model_.unpack(model.theta_[0])[0]
    eta = x @ weight[0].numpy() + float(bias[0])
    places = np.concatenate([[0.0], np.exp(bias[1:].numpy()).cumsum()])
    total = 0.0
    for mine, true in zip(eta, y, strict=True):
        for k, place in enumerate(places):
            total += (1 / (1 + np.exp(mine - place)) - (true <= k)) ** 2
    assert model.measures(x, y, groups)["ranked_probability_score"] == pytest.approx(total / len(y), rel=1e-9)


def test_ordered_classes_are_predicted_by_name() -> None:
    x, y, groups = rows("ordinal")
    model = coterie.RandomEffects(outcome="ordinal").fit(x, y.astype(int) + 3, groups)
    assert set(model.predict(x, groups)) <= {3, 4, 5, 6}
    assert model.score(x, y.astype(int) + 3, groups) > 0.3


# -- what is refused --------------------------------------------------------------------------------------------------
def test_targets_that_an_outcome_cannot_have_are_refused_with_the_client() -> None:
    x, y, groups = rows("poisson")
    for outcome, wrong in (("poisson", 1.5), ("negative-binomial", -1.0), ("gamma", 0.0), ("log-normal", -2.0)):
        bad = np.where(y > 0, y, 1.0)
        bad[65] = wrong
        with pytest.raises(DataError, match=f"is {wrong:g} in a row of client '1', and outcome {outcome} needs"):
            from_arrays(x, bad, groups, outcome=outcome)  # type: ignore[arg-type]


def test_methods_and_options_of_other_targets_are_refused() -> None:
    made = clients("poisson")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": "fedrep"}, "fedrep is not for counts"),
        ({"method": "moment-descent"}, "moment-descent is not for counts"),
        ({"method": "fedavg", "model": {"hidden": [8]}}, "is for linear models"),
        ({"method": "fedavg", "training": {"proximal": 0.1}}, "training.proximal is set"),
        ({"method": "ifca", "clusters": {"soft": True}}, "clusters.soft is set"),
    ]
    for tree, said in cases:
        with pytest.raises(ConfigError, match=said):
            fit(made, options(tree))
    x, y, groups = rows("gamma")
    with pytest.raises(ConfigError, match="measures are told of outcomes"):
        coterie.FedAvg().fit(x, y, groups).measures(x, y, groups)
    with pytest.raises(ConfigError, match="outcome is 'posson'"):
        from_arrays(*rows("poisson"), outcome="posson")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="task is classification, and outcome poisson is regression"):
        from_arrays(*rows("poisson"), outcome="poisson", task="classification")
