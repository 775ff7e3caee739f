# SPDX-License-Identifier: Apache-2.0
"""Answers of nodes: are they what was asked for, and what do they come to together?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from coterie.data.ragged import Layout, Ragged
from coterie.engines.worker import Answer, Worker, same_form
from coterie.errors import RunError
from coterie.protocol import Ask, Stack, Tensors

__all__ = ["Expected", "Piece", "bytes_of", "filled", "joined", "spoiled"]

_KINDS = 32  # of questions whose answers are remembered

Parts = dict[str, Tensors]  # field -> what its fold made


@dataclass(frozen=True)
class Piece:
    """One node's part of an answer: clients by their numbers in the federation, in the order of its stacks."""

    node: str
    ids: Tensor
    parts: Parts


@dataclass
class Expected:
    """What answers look like: the client function is tried here, on a client with one row of zeros.

    Attributes
    ----------
    x, y : Tensor
        Without rows: shape and precision.
    """

    x: Tensor
    y: Tensor | None
    seen: list[tuple[Ask, Parts]] = field(default_factory=list)

    def of(self, ask: Ask) -> Parts:
        """Answers of one client."""
        one = replace(ask, each={name: value[:1] for name, value in ask.each.items()})
        for known, parts in self.seen:
            if same_form(known, one):
                return parts
        row = Ragged(
            Layout.plan(np.array(["nobody"]), np.array([1])),
            self.x.new_zeros(1, *self.x.shape[1:]),
            None if self.y is None else self.y.new_zeros(1, *self.y.shape[1:]),
        )
        parts = Worker(row).answer({0: one}, torch.tensor([0]))[0].parts
        self.seen = [*self.seen[1 - _KINDS :], (one, parts)]
        return parts

    def check(self, ask: Ask, parts: Parts, n_clients: int) -> None:
        """Refuse an answer that has other fields, shapes or types than it must."""
        wanted = self.of(ask)
        if parts.keys() != wanted.keys():
            raise RunError(f"it answers {sorted(parts)} where {sorted(wanted)} was asked for")
        for name, part in wanted.items():
            if parts[name].keys() != part.keys():
                raise RunError(f"'{name}' comes as {sorted(parts[name])} and not as {sorted(part)}")
            for key, value in part.items():
                got, shape = parts[name][key], list(value.shape)
                if isinstance(ask.fold[name], Stack):
                    shape[1] = n_clients
                if not isinstance(got, Tensor) or got.dtype != value.dtype or list(got.shape) != shape:
                    said = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
                    raise RunError(f"'{name}' is {said} and not {value.dtype} {shape}")


def spoiled(ask: Ask, pieces: Sequence[Piece], *, stacks: bool) -> dict[str, str]:
    """Nodes whose numbers are not finite where another's are: they would spoil the model.  -> why, by node

    Parameters
    ----------
    stacks : bool
        Whether that holds for individual answers too, and not only for sums.
    """
    found: dict[str, str] = {}
    for name, how in ask.fold.items():
        if isinstance(how, Stack) and not stacks:
            continue
        fine = {piece.node: _finite(piece.parts[name]) for piece in pieces}
        if any(fine.values()):
            found |= {node: f"'{name}' is not finite, and others' is" for node, well in fine.items() if not well}
    return found


def _finite(part: Tensors) -> bool:
    return all(bool(value.isfinite().all()) for value in part.values())


def joined(ask: Ask, pieces: Sequence[Piece], bytes_down: int) -> Answer:
    """Put pieces together, in the order in which they are given: it does not depend on who came first."""
    if not pieces:
        return Answer({}, torch.zeros(0, dtype=torch.int64), 0, bytes_down)
    parts = dict(pieces[0].parts)
    for piece in pieces[1:]:
        parts = {name: ask.fold[name].merge(parts[name], piece.parts[name]) for name in parts}
    ids, order = torch.cat([piece.ids for piece in pieces]).sort()
    parts = {
        name: {"stack": part["stack"][:, order]} if isinstance(ask.fold[name], Stack) else part
        for name, part in parts.items()
    }
    up = sum(value.nbytes for piece in pieces for part in piece.parts.values() for value in part.values())
    return Answer(parts, ids, up, bytes_down)


def filled(ask: Ask, answer: Answer, ids: Tensor, expected: Parts) -> Answer:
    """Let clients that could not be reached count as clients without rows: zeros in what is individual."""
    parts: Parts = {}
    at = torch.searchsorted(ids, answer.ids)
    for name, part in expected.items():
        how = ask.fold[name]
        if not isinstance(how, Stack):
            parts[name] = answer.parts.get(name, {key: torch.zeros_like(value) for key, value in part.items()})
            continue
        like = part["stack"]
        whole = like.new_zeros(1, len(ids), *like.shape[2:])
        if len(answer.ids):
            whole[:, at] = answer.parts[name]["stack"]
        parts[name] = {"stack": whole}
    return replace(answer, parts=parts, ids=ids)


def bytes_of(values: Mapping[str, object]) -> int:
    """What tensors take."""
    return sum(value.nbytes for value in values.values() if isinstance(value, Tensor))
