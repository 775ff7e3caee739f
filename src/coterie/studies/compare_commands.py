# SPDX-License-Identifier: Apache-2.0
"""`coterie study compare-...`: the studies of comparisons on the command line."""

from typing import Annotated, Any

import typer

from coterie.studies import compare_planted as planted
from coterie.studies import compare_real as real
from coterie.studies.commands import Jobs, Json, Quick, Seed, Seeds, run_study, some_of
from coterie.studies.common import named
from coterie.studies.personal_commands import app

__all__ = ["app"]

_CASES = [case.name for case in planted.CASES]
_DATA = [task.name for task in real.TASKS]


@app.command(planted.NAME)
def compare_planted(
    cases: Annotated[str | None, some_of(_CASES)] = None,
    clients: Annotated[int | None, typer.Option(help="Clients.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of each client.")] = None,
    features: Annotated[int | None, typer.Option(help="Features.")] = None,
    noise: Annotated[float | None, typer.Option(help="Noise, relative to the signal.")] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """How often `compare` finds a planted structure: groups, low rank, independent clients, mixtures, outliers."""
    given: dict[str, Any] = {"clients": clients, "rows": rows, "features": features, "noise": noise}
    given |= {"jobs": jobs, "seed": seed, "reps": seeds, "cases": named("--cases", cases, _CASES)}
    run_study(planted, planted.Settings(**(planted.QUICK if quick else {})), given, as_json)


@app.command(real.NAME)
def compare_real(
    data: Annotated[str | None, some_of(_DATA)] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Every structure on ten real data sets, and which one `compare` chooses."""
    given = {"jobs": jobs, "seed": seed, "data": named("--data", data, _DATA)}
    run_study(real, real.Settings(**(real.QUICK if quick else {})), given, as_json)
