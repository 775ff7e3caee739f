# SPDX-License-Identifier: Apache-2.0
"""What a rotated study is made of: its data set and model (a task), and how it is run (settings)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coterie.algorithms.starts import Start
from coterie.errors import ConfigError
from coterie.local import Training
from coterie.models import Model
from coterie.studies.common import at_least, one_of
from coterie.studies.data.images import Images, Rotated

__all__ = ["INITS", "METHODS", "Settings", "Task"]

METHODS = ("ifca", "global", "local")
INITS = ("spread", "random", "balanced")
KERNELS = ("measured", "vmap", "loop")


@dataclass(frozen=True)
class Settings:
    """How a rotated study is run.

    Attributes
    ----------
    clients, rows : int
        m clients with n images each.
    rounds, step_size, decay : int, float, float
        T, gamma, and what gamma is multiplied by every round.
    local_steps, batch_size : int, int or None
        tau: full-batch steps, or passes in batches of this size.
    participation : float
        Share of the clients that take part in a round. Local models are trained for one sample of that size, every round.
    test_clients, test_rows : int or None
        Test clients and their images: as many as there are, and as many as training clients have, when None.
    hidden : int or None
        Hidden units, of tasks with a perceptron.
    pixels : str
        How pixels are prepared, of what the task offers; "raw" are between 0 and 1.
    init, candidates, start_steps : tuple of str, int, int
        IFCA's starts, one run each; clients that "spread" tries for each model, and the local steps (or passes) of each
        trial.
    methods : tuple of str
        Of ifca, global, local.
    seed, seeds : int
        Repetition i has the seed `seed` + i: another dealing of the images, other starts.
    evaluate_every : int
        Rounds between two test accuracies; 0 tests at the end only.
    kernel : {"measured", "vmap", "loop"}
        How convolutions of many clients are trained; "measured" takes what is faster here, and what it takes changes
        results by rounding.
    """

    clients: int
    rows: int
    rounds: int
    step_size: float
    local_steps: int
    batch_size: int | None = None
    decay: float = 1.0
    participation: float = 1.0
    test_clients: int | None = None
    test_rows: int | None = None
    hidden: int | None = None
    pixels: str = "raw"
    init: tuple[str, ...] = ("spread",)
    candidates: int = 5
    start_steps: int = 50
    methods: tuple[str, ...] = METHODS
    seed: int = 0
    seeds: int = 1
    evaluate_every: int = 0
    kernel: str = "measured"

    def __post_init__(self) -> None:
        at_least(1, rows=self.rows, rounds=self.rounds, local_steps=self.local_steps, seeds=self.seeds)
        at_least(1, batch_size=self.batch_size, test_rows=self.test_rows, hidden=self.hidden)
        at_least(0, evaluate_every=self.evaluate_every)
        for init in self.init:
            one_of("--init", init, INITS)
        one_of("--kernel", self.kernel, KERNELS)
        if not 0 < self.participation <= 1 or not 0 < self.decay <= 1 or not self.step_size > 0:
            raise ConfigError(
                f"step size {self.step_size}, decay {self.decay}, participation {self.participation} do not train",
                "give a positive --step-size, and shares above 0 and at most 1",
            )

    @property
    def training(self) -> Training:
        """What a client does in a round."""
        return self._passes(self.local_steps)

    @property
    def trained(self) -> list[tuple[str, str | None]]:
        """What is trained: each method, and IFCA from each of its starts."""
        return [(method, init) for method in self.methods for init in (self.init if method == "ifca" else (None,))]

    def start(self, init: str) -> Start:
        """Where IFCA begins."""
        kind: Any = init
        return Start(kind, candidates=self.candidates, fit=self._passes(self.start_steps), step_size=self.step_size)

    @staticmethod
    def patience(init: str) -> int:
        """Rounds until IFCA reseeds an empty cluster: never with the starts of the paper, which does not."""
        return 5 if init == "spread" else 0

    def _passes(self, count: int) -> Training:
        if self.batch_size is None:
            return Training(steps=count)
        return Training(epochs=count, batch_size=self.batch_size)


@dataclass(frozen=True)
class Task:
    """A data set and its model.

    Attributes
    ----------
    name : str
        Of the study.
    images : callable
        Read the images, given the seed.
    angles : tuple of int
        One cluster each.
    model : callable
        Make the model for some data.
    paper : mapping
        Images per client -> method -> the paper's mean and standard deviation.
    flat : bool
        Whether an image is a vector.
    pixels : mapping
        Ways to prepare pixels -> what is applied to all images, which are between 0 and 1; None leaves them so.
    """

    name: str
    images: Callable[[int], Images]
    angles: tuple[int, ...]
    model: Callable[[Settings, Rotated], Model]
    paper: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    flat: bool = True
    pixels: Mapping[str, Callable[[Tensor], Tensor] | None] = field(default_factory=lambda: {"raw": None})
