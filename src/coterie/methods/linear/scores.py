# SPDX-License-Identifier: Apache-2.0
"""Log scores of clients, from what they say about their held-out rows.

For regression clients say sums of squared errors. Noise is normal, with a variance for every client: it is what the errors
in its other folds show, drawn to a common variance where these are few. All structures are judged by that rule, so that
none gains by its noise; and a client that no model serves has a wide noise, and does not outweigh the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem, noise_level
from coterie.protocol import Replies

__all__ = ["Judged", "common_noise", "joined", "judged_newcomers", "judged_rows", "normal_score", "over_deals"]

_TINY = 1e-12


@dataclass(frozen=True)
class Judged:
    """How J settings serve M clients: mean log-likelihood, and mean squared error or share of rows predicted right."""

    score: Tensor  # [J, M] cross-validated
    metric: Tensor  # [J, M]
    test_score: Tensor  # [J, M] on test rows
    test_metric: Tensor  # [J, M]
    rows: Tensor  # [M] judged in cross-validation
    test_rows: Tensor  # [M]
    noise: Tensor  # [J] common noise variance
    by_deal: Tensor | None = None  # [R, J, M] the score with each deal of the folds; None for one deal
    least: Tensor | None = None  # [J, M] of outcomes: the loss of rows that are predicted exactly, cross-validated

    def at(self, setting: int) -> "Judged":
        """One setting alone."""
        some = slice(setting, setting + 1)
        return Judged(
            self.score[some], self.metric[some], self.test_score[some], self.test_metric[some], self.rows, self.test_rows,
            self.noise[some], None if self.by_deal is None else self.by_deal[:, some],
        )  # fmt: skip

    @property
    def deals(self) -> Tensor:
        """[R, J, M] the score with each deal of the folds."""
        return self.score[None] if self.by_deal is None else self.by_deal


def over_deals(every: Sequence[Judged]) -> Judged:
    """Average over deals of the folds; the first has judged test rows too. Who was away in one deal is not judged."""
    score, metric = (torch.stack([getattr(one, name) for one in every]) for name in ("score", "metric"))  # [R, J, M]
    rows = torch.stack([one.rows for one in every]).amin(0)
    return replace(every[0], score=score.mean(0), metric=metric.mean(0), rows=rows, by_deal=score)


def joined(every: Sequence[Judged]) -> Judged:
    """Settings that were judged one after the other."""
    score, right, test_score, test_metric, noise = (
        torch.cat([getattr(one, name) for one in every])
        for name in ("score", "metric", "test_score", "test_metric", "noise")
    )
    return Judged(score, right, test_score, test_metric, every[0].rows, every[0].test_rows, noise)


def judged_rows(got: Replies, problem: Problem) -> Judged:
    """Make scores of what clients said about V folds and test rows, if there was a fit for these."""
    loss, right, n = (got[name].movedim(0, -1) for name in ("loss", "metric", "rows"))  # [F, J, M], [F, 1, M]
    v = problem.n_folds
    if v not in problem.held:
        loss, right, n = (torch.cat([value, torch.zeros_like(value[:1])]) for value in (loss, right, n))
    if not problem.is_regression:
        value, common = -loss, torch.ones(loss.shape[1], dtype=torch.float64)
    else:
        value, common = _with_noise(loss, n, v)
    rows, test_rows = n[:v, 0].sum(0), n[v, 0]
    return Judged(
        value[:v].sum(0) / rows,
        right[:v].sum(0) / rows,
        value[v] / test_rows,
        right[v] / test_rows,
        rows,
        test_rows,
        common,
        least=got["least"].movedim(0, -1)[:v].sum(0) / rows if "least" in got.values else None,
    )


def _with_noise(loss: Tensor, n: Tensor, v: int) -> tuple[Tensor, Tensor]:
    """Log-likelihoods [F, J, M] and the common noise [J] of half squared errors [F, J, M] and rows [F, 1, M]."""
    total, rows = loss[:v].sum(0), n[:v].sum(0)
    others = torch.cat([total - loss[:v], total[None]])  # test rows are judged with the noise of all folds
    n_others = torch.cat([rows - n[:v], rows[None]])
    noise, common = common_noise(others, n_others)
    return normal_score(loss, n, noise), common[-1]


def common_noise(half_squares: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Noise variance of every client, and what they are drawn to: their harmonic mean, by which wide ones hardly count.

    half_squares [..., M], n -> [..., M], [...]
    """
    there = (n > 0).to(torch.float64).expand_as(half_squares)
    total = (2 * half_squares).sum(-1) / n.expand_as(half_squares).sum(-1).clamp(min=1)
    common = total.clamp(min=_TINY)
    for _ in range(20):
        noise = noise_level(half_squares, n, common[..., None])
        common = there.sum(-1).clamp(min=1) / (there / noise).sum(-1).clamp(min=_TINY)
    return noise, common


def normal_score(half_squares: Tensor, n: Tensor, noise: Tensor) -> Tensor:
    """Log-likelihood of n rows with normal noise."""
    noise = noise.clamp(min=_TINY)
    return -0.5 * n * (2 * math.pi * noise).log() - half_squares / noise


def judged_newcomers(got: Replies, problem: Problem, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of new clients, who have no noise of their own yet.  -> [J, M], [J, M], rows [M]"""
    loss, right, n = (got[name][:, -1].movedim(0, -1) for name in ("loss", "metric", "rows"))  # [J, M], [1, M]
    value = normal_score(loss, n, noise[:, None]) if problem.is_regression else -loss
    return value / n, right / n, n[0]
