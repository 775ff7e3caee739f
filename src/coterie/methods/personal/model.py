# SPDX-License-Identifier: Apache-2.0
"""Personal models in use: what all share, what is each client's own, and how a client that is new gets its part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from coterie.algorithms.fine_tuning import tuning_ask
from coterie.algorithms.preparation import Scaling
from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.documents import Said
from coterie.engines.checkpoint import save_tensors
from coterie.engines.private import RemoteState, kept_on_node
from coterie.errors import RunError
from coterie.evaluate import Measured, measure_own_ask
from coterie.limits import MOST_LAYERS, MOST_STEPS
from coterie.local import Training, own_outputs
from coterie.methods.base import Fitted
from coterie.methods.personal.measure import Fit, fit_personal_ask, judge_personal_ask
from coterie.methods.run_tables import rounds_table
from coterie.methods.session import On, Session
from coterie.methods.stored import Stored, StoredNames, StoredWords, describe, scaling_record
from coterie.models import Model, split
from coterie.models.outcomes import metric_of
from coterie.protocol import Ask
from coterie.report.numbers import decimals_for

__all__ = ["Adopted", "Fitting", "Personal", "PersonalWords", "begun", "copied", "trained"]

_COMMON = "models/models.safetensors"  # what a newcomer needs
_CLIENTS = "models/clients.safetensors"  # what is each client's own


@dataclass(frozen=True)
class Adopted:
    """The personal parts of M clients, fitted to given rows.

    Attributes
    ----------
    names : ndarray
        [M]
    own : Tensor
        [M, ...] their personal parts.
    measured : Measured
        Loss and accuracy (of numbers: mean squared error, in scaled units) on each half of these rows, with a part that is
        fitted to the other half; and how many rows there are.
    known : Tensor
        [M] whether a client already has a part of its own, which this does not change.
    """

    names: np.ndarray
    own: Tensor
    measured: Measured
    known: Tensor


class _Training(Said):
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]
    epochs: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None
    batch_size: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None
    momentum: Annotated[float, Field(ge=0, lt=1)]
    proximal: Annotated[float, Field(ge=0)]
    exact: bool

    @model_validator(mode="after")
    def _epochs_need_batches(self) -> Self:
        if self.epochs is not None and self.batch_size is None:
            raise ValueError("epochs need a batch_size")
        return self


class PersonalWords(StoredWords):
    """What personal models say of themselves."""

    layers: Annotated[list[str], Field(max_length=MOST_LAYERS)]


class TrainedWords(PersonalWords):
    """The same of those that are trained in steps."""

    step_size: Annotated[float, Field(gt=0)]
    training: _Training
    seed: Annotated[int, Field(ge=0)]


class Fitting(Protocol):
    """A way of its own to get a model from rows."""

    @property
    def start(self) -> Tensor:
        """[P] the model of a client that has shown nothing."""

    def ask(self) -> Ask:
        """Ask clients to make models of their labelled rows, and to keep them as private `theta`."""

    def record(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All of it, as tensors and words."""


@dataclass(frozen=True)
class Personal:
    """Everybody's personal model, for rows that are scaled.

    Attributes
    ----------
    model : Model
        Both parts together.
    layers : tuple of str
        The personal layers, by the beginnings of their names; none: clients go on from a common model with all of it.
    theta : Tensor
        [Q] what all share; without personal layers [P], where every client begins.
    names : ndarray
        [M] clients, ascending.
    own : Tensor or RemoteState
        [M, P - Q] every client's personal part; without personal layers [M, P], its own model. Where clients are on other
        machines it stays there, and this is a handle to it.
    fit : Fit or Fitting
        How a client that has none gets one.
    scaling : Scaling
        Of the columns.
    population : Tensor or None
        [P] the whole model of a client of which nothing is known; None where there is none.
    """

    words: ClassVar[type[PersonalWords]] = TrainedWords
    summary: ClassVar[tuple[str, ...]] = (
        "methods", "spread", "layers", "rounds", "virtual_time", "never_visited", "warnings",
    )  # fmt: skip

    model: Model
    layers: tuple[str, ...]
    theta: Tensor
    names: np.ndarray
    own: Tensor | RemoteState
    fit: "Fit | Fitting"
    scaling: Scaling
    population: Tensor | None = None

    @property
    def metric(self) -> str:
        """What scores count."""
        return metric_of(self.model.loss)

    @property
    def parts(self) -> Tensor:
        """[M, ...] the personal parts, where they are here."""
        if isinstance(self.own, RemoteState):
            raise RunError(
                "personal parameters are stored at the clients",
                "predict there: coterie predict RUN DATA --state FOLDER",
            )
        return self.own

    def of(self, names: np.ndarray) -> tuple[Tensor, Tensor]:
        """Look up the parts of clients [C, ...], and who has one [C]; the others have what they would begin with."""
        place = {name: i for i, name in enumerate(self.names.tolist())}
        at = torch.tensor([place.get(str(name), -1) for name in names], dtype=torch.int64)
        known = at >= 0
        if not len(self.names):
            return self.fit.start.expand(len(at), -1), known
        return torch.where(known[:, None], self.parts[at], self.fit.start), known

    def for_all(self, common: Tensor | None) -> Tensor | None:
        """The model of a client of which nothing is known: one model for all [P] that is given, or the mean of all models.

        None where models have stayed with clients elsewhere.
        """
        if common is not None or isinstance(self.own, RemoteState):
            return common
        mean = self.own.mean(0)
        return split(self.model, self.layers).join(self.theta, mean) if self.layers else mean

    def joined(self, new: Adopted) -> "Personal":
        """Take clients in with the parts that they have fitted; those that had one keep the new one."""
        kept = ~np.isin(self.names, new.names)
        names = np.concatenate([self.names[kept], new.names])
        order = np.argsort(names, kind="stable")
        own = torch.cat([self.parts[torch.from_numpy(kept)], new.own])
        return replace(self, names=names[order], own=own[torch.from_numpy(order)])

    def fitted(self, rows: Ragged, session: Session | None = None) -> Tensor:
        """Personal parts from rows alone.  [C, ...]"""
        own = self.adapted(rows, session=session)
        assert isinstance(own, Tensor)  # the rows are here
        return own

    def adapted(self, rows: Ragged, kept: Any = None, session: Session | None = None) -> Tensor | RemoteState:
        """Personal parts from rows that may be elsewhere; who has one already, as `kept` says, keeps it.  [C, ...]"""
        part = On(rows, {0: self.learn_ask(kept)}, kept)
        return self.parts_in((session or Session()).exchange([part])[0].private)

    def measured(self, rows: Ragged, own: Tensor | RemoteState, session: Session | None = None) -> Measured:
        """Judge clients on rows, each with its personal part.  own [C, ...]"""
        kept = (
            own if isinstance(own, RemoteState) else {0: {self._field: own.clone()}}
        )  # measuring writes back what it read
        return Measured(**(session or Session()).ask(rows, self.judge_ask(), kept).values)

    def learn_ask(self, kept: Any = None) -> Ask:
        """Ask clients to fit a part of their own; who has one already, as `kept` says of run 0, keeps it."""
        fit = self.fit
        if not isinstance(fit, Fit):
            return fit.ask()
        if self.layers:
            return fit_personal_ask(self.model, self.theta, split(self.model, self.layers), fit)
        fields = kept.fields if isinstance(kept, RemoteState) else kept or {}
        return tuning_ask(
            self.model, self.theta, fit.step_size, fit.seed, fit.training, only_new="visits" in fields.get(0, {})
        )

    def judge_ask(self) -> Ask:
        """Ask clients how well their models serve them; make a `Measured` of the values."""
        if self.layers:
            return judge_personal_ask(self.model, self.theta, split(self.model, self.layers))
        return measure_own_ask(self.model)

    def parts_in(self, private: Any) -> Tensor | RemoteState:
        """The personal parts in what clients keep of run 0, or where they keep them."""
        if isinstance(private, RemoteState):
            return private
        found: Tensor = private[0][self._field]
        return found

    @property
    def _field(self) -> str:
        """What clients call their own part."""
        return "personal" if self.layers else "theta"

    def outputs(self, rows: Ragged, own: Tensor) -> Tensor:
        """What every row's client makes of it, in the order of storage.  own [C, ...] -> [N, O]"""
        made = [torch.zeros(0, self.model.n_outputs, dtype=self.model.dtype)]
        cut = split(self.model, self.layers) if self.layers else None
        for block in rows.blocks():
            part = own[block.ids]
            whole = part if cut is None else cut.join(self.theta, part)
            made.append(own_outputs(self.model, whole[None], block)[0][block.real])
        return torch.cat(made)

    # -- the run folder -----------------------------------------------------------------------------------------------
    def save(self, folder: Path, schema: Schema) -> None:
        """Write what all share, with what a newcomer needs, and apart from it what is each client's own."""
        scaling, degree = scaling_record(self.scaling)
        start, how = self.fit.record()
        said = {
            "model": describe(self.model), "schema": schema.model_dump(mode="json"), "degree": degree,
            "layers": list(self.layers), **how,
        }  # fmt: skip
        common = {} if self.population is None else {"population": self.population}
        save_tensors(folder / _COMMON, {"theta": self.theta, **common, **start, **scaling}, said)
        if isinstance(self.own, RemoteState):  # parts have stayed with their clients
            there = {"names": [], "kept": self.own.record(self._field)}
            save_tensors(folder / _CLIENTS, {"own": self.fit.start[None][:0]}, there)
        else:
            save_tensors(folder / _CLIENTS, {"own": self.own}, {"names": self.names.tolist()})

    @classmethod
    def load(cls, folder: Path, document: Mapping[str, Any], module: nn.Module | Model | None) -> tuple[Self, Schema]:
        """Read what `save` wrote; the user's own network is given."""
        common, own = Stored(folder / _COMMON), Stored(folder / _CLIENTS)
        said, who = common.words(cls.words), own.words(StoredNames)
        model, layers = common.model(said, module), tuple(said.layers)
        shared, personal = split(model, layers).lengths if layers else (model.n_parameters,) * 2
        theta = common.tensor("theta", shared, dtype=model.dtype)
        parts = own.tensor("own", len(who.names), personal, dtype=model.dtype)
        fit, scaling = cls.read_fit(model, common, said, personal), common.scaling(said.schema_, said.degree)
        population = None
        if "population" in common:
            population = common.tensor("population", model.n_parameters, dtype=model.dtype)
        return cls(model, layers, theta, who.array, parts, fit, scaling, population), said.schema_

    def at_node(self, folder: Path, state: Path) -> Self:
        """Take in the parts of a node's clients, where its state folder is; `folder` is the run's."""
        who = Stored(folder / _CLIENTS).words(StoredNames)
        if who.kept is None:
            raise RunError(f"the personal parameters of {folder} are in that folder", "leave the state folder out")
        names, own = kept_on_node(state, who.kept)
        if (own.shape[1], own.dtype) != (self.parts.shape[1], self.parts.dtype):
            raise RunError(f"{state} keeps parts of another model than {folder}", "name the state folder of this run")
        order = np.argsort(np.asarray(names, dtype=str), kind="stable")
        return replace(self, names=np.asarray(names, dtype=str)[order], own=own[torch.from_numpy(order)])

    @staticmethod
    def read_fit(model: Model, common: Stored, said: Any, length: int) -> "Fit | Fitting":
        """Read how a client that has no part gets one, of so many numbers."""
        training = Training(**said.training.model_dump())
        return Fit(common.tensor("start", length, dtype=model.dtype), said.step_size, training, said.seed)

    def results(self, fitted: Fitted) -> dict[str, Any]:
        """What the run's document says of the models."""
        visits = fitted.per_client.get("rounds")
        return {
            "spread": {name: found.said() for name, found in fitted.extra["spread"].items()},
            "layers": list(self.layers),
            "rounds": len([r for r in fitted.rounds if "loss" in r.info]),
            "virtual_time": fitted.extra.get("virtual_time"),
            "never_visited": 0 if visits is None else int((visits == 0).sum()),
            "setting": None,
        }

    def clients(self, fitted: Fitted) -> dict[str, Any]:
        """Nothing but what was measured."""
        return {}

    def rounds(self, fitted: Fitted) -> pa.Table:
        """The rounds, with what held-out rows said on the way and what the clock showed."""
        told = [r for r in fitted.rounds if "loss" in r.info]
        table = rounds_table(told).drop_columns(["moved", "sizes", "movement", "spectrum"])
        columns = {"test_metric": ([r.info.get("test_metric") for r in told], pa.float64())}
        if fitted.extra.get("virtual_time") is not None:
            columns["virtual_time"] = ([r.time for r in told], pa.float64())
        if any("stage" in r.info for r in told):
            columns |= {name: ([r.info.get(name) for r in told], pa.int64()) for name in ("stage", "enough")}
        for name, (values, kind) in columns.items():
            table = table.append_column(name, pa.array(values, kind))
        return table

    # -- faces --------------------------------------------------------------------------------------------------------
    def remarks(self, fitted: Fitted) -> list[str]:
        """How the metric is spread over clients, and what time it took."""
        said, found = [], fitted.extra["spread"].get(fitted.options.method)
        if found is not None:
            names = {"mean": found.mean, "median": found.median}
            names |= {"worst tenth": found.worst_decile, "best tenth": found.best_decile}
            form = ".1%" if self.metric == "accuracy" else f".{decimals_for(list(names.values()), 4, most=9)}f"
            values = ", ".join(f"{name} {value:{form}}" for name, value in names.items())
            said.append(f"over clients, on held-out rows: {values}")
        if fitted.extra.get("virtual_time") is not None:
            said.append(f"virtual time: {fitted.extra['virtual_time']:.4g} seconds")
        return said

    def arrays(self) -> dict[str, Tensor]:
        """What all clients share."""
        return {"theta": self.theta}


def begun(
    model: Model, layers: tuple[str, ...], theta: Tensor, names: np.ndarray, fit: Fit, scaling: Scaling
) -> Personal:
    """Put together what training left with the server: as if no client had a part of its own yet."""
    fit = fit if layers else replace(fit, start=theta)
    return Personal(model, layers, theta, names, fit.start.expand(len(names), -1), fit, scaling)


def trained(
    model: Model, layers: tuple[str, ...], theta: Tensor, private: Mapping[str, Tensor] | RemoteState, rows: Ragged,
    fit: Fit, scaling: Scaling, session: Session | None = None,
) -> Personal:  # fmt: skip
    """Put together what training left with the server (theta) and with the clients (private).

    A client that was never visited, and every client where training leaves nothing with them, fits its part to its training
    rows, beside the private state, which stays as it is.
    """
    found = begun(model, layers, theta, rows.names, fit, scaling)
    kept = private if isinstance(private, RemoteState) else copied({0: private})
    return replace(found, own=found.adapted(rows, kept, session))


def copied(private: Any) -> Any:
    """What clients keep of all runs, to be measured, which changes that of run 0: nodes keep what comes of it beside it."""
    if isinstance(private, RemoteState):
        return private
    return {**private, 0: {name: value.clone() for name, value in private.get(0, {}).items()}}
