# SPDX-License-Identifier: Apache-2.0
"""Models: a flat parameter vector, outputs on rows, and gradient descent for many clients at once."""

from coterie.models.dense import Dense, linear_regression, mlp, softmax_regression
from coterie.models.losses import Loss, loss_gradient, row_loss
from coterie.models.network import Network, lenet

__all__ = [
    "Dense",
    "Loss",
    "Model",
    "Network",
    "lenet",
    "linear_regression",
    "loss_gradient",
    "mlp",
    "row_loss",
    "softmax_regression",
]

Model = Dense | Network
