# SPDX-License-Identifier: Apache-2.0
"""How networks are trained for a comparison, in every structure, and how they serve clients.

All take full-batch steps of one size, so that structures differ in what is shared and in little else: one for all is
FedAvg's, groups are IFCA's, a representation is FedRep's with a head for every client; one each is trained alone, and shrunk
ones go on from FedAvg's at every client.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.fedrep import fedrep, first_model
from coterie.algorithms.ifca import ifca
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.starts import Start
from coterie.data.ragged import Ragged
from coterie.engines.drive import Program
from coterie.evaluate import Measured, Placed
from coterie.local import Training, worst_if_nan
from coterie.methods.baselines import measured_models, placed
from coterie.methods.personal.measure import Fit, personal_start
from coterie.methods.personal.model import Personal, begun, copied
from coterie.methods.session import On, Session
from coterie.models import Model, last_layers
from coterie.protocol import Algorithm

__all__ = ["ALONE", "MOMENTUM", "STEPS", "TUNED", "Own", "Served", "Shared", "Trainer"]

STEPS = 10  # of a client in a round
MOMENTUM = 0.9
ALONE = (30, 100, 300, 600)  # steps of a network that one client trains: at most as many as in 60 rounds
TUNED = (3, 10, 30, 100, 300)  # steps from the common network; none would be the common network itself

_STEP_SIZES = (0.1, 0.03, 0.01)
_TRIED = 10  # rounds that tell which step size is best


class Served(Protocol):
    """A fit of a structure to rows of some clients."""

    def on(self, rows: Ragged) -> Measured:
        """Judge it by the rows that were held out of it."""

    def on_new(self, support: Ragged, query: Ragged) -> Measured:
        """Judge it by clients that show a few labelled rows first."""


@dataclass(frozen=True)
class Shared:
    """Networks [K, P] that clients have in common: each takes the one with the lowest loss."""

    session: Session
    model: Model
    theta: Tensor
    rows: Ragged

    @cached_property
    def placed(self) -> Placed:
        """Which is whose, by the rows that they were trained on."""
        return placed(self.model, self.theta, self.rows, self.session)

    def on(self, rows: Ragged) -> Measured:
        """Measure the network of a client's group."""
        return measured_models(self.model, self.theta, self.placed.label, rows, self.session)

    def on_new(self, support: Ragged, query: Ragged) -> Measured:
        """Take the group with the lowest loss."""
        label = placed(self.model, self.theta, support, self.session).label
        return measured_models(self.model, self.theta, label, query, self.session)


@dataclass(frozen=True)
class Own:
    """Networks of which a part, or all, is a client's own, and how they do on held-out rows.

    They are judged at once: clients keep one part of their own, and the next setting replaces it.
    """

    session: Session
    personal: Personal
    judged: Measured | None

    def on(self, rows: Ragged) -> Measured:
        """Tell how clients' own do."""
        assert self.judged is not None
        return self.judged

    def on_new(self, support: Ragged, query: Ragged) -> Measured:
        """Fit what is a client's own to its labelled rows."""
        return _judged(self.session, self.personal, support, query)


def _judged(session: Session, personal: Personal, rows: Ragged, held: Ragged, kept: Any = None) -> Measured:
    """Let clients fit a part of their own to rows, unless `kept` says that they have one, and judge it by others."""
    learn = On(rows, {0: personal.learn_ask(kept)}, kept)
    _, got = session.exchange([learn, On(held, {0: personal.judge_ask()}, after=0)])
    return Measured(**got[0].values)


@dataclass(frozen=True)
class Trainer:
    """How networks are trained.

    Attributes
    ----------
    session : Session
        What runs it.
    model : Model
        What is trained.
    rows : Ragged
        All training rows: they tell the step size.
    rounds : tuple of int
        After how many rounds federated training may end.
    starts : int
        Of IFCA.
    seed : int
        Of everything random.
    scaling : Scaling
        That rows were made with.
    """

    session: Session
    model: Model
    rows: Ragged
    rounds: tuple[int, ...]
    starts: int
    seed: int
    scaling: Scaling

    @cached_property
    def step_size(self) -> float:
        """The step with which FedAvg's training loss falls furthest; all structures take it."""
        programs = [partial(self._fedavg, step_size=step, rounds=_TRIED) for step in _STEP_SIZES]
        states = self._run("step size", self.rows, programs)
        fits = [Shared(self.session, self.model, state.theta[None], self.rows) for state in states]
        return _STEP_SIZES[_least([_total(fit.on(self.rows)) for fit in fits])]

    def _fedavg(self, state: Any, *, step_size: float, rounds: int) -> Algorithm:
        return fedavg(
            state, model=self.model, rounds=rounds, step_size=step_size, seed=self.seed, training=self._training
        )

    def _run(self, phase: str, rows: Ragged, programs: Sequence[Program]) -> list[Any]:
        return self.session.run(phase, rows, programs, None, self.rounds[-1]).states

    @property
    def _training(self) -> Training:
        return Training(STEPS, momentum=MOMENTUM)

    def common(self, rows: Ragged) -> list[Shared]:
        """One network for all, after each number of rounds."""
        program = partial(_snapshots, partial(self._fedavg, step_size=self.step_size), self.rounds)
        (thetas,) = self._run("global", rows, [program])
        return [Shared(self.session, self.model, theta[None], rows) for theta in thetas]

    def groups(self, rows: Ragged, n_clusters: int) -> list[Shared]:
        """Groups, from several starts side by side; the one that fits its training rows best is kept."""
        how: dict[str, Any] = {"model": self.model, "n_clusters": n_clusters, "step_size": self.step_size}
        how |= {"training": self._training, "start": Start(step_size=self.step_size)}
        programs = [
            partial(_snapshots, partial(ifca, seed=self.seed + start, **how), self.rounds)
            for start in range(self.starts)
        ]
        runs = [
            [Shared(self.session, self.model, theta, rows) for theta in run]
            for run in self._run("clusters", rows, programs)
        ]
        return runs[_least([_total(run[-1].on(rows)) for run in runs])]

    def heads(self, rows: Ragged, held: Ragged | None) -> list[Own]:
        """A shared body and a head each, after each number of rounds."""
        layers, seed, how = last_layers(self.model, 1), self.seed, self._training
        fit = Fit(personal_start(self.model, layers, seed=seed), self.step_size, how, seed)
        engine, made = self.session.engine(rows), list[Own]()

        def program(state: None) -> Algorithm:
            now = None
            for rounds in self.rounds:
                now = yield from fedrep(
                    now, model=self.model, rounds=rounds, step_size=self.step_size, seed=seed, head=how, body=how
                )
                found = begun(self.model, layers, now.theta, rows.names, fit, self.scaling)
                made.append(self._own(found, rows, held, copied(engine.private)))

        self._run("representation", rows, [program])
        return made

    def alone(self, rows: Ragged, held: Ragged | None) -> list[Own]:
        """One network each, after each number of steps."""
        start = first_model(self.model, self.seed)
        return [self._tuned(start, rows, held, Training(steps, momentum=MOMENTUM)) for steps in ALONE]

    def tuned(self, common: Shared, rows: Ragged, held: Ragged | None) -> list[Own]:
        """Networks that go on from the common one; plain steps, as MAML's clients take."""
        return [self._tuned(common.theta[0], rows, held, Training(steps)) for steps in TUNED]

    def _tuned(self, start: Tensor, rows: Ragged, held: Ragged | None, how: Training) -> Own:
        fit = Fit(start, self.step_size, how, self.seed)
        return self._own(begun(self.model, (), start, rows.names, fit, self.scaling), rows, held)

    def _own(self, found: Personal, rows: Ragged, held: Ragged | None, kept: Any = None) -> Own:
        judged = None if held is None else _judged(self.session, found, rows, held, kept)
        return Own(self.session, found, judged)


def _snapshots(
    algorithm: Callable[..., Algorithm], every: Sequence[int], state: None
) -> Generator[Any, Any, list[Tensor]]:
    """Run on, and keep what there is after each number of rounds."""
    now, kept = None, []
    for rounds in every:
        now = yield from algorithm(now, rounds=rounds)
        kept.append(now.theta)
    return kept


def _total(measured: Measured) -> float:
    return float((measured.loss * measured.rows).sum())


def _least(losses: Sequence[float]) -> int:
    return int(worst_if_nan(torch.tensor(losses)).argmin())
