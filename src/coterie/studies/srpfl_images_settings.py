# SPDX-License-Identifier: Apache-2.0
"""What the study of stragglers on images is made of: how it is run, clients with few classes, and their models.

Tziotis et al., "Straggler-Resilient Personalized Federated Learning", Section 5 and Appendix C; the preset `authors` has the
settings of the scripts that they published, where those say something else (`docs/studies.md` tells what is not copied).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError
from coterie.local import Training
from coterie.models import Model, Network, mlp
from coterie.participation import DynamicExponential, Exponential, Sampled, Speeds, VirtualClock
from coterie.studies.common import at_least, one_of
from coterie.studies.data import images
from coterie.studies.data.augment import flip_and_crop
from coterie.studies.data.handwriting import emnist, femnist
from coterie.studies.data.holdings import Partition, image_clients
from coterie.studies.data.images import Images, only_classes
from coterie.studies.data.partitions import shards

__all__ = ["DATASETS", "METHODS", "PRESETS", "SPEEDS", "Settings", "clients", "model", "settings"]

METHODS = ("srpfl", "fedrep", "lg-srpfl", "lg-fedavg", "flanp", "flanp-ft", "fedavg", "fedavg-ft", "hf-maml")
SPEEDS: dict[str, Speeds] = {"fixed": Exponential(), "dynamic": DynamicExponential()}
PRESETS = ("paper", "authors")
_CLASSES = 10
_SMALL_A = 36  # of FEMNIST's 62 classes, after ten digits and 26 capitals


def _letters() -> Images:
    """EMNIST's letters a to j, the first ten classes of its split `letters`."""
    return only_classes(emnist("letters"), range(_CLASSES))


def _small_letters() -> Images:
    """FEMNIST's small letters a to j."""
    return only_classes(femnist(), range(_SMALL_A, _SMALL_A + _CLASSES))


DATASETS: dict[str, Callable[[], Images]] = {
    "mnist": images.mnist,
    "fashion": images.fashion_mnist,
    "cifar": images.cifar10,
    "emnist": _letters,
    "femnist": _small_letters,
}


@dataclass(frozen=True)
class Settings:
    """How the study is run.

    Attributes
    ----------
    dataset : {"mnist", "fashion", "cifar", "emnist", "femnist"}
        Whose images.
    shards, clients, rows : int
        Classes of a client, M, and training images of each client; test images are as many as there are for everybody.
    scaled : bool
        Whether grey pixels are centred and scaled, as colours always are; otherwise they are between 0 and 1.
    channels : int or None
        Of both convolutions; None is a perceptron.
    hidden : tuple of int
        Hidden units, of the layers after the convolutions where there are any.
    rounds, step_size, batch_size : int, float, int
        Of all methods. The paper's figures show 288 (CIFAR-10: 380) units of time, in which 55 (73) rounds wait for the
        slowest of 100 clients.
    until : {"time", "rounds"}
        Whether methods with stages are given the time of the method that they are stages around, or its rounds.
    momentum : float
        Of FedRep's steps and of fine-tuning; other methods have none. It begins anew with every turn of head or
        representation.
    epochs, head_epochs, tune_epochs : int
        Passes over its images that a client makes in a round, with a representation or a whole model, and with a head; and
        before it is judged, where it has no model of its own.
    interleaved : bool
        Whether FedRep's passes with the head come before each pass with the representation, and not once before all.
    meta_step_size : float or None
        beta of HF-MAML, whose inner step alpha is `step_size`; None is the same.
    tuning : {"model", "head"}
        What is fine-tuned before a client is judged: the whole model, or the last layer, and for HF-MAML the one step on one
        batch that it trains for.
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
    scaled: bool = False
    channels: int | None = None
    hidden: tuple[int, ...] = (512, 256, 64)
    rounds: int = 55
    step_size: float = 0.01
    batch_size: int = 10
    until: str = "time"
    momentum: float = 0.0
    epochs: int = 5
    head_epochs: int = 10
    tune_epochs: int = 5
    interleaved: bool = False
    meta_step_size: float | None = None
    tuning: str = "model"
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
        one_of("until", self.until, ("time", "rounds"))
        one_of("tuning", self.tuning, ("model", "head"))
        for method in self.methods:
            one_of("--methods", method, METHODS)
        at_least(1, clients=self.clients, rounds=self.rounds, epochs=self.epochs, head_epochs=self.head_epochs)
        at_least(1, batch_size=self.batch_size, tune_epochs=self.tune_epochs)
        at_least(1, first=self.first, stage_rounds=self.stage_rounds, evaluate_every=self.evaluate_every)
        at_least(1, seeds=self.seeds, jobs=self.jobs)
        at_least(0, communication=self.communication)
        if not self.step_size > 0:
            raise ConfigError(f"--step-size is {self.step_size}", "give a number above 0")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum is {self.momentum}", "give at least 0 and less than 1")
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

    def passes(self, epochs: int, momentum: float = 0.0) -> Training:
        """Make so many passes over a client's images, in batches."""
        return Training(epochs=epochs, batch_size=self.batch_size, momentum=momentum)


def settings(dataset: str, *, preset: str = "paper", quick: bool = False) -> Settings:
    """Give a data set's settings; with `quick`, fewer clients, images, units and rounds, and longer steps."""
    one_of("--preset", preset, PRESETS)
    made = Settings(dataset, shards=3 if dataset == "femnist" else 5)
    if dataset == "cifar":
        made = replace(made, channels=64, hidden=(120, 64), epochs=1, head_epochs=1, rounds=73)
    if preset == "authors":
        made = _as_in_the_scripts(made)
    if not quick:
        return made
    fewer = replace(
        made, clients=50, rows=60, rounds=40, step_size=0.03, evaluate_every=4, seeds=1
    )  # stages of 5, 10, ... 40, 50
    if dataset == "cifar":
        return replace(fewer, channels=8, hidden=(32, 16), rounds=20)
    return replace(fewer, hidden=(128, 64, 32), epochs=3, head_epochs=6, tune_epochs=3)


def _as_in_the_scripts(made: Settings) -> Settings:
    """Take the settings of github.com/shenzebang/SRPFL, folder experiments, and the defaults of its utils/options.py.

    The scripts deal all images of EMNIST, 480 to a client, and 135 of FEMNIST; they have none for MNIST and Fashion-MNIST,
    whose clients have 150 as ever.
    """
    rows = {"emnist": 480, "femnist": 135, "cifar": 500}
    return replace(
        made, rows=rows.get(made.dataset, made.rows), scaled=made.dataset != "femnist", rounds=150, until="rounds",
        seeds=4, first=10, stage_rounds=10, momentum=0.5, head_epochs=10, interleaved=True, meta_step_size=0.1,
        tune_epochs=10, tuning="head", evaluate_every=10,
    )  # fmt: skip


@lru_cache(1)
def clients(dataset: str, n_clients: int, classes: int, rows: int, seed: int, *, scaled: bool = False) -> Partition:
    """Deal a data set's images to clients with few classes each, test images to match; read once in a process."""
    found = DATASETS[dataset]()
    held = shards(
        found.y_train, n_clients=n_clients, classes_per_client=classes, rows_per_client=rows, y_test=found.y_test,
        seed=seed,
    )  # fmt: skip
    grey = found.x_train.ndim == 3
    dealt = image_clients(found, held, flat=grey)
    if grey and not scaled:  # grey images are used as they are (Appendix C)
        return dealt
    assert isinstance(dealt.train.x, Tensor)
    x = dealt.train.x
    over = (0, 1) if grey else (0, 2, 3)
    mean, std = x.mean(over, keepdim=True), x.std(over, keepdim=True)  # [1, 1] or [1, Ch, 1, 1]

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
