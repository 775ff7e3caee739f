# SPDX-License-Identifier: Apache-2.0
"""Spoil some clients' rows, as a broken sensor or an adversary would, to see what the others lose.

Tian, Weng, Feng, ICML 2024, contaminate clients of real data sets and do not say how. `noise` is their simulation's outlier
client in the units of the data: the normal law with mean m + 2 s and variance 3 s^2, feature by feature, where m and s are
the client's own mean and deviation. The others are what robust methods are usually tried with.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import DiskRows, Ragged
from coterie.errors import ConfigError

__all__ = ["KINDS", "Contamination", "drawn_clients", "spoiled"]

Contamination = Literal["noise", "far", "copied", "constant", "permuted", "flipped", "huge"]
KINDS: tuple[Contamination, ...] = get_args(Contamination)

_FAR = 20.0  # deviations that far rows are moved by
_HUGE = 1e6
_COPIES = 3  # different rows that a client with copied ones has


def drawn_clients(n_clients: int, n_bad: int, seed: int) -> Tensor:
    """Draw who is bad: ascending client numbers. With more bad clients, those drawn with fewer are among them."""
    return torch.randperm(n_clients, generator=keys.generator(seed, "bad clients"))[:n_bad].sort().values


def spoiled(rows: Ragged, ids: Iterable[int], kind: Contamination, *, seed: int) -> Ragged:
    """Spoil the rows of some clients.

    Parameters
    ----------
    rows : Ragged
        Everybody's rows, in memory.
    ids : iterable of int
        The clients to spoil.
    kind : Contamination
        `noise`: normal rows (see above). `far`: moved by 20 deviations, everybody in the same direction. `copied`: copies of
        three of the rows. `constant`: the mean, in every row. `permuted`: features change places, the same in all rows of a
        client, and targets change rows. `flipped`: targets change sign, or features where there are none. `huge`: a million
        times as large.
    seed : int
        Of noise, copies and permutations.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no contamination {kind!r}", f"choose among {', '.join(KINDS)}")
    assert isinstance(rows.x, Tensor)
    assert not isinstance(rows.y, DiskRows)
    x, y = rows.x.clone(), None if rows.y is None else rows.y.clone()
    for client in ids:
        first = int(rows.layout.starts[client])
        own = slice(first, first + int(rows.layout.counts[client]))
        draws = keys.generator(seed, int(client), kind)
        x[own], new = _CHANGES[kind](x[own], None if y is None else y[own], draws)
        if y is not None and new is not None:
            y[own] = new
    return replace(rows, x=x, y=y)


Changed = tuple[Tensor, Tensor | None]


def _noise(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    """x [N, D], y [N]"""
    deviation = x.std(0, correction=0)
    made = torch.randn(x.shape, generator=draws, dtype=x.dtype)
    return x.mean(0) + 2 * deviation + 3**0.5 * deviation * made, y


def _far(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    return x + _FAR * x.std(0, correction=0), y


def _copied(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    few = torch.randint(len(x), (_COPIES,), generator=draws)
    pick = few[torch.randint(_COPIES, (len(x),), generator=draws)]
    return x[pick], None if y is None else y[pick]


def _constant(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    return x.mean(0).expand_as(x), None if y is None else y.mean().expand_as(y)


def _permuted(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    columns = torch.randperm(x.shape[1], generator=draws)
    return x[:, columns], None if y is None else y[torch.randperm(len(y), generator=draws)]


def _flipped(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    """Two changes of sign would leave a regression as it was, so only targets change theirs where there are any."""
    return (-x, None) if y is None else (x, -y)


def _huge(x: Tensor, y: Tensor | None, draws: torch.Generator) -> Changed:
    return _HUGE * x, None if y is None else _HUGE * y


_CHANGES: dict[Contamination, Callable[[Tensor, Tensor | None, torch.Generator], Changed]] = {
    "noise": _noise,
    "far": _far,
    "copied": _copied,
    "constant": _constant,
    "permuted": _permuted,
    "flipped": _flipped,
    "huge": _huge,
}
