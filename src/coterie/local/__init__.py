# SPDX-License-Identifier: Apache-2.0
"""Client work that several algorithms share, batched over runs and clients."""

from coterie.local.assess import chosen, client_losses, outputs, own_outputs, worst_if_nan
from coterie.local.row_space import training_moves
from coterie.local.served import served
from coterie.local.sgd import Training, train

__all__ = [
    "Training", "chosen", "client_losses", "outputs", "own_outputs", "served", "train", "training_moves", "worst_if_nan",
]  # fmt: skip
