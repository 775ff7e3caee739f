# SPDX-License-Identifier: Apache-2.0
"""The same rows in one file, in a file for every site, and as the summaries that sites share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from coterie import summarise


@dataclass(frozen=True)
class Sites:
    pooled: Path  # one table
    tables: list[Path]  # one for every site
    summaries: Path  # a folder


def planted_table(n_clients: int = 24, *, seed: int = 0) -> pa.Table:
    """Clients of two groups, with columns in units of their own and a category that not every site has all levels of."""
    draw = np.random.default_rng(seed)
    owner = draw.permutation(np.repeat(np.arange(n_clients), draw.integers(12, 40, n_clients)))
    standard = draw.normal(size=(len(owner), 3))
    slopes = np.array([[1.0, -2.0, 0.5], [-1.0, 0.5, 2.0]])[owner % 2]
    x = standard * [1.0, 50.0, 0.2] + [0.0, 3000.0, 5.0]
    level = draw.integers(0, 4, len(owner))
    level = np.where((owner % 4 == 0) & (level == 3), 0, level)  # no site 0 has the last level
    y = 1000 + 10 * (standard * slopes).sum(1) + level + draw.normal(size=len(owner))
    columns = {"who": np.array([f"c{i:02d}" for i in range(n_clients)])[owner], "age": x[:, 0], "dose": x[:, 1]}
    return pa.table({**columns, "ward": np.array(["a", "b", "c", "d"])[level], "length": x[:, 2], "y": y})


def written(folder: Path, table: pa.Table, client: str, n_sites: int = 4, **options: Any) -> Sites:
    """Write a table as one, split by client among sites, and summarised."""
    (folder / "sites").mkdir()
    pooled, tables = folder / "pooled.csv", []
    pc.write_csv(table, pooled)
    owner = np.unique(table[client].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)[1]
    for site in range(n_sites):
        path = folder / f"site-{site}.csv"
        pc.write_csv(table.filter(pa.array(owner % n_sites == site)), path)
        summarise(path, folder / "sites" / f"site-{site}.json", client=client, **options)
        tables.append(path)
    return Sites(pooled, tables, folder / "sites")
