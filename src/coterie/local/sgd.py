# SPDX-License-Identifier: Apache-2.0
"""Local training: gradient descent of many clients at once, full batch or minibatch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.errors import ConfigError
from coterie.local.least_squares import proximal_step
from coterie.models import Dense, Model, Network
from coterie.models.dense import DenseDescent
from coterie.models.network import NetworkDescent
from coterie.models.row_descent import RowDescent
from coterie.protocol import Block

__all__ = ["Training", "batches", "begin", "in_chunks", "numbers_held", "train"]

CHUNK_BYTES = 8 << 20  # parameters that are trained together: they stay in the cache from step to step
_WIDER, _PASSES = 2, 2  # features per row, and passes over the rows, from which their products cost less than the layer


@dataclass(frozen=True)
class Training:
    """What a client does with a model that it is given.

    Parameters
    ----------
    steps : int
        Gradient steps, when `epochs` is None.
    epochs : int, optional
        Passes over the client's rows, in its place; needs `batch_size`.
    batch_size : int, optional
        Rows per step, drawn without replacement; None means all rows.
    momentum : float
        Heavy-ball momentum, from zero at the start of each round.
    proximal : float
        mu of FedProx: mu/2 |theta - theta received|^2 is added to the loss.
    exact : bool
        Whether the loss with its proximal term is minimised in closed form, in place of steps: for linear regression.
    """

    steps: int = 10
    epochs: int | None = None
    batch_size: int | None = None
    momentum: float = 0.0
    proximal: float = 0.0
    exact: bool = False

    def work(self) -> float:
        """Gradient steps, or passes when they are counted so; a closed form counts as one."""
        if self.exact:
            return 1.0
        return float(self.steps if self.epochs is None else self.epochs)


def train(
    model: Model,
    theta: Tensor,
    data: Block,
    step_size: Tensor,
    how: Training,
    key: Tensor,
    layers: frozenset[str] | None = None,
    towards: Tensor | None = None,
) -> Tensor:
    """Train every client's model on its own rows.

    Parameters
    ----------
    theta : Tensor
        [S, C, P] where each run's clients start.
    data : Block
        Rows of the C clients.
    step_size : Tensor
        [S]
    how : Training
        Steps, batches, momentum, proximal term.
    key : Tensor
        [S] what minibatches are drawn from, together with the clients' own keys.
    layers : frozenset of str, optional
        Names of the parameters that move; all by default.
    towards : Tensor, optional
        [S, C, P] where the proximal term draws models; where they start by default.

    Returns
    -------
    Tensor
        [S, C, P]
    """
    if towards is not None and how.proximal:
        runs = zip(theta, towards, step_size, key, strict=True)
        return torch.stack([_drawn(model, start, end, data, float(size), how, k) for start, end, size, k in runs])

    def work(part: Tensor, rows: Block, s: int) -> Tensor:
        return _train_chunk(model, part, rows, float(step_size[s]), how, key[s], layers)

    return in_chunks(theta, data, work, numbers_held(model, how, data, layers))


def in_chunks(theta: Tensor, data: Block, work: Callable[[Tensor, Block, int], Tensor], numbers: int) -> Tensor:
    """Work on one run and a cache-sized number of clients at a time.

    Parameters
    ----------
    theta : Tensor
        [S, C, P] every run's and client's model.
    data : Block
        Rows of the C clients.
    work : callable
        (models [c, P], their rows, number of the run) -> [c, P]
    numbers : int
        That the work holds of one client from step to step.

    Returns
    -------
    Tensor
        [S, C, P]
    """
    out = torch.empty_like(theta)
    size = max(1, CHUNK_BYTES // (numbers * theta.element_size()))
    for s in range(len(theta)):
        for first in range(0, theta.shape[1], size):
            part = slice(first, first + size)
            out[s, part] = work(theta[s, part], data.clients(part), s)
    return out


def _train_chunk(
    model: Model,
    theta: Tensor,
    data: Block,
    step_size: float,
    how: Training,
    key: Tensor,
    layers: frozenset[str] | None = None,
) -> Tensor:
    """One run, a cache-sized number of clients.  theta [C, P]"""
    if how.exact:
        if layers is not None:
            raise ConfigError("an exact proximal step moves all of a model", "train in steps: exact=False")
        return proximal_step(model, theta, data, how.proximal)
    descent = begin(model, theta, data, how, layers)
    for x, y, weights, active in batches(model, data, how, key, layers):
        descent.step(x, y, weights, step_size, active)
    return descent.result()


def _drawn(
    model: Model, theta: Tensor, towards: Tensor, data: Block, step_size: float, how: Training, key: Tensor
) -> Tensor:
    """One run, with a proximal term that draws to other models than those at the start.  theta, towards [C, P]"""
    if how.exact:
        raise ConfigError("an exact proximal step draws models to where they start", "train in steps: exact=False")
    descent = model.descent(theta, momentum=how.momentum, proximal=how.proximal, towards=towards)
    for x, y, weights, active in batches(model, data, how, key, by_number=False):
        descent.step(x, y, weights, step_size, active)
    return descent.result()


def begin(
    model: Model, theta: Tensor, data: Block, how: Training, layers: frozenset[str] | None = None
) -> DenseDescent | NetworkDescent:
    """Start gradient descent from theta [C, P], on what `batches` hands out."""
    if isinstance(model, Dense) and _suits_rows(model, how, data, layers):
        return RowDescent(model, theta, data.x, momentum=how.momentum, proximal=how.proximal, layers=layers)
    return model.descent(theta, momentum=how.momentum, proximal=how.proximal, layers=layers)


def _suits_rows(model: Dense, how: Training, data: Block, layers: frozenset[str] | None) -> bool:
    """Whether the first layer moves, is much wider than clients have rows, and is passed often enough."""
    if model.is_linear or model.l2 or how.exact or (layers is not None and "0.weight" not in layers):
        return False
    n_rows = data.x.shape[1]
    if not 0 < _WIDER * n_rows <= model.sizes[0]:
        return False
    per_step = 1.0 if how.batch_size is None else min(1.0, how.batch_size / n_rows)
    passes = how.steps * per_step if how.epochs is None else how.epochs
    return passes >= (1 if how.momentum else _PASSES)  # a velocity of the layer costs as much again


def numbers_held(model: Model, how: Training, data: Block, layers: frozenset[str] | None = None) -> int:
    """What training holds of one client from step to step: its model, or with `RowDescent` N x N and N x H numbers of it."""
    if not isinstance(model, Dense) or not _suits_rows(model, how, data, layers):
        return model.n_parameters
    n_rows = data.x.shape[1]
    return model.n_parameters + n_rows * n_rows + (n_rows - model.sizes[0]) * model.sizes[1]


Batch = tuple[Any, Tensor, Tensor, Tensor | None]


def batches(
    model: Model,
    data: Block,
    how: Training,
    key: Tensor,
    layers: frozenset[str] | None = None,
    *,
    by_number: bool = True,
) -> Iterator[Batch]:
    """Rows (augmented as the model says), targets and weights of every step, and which clients take it (None: all).

    For `RowDescent`, unless it is said to be another, rows are given by their numbers [C, B], or None for all.
    """
    client = torch.arange(len(data.n))[:, None]
    by_number = by_number and isinstance(model, Dense) and _suits_rows(model, how, data, layers)
    augment = model.augment if isinstance(model, Network) else None
    for rows, weights, active, when in _lots(data, how, key):
        at = slice(None) if rows is None else (client, rows)
        x = rows if by_number else data.x[at]
        if augment is not None:
            pictures = keys.key(key, *when, "augment", data.keys[:, None], torch.arange(weights.shape[1]))  # [C, B]
            x = augment(data.x[at], pictures)
        yield x, data.target[at], weights, active


Lot = tuple[Tensor | None, Tensor, Tensor | None, tuple[int, int]]


def _lots(data: Block, how: Training, key: Tensor) -> Iterator[Lot]:
    """Numbers (None: all) and weights of every step's rows, which clients take it (None: all), and when."""
    if how.batch_size is None:
        active = None if bool((data.n > 0).all()) else (data.n > 0).to(data.x.dtype)
        for t in range(how.steps if how.epochs is None else how.epochs):
            yield None, data.weights, active, (t, 0)
        return
    client = torch.arange(len(data.n))[:, None]
    per_epoch = -(-data.n // how.batch_size)  # [C] a client's steps in one pass, the last one on what is left
    taken = torch.zeros_like(data.n)
    limit = torch.full_like(data.n, how.steps) if how.epochs is None else per_epoch * how.epochs
    epoch = 0
    while bool(((taken < limit) & (data.n > 0)).any()):
        order = keys.permuted(keys.key(key, epoch, "batch", data.keys), data.real)  # [C, N]
        for b in range(int(per_epoch.max())):
            active = (b < per_epoch) & (taken < limit)
            if not bool(active.any()):  # the others wait for their next pass
                break
            rows = order[:, b * how.batch_size : (b + 1) * how.batch_size]
            real = data.real[client, rows]
            weights = real / real.sum(1, keepdim=True).clamp(min=1).to(data.x.dtype)
            yield rows, weights, None if bool(active.all()) else active.to(data.x.dtype), (epoch, b)
            taken += active
        epoch += 1
