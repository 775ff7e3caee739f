# SPDX-License-Identifier: Apache-2.0
"""What clients say about mixtures: how likely their rows are, and which component each row comes from."""

from typing import Any

import torch
from torch import Tensor

from coterie.models.families import Family, expect
from coterie.protocol import Ask, Block, Stack, Tensors, answers

__all__ = ["judge", "judge_ask", "responsibilities"]


def judge_ask(family: Family, theta: Tensor, weights: Tensor, scale: Tensor) -> Ask:
    """Ask every client for the mean log-likelihood of its rows, under its own mixture.

    Parameters
    ----------
    theta, weights : Tensor
        [M, R, P], [M, R]
    scale : Tensor
        [M | 1, ...]
    """
    each = {"theta": theta, "weights": weights, "scale": scale.expand(len(theta), *scale.shape[1:])}
    fold = {"likelihood": Stack(), "n": Stack()}
    return Ask(judge, {"family": family}, fold, each=each, to=torch.arange(len(theta)), scratch=4 * theta.shape[1])


def responsibilities(family: Family, theta: Tensor, weights: Tensor, scale: Tensor, data: Block) -> Tensor:
    """Probability of every component for every row of a block, each client with its own mixture.  [C, N, R]"""
    ids = data.ids if len(scale) > 1 else torch.zeros(1, dtype=torch.int64)
    density = family.log_density(theta[None, data.ids], scale[None, ids], data)
    return expect(density, weights[None, data.ids], data)[0][0]


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(likelihood=Stack(), n=Stack())
def judge(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Mean log-likelihood of a client's rows."""
    density = shared["family"].log_density(each["theta"], each["scale"], data)
    _, likelihood = expect(density, each["weights"], data)
    return {"likelihood": likelihood, "n": data.n.expand(len(likelihood), -1)}, {}
