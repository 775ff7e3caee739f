# SPDX-License-Identifier: Apache-2.0
"""Sums over clients of what models are worth to them: all that a choice among structures and settings needs.

When a structure is judged, clients keep how each of its settings serves their held-out rows (`keep_judged`), fold by fold,
and tell sums only. A score is the mean log-likelihood of a client's held-out rows. For regression noise is normal, with a
variance for every client: it is what the errors in its other folds show, drawn to a common variance where these are few. All
structures are judged by that rule, so that none gains by its noise; and a client that no model serves has a wide noise, and
does not outweigh the others. The common variances are found by sums (`noise_sums`).

Scores are compared by sums of their products (`score_moments`), also with clients drawn again: each draws by its key how
often it is there. Whether it is an outlier it decides itself too, by what `count_distances` has told of all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.linear_by_fold import Problem, noise_level
from coterie.algorithms.outliers import scored
from coterie.algorithms.robust import COUNT, ONCE
from coterie.protocol import Block, Limit, RowProduct, Stack, Sum, Tensors, answers, from_sums, one_run_at_a_time

__all__ = [
    "COLUMNS",
    "ERRORS",
    "HELD",
    "LIMITS",
    "OUTLIER",
    "OUTLIER_SCORE",
    "PLAIN",
    "ROW_DEVIATION",
    "SHAPED",
    "SIDE",
    "SUMS",
    "count_distances",
    "fresh_judged",
    "hand_on",
    "keep_judged",
    "kept_name",
    "noise_sums",
    "normal_score",
    "score_moments",
    "tags_of",
    "tell_new",
    "tell_scores",
]  # fmt: skip

PLAIN, ERRORS, SHAPED = 0, 1, 2  # losses are log-likelihoods; half squared errors; log-likelihoods beyond noise's shape
OUTLIER = 3.5  # score above which a client is called an outlier
ROW_DEVIATION = math.sqrt(0.5)  # of a row's log density under normal noise: half of a squared normal variable
HELD = 1e6  # how far a score may be from another, in nats per row: more is said of no model, also of one that diverged

LIMITS = {
    "inverse": Limit(kind="positive"), "there": ONCE, "rows": COUNT, "below": replace(ONCE, kind="any"),
    "count": ONCE, "better": ONCE, "sizes": ONCE, "overall": Limit(kind="positive"),
}  # fmt: skip

COLUMNS = ("loss", "metric", "rows", "least", "label", "margin")  # of what clients keep
_LOSS, _METRIC, _ROWS, _LEAST, _LABEL, _MARGIN = range(len(COLUMNS))
_WILD = 1e15  # the largest metric: squared errors may be in the target's own units
_TINY = 1e-12
_EQUAL = 1e-9  # gains that only rounding tells from none
OUTLIER_SCORE = "outlier score"  # under this name clients keep theirs
SIDE = 64  # clients are counted in so many times so many bins
_GATHERED = "scores gathered"
_MOST_DRAWN = 12  # times that a client is drawn, at most: more has a chance of 1e-10


# -- what clients keep ------------------------------------------------------------------------------------------------
def kept_name(problem: Problem, tag: str) -> str:
    """Under which name clients keep how a structure serves them, by the deal of the folds."""
    return f"{tag} scores {problem.deal}" if problem.deal else f"{tag} scores"


def fresh_judged(problem: Problem, tag: str, settings: int) -> Tensors:
    """A client that has not judged anything."""
    return {kept_name(problem, tag): torch.zeros(len(problem.held), settings, len(COLUMNS), dtype=torch.float64)}


def keep_judged(problem: Problem, tag: str, reply: Tensors) -> Tensors:
    """What a client keeps of how it is served: values [C, F, J] by fold and setting."""
    settings, nothing = reply["loss"].shape, torch.zeros(())
    every = [reply.get(name, nothing).to(torch.float64).expand(settings) for name in COLUMNS]
    return {kept_name(problem, tag): torch.stack(every, -1)}


# -- scores -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Scores:
    """How settings serve clients, as far as these have judged all of them.  D deals, C clients, J settings."""

    by_deal: Tensor  # [D, C, J]
    metric: Tensor  # [C, J]
    test: Tensor  # [C, J]
    test_metric: Tensor  # [C, J]
    least: Tensor  # [C, J] the loss of rows that are predicted exactly
    rows: Tensor  # [C]
    test_rows: Tensor  # [C]
    enough: Tensor  # [C] who has rows enough, whether it has judged all or not
    judged: Tensor  # [C]

    @property
    def score(self) -> Tensor:
        """[C, J]"""
        return self.by_deal.mean(0)


def _kept(shared: dict[str, Any], private: Tensors, deal: int) -> Tensor:
    """[C, V + 1, J, columns] of all structures; without test rows, zeros."""
    names = [f"{tag} {deal}" if deal else tag for tag in shared["kept"]]
    every = torch.cat([private[name] for name in names], 2)
    if every.shape[1] == shared["n_folds"]:
        every = torch.cat([every, torch.zeros_like(every[:, :1])], 1)
    return every


def _others(part: Tensor) -> tuple[Tensor, Tensor]:
    """Half squared errors and rows of all other folds; for test rows, of all folds.  [C, V + 1, J, columns] -> [..., J]"""
    loss, n = part[..., _LOSS], part[..., _ROWS]
    h, m = loss[:, :-1].sum(1, keepdim=True), n[:, :-1].sum(1, keepdim=True)
    own = torch.ones(loss.shape[1], 1, dtype=loss.dtype)
    own[-1] = 0.0
    return h - loss * own, m - n * own


def normal_score(half_squares: Tensor, n: Tensor, noise: Tensor) -> Tensor:
    """Log-likelihood of n rows with normal noise."""
    noise = noise.clamp(min=_TINY)
    value: Tensor = -0.5 * n * (2 * math.pi * noise).log() - half_squares / noise
    return value


def _likelihoods(shared: dict[str, Any], part: Tensor, deal: int) -> Tensor:
    """Of held-out rows.  [C, V + 1, J, columns] -> [C, V + 1, J]"""
    loss, n, kind = part[..., _LOSS], part[..., _ROWS], shared["kinds"]
    value: Tensor = -loss - shared["shape"][deal] * n
    if bool((kind == ERRORS).any()):
        noise = noise_level(*_others(part), shared["noise"][deal])
        value = torch.where(kind == ERRORS, normal_score(loss, n, noise), value)
    return value


def _scores(shared: dict[str, Any], private: Tensors) -> _Scores:
    parts = [_kept(shared, private, deal) for deal in range(len(shared["noise"]))]
    first, by_deal, metric = parts[0], [], []
    enough = first[..., _ROWS].amax(2)[:, :-1].sum(1) >= shared["n_folds"]
    judged = enough & parts[0].isfinite().all(3).all(1).any(1)  # who answers no question with numbers is out
    for deal, part in enumerate(parts):
        n = part[:, :-1, :, _ROWS].sum(1)  # [C, J]
        judged = judged & (n > 0).all(1)
        n = n.clamp(min=1)
        by_deal.append(_bounded(_likelihoods(shared, part, deal)[:, :-1].sum(1) / n))
        metric.append(part[:, :-1, :, _METRIC].sum(1) / n)
    rows, tested = first[:, :-1, :, _ROWS].sum(1), first[:, -1, :, _ROWS]
    on_test = _likelihoods(shared, first, 0)[:, -1] / tested.clamp(min=1)
    return _Scores(
        torch.stack(by_deal), _bounded(torch.stack(metric).mean(0), _WILD), _bounded(on_test),
        _bounded(first[:, -1, :, _METRIC] / tested.clamp(min=1), _WILD), first[:, :-1, :, _LEAST].sum(1) / rows.clamp(min=1),
        rows[:, 0], tested[:, 0], enough, judged,  # mixtures may look at some of many rows
    )  # fmt: skip


def _bounded(values: Tensor, most: float = HELD) -> Tensor:
    """A score that is no number is the worst, as is a metric of errors."""
    return values.nan_to_num(nan=-HELD if most == HELD else most, posinf=most, neginf=-most).clamp(-most, most)


def _distance(shared: dict[str, Any], scores: _Scores) -> tuple[Tensor, Tensor]:
    """How far each client is from being served, and what it owes to chance.  [C] each

    Of numbers and densities by the score itself under whatever shared structure suits it best; of classes (`own`) by what a
    model of its own would gain.
    """
    score, rows = scores.score, scores.rows.clamp(min=1)
    if not shared["own"]:
        best = (score[:, list(shared["shared"])] + scores.least[:, shared["least"]][:, None]).amax(1)
        return -best, ROW_DEVIATION / rows.sqrt()
    gap = score[:, list(shared["own"])].amax(1) - score[:, list(shared["shared"])].amax(1)
    return gap, (2 * gap.clamp(min=0) / rows).sqrt()


def _outlying(shared: dict[str, Any], scores: _Scores) -> Tensor:
    """[C] outlier scores: NaN for who is not judged; 0 before it is known what is usual."""
    if "usual" not in shared:
        return torch.where(scores.judged, 0.0, math.nan).to(torch.float64)
    distance, noise = _distance(shared, scores)
    middle, spread = shared["usual"]
    found = scored(distance, middle, noise.clamp(min=float(spread)))
    return torch.where(scores.judged, found, torch.nan)


def _products(values: Tensor, centre: Tensor | float, counts: Tensor) -> RowProduct:
    """Sums of products of 1, the first value less the centre, and every value less the first, as often as clients count.

    values [C, N, J], counts [C, N, R]
    """
    one, first = torch.ones_like(values[..., :1]), values[..., :1]
    return RowProduct(torch.cat([one, first - centre, values - first], -1), counts, pairs=True)


# -- on the client ----------------------------------------------------------------------------------------------------
_DONE: Tensors = dict.fromkeys((_GATHERED, OUTLIER_SCORE), torch.zeros((), dtype=torch.float64))
_INDIVIDUAL = ("score", "tested", "test_score", "outlying", "state", "label", "margin")
SUMS = ("told", "told_tested", "told_counted", "told_all", "overall", "better", "count", "pairs", "sizes")


def _marked(data: Block) -> Tensors:
    """Clients keep something, so that what came from other deals stays with them."""
    return {_GATHERED: torch.ones(len(data.ids), dtype=torch.float64)}


@answers()
@from_sums
@one_run_at_a_time
def hand_on(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Hand what is kept on to the next question."""
    return {}, {}


@answers(inverse=Sum(), slope=Sum(), there=Sum())
@from_sums
@one_run_at_a_time
def noise_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of inverse noise variances, and how they change with the common one.  -> [C, D, V + 1, J] each"""
    inverse, slope, there = [], [], []
    for deal, noise in enumerate(shared["noise"]):
        h, n = _others(_kept(shared, private, deal))
        here = ((n > 0) & h.isfinite()).to(h.dtype)
        own = noise_level(torch.where(here > 0, h, 0.0), n, noise).clamp(min=_TINY)
        change = noise_level(
            torch.zeros_like(h), n, torch.ones_like(noise)
        )  # of a client's variance with the common one
        inverse.append(here / own)
        slope.append(here * change / own.square())
        there.append(here)
    reply = {"inverse": torch.stack(inverse, 1), "slope": torch.stack(slope, 1), "there": torch.stack(there, 1)}
    return reply, _marked(data)


@answers(moments=Sum(), metrics=Sum(), rows=Sum())
@from_sums
@one_run_at_a_time
def score_moments(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of products of scores: of all judged clients that are no outliers, and of them drawn again."""
    scores = _scores(shared, private)
    counted = scores.judged & ~(_outlying(shared, scores) > OUTLIER)
    often = _drawn(shared, data.keys) * counted[:, None]  # [C, 1 + R], the first: once
    deals = len(scores.by_deal)
    by_deal = torch.zeros(len(often), deals + 1, often.shape[1], dtype=torch.float64)
    by_deal[:, 0, 0] = often[:, 0]
    for deal in range(deals):
        by_deal[:, deal + 1, 1 + deal :: deals] = often[:, 1 + deal :: deals]
    values = torch.cat([scores.score[:, None], scores.by_deal.movedim(0, 1)], 1)  # [C, 1 + D, J]
    reply: dict[str, Any] = {"moments": _products(values, shared["centre"], by_deal)}
    reply["metrics"] = _products(scores.metric[:, None], 0.0, often[:, None])
    reply["rows"] = (scores.rows * counted)[:, None]
    return reply, _marked(data)


def _drawn(shared: dict[str, Any], own: Tensor) -> Tensor:
    """How often clients are there: once, and then as drawn with replacement, by Poisson's law.  [C, 1 + R]"""
    once = torch.ones(len(own), 1, dtype=torch.float64)
    if not shared["repetitions"]:
        return once
    u = keys.uniform(keys.key(shared["key"], own), shared["repetitions"])  # [C, R]
    chances = torch.tensor([math.exp(-1) / math.factorial(k) for k in range(_MOST_DRAWN)], dtype=torch.float64)
    return torch.cat([once, torch.bucketize(u, chances.cumsum(0), right=True).to(torch.float64)], 1)


@answers(below=Sum())
@from_sums
@one_run_at_a_time
def count_distances(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Count clients by how far they are from being served: between `SIDE` squared, less 1, cut points.  -> [SIDE, SIDE]"""
    scores = _scores(shared, private)
    distance, _ = _distance(shared, scores)
    at = torch.bucketize(distance, shared["cuts"])
    high, low = (one_hot(digit, SIDE)[:, None].to(torch.float64) for digit in (at // SIDE, at % SIDE))
    reply: dict[str, Any] = {"below": RowProduct(high, low * scores.judged[:, None, None])}
    return reply, _marked(data)


@answers(**dict.fromkeys(SUMS, Sum()), **dict.fromkeys(_INDIVIDUAL, Stack()))
@from_sums
@one_run_at_a_time
def tell_scores(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """What is said of the chosen setting of every structure: sums, and for tables of clients every client's own."""
    scores = _scores(shared, private)
    some, best, base = list(shared["settings"]), shared["chosen"], shared["base"]  # places of settings, and among these
    outlying = _outlying(shared, scores)
    odd, tested = outlying > OUTLIER, scores.test_rows > 0
    score, test = scores.score[:, some], scores.test[:, some]
    metric, on_test = (_in_units(shared, value[:, some]) for value in (scores.metric, scores.test_metric))
    gain, seen = score[:, best] - score[:, base], on_test[:, best] - on_test[:, base]
    seen = -seen if shared["lower"] else seen
    counted = {"told": scores.judged, "told_tested": tested, "told_all": tested, "told_counted": tested & ~odd}
    values = {"told": metric, "told_tested": on_test, "told_all": test, "told_counted": test}
    reply: dict[str, Any] = {
        name: _products(values[name][:, None], 0.0, mask[:, None, None].to(torch.float64))
        for name, mask in counted.items()
    }
    squares = scores.test_metric[:, some] * scores.test_rows[:, None]
    reply["overall"] = torch.cat([scores.test_rows[:, None], squares], 1) * tested[:, None]
    reply["better"] = torch.stack([_sides(gain, scores.judged), _sides(seen, tested)], 1)
    absent = scores.enough & ~scores.judged
    reply["count"] = torch.stack([scores.judged, odd], 1).to(torch.float64)
    reply |= {"score": score, "tested": on_test, "test_score": test, "outlying": outlying.nan_to_num(nan=0.0)}
    reply["state"] = torch.stack([scores.judged, odd, absent, tested, scores.enough], 1).to(torch.float64)
    if shared["grouped"]:
        reply |= _groups(shared, private, absent)
    return reply, {**_marked(data), OUTLIER_SCORE: outlying}


def _in_units(shared: dict[str, Any], right: Tensor) -> Tensor:
    """Root mean squared errors in the target's units, or what else is measured."""
    return right.clamp(min=0).sqrt() * shared["scale"] if shared["scale"] else right


def _sides(gain: Tensor, there: Tensor) -> Tensor:
    """Whether a client is better off, worse off, or neither.  [C] -> [C, 3]"""
    better, worse = gain > _EQUAL, gain < -_EQUAL
    return torch.stack([better, worse, ~(better | worse)], 1) * there[:, None].to(torch.float64)


def _groups(shared: dict[str, Any], private: Tensors, absent: Tensor) -> Tensors:
    """Clients of every cluster, and by their clusters in the last fit and in each of the others.  -> [C, L, K, K]"""
    tag, size = shared["grouped"], shared["n_clusters"]
    first, *again = (
        private[f"{tag} {d}" if d else tag][:, :, 0] for d in range(len(shared["noise"]))
    )  # [C, F, columns]
    label = torch.cat([first[:, :-1], *again, first[:, -1:]], 1)[..., _LABEL].long()
    there = ~absent & (first[..., _ROWS].sum(1) > 0)
    own = one_hot(label, size) * there[:, None, None].to(torch.float64)  # [C, L, K]
    pairs = torch.einsum("cfj,ck->cfjk", own[:, :-1], own[:, -1])
    return {"sizes": own[:, -1], "pairs": pairs, "label": label, "margin": first[:, -1, _MARGIN]}


@answers(told=Sum(), scores=Sum(), count=Sum(), metric=Stack(), there=Stack())
@from_sums
@one_run_at_a_time
def tell_new(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How models serve new clients, who have no noise of their own yet."""
    part = torch.cat([private[tag][:, -1:] for tag in shared["kept"]], 2)[:, 0]  # [C, J, columns]
    loss, n, kind = part[..., _LOSS], part[..., _ROWS], shared["kinds"]
    value = torch.where(kind == ERRORS, normal_score(loss, n, shared["noise"]), -loss - shared["shape"] * n)
    there, n = (n > 0).all(1), n.clamp(min=1)
    metric, score = _in_units(shared, _bounded(part[..., _METRIC] / n, _WILD)), _bounded(value / n)
    once = there[:, None, None].to(torch.float64)
    sums: dict[str, Any] = {
        name: _products(one[:, None], 0.0, once) for name, one in (("told", metric), ("scores", score))
    }
    sums["count"] = there[:, None].to(torch.float64)
    return {**sums, "metric": metric, "there": there.to(torch.float64)}, {}


def tags_of(kept: Sequence[tuple[str, int]], deals: int, folds: tuple[int, int]) -> Tensors:
    """What clients begin with that have judged nothing: names with their settings; folds of the first deal and of others."""
    fresh = {
        f"{tag} {d}" if d else tag: torch.zeros(folds[d > 0], settings, len(COLUMNS), dtype=torch.float64)
        for d in range(deals)
        for tag, settings in kept
    }
    return fresh | _DONE
