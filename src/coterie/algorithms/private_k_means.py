# SPDX-License-Identifier: Apache-2.0
"""k-means of clients' own models, differentially private, from several random starts side by side: where clusters begin.

It is done in the few directions in which clients' models are long. All starts are one question: a client is in one cluster
of each, so that its part is as long as the root of their number.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.private_moments import Directions, directions, longest, own_models
from coterie.models import Model
from coterie.protocol import Ask, Block, Noise, Replies, Save, Sum, Tensors, answers

__all__ = [
    "GROUP_QUESTIONS", "QUESTIONS", "Begun", "Groups", "groups_of_sizes", "k_means", "nearest_centres", "private_start",
    "shared_by", "total_distance",
]  # fmt: skip

_STEPS = 4  # of k-means
_LAST_STEPS = 2  # of the best start for each number of groups
QUESTIONS = 2 + _STEPS
GROUP_QUESTIONS = 2 + _STEPS + _LAST_STEPS
_STARTS = 10  # at most
_STARTS_EACH = 3  # where several numbers of groups are tried
_DRAWS = 50  # of which each start is the one whose centres are farthest apart
_CLEAR = 0.15  # of the bound: noise in a coordinate of a centre that several starts may bring about
_FEW = 0.25  # of the clients of a cluster of average size
_OUTSIDE = 1e6  # where nobody is

Run = Generator[Ask | Save, Replies | None, Any]


@dataclass(frozen=True)
class Begun:
    """Where clusters begin: theta [K, P]."""

    theta: Tensor


@dataclass(frozen=True)
class Groups:
    """The best centres of each number of groups, one after the other: theta [sum of sizes, P]."""

    theta: Tensor


def private_start(
    state: Begun | None, *, model: Model, n_clusters: int, multiplier: float, n_clients: int, step_size: float, seed: int,
    louder: float = 1.0,
) -> Run:  # fmt: skip
    """Find K models to begin with; every question has noise of `multiplier`, and what comes `louder` times as much."""
    if state is None:
        shared = shared_by(model, step_size)
        found = yield from directions(shared=shared, n=n_clusters, multiplier=multiplier, n_clients=n_clients)
        alone = louder * multiplier * shared["bound"] * n_clusters / n_clients  # noise in a coordinate of one start
        starts = max(1, min(_STARTS, int((_CLEAR * shared["bound"] / alone) ** 2)))
        how: dict[str, Any] = {"multiplier": multiplier, "n_clients": n_clients}
        draw = keys.generator(seed, "private start")
        centres = _drawn(found, [n_clusters] * starts, draw)
        centres = yield from k_means(centres, [n_clusters] * starts, shared, found, _STEPS, draw, **how)
        far = yield from _distances(centres, [n_clusters] * starts, shared, found, **how)
        state = Begun((centres[int(far.argmin())] @ found.basis.T).to(model.dtype))
        yield Save(state)
    return state


def groups_of_sizes(
    state: Groups | None, *, model: Model, sizes: Sequence[int], multiplier: float, n_clients: int, seed: int
) -> Run:
    """Find centres of several numbers of groups at once: of each, the best of a few starts, which is then improved."""
    if state is None:
        shared = shared_by(model, 0.0)
        found = yield from directions(shared=shared, n=max(sizes), multiplier=multiplier, n_clients=n_clients)
        how: dict[str, Any] = {"multiplier": multiplier, "n_clients": n_clients}
        draw, all_ = keys.generator(seed, "private groups"), [k for k in sizes for _ in range(_STARTS_EACH)]
        centres = yield from k_means(_drawn(found, all_, draw), all_, shared, found, _STEPS, draw, **how)
        far = yield from _distances(centres, all_, shared, found, **how)
        best = far.view(len(sizes), _STARTS_EACH).argmin(1) + _STARTS_EACH * torch.arange(len(sizes))
        centres = yield from k_means(centres[best], list(sizes), shared, found, _LAST_STEPS, None, **how)
        kept = torch.cat([own[:k] for own, k in zip(centres, sizes, strict=True)])
        state = Groups((kept @ found.basis.T).to(model.dtype))
        yield Save(state)
    return state


def shared_by(model: Model, step_size: float) -> dict[str, Any]:
    """What clients need to fit their own models."""
    return {"model": model, "step_size": torch.tensor(step_size, dtype=torch.float64), "bound": longest(model)}


def k_means(
    centres: Tensor, sizes: Sequence[int], shared: dict[str, Any], along: Directions, steps: int,
    draw: torch.Generator | None, *, multiplier: float, n_clients: int,
) -> Run:  # fmt: skip
    """Move centres [R, K, d], of which each start has its own number; with `draw`, deserted ones join the largest cluster.

    -> centres
    """
    bound, wide, number = shared["bound"], math.sqrt(len(sizes)), torch.tensor(sizes)
    bounds = {"sum": wide * bound, "count": wide}
    noise = Noise(multiplier, bounds, {"sum": 0.85, "count": 0.15}, purpose="groups of clients' models")
    for step in range(steps):
        asked = {**shared, "basis": along.basis, "centres": centres, "sizes": number, "step": step}
        fold = {"sum": Sum(), "count": Sum()}
        got = yield Ask(nearest_centres, asked, fold, noise=noise, scratch=centres[..., 0].numel())
        assert got is not None
        centres = _moved(got["sum"], got["count"], sizes, n_clients, along.length, draw if step < steps - 1 else None)
        centres = centres * (bound / centres.norm(dim=-1, keepdim=True).clamp(min=bound))
    return centres


def _distances(
    centres: Tensor,
    sizes: Sequence[int],
    shared: dict[str, Any],
    along: Directions,
    *,
    multiplier: float,
    n_clients: int,
) -> Run:
    """How far clients are from their centres.  -> [R]"""
    cap = shared["bound"] ** 2
    noise = Noise(
        multiplier, {"distance": math.sqrt(len(sizes)) * cap}, {"distance": 1.0}, purpose="the best of groups"
    )
    asked = {**shared, "basis": along.basis, "centres": centres, "sizes": torch.tensor(sizes), "cap": cap}
    got = yield Ask(total_distance, asked, {"distance": Sum()}, noise=noise, scratch=centres[..., 0].numel())
    assert got is not None
    return got["distance"]


def _drawn(along: Directions, sizes: Sequence[int], draw: torch.Generator) -> Tensor:
    """Centres as long as clients' models, those of a start far from each other.  [R, K, d]"""
    most, long = max(sizes), along.length
    out = torch.zeros(len(sizes), most, len(long), dtype=torch.float64)
    for r, k in enumerate(sizes):
        made = torch.randn(_DRAWS, k, len(long), generator=draw, dtype=torch.float64) * long
        made = made * (long.norm() / made.norm(dim=-1, keepdim=True).clamp(min=1e-12))
        apart = torch.cdist(made, made) + 1e9 * torch.eye(k, dtype=torch.float64)
        out[r, :k] = made[apart.flatten(1).min(1).values.argmax()]
    return out


def _moved(
    total: Tensor, count: Tensor, sizes: Sequence[int], n_clients: int, long: Tensor, draw: torch.Generator | None
) -> Tensor:
    """Means of clusters; who has hardly anybody shares the largest cluster, if anything comes after.  [R, K, d]"""
    count, centres = count.clone(), torch.zeros_like(total)
    for r, size in enumerate(sizes):
        least = _FEW * n_clients / size
        centres[r, :size] = total[r, :size] / count[r, :size].clamp(min=least)[:, None]
        for k in range(size) if draw is not None else ():
            if count[r, k] >= least:
                continue
            largest = int(count[r, :size].argmax())
            aside = torch.randn(len(long), generator=draw, dtype=torch.float64)
            aside = aside * (0.5 * long.norm() / aside.norm())
            centres[r, k], centres[r, largest] = centres[r, largest] + aside, centres[r, largest] - aside
            count[r, largest] /= 2
    return centres


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(sum=Sum(), count=Sum())
def nearest_centres(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The client's own model, put to the nearest centre of every start.  -> [S, C, R, K, d], [S, C, R, K]"""
    point = own_models(shared, data) @ shared["basis"][0]  # [C, d]
    gap = _gaps(shared, point)  # [R, C, K]
    share = one_hot(gap.argmin(-1), gap.shape[-1]).transpose(0, 1) * (data.n > 0)[:, None, None]  # [C, R, K]
    share = share.to(torch.float64)
    return {"sum": (share[..., None] * point[:, None, None])[None], "count": share[None]}, {}


@answers(distance=Sum())
def total_distance(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Squared distance to the nearest centre of every start.  -> [S, C, R]"""
    point = own_models(shared, data) @ shared["basis"][0]
    return {"distance": _gaps(shared, point).min(-1).values.T.square().clamp(max=shared["cap"])[None]}, {}


def _gaps(shared: dict[str, Any], point: Tensor) -> Tensor:
    """Distances to all centres that there are.  [R, C, K]"""
    centres = shared["centres"][0]
    gap = torch.cdist(point[None].expand(len(centres), -1, -1), centres)
    there = torch.arange(centres.shape[1]) < shared["sizes"][0][:, None]
    return gap.masked_fill(~there[:, None], _OUTSIDE)
