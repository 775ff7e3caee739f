# SPDX-License-Identifier: Apache-2.0
"""The mixed model of two classes: log odds X beta + Z b_i with b_i ~ N(0, L L^T), by Laplace's approximation.

For given fixed effects and factor, every client finds the mode of its random effects and answers with its part of the
deviance (Bates et al., 2015, on glmer: the random effects are integrated out by a normal approximation at the mode), of its
exact gradient, and of the information about fixed effects. Of these, sums are taken. The server takes Newton's steps in
fixed effects and factor together; second derivatives that involve the factor are differences of gradients, which the same
message brings. It begins with logistic regression, which is the model without random effects.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from coterie.algorithms.mixed_model import fresh_effects, kept_effects, plain_sums_ask
from coterie.algorithms.profiled import descent, entries, factor, independent, of_factor
from coterie.models import Dense
from coterie.protocol import Ask, Block, Lockstep, Replies, Save, Sum, Tensors, answers

__all__ = ["LaplaceState", "adapt_logit", "adapt_logit_ask", "laplace_sums", "mixed_logistic"]

_STARTS = (0.1, 0.4, 1.2)  # standard deviations of random effects, in log odds of a standard deviation
_LENGTHS = (1.0, 0.3)  # of Newton's step that are tried at once, far from the minimum
_NEAR = 1e-1  # what a step promises: below, Newton's own length is enough
_LAST = 1e-8  # below, the step is the last
_ROUNDING = 1e-6  # below, a step that does not gain shows that rounding is reached
_SHRINK = 0.05  # of the lengths, after a message in which none gained
_TIRED = 3  # such messages, and no more
_APART = 1e-4  # of factors whose gradients are compared
_MODE_STEPS, _AT_MODE = 60, 1e-11
_SUMS = ("deviance", "slope", "information", "n", "there")


@dataclass(frozen=True)
class LaplaceState:
    """The best fixed effects and factor so far, with their sums."""

    beta: Tensor  # [D + 1]
    theta: Tensor  # [K]
    deviance: Tensor  # []
    slope: Tensor  # [D + 1 + K] of the deviance
    hessian: Tensor  # [D + 1 + K, D + 1 + K]
    plain: Tensor  # [D + 2, D + 2] W^T W
    without: Tensor  # [] deviance without random effects
    n: float = 0.0
    clients: float = 0.0
    failed: int = 0
    stage: int = 0  # 0 to begin, 1 without random effects, 2 to begin with them, 3 on the way, 4 at the minimum
    round: int = 0


def mixed_logistic(
    state: LaplaceState | None, *, basis: Tensor, order: tuple[int, ...], diagonal: bool = False, rounds: int = 80
) -> Lockstep:
    """Find fixed effects and the covariance of random effects with the smallest deviance.

    Parameters
    ----------
    state : LaplaceState or None
        Where to go on from.
    basis : Tensor
        [R, D + 1] what makes the columns of random effects of features and intercept.
    order : tuple of int
        Features, those first that are kept where others are combinations of them.
    diagonal : bool
        Whether random effects are independent.
    rounds : int
        Messages, at most.
    """
    if state is None:
        state = _begun(*basis.shape, diagonal)
        yield Save(state)
    while state.round < rounds and state.stage < 4:
        if not state.stage:
            got = yield (plain_sums_ask(basis.shape[1] - 1),)
            if got[0].n:
                state = replace(state, plain=got[0]["total"], stage=1)
        else:
            free = _free(state, order)
            points = _points(state, free, len(basis), diagonal)
            sent = [point for at in points for point in (at, *_beside(at, state))]
            got = yield tuple(_sums_ask(point, basis, diagonal) for point in sent)
            if got[0].n:
                state = _chosen(state, points, got, free)
                if state.stage == 4:
                    lower = factor(state.theta, len(basis), diagonal)
                    state = replace(state, theta=of_factor(lower, diagonal))
        told = state.stage > 1 and got[0].n
        state = replace(state, round=state.round + 1)
        yield Save(state, {"loss": float(state.deviance) / max(state.n, 1.0)} if told else {})
    return state


def _begun(size: int, columns: int, diagonal: bool) -> LaplaceState:
    def nothing(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    k = len(entries(size, diagonal)[0])
    every = columns + k
    return LaplaceState(
        nothing(columns), nothing(k), nothing(), nothing(every), nothing(every, every),
        nothing(columns + 1, columns + 1), nothing(),
    )  # fmt: skip


def _sums_ask(point: Tensor, basis: Tensor, diagonal: bool) -> Ask:
    p = basis.shape[1]
    lower = factor(point[p:], len(basis), diagonal)
    shared = {"beta": point[:p], "factor": lower, "basis": basis, "diagonal": diagonal}
    return Ask(laplace_sums, shared, {name: Sum() for name in _SUMS}, scratch=2 * (len(basis) + 4), work=10.0)


# -- the server's steps -----------------------------------------------------------------------------------------------
def _free(state: LaplaceState, order: tuple[int, ...]) -> Tensor:
    """Numbers of the fixed effects and, once there are random effects, of the factor's entries, that may change."""
    kept, p = independent(state.plain, order), len(state.beta)
    own = range(p, p + len(state.theta)) if state.stage > 1 else ()
    return torch.tensor([*kept, *own])


def _points(state: LaplaceState, free: Tensor, size: int, diagonal: bool) -> list[Tensor]:
    """Fixed effects and factors to try."""
    at = torch.cat([state.beta, state.theta])
    if state.stage == 1 and not state.n:
        return [at]
    if state.stage == 2:
        unit = torch.eye(size, dtype=torch.float64)
        return [torch.cat([state.beta, of_factor(s * unit, diagonal)]) for s in _STARTS]
    step, gain = _step(state, free)
    lengths = _LENGTHS if gain > _NEAR or state.failed else (1.0,)
    return [at + _SHRINK**state.failed * length * step for length in lengths]


def _beside(point: Tensor, state: LaplaceState) -> list[Tensor]:
    """Points at which the gradient tells how it changes with every entry of the factor."""
    if state.stage < 2:
        return []
    unit = torch.eye(len(point), dtype=torch.float64)
    return [point + _APART * unit[at] for at in range(len(state.beta), len(point))]


def _step(state: LaplaceState, free: Tensor) -> tuple[Tensor, float]:
    at = torch.cat([state.beta, state.theta])
    step = torch.zeros_like(at)
    step[free], gain = descent(at[free], state.slope[free], state.hessian[free][:, free])
    return step, gain


def _chosen(
    state: LaplaceState, points: list[Tensor], got: tuple[Replies, ...], free: Tensor
) -> LaplaceState:
    """Go to the best of the points that were tried, or stay if none is better; say whether this is the minimum."""
    each = len(got) // len(points)
    best = min(range(len(points)), key=lambda j: float(got[j * each]["deviance"]))
    mine, p = got[best * each : (best + 1) * each], len(state.beta)
    n, there = float(mine[0]["n"]), float(mine[0]["there"])
    found = replace(
        state, beta=points[best][:p], theta=points[best][p:], deviance=mine[0]["deviance"], slope=mine[0]["slope"],
        hessian=_hessian(mine, p), n=n, clients=there, failed=0, stage=3 if state.stage > 1 else 1,
    )  # fmt: skip
    if state.stage == 2 or not state.n:
        return found
    gain = _step(state, free)[1]
    if float(found.deviance) < float(state.deviance) or (state.n, state.clients) != (n, there):
        return _at_minimum(found) if gain < _LAST else found
    if gain < _ROUNDING or state.failed >= _TIRED:
        return _at_minimum(state)
    return replace(state, failed=state.failed + 1)


def _hessian(mine: tuple[Replies, ...], p: int) -> Tensor:
    """Second derivatives: of fixed effects from the information, of the factor from differences of gradients."""
    slope = mine[0]["slope"]
    found = torch.zeros(len(slope), len(slope), dtype=torch.float64)
    found[:p, :p] = mine[0]["information"]
    for k, one in enumerate(mine[1:]):
        found[p + k] = (one["slope"] - slope) / _APART
        found[:p, p + k] = found[p + k, :p]
    return found


def _at_minimum(state: LaplaceState) -> LaplaceState:
    """Without random effects, the beginning of the model with them; with them, the end."""
    return replace(state, without=state.deviance, stage=2) if state.stage == 1 else replace(state, stage=4)


# -- clients' own effects -----------------------------------------------------------------------------------------------
def adapt_logit_ask(model: Dense, basis: Tensor, units: Tensor, beta: Tensor, lower: Tensor) -> Ask:
    """Ask clients for the modes of their random effects: they keep them, and the model that follows.

    Parameters
    ----------
    model : Dense
        Whose parameters are kept, as `theta`; `effects` and `deviation` [R] are kept beside, in the columns' own units.
    basis, units : Tensor
        [R, D + 1] what makes columns of random effects; [R, R] what makes random effects those of the columns' own units.
    beta : Tensor
        [D + 1] fixed effects.
    lower : Tensor
        [R, R] factor of the covariance of random effects.
    """
    shared = {"model": model, "basis": basis, "units": units, "beta": beta, "factor": lower}
    fresh = fresh_effects(model, beta, len(basis))
    return Ask(adapt_logit, shared, {}, fresh=fresh, scratch=2 * (len(basis) + 4), work=10.0)


# -- on the client ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Mode:
    """Where the random effects b = L u of clients are most likely, and what rows say there."""

    x: Tensor  # [C, N, D + 1] features and intercept, 0 on padding
    z: Tensor  # [S, C, N, R]
    u: Tensor  # [S, C, R]
    log_odds: Tensor  # [S, C, N]
    p: Tensor  # [S, C, N]
    w: Tensor  # [S, C, N] p (1 - p), 0 on padding
    seen: Tensor  # [S, C, R, R] Z^T W Z
    hessian: Tensor  # [S, C, R, R] of u: L^T Z^T W Z L + I


def _mode(shared: dict[str, Any], data: Block) -> _Mode:
    """Newton's method, damped far from the mode: the function is convex."""
    x = torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1).to(torch.float64) * data.real[..., None]
    z = torch.einsum("cnd,srd->scnr", x, shared["basis"])
    fixed = torch.einsum("cnd,sd->scn", x, shared["beta"])
    lower = shared["factor"][:, None]  # [S, 1, R, R]
    y, real = data.target.to(torch.float64), data.real.to(torch.float64)
    u = torch.zeros(*z.shape[:2], z.shape[-1], dtype=torch.float64)
    unit = torch.eye(z.shape[-1], dtype=torch.float64)
    for step in range(_MODE_STEPS + 1):
        log_odds = fixed + torch.einsum("scnr,scr->scn", z, (lower @ u[..., None])[..., 0])
        p = log_odds.sigmoid()
        w = p * (1 - p) * real
        seen = torch.einsum("scnr,scn,scnq->scrq", z, w, z)
        hessian = lower.transpose(-2, -1) @ seen @ lower + unit
        slope = torch.einsum("scnr,scn->scr", z, (p - y) * real)
        gradient = (lower.transpose(-2, -1) @ slope[..., None])[..., 0] + u
        move = -torch.linalg.solve(hessian, gradient[..., None])[..., 0]
        length = (move * -gradient).sum(-1).clamp(min=0).sqrt()  # [S, C] in units of the curvature
        if step == _MODE_STEPS or not u.numel() or float(length.max()) < _AT_MODE:
            break
        u = u + move / (1 + length)[..., None]
    return _Mode(x, z, u, log_odds, p, w, seen, hessian)


@answers(deviance=Sum(), slope=Sum(), information=Sum(), n=Sum(), there=Sum())
def laplace_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A client's part of the deviance, of its gradient in fixed effects and factor, and of twice the information."""
    at, lower = _mode(shared, data), shared["factor"][:, None]
    y, real = data.target.to(torch.float64), data.real.to(torch.float64)
    loss = ((softplus(at.log_odds) - y * at.log_odds) * real).sum(-1)
    deviance = 2 * loss + at.u.square().sum(-1) + torch.linalg.slogdet(at.hessian).logabsdet
    # The mode moves with the parameters; only the determinant feels it, through w: dw = w (1 - 2 p) d(log odds).
    inverse = torch.linalg.inv(at.hessian)
    spread = lower @ inverse @ lower.transpose(-2, -1)  # [S, C, R, R]
    feels = at.w * (1 - 2 * at.p) * torch.einsum("scnr,scrq,scnq->scn", at.z, spread, at.z)
    pull, moves = (torch.einsum("scnr,scn->scr", at.z, g) for g in ((at.p - y) * real, feels))
    weighed = torch.einsum("scnr,scn,cnd->scrd", at.z, at.w, at.x)  # Z^T W X
    follows = (spread @ moves[..., None])[..., 0]
    in_beta = torch.einsum("scn,cnd->scd", 2 * (at.p - y) * real + feels, at.x)
    in_beta = in_beta - torch.einsum("scrd,scr->scd", weighed, follows)
    back = (inverse @ lower.transpose(-2, -1) @ moves[..., None])[..., 0]
    in_factor = (2 * pull + moves - (at.seen @ follows[..., None])[..., 0])[..., None] * at.u[..., None, :]
    in_factor = in_factor + 2 * at.seen @ lower @ inverse - pull[..., None] * back[..., None, :]
    rows, columns = entries(in_factor.shape[-1], shared["diagonal"])
    whole = torch.einsum("cnd,scn,cne->scde", at.x, at.w, at.x)
    information = whole - weighed.transpose(-2, -1) @ spread @ weighed
    n = data.n.to(torch.float64).expand(len(deviance), -1)
    reply = {
        "deviance": deviance, "slope": torch.cat([in_beta, in_factor[..., rows, columns]], -1),
        "information": 2 * information, "n": n, "there": (n > 0).to(torch.float64),
    }  # fmt: skip
    return reply, {}


@answers()
def adapt_logit(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the mode of a client's random effects, with conditional standard deviations, and keep them and its model."""
    at, lower = _mode(shared, data), shared["factor"][:, None]
    variance = lower @ torch.linalg.inv(at.hessian) @ lower.transpose(-2, -1)
    return {}, kept_effects(shared, (lower @ at.u[..., None])[..., 0], variance)
