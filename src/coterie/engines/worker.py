# SPDX-License-Identifier: Apache-2.0
"""A worker holds some clients' rows and private state, answers for all of them at once, and folds what it can."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.data.ragged import BLOCK_BYTES, Ragged
from coterie.errors import RunError
from coterie.protocol import Ask, Block, RowProduct, Tensors, run_of
from coterie.threads import for_work

__all__ = ["Answer", "Worker", "same_form"]

_CUTS = 16  # ways to cut the same rows that are kept, as far as they fit: questions in lockstep want different blocks
_ROOM = 4  # blocks whose memory is for that


@dataclass(frozen=True)
class Answer:
    """What one run's ask brought.

    Attributes
    ----------
    parts : dict
        Field -> what its fold made of the replies, with a leading run axis of one; empty when nobody answered.
    ids : Tensor
        Who answered, ascending: the order of stacked fields.
    bytes_up : int
        What all clients' own replies would take; from afar, what the replies took that came.
    bytes_down : int, optional
        What was sent; None where nothing travels.
    """

    parts: dict[str, Tensors]
    ids: Tensor
    bytes_up: int
    bytes_down: int | None = None


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
        self.least_clients = 1  # behind a sum of some of the clients, such as those of a cluster
        self._cuts: list[_Cut] = []

    def answer(self, asks: Mapping[int, Ask], ids: Tensor) -> dict[int, Answer]:
        """Put every run's ask to the same clients, in one pass over their rows.

        Parameters
        ----------
        asks : mapping
            Slot -> its ask. Several asks of a run share its private state.
        ids : Tensor
            The clients, ascending.
        """
        for ask in asks.values():
            self.rows.admit(ask.step)
        groups = [
            _Lockstep(slots, [asks[at] for at in slots], counted=self.least_clients > 1) for slots in _alike(asks)
        ]
        if len(ids):
            with for_work(self.rows.numbers(ids)):
                for some in (
                    [[group] for group in groups] if self._small else [groups]
                ):  # else rows are read once for all
                    for block in self._blocks(ids, some):
                        place = torch.searchsorted(ids, block.ids)
                        for group in some:
                            self._answer_block(group, block, place)
        for group in groups:
            group.refuse_fewer(self.least_clients)
        return {at: answer for group in groups for at, answer in group.answers().items()}

    @property
    def _small(self) -> bool:
        """Whether all rows fit into a block."""
        return isinstance(self.rows.x, Tensor) and self.rows.x.nbytes <= self.block_bytes

    def _blocks(self, ids: Tensor, groups: Sequence["_Lockstep"]) -> Iterable[Block]:
        """Cut clients into blocks; few rows stay cut for the next time, together with what clients keep of them."""
        room = sum(group.bytes for group in groups)
        row_room = sum(len(group.runs) * group.ask.scratch * group.item_size for group in groups)
        cut = self.rows.blocks(ids, budget=self.block_bytes, room=room, row_room=row_room)
        if not self._small:
            return cut
        known = next((old for old in self._cuts if old.room == (room, row_room) and torch.equal(old.ids, ids)), None)
        made = known or _Cut(ids, (room, row_room), list(cut))
        most = min(_CUTS, max(1, _ROOM * self.block_bytes // max(8 * self.rows.numbers(ids), 1)))
        self._cuts = [made, *(old for old in self._cuts if old is not made)][:most]
        return made.blocks

    def _answer_block(self, group: "_Lockstep", block: Block, place: Tensor) -> None:
        each = {name: value[:, place] for name, value in group.each.items()}
        private = {
            name: torch.stack([self._private(run_of(at), name, a.fresh[name])[block.ids] for at, a in group.each_run])
            for name in group.ask.fresh
        }
        reply, private = group.ask.step(dict(group.shared), each, private, block)
        for name, value in private.items():
            for s, run in enumerate(group.runs):
                self.private[run_of(run)][name][block.ids] = value[s]
        group.take(block.ids, {name: _for_all(value, len(group.runs)) for name, value in reply.items()})

    def _private(self, run: int, name: str, fresh: Tensor) -> Tensor:
        """A run's private state, [M, ...]; what is asked for the first time starts fresh."""
        kept = self.private.setdefault(run, {})
        if name not in kept:
            kept[name] = fresh.expand(self.rows.n_clients, *fresh.shape).clone()
        return kept[name]


@dataclass(frozen=True)
class _Cut:
    """How clients were cut into blocks, and for what room."""

    ids: Tensor
    room: tuple[int, int]
    blocks: list[Block]


class _Lockstep:
    """Asks of several runs that differ in the values of their tensors only: stacked once, answered together."""

    def __init__(self, runs: Sequence[int], asks: Sequence[Ask], *, counted: bool) -> None:
        self.runs, self.ask, self.counted = list(runs), asks[0], counted
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
        self._parts: dict[str, Tensors] = {}
        self._ids: list[Tensor] = []
        self._up = 0
        self._behind: Tensors = {}  # field -> clients behind each of its sums, where these are of some of the clients

    def refuse_fewer(self, least: int) -> None:
        """Refuse to answer with a sum over fewer clients, but for sums over nobody."""
        for name, clients in self._behind.items():
            few = clients[(clients > 0) & (clients < least)]
            if len(few):
                raise RunError(
                    f"a sum of '{name}' would be over {int(few.min())} clients of a cluster, and {least} are needed",
                    "this node's policy refuses it; see docs/policy.md",
                )

    def take(self, ids: Tensor, reply: Tensors) -> None:
        """Fold a block's replies, of all runs at once, into what came before."""
        fold = self.ask.fold
        for name, how in fold.items():
            part = how.part(reply[name], reply)
            if self.counted and (share := getattr(how, "share", None)):
                there = (reply[share] != 0).sum(1)
                self._behind[name] = self._behind[name] + there if name in self._behind else there
            self._parts[name] = how.merge(self._parts[name], part) if name in self._parts else part
        sent = {needed for how in fold.values() for needed in how.needs} | set(fold)
        self._up += sum(_bytes(reply[name]) for name in sent)
        self._ids.append(ids)

    def answers(self) -> dict[int, Answer]:
        """Hand every run its own part."""
        if not self._ids:
            return {run: Answer({}, torch.zeros(0, dtype=torch.int64), 0) for run in self.runs}
        ids, order = torch.cat(self._ids).sort()
        for part in self._parts.values():
            if "stack" in part:
                part["stack"] = part["stack"][:, order]
        return {
            run: Answer(
                {n: {k: v[s : s + 1] for k, v in part.items()} for n, part in self._parts.items()}, ids, self._up
            )
            for s, run in enumerate(self.runs)
        }


def _for_all(value: Any, runs: int) -> Any:
    """Repeat what is the same for all runs."""
    return value.expand(runs) if isinstance(value, RowProduct) else value.expand(runs, *value.shape[1:])


def _bytes(value: Any) -> int:
    """What the clients of a block would send in one run."""
    return value.bytes_per_run if isinstance(value, RowProduct) else int(value[0].nbytes)


def _alike(asks: Mapping[int, Ask]) -> list[list[int]]:
    """Group runs whose asks can be stacked."""
    groups: list[tuple[Ask, list[int]]] = []
    for run, ask in asks.items():
        for first, runs in groups:
            if same_form(first, ask):
                runs.append(run)
                break
        else:
            groups.append((ask, [run]))
    return [runs for _, runs in groups]


def same_form(a: Ask, b: Ask) -> bool:
    """Whether asks differ in the values of their tensors only."""
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
