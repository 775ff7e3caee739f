# SPDX-License-Identifier: Apache-2.0
"""`coterie study srpfl-...`: straggler-resilient personalisation on the command line."""

from typing import Annotated, Any

import typer

from coterie.studies.choices import DATASETS, IMAGE_METHODS, LINEAR_METHODS, SPEEDS
from coterie.studies.commands import Clients, Jobs, Json, Quick, Rounds, Rows, Seed, Seeds, StepSize, run_study, some_of
from coterie.studies.common import named, numbers, one_of
from coterie.studies.mixture_commands import app

__all__ = ["app"]

Communication = Annotated[float | None, typer.Option(help="Virtual seconds of every exchange.")]


@app.command("srpfl-linear")
def srpfl_linear(
    clients: Clients = None,
    rows: Annotated[int | None, typer.Option(help="Rows of each client.")] = None,
    features: Annotated[int | None, typer.Option(help="Features.")] = None,
    rank: Annotated[int | None, typer.Option(help="Dimensions of the representation.")] = None,
    noise: Annotated[float | None, typer.Option(help="Standard deviation of the noise.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a client in a round.")] = None,
    step_size: StepSize = None,
    rounds: Rounds = None,
    first: Annotated[int | None, typer.Option(help="Clients of SRPFL's first stage.")] = None,
    stages: Annotated[
        str | None, typer.Option(help="When a stage is over: fixed (rounds), theory (Lemma B.1) or adaptive.")
    ] = None,
    stage_rounds: Annotated[int | None, typer.Option(help="Rounds of each of SRPFL's fixed stages.")] = None,
    speeds: Annotated[str | None, typer.Option(help=f"Of clients: {' or '.join(SPEEDS)}.")] = None,
    communication: Communication = None,
    methods: Annotated[str | None, some_of(LINEAR_METHODS)] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Algorithm 2 of SRPFL on planted linear representations: distance by round and by virtual time, against FedRep."""
    from coterie.studies import srpfl_linear as linear

    given: dict[str, Any] = {"clients": clients, "rows": rows, "features": features, "rank": rank, "noise": noise}
    given |= {"batch_size": batch_size, "step_size": step_size, "rounds": rounds, "first": first}
    given |= {"stages": stages, "stage_rounds": stage_rounds, "speeds": speeds, "communication": communication}
    given |= {"methods": named("--methods", methods, LINEAR_METHODS), "jobs": jobs, "seed": seed, "seeds": seeds}
    run_study(linear, linear.settings(quick=quick), given, as_json)


@app.command("srpfl-speedup")
def srpfl_speedup(
    clients: Annotated[
        str | None, typer.Option(help="Numbers of clients, comma-separated: the first stage's times powers of two.")
    ] = None,
    communication: Annotated[
        str | None, typer.Option(help="Communication costs, comma-separated, in mean times of a client's round.")
    ] = None,
    c_hat: Annotated[str | None, typer.Option(help="Targets over the least distance, comma-separated.")] = None,
    first: Annotated[int | None, typer.Option(help="Clients of SRPFL's first stage.")] = None,
    contraction: Annotated[float | None, typer.Option(help="a of Theorem 4.5.")] = None,
    trained: Annotated[
        str | None, typer.Option(help="Numbers of clients with which representations are trained as well.")
    ] = None,
    features: Annotated[int | None, typer.Option(help="Features, in training.")] = None,
    rank: Annotated[int | None, typer.Option(help="Dimensions of the representation, in training.")] = None,
    noise: Annotated[float | None, typer.Option(help="Standard deviation of the noise, in training.")] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Theorem 4.6 of SRPFL: time to accuracy over that of FedRep, from 16 to 8,192 clients, against 1 / log N."""
    from coterie.studies import srpfl_speedup as speedup

    given: dict[str, Any] = {"clients": numbers("--clients", clients, int), "c_hat": numbers("--c-hat", c_hat, float)}
    given |= {"communication": numbers("--communication", communication, float), "first": first}
    given |= {"contraction": contraction, "trained": numbers("--trained", trained, int), "features": features}
    given |= {"rank": rank, "noise": noise, "jobs": jobs, "seed": seed, "seeds": seeds}
    run_study(speedup, speedup.settings(quick=quick), given, as_json)


@app.command("srpfl-images")
def srpfl_images(
    dataset: Annotated[str, typer.Option(help=f"Whose images: {', '.join(DATASETS)}.")] = "mnist",
    preset: Annotated[
        str, typer.Option(help="paper: what its text says; authors: what their published scripts say.")
    ] = "paper",
    shards: Annotated[int | None, typer.Option(help="Classes of each client.")] = None,
    speeds: Annotated[str | None, typer.Option(help=f"Of clients: {' or '.join(SPEEDS)}.")] = None,
    participation: Annotated[
        float | None, typer.Option(help="Share of the clients that are drawn for a round.")
    ] = None,
    communication: Communication = None,
    clients: Clients = None,
    rows: Rows = None,
    rounds: Rounds = None,
    step_size: StepSize = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over its images that a client makes in a round, with all but heads.")
    ] = None,
    head_epochs: Annotated[int | None, typer.Option(help="The same with its head.")] = None,
    first: Annotated[int | None, typer.Option(help="Clients of the first stage.")] = None,
    stage_rounds: Annotated[int | None, typer.Option(help="Rounds of each stage.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Rounds between two test accuracies.")] = None,
    methods: Annotated[str | None, some_of(IMAGE_METHODS, "; all by default")] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Add the accuracy by virtual time to the JSON document.")
    ] = False,
    jobs: Jobs = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Figure 3 of SRPFL: personal models of images with stragglers, nine methods, accuracy and virtual time."""
    from coterie.studies import srpfl_images as images

    one_of("--dataset", dataset, DATASETS)
    given: dict[str, Any] = {"shards": shards, "speeds": speeds, "participation": participation, "clients": clients}
    given |= {"communication": communication, "rows": rows, "rounds": rounds, "step_size": step_size}
    given |= {"epochs": epochs, "head_epochs": head_epochs, "first": first, "stage_rounds": stage_rounds}
    given |= {"evaluate_every": evaluate_every, "methods": named("--methods", methods, IMAGE_METHODS)}
    given |= {"curves": curves, "jobs": jobs, "seed": seed, "seeds": seeds}
    run_study(images, images.settings(dataset, preset=preset, quick=quick), given, as_json)
