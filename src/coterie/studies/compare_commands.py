# SPDX-License-Identifier: Apache-2.0
"""`coterie study compare-...`: the studies of comparisons on the command line."""

from typing import Any

from coterie.studies.choices import BAD_CLIENTS, CASES, REAL_DATA
from coterie.studies.commands import JOBS, Given, Shown, ran, some_of, study
from coterie.studies.common import Tell
from coterie.studies.personal_commands import app

__all__ = ["app"]


@study(
    "compare-planted",
    {
        "cases": some_of(CASES),
        "clients": Given("Clients.", int),
        "rows": Given("Rows of each client.", int),
        "features": Given("Features.", int),
        "noise": Given("Noise, relative to the signal.", float),
        "jobs": JOBS,
    },
    repetitions="reps",
)
def compare_planted(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """How often `compare` finds a planted structure: groups, low rank, mixtures, outliers, counts, costs and others."""
    from coterie.studies import compare_planted as planted

    return ran(planted, planted.Settings(**(planted.QUICK if quick else {})), given, tell)


@study("compare-real", {"data": some_of(REAL_DATA), "jobs": JOBS})
def compare_real(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Every structure on twelve real data sets, which one `compare` chooses, and whether other seeds agree."""
    from coterie.studies import compare_real as real

    return ran(real, real.Settings(**(real.QUICK if quick else {})), given, tell)


@study(
    "bad-clients",
    {
        "methods": some_of(BAD_CLIENTS),
        "robust": some_of(("clip", "trimmed", "median", "near"), before="Ways of averaging, comma-separated, of "),
        "bad": Given("Share of the clients that answer wrongly.", float),
        "jobs": JOBS,
    },
    repetitions="reps",
)
def bad_clients(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """What 30 % of clients that flip signs, scale, or send constants or no numbers do to the others."""
    from coterie.studies import bad_clients as bad

    return ran(bad, bad.Settings(**(bad.QUICK if quick else {})), given, tell)
