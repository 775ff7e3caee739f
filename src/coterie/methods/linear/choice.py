# SPDX-License-Identifier: Apache-2.0
"""Choose settings and the structure, without clients whom nothing that others share serves; and how sure the choice is.

The choice rests on sums over clients (`select.Paired`), and is repeated with clients drawn again, and with one of the deals
of the folds: nothing is fitted again.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie import keys
from coterie.algorithms.target_shape import Shape
from coterie.methods.linear.scores import Table, distances, paired, with_noise
from coterie.methods.linear.sources import Source
from coterie.methods.linear.structures import ORDER, Found
from coterie.methods.linear.task import Task
from coterie.protocol import Algorithm
from coterie.select import Difference, Paired, as_good, difference, simplest

__all__ = ["ALIKE", "REPETITIONS", "RIVAL", "Evidence", "chosen", "means"]

REPETITIONS = 200  # of the choice
RIVAL = 0.2  # share of the repetitions from which a structure would do as well as the one that is chosen most often
_SHARE = 0.03  # of what the best brings over one model for all: who loses no more is as good
_CLEAR = 3.0  # standard errors, of the variance of intercepts
_WORSE = 0.05  # in squared errors: more than that is seen, whatever chance may be
ALIKE = 1.25  # effective parameters, times the fewest, that are about as many: they are not known better than that
_SHARED = ("global", "clusters", "representation", "mixture")  # structures in which clients have models in common
_OWN = ("local", "shrunk")


@dataclass(frozen=True)
class Evidence:
    """What the choice rests on."""

    found: dict[str, Found]
    settings: dict[str, int]
    chosen: str
    table: Table
    scores: Paired  # of judged clients that are no outliers, by the table's columns
    tolerance: float
    barred: tuple[str, ...]  # structures that may not be taken
    shares: dict[str, float] = field(default_factory=dict)  # of the repetitions in which a structure is chosen
    shape: Shape = field(default_factory=Shape)

    def column(self, name: str) -> int:
        """Of the structure's setting."""
        return self.table.at(name, self.settings[name])

    def df(self, name: str) -> float | None:
        """Effective parameters of the structure's setting; None where nobody can count them."""
        every = self.found[name].df
        return every[self.settings[name]] if every else None


def chosen(
    source: Source, task: Task, found: dict[str, Found], tolerance: float, *, shape: Shape | None = None,
    repetitions: int = 0,
) -> Algorithm:  # fmt: skip
    """Choose settings, find outliers, choose settings without them, and then the structure.

    Who did not answer when some structure was judged is not judged at all: all structures are judged by the same clients.

    Parameters
    ----------
    source : Source
        Who answers what clients keep of all structures.
    tolerance : float
        In the score, of numbers and of classes that are equally frequent; where one class is rare there is less to gain,
        and it is smaller in proportion to their entropy.
    shape : Shape, optional
        Of the target.
    repetitions : int
        How often the choice is repeated.

    Returns
    -------
    Evidence
    """
    if shape is not None and shape.entropy is not None:
        tolerance = tolerance * min(1.0, shape.entropy / math.log(2))
    table = Table.of({name: one.judged for name, one in found.items()}, task.problem)
    table = yield from with_noise(source, table)
    regression, mixed = task.problem.is_regression, "mixture" in found
    every, _, _ = yield from paired(source, table)
    first = _Scores(found, table, every[0], None, regression)
    settings = {name: first.setting(name, tolerance) for name in found}
    about = _outliers_by(task, found, table, settings)
    usual = yield from distances(source, table, about, every[0])
    how: dict[str, Any] = {"repetitions": repetitions, "key": keys.key(task.seed, "repetitions")}
    how |= {"centre": float(np.nan_to_num(every[0].means[0])), "metrics": regression and mixed}
    known = replace(table, usual={**about, "usual": usual})
    scores, metrics, _ = yield from paired(source, known, **how)
    if scores[0].n < 2:
        known = table
        scores, metrics, _ = yield from paired(source, known, **how)
    votes = [_Scores(found, known, one, metrics[at] if metrics else None, regression) for at, one in enumerate(scores)]
    choice, shares = _repeated(votes[0], votes[1:], tolerance)
    return Evidence(
        found,
        choice.settings,
        choice.winner,
        known,
        scores[0],
        choice.tolerance,
        choice.barred,
        shares,
        shape or Shape(),
    )


def means(source: Source, found: Found, task: Task) -> Algorithm:
    """Mean scores of a structure's settings.  -> [J]"""
    table = yield from with_noise(source, Table.of({found.name: found.judged}, task.problem))
    every, _, _ = yield from paired(source, table)
    return every[0].means


def _repeated(scores: "_Scores", again: "Sequence[_Scores]", tolerance: float) -> "tuple[_Choice, dict[str, float]]":
    """Choose again and again, with clients drawn again and one deal of the folds: what is chosen most often is chosen.

    One model for all, or else own intercepts, is taken in its place if it is a rival, and what the other brings beyond it is
    not clear. The shares of the repetitions, by structure, are told too.
    """
    choice, times = scores.choice(tolerance), len(again)
    if not times:
        return choice, {}
    votes = [one.choice(tolerance) if one.score.n > 0 else choice for one in again]
    won = Counter(one.winner for one in votes)
    free = [name for name in scores.found if name not in choice.barred and not scores.far_behind(name, choice)]
    winner = max(free, key=lambda name: (won[name], name == choice.winner))
    often = Counter(one.settings[winner] for one in votes if one.winner == winner)
    at = max(often, key=lambda j: (often[j], j == choice.settings[winner])) if often else choice.settings[winner]
    simpler = (("global", choice.settings["global"]), ("shrunk", scores.own_intercepts))
    for name, j in simpler if scores.one_will_do(choice) else simpler[1:]:
        if winner == name == "global" or j is None or (name, j) == (winner, at):
            break  # nothing is simpler
        rival = sum(one.winner == name and (name == "global" or one.settings[name] == j) for one in votes)
        if rival >= RIVAL * times and not scores.gap((winner, at), (name, j)).low > 0:
            winner, at = name, j
            break
    shares = {name: won[name] / times for name in scores.found}
    return replace(choice, winner=winner, settings=choice.settings | {winner: at}), shares


@dataclass(frozen=True)
class _Choice:
    settings: dict[str, int]
    winner: str
    barred: tuple[str, ...]
    tolerance: float


@dataclass(frozen=True)
class _Scores:
    """Scores of the clients that count, with all settings: a candidate is a structure with one of them."""

    found: Mapping[str, Found]
    table: Table
    score: Paired
    metric: Paired | None
    regression: bool

    def mean(self, name: str, setting: int) -> float:
        """Of a candidate."""
        return float(self.score.means[self.table.at(name, setting)])

    def gap(self, one: tuple[str, int], other: tuple[str, int]) -> Difference:
        """The difference of two candidates."""
        return difference(self.score, self.table.at(*one), self.table.at(*other))

    def choice(self, tolerance: float) -> _Choice:
        """Choose every structure's setting, and the structure."""
        settings = {name: self.setting(name, tolerance) for name in self.found}
        may = {name: not one.eligible or any(one.eligible) for name, one in self.found.items()}
        if self.metric is not None and "mixture" in self.found:
            may["mixture"] = self._predicts(settings, self.metric)
        candidates = [(name, settings[name]) for name in self.found]
        level = self.own_intercepts
        if level is not None and ("shrunk", level) not in candidates:
            candidates.append(("shrunk", level))  # next to one model for all, whatever else clients' own models may be
        candidates = [one for one in candidates if may[one[0]]]
        gain = max(self.mean(*one) for one in candidates) - self.mean("global", settings["global"])
        tolerance = max(tolerance, _SHARE * gain)
        barred = tuple(name for name, can in may.items() if not can)
        among = [self.table.at(*one) for one in candidates]
        able = as_good(self.score, among, tolerance=tolerance)
        good = [one for one, can in zip(candidates, able, strict=True) if can]
        if not self.one_will_do(_Choice(settings, "global", barred, tolerance)):
            good = [one for one in good if one[0] != "global"] or [("shrunk", level or 0)]
        winner, at = self._simplest(good or candidates)
        settings[winner] = at
        return _Choice(settings, winner, barred, tolerance)

    def one_will_do(self, choice: _Choice) -> bool:
        """Whether one model for all may be taken: if intercepts clearly differ, clients' own must bring little for that.

        The test of a variance sees much smaller differences than scores of held-out rows, and scores must then show that
        they do not matter.
        """
        level = self.own_intercepts
        if level is None or not self.found["shrunk"].levels > _CLEAR:
            return True
        gap = self.gap(("shrunk", level), ("global", choice.settings["global"]))
        return not (gap.mean > 0 and gap.high > choice.tolerance)

    def far_behind(self, name: str, choice: _Choice) -> bool:
        """Whether a structure is clearly worse than the best, by more than the tolerance."""
        may = [other for other in self.found if other not in choice.barred]
        best = max(may, key=lambda other: self.mean(other, choice.settings[other]))
        gap = self.gap((best, choice.settings[best]), (name, choice.settings[name]))
        return bool(gap.low > 0 and gap.mean > choice.tolerance)

    @property
    def own_intercepts(self) -> int | None:
        """Their place among the settings of shrunk models, if they are there."""
        settings = self.found["shrunk"].settings if "shrunk" in self.found else ()
        return next((j for j, one in enumerate(settings) if one.get("prior") == "intercept"), None)

    def _simplest(self, good: list[tuple[str, int]]) -> tuple[str, int]:
        """The one with fewest effective parameters; of those that have about as many, the one that is easiest to say."""
        if all(self.found[name].df for name, _ in good):
            df = [self.found[name].df[j] for name, j in good]
            good = [one for one, own in zip(good, df, strict=True) if own <= ALIKE * min(df)]
        return min(good, key=lambda one: _place(one[0], self.found[one[0]].settings[one[1]]))

    def setting(self, name: str, tolerance: float) -> int:
        """The best setting of a structure, or the simplest that is as good."""
        one, columns = self.found[name], self.table.columns(name)
        first = columns[0]
        if one.free:
            kinds: dict[tuple[str, ...], list[int]] = {}
            for j, setting in zip(columns, one.settings, strict=True):
                kinds.setdefault(tuple(setting), []).append(j)
            best = [max(some, key=lambda j: float(self.score.means[j])) for some in kinds.values()]
            return simplest(self.score, best, tolerance=tolerance) - first
        return simplest(self.score, columns, tolerance=tolerance, eligible=one.eligible) - first

    def _predicts(self, settings: Mapping[str, int], metric: Paired) -> bool:
        """Whether the mean of a mixture predicts about as well as the best of the other structures.

        If not, its components stand for noise, not for structure.
        """
        others = [name for name in self.found if name != "mixture"]
        best = max(others, key=lambda name: self.mean(name, settings[name]))
        ours, theirs = (self.table.at(name, settings[name]) for name in ("mixture", best))
        gap = difference(metric, ours, theirs)
        return not (gap.low > 0 or gap.mean > _WORSE * float(metric.means[theirs]))


def _place(name: str, setting: Mapping[str, object]) -> float:
    """The place of a structure among those with about as many parameters.

    Own levels come right after one model for all, and a spread by feature or by direction after a few directions.
    """
    after = {"intercept": "global", "diagonal": "representation", "full": "representation"}
    prior = setting.get("prior")
    return ORDER.index(after[str(prior)]) + 0.5 if prior in after else ORDER.index(name)


def _outliers_by(task: Task, found: Mapping[str, Found], table: Table, settings: Mapping[str, int]) -> dict[str, Any]:
    """By which columns it is told how far a client is from being served: see `score_sums.py`.

    Of classes by what a model of the client's own would gain. The score itself would not do: where one class is rare, a
    client in which it is less rare has a lower score under the true model.
    """
    shared = [table.at(name, settings[name]) for name in _SHARED if name in found]
    own = [table.at(name, settings[name]) for name in _OWN if name in found]
    if task.problem.n_classes < 2:
        own = []
    if own:
        levels = found["shrunk"].settings if "shrunk" in found else ()
        shared += [table.at("shrunk", j) for j, one in enumerate(levels) if one.get("prior") == "intercept"]
    return {"shared": tuple(shared), "own": tuple(own), "least": table.at("global", settings["global"])}
