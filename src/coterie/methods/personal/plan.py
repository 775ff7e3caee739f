# SPDX-License-Identifier: Apache-2.0
"""What the options of a personal fit mean: algorithm, stages, who takes part and what time it takes; and what is refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from coterie.algorithms import averaging, srpfl
from coterie.algorithms.fedrep import first_model
from coterie.config import FitOptions, PersonalOptions, TrainingOptions, first_given
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.engines.in_process import Program
from coterie.errors import ConfigError, DataError
from coterie.local import Training
from coterie.methods.personal.measure import Fit, personal_start
from coterie.methods.session import Prepared, Session, model_for, prepare
from coterie.models import Dense, Model, first_layers, last_layers, layer_names, split
from coterie.participation import (
    Clock,
    DynamicExponential,
    Everyone,
    Exponential,
    LogNormal,
    Participation,
    Sampled,
    Speeds,
    Trace,
    VirtualClock,
)
from coterie.protocol import Ask
from coterie.registry import METHODS

__all__ = [
    "Plan", "algorithm_of", "called", "check_plan", "passes", "plan", "prepare_personal", "shared_parameters",
]  # fmt: skip

_BATCH = 10  # rows, as in the paper, when nobody says
_SMALL_STEP = 0.01  # as in the paper: squared errors of such batches make networks diverge at 0.1 on real data
_STAGES = {"n0", "stages", "stage_rounds", "contraction"}
_TIMED = {"sigma", "trace", "communication"}


@dataclass(frozen=True)
class Plan:
    """How personal models are trained.

    Attributes
    ----------
    program : Program
        The algorithm, within its stages.
    state : type
        Of its state.
    layers : tuple of str
        The personal layers; none where all of the model is.
    fit : Fit
        How clients get a personal part that they do not have.
    question : Ask
        What a round asks, for its work.
    n_clients : int
        How many take part in a round, in the end.
    """

    title: str
    program: Program
    state: Any
    layers: tuple[str, ...]
    fit: Fit
    policy: Participation
    clock: Clock | None
    question: Ask
    n_clients: int


def prepare_personal(session: Session, clients: Clients, module: nn.Module | Model | None) -> Prepared:
    """Prepare, with local work that is counted in passes over small batches."""
    made, options = prepare(session, clients, module), session.options
    made = replace(made, training=_passes(options, options.personal.body_epochs))
    linear = isinstance(made.model, Dense) and made.model.is_linear
    if options.training.step_size is not None or linear or made.model.loss != "squared":
        return made
    return replace(made, step_size=_SMALL_STEP)


def plan(options: FitOptions, made: Prepared, clock: Clock | None) -> Plan:
    """Turn options into what is run."""
    p, t = options.personal, options.training
    layers = _layers(options, made.model)
    arguments = _arguments(options, made, layers)
    algorithm, new_client = algorithm_of(options.method)
    program: Program = called(algorithm, arguments)
    question = next(wanted for wanted in program(None) if isinstance(wanted, Ask))
    n_clients = _turnout(options, made.rows.n_clients)
    state: Any = averaging.State
    if p.stragglers == "srpfl":
        program = partial(srpfl.srpfl, program, n0=_first(p, n_clients), n_clients=n_clients, stages=_stages(p))
        state = srpfl.State[averaging.State]
    policy = Sampled(t.participation) if t.participation < 1 else Everyone()
    own_clock = _clock(p, question.work) if clock is None else clock
    fit = _fit(made, new_client, arguments, layers)
    return Plan(_title(options), program, state, layers, fit, policy, own_clock, question, n_clients)


def _passes(options: FitOptions, epochs: int) -> Training:
    t = options.training
    return Training(epochs=epochs, batch_size=t.batch_size or _BATCH, momentum=t.momentum, proximal=t.proximal)


def passes(options: FitOptions, t: TrainingOptions) -> Training:
    """Local work of a method, in steps or in passes over small batches."""
    if METHODS[options.method].family == "personal":
        return _passes(options, options.personal.body_epochs)
    return Training(t.local_steps, t.epochs, t.batch_size, t.momentum, t.proximal, t.exact)


def shared_parameters(options: FitOptions, model: Model) -> int:
    """How many parameters all clients share."""
    layers = _layers(options, model) if METHODS[options.method].family == "personal" else ()
    return split(model, layers).lengths[0] if layers else model.n_parameters


def _layers(options: FitOptions, model: Model) -> tuple[str, ...]:
    """The personal layers: as given, or those of the method."""
    number = METHODS[options.method].layers
    if options.personal.layers or not number:
        return options.personal.layers
    return last_layers(model, number) if number > 0 else first_layers(model, -number)


def _arguments(options: FitOptions, made: Prepared, layers: tuple[str, ...]) -> dict[str, Any]:
    """All that an algorithm may ask for, by the names of its arguments: options of its own are among them."""
    p, t = options.personal, options.training
    body = made.training
    return dict(p) | {
        "model": made.model, "rounds": t.rounds, "seed": options.seed, "decay": t.decay, "tol": t.tol,
        "robust": t.robust,
        "weighting": t.weighting or "clients", "step_size": made.step_size, "beta": made.step_size, "personal": layers,
        "training": body, "body": body, "head": _passes(options, p.head_epochs),
        "alpha": p.alpha or made.step_size,  # the paper has one step; for linear models it is 1/L, the most MAML allows
    }  # fmt: skip


def algorithm_of(method: str) -> tuple[Callable[..., Any], Callable[..., tuple[float, Training]]]:
    """The algorithm of a method, and how its clients get a part that they do not have: both are in one file."""
    where, _, name = METHODS[method].program.partition(":")
    module = import_module(where)
    return getattr(module, name), module.new_client


def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> "partial[Any]":
    """Hand a function those arguments that it takes."""
    return partial(function, **{name: arguments[name] for name in signature(function).parameters if name in arguments})


def _fit(made: Prepared, new_client: Callable[..., Any], arguments: Mapping[str, Any], layers: tuple[str, ...]) -> Fit:
    """How a client that has no part gets one: as the algorithm's file says."""
    step_size, training = called(new_client, arguments)()
    seed = arguments["seed"]
    start = personal_start(made.model, layers, seed=seed) if layers else first_model(made.model, seed)
    return Fit(start, step_size, training, seed)


# -- who takes part, and what time it takes ---------------------------------------------------------------------------
def _turnout(options: FitOptions, n_clients: int) -> int:
    """How many clients the policy asks in a round."""
    return max(1, round(options.training.participation * n_clients))


def _first(p: PersonalOptions, n_clients: int) -> int:
    return p.n0 or max(1, n_clients // 10)


def _stages(p: PersonalOptions) -> srpfl.Stages:
    made: dict[str, srpfl.Stages] = {
        "fixed": srpfl.Fixed(p.stage_rounds), "theory": srpfl.Theory(p.contraction), "adaptive": srpfl.Adaptive(),
    }  # fmt: skip
    return made[p.stages]


def _clock(p: PersonalOptions, work: float) -> Clock | None:
    """Seconds are for a round's work, as in the paper's figures."""
    if p.clock is None:
        return None
    speeds: Speeds = Exponential()
    if p.clock == "dynamic":
        speeds = DynamicExponential()
    elif p.clock == "lognormal":
        speeds = LogNormal(p.sigma)
    elif p.trace is not None:
        speeds = Trace(Path(p.trace))
    return VirtualClock(speeds, p.communication, unit=work)


def _title(options: FitOptions) -> str:
    method = METHODS[options.method]
    title = method.variant(options) if method.variant else method.title
    return title if options.personal.stragglers == "none" else method.staged or f"{title}, in stages"


# -- what is refused --------------------------------------------------------------------------------------------------
def check_plan(
    clients: Clients, options: FitOptions, *, module: nn.Module | Model | None = None, clock: Clock | None = None
) -> None:
    """Refuse what cannot work, before anything is written."""
    method, p = options.method, options.personal
    _check_stages(p, options)
    if clients.schema.task == "none":
        raise DataError(f"{method} needs a target to learn", "name its column with --target, or pass y")
    model = model_for(clients, options, module)
    if METHODS[method].layers:
        if not p.layers and len(layer_names(model)) == 1:
            raise ConfigError(
                f"{method} needs shared and personal layers, and this model has one layer",
                "give hidden layers, like --hidden 64,32",
            )
        split(model, _layers(options, model))
    n_clients = _turnout(options, clients.n_clients)
    if p.stragglers == "srpfl" and _first(p, n_clients) > n_clients:
        raise ConfigError(
            f"personal.n0 is {p.n0}, and {n_clients} clients take part in a round", f"give at most {n_clients}"
        )
    here = not isinstance(clients.train, RemoteRows)  # elsewhere, who is fast answers first
    if p.stragglers == "srpfl" and p.clock is None and clock is None and here:
        raise ConfigError(
            "personal.stragglers is srpfl, which needs a clock",
            "give one, like --clock exponential",
        )
    if p.clock == "trace" and p.trace is not None:
        Trace(Path(p.trace)).times(0, clients.train.keys, options.seed)


def _check_stages(p: PersonalOptions, options: FitOptions) -> None:
    """Refuse options that need another one."""
    every = set(PersonalOptions.model_fields)
    if p.stragglers == "none" and (name := first_given(options, "personal", every - _STAGES)):
        raise ConfigError(
            f"personal.{name} is set, and there are no stages", "give --stragglers srpfl, or leave it out"
        )
    if p.clock is None and (name := first_given(options, "personal", every - _TIMED)):
        raise ConfigError(f"personal.{name} is set, and there is no clock", "give one, like --clock exponential")
