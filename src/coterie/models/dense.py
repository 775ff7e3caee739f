# SPDX-License-Identifier: Apache-2.0
"""Fully connected models: linear and softmax regression (no hidden layer) and the multilayer perceptron.

A model's parameters are one flat vector, layer after layer, weights [O, I] then bias [O]. The gradient is written out,
so that a step of gradient descent for many clients is nothing but batched products that update the weights in place.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from coterie.models.losses import Loss, loss_gradient, weighted

__all__ = ["Dense", "linear_regression", "mlp", "softmax_regression"]

_Layers = list[tuple[Tensor | None, Tensor | None]]  # weights and biases; None where there is none, or it does not move


@dataclass(frozen=True)
class Dense:
    """Layers of sizes[0] -> sizes[1] -> ..., ReLU in between.

    Parameters
    ----------
    sizes : tuple of int
        Number of features, of hidden units by layer, of outputs.
    loss : {"squared", "cross_entropy"}
        What is minimised.
    intercept : bool
        Whether layers have a bias.
    l2 : float
        Ridge penalty l2/2 |weights|^2 in training; biases are not penalised.
    dtype : torch.dtype
        Of the parameters.
    class_weights : tuple of float
        What a row of each class counts in training; () counts all alike.
    threshold : float
        Of two classes, the probability of the second from which on it is predicted.
    """

    sizes: tuple[int, ...]
    loss: Loss
    intercept: bool = True
    l2: float = 0.0
    dtype: torch.dtype = torch.float64
    class_weights: tuple[float, ...] = ()
    threshold: float = 0.5

    @property
    def n_outputs(self) -> int:
        """Outputs per row."""
        return self.sizes[-1]

    @property
    def is_linear(self) -> bool:
        """Whether there is no hidden layer."""
        return len(self.sizes) == 2

    @cached_property
    def layers(self) -> dict[str, slice]:
        """Where each named parameter lies in the flat vector."""
        out, at = {}, 0
        for i, (fan_in, fan_out) in enumerate(zip(self.sizes[:-1], self.sizes[1:], strict=True)):
            for name, size in ((f"{i}.weight", fan_in * fan_out), (f"{i}.bias", fan_out)):
                if name.endswith("weight") or self.intercept:
                    out[name] = slice(at, at + size)
                    at += size
        return out

    @property
    def n_parameters(self) -> int:
        """Length of the flat vector."""
        return sum(part.stop - part.start for part in self.layers.values())

    def initial(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n start vectors, uniform within 1/sqrt(fan in) as torch.nn.Linear does.  [n, P]"""
        theta = torch.empty(n, self.n_parameters, dtype=self.dtype)
        for name, part in self.layers.items():
            bound = 1 / math.sqrt(self.sizes[int(name.split(".")[0])])
            theta[:, part] = bound * (
                2 * torch.rand(n, part.stop - part.start, generator=generator, dtype=self.dtype) - 1
            )
        return theta

    def unpack(self, theta: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """View flat vectors [..., P] as weights [..., O, I] and biases [..., O] by layer."""
        lead, out = theta.shape[:-1], []
        for i, (fan_in, fan_out) in enumerate(zip(self.sizes[:-1], self.sizes[1:], strict=True)):
            weight = theta[..., self.layers[f"{i}.weight"]].view(*lead, fan_out, fan_in)
            out.append((weight, theta[..., self.layers[f"{i}.bias"]] if self.intercept else None))
        return out

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Every model on every row.  theta [J, P], x [R, D] -> [J, R, O]"""
        if self.is_linear:  # one product for all models: rows are read once
            ((weight, bias),) = self.unpack(theta)
            out = x @ weight.reshape(-1, weight.shape[-1]).T
            if bias is not None:
                out += bias.reshape(-1)
            return out.view(len(x), len(theta), self.n_outputs).transpose(0, 1)
        return torch.stack([self._forward(vector, x) for vector in theta])

    def _forward(self, theta: Tensor, x: Tensor) -> Tensor:
        layers = self.unpack(theta)
        for weight, bias in layers[:-1]:
            x = torch.nn.functional.linear(x, weight, bias).relu_()
        return torch.nn.functional.linear(x, *layers[-1])

    def own_outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Every client's own model on its own rows.  theta [C, P], x [C, N, D] -> [C, N, O]"""
        layers = self.unpack(theta)
        for weight, bias in layers[:-1]:
            x = _affine(x, weight, bias).relu_()
        return _affine(x, *layers[-1])

    def gradient(self, theta: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Gradient of every client's weighted loss.  theta [S, C, P], x [C, N, D], y, weights [C, N] -> [S, C, P]"""
        return torch.stack([self.descent(vectors, momentum=0.0).gradient(x, y, weights) for vectors in theta])

    def linear_gradient(self, outputs: Tensor, x: Tensor, y: Tensor, weights: Tensor, theta: Tensor | None) -> Tensor:
        """Gradient of a model without hidden layers, from its outputs: one product for all runs.

        Parameters
        ----------
        outputs : Tensor
            [S, C, N, O] of each run's and client's model on the client's rows.
        x, y, weights : Tensor
            [C, N, D], [C, N], [C, N].
        theta : Tensor
            [S, C, P] those models; needed for a ridge penalty only.
        """
        delta = loss_gradient(self.loss, outputs, y, weighted(self.class_weights, y, weights))  # [S, C, N, O]
        runs, clients, rows, classes = delta.shape
        stacked = delta.permute(1, 0, 3, 2).reshape(clients, runs * classes, rows)
        g = torch.bmm(stacked, x).view(clients, runs, -1)  # [C, S, O D]
        if self.intercept:
            g = torch.cat([g, delta.sum(2).transpose(0, 1)], -1)
        return self._penalised(g.transpose(0, 1), theta)

    def _penalised(self, gradient: Tensor, theta: Tensor | None) -> Tensor:
        """Add the ridge penalty's gradient, in place."""
        if self.l2 and theta is not None:
            for name, part in self.layers.items():
                if name.endswith("weight"):
                    gradient[..., part] += self.l2 * theta[..., part]
        return gradient

    def descent(
        self,
        theta: Tensor,
        *,
        momentum: float,
        proximal: float = 0.0,
        layers: frozenset[str] | None = None,
        towards: Tensor | None = None,
    ) -> "DenseDescent":
        """Start gradient descent from theta [C, P], one model a client; of some named parameters, when they are given."""
        return DenseDescent(self, theta, momentum, proximal, layers, towards)


class DenseDescent:
    """Gradient descent of C models at once, each on its own client's rows."""

    def __init__(
        self,
        model: Dense,
        theta: Tensor,
        momentum: float,
        proximal: float,
        layers: frozenset[str] | None = None,
        towards: Tensor | None = None,
    ) -> None:
        self._model, self._momentum, self._proximal = model, momentum, proximal
        self._start = theta
        self._towards = theta if towards is None else towards
        # Contiguous working copies: products into strided views of the flat vectors are slower than this one copy.
        self._layers = [(w.contiguous(), None if b is None else b.clone()) for w, b in model.unpack(theta.clone())]
        names = frozenset(model.layers) if layers is None else layers
        self._moving: _Layers = [
            (w if f"{i}.weight" in names else None, b if f"{i}.bias" in names else None)
            for i, (w, b) in enumerate(self._layers)
        ]
        self._lowest = next((i for i, (w, b) in enumerate(self._moving) if w is not None or b is not None), 0)
        self._velocity: _Layers | None = None
        self._buffers: list[Tensor] = []

    def result(self) -> Tensor:
        """The models where they are now.  [C, P]"""
        return self._pack(self._layers)

    def gradient(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Gradient at the current models by what moves, without moving.  [C, P]"""
        return torch.cat([slope.flatten(1) for slope in self.slopes(x, y, weights)], 1)

    def slopes(self, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
        """The gradient, one tensor for each parameter that moves."""
        made = []
        for (w, b), (delta, below) in zip(self._moving[self._lowest :], self._backward(x, y, weights), strict=True):
            if w is not None:
                slope = torch.bmm(delta.transpose(1, 2), below)
                made.append(slope.add_(w, alpha=self._model.l2) if self._model.l2 else slope)
            if b is not None:
                made.append(delta.sum(1))
        return made

    def shifted(self, slopes: Sequence[Tensor], length: float) -> Self:
        """Models that are a step of some length away, against the slopes; these stay."""
        left = list(slopes)
        there = copy(self)
        there._layers = [
            (
                w if m_w is None else torch.sub(w, left.pop(0), alpha=length),
                b if b is None or m_b is None else torch.sub(b, left.pop(0), alpha=length),
            )
            for (w, b), (m_w, m_b) in zip(self._layers, self._moving, strict=True)
        ]
        there._moving = [
            (None if m_w is None else w, None if m_b is None else b)
            for (w, b), (m_w, m_b) in zip(there._layers, self._moving, strict=True)
        ]
        return there

    def step(self, x: Tensor, y: Tensor, weights: Tensor, step_size: float, active: Tensor | None = None) -> None:
        """Take one step; clients whose `active` [C] is 0 stay where they are."""
        self._move(self._backward(x, y, weights if active is None else weights * active[:, None]), step_size, active)

    def _move(self, deltas: list[tuple[Tensor, Tensor]], step_size: float, active: Tensor | None) -> None:
        """Take a step, given what `_backward` made."""
        one: float | Tensor = 1.0 if active is None else active
        into, alpha = self._moving, -step_size
        if self._momentum:
            into, alpha = self._decayed_velocity(one), 1.0
        if self._model.l2 or self._proximal:
            self._pull(into, alpha * one)
        for (w, b), (delta, below) in zip(into[self._lowest :], deltas, strict=True):
            _accumulate(w, b, delta, below, alpha)  # delta is 0 for clients that stay
        if self._momentum:
            for layer, velocity in zip(self._moving, into, strict=True):
                for value, v in zip(layer, velocity, strict=True):
                    if value is not None and v is not None:
                        value.sub_(_scaled(v, step_size * one))

    def _decayed_velocity(self, one: "float | Tensor") -> "_Layers":
        before = self._velocity or _zeros_like(self._moving)
        keep = 1.0 - (1.0 - self._momentum) * one  # 1 for clients that stay
        self._velocity = [
            (None if w is None else _scaled(w, keep), None if b is None else _scaled(b, keep)) for w, b in before
        ]
        return self._velocity

    def _pull(self, into: "_Layers", factor: "float | Tensor") -> None:
        """Add the gradient of the ridge and proximal terms, times a factor."""
        ends = self._model.unpack(self._towards)
        for (i_w, i_b), (w, b), (w0, b0) in zip(into, self._layers, ends, strict=True):
            if i_w is not None:
                i_w.add_(_scaled(self._model.l2 * w + self._proximal * (w - w0), factor))
            if i_b is not None and b is not None and b0 is not None:
                i_b.add_(_scaled(self._proximal * (b - b0), factor))

    def _backward(self, x: Tensor, y: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Forward and backward pass: by layer, the derivative by its outputs and its inputs.  [C, N, O], [C, N, I]

        From the lowest layer on that moves.
        """
        inputs = [x, *self._hidden(x, y.shape[1])]
        out = _affine(inputs[-1], *self._layers[-1])
        delta = loss_gradient(self._model.loss, out, y, weighted(self._model.class_weights, y, weights))
        deltas = [delta]
        for i in range(len(self._layers) - 1, self._lowest, -1):
            back = torch.bmm(delta, self._layers[i][0])
            delta = torch.ops.aten.threshold_backward(back, inputs[i], 0)  # ReLU's derivative, in one pass
            deltas.insert(0, delta)
        return list(zip(deltas, inputs[self._lowest :], strict=True))

    def _hidden(self, x: Tensor, n_rows: int) -> list[Tensor]:
        """Activations of the hidden layers, in buffers that are allocated once."""
        if not self._buffers or self._buffers[0].shape[1] != n_rows:
            clients = len(self._start)
            self._buffers = [self._start.new_empty(clients, n_rows, width) for width in self._model.sizes[1:-1]]
        for i, buffer in enumerate(self._buffers):
            x = (_affine(x, *self._layers[i], out=buffer) if i else self._enter(x, buffer)).relu_()
        return self._buffers

    def _enter(self, x: Tensor, out: Tensor) -> Tensor:
        """The first layer, where there are hidden ones."""
        return _affine(x, *self._layers[0], out=out)

    def _pack(self, layers: "Sequence[tuple[Tensor | None, Tensor | None]]") -> Tensor:
        return torch.cat([part.flatten(1) for layer in layers for part in layer if part is not None], 1)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2), out=out)
    return torch.baddbmm(bias[:, None, :], x, weight.transpose(1, 2), out=out)


def _accumulate(weight: Tensor | None, bias: Tensor | None, delta: Tensor, below: Tensor, alpha: float) -> None:
    """Add alpha times the layer's gradient: a product that updates in place, no gradient is ever formed."""
    if weight is not None:
        weight.baddbmm_(delta.transpose(1, 2), below, alpha=alpha)
    if bias is not None:
        bias.add_(delta.sum(1), alpha=alpha)


def _zeros_like(layers: "_Layers") -> "_Layers":
    return [(None if w is None else torch.zeros_like(w), None if b is None else torch.zeros_like(b)) for w, b in layers]


def _scaled(value: Tensor, factor: "float | Tensor") -> Tensor:
    if isinstance(factor, Tensor):
        factor = factor.view(-1, *(1,) * (value.dim() - 1))
    return value * factor


def linear_regression(n_features: int, *, intercept: bool = True, l2: float = 0.0) -> Dense:
    """Linear (with l2: ridge) regression, in float64."""
    return Dense((n_features, 1), "squared", intercept, l2)


def softmax_regression(n_features: int, n_classes: int, *, intercept: bool = True, l2: float = 0.0) -> Dense:
    """Logistic regression, one output per class, in float64."""
    return Dense((n_features, n_classes), "cross_entropy", intercept, l2)


def mlp(n_features: int, *hidden: int, n_outputs: int, loss: Loss = "cross_entropy") -> Dense:
    """Multilayer perceptron with ReLU, in float32."""
    return Dense((n_features, *hidden, n_outputs), loss, dtype=torch.float32)
