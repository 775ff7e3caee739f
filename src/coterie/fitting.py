# SPDX-License-Identifier: Apache-2.0
"""From clients and options to fitted models: prepare, choose among starts, fit, compare with baselines, measure.

Every phase keeps its own checkpoint in the run folder, so a fit that was killed is continued by calling it again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.algorithms import fedavg, ifca, preparation
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.starts import Start
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.engines.checkpoint import replace_file
from coterie.engines.in_process import Finished, InProcess, Round
from coterie.errors import ConfigError, DataError
from coterie.evaluate import Measured, Placed, measure_ask, measure_own_ask, place_ask
from coterie.local import Training
from coterie.models import Dense, Model, Network
from coterie.participation import Everyone, Sampled

__all__ = ["Fitted", "Score", "Watch", "check_fit", "fit", "measured_models", "placed"]

Watch = Callable[[str, Round, int], None]  # phase, what happened, rounds of the phase

_LOCAL_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
_VALIDATION = 0.2  # rows held out of training to choose among starts
_SUPPORT = 0.5  # rows of a new client that place it; the others judge


@dataclass(frozen=True)
class Score:
    """How one method does, over all rows: accuracy, or root mean squared error in the target's units."""

    method: str
    label: str
    train: float | None
    test: float | None
    new_clients: float | None = None


@dataclass(frozen=True)
class Fitted:
    """All that came of a fit."""

    options: FitOptions
    schema: Schema
    model: Model
    scaling: Scaling
    theta: Tensor  # [K, P]
    names: np.ndarray  # [M]
    placed: Placed
    scores: list[Score]
    per_client: dict[str, Tensor]  # [M] each
    rounds: list[Round]
    seconds: float
    chosen_run: int | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def metric(self) -> str:
        """What scores count."""
        return "accuracy" if self.model.loss == "cross_entropy" else "rmse"


def fit(
    clients: Clients,
    options: FitOptions,
    *,
    module: nn.Module | Model | None = None,
    start: Tensor | None = None,
    folder: Path | None = None,
    every: float = 2.0,
    watch: Watch | None = None,
) -> Fitted:
    """Fit what the options say.

    Parameters
    ----------
    clients : Clients
        Training rows, and held-out ones where there are.
    options : FitOptions
        What to fit, and how.
    module : nn.Module or Model, optional
        The model, in place of the one that `options.model` describes.
    start : Tensor, optional
        [K, P] models to begin with, for `init="warm"`.
    folder : Path, optional
        Where checkpoints are kept and found.
    every : float
        Seconds between checkpoints.
    watch : callable, optional
        Told of every round.
    """
    began = time.perf_counter()
    check_fit(clients, options, module=module, start=start)
    work = _Work(clients, options, folder, every, watch)
    work.prepare(module)
    theta, chosen_run = work.train(start)
    found = work.placed(work.rows, theta)
    scores, per_client = work.measure(theta, found)
    warnings = _warnings(theta, found, options)
    seconds = time.perf_counter() - began
    return Fitted(
        options, clients.schema, work.model, work.scaling, theta, clients.names, found,
        scores, per_client, work.rounds, seconds, chosen_run, warnings,
    )  # fmt: skip


def placed(model: Model, theta: Tensor, rows: Ragged) -> Placed:
    """Place clients among models theta [K, P] by the loss on their rows."""
    return Placed(**InProcess(rows).ask(place_ask(model, theta)).values)


def measured_models(model: Model, theta: Tensor, label: Tensor, rows: Ragged) -> Measured:
    """Measure model number `label` [M] of theta [K, P] on each client's rows."""
    return Measured(**InProcess(rows).ask(measure_ask(model, theta, label)).values)


def check_fit(
    clients: Clients, options: FitOptions, *, module: nn.Module | Model | None = None, start: Tensor | None = None
) -> None:
    """Refuse what cannot work, before anything is written."""
    if clients.schema.task == "none":
        raise DataError(f"{options.method} needs a target to learn", "name its column with --target, or pass y")
    model = _model(clients, options, module)
    if options.method == "ifca":
        _check_clusters(clients, options, model, start)
    small = int(clients.train.counts.min())
    if options.method == "ifca" and options.clusters.n_init > 1 and small < 2:
        name = clients.names[int(clients.train.counts.argmin())]
        raise DataError(
            f"client '{name}' has {small} training row; several starts are compared on held-out rows and need 2",
            "drop small clients with --min-rows 2, or use one start",
        )


def _check_clusters(clients: Clients, options: FitOptions, model: Model, start: Tensor | None) -> None:
    c, n_clients = options.clusters, clients.n_clients
    if n_clients < 2:
        raise DataError("there is only one client, so there are no groups to find", "check the client column")
    if c.n_clusters > n_clients:
        raise DataError(
            f"{c.n_clusters} clusters are more than the {n_clients} clients", f"ask for at most {n_clients} clusters"
        )
    if (c.init == "warm") != (start is not None):
        raise ConfigError(
            f"init is '{c.init}' and start models are {'not ' if start is None else ''}given",
            "warm starts are for Python: IFCA(init='warm', start=theta)",
        )
    ifca.shared_parameters(model, c.shared_layers)


class _Work:
    """The phases of one fit."""

    def __init__(
        self, clients: Clients, options: FitOptions, folder: Path | None, every: float, watch: Watch | None
    ) -> None:
        self.clients, self.options, self.folder, self.every, self.watch = clients, options, folder, every, watch
        self.rounds: list[Round] = []
        t = options.training
        self.training = Training(t.local_steps, t.epochs, t.batch_size, t.momentum, t.proximal)

    # -- phases -------------------------------------------------------------------------------------------------------
    def prepare(self, module: nn.Module | Model | None) -> None:
        """Learn the scaling from federated sums, make the model, find a step size."""
        clients, train = self.clients, self.clients.train
        real = clients.schema.task == "regression"
        scaling = partial(
            preparation.learn_scaling, shape=train.shape, divide=self.options.data.standardise, real_target=real
        )
        self.scaling: Scaling = self._run("prepare", train, [scaling], Scaling, 1).states[0]
        self.model = _model(clients, self.options, module)
        self.rows = self._scaled(train)
        self.test = None if clients.test is None else self._scaled(clients.test)
        self.newcomers = None if clients.newcomers is None else self._scaled(clients.newcomers)
        if isinstance(self.model, Network):
            block = next(self.rows.blocks(torch.arange(min(8, self.rows.n_clients))))
            if block.y is not None and block.x.shape[1]:
                self.model = self._kept_kernel(self.model.measured(block.x, block.y))
        self.step_size = self.options.training.step_size or self._safe_step_size()

    def _kept_kernel(self, model: Network) -> Network:
        """Keep the first choice of a run: kernels differ in rounding, and a resumed run is to be bit-equal."""
        if self.folder is None:
            return model
        path = self.folder / "checkpoints" / "kernel"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            replace_file(path, model.kernel.encode())
        return replace(model, kernel="loop" if path.read_text() == "loop" else "vmap")

    def train(self, start: Tensor | None) -> tuple[Tensor, int | None]:
        """Fit the method itself.  -> theta [K, P], number of the start that won"""
        t = self.options.training
        if self.options.method != "ifca":
            done = self._run("fit", self.rows, [self._fedavg()], fedavg.State, t.rounds)
            self.rounds = done.rounds
            return done.states[0].theta[None], None
        c = self.options.clusters
        begin = Start(c.init, start, c.candidates, step_size=self.step_size)
        chosen_run = None
        if c.n_init > 1:
            begin, chosen_run = self._best_start(begin)
        done = self._run("fit", self.rows, [self._ifca(begin, self.options.seed)], ifca.State, t.rounds)
        last = c.n_init if chosen_run is not None else 0  # the starts' rounds are kept, the final fit comes after them
        self.rounds += [replace(r, run=last) for r in done.rounds]
        return done.states[0].theta, chosen_run

    def _best_start(self, begin: Start) -> tuple[Start, int]:
        """Advance several starts in lockstep on part of the rows; the winner serves the other part best."""
        part, held = self.rows.split(_VALIDATION, seed=self.options.seed, purpose="validation")
        n_init = self.options.clusters.n_init
        programs = [self._ifca(begin, self.options.seed + 1 + i) for i in range(n_init)]
        done = self._run("choose a start", part, programs, ifca.State, self.options.training.rounds)
        self.rounds = list(done.rounds)
        losses = []
        for state in done.states:
            label = placed(self.model, state.theta, part).label
            measured = measured_models(self.model, state.theta, label, held)
            losses.append(float((measured.loss * measured.rows).sum()))
        winner = int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
        return Start("warm", done.states[winner].theta), winner

    def measure(self, theta: Tensor, found: Placed) -> tuple[list[Score], dict[str, Tensor]]:
        """Measure the method and the baselines on training rows, held-out rows and new clients."""
        label = found.label
        train = measured_models(self.model, theta, label, self.rows)
        test = None if self.test is None else measured_models(self.model, theta, label, self.test)
        per_client = {"train_loss": train.loss, "rows_train": train.rows}
        if test is not None:
            per_client |= {"test_loss": test.loss, "rows_test": test.rows, "metric": self._metric(test.right)}
        scores = [self._score(self.options.method, _title(self.options), train, test, self._on_newcomers(theta))]
        if self.options.baselines:
            if self.options.method == "ifca":
                self._add_global(scores, per_client)
            self._add_local(scores, per_client)
        return scores, per_client

    # -- baselines ----------------------------------------------------------------------------------------------------
    def _add_global(self, scores: list[Score], per_client: dict[str, Tensor]) -> None:
        closed = _closed_form(self.model)
        program = self._fedavg()
        if isinstance(self.model, Dense) and closed:  # l2/2 |w|^2 is what training penalises
            program = partial(fedavg.pooled_ridge, model=self.model, l2=max(self.model.l2 / 2, 1e-6))
        rounds = 1 if closed else self.options.training.rounds
        theta = self._run("one model for all", self.rows, [program], fedavg.State, rounds).states[0].theta[None]
        everyone = torch.zeros(self.rows.n_clients, dtype=torch.int64)
        train = measured_models(self.model, theta, everyone, self.rows)
        test = None if self.test is None else measured_models(self.model, theta, everyone, self.test)
        if test is not None:
            per_client["metric_global"] = self._metric(test.right)
        name = "one model for all" + (" (ridge)" if closed else "")
        scores.append(self._score("global", name, train, test, self._on_newcomers(theta)))

    def _add_local(self, scores: list[Score], per_client: dict[str, Tensor]) -> None:
        train_engine = self._trained_local(self.rows, self._local_ridge(), "one model each")
        train = Measured(**train_engine.ask(measure_own_ask(self.model)).values)
        test = None
        if self.test is not None:
            test = _own_on(train_engine, self.model, self.test)
            per_client["metric_local"] = self._metric(test.right)
        scores.append(self._score("local", "one model each", train, test, None))

    def _local_ridge(self) -> float:
        """Choose the local models' penalty on held-out rows, all clients together."""
        if not _closed_form(self.model):
            return 0.0
        part, held = self.rows.split(_VALIDATION, seed=self.options.seed, purpose="validation")
        losses = []
        for l2 in _LOCAL_RIDGES:
            measured = _own_on(self._trained_local(part, l2, None), self.model, held)
            losses.append(float((measured.loss * measured.rows).sum()))
        return _LOCAL_RIDGES[int(np.argmin(losses))]

    def _trained_local(self, rows: Ragged, l2: float, phase: str | None) -> InProcess:
        t = self.options.training
        program = partial(
            fedavg.local_models, model=self.model, rounds=t.rounds, step_size=self.step_size,
            seed=self.options.seed, training=replace(self.training, proximal=0.0), decay=t.decay, l2=l2,
        )  # fmt: skip
        engine = InProcess(rows)
        rounds = 1 if _closed_form(self.model) else t.rounds
        self._run(phase, rows, [program], fedavg.LocalState, rounds, engine)
        return engine

    # -- helpers ------------------------------------------------------------------------------------------------------
    def _run(
        self, phase: str | None, rows: Ragged, programs: Sequence[Any], state: type, total: int,
        engine: InProcess | None = None,
    ) -> Finished:  # fmt: skip
        t = self.options.training
        if engine is None:
            share = t.participation if phase in ("fit", "choose a start", "one model for all") else 1.0
            engine = InProcess(rows, participation=Sampled(share) if share < 1 else Everyone(), seed=self.options.seed)
        watch = self.watch
        told = None if watch is None or phase is None else lambda done: watch(phase, done, total)
        return engine.run(programs, checkpoint=self._checkpoint(phase), every=self.every, state_type=state, watch=told)

    def _checkpoint(self, phase: str | None) -> Path | None:
        if self.folder is None or phase is None:
            return None
        if phase == "fit":
            return self.folder / "state.safetensors"
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        return self.folder / "checkpoints" / f"{phase.replace(' ', '-')}.safetensors"

    def _ifca(self, begin: Start, seed: int) -> Any:
        t, c = self.options.training, self.options.clusters
        return partial(
            ifca.ifca, model=self.model, n_clusters=c.n_clusters, rounds=t.rounds, step_size=self.step_size, seed=seed,
            averaging=c.averaging, training=self.training, decay=t.decay, weighting=t.weighting or "clients",
            shared_layers=c.shared_layers, soft=c.soft, temperature=c.temperature, start=begin, patience=c.patience,
            tol=t.tol,
        )  # fmt: skip

    def _fedavg(self) -> Any:
        t = self.options.training
        return partial(
            fedavg.fedavg, model=self.model, rounds=t.rounds, step_size=self.step_size, seed=self.options.seed,
            training=self.training, decay=t.decay, weighting=t.weighting or "rows", tol=t.tol,
        )  # fmt: skip

    def _scaled(self, rows: Ragged) -> Ragged:
        return rows.changed(self.scaling.features, self.scaling.target).to(self.model.dtype)

    def _safe_step_size(self) -> float:
        if not self.model.is_linear or not isinstance(self.model, Dense):
            return 0.1
        program = partial(preparation.safe_step_size, model=self.model)
        bound = self._run("step size", self.rows, [program], preparation.Steepness, 1).states[0].value
        return preparation.steepness(self.model, bound)

    def placed(self, rows: Ragged, theta: Tensor) -> Placed:
        """Place clients among the models."""
        return placed(self.model, theta, rows)

    def _on_newcomers(self, theta: Tensor) -> float | None:
        """Place new clients by half of their rows, and judge on the other half."""
        if self.newcomers is None:
            return None
        enough = np.flatnonzero(self.newcomers.layout.counts > 1)  # nothing would be left of one row
        if not len(enough):
            return None
        query, support = self.newcomers.only(enough).split(_SUPPORT, seed=self.options.seed, purpose="support")
        label = self.placed(support, theta).label
        return self._overall(measured_models(self.model, theta, label, query))

    def _metric(self, right: Tensor) -> Tensor:
        if self.model.loss == "cross_entropy":
            return right
        return right.clamp(min=0).sqrt() * self.scaling.y_scale.to(right.dtype)

    def _overall(self, measured: Measured) -> float:
        return float(self._metric(torch.tensor(measured.mean_right, dtype=torch.float64)))

    def _score(self, method: str, label: str, train: Measured, test: Measured | None, new: float | None) -> Score:
        return Score(method, label, self._overall(train), None if test is None else self._overall(test), new)


def _own_on(trained: InProcess, model: Model, rows: Ragged) -> Measured:
    """Measure the private models that an engine's clients have learnt on other rows of the same clients."""
    engine = InProcess(rows)
    engine.worker.private = trained.worker.private
    return Measured(**engine.ask(measure_own_ask(model)).values)


def _closed_form(model: Model) -> bool:
    return isinstance(model, Dense) and model.is_linear and model.loss == "squared"


def _model(clients: Clients, options: FitOptions, module: nn.Module | Model | None) -> Model:
    if isinstance(module, Dense | Network):
        return module
    regression = clients.schema.task == "regression"
    if isinstance(module, nn.Module):
        return Network(module, "squared" if regression else "cross_entropy")
    shape, o = clients.train.shape, options.model
    if len(shape) != 1:
        raise ConfigError(
            f"rows of shape {shape} need a model of their own", "give a torch module as model=, or flatten the rows"
        )
    sizes = (shape[0], *o.hidden, 1 if regression else len(clients.schema.classes))
    dtype = torch.float32 if o.hidden else torch.float64
    return Dense(sizes, "squared" if regression else "cross_entropy", o.intercept, o.l2, dtype)


def _title(options: FitOptions) -> str:
    if options.method == "ifca":
        return f"IFCA, {options.clusters.n_clusters} clusters"
    return "FedProx" if options.training.proximal else "FedAvg"


def _warnings(theta: Tensor, found: Placed, options: FitOptions) -> list[str]:
    out = []
    diverged = int((~(theta.isfinite().all(1) & found.losses.isfinite().any(0))).sum())
    if diverged:
        out.append(f"{diverged} of {len(theta)} models diverged: lower training.step_size")
    if options.method != "ifca":
        return out
    unsure = int((~found.certain).sum())
    if unsure:
        out.append(
            f"{unsure} of {len(found.label)} clients could as well belong to another cluster: margin within noise"
        )
    sizes = torch.bincount(found.label, minlength=options.clusters.n_clusters)
    empty = int((sizes == 0).sum())
    if empty:
        out.append(f"{empty} of {len(sizes)} clusters ended empty: ask for fewer clusters, or for more starts (n_init)")
    return out
