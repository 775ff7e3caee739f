# SPDX-License-Identifier: Apache-2.0
"""Any torch.nn.Module as a model: many clients at once through vmap, or one after the other where that is faster."""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.errors import ConfigError
from coterie.models.losses import Loss, row_loss, weighted

__all__ = ["Network", "lenet"]


@dataclass(frozen=True, eq=False)
class Network:
    """A torch module with a loss.

    Parameters
    ----------
    module : nn.Module
        Takes rows [R, ...] and gives outputs [R, O]. Its own parameters are only the pattern: they are not trained.
    loss : {"squared", "cross_entropy"}
        What is minimised.
    shape : tuple of int, optional
        What a row is reshaped to, for modules that want images while the rows are flat.
    kernel : {"vmap", "loop"}
        How clients are trained: all at once, or one after the other. `measured` chooses.
    augment : callable, optional
        Changes the rows of every training step: (x [C, B, ...], keys [C, B]) -> x. Driven by the keys only.
    class_weights, threshold
        As of `Dense`.
    """

    module: nn.Module
    loss: Loss
    shape: tuple[int, ...] | None = None
    kernel: Literal["vmap", "loop"] = "vmap"
    augment: Callable[[Tensor, Tensor], Tensor] | None = None
    class_weights: tuple[float, ...] = ()
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in self.module.modules()):
            raise ConfigError(
                "the model has dropout, whose noise cannot be seeded here", "set p=0 in its Dropout layers"
            )
        if any(True for _ in self.module.buffers()):
            raise ConfigError(
                "the model has buffers (BatchNorm?), which cannot be averaged over clients",
                "use GroupNorm or LayerNorm instead of BatchNorm",
            )

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(self.module.parameters()).dtype

    @cached_property
    def layers(self) -> dict[str, slice]:
        """Where each named parameter lies in the flat vector."""
        out, at = {}, 0
        for name, value in self.module.named_parameters():
            out[name] = slice(at, at + value.numel())
            at += value.numel()
        return out

    @property
    def n_parameters(self) -> int:
        """Length of the flat vector."""
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def n_outputs(self) -> int:
        """Outputs per row: what the last layer says."""
        last = list(self.module.parameters())[-1]
        return len(last)

    @property
    def is_linear(self) -> bool:
        """Never known."""
        return False

    def initial(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw n start vectors by the layers' own reset_parameters.  [n, P]"""
        drawn = []
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator)))
            before = [value.detach().clone() for value in self.module.parameters()]
            for _ in range(n):
                for part in self.module.modules():
                    reset = getattr(part, "reset_parameters", None)
                    if callable(reset):
                        reset()
                drawn.append(torch.cat([p.detach().flatten() for p in self.module.parameters()]))
            with torch.no_grad():
                for value, own in zip(self.module.parameters(), before, strict=True):
                    value.copy_(own)
        return torch.stack(drawn)

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """View flat vectors [..., P] as named parameters."""
        shapes = {name: p.shape for name, p in self.module.named_parameters()}
        return {name: theta[..., part].view(*theta.shape[:-1], *shapes[name]) for name, part in self.layers.items()}

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Every model on every row.  theta [J, P], x [R, ...] -> [J, R, O]"""
        with torch.no_grad():
            return torch.stack([functional_call(self.module, self.unpack(v), (self._shaped(x),)) for v in theta])

    def own_outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Every client's own model on its own rows.  theta [C, P], x [C, N, ...] -> [C, N, O]"""
        with torch.no_grad():
            return torch.stack(
                [
                    functional_call(self.module, self.unpack(v), (self._shaped(r),))
                    for v, r in zip(theta, x, strict=True)
                ]
            )

    def gradient(self, theta: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Gradient of every client's weighted loss.  theta [S, C, P], x [C, N, ...], y, weights [C, N] -> [S, C, P]"""
        return torch.stack([self.descent(v, momentum=0.0).gradient(x, y, weights) for v in theta])

    def descent(
        self,
        theta: Tensor,
        *,
        momentum: float,
        proximal: float = 0.0,
        layers: frozenset[str] | None = None,
        towards: Tensor | None = None,
    ) -> "NetworkDescent":
        """Start gradient descent from theta [C, P], one model a client; of some named parameters, when they are given."""
        return NetworkDescent(self, theta, momentum, proximal, layers, towards)

    def measured(self, x: Tensor, y: Tensor) -> "Network":
        """Choose the faster kernel by training on some rows.  x [C, N, ...], y [C, N]"""
        theta = self.initial(1, torch.Generator().manual_seed(0)).expand(len(x), -1)
        weights = torch.full(y.shape[:2], 1 / y.shape[1], dtype=self.dtype)
        seconds = {}
        for kernel in ("vmap", "loop"):
            trial = replace(self, kernel=kernel)
            for warm in (True, False):
                begin = time.perf_counter()
                trial.descent(theta, momentum=0.0).step(x, y, weights, 0.0)
                if not warm:
                    seconds[kernel] = time.perf_counter() - begin
        return replace(self, kernel="vmap" if seconds["vmap"] <= seconds["loop"] else "loop")

    def _shaped(self, x: Tensor) -> Tensor:
        return x if self.shape is None else x.reshape(-1, *self.shape)

    def _client_loss(
        self, moving: dict[str, Tensor], fixed: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor
    ) -> Tensor:
        outputs = functional_call(self.module, {**moving, **fixed}, (self._shaped(x),))
        return (row_loss(self.loss, outputs, y) * weighted(self.class_weights, y, weights)).sum()


class NetworkDescent:
    """Gradient descent of C modules at once, each on its own client's rows."""

    def __init__(
        self,
        model: Network,
        theta: Tensor,
        momentum: float,
        proximal: float,
        layers: frozenset[str] | None = None,
        towards: Tensor | None = None,
    ) -> None:
        self._momentum, self._proximal = momentum, proximal
        self._all = model.unpack(theta)
        self._start = {name: value for name, value in self._all.items() if layers is None or name in layers}
        self._towards = self._start if towards is None else model.unpack(towards)
        self._now = {name: value.clone() for name, value in self._start.items()}
        self._velocity: dict[str, Tensor] = {}
        self._fixed = {name: value for name, value in self._all.items() if name not in self._start}
        # What does not move and is the same for all clients is held once: their rows then pass through it together.
        common = {name for name, value in self._fixed.items() if bool((value == value[:1]).all())}
        self._fixed |= {name: self._fixed[name][0] for name in common}
        axes = {name: None if name in common else 0 for name in self._fixed}
        one = grad(model._client_loss)
        self._gradient = vmap(one, (0, axes, 0, 0, 0)) if model.kernel == "vmap" else _looped(one, common)

    def result(self) -> Tensor:
        """The models where they are now.  [C, P]"""
        return torch.cat([self._now.get(name, value).flatten(1) for name, value in self._all.items()], 1)

    def gradient(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """Gradient at the current models by what moves, without moving.  [C, P]"""
        return torch.cat([slope.flatten(1) for slope in self.slopes(x, y, weights)], 1)

    def slopes(self, x: Tensor, y: Tensor, weights: Tensor) -> list[Tensor]:
        """The gradient, one tensor for each parameter that moves."""
        return list(self._gradient(self._now, self._fixed, x, y, weights).values())

    def shifted(self, slopes: Sequence[Tensor], length: float) -> "NetworkDescent":
        """Models that are a step of some length away, against the slopes; these stay."""
        there = copy(self)
        there._now = {
            name: torch.sub(value, slope, alpha=length)
            for (name, value), slope in zip(self._now.items(), slopes, strict=True)
        }
        return there

    def step(self, x: Tensor, y: Tensor, weights: Tensor, step_size: float, active: Tensor | None = None) -> None:
        """Take one step; clients whose `active` [C] is 0 stay where they are."""
        for name, g in self._gradient(self._now, self._fixed, x, y, weights).items():
            one = 1.0 if active is None else active.view(-1, *(1,) * (g.dim() - 1))
            self._now[name].sub_(self._direction(name, g, one), alpha=step_size)

    def _direction(self, name: str, g: Tensor, one: "float | Tensor") -> Tensor:
        """Add the proximal term and momentum; 0 for clients that stay."""
        if self._proximal:
            g = g + self._proximal * (self._now[name] - self._towards[name])
        if isinstance(one, Tensor):
            g = g * one
        if not self._momentum:
            return g
        before = self._velocity.get(name, torch.zeros_like(g))
        velocity = self._velocity[name] = before * (1 - (1 - self._momentum) * one) + g
        return velocity * one if isinstance(one, Tensor) else velocity


def _looped(one: Callable[..., dict[str, Tensor]], common: set[str]) -> Callable[..., dict[str, Tensor]]:
    def every(moving: dict[str, Tensor], fixed: dict[str, Tensor], *rows: Tensor) -> dict[str, Tensor]:
        made = []
        for c in range(len(rows[0])):
            held = {name: p if name in common else p[c] for name, p in fixed.items()}
            made.append(one({name: p[c] for name, p in moving.items()}, held, *(r[c] for r in rows)))
        return {name: torch.stack([g[name] for g in made]) for name in moving}

    return every


def lenet(
    channels: int, size: int, n_classes: int, *, flat: bool = True, kernel: Literal["vmap", "loop"] = "vmap"
) -> Network:
    """Two convolutions and two dense layers, for square images (sides a multiple of 4), flat or channels first."""
    module = nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (size // 4) ** 2, 128), nn.ReLU(), nn.Linear(128, n_classes),
    )  # fmt: skip
    return Network(module, "cross_entropy", shape=(channels, size, size) if flat else None, kernel=kernel)
