# SPDX-License-Identifier: Apache-2.0
"""What a node lets a server ask: its policy file, and the checks that come before any work.

A server says which client function is run, on which rows, for which clients, and how the answers are folded. So a node that
answered everything could be read row by row. What may leave is decided here, at the node: a client function itself declares
its fields and folds (`coterie.protocol.answers`), and the file narrows that down.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.data.remote import Cast, Divided, Folded, Part, Scaled, View
from coterie.engines.flower import registry
from coterie.engines.flower.divisions import Seen
from coterie.engines.flower.messages import Question
from coterie.engines.flower.policy_file import Policy, Sums
from coterie.engines.flower.wire import fingerprint
from coterie.engines.private import reveal
from coterie.errors import RunError
from coterie.files import owner_only, replace_file
from coterie.protocol import Ask, not_declared
from coterie.robust_folds import plainly

__all__ = ["check_asks", "check_rows", "count"]

_POLICY = "this node's policy refuses it; see docs/policy.md"


# -- checks -----------------------------------------------------------------------------------------------------------
def check_asks(question: Question, policy: Policy) -> None:
    """Refuse what no client function lets leave, before rows are read."""
    for ask in question.asks.values():
        plain = plainly(ask)
        if plain is not ask and not policy.individual.updates:
            raise RunError(
                "a trimmed mean or median needs every client's own update, which this node's policy keeps",
                "set individual.updates = true in the policy to allow it, or average with --robust clip",
            )
        why = _not_revealed(ask) if ask.step is reveal else not_declared(plain)
        if why is not None:
            raise RunError(why, _POLICY)


def _not_revealed(ask: Ask) -> str | None:
    """What clients keep is told only where the client function that keeps it says so."""
    hidden = sorted(set(ask.fold) - registry.revealed())
    return f"'{hidden[0]}' stays with a client" if hidden else None


def check_rows(question: Question, seen: Seen, policy: Policy) -> None:
    """Refuse questions for others than the node's clients, and for too few clients or rows."""
    _check_ids(question.ids, len(seen.names))
    told = [how for ask in question.asks.values() if ask.step is not reveal for how in ask.fold.values()]
    if not told or not len(question.ids):
        return  # nothing leaves, or nothing of anybody
    for division in seen.divisions:
        if not division.allowed(policy.divisions.share):
            least = f"{policy.divisions.share:.0%}"
            raise RunError(
                f"rows are divided by {division.rule}, and this node lets at least {least} on each side", _POLICY
            )
    rows = seen.rows(question.ids)
    if any(how.individual for how in told):
        _check_individual(rows, policy.individual.rows)
    if not all(how.individual for how in told):
        _check_sums(question, seen, policy.sums)
    for ask in question.asks.values():
        _check_drawn(ask, rows, policy.sums.rows)


def _check_drawn(ask: Ask, rows: Tensor, least: int) -> None:
    """Refuse minibatches and parts of too few rows: client functions draw them by these names, as the server says."""
    sizes = [getattr(value, "batch_size", None) for value in ask.shared.values()] + [ask.shared.get("batch_size")]
    drawn = [rows.clamp(max=size) for size in sizes if size is not None]
    drawn += [rows // ask.shared["resample"]] if ask.shared.get("resample") else []
    for some in drawn if ask.fold else ():
        if int(some.sum()) < min(least, int(rows.sum())):
            found = _counted(int(some.sum()), "row")
            raise RunError(f"'{ask.step.__name__}' would draw {found}, and this node wants at least {least}", _POLICY)


def _check_ids(ids: Tensor, n_clients: int) -> None:
    if ids.dim() != 1 or ids.is_floating_point() or bool((ids[1:] <= ids[:-1]).any()):
        raise RunError("the server asks for clients that are not in ascending order, each once", _POLICY)
    if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= n_clients):
        raise RunError(
            "the server asks for a client that is not on this node", "start a new run: the node's clients have changed"
        )


def _check_individual(rows: Tensor, least: int) -> None:
    few = rows[(rows > 0) & (rows < least)]
    if len(few):
        found = _counted(int(few.min()), "row")
        raise RunError(f"a client's own values would be of {found}, and this node wants at least {least}", _POLICY)


def _check_sums(question: Question, seen: Seen, least: Sums) -> None:
    if len(question.ids) < least.clients:
        found = _counted(len(question.ids), "client")
        raise RunError(f"a sum would be over {found}, and this node wants at least {least.clients}", _POLICY)
    fewest = seen.fewest(question.ids)
    if fewest is not None and fewest < least.rows:
        found = _counted(fewest, "row")
        raise RunError(
            f"a sum would be over {found}, or all but {found}; this node wants at least {least.rows}", _POLICY
        )


def count(file: Path, questions: Sequence[Question], policy: Policy) -> None:
    """Count what a run asks, over restarts of the node, and refuse what is too much."""
    said: dict[str, Any] = {"questions": 0, "rows": []}
    if file.exists():
        said = json.loads(file.read_text(encoding="utf-8"))
    said["questions"] += sum(len(question.asks) for question in questions)
    if said["questions"] > policy.run.questions:
        raise RunError(f"this node answers {policy.run.questions} questions of a run", _POLICY)
    sets = {_rows_named(question) for question in questions if any(ask.fold for ask in question.asks.values())}
    said["rows"] = sorted({*said["rows"], *sets} - {""})
    if len(said["rows"]) > policy.divisions.number:
        raise RunError(f"this node lets a run divide its rows in {policy.divisions.number} ways", _POLICY)
    with owner_only():
        replace_file(file, json.dumps(said).encode())


def _rows_named(question: Question) -> str:
    """A word for the set of rows that a question is about, the same for those that are left; none for all of them."""
    part, views = question.part, _dividing(question.views)
    if views and isinstance(views[-1], Divided):
        views = (*views[:-1], replace(views[-1], taken=True))
    if isinstance(part, Folded):
        part = replace(part, views=_dividing(part.views), test_views=_dividing(part.test_views))
    return "" if isinstance(part, Part) and not views else fingerprint((part, views))


def _dividing(views: tuple[View, ...]) -> tuple[View, ...]:
    """What is done to rows, but for what changes their numbers only."""
    return tuple(view for view in views if not isinstance(view, Scaled | Cast))


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
