# SPDX-License-Identifier: Apache-2.0
"""Models: a flat parameter vector, outputs on rows, and gradient descent for many clients at once."""

from coterie.models.dense import Dense, linear_regression, mlp, softmax_regression
from coterie.models.losses import Loss, decided, loss_gradient, row_loss, row_metric, weighted
from coterie.models.network import Network, lenet
from coterie.models.split import (
    Part,
    Split,
    Tail,
    first_layers,
    last_layers,
    layer_names,
    named_layers,
    split,
    tail,
)

__all__ = [
    "Dense",
    "Loss",
    "Model",
    "Network",
    "Part",
    "Split",
    "Tail",
    "decided",
    "first_layers",
    "last_layers",
    "layer_names",
    "lenet",
    "linear_regression",
    "loss_gradient",
    "mlp",
    "named_layers",
    "row_loss",
    "row_metric",
    "softmax_regression",
    "split",
    "tail",
    "weighted",
]

Model = Dense | Network
