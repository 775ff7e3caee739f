# SPDX-License-Identifier: Apache-2.0
"""`coterie study privacy-...`: the studies of differential privacy on the command line."""

from typing import Any

from coterie.studies.choices import PRIVATE_METHODS
from coterie.studies.commands import CLIENTS, JOBS, ROUNDS, Given, Shown, many, ran, some_of, study
from coterie.studies.common import Tell
from coterie.studies.compare_commands import app

__all__ = ["app"]

_EPSILON = many("Values of epsilon, comma-separated.", float)


@study(
    "privacy-audit",
    {
        "methods": some_of(PRIVATE_METHODS),
        "epsilon": _EPSILON,
        "clients": Given("Clients beside the canaries.", int),
        "canaries": Given("Canaries of a run, of which about half take part.", int),
        "rounds": ROUNDS,
        "noise": Given("Factor on the noise that is added, which the account knows nothing of.", float),
        "jobs": JOBS,
    },
    repetitions="reps",
)
def privacy_audit(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Who takes part, as far as noised sums tell: a lower bound of epsilon from canaries, below what is claimed."""
    from coterie.studies import privacy_audit as audit

    return ran(audit, audit.Settings(**(audit.QUICK if quick else {})), given, tell)


@study(
    "privacy-utility",
    {
        "epsilon": _EPSILON,
        "clients": CLIENTS,
        "rows": Given("Rows of each client.", int),
        "rounds": ROUNDS,
        "jobs": JOBS,
    },
    repetitions="reps",
)
def privacy_utility(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """What a privacy budget leaves of FedAvg, IFCA, FedRep, shrunk models and the choice of a structure."""
    from coterie.studies import privacy_utility as utility

    return ran(utility, utility.Settings(**(utility.QUICK if quick else {})), given, tell)
