# SPDX-License-Identifier: Apache-2.0
"""The mixed model as users meet it: simulated data against statsmodels, units, predictions, intervals, refusals."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
import torch
from scipy.stats import chi2

import coterie
from command import coterie as command
from coterie import ConfigError, DataError
from coterie.config import check_options, options
from coterie.methods.fit import fit
from coterie.runs.folder import begin_run

NAMES = ("age", "dose")


def simulated(
    seed: int = 0, clients: int = 40, *, slope: float = 0.8, sd: float = 2.0, classes: bool = False
) -> dict[str, np.ndarray]:
    """Columns in units of their own; intercepts with deviation `sd`, slopes of age with deviation `slope` / 10."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(4, 25, clients)
    who = np.repeat([f"c{i:02d}" for i in range(clients)], sizes)
    age, dose = 50 + 10 * draw.normal(size=len(who)), 0.01 * draw.normal(size=len(who))
    own = np.repeat(draw.normal(size=(clients, 2)), sizes, 0) * [sd, slope]
    y = 20 + 0.3 * (age - 50) + 200 * dose + own[:, 0] + own[:, 1] * (age - 50) / 10 + 1.5 * draw.normal(size=len(who))
    target = np.where(y + draw.logistic(size=len(y)) > 20, "yes", "no") if classes else y
    return {"who": who, "age": age, "dose": dose, "y": target}


def arrays(table: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.stack([table[name] for name in NAMES], 1), table["y"], table["who"]


def written(table: dict[str, np.ndarray], path: Path) -> Path:
    pc.write_csv(pa.table(table), path)
    return path


# -- against statsmodels ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize("slopes", [(), ("age",)])
def test_statsmodels_finds_the_same(reml: bool, slopes: tuple[str, ...], tmp_path: Path) -> None:
    """Its own minimum is less exact than ours: likelihoods agree to 1e-6, estimates to 1e-3."""
    mixedlm = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    table = simulated(1)
    table["age"] = (table["age"] - 50) / 10  # statsmodels does not scale
    table["dose"] = table["dose"] * 100
    x, y, who = arrays(table)
    fixed = np.column_stack([np.ones(len(y)), x])
    random = np.column_stack([np.ones(len(y)), *(table[name] for name in slopes)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = mixedlm.MixedLM(y, fixed, who, random).fit(reml=reml, method=["lbfgs", "bfgs"], gtol=1e-9)
    clients = coterie.read(written(table, tmp_path / "t.csv"), client="who", target="y", test_size=0.0)
    ours = coterie.MixedModel(slopes=slopes, reml=reml).fit(clients)
    said = ours.summary_
    assert said["log_likelihood"] == pytest.approx(theirs.llf, rel=1e-6)
    assert said["log_likelihood"] >= theirs.llf - 1e-6
    assert [one["estimate"] for one in said["fixed"]] == pytest.approx(theirs.fe_params, rel=1e-3)
    assert [one["error"] for one in said["fixed"]] == pytest.approx(theirs.bse_fe, rel=1e-3)
    assert said["residual_sd"] ** 2 == pytest.approx(theirs.scale, rel=1e-3)
    assert list(ours.variance_.values()) == pytest.approx(np.diag(theirs.cov_re), rel=1e-3)
    own = ours.client_effects()
    for r, name in enumerate(ours.variance_):
        wanted = [theirs.random_effects[client].iloc[r] for client in own["client"]]
        np.testing.assert_allclose(own[name], wanted, atol=5e-3)


def test_heterogeneity_is_that_of_a_meta_analysis() -> None:
    """Of clients' own least squares on the column with random effects, the other coefficients as they are for all."""
    meta = pytest.importorskip("statsmodels.stats.meta_analysis")
    x, y, who = arrays(simulated(2))
    said = coterie.MixedModel().fit(x, y, who).summary_
    beta = [one["estimate"] for one in said["fixed"]]
    left = y - x @ beta[1:]
    names, n = np.unique(who, return_counts=True)
    means = [left[who == name].mean() for name in names]
    found = meta.combine_effects(np.array(means), said["residual_sd"] ** 2 / n, method_re="chi2")
    one = said["heterogeneity"][0]
    assert (one["q"], one["tau2"], one["i2"]) == pytest.approx((found.q, found.tau2, found.i2), rel=1e-8)
    assert (one["freedom"], one["clients"]) == (len(names) - 1, len(names))
    assert one["mean"] == pytest.approx(found.mean_effect_fe, rel=1e-8)
    assert one["p"] == pytest.approx(chi2.sf(found.q, len(names) - 1))


@pytest.mark.parametrize("slopes", [(), ("x0",)])
def test_heterogeneity_of_classes_is_that_of_clients_own_logistic_regressions(slopes: tuple[str, ...]) -> None:
    """Q, I2, tau2 and mean by hand from statsmodels' fits; clients that are told apart have none, and are counted."""
    api = pytest.importorskip("statsmodels.api")
    draw = np.random.default_rng(5)
    who = np.repeat(np.arange(14), 60)
    x = draw.normal(3, 2, size=(len(who), 2))
    odds = -0.5 + 0.6 * (x[:, 0] - 3) - 0.3 * (x[:, 1] - 3) + np.repeat(draw.normal(size=14), 60)
    y = (draw.random(len(who)) < 1 / (1 + np.exp(-odds))).astype(int)
    y[who == 3] = 1  # one class alone
    y[who == 8] = (x[who == 8, 0] > 3).astype(int)  # separated by a slope, but not by an intercept
    said = coterie.MixedModel(slopes=slopes).fit(x, np.array(["no", "yes"])[y], who).summary_
    beta = np.array([one["estimate"] for one in said["fixed"]])
    wide = np.column_stack([np.ones(len(who)), x])
    columns = [0, *(1 + int(name[1:]) for name in slopes)]
    own = []
    for name in (name for name in range(14) if name != 3 and not (slopes and name == 8)):
        at = who == name
        model = api.GLM(y[at], wide[at][:, columns], family=api.families.Binomial(), offset=wide[at] @ beta)
        got = model.fit(tol=1e-12, tol_criterion="params")
        own.append((got.params, np.diag(got.cov_params())))
    assert len(said["heterogeneity"]) == len(columns)
    for k, one in enumerate(said["heterogeneity"]):
        d, w = np.array([b[k] for b, _ in own]), np.array([1 / v[k] for _, v in own])
        mean = (w * d).sum() / w.sum()
        q, freedom = (w * (d - mean) ** 2).sum(), len(own) - 1
        excess = max(q - freedom, 0.0)
        tau2 = excess / (w.sum() - (w**2).sum() / w.sum())
        assert (one["q"], one["i2"], one["tau2"]) == pytest.approx((q, excess / q, tau2), rel=1e-6)
        assert one["mean"] == pytest.approx(beta[columns[k]] + mean, rel=1e-6)
        assert one["error"] == pytest.approx(w.sum() ** -0.5, rel=1e-6)
        assert (one["clients"], one["left_out"], one["freedom"]) == (len(own), 14 - len(own), freedom)
        assert one["p"] == pytest.approx(chi2.sf(q, freedom), rel=1e-6)


def test_whoever_has_no_estimate_of_its_own_is_told_of(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    who, x = np.repeat([f"c{i}" for i in range(6)], 30), draw.normal(size=180)
    y = np.where((draw.random(180) < 1 / (1 + np.exp(-x))) | (who == "c2"), "yes", "no")
    data = written({"who": who, "x": x, "y": y}, tmp_path / "t.csv")
    said = command("fit", data, "--client", "who", "--target", "y", "--method", "mixed", "--out", tmp_path / "run")
    assert said.code == 0, said.err
    assert "without estimates of their own: 1 of 6 clients" in said.out
    assert "left out" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


# -- units ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{}, {"covariance": "diagonal"}, {"random_intercept": False}])
def test_estimates_do_not_depend_on_scaling(how: dict[str, Any]) -> None:
    x, y, who = arrays(simulated(3))
    slopes = ("x0",)
    ours, raw = (coterie.MixedModel(slopes=slopes, standardise=s, **how).fit(x, y, who) for s in (True, False))
    for name in ("log_likelihood", "residual_sd", "icc", "aic"):
        assert ours.summary_[name] == pytest.approx(raw.summary_[name], rel=1e-7), name
    for name, one in raw.fixed_effects_.items():
        assert ours.fixed_effects_[name] == pytest.approx(one, rel=1e-5)
    assert list(ours.variance_.values()) == pytest.approx(list(raw.variance_.values()), rel=1e-4)
    np.testing.assert_allclose(ours.predict(x, who), raw.predict(x, who), rtol=1e-6)


def test_columns_far_from_zero_are_fitted_like_others() -> None:
    x, y, who = arrays(simulated(4))
    near = coterie.MixedModel(slopes="x0").fit(x - x.mean(0), y, who)
    far = coterie.MixedModel(slopes="x0", standardise=False).fit(x - x.mean(0) + 1e5, y + 1e5, who)
    assert far.log_likelihood_ == pytest.approx(near.log_likelihood_, rel=1e-9)
    assert far.variance_["x0"] == pytest.approx(near.variance_["x0"], rel=1e-5)
    assert far.fixed_effects_["x0"] == pytest.approx(near.fixed_effects_["x0"], rel=1e-6)


def test_other_units_change_coefficients_alone() -> None:
    x, y, who = arrays(simulated(4))
    one = coterie.MixedModel(slopes=("x0",)).fit(x, y, who)
    other = coterie.MixedModel(slopes=("x0",)).fit(x * [100.0, 1.0] + [7.0, 0.0], 3 * y, who)
    assert other.fixed_effects_["x0"]["estimate"] == pytest.approx(3 * one.fixed_effects_["x0"]["estimate"] / 100)
    assert other.variance_["x0"] == pytest.approx(9 * one.variance_["x0"] / 1e4, rel=1e-5)
    assert other.icc_ == pytest.approx(one.icc_, rel=1e-6)


# -- what follows from the estimates --------------------------------------------------------------------------------------
def test_a_random_intercept_has_the_ratios_that_belong_to_it() -> None:
    x, y, who = arrays(simulated(5, slope=0.0))
    said = coterie.MixedModel(reml=False).fit(x, y, who).summary_
    between, noise = said["random"][0]["variance"], said["residual_sd"] ** 2
    assert said["icc"] == pytest.approx(between / (between + noise))
    w = np.column_stack([x, np.ones(len(y))])
    left = y - w @ np.linalg.lstsq(w, y, rcond=None)[0]
    plain = -len(y) / 2 * (np.log(2 * np.pi * (left @ left) / len(y)) + 1)
    statistic = 2 * (said["log_likelihood"] - plain)
    assert said["test"]["statistic"] == pytest.approx(statistic)
    assert said["test"]["p"] == pytest.approx(chi2.sf(statistic, 1) / 2)
    assert said["parameters"] == 5  # three fixed effects and two variances
    assert said["bic"] == pytest.approx(said["deviance"] + 5 * np.log(len(y)))
    low, high = said["new_client"]["low"], said["new_client"]["high"]
    error = np.sqrt(between + _variance_of_mean(said, w, who))
    assert (high - low) / 2 == pytest.approx(1.959964 * error, rel=1e-6)
    wider = (said["new_row"]["high"] - said["new_row"]["low"]) / 2
    assert wider == pytest.approx(1.959964 * np.sqrt(error**2 + noise), rel=1e-6)


def _variance_of_mean(said: dict[str, Any], w: np.ndarray, who: np.ndarray) -> float:
    """Of the fixed part at the mean row."""
    noise, between = said["residual_sd"] ** 2, said["random"][0]["variance"]
    v = noise * np.eye(len(w)) + between * (who[:, None] == who)
    row = w.mean(0)
    return float(row @ np.linalg.solve(w.T @ np.linalg.solve(v, w), row))


def test_new_clients_lie_within_their_intervals_as_often_as_they_should() -> None:
    """Means of new clients at the mean row, with the same truth: of 200, about 95 %."""
    x, y, who = arrays(simulated(6, clients=150, slope=0.0))
    said = coterie.MixedModel().fit(x, y, who).summary_["new_client"]
    means = 20 + 2.0 * np.random.default_rng(7).normal(size=200)
    inside = ((means > said["low"]) & (means < said["high"])).mean()
    assert 0.88 < inside < 0.995


def test_without_differences_the_variance_is_zero_and_the_test_says_so() -> None:
    draw = np.random.default_rng(12)
    who = np.repeat([f"{i}" for i in range(10)], 6)
    x, y = draw.normal(size=(60, 1)), draw.normal(size=60)
    y = y - np.repeat([y[who == name].mean() for name in np.unique(who)], 6)  # no mean differs
    model = coterie.MixedModel().fit(x, y, who)
    assert model.variance_["(intercept)"] == pytest.approx(0.0, abs=1e-12)
    assert model.summary_["boundary"]
    assert model.summary_["test"]["p"] == pytest.approx(1.0, abs=0.51)  # the statistic is zero to rounding
    assert model.summary_["heterogeneity"][0]["tau2"] == 0.0
    assert any("zero" in said for said in model.fitted_.warnings)


def test_the_first_level_of_a_category_is_what_others_are_compared_with(tmp_path: Path) -> None:
    table = simulated(8)
    table["ward"] = np.array(["a", "b", "c"])[np.random.default_rng(0).integers(0, 3, len(table["y"]))]
    table["y"] = table["y"] + np.where(table["ward"] == "c", 5.0, 0.0)
    model = coterie.MixedModel().fit(
        coterie.read(written(table, tmp_path / "t.csv"), client="who", target="y", test_size=0.0)
    )
    assert list(model.fixed_effects_) == ["(intercept)", "age", "dose", "ward=b", "ward=c"]
    assert model.summary_["left_out"] == ["ward=a"]
    assert model.fixed_effects_["ward=c"]["estimate"] == pytest.approx(5.0, abs=1.0)


# -- prediction -----------------------------------------------------------------------------------------------------------
def test_known_clients_new_ones_and_those_without_labels_are_predicted(tmp_path: Path) -> None:
    table = simulated(9)
    data, run = written(table, tmp_path / "t.csv"), tmp_path / "run"
    said = command(
        "fit", data, "--client", "who", "--target", "y", "--method", "mixed", "--slopes", "age", "--test-size", "0",
        "--out", run,
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "fixed effect" in said.out
    assert "likelihood ratio" in said.out
    model = coterie.load(run)
    assert isinstance(model, coterie.MixedModel)
    x, y, who = arrays(table)
    fixed = {name: one["estimate"] for name, one in model.fixed_effects_.items()}
    population = fixed["(intercept)"] + fixed["age"] * x[:, 0] + fixed["dose"] * x[:, 1]
    own = model.client_effects()
    place = {name: i for i, name in enumerate(own["client"].tolist())}
    at = [place[name] for name in who]
    wanted = population + own["(intercept)"][at] + own["age"][at] * x[:, 0]
    np.testing.assert_allclose(model.predict(x, who), wanted, rtol=1e-9)
    strangers = np.array([f"new {name}" for name in who])
    np.testing.assert_allclose(model.predict(x, strangers), population, rtol=1e-9)
    path = written({"who": strangers, "age": x[:, 0], "dose": x[:, 1]}, tmp_path / "new.csv")
    assert command("predict", run, path, "--out", tmp_path / "p.csv").code == 0
    np.testing.assert_allclose(pc.read_csv(tmp_path / "p.csv")["prediction"].to_numpy(), population, rtol=1e-9)
    # A new client with the rows of a known one has the same effects.
    columns = coterie.from_arrays(x, y, strangers, feature_names=NAMES, test_size=0.0)
    np.testing.assert_allclose(model.adopt(columns).predict(x, strangers), wanted, rtol=1e-9)


def test_a_mixed_model_of_classes_is_fitted_and_used(tmp_path: Path) -> None:
    data, run = written(simulated(10, classes=True), tmp_path / "t.csv"), tmp_path / "run"
    said = command("fit", data, "--client", "who", "--target", "y", "--method", "mixed", "--no-baselines", "--out", run)
    assert said.code == 0, said.err
    model = coterie.load(run)
    assert model.summary_["residual_sd"] is None
    assert 0 < model.icc_ < 1
    assert 0 < model.summary_["new_client"]["low"] < model.summary_["new_client"]["high"] < 1
    assert command("predict", run, data, "--out", tmp_path / "p.csv").code == 0
    made = pc.read_csv(tmp_path / "p.csv")["prediction"].to_pylist()
    assert np.mean(np.array(made) == simulated(10, classes=True)["y"]) > 0.7


def test_a_killed_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    x, y, who = arrays(simulated(11))
    clients = coterie.from_arrays(x, y, who, feature_names=NAMES)
    chosen = options({"method": "mixed", "mixed": {"slopes": ["age"]}, "baselines": False})
    begin_run(tmp_path / "run", chosen, "a test", clients)

    class KilledError(Exception):
        pass

    def watch(phase: str, done: Any, total: int) -> None:
        if phase == "fit" and done.round == 4:
            raise KilledError

    with pytest.raises(KilledError):
        fit(clients, chosen, folder=tmp_path / "run", every=0.0, watch=watch)
    again, whole = fit(clients, chosen, folder=tmp_path / "run", every=0.0), fit(clients, chosen)
    assert again.models.quantities == whole.models.quantities
    for column, value in whole.per_client.items():
        assert torch.equal(again.per_client[column].nan_to_num(), value.nan_to_num()), column


# -- what is refused ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"slopes": ["height"]}, "mixed.slopes has 'height', which is no number in a row"),
        ({"random_intercept": False}, "without a random intercept there must be random slopes"),
    ],
)
def test_what_cannot_be_is_refused(how: dict[str, Any], message: str) -> None:
    x, y, who = arrays(simulated(0))
    with pytest.raises(ConfigError, match=message):
        coterie.MixedModel(**how).fit(x, y, who)


def test_a_target_that_columns_tell_exactly_is_refused() -> None:
    x, y, who = arrays(simulated(0))
    effect = (np.unique(who, return_inverse=True)[1] % 5).astype(float)
    for target in (x @ [1.0, 2.0], x @ [1.0, 2.0] + effect):
        with pytest.raises(DataError, match="exactly"):
            coterie.MixedModel().fit(x, target, who)
    with pytest.raises(DataError, match="too few for 1 random effects"):
        coterie.MixedModel().fit(x, y, np.arange(len(y)))


def test_one_client_and_three_classes_are_refused() -> None:
    x, y, who = arrays(simulated(0))
    with pytest.raises(DataError, match="two clients"):
        coterie.MixedModel().fit(x, y, np.repeat("a", len(y)))
    with pytest.raises(ConfigError, match="two classes"):
        coterie.MixedModel().fit(x, np.array(["a", "b", "c"])[np.arange(len(y)) % 3], who)
    with pytest.raises(ConfigError, match="16"):
        coterie.MixedModel(slopes=("all",)).fit(np.random.default_rng(0).normal(size=(len(y), 20)), y, who)


def test_other_methods_have_no_use_for_its_options() -> None:
    given = options({"method": "ifca", "mixed": {"slopes": ["a"]}})
    with pytest.raises(ConfigError, match=r"mixed.slopes is set, and ifca has no use for it"):
        check_options(given)
