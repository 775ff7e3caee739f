# SPDX-License-Identifier: Apache-2.0
"""Where federated mixtures begin: EM on every client from several starts, then components numbered alike.

Every client runs all its starts at once: k-means++ seeds for Gaussian components, random coefficients and falling noise
(annealing) for regressions, where EM from a random start mostly ends badly. With a covariance to estimate, clients fit twice:
the second time in the metric of the covariance that all of them found together.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.alignment import align
from coterie.models.mixtures import Family, expect
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors

__all__ = ["MixtureStart", "Started", "aligned_start", "fit_locally", "renumber"]

Run = Generator[Ask | Save, Replies | None, Any]

_COLD = 0.05  # densities begin with this power, and have their own from halfway on


@dataclass(frozen=True)
class MixtureStart:
    """How clients begin.

    Parameters
    ----------
    restarts : int
        Starts of every client; the likeliest wins.
    iterations : int
        EM steps of each.
    orders : int
        Random orders of the clients that alignment tries.
    theta : Tensor, optional
        [R, P] where everybody begins, in place of all this.
    """

    restarts: int = 20
    iterations: int = 50
    orders: int = 10
    theta: Tensor | None = None


@dataclass(frozen=True)
class Started:
    """What clients found, numbered alike."""

    ids: Tensor  # [C]
    theta: Tensor  # [C, R, P]
    n: Tensor  # [C]
    scale: Tensor


def aligned_start(family: Family, n_components: int, start: MixtureStart, seed: int, fresh: Tensors) -> Run:
    """Let clients fit alone, and number their components alike.  -> Started, or None if nobody answered"""
    scale = family.unit_scale()
    got = None
    for attempt in range(2 if family.has_scale else 1):
        shared = {
            "family": family, "n_components": n_components, "restarts": start.restarts, "iterations": start.iterations,
            "scale": scale, "key": keys.key(seed, attempt, "mixture start"),
        }  # fmt: skip
        fold = {"theta": Stack(), "n": Stack(), "scatter": Sum()}
        got = yield Ask(
            fit_locally, shared, fold, fresh=fresh, work=float(start.iterations),
            scratch=4 * n_components * start.restarts,
        )  # fmt: skip
        if got is None or got.n == 0 or not bool((got["n"] > 0).any()):
            return None
        scale = family.scale_of(got["scatter"], float(got["n"].sum()))
    assert got is not None
    there = got["n"] > 0
    order = torch.arange(n_components).repeat(got.n, 1)
    order[there] = align(got["theta"][there], seed, orders=start.orders)
    yield Ask(renumber, {}, {"n": Sum()}, each={"order": order}, to=got.ids, fresh=fresh)
    return Started(got.ids, torch.take_along_dim(got["theta"], order[..., None], 1), got["n"], scale)


# -- on the client ----------------------------------------------------------------------------------------------------
def fit_locally(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """EM from several starts at once; the likeliest is kept."""
    family, starts = shared["family"], shared["restarts"]
    scale = shared["scale"].repeat_interleave(starts, 0)  # [S B, ...]
    number = torch.arange(starts).repeat(len(shared["key"]))[:, None]
    draws = keys.key(shared["key"].repeat_interleave(starts)[:, None], number, data.keys)  # [S B, C]
    theta = family.draw(shared["n_components"], scale, data, draws)  # [S B, C, R, P]
    weights = torch.full(theta.shape[:3], 1.0 / theta.shape[2], dtype=theta.dtype)
    steps = shared["iterations"]
    for t in range(steps):
        heat = min(1.0, _COLD ** (1 - 2 * t / steps)) if family.anneals else 1.0
        gamma, _ = expect(heat * family.log_density(theta, scale, data), weights, data)
        weights = torch.einsum("scnr,cn->scr", gamma, data.weights)
        theta = family.maximise(theta, gamma, data)
    gamma, likelihood = expect(family.log_density(theta, scale, data), weights, data)
    best = likelihood.view(-1, starts, len(data.n)).argmax(1)  # [S, C]
    pick = best + starts * torch.arange(len(best))[:, None]
    own = torch.arange(len(data.n))[None]
    theta, weights, gamma = theta[pick, own], weights[pick, own], gamma[pick, own]
    kept = {"tilde": theta, "weights": weights, "first_weights": weights}
    return {"theta": theta, "n": data.n[None], "scatter": family.scatter(theta, gamma, data)}, kept


def renumber(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Call components as the server says."""
    order = each["order"]  # [S, C, R]
    kept = {
        "tilde": torch.take_along_dim(private["tilde"], order[..., None], 2),
        "weights": torch.take_along_dim(private["weights"], order, 2),
        "first_weights": torch.take_along_dim(private["first_weights"], order, 2),
    }
    return {"n": data.n[None]}, kept
