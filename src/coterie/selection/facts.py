# SPDX-License-Identifier: Apache-2.0
"""What is known after a comparison, found once: headline, evidence and doubts are words for these facts, and for no others.

So they cannot contradict each other: a structure has one standing beside the chosen one, every client is counted once, and
what is not clear is marked so for all that is said.
"""

import math
from dataclasses import dataclass
from typing import Literal

from coterie.methods.linear.choice import ALIKE, RIVAL
from coterie.selection.result import Comparison, Difference, Structure

__all__ = ["Counts", "Facts", "Kind", "Other", "Sign", "Standing", "Tally", "facts", "kind"]

Sign = Literal["better", "level", "worse"]  # by a 95 % interval: level if it contains 0
# Beside the chosen structure; "slightly" is by no more than the tolerance of the choice.
Standing = Literal["better", "slightly better", "level", "slightly worse", "worse", "barred"]
# In which way clients differ: not, in their levels, in groups, each from all others, or within themselves.
Kind = Literal["one for all", "own intercepts", "groups", "own models", "mixtures"]

_STABLE = 0.5  # adjusted Rand index from which groups are spoken of


@dataclass(frozen=True)
class Tally:
    """Clients for whom the chosen structure is better, worse, or the same as one model for all."""

    better: int
    worse: int
    equal: int

    @property
    def clients(self) -> int:
        """All of them."""
        return self.better + self.worse + self.equal


@dataclass(frozen=True)
class Counts:
    """How many clients there are: `scored` have enough rows and answered; without `outliers` they are `compared`."""

    clients: int
    scored: int
    outliers: int
    too_small: int
    absent: int

    @property
    def compared(self) -> int:
        """Clients that intervals are paired over."""
        return self.scored - self.outliers


@dataclass(frozen=True)
class Other:
    """A structure that was not chosen."""

    structure: Structure
    standing: Standing
    over_global: Sign | None  # None for one model for all itself

    @property
    def share(self) -> float:
        """Of the repetitions, in which it was chosen."""
        return self.structure.chosen_share or 0.0

    @property
    def would_do(self) -> bool:
        """Whether it serves clients no worse, as far as one can tell."""
        return self.standing in ("better", "slightly better", "level")


@dataclass(frozen=True)
class Facts:
    """All that words are made of.

    Attributes
    ----------
    chosen : Structure
        What was chosen.
    over_global : str or None
        Whether it is clearly better than one model for all; None if it is one model for all.
    others : tuple of Other
        All other structures.
    counts : Counts
        Of clients.
    held_out, on_test : Tally or None
        Clients that gain, on held-out rows of the cross-validation (of those who are scored), and in the metric on test
        rows (of those who have test rows); None where one model for all was chosen, or there are no test rows.
    new_clients : str or None
        Whether clients that were not there are served better by what was chosen than by one model for all.
    groups : {"stable", "unstable"} or None
        Whether chosen groups would come out again.
    predicts_worse : bool
        Whether the chosen structure has a lower R^2 than one model for all, over all test rows together.
    """

    chosen: Structure
    over_global: Sign | None
    others: tuple[Other, ...]
    counts: Counts
    held_out: Tally | None
    on_test: Tally | None
    new_clients: Sign | None
    groups: Literal["stable", "unstable"] | None
    predicts_worse: bool

    @property
    def sure(self) -> bool:
        """Whether clients clearly differ in the way that was chosen, or one model for all was."""
        return self.over_global in (None, "better") or any(other.over_global == "better" for other in self.kin)

    @property
    def kin(self) -> tuple[Other, ...]:
        """Structures that say the same of clients as the chosen one, and are as good with about as many parameters."""
        alike = (other for other in self.others if kind(other.structure) == kind(self.chosen))
        good = (other for other in alike if other.standing in ("slightly better", "level") and other.structure.as_good)
        most = ALIKE * (self.chosen.df or math.inf)
        return tuple(other for other in good if (other.structure.df or 0.0) <= most)

    @property
    def rivals(self) -> dict[Kind, tuple[Other, ...]]:
        """Ways to differ that might as well have been chosen: they often were, and serve clients no worse.

        Own intercepts are a part of own models: that a larger model serves clients as well says nothing against them.
        """
        own, found = kind(self.chosen), dict[Kind, tuple[Other, ...]]()
        for one in dict.fromkeys(kind(other.structure) for other in self.others):
            members = tuple(other for other in self.others if kind(other.structure) == one)
            able = tuple(other for other in members if other.would_do)
            larger = (own, one) == ("own intercepts", "own models")
            if one != own and not larger and able and sum(other.share for other in able) >= RIVAL:
                found[one] = able
        return found

    @property
    def also(self) -> tuple[Structure, ...]:
        """Structures that would do as well as the chosen one."""
        return tuple(other.structure for some in (self.kin, *self.rivals.values()) for other in some)

    def standing(self, *wanted: Standing) -> list[Structure]:
        """Structures with these standings, the best first."""
        some = [other.structure for other in self.others if other.standing in wanted]
        return sorted(some, key=lambda one: -one.score)


def facts(found: Comparison) -> Facts:
    """Find the facts of a comparison."""
    chosen, everybody = found[found.chosen], found["global"]
    shared = chosen is everybody
    others = tuple(
        Other(one, _standing(one, found.tolerance), _sign(one.versus_global))
        for one in found.structures
        if one is not chosen
    )
    counts = Counts(len(found.names), found.n_judged, found.n_outliers, len(found.too_small), found.n_absent)
    lower = found.metric == "rmse"
    tested = chosen.test_metric is not None and everybody.test_metric is not None
    stability = None if found.grouping is None or chosen.name != "clusters" else found.grouping.stability
    return Facts(
        chosen=chosen,
        over_global=None if shared else _sign(chosen.versus_global),
        others=others,
        counts=counts,
        held_out=None if shared else _tally(found.held_out),
        on_test=_tally(found.on_test) if tested and not shared else None,
        new_clients=None if shared else _for_new_clients(chosen, everybody, lower),
        groups=None if stability is None else "stable" if stability >= _STABLE else "unstable",
        predicts_worse=(
            not shared
            and chosen.test_r2 is not None
            and everybody.test_r2 is not None
            and chosen.test_r2 < everybody.test_r2
        ),
    )


def kind(one: Structure) -> Kind:
    """What a structure says of clients."""
    if one.setting.get("prior") == "intercept":
        return "own intercepts"
    kinds: dict[str, Kind] = {"global": "one for all", "clusters": "groups", "mixture": "mixtures"}
    return kinds.get(one.name, "own models")


def _sign(difference: Difference | None) -> Sign | None:
    if difference is None:
        return None
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "level"


def _standing(one: Structure, tolerance: float) -> Standing:
    if one.barred:
        return "barred"
    sign = _sign(one.versus_chosen) or "level"
    if sign == "level" or one.versus_chosen is None or abs(one.versus_chosen.mean) > tolerance:
        return sign
    return "slightly better" if sign == "better" else "slightly worse"


def _tally(sides: tuple[int, int, int]) -> Tally | None:
    """Who gains; nothing where nobody counts."""
    return Tally(*sides) if sum(sides) else None


def _for_new_clients(chosen: Structure, everybody: Structure, lower: bool) -> Sign | None:
    """By the metric's difference, whose sign depends on the metric."""
    if chosen.new_metric is None or everybody.new_metric is None:
        return None
    sign = _sign(chosen.new_versus_global) or "level"
    turned: dict[Sign, Sign] = {"better": "worse", "worse": "better", "level": "level"}
    return turned[sign] if lower else sign
