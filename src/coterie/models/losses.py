# SPDX-License-Identifier: Apache-2.0
"""Losses: squared error for numbers, cross-entropy for classes, minus the log-likelihood for other outcomes."""

from typing import Literal

import torch
from torch import Tensor

from coterie.models.outcomes import outcome_of

__all__ = ["Loss", "decided", "loss_gradient", "row_loss", "row_metric", "weighted"]

Loss = Literal[
    "squared", "cross_entropy", "poisson", "negative-binomial", "gamma", "log-normal", "ordinal", "cox", "cox-breslow"
]


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
    if loss != "cross_entropy":
        return outcome_of(loss).loss(outputs, y)
    chosen = outputs.gather(-1, y.expand(outputs.shape[:-1])[..., None]).squeeze(-1)
    return outputs.logsumexp(-1) - chosen


def row_metric(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Squared error of every row, or whether it is predicted right.  outputs [..., O], y [...] -> [...]"""
    if loss == "squared":
        return row_loss(loss, outputs, y)
    if loss != "cross_entropy":
        return outcome_of(loss).hit(outputs, y)
    return (outputs.argmax(-1) == y).to(outputs.dtype)


def loss_gradient(loss: Loss, outputs: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Derivative of the weighted sum of row losses by the outputs.  [..., O]"""
    if loss == "squared":
        return (2 * (outputs.squeeze(-1) - y) * weights)[..., None]
    if loss != "cross_entropy":
        return outcome_of(loss).first(outputs, y) * weights[..., None]
    p = torch.softmax(outputs, -1)
    index = y.expand(outputs.shape[:-1])[..., None]
    p.scatter_add_(-1, index, p.new_full((), -1.0).expand(index.shape))
    return p.mul_(weights[..., None])
