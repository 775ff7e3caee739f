# SPDX-License-Identifier: Apache-2.0
"""Disjoint parts of every client's rows, for algorithms that take fresh rows in every round."""

import torch

from coterie import keys
from coterie.protocol import Block

__all__ = ["part_of"]


def part_of(data: Block, key: torch.Tensor, part: int, parts: int) -> Block:
    """Keep one of several disjoint parts of every client's rows, whose sizes differ by one row at most.

    Parameters
    ----------
    data : Block
        Rows of C clients.
    key : Tensor
        [] what rows are shuffled by, together with the clients' own keys: parts of the same key are disjoint.
    part, parts : int
        Which one, from 0, of how many. A client with fewer rows than there are parts has none in the last ones.
    """
    shuffled = keys.permuted(keys.key(key, data.keys), data.real)  # [C, N] row numbers, padding last
    n_rows = data.x.shape[1]
    place = torch.arange(min(part, n_rows), n_rows, parts)  # of the part's rows among the shuffled
    real = place < data.n[:, None]  # [C, n]
    client = torch.arange(len(data.n))[:, None]
    rows = shuffled[:, place]
    x = data.x[client, rows]
    x = x * real.view(*real.shape, *(1,) * (x.dim() - 2)).to(x.dtype)
    y = None if data.y is None else data.y[client, rows]
    return Block(data.ids, data.keys, x, y, real.sum(1), None if bool(real.all()) else real)
