# SPDX-License-Identifier: Apache-2.0
"""`coterie study srpfl-...`: straggler-resilient personalisation on the command line."""

from typing import Any

from coterie.studies.choices import DATASETS, IMAGE_METHODS, LINEAR_METHODS, SPEEDS
from coterie.studies.commands import CLIENTS, JOBS, ROUNDS, ROWS, STEP_SIZE, Given, Shown, many, ran, some_of, study
from coterie.studies.common import Tell, one_of
from coterie.studies.mixture_commands import app

__all__ = ["app"]

_SPEEDS = Given(f"Speeds of clients: {' or '.join(SPEEDS)}.")
_COMMUNICATION = Given("Virtual seconds added to every round.", float)
_FIRST = Given("Clients of SRPFL's first stage.", int)


@study(
    "srpfl-linear",
    {
        "clients": CLIENTS,
        "rows": Given("Rows of each client.", int),
        "features": Given("Features.", int),
        "rank": Given("Dimensions of the representation.", int),
        "noise": Given("Standard deviation of the noise.", float),
        "batch_size": Given("Rows of a client in a round.", int),
        "step_size": STEP_SIZE,
        "rounds": ROUNDS,
        "first": _FIRST,
        "stages": Given("When a stage ends: fixed (rounds), theory (Lemma B.1) or adaptive."),
        "stage_rounds": Given("Rounds of each of SRPFL's fixed stages.", int),
        "speeds": _SPEEDS,
        "communication": _COMMUNICATION,
        "methods": some_of(LINEAR_METHODS),
        "jobs": JOBS,
    },
)
def srpfl_linear(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Algorithm 2 of SRPFL on planted linear representations: distance by round and virtual time, next to FedRep."""
    from coterie.studies import srpfl_linear as linear

    return ran(linear, linear.settings(quick=quick), given, tell)


@study(
    "srpfl-speedup",
    {
        "clients": many("Numbers of clients, comma-separated; each is --first times a power of two.", int),
        "communication": many(
            "Communication costs, comma-separated, in units of a client's mean time for a round.", float
        ),
        "c_hat": many("Target distances, relative to the smallest, comma-separated.", float),
        "first": _FIRST,
        "contraction": Given("Contraction a in Theorem 4.5.", float),
        "trained": many("Numbers of clients for which representations are also trained.", int),
        "features": Given("Features, in training.", int),
        "rank": Given("Dimensions of the representation, in training.", int),
        "noise": Given("Standard deviation of the noise, in training.", float),
        "jobs": JOBS,
    },
)
def srpfl_speedup(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Theorem 4.6 of SRPFL: time to an accuracy relative to FedRep, for 16 to 8,192 clients; in theory 1 / log N."""
    from coterie.studies import srpfl_speedup as speedup

    return ran(speedup, speedup.settings(quick=quick), given, tell)


@study(
    "srpfl-images",
    {
        "dataset": Given(f"Data set: {', '.join(DATASETS)}.", default="mnist"),
        "preset": Given("Options of the paper's text (paper) or of the authors' scripts (authors).", default="paper"),
        "shards": Given("Classes of each client.", int),
        "speeds": _SPEEDS,
        "participation": Given("Share of the clients in a round.", float),
        "communication": _COMMUNICATION,
        "clients": CLIENTS,
        "rows": ROWS,
        "rounds": ROUNDS,
        "step_size": STEP_SIZE,
        "epochs": Given("Passes over a client's images per round, with all layers but the head.", int),
        "head_epochs": Given("Passes per round with the head.", int),
        "first": Given("Clients of the first stage.", int),
        "stage_rounds": Given("Rounds of each stage.", int),
        "evaluate_every": Given("Rounds between tests.", int),
        "methods": some_of(IMAGE_METHODS, "; all by default"),
        "curves": Given("Add the accuracy by virtual time to the JSON document.", bool),
        "jobs": JOBS,
    },
)
def srpfl_images(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Figure 3 of SRPFL: personal models of images, with stragglers: accuracy and virtual time of nine methods."""
    from coterie.studies import srpfl_images as images

    dataset = given.pop("dataset")
    one_of("--dataset", dataset, DATASETS)
    return ran(images, images.settings(dataset, preset=given.pop("preset"), quick=quick), given, tell)
