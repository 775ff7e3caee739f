# SPDX-License-Identifier: Apache-2.0
"""FedGrEM as in the paper, 1,000 rounds on pen digits (44 clients, R = 10, D = 16), against bare arithmetic."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import best
from coterie.algorithms.central import central_weights, shrunk
from coterie.algorithms.fedgrem import State, estimates, fedgrem
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess, Program
from coterie.errors import DataError
from coterie.models.mixtures import Gaussian
from coterie.protocol import Tensors
from coterie.studies.fedgrem_real import standardised
from coterie.studies.mixture_tasks import pendigits

COMPONENTS, ROUNDS, C_LAMBDA, C_ETA, KAPPA = 10, 1000, 2.0, 0.95, 0.1


def run() -> list[dict]:
    name, rows = _rows()
    return [_row(name, rows, Gaussian(rows.shape[0], covariance)) for covariance in ("unit", "full")]


def _rows() -> tuple[str, Ragged]:
    try:
        rows = replace(pendigits(), y=None)
        return "pen digits", standardised(rows, rows)[0]
    except DataError:  # the file is not there
        draw = torch.Generator().manual_seed(0)
        centres = 2 * torch.randn(COMPONENTS, 16, generator=draw, dtype=torch.float64)
        label = torch.randint(COMPONENTS, (44, 250), generator=draw)
        noise = torch.randn(44, 250, 16, generator=draw, dtype=torch.float64)
        return "random rows in place of pen digits", Ragged.from_blocks(centres[label] + noise, None)


def _program(family: Gaussian, rounds: int) -> Program:
    return partial(
        fedgrem, family=family, n_components=COMPONENTS, rounds=rounds, seed=0, c_lambda=C_LAMBDA, c_eta=C_ETA,
        kappa=KAPPA, penalty="norm", together=0.0, robust=math.inf, share_weights=0.0,
    )  # fmt: skip


def _row(name: str, rows: Ragged, family: Gaussian) -> dict:
    engine = InProcess(rows)
    (start,) = engine.run([_program(family, 0)]).states
    bare = _Bare(rows, family, start, dict(engine.worker.private[0]))
    found: dict[str, Tensor] = {}

    def ours() -> None:
        (state,) = engine.run([_program(family, ROUNDS)]).states
        found["ours"] = estimates(state, family, engine.worker.private[0], rows.counts, "norm")

    def arithmetic() -> None:
        found["bare"] = bare.run()

    seconds = best(2, start=lambda: engine.run([_program(family, 0)]), ours=ours, bare=arithmetic)
    apart = float((found["ours"] - found["bare"]).abs().max())
    assert family.has_scale or apart < 1e-6, (
        "the bench must fit the same mixtures"
    )  # with a scale all clients count here
    alone = seconds["ours"] - seconds["start"]
    return {
        "bench": f"FedGrEM, {name}, {ROUNDS:,} rounds, {family.covariance} covariance",
        "seconds": alone,
        "bare": seconds["bare"],
        "ratio": alone / seconds["bare"],
        "limit of seconds": 10.0,
        "start": seconds["start"],
    }


class _Bare:
    """The arithmetic of all rounds on one padded block: E-step, gradient step, Huber's location, shrinking."""

    def __init__(self, rows: Ragged, family: Gaussian, start: State, private: Tensors) -> None:
        data = next(rows.blocks(budget=1 << 40))
        self.x, self.mask, self.size = data.x, data.real[..., None], data.n  # [C, N, D], [C, N, 1], [C]
        self.n = data.n.double()[:, None, None]
        self.ids, self.family, self.start = data.ids, family, start
        self.theta, self.first = private["tilde"][data.ids], private["first_weights"][data.ids]
        self.outer = torch.bmm(self.x.mT, self.x).sum(0)

    def run(self) -> Tensor:
        """Every client's parameters, in the order of their names.  [C, R, D]"""
        theta, w, w0, lam = self.theta, self.first, self.first, 1.0
        centre, scale = self.start.centre, self.start.scale
        for _ in range(ROUNDS):
            lam = KAPPA * lam + C_LAMBDA * math.sqrt(self.x.shape[2] + math.log(len(self.x)))
            gamma = self._expect(theta, w, scale)
            total = gamma.sum(1)[..., None]  # [C, R, 1]
            sums = torch.bmm(gamma.mT, self.x)
            w = (total / self.n)[..., 0]
            tilde = theta + (sums - total * theta) / self.n * (C_ETA / torch.maximum(w0, w))[..., None]
            weight = central_weights(self._at(tilde, scale), self.size, lam, self._at(centre, scale))
            centre = (weight * tilde).sum(0)
            if self.family.has_scale:
                scale = self._scale(theta, sums, total)
            at = self._at(tilde - centre, scale)
            theta = shrunk(tilde, centre, (lam / self.n[..., 0].sqrt()).expand(w.shape), at)
        out = torch.empty_like(theta)
        out[self.ids] = theta
        return out

    def _at(self, theta: Tensor, scale: Tensor) -> Tensor:
        return theta @ scale if self.family.has_scale else theta

    def _expect(self, theta: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        """Responsibilities.  [C, N, R]"""
        mean = self._at(theta, scale)
        constant = w.clamp(min=1e-12).log() - mean.square().sum(-1) / 2
        return torch.baddbmm(constant[:, None], self._at(self.x, scale), mean.mT).softmax(-1).mul_(self.mask)

    def _scale(self, theta: Tensor, sums: Tensor, total: Tensor) -> Tensor:
        cross = torch.einsum("crd,cre->de", sums, theta)
        squares = torch.einsum("crd,cre->de", total * theta, theta)
        return self.family.scale_of(self.outer - cross - cross.T + squares, self.n.sum())
