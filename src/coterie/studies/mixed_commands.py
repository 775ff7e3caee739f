# SPDX-License-Identifier: Apache-2.0
"""`coterie study mixed-regression...`: the studies of moment descent on the command line."""

from dataclasses import replace
from typing import Any

from coterie.studies.choices import FACTORS, MIXED_METHODS, MIXED_PAPER, VARIANTS
from coterie.studies.commands import JOBS, ROUNDS, STEP_SIZE, Given, Shown, app, many, ran, some_of, study
from coterie.studies.common import Tell

__all__ = ["app"]

METHODS = some_of(MIXED_METHODS, "; all by default")


@study(
    "mixed-regression",
    {
        "setting": Given(
            "c1 (equal clients), c2 (unequal clients) or c3 (unequal clusters too) of appendix C.", default="c1"
        ),
        "preset": Given(
            f"Our options (default), or those of the paper's experiments ({MIXED_PAPER}).", default="default"
        ),
        "features": Given("Distribution of features: normal, rademacher, uniform, laplace."),
        "covariance": Given("Covariance of features: the same in all clusters, or differs."),
        "methods": METHODS,
        "rounds": ROUNDS,
        "local_steps": many("Local steps of FedAvg in Phase 2, comma-separated; our method runs once with each.", int),
        "step_size": STEP_SIZE,
        "eta": Given("eta of FedProx, under the paper's loss.", float),
        "average_over": Given("Clients that a model is averaged over in Phase 2: cluster, or everyone (Lemma 1)."),
        "estimator": Given("Estimator of the moments in Phase 1: pairs, halves, or two (the paper's text)."),
        "anchors": Given("Number of anchors in Phase 1.", int),
        "noise_on_anchors": Given("Standard deviation of noise on what clients see of the anchors (Remark 2).", float),
        "curves": Given("Add the error by round, also for 1 and 10 local steps, to the JSON document.", bool),
        "jobs": JOBS,
    },
)
def mixed_regression(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Moment descent on planted linear models, next to IFCA, one-shot clustering, one model for all, the oracle."""
    from coterie.studies import mixed_regression as regression

    base = regression.settings(given.pop("setting"), given.pop("preset"), quick=quick)
    if given["curves"]:
        given.setdefault("local_steps", regression.LEFT_PANELS)
    problem = {name: given.pop(name) for name in ("features", "covariance") if name in given}
    runs = {name: given.pop(name) for name in ("seed", "seeds", "jobs") if name in given}
    parts = {"problem": replace(base.problem, **problem), "how": replace(base.how, **given)}
    return ran(regression, base, parts | runs, tell)


@study("mixed-regression-scaling", {"factors": some_of(FACTORS, "; all by default"), "methods": METHODS, "jobs": JOBS})
def mixed_regression_scaling(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """The same with other numbers of clients, rows, features and clusters, noise, covariances and distributions."""
    from coterie.studies import mixed_scaling as scaling

    return ran(scaling, scaling.settings(given.pop("factors", None), quick=quick), given, tell)


@study(
    "mixed-regression-ablation",
    {
        "settings": some_of(("c1", "c2", "c3"), " of appendix C; all by default"),
        "variants": some_of(VARIANTS, "; all by default"),
        "methods": METHODS,
        "rounds": ROUNDS,
        "jobs": JOBS,
    },
)
def mixed_regression_ablation(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Moment descent without each of our additions to the paper, and as in the paper."""
    from coterie.studies import mixed_ablation as ablation

    return ran(ablation, ablation.settings(quick=quick), given, tell)
