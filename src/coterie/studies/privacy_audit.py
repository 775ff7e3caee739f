# SPDX-License-Identifier: Apache-2.0
"""Does noise hide who takes part? Canaries among the clients, and a lower bound of epsilon from who is recognised.

Canaries are clients that say what is easiest to recognise: each an update of its own direction, as long as it may be. A
coin decides of each whether it takes part; all of them are audited in one run (Steinke, Nasr, Jagielski, "Privacy Auditing
with One (1) Training Run", NeurIPS 2023). Whoever sees the noised sums of all rounds adds up each canary's coordinate, and
says that it was there where that is above half of what it would have said. From upper bounds of both error rates, with 95 %
confidence together, follows how different the two cases are at least, as normal noise goes, and so epsilon (Nasr et al.,
"Tight Auditing of Differentially Private Machine Learning", USENIX Security 2023). Other clients have nothing in these
coordinates.

Everything else is what `coterie fit --epsilon` runs: bounds, noise, rounds and the account. The study can fail: with a
factor on the noise that is added, and not accounted for.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms import fedavg, ifca
from coterie.algorithms.private_rounds import Rounds, privately
from coterie.algorithms.starts import Start
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import Dense
from coterie.privacy.account import Account
from coterie.privacy.accountant import Release, least_noise
from coterie.privacy.gaussian import gaussian_epsilon
from coterie.privacy.noise import Noises
from coterie.protocol import (
    Algorithm,
    Ask,
    Block,
    ByCluster,
    ClusterSums,
    RowProduct,
    Sum,
    Tensors,
    WeightedMean,
    answers,
)
from coterie.studies.choices import PRIVATE_METHODS
from coterie.studies.common import Column, Outcome, Tell, silent
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "QUICK", "Settings", "run", "with_canaries"]

NAME = "privacy-audit"
QUICK: dict[str, Any] = {"reps": 2, "epsilon": (8.0,)}

_DELTA = 1e-5
_CONFIDENCE = 0.95
_LOUD = 1e3  # an update so long is shortened to the bound
_FEATURES = 10  # of the other clients
_CLUSTERS = 2
_WITHIN = 0.999  # of epsilon is planned with


@dataclass(frozen=True)
class Settings:
    """What is audited.

    Attributes
    ----------
    epsilon : tuple of float
        That are claimed; the last one also without noise.
    reps : int
        Runs of each, all of whose canaries count together.
    noise : float
        Factor on the standard deviation of the noise that is added, and that the account knows nothing of.
    """

    methods: tuple[str, ...] = PRIVATE_METHODS
    epsilon: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    clients: int = 100
    canaries: int = 500
    rows: int = 5
    rounds: int = 10
    reps: int = 40
    noise: float = 1.0
    jobs: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class _Task:
    settings: Settings
    method: str
    epsilon: float
    noise: float
    seed: int


class _Factor(Noises):
    """Other noise than is asked for."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def added(self, total: Tensor, deviation: float, about: bytes) -> Tensor:
        return super().added(total, self.factor * deviation, about) if self.factor else total


def run(settings: Settings, tell: Tell = silent) -> Outcome:
    """Audit every method with every epsilon, and with the last one without noise."""
    noises = [(epsilon, settings.noise) for epsilon in settings.epsilon] + [(settings.epsilon[-1], 0.0)]
    tasks = [
        _Task(settings, method, epsilon, noise, settings.seed + rep)
        for rep in range(settings.reps)
        for method in settings.methods
        for epsilon, noise in noises
    ]
    rows = side_by_side(_one, tasks, settings.jobs, lambda n: tell(NAME, n, len(tasks)))
    return Outcome(NAME, asdict(settings), rows, _summary(settings, noises, rows))


def _one(task: _Task) -> dict[str, Any]:
    """One run: how many canaries were there, and who of them was recognised."""
    began, s = time.process_time(), task.settings
    coins = torch.rand(s.canaries, generator=keys.generator(task.seed, "coins")) < 0.5
    there = coins.nonzero()[:, 0]
    multiplier = least_noise(lambda z: {Release(z): s.rounds}, _WITHIN * task.epsilon, _DELTA)
    account = Account(task.epsilon, _DELTA)
    clusters = _CLUSTERS if task.method == "ifca" else 1
    heard = torch.zeros(clusters, s.canaries, dtype=torch.float64)
    model = Dense((_FEATURES + s.canaries, 1), "squared", intercept=False, dtype=torch.float64)
    rounds = Rounds(multiplier, 1.0, False, s.clients + len(there))
    program = partial(_program, task=task, model=model, direction=_directions(s, there))
    engine = InProcess(_rows(s, len(there), task.seed))
    engine.worker.noises = _Factor(task.noise)

    def listening(state: Any) -> Algorithm:
        return _overheard(privately(state, program, rounds=rounds), heard)

    engine.run([listening], account=account)
    own = heard[torch.arange(s.canaries) % clusters, torch.arange(s.canaries)]  # what each has said, if it was there
    said = own > s.rounds / 2  # each round's clip is 1
    return {
        "method": task.method, "epsilon": task.epsilon, "noise": task.noise, "seed": task.seed,
        "spent": account.spent, "multiplier": multiplier,
        "there": len(there), "missed": int((coins & ~said).sum()),
        "away": int((~coins).sum()), "false": int((~coins & said).sum()),
        "seconds": time.process_time() - began,
    }  # fmt: skip


def _rows(s: Settings, canaries: int, seed: int) -> Ragged:
    """Clients of a linear regression, and after them canaries, whose rows say nothing."""
    draw = keys.generator(seed, "audited clients")
    x = torch.zeros(s.clients + canaries, s.rows, _FEATURES + s.canaries, dtype=torch.float64)
    x[: s.clients, :, :_FEATURES] = torch.randn(s.clients, s.rows, _FEATURES, generator=draw, dtype=torch.float64)
    models = torch.randn(_CLUSTERS, _FEATURES, generator=draw, dtype=torch.float64) / math.sqrt(_FEATURES)
    own = models[torch.arange(len(x)) % _CLUSTERS]
    return Ragged.from_blocks(x, torch.einsum("cnd,cd->cn", x[..., :_FEATURES], own))


def _directions(s: Settings, there: Tensor) -> Tensor:
    """[M] the canary that a client is, -1 for others."""
    return torch.cat([torch.full((s.clients,), -1), there])


def _program(state: Any, *, task: _Task, model: Dense, direction: Tensor) -> Algorithm:
    """An algorithm, some of whose clients are canaries."""
    how: dict[str, Any] = {
        "model": model, "rounds": task.settings.rounds, "step_size": 0.05, "seed": task.seed,
        "training": Training(steps=1),
    }  # fmt: skip
    if task.method == "ifca":
        start = Start("random")
        inner: Algorithm = ifca.ifca(state, n_clusters=_CLUSTERS, start=start, patience=0, **how)
    else:
        inner = fedavg.fedavg(state, weighting="clients", **how)
    replies: Any = None
    while True:
        try:
            wanted = inner.send(replies)
        except StopIteration as end:
            return end.value
        if isinstance(wanted, Ask):
            shared = {**wanted.shared, "direction": direction, "first": _FEATURES, "clustered": task.method == "ifca"}
            wanted = Ask(
                with_canaries, shared, wanted.fold, fresh=wanted.fresh, work=wanted.work, scratch=wanted.scratch
            )
        replies = yield wanted


def _overheard(inner: Algorithm, heard: Tensor) -> Algorithm:
    """Add up what everybody can see: noised sums of canaries' coordinates, in units of the bound.  heard [K, canaries]"""
    replies: Any = None
    while True:
        try:
            wanted = inner.send(replies)
        except StopIteration as end:
            return end.value
        replies = yield wanted
        if isinstance(wanted, Ask):
            assert replies is not None
            found = replies["update"]
            total = found.sum if isinstance(found, ClusterSums) else found[None]
            heard += total[:, _FEATURES:]


def _summary(
    settings: Settings, noises: Sequence[tuple[float, float]], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """A line for each method and epsilon: all canaries of all runs together."""
    out = []
    for method in settings.methods:
        for epsilon, noise in noises:
            some = [r for r in rows if (r["method"], r["epsilon"], r["noise"]) == (method, epsilon, noise)]
            total = {name: sum(r[name] for r in some) for name in ("there", "missed", "away", "false")}
            low = epsilon_below(**total)
            claimed = max(r["spent"] for r in some)
            right = 1 - (total["missed"] + total["false"]) / (total["there"] + total["away"])
            out.append(
                {
                    "method": method, "epsilon": epsilon, "noise": noise, "claimed": claimed, "measured": low,
                    "right": right, "holds": low <= claimed, "canaries": total["there"] + total["away"],
                    "seconds": sum(r["seconds"] for r in some) / len(some),
                }
            )  # fmt: skip
    return out


def epsilon_below(there: int, missed: int, away: int, false: int) -> float:
    """Epsilon at least, with 95 % confidence, if so many canaries were missed, and others seen that were not there."""
    from scipy.stats import beta, norm  # slow to load

    each = (1 - _CONFIDENCE) / 2
    most = [
        1.0 if wrong == n else float(beta.ppf(1 - each, wrong + 1, n - wrong))
        for wrong, n in ((missed, there), (false, away))
    ]
    apart = sum(float(norm.ppf(1 - rate)) for rate in most) if max(most) < 1 else 0.0
    return gaussian_epsilon(max(apart, 0.0) ** 2, _DELTA)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(update=(WeightedMean("weight"), ByCluster("share")), loss=WeightedMean("n"), n=Sum(), count=Sum(), moved=Sum())
def with_canaries(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[dict[str, Any], Tensors]:
    """Answer as the algorithm's clients do, but for canaries: theirs are their own coordinates, in clusters of their own."""
    inner = ifca.assign_and_train if shared["clustered"] else fedavg.train_shared
    reply, kept = inner(shared, each, private, data)
    canary = shared["direction"][0][data.ids]  # [C]
    odd = canary >= 0
    update = reply["update"]
    update = (update.formed() if isinstance(update, RowProduct) else update).clone()
    place = shared["first"] + canary[odd]
    update[:, odd] = _LOUD * one_hot(place, update.shape[-1]).to(update.dtype)
    reply = {**reply, "update": update}
    if shared["clustered"]:
        share = reply["share"].clone()
        share[:, odd] = one_hot(canary[odd] % share.shape[-1], share.shape[-1]).to(share.dtype)
        reply["share"] = share
    return reply, kept


CAPTION = (
    "claimed: epsilon that the account has spent, with delta 1e-5. measured: a lower bound of it, with 95 % confidence,\n"
    "from canaries that are recognised in noised sums. right: share of canaries of which it was said rightly whether they\n"
    "took part."
)
COLUMNS = [
    Column("method", "method"), Column("epsilon", "epsilon", "g"), Column("noise", "noise", "g"),
    Column("claimed", "claimed", ".2f"), Column("measured", "measured", ".2f"), Column("right", "right", ".1%"),
    Column("holds", "holds"), Column("canaries", "canaries"), Column("seconds", "CPU seconds", ".1f"),
]  # fmt: skip
