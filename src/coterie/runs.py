# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: options, rounds, clients, models and a report, each written whole or not at all."""

import io
import json
import math
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError
from torch import Tensor, nn

from coterie import model_folder
from coterie.algorithms.preparation import Scaling
from coterie.config import PERSONAL, FitOptions
from coterie.data.clients import Clients
from coterie.data.schema import Schema
from coterie.engines.checkpoint import replace_file
from coterie.errors import ConfigError, RunError
from coterie.fitting import Descended, Fitted, Score
from coterie.mixture import folder as mixture_folder
from coterie.mixture.model import Mixtures
from coterie.mixture.results import Choice
from coterie.mixture.run import FittedMixture
from coterie.mixture.scores import MixtureScore
from coterie.models import Model
from coterie.personal import folder as personal_folder
from coterie.personal.model import Personal
from coterie.personal.run import FittedPersonal

__all__ = [
    "AnyFitted",
    "Loaded",
    "LoadedMixture",
    "LoadedPersonal",
    "begin_run",
    "finish_run",
    "is_finished",
    "load_mixture",
    "load_personal",
    "load_run",
    "read_options",
    "settle_run",
    "strict",
    "summary",
]

AnyFitted = Fitted | FittedMixture | FittedPersonal

_SUMMARY = ("methods", "n_clusters", "cluster_sizes", "uncertain_clients", "warnings")
_SUMMARY_OF_MIXTURE = ("methods", "n_components", "c_lambda", "outliers", "rounds", "settled", "warnings")
_SUMMARY_OF_PERSONAL = ("methods", "spread", "layers", "rounds", "virtual_time", "never_visited", "warnings")


@dataclass(frozen=True)
class Loaded:
    """A finished run, read back: all that predicting and placing need."""

    options: FitOptions
    schema: Schema
    model: Model
    scaling: Scaling
    theta: Tensor  # [K, P]
    labels: dict[str, int]  # client -> cluster
    margins: np.ndarray  # [M] in the order of the labels
    certain: np.ndarray  # [M]
    scores: list[Score]
    descended: Descended | None = None


@dataclass(frozen=True)
class LoadedMixture:
    """A finished run of a mixture, read back."""

    options: FitOptions
    schema: Schema
    mixtures: Mixtures
    scores: list[MixtureScore]
    counted: Choice | None


@dataclass(frozen=True)
class LoadedPersonal:
    """A finished run of personal models, read back."""

    options: FitOptions
    schema: Schema
    scaling: Scaling
    personal: Personal
    scores: list[Score]


def begin_run(folder: Path, options: FitOptions, command: str, clients: Clients) -> bool:
    """Make the folder and write down what is about to be done.  -> whether the run is new

    A folder that holds something else, a run with other options, or a run on other data, is refused.
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
        return False
    if folder.exists() and any(path.suffix != ".tmp" for path in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and not a run", "name a new folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder, {"status": "running", **_header(options, command), "fingerprint": print_})
    return True


def settle_run(folder: Path, options: FitOptions) -> None:
    """Write down the options that a comparison has settled, so that a resumed run goes on with them."""
    document = _read_json(folder)
    _write_json(folder, document | {"method": options.method, "config": options.model_dump(mode="json")})


def finish_run(folder: Path, fitted: AnyFitted, results: Mapping[str, Any] | None = None) -> None:
    """Write everything that a finished run holds; `results` adds to what the fit itself says."""
    (folder / "models").mkdir(exist_ok=True)
    if isinstance(fitted, FittedMixture):
        mixture_folder.write_models(folder, fitted)
        found = mixture_folder.contents(fitted)
    elif isinstance(fitted, FittedPersonal):
        personal_folder.write_models(folder, fitted)
        found = personal_folder.contents(fitted)
    else:
        model_folder.write_models(folder, fitted)
        found = model_folder.contents(fitted)
    _write_table(folder / "rounds.parquet", found.rounds)
    _write_table(folder / "clients.parquet", found.clients)
    document = _read_json(folder) | {"status": "finished", "seconds": fitted.seconds}
    document |= {"data": found.data, "results": {**found.results, **(results or {})}}
    _write_json(folder, document)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for left in folder.rglob(".*.tmp"):  # of a process that was killed while it wrote
        left.unlink()


def summary(folder: Path) -> dict[str, Any]:
    """What a finished run found, in short."""
    document = _read_json(folder)
    data, results = document["data"], document["results"]
    kinds = {"mixture": _SUMMARY_OF_MIXTURE} | dict.fromkeys(PERSONAL, _SUMMARY_OF_PERSONAL)
    found = {name: results[name] for name in kinds.get(document["method"], _SUMMARY)}
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
        raise RunError(
            f"{folder / 'run.json'} has options that are not known", "it may be of another version of coterie"
        ) from None


def load_run(folder: Path, *, module: nn.Module | Model | None = None) -> Loaded:
    """Read a finished run.

    Parameters
    ----------
    folder : Path
        The run.
    module : nn.Module or Model, optional
        The user's own network, when that was trained: code is not kept in a run folder.
    """
    document = _read_finished(folder)
    model, scaling, theta, schema = model_folder.read_models(folder, module)
    table = _read_clients(folder)
    labels = dict(zip(table["client"].to_pylist(), table["label"].to_pylist(), strict=True))
    margins, certain = (table[name].to_numpy() for name in ("margin", "certain"))
    scores = [Score(**said) for said in document["results"]["methods"]]
    options = read_options(folder)
    descended = model_folder.read_descended(folder, list(labels)) if options.method == "moment-descent" else None
    return Loaded(options, schema, model, scaling, theta, labels, margins, certain, scores, descended)


def load_mixture(folder: Path) -> LoadedMixture:
    """Read a finished run of a mixture."""
    found = _read_finished(folder)["results"]
    choices = [mixture_folder.read_choice(found[name]) for name in ("c_lambda_choice", "components_choice")]
    mixtures, schema = mixture_folder.read_models(folder, choices[0])
    scores = [MixtureScore(**said) for said in found["methods"]]
    return LoadedMixture(read_options(folder), schema, mixtures, scores, choices[1])


def load_personal(folder: Path, *, module: nn.Module | Model | None = None) -> LoadedPersonal:
    """Read a finished run of personal models; `module` as for `load_run`."""
    document = _read_finished(folder)
    personal, scaling, schema = personal_folder.read_models(folder, module)
    scores = [Score(**said) for said in document["results"]["methods"]]
    return LoadedPersonal(read_options(folder), schema, scaling, personal, scores)


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
    text = json.dumps(strict(document), indent=2, allow_nan=False)
    replace_file(folder / "run.json", (text + "\n").encode())


def strict(value: Any) -> Any:
    """What JSON can say: a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {name: strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_json(folder: Path) -> dict[str, Any]:
    way_out = "name the folder that `coterie fit --out` wrote"
    try:
        document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder} is not a run: it has no run.json", way_out) from None
    except (ValueError, OSError):
        raise RunError(f"{folder / 'run.json'} cannot be read", "start the run again with `coterie fit`") from None
    if not isinstance(document, dict) or not {"status", "config", "fingerprint"} <= document.keys():
        raise RunError(f"{folder} is not a run: its run.json is of something else", way_out)
    return document


def _read_finished(folder: Path) -> dict[str, Any]:
    document = _read_json(folder)
    if document["status"] != "finished":
        raise RunError(f"the run in {folder} has not finished", f"continue it with `coterie resume {folder}`")
    return document


def _read_clients(folder: Path) -> pa.Table:
    path = folder / "clients.parquet"
    try:
        return pq.read_table(path, columns=["client", "label", "margin", "certain"])
    except (OSError, pa.ArrowException):
        raise RunError(f"{path} cannot be read", "start the run again with `coterie fit`") from None
