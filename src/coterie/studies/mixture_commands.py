# SPDX-License-Identifier: Apache-2.0
"""`coterie study fedgrem-...`: FedGrEM's studies on the command line."""

from dataclasses import replace
from typing import Any

from coterie.studies.choices import CONTAMINATIONS, MIXTURE_METHODS
from coterie.studies.commands import ROUNDS, Given, Shown, many, ran, some_of, study
from coterie.studies.common import Tell
from coterie.studies.mixed_commands import app

__all__ = ["app"]

_METHODS = {"methods": some_of(MIXTURE_METHODS)}
_DISTANCES = many("Distances from common parameters, comma-separated.", float)
_UNTIL = {
    "rounds": ROUNDS,
    "tol": Given("Rounds end when no estimate moves by more than this.", float),
    "jobs": Given("Processes; as many as there are cores by default.", int),
}


@study(
    "fedgrem-simulation",
    {
        "model": Given("gmm (Gaussian mixtures) or mor (mixtures of regressions).", default="gmm"),
        "h": _DISTANCES,
        "outliers": Given("Outlier client as in the paper's text (paper) or in the authors' code (official)."),
        **_METHODS,
        "c_eta": many("Step sizes of the FedGrEM methods, times components' first weights, comma-separated.", float),
        **_UNTIL,
    },
    repetitions="reps",
)
def fedgrem_simulation(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Figure 3 and Tables 4, 5 of FedGrEM: planted mixtures with one outlier client, compared with nine methods."""
    from coterie.studies import fedgrem_simulation as simulation

    base = simulation.Settings(given.pop("model"), **(simulation.QUICK if quick else {}))
    return ran(simulation, base, given, tell)


_REAL = {
    "rows": Given("Images of each client; all by default. Not for pen digits.", int),
    "bad": many("Numbers of contaminated clients, comma-separated.", int),
    "contamination": Given(f"How clients are contaminated: {', '.join(CONTAMINATIONS)}."),
    "covariance": Given("Covariance of components: unit, diagonal or full."),
    **_METHODS,
    **_UNTIL,
    "times": Given("Fit methods one by one, and report their CPU seconds.", bool),
}


def _real(task: str, small: dict[str, Any], given: dict[str, Any], tell: Tell) -> Shown:
    """Run a study of real data; they differ in the data alone."""
    from coterie.studies import fedgrem_real as real
    from coterie.studies.mixture_tasks import TASKS

    outcome = real.run(TASKS[task], replace(real.Settings(TASKS[task].bad), **(small | given)), tell)
    return Shown(outcome, real.TIMED if given["times"] else real.COLUMNS, real.CAPTION)


@study("fedgrem-pendigits", _REAL, repetitions="reps")
def fedgrem_pendigits(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Table 1 of FedGrEM: pen digits of 44 writers, some of them contaminated."""
    return _real("fedgrem-pendigits", {"reps": 1} if quick else {}, given, tell)


@study("fedgrem-mnist", _REAL, repetitions="reps")
def fedgrem_mnist(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Table 2 of FedGrEM: MNIST dealt to 100 clients after an embedding in ten dimensions."""
    return _real("fedgrem-mnist", {"reps": 1, "rows": 100} if quick else {}, given, tell)


@study("fedgrem-fashion", _REAL, repetitions="reps")
def fedgrem_fashion(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Table 3 of FedGrEM: the same on Fashion-MNIST."""
    return _real("fedgrem-fashion", {"reps": 1, "rows": 100} if quick else {}, given, tell)


@study(
    "fedgrem-adversarial",
    {
        "data": Given("gmm, mor (planted mixtures) or pendigits.", default="gmm"),
        "kinds": some_of(CONTAMINATIONS),
        "shares": many("Shares of bad clients, comma-separated.", float),
        "h": Given("Distance of planted parameters from common ones.", float),
        **_METHODS,
        **_UNTIL,
    },
    repetitions="reps",
)
def fedgrem_adversarial(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """How much good clients lose to contaminated ones: seven kinds, up to 30 % of the clients."""
    from coterie.studies import fedgrem_adversarial as adversarial

    base = adversarial.Settings(given.pop("data"), **(adversarial.QUICK if quick else {}))
    return ran(adversarial, base, given, tell)


@study(
    "fedgrem-adaptive",
    {
        "d": many("Dimensions, comma-separated.", int),
        "r": many("Numbers of components, comma-separated.", int),
        "h": _DISTANCES,
        "n": many("Rows of every client, comma-separated.", int),
        "apart": Given("Smallest distance between two centres.", float),
        **_UNTIL,
    },
    repetitions="reps",
)
def fedgrem_adaptive(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Whether FedGrEM is ever worse than local EM or FedEM, over a grid of sizes and distances."""
    from coterie.studies import fedgrem_adaptive as adaptive

    return ran(adaptive, adaptive.Settings(**(adaptive.QUICK if quick else {})), given, tell)
