# SPDX-License-Identifier: Apache-2.0
"""Whom anchors' models are sent to, and what of them: fresh clients (Phase 1, line 7), perturbed copies (Remark 2).

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022. The server asks who is there
before it sends either; the participation policy decides that, as for any question.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.protocol import Ask, Block, Replies, Save, Stack, Tensors, answers

__all__ = ["There", "answer_to", "fresh", "perturbed", "residuals", "who_is_there"]

Run = Generator[Ask | Save, Replies | None, Any]


@dataclass(frozen=True)
class There:
    """Clients that answer."""

    ids: Tensor  # [C] their numbers
    lots: Tensor  # [C] a number made of each client's name


def who_is_there() -> Run:
    """Ask whom the policy chooses.  -> There, or None if nobody answered"""
    got = yield Ask(answer_to, {}, {"lot": Stack()})
    return None if got is None or got.n == 0 else There(got.ids, got["lot"])


def fresh(there: There, anchors: Tensor, seed: int, t: int, parts: int) -> There | None:
    """Line 7: S_t, one of several disjoint parts of those who are no anchors; when all were taken, parts are drawn again."""
    cycle, part = divmod(t, parts)
    u = keys.uniform(keys.key(seed, cycle, "fresh clients", there.lots), 1)[:, 0]
    chosen = ((u * parts).long() == part) & ~torch.isin(there.ids, anchors)
    return There(there.ids[chosen], there.lots[chosen]) if bool(chosen.any()) else None


def perturbed(points: Tensor, lots: Tensor, noise: float, secret: str, *about: int | str, copies: int = 2) -> Tensor:
    """Copies of every point [A, P] for every client, with noise of their own.  [C, copies, A, P]

    The noise depends on the client's lot, on what it is about, and on a secret of the server: clients know the run's seed,
    and could subtract what follows from it. The same secret gives the same copies: averaging over others would undo it.
    """
    size = copies * points.numel()
    u = keys.hidden_uniform(secret, *about, lots=lots, n=2 * size).view(len(lots), 2, size)
    normal = (-2 * (1 - u[:, 0]).log()).sqrt() * (2 * math.pi * u[:, 1]).cos()  # Box and Muller
    return points + noise * normal.view(len(lots), copies, *points.shape).to(points.dtype)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(lot=Stack())
def answer_to(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say that the client is there, and its lot."""
    return {"lot": keys.key("lot", data.keys)[None]}, {}


def residuals(x: Tensor, data: Block, theta: Tensor) -> Tensor:
    """y - <x, theta> under common models [S, A, P], or every client's own [S, C, A, P]; zero on padding.  [C, N, S, A]"""
    if theta.dim() == 3:
        fitted = (x.flatten(0, 1) @ theta.flatten(0, 1).T).view(*x.shape[:2], *theta.shape[:2])
    else:
        fitted = torch.einsum("cnp,scap->cnsa", x, theta)
    return (data.target[..., None, None] - fitted).mul_(data.real[..., None, None])
