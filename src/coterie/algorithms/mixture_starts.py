# SPDX-License-Identifier: Apache-2.0
"""Where federated mixtures begin: EM on every client from several starts, then components numbered alike.

Every client runs all its starts at once. Gaussian components begin with k-means (k-means++ seeds, hard assignments, equal
weights), and the start with the smallest sum of squares goes on with EM: on overlapping groups it ends in better optima than
EM from the seeds. Regressions begin with random coefficients and falling noise (annealing), where EM from a random start
mostly ends badly, and the likeliest goes on. With a scale to estimate, clients fit twice: the second time in the metric of
what those who are alike found together.

Runs in lockstep that begin alike (candidates of a penalty, methods to compare) are started once: clients notice it.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.alignment import align
from coterie.algorithms.outliers import chance, outlier_scores
from coterie.local.k_means import k_means
from coterie.models.families import Family, expect, shares
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors, answers, reveals

__all__ = [
    "NEAR", "REVEALED", "MixtureStart", "Started", "aligned_start", "fit_locally", "fresh_mixture", "own_scale", "renumber",
]  # fmt: skip

Run = Generator[Ask | Save, Replies | None, Any]

REVEALED = frozenset((
    "alone", "begun", "centre", "has_scale", "joint", "mixed", "mixes", "own_scale", "rate", "stride", "tilde", "told",
    "weights",
))  # fmt: skip  # what clients tell of their own mixtures after a fit: see docs/privacy.md
_ATTEMPTS = 2  # fits of a mixture whose scale is estimated: each in the metric that came of the one before
_TIE = 1e-9  # likelihoods, relative, that are the same: rounding must not decide
_COLD = 0.05  # densities begin with this power, and have their own from halfway on
NEAR = 3.0  # outlier score up to which a client's rows may shape the common scale


@dataclass(frozen=True)
class MixtureStart:
    """How clients begin.

    Parameters
    ----------
    restarts : int
        Starts of every client; the best wins.
    iterations : int
        Steps of each start, and EM steps of the winner.
    orders : int
        Random orders of the clients that alignment tries at most.
    random : bool
        Whether common components are drawn, in place of all that: nobody is asked for a fit of its own. For EM whose
        components are common ("pooled", "components", "fedem"), with several seeds side by side.
    """

    restarts: int = 20
    iterations: int = 30
    orders: int = 10
    random: bool = False


@dataclass(frozen=True)
class Started:
    """What clients found, numbered alike."""

    ids: Tensor  # [C]
    theta: Tensor  # [C, R, P]
    n: Tensor  # [C]
    scale: Tensor  # common, from clients who are alike
    weights: Tensor  # [R] proportions over all rows


def fresh_mixture(n_components: int, family: Family, *, own_metric: bool = False) -> Tensors:
    """Private state of a client that missed the start: it begins at the centre, with equal weights."""
    equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
    theta = torch.zeros(n_components, family.n_parameters, dtype=torch.float64)
    fresh = {
        "tilde": theta, "weights": equal, "first_weights": equal, "along": theta, "stride": torch.zeros_like(equal),
        "first": theta, "rate": torch.ones((), dtype=torch.float64),
        "begun": torch.tensor(False), "alone": torch.tensor(False),
    }  # fmt: skip
    return fresh | ({"own_scale": family.unit_scale(), "has_scale": torch.tensor(False)} if own_metric else {})


def aligned_start(
    family: Family, n_components: int, start: MixtureStart, seed: int, *, own_metric: bool = False
) -> Run:
    """Let clients fit alone, and number their components alike.  -> Started, or None if nobody answered

    With `own_metric`, a client fits in the metric of its own rows, and hears nothing of the others'.
    """
    scale, found = family.unit_scale(), None
    own_metric = own_metric and family.has_scale
    fresh = fresh_mixture(n_components, family, own_metric=own_metric)
    for attempt in range(_ATTEMPTS if family.has_scale and not own_metric else 1):
        rough = family.has_scale and attempt == 0 and not own_metric  # the scale is not known at all
        got = yield Ask(
            fit_locally,
            {
                "family": family, "n_components": n_components, "restarts": start.restarts,
                "iterations": start.iterations, "rough": rough, "scale": scale, "own_metric": own_metric,
                "key": keys.key(seed, attempt, "mixture start"),
            },
            {"theta": Stack(), "n": Stack()},
            fresh=fresh,
            work=float(start.iterations),
            scratch=4 * n_components * start.restarts,
        )  # fmt: skip
        if got is None or got.n == 0 or not bool((got["n"] > 0).any()):
            return None
        found = yield from _numbered(family, start, seed, got, scale, rough)
        scale = found.scale
    return found


def _numbered(family: Family, start: MixtureStart, seed: int, got: Replies, scale: Tensor, rough: bool) -> Run:
    """Align, tell clients the order, and sum up the scale over those who are alike.  -> Started"""
    there = got["n"] > 0
    order = torch.arange(got["theta"].shape[1]).repeat(got.n, 1)
    at = family.coordinates(got["theta"], scale)
    order[there] = align(at[there], seed, orders=start.orders)
    at = torch.take_along_dim(at, order[..., None], 1)
    away = (at[there] - at[there].median(0).values).norm(dim=-1).mean(1)
    noise = chance(got["n"][there], *at.shape[1:]) * (not rough)  # in units of the scale
    near = there.clone()
    near[there] = outlier_scores(away, noise) <= NEAR
    sums = yield Ask(
        renumber,
        {"family": family, "scale": scale, "rough": rough},
        {"scatter": Sum(), "within": Sum(), "rows": Sum()},
        each={"order": order, "near": near},
        to=got.ids,
        fresh=fresh_mixture(order.shape[1], family),
        scratch=2 * order.shape[1],
    )
    theta = torch.take_along_dim(got["theta"], order[..., None], 1)
    if sums is None or sums.n == 0:
        equal = torch.full(order.shape[1:], 1.0 / order.shape[1], dtype=torch.float64)
        return Started(got.ids, theta, got["n"], scale, equal)
    if float(sums["within"]) > 0:
        scale = family.scale_of(sums["scatter"], sums["within"])
    return Started(got.ids, theta, got["n"], scale, sums["rows"] / sums["rows"].sum())


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(theta=Stack(), n=Stack())
@reveals(*REVEALED)
def fit_locally(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Fit a mixture from several starts at once, and go on with the best."""
    runs, key, scale = len(shared["key"]), shared["key"], shared["scale"]
    if bool((key == key[0]).all()) and torch.equal(scale, scale[:1].expand_as(scale)):
        key, scale = key[:1], scale[:1]
    scale = scale[:, None]
    family, theta = shared["family"], _best_start(shared, key, scale, data)
    if shared["own_metric"]:
        gamma = _hard(family.log_density(theta, scale, data), data)
        scale = own_scale(family, family.scatter(theta, gamma, data), data)
        theta = _best_start(shared, key, scale, data)
    weights = torch.full(theta.shape[:3], 1.0 / theta.shape[2], dtype=theta.dtype)
    for _ in range(0 if shared["rough"] else shared["iterations"]):
        gamma, _ = expect(family.log_density(theta, scale, data), weights, data)
        weights, theta = shares(gamma, data), family.maximise(theta, gamma, data)
    present = data.n > 0
    weights = torch.where(present[:, None], weights, 1.0 / theta.shape[2])
    theta, weights, scale = (value.expand(runs, *value.shape[1:]) for value in (theta, weights, scale))
    begun = present.expand(runs, -1)
    kept = {"tilde": theta, "weights": weights, "first": theta, "first_weights": weights, "begun": begun}
    kept |= {"own_scale": scale, "has_scale": begun} if shared["own_metric"] else {}
    return {"theta": theta, "n": data.n[None]}, {**private, **kept}


def _best_start(shared: dict[str, Any], key: Tensor, scale: Tensor, data: Block) -> Tensor:
    """The best of several starts.  key [S], scale [S, 1, ...] -> theta [S, C, R, P]"""
    family, starts, steps, r = shared["family"], shared["restarts"], shared["iterations"], shared["n_components"]
    draws = keys.key(key[:, None, None], torch.arange(starts)[:, None], data.keys)  # [S, B, C]
    if not family.anneals:
        rows = family.coordinates(data.x, scale).expand(len(key), *data.x.shape)
        member = torch.stack([k_means(x, data, r, own, steps) for x, own in zip(rows, draws, strict=True)])
        found: Tensor = family.maximise(family.draw(r, scale, data, draws[:, 0]), member, data)
        return found  # an empty component is at a row
    many = scale.repeat_interleave(starts, 0)  # [S B, 1, ...]
    theta, merit = _anneal(family, family.draw(r, many, data, draws.flatten(0, 1)), many, data, steps)
    merit = merit.view(-1, starts, len(data.n))
    top = merit.amax(1, keepdim=True)
    best = (merit >= top - _TIE * (1 + top.abs())).to(torch.int8).argmax(1)  # [S, C] the first of those
    pick = best + starts * torch.arange(len(best))[:, None]
    return theta[pick, torch.arange(len(data.n))[None]]


def own_scale(family: Family, scatter: Tensor, data: Block) -> Tensor:
    """A client's own scale; one further row of unit variance keeps it from vanishing where rows are few.  [S, C, ...]"""
    rows = data.n.to(torch.float64).expand(len(scatter), -1)
    return (
        family.scale_of(scatter + family.unit_scale(), rows + 1) if family.has_scale else family.scale_of(scatter, rows)
    )


def _hard(density: Tensor, data: Block) -> Tensor:
    """Every row belongs to one component.  [S, C, N, R]"""
    label = density.nan_to_num(nan=-torch.inf).argmax(-1)
    return one_hot(label, density.shape[-1]).to(density.dtype) * data.real[..., None]


def _anneal(family: Family, theta: Tensor, scale: Tensor, data: Block, steps: int) -> tuple[Tensor, Tensor]:
    """EM with densities that sharpen, and the log-likelihood.  -> theta, [S B, C]"""
    weights = torch.full(theta.shape[:3], 1.0 / theta.shape[2], dtype=theta.dtype)
    for t in range(steps):
        heat = min(1.0, _COLD ** (1 - 2 * t / steps))
        gamma, _ = expect(heat * family.log_density(theta, scale, data), weights, data)
        weights, theta = shares(gamma, data), family.maximise(theta, gamma, data)
    return theta, expect(family.log_density(theta, scale, data), weights, data)[1]


@answers(scatter=Sum(), within=Sum(), rows=Sum())
def renumber(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Call components as the server says, and say how rows scatter about them."""
    family, order = shared["family"], each["order"]  # [S, C, R]
    theta = torch.take_along_dim(private["tilde"], order[..., None], 2)
    weights = torch.take_along_dim(private["weights"], order, 2)
    density = family.log_density(theta, shared["scale"][:, None], data)
    gamma = _hard(density, data) if shared["rough"] else expect(density, weights, data)[0]
    near = each["near"] & (data.n > 0)
    scatter = family.scatter(theta, gamma, data)
    reply = {
        "scatter": torch.where(near.view(*near.shape, *(1,) * (scatter.dim() - 2)), scatter, 0.0),
        "within": (near * data.n).to(torch.float64),
        "rows": weights * data.n[:, None],
    }
    return reply, {**private, "tilde": theta, "weights": weights, "first": theta, "first_weights": weights}
