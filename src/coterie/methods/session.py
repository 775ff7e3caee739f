# SPDX-License-Identifier: Apache-2.0
"""How a fit is run: in phases, each with a checkpoint of its own; and the first, in which everything is prepared.

A fit that was killed is continued by doing all phases again: those that had ended are only read.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.algorithms import preparation
from coterie.algorithms.preparation import Scaling
from coterie.config import FitOptions
from coterie.config import options as default_options
from coterie.data.clients import Clients
from coterie.data.draws import CALIBRATION, SUPPORT, VALIDATION, Rule, Share
from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.data.schema import Schema
from coterie.engines.drive import Finished, Job, Program, Request, Round, Traffic
from coterie.engines.engine_for import AnyEngine, engine_for
from coterie.engines.screening import left_out_text
from coterie.errors import ConfigError, RunError
from coterie.evaluate import class_counts_ask
from coterie.files import make_folder, replace_file
from coterie.limits import MOST_PARAMETERS
from coterie.local import Training
from coterie.local.monomials import MOST, n_monomials
from coterie.models import Dense, Loss, Model, Network
from coterie.models.outcomes import OUTCOMES, outcome_of
from coterie.participation import Clock, Everyone, Participation, Sampled
from coterie.privacy.account import Account
from coterie.privacy.noise import Noises
from coterie.protocol import Ask, Replies, Tensors
from coterie.secure.in_memory import NodesInMemory

__all__ = [
    "Answered", "On", "Phase", "Prepared", "Session", "Watch", "has_closed_form", "learnt_scaling", "model_for",
    "newcomers", "prepare", "shown_and_judged", "target_of",
]  # fmt: skip

Watch = Callable[[str, Round, int], None]  # phase, what happened, rounds of the phase

_EVERYONE = ("prepare", "step size", "one model each", "baselines", None)  # else a share of the clients takes part
_READY = 12  # engines that are kept: rows are asked again and again


@dataclass(frozen=True)
class On:
    """What clients are asked on one set of their rows: a part of a message.

    Attributes
    ----------
    rows : Ragged
        Which.
    asks : mapping
        Run -> its ask.
    private : dict or RemoteState, optional
        What clients keep, and start from.
    after : int, optional
        The number of an earlier part of the message, on other rows of the same clients: they go on from what that has left
        with them, beside what they keep.
    """

    rows: Ragged
    asks: Mapping[int, Ask]
    private: Any = None
    after: int | None = None


@dataclass(frozen=True)
class Answered:
    """What a part of a message brought: replies by run, and what clients keep after it (from afar, a handle)."""

    replies: dict[int, Replies]
    private: Any

    def __getitem__(self, run: int) -> Replies:
        return self.replies[run]


@dataclass(frozen=True)
class Phase:
    """Programs that run side by side on one set of rows.

    Attributes
    ----------
    name : str or None
        What a phase without a name does is neither kept nor told of.
    rows : Ragged
        Of the clients that it is about.
    programs : sequence of callable
        What is run.
    state : type or sequence of types
        Of the programs' states. Where they differ, the first program is what the phase is about, and is told of alone.
    total : int
        Rounds that are expected.
    policy, clock
        Who takes part, in place of the share of the options, and by which clock.
    goes_on : bool
        Whether clients keep what earlier programs on these rows have left with them.
    said : str, optional
        What it is called when it is told of, in place of its name; "" is not told of: of phases that run side by side, one
        tells how far all have come.
    """

    name: str | None
    rows: Ragged
    programs: Sequence[Program]
    state: type | Sequence[type] | None
    total: int
    policy: Participation | None = None
    clock: Clock | None = None
    goes_on: bool = False
    said: str | None = None


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
    traffic : Traffic
        Messages and bytes so far.
    left_out : dict
        Clients whose answers did not count, in some message -> why.
    of : mapping
        Whose checkpoints these are: the run, and its data. They say so, and those of others are refused.
    nodes : NodesInMemory
        Who adds up securely, where the options say so and clients are here.
    account : Account or None
        Of differential privacy: with it, nothing is asked that is not paid for.
    secret : bytes or None
        What noise and lots follow from, beside what is asked; without, noise is drawn anew for every answer.
    """

    options: FitOptions = field(default_factory=default_options)
    folder: Path | None = None
    every: float = 2.0
    watch: Watch | None = None
    traffic: Traffic = field(default_factory=Traffic, repr=False, compare=False)
    left_out: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    of: Mapping[str, str] = field(default_factory=dict)
    nodes: NodesInMemory = field(default_factory=NodesInMemory, repr=False, compare=False)
    account: Account | None = None
    secret: bytes | None = field(default=None, repr=False)
    _engines: dict[tuple[int, bool], AnyEngine] = field(default_factory=dict, init=False, repr=False, compare=False)
    _running: list[tuple[int, bool]] = field(default_factory=list, init=False, repr=False, compare=False)

    def run(
        self, phase: str | None, rows: Ragged, programs: Sequence[Any], state: type | Sequence[type] | None, total: int,
        **how: Any,
    ) -> Finished:  # fmt: skip
        """Run programs side by side: see `Phase` for what can be said."""
        return self.run_all([Phase(phase, rows, programs, state, total, **how)])[0]

    def run_all(self, phases: Sequence[Phase]) -> list[Finished]:
        """Run phases that do not wait for each other, each on its own rows, side by side: they share their messages."""
        assert len({id(phase.rows) for phase in phases}) == len(phases)  # what clients keep is the engine's
        running = [(id(phase.rows), False) for phase in phases]
        self._running.extend(running)
        try:
            jobs = [self._job(phase) for phase in phases]
            done: list[Finished] = jobs[0].engine.run_all(jobs)
        finally:
            del self._running[-len(running) :]
        self.traffic.add(Traffic.side_by_side(one.traffic for one in done))
        for phase, one in zip(phases, done, strict=True):
            self._note(phase.rows, one.left_out)
        return done

    def _job(self, phase: Phase) -> Job:
        engine, watch = self.engine(phase.rows), self.watch
        share = 1.0 if phase.name in _EVERYONE else self.options.training.participation
        policy = phase.policy or (Sampled(share) if share < 1 else Everyone())
        engine.set_up(participation=policy, clock=phase.clock, seed=self.options.seed, store=phase.name)
        said = phase.name if phase.said is None else phase.said
        told = (
            None if watch is None or not said else _teller(watch, said, phase.total, isinstance(phase.state, Sequence))
        )
        checkpoint = self._checkpoint(phase.name)
        of = {**self.of, "phase": str(phase.name)} if self.of else None
        return Job(engine, phase.programs, checkpoint, self.every, phase.state, told, phase.goes_on, of, self.account)

    def _note(self, rows: Ragged, left_out: Mapping[int, str]) -> None:
        self.left_out.update({str(rows.names[one]): why for one, why in left_out.items()})

    def remarks(self) -> list[str]:
        """Say whose answers did not count."""
        names = sorted(self.left_out)
        return left_out_text(names, {at: self.left_out[name] for at, name in enumerate(names)})

    def secured(self) -> dict[str, Any]:
        """What secure sums have cost, and who dropped out of them."""
        return self.nodes.cost.said()

    def engine(self, rows: Ragged, *, asks: bool = False) -> AnyEngine:
        """What answers for these rows: one that is run, with what its clients keep; and beside it one that is asked.

        Those that were used last are kept, and those that run now in any case: their clients' state is needed.
        """
        key = (id(rows), asks)  # an engine keeps its rows, so that no others have their number
        how = {"nodes": self.nodes} if self.options.secure else {}
        engine = self._engines.pop(key, None) or engine_for(rows, noises=Noises(self.secret), **how)
        self._engines[key] = engine
        idle = [known for known in self._engines if known not in self._running]
        for known in idle[: max(0, len(idle) - _READY)]:
            del self._engines[known]
        return engine

    def ask(self, rows: Ragged, ask: Ask, private: Any = None) -> Replies:
        """Put one question to everyone, outside any round, with the private state that is given: see `asks`."""
        return self.asks(rows, {0: ask}, private)[0]

    def asks(self, rows: Ragged, asks: Mapping[int, Ask], private: Any = None) -> dict[int, Replies]:
        """Put several runs' questions to everyone; what clients keep after that is in `private`, as far as it is here."""
        return self.exchange([On(rows, asks, private)])[0].replies

    def exchange(self, parts: Sequence[On], traffic: Traffic | None = None) -> list[Answered]:
        """Put questions on several sets of rows, each of them once, in one message; outside any round.

        It is counted in `traffic`, or as the session's.
        """
        assert len({id(part.rows) for part in parts}) == len(parts)  # what clients keep is the engine's
        requests = []
        for part in parts:
            engine = self.engine(part.rows, asks=True)
            engine.forget()
            if part.private is not None:
                engine.private = part.private
            asks = part.asks if self.account is None else self.account.admit(part.asks, engine.word)
            requests.append(Request(engine, asks, part.after))
        found = requests[0].engine.exchange(requests)
        for part, replies in zip(parts, found, strict=True):
            for reply in replies.values():
                self._note(part.rows, reply.left_out)
        (traffic or self.traffic).count(reply for replies in found for reply in replies.values())
        return [Answered(replies, request.engine.private) for replies, request in zip(found, requests, strict=True)]

    def _check_revealed(self) -> None:
        if self.account is not None:
            raise RunError(
                "what clients keep would be told, and the run has a privacy budget", "leave privacy.epsilon out"
            )

    def revealed(self, wanted: Sequence[tuple[Ragged, Sequence[int]]], names: Collection[str]) -> list[list[Tensors]]:
        """These fields of what runs on some rows have left with clients, where a method says that they may be known.

        It is one message, for several sets of rows.
        """
        self._check_revealed()
        engines = [(self.engine(rows), runs) for rows, runs in wanted]
        self.traffic.messages += 1
        return engines[0][0].revealed_all(engines, names)

    def kept_word(self, name: str, word: str) -> str:
        """Keep a word of the first time, or say what was kept: for choices that a resumed run must not make anew."""
        if self.folder is None:
            return word
        path = self.folder / "checkpoints" / name
        make_folder(path.parent)
        if not path.exists():
            replace_file(path, word.encode())
        return path.read_text(encoding="utf-8", errors="replace")

    def _checkpoint(self, phase: str | None) -> Path | None:
        if self.folder is None or phase is None:
            return None
        if phase == "fit":
            return self.folder / "state.safetensors"
        make_folder(self.folder / "checkpoints")
        return self.folder / "checkpoints" / f"{phase.replace(' ', '-')}.safetensors"


def _teller(watch: Watch, phase: str, total: int, first_only: bool) -> Callable[[Round], None]:
    def told(done: Round) -> None:
        if done.run == 0 or not first_only:
            watch(phase, done, max(total, done.round))

    return told


@dataclass(frozen=True)
class Prepared:
    """What training and measuring start from: rows that are scaled, a model, and how clients train it."""

    model: Model
    scaling: Scaling
    rows: Ragged
    test: Ragged | None
    newcomers: tuple[Ragged, Ragged] | None  # rows that new clients show, and those that judge
    training: Training
    step_size: float
    seed: int
    calibration: Ragged | None = None  # rows that nobody trains on, for prediction intervals

    @cached_property
    def validation(self) -> tuple[Ragged, Ragged]:
        """Training rows without some, and these, by which starts, numbers and penalties are chosen."""
        return self.rows.split(VALIDATION, seed=self.seed, purpose="validation")


def shown_and_judged(rows: Ragged | None, rule: Rule, *, seed: int, purpose: str) -> tuple[Ragged, Ragged] | None:
    """Divide the rows of new clients: some that a client is placed by, or learns from, and the others, which judge."""
    if rows is None or not rows.n_clients:
        return None
    query, support = rows.divide(rule, seed=seed, purpose=purpose)
    return support, query


def newcomers(rows: Ragged | None, seed: int) -> tuple[Ragged, Ragged] | None:
    """Divide the rows of new clients by halves."""
    enough = None if rows is None else rows.at_least(2)  # nothing would be left of one row
    return shown_and_judged(enough, Share(SUPPORT), seed=seed, purpose="support")


def prepare(session: Session, clients: Clients, module: nn.Module | Model | None) -> Prepared:
    """Set calibration rows apart, learn the scaling from federated sums, make the model, find a step size."""
    options, apart = session.options, None
    if options.predictions.coverage is not None:
        rest, apart = clients.train.split(CALIBRATION, seed=options.seed, purpose="calibration")
        clients = replace(clients, train=rest)
    scaling = learnt_scaling(session, clients, divide=options.data.standardise, degree=options.model.degree)
    model = model_for(clients, options, module)

    def scaled(rows: Ragged) -> Ragged:
        return rows.scaled(scaling).to(model.dtype)

    rows = scaled(clients.train)
    if model.loss == "cross_entropy":
        model = _deciding(session, model, rows, clients.schema.classes)
    if isinstance(model, Network):
        model = _with_kernel(session, model, rows)
    t = options.training
    training = Training(t.local_steps, t.epochs, t.batch_size, t.momentum, t.proximal, t.exact)
    test, new = (None if part is None else scaled(part) for part in (clients.test, clients.newcomers))
    step_size = t.step_size or _safe_step_size(session, model, rows)
    shown = newcomers(new, options.seed)
    calibration = None if apart is None else scaled(apart)
    return Prepared(model, scaling, rows, test, shown, training, step_size, options.seed, calibration)


def _deciding(session: Session, model: Model, rows: Ragged, classes: tuple[str, ...]) -> Model:
    """Let the model know what rows of each class count, and when the second of two is predicted."""
    asked = session.options.predictions
    weights: tuple[float, ...] = model.class_weights
    if isinstance(asked.class_weights, dict):
        weights = tuple(asked.class_weights[name] for name in classes)
    elif asked.class_weights == "balanced":
        count = session.ask(rows, class_counts_ask(len(classes)))["count"].clamp(min=1)
        weights = tuple((count.sum() / len(classes) / count).tolist())
    threshold = model.threshold if asked.threshold == 0.5 else asked.threshold  # one's own model may have its own
    if (weights, threshold) == (model.class_weights, model.threshold):
        return model
    return replace(model, class_weights=weights, threshold=threshold)


def learnt_scaling(session: Session, clients: Clients, *, divide: bool, degree: int = 1) -> Scaling:
    """Learn the scaling from federated sums."""
    regression = clients.schema.task == "regression" and clients.schema.outcome is None
    how: dict[str, Any] = {"divide": divide, "real_target": regression, "degree": degree}
    program = partial(preparation.learn_scaling, shape=clients.train.shape, **how)
    found: Scaling = session.run("prepare", clients.train, [program], Scaling, 1).states[0]
    return found


def _with_kernel(session: Session, model: Network, rows: Ragged) -> Network:
    """Choose how a network is computed by measuring once: kernels differ in rounding, and a resumed run is bit-equal."""
    if isinstance(rows, RemoteRows):
        return model  # what is fast there cannot be measured here
    block = next(rows.blocks(torch.arange(min(8, rows.n_clients))))
    if block.y is None or not block.x.shape[1]:
        return model
    chosen = session.kept_word("kernel", model.measured(block.x, block.y).kernel)
    if chosen not in ("loop", "vmap"):
        raise RunError(
            f"the run's kernel is {chosen!r}, which there is not: checkpoints/kernel is damaged", "fit again"
        )
    return replace(model, kernel="loop" if chosen == "loop" else "vmap")


def _safe_step_size(session: Session, model: Model, rows: Ragged) -> float:
    if not isinstance(model, Dense) or not model.is_linear or model.loss in OUTCOMES:  # these need none
        return 0.1
    program = partial(preparation.safe_step_size, model=model, fine=session.options.secure)
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
    loss, outputs = target_of(clients.schema)
    sizes = (inputs, *o.hidden, outputs)
    numbers = sum((a + 1) * b for a, b in itertools.pairwise(sizes))
    several = (options.n_clusters or 1) * options.clusters.n_init
    if numbers * several > MOST_PARAMETERS:
        raise ConfigError(
            f"{several:,} models of {numbers:,} numbers are more than can be trained side by side; the limit is "
            f"{MOST_PARAMETERS:,} numbers",
            "ask for smaller layers, fewer clusters or fewer starts",
        )
    dtype = torch.float32 if o.hidden else torch.float64
    return Dense(sizes, loss, o.intercept, o.l2, dtype)


def target_of(schema: Schema) -> tuple[Loss, int]:
    """What a model of the target minimises, and how many outputs it has."""
    classes = len(schema.classes)
    if schema.outcome is not None:
        return schema.outcome, 1 + outcome_of(schema.outcome).n_extra(classes)
    return ("squared", 1) if schema.task == "regression" else ("cross_entropy", classes)


def has_closed_form(model: Model) -> bool:
    """Tell whether the model is linear regression."""
    return isinstance(model, Dense) and model.is_linear and model.loss == "squared"
