# SPDX-License-Identifier: Apache-2.0
"""The mixed model finds what R's lme4 finds: seven models of real data, by REML and by ML, and one of classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
import pytest
import torch

import coterie
from coterie.algorithms.mixed_model import _sums_ask, plain_sums_ask
from coterie.algorithms.profiled import independent, of_factor, profile
from coterie.engines.in_process import InProcess
from lme4_numbers import REFERENCES, Reference

NEAR = 1e-5  # relative


def fitted(one: Reference, shared_data: Path) -> coterie.MixedModel:
    clients = coterie.read(
        shared_data / one.file, client=one.client, target=one.target, features=list(one.features), test_size=0.0,
        task="regression",
    )  # fmt: skip
    return coterie.MixedModel(slopes=one.slopes, reml=one.reml).fit(clients)


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the largest number: a covariance may be near zero."""
    ours, theirs = np.asarray(ours, dtype=float).ravel(), np.asarray(theirs, dtype=float).ravel()
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# What 40 digits find, by Newton's method from lme4's estimates: standard deviations of intercepts, slopes and rows, and the
# log-likelihood. lme4 stops where its own is lower by up to 8e-8, and variances of slopes are off in the fourth digit.
EXACT = {
    ("sleep-slopes", True): ([24.7404514644, 5.92213310373], 25.5918156267, -871.8141359792454),
    ("sleep-slopes", False): ([23.7805669992, 5.71683454251], 25.5918156267, -875.9696722315988),
    ("bdf-slopes", True): ([3.02709989354, 0.430751202111], 6.27519252062, -7562.262058376036),
    ("bdf-slopes", False): ([3.01005320937, 0.423747625382], 6.27384482301, -7556.993388161473),
    ("oxboys-slopes", True): ([8.08107723121, 1.68071651514], 0.659888955191, -362.0454752819712),
    ("oxboys-slopes", False): ([7.92403064445, 1.64672464076], 0.659889052394, -362.9838445470642),
}
STOPS_SHORT = 2e-4  # so near are lme4's variances of sleep-slopes and bdf-slopes to those of the largest likelihood

every = pytest.mark.parametrize("one", REFERENCES, ids=lambda one: f"{one.name}-{'reml' if one.reml else 'ml'}")


@every
def test_all_quantities_are_those_of_lme4(one: Reference, shared_data: Path) -> None:
    near = STOPS_SHORT if one.name in ("sleep-slopes", "bdf-slopes") else NEAR
    model = fitted(one, shared_data)
    said = model.summary_
    for name in ("log_likelihood", "aic", "bic", "residual_sd"):
        assert said[name] == pytest.approx(getattr(one, name), rel=NEAR), name
    assert said["log_likelihood"] > one.log_likelihood - 1e-10 * abs(one.log_likelihood)  # of which 12 digits are given
    kept = [one.features[k] for k in range(len(one.features)) if one.features[k] not in said["left_out"]]
    fixed = [model.fixed_effects_[name] for name in ("(intercept)", *kept)]
    assert [line["estimate"] for line in fixed] == pytest.approx(one.fixed, rel=NEAR)
    assert [line["error"] for line in fixed] == pytest.approx(one.error, rel=near)
    sd = np.array([line["sd"] for line in said["random"]])
    size = len(sd)
    covariance = np.reshape(one.covariance, (size, size))
    assert sd == pytest.approx(np.sqrt(np.diag(covariance)), rel=near)
    assert apart(np.array(said["correlations"]) * np.outer(sd, sd), covariance) < near
    own = model.client_effects()
    at = [own["client"].tolist().index(name) for name in one.effects_of]
    names = [line["name"] for line in said["random"]]
    effects, deviations = (np.stack([own[f"{n}{part}"][at] for n in names], 1) for part in ("", " deviation"))
    theirs = np.reshape(one.effects, (-1, size))
    variances = np.reshape(one.effects_variance, (-1, size))
    for r in range(size):
        assert apart(effects[:, r], theirs[:, r]) < near
        assert apart(deviations[:, r], np.sqrt(variances[:, r])) < near
    assert model.fitted_.traffic is not None
    assert model.fitted_.traffic.messages < 30


@pytest.mark.parametrize("name", EXACT, ids=lambda name: f"{name[0]}-{'reml' if name[1] else 'ml'}")
def test_variances_of_slopes_are_those_of_the_largest_likelihood(name: tuple[str, bool], shared_data: Path) -> None:
    sd, noise, likelihood = EXACT[name]
    one = next(one for one in REFERENCES if (one.name, one.reml) == name)
    said = fitted(one, shared_data).summary_
    assert [line["sd"] for line in said["random"]] == pytest.approx(sd, rel=1e-7)
    assert said["residual_sd"] == pytest.approx(noise, rel=1e-7)
    assert said["log_likelihood"] == pytest.approx(likelihood, rel=1e-12)


@every
def test_at_the_covariance_of_lme4_all_else_is_that_of_lme4(one: Reference, shared_data: Path) -> None:
    """Fixed effects, errors, noise and likelihood follow from the covariance; here nothing is minimised."""
    rows = coterie.read(
        shared_data / one.file, client=one.client, target=one.target, features=list(one.features), test_size=0.0,
        task="regression",
    )  # fmt: skip
    names = rows.schema.feature_names
    d, size = len(names), 1 + len(one.slopes)
    basis = torch.eye(d + 1, dtype=torch.float64)[[d, *(names.index(slope) for slope in one.slopes)]]
    psi = np.reshape(one.covariance, (size, size)) / one.residual_sd**2
    theta = of_factor(torch.from_numpy(np.linalg.cholesky(psi)), False)
    engine, weight = InProcess(rows.train), torch.zeros(d + 2, d + 2, dtype=torch.float64)
    got = engine.ask(_sums_ask(theta, basis, weight, False))
    plain = engine.ask(plain_sums_ask(d))["total"]
    kept = independent(plain, tuple(names.index(name) for name in one.features))
    at = profile(got["total"], float(got["logdet"]), float(got["n"]), kept, one.reml)
    place = [d, *(k for k in (names.index(name) for name in one.features) if k in kept)]
    noise = at.squares / at.freedom
    assert at.beta[place].tolist() == pytest.approx(one.fixed, rel=1e-8)
    assert (noise * at.inverse.diagonal()[place]).sqrt().tolist() == pytest.approx(one.error, rel=1e-8)
    assert noise**0.5 == pytest.approx(one.residual_sd, rel=1e-8)
    assert -at.deviance / 2 == pytest.approx(one.log_likelihood, rel=1e-11)


def test_a_column_that_others_tell_is_left_out_and_said_so(shared_data: Path) -> None:
    """In the schools x0 + x1 + x2 is 1."""
    school = next(one for one in REFERENCES if one.name == "school-intercepts")
    model = fitted(school, shared_data)
    assert list(model.fixed_effects_) == ["(intercept)", "x0", "x1", "x3"]
    assert model.summary_["left_out"] == ["x2"]
    assert "x2" in model.fitted_.warnings[0]
    assert model.log_likelihood_ == pytest.approx(school.log_likelihood, rel=NEAR)


def test_classes_are_those_of_glmer_within_two_percent(shared_data: Path) -> None:
    """mine ~ f1 + f2 + f3 + (1 | field), Laplace, features standardised by the sample standard deviation."""
    table = pc.read_csv(shared_data / "landmine_29fields.csv.gz")
    x = np.stack([table[name].to_numpy() for name in ("f1", "f2", "f3")], 1)
    x = (x - x.mean(0)) / x.std(0, ddof=1)
    model = coterie.MixedModel().fit(x, table["mine"].to_numpy(), table["field"].to_numpy())
    said = model.summary_
    fixed = [line["estimate"] for line in said["fixed"]]
    errors = [line["error"] for line in said["fixed"]]
    assert fixed == pytest.approx([-3.05640788299, -0.617837500775, -0.129456819685, 0.612979241758], rel=0.02)
    assert errors == pytest.approx([0.0866966850424, 0.0560369512062, 0.0648798453164, 0.0302905482039], rel=0.02)
    assert said["random"][0]["sd"] == pytest.approx(0.400387691606, rel=0.02)
    assert said["log_likelihood"] == pytest.approx(-3089.26599781, rel=1e-6)
    assert model.fitted_.traffic is not None
    assert model.fitted_.traffic.messages < 30
