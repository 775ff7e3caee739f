# SPDX-License-Identifier: Apache-2.0
"""Answers that do not count: of clients whose numbers are not finite, cannot be, or are absurd beside others'.

A worker leaves out, on the spot, who answers with numbers that are not finite or that are negative where that cannot be. How
long values are is told as counts of clients by half powers of two, which add up over blocks and nodes; the engine takes the
usual length from them, and if somebody is beyond what `Ask.limits` allows, asks once more from where clients were and says
the bounds. So nothing depends on blocks, on the order of clients or on earlier rounds, and honest clients are asked once.

Where half of the clients' numbers or more are not finite, the fault is not theirs (a step size too large): all count.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.protocol import Ask, Block, Limit, Lowest, RowProduct

__all__ = [
    "BINS", "NOT_FINITE", "Bounds", "ClientWarning", "Look", "bounds_after", "counted_lengths", "counts_of", "left_out_text",
    "lengths_of", "longest", "look", "most_are_wild", "was_sent_finite",
]  # fmt: skip

_LEAST = 5  # clients from which others' lengths say something
_USUAL = (
    0.65  # of the clients do not exceed the usual length: less than half may be bad, and an honest half may be longer
)
_ROUNDING = 1e-6  # of a matrix' length that its diagonal may be below zero
_LONGEST = 1e300  # lengths overflow where values do not
BINS = 1024  # lengths that are told apart: half powers of two from 2^-256 to 2^256
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


def look(ask: Ask, bounds: list[Bounds], reply: dict[str, Any], block: Block) -> Look:
    """Look at a block's replies, of all runs at once."""
    reply, weights, n = dict(reply), _weights(ask), block.n
    sent = list(dict.fromkeys([*ask.fold, *(name for how in ask.fold.values() for name in how.needs)]))
    keep = torch.ones(len(bounds), len(n), dtype=torch.bool)
    tame = keep
    why: list[tuple[int, int, str]] = []
    lengths: dict[str, Tensor] = {}

    def leave_out(bad: Tensor, reason: str) -> None:
        nonlocal keep
        if not bool(bad.any()):
            return
        for s, c in (bad & keep).nonzero().tolist():
            why.append((s, c, reason))
        keep = keep & ~bad

    strict = torch.tensor([[not b.everyone] for b in bounds])
    for name in sent:
        value, limit = reply[name], ask.limits.get(name)
        numbers = value.g if isinstance(value, RowProduct) else value
        if not numbers.is_floating_point() or not numbers.numel():
            continue
        measured = limit is not None and limit.finite and not isinstance(value, RowProduct)
        length = _norm(value) if measured else numbers.sum(_rest(numbers)) if numbers.dim() > 2 else numbers
        finite = _finite(numbers, length)  # [S, C]
        if limit is None or limit.finite:
            tame = tame & finite
            leave_out(~finite & strict, f"'{name}' {NOT_FINITE}")
        if name in weights:
            leave_out((numbers.reshape(*numbers.shape[:2], -1).amin(2) < 0) & strict, f"'{name}' is negative")
        if limit is None or not limit.finite:
            continue
        length = length.clamp(max=_LONGEST) if measured else _length(value, block)
        if limit.kind != "any":
            leave_out(_negative(value, length, limit) & strict, f"'{name}' is negative")
        length = length / n.clamp(min=1) if limit.per_row else length
        lengths[name] = torch.where(finite & (n > 0), length, 0.0)
        if any(name in b.out for b in bounds):
            out = torch.tensor([b.out.get(name, math.inf) for b in bounds], dtype=torch.float64)[:, None]
            leave_out(length > out, f"'{name}' is far longer than others'")
        if any(name in b.clip for b in bounds):
            clip = torch.tensor([b.clip.get(name, math.inf) for b in bounds], dtype=torch.float64)[:, None]
            reply[name] = _times(value, torch.where(length > clip, clip / length, 1.0))
    lengths = {name: torch.where(keep, length, 0.0) for name, length in lengths.items()}
    return Look(reply, keep, why, lengths, (~tame).sum(1))


def was_sent_finite(ask: Ask) -> bool:
    """Whether clients were asked with finite numbers: else nobody's answer can be, and nobody is to blame."""
    return all(
        bool(value.isfinite().all())
        for value in ask.shared.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    )


def _finite(numbers: Tensor, told: Tensor) -> Tensor:
    """[S, C] whether all of a client's numbers are finite: sums or lengths tell in one pass, unless they overflow."""
    finite = told.isfinite()
    if not bool(finite.all()):
        doubtful = numbers[~finite]
        finite[~finite] = doubtful.reshape(len(doubtful), -1).isfinite().all(1)
    return finite


def _rest(values: Tensor) -> tuple[int, ...]:
    """All axes but those of runs and clients: reduced as they lie, large values are not copied."""
    return tuple(range(2, values.dim()))


def _weights(ask: Ask) -> set[str]:
    """Fields by which clients are weighted."""
    return {name for how in ask.fold.values() if not isinstance(how, Lowest) for name in how.needs}


def _length(value: RowProduct, block: Block) -> Tensor:
    """[S, C] the most that the length of a product over rows can be, which is not formed."""
    rows = (
        block.once("length of all rows", lambda: _norm(block.x[None])) if value.x is block.x else _norm(value.x[None])
    )
    return ((rows.square() if value.pairs else rows) * _norm(value.g)).clamp(max=_LONGEST)


def _norm(values: Tensor) -> Tensor:
    """[S, C, ...] -> [S, C]"""
    parts = torch.linalg.vector_norm(values, dim=(-2, -1)) if values.dim() > 4 else values  # matrices first: a third
    rest = _rest(parts)
    norm: Tensor = (torch.linalg.vector_norm(parts, dim=rest) if rest else parts.abs()).to(torch.float64)
    over = ~norm.isfinite()
    if values.dtype != torch.float64 and bool(over.any()):  # squares overflow where values do not
        long = values[over]
        norm[over] = torch.linalg.vector_norm(long.reshape(len(long), -1), dim=1, dtype=torch.float64)
    return norm


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
def counts_of(length: Tensor) -> Tensor:
    """Count clients by the length of their values, in half powers of two; length 0 tells nothing.  [S, C] -> [S, B]"""
    known = length.numpy()  # of few numbers, in numpy: a fraction of torch's time
    half_powers = np.floor(2 * np.log2(np.where(known > 0, known, 1.0))) + (BINS // 2 + 1)
    at = np.where(known > 0, half_powers.clip(1, BINS), 0).astype(np.int64)
    at += (BINS + 1) * np.arange(len(at))[:, None]
    counts = np.bincount(at.ravel(), minlength=len(at) * (BINS + 1)).reshape(len(at), -1)
    return torch.from_numpy(counts[:, 1:])


def lengths_of(counts: Tensor) -> Tensor:
    """The same as rows of (half powers of two, clients), without those where nobody is.  [B] -> [L, 2]"""
    there = counts.nonzero()[:, 0]
    return torch.stack([there - BINS // 2, counts[there]], 1)


def counted_lengths(lengths: Tensor) -> np.ndarray:
    """Undo `lengths_of`: all counts, so that they add up.  [L, 2] -> [B]"""
    counts = np.zeros(BINS, dtype=np.int64)
    np.add.at(counts, lengths[:, 0].numpy() + BINS // 2, lengths[:, 1].numpy())
    return counts


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
        middle = _usual(counts)
        if middle is None:
            continue
        limit, most = ask.limits[name], 2.0 ** (int(counts[:, 0].max()) / 2)
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
    middle = None if counts is None else _usual(counts)
    return 0.0 if counts is None or middle is None else 2.0 ** (int(counts[:, 0].max()) / 2) / middle


def _usual(counts: Tensor) -> float | None:
    """The length that most clients do not exceed, rounded up to a half power of two."""
    half_powers, clients = counts.numpy().T  # of few numbers, in numpy: a tenth of torch's time
    total = int(clients.sum())
    if total < _LEAST:
        return None
    order = half_powers.argsort(kind="stable")
    at = int((clients[order].cumsum() >= _USUAL * total).argmax())
    return float(2.0 ** ((int(half_powers[order[at]]) + 1) / 2))


def left_out_text(names: np.ndarray | Sequence[str], left_out: Mapping[int, str]) -> list[str]:
    """Say who was left out, in a sentence for every reason."""
    said = []
    for why in sorted(set(left_out.values())):
        who = [str(names[one]) for one in sorted(left_out) if left_out[one] == why]
        more = f" and {len(who) - _NAMED} more" if len(who) > _NAMED else ""
        listed = ", ".join(f"'{one}'" for one in who[:_NAMED]) + more
        said.append(f"client{'s' * (len(who) > 1)} {listed} left out: {why}")
    return said
