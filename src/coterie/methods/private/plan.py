# SPDX-License-Identifier: Apache-2.0
"""What a privacy budget is spent on, before anything is: its shares, the noise that follows, and whether that is of use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coterie.algorithms.private_k_means import QUESTIONS as START_QUESTIONS
from coterie.algorithms.private_rounds import Rounds
from coterie.algorithms.private_scaling import QUESTIONS
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.engines.secure import NODES
from coterie.errors import ConfigError
from coterie.models import Model
from coterie.privacy.accountant import Release, epsilon_of, least_noise
from coterie.secure.graph import threshold

__all__ = ["FAINT", "Budget", "PlannedQuestions", "delta_of", "louder_on", "planned", "starts_privately"]

_SCALING, _START, _MEASURE = 0.1, 0.2, 0.1  # shares of the budget; the rest is for training
_WITHIN = 0.999  # of epsilon is planned with, so that rounding never leads beyond
_USELESS, FAINT = 1.0, 3.0  # all updates together, over the length of the noise in them
_VOTES = 8.0  # the most votes of a column are a quarter, and twice the noise is seen
_MOST_DELTA = 1e-5
_FIRST_CLIP = 1.0  # updates of standardised columns are hardly longer at first


@dataclass(frozen=True)
class PlannedQuestions:
    """Noise multipliers of every kind of question.

    Attributes
    ----------
    scaling, start, measure : float or None
        None: not asked.
    rounds : Rounds or None
        Of training in rounds.
    moments : float or None
        Of the one question of methods without rounds.
    signal : float
        All updates together, each as long as it may be, over the length of the noise in them, or less, where columns are
        scaled by fewer votes than that.
    louder : float
        How much more noise comes than a question asks for: as several nodes add all of it each, or shares.
    """

    scaling: float | None
    start: float | None
    measure: float | None
    rounds: Rounds | None
    moments: float | None
    signal: float
    louder: float


def delta_of(clients: Clients, options: FitOptions) -> float:
    """Delta as given, or a tenth of one over the number of clients, and at most 1e-5."""
    given = options.privacy.delta
    return min(_MOST_DELTA, 0.1 / max(clients.n_clients, 1)) if given is None else given


@dataclass(frozen=True)
class Budget:
    """A budget, of which each kind of question has a share.

    Attributes
    ----------
    once : float
        The multiplier of one question that costs all of it.
    multipliers : dict
        Kind -> the multiplier of each of its questions.
    """

    once: float
    multipliers: dict[str, float]

    @classmethod
    def of(
        cls, clients: Clients, options: FitOptions, shares: Mapping[str, float], questions: Mapping[str, int]
    ) -> "Budget":
        """Divide the budget of the options; kinds without questions have nothing."""
        assert options.privacy.epsilon is not None
        once = least_noise(lambda z: {Release(z): 1}, _WITHIN * options.privacy.epsilon, delta_of(clients, options))
        used = {name: share for name, share in shares.items() if questions[name]}
        return cls(once, {name: once * math.sqrt(questions[name] / share) for name, share in used.items()})

    def __getitem__(self, kind: str) -> float:
        return self.multipliers[kind]


def starts_privately(options: FitOptions, model: Model) -> bool:
    """Whether clusters begin with what k-means finds among clients' linear models."""
    linear = getattr(model, "is_linear", False)
    return options.method == "ifca" and (options.n_clusters or 1) > 1 and options.clusters.init == "spread" and linear


def planned(clients: Clients, options: FitOptions, model: Model, n_shared: int) -> PlannedQuestions:
    """Divide the budget, and refuse one of which nothing useful comes.

    Parameters
    ----------
    n_shared : int
        Parameters that all clients share.
    """
    assert options.privacy.epsilon is not None
    epsilon, delta = _WITHIN * options.privacy.epsilon, delta_of(clients, options)
    far = isinstance(clients.train, RemoteRows)
    counts = {
        "scaling": QUESTIONS if options.data.standardise else 0,
        "start": START_QUESTIONS if starts_privately(options, model) else 0,
        "measure": _measured(clients, options),
    }
    shares = {"scaling": _SCALING, "start": _START, "measure": _MEASURE}
    budget = Budget.of(clients, options, shares, counts)
    found, once = budget.multipliers, budget.once
    rest = 1 - sum(shares[name] for name in found)
    others = {Release(z): counts[name] for name, z in found.items()}
    in_rounds = options.method not in ("shrunk", "local")
    clusters = options.n_clusters or 1 if options.method == "ifca" else 1
    signal, rounds, moments, louder = math.inf, None, None, louder_on(clients, options)
    if in_rounds:
        number, sampling = options.training.rounds + far, options.training.participation
        if sampling < 1:
            z = least_noise(lambda z: {**others, Release(z, sampling): number}, epsilon, delta)
        else:
            z = once * math.sqrt(number / rest)
        clip = options.privacy.clip
        rounds = Rounds(z, clip or _FIRST_CLIP, clip is None, clients.n_clients, sampling)
        signal = math.sqrt(options.training.rounds) * rounds.expected / (clusters * louder * z * math.sqrt(n_shared))
    elif options.method == "shrunk":
        moments = once / math.sqrt(rest)
        signal = clients.n_clients / (louder * moments * math.sqrt(n_shared))
    signals = {f"{n_shared:,} shared parameters": signal}
    if "scaling" in found:
        width = math.prod(clients.train.shape) + (clients.schema.task == "regression")
        signals["scales of columns"] = clients.n_clients / (_VOTES * louder * found["scaling"] * math.sqrt(width))
    where = min(signals, key=signals.__getitem__)
    made = PlannedQuestions(
        found.get("scaling"), found.get("start"), found.get("measure"), rounds, moments, signals[where], louder
    )
    if made.signal < _USELESS and not options.privacy.anyway:
        raise ConfigError(
            _useless(clients, options, made.signal, where), _help(clients, options, made.signal, once, delta)
        )
    return made


def louder_on(clients: Clients, options: FitOptions) -> float:
    """How much more noise comes than a question asks for, by who adds it."""
    rows = clients.train
    nodes = len(np.unique(rows.place)) if isinstance(rows, RemoteRows) else min(NODES, clients.n_clients)
    if options.secure:
        return math.sqrt(nodes / threshold(nodes))
    return math.sqrt(nodes) if isinstance(rows, RemoteRows) else 1.0


def _measured(clients: Clients, options: FitOptions) -> int:
    """Questions that measure: on held-out rows, on new clients', and how many clients each cluster has."""
    return 1 + (clients.newcomers is not None) + (options.method == "ifca")


def _useless(clients: Clients, options: FitOptions, signal: float, where: str) -> str:
    return (
        f"with privacy.epsilon={options.privacy.epsilon:g} and {clients.n_clients} clients the noise in {where} would be "
        f"{1 / signal:.1f} times as long as all that clients can say"
    )


def _help(clients: Clients, options: FitOptions, signal: float, once: float, delta: float) -> str:
    """What would be enough: clients, epsilon, or fewer parameters."""
    more = math.ceil(clients.n_clients / signal)
    enough = epsilon_of({Release(once * signal): 1}, delta)
    said = f"it takes {more:,} clients, an epsilon of {enough:.1f}, or fewer parameters"
    said += " or clusters" if options.method == "ifca" else ""
    if isinstance(clients.train, RemoteRows) and not options.secure:
        said += ", or --secure, with which nodes share the noise"
    return f"{said}; privacy.anyway=true spends the budget all the same"
