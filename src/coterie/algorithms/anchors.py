# SPDX-License-Identifier: Apache-2.0
"""Anchors of moment descent: who they are, how their models become the clusters' models, and who is still badly served.

The paper draws ceil(3 K log K) clients with enough rows and joins those whose models end within Delta/2. With shares 0.2,
0.3 and 0.5 and 10 anchors, one seed in ten has no anchor in the smallest cluster; an anchor may not arrive; and Delta is
not known. So there are more anchors; their groups are cut from a tree when Delta does not give K of them; a group whose
model serves clients worse than another anchor's would gives way to it; and if many clients are badly served, the descent is
repeated with anchors drawn among those.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.starts import serve
from coterie.local import client_losses, outputs
from coterie.models import Dense
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors

__all__ = ["Anchors", "badly_served", "first_anchors", "group_anchors", "introduce", "swapped"]

Run = Generator[Ask | Save, Replies | None, Any]

_PER_CLUSTER = (
    10  # anchors, when their number is not given: a cluster with a share of 0.2 of 3 is missed once in 800 times
)
_ROWS_PER_CLUSTER = 10  # rows that make a client an anchor: the direction has K coordinates
_FAR = 4.0  # times the median loss: badly served
_MANY = 0.02  # share of clients: enough to look for another cluster
_GAP = 1.5  # ratio of heights in the anchors' tree that separates clusters


@dataclass(frozen=True)
class Anchors:
    """Which clients become anchors.

    Parameters
    ----------
    number : int, optional
        A; 10 K by default.
    min_rows : int, optional
        Rows that an anchor should have; 10 K by default. Where fewer than A clients have them, the largest others help out.
    further : bool
        Whether to repeat the descent with anchors among badly served clients, if there are many.
    swaps : bool
        Whether groups whose model serves clients worse than another anchor's would give way to it.
    """

    number: int | None = None
    min_rows: int | None = None
    further: bool = True
    swaps: bool = True


def first_anchors(how: Anchors, n_clusters: int, seed: int) -> Run:
    """Draw anchors among the clients with enough rows.  -> [A] client numbers"""
    got = yield Ask(introduce, {"key": keys.key(seed, "anchors")}, {"n": Stack(), "draw": Stack()})
    if got is None or got.n == 0:
        return torch.zeros(0, dtype=torch.int64)
    return _drawn(got.ids, got["n"], got["draw"], how, n_clusters)


def _drawn(ids: Tensor, n: Tensor, draw: Tensor, how: Anchors, n_clusters: int) -> Tensor:
    """Take those with enough rows by their draws, then the largest of the others."""
    number = how.number or _PER_CLUSTER * n_clusters
    least = how.min_rows or _ROWS_PER_CLUSTER * n_clusters
    rank = np.lexsort((draw.numpy(), -np.minimum(n.numpy(), least)))
    rank = rank[n.numpy()[rank] > 1]  # one row has no direction
    return ids[torch.from_numpy(rank[:number].copy())]


def badly_served(model: Dense, theta: Tensor, taken: Tensor, how: Anchors, n_clusters: int, seed: int) -> Run:
    """Draw further anchors among clients whose loss is far above the median, if these are many.  -> [A] client numbers"""
    nobody = taken[:0]
    base = torch.zeros(model.n_parameters, dtype=model.dtype)
    got = yield Ask(serve, {"model": model, "theta": theta, "base": base}, {"loss": Stack()}, scratch=len(theta))
    who = yield Ask(introduce, {"key": keys.key(seed, "further anchors")}, {"n": Stack(), "draw": Stack()})
    if got is None or who is None or got.n == 0 or not torch.equal(got.ids, who.ids):
        return nobody
    n = who["n"]
    mean = got["loss"] / n.clamp(min=1)
    solid = n >= max(2, min(3 * n_clusters, int(n.max())))  # a few rows have a large loss by chance
    typical = mean[solid].median() if bool(solid.any()) else mean.median()
    bad = solid & (mean > _FAR * typical) & ~torch.isin(got.ids, taken)
    if int(bad.sum()) < max(1.0, _MANY * int(solid.sum())):
        return nobody
    return _drawn(got.ids[bad], n[bad], who["draw"][bad], how, n_clusters)


# -- from anchors to clusters -----------------------------------------------------------------------------------------
def group_anchors(model: Dense, local: Tensor, n_clusters: int | None, delta: float, swaps: bool = True) -> Run:
    """Make K models of the anchors' [A, P].  -> theta [K, P], events

    Groups come from distances alone; then representatives that serve clients badly are replaced by other anchors.
    """
    group, how = _groups(local, n_clusters, delta)
    chosen = torch.tensor([_medoid(local, group == g) for g in range(int(group.max()) + 1)])
    wanted = len(chosen) if n_clusters is None else min(n_clusters, len(local))
    chosen = chosen[:wanted]
    replaced = 0
    if swaps:
        chosen, replaced = yield from _improved(model, local, chosen)
    said = f"{len(local)} anchors make {len(chosen)} cluster{'s' * (len(chosen) != 1)}: {how}"
    if replaced:
        said += f"; {replaced} replaced by anchors that serve clients better"
    return _centres(local, chosen, delta), [said]


def _groups(local: Tensor, n_clusters: int | None, delta: float) -> tuple[Tensor, str]:
    """Number every anchor's group.  [A]"""
    from scipy.cluster.hierarchy import fcluster, linkage  # here: only servers need it, and it is slow to load

    if len(local) == 1:
        return torch.zeros(1, dtype=torch.int64), "a single one"
    safe = local.nan_to_num(0.0, 0.0, 0.0).double().clamp(-1e100, 1e100)  # squares stay finite
    far = torch.cdist(safe, safe, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    distances = far[np.triu_indices(len(far), 1)]
    if delta > 0:
        near = fcluster(linkage(distances, "single"), delta / 2, "distance")
        if n_clusters is None or near.max() == n_clusters:
            return _numbered(near), "those within half of the given distance are one"
    tree = linkage(distances, "average")
    if n_clusters is not None:
        cut = fcluster(tree, n_clusters, "maxclust")
        return _numbered(cut), "their tree is cut at the number asked for"
    return _numbered(fcluster(tree, _gap_count(tree), "maxclust"), least=0.05), "their tree is cut at its largest gap"


def _gap_count(tree: np.ndarray) -> int:
    """Groups at the largest relative gap between successive joins; one group when there is no clear gap."""
    heights = tree[:, 2]
    ratios = heights[1:] / np.maximum(heights[:-1], 1e-300)
    half = len(ratios) // 2  # the lowest joins are of neighbours and say nothing
    if not len(ratios) or ratios[half:].max() < _GAP:
        return 1
    return int(len(heights) - (half + int(ratios[half:].argmax())))


def _numbered(labels: np.ndarray, least: float = 0.0) -> Tensor:
    """Number groups from zero, the largest first; members of groups that are too small get -1."""
    names, counts = np.unique(labels, return_counts=True)
    by_size = names[np.argsort(-counts, kind="stable")]
    kept = [name for name in by_size if (labels == name).sum() > least * len(labels) or name == by_size[0]]
    out = np.full(len(labels), -1)
    for number, name in enumerate(kept):
        out[labels == name] = number
    return torch.from_numpy(out)


def _medoid(local: Tensor, members: Tensor) -> int:
    """The member that is nearest to the others."""
    own = members.nonzero()[:, 0]
    return int(own[torch.cdist(local[own], local[own]).sum(1).argmin()])


def _improved(model: Dense, local: Tensor, chosen: Tensor) -> Run:
    """Exchange a representative for another anchor while that lowers everybody's loss by a hundredth.  -> chosen, swaps"""
    swaps = 0
    while swaps < 2 * len(chosen) and len(local) > len(chosen):
        got = yield Ask(
            swapped,
            {"model": model, "theta": local, "chosen": chosen},
            {"loss": Sum()},
            scratch=len(local) * (1 + len(chosen)),
        )
        if got is None or got.n == 0:
            break
        loss = got["loss"].nan_to_num(nan=math.inf)  # [K, A]
        now = float(loss[0, chosen[0]])
        k, a = divmod(int(loss.argmin()), len(local))
        if not float(loss[k, a]) < 0.99 * now:
            break
        chosen = chosen.clone()
        chosen[k] = a
        swaps += 1
    return chosen, swaps


def _centres(local: Tensor, chosen: Tensor, delta: float) -> Tensor:
    """Mean of the anchors near each representative: within half the distance to the next one.  [K, P]"""
    centres = local[chosen]
    if len(chosen) == 1:
        return local.median(0).values[None]
    between = torch.cdist(centres, centres) + torch.diag(torch.full((len(chosen),), math.inf, dtype=local.dtype))
    near, nearest = torch.cdist(local, centres).min(1)  # [A]
    near[chosen], nearest[chosen] = 0.0, torch.arange(len(chosen))  # however near to another, it stands for its own
    reach = between.min() / 2 if not delta else torch.tensor(delta / 2)
    return torch.stack([local[(nearest == k) & ((near <= reach) | (near == 0))].mean(0) for k in range(len(chosen))])


# -- on the client ----------------------------------------------------------------------------------------------------
def introduce(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say how many rows a client has, and its lot."""
    draw = keys.uniform(keys.key(shared["key"][:, None], data.keys), 1)[..., 0]  # [S, C]
    return {"n": data.n[None], "draw": draw}, {}


def swapped(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Total loss of a client if each anchor took the place of each representative.  -> [S, C, K, A]"""
    model, theta, chosen = shared["model"], shared["theta"], shared["chosen"]  # [S, A, P], [S, K]
    loss = client_losses(model, outputs(model, theta, data), data)  # [S, A, C]
    own = torch.take_along_dim(loss, chosen[..., None], 1)  # [S, K, C]
    out = []
    for k in range(chosen.shape[1]):
        others = torch.cat([own[:, :k], own[:, k + 1 :]], 1)
        left = others.min(1, keepdim=True).values if others.shape[1] else torch.full_like(own[:, :1], math.inf)
        out.append(torch.minimum(loss, left) * data.n)  # [S, A, C]
    return {"loss": torch.stack(out, 1).permute(0, 3, 1, 2).to(torch.float64)}, {}
