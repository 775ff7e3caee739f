# SPDX-License-Identifier: Apache-2.0
"""The linear mixed model by maximum likelihood or restricted maximum likelihood, exactly, from sums over clients.

Client i has y = X beta + Z b_i + e with e ~ N(0, s^2 I) and b_i ~ N(0, s^2 Psi); Z are some of the columns of X. The server
sends factors of Psi; clients answer with their parts of X^T V^-1 X, X^T V^-1 y, y^T V^-1 y and log |V|, and of the
derivatives, of which the sums are taken. So the deviance is that of all rows together, as lme4 has it (Bates et al., 2015),
and is minimised by Newton's method: `profiled.py`. A message tries several factors.

Columns of W are the features, the intercept and the target; `basis` [R, D + 1] makes Z of features and intercept.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.mixed_clients import SPREAD, client_spread, products, projected
from coterie.algorithms.profiled import (
    Profile,
    Sums,
    derivatives,
    descent,
    entries,
    factor,
    independent,
    lowered,
    of_factor,
    pivoted,
    placed_anew,
    profile,
)
from coterie.protocol import Ask, Block, Lockstep, Replies, Save, Sum, Tensors, answers, from_sums

__all__ = ["State", "mixed_model", "mixed_sums", "plain_sums_ask"]

_STARTS = (0.1, 0.4, 1.5, 6.0)  # standard deviations of random effects over that of the noise
_LENGTHS = (1.0, 0.25, 4.0)  # of Newton's step that are tried at once, far from the minimum
_NEAR = 1e-2  # what a step promises: below, Newton's own length is enough
_LAST = 1e-11  # below, the step is the last
_ROUNDING = 1e-6  # below, rounding hides what a step gains
_SLACK = 1e-11  # of the deviance: its rounding
_SHRINK = 0.02  # of the lengths, after a message in which none gained
_TIRED = 3  # such messages, and no more
_SUMS = ("total", "logdet", "inner", "outer", "information", "curvature")


@dataclass(frozen=True)
class State:
    """The best factor so far, with its sums."""

    theta: Tensor  # [K] free entries of the factor of Psi
    total: Tensor  # [D + 2, D + 2]
    logdet: Tensor  # []
    inner: Tensor  # [R, R]
    outer: Tensor  # [K, D + 2, D + 2]
    information: Tensor  # [K, K]
    curvature: Tensor  # [K, K]
    plain: Tensor  # [D + 2, D + 2] W^T W
    spread: Tensor  # [5, R] sums about clients' own estimates: see `client_spread`
    n: float = 0.0  # rows
    clients: float = 0.0  # with rows
    expected: bool = True  # whether `curvature` is not known yet
    failed: int = 0  # messages in a row without a better factor
    stage: int = 0  # 0 to begin, 1 on the way, 2 at the minimum, 3 when all is known
    round: int = 0

    @property
    def sums(self) -> Sums:
        """At the best factor."""
        return Sums(*(getattr(self, name) for name in _SUMS))

    def kept(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Columns that have fixed effects."""
        return independent(self.plain, order)


def mixed_model(
    state: State | None, *, basis: Tensor, units: Tensor, order: tuple[int, ...], reml: bool = True,
    diagonal: bool = False, rounds: int = 60,
) -> Lockstep:  # fmt: skip
    """Find the covariance of random effects with the smallest deviance.

    Parameters
    ----------
    state : State or None
        Where to go on from.
    basis : Tensor
        [R, D + 1] what makes the columns of random effects of features and intercept.
    units : Tensor
        [R, R] what makes random effects those of the columns' own units.
    order : tuple of int
        Features, those first that are kept where others are combinations of them.
    reml : bool
        Whether the likelihood is restricted.
    diagonal : bool
        Whether random effects are independent.
    rounds : int
        Messages, at most.
    """
    size, wide = basis.shape[0], basis.shape[1] + 1
    if state is None:
        state = _begun(size, wide, diagonal)
        yield Save(state)
    while state.round < rounds and state.stage < 3:
        state = placed_anew(state)
        now, thetas = _profiled(state, order, reml), _candidates(state, order, reml, diagonal)
        if state.stage == 2:
            assert now is not None
            noise = torch.tensor(now.squares / now.freedom, dtype=torch.float64)
            shared = {"basis": basis, "units": units, "beta": now.beta, "noise": noise}
            got = yield (Ask(client_spread, shared, {name: Sum() for name in SPREAD}),)
            if got[0].n:
                state = replace(state, spread=torch.stack([got[0][name] for name in SPREAD]), stage=3)
        else:
            weight = torch.zeros(wide, wide, dtype=torch.float64) if now is None else now.weight(reml)
            got = yield tuple(_sums_ask(theta, basis, weight, diagonal) for theta in thetas)
            if got[0].n:
                state = _chosen(state, thetas, got, order, reml, diagonal)
        state = replace(state, round=state.round + 1)
        best = _profiled(state, order, reml)
        yield Save(state, {"loss": best.deviance / state.n} if best is not None and got[0].n else {})
    return state


def plain_sums_ask(n_features: int) -> Ask:
    """Ask for the sums without random effects: products of features, intercept and target, as `total`."""
    nothing = torch.zeros(1, dtype=torch.float64)
    basis, weight = torch.zeros(1, n_features + 1), torch.zeros(n_features + 2, n_features + 2)
    return _sums_ask(nothing, basis.double(), weight.double(), True)


def _begun(size: int, wide: int, diagonal: bool) -> State:
    def nothing(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    k = len(entries(size, diagonal)[0])
    return State(
        nothing(k), nothing(wide, wide), nothing(), nothing(size, size), nothing(k, wide, wide), nothing(k, k),
        nothing(k, k), nothing(wide, wide), nothing(len(SPREAD), size),
    )  # fmt: skip


def _sums_ask(theta: Tensor, basis: Tensor, weight: Tensor, diagonal: bool) -> Ask:
    lower = factor(theta, len(basis), diagonal)
    shared = {"basis": basis, "covariance": lower @ lower.T, "weight": weight, "diagonal": diagonal}
    fold = {name: Sum() for name in (*_SUMS, "n", "there")}
    return Ask(mixed_sums, shared, fold, scratch=(len(theta) + 1) * len(weight))


def _profiled(state: State, order: tuple[int, ...], reml: bool) -> Profile | None:
    if not state.stage:
        return None
    return profile(state.total, float(state.logdet), state.n, state.kept(order), reml)


# -- the server's steps -----------------------------------------------------------------------------------------------
def _candidates(state: State, order: tuple[int, ...], reml: bool, diagonal: bool) -> list[Tensor]:
    """Factors to try: none at all and some sizes to begin with, then along Newton's step."""
    size = len(state.inner)
    if not state.stage:
        return [of_factor(s * torch.eye(size, dtype=torch.float64), diagonal) for s in (0.0, *_STARTS)]
    if state.stage > 1:
        return []
    root, free, step, gain = _step(state, order, reml, diagonal)
    lengths = _LENGTHS if gain > _NEAR or state.failed else (1.0,)
    found = []
    for length in lengths:
        moved = root.clone()
        moved[free] += _SHRINK**state.failed * length * step
        found.append(of_factor(moved if diagonal else lowered(moved), diagonal))
    return found


def _step(
    state: State, order: tuple[int, ...], reml: bool, diagonal: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, float]:
    """A root of Psi, its free entries, Newton's step for these, and what it promises."""
    now = _profiled(state, order, reml)
    assert now is not None
    root, free = pivoted(factor(state.theta, len(state.inner), diagonal), diagonal)
    slopes = derivatives(root, free, state.sums, now, reml=reml, diagonal=diagonal, expected=state.expected)
    return root, free, *descent(root[free], *slopes)


def _chosen(
    state: State, thetas: list[Tensor], got: tuple[Replies, ...], order: tuple[int, ...], reml: bool, diagonal: bool
) -> State:
    """Go to the best of the factors that were tried, or stay if none is better; say whether this is the minimum."""
    n, there = float(got[0]["n"]), float(got[0]["there"])
    first = not state.stage
    if first:
        state = replace(state, plain=got[0]["total"])
    kept = state.kept(order)
    deviances = [profile(one["total"], float(one["logdet"]), n, kept, reml).deviance for one in got]
    best = min(range(first, len(got)), key=deviances.__getitem__)
    found = replace(
        state, theta=thetas[best], **{name: got[best][name] for name in _SUMS}, n=n, clients=there, failed=0, stage=1,
        expected=first,
    )  # fmt: skip
    if first:
        return found
    before = profile(state.total, float(state.logdet), state.n, kept, reml).deviance
    gain = _step(state, order, reml, diagonal)[-1]
    slack = _SLACK * (1 + abs(before)) if gain < _ROUNDING else 0.0
    if deviances[best] < before + slack or (state.n, state.clients) != (n, there):  # sums of other clients are new
        return replace(found, stage=2) if gain < _LAST else found
    if gain < _ROUNDING or state.failed >= _TIRED:
        return replace(state, stage=2)
    return replace(state, failed=state.failed + 1)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    total=Sum(), logdet=Sum(), inner=Sum(), outer=Sum(), information=Sum(), curvature=Sum(), n=Sum(), there=Sum()
)  # fmt: skip
@from_sums
def mixed_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """A client's part of the deviance and its derivatives, at one factor: see `Sums`."""
    sums = products(data)
    inside, zw, zz = projected(shared, sums)
    b, c = torch.linalg.solve(inside, zw), torch.linalg.solve(inside, zz)  # Z^T V^-1 W, Z^T V^-1 Z
    total = sums - zw.transpose(-2, -1) @ shared["covariance"][:, None] @ b
    rows, columns = entries(zz.shape[-1], shared["diagonal"])
    half = b[..., rows, :, None] * b[..., columns, None, :]  # [S, C, K, Q, Q]
    outer = torch.where((rows == columns)[:, None, None], half, half + half.transpose(-2, -1))
    seen = b @ shared["weight"][:, None] @ b.transpose(-2, -1)  # [S, C, R, R]
    n = data.n.to(torch.float64).expand(len(b), -1)
    reply = {
        "total": total, "logdet": torch.linalg.slogdet(inside).logabsdet, "inner": c, "outer": outer,
        "information": _pairs(c, c, rows, columns), "curvature": _pairs(c, seen, rows, columns), "n": n,
        "there": (n > 0).to(torch.float64),
    }  # fmt: skip
    return reply, {}


def _pairs(c: Tensor, d: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Trace of E_k C E_l D for all k and l, where E_k has ones at an entry of Psi and its mirror image.  -> [S, C, K, K]"""
    found = torch.zeros(*c.shape[:2], len(rows), len(rows), dtype=c.dtype)
    one = torch.where(rows == columns, 0.5, 1.0).to(c.dtype)  # an entry that is its own mirror image counts once
    for (a, b), (e, f) in itertools.product(((rows, columns), (columns, rows)), repeat=2):
        found += c[..., b[:, None], e] * d[..., f[:, None], a].transpose(-2, -1)  # e_a e_b^T C e_e e_f^T D
    return found * one[:, None] * one
