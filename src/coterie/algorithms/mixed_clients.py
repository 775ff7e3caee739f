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
    "adapt_mixed", "adapt_mixed_ask", "client_spread", "fresh_effects", "kept_effects", "products", "projected",
]  # fmt: skip

_RANK = 1e-9  # of the largest eigenvalue: below, a client's rows do not tell all of its effects


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
    d = torch.einsum("srq,scqp,scp->scr", units, inverse, left)
    variance = torch.einsum("srq,scqp,srp->scr", units, inverse, units) * shared["noise"][:, None, None]
    w = clear[..., None] / variance
    count = clear[..., None].to(torch.float64).expand_as(w)
    return {"count": count, "precision": w, "squared": w * w, "first": w * d, "second": w * d * d}, {}


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
