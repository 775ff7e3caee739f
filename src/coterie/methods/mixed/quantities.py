# SPDX-License-Identifier: Apache-2.0
"""What a mixed model says, in the data's own units: estimates, intervals, likelihood, tests, heterogeneity, new clients."""

import math
from typing import Any

import numpy as np
import torch
from scipy.special import chdtrc, expit  # of scipy.stats, which takes most of a second to load, the same
from torch import Tensor

from coterie.algorithms.mixed_logistic import LaplaceState
from coterie.algorithms.mixed_model import State
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.profiled import Profile, factor, independent, pivoted, profile
from coterie.data.schema import Schema
from coterie.methods.mixed.design import INTERCEPT, Design, in_units

__all__ = ["WIDE", "best", "classes_found", "numbers_found"]

WIDE = 1.959963984540054  # standard errors to each side of an estimate that has a normal distribution: 95 %
_LATENT = math.pi**2 / 3  # variance of the noise of log odds
_NONE = (
    1e-6  # standard deviation of effects that have none; a fit with one, or with correlations of 1, is at the boundary
)


def best(state: State, how: Design, reml: bool) -> Profile:
    """The model at the factor that was found."""
    return profile(state.total, float(state.logdet), state.n, state.kept(how.order), reml)


def numbers_found(
    schema: Schema, scaling: Scaling, how: Design, state: State, *, reml: bool, diagonal: bool
) -> dict[str, Any]:
    """All quantities of a model of numbers."""
    kept, at = state.kept(how.order), best(state, how, reml)
    unit, noise = float(scaling.y_scale), at.squares / at.freedom
    lower = factor(state.theta, len(how.names), diagonal)
    psi = noise * lower @ lower.T
    plain = profile(state.plain, 0.0, state.n, kept, reml)
    scales = scaling.scale.double()[[k for k in kept if k < len(scaling.scale)]]
    shift = 2 * at.freedom * math.log(unit) + (2 * float(scales.log().sum()) if reml else 0.0)
    row = state.plain[-2, :-1] / state.n  # [D + 1] the mean row
    shown, center = noise * at.inverse[:-1, :-1], float(row @ at.beta)
    place = (how.basis @ row) @ psi @ (how.basis @ row) + row @ shown @ row
    between = float((psi * (how.basis @ state.plain[:-1, :-1] @ how.basis.T)).sum()) / state.n
    free = len(kept) + len(state.theta) + 1
    return {
        **_counts(state), "reml": reml, "covariance": "diagonal" if diagonal else "full",
        "left_out": _left_out(schema, kept),
        "fixed": _fixed(schema, scaling, kept, at.beta, shown),
        "random": _random(how, psi), "correlations": _correlations(how.units @ psi @ how.units.T),
        "residual_sd": math.sqrt(noise) * unit, "icc": between / (between + noise),
        **_likelihood(at.deviance + shift, free, state.n),
        "test": _test(plain.deviance - at.deviance, len(state.theta), len(how.names)),
        "heterogeneity": _heterogeneity(schema, scaling, how, state, at.beta),
        "new_client": _interval(center * unit + float(scaling.y_mean), unit * math.sqrt(float(place))),
        "new_row": _interval(center * unit + float(scaling.y_mean), unit * math.sqrt(float(place) + noise)),
        "boundary": _at_boundary(lower @ lower.T),
    }  # fmt: skip


def classes_found(
    schema: Schema, scaling: Scaling, how: Design, state: LaplaceState, *, diagonal: bool
) -> dict[str, Any]:
    """All quantities of a model of two classes, in log odds of the second; new clients' in its probability."""
    p, kept = len(state.beta), independent(state.plain, how.order)
    psi = state.root @ state.root.T
    covariance = _about_beta(state, kept, diagonal)
    row = state.plain[-2, :-1] / state.n
    centre, place = float(row @ state.beta), (how.basis @ row) @ psi @ (how.basis @ row) + row @ covariance @ row
    between = float((psi * (how.basis @ state.plain[:-1, :-1] @ how.basis.T)).sum()) / state.n
    own = len(state.slope) - p
    free, odds = len(kept) + own, _interval(centre, math.sqrt(float(place)))
    return {
        **_counts(state), "reml": False, "covariance": "diagonal" if diagonal else "full",
        "left_out": _left_out(schema, kept),
        "fixed": _fixed(schema, scaling, kept, state.beta, covariance[:p, :p]),
        "random": _random(how, psi), "correlations": _correlations(how.units @ psi @ how.units.T),
        "residual_sd": None, "icc": between / (between + _LATENT),
        **_likelihood(float(state.deviance), free, state.n),
        "test": _test(float(state.without - state.deviance), own, len(how.names)),
        "heterogeneity": _heterogeneity(schema, scaling, how, state, state.beta),
        "new_client": {name: float(expit(value)) for name, value in odds.items()},
        "new_row": None, "boundary": _at_boundary(psi),
    }  # fmt: skip


def _counts(state: State | LaplaceState) -> dict[str, int]:
    return {"rows": int(state.n), "clients": int(state.clients)}


def _interval(estimate: float, error: float) -> dict[str, float]:
    return {"estimate": estimate, "low": estimate - WIDE * error, "high": estimate + WIDE * error}


def _likelihood(deviance: float, free: int, n: float) -> dict[str, Any]:
    return {
        "log_likelihood": -deviance / 2, "deviance": deviance, "parameters": free, "aic": deviance + 2 * free,
        "bic": deviance + math.log(n) * free,
    }  # fmt: skip


# -- fixed effects ----------------------------------------------------------------------------------------------------
def _fixed(
    schema: Schema, scaling: Scaling, kept: tuple[int, ...], beta: Tensor, covariance: Tensor
) -> list[dict[str, Any]]:
    """The table of fixed effects, the intercept first."""
    unit, shift = in_units(scaling)
    estimates, errors = unit @ beta + shift, (unit @ covariance @ unit.T).diagonal().clamp(min=0).sqrt()
    names = (*schema.feature_names, INTERCEPT)
    first = sorted(kept, key=lambda k: k != len(names) - 1)
    return [
        {"name": names[k], **_interval(float(estimates[k]), float(errors[k])), "error": float(errors[k])} for k in first
    ]


def _left_out(schema: Schema, kept: tuple[int, ...]) -> list[str]:
    """Columns without a fixed effect of their own, since others tell the same."""
    return [name for k, name in enumerate(schema.feature_names) if k not in kept]


def _about_beta(state: LaplaceState, kept: tuple[int, ...], diagonal: bool) -> Tensor:
    """The covariance of fixed effects: from second derivatives in all parameters, but for variances that are zero."""
    p = len(state.beta)
    entries = state.root[pivoted(state.root, diagonal)[1]].tolist()
    own = [p + k for k, value in enumerate(entries) if abs(value) > _NONE]
    at = torch.tensor([*kept, *own])
    values, vectors = torch.linalg.eigh(state.hessian[at][:, at])
    good = values > 1e-10 * float(values.max())
    inverse = (vectors[:, good] / values[good]) @ vectors[:, good].T
    found = torch.zeros(p, p, dtype=torch.float64)
    few = torch.tensor(kept)
    found[few[:, None], few] = 2 * inverse[: len(kept), : len(kept)]
    return found


# -- random effects ---------------------------------------------------------------------------------------------------
def _random(how: Design, psi: Tensor) -> list[dict[str, Any]]:
    variance = (how.units @ psi @ how.units.T).diagonal().clamp(min=0)
    return [{"name": n, "variance": float(v), "sd": float(v.sqrt())} for n, v in zip(how.names, variance, strict=True)]


def _correlations(covariance: Tensor) -> list[list[float | None]]:
    """[R, R]; None where a variance is zero."""
    sd = covariance.diagonal().clamp(min=0).sqrt()
    both = torch.outer(sd, sd)
    made = torch.where(both > 0, covariance / both.clamp(min=1e-300), torch.nan).clamp(-1, 1)
    return [[None if math.isnan(v) else v for v in line] for line in made.tolist()]


def _at_boundary(covariance: Tensor) -> bool:
    """Whether some combination of random effects, of scaled columns, has no variance."""
    sd = covariance.diagonal().clamp(min=0).sqrt()
    if bool((sd < _NONE).any()):
        return True
    return bool(torch.linalg.eigvalsh(covariance / torch.outer(sd, sd))[0] < _NONE)


# -- tests ------------------------------------------------------------------------------------------------------------
def _test(statistic: float, free: int, size: int) -> dict[str, Any]:
    """The likelihood ratio against the model without random effects.

    A single variance is zero in half of all samples if there is none: the distribution is half a point at zero, half a
    chi-square. Of several effects, the chi-square with one degree for each free number is taken, which is cautious.
    """
    value = max(statistic, 0.0)
    p = float(chdtrc(free, value))
    if size == 1:
        p = p / 2 if value > 0 else 1.0
    return {"statistic": value, "freedom": free, "p": p, "mixture": size == 1}


def _heterogeneity(
    schema: Schema, scaling: Scaling, how: Design, state: State | LaplaceState, beta: Tensor
) -> list[dict[str, Any]]:
    """Cochran's Q, I^2 and the variance of DerSimonian and Laird, of clients' own estimates of each effect."""
    unit, shift = in_units(scaling)
    common, names = unit @ beta + shift, (*schema.feature_names, INTERCEPT)
    found = []
    for name, sums in zip(how.names, state.spread.T.tolist(), strict=True):
        count, weight, squared, first, second = sums
        if count < 2:
            continue
        q, freedom = max(second - first**2 / weight, 0.0), count - 1  # but for rounding it is not negative
        excess = max(q - freedom, 0.0)
        found.append({
            "name": name, "clients": int(count), "left_out": max(int(state.clients - count), 0), "q": q,
            "freedom": int(freedom), "p": float(chdtrc(freedom, q)),
            "i2": excess / q if q > 0 else 0.0, "tau2": excess / (weight - squared / weight),
            "mean": float(common[names.index(name)]) + first / weight, "error": float(np.sqrt(1 / weight)),
        })  # fmt: skip
    return found
