# SPDX-License-Identifier: Apache-2.0
"""Somebody subtracts noise that follows from the seed, and somebody guesses names behind their hashes."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.flower_grid import MemoryGrid, dealt
from torch import Tensor

from benchmarks.attacks import AttackSucceededError
from coterie import keys
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.copies import perturbed
from coterie.algorithms.moment_descent import Descent, moment_descent
from coterie.data.ragged import Ragged
from coterie.engines.flower.connect import connect
from coterie.engines.flower.identity import hide_names
from coterie.engines.in_process import InProcess
from coterie.models import linear_regression
from coterie.protocol import Ask, Save

__all__ = ["ATTACKS"]

_SEED, _NOISE, _WIDTH, _GROUPS = 7, 0.1, 4, 2


def _overheard() -> tuple[Tensor, Tensor, Tensor, int]:
    """Run moment descent with noise.  -> what clients were sent in the last iteration [C, 2, A, P], the models, lots, t"""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 30, _WIDTH, generator=draw, dtype=torch.float64)
    truth = 2 * torch.eye(_GROUPS, _WIDTH, dtype=torch.float64)[torch.arange(40) % _GROUPS]
    rows = Ragged.from_blocks(x, torch.einsum("cnp,cp->cn", x, truth))
    sent, models, lots = list[Tensor](), list[Tensor](), list[Tensor]()
    how = Descent(iterations=2, anchors=Anchors(number=4, further=False, swaps=False), noise=_NOISE)

    def program(state: Any) -> Any:
        run = moment_descent(
            state, model=linear_regression(_WIDTH, intercept=False), n_clusters=_GROUPS, seed=_SEED, descent=how
        )
        got = None
        while True:
            try:
                wanted = run.send(got)
            except StopIteration as end:
                return end.value
            got = yield wanted
            if isinstance(wanted, Save):
                models.append(wanted.state.local)
            elif isinstance(wanted, Ask) and "copies" in wanted.each:
                sent.append(wanted.each["copies"])
            elif isinstance(wanted, Ask) and wanted.step.__name__ == "answer_to":
                lots.append(got["lot"])

    InProcess(rows).run([program])
    return sent[-1], models[1], lots[-1], 1


def _subtract_what_follows_from_the_seed() -> str:
    sent, models, lots, t = _overheard()
    before = float((sent - models).std())
    size = sent[0].numel()
    u = keys.uniform(keys.key(keys.key(_SEED, t, "copies"), lots), 2 * size).view(len(lots), 2, size)
    drawn = ((-2 * (1 - u[:, 0]).log()).sqrt() * (2 * math.pi * u[:, 1]).cos()).view(sent.shape)
    guesses = {"as it was drawn once": _NOISE * drawn}
    for word in (str(_SEED), "", *map(str, range(1000))):
        if word:
            guesses[f"secret '{word}'"] = perturbed(torch.zeros_like(models), lots, _NOISE, word, t, "copies")
    left = {name: float((sent - guess - models).std()) for name, guess in guesses.items()}
    best = min(left, key=left.__getitem__)
    if left[best] < 1.1 * before:
        raise AttackSucceededError(f"noise of {before:.3f} is down to {left[best]:.3g}: {best}")
    return f"noise of {before:.3f} on the models; after subtracting the best of {len(left):,} guesses {left[best]:.3f}"


def _guess_names() -> str:
    """Hash the names that a phone book would have, in all ways that need no secret."""
    book = np.array([f"patient-{i:04d}" for i in range(1000)])
    draw = torch.Generator().manual_seed(0)
    rows = Ragged.from_blocks(torch.randn(1000, 2, 2, generator=draw, dtype=torch.float64), torch.zeros(1000, 2), book)
    with tempfile.TemporaryDirectory() as folder:
        nodes = {i: replace(node, opaque=True) for i, node in dealt(rows, Path(folder), nodes=4).items()}
        grid = MemoryGrid(nodes)
        clients = connect(grid, run="attack", nodes=4, test_size=0.0, timeout=2.0, wait=5.0, poll=0.01)
        told = {*clients.names.tolist(), *(f"{int(key) & (2**64 - 1):016x}" for key in clients.train.keys)}
        plain = next(iter(nodes.values())).load(None)
        guesses = {f"{int(key) & (2**64 - 1):016x}" for key in keys.name_keys(book)} | set(book.tolist())
        for secret in (b"", b"coterie", b"secret", b"attack", *(f"node-{i}".encode() for i in range(4))):
            guesses |= set(hide_names(replace(plain, train=rows), secret).names.tolist())
        found = len(told & guesses)
        if found or any("patient-" in str(message.content) for message in grid.replied):
            raise AttackSucceededError(f"{found} of 1,000 names are known")
    return f"{found} of 1,000 names found among {len(guesses):,} guesses; the server is told such as {clients.names[0]}"


ATTACKS: dict[str, Callable[[], str]] = {
    "subtract noise that follows from the seed": _subtract_what_follows_from_the_seed,
    "guess hidden names": _guess_names,
}
