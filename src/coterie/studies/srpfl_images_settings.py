# SPDX-License-Identifier: Apache-2.0
"""What the study of stragglers on images is made of: how it is run, clients with few classes, and their models.

Tziotis et al., "Straggler-Resilient Personalized Federated Learning", Section 5 and Appendix C.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from coterie.data import images
from coterie.data.augment import flip_and_crop
from coterie.data.holdings import Partition, image_clients
from coterie.data.images import Images
from coterie.data.partitions import shards
from coterie.errors import ConfigError
from coterie.local import Training
from coterie.models import Model, Network, mlp
from coterie.participation import DynamicExponential, Exponential, Sampled, Speeds, VirtualClock
from coterie.studies.common import at_least, one_of

__all__ = ["DATASETS", "METHODS", "SPEEDS", "Settings", "clients", "model", "settings"]

METHODS = ("srpfl", "fedrep", "lg-srpfl", "lg-fedavg", "flanp", "flanp-ft", "fedavg", "fedavg-ft", "hf-maml")
SPEEDS: dict[str, Speeds] = {"fixed": Exponential(), "dynamic": DynamicExponential()}
DATASETS: dict[str, Callable[[], Images]] = {
    "mnist": images.mnist,
    "fashion": images.fashion_mnist,
    "cifar": images.cifar10,
}
_CLASSES = 10


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    dataset : {"mnist", "fashion", "cifar"}
        Whose images.
    shards, clients, rows : int
        Classes of a client, M, and training images of each client; test images are as many as there are for everybody.
    channels : int or None
        Of both convolutions; None is a perceptron.
    hidden : tuple of int
        Hidden units, of the layers after the convolutions where there are any.
    rounds, step_size, batch_size : int, float, int
        Of all methods. The paper's figures show 288 (CIFAR-10: 380) units of time, in which 55 (73) rounds wait for the
        slowest of 100 clients. Methods with stages are given time and not rounds.
    epochs, head_epochs, tune_epochs : int
        Passes over its images that a client makes in a round, with a representation or a whole model, and with a head; and
        before it is judged, where it has no model of its own.
    first, stage_rounds : int
        n_0 and tau_r: clients of the first stage, and rounds of every stage.
    speeds : {"fixed", "dynamic"}
        Whether clients' times are drawn once or every round.
    participation, communication : float
        Share of the clients that are drawn for a round, N / M, and virtual seconds of every exchange.
    evaluate_every : int
        Rounds between two test accuracies; the last round is always tested.
    methods : tuple of str
        Of `METHODS`. FedRep (for LG-SRPFL: LG-FedAvg) is run in any case: its final accuracy is the others' target.
    curves : bool
        Whether rows say the accuracy by virtual time.
    seed, seeds, jobs : int
        First seed, how many, and processes.
    """

    dataset: str = "mnist"
    shards: int = 5
    clients: int = 100
    rows: int = 150
    channels: int | None = None
    hidden: tuple[int, ...] = (512, 256, 64)
    rounds: int = 55
    step_size: float = 0.01
    batch_size: int = 10
    epochs: int = 5
    head_epochs: int = 10
    tune_epochs: int = 5
    first: int = 5
    stage_rounds: int = 10
    speeds: str = "fixed"
    participation: float = 1.0
    communication: float = 0.0
    evaluate_every: int = 5
    methods: tuple[str, ...] = METHODS
    curves: bool = False
    seed: int = 0
    seeds: int = 1
    jobs: int | None = None

    def __post_init__(self) -> None:
        one_of("--dataset", self.dataset, tuple(DATASETS))
        one_of("--speeds", self.speeds, tuple(SPEEDS))
        for method in self.methods:
            one_of("--methods", method, METHODS)
        at_least(1, clients=self.clients, rounds=self.rounds, epochs=self.epochs, head_epochs=self.head_epochs)
        at_least(1, batch_size=self.batch_size, tune_epochs=self.tune_epochs)
        at_least(1, first=self.first, stage_rounds=self.stage_rounds, evaluate_every=self.evaluate_every)
        at_least(1, seeds=self.seeds, jobs=self.jobs)
        at_least(0, communication=self.communication)
        if not self.step_size > 0:
            raise ConfigError(f"--step-size is {self.step_size}", "give a number above 0")
        if not 0 < self.participation <= 1:
            raise ConfigError(f"--participation is {self.participation}", "give a share above 0 and at most 1")
        if self.first > self.drawn:
            raise ConfigError(
                f"--first is {self.first}, and {self.drawn} clients are drawn for a round", "begin with at most so many"
            )

    @property
    def drawn(self) -> int:
        """N, clients that are drawn for a round."""
        return max(1, round(self.participation * self.clients))

    @property
    def sample(self) -> Sampled:
        """Who is drawn."""
        return Sampled(number=self.drawn)

    @property
    def clock(self) -> VirtualClock:
        """A client takes T_i for a round's passes through the whole model: HF-MAML's four gradients cost 4 T_i."""
        return VirtualClock(SPEEDS[self.speeds], self.communication, unit=self.epochs)

    def passes(self, epochs: int) -> Training:
        """Make so many passes over a client's images, in batches."""
        return Training(epochs=epochs, batch_size=self.batch_size)


def settings(dataset: str, *, quick: bool = False) -> Settings:
    """Give a data set's settings; with `quick`, fewer clients, images, units and rounds, and longer steps."""
    made = Settings(dataset)
    if dataset == "cifar":
        made = replace(made, channels=64, hidden=(120, 64), epochs=1, head_epochs=1, rounds=73)
    if not quick:
        return made
    fewer = replace(
        made, clients=50, rows=60, rounds=40, step_size=0.03, evaluate_every=4
    )  # stages of 5, 10, ... 40, 50
    if dataset == "cifar":
        return replace(fewer, channels=8, hidden=(32, 16), rounds=20)
    return replace(fewer, hidden=(128, 64, 32), epochs=3, head_epochs=6, tune_epochs=3)


@lru_cache(1)
def clients(dataset: str, n_clients: int, classes: int, rows: int, seed: int) -> Partition:
    """Deal a data set's images to clients with few classes each, test images to match; read once in a process."""
    found = DATASETS[dataset]()
    held = shards(
        found.y_train, n_clients=n_clients, classes_per_client=classes, rows_per_client=rows, y_test=found.y_test,
        seed=seed,
    )  # fmt: skip
    dealt = image_clients(found, held, flat=found.x_train.ndim == 3)
    if found.x_train.ndim == 3:  # grey images are used as they are (Appendix C)
        return dealt
    assert isinstance(dealt.train.x, Tensor)
    x = dealt.train.x
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)  # [1, Ch, 1, 1]

    def standardised(pixels: Tensor) -> Tensor:
        return (pixels - mean) / std

    return Partition(dealt.train.changed(standardised), dealt.test.changed(standardised))


def model(chosen: Settings, shape: tuple[int, ...]) -> Model:
    """Make the model for rows of this shape: a perceptron for vectors, LeNet-5 for pictures."""
    if chosen.channels is None:
        return mlp(shape[0], *chosen.hidden, n_outputs=_CLASSES)
    depth, side, _ = shape
    side = ((side - 4) // 2 - 4) // 2  # what two unpadded convolutions and poolings leave
    layers: list[nn.Module] = []
    for before in (depth, chosen.channels):
        layers += [nn.Conv2d(before, chosen.channels, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    sizes = (chosen.channels * side**2, *chosen.hidden)
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(sizes[-1], _CLASSES))
    return Network(module.to(torch.float32), "cross_entropy", augment=flip_and_crop)
