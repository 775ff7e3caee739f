# SPDX-License-Identifier: Apache-2.0
"""`coterie fit --method auto`: compare structures, then fit the one that was chosen to all training rows."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coterie.config import FitOptions, check_options
from coterie.data.clients import Clients
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.methods.session import Watch
from coterie.report.comparison import read_comparison
from coterie.runs.comparison import about, keeping_answers, write_comparison
from coterie.runs.folder import begin_run, begun_by, read_options, settle_run
from coterie.runs.holding import holding, remove_run
from coterie.selection.result import FitAdvice
from coterie.selection.run import compare

__all__ = ["advised", "settled_run", "why"]

_FOLDER = "comparison"


def settled_run(
    folder: Path,
    chosen: FitOptions,
    clients: Clients,
    command: str,
    *,
    watch: Watch | None = None,
    begun: Callable[[], None] = lambda: None,
) -> FitOptions:
    """Begin a run, or continue it, with the comparison.  -> the options of what was chosen, from now on the run's

    `begun` is told that there is a run folder.
    """
    check_options(chosen)
    if chosen.privacy.epsilon is not None:
        raise ConfigError(
            "method auto compares structures first, and a privacy budget is for one or the other",
            "call coterie compare --epsilon, and fit what it finds with --method and a budget of its own",
        )
    with holding(folder):
        if _is_settled(folder, chosen):
            return read_options(folder)
        new = begin_run(folder, chosen, command, clients)
        begun()
        try:
            decided = _settled(clients, chosen, folder, watch)
        except CoterieError as error:
            if new and not isinstance(error, RunError):  # nodes that were lost may come back, and the run be continued
                remove_run(folder)  # nothing half-written
            raise
        settle_run(folder, decided)
    return decided


def _is_settled(folder: Path, chosen: FitOptions) -> bool:
    """Whether these options began the run, and its own are now those of what its comparison found."""
    if not (folder / "run.json").exists() or not (folder / _FOLDER).exists():
        return False
    return read_options(folder) == advised(read_comparison(folder / _FOLDER)).into(chosen)


def _settled(clients: Clients, chosen: FitOptions, folder: Path, watch: Watch | None) -> FitOptions:
    """Compare, unless that was done before the run was interrupted, and give the options of what was chosen."""
    inside = folder / _FOLDER
    if not inside.exists():
        with keeping_answers(folder / "checkpoints" / "answers", clients, chosen):
            found = compare(clients, hidden=chosen.model.hidden, seed=chosen.seed, secure=chosen.secure, watch=watch)
            document = about(found, data=chosen.data.model_dump(mode="json"), command=begun_by(folder), fit=None)
            write_comparison(inside, found, document)
    return advised(read_comparison(inside)).into(chosen)


def advised(document: Mapping[str, Any]) -> FitAdvice:
    """How to fit what a comparison's document says was chosen."""
    said = _taken(document["rows"])["fit"]
    return FitAdvice(said["method"], said.get("options") or {})


def _taken(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was chosen; if no method fits that (one network each), the best of the others."""
    can = [row for row in rows if row["fit"]["method"] is not None]
    if not can:
        raise RunError("the comparison has no structure that a method fits", "compare again, or name a --method")
    return next((row for row in can if row["chosen"]), None) or max(can, key=_score)


def _score(row: Mapping[str, Any]) -> float:
    found = row.get("score")
    return -math.inf if found is None else float(found)


def why(folder: Path) -> dict[str, Any]:
    """What a run's comparison said, for its results; nothing for a run whose method was named."""
    if not (folder / _FOLDER).exists():
        return {}
    said = read_comparison(folder / _FOLDER)
    found = {"chosen": said["chosen"], "report": f"{_FOLDER}/report.html", **said["answer"]}
    taken = _taken(said["rows"])
    if not taken["chosen"]:
        found["doubts"] = [
            f"No method can fit this structure yet, so the next best was chosen: {taken['label']}.",
            *found["doubts"],
        ]
    return {"why": found}
