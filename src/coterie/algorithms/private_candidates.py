# SPDX-License-Identifier: Apache-2.0
"""How well linear models of several structures serve clients, differentially private: means of paired differences.

Every client makes its own model of each candidate from some of its rows, and is judged on others. Losses are compared with
those of the first candidate, one model for all; a client's differences are bounded together, and of them and their products
the sums have noise. So the error of each mean, and of each difference between two, is known: that of clients and of noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.local import client_losses, own_outputs
from coterie.models import Dense
from coterie.protocol import Ask, Block, Noise, Replies, Sum, Tensors, answers

__all__ = ["Candidates", "Judged", "fit_candidates", "judge_candidates", "judging_ask", "learning_ask", "simplest"]

BOUND = 1.5  # of all differences of a client, in units of the target's variance
_CAP = 2.0  # of its loss under one model for all
_FLOOR = 1e-6


@dataclass(frozen=True)
class Candidates:
    """Models of several structures: first those that clients choose among, then those that they draw to.

    Attributes
    ----------
    centres : Tensor
        [sum of sizes, P]
    sizes : tuple of int
        How many of them belong to each of the first candidates.
    mean, root : Tensor
        [Q, P], [Q, P, P] the clients' models of the others are drawn from N(mean, root root^T).
    noise : float
        Variance of rows.
    """

    centres: Tensor
    sizes: tuple[int, ...]
    mean: Tensor
    root: Tensor
    noise: float

    @property
    def n(self) -> int:
        """Of all candidates."""
        return len(self.sizes) + len(self.mean)


@dataclass(frozen=True)
class Judged:
    """What clients said.

    Attributes
    ----------
    first : float
        Mean loss of the first candidate.
    mean : Tensor
        [J] how much more each candidate loses, of the first 0.
    second : Tensor
        [J, J] mean products of these differences.
    deviation : float
        Standard deviation of the noise in each mean.
    n : int
        Clients.
    """

    first: float
    mean: Tensor
    second: Tensor
    deviation: float
    n: int

    def error(self, a: int, b: int) -> float:
        """Standard error of the difference between two: of clients drawn again, and of noise."""
        square = self.second[a, a] + self.second[b, b] - 2 * self.second[a, b] - (self.mean[a] - self.mean[b]) ** 2
        noisy = sum(one > 0 for one in (a, b)) * self.deviation**2
        return math.sqrt(max(float(square), 0.0) / self.n + noisy)


def learning_ask(model: Dense, found: Candidates) -> Ask:
    """Let every client make its model of each candidate, and keep them."""
    shared = {
        "model": model, "centres": found.centres, "sizes": found.sizes, "mean": found.mean, "root": found.root,
        "noise": torch.tensor(found.noise, dtype=torch.float64),
    }  # fmt: skip
    fresh = {"candidates": torch.zeros(found.n, model.n_parameters, dtype=torch.float64)}
    return Ask(fit_candidates, shared, {}, fresh=fresh, scratch=len(found.centres))


def judging_ask(model: Dense, n: int, multiplier: float) -> Ask:
    """Ask how much more of the n candidates lose than the first."""
    noise = Noise(
        multiplier, {"mean": BOUND, "second": BOUND**2, "first": _CAP}, {"mean": 0.55, "second": 0.35, "first": 0.1},
        purpose="scores of candidates",
    )  # fmt: skip
    fresh = {"candidates": torch.zeros(n, model.n_parameters, dtype=torch.float64)}
    fold = {"mean": Sum(), "second": Sum(), "first": Sum()}
    return Ask(judge_candidates, {"model": model, "bound": BOUND}, fold, fresh=fresh, scratch=n, noise=noise)


def judged_in(got: Replies, ask: Ask, n_clients: int, louder: float = 1.0) -> Judged:
    """What came of it."""
    assert ask.noise is not None
    mean = torch.cat([torch.zeros(1, dtype=torch.float64), got["mean"] / n_clients])
    second = torch.nn.functional.pad((got["second"] + got["second"].T) / (2 * n_clients), (1, 0, 1, 0))
    deviation = louder * ask.noise.deviation("mean") / n_clients
    first = min(max(float(got["first"]) / n_clients, 0.0), _CAP)
    return Judged(first, mean, second, deviation, n_clients)


def simplest(found: Judged, order: Sequence[int], tolerance: float, sure: float, gain: float = 0.0) -> int:
    """The first of some candidates, the simplest first, that is as good as the best of them, or nearly.

    Parameters
    ----------
    tolerance, gain : float
        A simpler one is as good if it loses no more than the first of these shares of the best one's loss, or the second
        of what the best one gains over one model for all,
    sure : float
        or no more than so many standard errors of the difference.
    """
    best = min(order, key=lambda one: float(found.mean[one]))
    least = tolerance * max(found.first + float(found.mean[best]), 0.0)
    least = max(least, -gain * float(found.mean[best]))
    for one in order:
        if float(found.mean[one] - found.mean[best]) <= max(least, sure * found.error(one, best)):
            return one
    return best


# -- on the client ----------------------------------------------------------------------------------------------------
@answers()
def fit_candidates(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The best of each candidate's centres, or the mode of the client's model given its rows.  -> [S, C, J, P]"""
    model: Dense = shared["model"]
    centres, mean, root = shared["centres"][0], shared["mean"][0], shared["root"][0]
    loss = torch.stack(
        [client_losses(model, own_outputs(model, one.expand(1, len(data.n), -1), data), data)[0] for one in centres], 1
    )  # [C, sum of sizes]
    own = []
    sizes = list(shared["sizes"])
    for some, lost in zip(torch.split(centres, sizes), torch.split(loss, sizes, 1), strict=True):
        own.append(some[lost.argmin(1)])
    x = torch.cat([data.x, torch.ones_like(data.x[..., :1])], -1) * data.real[..., None]  # [C, N, P]
    products = torch.bmm(x.transpose(1, 2), x) / shared["noise"][0]
    for m, b in zip(mean, root, strict=True):
        residual = (data.target - x @ m) * data.real
        right = torch.einsum("cnp,cn->cp", x, residual) / shared["noise"][0] @ b
        left = b.T @ products @ b + (1 + _FLOOR) * torch.eye(b.shape[1], dtype=b.dtype)
        own.append(m + torch.linalg.solve(left, right) @ b.T)
    return {}, {"candidates": torch.stack(own, 1)[None]}


@answers(mean=Sum(), second=Sum(), first=Sum())
def judge_candidates(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """How much more each candidate's model loses than the first one's, within bounds, and products of that."""
    model: Dense = shared["model"]
    own = private["candidates"][0].transpose(0, 1)  # [J, C, P]
    loss = client_losses(model, own_outputs(model, own, data), data)  # [J, C]
    there = (data.n > 0).to(torch.float64)
    difference = (loss[1:] - loss[:1]).T.nan_to_num(0.0, shared["bound"], -shared["bound"]) * there[
        :, None
    ]  # [C, J - 1]
    long = difference.norm(dim=1, keepdim=True).clamp(min=shared["bound"])
    difference = difference * (shared["bound"] / long)
    reply = {
        "mean": difference[None],
        "second": (difference[:, :, None] * difference[:, None])[None],
        "first": (loss[0] * there)[None],
    }
    return reply, dict(private)
