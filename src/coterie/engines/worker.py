# SPDX-License-Identifier: Apache-2.0
"""A worker holds some clients' rows and private state, answers for all of them at once, and folds what it can."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coterie.data.ragged import BLOCK_BYTES, Ragged
from coterie.engines.screening import (
    NOT_FINITE,
    Bounds,
    bounds_after,
    lengths_of,
    look,
    most_are_wild,
    was_sent_finite,
)
from coterie.errors import RunError
from coterie.privacy.bounds import bounded, noised
from coterie.privacy.noise import Noises
from coterie.protocol import Ask, Block, ByCluster, Individual, RowProduct, Tensors, run_of
from coterie.threads import for_work

__all__ = ["Answer", "Worker", "completed", "part_of_clients", "same_form"]

_CUTS = 8  # ways to cut the same rows that are kept, as far as they fit: questions in lockstep want different blocks
_LITTLE = 1024  # bytes
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
    left_out : dict
        Client -> why its answer does not count.
    lengths : dict
        Field -> clients counted by the length of their values: see `coterie.engines.screening`.
    wild : int
        Clients of this worker whose numbers are not finite, whether they count or not.
    unnamed : int
        How many clients' answers do not count, where their nodes do not say whose.
    """

    parts: dict[str, Tensors]
    ids: Tensor
    bytes_up: int
    bytes_down: int | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    lengths: Tensors = field(default_factory=dict)
    wild: int = 0
    unnamed: int = 0

    @property
    def reasons(self) -> list[str]:
        """Why clients' answers do not count; of those without names, those whose numbers are not finite are known."""
        return [*self.left_out.values(), *[NOT_FINITE] * (self.wild if self.unnamed else 0)]


def part_of_clients(ask: Ask, at: Tensor) -> Ask:
    """The same ask to some of those whom it is put to, by their places."""
    return replace(ask, each={name: value[at] for name, value in ask.each.items()}) if ask.each else ask


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
        self.noises = Noises()  # where noise comes from that answers ask for
        self.noise_share = 1.0  # of its variance that this worker adds
        self._cuts: list[_Cut] = []
        self._diverged: set[int] = set()  # slots where most clients' numbers were not finite the last time
        self._own: set[tuple[int, str]] = set()  # private state that this answer has copied: the former can be restored

    def screened(self, asks: Mapping[int, Ask], ids: Tensor) -> dict[int, Answer]:
        """Put every run's ask to all the clients that there are, and once more where somebody's answer is absurd.

        A run that has diverged is asked at once as if it still does, and again if it does not.
        """
        before = {run: dict(kept) for run, kept in self.private.items()}
        bounds = {at: Bounds(everyone=True) for at in asks if at in self._diverged}
        answers = self.answer(asks, ids, bounds)
        wrong = {at for at in bounds if not most_are_wild(answers[at].wild, len(ids))}
        bounds = {at: found for at, found in bounds.items() if at not in wrong}
        answers |= self._again(asks, ids, bounds, wrong, before)
        found = {
            at: bounds_after(ask, answers[at].lengths, answers[at].reasons, len(ids))
            for at, ask in asks.items()
            if at not in bounds
        }
        beyond = {at: one for at, one in found.items() if one is not None}
        bounds |= beyond
        answers |= self._again(asks, ids, bounds, beyond, before)
        diverge = {at for at, one in bounds.items() if one.everyone}
        self._diverged = (self._diverged - asks.keys()) | diverge
        return answers

    def _again(
        self, asks: Mapping[int, Ask], ids: Tensor, bounds: Mapping[int, Bounds], some: Iterable[int],
        before: Mapping[int, Tensors],
    ) -> dict[int, Answer]:  # fmt: skip
        """Ask once more, from what clients kept before, the runs of some of the slots."""
        runs = {run_of(at) for at in some}
        if not runs:
            return {}
        for run in runs:
            self.private.pop(run, None)
            if run in before:
                self.private[run] = before[run]
        return self.answer({at: ask for at, ask in asks.items() if run_of(at) in runs}, ids, bounds)

    def answer(
        self, asks: Mapping[int, Ask], ids: Tensor, bounds: Mapping[int, Bounds] | None = None
    ) -> dict[int, Answer]:
        """Put every run's ask to the same clients, in one pass over their rows.

        Parameters
        ----------
        asks : mapping
            Slot -> its ask. Several asks of a run share its private state.
        ids : Tensor
            The clients, ascending.
        bounds : mapping, optional
            Slot -> what its clients' answers may be.
        """
        for ask in asks.values():
            self.rows.admit(ask.step)
        asks = {at: ask if ask.noise is None else replace(ask, limits={}) for at, ask in asks.items()}
        self._own = set()
        known, counted = bounds or {}, self.least_clients > 1
        groups = [
            _Lockstep(
                slots,
                [asks[at] for at in slots],
                [known.get(at) for at in slots],
                counted=counted and asks[slots[0]].noise is None,  # else refusing would tell of clients
            )
            for slots in _alike(asks)
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
        answers = {at: answer for group in groups for at, answer in group.answers().items()}
        return {at: self._hidden(asks[at], answer) for at, answer in answers.items()}

    def _hidden(self, ask: Ask, answer: Answer) -> Answer:
        """Add the noise that the ask wants."""
        if ask.noise is None or not answer.parts:
            return answer
        about = self.word + answer.ids.numpy().tobytes() if self.noises.repeats else b""
        return replace(answer, parts=noised(ask, answer.parts, self.noises, self.noise_share, about))

    @cached_property
    def word(self) -> bytes:
        """What tells these rows from others."""
        found = hashlib.sha256()
        for block in self.rows.blocks():
            for value in (block.keys, block.n, block.x, block.y):
                if value is not None:
                    found.update(value.contiguous().numpy().tobytes())
        return found.digest()

    @property
    def _small(self) -> bool:
        """Whether all rows fit into a block."""
        return isinstance(self.rows.x, Tensor) and self.rows.x.nbytes <= self.block_bytes

    def _blocks(self, ids: Tensor, groups: Sequence["_Lockstep"]) -> Iterable[Block]:
        """Cut clients into blocks; few rows stay cut for the next time, together with what clients keep of them."""
        room = sum(group.bytes for group in groups)
        row_room = sum(len(group.runs) * group.ask.scratch * group.item_size for group in groups)
        if self._small:  # questions that want nearly the same room share their cuts, and what is kept with these
            room, row_room = _rounded_up(room), _rounded_up(row_room)
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
            name: _side_by_side([self._private(run_of(at), name, a.fresh[name])[block.ids] for at, a in group.each_run])
            for name in group.ask.fresh
        }
        reply, private = self.reply(group.ask, dict(group.shared), each, private, block)
        for name, value in private.items():
            for s, run in enumerate(group.runs):
                self._writable(run_of(run), name)[block.ids] = value[s]
        group.take(block, {name: _for_all(value, len(group.runs)) for name, value in reply.items()})

    @staticmethod
    def reply(
        ask: Ask, shared: dict[str, Any], each: Tensors, private: Tensors, block: Block
    ) -> tuple[dict[str, Any], Tensors]:
        """What a block's clients answer, and keep."""
        return ask.step(shared, each, private, block)

    def _writable(self, run: int, name: str) -> Tensor:
        kept = self.private[run]
        if (run, name) not in self._own:
            self._own.add((run, name))
            kept[name] = kept[name].clone()
        return kept[name]

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

    def __init__(
        self, runs: Sequence[int], asks: Sequence[Ask], bounds: Sequence[Bounds | None], *, counted: bool
    ) -> None:
        self.runs, self.ask, self.bounds = list(runs), asks[0], list(bounds)
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
        self._strands = [_Strand(slice(0, len(asks)), counted)]
        self._left_out: list[dict[int, str]] = [{} for _ in asks]
        self._lengths: dict[str, list[Tensor]] = {}  # field -> [S, C] of every block
        self._wild = torch.zeros(len(asks), dtype=torch.int64)
        self._strict: dict[int, bool] = {}

    def _strictly(self, s: int) -> bool:
        """Whether who answers with numbers that cannot be is left out of a run: not where nobody is to blame."""
        if s not in self._strict:
            told = self.bounds[s]
            self._strict[s] = was_sent_finite(self.each_run[s][1]) if told is None else not told.everyone
        return self._strict[s]

    def refuse_fewer(self, least: int) -> None:
        """Refuse to answer with a sum over fewer clients, but for sums over nobody."""
        for strand in self._strands:
            for name, clients in strand.behind.items():
                few = clients[(clients > 0) & (clients < least)]
                if len(few):
                    raise RunError(
                        f"a sum of '{name}' would be over {int(few.min())} clients of a cluster, and {least} are needed",
                        "this node's policy refuses it; see docs/policy.md",
                    )

    def take(self, block: Block, reply: dict[str, Any]) -> None:
        """Fold a block's replies, of all runs at once, into what came before; who is left out differs between runs."""
        if self.ask.noise is not None:
            reply = bounded(self.ask, reply)
        seen = look(self.ask, [one or Bounds() for one in self.bounds], self._strictly, reply, block)
        self._wild += seen.wild
        for s, c, why in seen.why:
            self._left_out[s][int(block.ids[c])] = why
        for name, length in seen.lengths.items():
            self._lengths.setdefault(name, []).append(length)
        if seen.why and len(self._strands) < len(self.runs):
            self._strands = [part for strand in self._strands for part in strand.parted(seen.keep)]
        for strand in self._strands:
            own = seen.keep[strand.runs.start]
            keep = own if seen.why and not bool(own.all()) else slice(None)
            strand.take(self.ask, block.ids[keep], {name: _cut(v, strand.runs, keep) for name, v in seen.reply.items()})

    def answers(self) -> dict[int, Answer]:
        """Hand every run its own part."""
        found = {}
        every = {name: lengths_of(torch.cat(lengths, 1)) for name, lengths in self._lengths.items()}
        for strand in self._strands:
            parts, ids = strand.found(self.ask)
            for s in range(len(self.runs))[strand.runs]:
                at = slice(s - strand.runs.start, s - strand.runs.start + 1)
                own = {name: {k: v[at] for k, v in part.items()} for name, part in parts.items()}
                lengths = {name: counts[s] for name, counts in every.items()}
                found[self.runs[s]] = Answer(own, ids, strand.up, None, self._left_out[s], lengths, int(self._wild[s]))
        return found


class _Strand:
    """Folded replies of some runs in lockstep: of all, until they differ in who counts."""

    def __init__(self, runs: slice, counted: bool) -> None:
        self.runs, self.up, self.counted = runs, 0, counted
        self.behind: Tensors = {}  # field -> clients behind each of its sums, where these are of some of the clients
        self._parts: dict[str, Tensors] = {}
        self._ids: list[Tensor] = []

    def parted(self, keep: Tensor) -> "list[_Strand]":
        """Runs next to each other that leave out the same clients stay together.  keep [S, C]"""
        own = keep[self.runs]
        edges = [0, *((own[1:] != own[:-1]).any(1).nonzero()[:, 0] + 1).tolist(), len(own)]
        return [self] if len(edges) == 2 else [self._some(slice(*ends)) for ends in itertools.pairwise(edges)]

    def _some(self, at: slice) -> "_Strand":
        """Some of the runs alone."""
        first = self.runs.start
        some = _Strand(slice(first + at.start, first + at.stop), self.counted)
        some.behind = {name: clients[at] for name, clients in self.behind.items()}
        some._parts = {name: {k: v[at] for k, v in part.items()} for name, part in self._parts.items()}
        some._ids, some.up = list(self._ids), self.up
        return some

    def take(self, ask: Ask, ids: Tensor, reply: dict[str, Any]) -> None:
        """Fold a block's replies into what came before."""
        if not len(ids):
            return
        for name, how in ask.fold.items():
            part = how.part(reply[name], reply)
            if self.counted and isinstance(how, ByCluster):
                there = (reply[how.share] != 0).sum(1)
                self.behind[name] = self.behind[name] + there if name in self.behind else there
            self._parts[name] = how.merge(self._parts[name], part) if name in self._parts else part
        sent = {needed for how in ask.fold.values() for needed in how.needs} | set(ask.fold)
        self.up += sum(_bytes(reply[name]) for name in sent)
        self._ids.append(ids)

    def found(self, ask: Ask) -> tuple[dict[str, Tensors], Tensor]:
        """Parts, and who has answered."""
        if not self._ids:
            return {}, torch.zeros(0, dtype=torch.int64)
        ids, order = torch.cat(self._ids).sort()
        stacked = {name for name, how in ask.fold.items() if isinstance(how, Individual)}
        return {
            name: {k: v[:, order] for k, v in part.items()} if name in stacked else part
            for name, part in self._parts.items()
        }, ids


def completed(ask: Ask, answer: Answer, ids: Tensor, expected: Mapping[str, Tensors] | None = None) -> Answer:
    """Let clients whose answers are lacking count as clients without rows: zeros in what is individual.

    `expected` is what an answer looks like, for where there is none.
    """
    if len(answer.ids) == len(ids):
        return answer
    parts: dict[str, Tensors] = {}
    at = torch.searchsorted(ids, answer.ids)
    for name, part in (answer.parts or expected or {}).items():
        if not isinstance(ask.fold[name], Individual):
            parts[name] = part if answer.parts else {key: torch.zeros_like(value) for key, value in part.items()}
            continue
        parts[name] = {}
        for key, like in part.items():
            whole = like.new_zeros(1, len(ids), *like.shape[2:])
            if len(answer.ids):
                whole[:, at] = answer.parts[name][key]
            parts[name][key] = whole
    return replace(answer, parts=parts, ids=ids)


def _rounded_up(room: int) -> int:
    """To a power of two; little room stays as it is."""
    return room if room < _LITTLE else 1 << (room - 1).bit_length()


def _cut(value: Any, runs: slice, keep: slice | Tensor) -> Any:
    """Some runs' replies of some clients."""
    if isinstance(value, RowProduct):
        return replace(value, x=value.x[keep], g=value.g[runs, keep])
    return value[runs, keep]


def _side_by_side(values: Sequence[Tensor]) -> Tensor:
    """Stack runs; one alone is not copied."""
    return values[0][None] if len(values) == 1 else torch.stack(list(values))


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
    if a.step is not b.step or dict(a.fold) != dict(b.fold) or _looks(a) != _looks(b) or a.epsilon != b.epsilon:
        return False
    if a.noise != b.noise:
        return False
    return all(
        _same_values(dict(left), dict(right))
        for left, right in ((a.shared, b.shared), (a.each, b.each), (a.fresh, b.fresh))
    )


def _looks(ask: Ask) -> dict[str, tuple[bool, str]]:
    """What workers look at: bounds come from the engine."""
    return {name: (limit.per_row, limit.kind) for name, limit in ask.limits.items()}


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
