# SPDX-License-Identifier: Apache-2.0
"""The mixed model of two classes: log odds X beta + Z b_i with b_i ~ N(0, A A^T), by Laplace's approximation.

For given fixed effects and root A, every client finds the mode of its random effects and answers with its part of the
deviance (Bates et al., 2015, on glmer: the random effects are integrated out by a normal approximation at the mode), of its
exact gradient, and of the information about fixed effects. Of these, sums are taken. The server takes Newton's steps in
fixed effects and root together; second derivatives that involve the root are differences of gradients, which the same
message brings. It begins with logistic regression, which is the model without random effects.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from coterie.algorithms.mixed_clients import SPREAD, fresh_effects, kept_effects, logit_spread
from coterie.algorithms.mixed_model import plain_sums_ask
from coterie.algorithms.profiled import descent, entries, independent, pivoted, placed_anew
from coterie.models import Dense
from coterie.protocol import Ask, Block, Lockstep, Replies, Save, Sum, Tensors, answers

__all__ = ["LaplaceState", "adapt_logit", "adapt_logit_ask", "laplace_sums", "mixed_logistic"]

_STARTS = (0.1, 0.4, 1.2)  # standard deviations of random effects, in log odds of a standard deviation
_LENGTHS = (1.0, 0.3)  # of Newton's step that are tried at once, far from the minimum
_NEAR = 1e-1  # what a step promises: below, Newton's own length is enough
_LAST = 1e-8  # below, the step is the last
_ROUNDING = 1e-6  # below, rounding hides what a step gains
_SLACK = 1e-11  # of the deviance: its rounding
_SHRINK = 0.05  # of the lengths, after a message in which none gained
_TIRED = 3  # such messages, and no more
_APART = 1e-4  # of roots whose gradients are compared
_MODE_STEPS, _AT_MODE = 60, 1e-11
_SUMS = ("deviance", "slope", "in_root", "information", "n", "there")


@dataclass(frozen=True)
class LaplaceState:
    """The best fixed effects and covariance so far, with their sums."""

    beta: Tensor  # [D + 1]
    root: Tensor  # [R, R] of the covariance, as `pivoted` has it
    deviance: Tensor  # []
    slope: Tensor  # [D + 1 + K] of the deviance, in fixed effects and free entries of the root
    hessian: Tensor  # [D + 1 + K, D + 1 + K]
    plain: Tensor  # [D + 2, D + 2] W^T W
    without: Tensor  # [] deviance without random effects
    spread: Tensor  # [5, R] sums about clients' own estimates: see `logit_spread`
    n: float = 0.0
    clients: float = 0.0
    failed: int = 0
    stage: int = (
        0  # 0 to begin, 1 without random effects, 2 to begin with them, 3 on the way, 4 at the minimum, 5 at the end
    )
    round: int = 0


_Point = tuple[Tensor, Tensor]  # fixed effects, and a root of the covariance


def mixed_logistic(
    state: LaplaceState | None, *, basis: Tensor, units: Tensor, order: tuple[int, ...], diagonal: bool = False,
    rounds: int = 40,
) -> Lockstep:  # fmt: skip
    """Find fixed effects and the covariance of random effects with the smallest deviance.

    Parameters
    ----------
    state : LaplaceState or None
        Where to go on from.
    basis : Tensor
        [R, D + 1] what makes the columns of random effects of features and intercept.
    units : Tensor
        [R, R] what makes random effects those of the columns' own units.
    order : tuple of int
        Features, those first that are kept where others are combinations of them.
    diagonal : bool
        Whether random effects are independent.
    rounds : int
        Messages, at most.
    """
    if state is None:
        state = _begun(len(basis), basis.shape[1], diagonal)
        yield Save(state)
    while state.round < rounds and state.stage < 5:
        state = placed_anew(state)
        if not state.stage:
            got = yield (plain_sums_ask(basis.shape[1] - 1),)
            if got[0].n:
                state = replace(state, plain=got[0]["total"], stage=1)
        elif state.stage == 4:
            got = yield (_spread_ask(state.beta, basis, units),)
            if got[0].n:
                state = replace(state, spread=torch.stack([got[0][name] for name in SPREAD]), stage=5)
        else:
            points = _points(state, order, diagonal)
            sent = [one for at in points for one in (at, *_beside(at, state, diagonal))]
            got = yield tuple(_sums_ask(one, basis) for one in sent)
            if got[0].n:
                state = _chosen(state, points, got, order, diagonal)
        told = state.n and got[0].n
        state = replace(state, round=state.round + 1)
        yield Save(state, {"loss": float(state.deviance) / state.n} if told else {})
    return state


def _begun(size: int, columns: int, diagonal: bool) -> LaplaceState:
    def nothing(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    every = columns + len(entries(size, diagonal)[0])
    return LaplaceState(
        nothing(columns), nothing(size, size), nothing(), nothing(every), nothing(every, every),
        nothing(columns + 1, columns + 1), nothing(), nothing(len(SPREAD), size),
    )  # fmt: skip


def _sums_ask(point: _Point, basis: Tensor) -> Ask:
    shared = {"beta": point[0], "root": point[1], "basis": basis}
    return Ask(laplace_sums, shared, {name: Sum() for name in _SUMS}, scratch=2 * (len(basis) + 4), work=10.0)


def _spread_ask(beta: Tensor, basis: Tensor, units: Tensor) -> Ask:
    shared = {"basis": basis, "units": units, "beta": beta}
    return Ask(logit_spread, shared, {name: Sum() for name in SPREAD}, scratch=2 * (len(basis) + 4), work=10.0)


# -- the server's steps -----------------------------------------------------------------------------------------------
def _points(state: LaplaceState, order: tuple[int, ...], diagonal: bool) -> list[_Point]:
    """Fixed effects and roots to try: some sizes to begin with, then along Newton's step."""
    if state.stage == 1 and not state.n:
        return [(state.beta, state.root)]
    if state.stage == 2:
        return [(state.beta, s * torch.eye(len(state.root), dtype=torch.float64)) for s in _STARTS]
    step, gain = _step(state, order, diagonal)
    p, free, found = len(state.beta), pivoted(state.root, diagonal)[1], []
    for length in _LENGTHS if gain > _NEAR or state.failed else (1.0,):
        move, root = _SHRINK**state.failed * length * step, state.root.clone()
        root[free] += move[p:]
        found.append((state.beta + move[:p], pivoted(root, diagonal)[0]))
    return found


def _beside(point: _Point, state: LaplaceState, diagonal: bool) -> list[_Point]:
    """Points at which the gradient tells how it changes with every free entry of the root."""
    if state.stage < 2:
        return []
    (beta, root), found = point, []
    for row, column in zip(*pivoted(root, diagonal)[1], strict=True):
        moved = root.clone()
        moved[row, column] += _APART
        found.append((beta, moved))
    return found


def _step(state: LaplaceState, order: tuple[int, ...], diagonal: bool) -> tuple[Tensor, float]:
    """Newton's step, of what may change: before there are random effects, fixed effects alone."""
    at = torch.cat([state.beta, state.root[pivoted(state.root, diagonal)[1]]])
    own = range(len(state.beta), len(at)) if state.stage > 1 else ()
    may = torch.tensor([*independent(state.plain, order), *own])
    step = torch.zeros_like(at)
    step[may], gain = descent(at[may], state.slope[may], state.hessian[may][:, may])
    return step, gain


def _chosen(
    state: LaplaceState, points: list[_Point], got: tuple[Replies, ...], order: tuple[int, ...], diagonal: bool
) -> LaplaceState:
    """Go to the best of the points that were tried, or stay if none is better; say whether this is the minimum."""
    each = len(got) // len(points)
    best = min(range(len(points)), key=lambda j: float(got[j * each]["deviance"]))
    mine, (beta, root) = got[best * each : (best + 1) * each], points[best]
    n, there, deviance = float(mine[0]["n"]), float(mine[0]["there"]), mine[0]["deviance"]
    slope, hessian = _derivatives(mine, len(beta), pivoted(root, diagonal)[1])
    found = replace(
        state, beta=beta, root=root, deviance=deviance, slope=slope, hessian=hessian, n=n, clients=there, failed=0,
        stage=max(state.stage, 1) if state.stage < 2 else 3,
    )  # fmt: skip
    if state.stage == 2 or not state.n:
        return found
    before, gain = float(state.deviance), _step(state, order, diagonal)[1]
    slack = _SLACK * (1 + abs(before)) if gain < _ROUNDING else 0.0
    if float(deviance) < before + slack or (state.n, state.clients) != (n, there):  # sums of other clients are new
        return _at_minimum(found) if gain < _LAST else found
    if gain < _ROUNDING or state.failed >= _TIRED:
        return _at_minimum(state)
    return replace(state, failed=state.failed + 1)


def _derivatives(mine: tuple[Replies, ...], p: int, free: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient, and second derivatives: of fixed effects from the information, of the root from differences of gradients."""
    slopes = [torch.cat([one["slope"], one["in_root"][free]]) for one in mine]
    found = torch.zeros(len(slopes[0]), len(slopes[0]), dtype=torch.float64)
    found[:p, :p] = mine[0]["information"]
    for k, other in enumerate(slopes[1:]):
        found[p + k] = (other - slopes[0]) / _APART
        found[:p, p + k] = found[p + k, :p]
    return slopes[0], found


def _at_minimum(state: LaplaceState) -> LaplaceState:
    """Without random effects, the beginning of the model with them; with them, the end."""
    return replace(state, without=state.deviance, stage=2) if state.stage == 1 else replace(state, stage=4)


# -- clients' own effects -----------------------------------------------------------------------------------------------
def adapt_logit_ask(model: Dense, basis: Tensor, units: Tensor, beta: Tensor, root: Tensor) -> Ask:
    """Ask clients for the modes of their random effects: they keep them, and the model that follows.

    Parameters
    ----------
    model : Dense
        Whose parameters are kept, as `theta`; `effects` and `deviation` [R] are kept beside, in the columns' own units.
    basis, units : Tensor
        [R, D + 1] what makes columns of random effects; [R, R] what makes random effects those of the columns' own units.
    beta : Tensor
        [D + 1] fixed effects.
    root : Tensor
        [R, R] A, of the covariance A A^T of random effects.
    """
    shared = {"model": model, "basis": basis, "units": units, "beta": beta, "root": root}
    fresh = fresh_effects(model, beta, len(basis))
    return Ask(adapt_logit, shared, {}, fresh=fresh, scratch=2 * (len(basis) + 4), work=10.0)


# -- on the client ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Mode:
    """Where the random effects b = A u of clients are most likely, and what rows say there."""

    x: Tensor  # [C, N, D + 1] features and intercept, 0 on padding
    z: Tensor  # [S, C, N, R]
    u: Tensor  # [S, C, R]
    log_odds: Tensor  # [S, C, N]
    p: Tensor  # [S, C, N]
    w: Tensor  # [S, C, N] p (1 - p), 0 on padding
    seen: Tensor  # [S, C, R, R] Z^T W Z
    hessian: Tensor  # [S, C, R, R] of u: A^T Z^T W Z A + I


def _mode(shared: dict[str, Any], data: Block) -> _Mode:
    """Newton's method, damped far from the mode: the function is convex."""
    x = torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1).to(torch.float64) * data.real[..., None]
    z = torch.einsum("cnd,srd->scnr", x, shared["basis"])
    fixed = torch.einsum("cnd,sd->scn", x, shared["beta"])
    root = shared["root"][:, None]  # [S, 1, R, R]
    y, real = data.target.to(torch.float64), data.real.to(torch.float64)
    u = torch.zeros(*z.shape[:2], z.shape[-1], dtype=torch.float64)
    unit = torch.eye(z.shape[-1], dtype=torch.float64)
    for step in range(_MODE_STEPS + 1):
        log_odds = fixed + torch.einsum("scnr,scr->scn", z, (root @ u[..., None])[..., 0])
        p = log_odds.sigmoid()
        w = p * (1 - p) * real
        seen = torch.einsum("scnr,scn,scnq->scrq", z, w, z)
        hessian = root.transpose(-2, -1) @ seen @ root + unit
        slope = torch.einsum("scnr,scn->scr", z, (p - y) * real)
        gradient = (root.transpose(-2, -1) @ slope[..., None])[..., 0] + u
        move = -torch.linalg.solve(hessian, gradient[..., None])[..., 0]
        length = (move * -gradient).sum(-1).clamp(min=0).sqrt()  # [S, C] in units of the curvature
        if step == _MODE_STEPS or not u.numel() or float(length.max()) < _AT_MODE:
            break
        u = u + move / (1 + length)[..., None]
    return _Mode(x, z, u, log_odds, p, w, seen, hessian)


@answers(deviance=Sum(), slope=Sum(), in_root=Sum(), information=Sum(), n=Sum(), there=Sum())
def laplace_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A client's part of the deviance, of its gradient in fixed effects and root, and of twice the information."""
    at, root = _mode(shared, data), shared["root"][:, None]
    y, real = data.target.to(torch.float64), data.real.to(torch.float64)
    loss = ((softplus(at.log_odds) - y * at.log_odds) * real).sum(-1)
    deviance = 2 * loss + at.u.square().sum(-1) + torch.linalg.slogdet(at.hessian).logabsdet
    # The mode moves with the parameters; only the determinant feels it, through w: dw = w (1 - 2 p) d(log odds).
    inverse = torch.linalg.inv(at.hessian)
    spread = root @ inverse @ root.transpose(-2, -1)  # [S, C, R, R]
    feels = at.w * (1 - 2 * at.p) * torch.einsum("scnr,scrq,scnq->scn", at.z, spread, at.z)
    pull, moves = (torch.einsum("scnr,scn->scr", at.z, g) for g in ((at.p - y) * real, feels))
    weighed = torch.einsum("scnr,scn,cnd->scrd", at.z, at.w, at.x)  # Z^T W X
    follows = (spread @ moves[..., None])[..., 0]
    in_beta = torch.einsum("scn,cnd->scd", 2 * (at.p - y) * real + feels, at.x)
    in_beta = in_beta - torch.einsum("scrd,scr->scd", weighed, follows)
    back = (inverse @ root.transpose(-2, -1) @ moves[..., None])[..., 0]
    in_root = (2 * pull + moves - (at.seen @ follows[..., None])[..., 0])[..., None] * at.u[..., None, :]
    in_root = in_root + 2 * at.seen @ root @ inverse - pull[..., None] * back[..., None, :]
    whole = torch.einsum("cnd,scn,cne->scde", at.x, at.w, at.x)
    information = whole - weighed.transpose(-2, -1) @ spread @ weighed
    n = data.n.to(torch.float64).expand(len(deviance), -1)
    reply = {
        "deviance": deviance, "slope": in_beta, "in_root": in_root, "information": 2 * information, "n": n,
        "there": (n > 0).to(torch.float64),
    }  # fmt: skip
    return reply, {}


@answers()
def adapt_logit(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the mode of a client's random effects, with conditional standard deviations, and keep them and its model."""
    at, root = _mode(shared, data), shared["root"][:, None]
    variance = root @ torch.linalg.inv(at.hessian) @ root.transpose(-2, -1)
    return {}, kept_effects(shared, (root @ at.u[..., None])[..., 0], variance)
