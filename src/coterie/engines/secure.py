# SPDX-License-Identifier: Apache-2.0
"""Asks whose sums are added securely: what a worker has folded becomes arrays of one sum, and the sum an answer again.

All asks of a message are one sum. Beside the folds' parts it has, for each ask, the counts of clients by length that
screening needs, how many clients' numbers are not finite, and how many clients do not count. Who they are, their nodes know.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.ragged import BLOCK_BYTES, Ragged
from coterie.engines.screening import BINS, Bounds, counted_lengths, from_counts
from coterie.engines.worker import Answer, Worker, part_of_clients
from coterie.errors import ConfigError
from coterie.protocol import Ask, Tensors, run_of
from coterie.secure.in_memory import NodesInMemory

__all__ = ["NODES", "SecureWorker", "answers_of", "arrays_of", "check_sums_only", "question_of", "shaped"]

NODES = 8  # in memory, where there are as many clients


def check_sums_only(asks: Mapping[int, Ask]) -> None:
    """Refuse to ask for values of single clients."""
    for ask in asks.values():
        for name, how in ask.fold.items():
            if how.individual:
                raise ConfigError(
                    f"'{name}' of '{ask.step.__name__}' is every client's own value, and secure sums tell sums only",
                    "see docs/secure-sums.md for what can be asked instead, or leave secure out",
                )


def arrays_of(asks: Mapping[int, Ask], answers: Mapping[int, Answer]) -> dict[str, NDArray[Any]]:
    """What a node adds to a sum."""
    out: dict[str, NDArray[Any]] = {}
    for at in asks:
        found = answers[at]
        for name, part in found.parts.items():
            out |= {f"{at}/part/{name}/{key}": value.numpy() for key, value in part.items()}
        for name in _looked_at(asks[at]):
            lengths = found.lengths.get(name)
            out[f"{at}/length/{name}"] = np.zeros(BINS, dtype=np.int64) if lengths is None else counted_lengths(lengths)
        out[f"{at}/wild"] = np.array(found.wild)
        out[f"{at}/out"] = np.array(len(found.left_out))
    return out


def _looked_at(ask: Ask) -> list[str]:
    """Fields whose lengths the engine bounds."""
    return sorted(name for name, limit in ask.limits.items() if limit.finite and min(limit.clip, limit.out) < math.inf)


def answers_of(
    asks: Mapping[int, Ask], total: Mapping[str, NDArray[Any]], ids: Tensor, bytes_up: int, like: Mapping[str, Tensor]
) -> dict[int, Answer]:
    """What the sums of all nodes are to the asks; `like` has tensors of their precision."""
    out = {}
    for at, ask in asks.items():
        parts: dict[str, Tensors] = {}
        lengths = {}
        for name, value in total.items():
            slot, kind, *rest = name.split("/", 3)
            if slot != str(at):
                continue
            if kind == "part":
                field, _, key = "/".join(rest).rpartition("/")
                parts.setdefault(field, {})[key] = torch.from_numpy(value).to(like[name].dtype)
            elif kind == "length" and value.any():
                lengths[rest[0]] = from_counts(torch.from_numpy(value))
        parts = {name: parts[name] for name in ask.fold if name in parts}
        wild, left_out = int(total[f"{at}/wild"]), int(total[f"{at}/out"])
        up = bytes_up if at == next(iter(asks)) else 0
        out[at] = Answer(parts, ids, up, None, {}, lengths, wild, left_out)
    return out


def question_of(asks: Mapping[int, Ask], bounds: Mapping[int, Bounds]) -> bytes:
    """What tells a question from others, the same at all nodes: masks of others do not go with it."""
    found = hashlib.sha256()
    for at, ask in asks.items():
        found.update(f"{at} {ask.step.__module__}.{ask.step.__name__} {dict(ask.fold)!r} {bounds.get(at)!r}".encode())
        for name, value in sorted(ask.shared.items()):
            found.update(name.encode())
            found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return found.digest()


def shaped(worker: Worker, asks: Mapping[int, Ask], answers: Mapping[int, Answer], ids: Tensor) -> dict[int, Answer]:
    """Answers of nodes none of whose clients count: zeros, in the shape that others' parts have."""
    lacking = {at: ask for at, ask in asks.items() if ask.fold and not answers[at].parts}
    if not lacking:
        return dict(answers)
    kept = {run: dict(own) for run, own in worker.private.items()}
    everyone = Worker.answer(worker, lacking, ids, {at: Bounds(everyone=True) for at in lacking})
    worker.private = kept
    out = dict(answers)
    for at, found in everyone.items():
        zeros = {n: {k: torch.zeros_like(v) for k, v in part.items()} for n, part in found.parts.items()}
        was = answers[at]
        out[at] = Answer(zeros, was.ids, was.bytes_up, None, was.left_out, was.lengths, was.wild)
    return out


class SecureWorker(Worker):
    """A worker whose clients are on nodes in memory, each with some of them, that add up securely.

    Parameters
    ----------
    rows : Ragged
        The clients' rows.
    nodes : NodesInMemory
        Who adds up; they may be those of other workers too.
    n_nodes : int
        How many; clients are dealt to them in order.
    """

    def __init__(
        self, rows: Ragged, *, nodes: NodesInMemory | None = None, n_nodes: int = NODES, block_bytes: int = BLOCK_BYTES
    ) -> None:
        super().__init__(rows, block_bytes=block_bytes)
        self.nodes = nodes or NodesInMemory()
        self.n_nodes = min(n_nodes, rows.n_clients)
        self.told: dict[int, str] = {}  # client -> why its answer did not count: its node knows

    def answer(
        self, asks: Mapping[int, Ask], ids: Tensor, bounds: Mapping[int, Bounds] | None = None
    ) -> dict[int, Answer]:
        """Put every run's ask to the clients of each node, and add up what they say."""
        told = {at: ask for at, ask in asks.items() if ask.fold}
        if not told or not len(ids):
            return super().answer(asks, ids, bounds)
        check_sums_only(told)
        before = {run: dict(own) for run, own in self.private.items()}
        parts, up, like = {}, 0, dict[str, Tensor]()
        own = self._by_node(ids)
        if any(ask.noise is not None for ask in told.values()):
            self.noise_share = 1.0 / self.nodes.threshold(tuple(own))
        for name, some in own.items():
            mine = {at: part_of_clients(ask, torch.searchsorted(ids, some)) for at, ask in asks.items()}
            found = shaped(self, mine, super().answer(mine, some, bounds), some)
            for one in found.values():
                self.told |= one.left_out
            arrays = arrays_of(told, found)
            up += sum(value.nbytes for value in arrays.values())
            parts[name] = arrays
            like = {f"{at}/part/{n}/{k}": v for at in told for n, p in found[at].parts.items() for k, v in p.items()}
        total, there = self.nodes.total(question_of(told, bounds or {}), parts)
        heard = torch.cat([own[name] for name in there]).sort().values
        self._undo(asks, before, ids[~torch.isin(ids, heard)])
        silent = {at: Answer({}, heard, 0) for at in asks if at not in told}
        return answers_of(told, total, heard, up, like) | silent

    def _by_node(self, ids: Tensor) -> dict[str, Tensor]:
        """Clients that are asked, by node."""
        place = ids * self.n_nodes // self.rows.n_clients
        return {f"node-{at}": ids[place == at] for at in np.unique(place.numpy()).tolist()}

    def _undo(self, asks: Mapping[int, Ask], before: Mapping[int, Tensors], ids: Tensor) -> None:
        """Let clients whose answers did not come keep what they had."""
        if not len(ids):
            return
        for at, ask in asks.items():
            for name, fresh in ask.fresh.items():
                kept = self.private[run_of(at)]
                was = before.get(run_of(at), {}).get(name)
                kept[name] = kept[name].clone()
                kept[name][ids] = fresh if was is None else was[ids]
