# SPDX-License-Identifier: Apache-2.0
"""What the model that serves each client makes of its rows, whichever kind of model that is."""

from typing import Any

import torch
from torch import Tensor

from coterie.local.assess import chosen, outputs, own_outputs
from coterie.models import Model, Split, tail
from coterie.protocol import Block, Tensors

__all__ = ["mixed_outputs", "served", "split_outputs"]


def served(shared: dict[str, Any], private: Tensors, data: Block) -> Tensor:
    """Outputs of the model that serves each client.  -> [S, C, N, O]

    What a client is sent says which that is: models with `share`s, of which all clients get the mixture; a `split` model,
    whose personal part the client keeps; models `theta` of which the client keeps its label; else a model that is its own.
    """
    model = shared["model"]
    if "share" in shared:
        return mixed_outputs(model, outputs(model, shared["theta"], data), shared["share"])
    if "split" in shared:
        return split_outputs(model, shared["split"], shared["theta"], private["personal"], data)
    if "theta" in shared:
        return chosen(outputs(model, shared["theta"], data), private["placed"])
    return own_outputs(model, private["theta"], data)


def mixed_outputs(model: Model, scores: Tensor, share: Tensor) -> Tensor:
    """The mean prediction of K models, or the log of their mean probabilities.  [S, K, ..., O], [S, K] -> [S, ..., O]"""
    if share.shape[1] == 1:
        return scores[:, 0]
    share = share.to(scores.dtype)
    if model.loss == "squared":
        return torch.einsum("sk...,sk->s...", scores, share)
    return torch.einsum("sk...,sk->s...", scores.softmax(-1), share).clamp(min=torch.finfo(scores.dtype).tiny).log()


def split_outputs(model: Model, parts: Split, theta: Tensor, own: Tensor, data: Block) -> Tensor:
    """Outputs of every client's model; rows pass together through what all share, where that can be cut off.

    theta [S, Q], own [S, C, P - Q] -> [S, C, N, O]
    """
    head = tail(model, parts.moving("personal"))
    if head is not None:
        features = [head.features(vector[None], data.x) for vector in theta]
        return torch.stack([head.model.own_outputs(o, f) for o, f in zip(own, features, strict=True)])
    top = tail(model, parts.moving("shared"))
    if top is not None:
        rows = [top.features(o, data.x).flatten(0, 1) for o in own]
        flat = torch.stack([top.model.outputs(v[None], r)[0] for v, r in zip(theta, rows, strict=True)])
        return flat.view(len(own), *data.x.shape[:2], model.n_outputs)
    return own_outputs(model, parts.join(theta[:, None], own), data)
