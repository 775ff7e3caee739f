# SPDX-License-Identifier: Apache-2.0
"""EM and gradient EM for mixtures: every client alone, all rows pooled, common components (FedEM), borrowed ones (TGMM).

What FedGrEM is compared with in Tian, Weng, Feng, ICML 2024. All of them begin with the same local fits, numbered alike.

- local: no client hears of another; a scale is each client's own.
- pooled: one mixture for all rows, proportions included, from sums over clients.
- fedem: common components from sums over clients, proportions of each client. Marfoq et al., NeurIPS 2021.
- tgmm: a client's component is the mean of its own M-step and, each with weight `borrow`, of every other client's.
  Wang, Zhou, Sheng, Lu, "Unsupervised transfer learning for Gaussian mixtures", 2021; run at every client with all others
  as sources.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.mixture_starts import MixtureStart, Started, aligned_start, fresh_mixture, own_scale
from coterie.errors import ConfigError
from coterie.models.families import Family, expect, gradient_step, shares, typical_length
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean

__all__ = ["Sharing", "State", "begin", "em", "em_step", "own_parameters"]

Run = Generator[Ask | Save, Replies | None, Any]
Sharing = Literal["local", "pooled", "fedem", "tgmm"]


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    theta: Tensor  # [R, P] common components; for "tgmm" the sum of all M-steps, for "local" where latecomers begin
    weights: Tensor  # [R] proportions over all rows
    first_weights: Tensor  # [R] what they were at the start
    scale: Tensor  # [...] of the family
    count: float = 0.0  # for "tgmm": whose M-steps are summed; else 1 after the start
    round: int = 0
    settled: bool = False


def em(
    state: State | None,
    *,
    family: Family,
    n_components: int,
    rounds: int,
    seed: int,
    sharing: Sharing,
    gradient: bool = False,
    c_eta: float = 0.95,
    borrow: float = 0.4,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    fitted: Family | None = None,
    tol: float = 0.0,
) -> Run:
    """Fit mixtures by EM.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    family : Family
        Of the components.
    n_components, rounds : int
        R and T.
    sharing : {"local", "pooled", "fedem", "tgmm"}
        What clients have in common.
    gradient : bool
        Gradient steps of c_eta over a component's first weight, in place of exact M-steps: for "local" and "pooled".
    borrow : float
        Weight of every other client's component in "tgmm".
    start : MixtureStart
        Local EM and alignment.
    fitted : Family, optional
        The family after the start, where it is another one.
    tol : float
        Stop when parameters move by no more than this, relative to components' lengths and on average over rows; 0 never
        stops early.
    """
    family_after = fitted or family
    if not family_after.has_moments and sharing in ("pooled", "fedem"):
        raise ConfigError(f"'{sharing}' needs an M-step in sums over rows, and this family has none", "use fedgrem")
    if gradient and sharing not in ("local", "pooled"):
        raise ConfigError(f"'{sharing}' has exact M-steps", "leave gradient out")
    if state is None:
        state = yield from begin(family, n_components, start, seed, own_metric=sharing == "local")
    while state.round < rounds and not state.settled:
        if not state.count:
            state = yield from begin(family, n_components, start, seed, state.round + 1, own_metric=sharing == "local")
            continue
        got = yield _ask(state, family_after, n_components, sharing, gradient, c_eta, borrow)
        state = replace(state, round=state.round + 1)
        if got is None or got.n == 0 or not float(got["n"]):
            yield Save(state, {"events": ["nobody answered"]})
            continue
        before, state = state, _updated(state, got, family_after, sharing, gradient, c_eta)
        common = family_after.coordinates(state.theta - before.theta, state.scale).norm(dim=-1).max()
        moved = got["moved"] if sharing in ("local", "tgmm") else common.clamp(max=1e150)
        change = float(moved) / typical_length(state.theta / max(state.count, 1.0), state.scale, family_after)
        state = replace(state, settled=bool(tol) and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), "change": change})
    return state


def begin(
    family: Family, n_components: int, start: MixtureStart, seed: int, round_: int = 0, *, own_metric: bool = False
) -> Run:
    """Start, and save.  -> State, with count 0 if nobody answered"""
    found: Started | None = yield from aligned_start(family, n_components, start, seed, own_metric=own_metric)
    equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
    zero = torch.zeros(n_components, family.n_parameters, dtype=torch.float64)
    state = State(zero, equal, equal, family.unit_scale(), round=round_)
    if found is not None:
        centre = found.theta[found.n > 0].median(0).values
        state = replace(state, theta=centre, weights=found.weights, first_weights=found.weights, count=1.0)
        state = replace(state, scale=found.scale)
    yield Save(state, {"events": [] if found is not None else ["nobody answered"]})
    return state


def _ask(
    state: State, family: Family, n_components: int, sharing: Sharing, gradient: bool, c_eta: float, borrow: float
) -> Ask:
    fold: dict[str, Any] = {"n": Sum(), "loss": WeightedMean("n"), "moved": WeightedMean("n"), "rows": Sum()}
    if sharing in ("pooled", "fedem"):
        fold["moments"] = Sum()
    if sharing == "tgmm":
        fold |= {"step": Sum(), "answers": Sum()}
    if sharing != "local":
        fold["scatter"] = Sum()
    fresh = fresh_mixture(n_components, family, own_metric=sharing == "local")
    shared = {
        "family": family, "theta": state.theta, "weights": state.weights, "scale": state.scale,
        "count": torch.tensor(state.count, dtype=torch.float64), "sharing": sharing, "gradient": gradient,
        "c_eta": torch.tensor(c_eta, dtype=torch.float64), "borrow": borrow,
    }  # fmt: skip
    return Ask(em_step, shared, fold, fresh=fresh, scratch=6 * n_components)


def _updated(state: State, got: Replies, family: Family, sharing: Sharing, gradient: bool, c_eta: float) -> State:
    """What the server makes of the sums."""
    n = got["n"].to(torch.float64)
    weights = got["rows"] / n
    if sharing == "local":
        return replace(state, weights=weights)
    scale = family.scale_of(got["scatter"], n) if family.has_scale else state.scale
    state = replace(state, weights=weights, scale=scale)
    if sharing == "tgmm":
        return replace(state, theta=got["step"], count=float(got["answers"]))
    if not gradient:
        return replace(state, theta=family.solved(got["moments"], state.theta))
    slope, bend = family.slope(got["moments"], state.theta)
    eta = c_eta / torch.maximum(state.first_weights, bend / n).clamp(min=1e-9)
    return replace(state, theta=state.theta + eta[:, None] * slope / n)


def own_parameters(
    state: State, private: Tensors, sharing: Sharing, borrow: float = 0.4
) -> tuple[Tensor, Tensor, Tensor]:
    """Every client's components, proportions and scale after the last round.  -> [M, R, P], [M, R], [M | 1, ...]"""
    runs = {name: value[None] for name, value in private.items()}
    theta, weights, scale = _own(
        runs, state.theta[None], state.weights[None], state.scale[None],
        torch.tensor([state.count], dtype=torch.float64), sharing, borrow,
    )  # fmt: skip
    clients = len(private["weights"])
    return theta[0].expand(clients, -1, -1), weights[0].expand(clients, -1), scale[0]


def _own(
    private: Tensors, theta: Tensor, weights: Tensor, scale: Tensor, count: Tensor, sharing: Sharing, borrow: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters that clients have, from theirs and the common ones.  -> [S, C | 1, R, P], [S, C | 1, R], [S, C | 1, ...]"""
    common, scale = theta[:, None], scale[:, None]
    if sharing == "pooled":
        return common, weights[:, None], scale
    if sharing == "fedem":
        return common, private["weights"], scale
    begun, tilde = private["begun"][..., None, None], private["tilde"]
    if sharing == "local":
        known = private["has_scale"].view(*private["has_scale"].shape, *(1,) * (scale.dim() - 2))
        return torch.where(begun, tilde, common), private["weights"], torch.where(known, private["own_scale"], scale)
    total = count[:, None, None, None]
    mixed = ((1 - borrow) * tilde + borrow * common) / (1 - borrow + borrow * total)
    mixed = torch.where(total > 1, mixed, tilde)  # nobody has sent an M-step yet, or only one
    return torch.where(begun, mixed, common / total), private["weights"], scale


# -- on the client ----------------------------------------------------------------------------------------------------
def em_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """E-step; then the M-step, or the sums that it needs."""
    family, sharing, present = shared["family"], shared["sharing"], data.n > 0
    theta, weights, scale = _own(
        private, shared["theta"], shared["weights"], shared["scale"], shared["count"], sharing, shared["borrow"]
    )
    gamma, likelihood = expect(family.log_density(theta, scale, data), weights, data)
    theta = theta.expand(-1, len(data.n), -1, -1)
    new = torch.where(present[:, None], shares(gamma, data), weights.expand(len(gamma), len(data.n), -1))
    reply: Tensors = {
        "n": data.n[None],
        "loss": -likelihood,
        "rows": shares(gamma, data) * data.n[:, None],
        "moved": torch.zeros_like(likelihood),
    }
    kept = {**private, "weights": new}
    if sharing != "local":
        reply["scatter"] = family.scatter(theta, gamma, data)
    if sharing in ("pooled", "fedem"):
        return {**reply, "moments": family.moments(gamma, data)}, kept
    if shared["gradient"]:
        tilde, kept["along"] = gradient_step(family, theta, gamma, data, private, shared["c_eta"])
    else:
        tilde = family.maximise(theta, gamma, data)
    moved = family.coordinates(tilde - private["tilde"], scale).norm(dim=-1).amax(-1)
    reply["moved"] = torch.where(private["begun"], moved, torch.inf).clamp(max=1e150)
    if sharing == "tgmm":
        reply |= {"step": tilde * present[:, None, None], "answers": present[None].to(torch.float64)}
    kept |= {"tilde": tilde, "begun": private["begun"] | present}
    if sharing == "local":
        kept |= {
            "own_scale": own_scale(family, family.scatter(theta, gamma, data), data),
            "has_scale": present.expand(len(gamma), -1),
        }
    return reply, kept
