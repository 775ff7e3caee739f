# SPDX-License-Identifier: Apache-2.0
"""Models in two parts: layers that everybody shares and layers that are a client's own, chosen by their names."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError
from coterie.models.dense import Dense
from coterie.models.network import Network

__all__ = [
    "Part",
    "Split",
    "Tail",
    "first_layers",
    "last_layers",
    "layer_names",
    "named_layers",
    "split",
    "tail",
]

Part = Literal["personal", "shared", "both"]

_ROWS = 1024  # that pass through fixed layers at once: a convolution's activations take a hundred times a row's room


def layer_names(model: Dense | Network) -> tuple[str, ...]:
    """Names of the layers with parameters, from the input on, without ``.weight`` and ``.bias``."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in model.layers))


def last_layers(model: Dense | Network, n: int) -> tuple[str, ...]:
    """Names of the last n layers, and of fewer when one would not be left."""
    names = layer_names(model)
    return names[max(1, len(names) - n) :]


def first_layers(model: Dense | Network, n: int) -> tuple[str, ...]:
    """Names of all but the last n layers, and of one at least."""
    names = layer_names(model)
    return names[: max(1, len(names) - n)]


def named_layers(model: Dense | Network, beginnings: Iterable[str], option: str) -> frozenset[str]:
    """Parameters of the layers whose names begin so; `option` is who asked, for the error."""
    found: set[str] = set()
    for layer in beginnings:
        own = {name for name in model.layers if name == layer or name.startswith(f"{layer}.")}
        if not own:
            raise ConfigError(
                f"{option}: the model has no layer '{layer}'", f"its layers are {', '.join(model.layers)}"
            )
        found |= own
    return frozenset(found)


@dataclass(frozen=True)
class Split:
    """Where a model's shared and personal parameters lie in its flat vector.

    Attributes
    ----------
    personal, shared : tuple of str
        Names of the parameters of either part, in the model's order.
    order : tuple
        Pieces of the flat vector, from the beginning: whether it is personal, where it begins and where it ends.
    """

    personal: tuple[str, ...]
    shared: tuple[str, ...]
    order: tuple[tuple[bool, int, int], ...]

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of the shared and of the personal part: Q and P - Q."""
        shared, personal = (sum(b - a for own, a, b in self.order if own == side) for side in (False, True))
        return shared, personal

    def moving(self, part: Part) -> frozenset[str]:
        """Names of the parameters that move when this part is trained."""
        chosen = {"personal": self.personal, "shared": self.shared, "both": self.personal + self.shared}
        return frozenset(chosen[part])

    def parts(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Take vectors apart.  [..., P] -> shared [..., Q], personal [..., P - Q]"""
        shared, personal = ([theta[..., a:b] for own, a, b in self.order if own == side] for side in (False, True))
        return _together(shared), _together(personal)

    def join(self, shared: Tensor, personal: Tensor) -> Tensor:
        """Put vectors together; their leading axes may broadcast.  [..., Q], [..., P - Q] -> [..., P]"""
        lead = (shared[..., :1] + personal[..., :1]).shape[:-1]
        pieces, at = [], {False: 0, True: 0}
        for own, a, b in self.order:
            value, first = personal if own else shared, at[own]
            at[own] += b - a
            pieces.append(value[..., first : at[own]].expand(*lead, -1))
        return torch.cat(pieces, -1)


def _together(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def split(model: Dense | Network, personal: Iterable[str]) -> Split:
    """Split a model, given the personal layers by the beginnings of their names."""
    own = named_layers(model, personal, "personal")
    if not own or len(own) == len(model.layers):
        what = "none" if not own else "all"
        raise ConfigError(
            f"personal: {what} of the model's layers would be personal",
            f"choose some of {', '.join(layer_names(model))}",
        )
    order: list[tuple[bool, int, int]] = []
    for name, part in model.layers.items():
        begin = order.pop()[1] if order and order[-1][0] == (name in own) else part.start
        order.append((name in own, begin, part.stop))
    names = tuple(model.layers)
    return Split(tuple(n for n in names if n in own), tuple(n for n in names if n not in own), tuple(order))


@dataclass(frozen=True)
class Tail:
    """The last layers of a model as a model of their own, so that what the layers below make of the rows is made once.

    Attributes
    ----------
    model : Dense or Network
        The last layers.
    below : Dense or Network
        The others.
    """

    model: Dense | Network
    below: Dense | Network

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """What the last layers get, from one common model below or from every client's own.

        theta [1 or C, Q], x [C, N, ...] -> [C, N, ...]
        """
        if len(theta) == 1:
            rows = x.flatten(0, 1)
            pieces = [self.below.outputs(theta, rows[i : i + _ROWS])[0] for i in range(0, max(1, len(rows)), _ROWS)]
            flat = torch.cat(pieces)
            made = flat.view(*x.shape[:2], *flat.shape[1:])
        else:
            made = self.below.own_outputs(theta, x)
        return made.relu_() if isinstance(self.below, Dense) else made


def tail(model: Dense | Network, layers: frozenset[str]) -> Tail | None:
    """Cut a model below these layers; None where they are not the last ones, or the module is not a plain sequence."""
    names = tuple(model.layers)
    first = len(names) - len(layers)
    if not layers or not first or frozenset(names[first:]) != layers:
        return None
    if isinstance(model, Dense):
        at = int(names[first].split(".")[0])
        if names[first - 1].startswith(f"{at}."):  # between a layer's weight and its bias
            return None
        return Tail(replace(model, sizes=model.sizes[at:]), replace(model, sizes=model.sizes[: at + 1]))
    if type(model.module) is not nn.Sequential:  # a subclass may do more than one layer after the other
        return None
    children = [name for name, _ in model.module.named_children()]
    at = children.index(names[first].split(".")[0])
    if names[first - 1].split(".")[0] == children[at]:
        return None
    upper, lower = model.module[at:], model.module[:at]
    return Tail(replace(model, module=upper, shape=None), replace(model, module=lower))
