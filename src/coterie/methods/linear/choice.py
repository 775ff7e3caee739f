# SPDX-License-Identifier: Apache-2.0
"""Choose settings and the structure, without clients whom nothing that others share serves."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.outliers import outlier_scores
from coterie.methods.linear.structures import ORDER, Found
from coterie.methods.linear.task import Task
from coterie.select import difference, simplest

__all__ = ["OUTLIER", "Evidence", "chosen", "names_where", "outlying"]

OUTLIER = 3.5  # score above which a client is called an outlier
_ROW_DEVIATION = math.sqrt(0.5)  # of a row's log density under normal noise: half of a squared normal variable
_SHARE = 0.03  # of what the best brings over one model for all: who loses no more is as good
_WORSE = 0.05  # in squared errors: more than that is seen, whatever chance may be
_SHARED = ("global", "clusters", "representation", "mixture")  # structures in which clients have models in common


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

    def score(self, name: str, *, test: bool = False) -> Tensor:
        """[M] of the structure's setting, NaN for who was not judged or, on test rows, has none."""
        one = self.found[name].judged
        if test:
            return torch.where(one.test_rows > 0, one.test_score[self.settings[name]], torch.nan)
        return torch.where(self.judged, one.score[self.settings[name]], torch.nan)

    def counted(self, values: Tensor) -> Tensor:
        """[M] without outliers."""
        return torch.where(self.odd, torch.nan, values)


def chosen(task: Task, found: dict[str, Found], tolerance: float) -> Evidence:
    """Choose settings, find outliers, choose settings without them, and then the structure.

    Who did not answer when some structure was judged is not judged at all: all structures are judged by the same clients.
    """
    there = torch.stack([one.judged.rows > 0 for one in found.values()]).all(0)
    judged, nobody = task.judged & there, torch.zeros_like(task.judged)
    settings = {name: _setting(one, judged, tolerance) for name, one in found.items()}
    shared = torch.stack([_score(found[name], settings[name], judged) for name in _SHARED if name in found])
    least = found["global"].judged.least
    if least is not None:  # a row's likelihood depends on its size; its deviance does not
        shared = shared + least[settings["global"]]
    score = outlying(shared, found["global"].judged.rows)
    odd = (score > OUTLIER) & judged
    if int((judged & ~odd).sum()) < 2:
        odd = nobody
    counted = judged & ~odd
    settings = {name: _setting(one, counted, tolerance) for name, one in found.items()}
    scores = torch.stack([_score(one, settings[name], counted) for name, one in found.items()])
    may = [not one.eligible or any(one.eligible) for one in found.values()]
    if task.problem.is_regression and "mixture" in found:
        may[list(found).index("mixture")] = _predicts(found, settings, scores)
    best = scores[may].nanmean(1).max()
    tolerance = max(tolerance, _SHARE * float(best - scores[list(found).index("global")].nanmean()))
    order = sorted(range(len(scores)), key=lambda j: _complexity(*list(settings.items())[j], found))
    winner = list(found)[order[simplest(scores[order], tolerance=tolerance, eligible=[may[j] for j in order])]]
    barred = tuple(name for name, can in zip(found, may, strict=True) if not can)
    absent = task.judged & ~there
    return Evidence(found, settings, winner, judged, odd, score, tolerance, barred, absent)


def _predicts(found: dict[str, Found], settings: dict[str, int], scores: Tensor) -> bool:
    """Whether the mean of a mixture predicts about as well as the best of the other structures.

    If not, its components stand for noise, not for structure.
    """
    others = [j for j, name in enumerate(found) if name != "mixture"]
    best = list(found)[max(others, key=lambda j: float(scores[j].nanmean()))]
    errors = (found[name].judged.metric[settings[name]] for name in ("mixture", best))
    ours, theirs = (torch.where(scores[0].isnan(), torch.nan, error) for error in errors)
    gap = difference(ours, theirs)
    return not (gap.low > 0 or gap.mean > _WORSE * float(theirs.nanmean()))


def _complexity(name: str, setting: int, found: dict[str, Found]) -> float:
    """The place of a structure in the order.

    Own levels are simpler than own models, and a spread by feature or by direction is less simple than a few directions.
    """
    after = {"intercept": "clusters", "diagonal": "representation", "full": "representation"}
    prior = found[name].settings[setting].get("prior")
    return ORDER.index(after[str(prior)]) + 0.5 if prior in after else ORDER.index(name)


def _score(one: Found, setting: int, counted: Tensor) -> Tensor:
    """[M] NaN for who does not count."""
    return torch.where(counted, one.judged.score[setting], torch.nan)


def _setting(one: Found, counted: Tensor, tolerance: float) -> int:
    scores = torch.where(counted, one.judged.score, torch.nan)
    if one.free:
        kinds: dict[tuple[str, ...], list[int]] = {}
        for j, setting in enumerate(one.settings):
            kinds.setdefault(tuple(setting), []).append(j)
        best = [max(some, key=lambda j: float(scores[j].nanmean())) for some in kinds.values()]
        return best[simplest(scores[best], tolerance=tolerance)]
    return simplest(scores, tolerance=tolerance, eligible=one.eligible)


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


def names_where(names: np.ndarray, mask: Tensor | np.ndarray) -> tuple[str, ...]:
    """Names of the clients for whom it is so."""
    return tuple(str(name) for name in names[np.asarray(mask)])
