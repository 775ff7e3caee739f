# SPDX-License-Identifier: Apache-2.0
"""A worker holds some clients' rows and private state, answers for all of them at once, and folds what it can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.data.ragged import BLOCK_BYTES, Ragged
from coterie.protocol import Ask, Block, Tensors

__all__ = ["Answer", "Worker"]


@dataclass
class Answer:
    """What one run's ask brought: a part for every field, with a leading run axis of one."""

    parts: dict[str, Tensors] = field(default_factory=dict)
    ids: list[Tensor] = field(default_factory=list)
    bytes_up: int = 0


class Worker:
    """The client side of an engine.

    Parameters
    ----------
    rows : Ragged
        The clients' rows.
    block_bytes : int
        Memory that a block may take: its rows, what its clients are sent, and what they answer.
    """

    def __init__(self, rows: Ragged, *, block_bytes: int = BLOCK_BYTES) -> None:
        self.rows = rows
        self.block_bytes = block_bytes
        self.private: dict[int, Tensors] = {}  # run -> name -> [M, ...]

    def answer(self, asks: Mapping[int, Ask], ids: Tensor) -> dict[int, Answer]:
        """Put every run's ask to the same clients, in one pass over their rows.

        Parameters
        ----------
        asks : mapping
            Run number -> its ask.
        ids : Tensor
            The clients, ascending.
        """
        answers = {run: Answer() for run in asks}
        groups = [_Lockstep(runs, [asks[run] for run in runs]) for runs in _alike(asks)]
        if len(ids):
            room = sum(group.bytes for group in groups)
            scratch = sum(len(group.runs) * group.ask.scratch * group.item_size for group in groups)
            for block in self.rows.blocks(ids, budget=self.block_bytes, room=room, row_room=scratch):
                place = torch.searchsorted(ids, block.ids)
                for group in groups:
                    self._answer_block(group, block, place, answers)
        return answers

    def _answer_block(self, group: "_Lockstep", block: Block, place: Tensor, answers: dict[int, Answer]) -> None:
        ask = group.ask
        each = {name: value[:, place] for name, value in group.each.items()}
        private = {
            name: torch.stack([self._private(run, name, a.fresh[name])[block.ids] for run, a in group.each_run])
            for name in ask.fresh
        }
        reply, private = ask.step(dict(group.shared), each, private, block)
        for name, value in private.items():
            for s, run in enumerate(group.runs):
                self.private[run][name][block.ids] = value[s]
        reply = {name: value.expand(len(group.runs), *value.shape[1:]) for name, value in reply.items()}
        parts = {name: fold.part(reply[name], reply) for name, fold in ask.fold.items()}
        sent = {needed for fold in ask.fold.values() for needed in fold.needs} | set(ask.fold)
        up = sum(reply[name][0].nbytes for name in sent)
        for s, run in enumerate(group.runs):
            answer = answers[run]
            answer.ids.append(block.ids)
            answer.bytes_up += up
            for name, fold in ask.fold.items():
                part = {k: v[s : s + 1] for k, v in parts[name].items()}
                answer.parts[name] = fold.merge(answer.parts[name], part) if name in answer.parts else part

    def _private(self, run: int, name: str, fresh: Tensor) -> Tensor:
        """A run's private state, [M, ...]; what is asked for the first time starts fresh."""
        kept = self.private.setdefault(run, {})
        if name not in kept:
            kept[name] = fresh.expand(self.rows.n_clients, *fresh.shape).clone()
        return kept[name]


class _Lockstep:
    """Asks of several runs that differ in the values of their tensors only: stacked once, answered together."""

    def __init__(self, runs: Sequence[int], asks: Sequence[Ask]) -> None:
        self.runs, self.ask = list(runs), asks[0]
        self.each_run = list(zip(runs, asks, strict=True))
        self.shared: dict[str, Any] = {
            name: torch.stack([a.shared[name] for a in asks]) if isinstance(value, Tensor) else value
            for name, value in self.ask.shared.items()
        }
        self.each = {name: torch.stack([a.each[name] for a in asks]) for name in self.ask.each}
        tensors = [v for v in self.shared.values() if isinstance(v, Tensor)]
        own = [v.nbytes for v in self.ask.fresh.values()] + [v[:1].nbytes for v in self.ask.each.values()]
        self.bytes = sum(v.nbytes for v in tensors) + len(asks) * sum(own)  # that one client is sent and keeps
        self.item_size = max((v.element_size() for v in tensors), default=8)


def _alike(asks: Mapping[int, Ask]) -> list[list[int]]:
    """Group runs whose asks can be stacked."""
    groups: list[tuple[Ask, list[int]]] = []
    for run, ask in asks.items():
        for first, runs in groups:
            if _same_form(first, ask):
                runs.append(run)
                break
        else:
            groups.append((ask, [run]))
    return [runs for _, runs in groups]


def _same_form(a: Ask, b: Ask) -> bool:
    if a.step is not b.step or dict(a.fold) != dict(b.fold):
        return False
    return all(
        _same_values(dict(left), dict(right))
        for left, right in ((a.shared, b.shared), (a.each, b.each), (a.fresh, b.fresh))
    )


def _same_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    for name, left in a.items():
        right = b[name]
        if isinstance(left, Tensor):
            if not isinstance(right, Tensor) or left.shape != right.shape or left.dtype != right.dtype:
                return False
        elif isinstance(right, Tensor) or left != right:
            return False
    return True
