# SPDX-License-Identifier: Apache-2.0
"""Read clients' rows from Parquet, CSV or arrays, or what sites share in place of theirs.

A file is read twice, a batch at a time: once to count rows, levels and classes, once to encode every row and write it
to its place. So a file may be larger than memory: its rows then go to a temporary file.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients, check_options, check_outcome, held_out
from coterie.data.faults import faults
from coterie.data.frames import is_frame, opened
from coterie.data.gather import gather, laid_out, scanned
from coterie.data.roles import Roles, assign_roles, roles_of
from coterie.data.scan import Scan, described
from coterie.data.schema import Missing, Schema, Task
from coterie.data.sites import read_sites, site_files
from coterie.data.sources import Csv, Source, similar
from coterie.data.stand_ins import needs_rows
from coterie.data.targets import check_target
from coterie.errors import ConfigError, DataError
from coterie.outcome_names import OutcomeName

__all__ = ["Clients", "from_arrays", "read", "read_with", "split_of"]

_PRECISIONS = (torch.float16, torch.float32, torch.float64)


def read(
    path: Any,
    *,
    client: str | None = None,
    target: str | None = None,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    categorical: Collection[str] = (),
    missing: Missing = "error",
    task: Task | Literal["auto"] = "auto",
    outcome: OutcomeName | None = None,
    event: str | None = None,
    min_rows: int = 1,
    test_size: float = 0.2,
    new_clients: float = 0.0,
    split: str = "random",
    seed: int = 0,
    sep: str = "",
    decimal: str = ".",
    thousands: str = "",
    encoding: str = "utf-8",
    dtype: torch.dtype = torch.float64,
    memory: int = 1 << 30,
    spill: str | Path | None = None,
) -> Clients:
    """Read a table with one row per sample and a column that names the client.

    Parameters
    ----------
    path : str or Path, or several, or a data frame
        A Parquet or CSV file (``.parquet``, ``.csv``, ``.csv.gz``, ``.tsv``), or a folder with one such file a client; or
        a data frame of pandas or polars, or an Arrow table.
        Or site summaries, which `coterie summarise` writes: several files (``.json``), or a folder of them. Their columns,
        seed and test rows are settled already.
    client : str, optional
        The column that names the client. In a folder whose files do not have it, the file names stand for it.
    target : str, optional
        The column to predict.
    features, exclude : collections of str, optional
        The columns to use (all by default), and columns not to use.
    categorical : collection of str, optional
        Numeric columns to be taken as categories. Text always is; truth values count as 0 and 1.
    missing : {"error", "mean", "drop"}
        What to do about missing values: stop; keep them as NaN (zeros for a category) to be filled with the federated
        mean; or leave out rows that have any. Rows without a client or a target are left out by the latter two.
    task : {"auto", "regression", "classification", "none"}
        What the target is. By default text, truth values and whole numbers with at most 10 different values are
        classes.
    outcome : {"poisson", "negative-binomial", "gamma", "log-normal", "ordinal", "cox", "cox-breslow"}, optional
        What the target is, if it is neither a plain number nor one of several classes without an order: counts,
        positive and skewed numbers, classes in an order, or times to an event.
    event : str, optional
        The column that says whether the event happened (1) or the time is censored (0), with outcome "cox".
    min_rows : int
        Leave out clients with fewer rows.
    test_size, new_clients : float
        Share of each client's rows, and share of the clients, to hold out.
    split : {"random", "time", "time:COLUMN"}
        Which rows are held out: drawn at random; or the last ones of every client, in the order of the file or of a
        column. Folds of a cross-validation are then blocks of rows that follow each other. A column of dates only orders
        rows; a number stays a feature, unless it is excluded.
    seed : int
        For what is held out.
    sep, decimal, thousands, encoding : str
        How a CSV file is written: what stands between cells (a comma, or a tab in ``.tsv``), before decimals and between
        groups of three digits (nothing), and the encoding of its text.
    dtype : torch.dtype
        Precision of features and real-valued targets.
    memory : int
        Bytes that the rows may take in memory; beyond, they are kept on disk.
    spill : str or Path, optional
        The folder to keep them in; a temporary one by default. What is put there goes away with the result.

    Raises
    ------
    DataError
        If the table cannot be used as asked.

    Examples
    --------
    >>> clients = read("patients.parquet", client="hospital", target="outcome")  # doctest: +SKIP
    """
    check_options(missing=missing, task=task, test_size=test_size, new_clients=new_clients)
    check_outcome(outcome, event)
    _check_rows(min_rows, dtype)
    in_time, when = split_of(split)
    if not is_frame(path) and (files := site_files(path)):
        if outcome is not None:
            raise needs_rows(f"outcome {outcome}")
        if in_time:
            raise ConfigError("site summaries were divided at random", "leave --split out")
        return read_sites(
            files, client=client, target=target, features=features, exclude=exclude, categorical=categorical,
            missing=missing, task=task, min_rows=min_rows, test_size=test_size, new_clients=new_clients, seed=seed,
            dtype=dtype,
        )  # fmt: skip
    source = opened(path, client, Csv(sep, decimal, thousands, encoding))
    roles = assign_roles(
        source,
        target=target,
        features=features,
        exclude=exclude,
        categorical=categorical,
        missing=missing,
        task=task,
        outcome=outcome,
        event=event,
        when=when,
    )
    scan, roles = _without_dates(scanned(source, roles))
    if fault := next(faults(scan, largest=torch.finfo(dtype).max), None):
        raise _located(fault, source)
    schema = described(scan)
    layout, too_small = laid_out(scan, min_rows)
    rows, _ = gather(source, roles, schema, layout, dtype=dtype, memory=memory, spill=spill)
    return held_out(
        replace(rows, in_time=in_time),
        schema,
        test_size=test_size,
        new_clients=new_clients,
        seed=seed,
        dropped_rows=scan.dropped_rows,
        dropped_clients=too_small,
    )


def read_with(
    schema: Schema,
    path: Any,
    *,
    min_rows: int = 1,
    split: str = "random",
    sep: str = "",
    decimal: str = ".",
    thousands: str = "",
    encoding: str = "utf-8",
    dtype: torch.dtype = torch.float64,
    memory: int = 1 << 30,
    spill: str | Path | None = None,
) -> Clients:
    """Read a table in the way another one was read: same columns, same levels, same classes; nothing is held out.

    Parameters
    ----------
    schema : Schema
        Of the other table. Its target may be absent or empty here; then there are no targets.
    path, min_rows, split, sep, decimal, thousands, encoding, dtype, memory, spill
        As for `read`; `split` says in which order rows are, for what will be held out of them later.

    Raises
    ------
    DataError
        If the table does not fit the schema.
    """
    _check_rows(min_rows, dtype)
    in_time, when = split_of(split)
    source = opened(path, schema.client, Csv(sep, decimal, thousands, encoding))
    roles = replace(roles_of(schema, source), when=when)
    if when is not None and when not in source.columns:
        raise DataError(f"'{source.path}' has no column '{when}'", similar(when, source.columns))
    scan = scanned(source, roles)
    if scan.target is not None and scan.target.kind is None:  # nobody has a target yet
        roles = replace(roles, target=None)
        scan = scanned(source, roles)
    if fault := next(faults(scan, largest=torch.finfo(dtype).max, known=schema), None):
        raise _located(fault, source)
    layout, too_small = laid_out(scan, min_rows)
    rows, unknown = gather(source, roles, schema, layout, dtype=dtype, memory=memory, spill=spill)
    check_target(rows, schema)
    rows = replace(rows, in_time=in_time)
    return Clients(schema, rows, dropped_rows=scan.dropped_rows, dropped_clients=too_small, unknown_levels=unknown)


def split_of(split: str) -> tuple[bool, str | None]:
    """Whether rows are held out by time, and the column that says when, if it is not the order of the file."""
    kind, _, column = split.partition(":")
    if kind not in ("random", "time") or (kind == "random" and column):
        raise ConfigError(f"split is '{split}'", "choose random, time (the order of the file) or time:COLUMN")
    return kind == "time", column or None


def _without_dates(scan: Scan) -> tuple[Scan, Roles]:
    """A column of dates that orders rows is no feature."""
    roles, name = scan.roles, scan.roles.when
    if name is not None and name in scan.features and scan.features[name].kind == "date":
        del scan.features[name]
        scan.roles = roles = replace(roles, features=tuple(one for one in roles.features if one != name))
    return scan, roles


def _check_rows(min_rows: int, dtype: torch.dtype) -> None:
    if min_rows < 1:
        raise ConfigError(f"min_rows is {min_rows}, and a client needs at least 1 row", "--min-rows 1")
    if dtype not in _PRECISIONS:
        raise DataError(f"rows cannot be kept as {dtype}", "choose torch.float32 or torch.float64")


def _located(fault: DataError, source: Source) -> DataError:
    return DataError(f"{source.path.name}: {fault.message}", fault.hint)
