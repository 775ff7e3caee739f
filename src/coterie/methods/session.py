# SPDX-License-Identifier: Apache-2.0
"""How a fit is run: in phases, each with a checkpoint of its own; and the first, in which everything is prepared.

A fit that was killed is continued by doing all phases again: those that had ended are only read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.algorithms import preparation
from coterie.algorithms.preparation import Scaling
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.engines.checkpoint import replace_file
from coterie.engines.chosen import AnyEngine, engine_on
from coterie.engines.drive import Finished, Round
from coterie.errors import ConfigError
from coterie.local import Training
from coterie.local.monomials import MOST, n_monomials
from coterie.models import Dense, Model, Network
from coterie.participation import Everyone, Sampled

__all__ = ["Prepared", "Session", "Watch", "has_closed_form", "model_for", "prepare"]

Watch = Callable[[str, Round, int], None]  # phase, what happened, rounds of the phase

_EVERYONE = (
    "prepare",
    "step size",
    "one model each",
    "baselines",
    None,
)  # in other phases a share of the clients takes part


@dataclass(frozen=True)
class Session:
    """How programs are run, and where their clients are: what makes engines, keeps checkpoints and tells progress.

    Attributes
    ----------
    options : FitOptions
        Of the fit.
    folder : Path or None
        Where checkpoints are kept and found.
    every : float
        Seconds between checkpoints.
    watch : callable or None
        Told of every round.
    """

    options: FitOptions
    folder: Path | None
    every: float
    watch: Watch | None

    def run(
        self, phase: str | None, rows: Ragged, programs: Sequence[Any], state: type, total: int,
        engine: AnyEngine | None = None,
    ) -> Finished:  # fmt: skip
        """Run programs side by side; a phase without a name is neither kept nor told of."""
        engine = self.engine(phase, rows) if engine is None else engine
        watch = self.watch
        told = None if watch is None or phase is None else lambda done: watch(phase, done, max(total, done.round))
        return engine.run(programs, checkpoint=self._checkpoint(phase), every=self.every, state_type=state, watch=told)

    def engine(self, phase: str | None, rows: Ragged) -> AnyEngine:
        """Make what drives a phase: in most, a share of the clients takes part."""
        share = 1.0 if phase in _EVERYONE else self.options.training.participation
        policy = Sampled(share) if share < 1 else Everyone()
        return engine_on(rows, participation=policy, seed=self.options.seed, store=phase)

    def kept_word(self, name: str, word: str) -> str:
        """Keep a word of the first time, or say what was kept: for choices that a resumed run must not make anew."""
        if self.folder is None:
            return word
        path = self.folder / "checkpoints" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            replace_file(path, word.encode())
        return path.read_text()

    def _checkpoint(self, phase: str | None) -> Path | None:
        if self.folder is None or phase is None:
            return None
        if phase == "fit":
            return self.folder / "state.safetensors"
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        return self.folder / "checkpoints" / f"{phase.replace(' ', '-')}.safetensors"


@dataclass(frozen=True)
class Prepared:
    """What training and measuring start from: rows that are scaled, a model, and how clients train it."""

    model: Model
    scaling: Scaling
    rows: Ragged
    test: Ragged | None
    newcomers: Ragged | None
    training: Training
    step_size: float


def prepare(session: Session, clients: Clients, module: nn.Module | Model | None) -> Prepared:
    """Learn the scaling from federated sums, make the model, find a step size."""
    options, train = session.options, clients.train
    program = partial(
        preparation.learn_scaling, shape=train.shape, divide=options.data.standardise,
        real_target=clients.schema.task == "regression", degree=options.model.degree,
    )  # fmt: skip
    scaling: Scaling = session.run("prepare", train, [program], Scaling, 1).states[0]
    model = model_for(clients, options, module)

    def scaled(rows: Ragged) -> Ragged:
        return rows.scaled(scaling).to(model.dtype)

    rows = scaled(train)
    if isinstance(model, Network):
        model = _with_kernel(session, model, rows)
    t = options.training
    training = Training(t.local_steps, t.epochs, t.batch_size, t.momentum, t.proximal, t.exact)
    test, newcomers = (None if part is None else scaled(part) for part in (clients.test, clients.newcomers))
    step_size = t.step_size or _safe_step_size(session, model, rows)
    return Prepared(model, scaling, rows, test, newcomers, training, step_size)


def _with_kernel(session: Session, model: Network, rows: Ragged) -> Network:
    """Choose how a network is computed by measuring once: kernels differ in rounding, and a resumed run is bit-equal."""
    if isinstance(rows, RemoteRows):
        return model  # what is fast there cannot be measured here
    block = next(rows.blocks(torch.arange(min(8, rows.n_clients))))
    if block.y is None or not block.x.shape[1]:
        return model
    chosen = session.kept_word("kernel", model.measured(block.x, block.y).kernel)
    return replace(model, kernel="loop" if chosen == "loop" else "vmap")


def _safe_step_size(session: Session, model: Model, rows: Ragged) -> float:
    if not isinstance(model, Dense) or not model.is_linear:
        return 0.1
    program = partial(preparation.safe_step_size, model=model)
    bound = session.run("step size", rows, [program], preparation.Steepness, 1).states[0].value
    return preparation.steepness(model, bound)


def model_for(clients: Clients, options: FitOptions, module: nn.Module | Model | None) -> Model:
    """Make the model that the options describe, or take the one that is given."""
    o, regression = options.model, clients.schema.task == "regression"
    if module is not None and o.degree > 1:
        raise ConfigError(f"model.degree is {o.degree}, and your own model is given", "multiply features in your model")
    if isinstance(module, Dense | Network):
        return module
    if isinstance(module, nn.Module):
        return Network(module, "squared" if regression else "cross_entropy")
    shape = clients.train.shape
    if len(shape) != 1:
        raise ConfigError(
            f"rows of shape {shape} need your own model", "give a torch module as model=, or flatten the rows"
        )
    inputs = n_monomials(shape[0], o.degree)
    if o.degree > 1 and inputs > MOST:
        raise ConfigError(
            f"{shape[0]} features have {inputs:,} products up to degree {o.degree}; the limit is {MOST:,}",
            "lower model.degree, or leave columns out with --exclude",
        )
    sizes = (inputs, *o.hidden, 1 if regression else len(clients.schema.classes))
    dtype = torch.float32 if o.hidden else torch.float64
    return Dense(sizes, "squared" if regression else "cross_entropy", o.intercept, o.l2, dtype)


def has_closed_form(model: Model) -> bool:
    """Tell whether the model is linear regression."""
    return isinstance(model, Dense) and model.is_linear and model.loss == "squared"
