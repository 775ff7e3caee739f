# SPDX-License-Identifier: Apache-2.0
"""Requests that a node's policy must refuse, each with a sentence that says what the policy wants, and a line in the log.

The node is that of `reading_rows`: 40 rows of 4 wards. Every attack ends in the refusal; that the log's last line says the
same, and that nothing left, is checked too.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.attacks import AttackSucceededError
from benchmarks.attacks.reading_rows import WARDS, Refused, Victim, got, question, sums
from coterie.algorithms.copies import answer_to
from coterie.engines.flower.approvals import decide
from coterie.engines.flower.messages import Hello
from coterie.engines.flower.question_log import Entry, entries
from coterie.protocol import Ask, Stack

__all__ = ["ATTACKS", "refused", "refused_line"]

RUN = "run"
ALL = range(WARDS)


def refused_line(run: Callable[[Victim], str], **how: Any) -> tuple[str, Entry]:
    """Run it on a fresh victim.  -> the refusal, and the last line of the node's log"""
    with tempfile.TemporaryDirectory() as place:
        victim = Victim(Path(place), **how)
        try:
            found = run(victim)
        except Refused as refusal:
            lines, _ = entries(state(victim))
            return str(refusal), lines[-1]
    raise AttackSucceededError(found)


def refused(run: Callable[[Victim], str], **how: Any) -> Callable[[], str]:
    """The refusal, if the log says it too."""

    def tried() -> str:
        why, line = refused_line(run, **how)
        if line.refused != why or line.bytes:
            raise AttackSucceededError(f"it is refused ({why}), and the log says {line}")
        return f"{why} (in the log: {line.time[:19]} {line.run} {line.function or 'unreadable'}, 0 bytes)"

    return tried


def state(victim: Victim) -> Path:
    """The folder of the node."""
    return Path(str(victim.context.node_config["state"])) / "ward-7"


def told(victim: Victim, ask: Ask, ids: Any = ALL, **how: Any) -> str:
    """Ask, and say what came back."""
    field = next(iter(ask.fold))
    return f"'{field}' of {len(ids)} wards: {got(victim.asked(question(ask, ids, **how)), field).tolist()}"


def lots() -> Ask:
    """A question for a number of every client."""
    return Ask(answer_to, {}, {"lot": Stack()})


# -- attacks ----------------------------------------------------------------------------------------------------------
def another_method(victim: Victim) -> str:
    """Greet as a run of a method that is not allowed."""
    return f"the names of {len(victim.asked(Hello(RUN)).names)} wards"


def another_function(victim: Victim) -> str:
    """Run a client function that is not allowed, in a run that calls itself something else."""
    return told(victim, lots())


def few_clients(victim: Victim) -> str:
    """Ask one ward."""
    return told(victim, sums(), [2])


def small_clients(victim: Victim) -> str:
    """Ask a node whose clients all have fewer rows than its owner wants."""
    return told(victim, sums())


def small_values(victim: Victim) -> str:
    """Ask for values of single wards with few rows."""
    return told(victim, lots())


def single_values(victim: Victim) -> str:
    """Ask for values of single wards, where none may leave."""
    return told(victim, lots())


def other_values(victim: Victim) -> str:
    """Ask for values of single wards, where others may leave."""
    return told(victim, lots())


def open_sums(victim: Victim) -> str:
    """Ask for a sum that is not masked."""
    return told(victim, sums())


def many_runs(victim: Victim) -> str:
    """Ask as often as a run may, and go on as another run."""
    for number in (1, 2, 3):
        said = told(victim, sums(), number=number, run=f"run{number}")
    return said


def much_epsilon(victim: Victim) -> str:
    """Spend the budget in one run, and go on as another."""
    cost = replace(sums(), epsilon=0.4)
    told(victim, cost, run="first")
    told(victim, cost, run="second")
    return told(victim, cost, run="third")


def without_noise(victim: Victim) -> str:
    """Say that the answer costs next to nothing, where no noise is added."""
    return told(victim, replace(sums(), epsilon=1e-9))


def unapproved(victim: Victim) -> str:
    """Greet, as any run does, and be told the names of clients."""
    return f"the names of {len(victim.asked(Hello(RUN)).names)} wards"


def without_a_greeting(victim: Victim) -> str:
    """Do not greet, and ask at once."""
    return told(victim, sums())


def refused_by_hand(victim: Victim) -> str:
    """Go on after the owner has had enough."""
    try:
        victim.asked(Hello(RUN))
    except Refused:
        decide(state(victim), RUN, "approved")
    told(victim, sums())
    decide(state(victim), RUN, "refused")
    return told(victim, sums(), number=2)


APPROVED = "[run]\napproval = true\n"

CASES: dict[str, tuple[Callable[[Victim], str], str]] = {
    "another-method": (another_method, '[run]\nmethods = ["fedavg", "mixed"]\n'),
    "another-function": (another_function, '[run]\nfunctions = ["column_sums", "coterie.algorithms.fedavg.*"]\n'),
    "few-clients": (few_clients, "[sums]\nclients = 3\n"),
    "small-clients": (small_clients, "[clients]\nrows = 11\n"),
    "small-values": (small_values, "[individual]\nrows = 11\n"),
    "single-values": (single_values, "[individual]\nfields = []\n"),
    "other-values": (other_values, '[individual]\nfields = ["loss", "place.*"]\n'),
    "open-sums": (open_sums, "[secure]\nonly = true\n"),
    "many-runs": (many_runs, "[budget]\nquestions = 2\n"),
    "much-epsilon": (much_epsilon, "[budget]\nepsilon = 1.0\n"),
    "without-noise": (without_noise, "[budget]\nepsilon_required = true\n"),
    "unapproved": (unapproved, APPROVED),
    "without-a-greeting": (without_a_greeting, APPROVED),
    "refused-by-hand": (refused_by_hand, APPROVED),
}

ATTACKS: dict[str, Callable[[], str]] = {name: refused(run, policy=said) for name, (run, said) in CASES.items()}
