# SPDX-License-Identifier: Apache-2.0
"""Clients that answer wrongly: between what a client function returns and what its worker makes of it.

What is sent in place of the truth: `flip`, minus what may have either sign (a client that knows what cannot be negative);
`scale` and `scale back`, 100 and -100 times everything; `constant`, ones; `nan`. Where a question is for an `update`, that
alone is changed, so that weights do not give the client away. Answers that are not numbers come to every question; others
come in training, not where columns are scaled and final models are measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from coterie.engines.worker import Worker
from coterie.protocol import Ask, Block, RowProduct, Tensors

__all__ = ["ATTACKS", "answering_wrongly"]

ATTACKS = ("flip", "scale", "scale back", "constant", "nan")

_SIGNED = ("update", "gradient", "stretch", "slope", "product", "theta", "pull")
_APART = ("coterie.algorithms.preparation", "coterie.evaluate", "coterie.methods.personal.measure")


@contextmanager
def answering_wrongly(keys: Tensor, attack: str) -> Iterator[None]:
    """Let the clients with these keys answer so, in this process."""
    honest = Worker.reply

    def reply(
        ask: Ask, shared: dict[str, Any], each: Tensors, private: Tensors, block: Block
    ) -> tuple[dict[str, Any], Tensors]:
        told, kept = honest(ask, shared, each, private, block)
        bad = torch.isin(block.keys, keys)
        if bool(bad.any()) and _asked(ask, attack):
            told = {
                name: _changed(value, bad, attack) if _meant(name, told, attack) else value
                for name, value in told.items()
            }
        return told, kept

    with patch.object(Worker, "reply", staticmethod(reply)):
        yield


def _asked(ask: Ask, attack: str) -> bool:
    return attack == "nan" or ask.step.__module__ not in _APART


def _meant(name: str, told: dict[str, Any], attack: str) -> bool:
    if attack == "nan":
        return True
    return name in _SIGNED if attack == "flip" else name == "update" or "update" not in told


def _changed(value: Any, bad: Tensor, attack: str) -> Any:
    if isinstance(value, RowProduct):
        if attack != "constant":
            return replace(value, g=_changed(value.g, bad, attack))
        value = value.formed()
    if not value.is_floating_point():
        return value
    there = bad.view(1, -1, *(1,) * (value.dim() - 2))
    if attack in ("constant", "nan"):
        return torch.where(there, torch.full_like(value, 1.0 if attack == "constant" else torch.nan), value)
    return torch.where(there, value * {"flip": -1.0, "scale": 100.0, "scale back": -100.0}[attack], value)
