# SPDX-License-Identifier: Apache-2.0
"""FedGrEM's decentralised update: every client has a centre of its own, that of its neighbours and itself.

Tian, Weng, Feng, ICML 2024, appendix D, after the idea of Algorithm 4 of Marfoq et al., NeurIPS 2021.

This simulates the decentralised algorithm. In the mathematics a client's estimate goes to its neighbours only. In the
messages here the server relays: it sees all estimates, computes each client's centre in that client's place, and tells it.

A question that carries what is each client's own must name whom it asks. So centres go to those who have just answered, in
a second question, and clients keep them: who misses a round comes back with the centre that it had, and who was never told
one, because it missed the start or all its neighbours were rejected, has that of everybody.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.central import central_weights
from coterie.models.families import Family
from coterie.protocol import Ask, Block, Replies, Save, Tensors, answers

__all__ = ["fresh_centre", "own_centre", "own_centres", "ring", "take_centre", "tell_centres"]


def ring(n_clients: int, k: int) -> Tensor:
    """Who hears whom: everyone itself, and the k next on either side by number.  [M, 2 k + 1], or [M, M] if these are all"""
    own = torch.arange(n_clients)
    if 2 * k + 1 >= n_clients:
        return own.expand(n_clients, -1)
    return ((own[:, None] + torch.arange(-k, k + 1)) % n_clients).sort(1).values


def own_centres(
    tilde: Tensor,
    at: Tensor,
    n: Tensor,
    part: Tensor,
    near: Tensor,
    lam: float,
    *,
    steps: int | None = None,
    sparse: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The central update of every client's neighbours, all clients at once.

    Parameters
    ----------
    tilde, at : Tensor
        [M, R, P] estimates, and the same in the coordinates that lengths are measured in.
    n, part : Tensor
        [M] rows, and who has a part in any centre.
    near : Tensor
        [M, J] whom each client hears.
    lam, steps, sparse
        As for `central_weights`.

    Returns
    -------
    Tensor, Tensor
        [M, R, P] centres, and [M] whether there is one: not where no neighbour has a part.
    """
    known = part[near].any(1)
    near = near[known].T  # [J, C]
    (j, c), (_, r, p) = near.shape, tilde.shape
    counts, around = part[near], at[near]  # [J, C], [J, C, R, P]
    begin = torch.where(counts[..., None, None], around, torch.nan).nanmedian(0).values
    rows = (n[near] * counts).repeat_interleave(r, 1)  # a client's component is one of C R problems
    weight = central_weights(around.reshape(j, c * r, p), rows, lam, begin.reshape(c * r, p), steps, sparse)
    centres = torch.zeros_like(tilde)
    centres[known] = (weight.view(j, c, r, p) * tilde[near]).sum(0)
    return centres, known


def tell_centres(
    ids: Tensor, tilde: Tensor, at: Tensor, n: Tensor, part: Tensor, lam: float, family: Family, k: int, **how: Any
) -> Generator[Ask | Save, Replies | None, None]:
    """Tell those who answered (ids) their own centres. The ring is of the clients that have been heard and have rows.

    tilde, at [M, R, P]; n, part [M]; `how` as for `own_centres`
    """
    there = (n > 0).nonzero()[:, 0]
    centres, known = torch.zeros_like(tilde), torch.zeros_like(part)
    centres[there], known[there] = own_centres(
        tilde[there], at[there], n[there], part[there], ring(len(there), k), lam, **how
    )
    to = ids[known[ids]]
    if len(to):
        fresh = fresh_centre(tilde.shape[1], family)
        yield Ask(take_centre, {}, fold={}, each={"centre": centres[to]}, to=to, fresh=fresh, work=0.0)


def fresh_centre(n_components: int, family: Family) -> Tensors:
    """Private state of a client that has not been told its own centre."""
    centre = torch.zeros(n_components, family.n_parameters, dtype=torch.float64)
    return {"centre": centre, "told": torch.tensor(False)}


def own_centre(private: Tensors, common: Tensor) -> Tensor:
    """The centre that a client is drawn to: its own, if it was told one.  common [..., 1, R, P] -> [..., 1 | C, R, P]"""
    return torch.where(private["told"][..., None, None], private["centre"], common) if "told" in private else common


# -- on the client ----------------------------------------------------------------------------------------------------
@answers()
def take_centre(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Keep the centre of the neighbours until there is a newer one."""
    return {}, {"centre": each["centre"], "told": torch.ones_like(private["told"])}
