# SPDX-License-Identifier: Apache-2.0
"""One method on one dealing of rotated images: its program, its run, its score (Section 6.2 of the IFCA paper).

Test clients take the model with the smallest loss on their rows, and accuracy is over all their rows. Local models are tested
on all test rows of their rotation, and accuracy is averaged over models. Where only a share of the clients takes part in a
round, local models are trained (every round) and tested for one fixed sample of that size, as in the authors' code.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import fedavg, ifca
from coterie.data.images import Rotated
from coterie.engines.in_process import InProcess, Program, Round
from coterie.evaluate import adjusted_rand
from coterie.fitting import measured_models, placed
from coterie.models import Model
from coterie.participation import Sampled
from coterie.protocol import Algorithm, Save
from coterie.studies.rotated_settings import Settings

__all__ = ["Fit", "Score", "fit"]

_CHECKPOINT_SECONDS = 120.0  # between two checkpoints: those of local models are large
_TEST_BYTES = 8 << 20  # test rows that all local models see at once


@dataclass(frozen=True)
class Score:
    """What goes into the table of one method and one seed."""

    accuracy: float
    adjusted_rand: float | None
    seconds_per_round: float
    curve: list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class Fit:
    """One method on one dealing of the images.

    Attributes
    ----------
    method : str
        ifca, global or local.
    state : State or LocalState
        The algorithm's last state.
    theta : Tensor
        [K, P] models: of the clusters, the one for all, or everybody's own.
    rounds : list of Round
        What happened.
    score : Score
        How well it did.
    """

    method: str
    state: Any
    theta: Tensor
    rounds: list[Round]
    score: Score


def _for_method(method: str, settings: Settings, seed: int, data: Rotated) -> tuple[Rotated, InProcess]:
    """Give the data that a method trains on, and its engine."""
    if settings.participation == 1:
        return data, InProcess(data.train, participation=Everyone(), seed=seed)
    policy = Sampled(settings.participation)
    if method != "local":
        return data, InProcess(data.train, participation=policy, seed=seed)
    ids, _ = policy.choose(0, data.train.keys, seed)
    own = replace(data, train=data.train.only(ids.numpy()), truth=data.truth[ids])
    return own, InProcess(own.train, seed=seed)


@dataclass(frozen=True, eq=False)
class _Trial:
    """One method, from its program to its score."""

    task: Task
    settings: Settings
    seed: int
    data: Rotated
    engine: InProcess
    model: Model
    method: str

    def fit(self, checkpoint: Path | None, tell: Callable[..., None]) -> Fit:
        program, state_type = self._program()

        def tested(saved: Any) -> Algorithm:
            return _tested(program(saved), self.settings.evaluate_every, self._accuracy)

        def watch(done: Round) -> None:
            tell(done.round, self.settings.rounds, _note(done))

        finished = self.engine.run(
            [tested], checkpoint=checkpoint, every=_CHECKPOINT_SECONDS, state_type=state_type, watch=watch
        )
        state = finished.states[0]
        seconds = [r.seconds - r.info.get("test_seconds", 0.0) for r in finished.rounds if "loss" in r.info]
        curve = [(r.info["rounds_done"], r.info["accuracy"]) for r in finished.rounds if "accuracy" in r.info]
        score = Score(self._accuracy(state), self._adjusted_rand(state), statistics.mean(seconds), curve)
        return Fit(self.method, state, self._models(state), finished.rounds, score)

    def _program(self) -> tuple[Program, type]:
        """Give the method's program and the type of its state."""
        s = self.settings
        common: dict[str, Any] = {"model": self.model, "rounds": s.rounds, "step_size": s.step_size}
        common |= {"seed": self.seed, "training": s.training, "decay": s.decay}
        if self.method == "global":
            return partial(fedavg.fedavg, weighting="clients", **common), fedavg.State
        if self.method == "local":
            return partial(fedavg.local_models, **common), fedavg.LocalState
        clusters = len(self.task.angles)
        return partial(ifca.ifca, n_clusters=clusters, start=s.start, patience=s.patience, **common), ifca.State

    def _models(self, state: Any) -> Tensor:
        """[K, P] whatever the method trained."""
        if self.method == "local":
            return self.engine.worker.private[0]["theta"]
        theta: Tensor = state.theta
        return theta if self.method == "ifca" else theta[None]

    def _accuracy(self, state: Any) -> float:
        theta, data = self._models(state), self.data
        if self.method == "local":
            return _own_rotation_accuracy(self.model, theta, data)
        label = placed(self.model, theta, data.test).label
        return measured_models(self.model, theta, label, data.test).mean_right

    def _adjusted_rand(self, state: Any) -> float | None:
        if self.method != "ifca":
            return None
        return adjusted_rand(placed(self.model, state.theta, self.data.train).label, self.data.truth)


def _tested(algorithm: Algorithm, every: int, test: Callable[[Any], float]) -> Algorithm:
    """Pass an algorithm's questions on, and add the test accuracy to every so many of its saves."""
    replies = None
    while True:
        try:
            wanted = algorithm.send(replies)
        except StopIteration as end:
            return end.value
        if isinstance(wanted, Save) and every and wanted.state.round and wanted.state.round % every == 0:
            begin = time.perf_counter()
            found = {"accuracy": test(wanted.state), "rounds_done": wanted.state.round}
            wanted = replace(wanted, info={**wanted.info, **found, "test_seconds": time.perf_counter() - begin})
        replies = yield wanted


def _own_rotation_accuracy(model: Model, theta: Tensor, data: Rotated) -> float:
    """Test every client's own model [M, P] on all test rows of its rotation, and average over models."""
    accuracy = torch.empty(len(theta), dtype=torch.float64)
    for rotation in range(int(data.truth.max()) + 1):
        own = data.truth == rotation
        correct, n = torch.zeros(int(own.sum()), dtype=torch.int64), 0
        for block in data.test.blocks((data.test_truth == rotation).nonzero()[:, 0], budget=_TEST_BYTES):
            guess = model.outputs(theta[own], block.x.flatten(0, 1)).argmax(-1)  # [J, R]
            correct += (guess == block.target.flatten()).sum(1)
            n += guess.shape[1]
        accuracy[own] = correct.double() / n
    return float(accuracy.mean())


def _note(done: Round) -> str:
    said = {name: done.info[name] for name in ("loss", "sizes", "accuracy") if name in done.info}
    return "  ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {' '.join(map(str, value))}"
        for name, value in said.items()
    )


