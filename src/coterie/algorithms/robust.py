# SPDX-License-Identifier: Apache-2.0
"""How clients' updates are averaged where some clients are bad: `robust` of every algorithm that averages.

`clip` limits lengths, and works with sums alone: updates longer than 10 times the usual are shortened to that, and clients
beyond 30 times are left out. Updates that are short beside the model are never touched, so that models which have converged
keep clients who still move. `trimmed` and `median` (Yin et al., ICML 2018) also withstand a minority whose updates are as
long as others', and so does `near`, the mean of updates that are near to most others'; they need every client's own.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from coterie.protocol import Ask, ByCluster, Fold, Limit, WeightedMean
from coterie.robust_folds import MEDIAN, Trimmed, TrimmedByCluster

__all__ = ["COUNT", "LOSSES", "ONCE", "SPREAD", "SQUARES", "Robust", "robustly"]

Robust = Literal["none", "clip", "trimmed", "median", "near"]

COUNT = Limit(out=3.0, floor=4.0, per_row=True, kind="positive")  # what counts a client's rows, in several fits
ONCE = Limit(out=2.0, floor=4.0, kind="positive")  # what counts clients
LOSSES = Limit(kind="positive")
SPREAD = Limit(out=1000.0, per_row=True)  # moments of a row
SQUARES = Limit(kind="definite")  # sums of products

_CLIP, _OUT = 10.0, 30.0  # times the usual length
_SHORT = 0.1  # of the model's length
_TRIMMED = 0.4  # of the weight, at either end


def robustly(ask: Ask, how: Robust, theta: Tensor, length: float = 1.0) -> Ask:
    """Average the `update` of an ask in another way.

    Parameters
    ----------
    theta : Tensor
        [..., P] what is moved.
    length : float
        By which updates are multiplied before they move it.
    """
    if how == "none":  # a round only tells how long the longest was
        return replace(ask, limits={**ask.limits, "update": Limit()})
    short = _SHORT * float(theta.norm(dim=-1).nan_to_num(0.0, 0.0).max()) / max(abs(length), 1e-300)
    if how == "clip":
        return replace(ask, limits={**ask.limits, "update": Limit(_CLIP, _OUT, short)})
    share, near = _TRIMMED if how == "trimmed" else MEDIAN, how == "near"
    fold = {**ask.fold, "update": _trimming(ask.fold["update"], share, near)}
    return replace(ask, fold=fold, limits={**ask.limits, "update": Limit(out=_OUT, floor=short)})


def _trimming(fold: Fold, share: float, near: bool) -> Fold:
    if isinstance(fold, ByCluster):
        return TrimmedByCluster(fold.share, share, fold.per_cluster, near)
    assert isinstance(fold, WeightedMean)
    return Trimmed(fold.by, share, near)
