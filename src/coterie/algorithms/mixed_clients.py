# SPDX-License-Identifier: Apache-2.0
"""What clients make of a mixed model: their random effects, which they keep, and how their own estimates differ.

Columns of W are the features, the intercept and the target; `basis` [R, D + 1] makes the columns Z of random effects of
features and intercept, and `units` [R, R] makes effects those of the data's own units.
"""

from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.random_effects import as_dense
from coterie.models import Dense
from coterie.protocol import Ask, Block, Sum, Tensors, answers, from_sums

__all__ = [
    "SPREAD", "adapt_mixed", "adapt_mixed_ask", "client_spread", "fresh_effects", "kept_effects", "logit_spread",
    "products", "projected",
]  # fmt: skip

SPREAD = ("count", "precision", "squared", "first", "second")  # of clients' own estimates
_RANK = 1e-9  # of the largest eigenvalue: below, a client's rows do not tell all of its effects
_OWN_STEPS, _AT_OWN = 200, 1e-10
_FLAT = 1e-8  # of the information at the common estimate: where less is left, a client's own estimate is infinite


def adapt_mixed_ask(model: Dense, basis: Tensor, units: Tensor, beta: Tensor, covariance: Tensor, noise: Tensor) -> Ask:
    """Ask clients to predict their random effects, and to keep them with the model that follows.

    Parameters
    ----------
    model : Dense
        Whose parameters are kept, as `theta`; `effects` and `deviation` [R] are kept beside, in the columns' own units.
    basis, units : Tensor
        [R, D + 1], [R, R] as in `mixed_model`.
    beta : Tensor
        [D + 1] fixed effects.
    covariance : Tensor
        [R, R] of random effects over that of the noise.
    noise : Tensor
        [] variance.
    """
    shared = {
        "model": model, "basis": basis, "units": units, "beta": beta, "covariance": covariance, "noise": noise,
    }  # fmt: skip
    return Ask(adapt_mixed, shared, {}, fresh=fresh_effects(model, beta, len(basis)), scratch=len(beta))


def fresh_effects(model: Dense, beta: Tensor, size: int) -> Tensors:
    """What a client keeps that has shown nothing."""
    nothing = torch.zeros(size, dtype=torch.float64)
    return {"theta": as_dense(model, beta), "effects": nothing, "deviation": nothing.clone()}


# -- on the client ----------------------------------------------------------------------------------------------------
def products(data: Block) -> Tensor:
    """W^T W: sums of products of features, intercept and target.  [C, Q, Q]"""

    def made() -> Tensor:
        w = torch.cat([data.x, torch.ones_like(data.x[..., :1]), data.target[..., None].to(data.x.dtype)], -1)
        w = (w * data.real[..., None]).to(torch.float64)
        return torch.bmm(w.transpose(1, 2), w)

    return data.once("products of features, intercept and target", made)


def projected(shared: dict[str, Any], sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What random effects make of the products.  -> I + Z^T Z Psi, Z^T W, Z^T Z  [S, C, R, R], [S, C, R, Q], [S, C, R, R]"""
    basis = shared["basis"]  # [S, R, D + 1]
    zw = torch.einsum("srd,cdq->scrq", basis, sums[:, :-1])
    zz = torch.einsum("scrd,sqd->scrq", zw[..., :-1], basis)
    unit = torch.eye(basis.shape[1], dtype=torch.float64)
    return unit + zz @ shared["covariance"][:, None], zw, zz


@answers(count=Sum(), precision=Sum(), squared=Sum(), first=Sum(), second=Sum())
@from_sums
def client_spread(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How a client's own estimate of each effect, from its rows alone, differs from the common one, by its precision w.

    Own estimates are least squares on the columns that have random effects, with the other coefficients as they are for
    all. Sums: 1, w, w^2, w d, w d^2 for the difference d; 0 where the rows do not tell all effects.
    """
    basis, units = shared["basis"], shared["units"]
    zero = torch.zeros(len(basis), basis.shape[1], basis.shape[1], dtype=torch.float64)
    _, zw, zz = projected({**shared, "covariance": zero}, products(data))
    left = zw[..., -1] - torch.einsum("scrd,sd->scr", zw[..., :-1], shared["beta"])
    values = torch.linalg.eigvalsh(zz)
    clear = values[..., 0] > _RANK * values[..., -1].clamp(min=torch.finfo(torch.float64).tiny)  # [S, C]
    unit = torch.eye(zz.shape[-1], dtype=torch.float64)
    inverse = torch.linalg.inv(torch.where(clear[..., None, None], zz, unit))
    b, noise = torch.einsum("scqp,scp->scq", inverse, left), shared["noise"][:, None, None, None]
    return _spread_sums(units, b, inverse * noise, clear), {}


@answers(count=Sum(), precision=Sum(), squared=Sum(), first=Sum(), second=Sum())
def logit_spread(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The same of two classes: own estimates are logistic regressions, 0 also where they are infinite.

    They are where the columns, or the intercept alone, tell the classes of a client's rows apart (separation): along such a
    direction the likelihood rises for ever, and the information about it goes to nothing.
    """
    x = torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1).to(torch.float64) * data.real[..., None]
    z = torch.einsum("cnd,srd->scnr", x, shared["basis"])
    fixed = torch.einsum("cnd,sd->scn", x, shared["beta"])
    y, real = data.target.to(torch.float64), data.real.to(torch.float64)
    p = fixed.sigmoid()
    common = torch.einsum("scnr,scn,scnq->scrq", z, p * (1 - p) * real, z)
    values, unit = torch.linalg.eigvalsh(common), torch.eye(z.shape[-1], dtype=torch.float64)
    clear = values[..., 0] > _RANK * values[..., -1].clamp(min=torch.finfo(torch.float64).tiny)
    lower = torch.linalg.cholesky(torch.where(clear[..., None, None], common, unit))
    z = torch.linalg.solve_triangular(lower.transpose(-2, -1), z, upper=True, left=False)  # there is 1 of information
    v, inverse, clear = _own_log_odds(z, fixed, y, real, clear)
    back = torch.linalg.inv(lower)
    b = torch.einsum("scqr,scq->scr", back, v)
    return _spread_sums(shared["units"], b, back.transpose(-2, -1) @ inverse @ back, clear), {}


def _own_log_odds(z: Tensor, fixed: Tensor, y: Tensor, real: Tensor, clear: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method, with steps as long as the change of log odds allows (Sun and Tran-Dinh, 2019, for logistic losses).

    -> what is added to the common estimate [S, C, R], its covariance [S, C, R, R], and who has a finite one [S, C]
    """
    v, unit = z.new_zeros(*z.shape[:2], z.shape[-1]), torch.eye(z.shape[-1], dtype=z.dtype)
    for step in range(_OWN_STEPS + 1):
        p = (fixed + torch.einsum("scnr,scr->scn", z, v)).sigmoid()
        seen = torch.einsum("scnr,scn,scnq->scrq", z, p * (1 - p) * real, z)
        clear = clear & (torch.linalg.eigvalsh(seen)[..., 0] > _FLAT)
        inverse = torch.linalg.inv(torch.where(clear[..., None, None], seen, unit))
        slope = torch.einsum("scnr,scn->scr", z, (y - p) * real) * clear[..., None]
        move = (inverse @ slope[..., None])[..., 0]
        far = (move * slope).sum(-1).clamp(min=0).sqrt()  # [S, C] in standard errors
        if step == _OWN_STEPS or not v.numel() or float(far.max()) < _AT_OWN:
            break
        reach = torch.einsum("scnr,scr->scn", z, move).abs().amax(-1).clamp(min=torch.finfo(z.dtype).tiny)
        v = v + move * (reach.log1p() / reach)[..., None]
    return v, inverse, clear & (far < _AT_OWN)


def _spread_sums(units: Tensor, b: Tensor, covariance: Tensor, clear: Tensor) -> Tensors:
    """1, w, w^2, w d, w d^2 of own estimates in the data's own units.  [S, C, R], [S, C, R, R], [S, C] -> [S, C, R] each"""
    d = torch.einsum("srq,scq->scr", units, b)
    w = clear[..., None] / torch.einsum("srq,scqp,srp->scr", units, covariance, units)
    count = clear[..., None].to(torch.float64).expand_as(w)
    return dict(zip(SPREAD, (count, w, w * w, w * d, w * d * d), strict=True))


@answers()
@from_sums
def adapt_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Predict a client's random effects (BLUP), with conditional standard deviations, and keep them and its model."""
    covariance = shared["covariance"][:, None]
    inside, zw, zz = projected(shared, products(data))
    left = zw[..., -1] - torch.einsum("scrd,sd->scr", zw[..., :-1], shared["beta"])  # Z^T (y - X beta)
    b = (covariance @ torch.linalg.solve(inside, left[..., None]))[..., 0]
    known = covariance - covariance @ torch.linalg.solve(inside, zz) @ covariance
    return {}, kept_effects(shared, b, known * shared["noise"][:, None, None, None])


def kept_effects(shared: dict[str, Any], b: Tensor, variance: Tensor) -> Tensors:
    """What a client keeps of its random effects.  [S, C, R], [S, C, R, R]"""
    units = shared["units"]
    own = shared["beta"][:, None] + torch.einsum("scr,srd->scd", b, shared["basis"])
    deviation = torch.einsum("srq,scqp,srp->scr", units, variance, units).clamp(min=0).sqrt()
    effects = torch.einsum("srq,scq->scr", units, b)
    return {"theta": as_dense(shared["model"], own), "effects": effects, "deviation": deviation}
