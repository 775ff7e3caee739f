# SPDX-License-Identifier: Apache-2.0
"""Runs that wait until a node's owner has looked at them, and what the owner has said: one small file at the node."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from coterie.engines.flower.node_lock import alone
from coterie.errors import ConfigError, RunError
from coterie.files import owner_only, replace_file

__all__ = ["Asking", "WaitsError", "check_approved", "decide", "pending"]

FILE = "runs.json"
MOST_WAITING = 100  # runs: whoever starts runs could fill the disk

Decision = Literal["pending", "approved", "refused"]


class WaitsError(RunError):
    """The run may be answered as soon as the node's owner has approved it."""


@dataclass(frozen=True)
class Asking:
    """A run that asks, and what was decided of it.

    Attributes
    ----------
    run, flower, submitter, method : str, int, str, str
        Who asks: coterie's name of the run, Flower's number of it, and what the run says of itself.
    since : str
        When it first asked, in UTC.
    decision : str
        What the owner has said.
    """

    run: str
    flower: int = 0
    submitter: str = ""
    method: str = ""
    since: str = ""
    decision: Decision = "pending"


def check_approved(folder: Path, asking: Asking) -> None:
    """Refuse a run that the owner has not approved; a new one is written down, for the owner to look at."""
    known = _read(folder).get(asking.run)
    if known is None:
        with _changing(folder) as runs:
            if sum(one.decision == "pending" for one in runs.values()) >= MOST_WAITING:
                raise RunError(
                    f"{MOST_WAITING} runs wait for approval at this node, and it takes no more",
                    "its owner decides with `coterie node approve RUN` or `coterie node refuse RUN`",
                )
            known = runs.setdefault(asking.run, replace(asking, since=datetime.now(UTC).isoformat(timespec="seconds")))
    if known.decision == "refused":
        raise RunError(f"the owner of this node has refused run {asking.run}", "ask the owner why")
    if known.decision == "pending":
        raise WaitsError(
            f"run {asking.run} waits for the approval of this node's owner",
            f"its owner approves it with: coterie node approve {asking.run}",
        )


def pending(folder: Path) -> list[Asking]:
    """Runs that wait, the first first."""
    return sorted((one for one in _read(folder).values() if one.decision == "pending"), key=lambda one: one.since)


def decide(folder: Path, run: str, decision: Decision) -> Asking:
    """Write down what the owner says of a run that has asked."""
    with _changing(folder) as runs:
        if run not in runs:
            raise ConfigError(f"no run '{run}' has asked this node", "`coterie node pending` lists the runs that have")
        runs[run] = replace(runs[run], decision=decision)
        return runs[run]


@contextmanager
def _changing(folder: Path) -> Iterator[dict[str, Asking]]:
    """Change the file; no other process does meanwhile."""
    with owner_only():
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            runs = _read(folder)
            yield runs
            document = {"runs": [asdict(one) for one in runs.values()]}
            replace_file(folder / FILE, (json.dumps(document, indent=1) + "\n").encode())


def _read(folder: Path) -> dict[str, Asking]:
    path = folder / FILE
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        runs = [Asking(**one) for one in said["runs"]]
        if not all(one.decision in get_args(Decision) for one in runs):
            raise ValueError
        return {one.run: one for one in runs}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RunError(f"{path} cannot be read", "remove it; all runs then wait for approval again") from None
