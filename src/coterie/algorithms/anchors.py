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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.copies import perturbed, residuals, who_is_there
from coterie.algorithms.robust import LOSSES
from coterie.algorithms.starts import exchanged, first_smallest, serve
from coterie.local import worst_if_nan
from coterie.local.row_space import features
from coterie.models import Dense
from coterie.protocol import Ask, Block, ByCluster, Lockstep, Replies, Save, Stack, Tensors, answers

__all__ = ["Anchors", "Grouping", "badly_served", "first_anchors", "group_anchors", "introduce", "nearest_anchor"]

Run = Generator[Ask | Save, Replies | None, Any]

_PER_CLUSTER = 10  # anchors, when their number is not given: of 3 clusters, one with 0.2 is missed once in 800 times
_ROWS_PER_CLUSTER = 10  # rows that make a client an anchor: the direction has K coordinates
_FAR = 4.0  # times the median loss: badly served
_MANY = 0.02  # share of clients: enough to look for another cluster
_DIVERGED = 1e30  # the loss of a model that did
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

    def wanted(self, n_clusters: int) -> int:
        """How many there shall be."""
        return self.number or _PER_CLUSTER * n_clusters


def first_anchors(how: Anchors, n_clusters: int, seed: int) -> Run:
    """Draw anchors among the clients with enough rows.  -> [A] client numbers"""
    got = yield Ask(introduce, {"key": keys.key(seed, "anchors")}, {"n": Stack(), "draw": Stack()})
    if got is None or got.n == 0:
        return torch.zeros(0, dtype=torch.int64)
    return _drawn(got.ids, got["n"], got["draw"], how, n_clusters)


def _drawn(ids: Tensor, n: Tensor, draw: Tensor, how: Anchors, n_clusters: int) -> Tensor:
    """Take those with enough rows by their draws, then the largest of the others."""
    number = how.wanted(n_clusters)
    least = how.min_rows or _ROWS_PER_CLUSTER * n_clusters
    rank = np.lexsort((draw.numpy(), -np.minimum(n.numpy(), least)))
    rank = rank[n.numpy()[rank] > 1]  # one row has no direction
    return ids[torch.from_numpy(rank[:number].copy())]


def badly_served(model: Dense, theta: Tensor, taken: Tensor, how: Anchors, n_clusters: int, seed: int) -> Lockstep:
    """Draw further anchors among clients whose loss is far above the median, if these are many.  -> [A] client numbers"""
    nobody = taken[:0]
    base = torch.zeros(model.n_parameters, dtype=model.dtype)
    got, who = yield (
        Ask(serve, {"model": model, "theta": theta, "base": base}, {"loss": Stack()}, scratch=len(theta)),
        Ask(introduce, {"key": keys.key(seed, "further anchors")}, {"n": Stack(), "draw": Stack()}),
    )
    if got.n == 0 or not torch.equal(got.ids, who.ids):
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
@dataclass(frozen=True)
class Grouping:
    """How anchors' models become the clusters'.

    Parameters
    ----------
    delta : float
        Least distance between two models, if known; 0 if not.
    swaps : bool
        See `Anchors`.
    most : int
        Groups there may be when their number is not given.
    noise : float
        Remark 2: what clients are sent of an anchor's model is perturbed, with this standard deviation.
    secret : str
        What that noise is drawn from.
    """

    delta: float = 0.0
    swaps: bool = True
    most: int = 6
    noise: float = 0.0
    secret: str = field(default="", repr=False)


def group_anchors(model: Dense, local: Tensor, n_clusters: int | None, how: Grouping) -> Run:
    """Make K models of the anchors' [A, P].  -> theta [K, P], events

    Groups come from distances alone; then representatives that serve clients badly are replaced by other anchors.
    """
    group, said = _groups(local, n_clusters, how)
    chosen = torch.tensor([_medoid(local, group == g) for g in range(int(group.max()) + 1)])
    chosen, swaps = chosen[: len(chosen) if n_clusters is None else min(n_clusters, len(local))], 0
    if how.swaps:
        chosen, swaps = yield from _improved(model, local, chosen, how)
    said = f"{len(local)} anchors make {len(chosen)} cluster{'s' * (len(chosen) != 1)}: {said}"
    if swaps:
        said += f"; {swaps} replaced by anchors that serve clients better"
    theta, sizes = _centres(local, chosen, how.delta)
    if how.noise:  # the centre of one anchor is its model: everybody is sent a copy of that, the same one
        everybody = torch.zeros(1, dtype=torch.int64)
        copy = perturbed(theta, everybody, how.noise, how.secret, len(local), "centres", copies=1)
        theta = torch.where((sizes == 1)[:, None], copy[0, 0], theta)
    return theta, [said]


def _groups(local: Tensor, n_clusters: int | None, how: Grouping) -> tuple[Tensor, str]:
    """Number every anchor's group, and say how they were found.  [A]"""
    from scipy.cluster.hierarchy import fcluster, linkage  # here: only servers need it, and it is slow to load

    if len(local) == 1:
        return torch.zeros(1, dtype=torch.int64), "a single one"
    safe = local.nan_to_num(0.0, 0.0, 0.0).double().clamp(-1e100, 1e100)  # squares stay finite
    far = torch.cdist(safe, safe, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    distances = far[np.triu_indices(len(far), 1)]
    if how.delta > 0:
        near = fcluster(linkage(distances, "single"), how.delta / 2, "distance")
        if near.max() == n_clusters or (n_clusters is None and near.max() <= how.most):
            return _numbered(near), "those within half of the given distance are one"
    tree = linkage(distances, "average")
    if n_clusters is not None:
        cut = fcluster(tree, n_clusters, "maxclust")
        return _numbered(cut), "their tree is cut at the number asked for"
    count = _gap_count(tree)
    if count > how.most:
        return _numbered(fcluster(tree, how.most, "maxclust")), "their tree is cut at the most that are looked for"
    return _numbered(fcluster(tree, count, "maxclust"), least=0.05), "their tree is cut at its largest gap"


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
    return int(own[first_smallest(torch.cdist(local[own], local[own]).sum(1))])


def _improved(model: Dense, local: Tensor, chosen: Tensor, how: Grouping) -> Run:
    """Exchange a representative for another anchor while that lowers everybody's loss by a hundredth.  -> chosen, swaps

    Clients that the same anchor serves best stay together, so that one exchange with them tells all.
    """
    if len(local) == len(chosen):
        return chosen, 0
    each, to = {}, None
    shared: dict[str, Any] = {"model": model, "theta": local}
    if how.noise:
        there = yield from who_is_there()
        if there is None:
            return chosen, 0
        copies = perturbed(local, there.lots, how.noise, how.secret, len(local), "swaps", copies=1)
        shared, each, to = {"model": model}, {"copies": copies}, there.ids
    got = yield Ask(
        nearest_anchor, shared, {"loss": ByCluster("share")}, each=each, to=to, scratch=2 * len(local),
        limits={"loss": LOSSES},
    )  # fmt: skip
    if got is None or got.n == 0:
        return chosen, 0
    return exchanged(got["loss"].sum, chosen, gain=0.01, most=2 * len(chosen))


def _centres(local: Tensor, chosen: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Mean of the anchors near each representative: within half the distance to the next one.  [K, P], how many [K]"""
    centres = local[chosen]
    if len(chosen) == 1:  # a median, whose numbers are anchors' own
        return local.median(0).values[None], torch.ones(1, dtype=torch.int64)
    between = torch.cdist(centres, centres) + torch.diag(torch.full((len(chosen),), math.inf, dtype=local.dtype))
    near, nearest = torch.cdist(local, centres).min(1)  # [A]
    near[chosen], nearest[chosen] = 0.0, torch.arange(len(chosen))  # however near to another, it stands for its own
    reach = between.min() / 2 if not delta else torch.tensor(delta / 2)
    own = [(nearest == k) & ((near <= reach) | (near == 0)) for k in range(len(chosen))]
    return torch.stack([local[members].mean(0) for members in own]), torch.stack(own).sum(1)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(n=Stack(), draw=Stack())
def introduce(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say how many rows a client has, and its lot."""
    draw = keys.uniform(keys.key(shared["key"][:, None], data.keys), 1)[..., 0]  # [S, C]
    return {"n": data.n[None], "draw": draw}, {}


@answers(loss=ByCluster("share"))
def nearest_anchor(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Total loss of a client under every anchor's model, and which of them serves it best.  -> [S, C, A] each"""
    theta = each["copies"][:, :, 0] if "copies" in each else shared["theta"]
    loss = residuals(features(shared["model"], data), data, theta).square_().sum(1).transpose(0, 1)  # [S, C, A]
    loss = worst_if_nan(loss).to(torch.float64).clamp(max=_DIVERGED)
    share = one_hot(loss.argmin(-1), loss.shape[-1]) * (data.n > 0)[:, None]
    return {"loss": loss, "share": share.to(torch.float64)}, {}
