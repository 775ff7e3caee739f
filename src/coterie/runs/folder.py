# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: options, rounds, clients, models and a report, each written whole or not at all."""

import io
import json
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError
from torch import nn

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.documents import checked
from coterie.engines.drive import Traffic
from coterie.errors import ConfigError, RunError
from coterie.files import check_files, digest, is_temporary, make_folder, replace_file, sealed
from coterie.limits import LARGEST_RESULT
from coterie.lock import LOCK
from coterie.methods.base import Fitted
from coterie.methods.families import family_of
from coterie.methods.intervals import Intervals
from coterie.methods.mixture.stored import StoredMixtures, read_choice
from coterie.methods.personal.model import Personal
from coterie.methods.run_tables import events, hide_undefined, hide_untested
from coterie.models import Model
from coterie.privacy.account import forget_secret
from coterie.registry import METHODS
from coterie.report.run_document import FinishedDocument
from coterie.report.run_folder import read_document
from coterie.runs.holding import RUN_NAME, tidy

__all__ = [
    "begin_run",
    "begun_by",
    "checkpoints_of",
    "finish_run",
    "is_finished",
    "load_run",
    "read_options",
    "settle_run",
    "strict",
    "summary",
]

_ANOTHER = "it may come from another version of coterie"


def begin_run(folder: Path, options: FitOptions, command: str, clients: Clients) -> bool:
    """Make the folder and write down what is about to be done.  -> whether the run is new

    A folder that holds something else, a run with other options, or a run on other data, is refused. A run that has
    finished is running again: what it has written will be replaced file by file.
    """
    print_ = clients.fingerprint()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and a run is a folder", "name a new folder with --out")
    if (folder / "run.json").exists():
        if read_options(folder) != options:
            raise ConfigError(
                f"{folder} holds a run with other options",
                f"continue it with `coterie resume {folder}`, or name another --out",
            )
        if _read_json(folder)["fingerprint"] != print_:
            raise RunError(
                f"the data of the run in {folder} has changed since it began", "start a new run with another --out"
            )
        if is_finished(folder):
            ended = {"seconds", "data", "results", "files"}
            begun = {key: value for key, value in _read_json(folder).items() if key not in ended}
            _write_json(folder, begun | {"status": "running"})
        return False
    if folder.exists() and any(
        path.name not in (LOCK, RUN_NAME) and not is_temporary(path) for path in folder.iterdir()
    ):
        raise ConfigError(f"{folder} is not empty and not a run", "name a new folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    begun = {"status": "running", "id": uuid.uuid4().hex, **_header(options, command), "fingerprint": print_}
    _write_json(folder, begun)
    return True


def checkpoints_of(folder: Path) -> dict[str, str]:
    """What a run's checkpoints say that they are of; nothing for a run of an earlier version."""
    document = _read_json(folder)
    return {"run": str(document["id"]), "data": str(document["fingerprint"])} if "id" in document else {}


def begun_by(folder: Path) -> str:
    """The command that began the run, whichever goes on with it."""
    return str(_read_json(folder)["command"])


def settle_run(folder: Path, options: FitOptions) -> None:
    """Write down the options that a comparison has settled, so that a resumed run goes on with them."""
    document = _read_json(folder)
    _write_json(folder, document | {"method": options.method, "config": options.model_dump(mode="json")})


def finish_run(folder: Path, fitted: Fitted, results: Mapping[str, Any] | None = None) -> None:
    """Write everything that a finished run holds; `results` adds to what the fit itself says."""
    make_folder(folder / "models")
    fitted.models.save(folder, fitted.schema)
    if "intervals" in fitted.extra:
        fitted.extra["intervals"].save(folder)
    _write_table(folder / "rounds.parquet", fitted.models.rounds(fitted))
    _write_table(folder / "clients.parquet", _clients(fitted))
    found = {
        "methods": [asdict(score) for score in fitted.scores],
        **fitted.models.results(fitted),
        **{
            name: fitted.extra[name]
            for name in ("probabilities", "coverage", "secure", "privacy")
            if name in fitted.extra
        },
        "warnings": fitted.warnings,
        "events": events(fitted.rounds),
        **({} if fitted.traffic is None else vars(fitted.traffic)),
    }
    document = _read_json(folder) | {"status": "finished", "seconds": fitted.seconds}
    document |= {"data": _data(fitted), "results": {**found, **(results or {})}, "files": _digests(folder)}
    _write_json(folder, document)
    forget_secret(folder)
    tidy(folder)


def _digests(folder: Path) -> dict[str, str]:
    """Of all files that are read back: tables, models, and the last checkpoint, which has what moment descent found."""
    names = ["rounds.parquet", "clients.parquet", "state.safetensors"]
    names += sorted(f"models/{path.name}" for path in (folder / "models").glob("*.safetensors"))
    return {name: digest(folder / name) for name in names if (folder / name).is_file()}


def _data(fitted: Fitted) -> dict[str, Any]:
    schema, counts = (
        fitted.schema,
        [fitted.per_client.get(name) for name in ("rows_train", "rows_test", "rows_calibration")],
    )
    return {
        "path": fitted.options.data.path, "client": schema.client, "target": schema.target, "task": schema.task,
        "n_clients": len(fitted.models.names), "n_rows": sum(int(n.sum()) for n in counts if n is not None),
        "n_features": schema.n_features, "metric": fitted.metric,
        "metric_better": "lower" if fitted.metric == "rmse" else "higher",
        "target_scale": (
            None if schema.task == "none" or schema.outcome else float(fitted.models.scaling.y_scale)
        ),
    }  # fmt: skip


def _clients(fitted: Fitted) -> pa.Table:
    """A row for each client, in the order of their names."""
    columns: dict[str, Any] = {"client": fitted.models.names.tolist(), **fitted.models.clients(fitted)}
    columns |= {name: value.numpy() for name, value in fitted.per_client.items()}
    hide_untested(columns)
    hide_undefined(columns)
    return pa.table({name: columns[name] for name in sorted(columns, key=lambda name: name.startswith("map_"))})


def summary(folder: Path) -> dict[str, Any]:
    """What a finished run found, in short."""
    document = _read_finished(folder)
    data, results = document["data"], document["results"]
    names = family_of(document["method"]).models.summary
    if missing := [name for name in names if name not in results]:
        raise RunError(f"{folder / 'run.json'} does not say its {missing[0]}", _ANOTHER)
    found = {name: results[name] for name in names}
    found |= {name: results[name] for name in ("adjusted_rand", "why") if name in results}
    about = {"method": document["method"], "seed": document["seed"], "metric": data["metric"]}
    return about | found | {"target_scale": data["target_scale"], "seconds": document["seconds"]}


def is_finished(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return bool(_read_json(folder)["status"] == "finished")


def read_options(folder: Path) -> FitOptions:
    """Read what a run was asked to do."""
    try:
        return FitOptions.model_validate(_read_json(folder)["config"])
    except ValidationError:
        raise RunError(f"{folder / 'run.json'} has unknown options", _ANOTHER) from None


def load_run(folder: Path, *, module: nn.Module | Model | None = None, state: Path | None = None) -> Fitted:
    """Read a finished run: all that predicting and placing need, without what happened on the way.

    Parameters
    ----------
    folder : Path
        The run.
    module : nn.Module or Model, optional
        The user's own network, when that was trained: code is not kept in a run folder.
    state : Path, optional
        The state folder of a node, where this is one: its clients' own parts are there.
    """
    document, options = _read_finished(folder), read_options(folder)
    if options.method != document["method"]:
        raise RunError(f"{folder / 'run.json'} has the options of {options.method}, not of its method", _ANOTHER)
    check_files(folder, document)
    family, found = family_of(options.method), document["results"]
    models, schema = family.models.load(folder, document, module)
    if state is not None:
        if not isinstance(models, Personal):
            raise ConfigError(f"{options.method} leaves nothing with clients", "leave the state folder out")
        models = models.at_node(folder, state)
    known = [one.name for one in fields(family.score)]
    scores = [family.score(**{name: said.get(name) for name in known}) for said in found["methods"]]
    extra: dict[str, Any] = (
        {"counted": read_choice(found.get("components_choice"))} if isinstance(models, StoredMixtures) else {}
    )
    if (intervals := Intervals.load(folder)) is not None:
        extra["intervals"] = intervals
    counted = [found.get(one.name) for one in fields(Traffic)]
    return Fitted(
        options, schema, models, scores, warnings=found["warnings"], extra=extra, seconds=document["seconds"],
        traffic=None if None in counted else Traffic(*counted),
    )  # fmt: skip


# -- writing ----------------------------------------------------------------------------------------------------------
def _header(options: FitOptions, command: str) -> dict[str, Any]:
    packages = ("torch", "numpy", "scikit-learn", "pyarrow")
    return {
        "coterie": version("coterie"),
        "method": options.method,
        "seed": options.seed,
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "config": options.model_dump(mode="json"),
    }


def _write_table(path: Path, table: pa.Table) -> None:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    replace_file(path, buffer.getvalue())


def _write_json(folder: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(sealed(strict(document)), indent=2, allow_nan=False)
    replace_file(folder / "run.json", (text + "\n").encode())


def strict(value: Any) -> Any:
    """What JSON can say, and `parsed` reads: a number that is not finite, or as good as not, is null."""
    if isinstance(value, Mapping):
        return {name: strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) <= LARGEST_RESULT else value


def _read_json(folder: Path) -> dict[str, Any]:
    document = read_document(folder)
    if not {"status", "config", "fingerprint"} <= document.keys():
        raise RunError(
            f"{folder} is not a run: its run.json was not written by a run",
            "name the folder that `coterie fit --out` wrote",
        )
    return document


def _read_finished(folder: Path) -> dict[str, Any]:
    document = _read_json(folder)
    if document["status"] != "finished":
        raise RunError(f"the run in {folder} has not finished", f"continue it with `coterie resume {folder}`")
    checked(FinishedDocument, document, str(folder / "run.json"), _ANOTHER)
    if document["method"] not in METHODS:
        raise RunError(f"{folder} is a run of '{document['method']}', which is no method here", _ANOTHER)
    return document
