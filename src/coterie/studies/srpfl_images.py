# SPDX-License-Identifier: Apache-2.0
"""Personal models of images with stragglers: how well nine methods serve clients, and after what virtual time.

Tziotis et al., "Straggler-Resilient Personalized Federated Learning", Figure 3. Every client has images of few classes, and
is judged on test images of the same classes, with what it keeps of its own: a head (FedRep and SRPFL), a representation
(LG-FedAvg and LG-SRPFL), or the common model after fine-tuning (-ft and HF-MAML). All clients count, also those that were
never asked: they first fit what would be their own. SRPFL, LG-SRPFL and FLANP begin with the fastest clients, and double
their number in stages; they are given the virtual time of the method that they are stages around, and so more rounds, or
as in the authors' scripts its rounds, and so less time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.fedrep import partly_shared
from coterie.algorithms.lg_fedavg import lg_fedavg
from coterie.algorithms.maml import maml
from coterie.algorithms.srpfl import Fixed, srpfl
from coterie.engines.in_process import InProcess
from coterie.evaluate import Measured, measure_ask
from coterie.local import Training
from coterie.methods.personal.measure import Fit, distribution, measure_fine_tuned, measure_personal, personal_start
from coterie.models import Part, last_layers, layer_names, split
from coterie.participation import select_participants
from coterie.protocol import Ask, Lockstep, Replies, Save
from coterie.studies.common import Column, Outcome, Tell, seen, silent
from coterie.studies.data.holdings import Partition
from coterie.studies.parallel import side_by_side
from coterie.studies.srpfl_images_settings import DATASETS, METHODS, PRESETS, SPEEDS, Settings, clients, model, settings

__all__ = ["CAPTION", "COLUMNS", "DATASETS", "METHODS", "NAME", "PRESETS", "SPEEDS", "Settings", "run", "settings"]

NAME = "srpfl-images"
CAPTION = (
    "accuracy: mean over all clients, each on its own test images, after the last round; worst: over the tenth of the "
    "clients who fare worst\ntarget: final accuracy of fedrep (for lg-srpfl: of lg-fedavg) minus one point; time: virtual "
    "time until it was first seen, over that of fedrep (lg-fedavg); in all: virtual time of all rounds\nleft out: how often "
    "a client's steps diverged, so that it had no say in a round, over all rounds and seeds (hf-maml)"
)
_STAGED = {"srpfl": "fedrep", "lg-srpfl": "lg-fedavg", "flanp": "fedavg"}  # stages around what
_TUNED = {"fedavg-ft": "fedavg", "flanp-ft": "flanp"}  # judged after fine-tuning, trained as what
_LONGEST_FIRST = ("hf-maml", "fedrep", "srpfl", "lg-fedavg", "lg-srpfl", "fedavg", "flanp")
_POINT = 0.01
_ENDLESS = 1 << 30  # rounds: time ends them

Curve = list[dict[str, Any]]  # what was seen at some rounds: round, virtual_time, left_out, accuracy, worst_decile


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Train every method with every seed; what is fine-tuned is trained once, for both of its methods."""
    wanted = {*chosen.methods, *(_reference(method) for method in chosen.methods)}
    trainings = {_training(method) for method in wanted}
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    tasks = [(training, seed) for seed in seeds for training in _LONGEST_FIRST if training in trainings]
    _dealt(chosen, chosen.seed)  # processes that are copies of this one need not read it again
    found = side_by_side(
        partial(_train, chosen, wanted), tasks, chosen.jobs, lambda done: tell(NAME, done, len(tasks), "trainings")
    )
    curves: dict[str, list[Curve]] = {method: [] for method in METHODS}
    for each in found:
        for method, curve in each.items():
            curves[method].append(curve)
    rows = [_row(method, curves[method], curves[_reference(method)]) for method in chosen.methods]
    if chosen.curves:
        rows = [{**row, "curves": curves[row["method"]]} for row in rows]
    return Outcome(NAME, asdict(chosen), rows)


def _reference(method: str) -> str:
    """Whose final accuracy is the target."""
    return "lg-fedavg" if method.startswith("lg-") else "fedrep"


def _training(method: str) -> str:
    """What is trained for a method."""
    return _TUNED.get(method, method)


def _dealt(chosen: Settings, seed: int) -> Partition:
    return clients(chosen.dataset, chosen.clients, chosen.shards, chosen.rows, seed, scaled=chosen.scaled)


# -- one training -----------------------------------------------------------------------------------------------------
def _train(chosen: Settings, wanted: set[str], task: tuple[str, int]) -> dict[str, Curve]:
    """Train once, the rounds of the settings or until the time is over; a curve for each wanted method."""
    training, seed = task
    trial = _Trial(chosen, training, seed)
    curves: dict[str, Curve] = {method: [] for method in METHODS if method in wanted and _training(method) == training}
    time = trial.time_of_everyone() if trial.timed else math.inf

    def see(save: Save) -> tuple[Save, bool]:
        done = save.state.round
        trial.left_out += save.info.get("left_out", 0)
        over = trial.time >= time if trial.timed else done >= chosen.rounds
        if not done or (done % chosen.evaluate_every and not over):
            return save, True
        for method, curve in curves.items():
            judged = trial.judge(method, save.state.theta)
            curve.append({"round": done, "virtual_time": trial.time, "left_out": trial.left_out, **judged})
        return save, not over

    trial.engine.run([partial(trial.program, see)])
    return curves


class _Trial:
    """A training and its clients."""

    def __init__(self, chosen: Settings, training: str, seed: int) -> None:
        self.chosen, self.training, self.seed = chosen, training, seed
        self.staged, self.steps = training in _STAGED, _STAGED.get(training, training)
        self.timed = self.staged and chosen.until == "time"
        self.time = 0.0  # that has gone by
        self.left_out = 0  # clients without a say, over rounds
        self.data = _dealt(chosen, seed)
        self.model = model(chosen, self.data.train.shape)
        top = last_layers(self.model, 1 if self.steps == "fedrep" else 2)
        below = tuple(name for name in layer_names(self.model) if name not in top)
        self.personal = top if self.steps == "fedrep" else below
        self.engine = InProcess(self.data.train, participation=chosen.sample, clock=chosen.clock, seed=seed)

    def program(self, see: Callable[[Save], tuple[Save, bool]], state: Any) -> Lockstep:
        """Say who takes part in what, and look at it on the way."""

        def everyone(inner: Any) -> Lockstep:
            return seen(self._timed(self._rounds(inner)), see)

        if not self.staged:
            return everyone(state)
        stages = Fixed(self.chosen.stage_rounds)
        return srpfl(everyone, state, n0=self.chosen.first, n_clients=self.chosen.drawn, stages=stages)

    def time_of_everyone(self) -> float:
        """Say what the rounds of the settings take where everyone who is drawn takes part."""
        rounds = self._rounds(None)
        asked = next(wanted for wanted in rounds if isinstance(wanted, Ask))
        rounds.close()
        who = partial(select_participants, self.chosen.sample, self.chosen.clock, asked, clients=self.data.train.keys)
        return sum(who(round_=t, seed=self.seed).seconds for t in range(1, self.chosen.rounds + 1))

    def _timed(self, algorithm: Lockstep) -> Lockstep:
        """Count the time of its questions."""
        replies: Replies | None = None
        while True:
            try:
                wanted = algorithm.send(replies)
            except StopIteration as end:
                return end.value
            replies = yield wanted
            self.time += 0.0 if replies is None else replies.elapsed

    def _rounds(self, state: Any) -> Lockstep:
        s = self.chosen
        rounds = _ENDLESS if self.timed else s.rounds
        common: dict[str, Any] = {"model": self.model, "rounds": rounds, "seed": self.seed, "weighting": "clients"}
        if self.steps == "hf-maml":
            beta = s.step_size if s.meta_step_size is None else s.meta_step_size
            return maml(state, alpha=s.step_size, beta=beta, training=s.passes(s.epochs), **common)
        common |= {"step_size": s.step_size}
        if self.steps == "fedavg":
            return fedavg(state, training=s.passes(s.epochs), **common)
        common |= {"personal": self.personal}
        if self.steps == "lg-fedavg":
            return lg_fedavg(state, training=s.passes(s.epochs), **common)
        return partly_shared(state, turns=self._turns(), **common)

    def _turns(self) -> tuple[tuple[Part, Training], ...]:
        """FedRep's: the head, then the representation, once or as often as there are passes with the latter."""
        s = self.chosen
        times, each = (s.epochs, 1) if s.interleaved else (1, s.epochs)
        return (("personal", s.passes(s.head_epochs, s.momentum)), ("shared", s.passes(each, s.momentum))) * times

    def judge(self, method: str, theta: Tensor) -> dict[str, float]:
        """Measure all clients, each with what is its own."""
        found = distribution(self.model, self._measured(method, theta))
        return {"accuracy": found.mean, "worst_decile": found.worst_decile}

    def _measured(self, method: str, theta: Tensor) -> Measured:
        s, data = self.chosen, self.data
        if method in ("fedavg", "flanp"):
            ask = measure_ask(self.model, theta[None], torch.zeros(s.clients, dtype=torch.int64))
            return Measured(**InProcess(data.test).ask(ask).values)
        rows: dict[str, Any] = {"rows": data.test, "train_rows": data.train}
        how: dict[str, Any] = {"step_size": s.step_size, "seed": self.seed}
        if self.steps == "hf-maml" and s.tuning == "head":
            return measure_fine_tuned(self.model, theta, training=Training(1, batch_size=s.batch_size), **rows, **how)
        if self.steps in ("fedavg", "hf-maml") and s.tuning == "model":
            tuned = s.passes(s.tune_epochs, s.momentum)
            return measure_fine_tuned(self.model, theta, training=tuned, **rows, **how)
        if self.steps == "fedavg":
            head = last_layers(self.model, 1)
            theta, start = split(self.model, head).parts(theta)
            fit = Fit(start, training=s.passes(s.tune_epochs, s.momentum), **how)
            return measure_personal(self.model, theta, None, personal=head, fit=fit, **rows)
        epochs = s.head_epochs if self.steps == "fedrep" else s.tune_epochs
        start = personal_start(self.model, self.personal, seed=self.seed)
        fit = Fit(start, training=s.passes(epochs, s.momentum), **how)
        private = self.engine.worker.private.get(0)
        return measure_personal(self.model, theta, private, personal=self.personal, fit=fit, **rows)


# -- the table --------------------------------------------------------------------------------------------------------
def _row(method: str, curves: Sequence[Curve], reference: Sequence[Curve]) -> dict[str, Any]:
    """Sum up one method's seeds: means; medians of what may never be reached."""
    last = [curve[-1] for curve in curves]
    targets = [curve[-1]["accuracy"] - _POINT for curve in reference]
    there = [_reached(*pair) for pair in zip(curves, targets, strict=True)]
    base = [_reached(*pair) for pair in zip(reference, targets, strict=True)]
    accuracy = [point["accuracy"] for point in last]
    ratios = [
        p["virtual_time"] / b["virtual_time"] for p, b in zip(there, base, strict=True)
    ]  # seeds have other clocks
    return {
        "method": method,
        "final_accuracy": float(np.mean(accuracy)),
        "std": float(np.std(accuracy, ddof=1)) if len(accuracy) > 1 else None,
        "worst_decile": float(np.mean([point["worst_decile"] for point in last])),
        "target": float(np.mean(targets)),
        "rounds_to_target": _median([point["round"] for point in there]),
        "time_to_target": _median([point["virtual_time"] for point in there]),
        "time_ratio": _median(ratios),
        "virtual_time": float(np.mean([point["virtual_time"] for point in last])),
        "rounds": _median([point["round"] for point in last]),
        "left_out": sum(point["left_out"] for point in last),
        "seeds": len(curves),
    }


def _reached(curve: Curve, target: float) -> dict[str, Any]:
    """When the target was first seen: infinitely late, if never."""
    never = {"round": math.inf, "virtual_time": math.inf}
    return next((point for point in curve if point["accuracy"] >= target), never)


def _median(values: Sequence[float]) -> float | None:
    middle = float(np.median(values))
    return middle if math.isfinite(middle) else None


COLUMNS = [
    Column("method", "method"), Column("final_accuracy", "accuracy", ".3f"), Column("std", "std", ".3f"),
    Column("worst_decile", "worst", ".3f"), Column("target", "target", ".3f"),
    Column("rounds_to_target", "rounds", ".0f"), Column("time_to_target", "time", ".1f"),
    Column("time_ratio", "over fedrep's", ".2f"), Column("virtual_time", "in all", ".1f"),
    Column("left_out", "left out"),
]  # fmt: skip
