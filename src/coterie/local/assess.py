# SPDX-License-Identifier: Apache-2.0
"""How well do given models serve each client? Shared by every algorithm that lets clients choose."""

import torch
from torch import Tensor

from coterie.models import Model, row_loss
from coterie.protocol import Block

__all__ = ["chosen", "client_losses", "outputs", "own_outputs", "worst_if_nan"]


def outputs(model: Model, theta: Tensor, data: Block) -> Tensor:
    """Every model of every run on every row.  theta [S, K, P] -> [S, K, C, N, O]"""
    flat = model.outputs(theta.flatten(0, 1), data.x.flatten(0, 1))
    return flat.view(*theta.shape[:2], *data.x.shape[:2], flat.shape[-1])


def client_losses(model: Model, scores: Tensor, data: Block) -> Tensor:
    """Mean loss of every client under every model, from the outputs; never NaN.  [..., C, N, O] -> [..., C]"""
    return worst_if_nan(torch.einsum("...cn,cn->...c", row_loss(model.loss, scores, data.target), data.weights))


def worst_if_nan(loss: Tensor) -> Tensor:
    """Make losses that are no numbers infinite: whoever takes the smallest never takes a model that diverged."""
    return loss.nan_to_num(nan=torch.inf, posinf=torch.inf)


def own_outputs(model: Model, theta: Tensor, data: Block) -> Tensor:
    """Every client's own model of every run on its own rows.  theta [S, C, P] -> [S, C, N, O]"""
    return torch.stack([model.own_outputs(vectors, data.x) for vectors in theta])


def chosen(per_model: Tensor, label: Tensor) -> Tensor:
    """Pick each client's own model's entry.  [S, K, C, ...], label [S, C] -> [S, C, ...]"""
    s = torch.arange(len(label))[:, None]
    c = torch.arange(label.shape[1])[None]
    return per_model[s, label, c]
