# SPDX-License-Identifier: Apache-2.0
"""`coterie study mixed-regression...`: the studies of moment descent on the command line."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from coterie.studies.choices import FACTORS, MIXED_METHODS, MIXED_PAPER, VARIANTS
from coterie.studies.commands import Jobs, Json, Quick, Rounds, Seed, Seeds, StepSize, app, run_study, some_of, stated
from coterie.studies.common import named, numbers

__all__ = ["app"]

Methods = Annotated[str | None, some_of(MIXED_METHODS, "; all by default")]


@app.command("mixed-regression")
def mixed_regression(
    setting: Annotated[
        str, typer.Option(help="c1 (equal clients), c2 (unequal clients) or c3 (unequal clusters too) of appendix C.")
    ] = "c1",
    preset: Annotated[
        str,
        typer.Option(help=f"Phases as here (default), or as in the paper's experiments ({MIXED_PAPER})."),
    ] = "default",
    features: Annotated[str | None, typer.Option(help="Law of features: normal, rademacher, uniform, laplace.")] = None,
    covariance: Annotated[str | None, typer.Option(help="Of features: the same in all clusters, or differs.")] = None,
    methods: Methods = None,
    rounds: Rounds = None,
    local_steps: Annotated[
        str | None, typer.Option(help="Local steps of FedAvg in Phase 2, comma-separated: one run of ours for each.")
    ] = None,
    step_size: StepSize = None,
    eta: Annotated[float | None, typer.Option(help="eta of FedProx, under the paper's loss.")] = None,
    average_over: Annotated[
        str | None, typer.Option(help="What models are averaged over in Phase 2: cluster, or everyone (Lemma 1).")
    ] = None,
    estimator: Annotated[str | None, typer.Option(help="Of Phase 1: pairs, halves, or two (the paper's text).")] = None,
    anchors: Annotated[int | None, typer.Option(help="Anchors of Phase 1.")] = None,
    noise_on_anchors: Annotated[
        float | None, typer.Option(help="Standard deviation of noise on what clients see of the anchors (Remark 2).")
    ] = None,
    curves: Annotated[
        bool,
        typer.Option("--curves", help="Add the error by round, also for 1 and 10 local steps, to the JSON document."),
    ] = False,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Moment descent on planted linear models, against IFCA, one-shot clustering, one model for all and the oracle."""
    from coterie.studies import mixed_regression as regression

    base = regression.settings(setting, preset, quick=quick)
    steps = numbers("--local-steps", local_steps, int) or (regression.LEFT_PANELS if curves else None)
    how: dict[str, Any] = {
        "methods": named("--methods", methods, MIXED_METHODS),
        "rounds": rounds,
        "local_steps": steps,
    }
    how |= {"step_size": step_size, "eta": eta, "average_over": average_over, "estimator": estimator}
    how |= {"anchors": anchors, "noise_on_anchors": noise_on_anchors, "curves": curves}
    problem = replace(base.problem, **stated({"features": features, "covariance": covariance}))
    given = {"problem": problem, "how": replace(base.how, **stated(how)), "seed": seed, "seeds": seeds, "jobs": jobs}
    run_study(regression, base, given, as_json)


@app.command("mixed-regression-scaling")
def mixed_regression_scaling(
    factors: Annotated[str | None, some_of(FACTORS, "; all by default")] = None,
    methods: Methods = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """The same against the numbers of clients, rows, features and clusters, noise, covariance, law and private anchors."""
    from coterie.studies import mixed_scaling as scaling

    base = scaling.settings(named("--factors", factors, FACTORS), quick=quick)
    given = {"methods": named("--methods", methods, MIXED_METHODS), "seed": seed, "seeds": seeds, "jobs": jobs}
    run_study(scaling, base, given, as_json)


@app.command("mixed-regression-ablation")
def mixed_regression_ablation(
    settings: Annotated[
        str | None, typer.Option(help="Comma-separated, of c1, c2 and c3 of appendix C; all by default.")
    ] = None,
    variants: Annotated[str | None, some_of(VARIANTS, "; all by default")] = None,
    methods: Methods = None,
    rounds: Rounds = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Moment descent without each of what is added to the paper here, and as the paper has it."""
    from coterie.studies import mixed_ablation as ablation
    from coterie.studies import mixed_regression as regression

    given: dict[str, Any] = {"settings": named("--settings", settings, tuple(regression.SETTINGS)), "rounds": rounds}
    given |= {"variants": named("--variants", variants, VARIANTS), "seeds": seeds, "jobs": jobs}
    given |= {"methods": named("--methods", methods, MIXED_METHODS), "seed": seed}
    run_study(ablation, ablation.settings(quick=quick), given, as_json)
