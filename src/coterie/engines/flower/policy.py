# SPDX-License-Identifier: Apache-2.0
"""What a node lets a server ask: its policy file, and the checks that come before any work.

A server says which client function is run, on which rows, for which clients, and how the answers are folded. So a node that
answered everything could be read row by row. What may leave is decided here, at the node: a client function itself declares
its fields and folds (`coterie.protocol.answers`), and the file narrows that down.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from coterie.data.remote import Cast, Divided, Folded, Part, Scaled, View
from coterie.engines.flower import registry
from coterie.engines.flower.divisions import Seen
from coterie.engines.flower.ledger import Asked, read_ledger, write_ledger
from coterie.engines.flower.messages import Question, Secure
from coterie.engines.flower.node_lock import alone
from coterie.engines.flower.policy_file import Patterns, Policy, Sums
from coterie.engines.flower.protections import epsilon_of, has_noise, is_masked, loss_of
from coterie.engines.flower.state import run_word
from coterie.engines.flower.wire import fingerprint
from coterie.engines.private import reveal
from coterie.errors import RunError
from coterie.files import owner_only
from coterie.protocol import Ask, not_declared
from coterie.robust_folds import plainly

__all__ = ["charge", "check_asks", "check_method", "check_rows"]

_POLICY = "this node's policy refuses it; see docs/policy.md"


# -- checks -----------------------------------------------------------------------------------------------------------
def check_method(method: str, policy: Policy) -> None:
    """Refuse a run of another method than those that are allowed, by what the run says of itself."""
    if not _matches(policy.run.methods, method):
        said = f"is of method '{method}'" if method else "does not say its method"
        raise RunError(f"the run {said}, and this node allows {_listed(policy.run.methods)}", _POLICY)


def check_asks(question: Question, policy: Policy, secure: Secure | None = None) -> None:
    """Refuse what no client function lets leave, and what the policy does not, before rows are read.

    Parameters
    ----------
    question : Question
        What is asked.
    policy : Policy
        Of the node.
    secure : Secure, optional
        The secure sum that the answers are to leave in.
    """
    for ask in question.asks.values():
        _check_function(ask, policy.run.functions)
        plain = plainly(ask)
        if plain is not ask and not policy.individual.updates:
            raise RunError(
                "a trimmed mean or median needs every client's own update, which this node's policy keeps",
                "set individual.updates = true in the policy to allow it, or average with --robust clip",
            )
        why = _not_revealed(ask) if ask.step is reveal else not_declared(plain)
        if why is not None:
            raise RunError(why, _POLICY)
        _check_fields(ask, policy, secure)


def _check_function(ask: Ask, allowed: Patterns) -> None:
    name = ask.step.__name__
    if not _matches(allowed, name, f"{ask.step.__module__}.{name}"):
        raise RunError(f"'{name}' is not a client function that this node allows: {_listed(allowed)}", _POLICY)


def _check_fields(ask: Ask, policy: Policy, secure: Secure | None) -> None:
    """Refuse values of single clients that are to stay, what is not masked, and what has no noise, where that is wanted."""
    name, allowed = ask.step.__name__, policy.individual.fields
    for field, how in ask.fold.items():
        if how.individual and not _matches(allowed, field, f"{name}.{field}"):
            raise RunError(
                f"'{field}' of '{name}' would leave for each client, and this node lets {_listed(allowed)} leave so",
                _POLICY,
            )
        if policy.secure.only and not is_masked(how, secure):
            raise RunError(
                f"'{field}' of '{name}' would leave unmasked, and this node sends masked sums only",
                "run with --secure; see docs/secure-sums.md",
            )
        if secure is not None and how.individual:
            raise RunError(
                f"'{field}' of '{name}' is clients' own values, and no secure sum has these", "see docs/secure-sums.md"
            )
    if policy.budget.epsilon_required and ask.fold and not has_noise(ask):
        raise RunError(
            f"'{name}' would be answered without noise, and this node wants noise in all that leaves", _POLICY
        )


def _matches(allowed: Patterns, *names: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in allowed)


def _listed(allowed: Patterns) -> str:
    return ", ".join(allowed) or "none"


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


def charge(folder: Path, questions: Sequence[Question], policy: Policy) -> None:
    """Count what is asked, over restarts of the node, and refuse what is too much: of a run, or of all together.

    Of what is refused nothing is counted.
    """
    asks = [ask for question in questions for ask in question.asks.values()]
    with owner_only(), alone(folder):
        said = sum(epsilon_of(ask) for ask in asks if not has_noise(ask))
        spent = read_ledger(folder).after(len(asks), said, policy.budget, sum(map(loss_of, asks)))
        runs = {run: one for run, one in spent.runs.items() if (folder / run).is_dir()}
        for name in {question.run: None for question in questions}:
            own = [question for question in questions if question.run == name]
            runs[run_word(name)] = _counted_with(runs.get(run_word(name), Asked()), own, policy)
        write_ledger(folder, replace(spent, runs=runs))


def _counted_with(before: Asked, questions: Sequence[Question], policy: Policy) -> Asked:
    """What a run has asked, with these questions."""
    number = before.questions + sum(len(question.asks) for question in questions)
    if number > policy.run.questions:
        raise RunError(f"this node answers {policy.run.questions} questions of a run", _POLICY)
    sets = {_rows_named(question) for question in questions if any(ask.fold for ask in question.asks.values())}
    rows = sorted({*before.rows, *sets} - {""})
    if len(rows) > policy.divisions.number:
        raise RunError(f"this node lets a run divide its rows in {policy.divisions.number} ways", _POLICY)
    return Asked(number, rows)


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
