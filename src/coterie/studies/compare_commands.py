# SPDX-License-Identifier: Apache-2.0
"""`coterie study compare-...`: the studies of comparisons on the command line."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from coterie.studies import compare_planted as planted
from coterie.studies import compare_real as real
from coterie.studies.commands import Jobs, Json, Quick, Seed, Seeds, stated
from coterie.studies.common import named, progress, show
from coterie.studies.personal_commands import app

__all__ = ["app"]


@app.command(planted.NAME)
def compare_planted(
    cases: Annotated[
        str | None, typer.Option(help=f"Comma-separated, of {', '.join(case.name for case in planted.CASES)}.")
    ] = None,
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
    given |= {"jobs": jobs, "reps": seeds, "cases": named("--cases", cases, [case.name for case in planted.CASES])}
    settings = replace(planted.Settings(seed=seed), **{**(planted.QUICK if quick else {}), **stated(given)})
    with progress() as tell:
        outcome = planted.run(settings, tell)
    show(outcome, planted.COLUMNS, caption=planted.CAPTION, as_json=as_json)


@app.command(real.NAME)
def compare_real(
    data: Annotated[
        str | None, typer.Option(help=f"Comma-separated, of {', '.join(task.name for task in real.TASKS)}.")
    ] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Every structure on ten real data sets, and which one `compare` chooses."""
    given: dict[str, Any] = {"jobs": jobs, "data": named("--data", data, [task.name for task in real.TASKS])}
    settings = replace(real.Settings(seed=seed), **{**(real.QUICK if quick else {}), **stated(given)})
    with progress() as tell:
        outcome = real.run(settings, tell)
    show(outcome, real.COLUMNS, caption=real.CAPTION, as_json=as_json)
