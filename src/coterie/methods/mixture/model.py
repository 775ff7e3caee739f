# SPDX-License-Identifier: Apache-2.0
"""Fitted mixtures in use: whose components are whose, and everything in the columns' own units.

Mixtures are fitted to scaled rows. Log-likelihoods are of the rows as they are: a density falls by the scale of its units.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.inference import adopt_ask, expectations, spread_ask
from coterie.algorithms.outliers import usual
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.validation import responsibilities
from coterie.data.ragged import Ragged
from coterie.methods.mixture.results import OUTLIER, MixtureFit, bic, log_likelihood
from coterie.methods.mixture.stored import StoredMixtures, Typical
from coterie.methods.session import On, Session
from coterie.models.mixtures import Regression
from coterie.protocol import Ask, Replies

__all__ = ["Adopted", "Mixtures", "Typical", "ready"]


@dataclass(frozen=True)
class Adopted:
    """Where each of M clients stands among the centre's components.

    Attributes
    ----------
    names : ndarray
        [M]
    weights : Tensor
        [M, R] its proportions, estimated from its rows.
    log_likelihood : Tensor
        [M] of a row, on average; zero for who has none.
    misfit : Tensor
        [M] how much less that is than what clients of the training usually have, in standard errors; who has no rows has 0.
    rows : Tensor
        [M] that this rests on.
    """

    names: np.ndarray
    weights: Tensor
    log_likelihood: Tensor
    misfit: Tensor
    rows: Tensor

    @property
    def fits(self) -> Tensor:
        """[M] whether the components could well be the client's."""
        return self.misfit <= OUTLIER


@dataclass(frozen=True)
class Mixtures(StoredMixtures):
    """Everybody's mixture in use: the way from rows to scaled ones and back."""

    # -- rows ---------------------------------------------------------------------------------------------------------
    def prepared(self, rows: Ragged) -> Ragged:
        """Scale rows."""
        return rows.to(torch.float64).scaled(self.scaling)

    def of(self, names: np.ndarray) -> MixtureFit:
        """The mixtures of these clients; who was not there in training is at the centre, with mean proportions.

        How clients differ from the centre then counts as scatter of the rows.
        """
        fit, known = self.fit, {name: i for i, name in enumerate(self.names.tolist())}
        place = torch.tensor([known.get(name, -1) for name in names.tolist()], dtype=torch.int64)
        new = place < 0
        scale = fit.scale if len(fit.scale) == 1 else fit.scale[place]
        wide = new.view(-1, *(1,) * (scale.dim() - 1))
        return replace(
            fit,
            theta=torch.where(new[:, None, None], fit.centre, fit.theta[place]),
            weights=torch.where(new[:, None], self.mean_weights, fit.weights[place]),
            scale=torch.where(wide, self.new_scale, scale) if bool(new.any()) else scale,
            outlier_score=torch.where(new, -torch.inf, fit.outlier_score[place]),
            freedom=torch.where(new[:, None], 0.0, fit.freedom[place]),
        )

    def log_likelihood(self, rows: Ragged, session: Session | None = None) -> Tensor:
        """Mean log-likelihood of every client's scaled rows, in the units that they had; zero for who has none.  [M]"""
        return self.in_units(log_likelihood(self.of(rows.names), rows, session), rows)

    def in_units(self, likelihood: Tensor, rows: Ragged) -> Tensor:
        """Mean log-likelihoods of every client's scaled rows, in the units that they had.  [M]"""
        return torch.where(torch.from_numpy(rows.layout.counts > 0), likelihood - self.shift, likelihood)

    def bic(self, rows: Ragged) -> float:
        """Bayesian information criterion of scaled rows, in the units that they had: see `results.bic`."""
        fit = self.of(rows.names)
        n = rows.layout.counts[~fit.outliers.numpy()].sum()
        return bic(fit, rows) + 2 * float(n) * self.shift

    def probabilities(self, rows: Ragged) -> Tensor:
        """How likely each component is for every scaled row, in the order of storage.  [N, R]"""
        fit = self.of(rows.names)
        found = [torch.zeros(0, len(fit.centre), dtype=torch.float64)]
        for block in rows.blocks():
            gamma = responsibilities(fit.family, fit.theta, fit.weights, fit.scale, block)
            found.append(gamma[block.real])
        return torch.cat(found)

    def expected(self, rows: Ragged) -> Tensor:
        """E[y | x] of every scaled row, in the order of storage and the target's own units.  [N]"""
        fit = self.of(rows.names)
        assert isinstance(fit.family, Regression)
        line = torch.einsum("mr,mrp->mp", fit.weights, fit.theta)
        made = [expectations(fit.family, line[b.ids], b)[b.real] for b in rows.blocks()]
        return self.scaling.back(torch.cat([torch.zeros(0, dtype=torch.float64), *made]))

    def adopt(self, rows: Ragged, session: Session | None = None) -> Adopted:
        """Estimate the proportions of clients, old or new, given the centre's components and their scaled rows."""
        return self.adopted((session or Session()).ask(rows, self.adopt_ask), rows)

    @property
    def adopt_ask(self) -> Ask:
        """What clients are asked to estimate their proportions."""
        return adopt_ask(self.fit.family, self.fit.centre, self.mean_weights, self.new_scale)

    def adopted(self, got: Replies, rows: Ragged) -> Adopted:
        """What they said to that."""
        likelihood, n, usual = got["likelihood"] - self.shift, got["n"], self.typical
        error = (usual.spread**2 + usual.deviation**2 / n.clamp(min=1)).sqrt().clamp(min=1e-300)
        misfit = torch.where(n > 0, (usual.likelihood - likelihood) / error, 0.0)
        return Adopted(rows.names, got["weights"], torch.where(n > 0, likelihood, 0.0), misfit, n)


def ready(
    fits: Sequence[MixtureFit], scaling: Scaling, rows: Ragged, session: Session, shown: Ragged | None = None
) -> tuple[list[Mixtures], Tensor | None]:
    """Make fits ready for use, also by newcomers: how rows scatter about the centre, and how well it fits who was there.

    It takes two messages for all of them, or one where no scale is estimated. In the second, clients that have `shown` rows
    estimate their proportions of the first fit's components.  -> mixtures, their proportions [C, R]
    """
    good = [_good(fit, rows) for fit in fits]
    found = [
        Mixtures(fit, scaling, rows.names, scale, Typical(0.0, 0.0, 0.0))
        for fit, scale in zip(fits, _new_scales(fits, rows, good, session), strict=True)
    ]
    parts = [On(rows, {i: one.adopt_ask for i, one in enumerate(found)})]
    parts += [] if shown is None else [On(shown, {0: found[0].adopt_ask})]
    got = session.exchange(parts)
    for i, (one, who) in enumerate(zip(found, good, strict=True)):
        middle, spread = usual(got[0][i]["likelihood"][who] - one.shift)
        found[i] = replace(one, typical=Typical(middle, spread, float(got[0][i]["deviation"][who].median())))
    return found, None if shown is None else got[1][0]["weights"]


def _good(fit: MixtureFit, rows: Ragged) -> Tensor:
    """Clients with rows that are no outliers; all with rows if there are none such.  [M]"""
    there = torch.from_numpy(rows.layout.counts > 0)
    good = there & ~fit.outliers
    return good if bool(good.any()) else there


def _new_scales(fits: Sequence[MixtureFit], rows: Ragged, good: Sequence[Tensor], session: Session) -> list[Tensor]:
    """How widely rows of newcomers will scatter about the centres."""
    asks = {
        i: spread_ask(fit.family, fit.centre, fit.theta, fit.weights, fit.scale, who)
        for i, (fit, who) in enumerate(zip(fits, good, strict=True)) if fit.family.has_scale
    }  # fmt: skip
    sums = session.asks(rows, asks) if asks else {}
    return [
        fit.family.scale_of(sums[i]["scatter"], sums[i]["n"]) if i in sums else fit.scale[0]
        for i, fit in enumerate(fits)
    ]
