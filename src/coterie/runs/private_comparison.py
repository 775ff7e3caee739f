# SPDX-License-Identifier: Apache-2.0
"""A comparison with a privacy budget: what it found, as a document and on the screen."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.errors import ConfigError
from coterie.files import replace_file
from coterie.report.privacy import said
from coterie.runs.screen import out
from coterie.selection.private import PrivateChoice, Tried, compare_private

__all__ = ["private_run", "show_private"]

_FILE = "compare.json"
_HEADLINES = {
    "global": "One model for all clients does as well as anything that was tried.",
    "local": "Clients share too little: each is best served by a model of its own.",
    "shrunk": "Clients deviate from a common model: models of their own, shrunk towards it, do best.",
}
_NOTHING = (
    "Nothing can be said within this budget: no candidate predicts better than the target's mean does. More clients, fewer "
    "features or a larger epsilon would help."
)
_NAMES = {"global": "one model for all", "local": "one model each", "shrunk": "shrunk models"}


def private_run(
    clients: Clients, chosen: FitOptions, folder: Path | None, *, epsilon: float, delta: float | None
) -> dict[str, Any]:
    """Compare, and write down what was found where a folder is named."""
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "name a new folder with --out: a budget is spent once")
    found = compare_private(clients, epsilon=epsilon, delta=delta, seed=chosen.seed, secure=chosen.secure)
    document = _document(found, chosen)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / _FILE, json.dumps(document, indent=2).encode())
    return document


def _document(found: PrivateChoice, chosen: FitOptions) -> dict[str, Any]:
    return {
        "structure": found.chosen.structure, "setting": found.chosen.setting, "headline": _headline(found.chosen),
        "tried": [asdict(one) for one in found.tried], "clients": found.n_clients, "seed": chosen.seed,
        "privacy": found.privacy,
    }  # fmt: skip


def _headline(one: Tried) -> str:
    if not one.loss < 1:
        return _NOTHING
    if one.structure == "clusters":
        return f"Clients fall into {one.setting['n_clusters']} groups, with one model per group."
    return _HEADLINES[one.structure]


def show_private(found: dict[str, Any]) -> None:
    """Show all candidates, with the error of their distance to the best."""
    out.print(found["headline"])
    table = Table("structure", Column("loss", justify="right"), Column("error", justify="right"))
    for one in found["tried"]:
        mine = (one["structure"], one["setting"]) == (found["structure"], found["setting"])
        groups = one["setting"].get("n_clusters")
        name = f"{groups} groups" if groups else _NAMES[one["structure"]]
        table.add_row(f"{'*' * mine}{name}", f"{one['loss']:.4f}", f"{one['error']:.4f}")
    out.print(table, soft_wrap=False)
    out.print("loss: mean squared error in units of the target's variance; error: of the distance to the lowest one")
    out.print(said(found["privacy"]))
