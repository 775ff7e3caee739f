# SPDX-License-Identifier: Apache-2.0
"""Rows that stand in for those of a site that shares only sums: they have the same counts, means and sums of products.

They were divided before they were summed. So what they can be divided into is fixed: folds, training and test rows, and what
a new client shows; anything else that looks at single rows is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.data.draws import First, Fold, Rule
from coterie.data.moments import Moments, rows_with
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError
from coterie.protocol import Step

__all__ = ["FOLDS_AGAIN", "Division", "StandIns", "needs_rows"]

FOLDS_AGAIN = "folds again"  # the purpose of a second deal of the rows to folds
_Change = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]  # of features, and of targets

_NOBODY = Moments(*(torch.zeros(0, 0, *size) for size in ((), (0,), (0, 0))))


@dataclass(frozen=True)
class Division:
    """How rows were divided before they were summed, and what the parts are: (rest, taken), or one part for every fold."""

    rule: Rule
    seed: int
    moments: Moments


@dataclass(frozen=True, eq=False)
class StandIns(Ragged):
    """Rows made of sums.

    Attributes
    ----------
    moments : Moments
        What they have, before they were changed.
    divisions : mapping
        Purpose -> how the rows of these clients were divided for it.
    drawn : str
        The purpose for which rows lie where its draw finds them, so that a client can divide them itself; "" for none.
    changes : tuple
        What was done to features and targets since.
    """

    moments: Moments = _NOBODY
    divisions: Mapping[str, Division] = field(default_factory=dict)
    drawn: str = ""
    changes: tuple[_Change, ...] = ()

    @classmethod
    def of(
        cls,
        names: np.ndarray,
        moments: Moments,
        divisions: Mapping[str, Division] | None = None,
        *,
        folds: bool = False,
    ) -> "StandIns":
        """Make rows for clients with these names, ascending; with `folds` a row's fold is the number of its part."""
        layout, x, y, part = rows_with(names, moments)
        return cls(layout, x, y, fold=part if folds else None, moments=moments, divisions=divisions or {})

    @classmethod
    def for_draw(cls, names: np.ndarray, divisions: Mapping[str, Division], purpose: str) -> "StandIns":
        """Make rows that have the parts of a division, (rest, taken), and lie where a client that draws finds them."""
        known = divisions[purpose]
        made = cls.of(names, known.moments, divisions)
        assert isinstance(made.x, Tensor)
        assert isinstance(made.y, Tensor)
        taken = known.rule.takes(made._ranks(known.seed, purpose), made.layout.counts[made.owners])
        place = torch.from_numpy(np.lexsort((taken, made._place()[made.owners])))  # of the rest, then of what is taken
        x, y = torch.empty_like(made.x), torch.empty_like(made.y)
        x[place], y[place] = made.x, made.y
        return replace(made, x=x, y=y, drawn=purpose)

    def renamed(self, names: np.ndarray) -> Ragged:
        """Refuse: rows lie where the names' draws find them."""
        raise ConfigError("names of clients of site summaries cannot be hidden", "give clients names that may be told")

    def table(self, predictions: Any = None) -> Any:
        """Refuse: there are no rows."""
        raise needs_rows("a table of rows")

    def admit(self, step: Step) -> None:
        """Refuse a client function unless sums of products are all that it needs."""
        if not getattr(step, "from_sums", False):
            raise needs_rows(f"what is asked here ({step.__name__})")

    # -- deriving -----------------------------------------------------------------------------------------------------
    def changed(
        self, change: Callable[[Tensor], Tensor], change_y: Callable[[Tensor], Tensor] | None = None
    ) -> "StandIns":
        """Apply functions to features and targets, and remember them for rows that are made later."""
        made = super().changed(change, change_y)
        assert isinstance(made, StandIns)
        return replace(made, changes=(*self.changes, (change, change_y)))

    def divide(self, rule: Rule, *, seed: int, purpose: str) -> "tuple[StandIns, StandIns]":
        """Take the part that was taken before rows were summed: (rest, taken)."""
        moments = self._divided(rule, seed, purpose)
        taken = rule.number if isinstance(rule, Fold) else 1
        rest = [v for v in range(moments.n.shape[1]) if v != taken]
        return self._made(moments.parts(rest)), self._made(moments.parts([taken]))

    def with_folds(self, n_folds: int, *, seed: int, test: Ragged | None = None) -> "StandIns":
        """Number rows by the folds that they were summed in, with the same clients' test rows beside them."""
        assert test is None or isinstance(test, StandIns)
        second = self.divisions.get(FOLDS_AGAIN)
        purpose = FOLDS_AGAIN if second is not None and second.seed == seed else "folds"
        own = self.moments.together() if n_folds == 1 else self._divided(Fold(0, n_folds), seed, purpose)
        beside = [] if test is None else [test.moments.together()]
        return self._made(Moments.side_by_side([own, *beside]), folds=True)

    def only(self, ids: np.ndarray) -> "StandIns":
        """Keep some clients (numbers); they are numbered anew."""
        ids = np.sort(ids)
        divisions = {purpose: replace(one, moments=one.moments.clients(ids)) for purpose, one in self.divisions.items()}
        names = self.names[ids]
        if self.drawn:
            return StandIns.for_draw(names, divisions, self.drawn)._after(self.changes)
        return StandIns.of(names, self.moments.clients(ids), divisions)._after(self.changes)

    def _divided(self, rule: Rule, seed: int, purpose: str) -> Moments:
        """Find how rows were divided, as far as it is what is asked for."""
        known = self.divisions.get(purpose)
        if known is None:
            raise needs_rows(f"dividing rows for {purpose}")
        asked = replace(rule, number=0) if isinstance(rule, Fold) else rule
        if (known.rule, known.seed) != (asked, seed):
            raise ConfigError(
                f"site summaries were written for {_said(known.rule)} and seed {known.seed}, and {_said(asked)} and seed "
                f"{seed} are asked for",
                "ask for what they were written for, or write them again with `coterie summarise`",
            )
        return known.moments

    def _made(self, moments: Moments, *, folds: bool = False) -> "StandIns":
        """Make the same clients' rows of other sums, changed in the same way."""
        return StandIns.of(self.names, moments, folds=folds)._after(self.changes)

    def _after(self, changes: tuple[_Change, ...]) -> "StandIns":
        made = self
        for change, change_y in changes:
            made = made.changed(change, change_y)
        return made


def _said(rule: Rule) -> str:
    """A rule in words."""
    if isinstance(rule, Fold):
        return f"{rule.n_folds} folds"
    return f"{rule.n} rows of a new client" if isinstance(rule, First) else f"{rule}"


def needs_rows(what: str) -> ConfigError:
    """Say that sums are not enough, and for what they are."""
    return ConfigError(
        f"{what} needs rows, and site summaries hold sums of products only",
        "on summaries work `coterie compare`, and `coterie fit` of linear regression with --method fedavg, ifca, local, "
        "shrunk or representation",
    )
