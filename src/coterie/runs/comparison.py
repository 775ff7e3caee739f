# SPDX-License-Identifier: Apache-2.0
"""A comparison is a folder: what was found, a table of the clients, and a report, put in place all at once."""

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.config import DataOptions, FitOptions
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.errors import ConfigError
from coterie.files import digest, is_temporary, remove_files, sealed, temporary
from coterie.lock import held
from coterie.methods.linear.structures import Effort
from coterie.methods.session import Watch
from coterie.report.comparison import write_comparison_report
from coterie.runs.folder import strict
from coterie.runs.holding import remove_own
from coterie.selection.result import Comparison
from coterie.selection.run import compare
from coterie.selection.text import answer, fit_command

__all__ = [
    "Compared", "about", "answers_of", "check_free", "clients_table", "compare_run", "holding_place", "keeping_answers",
    "write_comparison",
]  # fmt: skip

_FILES = ("compare.json", "clients.parquet", "report.html")


@contextmanager
def holding_place(folder: Path) -> Iterator[None]:
    """Have the place alone where a comparison's folder will be; the lock is beside it, as the folder comes all at once.

    Drafts that killed processes have left there are removed, and answers once the folder is there.
    """
    with held(folder.with_name(f".{folder.name}.lock"), folder) as first:
        if first:
            for path in folder.parent.iterdir():
                if is_temporary(path, folder.name) and path.is_dir():
                    remove_files(path, [*_FILES, *(inner.name for inner in path.iterdir() if is_temporary(inner))])
            if (folder / "compare.json").is_file():
                remove_own(answers_of(folder))
        yield


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something, before anything is computed."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and a comparison is a folder", "name a new folder with --out")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "name a new folder with --out")


def about(found: Comparison, *, data: Mapping[str, Any], command: str, fit: str | None) -> dict[str, Any]:
    """All that `compare.json` says.

    Parameters
    ----------
    found : Comparison
        What was found.
    data : mapping
        What was read, and how.
    command : str
        What was asked for.
    fit : str or None
        The command that fits what was chosen.
    """
    said = answer(found)
    document: dict[str, Any] = strict(
        {
            "coterie": version("coterie"),
            "command": command,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
            "data": dict(data),
            "answer": said._asdict(),
            "fit": fit,
            **found.document(),
        }
    )
    return document


@dataclass(frozen=True)
class Compared:
    """A comparison that is written: what was found, what `compare.json` says, the next command, and the report."""

    found: Comparison
    document: dict[str, Any]
    fit: str | None
    report: Path


def compare_run(
    folder: Path,
    clients: Clients,
    chosen: FitOptions,
    command: str,
    *,
    named: DataOptions,
    quick: bool = False,
    effort: Effort | None = None,
    watch: Watch | None = None,
    on_flower: bool = False,
) -> Compared:
    """Compare, and write the folder.

    Parameters
    ----------
    folder : Path
        A new one.
    clients : Clients
        Whom to compare.
    chosen : FitOptions
        How the data was asked for, hidden layers, and the seed.
    command : str
        What was asked for, to be written down.
    named : DataOptions
        The data as the next command is to name it.
    quick, effort, watch
        As for `compare`.
    on_flower : bool
        Whether the next command runs on the same federation.
    """
    how: dict[str, Any] = {"quick": quick, "effort": effort}
    with holding_place(folder), keeping_answers(answers_of(folder), clients, chosen, **how):
        found = compare(clients, hidden=chosen.model.hidden, seed=chosen.seed, secure=chosen.secure, watch=watch, **how)
        advice = found[found.chosen].fit
        fit = fit_command(named, advice, seed=chosen.seed, on_flower=on_flower, secure=chosen.secure)
        document = about(found, data=chosen.data.model_dump(mode="json"), command=command, fit=fit)
        return Compared(found, document, fit, write_comparison(folder, found, document))


def answers_of(folder: Path) -> Path:
    """Where a comparison on other machines keeps their answers until its folder is written."""
    return folder.with_name(f".{folder.name}.answers")


def keeping_answers(
    place: Path, clients: Clients, chosen: FitOptions, *, quick: bool = False, effort: Effort | None = None
) -> AbstractContextManager[None]:
    """Keep what clients on other machines answer, and begin with what they have answered before; rows here need nothing."""
    if not isinstance(clients.train, RemoteRows):
        return nullcontext()
    asked = {"coterie": version("coterie"), "data": clients.fingerprint(), "quick": quick, "seed": chosen.seed}
    asked |= {"hidden": list(chosen.model.hidden), "effort": None if effort is None else vars(effort)}
    asked |= {"secure": True} if chosen.secure else {}
    made: AbstractContextManager[None] = clients.train.federation.remembering(place, asked)
    return made


def write_comparison(folder: Path, found: Comparison, document: Mapping[str, Any]) -> Path:
    """Write `compare.json`, `clients.parquet` and `report.html`, and return the path of the report."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = temporary(folder)
    draft.mkdir()
    try:
        pq.write_table(clients_table(found), draft / "clients.parquet")
        said = sealed({**document, "files": {"clients.parquet": digest(draft / "clients.parquet")}})
        text = json.dumps(said, indent=2, allow_nan=False)
        (draft / "compare.json").write_text(text + "\n", encoding="utf-8")
        write_comparison_report(draft, name=folder.name)
        check_free(folder)
        os.replace(draft, folder)
    finally:
        if draft.exists():
            remove_files(draft, _FILES)
    return folder / "report.html"


def clients_table(found: Comparison) -> pa.Table:
    """Lay clients out in the order of their names; what a client does not have is null."""
    columns: dict[str, Any] = {"client": found.names.tolist(), "rows": found.rows}
    if found.judged is None:  # sums were secure: nothing else is known of single clients
        return pa.table(columns)
    columns |= {
        "judged": found.judged,
        "outlier": np.isin(found.names, found.outliers),
        "outlier_score": _with_nulls(found.outlier_score),
        "gain": _with_nulls(found.gain),
    }
    groups = found.grouping
    if groups is not None and groups.labels is not None:
        columns["label"] = pa.array(groups.labels, mask=groups.labels < 0)
        columns["agreement"] = _with_nulls(groups.agreement)
        columns |= {"margin": _with_nulls(groups.margin)}
    if groups is not None and groups.map is not None:
        columns |= {"map_x": _with_nulls(groups.map[:, 0]), "map_y": _with_nulls(groups.map[:, 1])}
    for one in found.structures:
        columns[f"score_{one.name}"] = _with_nulls(one.client_score)
    for one in found.structures:
        columns[f"metric_{one.name}"] = _with_nulls(one.client_test_metric)
    return pa.table(columns)


def _with_nulls(given: np.ndarray | None) -> pa.Array:
    values = np.asarray(given, dtype=np.float64)
    return pa.array(values, mask=~np.isfinite(values))
