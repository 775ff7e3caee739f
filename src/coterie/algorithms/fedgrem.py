# SPDX-License-Identifier: Apache-2.0
"""FedGrEM: gradient EM on every client, and a robust centre of what they find.

Tian, Weng, Feng, "Towards the Theory of Unsupervised Federated Learning: Non-asymptotic Analysis of Federated EM
Algorithms", ICML 2024, Algorithm 1.

A client's estimate after the central update follows from the centre and from what it sent: theta = centre + D, where D is
the soft-thresholded difference. So the server sends the centre and lambda only, and clients keep what they sent.

Departures: the central update is solved until it converges (the authors' loop stops after one step); sample sizes may
differ; a scale that components share (a covariance, a noise variance) may be estimated, from sums over the clients within
reach of the centre; C_lambda may be 0 (every client alone) or infinite (common parameters).
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.mixture_starts import MixtureStart, aligned_start
from coterie.models.mixtures import Family, expect
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors, WeightedMean

__all__ = ["State", "central_update", "distances", "fedgrem", "gradient_em", "shrunk"]

Run = Generator[Ask | Save, Replies | None, Any]

_INNER = 500  # steps of a central update at most
_REACH = 3.0  # times the median distance from the centre: whose rows may shape the common scale


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    centre: Tensor  # [R, P]
    tilde: Tensor  # [M, R, P] what each client sent last
    n: Tensor  # [M] rows; 0 for who was never heard
    scale: Tensor  # [...] of the family
    mean_weights: Tensor  # [R] centre of the mixture proportions, for when they are drawn together
    lam: float
    round: int = 0
    settled: bool = False


def fedgrem(
    state: State | None,
    *,
    family: Family,
    n_components: int,
    rounds: int,
    seed: int,
    c_lambda: float = 2.0,
    c_eta: float = 0.95,
    kappa: float = 0.1,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    share_weights: float = 0.0,
    batch_size: int | None = None,
    clip: float = math.inf,
    tol: float = 0.0,
) -> Run:
    """Fit a mixture to every client, each helped by the others as far as they are alike.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    family : Family
        Of the components.
    n_components, rounds : int
        R and T.
    c_lambda : float
        C of the penalty: 0 leaves every client alone, infinity makes parameters common.
    c_eta : float
        Step size times a component's first weight.
    kappa : float
        Of lambda_t = kappa lambda_(t-1) + C sqrt(P + log M), lambda_0 = 1.
    start : MixtureStart
        Local EM and alignment.
    share_weights : float
        The same penalty's C for mixture proportions; 0 leaves them to every client.
    batch_size : int, optional
        Rows of a round, drawn anew; all by default.
    clip : float
        Largest length of one row's part of a gradient.
    tol : float
        Stop when nobody's estimate moves by more than this, relative to the centres' lengths; 0 never stops early.
    """
    fresh = _fresh(n_components, family)
    if state is None:
        found = yield from aligned_start(family, n_components, start, seed, fresh)
        state = _first(found, n_components, family)
        yield Save(state, {"events": [] if found is not None else ["nobody answered"]})
    while state.round < rounds and not state.settled:
        lam = kappa * state.lam + c_lambda * math.sqrt(family.n_parameters + math.log(max(len(state.n), 1)))
        got = yield Ask(
            gradient_em,
            {
                "family": family, "centre": state.centre, "scale": state.scale, "mean_weights": state.mean_weights,
                "lam": _number(state.lam), "share_weights": _number(share_weights), "c_eta": _number(c_eta),
                "reach": _number(_reach(state)), "key": keys.key(seed, state.round, "fedgrem"),
                "batch_size": batch_size, "clip": clip,
            },
            {"tilde": Stack(), "n": Stack(), "scatter": Sum(), "within": Sum(), "weights": Sum(), "loss": WeightedMean("n")},
            fresh=fresh,
            scratch=6 * n_components,
        )  # fmt: skip
        state = replace(state, round=state.round + 1)
        if got is None or got.n == 0 or not bool((got["n"] > 0).any()):
            yield Save(state, {"events": ["nobody answered"]})
            continue
        before, state = state, _updated(state, got, family, lam)
        change = _change(before, state)
        state = replace(state, settled=bool(tol) and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), "change": change, "events": []})
    return state


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _fresh(n_components: int, family: Family) -> Tensors:
    """A client that missed the start begins at the centre, with equal weights."""
    equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
    nothing = torch.full((n_components, family.n_parameters), math.nan, dtype=torch.float64)
    return {"tilde": nothing, "weights": equal, "first_weights": equal}


def _first(found: Any, n_components: int, family: Family) -> State:
    """The state after the start: the centre is a median, so that outliers do not matter yet."""
    equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
    centre = torch.zeros(n_components, family.n_parameters, dtype=torch.float64)
    none = State(centre, centre[None][:0], torch.zeros(0, dtype=torch.int64), family.unit_scale(), equal, 0.0)
    if found is None:
        return none
    state = _remembered(none, found.ids, found.theta, found.n)
    there = state.n > 0
    return replace(state, centre=state.tilde[there].median(0).values, scale=found.scale)


def _remembered(state: State, ids: Tensor, tilde: Tensor, n: Tensor) -> State:
    """Keep what clients sent; who has not been heard of has no rows."""
    size = max(len(state.n), int(ids.max()) + 1)
    kept = state.tilde.new_zeros(size, *state.tilde.shape[1:])
    rows = torch.zeros(size, dtype=torch.int64)
    kept[: len(state.n)], rows[: len(state.n)] = state.tilde, state.n
    kept[ids], rows[ids] = tilde, n
    return replace(state, tilde=kept, n=rows)


def _updated(state: State, got: Replies, family: Family, lam: float) -> State:
    """The central update, and the common scale."""
    state = _remembered(state, got.ids, got["tilde"], got["n"])
    there = state.n > 0
    centre = central_update(state.tilde[there], state.n[there], lam, state.centre)
    within = float(got["within"])
    scale = family.scale_of(got["scatter"], within) if within > 0 else state.scale
    mean_weights = got["weights"] / got["weights"].sum().clamp(min=1e-300)
    return replace(state, centre=centre, lam=lam, scale=scale, mean_weights=mean_weights)


def central_update(tilde: Tensor, n: Tensor, lam: float, start: Tensor) -> Tensor:
    """Minimise sum_k n_k/2 |nu_k - tilde_k|^2 + sqrt(n_k) lam |nu_k - centre| over all nu_k and the centre.

    Given the centre, nu_k is soft-thresholded; what is left for the centre is Huber's loss of the distances, minimised by
    reweighted means: weight n_k within lam / sqrt(n_k), and falling like one over the distance beyond.

    Parameters
    ----------
    tilde : Tensor
        [M, R, P]
    n : Tensor
        [M] rows.
    lam : float
        Penalty; 0 (nobody cares for the centre) is taken as a very small one.
    start : Tensor
        [R, P] where to begin.

    Returns
    -------
    Tensor
        [R, P] the centre.
    """
    rows = n.to(tilde.dtype)[:, None]  # [M, 1]
    if math.isinf(lam):
        return (rows[..., None] * tilde).sum(0) / rows.sum()
    reach = max(lam, 1e-6) / rows.sqrt()
    centre = start
    for _ in range(_INNER):
        distance = (tilde - centre).norm(dim=-1)  # [M, R]
        weight = rows * (reach / distance.clamp(min=1e-300)).clamp(max=1.0)
        new = (weight[..., None] * tilde).sum(0) / weight.sum(0)[..., None]
        moved = (new - centre).norm(dim=-1).max()
        centre = new
        if float(moved) <= 1e-12 * (1.0 + float(centre.abs().max())):
            break
    return centre


def shrunk(tilde: Tensor, centre: Tensor, reach: Tensor) -> Tensor:
    """centre + soft-threshold(tilde - centre, reach); who sent nothing is at the centre.  reach [...] of tilde [..., P]"""
    difference = torch.where(tilde.isnan(), 0.0, tilde - centre)
    length = difference.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return centre + difference * (1.0 - reach[..., None] / length).clamp(min=0.0)


def distances(state: State) -> Tensor:
    """How far every client's components are from the centre.  [M, R]"""
    return (state.tilde - state.centre).norm(dim=-1)


def _reach(state: State) -> float:
    """How far a client's estimates may be, on average, to count for the scale."""
    there = state.n > 0
    if not bool(there.any()):
        return math.inf
    return _REACH * float(distances(state)[there].mean(1).median())


def _change(before: State, after: State) -> float:
    """Largest move of an estimate, relative to the centres' typical length."""
    both = (before.n > 0)[: len(before.n)]
    moved = (after.tilde[: len(before.n)][both] - before.tilde[both]).norm(dim=-1)
    size = after.centre.norm(dim=-1).mean().clamp(min=1e-300)
    return float(moved.max() / size) if moved.numel() else math.inf


# -- on the client ----------------------------------------------------------------------------------------------------
def gradient_em(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Local update: E-step, proportions, and a gradient step from the estimate of the last central update."""
    family = shared["family"]
    data = _batch(data, shared["batch_size"], shared["key"])  # paper: all rows
    root = data.n.clamp(min=1).to(torch.float64).sqrt()[:, None]  # [C, 1]
    centre = shared["centre"][:, None]  # [S, 1, R, P]
    theta = shrunk(private["tilde"], centre, shared["lam"][:, None, None] / root)
    weights = private["weights"]
    if bool((shared["share_weights"] > 0).any()):
        pull = shared["share_weights"][:, None] / root[:, 0]
        weights = shrunk(weights, shared["mean_weights"][:, None], pull)
    gamma, likelihood = expect(family.log_density(theta, shared["scale"], data), weights, data)
    new = torch.einsum("scnr,cn->scr", gamma, data.weights)  # line: w_r = mean gamma_ir
    present = (data.n > 0)[:, None]
    new = torch.where(present, new, weights)
    step = shared["c_eta"][:, None, None] / private["first_weights"].clamp(min=1e-3)
    tilde = theta + (step / family.curvature(data)[:, None])[..., None] * family.ascent(theta, gamma, data, shared["clip"])
    far = (private["tilde"] - centre).norm(dim=-1).mean(-1)  # [S, C]
    near = ((far <= shared["reach"][:, None]) & (data.n > 0)).to(torch.float64)
    reply = {
        "tilde": tilde,
        "n": data.n[None],
        "scatter": _weighted(family.scatter(theta, gamma, data), near),
        "within": near * data.n,
        "weights": new * present,
        "loss": -likelihood,
    }
    return reply, {"tilde": tilde, "weights": new, "first_weights": private["first_weights"]}


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    """value [S, C, ...] times weight [S, C]"""
    return value * weight.view(*weight.shape, *(1,) * (value.dim() - 2))


def _batch(data: Block, size: int | None, key: Tensor) -> Block:
    """Draw rows of every client without replacement, the same for all runs; all rows when no size is given."""
    if size is None or data.x.shape[1] <= size:
        return data
    rows = keys.permuted(keys.key(key[0], data.keys), data.real)[:, :size]  # [C, B]
    own = torch.arange(len(rows))[:, None]
    y = None if data.y is None else data.y[own, rows]
    return Block(data.ids, data.keys, data.x[own, rows], y, data.n.clamp(max=size), data.real[own, rows])
