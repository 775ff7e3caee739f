# SPDX-License-Identifier: Apache-2.0
"""Small data sets whose rows are mixtures, in columns of very different units, as arrays and as files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from coterie.data.clients import Clients
from coterie.data.readers import from_arrays

CENTRES = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
UNITS, ORIGIN = np.array([1.0, 100.0]), np.array([5.0, -300.0])
LINES = np.array([[2.0, 3.0, 10.0], [-1.0, -2.0, 30.0]])  # slopes and intercept


@dataclass(frozen=True)
class Mixed:
    """Rows in no particular order: clients are interleaved."""

    x: np.ndarray  # [N, 2]
    y: np.ndarray | None  # [N]
    groups: np.ndarray  # [N] client names
    component: np.ndarray  # [N] true ones

    @property
    def names(self) -> list[str]:
        return sorted(set(self.groups.tolist()))

    def clients(self, **options: object) -> Clients:
        task = "none" if self.y is None else "regression"
        return from_arrays(self.x, self.y, self.groups, task=task, **options)  # type: ignore[arg-type]

    def write(self, path: Path) -> Path:
        columns = {"site": self.groups, "length": self.x[:, 0], "weight": self.x[:, 1]}
        pc.write_csv(pa.table(columns | ({} if self.y is None else {"price": self.y})), path)
        return path


def clusters(n_clients: int = 8, rows: int = 30, *, outlier: bool = False, seed: int = 0, prefix: str = "s") -> Mixed:
    """Three groups of rows at every client; the last client's lie elsewhere when it is an outlier."""
    draw = np.random.default_rng(seed)
    owner = draw.permutation(np.repeat(np.arange(n_clients), rows))
    component = draw.choice(3, size=len(owner), p=[0.5, 0.3, 0.2])
    x = CENTRES[component] + draw.normal(size=(len(owner), 2))
    if outlier:
        x[owner == n_clients - 1] += [30.0, 40.0]
    return Mixed(x * UNITS + ORIGIN, None, np.array([f"{prefix}{i:02d}" for i in range(n_clients)])[owner], component)


def lines(n_clients: int = 8, rows: int = 40, *, seed: int = 0, prefix: str = "s") -> Mixed:
    """Two regressions at every client, the first with three quarters of the rows."""
    draw = np.random.default_rng(seed)
    owner = draw.permutation(np.repeat(np.arange(n_clients), rows))
    component = (draw.random(len(owner)) < 0.25).astype(int)
    x = draw.normal(size=(len(owner), 2))
    y = (x * LINES[component, :2]).sum(1) + LINES[component, 2] + 0.5 * draw.normal(size=len(owner))
    names = np.array([f"{prefix}{i:02d}" for i in range(n_clients)])
    return Mixed(x * UNITS + ORIGIN, y, names[owner], component)
