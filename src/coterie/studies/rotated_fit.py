# SPDX-License-Identifier: Apache-2.0
"""One method on one dealing of rotated images: its program, its run, its score (Section 6.2 of the IFCA paper).

Test clients take the model with the smallest loss on their rows, and accuracy is over all their rows. Local models are
tested on all test rows of their rotation, and accuracy is averaged over models. Where only a share of the clients takes
part in a round, local models are trained (every round) and tested for one fixed sample of that size, as in the authors'
code.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import fedavg, ifca
from coterie.engines.in_process import InProcess, Round
from coterie.evaluate import adjusted_rand
from coterie.methods.baselines import measured_models, placed
from coterie.models import Model
from coterie.participation import Sampled
from coterie.protocol import Lockstep, Save
from coterie.studies.common import seen
from coterie.studies.data.images import Rotated
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
    method, init : str, str or None
        ifca, global or local; the start, of IFCA.
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
    init: str | None
    state: Any
    theta: Tensor
    rounds: list[Round]
    score: Score


def fit(
    method: str,
    settings: Settings,
    data: Rotated,
    model: Model,
    seed: int,
    *,
    init: str | None = None,
    checkpoint: Path | None = None,
    tell: Callable[[int, int, str], None],
) -> Fit:
    """Train a method (IFCA from the start `init`) and test it.

    `tell` hears of every round: number, rounds in all, what there is to say.
    """
    trial = _Trial(method, init, settings, _trained_on(method, settings, data, seed), model, seed)

    def watch(done: Round) -> None:
        tell(done.round, settings.rounds, _note(done))

    finished = trial.engine.run(
        [trial.program], checkpoint=checkpoint, every=_CHECKPOINT_SECONDS, state_type=trial.state_type, watch=watch
    )
    state, rounds = finished.states[0], finished.rounds
    seconds = [r.seconds - r.info.get("test_seconds", 0.0) for r in rounds if "loss" in r.info]
    curve = [(r.info["rounds_done"], r.info["accuracy"]) for r in rounds if "accuracy" in r.info]
    score = Score(trial.accuracy(state), trial.adjusted_rand(state), statistics.mean(seconds), curve)
    return Fit(method, init, state, trial.models(state), rounds, score)


def _trained_on(method: str, settings: Settings, data: Rotated, seed: int) -> Rotated:
    """Keep a sample of the clients for local models where not everybody takes part in a round."""
    if method != "local" or settings.participation == 1:
        return data
    ids = Sampled(settings.participation).choose(0, data.train.keys, seed).asked
    return replace(data, train=data.train.only(ids.numpy()), truth=data.truth[ids])


class _Trial:
    """What the three methods do differently."""

    def __init__(
        self, method: str, init: str | None, settings: Settings, data: Rotated, model: Model, seed: int
    ) -> None:
        self.method, self.init, self.settings, self.data, self.model, self.seed = (
            method,
            init,
            settings,
            data,
            model,
            seed,
        )
        share = 1.0 if method == "local" else settings.participation
        self.engine = InProcess(data.train, participation=Sampled(share), seed=seed)
        self.state_type = {"ifca": ifca.State, "global": fedavg.State, "local": fedavg.LocalState}[method]

    def program(self, saved: Any) -> Lockstep:
        """Start the method's algorithm, or go on with it; it is tested on the way if the settings say so."""
        s = self.settings
        common: dict[str, Any] = {"model": self.model, "rounds": s.rounds, "step_size": s.step_size}
        common |= {"seed": self.seed, "training": s.training, "decay": s.decay}
        algorithm: Lockstep
        if self.method == "global":
            algorithm = fedavg.fedavg(saved, weighting="clients", **common)
        elif self.method == "local":
            algorithm = fedavg.local_models(saved, **common)
        else:
            assert self.init is not None
            common |= {"start": s.start(self.init), "patience": s.patience(self.init)}
            algorithm = ifca.ifca(saved, n_clusters=len(set(self.data.truth.tolist())), **common)
        return seen(algorithm, self._tested)

    def _tested(self, save: Save) -> tuple[Save, bool]:
        """Add the test accuracy to every so many saves."""
        done, every = save.state.round, self.settings.evaluate_every
        if not every or not done or done % every:
            return save, True
        begin = time.perf_counter()
        found = {"accuracy": self.accuracy(save.state), "rounds_done": done}
        return replace(save, info={**save.info, **found, "test_seconds": time.perf_counter() - begin}), True

    def models(self, state: Any) -> Tensor:
        """[K, P] whatever the method trained."""
        if self.method == "local":
            return self.engine.worker.private[0]["theta"]
        theta: Tensor = state.theta
        return theta if self.method == "ifca" else theta[None]

    def accuracy(self, state: Any) -> float:
        """Test it."""
        theta, test = self.models(state), self.data.test
        if self.method == "local":
            return _own_rotation_accuracy(self.model, theta, self.data)
        label = placed(self.model, theta, test).label
        return measured_models(self.model, theta, label, test).mean_metric

    def adjusted_rand(self, state: Any) -> float | None:
        """Compare the training clients' choice with the truth, where they had one."""
        if self.method != "ifca":
            return None
        return adjusted_rand(placed(self.model, state.theta, self.data.train).label, self.data.truth)


def _own_rotation_accuracy(model: Model, theta: Tensor, data: Rotated) -> float:
    """Test every client's own model [M, P] on all test rows of its rotation, and average over models."""
    accuracy = torch.empty(len(theta), dtype=torch.float64)
    for rotation in set(data.truth.tolist()):
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
