# SPDX-License-Identifier: Apache-2.0
"""A run is a folder: options, rounds, clients, models and a report, each written whole or not at all."""

import hashlib
import io
import json
import math
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.schema import Schema
from coterie.engines.checkpoint import load_tensors, replace_file, save_tensors, to_record
from coterie.errors import ConfigError, RunError
from coterie.fitting import Descended, Fitted, Score
from coterie.local.monomials import monomial_names
from coterie.models import Dense, Model, Network
from coterie.run_tables import clients_table, rounds_table

__all__ = ["Loaded", "begin_run", "finish_run", "is_finished", "load_run", "read_options", "summary"]

_MODELS = "models/models.safetensors"
_STATE = "state.safetensors"


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


def begin_run(folder: Path, options: FitOptions, command: str, clients: Clients) -> bool:
    """Make the folder and write down what is about to be done.  -> whether the run is new

    A folder that holds something else, a run with other options, or a run on other data, is refused.
    """
    print_ = _fingerprint(clients)
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


def finish_run(folder: Path, fitted: Fitted, results: Mapping[str, Any] | None = None) -> None:
    """Write everything that a finished run holds; `results` adds to what the fit itself says."""
    _write_models(folder, fitted)
    _write_table(folder / "rounds.parquet", rounds_table(fitted.rounds))
    _write_table(folder / "clients.parquet", clients_table(fitted))
    document = _read_json(folder) | {"status": "finished", "seconds": fitted.seconds}
    document |= {"data": _data(fitted), "results": {**_results(fitted), **(results or {})}}
    _write_json(folder, document)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for left in folder.rglob(".*.tmp"):  # of a process that was killed while it wrote
        left.unlink()


def summary(folder: Path) -> dict[str, Any]:
    """What a finished run found, in short."""
    document = _read_json(folder)
    data, results = document["data"], document["results"]
    names = ("methods", "n_clusters", "cluster_sizes", "uncertain_clients", "warnings")
    found = {name: results[name] for name in names}
    found |= {name: results[name] for name in ("adjusted_rand",) if name in results}
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
    document = _read_json(folder)
    if document["status"] != "finished":
        raise RunError(f"the run in {folder} has not finished", f"continue it with `coterie resume {folder}`")
    tensors, said = load_tensors(folder / _MODELS)
    model = _model_from(said["model"], module)
    scaled = {name.removeprefix("scaling/"): v for name, v in tensors.items() if name.startswith("scaling/")}
    scaling = Scaling(**scaled, degree=said.get("degree", 1))
    table = _read_clients(folder)
    labels = dict(zip(table["client"].to_pylist(), table["label"].to_pylist(), strict=True))
    margins, certain = (table[name].to_numpy() for name in ("margin", "certain"))
    schema = Schema.model_validate(said["schema"])
    scores = [Score(**said) for said in document["results"]["methods"]]
    options = read_options(folder)
    descended = _read_descended(folder, list(labels)) if options.method == "moment-descent" else None
    return Loaded(options, schema, model, scaling, tensors["theta"], labels, margins, certain, scores, descended)


def _fingerprint(clients: Clients) -> str:
    """What tells one data set from another: its columns, its clients, and every value."""
    seen = hashlib.blake2b(clients.schema.model_dump_json().encode(), digest_size=16)
    for rows in (clients.train, clients.test, clients.newcomers):
        if rows is not None:
            seen.update("\0".join(rows.names.tolist()).encode() + rows.layout.counts.tobytes())
            for block in rows.blocks():
                for part in (block.x, block.y):
                    seen.update(b"" if part is None else part.contiguous().numpy().data)
    return seen.hexdigest()


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


def _data(fitted: Fitted) -> dict[str, Any]:
    schema, data = fitted.schema, fitted.options.data
    rows = sum(int(fitted.per_client[name].sum()) for name in ("rows_train", "rows_test") if name in fitted.per_client)
    return {
        "path": data.path, "client": schema.client, "target": schema.target, "task": schema.task,
        "n_clients": len(fitted.names), "n_rows": rows, "n_features": schema.n_features, "metric": fitted.metric,
        "metric_better": "higher" if fitted.metric == "accuracy" else "lower",
        "target_scale": float(fitted.scaling.y_scale),
    }  # fmt: skip


def _results(fitted: Fitted) -> dict[str, Any]:
    k = len(fitted.theta)
    last = fitted.options.clusters.n_init if fitted.chosen_run is not None else 0
    return {
        "methods": [asdict(score) for score in fitted.scores],
        "n_clusters": k,
        "counted": fitted.counted,
        "cluster_sizes": torch.bincount(fitted.placed.label, minlength=k).tolist(),
        "chosen_run": last,
        "uncertain_clients": int((~fitted.placed.certain).sum()),
        "warnings": fitted.warnings,
        "events": [
            {"run": r.run, "round": r.round, "text": text} for r in fitted.rounds for text in r.info.get("events", ())
        ],
        "profiles": _profiles(fitted),
        "anchors": None if fitted.descended is None else fitted.descended.anchors.tolist(),
    }


def _profiles(fitted: Fitted) -> dict[str, Any] | None:
    """How linear models differ: coefficients of standardised features."""
    model = fitted.model
    if not isinstance(model, Dense) or not model.is_linear or model.loss != "squared" or len(fitted.theta) < 2:
        return None
    weight = fitted.theta[:, model.layers["0.weight"]]
    names = monomial_names(fitted.schema.feature_names, fitted.scaling.degree)
    return {"features": list(names), "coefficients": weight.tolist()}


def _write_models(folder: Path, fitted: Fitted) -> None:
    (folder / "models").mkdir(exist_ok=True)
    scaling, said = to_record(fitted.scaling)
    tensors = {"theta": fitted.theta} | {f"scaling/{name}": value for name, value in scaling.items()}
    document = {"model": _describe(fitted.model), "schema": fitted.schema.model_dump(mode="json")}
    document["degree"] = said["degree"]
    save_tensors(folder / _MODELS, tensors, document)
    for k, theta in enumerate(fitted.theta):
        save_tensors(folder / "models" / f"cluster-{k}.safetensors", _named(fitted.model, theta), {"cluster": k})


def _named(model: Model, theta: Tensor) -> dict[str, Tensor]:
    """One model's parameters by name, in their own shapes: what `load_state_dict` takes."""
    if isinstance(model, Network):
        return model.unpack(theta)
    parts = [part for layer in model.unpack(theta) for part in layer if part is not None]
    return dict(zip(model.layers, parts, strict=True))


def _describe(model: Model) -> dict[str, Any]:
    if isinstance(model, Network):
        return {"kind": "network", "loss": model.loss, "shape": model.shape, "kernel": model.kernel}
    made = asdict(model)
    return {"kind": "dense", **made, "dtype": str(model.dtype).removeprefix("torch.")}


def _model_from(said: dict[str, Any], module: nn.Module | Model | None) -> Model:
    if said["kind"] == "dense":
        own = {name: said[name] for name in ("loss", "intercept", "l2")}
        return Dense(tuple(said["sizes"]), dtype=getattr(torch, said["dtype"]), **own)
    if isinstance(module, Network):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "this run trained a torch module, whose code is not in the folder",
            "load it in Python: coterie.load(RUN, model=MyNet())",
        )
    shape = None if said["shape"] is None else tuple(said["shape"])
    return Network(module, said["loss"], shape, said["kernel"])


def _write_table(path: Path, table: pa.Table) -> None:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    replace_file(path, buffer.getvalue())


def _write_json(folder: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(_strict(document), indent=2, allow_nan=False)
    replace_file(folder / "run.json", (text + "\n").encode())


def _strict(value: Any) -> Any:
    """What JSON can say: a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
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


def _read_clients(folder: Path) -> pa.Table:
    path = folder / "clients.parquet"
    try:
        return pq.read_table(path, columns=["client", "label", "margin", "certain"])
    except (OSError, pa.ArrowException):
        raise RunError(f"{path} cannot be read", "start the run again with `coterie fit`") from None


def _read_descended(folder: Path, names: list[str]) -> Descended | None:
    """What Phase 1 left in the last checkpoint; who was given only the models has none."""
    if not (folder / _STATE).exists():
        return None
    tensors, said = load_tensors(folder / _STATE)
    spectra = [r["info"]["spectrum"] for r in said["rounds"] if "spectrum" in r["info"]]
    spectrum = torch.tensor(spectra[-1] if spectra else [], dtype=torch.float64)
    return Descended(np.asarray(names)[tensors["state/0/anchors"].numpy()], tensors["state/0/local"], spectrum)
