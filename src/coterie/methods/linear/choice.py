# SPDX-License-Identifier: Apache-2.0
"""Choose settings and the structure, without clients whom nothing that others share serves; and how sure the choice is.

The choice is repeated with clients drawn again, and with one of the deals of the folds: from scores that are there, so that
nothing is fitted again.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.outliers import outlier_scores
from coterie.algorithms.target_shape import Shape
from coterie.methods.linear.structures import ORDER, Found
from coterie.methods.linear.task import Task
from coterie.select import as_good, difference, simplest

__all__ = [
    "ALIKE",
    "OUTLIER",
    "REPETITIONS",
    "RIVAL",
    "Evidence",
    "chosen",
    "names_where",
    "outlying",
    "outlying_classes",
]

OUTLIER = 3.5  # score above which a client is called an outlier
REPETITIONS = 200  # of the choice
RIVAL = 0.2  # share of the repetitions from which a structure would do as well as the one that is chosen most often
_ROW_DEVIATION = math.sqrt(0.5)  # of a row's log density under normal noise: half of a squared normal variable
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
    judged: Tensor  # [M]
    odd: Tensor  # [M] outliers
    outlier_score: Tensor  # [M]
    tolerance: float
    barred: tuple[str, ...]  # structures that may not be taken
    absent: Tensor  # [M] who has rows enough, and did not answer
    shares: dict[str, float] = field(default_factory=dict)  # of the repetitions in which a structure is chosen
    shape: Shape = field(default_factory=Shape)

    def score(self, name: str, *, test: bool = False) -> Tensor:
        """[M] of the structure's setting, NaN for who was not judged or, on test rows, has none."""
        one = self.found[name].judged
        if test:
            return torch.where(one.test_rows > 0, one.test_score[self.settings[name]], torch.nan)
        return torch.where(self.judged, one.score[self.settings[name]], torch.nan)

    def counted(self, values: Tensor) -> Tensor:
        """[M] without outliers."""
        return torch.where(self.odd, torch.nan, values)

    def df(self, name: str) -> float | None:
        """Effective parameters of the structure's setting; None where nobody can count them."""
        every = self.found[name].df
        return every[self.settings[name]] if every else None


def chosen(
    task: Task, found: dict[str, Found], tolerance: float, *, shape: Shape | None = None, repetitions: int = 0
) -> Evidence:
    """Choose settings, find outliers, choose settings without them, and then the structure.

    Who did not answer when some structure was judged is not judged at all: all structures are judged by the same clients.

    Parameters
    ----------
    tolerance : float
        In the score, of numbers and of classes that are equally frequent; where one class is rare there is less to gain,
        and it is smaller in proportion to their entropy.
    shape : Shape, optional
        Of the target.
    repetitions : int
        How often the choice is repeated.
    """
    if shape is not None and shape.entropy is not None:
        tolerance = tolerance * min(1.0, shape.entropy / math.log(2))
    there = torch.stack([one.judged.rows > 0 for one in found.values()]).all(0)
    judged, nobody = task.judged & there, torch.zeros_like(task.judged)
    first = _Scores.of(found, judged, task.problem.is_regression)
    settings = {name: first.setting(name, tolerance) for name in found}
    score = _outlier_scores(task, found, settings, judged)
    odd = (score > OUTLIER) & judged
    if int((judged & ~odd).sum()) < 2:
        odd = nobody
    scores = _Scores.of(found, judged & ~odd, task.problem.is_regression)
    choice, shares = _repeated(scores, tolerance, repetitions, task.seed)
    return Evidence(
        found, choice.settings, choice.winner, judged, odd, score, choice.tolerance, choice.barred, task.judged & ~there,
        shares, shape or Shape(),
    )  # fmt: skip


def _repeated(scores: "_Scores", tolerance: float, times: int, seed: int) -> "tuple[_Choice, dict[str, float]]":
    """Choose again and again, with clients drawn again and one deal of the folds: what is chosen most often is chosen.

    One model for all, or else own intercepts, is taken in its place if it is a rival, and what the other brings beyond it is
    not clear. The shares of the repetitions, by structure, are told too.
    """
    choice = scores.choice(tolerance)
    if not times:
        return choice, {}
    draw, n, deals = keys.generator(seed, "repetitions"), scores.n_clients, next(iter(scores.deals.values())).shape[0]
    votes = [scores.drawn(torch.randint(n, (n,), generator=draw), at % deals).choice(tolerance) for at in range(times)]
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
        if rival >= RIVAL * times and not difference(scores.score[winner][at], scores.score[name][j]).low > 0:
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
    """Scores of the clients that count, with all settings."""

    found: Mapping[str, Found]
    score: dict[str, Tensor]  # [J, N]
    metric: dict[str, Tensor]  # [J, N]
    deals: dict[str, Tensor]  # [R, J, N]
    regression: bool

    @classmethod
    def of(cls, found: Mapping[str, Found], counted: Tensor, regression: bool) -> "_Scores":
        """Of some clients.  counted [M]"""
        score, metric, deals = (
            {name: getattr(one.judged, what)[..., counted] for name, one in found.items()}
            for what in ("score", "metric", "deals")
        )
        return cls(found, score, metric, deals, regression)

    @property
    def n_clients(self) -> int:
        """N."""
        return next(iter(self.score.values())).shape[1]

    def drawn(self, some: Tensor, deal: int) -> "_Scores":
        """These clients, some of them more than once, as one deal of the folds has judged them.  [N]"""
        score = {name: value[deal][:, some] for name, value in self.deals.items()}
        metric = {name: value[:, some] for name, value in self.metric.items()}
        return _Scores(self.found, score, metric, {}, self.regression)

    def choice(self, tolerance: float) -> _Choice:
        """Choose every structure's setting, and the structure."""
        settings = {name: self.setting(name, tolerance) for name in self.found}
        may = {name: not one.eligible or any(one.eligible) for name, one in self.found.items()}
        if self.regression and "mixture" in self.found:
            may["mixture"] = self._predicts(settings)
        candidates = [(name, settings[name]) for name in self.found]
        level = self.own_intercepts
        if level is not None and ("shrunk", level) not in candidates:
            candidates.append(("shrunk", level))  # next to one model for all, whatever else clients' own models may be
        candidates = [one for one in candidates if may[one[0]]]
        scores = torch.stack([self.score[name][j] for name, j in candidates])
        gain = float(scores.nanmean(1).max() - self.score["global"][settings["global"]].nanmean())
        tolerance = max(tolerance, _SHARE * gain)
        barred = tuple(name for name, can in may.items() if not can)
        good = [one for one, can in zip(candidates, as_good(scores, tolerance=tolerance), strict=True) if can]
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
        gap = difference(self.score["shrunk"][level], self.score["global"][choice.settings["global"]])
        return not (gap.mean > 0 and gap.high > choice.tolerance)

    def far_behind(self, name: str, choice: _Choice) -> bool:
        """Whether a structure is clearly worse than the best, by more than the tolerance."""
        may = [other for other in self.found if other not in choice.barred]
        best = max(may, key=lambda other: float(self.score[other][choice.settings[other]].nanmean()))
        gap = difference(*(self.score[one][choice.settings[one]] for one in (best, name)))
        return gap.low > 0 and gap.mean > choice.tolerance

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
        one, scores = self.found[name], self.score[name]
        if one.free:
            kinds: dict[tuple[str, ...], list[int]] = {}
            for j, setting in enumerate(one.settings):
                kinds.setdefault(tuple(setting), []).append(j)
            means = scores.nanmean(1)
            best = [max(some, key=lambda j: float(means[j])) for some in kinds.values()]
            return best[simplest(scores[best], tolerance=tolerance)]
        return simplest(scores, tolerance=tolerance, eligible=one.eligible)

    def _predicts(self, settings: Mapping[str, int]) -> bool:
        """Whether the mean of a mixture predicts about as well as the best of the other structures.

        If not, its components stand for noise, not for structure.
        """
        others = [name for name in self.found if name != "mixture"]
        best = max(others, key=lambda name: float(self.score[name][settings[name]].nanmean()))
        ours, theirs = (self.metric[name][settings[name]] for name in ("mixture", best))
        gap = difference(ours, theirs)
        return not (gap.low > 0 or gap.mean > _WORSE * float(theirs.nanmean()))


def _place(name: str, setting: Mapping[str, object]) -> float:
    """The place of a structure among those with about as many parameters.

    Own levels come right after one model for all, and a spread by feature or by direction after a few directions.
    """
    after = {"intercept": "global", "diagonal": "representation", "full": "representation"}
    prior = setting.get("prior")
    return ORDER.index(after[str(prior)]) + 0.5 if prior in after else ORDER.index(name)


# -- outliers ---------------------------------------------------------------------------------------------------------
def _outlier_scores(task: Task, found: dict[str, Found], settings: dict[str, int], judged: Tensor) -> Tensor:
    """[M] of numbers and densities by the score itself, of classes by what a model of the client's own would gain."""

    def score(name: str, j: int) -> Tensor:
        return torch.where(judged, found[name].judged.score[j], torch.nan)

    shared = [score(name, settings[name]) for name in _SHARED if name in found]
    own = [score(name, settings[name]) for name in _OWN if name in found]
    rows = found["global"].judged.rows
    if task.problem.n_classes < 2 or not own:
        least = found["global"].judged.least  # a row's likelihood depends on its size; its deviance does not
        each = torch.stack(shared)
        return outlying(each if least is None else each + least[settings["global"]], rows)
    levels = found["shrunk"].settings if "shrunk" in found else ()
    shared += [score("shrunk", j) for j, one in enumerate(levels) if one.get("prior") == "intercept"]
    return outlying_classes(torch.stack(shared), torch.stack(own), rows)


def outlying(shared: Tensor, rows: Tensor) -> Tensor:
    """Outlier score of every client: how far it lies below the others, under whatever shared structure suits it best.

    Parameters
    ----------
    shared : Tensor
        [J, M] scores under shared structures, NaN for who is not judged.
    rows : Tensor
        [M] that the scores rest on.
    """
    best = shared.nan_to_num(nan=-math.inf).amax(0)
    judged = best.isfinite()
    out = torch.full(best.shape, math.nan, dtype=torch.float64)
    out[judged] = outlier_scores(-best[judged], _ROW_DEVIATION / rows[judged].clamp(min=1).sqrt())
    return out


def outlying_classes(shared: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    """Outlier score of every client by how much better a model of its own predicts classes than any shared structure.

    The score itself would not do: where one class is rare, a client in which it is less rare has a lower score under the
    true model. A log-likelihood ratio has, over n rows with mean d, a standard error of about sqrt(2 d / n).

    Parameters
    ----------
    shared, own : Tensor
        [J, M] scores under shared structures (own levels among them), and with models of clients' own; NaN for who is not
        judged.
    rows : Tensor
        [M] that the scores rest on.
    """
    gap = own.nan_to_num(nan=-math.inf).amax(0) - shared.nan_to_num(nan=-math.inf).amax(0)
    judged = gap.isfinite()
    out = torch.full(gap.shape, math.nan, dtype=torch.float64)
    chance = (2 * gap[judged].clamp(min=0) / rows[judged].clamp(min=1)).sqrt()
    out[judged] = outlier_scores(gap[judged], chance)
    return out


def names_where(names: np.ndarray, mask: Tensor | np.ndarray) -> tuple[str, ...]:
    """Names of the clients for whom it is so."""
    return tuple(str(name) for name in names[np.asarray(mask)])
