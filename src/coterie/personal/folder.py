# SPDX-License-Identifier: Apache-2.0
"""What the run folder of personal models holds: what was found, its tables, and the models."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.comparison.prior import Prior
from coterie.data.schema import Schema
from coterie.engines.checkpoint import load_tensors, save_tensors, to_record
from coterie.local import Training
from coterie.model_folder import describe, model_from, scaling_from
from coterie.models import Dense, Model
from coterie.personal.measure import Distribution, Fit
from coterie.personal.model import Fitting, Personal
from coterie.personal.prior import FromPrior
from coterie.personal.run import FittedPersonal
from coterie.run_tables import Contents, events, hide_untested, rounds_table

__all__ = ["contents", "read_models", "write_models"]

_COMMON = "models/models.safetensors"  # what a newcomer needs
_CLIENTS = "models/clients.safetensors"  # what is each client's own


def contents(fitted: FittedPersonal) -> Contents:
    """What a finished run says and tabulates."""
    return Contents(_data(fitted), _results(fitted), _rounds(fitted), _clients(fitted))


def _data(fitted: FittedPersonal) -> dict[str, Any]:
    schema, counts = fitted.schema, [fitted.per_client.get(name) for name in ("rows_train", "rows_test")]
    return {
        "path": fitted.options.data.path, "client": schema.client, "target": schema.target, "task": schema.task,
        "n_clients": len(fitted.personal.names), "n_rows": sum(int(n.sum()) for n in counts if n is not None),
        "n_features": schema.n_features, "metric": fitted.metric,
        "metric_better": "higher" if fitted.metric == "accuracy" else "lower",
        "target_scale": float(fitted.scaling.y_scale),
    }  # fmt: skip


def _results(fitted: FittedPersonal) -> dict[str, Any]:
    told = [r for r in fitted.rounds if "loss" in r.info]
    return {
        "methods": [asdict(score) for score in fitted.scores],
        "spread": {name: _said(found) for name, found in fitted.spread.items()},
        "layers": list(fitted.personal.layers),
        "rounds": len(told),
        "virtual_time": fitted.virtual_time,
        "never_visited": int((fitted.per_client["rounds"] == 0).sum()) if "rounds" in fitted.per_client else 0,
        "setting": fitted.personal.fit.setting if isinstance(fitted.personal.fit, FromPrior) else None,
        "warnings": fitted.warnings,
        "events": events(fitted.rounds),
    }


def _said(found: Distribution) -> dict[str, float]:
    return {name: getattr(found, name) for name in ("mean", "median", "worst_decile", "best_decile")}


def _rounds(fitted: FittedPersonal) -> pa.Table:
    """The rounds, with what held-out rows said on the way and what the clock showed."""
    told = [r for r in fitted.rounds if "loss" in r.info]
    table = rounds_table(told).drop_columns(["moved", "sizes", "movement", "spectrum"])
    columns = {"test_metric": ([r.info.get("test_metric") for r in told], pa.float64())}
    if fitted.timed:
        columns["virtual_time"] = ([r.time for r in told], pa.float64())
    if any("stage" in r.info for r in told):
        columns |= {name: ([r.info.get(name) for r in told], pa.int64()) for name in ("stage", "enough")}
    for name, (values, kind) in columns.items():
        table = table.append_column(name, pa.array(values, kind))
    return table


def _clients(fitted: FittedPersonal) -> pa.Table:
    columns: dict[str, Any] = {"client": fitted.personal.names.tolist()}
    columns |= {name: value.numpy() for name, value in fitted.per_client.items()}
    hide_untested(columns)
    return pa.table(columns)


# -- models -----------------------------------------------------------------------------------------------------------
def write_models(folder: Path, fitted: FittedPersonal) -> None:
    """Write what all share, with what a newcomer needs, and apart from it what is each client's own."""
    found, fit = fitted.personal, fitted.personal.fit
    scaling, degree = to_record(fitted.scaling)
    start, how = _how(fit)
    tensors = {"theta": found.theta, **start} | {f"scaling/{name}": v for name, v in scaling.items()}
    said = {
        "model": describe(found.model), "schema": fitted.schema.model_dump(mode="json"), "degree": degree["degree"],
        "layers": list(found.layers), **how,
    }  # fmt: skip
    save_tensors(folder / _COMMON, tensors, said)
    own, names = (found.own, found.names.tolist()) if isinstance(found.own, Tensor) else (fit.start[None][:0], [])
    save_tensors(folder / _CLIENTS, {"own": own}, {"names": names})  # none where they have stayed with their clients


def _how(fit: Fit | Fitting) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """How a newcomer gets its part, as tensors and words."""
    if isinstance(fit, FromPrior):
        prior = {f"prior/{name}": getattr(fit.prior, name) for name in ("mean", "root", "noise")}
        return prior, {"structure": fit.structure, "setting": fit.setting}
    assert isinstance(fit, Fit)
    return {"start": fit.start}, {"step_size": fit.step_size, "training": asdict(fit.training), "seed": fit.seed}


def _read_how(model: Model, common: dict[str, Tensor], said: dict[str, Any]) -> Fit | FromPrior:
    """Read what `_how` said."""
    if "structure" in said:
        assert isinstance(model, Dense)
        prior = Prior(*(common[f"prior/{name}"] for name in ("mean", "root", "noise")))
        return FromPrior(said["structure"], said["setting"], prior, model)
    return Fit(common["start"], said["step_size"], Training(**said["training"]), said["seed"])


def read_models(folder: Path, module: nn.Module | Model | None) -> tuple[Personal, Scaling, Schema]:
    """Read what `write_models` wrote; the user's own network is given."""
    common, said = load_tensors(folder / _COMMON)
    own, who = load_tensors(folder / _CLIENTS)
    names, model = np.asarray(who["names"], dtype=str), model_from(said["model"], module)
    fit = _read_how(model, common, said)
    personal = Personal(model, tuple(said["layers"]), common["theta"], names, own["own"], fit)
    return personal, scaling_from(common, said), Schema.model_validate(said["schema"])
