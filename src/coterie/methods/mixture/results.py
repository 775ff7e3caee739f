# SPDX-License-Identifier: Apache-2.0
"""What comes of fitting mixtures: every client's own, who is an outlier, and how likely rows are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import em, fedgmm, fedgrem
from coterie.algorithms.neighbours import own_centre
from coterie.algorithms.outliers import chance, outlier_scores
from coterie.algorithms.validation import judge_ask, responsibilities
from coterie.data.ragged import Ragged
from coterie.methods.session import On, Session
from coterie.models.mixtures import Family, Gaussian
from coterie.protocol import Tensors

__all__ = [
    "EM_METHODS",
    "OUTLIER",
    "Choice",
    "MixtureFit",
    "bic",
    "deviations",
    "labels",
    "log_likelihood",
    "log_likelihoods",
    "of_baseline",
    "of_fedgrem",
]

OUTLIER = 3.5  # score above which a client is called an outlier
EM_METHODS: dict[str, tuple[em.Sharing, bool]] = {
    "local-em": ("local", False), "local-grem": ("local", True), "pooled-em": ("pooled", False),
    "pooled-grem": ("pooled", True), "pooled-components": ("components", False), "fedem": ("fedem", False),
    "tgmm": ("tgmm", False), "tgmm-mutual": ("mutual", False),
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """Candidates, what their held-out rows said (higher is better), and which was chosen."""

    values: tuple[float, ...]
    scores: tuple[float, ...]
    best: int

    @property
    def value(self) -> float:
        """The chosen one."""
        return self.values[self.best]


@dataclass(frozen=True)
class MixtureFit:
    """A mixture for every client.

    Attributes
    ----------
    centre : Tensor
        [R, P] common components, or the centre of the clients'.
    theta, weights : Tensor
        [M, R, P], [M, R] of every client.
    scale : Tensor
        [M | 1, ...] each client's own, or common.
    outlier_score : Tensor
        [M] robust z of a client's distance from the centre, the mean over its components by their shares: see
        `coterie.algorithms.outliers`. Who was never heard has -inf; above `OUTLIER` one is called an outlier.
    freedom : Tensor
        [M, R] how much of a client's component is its own: 0 at the centre, 1 where nothing draws it there.
    """

    method: str
    family: Family
    centre: Tensor
    theta: Tensor
    weights: Tensor
    scale: Tensor
    outlier_score: Tensor
    freedom: Tensor
    rounds: int
    c_lambda: float | None = None
    choice: Choice | None = None

    @property
    def outliers(self) -> Tensor:
        """[M] who is one."""
        return self.outlier_score > OUTLIER


def of_fedgrem(
    name: str, family: Family, rows: Ragged, state: fedgrem.State, private: Tensors, c_lambda: float,
    penalty: fedgrem.Penalty = "squared",
) -> MixtureFit:  # fmt: skip
    """What FedGrEM left with the server (state) and with the clients (private)."""
    theta = fedgrem.estimates(state, family, private, torch.from_numpy(rows.layout.counts), penalty)
    centre = own_centre(private, state.centre)
    left, whole = (_lengths(family, v - centre, state.scale) for v in (theta, private["tilde"]))
    free = torch.where(
        whole > 0, left / whole.clamp(min=1e-300), float(c_lambda == 0)
    )  # who is at the centre is free if alone
    freedom = torch.where(private["begun"][:, None], free, 0.0)
    scores = torch.full((rows.n_clients,), -math.inf, dtype=torch.float64)
    scores[: len(state.n)] = fedgrem.scores(state)
    return MixtureFit(
        name, family, state.centre, theta, private["weights"], state.scale[None], scores, freedom, state.round, c_lambda
    )


def of_baseline(name: str, family: Family, rows: Ragged, state: Any, private: Tensors) -> MixtureFit:
    """What a baseline left with the server (state) and with the clients (private)."""
    if isinstance(state, fedgmm.State):
        theta, scale = state.theta.expand(rows.n_clients, -1, -1), state.scale[None]
        weights = fedgmm.marginal(private)
    else:
        sharing = "fedem" if name == "fedgmm" else EM_METHODS[name][0]
        theta, weights, scale = em.own_parameters(state, private, sharing)
    if name == "fedgmm" and isinstance(family, Gaussian):
        family = replace(family, covariance="full")
    n = torch.from_numpy(rows.layout.counts)
    there = n > 0
    centre = theta[there].median(0).values
    score = torch.full((rows.n_clients,), -math.inf, dtype=torch.float64)
    distance = (_lengths(family, theta - centre, state.scale) * weights)[there].sum(1)
    score[there] = outlier_scores(distance, chance(n[there], *centre.shape))
    freedom = torch.full(weights.shape, float(name.startswith(("local", "tgmm"))), dtype=torch.float64)
    return MixtureFit(name, family, centre, theta, weights, scale, score, freedom, state.round)


def _lengths(family: Family, difference: Tensor, scale: Tensor) -> Tensor:
    length: Tensor = family.coordinates(difference, scale).norm(dim=-1)
    return length


def deviations(fit: MixtureFit) -> Tensor:
    """How far every client's components are from the centre, in units of the scale.  [M, R]"""
    return _lengths(fit.family, fit.theta - fit.centre, fit.scale)


def labels(fit: MixtureFit, rows: Ragged) -> Tensor:
    """The likeliest component of every row, in the order of storage; the clients must be those of the fit.  [N]"""
    out = []
    for block in rows.blocks():
        gamma = responsibilities(fit.family, fit.theta, fit.weights, fit.scale, block)
        out.append(gamma.argmax(-1)[block.real])
    return torch.cat(out)


def log_likelihood(fit: MixtureFit, rows: Ragged, session: Session | None = None) -> Tensor:
    """Mean log-likelihood of every client's rows, zero for who has none; the clients must be those of the fit.  [M]"""
    return log_likelihoods([([fit], rows)], session or Session())[0][0]


def log_likelihoods(judged: Sequence[tuple[Sequence[MixtureFit], Ragged]], session: Session) -> list[Tensor]:
    """The same for several fits, and several sets of rows, in one message.  -> [K, M] for each set of rows"""
    got = session.exchange([
        On(rows, {i: judge_ask(fit.family, fit.theta, fit.weights, fit.scale) for i, fit in enumerate(fits)})
        for fits, rows in judged
    ])  # fmt: skip
    return [
        torch.stack([one[i]["likelihood"] for i in range(len(fits))])
        for one, (fits, _) in zip(got, judged, strict=True)
    ]


def bic(fit: MixtureFit, rows: Ragged, *, good: Tensor | None = None, total: Tensor | None = None) -> float:
    """Bayesian information criterion over the clients in `good`, or else those that are no outliers; smaller is better.

    A common component counts P parameters, and a client's own as many as it is free: see `MixtureFit.freedom`. `total` is
    the log-likelihood of every client's rows [M], where it is known.
    """
    n = torch.from_numpy(rows.layout.counts).to(torch.float64)
    good = (n > 0) & ~fit.outliers if good is None else good
    r, p = fit.centre.shape
    free = r * p + float(fit.freedom[good].sum()) * p + int(good.sum()) * (r - 1) + len(fit.scale) * fit.family.n_scale
    total = log_likelihood(fit, rows) * n if total is None else total
    likelihood = float(total[good].sum())
    return -2 * likelihood + free * math.log(max(float(n[good].sum()), 2.0))
