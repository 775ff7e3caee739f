# SPDX-License-Identifier: Apache-2.0
"""Answers that do not count: of clients whose numbers are not finite, cannot be, or are absurd beside others'.

A worker leaves out, on the spot, who answers with numbers that are not finite or that are negative where that cannot be. How
long values are is told as counts of clients by half powers of two, which add up over blocks and nodes; the engine takes the
usual length from them, and if somebody is beyond what `Ask.limits` allows, asks once more from where clients were and says
the bounds. So nothing depends on blocks, on the order of clients or on earlier rounds, and honest clients are asked once.

Where half of the clients' numbers or more are not finite, the fault is not theirs (a step size too large): all count.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.protocol import Ask, Block, Limit, Lowest, RowProduct

__all__ = [
    "BINS", "NOT_FINITE", "Bounds", "ClientWarning", "Look", "bounds_after", "counted_lengths", "from_counts",
    "left_out_text", "lengths_of", "longest", "look", "most_are_wild", "was_sent_finite",
]  # fmt: skip

_LEAST = 5  # clients from which others' lengths say something
_USUAL = (
    0.65  # of the clients do not exceed the usual length: less than half may be bad, and an honest half may be longer
)
_ROUNDING = 1e-6  # of a matrix' length that its diagonal may be below zero
_LONGEST = 1e300  # lengths overflow where values do not
BINS = 1024  # lengths that are told apart: half powers of two from 2^-256 to 2^256
_LEAST_LENGTH = 2.0**-256
_NAMED = 5  # clients that are named in a sentence
NOT_FINITE = "is not finite"


class ClientWarning(UserWarning):
    """Some clients' answers do not count."""


@dataclass(frozen=True)
class Bounds:
    """What an engine has learnt from the lengths of all clients' values.

    Attributes
    ----------
    clip, out : dict
        Field -> the length to which longer values are shortened, and beyond which a client is left out.
    everyone : bool
        Whether clients count whose numbers are not finite.
    """

    clip: Mapping[str, float] = field(default_factory=dict)
    out: Mapping[str, float] = field(default_factory=dict)
    everyone: bool = False


@dataclass(frozen=True)
class Look:
    """What a block's replies look like.

    Attributes
    ----------
    reply : dict
        What is to be folded: long values are shortened.
    keep : Tensor
        [S, C] who counts.
    why : list
        (run, client's place, reason) of who does not.
    lengths : dict
        Field -> [S, C] length, 0 where nothing can be said.
    wild : Tensor
        [S] how many clients' numbers are not finite, whether they count or not.
    """

    reply: dict[str, Any]
    keep: Tensor
    why: list[tuple[int, int, str]]
    lengths: dict[str, Tensor]
    wild: Tensor


def look(
    ask: Ask, bounds: Sequence[Bounds], strictly: Callable[[int], bool], reply: dict[str, Any], block: Block
) -> Look:
    """Look at a block's replies, of all runs at once.

    `strictly` tells whether clients of a run are left out on the spot; it is asked of those in which somebody would be.
    """
    reply, weights, n = dict(reply), _weights(ask), block.n
    sent = list(dict.fromkeys([*ask.fold, *(name for how in ask.fold.values() for name in how.needs)]))
    keep = torch.ones(len(bounds), len(n), dtype=torch.bool)
    tame = keep
    why: list[tuple[int, int, str]] = []
    lengths: dict[str, Tensor] = {}

    def leave_out(bad: Tensor, reason: str, always: bool = False) -> None:
        nonlocal keep
        if not bool(bad.any()):
            return
        if not always:
            bad = bad & torch.tensor([[some and strictly(s)] for s, some in enumerate(bad.any(1).tolist())])
        for s, c in (bad & keep).nonzero().tolist():
            why.append((s, c, reason))
        keep = keep & ~bad

    for name in sent:
        value, limit = reply[name], ask.limits.get(name)
        numbers = value.g if isinstance(value, RowProduct) else value
        if not numbers.is_floating_point() or not numbers.numel():
            continue
        measured = limit is not None and limit.finite
        finite, length = _lengths(numbers) if measured else (_finite(numbers), numbers)  # [S, C] each
        if (limit is None or limit.finite) and not bool(finite.all()):
            tame = tame & finite
            leave_out(~finite, f"'{name}' {NOT_FINITE}")
        if name in weights:
            leave_out(numbers.reshape(*numbers.shape[:2], -1).amin(2) < 0, f"'{name}' is negative")
        if limit is None or not limit.finite:
            continue
        length = (_rows(value, block) * length if isinstance(value, RowProduct) else length).clamp(max=_LONGEST)
        if limit.kind != "any":
            leave_out(_negative(value, length, limit), f"'{name}' is negative")
        length = length / n.clamp(min=1) if limit.per_row else length
        lengths[name] = torch.where(finite & (n > 0), length, 0.0)
        if any(name in b.out for b in bounds):
            out = torch.tensor([b.out.get(name, math.inf) for b in bounds], dtype=torch.float64)[:, None]
            leave_out(length > out, f"'{name}' is far longer than others'", always=True)
        if any(name in b.clip for b in bounds):
            clip = torch.tensor([b.clip.get(name, math.inf) for b in bounds], dtype=torch.float64)[:, None]
            reply[name] = _times(value, torch.where(length > clip, clip / length, 1.0))
    if why:
        lengths = {name: torch.where(keep, length, 0.0) for name, length in lengths.items()}
    return Look(reply, keep, why, lengths, (~tame).sum(1))


def was_sent_finite(ask: Ask) -> bool:
    """Whether clients were asked with finite numbers: else nobody's answer can be, and nobody is to blame."""
    return all(
        bool(value.isfinite().all())
        for value in ask.shared.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    )


def _finite(numbers: Tensor) -> Tensor:
    """[S, C] whether all of a client's numbers are finite: their sum tells, unless it overflows."""
    if numbers.dim() == 2:
        return numbers.isfinite()
    finite = numbers.sum(_rest(numbers)).isfinite()
    return finite if bool(finite.all()) else _looked_through(numbers, finite, ~finite)


def _lengths(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[S, C] whether all of a client's numbers are finite, and their norm, in one pass unless squares overflow."""
    norm = _norm(numbers)
    finite = norm.isfinite()
    if numbers.dim() == 2 or bool(finite.all()):
        return finite, norm
    finite = _looked_through(numbers, finite, norm.isinf())  # a norm is not a number only where one of them is not
    over = finite & norm.isinf()
    if bool(over.any()):
        norm[over] = torch.linalg.vector_norm(numbers[over].flatten(1), dim=1, dtype=torch.float64)
    return finite, norm


def _looked_through(numbers: Tensor, finite: Tensor, doubt: Tensor) -> Tensor:
    """Look at every number of clients of whom it is in doubt."""
    finite[doubt] = numbers[doubt].isfinite().flatten(1).all(1)
    return finite


def _rest(values: Tensor) -> tuple[int, ...]:
    """All axes but those of runs and clients: reduced as they lie, large values are not copied."""
    return tuple(range(2, values.dim()))


def _weights(ask: Ask) -> set[str]:
    """Fields by which clients are weighted."""
    return {name for how in ask.fold.values() if not isinstance(how, Lowest) for name in how.needs}


def _rows(value: RowProduct, block: Block) -> Tensor:
    """[1, C] by how much a product over rows, which is not formed, can be longer than its other factor."""
    rows = (
        block.once("length of all rows", lambda: _norm(block.x[None])) if value.x is block.x else _norm(value.x[None])
    )
    return rows.square() if value.pairs else rows


def _norm(values: Tensor) -> Tensor:
    """[S, C, ...] -> [S, C]"""
    parts = torch.linalg.vector_norm(values, dim=(-2, -1)) if values.dim() > 4 else values  # matrices first: a third
    rest = _rest(parts)
    return (torch.linalg.vector_norm(parts, dim=rest) if rest else parts.abs()).to(torch.float64)


def _negative(value: Any, length: Tensor, limit: Limit) -> Tensor:
    if limit.kind == "definite":
        value = value.diagonal(dim1=-2, dim2=-1)
    rest = _rest(value)
    least = value.amin(rest) if rest else value
    return least < -_ROUNDING * length  # type: ignore[no-any-return]


def _times(value: Any, factor: Tensor) -> Any:
    if isinstance(value, RowProduct):
        return value.times(factor)
    return value * factor.to(value.dtype).view(*factor.shape, *(1,) * (value.dim() - 2))


# -- what all clients' lengths say ------------------------------------------------------------------------------------
def lengths_of(length: Tensor) -> list[Tensor]:
    """Count clients by the length of their values: rows of (half powers of two, clients), for every run.

    Length 0 tells nothing.  [S, C] -> S times [L, 2]
    """
    known = length.numpy()  # of few numbers, in numpy: a fraction of torch's time
    squares = np.square(known.clip(_LEAST_LENGTH, 1 / _LEAST_LENGTH))
    at = np.where(known > 0, (np.frexp(squares)[1] + BINS // 2).clip(max=BINS), 0).astype(np.int64)
    at += (BINS + 1) * np.arange(len(at))[:, None]
    counts = np.bincount(at.ravel(), minlength=len(at) * (BINS + 1)).reshape(len(at), -1)[:, 1:]
    run, place = counts.nonzero()
    rows = torch.from_numpy(np.stack([place - BINS // 2, counts[run, place]], 1))
    return list(torch.split(rows, np.bincount(run, minlength=len(at)).tolist()))


def counted_lengths(lengths: Tensor) -> np.ndarray:
    """All counts of a run, also of lengths that nobody has, so that they add up.  [L, 2] -> [B]"""
    counts = np.zeros(BINS, dtype=np.int64)
    np.add.at(counts, lengths[:, 0].numpy() + BINS // 2, lengths[:, 1].numpy())
    return counts


def from_counts(counts: Tensor) -> Tensor:
    """Undo `counted_lengths`.  [B] -> [L, 2]"""
    there = counts.nonzero()[:, 0]
    return torch.stack([there - BINS // 2, counts[there]], 1)


def bounds_after(ask: Ask, lengths: Mapping[str, Tensor], left_out: Iterable[str], n_clients: int) -> Bounds | None:
    """What is to be asked again with; None where nobody is beyond.

    Parameters
    ----------
    lengths : mapping
        Field -> counts of clients by length, of all blocks and nodes: see `lengths_of`.
    left_out : iterable of str
        Why clients were left out.
    n_clients : int
        That were asked.
    """
    if most_are_wild(sum(why.endswith(NOT_FINITE) for why in left_out), n_clients):
        return Bounds(everyone=True)
    clip, out = {}, {}
    for name, counts in lengths.items():
        middle, most = _usual_and_most(counts)
        if not middle:
            continue
        limit = ask.limits[name]
        within, beyond = (max(times * middle, limit.floor) for times in (limit.clip, limit.out))
        if most >= within:
            clip[name] = within
        if most >= beyond:
            out[name] = beyond
    return Bounds(clip, out) if clip or out else None


def most_are_wild(wild: int, n_clients: int) -> bool:
    """Whether so many clients' numbers are not finite that the fault is not theirs."""
    return wild > 0 and n_clients <= 2 * wild


def longest(counts: Tensor | None) -> float:
    """How many times as long as usual the longest value is; 0 where that is not known."""
    middle, most = (0.0, 0.0) if counts is None else _usual_and_most(counts)
    return most / middle if middle else 0.0


def _usual_and_most(counts: Tensor) -> tuple[float, float]:
    """The length that most clients do not exceed, rounded up to a half power of two, and the largest; 0 where too few say.

    Of so few numbers that lists take a tenth of the time.
    """
    rows = sorted(counts.tolist())
    enough = _USUAL * sum(clients for _, clients in rows)
    if enough < _USUAL * _LEAST:
        return 0.0, 0.0
    so_far = 0
    for half_power, clients in rows:
        so_far += clients
        if so_far >= enough:
            return 2.0 ** ((half_power + 1) / 2), 2.0 ** (rows[-1][0] / 2)
    return 0.0, 0.0


def left_out_text(names: np.ndarray | Sequence[str], left_out: Mapping[int, str]) -> list[str]:
    """Say who was left out, in a sentence for every reason."""
    said = []
    for why in sorted(set(left_out.values())):
        who = [str(names[one]) for one in sorted(left_out) if left_out[one] == why]
        more = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
        listed = ", ".join(f"'{one}'" for one in who[:_NAMED]) + more
        said.append(f"client{'s' * (len(who) > 1)} {listed} left out: {why}")
    return said
