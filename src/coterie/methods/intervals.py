# SPDX-License-Identifier: Apache-2.0
"""Prediction intervals of numbers: what was learnt of residuals, for clients old and new, and where it is stored.

Distances are in the scaled target's units. Two ways:

- ``model``: normal, from the variance of training residuals, and of the model itself where the method knows it.
- ``conformal``: from calibration rows, which nobody trained on: a client's own where it has enough, else those of all
  clients, each counting alike.

Clients that were not there in training have the distances of the population model in either way.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.linear_by_fold import NOISE_ROWS
from coterie.engines.checkpoint import save_tensors
from coterie.errors import ConfigError
from coterie.methods.stored import Stored, StoredNames

__all__ = ["COVERAGE", "LEVELS", "How", "Intervals", "client_noise", "normal_quantile"]

How = Literal["conformal", "model"]

COVERAGE = 0.9  # when nobody says
LEVELS = (0.5, 0.8, 0.9, 0.95)  # that are calibrated, beside what is asked for
_FILE = "models/intervals.safetensors"


@dataclass(frozen=True)
class Intervals:
    """How far targets lie from predictions.

    Attributes
    ----------
    names : ndarray
        [M] clients of the training, ascending.
    noise : Tensor
        [M] variance of each client's residuals.
    population_noise : float
        Variance of residuals of the population model, at a client that was not there.
    levels : tuple of float
        Coverages that were calibrated; none without calibration rows.
    own : Tensor
        [M, L] clients' own conformal distances; infinite for those with too few calibration rows.
    pooled, population : Tensor
        [L] conformal distances at a client that counts like all others: of clients' own models, and of the population's.
    """

    names: np.ndarray
    noise: Tensor
    population_noise: float
    levels: tuple[float, ...] = ()
    own: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    pooled: Tensor = field(default_factory=lambda: torch.zeros(0))
    population: Tensor = field(default_factory=lambda: torch.zeros(0))

    def widths(self, names: np.ndarray, coverage: float, how: How) -> Tensor:
        """How far intervals reach at each client, without what a model's own uncertainty adds.  [C]"""
        place = {name: i for i, name in enumerate(self.names.tolist())}
        at = torch.tensor([place.get(str(name), -1) for name in names], dtype=torch.int64)
        if how == "model":
            noise = torch.cat([self.noise, torch.tensor([self.population_noise], dtype=torch.float64)])
            return normal_quantile(coverage) * noise[at].sqrt()
        column = self._level(coverage)
        own, pooled = self.own[:, column], self.pooled[column]
        found = torch.where(own.isfinite(), own, pooled)
        return torch.cat([found, self.population[column : column + 1]])[at]

    def calibrated(self, coverage: float) -> Tensor:
        """[M] who has an interval from its own calibration rows."""
        return self.own[:, self._level(coverage)].isfinite()

    def _level(self, coverage: float) -> int:
        found = next((i for i, level in enumerate(self.levels) if math.isclose(level, coverage)), None)
        if found is not None:
            return found
        if not self.levels:
            raise ConfigError(
                "no calibration rows were held out of training, and conformal intervals need them",
                f"fit with --coverage {coverage:g} (coverage={coverage:g} in Python), or ask for how='model'",
            )
        raise ConfigError(
            f"intervals of coverage {coverage:g} were not calibrated",
            f"fit with --coverage {coverage:g}, or ask for one of {', '.join(f'{one:g}' for one in self.levels)}",
        )

    # -- the run folder -----------------------------------------------------------------------------------------------
    def save(self, folder: Path) -> None:
        """Write all of it."""
        tensors = {"noise": self.noise, "population_noise": torch.tensor(self.population_noise, dtype=torch.float64)}
        tensors |= {name: getattr(self, name) for name in ("own", "pooled", "population") if self.levels}
        save_tensors(folder / _FILE, tensors, {"names": self.names.tolist(), "levels": list(self.levels)})

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read what `save` wrote; None in folders of classifiers, and of earlier versions."""
        if not (folder / _FILE).exists():
            return None
        stored, f64 = Stored(folder / _FILE), torch.float64
        said = stored.words(_Words)
        m, levels = len(said.names), tuple(said.levels)
        noise, common = stored.tensor("noise", m, dtype=f64), float(stored.tensor("population_noise", dtype=f64))
        if not levels:
            return cls(said.array, noise, common)
        own = stored.tensor("own", m, len(levels), dtype=f64)
        pooled, population = (stored.tensor(name, len(levels), dtype=f64) for name in ("pooled", "population"))
        return cls(said.array, noise, common, levels, own, pooled, population)


class _Words(StoredNames):
    levels: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(max_length=len(LEVELS) + 1)]


def client_noise(squares: Tensor, rows: Tensor, common: float) -> Tensor:
    """[M] variance of each client's residuals: its own mean square, and the common one as if seen in some rows."""
    return (NOISE_ROWS * common + rows * squares.nan_to_num(nan=common)) / (NOISE_ROWS + rows)


def normal_quantile(coverage: float) -> float:
    """How many standard deviations cover a share of a normal distribution, on both sides of its mean."""
    if not 0 < coverage < 1:
        raise ConfigError(f"coverage is {coverage:g}", "give a share between 0 and 1, such as 0.9")
    return float(torch.special.ndtri(torch.tensor((1 + coverage) / 2, dtype=torch.float64)))
