# SPDX-License-Identifier: Apache-2.0
"""The data sets of the rotated studies: MNIST and CIFAR-10 as in Table 1, and scikit-learn's digits for the demo.

MNIST: pixels are between 0 and 1, as in the authors' code. "standardised" takes the usual mean and deviation (0.1307 and
0.3081), a departure.

CIFAR-10: images are standardised one by one and there are 600 rounds, as in the authors' code. Departures: gamma, which the
paper does not give, is 0.1 (the authors: 0.25, for another network of two convolutions and two dense layers); images keep
their 32 x 32 pixels (the authors cut 24 x 24), padded with zeros and cut at random; brightness and contrast are left as
they are.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.models import Model, lenet, mlp
from coterie.studies.data import images
from coterie.studies.data.augment import flip_and_crop
from coterie.studies.data.images import Rotated
from coterie.studies.rotated_settings import Settings, Task

__all__ = [
    "CIFAR", "CIFAR_PAPER", "CIFAR_QUICK", "DIGITS", "DIGITS_DEMO", "DIGITS_QUICK", "MNIST", "MNIST_PAPER", "MNIST_QUICK",
    "MNIST_TABLE", "mnist_step_size",
]  # fmt: skip


def _perceptron(settings: Settings, data: Rotated) -> Model:
    assert settings.hidden is not None
    return mlp(data.train.shape[0], settings.hidden, n_outputs=10)


def _convolutions(settings: Settings, data: Rotated) -> Model:
    channels, size, _ = data.train.shape
    made = replace(lenet(channels, size, 10, flat=False), augment=flip_and_crop)
    kernel: Any = settings.kernel
    if kernel != "measured":
        return replace(made, kernel=kernel)
    block = next(data.train.blocks(torch.arange(min(4, data.train.n_clients))))
    some = slice(0, settings.batch_size or block.x.shape[1])
    return made.measured(block.x[:, some], block.target[:, some])


def _usual_pixels(x: Tensor) -> Tensor:
    """Standardise MNIST's pixels by the constants that everybody uses."""
    return (x - 0.1307) / 0.3081


def _standardised(x: Tensor) -> Tensor:
    """Give every picture mean 0 and variance 1.  [N, Ch, H, W]"""
    mean, std = x.mean((1, 2, 3), keepdim=True), x.std((1, 2, 3), keepdim=True)
    return (x - mean) / std.clamp(min=1e-3)


Pair = tuple[float, float]


def _table(ifca: Pair, global_: Pair, local: Pair) -> dict[str, Pair]:
    """Name a column of Table 1: mean and standard deviation of each method."""
    return {"ifca": ifca, "global": global_, "local": local}


# -- rotated MNIST ----------------------------------------------------------------------------------------------------
MNIST = Task(
    "ifca-rotated-mnist",
    lambda seed: images.mnist(),
    (0, 90, 180, 270),
    _perceptron,
    {
        50: _table((0.9420, 0.0003), (0.8674, 0.0004), (0.6332, 0.0002)),
        100: _table((0.9505, 0.0002), (0.8865, 0.0008), (0.7366, 0.0004)),
        200: _table((0.9525, 0.0040), (0.8973, 0.0013), (0.8005, 0.0002)),
    },
    pixels={"raw": None, "standardised": _usual_pixels},
)
MNIST_PAPER = Settings(clients=1200, rows=200, rounds=300, step_size=0.1, local_steps=10, hidden=200)
MNIST_TABLE = ((4800, 50), (2400, 100), (1200, 200))
MNIST_QUICK = replace(MNIST_PAPER, clients=80, rows=100, rounds=5, test_clients=40)


def mnist_step_size(rounds: int) -> float:
    """Give the step size for so many rounds: the paper's 0.1 for its 300; fewer rounds take longer steps, up to 0.5.

    Step size times rounds stays that of the paper as long as that is stable: steps of 1 diverge.
    """
    return min(0.5, MNIST_PAPER.step_size * max(1.0, MNIST_PAPER.rounds / rounds))


# -- rotated digits, the demo -----------------------------------------------------------------------------------------
DIGITS = Task("ifca-rotated-digits", images.digits, (0, 90, 180, 270), _perceptron)
DIGITS_DEMO = Settings(
    clients=144, rows=39, rounds=50, step_size=0.3, local_steps=10, test_clients=144, test_rows=9, hidden=128
)
DIGITS_QUICK = replace(DIGITS_DEMO, rounds=20)

# -- rotated CIFAR-10 -------------------------------------------------------------------------------------------------
CIFAR = Task(
    "ifca-rotated-cifar",
    lambda seed: images.cifar10(),
    (0, 180),
    _convolutions,
    {500: _table((0.8151, 0.0137), (0.7787, 0.0039), (0.3397, 0.0119))},
    flat=False,
    pixels={"standardised": _standardised},
)
CIFAR_PAPER = Settings(
    clients=200,
    rows=500,
    rounds=600,
    step_size=0.1,
    local_steps=5,
    batch_size=50,
    decay=0.99,
    participation=0.1,
    pixels="standardised",
    candidates=3,
    start_steps=5,
)
CIFAR_QUICK = replace(CIFAR_PAPER, clients=8, rows=100, rounds=2, participation=0.5, test_clients=4, start_steps=2)
