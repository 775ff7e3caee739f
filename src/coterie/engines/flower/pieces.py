# SPDX-License-Identifier: Apache-2.0
"""Answers of nodes: are they what was asked for, and what do they come to together?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from coterie.data.ragged import Layout, Ragged
from coterie.engines.screening import Bounds
from coterie.engines.worker import Answer, Worker, same_form
from coterie.errors import RunError
from coterie.protocol import Ask, ByCluster, Individual, Mean, Stack, Sum, Tensors, WeightedMean
from coterie.robust_folds import Trimmed, TrimmedByCluster

__all__ = ["Expected", "Piece", "bytes_of", "joined", "lengths_in", "spoiled"]

_KINDS = 32  # of questions whose answers are remembered
_ROUNDING = 1 + 1e-6  # sums of shares in single precision
COUNTS = {"answers", "count", "counted", "n", "rows", "there", "weight", "within"}  # fields of answers that count

Parts = dict[str, Tensors]  # field -> what its fold made


@dataclass(frozen=True)
class Piece:
    """One node's part of an answer: clients by their numbers in the federation, in the order of its stacks.

    Clients that the node has left out are not among them; parts are empty where all are.
    """

    node: str
    ids: Tensor
    parts: Parts
    left_out: dict[int, str] = field(default_factory=dict)
    lengths: Tensors = field(default_factory=dict)


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
        parts = Worker(row).answer({0: one}, torch.tensor([0]), {0: Bounds(everyone=True)})[0].parts
        self.seen = [*self.seen[1 - _KINDS :], (one, parts)]
        return parts

    def check(self, ask: Ask, parts: Parts, rows: Tensor) -> None:
        """Refuse an answer that has other fields, shapes or types than it must, or counts more than there is.

        `rows` [C] are the row counts of those who answer, as their node has introduced them.
        """
        n_clients = len(rows)
        wanted = self.of(ask) if n_clients else {}
        if parts.keys() != wanted.keys():
            raise RunError(f"it answers {sorted(parts)} where {sorted(wanted)} was asked for")
        for name, part in wanted.items():
            if parts[name].keys() != part.keys():
                raise RunError(f"'{name}' comes as {sorted(parts[name])} and not as {sorted(part)}")
            for key, value in part.items():
                got, shape = parts[name][key], list(value.shape)
                if isinstance(ask.fold[name], Individual):
                    shape[1] = n_clients
                if not isinstance(got, Tensor) or got.dtype != value.dtype or list(got.shape) != shape:
                    said = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
                    raise RunError(f"'{name}' is {said} and not {value.dtype} {shape}")
            if ask.noise is None:
                _check_counts(ask, name, parts[name], rows)


def _check_counts(ask: Ask, name: str, part: Tensors, rows: Tensor) -> None:
    """Refuse clients or rows that are not there: weights decide how much a node's answer counts.

    Weights are never below zero. Those of coterie's own client functions are row counts, or at most one for each client.
    What others weigh by is not known.
    """
    how, most = ask.fold[name], float(max(int(rows.sum()), len(rows)))
    if isinstance(how, Mean):
        _check_between(f"'{name}' is a mean of", part["count"], len(rows), len(rows))
    own = ask.step.__module__.startswith("coterie.")
    if isinstance(how, WeightedMean | ByCluster):
        total = part["weight"].sum(-1) if isinstance(how, ByCluster) else part["weight"]
        _check_between(f"a weight of '{name}' is", part["weight"], 0, math.inf)
        _check_between(f"the weight of '{name}' is", total, 0, most if own else math.inf)
    if isinstance(how, Trimmed | TrimmedByCluster):
        each = rows.clamp(min=1).view(1, -1, *(1,) * (part["weight"].dim() - 2))
        _check_between(f"a weight of '{name}' is", part["weight"], 0, each if own else math.inf)
    if own and name in COUNTS and isinstance(how, Sum):
        _check_between(f"'{name}' is", part["sum"], 0, most)
    if own and name in COUNTS and isinstance(how, Stack):
        each = rows.clamp(min=1).view(1, -1, *(1,) * (part["stack"].dim() - 2))
        _check_between(f"'{name}' is", part["stack"], 0, each)


def _check_between(what: str, value: Tensor, least: float, most: "float | Tensor") -> None:
    wrong = ~((value >= least) & (value <= most * _ROUNDING))  # NaN is wrong, too
    if bool(wrong.any()):
        end = float(most.max()) if isinstance(most, Tensor) else most
        raise RunError(f"{what} {float(value[wrong][0]):g}, and must be {least:g} to {end:g}")


def spoiled(ask: Ask, pieces: Sequence[Piece], *, stacks: bool) -> dict[str, str]:
    """Nodes whose numbers are not finite where another's are: they would spoil the model.  -> why, by node

    Parameters
    ----------
    stacks : bool
        Whether that holds for individual answers too, and not only for sums.
    """
    found: dict[str, str] = {}
    pieces = [piece for piece in pieces if len(piece.ids)]
    for name, how in ask.fold.items():
        if isinstance(how, Individual) and not stacks:
            continue
        fine = {piece.node: _finite(piece.parts[name]) for piece in pieces}
        if any(fine.values()):
            found |= {node: f"'{name}' is not finite, and others' is" for node, well in fine.items() if not well}
    return found


def _finite(part: Tensors) -> bool:
    return all(bool(value.isfinite().all()) for value in part.values())


def lengths_in(pieces: Sequence[Piece]) -> Tensors:
    """Clients counted by the length of their values, of all nodes together."""
    names = dict.fromkeys(name for piece in pieces for name in piece.lengths)
    return {name: torch.cat([piece.lengths[name] for piece in pieces if name in piece.lengths]) for name in names}


def joined(ask: Ask, pieces: Sequence[Piece], bytes_down: int) -> Answer:
    """Put pieces together, in the order in which they are given: it does not depend on who came first."""
    left_out = {one: why for piece in pieces for one, why in piece.left_out.items()}
    lengths, pieces = lengths_in(pieces), [piece for piece in pieces if len(piece.ids)]
    if not pieces:
        return Answer({}, torch.zeros(0, dtype=torch.int64), 0, bytes_down, left_out, lengths)
    parts = dict(pieces[0].parts)
    for piece in pieces[1:]:
        parts = {name: ask.fold[name].merge(parts[name], piece.parts[name]) for name in parts}
    ids, order = torch.cat([piece.ids for piece in pieces]).sort()
    parts = {
        name: {key: value[:, order] for key, value in part.items()} if isinstance(ask.fold[name], Individual) else part
        for name, part in parts.items()
    }
    up = sum(value.nbytes for piece in pieces for part in piece.parts.values() for value in part.values())
    return Answer(parts, ids, up, bytes_down, left_out, lengths)


def bytes_of(values: Mapping[str, object]) -> int:
    """What tensors take."""
    return sum(value.nbytes for value in values.values() if isinstance(value, Tensor))
