# SPDX-License-Identifier: Apache-2.0
"""How the data in tests/golden/data were made: `python tests/golden/make_data.py`.

The files are kept, so that no number depends on the generator. What is planted is far apart: no choice is near a tie.
"""

import csv
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "data"
SLOPES = np.array([[2.0, -1.0, 0.5], [-1.0, 2.0, 1.0]])
WARDS = np.array([[0.0, 0.5, 1.2], [0.0, -0.8, 0.3]])
CENTRES = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
LINES = np.array([[2.0, 3.0, 10.0], [-1.0, -2.0, 16.0]])  # slopes and intercept


def write(name: str, header: str, owner: np.ndarray, prefix: str, *columns: np.ndarray) -> None:
    """Write rows in their order; an empty cell for what is not a number."""
    with (FOLDER / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header.split())
        for i, *values in zip(owner, *columns, strict=True):
            out.writerow([f"{prefix}{i:02d}", *(_cell(value) for value in values)])


def _cell(value: object) -> str:
    return ("" if np.isnan(value) else f"{value:.3f}") if isinstance(value, float) else str(value)


def owners(draw: np.random.Generator, n_clients: int, rows: int) -> np.ndarray:
    """Clients of different sizes, their rows in no order."""
    return draw.permutation(np.repeat(np.arange(n_clients), rows + 2 * (np.arange(n_clients) % 3)))


def some_missing(y: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Every client's last row has no target."""
    y = y.astype(object)
    for i in set(owner.tolist()):
        y[np.flatnonzero(owner == i)[-1]] = ""
    return y


def lines(name: str, seed: int, n_clients: int, rows: int, prefix: str = "s", *, new: bool = False) -> None:
    """Two groups of clients with a linear model each; one column is of words."""
    draw = np.random.default_rng(seed)
    owner = owners(draw, n_clients, rows)
    z, ward = draw.normal(size=(len(owner), 3)), draw.choice(3, len(owner), p=[0.5, 0.3, 0.2])
    noise = 0.3 * draw.normal(size=len(owner))
    y = np.round(50 + 10 * ((z * SLOPES[owner % 2]).sum(1) + WARDS[owner % 2, ward] + noise), 3)
    x = z * [1.0, 5.0, 0.2] + [0.0, 30.0, 0.0]
    write(
        name,
        "site x0 x1 x2 ward y",
        owner,
        prefix,
        *x.T,
        np.array(["east", "north", "west"])[ward],
        some_missing(y, owner) if new else y,
    )


def classes(name: str, seed: int, n_clients: int, rows: int, prefix: str = "s", *, new: bool = False) -> None:
    """Two groups of clients that call the same three regions, and the same two, by different names."""
    draw = np.random.default_rng(seed)
    owner = owners(draw, n_clients, rows)
    x = draw.normal(size=(len(owner), 2))
    angle = np.arctan2(x[:, 1], x[:, 0]) + 0.5 * draw.normal(size=len(owner))
    region = np.floor((angle + np.pi) / (2 * np.pi / 3)).astype(int) % 3
    label = np.array(["high", "low", "mid"])[(region + owner % 2) % 3]
    high = x[:, 0] + 0.8 * draw.normal(size=len(owner)) > 0
    sign = np.where(high == (owner % 2 == 0), "yes", "no")
    write(name, "site a b label sign", owner, prefix, *x.T, some_missing(label, owner) if new else label, sign)


def different(name: str, seed: int, n_clients: int, rows: int, prefix: str = "s", *, new: bool = False) -> None:
    """Every client has slopes of its own, not far from common ones."""
    draw = np.random.default_rng(seed)
    owner = owners(draw, n_clients, rows)
    slopes = 2.0 + draw.normal(size=(n_clients, 5))
    x = draw.normal(size=(len(owner), 5))
    y = np.round((x * slopes[owner]).sum(1) + 1.5 * draw.normal(size=len(owner)), 3)
    write(name, "site a b c d e y", owner, prefix, *x.T, some_missing(y, owner) if new else y)


def directions(name: str, seed: int, n_clients: int, rows: int, prefix: str = "s", *, new: bool = False) -> None:
    """Clients' slopes lie evenly on a line."""
    draw = np.random.default_rng(seed)
    owner = owners(draw, n_clients, rows)
    slopes = 1.0 + np.linspace(-4, 4, n_clients)[:, None] * np.array([0.5, -0.5, 0.5, 0.5, 0.0])
    x = draw.normal(size=(len(owner), 5))
    y = np.round((x * slopes[owner]).sum(1) + draw.normal(size=len(owner)), 3)
    write(name, "site a b c d e y", owner, prefix, *x.T, some_missing(y, owner) if new else y)


def rows_of_kinds(name: str, seed: int, n_clients: int, rows: int, prefix: str = "s", *, new: bool = False) -> None:
    """Three groups of rows at every client; the last client's lie elsewhere."""
    draw = np.random.default_rng(seed)
    owner = owners(draw, n_clients, rows)
    kind = draw.choice(3, size=len(owner), p=[0.5, 0.3, 0.2])
    x = CENTRES[kind] + draw.normal(size=(len(owner), 2))
    x[owner == n_clients - 1] += [0.0, 0.0] if new else [30.0, 40.0]
    write(name, "site length weight", owner, prefix, *(x * [1.0, 100.0] + [5.0, -300.0]).T)


def mixed(name: str, seed: int, n_clients: int, rows: int, prefix: str = "s", *, new: bool = False) -> None:
    """Two regressions at every client, the first with two thirds of the rows."""
    draw = np.random.default_rng(seed)
    owner = owners(draw, n_clients, rows)
    kind = (draw.random(len(owner)) < 1 / 3).astype(int)
    x = draw.normal(size=(len(owner), 2))
    y = np.round((x * LINES[kind, :2]).sum(1) + LINES[kind, 2] + 0.5 * draw.normal(size=len(owner)), 3)
    write(name, "site length weight price", owner, prefix, *x.T, some_missing(y, owner) if new else y)


def main() -> None:
    """Write all files, and for each one a file of clients that were not there in training."""
    FOLDER.mkdir(exist_ok=True)
    lines("lines", 0, 12, 12)
    lines("lines-new", 1, 3, 6, "t", new=True)
    classes("classes", 2, 12, 18)
    classes("classes-new", 3, 3, 10, "t", new=True)
    different("different", 4, 12, 12)
    different("different-new", 5, 3, 6, "t", new=True)
    directions("directions", 6, 14, 10)
    directions("directions-new", 7, 3, 6, "t", new=True)
    rows_of_kinds("rows", 8, 7, 20)
    rows_of_kinds("rows-new", 9, 2, 8, "t", new=True)
    mixed("mixed", 10, 7, 22)
    mixed("mixed-new", 11, 2, 8, "t", new=True)


if __name__ == "__main__":
    main()
