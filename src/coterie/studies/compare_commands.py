# SPDX-License-Identifier: Apache-2.0
"""`coterie study compare-...`: the studies of comparisons on the command line."""

from typing import Annotated, Any

import typer

from coterie.studies.choices import CASES, REAL_DATA
from coterie.studies.commands import Jobs, Json, Quick, Seed, Seeds, run_study, some_of
from coterie.studies.common import named
from coterie.studies.personal_commands import app

__all__ = ["app"]


@app.command("compare-planted")
def compare_planted(
    cases: Annotated[str | None, some_of(CASES)] = None,
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
    from coterie.studies import compare_planted as planted

    given: dict[str, Any] = {"clients": clients, "rows": rows, "features": features, "noise": noise}
    given |= {"jobs": jobs, "seed": seed, "reps": seeds, "cases": named("--cases", cases, CASES)}
    run_study(planted, planted.Settings(**(planted.QUICK if quick else {})), given, as_json)


@app.command("compare-real")
def compare_real(
    data: Annotated[str | None, some_of(REAL_DATA)] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Every structure on ten real data sets, and which one `compare` chooses."""
    from coterie.studies import compare_real as real

    given = {"jobs": jobs, "seed": seed, "data": named("--data", data, REAL_DATA)}
    run_study(real, real.Settings(**(real.QUICK if quick else {})), given, as_json)
