# SPDX-License-Identifier: Apache-2.0
"""`coterie study fedgrem-...`: FedGrEM's studies on the command line."""

from dataclasses import replace
from typing import Annotated, Any, cast

import typer

from coterie.studies.choices import CONTAMINATIONS, MIXTURE_METHODS
from coterie.studies.commands import Json, Quick, Rounds, Seed, Seeds, run_study, some_of, stated
from coterie.studies.common import named, numbers, progress, show
from coterie.studies.mixed_commands import app

__all__ = ["app"]

Methods = Annotated[str | None, some_of(MIXTURE_METHODS)]
Distances = Annotated[str | None, typer.Option("--h", help="Distances from common parameters, comma-separated.")]
Tolerance = Annotated[float | None, typer.Option(help="Rounds end when no estimate moves by more than this.")]
Bad = Annotated[str | None, typer.Option(help="Numbers of contaminated clients, comma-separated.")]
Contaminated = Annotated[str | None, typer.Option("--contamination", help=f"How: {', '.join(CONTAMINATIONS)}.")]
CovarianceOption = Annotated[str | None, typer.Option("--covariance", help="Of components: unit, diagonal or full.")]
Jobs = Annotated[int | None, typer.Option(help="Processes side by side; as many as there are cores by default.")]
Times = Annotated[bool, typer.Option("--times", help="Fit methods one by one, and tell their CPU seconds.")]
Rows = Annotated[int | None, typer.Option("--rows", help="Images of each client; all by default. Writers have theirs.")]


@app.command("fedgrem-simulation")
def fedgrem_simulation(
    model: Annotated[str, typer.Option(help="gmm (Gaussian mixtures) or mor (mixtures of regressions).")] = "gmm",
    h: Distances = None,
    outliers: Annotated[
        str | None, typer.Option(help="Outlier client as in the text (paper) or in the authors' code (official).")
    ] = None,
    methods: Methods = None,
    c_eta: Annotated[
        str | None, typer.Option(help="Step sizes of the FedGrEM methods times first weights, comma-separated.")
    ] = None,
    rounds: Rounds = None,
    tol: Tolerance = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Figure 3 and Tables 4, 5 of FedGrEM: planted mixtures, one outlier client, against nine methods."""
    from coterie.studies import fedgrem_simulation as simulation

    given: dict[str, Any] = {"outliers": outliers, "reps": seeds, "rounds": rounds, "tol": tol, "jobs": jobs}
    given |= {"h": numbers("--h", h, float), "methods": named("--methods", methods, MIXTURE_METHODS)}
    given |= {"c_eta": numbers("--c-eta", c_eta, float), "seed": seed}
    base = simulation.Settings(cast(Any, model), **(simulation.QUICK if quick else {}))
    run_study(simulation, base, given, as_json)


def _real_study(name: str, help_: str, small: dict[str, Any]) -> None:
    """Put a study of real data on the command line; they differ in the data alone."""

    @app.command(name, help=help_)
    def study(
        rows: Rows = None,
        bad: Bad = None,
        contamination: Contaminated = None,
        covariance: CovarianceOption = None,
        methods: Methods = None,
        rounds: Rounds = None,
        tol: Tolerance = None,
        jobs: Jobs = None,
        times: Times = False,
        seed: Seed = 0,
        seeds: Seeds = None,
        quick: Quick = False,
        as_json: Json = False,
    ) -> None:
        from coterie.studies import fedgrem_real as real
        from coterie.studies.mixture_tasks import TASKS

        given: dict[str, Any] = {"contamination": contamination, "covariance": covariance, "rounds": rounds, "tol": tol}
        given |= {"jobs": jobs, "reps": seeds, "rows": rows, "bad": numbers("--bad", bad, int)}
        given |= {"methods": named("--methods", methods, MIXTURE_METHODS), "times": times}
        task = TASKS[name]
        settings = replace(real.Settings(task.bad, seed=seed), **{**(small if quick else {}), **stated(given)})
        with progress() as tell:
            outcome = real.run(task, settings, tell)
        show(outcome, real.TIMED if times else real.COLUMNS, caption=real.CAPTION, as_json=as_json)


_real_study(
    "fedgrem-pendigits", "Table 1 of FedGrEM: pen digits of 44 writers, some of them contaminated.", {"reps": 1}
)
_real_study(
    "fedgrem-mnist",
    "Table 2 of FedGrEM: MNIST dealt to 100 clients after an embedding in ten dimensions.",
    {"reps": 1, "rows": 100},
)
_real_study("fedgrem-fashion", "Table 3 of FedGrEM: the same on Fashion-MNIST.", {"reps": 1, "rows": 100})


@app.command("fedgrem-adversarial")
def fedgrem_adversarial(
    data: Annotated[str, typer.Option(help="gmm, mor (planted mixtures) or pendigits.")] = "gmm",
    kinds: Annotated[str | None, some_of(CONTAMINATIONS)] = None,
    shares: Annotated[str | None, typer.Option(help="Shares of bad clients, comma-separated.")] = None,
    h: Annotated[float | None, typer.Option("--h", help="Distance of planted parameters from common ones.")] = None,
    methods: Methods = None,
    rounds: Rounds = None,
    tol: Tolerance = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """What good clients lose to bad ones of seven kinds, up to three in ten."""
    from coterie.studies import fedgrem_adversarial as adversarial

    given: dict[str, Any] = {"h": h, "reps": seeds, "rounds": rounds, "tol": tol, "jobs": jobs}
    given |= {"kinds": named("--kinds", kinds, CONTAMINATIONS), "methods": named("--methods", methods, MIXTURE_METHODS)}
    given |= {"shares": numbers("--shares", shares, float), "seed": seed}
    base = adversarial.Settings(cast(Any, data), **(adversarial.QUICK if quick else {}))
    run_study(adversarial, base, given, as_json)


@app.command("fedgrem-adaptive")
def fedgrem_adaptive(
    d: Annotated[str | None, typer.Option("--d", help="Dimensions, comma-separated.")] = None,
    r: Annotated[str | None, typer.Option("--r", help="Numbers of components, comma-separated.")] = None,
    h: Distances = None,
    n: Annotated[str | None, typer.Option("--n", help="Rows of every client, comma-separated.")] = None,
    apart: Annotated[float | None, typer.Option(help="Smallest distance between two centres.")] = None,
    rounds: Rounds = None,
    tol: Tolerance = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Whether FedGrEM is ever worse than local EM or FedEM, over a grid of sizes and distances."""
    from coterie.studies import fedgrem_adaptive as adaptive

    given: dict[str, Any] = {"apart": apart, "reps": seeds, "rounds": rounds, "tol": tol, "jobs": jobs}
    given |= {"d": numbers("--d", d, int), "r": numbers("--r", r, int), "n": numbers("--n", n, int)}
    given |= {"h": numbers("--h", h, float), "seed": seed}
    run_study(adaptive, adaptive.Settings(**(adaptive.QUICK if quick else {})), given, as_json)
