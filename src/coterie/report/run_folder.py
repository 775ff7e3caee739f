# SPDX-License-Identifier: Apache-2.0
"""What a run folder holds, read once; every part may be missing, as a run may still be under way."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coterie.data.parquet import whole_table
from coterie.data.values import is_text
from coterie.documents import checked, read_json
from coterie.errors import DataError, RunError
from coterie.files import check_files, check_seal
from coterie.limits import LARGEST_RESULT, MOST_PARTS, MOST_STEPS
from coterie.report.numbers import TickFormat, decimals_for, fixed, percent_ticks, plain_ticks
from coterie.report.run_document import RunDocument

__all__ = ["Floats", "Metric", "Run", "checked_table", "number", "read_document", "read_run", "read_table"]

Floats = NDArray[np.float64]

_METRIC_NAMES = {
    "rmse": "RMSE",
    "mae": "MAE",
    "mse": "MSE",
    "r2": "R²",
    "auc": "AUC",
    "nll": "NLL",
    "log_likelihood": "log-likelihood",
    "log density": "log density",
}
_SHARES = ("accuracy", "balanced_accuracy")
_CHANGED = "it was cut off or changed by hand: fit again, with another --out"


@dataclass(frozen=True)
class Metric:
    """How the run is judged: its name, which direction is better, and how it is written."""

    name: str
    higher: bool
    share: bool  # between 0 and 1 and written in percent

    @property
    def title(self) -> str:
        """The name as a title begins with it."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def form(self) -> TickFormat:
        """How ticks on an axis of this metric are written."""
        return percent_ticks if self.share else plain_ticks

    def gain(self, ours: Floats, theirs: Floats) -> Floats:
        """Say how much better ours is, positive is better; shares in percentage points."""
        scale = 100.0 if self.share else 1.0
        return scale * (ours - theirs if self.higher else theirs - ours)

    @property
    def gain_unit(self) -> str:
        """The unit of a gain."""
        return f"{self.name}, percentage points" if self.share else self.name

    def texts(self, values: Sequence[float | None]) -> list[str]:
        """Write values that stand side by side with the same decimals."""
        if not self.share:
            decimals = decimals_for(values)
            return [fixed(v, decimals) for v in values]
        percent = [None if v is None else 100 * v for v in values]
        decimals = max(1, min(decimals_for(percent), 2)) if len(percent) <= 8 else 1
        return [fixed(v, decimals) + ("" if v is None or math.isnan(v) else "\u00a0%") for v in percent]


@dataclass(frozen=True)
class Run:
    """A run folder in memory: `run.json`, the two tables as columns, and whether models were saved."""

    name: str
    info: dict[str, Any]
    rounds: dict[str, list[Any]]
    clients: dict[str, list[Any]]
    has_models: bool = False
    path: str = ""  # as commands name it, from the folder in which this one was given

    def part(self, name: str) -> dict[str, Any]:
        """Give a nested part of `run.json`, empty when it is not there."""
        value = self.info.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def results(self) -> dict[str, Any]:
        """What the run found."""
        return self.part("results")

    @cached_property
    def metric(self) -> Metric:
        """The metric of the run."""
        data = self.part("data")
        key = str(data.get("metric") or "metric")
        higher = data.get("metric_better", "higher" if key in _SHARES else "lower") == "higher"
        return Metric(_METRIC_NAMES.get(key, key.replace("_", " ")), higher, key in _SHARES)

    @property
    def noun(self) -> str:
        """What is fitted."""
        return "mixture" if self.info.get("method") == "mixture" else "model"

    @cached_property
    def n_clients(self) -> int | None:
        """How many clients there are."""
        stated = number(self.part("data").get("n_clients"))
        return int(stated) if stated is not None else len(self.clients.get("client", [])) or None

    @cached_property
    def labels(self) -> list[int]:
        """The cluster of every client in the table, -1 where there is none."""
        return [-1 if v is None else int(v) for v in self.clients.get("label", [])]

    @cached_property
    def n_clusters(self) -> int | None:
        """How many clusters there are."""
        stated = number(self.results.get("n_clusters"))
        if stated is not None:
            return int(stated)
        return len(self.results.get("cluster_sizes") or []) or max(self.labels, default=-1) + 1 or None

    @cached_property
    def weight_columns(self) -> list[str]:
        """The columns of the clients with the weights of components, in their order."""
        names = [f"weight_{r}" for r in range(len(self.clients))]
        return [name for name in names if name in self.clients]

    def client_column(self, name: str) -> Floats | None:
        """Give a column of the clients as numbers with NaN for nulls; None when there is nothing in it."""
        return _floats(self.clients.get(name))

    @cached_property
    def restarts(self) -> dict[int, list[int]]:
        """Row numbers of every restart in the table of rounds, by round; without those of moment descent."""
        rounds = self.rounds.get("round", [])
        if not rounds or None in rounds:
            return {}
        rows: dict[int, list[int]] = {}
        for i, run in enumerate(self.rounds.get("run", [0] * len(rounds))):
            if not self._movement[i]:
                rows.setdefault(int(run or 0), []).append(i)
        return {run: sorted(mine, key=lambda i: rounds[i]) for run, mine in sorted(rows.items())}

    @cached_property
    def descents(self) -> list[list[int]]:
        """Row numbers of moment descent, by round: a list for the first anchors, and one for those that came later."""
        rounds = self.rounds.get("round", [])
        if not rounds or None in rounds:
            return []
        groups: list[list[int]] = []
        for i in sorted((i for i, moved in enumerate(self._movement) if moved), key=lambda i: rounds[i]):
            if groups and rounds[i] == rounds[groups[-1][-1]] + 1:
                groups[-1].append(i)
            else:  # a round in which anchors were drawn lies between
                groups.append([i])
        return groups

    @cached_property
    def _movement(self) -> list[Any]:
        """How far anchors moved, for each row of the rounds; None elsewhere."""
        return self.rounds.get("movement", [None] * len(self.rounds.get("round", [])))

    @cached_property
    def chosen(self) -> int | None:
        """The restart that was kept: as the run says, else the one with the lowest last loss."""
        stated = number(self.results.get("chosen_run"))
        if stated is not None and int(stated) in self.restarts:
            return int(stated)
        losses = {run: self.round_column("loss", run) for run in self.restarts}
        last = {run: loss[-1] for run, loss in losses.items() if loss is not None and np.isfinite(loss[-1])}
        return min(last, key=lambda run: last[run]) if last else next(iter(self.restarts), None)

    def round_column(self, name: str, run: int) -> Floats | None:
        """Give a column of one restart's rounds as numbers; None when there is nothing in it."""
        column = self.rounds.get(name)
        return None if column is None else _floats([column[i] for i in self.restarts.get(run, [])])


def number(value: object) -> float | None:
    """Take a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_RESULT:
        return None
    return float(value)


def read_run(folder: Path) -> Run:
    """Read `run.json`, and `rounds.parquet` and `clients.parquet` where they are there.

    Raises
    ------
    RunError
        The folder has no `run.json`, or a file in it cannot be read.
    """
    info = read_document(folder)
    check_files(folder, info, ("rounds.parquet", "clients.parquet"))
    rounds, clients = read_table(folder / "rounds.parquet"), read_table(folder / "clients.parquet")
    has_models = any(folder.glob("models/*.safetensors"))
    return Run(folder.resolve().name, info, rounds, clients, has_models, _from_here(folder))


def _from_here(folder: Path) -> str:
    """A folder as a command names it: from where we are if it is below, else from the root."""
    here, there = Path.cwd(), folder.resolve()
    return str(there.relative_to(here)) if there.is_relative_to(here) and there != here else str(there)


def read_document(folder: Path) -> dict[str, Any]:
    """Read `run.json`.

    Raises
    ------
    RunError
        There is none, it cannot be read, or it is no run's.
    """
    path, way_out = folder / "run.json", "name the folder that `coterie fit --out` wrote"
    try:
        document: dict[str, Any] = read_json(path, _CHANGED)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} is not a run: it has no run.json", way_out) from None
    if not isinstance(document, dict):
        raise RunError(f"{folder} is not a run: its run.json was not written by a run", way_out)
    check_seal(path, document)
    checked(RunDocument, document, str(path), _CHANGED)
    return document


def read_table(path: Path) -> dict[str, list[Any]]:
    """Read a Parquet file as columns of Python values; a file that is not there has no columns.

    Raises
    ------
    RunError
        It cannot be read, or a column holds what it should not.
    """
    table = checked_table(path)
    return {} if table is None else table.to_pydict()


def checked_table(path: Path) -> pa.Table | None:
    """Read a Parquet file of a run folder, whose columns hold what they should; None where there is none."""
    if not path.exists():
        return None
    try:
        table = whole_table(path)
    except DataError as error:
        raise RunError(error.message, error.hint) from None
    except (pa.ArrowException, OSError, ValueError):
        raise RunError(f"'{path}' cannot be read", "it was cut off or changed: fit again, with another --out") from None
    for field in table.schema:
        if not _kind_of(field.name)(field.type):
            raise RunError(f"'{path}' has a column '{field.name}' of {field.type}, which no run writes", _CHANGED)
    _check_values(path, table)
    return table


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind))


def _is_numbers(kind: pa.DataType) -> bool:
    several = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(pa.types.is_null(kind) or (several and _is_number(kind.value_type)))


def _is_truth(kind: pa.DataType) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_null(kind))


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))


def _is_anything(kind: pa.DataType) -> bool:
    """Columns of later versions."""
    return is_text(kind) or _is_number(kind) or _is_numbers(kind) or _is_truth(kind)


_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "client": is_text,
    **dict.fromkeys(("certain", "outlier", "judged"), _is_truth),
    **dict.fromkeys(("sizes", "movement", "spectrum"), _is_numbers),
    **dict.fromkeys(("label", "run", "round"), _is_whole),
    **dict.fromkeys(
        (
            "margin", "margin_error", "map_x", "map_y", "train_loss", "test_loss", "rows_train", "rows_test", "rows",
            "metric", "outlier_score", "own", "rmse", "train_log_likelihood", "rounds", "seconds", "gain", "agreement",
            "loss", "participants", "messages", "bytes_up", "bytes_down", "moved", "change", "test_metric",
            "virtual_time", "stage", "enough",
        ),
        _is_number,
    ),
}  # fmt: skip
_NUMBERED = ("weight_", "metric_", "score_")


def _kind_of(name: str) -> Callable[[pa.DataType], bool]:
    return _KINDS.get(name) or (_is_number if name.startswith(_NUMBERED) else _is_anything)


def _check_values(path: Path, table: pa.Table) -> None:
    """Refuse clusters and rounds that cannot be."""
    there = set(table.column_names)
    for name, least, most in (("label", -1, MOST_PARTS), ("run", 0, MOST_PARTS), ("round", 0, MOST_STEPS)):
        if name in there and not pa.types.is_null(table[name].type):
            ends = pc.min_max(table[name]).as_py()
            if any(end is not None and not least <= end <= most for end in ends.values()):
                raise RunError(f"'{path}' has a {name} that is not from {least} to {most:,}", _CHANGED)
    for name in there & {"sizes", "movement", "spectrum"}:
        if (
            not pa.types.is_null(table[name].type)
            and (pc.max(pc.list_value_length(table[name])).as_py() or 0) > MOST_PARTS
        ):
            raise RunError(f"'{path}' has more than {MOST_PARTS:,} numbers in a cell of '{name}'", _CHANGED)


def _floats(column: list[Any] | None) -> Floats | None:
    """Turn a column into floats, nulls into NaN, and an empty one into None."""
    if column is None:
        return None
    values = np.array(column, dtype=np.float64)
    far = np.abs(values) > LARGEST_RESULT  # as good as infinite: sums and squares of them are
    values[far] = np.copysign(np.inf, values[far])
    return values if np.isfinite(values).any() else None
