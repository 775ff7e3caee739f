# SPDX-License-Identifier: Apache-2.0
"""Training of a perceptron whose first layer is wider than a client has rows, in the space of these rows.

Gradient steps move the first layer's weights by -V^T x, a combination of the client's rows. With the rows' products x x^T,
the first layer's outputs follow from V without touching x or the weights again, and a step on some rows adds to V on these
rows only. The weights are formed once, at the end. With 150 rows of 784 features this is most of what a step costs.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from coterie.models.dense import Dense, DenseDescent

__all__ = ["RowDescent"]


class RowDescent(DenseDescent):
    """Gradient descent of C perceptrons at once, each on its own client's rows, which are named by their numbers.

    Parameters
    ----------
    model : Dense
        With a hidden layer and without a ridge penalty.
    theta : Tensor
        [C, P] where the clients start.
    x : Tensor
        [C, N, D] the clients' rows.
    momentum, proximal : float
        As for `Training`.
    layers : frozenset of str, optional
        Names of the parameters that move, the first layer's weights among them; all by default.
    """

    def __init__(
        self,
        model: Dense,
        theta: Tensor,
        x: Tensor,
        *,
        momentum: float,
        proximal: float,
        layers: frozenset[str] | None = None,
    ) -> None:
        super().__init__(model, theta, momentum, proximal, layers)
        weight, bias = self._layers[0]
        self._x, self._own_bias = x, self._moving[0][1]
        self._moving[0] = (None, None)  # it moves by V
        self._gram = torch.bmm(x, x.transpose(1, 2))  # [C, N, N]
        if self._own_bias is not None:
            self._gram += 1.0  # the bias is the weight of a feature that is one
        self._begin = torch.bmm(x, weight.transpose(1, 2))  # [C, N, H] the first layer's outputs at the start
        if bias is not None:
            self._begin += bias[:, None]
        self._v = torch.zeros_like(self._begin)
        self._pace = torch.zeros_like(self._begin) if momentum else None  # velocity of V
        self._rows: Tensor | None = None
        self._client = torch.arange(len(x))[:, None]

    def result(self) -> Tensor:
        """The models where they are now.  [C, P]"""
        weight, bias = self._layers[0]
        moved = torch.baddbmm(weight, self._v.transpose(1, 2), self._x, alpha=-1)
        moved_bias = bias if self._own_bias is None else self._own_bias - self._v.sum(1)
        return self._pack([(moved, moved_bias), *self._layers[1:]])

    def slopes(self, x: Tensor | None, y: Tensor, weights: Tensor) -> list[Tensor]:
        """The gradient on some rows, one tensor for each parameter that moves; the first layer's by rows  [C, N, H]."""
        self._rows = x
        deltas = self._backward(self._x, y, weights)
        made = [torch.zeros_like(self._v)]
        self._add(made[0], deltas[0][0])
        for (w, b), (delta, below) in zip(self._moving[1:], deltas[1:], strict=True):
            made += [] if w is None else [torch.bmm(delta.transpose(1, 2), below)]
            made += [] if b is None else [delta.sum(1)]
        return made

    def shifted(self, slopes: Sequence[Tensor], length: float) -> Self:
        """Models that are a step of some length away, against the slopes; these stay."""
        there = super().shifted(slopes[1:], length)
        there._v = torch.add(self._v, slopes[0], alpha=length)
        return there

    def step(
        self, x: Tensor | None, y: Tensor, weights: Tensor, step_size: float, active: Tensor | None = None
    ) -> None:
        """Take one step on some rows, x [C, B] their numbers, none of them twice (None: all)."""
        self._rows = x
        deltas = self._backward(self._x, y, weights if active is None else weights * active[:, None])
        self._move(deltas, step_size, active)
        delta = deltas[0][0]  # [C, B, H] 0 for clients that stay
        if not self._proximal and self._pace is None:
            self._add(self._v, delta * step_size)
            return
        one: float | Tensor = 1.0 if active is None else active[:, None, None]
        along = -self._proximal * one * self._v  # of the rows' combination that the gradient is
        self._add(along, delta)
        if self._pace is not None:
            along = self._pace = self._pace * (1 - (1 - self._momentum) * one) + along
        self._v += step_size * one * along

    def _add(self, into: Tensor, delta: Tensor) -> None:
        """Add to the rows of the step."""
        if self._rows is None:
            into += delta
        else:
            into[self._client, self._rows] += delta

    def _enter(self, x: Tensor, out: Tensor) -> Tensor:
        """The first layer's outputs, on the rows of the step."""
        if self._rows is None:
            return torch.baddbmm(self._begin, self._gram, self._v, alpha=-1, out=out)
        at = (self._client, self._rows)
        return torch.baddbmm(self._begin[at], self._gram[at], self._v, alpha=-1, out=out)
