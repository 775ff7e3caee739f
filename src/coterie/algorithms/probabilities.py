# SPDX-License-Identifier: Apache-2.0
"""How good are predicted probabilities? Clients count their rows by log odds, in fixed bins, and the counts are summed.

The area under the ROC curve, the average precision and the calibration of all clients' rows together follow from these
sums: rows of a bin count as ties. That is as precise as the bins are narrow: up to four classes 0.006. The area is off by at
most half the share of pairs of a positive and a negative row that share a bin (`Ranked.within`). Log loss and Brier score
are means over rows, and exact. What a client says of its own rows alone is exact as well.

Of more than two classes each is set against the others, and what is told is the mean over classes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.local import served
from coterie.models import decided
from coterie.protocol import Ask, Block, Fold, Limit, Stack, Sum, Tensors, WeightedMean, answers

__all__ = [
    "BINS", "OWN", "Ranked", "bin_centres", "bins_for", "influence_ask", "probabilities_ask",
    "probabilities_together_ask", "ranked", "tell_influence", "tell_probabilities",
]  # fmt: skip

BINS = 4096  # of up to four classes
_ALL_BINS, _LEAST_BINS = 16384, 1024  # of more than four, which share them
_REACH = 12.0  # log odds beyond which rows count as ties: probabilities of 6e-6
_FAR = 1e6  # outputs beyond are taken as this
_CLIENT_ROWS = 8  # that clients are taken to have, where memory is sized by rows

OWN = (
    "rows", "base_rate", "log_loss", "log_loss_error", "brier", "brier_error", "auroc", "auroc_error",
    "average_precision", "positives", "negatives",
)  # fmt: skip


def probabilities_ask(judge: Ask) -> Ask:
    """Ask what probabilities are worth of the models that another ask judges."""
    model = judge.shared["model"]
    views = 1 if model.n_outputs == 2 else model.n_outputs
    fold: dict[str, Fold] = {"counts": Sum(), "confusion": Sum(), "own": Stack()}
    scratch = model.n_outputs * 8 + 2 * bins_for(model.n_outputs) * views // _CLIENT_ROWS
    return replace(
        judge, step=tell_probabilities, fold=fold, scratch=scratch, limits={"own": Limit(finite=False)}
    )  # what a client of one class does not have is not a number


def probabilities_together_ask(judge: Ask) -> Ask:
    """The same over all clients together, and nothing of a single one."""
    means: dict[str, Fold] = {name: WeightedMean("rows") for name in ("log_loss", "brier")}
    fold = {"counts": Sum(), "confusion": Sum(), **means, "rows": Sum(), "there": Sum()}
    return replace(probabilities_ask(judge), fold=fold, limits={})


def influence_ask(judge: Ask, counts: Tensor) -> Ask:
    """Ask how area and average precision of all rows would change if a client counted more.  counts [V, 2, B]"""
    scratch = judge.shared["model"].n_outputs * 8 + 4 * counts.numel() // _CLIENT_ROWS
    shared = {**judge.shared, "counts": counts}
    return replace(judge, step=tell_influence, shared=shared, fold={"influence": Stack()}, scratch=scratch, limits={})


def bins_for(n_classes: int) -> int:
    """How many bins each class has: the more classes, the fewer."""
    return max(_LEAST_BINS, min(BINS, _ALL_BINS // n_classes))


def bin_centres(bins: int) -> Tensor:
    """The log odds in the middle of every bin.  [B]"""
    return (torch.arange(bins, dtype=torch.float64) + 0.5) * (2 * _REACH / bins) - _REACH


@dataclass(frozen=True)
class Ranked:
    """What counts of negative and positive rows by bin say, [...] each; not a number where there is only one kind."""

    auroc: Tensor
    within: Tensor  # by how much the area may be off at most, since rows of a bin are not told apart
    average_precision: Tensor


def ranked(counts: Tensor) -> Ranked:
    """Area under the ROC curve and average precision.  counts [..., 2, B]"""
    negative, positive = counts.double().unbind(-2)
    n, p = negative.sum(-1), positive.sum(-1)
    pairs = torch.where((n > 0) & (p > 0), n * p, torch.nan)
    won = (positive * (_below(negative) + negative / 2)).sum(-1)
    precision = _from(positive) / _from(negative + positive).clamp(min=1)
    average = (positive * precision).sum(-1) / p.clamp(min=1)
    together = (positive * negative).sum(-1) / pairs
    return Ranked(won / pairs, together / 2, torch.where(pairs.isnan(), torch.nan, average))


def _below(counts: Tensor) -> Tensor:
    return counts.cumsum(-1) - counts


def _from(counts: Tensor) -> Tensor:
    """Rows of a bin and of those above."""
    return counts.flip(-1).cumsum(-1).flip(-1)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    counts=Sum(), confusion=Sum(), own=Stack(), log_loss=WeightedMean("rows"), brier=WeightedMean("rows"), rows=Sum(),
    there=Sum(),
)  # fmt: skip
def tell_probabilities(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """Count rows by class and log odds, and by class and prediction; and say what the client's own rows make of them."""
    scores = _scores(shared, private, data)  # [S, C, N, O]
    odds, positive, p = _views(scores, data)  # [S, C, V, N], [C, V, N], [S, C, N, O]
    counts = _counted(odds, positive, data).float()  # exact up to 16 million rows of a bin
    classes = scores.shape[-1]
    predicted = decided(scores, shared["model"].threshold)
    one_hot = torch.nn.functional.one_hot
    actual = one_hot(data.target, classes).double() * data.real[..., None]
    confusion = torch.einsum("cna,scnb->scab", actual, one_hot(predicted, classes).double())
    own = _own(scores, p, odds, positive, actual, data)
    means = {name: own[..., OWN.index(name)].nan_to_num() for name in ("log_loss", "brier")}
    return {
        "counts": counts,
        "confusion": confusion,
        "own": own,
        **means,
        "rows": data.n[None],
        "there": data.n[None] > 0,
    }, {}


@answers(influence=Stack())
def tell_influence(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """By how much the area and the average precision of all rows change, for each time that the client counts more."""
    odds, positive, _ = _views(_scores(shared, private, data), data)
    own = _counted(odds, positive, data)  # [S, C, V, 2, B]
    counts = shared["counts"][:, None].double()  # [S, 1, V, 2, B]
    found = ranked(counts)
    (own_n, own_p), (n, p) = own.unbind(-2), counts.unbind(-2)
    total_n, total_p = n.sum(-1), p.sum(-1)
    won = (own_p * (_below(n) + n / 2) + p * (_below(own_n) + own_n / 2)).sum(-1) / (total_n * total_p)
    share_n, share_p = own_n.sum(-1) / total_n, own_p.sum(-1) / total_p
    area = won - found.auroc * (share_n + share_p)
    hits, rows = _from(p), _from(n + p).clamp(min=1)
    moved = _from(own_p) / rows - hits * _from(own_n + own_p) / rows.square()
    average = (own_p * hits / rows + p * moved).sum(-1) / total_p - found.average_precision * share_p
    return {"influence": torch.stack([area.nanmean(-1), average.nanmean(-1)], -1).nan_to_num()}, {}


def _scores(shared: dict[str, Any], private: Tensors, data: Block) -> Tensor:
    """Outputs, which are finite even of a model that diverged.  [S, C, N, O]"""
    return served(shared, private, data).double().nan_to_num(nan=0.0).clamp(-_FAR, _FAR)


def _views(scores: Tensor, data: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Log odds of every class against the others (of two, of the second), who is of it, and probabilities."""
    log_p = scores.log_softmax(-1)
    p = log_p.exp()
    if scores.shape[-1] == 2:
        return (log_p[..., 1] - log_p[..., 0])[:, :, None], (data.target == 1)[:, None], p
    odds = log_p - torch.log1p(-p.clamp(max=1 - 1e-16))
    classes = torch.arange(scores.shape[-1])
    return odds.transpose(-2, -1).contiguous(), data.target[:, None] == classes[:, None], p


def _counted(odds: Tensor, positive: Tensor, data: Block) -> Tensor:
    """Count negative and positive rows by bin.  odds [S, C, V, N], positive [C, V, N] -> [S, C, V, 2, B]"""
    bins = bins_for(max(2, odds.shape[2]))
    place = ((odds + _REACH) * (bins / (2 * _REACH))).clamp(0, bins - 1).long()
    who = torch.stack([~positive, positive], 2) & data.real[:, None, None]  # [C, V, 2, N]
    there = who.double().expand(*odds.shape[:3], *who.shape[2:])
    out = torch.zeros(*there.shape[:-1], bins, dtype=torch.float64)
    return out.scatter_add_(-1, place[..., None, :].expand_as(there), there)


def _own(scores: Tensor, p: Tensor, odds: Tensor, positive: Tensor, actual: Tensor, data: Block) -> Tensor:
    """What every client's own rows say, in the order of `OWN`.  -> [S, C, 11]"""
    n = data.n.double().clamp(min=1)
    loss = -(scores.log_softmax(-1) * actual).sum(-1)  # [S, C, N]
    square = (p - actual).square().sum(-1) * data.real / (2 if p.shape[-1] == 2 else 1)
    log_loss, brier = (_mean_and_error(value, data, n) for value in (loss, square))
    base = (actual.sum(1).amax(-1) / n).expand_as(log_loss[0])
    there = positive & data.real[:, None]
    area, error, average = _ranks(odds, there, data.real[:, None] & ~there)
    rows, hits = data.n.double().expand_as(base), there.sum(-1).double().mean(-1).expand_as(base)
    columns = (rows, base, *log_loss, *brier, area, error, average, hits, rows - hits)
    return torch.stack(columns, -1)


def _mean_and_error(value: Tensor, data: Block, n: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over a client's rows, and its standard error.  [S, C, N] -> [S, C] each"""
    mean = value.sum(-1) / n
    spread = ((value - mean[..., None]).square() * data.real).sum(-1) / (n - 1).clamp(min=1)
    return mean, torch.where(data.n > 1, (spread / n).sqrt(), torch.nan)


def _ranks(odds: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Area under the ROC curve, its standard error (DeLong et al., 1988) and average precision, exactly.

    odds [S, C, V, N], positive, negative [C, V, N] -> [S, C] each, the mean over classes that have both kinds of rows
    """
    p, n = positive.sum(-1).double(), negative.sum(-1).double()  # [C, V]
    both = (p > 0) & (n > 0)
    below_n, from_n = _shares(odds, negative)
    below_p, from_p = _shares(odds, positive)
    area = (below_n * positive).sum(-1) / p.clamp(min=1)
    moved = (below_n - area[..., None]) * positive / p.clamp(min=1)[..., None]
    moved = moved + (1 - below_p - area[..., None]) * negative / n.clamp(min=1)[..., None]
    hits, others = from_p * p[..., None], from_n * n[..., None]
    precision = hits / (hits + others).clamp(min=1)
    average = (precision * positive).sum(-1) / p.clamp(min=1)
    classes = both.sum(-1).clamp(min=1)
    variance = ((moved * both[..., None]).sum(-2) / classes[:, None]).square().sum(-1)
    none = ~both.any(-1)
    area, average = ((value * both).sum(-1) / classes for value in (area, average))
    area, error, average = (value.masked_fill(none, torch.nan) for value in (area, variance.sqrt(), average))
    return area, error, average


def _shares(odds: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows of one kind, the share below each row (ties count half), and the share that is not below it."""
    total = who.sum(-1, keepdim=True).double().clamp(min=1)
    ordered = torch.where(who, odds, torch.inf).sort(-1).values
    low, high = (torch.searchsorted(ordered, odds, right=side).double() for side in (False, True))
    return (low + high) / 2 / total, (who.sum(-1, keepdim=True) - low) / total
