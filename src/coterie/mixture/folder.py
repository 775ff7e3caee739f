# SPDX-License-Identifier: Apache-2.0
"""What the run folder of a mixture holds: what was found, its tables, and the models."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from coterie.algorithms.preparation import Scaling
from coterie.data.schema import Schema
from coterie.engines.checkpoint import load_tensors, save_tensors, to_record
from coterie.errors import RunError
from coterie.mixture.model import Mixtures, Typical
from coterie.mixture.results import OUTLIER, Choice, MixtureFit
from coterie.mixture.run import FittedMixture
from coterie.models.mixtures import Family, Gaussian, Regression
from coterie.run_tables import Contents, events, rounds_table

__all__ = ["contents", "read_choice", "read_models", "write_models"]

_COMMON = "models/models.safetensors"  # what a newcomer needs
_CLIENTS = "models/clients.safetensors"  # what is each client's own


def contents(fitted: FittedMixture) -> Contents:
    """What a finished run says and tabulates."""
    return Contents(_data(fitted), _results(fitted), _rounds(fitted), _clients(fitted))


def _data(fitted: FittedMixture) -> dict[str, Any]:
    schema, counts = fitted.schema, [fitted.per_client.get(name) for name in ("rows_train", "rows_test")]
    return {
        "path": fitted.options.data.path, "client": schema.client, "target": schema.target, "task": schema.task,
        "n_clients": len(fitted.mixtures.names), "n_rows": sum(int(n.sum()) for n in counts if n is not None),
        "n_features": schema.n_features, "metric": "log_likelihood", "metric_better": "higher",
        "target_scale": float(fitted.mixtures.scaling.y_scale) if schema.task == "regression" else None,
    }  # fmt: skip


def _results(fitted: FittedMixture) -> dict[str, Any]:
    fit, by = fitted.mixtures.fit, {"by": fitted.options.mixture.choose_by}
    return {
        "methods": [asdict(score) for score in fitted.scores],
        **{name: value for name, value in _said(fit.family).items() if name in ("family", "covariance", "variance")},
        "n_components": len(fit.centre),
        "c_lambda": _word(fit.c_lambda),
        "c_lambda_choice": None if fit.choice is None else _choice(fit.choice),
        "components_choice": None if fitted.counted is None else _choice(fitted.counted) | by,
        "rounds": fit.rounds,
        "settled": fitted.settled,
        "outlier_threshold": OUTLIER,
        "outliers": _outliers(fitted.mixtures),
        "components": _components(fitted),
        "warnings": fitted.warnings,
        "events": events(fitted.rounds),
    }


def _word(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "common" if value == math.inf else value


def _choice(choice: Choice) -> dict[str, Any]:
    values = [_word(value) for value in choice.values]
    return {"values": values, "scores": list(choice.scores), "chosen": choice.best}


def read_choice(said: Mapping[str, Any] | None) -> Choice | None:
    """Read back what `contents` says of a choice."""
    if said is None:
        return None
    values = tuple(math.inf if value == "common" else float(value) for value in said["values"])
    return Choice(values, tuple(said["scores"]), said["chosen"])


def _outliers(mixtures: Mixtures) -> list[dict[str, Any]]:
    score = mixtures.fit.outlier_score
    far = torch.argsort(score, descending=True)[: int(mixtures.fit.outliers.sum())].tolist()
    return [{"client": str(mixtures.names[k]), "score": float(score[k])} for k in far]


def _components(fitted: FittedMixture) -> dict[str, Any]:
    """The centre in the columns' own units."""
    mixtures, family = fitted.mixtures, fitted.mixtures.fit.family
    names, spread = list(fitted.schema.feature_names), mixtures.covariance.diagonal().sqrt()
    about: dict[str, Any] = {"deviation": spread.tolist()}
    if isinstance(family, Regression):
        names, about = names + ["intercept"] * family.intercept, {"noise": float(spread)}
    centre = mixtures.raw(mixtures.fit.centre).tolist()
    return {"parameters": names, "centre": centre, "weights": mixtures.mean_weights.tolist(), **about}


# -- tables -----------------------------------------------------------------------------------------------------------
def _rounds(fitted: FittedMixture) -> pa.Table:
    shift = fitted.mixtures.shift
    told = [r for r in fitted.rounds if "loss" in r.info]
    table = rounds_table([replace(r, info={**r.info, "loss": r.info["loss"] + shift}) for r in told])
    return table.append_column("change", pa.array([r.info["change"] for r in told], pa.float64()))


def _clients(fitted: FittedMixture) -> pa.Table:
    mixtures, fit = fitted.mixtures, fitted.mixtures.fit
    score = fit.outlier_score.numpy()
    columns: dict[str, Any] = {
        "client": mixtures.names.tolist(),
        "outlier_score": pa.array(score, mask=np.isneginf(score)),  # who was never heard has none
        "outlier": fit.outliers.numpy(),
        "own": fit.freedom.mean(1).numpy(),
    }
    columns |= {f"weight_{r}": fit.weights[:, r].numpy() for r in range(fit.weights.shape[1])}
    columns |= {name: value.numpy() for name, value in fitted.per_client.items()}
    if "rows_test" in columns:
        untested = columns["rows_test"] == 0
        for name in ("metric", "metric_global", "metric_local", "rmse"):
            if name in columns:
                columns[name] = pa.array(columns[name], mask=untested)
    return pa.table(columns)


# -- models -----------------------------------------------------------------------------------------------------------
def write_models(folder: Path, fitted: FittedMixture) -> None:
    """Write what is common, and what is each client's own, in units of scaled rows."""
    mixtures, fit = fitted.mixtures, fitted.mixtures.fit
    scaling, _ = to_record(mixtures.scaling)
    common = {"centre": fit.centre, "mean_weights": mixtures.mean_weights, "scale": fit.scale}
    common["new_scale"] = mixtures.new_scale
    common |= {f"scaling/{name}": value for name, value in scaling.items()}
    said = {
        "family": _said(fit.family), "schema": fitted.schema.model_dump(mode="json"),
        "typical": asdict(mixtures.typical), "rounds": fit.rounds, "c_lambda": _word(fit.c_lambda),
    }  # fmt: skip
    save_tensors(folder / _COMMON, common, said)
    own = {name: getattr(fit, name) for name in ("theta", "weights", "freedom", "outlier_score")}
    save_tensors(folder / _CLIENTS, own, {"names": mixtures.names.tolist()})


def read_models(folder: Path, choice: Choice | None) -> tuple[Mixtures, Schema]:
    """Read what `write_models` wrote."""
    for name, what in ((_COMMON, "the centre"), (_CLIENTS, "every client's own components")):
        if not (folder / name).exists():
            way_out = "copy the whole folder of the run, or start it again with `coterie fit`"
            raise RunError(f"{folder} has no {name}, which holds {what}", way_out)
    common, said = load_tensors(folder / _COMMON)
    own, who = load_tensors(folder / _CLIENTS)
    c_lambda = math.inf if said["c_lambda"] == "common" else said["c_lambda"]
    fit = MixtureFit(
        "fedgrem", _family(said["family"]), common["centre"], own["theta"], own["weights"], common["scale"],
        own["outlier_score"], own["freedom"], said["rounds"], c_lambda, choice,
    )  # fmt: skip
    scaling = Scaling(**_under("scaling/", common))
    names, usual = np.asarray(who["names"], dtype=str), Typical(**said["typical"])
    return Mixtures(fit, scaling, names, common["new_scale"], usual), Schema.model_validate(said["schema"])


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _said(family: Family) -> dict[str, Any]:
    """A family in words and numbers."""
    assert isinstance(family, Gaussian | Regression)
    return {"family": "regression" if isinstance(family, Regression) else "gaussian", **asdict(family)}


def _family(said: Mapping[str, Any]) -> Family:
    given = {name: value for name, value in said.items() if name != "family"}
    return Regression(**given) if said["family"] == "regression" else Gaussian(**given)
