# SPDX-License-Identifier: Apache-2.0
"""EM and gradient EM for mixtures: every client alone, all rows pooled, averaged components (FedEM), borrowed ones (TGMM).

What FedGrEM is compared with in Tian, Weng, Feng, ICML 2024. All of them begin with the same local fits, numbered alike.

- local: no client hears of another; a scale is each client's own.
- pooled: one mixture for all rows, proportions included, from sums over clients.
- components: common components from the same sums, but proportions of each client: EM for a mixture whose clients differ
  in their proportions alone. Nobody's baseline.
- fedem: every client makes an E-step with its own proportions and a whole M-step from its own rows; the common components
  are the mean of what clients found, weighted by all their rows, whatever the component. Marfoq, Neglia, Bellet, Kameni,
  Vidal, "Federated Multi-Task Learning under a Mixture of Distributions", NeurIPS 2021, Algorithm 1.
- tgmm: a client's component is the mean of its own M-step and, each with weight `borrow`, of what every other client began
  with. R. Wang, Zhou, Jiang, Han, L. Wang, D. Wang, Chen, "A General Transfer Learning-based Gaussian Mixture Model for
  Clustering", International Journal of Fuzzy Systems 23, 2021; run at every client with all others as sources, as in the
  code of Tian et al.: sources do not learn.
- mutual: the same with every other client's last M-step, so that all learn from each other. Nobody's baseline either.

Departures: Marfoq et al. begin at random, as `MixtureStart(random=True)` does. A scale, where one is estimated, is common
but for "local": averaged like the components in "fedem", and from sums over clients elsewhere.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart, Started, aligned_start, fresh_mixture, own_scale
from coterie.errors import ConfigError
from coterie.models.families import Family, expect, gradient_step, shares, typical_length
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean, answers, reveals

__all__ = ["Sharing", "State", "begin", "em", "em_step", "own_parameters"]

Run = Generator[Ask | Save, Replies | None, Any]
Sharing = Literal["local", "pooled", "components", "fedem", "tgmm", "mutual"]

_BORROWS = ("tgmm", "mutual")
_SUMMED = ("pooled", "components")  # common components from sums over clients


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    theta: Tensor  # [R, P] common components; the sum of all to borrow from; for "local" where latecomers begin
    weights: Tensor  # [R] proportions over all rows
    first_weights: Tensor  # [R] what they were at the start
    scale: Tensor  # [...] of the family
    count: float = 0.0  # whose components are summed, where they are; else 1 after the start
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
    sharing : {"local", "pooled", "components", "fedem", "tgmm", "mutual"}
        What clients have in common.
    gradient : bool
        Gradient steps of c_eta over a component's first weight, in place of exact M-steps: for "local" and "pooled".
    borrow : float
        Weight of every other client's component in "tgmm" and "mutual".
    start : MixtureStart
        Local EM and alignment.
    fitted : Family, optional
        The family after the start, where it is another one.
    tol : float
        Stop when parameters move by no more than this, relative to components' lengths and on average over rows; 0 never
        stops early. Where clients borrow, it is what they make of their own and the others' that moves, from the second
        round on.
    """
    family_after = fitted or family
    if not family_after.has_moments and sharing in _SUMMED:
        raise ConfigError(f"'{sharing}' needs an M-step in sums over rows, and this family has none", "use fedgrem")
    if start.random and sharing not in (*_SUMMED, "fedem"):
        raise ConfigError(
            f"'{sharing}' begins with clients' own fits", "use pooled, components or fedem, or another start"
        )
    if gradient and sharing not in ("local", "pooled"):
        raise ConfigError(f"'{sharing}' has exact M-steps", "leave gradient out")
    if state is None:
        state = yield from begin(family, n_components, start, seed, sharing)
    while state.round < rounds and not state.settled:
        if not state.count:
            state = yield from begin(family, n_components, start, seed, sharing, state.round + 1)
            continue
        got = yield _ask(state, family_after, n_components, sharing, gradient, c_eta, borrow)
        state = replace(state, round=state.round + 1)
        if got is None or got.n == 0 or not float(got["n"]):
            yield Save(state, {"events": ["nobody answered"]})
            continue
        before, state = state, _updated(state, got, family_after, sharing, gradient, c_eta)
        common = family_after.coordinates(state.theta - before.theta, state.scale).norm(dim=-1).max()
        moved = got["moved"] if sharing in ("local", *_BORROWS) else common.clamp(max=1e150)
        change = float(moved) / typical_length(state.theta / max(state.count, 1.0), state.scale, family_after)
        state = replace(state, settled=bool(tol) and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), "change": change})
    return state


def begin(family: Family, n_components: int, start: MixtureStart, seed: int, sharing: Sharing, round_: int = 0) -> Run:
    """Start, and save.  -> State, with count 0 if nobody answered"""
    if start.random:
        draw = keys.generator(seed, round_, "mixture components")
        theta = torch.randn(n_components, family.n_parameters, generator=draw, dtype=torch.float64)
        equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
        state = State(theta, equal, equal, family.unit_scale(), count=1.0, round=round_)
        yield Save(state, {"events": []})
        return state
    alone = sharing == "local"
    found: Started | None = yield from aligned_start(family, n_components, start, seed, own_metric=alone)
    equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
    zero = torch.zeros(n_components, family.n_parameters, dtype=torch.float64)
    state = State(zero, equal, equal, family.unit_scale(), round=round_)
    if found is not None:
        first = found.theta[found.n > 0]
        theta, count = (first.sum(0), float(len(first))) if sharing in _BORROWS else (first.median(0).values, 1.0)
        state = replace(state, theta=theta, count=count, scale=found.scale)
        state = replace(state, weights=found.weights, first_weights=found.weights)
    yield Save(state, {"events": [] if found is not None else ["nobody answered"]})
    return state


def _ask(
    state: State, family: Family, n_components: int, sharing: Sharing, gradient: bool, c_eta: float, borrow: float
) -> Ask:
    fold: dict[str, Any] = {"n": Sum(), "loss": WeightedMean("n"), "moved": WeightedMean("n"), "rows": Sum()}
    if sharing in _SUMMED:
        fold["moments"] = Sum()
    if sharing == "fedem":
        fold["step"] = WeightedMean("n")
    if sharing == "mutual":
        fold |= {"step": Sum(), "answers": Sum()}
    if sharing != "local":
        fold["scatter"] = Sum()
    fresh = fresh_mixture(n_components, family, own_metric=sharing == "local")
    if sharing in _BORROWS:
        fresh |= {"mixed": fresh["tilde"], "mixes": torch.tensor(False)}
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
        return state
    if sharing == "fedem":
        return replace(state, theta=got["step"])
    if sharing == "mutual":
        return replace(state, theta=got["step"], count=float(got["answers"]))
    if not gradient:
        return replace(state, theta=family.solved(got["moments"], state.theta))
    slope, curvature = family.slope(got["moments"], state.theta)
    eta = c_eta / torch.maximum(state.first_weights, curvature / n).clamp(min=1e-9)
    return replace(state, theta=state.theta + eta[:, None] * slope / n)


def own_parameters(state: State, private: Tensors, sharing: Sharing) -> tuple[Tensor, Tensor, Tensor]:
    """Every client's components, proportions and scale after the last round.  -> [M, R, P], [M, R], [M | 1, ...]"""
    runs = {name: value[None] for name, value in private.items()}
    theta, weights, scale = _own(
        runs, state.theta[None], state.weights[None], state.scale[None],
        torch.tensor([state.count], dtype=torch.float64), sharing,
    )  # fmt: skip
    clients = len(private["weights"])
    return theta[0].expand(clients, -1, -1), weights[0].expand(clients, -1), scale[0]


def _own(
    private: Tensors, theta: Tensor, weights: Tensor, scale: Tensor, count: Tensor, sharing: Sharing
) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters that clients have, from theirs and the common ones.  -> [S, C | 1, R, P], [S, C | 1, R], [S, C | 1, ...]"""
    common, scale = theta[:, None], scale[:, None]
    if sharing == "pooled":
        return common, weights[:, None], scale
    if sharing in ("components", "fedem"):
        return common, private["weights"], scale
    begun, tilde = private["begun"][..., None, None], private["tilde"]
    if sharing == "local":
        known = private["has_scale"].view(*private["has_scale"].shape, *(1,) * (scale.dim() - 2))
        return torch.where(begun, tilde, common), private["weights"], torch.where(known, private["own_scale"], scale)
    first = torch.where(begun, tilde, common / count[:, None, None, None])
    if "mixed" not in private:  # before the first round
        return first, private["weights"], scale
    return torch.where(private["mixes"][..., None, None], private["mixed"], first), private["weights"], scale


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    n=Sum(),
    loss=WeightedMean("n"),
    moved=WeightedMean("n"),
    rows=Sum(),
    moments=Sum(),
    step=(WeightedMean("n"), Sum()),
    answers=Sum(),
    scatter=Sum(),
)
@reveals(*REVEALED)
def em_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """E-step; then the M-step, or the sums that it needs."""
    family, sharing, present = shared["family"], shared["sharing"], data.n > 0
    theta, weights, scale = _own(private, shared["theta"], shared["weights"], shared["scale"], shared["count"], sharing)
    gamma, likelihood = expect(family.log_density(theta, scale, data), weights, data)
    theta = theta.expand(-1, len(data.n), -1, -1)
    new = torch.where(present[:, None], shares(gamma, data), weights.expand(len(gamma), len(data.n), -1))
    rows = shares(gamma, data) * data.n[:, None]  # [S, C, R]
    reply: Tensors = {"n": data.n[None], "loss": -likelihood, "rows": rows, "moved": torch.zeros_like(likelihood)}
    kept = {**private, "weights": new}
    if sharing in _SUMMED:
        reply |= {"scatter": family.scatter(theta, gamma, data), "moments": family.moments(gamma, data)}
        return reply, kept
    if shared["gradient"]:
        tilde, kept["along"], _ = gradient_step(family, theta, gamma, data, private, shared["c_eta"])
    else:
        tilde = family.maximise(theta, gamma, data)
    if sharing == "fedem":
        return reply | {"scatter": family.scatter(tilde, gamma, data), "step": tilde}, kept
    if sharing in _BORROWS:
        found = _borrowed(shared, private, tilde)
        kept |= {
            "mixed": torch.where(present[:, None, None], found, private["mixed"]), "mixes": private["mixes"] | present,
        }  # fmt: skip
        reply["scatter"] = family.scatter(theta, gamma, data)
        before, known = theta, private["mixes"]
        if sharing == "mutual":
            reply |= {"step": tilde * present[:, None, None], "answers": present[None].to(torch.float64)}
            kept |= {"tilde": tilde, "begun": private["begun"] | present}
    else:
        found, before, known = tilde, private["tilde"], private["begun"]
        kept |= {
            "tilde": tilde, "begun": known | present, "has_scale": present.expand(len(gamma), -1),
            "own_scale": own_scale(family, family.scatter(theta, gamma, data), data),
        }  # fmt: skip
    moved = family.coordinates(found - before, scale).norm(dim=-1).amax(-1)
    reply["moved"] = torch.where(known, moved, torch.inf).clamp(max=1e150)
    return reply, kept


def _borrowed(shared: dict[str, Any], private: Tensors, tilde: Tensor) -> Tensor:
    """Mean of a client's M-step and, each with weight `borrow`, of what there is from the others.  -> [S, C, R, P]"""
    borrow, source = shared["borrow"], private["begun"][..., None, None].to(torch.float64)  # whether it is one itself
    others = shared["theta"][:, None] - source * private["tilde"]
    mean: Tensor = (tilde + borrow * others) / (1 + borrow * (shared["count"][:, None, None, None] - source))
    return mean
