# SPDX-License-Identifier: Apache-2.0
"""Local training: gradient descent of many clients at once, full batch or minibatch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import keys
from coterie.errors import ConfigError
from coterie.local.least_squares import proximal_step
from coterie.models import Dense, Model, Network
from coterie.models.row_descent import RowDescent
from coterie.protocol import Block

__all__ = ["Training", "batches", "in_chunks", "train"]

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

    Returns
    -------
    Tensor
        [S, C, P]
    """

    def work(part: Tensor, rows: Block, s: int) -> Tensor:
        return _train_chunk(model, part, rows, float(step_size[s]), how, key[s], layers)

    if isinstance(model, Dense) and _suits_rows(model, how, data, layers):
        return in_chunks(theta, data, work, _row_numbers(model, data))
    return in_chunks(theta, data, work)


def in_chunks(
    theta: Tensor, data: Block, work: Callable[[Tensor, Block, int], Tensor], numbers: int | None = None
) -> Tensor:
    """Work on one run and a cache-sized number of clients at a time.

    Parameters
    ----------
    theta : Tensor
        [S, C, P] every run's and client's model.
    data : Block
        Rows of the C clients.
    work : callable
        (models [c, P], their rows, number of the run) -> [c, P]
    numbers : int, optional
        That the work holds of one client from step to step; by default its model.

    Returns
    -------
    Tensor
        [S, C, P]
    """
    out = torch.empty_like(theta)
    size = max(1, CHUNK_BYTES // ((numbers or theta.shape[-1]) * theta.element_size()))
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
    if isinstance(model, Dense) and _suits_rows(model, how, data, layers):
        return _train_on_rows(model, theta, data, step_size, how, key, layers)
    descent = model.descent(theta, momentum=how.momentum, proximal=how.proximal, layers=layers)
    for x, y, weights, active in batches(model, data, how, key):
        descent.step(x, y, weights, step_size, active)
    return descent.result()


def _train_on_rows(
    model: Dense,
    theta: Tensor,
    data: Block,
    step_size: float,
    how: Training,
    key: Tensor,
    layers: frozenset[str] | None,
) -> Tensor:
    """The same, the first layer in the space of the clients' rows.  theta [C, P]"""
    descent = RowDescent(model, theta, data.x, momentum=how.momentum, proximal=how.proximal, layers=layers)
    client = torch.arange(len(theta))[:, None]
    for rows, weights, active, _ in _lots(data, how, key):
        y = data.target if rows is None else data.target[client, rows]
        descent.step_on(rows, y, weights, step_size, active)
    return descent.result()


def _suits_rows(model: Dense, how: Training, data: Block, layers: frozenset[str] | None) -> bool:
    """Whether the first layer moves, is much wider than clients have rows, and is passed often enough."""
    if model.is_linear or model.l2 or how.exact or (layers is not None and "0.weight" not in layers):
        return False
    n_rows = data.x.shape[1]
    if not 0 < _WIDER * n_rows <= model.sizes[0]:
        return False
    per_step = 1.0 if how.batch_size is None else min(1.0, how.batch_size / n_rows)
    return (how.steps * per_step if how.epochs is None else how.epochs) >= _PASSES


def _row_numbers(model: Dense, data: Block) -> int:
    """What `RowDescent` holds of one client from step to step: all layers but the first, and N x N and N x H numbers."""
    n_rows = data.x.shape[1]
    return model.n_parameters + n_rows * n_rows + (n_rows - model.sizes[0]) * model.sizes[1]


Batch = tuple[Tensor, Tensor, Tensor, Tensor | None]


def batches(model: Model, data: Block, how: Training, key: Tensor) -> Iterator[Batch]:
    """Rows (augmented as the model says), targets and weights of every step, and which clients take it (None: all)."""
    augment = model.augment if isinstance(model, Network) else None
    for x, y, weights, active, when in _batches(data, how, key):
        if augment is not None:
            pictures = keys.key(key, *when, "augment", data.keys[:, None], torch.arange(x.shape[1]))  # [C, B]
            x = augment(x, pictures)  # noqa: PLW2901
        yield x, y, weights, active


Lot = tuple[Tensor | None, Tensor, Tensor | None, tuple[int, int]]


def _batches(data: Block, how: Training, key: Tensor) -> Iterator[tuple[*Batch, tuple[int, int]]]:
    """Rows, targets and weights of every step, which clients take it (None: all), and when: pass and place in it."""
    client = torch.arange(len(data.n))[:, None]
    for rows, weights, active, when in _lots(data, how, key):
        at = slice(None) if rows is None else (client, rows)
        yield data.x[at], data.target[at], weights, active, when


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
