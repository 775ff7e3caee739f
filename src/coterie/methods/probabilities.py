# SPDX-License-Identifier: Apache-2.0
"""What predicted probabilities are worth: of all rows with 95 % intervals, client by client, and how calibrated they are.

Intervals of all rows together come from resampling clients, since rows of a client are alike: log loss, Brier score and
accuracy are computed anew of every draw, and area and average precision move by clients' influence on them. Intervals of a
client are of its own rows alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.probabilities import OWN, bin_centres, ranked
from coterie.evaluate import Measured
from coterie.protocol import Replies

__all__ = ["Resampled", "class_measures", "client_measures", "share_interval"]

_DRAWS = 1000  # of clients
_MOST = 5_000_000  # numbers that draws take
_Z = 1.959964  # of 95 %
_GROUPS = 10  # of rows with similar probabilities, for calibration

Interval = tuple[float | None, float | None]


# -- all rows ---------------------------------------------------------------------------------------------------------
def class_measures(
    told: Replies, measured: Measured, influence: Tensor | None, *, seed: int, threshold: float
) -> dict[str, Any]:
    """What the probabilities of all rows are worth.

    Parameters
    ----------
    told : Replies
        What `tell_probabilities` brought.
    measured : Measured
        Accuracy by client.
    influence : Tensor, optional
        [M, 2] of `tell_influence`; without it, area and average precision have no interval.
    seed : int
        That clients are resampled from.
    threshold : float
        That classes were decided by.
    """
    counts, confusion, own = told["counts"].double(), told["confusion"], _own(told)
    found, rows = ranked(counts), own["rows"]
    within = Resampled(rows, seed)
    there = int(told["there"]) if "there" in told.values else int((rows > 0).sum())
    out: dict[str, Any] = {"rows": int(rows.sum()), "clients": there}
    out["accuracy"] = within.mean(measured.metric.double())
    out["base_rate"] = {"value": float(confusion.sum(1).max() / confusion.sum().clamp(min=1))}
    areas = {"auroc": found.auroc, "average_precision": found.average_precision}
    for at, (name, value) in enumerate(areas.items()):
        mean = float(value.nanmean())
        out[name] = within.moved(mean, None if influence is None else influence[:, at])
    out["auroc"]["within"] = float(found.within.nanmean())
    out |= {name: within.mean(own[name]) for name in ("log_loss", "brier")}
    out["calibration"] = _calibration(counts.sum(0))
    out["decisions"] = _decisions(confusion, threshold)
    return out


class Resampled:
    """Clients drawn again and again, with replacement: what would have come of other clients like these."""

    def __init__(self, rows: Tensor, seed: int) -> None:
        self.rows = rows
        there = (rows > 0).nonzero()[:, 0]
        self.several = len(there) > 1
        if self.several:
            draws = max(100, min(_DRAWS, _MOST // len(rows)))
            chosen = torch.randint(len(there), (draws, len(there)), generator=keys.generator(seed, "resample clients"))
            self.times = torch.zeros(draws, len(rows), dtype=torch.float64)
            self.times.scatter_add_(1, there[chosen], torch.ones(chosen.shape, dtype=torch.float64))

    def mean(self, values: Tensor) -> dict[str, Any]:
        """Mean over rows of what clients have as means of theirs.  [M]"""
        sums = torch.where(self.rows > 0, values * self.rows, 0.0)
        mean = float(sums.sum() / self.rows.sum().clamp(min=1))
        return self._said(mean, lambda: self.times @ sums / (self.times @ self.rows).clamp(min=1))

    def moved(self, value: float, influence: Tensor | None) -> dict[str, Any]:
        """A figure that moves by every client's influence each time that it is drawn more than once.  [M]"""
        if influence is None:
            return {"value": value}
        return self._said(value, lambda: (value + (self.times - (self.rows > 0).double()) @ influence).clamp(0, 1))

    def _said(self, value: float, draws: Callable[[], Tensor]) -> dict[str, Any]:
        if not self.several:
            return {"value": value}
        low, high = draws().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return {"value": value, "low": low, "high": high}


def _calibration(counts: Tensor) -> dict[str, Any]:
    """Mean probability and share of the class, in groups of rows with similar probabilities.  counts [2, B]"""
    negative, positive = counts
    rows = negative + positive
    total = rows * bin_centres(counts.shape[-1]).sigmoid()
    place = ((rows.cumsum(0) - rows / 2) / rows.sum().clamp(min=1) * _GROUPS).long().clamp(0, _GROUPS - 1)
    n, hits, sums = (
        torch.zeros(_GROUPS, dtype=torch.float64).scatter_add_(0, place, value) for value in (rows, positive, total)
    )
    groups = []
    for count, hit, summed in zip(n.tolist(), hits.tolist(), sums.tolist(), strict=True):
        if count:
            low, high = share_interval(hit, count)
            groups.append(
                {"rows": int(count), "predicted": summed / count, "observed": hit / count, "low": low, "high": high}
            )
    error = float((sums - hits).abs().sum() / n.sum().clamp(min=1))
    return {"error": error, "groups": groups}


def _decisions(confusion: Tensor, threshold: float) -> dict[str, float | None] | None:
    """How often the second of two classes is found, and rightly so; None where there are more."""
    if len(confusion) != 2:
        return None
    (right_0, wrong_0), (wrong_1, right_1) = confusion.tolist()
    said = {
        "sensitivity": (right_1, right_1 + wrong_1), "specificity": (right_0, right_0 + wrong_0),
        "precision": (right_1, right_1 + wrong_0),
    }  # fmt: skip
    return {"threshold": threshold} | {name: hit / n if n else None for name, (hit, n) in said.items()}


# -- client by client -------------------------------------------------------------------------------------------------
def client_measures(told: Replies, measured: Measured) -> dict[str, Tensor]:
    """What every client's own rows say, with intervals; not a number where it is not defined.  [M] each"""
    own = _named(told["own"])
    out = {"base_rate": own["base_rate"]}
    out["metric_low"], out["metric_high"] = _wilson(measured.metric.double() * own["rows"], own["rows"])
    p, n = own["positives"], own["negatives"]
    area, average = _inside(own["auroc"], p * n), _inside(own["average_precision"], p)
    errors = {
        "auroc": (area, torch.maximum(own["auroc_error"], _area_error(area, p, n))),
        "average_precision": (average, (average * (1 - average) / p).sqrt()),  # Boyd, Eng, Page, 2013
    }
    for name, (middle, error) in errors.items():
        reach = _Z * error / (middle * (1 - middle))
        out[name] = own[name]
        low, high = ((middle.logit() + side * reach).sigmoid() for side in (-1, 1))
        out[f"{name}_low"], out[f"{name}_high"] = torch.minimum(low, own[name]), torch.maximum(high, own[name])
    for name in ("log_loss", "brier"):
        out[name] = own[name]
        out[f"{name}_low"], out[f"{name}_high"] = (own[name] + side * _Z * own[f"{name}_error"] for side in (-1, 1))
        out[f"{name}_low"] = out[f"{name}_low"].clamp(min=0)
    return {name: torch.where(own["rows"] > 0, value, torch.nan) for name, value in out.items()}


def _own(told: Replies) -> dict[str, Tensor]:
    """What clients say of their own rows, by name; or all of them together, as one.  [M]"""
    if "own" in told.values:
        return _named(told["own"])
    return {name: told[name].double().reshape(1) for name in ("rows", "log_loss", "brier")}


def _named(own: Tensor) -> dict[str, Tensor]:
    return dict(zip(OWN, own.double().unbind(-1), strict=True))


def _inside(share: Tensor, n: Tensor) -> Tensor:
    """Off 0 and 1, as if half a row more had been seen of either side."""
    return (share * n + 0.5) / (n + 1)


def _area_error(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """Standard error of an area as Hanley and McNeil (1982) have it: where all pairs are in order, DeLong's would be 0."""
    one, two = a / (2 - a), 2 * a * a / (1 + a)
    return ((a * (1 - a) + (p - 1) * (one - a * a) + (n - 1) * (two - a * a)) / (p * n)).clamp(min=0).sqrt()


def _wilson(hits: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Wilson's 95 % interval of a share."""
    centre = (hits + _Z * _Z / 2) / (n + _Z * _Z)
    reach = _Z / (n + _Z * _Z) * (hits * (n - hits) / n.clamp(min=1) + _Z * _Z / 4).clamp(min=0).sqrt()
    return centre - reach, centre + reach


def share_interval(hits: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of one share."""
    low, high = _wilson(torch.tensor(hits, dtype=torch.float64), torch.tensor(n, dtype=torch.float64))
    return max(float(low), 0.0), min(float(high), 1.0)
