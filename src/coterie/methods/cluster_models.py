# SPDX-License-Identifier: Apache-2.0
"""K models, and the one that each client is served by: what clustering leaves behind, and, with K = 1, FedAvg."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.data.schema import Schema
from coterie.documents import Said, checked
from coterie.engines.checkpoint import save_tensors
from coterie.errors import RunError
from coterie.evaluate import Placed
from coterie.local.monomials import monomial_names
from coterie.methods.base import Fitted
from coterie.methods.coefficients import cluster_coefficients
from coterie.methods.run_tables import rounds_table
from coterie.methods.stored import Stored, StoredWords, describe, named_parameters, scaling_record
from coterie.models import Dense, Loss, Model
from coterie.models.outcomes import metric_of
from coterie.report.run_folder import checked_table

__all__ = ["ClusterModels", "Counted", "Descended"]

_MODELS = "models/models.safetensors"
_STATE = "state.safetensors"
_FAR = 1e12  # the loss of a diverged model, on the map


@dataclass(frozen=True)
class Descended:
    """What Phase 1 of moment descent left behind."""

    anchors: np.ndarray  # [A] their names
    theta: Tensor  # [A, P] their models
    spectrum: Tensor  # [L] singular values that the last iteration saw


@dataclass(frozen=True)
class Counted:
    """What is known of where clients belong, where they keep that to themselves."""

    sizes: Tensor  # [K] clients of each cluster
    unsure: int  # whose margin is within two standard errors


@dataclass(frozen=True)
class ClusterModels:
    """K models for rows that are scaled, and where each client belongs.

    Attributes
    ----------
    model : Model
        What theta are parameters of.
    scaling : Scaling
        Of the columns.
    theta : Tensor
        [K, P]
    names : ndarray
        [M] clients, ascending.
    placed : Placed or None
        Where they belong; read back, losses are not known. None where clients keep it to themselves.
    descended : Descended or None
        Phase 1 of moment descent.
    counted : Counted or None
        What is known in place of where they belong.
    """

    summary: ClassVar[tuple[str, ...]] = ("methods", "n_clusters", "cluster_sizes", "uncertain_clients", "warnings")

    model: Model
    scaling: Scaling
    theta: Tensor
    names: np.ndarray
    placed: Placed | None
    descended: Descended | None = None
    counted: Counted | None = None

    @property
    def metric(self) -> str:
        """What scores count."""
        return metric_of(self.model.loss)

    @property
    def sizes(self) -> list[int]:
        """[K] clients of each cluster."""
        if self.counted is not None:
            return [int(n) for n in self.counted.sizes]
        return torch.bincount(self.belongs.label, minlength=len(self.theta)).tolist()

    @property
    def belongs(self) -> Placed:
        """Where clients belong, unless they keep it to themselves."""
        if self.placed is None:
            raise RunError(
                "with secure sums or a privacy budget, clients keep their clusters to themselves",
                "place clients by their own rows: coterie assign, or the estimator's assign",
            )
        return self.placed

    @property
    def uncertain(self) -> int:
        """How many clients' clusters are uncertain, as far as that is known."""
        return self.counted.unsure if self.counted is not None else int((~self.belongs.certain).sum())

    @property
    def shares(self) -> Tensor:
        """[K] the share of the clients in each cluster: a new client of which nothing is known gets all models by these."""
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return sizes / sizes.sum().clamp(min=1)

    @property
    def labels(self) -> dict[str, int]:
        """The cluster of each client by name; nothing where clients keep it to themselves."""
        if self.placed is None:
            return {}
        return dict(zip(self.names.tolist(), self.placed.label.tolist(), strict=True))

    # -- the run folder -----------------------------------------------------------------------------------------------
    def save(self, folder: Path, schema: Schema) -> None:
        """Write all models together with what they need, and each alone."""
        scaling, degree = scaling_record(self.scaling)
        said = {"model": describe(self.model), "schema": schema.model_dump(mode="json"), "degree": degree}
        save_tensors(folder / _MODELS, {"theta": self.theta, **scaling}, said)
        for k, theta in enumerate(self.theta):
            save_tensors(
                folder / "models" / f"cluster-{k}.safetensors", named_parameters(self.model, theta), {"cluster": k}
            )

    @classmethod
    def load(
        cls, folder: Path, document: Mapping[str, Any], module: nn.Module | Model | None
    ) -> tuple["ClusterModels", Schema]:
        """Read what `save` wrote, and where clients belong from the table of clients."""
        stored = Stored(folder / _MODELS)
        said = stored.words(StoredWords)
        model = stored.model(said, module)
        theta = stored.tensor("theta", None, model.n_parameters, dtype=model.dtype)
        names, placed = _read_clients(folder / "clients.parquet", len(theta), document)
        descended = _read_descended(folder, names, model) if document["method"] == "moment-descent" else None
        counted = None if placed is not None else _read_counted(document, len(theta))
        found = cls(model, stored.scaling(said.schema_, said.degree), theta, names, placed, descended, counted)
        return found, said.schema_

    def results(self, fitted: Fitted) -> dict[str, Any]:
        """What the run's document says of the models."""
        chosen = fitted.extra.get("chosen_run")
        return {
            "n_clusters": len(self.theta),
            "counted": fitted.extra.get("counted"),
            "cluster_sizes": self.sizes,
            "chosen_run": 0 if chosen is None else fitted.options.clusters.n_init,
            "uncertain_clients": self.uncertain if self.placed is None or self.placed.knows_errors else None,
            "profiles": self._profiles(fitted.schema),
            "coefficients": cluster_coefficients(self.model, self.theta, fitted.schema, self.scaling),
            "anchors": None if self.descended is None else self.descended.anchors.tolist(),
        }

    def _profiles(self, schema: Schema) -> dict[str, Any] | None:
        """How linear models differ: coefficients of standardised features."""
        model = self.model
        if not isinstance(model, Dense) or not model.is_linear or model.loss != "squared" or len(self.theta) < 2:
            return None
        weight = self.theta[:, model.layers["0.weight"]]
        return {
            "features": list(monomial_names(schema.feature_names, self.scaling.degree)),
            "coefficients": weight.tolist(),
        }

    def clients(self, fitted: Fitted) -> dict[str, Any]:
        """Where clients belong, and a map of them; nothing where they keep it to themselves."""
        if self.placed is None:
            return {}
        x, y = _map(self.placed, self.model.loss)
        certain = {"certain": self.placed.certain.numpy()} if self.placed.knows_errors else {}
        return {
            "label": self.placed.label.numpy(),
            "margin": self.placed.margin.double().numpy(),
            "margin_error": pa.array(self.placed.margin_error.double().tolist(), pa.float64(), from_pandas=True),
            **certain,
            "map_x": x,
            "map_y": y,
        }

    def rounds(self, fitted: Fitted) -> pa.Table:
        """A row for each round."""
        return rounds_table(fitted.rounds)

    # -- faces --------------------------------------------------------------------------------------------------------
    def remarks(self, fitted: Fitted) -> list[str]:
        """How clusters were counted, and how large they are."""
        counted = fitted.extra.get("counted")
        said = [] if counted is None else [str(counted)]
        return said + [f"clients per cluster: {', '.join(map(str, self.sizes))}"] * (len(self.theta) > 1)

    def arrays(self) -> dict[str, Tensor]:
        """All models' parameters: "0/...", "1/..." are those of the clusters."""
        models = [named_parameters(self.model, theta) for theta in self.theta]
        return {f"{k}/{name}": value.contiguous() for k, model in enumerate(models) for name, value in model.items()}


def _map(found: Placed, loss: Loss) -> tuple[np.ndarray, np.ndarray]:
    """Lay clients out by how they fare under all models: principal axes of the losses, each relative to the mean."""
    known = found.losses.double().nan_to_num(nan=_FAR).clamp(-_FAR, _FAR)
    positive = loss in ("squared", "cross_entropy")  # minus a log density need not be
    losses = (known.clamp(min=1e-12).log() if positive else known).numpy()  # [M, K]
    about = losses - losses.mean(1, keepdims=True)
    about = about - about.mean(0)
    _, _, axes = np.linalg.svd(about, full_matrices=False)
    across = about @ axes.T
    second = across[:, 1] if losses.shape[1] > 2 else losses.min(1)
    return across[:, 0], second


class _Results(Said):
    cluster_sizes: list[int]
    uncertain_clients: int | None = None


def _read_counted(document: Mapping[str, Any], n_clusters: int) -> Counted:
    """What a run with secure sums says of its clusters."""
    said = checked(_Results, document["results"], "what the run says of its clusters", "start the run again")
    if len(said.cluster_sizes) != n_clusters or min(said.cluster_sizes) < 0:
        raise RunError(f"the run counts clients of other clusters than its {n_clusters}", "start the run again")
    return Counted(torch.tensor(said.cluster_sizes), said.uncertain_clients or 0)


def _read_clients(path: Path, n_clusters: int, document: Mapping[str, Any]) -> tuple[np.ndarray, Placed | None]:
    config = document.get("config", {})
    if config.get("secure", False) or (config.get("privacy") or {}).get("epsilon") is not None:
        return _read_names(path), None
    columns = ("client", "label", "margin", "margin_error", "rows_train")
    table = checked_table(path)
    if table is None or (missing := [name for name in columns if name not in table.column_names]):
        lacks = "does not exist" if table is None else f"has no column '{missing[0]}'"
        raise RunError(f"'{path}' {lacks}", "start the run again with `coterie fit`")
    label, rows = (
        table[name].cast(pa.int64(), safe=False).fill_null(-1).to_numpy() for name in ("label", "rows_train")
    )
    if len(label) and not (label.min() >= 0 and label.max() < n_clusters):
        raise RunError(f"'{path}' has clients of clusters that are not among the {n_clusters}", "start the run again")
    margin, error = (table[name].cast(pa.float64(), safe=False).to_numpy() for name in ("margin", "margin_error"))
    unknown = torch.full((len(label), n_clusters), torch.nan, dtype=torch.float64)
    parts = (torch.from_numpy(values.copy()) for values in (label, margin, error, rows))
    first, *others = parts
    return _names(path, table), Placed(first, unknown, *others)


def _read_names(path: Path) -> np.ndarray:
    table = checked_table(path)
    if table is None or "client" not in table.column_names:
        raise RunError(f"'{path}' does not say who the clients are", "start the run again with `coterie fit`")
    return _names(path, table)


def _names(path: Path, table: pa.Table) -> np.ndarray:
    names = table["client"].to_pylist()
    if None in names or len(set(names)) < len(names):
        raise RunError(f"'{path}' has clients without a name, or with the same", "start the run again")
    return np.asarray(names, dtype=str)


class _Info(Said):
    spectrum: list[float] | None = None


class _Round(Said):
    info: _Info


class _State(Said):
    rounds: list[_Round]


def _read_descended(folder: Path, names: np.ndarray, model: Model) -> Descended | None:
    """What Phase 1 left in the last checkpoint; who was given only the models has none."""
    if not (folder / _STATE).exists():
        return None
    stored = Stored(folder / _STATE)
    spectra = [one.info.spectrum for one in stored.words(_State).rounds if one.info.spectrum]
    spectrum = torch.tensor(spectra[-1] if spectra else [], dtype=torch.float64)
    anchors = stored.tensor("state/0/anchors", None, dtype=torch.int64)
    if not (anchors.min() >= 0 and anchors.max() < len(names)):
        raise RunError(
            f"{folder / _STATE} has anchors that are not among the {len(names)} clients", "start the run again"
        )
    return Descended(names[anchors.numpy()], stored.tensor("state/0/local", len(anchors), model.n_parameters), spectrum)
