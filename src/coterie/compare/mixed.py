# SPDX-License-Identifier: Apache-2.0
"""Mixtures of regressions within clients: every row has one of R common models, in proportions of the client's own.

EM with components from sums over all clients (as FedEM: Marfoq et al., NeurIPS 2021), from several random starts in lockstep
and with densities that are flat at first. Clients have too few rows here to begin with mixtures of their own, as FedGrEM does.

A mixture also gains where noise is merely not normal. What a mixture of noises brings, around one model for all, is therefore
fitted as well, to be taken off: the same components with common slopes and common proportions.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.compare.problem import Problem
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors

__all__ = ["Mixed", "expect_rows", "fit_mixed", "judge_mixed", "judge_mixed_ask"]

Run = Generator[Ask | Save, Replies | None, Any]

_COLD = 0.1  # densities begin with this power
_OWN_ROWS = 2.0  # common proportions count as so many rows of a client
_LEAST = 0.05  # smallest variance of a component, relative to all noise together
_WEIGHT_STEPS = 20  # in which a client finds its proportions


@dataclass(frozen=True)
class Mixed:
    """Mixtures, in each of F fits and J starts."""

    theta: Tensor  # [F, J, R, P]
    weights: Tensor  # [F, J, R] common proportions
    noise: Tensor  # [F, J, R] variances
    likelihood: Tensor  # [F, J] of all training rows


def fit_mixed(
    base: Tensor, spread: Tensor, problem: Problem, *, n_components: int, starts: int, rounds: int, slopes: bool, seed: int
) -> Run:
    """Fit mixtures and take the likeliest start of every fit.  -> Mixed with J = 1

    Parameters
    ----------
    base, spread : Tensor
        [F, P], [F] one model for all, and the variance around it.
    slopes : bool
        Whether components differ in all of the model, and proportions between clients; else in the intercept only.
    """
    state = _begin(base, spread, n_components, starts, slopes, seed)
    warm = rounds // 2
    fold = {name: Sum() for name in ("moments", "rows", "likelihood", "n")}
    for round_ in range(rounds):
        power = min(1.0, _COLD ** (1 - round_ / max(warm, 1)))
        shared = {**_shared(state, problem, slopes), "power": torch.tensor(power, dtype=torch.float64)}
        got = yield Ask(expect_rows, shared, fold, fresh=_fresh(state), scratch=_scratch(state, problem))
        if got is None or got.n == 0:
            continue
        state = _maximised(state, got, base, spread, slopes)
        yield Save(state)
    best = state.likelihood.argmax(1)
    at = torch.arange(len(best))
    return Mixed(*(getattr(state, name)[at, best][:, None] for name in ("theta", "weights", "noise", "likelihood")))


def _begin(base: Tensor, spread: Tensor, n_components: int, starts: int, slopes: bool, seed: int) -> Mixed:
    fits, size = base.shape
    draw = keys.generator(seed, n_components, "mixed starts")
    offset = torch.randn(starts, n_components, size, generator=draw, dtype=torch.float64)
    if not slopes:
        offset[..., :-1] = 0.0
    theta = base[:, None, None] + spread[:, None, None, None].sqrt() * offset * (1.0 if not slopes else size**-0.5)
    equal = torch.full((fits, starts, n_components), 1.0 / n_components, dtype=torch.float64)
    noise = spread[:, None, None].expand_as(equal).clone()
    return Mixed(theta, equal, noise, torch.zeros(fits, starts, dtype=torch.float64))


def _maximised(state: Mixed, got: Replies, base: Tensor, spread: Tensor, slopes: bool) -> Mixed:
    """The M-step from sums of products by responsibility [F, J, R, Q, Q]."""
    moments = got["moments"]
    rows = moments[..., -2, -2].clamp(min=1e-9)
    a, b = moments[..., :-1, :-1], moments[..., :-1, -1]
    if slopes:
        little = 1e-6 * (1 + rows[..., None]) * torch.ones(a.shape[-1], dtype=a.dtype)
        theta = torch.linalg.solve(a + torch.diag_embed(little), b)
    else:
        fixed = base[:, None, None].expand_as(state.theta).clone()
        fixed[..., -1] += (b[..., -1] - torch.einsum("fjrp,fjrp->fjr", a[..., -1, :], fixed)) / rows
        theta = fixed
    residual = torch.cat([theta, -torch.ones_like(theta[..., :1])], -1)
    squares = torch.einsum("fjrp,fjrpq,fjrq->fjr", residual, moments, residual).clamp(min=0)
    noise = torch.maximum(squares / rows, _LEAST * spread[:, None, None])
    weights = got["rows"] / got["rows"].sum(-1, keepdim=True).clamp(min=1e-9)
    return replace(state, theta=theta, noise=noise, weights=weights, likelihood=got["likelihood"])


def judge_mixed_ask(found: Mixed, problem: Problem, *, slopes: bool) -> Ask:
    """Ask clients how likely held-out rows are, once they have found their proportions in the training rows."""
    fold = {name: Stack() for name in ("loss", "right", "rows", *(["weights"] if slopes else []))}
    return Ask(judge_mixed, _shared(found, problem, slopes), fold, scratch=_scratch(found, problem))


def _shared(state: Mixed, problem: Problem, slopes: bool) -> dict[str, Any]:
    return {
        "problem": problem, "theta": state.theta, "weights": state.weights, "noise": state.noise, "own": slopes,
    }  # fmt: skip


def _fresh(state: Mixed) -> Tensors:
    return {f"weights {state.theta.shape[2]}": torch.full(state.weights.shape, -1.0, dtype=torch.float64)}


def _scratch(state: Mixed, problem: Problem) -> int:
    return state.weights.numel() * (problem.n_features + 6)


# -- on the client ----------------------------------------------------------------------------------------------------
def expect_rows(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The E-step: sums of products of training rows by responsibility, and new proportions of the client's own."""
    (name,) = private
    common = shared["weights"][0][:, :, None]  # [F, J, 1, R]
    own = private[name][0].permute(1, 2, 0, 3)  # [F, J, C, R]
    weights = torch.where(own < 0, common, own) if shared["own"] else common.expand_as(own)
    train, _ = _masks(shared["problem"], data)
    joint = weights[..., None, :].log() + _density(shared, data)  # [F, J, C, N, R]
    gamma = (shared["power"] * joint).softmax(-1) * train[:, None, ..., None]
    z = _rows(data)
    weighted = torch.einsum("fjcnr,cnp->fjcrnp", gamma, z)
    moments = weighted.transpose(-2, -1) @ z[:, None]  # [F, J, C, R, Q, Q]
    likelihood = (joint.logsumexp(-1) * train[:, None]).sum(-1)
    rows = gamma.sum(3)
    reply = {"moments": moments, "rows": rows, "likelihood": likelihood, "n": train.sum(-1)[:, None]}
    kept = _proportions(rows, common).permute(2, 0, 1, 3)[None]
    return {field: value.movedim(2, 0)[None] for field, value in reply.items()}, {name: kept}


def judge_mixed(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Find the client's proportions in its training rows, and judge the mixture by the held-out ones."""
    train, held = _masks(shared["problem"], data)
    density, common = _density(shared, data), shared["weights"][0][:, :, None]
    weights = common.expand(-1, -1, len(data.n), -1)
    for _ in range(_WEIGHT_STEPS if shared["own"] else 0):
        gamma = (weights[..., None, :].log() + density).softmax(-1) * train[:, None, ..., None]
        weights = _proportions(gamma.sum(3), common)
    likelihood = (weights[..., None, :].log() + density).logsumexp(-1)
    z = _rows(data)
    expected = torch.einsum("fjcr,fjrp,cnp->fjcn", weights, shared["theta"][0], z[..., :-1])
    squares = (expected - z[..., -1]).square()
    reply = {
        "loss": -(likelihood * held[:, None]).sum(-1),
        "right": (squares * held[:, None]).sum(-1),
        "rows": held.sum(-1)[:, None],
        "weights": weights,
    }
    return {field: value.movedim(2, 0)[None] for field, value in reply.items()}, {}


def _proportions(rows: Tensor, common: Tensor) -> Tensor:
    return (rows + _OWN_ROWS * common) / (rows.sum(-1, keepdim=True) + _OWN_ROWS)


def _rows(data: Block) -> Tensor:
    """Features, intercept and target.  [C, N, Q]"""
    return torch.cat([data.x[..., :-1], torch.ones_like(data.x[..., :1]), data.target[..., None]], -1)


def _masks(problem: Problem, data: Block) -> tuple[Tensor, Tensor]:
    """Which rows are trained on, and which are held out.  [F, C, N]"""
    fold = data.x[..., -1]
    numbers = torch.tensor(problem.held, dtype=fold.dtype).view(-1, 1, 1)
    train = (fold != numbers) & (fold != problem.n_folds) & data.real
    return train.to(data.x.dtype), ((fold == numbers) & data.real).to(data.x.dtype)


def _density(shared: dict[str, Any], data: Block) -> Tensor:
    """Log density of every row under every component.  [F, J, C, N, R]"""
    z, noise = _rows(data), shared["noise"][0][:, :, None, None]
    outputs = torch.einsum("cnp,fjrp->fjcnr", z[..., :-1], shared["theta"][0])
    return -0.5 * ((z[..., -1:] - outputs).square() / noise + (2 * torch.pi * noise).log())
