# SPDX-License-Identifier: Apache-2.0
"""Moments of residuals on a client: its share of the subspaces of moment descent, and an anchor's step within one.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, Phase 1, lines 9 and 11 to 15.
With e = (y - <x, theta>) x, estimates of E[e] E[e]^T from a client's rows: `pairs` takes all pairs of them, `halves` two
means, `two` the first two rows, as the paper's text.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.copies import residuals
from coterie.local.parts import part_of
from coterie.local.row_space import features
from coterie.protocol import Block, RowProduct, Stack, Sum, Tensors, answers

__all__ = ["Estimator", "descend", "multiply_moments"]

Estimator = Literal["pairs", "halves", "two"]


@answers(product=Sum(), weight=Sum())
def multiply_moments(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Any, Tensors]:
    """A client's share of Y Q: its estimate of E[e] E[e]^T at every point, times Q, weighted by its rows.

    With e_j = r_j x_j for residuals r, the product is x^T g where g_j = r_j sum_l w_jl r_l (x_l^T Q): nothing larger than
    N x K is formed for a point.
    """
    q = shared["q"]  # [S, A, P, L]
    x = features(shared["model"], data)  # [C, N, P]
    runs, points, size, columns = q.shape
    z = (x.flatten(0, 1) @ q.permute(2, 0, 1, 3).reshape(size, -1)).view(*x.shape[:2], runs, points, columns)
    if "copies" in each:
        left, right = (residuals(x, data, each["copies"][:, :, i]) for i in (0, 1))
    else:
        left = right = residuals(x, data, shared["theta"])  # [C, N, S, A]
    if shared["transposed"]:
        left, right = right, left
    z.mul_(right[..., None])  # r_l x_l^T Q
    g, weight = _paired(z, shared["estimator"], shared["transposed"], data)
    g.mul_(left[..., None])
    reply = {
        "product": RowProduct(x, g.permute(2, 0, 1, 3, 4).flatten(3)),  # [S, C, N, A L]
        "weight": weight.to(torch.float64)[None],
    }
    return reply, {}


def _paired(z: Tensor, estimator: Estimator, transposed: bool, data: Block) -> tuple[Tensor, Tensor]:
    """What every row is multiplied with: n sum_l w_jl z_l, and the client's weight n.  z [C, N, ...] -> [C, N, ...], [C]"""
    n = data.n.to(z.dtype)
    enough = (data.n > 1).to(z.dtype)
    lead = (-1, 1) + (1,) * (z.dim() - 2)
    if estimator == "pairs":  # w_jl = 1 / n(n-1) off the diagonal
        return (z.sum(1, keepdim=True) - z).mul_((enough / (n - 1).clamp(min=1)).view(lead)), n * enough
    first, second = _parts(estimator, data)
    if transposed:
        first, second = second, first
    other = torch.einsum("cn,cn...->c...", second.to(z.dtype), z)[:, None]
    pairs = (first.sum(1) * second.sum(1)).clamp(min=1).to(z.dtype)
    weight = enough if estimator == "two" else n * enough
    rows = (first.to(z.dtype) * (weight / pairs)[:, None]).view(*first.shape, *lead[2:])
    return rows * other, weight


def _parts(estimator: Estimator, data: Block) -> tuple[Tensor, Tensor]:
    """The rows that are paired with each other: first and second half, or first and second row.  [C, N] each"""
    row = torch.arange(data.x.shape[1])
    size = torch.ones_like(data.n) if estimator == "two" else data.n // 2
    first = row < size[:, None]
    second = (row >= size[:, None]) & (row < (2 if estimator == "two" else data.n[:, None]))
    return first & data.real, second & data.real


@answers(theta=Stack(), moved=Stack())
def descend(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Steps 11 to 15 on an anchor: the leading direction of its own e in the subspace, and a step along it."""
    if not shared["resample"]:
        return _descended(shared, each, data), {}
    made = []
    for s in range(len(shared["part"])):  # each run takes a part of its own: D_i,t of eq. (2)
        run = {name: value[s : s + 1] if isinstance(value, Tensor) else value for name, value in shared.items()}
        rows = part_of(data, shared["shuffle"][s], int(shared["part"][s]), shared["resample"])
        made.append(_descended(run, {name: value[s : s + 1] for name, value in each.items()}, rows))
    return {name: torch.cat([run[name] for run in made]) for name in made[0]}, {}


def _descended(shared: dict[str, Any], each: Tensors, data: Block) -> Tensors:
    x = features(shared["model"], data)
    theta, basis = each["theta"], each["basis"]  # [S, C, P], [S, C, P, K]
    r = (data.target - torch.einsum("cnp,scp->scn", x, theta)) * data.real
    e = r[..., None] * torch.einsum("cnp,scpk->scnk", x, basis)  # [S, C, N, K]
    b, s = _leading(_second_moment(e, shared["estimator"], data))
    towards = torch.einsum("scnk,sck->sc", e, b)
    b = torch.where((towards < 0)[..., None], -b, b)  # the sign of <b, mean e>
    direction = torch.einsum("scpk,sck->scp", basis, b)
    length = s * shared["step_size"][:, None]
    if shared["curvature"]:
        along = torch.einsum("cnp,scp->scn", x, direction).square_()
        length = length / torch.einsum("scn,cn->sc", along, data.weights).clamp(min=1e-12)
    moved = torch.where((s > shared["least"][:, None]) & (data.n > 1), length, 0.0)
    return {"theta": theta + moved[..., None] * direction, "moved": moved}


def _second_moment(e: Tensor, estimator: Estimator, data: Block) -> Tensor:
    """The estimate of E[e] E[e]^T in K dimensions, made symmetric.  e [S, C, N, K] -> [S, C, K, K]"""
    n = data.n.to(e.dtype)[:, None, None]
    if estimator == "pairs":
        total = e.sum(2)
        return (total[..., None] * total[..., None, :] - e.transpose(2, 3) @ e) / (n * (n - 1)).clamp(min=1)
    if estimator == "two":  # eq. (2): rows 1 and 2, 3 and 4, ...
        half = e.shape[2] // 2
        real = data.real[:, 1 : 2 * half : 2, None].to(e.dtype)
        a = (e[:, :, 0 : 2 * half : 2] * real).transpose(2, 3) @ e[:, :, 1 : 2 * half : 2]
        a = a / (data.n // 2).clamp(min=1).to(e.dtype)[:, None, None]
    else:
        one, two = (
            torch.einsum("scnk,cn->sck", e, part.to(e.dtype) / part.sum(1, keepdim=True).clamp(min=1))
            for part in _parts(estimator, data)
        )
        a = one[..., None] * two[..., None, :]
    return (a + a.transpose(2, 3)) / 2


_SQUARINGS = 12  # M, M^2, M^4, ...: as many as 4,096 steps of power iteration


def _leading(a: Tensor) -> tuple[Tensor, Tensor]:
    """Power iteration for the largest eigenvalue of a symmetric estimate of m m^T.  [..., K, K] -> [..., K], s [...]

    The estimate may have negative eigenvalues, which are noise: it is shifted so that the largest one also has the largest
    absolute value.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    size = torch.linalg.matrix_norm(a)[..., None, None].clamp(min=1e-300)
    power = a / size + eye  # eigenvalues within [0, 2]
    for _ in range(_SQUARINGS):
        power = power @ power
        power = power / torch.linalg.matrix_norm(power)[..., None, None].clamp(min=1e-300)
    column = power.norm(dim=-2).argmax(-1)
    b = torch.take_along_dim(power, column[..., None, None], -1).squeeze(-1)
    b = b / b.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    value = torch.einsum("...k,...kl,...l->...", b, a, b)
    return b, value.clamp(min=0).sqrt()
