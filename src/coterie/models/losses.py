# SPDX-License-Identifier: Apache-2.0
"""The two losses: squared error for numbers, cross-entropy for classes."""

from typing import Literal

import torch
from torch import Tensor

__all__ = ["Loss", "decided", "loss_gradient", "row_loss", "weighted"]

Loss = Literal["squared", "cross_entropy"]


def weighted(class_weights: tuple[float, ...], y: Tensor, weights: Tensor) -> Tensor:
    """Weights of rows, each times that of its class; where classes have none, as they are.  y, weights [...] -> [...]"""
    if not class_weights:
        return weights
    return weights * torch.tensor(class_weights, dtype=weights.dtype)[y]


def decided(outputs: Tensor, threshold: float) -> Tensor:
    """The class that is predicted: the likeliest; of two, the second from a probability on.  [..., O] -> [...]"""
    if outputs.shape[-1] != 2 or threshold == 0.5:
        return outputs.argmax(-1)
    return (outputs.softmax(-1)[..., 1] >= threshold).long()


def row_loss(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Loss of every row.  outputs [..., O], y [...] -> [...]"""
    if loss == "squared":
        return (outputs.squeeze(-1) - y) ** 2
    chosen = outputs.gather(-1, y.expand(outputs.shape[:-1])[..., None]).squeeze(-1)
    return outputs.logsumexp(-1) - chosen


def loss_gradient(loss: Loss, outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Derivative of the weighted sum of row losses by the outputs.  [..., O]"""
    if loss == "squared":
        return (2 * (outputs.squeeze(-1) - y) * weights)[..., None]
    p = torch.softmax(outputs, -1)
    index = y.expand(outputs.shape[:-1])[..., None]
    p.scatter_add_(-1, index, p.new_full((), -1.0).expand(index.shape))
    return p.mul_(weights[..., None])
