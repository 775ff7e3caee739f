# SPDX-License-Identifier: Apache-2.0
"""Clocks: what a client's work takes, in virtual seconds that are drawn by key, or in seconds on the wall.

Tziotis, Shen, Pedarsani, Hassani, Mokhtari, "Straggler-Resilient Personalized Federated Learning", section 5: a round costs
what its slowest participant needs, plus communication. Here the former is in proportion to the work that is asked for,
and both are charged for every question.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from torch import Tensor

from coterie import keys
from coterie.data.parquet import whole_table
from coterie.errors import ConfigError, DataError

__all__ = ["Clock", "DynamicExponential", "Exponential", "LogNormal", "Speeds", "Trace", "VirtualClock", "WallClock"]


class Speeds(Protocol):
    """How long a unit of work takes each client in a round."""

    def times(self, round_: int, clients: Tensor, seed: int) -> Tensor:
        """Draw, by key, for clients given by their keys.  [M] -> [M]"""


class Clock(Protocol):
    """What time an engine goes by."""

    def arrivals(self, round_: int, clients: Tensor, seed: int, work: float) -> Tensor | None:
        """Say when each client's answer would be there, for so much work.  [M]; None if nobody knows before."""

    def elapsed(self, seconds: float, measured: float) -> float:
        """Say what a question took, of the seconds that were foretold and those that passed on the wall."""


@dataclass(frozen=True)
class Exponential:
    """Fixed speeds: each client's time is drawn once, Exp(rate)."""

    rate: float = 1.0

    def __post_init__(self) -> None:
        _positive("the rate of an exponential law", self.rate)

    def times(self, round_: int, clients: Tensor, seed: int) -> Tensor:
        """Draw by client only."""
        return _exponential(keys.key(seed, "speed", clients)) / self.rate


@dataclass(frozen=True)
class DynamicExponential:
    """Changing speeds: in each round a client's time is drawn anew, Exp(lambda_i), with lambda_i ~ U[lowest, 1] for good.

    Parameters
    ----------
    lowest : float, optional
        The lowest rate; one over the number of clients by default, as in the paper.
    """

    lowest: float | None = None

    def __post_init__(self) -> None:
        if self.lowest is not None and not 0 < self.lowest <= 1:
            raise ConfigError(f"the lowest rate is {self.lowest}", "give 0 < lowest <= 1")

    def times(self, round_: int, clients: Tensor, seed: int) -> Tensor:
        """Draw the rate by client, the time by round and client."""
        lowest = 1 / max(len(clients), 1) if self.lowest is None else self.lowest
        rate = lowest + (1 - lowest) * _uniform(keys.key(seed, "rate", clients))
        return _exponential(keys.key(seed, round_, "time", clients)) / rate


@dataclass(frozen=True)
class LogNormal:
    """Fixed speeds with a heavier tail: log T ~ N(0, sigma^2), drawn once; the median client takes one second."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"sigma of a lognormal law is {self.sigma}", "give sigma at least 0")

    def times(self, round_: int, clients: Tensor, seed: int) -> Tensor:
        """Draw by client only."""
        u = _uniform(keys.key(seed, "speed", clients)).clamp(min=2.0**-54)  # 0 would take no time at all
        return torch.exp(self.sigma * torch.special.ndtri(u))


@dataclass(frozen=True)
class Trace:
    """Times from a file, CSV or Parquet, with columns `client`, `seconds` and, where speeds change, `round`.

    Rounds are numbered from 0; after the last one the trace begins again. A client's own rounds may be fewer than others'.
    """

    path: Path

    def times(self, round_: int, clients: Tensor, seed: int) -> Tensor:
        """Look the clients up."""
        known, first, count, seconds = self._table
        place = torch.searchsorted(known, clients).clamp(max=len(known) - 1)
        lost = int((known[place] != clients).sum())
        if lost:
            raise DataError(
                f"{lost} of {len(clients)} clients are not in the trace {self.path}",
                "give every client of the federation, by its name, in the column 'client'",
            )
        return seconds[first[place] + round_ % count[place]]

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[U] keys, ascending; [U] where each client's times begin, and how many there are; all times."""
        table = _read(self.path)
        seconds = table["seconds"].to_numpy()
        if len(seconds) == 0 or not bool((np.isfinite(seconds) & (seconds >= 0)).all()):
            raise DataError(f"the trace {self.path} has no times, or invalid ones", "give seconds >= 0")
        client = keys.name_keys(table["client"].to_numpy()).numpy()
        order = np.lexsort((table["round"].to_numpy(), client))
        known, first, count = np.unique(client[order], return_index=True, return_counts=True)
        of_clients = torch.from_numpy(known), torch.from_numpy(first), torch.from_numpy(count)
        return (*of_clients, torch.from_numpy(seconds[order]))


@dataclass(frozen=True)
class VirtualClock:
    """Virtual time: who would answer when, and what a round would cost, without waiting for it.

    Parameters
    ----------
    speeds : Speeds
        Seconds that a unit of work takes each client.
    communication : float
        Seconds that a question and its answer are on their way, charged every time.
    unit : float
        How much work (`Ask.work`: gradient steps, or passes) is a unit. With the work of a round, as in the paper's figures,
        a client takes T_i for the round.
    """

    speeds: Speeds = field(default_factory=Exponential)
    communication: float = 0.0
    unit: float = 1.0

    def __post_init__(self) -> None:
        _positive("the unit of work", self.unit)
        if not 0 <= self.communication < math.inf:
            raise ConfigError(f"communication takes {self.communication} seconds", "give at least 0")

    def times(self, round_: int, clients: Tensor, seed: int) -> Tensor:
        """Say what a unit of work takes each client.  [M]"""
        return self.speeds.times(round_, clients, seed)

    def arrivals(self, round_: int, clients: Tensor, seed: int, work: float) -> Tensor:
        """Say when each answer is there.  [M]"""
        return self.times(round_, clients, seed) * (work / self.unit) + self.communication

    def elapsed(self, seconds: float, measured: float) -> float:
        """Go by what was foretold."""
        return seconds


@dataclass(frozen=True)
class WallClock:
    """Real time: nobody knows before who is fast, and a question takes what it takes."""

    def arrivals(self, round_: int, clients: Tensor, seed: int, work: float) -> None:
        """Know nothing."""

    def elapsed(self, seconds: float, measured: float) -> float:
        """Go by the wall."""
        return measured


def _uniform(key: Tensor) -> Tensor:
    return keys.uniform(key, 1)[..., 0]


def _exponential(key: Tensor) -> Tensor:
    return -torch.log1p(-_uniform(key))  # finite: draws are below 1


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{what} is {value}", "give a number above 0")


def _read(path: Path) -> pa.Table:
    """Read a trace; a file without rounds is one round."""
    if not path.exists():
        raise DataError(f"there is no trace at {path}", "give a CSV or Parquet file")
    kinds = {"client": pa.string(), "round": pa.int64(), "seconds": pa.float64()}
    try:
        if path.suffix == ".parquet":
            table = whole_table(path)
        else:
            table = pa.csv.read_csv(path, convert_options=pa.csv.ConvertOptions(column_types=kinds))
        if "round" not in table.column_names:
            table = table.append_column("round", pa.array(np.zeros(len(table), np.int64)))
        return table.select(list(kinds)).cast(pa.schema(kinds))
    except (OSError, ValueError, KeyError, pa.ArrowException):
        raise DataError(
            f"the trace {path} cannot be read as clients and seconds",
            "give a CSV or Parquet file with columns client, seconds and, where speeds change, round",
        ) from None
