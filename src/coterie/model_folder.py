# SPDX-License-Identifier: Apache-2.0
"""What the run folder of models for clients or clusters holds: what was found, its tables, and the models."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.data.schema import Schema
from coterie.engines.checkpoint import load_tensors, save_tensors, to_record
from coterie.errors import ConfigError
from coterie.fitting import Descended, Fitted
from coterie.local.monomials import monomial_names
from coterie.models import Dense, Model, Network
from coterie.run_tables import Contents, clients_table, events, rounds_table

__all__ = [
    "contents",
    "describe",
    "model_from",
    "named_parameters",
    "read_descended",
    "read_models",
    "scaling_from",
    "write_models",
]

_MODELS = "models/models.safetensors"
_STATE = "state.safetensors"


def contents(fitted: Fitted) -> Contents:
    """What a finished run says and tabulates."""
    return Contents(_data(fitted), _results(fitted), rounds_table(fitted.rounds), clients_table(fitted))


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
        "events": events(fitted.rounds),
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


def write_models(folder: Path, fitted: Fitted) -> None:
    """Write all models together with what they need, and each alone."""
    scaling, said = to_record(fitted.scaling)
    tensors = {"theta": fitted.theta} | {f"scaling/{name}": value for name, value in scaling.items()}
    document = {"model": describe(fitted.model), "schema": fitted.schema.model_dump(mode="json")}
    document["degree"] = said["degree"]
    save_tensors(folder / _MODELS, tensors, document)
    for k, theta in enumerate(fitted.theta):
        save_tensors(
            folder / "models" / f"cluster-{k}.safetensors", named_parameters(fitted.model, theta), {"cluster": k}
        )


def read_models(folder: Path, module: nn.Module | Model | None) -> tuple[Model, Scaling, Tensor, Schema]:
    """Read what `write_models` wrote; the user's own network is given."""
    tensors, said = load_tensors(folder / _MODELS)
    model = model_from(said["model"], module)
    return model, scaling_from(tensors, said), tensors["theta"], Schema.model_validate(said["schema"])


def scaling_from(tensors: dict[str, Tensor], said: dict[str, Any]) -> Scaling:
    """Read how features and target are scaled."""
    scaled = {name.removeprefix("scaling/"): v for name, v in tensors.items() if name.startswith("scaling/")}
    return Scaling(**scaled, degree=said.get("degree", 1))


def named_parameters(model: Model, theta: Tensor) -> dict[str, Tensor]:
    """One model's parameters by name, in their own shapes: what `load_state_dict` takes."""
    if isinstance(model, Network):
        return model.unpack(theta)
    parts = [part for layer in model.unpack(theta) for part in layer if part is not None]
    return dict(zip(model.layers, parts, strict=True))


def describe(model: Model) -> dict[str, Any]:
    """A model in words and numbers; of a user's own network, how it is used."""
    if isinstance(model, Network):
        return {"kind": "network", "loss": model.loss, "shape": model.shape, "kernel": model.kernel}
    made = asdict(model)
    return {"kind": "dense", **made, "dtype": str(model.dtype).removeprefix("torch.")}


def model_from(said: dict[str, Any], module: nn.Module | Model | None) -> Model:
    """Make the model that `describe` described; the user's own network is given."""
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


def read_descended(folder: Path, names: list[str]) -> Descended | None:
    """What Phase 1 left in the last checkpoint; who was given only the models has none."""
    if not (folder / _STATE).exists():
        return None
    tensors, said = load_tensors(folder / _STATE)
    spectra = [r["info"]["spectrum"] for r in said["rounds"] if "spectrum" in r["info"]]
    spectrum = torch.tensor(spectra[-1] if spectra else [], dtype=torch.float64)
    return Descended(np.asarray(names)[tensors["state/0/anchors"].numpy()], tensors["state/0/local"], spectrum)
