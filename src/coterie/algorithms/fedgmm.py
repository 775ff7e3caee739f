# SPDX-License-Identifier: Apache-2.0
"""FedGMM: a joint mixture over features and regressions, its components common and its proportions each client's own.

Wu, Zhang, Yu, Bao, Yang, "Personalized Federated Learning under Mixture of Distributions", ICML 2023; as a baseline in Tian,
Weng, Feng, ICML 2024. A row (x, y) comes from Gaussian part q of the features and from regression r with probability
pi_qr, at every client its own. Every client makes whole M-steps from its own rows; the server averages what clients found:
parts' means weighted by a client's rows in the part, which makes them means of all rows, regressions and the covariance by
all of a client's rows.

Departures: so Tian et al. have it in their code, where clients have as many rows; the code of Wu et al. weighs regressions,
too, by the rows in them, which one outlier client spoils. Parts share one covariance. It starts like the other baselines.
Rows without a target have no regressions: what is left is FedEM whose components share a covariance that is estimated.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms import em as plain
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart, fresh_mixture
from coterie.errors import ConfigError
from coterie.models.families import Family, expect, shares, typical_length
from coterie.models.mixtures import Gaussian, Regression
from coterie.protocol import Ask, Block, Fold, Replies, Save, Sum, Tensors, WeightedMean, answers, reveals

__all__ = ["State", "describe", "fedgmm", "joint_step", "marginal"]

Run = Generator[Ask | Save, Replies | None, Any]


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    theta: Tensor  # [R, P] regressions
    scale: Tensor  # [] of their noise
    parts: Tensor  # [Q, D] means of the features' parts; none before the start
    part_scale: Tensor  # [D, D] of the features' covariance
    round: int = 0
    settled: bool = False


def fedgmm(
    state: Any,
    *,
    family: Family,
    n_components: int,
    rounds: int,
    seed: int,
    parts: int = 3,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    tol: float = 0.0,
) -> Run:
    """Fit a joint mixture.

    Parameters
    ----------
    state : State, em.State (for Gaussian components) or None
        Where to go on; None starts.
    family : Gaussian or Regression
        Of the components.
    n_components, rounds : int
        R and T.
    parts : int
        Gaussian parts of the features.
    start : MixtureStart
        Local EM and alignment.
    tol : float
        Stop when no component moves by more than this, relative to components' lengths; 0 never stops early.
    """
    if isinstance(family, Gaussian):
        return (
            yield from plain.em(
                state, family=family, fitted=replace(family, covariance="full"), n_components=n_components,
                rounds=rounds, seed=seed, sharing="fedem", start=start, tol=tol,
            )
        )  # fmt: skip
    if not isinstance(family, Regression):
        raise ConfigError("FedGMM has Gaussian components or regressions", "use fedgrem for families of your own")
    if state is None:
        state = yield from _begin(family, n_components, start, seed, parts, 0)
    while state.round < rounds and not state.settled:
        if not len(state.parts):
            state = yield from _begin(family, n_components, start, seed, parts, state.round + 1)
            continue
        got = yield _ask(state, family, n_components, parts)
        state = replace(state, round=state.round + 1)
        if got is None or got.n == 0 or not float(got["n"]):
            yield Save(state, {"events": ["nobody answered"]})
            continue
        before, state = state, _updated(state, got, family)
        moved = float(family.coordinates(state.theta - before.theta, state.scale).norm(dim=-1).max())
        change = moved / typical_length(state.theta, state.scale, family)
        state = replace(state, settled=bool(tol) and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), "change": change})
    return state


def _begin(family: Regression, n_components: int, start: MixtureStart, seed: int, parts: int, round_: int) -> Run:
    """The common start, and parts drawn as the features are spread.  -> State"""
    d, saves = family.n_features, plain.begin(family, n_components, start, seed, "fedem", round_)
    found = yield from _unsaved(saves)
    got = None
    if found.count:
        got = yield Ask(describe, {"family": Gaussian(d, "full")}, {"moments": Sum(), "scatter": Sum()})
    if got is None or got.n == 0 or not float(got["moments"][0, -1]):
        state = State(found.theta, found.scale, found.theta.new_zeros(0, d), torch.eye(d, dtype=torch.float64), round_)
        yield Save(state, {"events": ["nobody answered"]})
        return state
    rows, total = got["moments"][0, :-1], got["moments"][0, -1]
    mean = rows / total
    scale = Gaussian(d, "full").scale_of(got["scatter"] - torch.outer(rows, mean), total)
    normal = torch.randn(parts, d, generator=keys.generator(seed, "parts"), dtype=torch.float64)
    state = State(found.theta, found.scale, mean + normal @ torch.linalg.inv(scale), scale, round_)
    yield Save(state, {"events": []})
    return state


def _unsaved(program: Run) -> Run:
    """Run a program without its saves."""
    try:
        wanted = next(program)
        while True:
            wanted = program.send((yield wanted) if isinstance(wanted, Ask) else None)
    except StopIteration as end:
        return end.value


def _ask(state: State, family: Regression, n_components: int, parts: int) -> Ask:
    shared = {
        "family": family, "features": Gaussian(family.n_features, "full"), "theta": state.theta, "scale": state.scale,
        "parts": state.parts, "part_scale": state.part_scale,
    }  # fmt: skip
    fold: dict[str, Fold] = {
        "n": Sum(), "loss": WeightedMean("n"), "step": WeightedMean("n"), "scatter": Sum(), "part_moments": Sum(),
        "part_scatter": Sum(),
    }  # fmt: skip
    fresh = fresh_mixture(n_components, family)
    fresh["joint"] = torch.zeros(parts * n_components, dtype=torch.float64)
    return Ask(joint_step, shared, fold, fresh=fresh, scratch=4 * parts * n_components)


def _updated(state: State, got: Replies, family: Regression) -> State:
    """Means of clients' M-steps."""
    n, features = got["n"].to(torch.float64), Gaussian(family.n_features, "full")
    return replace(
        state,
        theta=got["step"],
        scale=family.scale_of(got["scatter"], n) if family.has_scale else state.scale,
        parts=features.solved(got["part_moments"], state.parts),
        part_scale=features.scale_of(got["part_scatter"], n),
    )


def marginal(private: Tensors) -> Tensor:
    """Proportions of the regressions, whatever the part.  [..., R]"""
    joint, weights = private["joint"], private["weights"]
    summed = joint.view(*joint.shape[:-1], -1, weights.shape[-1]).sum(-2)
    return torch.where(summed.sum(-1, keepdim=True) > 0, summed, weights)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(moments=Sum(), scatter=Sum())
def describe(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums over a client's features: one component holds all rows."""
    family, all_rows = shared["family"], data.real[None, :, :, None].to(data.x.dtype)
    zero = data.x.new_zeros(1, len(data.n), 1, data.x.shape[2])
    return {"moments": family.moments(all_rows, data), "scatter": family.scatter(zero, all_rows, data)}, {}


@answers(n=Sum(), loss=WeightedMean("n"), step=WeightedMean("n"), scatter=Sum(), part_moments=Sum(), part_scatter=Sum())
@reveals(*REVEALED)
def joint_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """E-step over parts and regressions together, and M-steps: parts' means are sent as the sums that they are made of."""
    family, features = shared["family"], shared["features"]
    theta, parts = (shared[name][:, None].expand(-1, len(data.n), -1, -1) for name in ("theta", "parts"))
    target = family.log_density(theta, shared["scale"][:, None], data)  # [S, C, N, R]
    where = features.log_density(parts, shared["part_scale"][:, None], data)  # [S, C, N, Q]
    begins = private["joint"].sum(-1, keepdim=True) == 0
    even = private["weights"].repeat(1, 1, parts.shape[2]) / parts.shape[2]
    joint = torch.where(begins, even, private["joint"])  # [S, C, Q R]
    gamma, likelihood = expect((where[..., None] + target[..., None, :]).flatten(3), joint, data)
    both = gamma.view(*gamma.shape[:-1], parts.shape[2], theta.shape[2])
    regression, part = both.sum(-2), both.sum(-1)
    new = torch.where((data.n > 0)[:, None], shares(gamma, data), joint)
    tilde = family.maximise(theta, regression, data)
    reply = {
        "n": data.n[None],
        "loss": -likelihood,
        "step": tilde,
        "scatter": family.scatter(tilde, regression, data),
        "part_moments": features.moments(part, data),
        "part_scatter": features.scatter(features.maximise(parts, part, data), part, data),
    }
    return reply, {**private, "joint": new}
