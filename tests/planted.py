# SPDX-License-Identifier: Apache-2.0
"""Small data sets with planted groups, as arrays and as files, for the tests of what users meet."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from coterie.data.clients import Clients
from coterie.data.readers import from_arrays

SLOPES = np.array([[2.0, -1.0, 0.5], [-1.0, 2.0, 1.0]])


@dataclass(frozen=True)
class Planted:
    """Rows in no particular order: clients are interleaved."""

    x: np.ndarray  # [N, 3]
    y: np.ndarray  # [N]
    groups: np.ndarray  # [N] client names
    truth: dict[str, int]  # client -> group

    @property
    def names(self) -> list[str]:
        return sorted(self.truth)

    def clients(self, **options: object) -> Clients:
        return from_arrays(self.x, self.y, self.groups, **options)  # type: ignore[arg-type]

    def rows_of(self, *names: str) -> np.ndarray:
        return np.isin(self.groups, names)

    def agrees(self, names: list[str], labels: list[int]) -> bool:
        """Whether labels are the planted groups, up to their numbers."""
        pairs = {(self.truth[name], label) for name, label in zip(names, labels, strict=True)}
        return len(pairs) == len(set(self.truth.values())) == len({label for _, label in pairs})

    def write(self, path: Path) -> Path:
        columns = {"site": self.groups, **{f"x{i}": self.x[:, i] for i in range(3)}, "y": self.y}
        pc.write_csv(pa.table(columns), path)
        return path


def planted(
    n_clients: int = 10, rows: int = 20, *, classes: bool = False, noise: float = 0.2, seed: int = 0, prefix: str = "s"
) -> Planted:
    """Clients of two groups in turn: linear models, or with `classes` the words no/yes by their sign."""
    draw = np.random.default_rng(seed)
    names = [f"{prefix}{i:02d}" for i in range(n_clients)]
    owner = draw.permutation(np.repeat(np.arange(n_clients), rows))
    x = draw.normal(size=(len(owner), 3)) * [1.0, 5.0, 0.2] + [0.0, 30.0, 0.0]
    standard = (x - [0.0, 30.0, 0.0]) / [1.0, 5.0, 0.2]
    y = (standard * SLOPES[owner % 2]).sum(1) + noise * draw.normal(size=len(owner))
    target = np.where(y > 0, "yes", "no") if classes else 50 + 10 * y
    return Planted(x, target, np.array(names)[owner], {name: i % 2 for i, name in enumerate(names)})
