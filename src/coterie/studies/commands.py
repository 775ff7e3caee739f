# SPDX-License-Identifier: Apache-2.0
"""`coterie study`: the studies on the command line. Results go to stdout, progress to stderr."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.table import Table

from coterie.errors import ConfigError
from coterie.studies.choices import VARIABLE
from coterie.studies.common import Column, Outcome, Tell, console, named, numbers, progress, show

if TYPE_CHECKING:
    from coterie.studies.rotated_settings import Settings, Task

__all__ = ["app"]

app = typer.Typer(help="Run the papers' experiments; without a name, list them.", rich_markup_mode=None)

Seed = Annotated[int, typer.Option(help="Seed of the first repetition; the next ones count up from it.")]
Seeds = Annotated[int | None, typer.Option("--seeds", "--reps", help="Repetitions.")]
Quick = Annotated[bool, typer.Option("--quick", help="A reduced setting that ends within a minute.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")]
Clients = Annotated[int | None, typer.Option(help="Training clients.")]
Rows = Annotated[int | None, typer.Option(help="Images of each client.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds of training.")]
TestClients = Annotated[int | None, typer.Option(help="Test clients; as many as there are images for by default.")]
StepSize = Annotated[float | None, typer.Option(help="Step size of local training.")]
LocalSteps = Annotated[int | None, typer.Option(help="Local steps (with batches: passes) of a round.")]
Methods = Annotated[str | None, typer.Option(help="Comma-separated, of ifca, global, local; all by default.")]
Init = Annotated[str | None, typer.Option(help="Starts of IFCA, comma-separated: spread, random, balanced.")]
EvaluateEvery = Annotated[int | None, typer.Option(help="Test every so many rounds, not only after the last.")]
Jobs = Annotated[int | None, typer.Option(help="Processes; as many as there are repetitions or cores by default.")]
Checkpoint = Annotated[
    Path | None, typer.Option(envvar=VARIABLE, help="Folder for checkpoints: run again to go on from there.")
]


@app.callback(invoke_without_command=True)
def list_studies(context: typer.Context, as_json: Json = False) -> None:
    """Run the papers' experiments; without a name, list them."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise ConfigError("--json stands before the study's name", "write coterie study NAME --json")
        return
    commands: dict[str, Any] = context.command.commands  # type: ignore[attr-defined]  # a group's
    lines = {name: command.get_short_help_str(limit=200) for name, command in commands.items()}
    if as_json:
        print(json.dumps({"studies": lines}, indent=2))
        return
    table = Table("study", "what it shows", box=None, pad_edge=False)
    for name, line in lines.items():
        table.add_row(name, line)
    console().print(table, "\nRun one with `coterie study NAME`; `--quick` takes less than a minute.")


@app.command("ifca-synthetic")
def ifca_synthetic(
    panel: Annotated[str, typer.Option(help="Panel of Figure 2: a, b, c or d.")] = "a",
    preset: Annotated[
        str | None, typer.Option(help="Planted models as in the authors' code (official) or as in the text (paper).")
    ] = None,
    init: Annotated[str | None, typer.Option(help="Comma-separated starts: random, spread, balanced.")] = None,
    trials: Annotated[int | None, typer.Option("--trials", "--seeds", "--reps", help="Trials at each point.")] = None,
    starts: Annotated[int | None, typer.Option(help="Starts in each trial.")] = None,
    rounds: Rounds = None,
    r: Annotated[str | None, typer.Option("--r", help="Separations, comma-separated.")] = None,
    sigma: Annotated[str | None, typer.Option(help="Noise levels, comma-separated.")] = None,
    clients: Annotated[str | None, typer.Option(help="Numbers of clients, comma-separated.")] = None,
    rows: Annotated[str | None, typer.Option(help="Rows of each client, comma-separated.")] = None,
    features: Annotated[str | None, typer.Option(help="Numbers of features, comma-separated.")] = None,
    steps: Annotated[
        str | None, typer.Option(help="Step sizes that each start is tried with, comma-separated.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    jobs: Jobs = None,
    seed: Seed = 0,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Figure 2 of IFCA: how often starts find planted linear models."""
    from coterie.studies import ifca_synthetic as synthetic

    given: dict[str, Any] = {"preset": preset, "trials": trials, "starts": starts, "rounds": rounds, "dtype": dtype}
    given |= {"init": named("--init", init, synthetic.INITS), "jobs": jobs}
    given |= {name: numbers(f"--{name}", text, float) for name, text in (("r", r), ("sigma", sigma), ("steps", steps))}
    sizes = (("clients", clients), ("rows", rows), ("features", features))
    given |= {name: numbers(f"--{name}", text, int) for name, text in sizes}
    run_study(synthetic, synthetic.settings(panel, quick=quick), given | {"seed": seed}, as_json)


@app.command("ifca-rotated-mnist")
def ifca_rotated_mnist(
    clients: Clients = None,
    rows: Rows = None,
    rounds: Rounds = None,
    test_clients: TestClients = None,
    step_size: StepSize = None,
    local_steps: LocalSteps = None,
    methods: Methods = None,
    init: Init = None,
    pixels: Annotated[
        str | None, typer.Option(help="raw (between 0 and 1, as the authors; the default) or standardised.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="All three sizes of Table 1, one after the other.")] = False,
    evaluate_every: EvaluateEvery = None,
    checkpoint: Checkpoint = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Table 1 of IFCA: four rotations of MNIST, against one model for all and one each."""
    from coterie.studies import rotated_tasks as tasks

    given: dict[str, Any] = {"clients": clients, "rows": rows, "rounds": rounds, "test_clients": test_clients}
    given |= {"step_size": step_size, "local_steps": local_steps, "pixels": pixels}
    given |= {"evaluate_every": evaluate_every, "seeds": seeds}
    settings = _rotated(tasks.MNIST_QUICK if quick else tasks.MNIST_PAPER, given, methods, init, seed)
    if step_size is None:
        settings = replace(settings, step_size=tasks.mnist_step_size(settings.rounds))
    sizes = [replace(settings, clients=m, rows=n) for m, n in tasks.MNIST_TABLE] if table else [settings]
    _run_rotated(tasks.MNIST, sizes, checkpoint, as_json)


@app.command("ifca-rotated-digits")
def ifca_rotated_digits(
    rounds: Rounds = None,
    methods: Methods = None,
    init: Init = None,
    evaluate_every: EvaluateEvery = None,
    checkpoint: Checkpoint = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """The demo: the same on scikit-learn's digits, 144 clients, in some seconds."""
    from coterie.studies import rotated_tasks as tasks

    given = {"rounds": rounds, "evaluate_every": evaluate_every, "seeds": seeds}
    settings = _rotated(tasks.DIGITS_QUICK if quick else tasks.DIGITS_DEMO, given, methods, init, seed)
    _run_rotated(tasks.DIGITS, [settings], checkpoint, as_json)


@app.command("ifca-rotated-cifar")
def ifca_rotated_cifar(
    clients: Clients = None,
    rows: Rows = None,
    rounds: Rounds = None,
    test_clients: TestClients = None,
    step_size: StepSize = None,
    local_steps: LocalSteps = None,
    batch_size: Annotated[int | None, typer.Option(help="Images of a local step.")] = None,
    participation: Annotated[float | None, typer.Option(help="Share of the clients that take part in a round.")] = None,
    methods: Methods = None,
    init: Init = None,
    kernel: Annotated[str | None, typer.Option(help="How clients train: vmap, loop, or measured (the faster).")] = None,
    evaluate_every: EvaluateEvery = None,
    checkpoint: Checkpoint = None,
    seed: Seed = 0,
    seeds: Seeds = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Table 1 of IFCA: two rotations of CIFAR-10 with a convolutional network (in full, days of one core)."""
    from coterie.studies import rotated_tasks as tasks

    given: dict[str, Any] = {"clients": clients, "rows": rows, "rounds": rounds, "test_clients": test_clients}
    given |= {"step_size": step_size, "local_steps": local_steps}
    given |= {"batch_size": batch_size, "participation": participation}
    given |= {"evaluate_every": evaluate_every, "seeds": seeds, "kernel": kernel}
    settings = _rotated(tasks.CIFAR_QUICK if quick else tasks.CIFAR_PAPER, given, methods, init, seed)
    _run_rotated(tasks.CIFAR, [settings], checkpoint, as_json)


def _rotated(base: "Settings", given: dict[str, Any], methods: str | None, init: str | None, seed: int) -> "Settings":
    from coterie.studies.rotated_settings import INITS, METHODS

    given |= {"methods": named("--methods", methods, METHODS), "init": named("--init", init, INITS)}
    return replace(base, seed=seed, **stated(given))


def _run_rotated(task: "Task", sizes: "list[Settings]", checkpoint: Path | None, as_json: bool) -> None:
    from coterie.studies import ifca_rotated as rotated

    with progress() as tell:
        outcome = rotated.run(task, sizes, tell, checkpoint)
    show(outcome, rotated.COLUMNS, caption=rotated.CAPTION, as_json=as_json)


def some_of(names: Iterable[str], rest: str = "") -> Any:
    """Describe an option that takes some of these names."""
    return typer.Option(help=f"Comma-separated, of {', '.join(names)}{rest}.")


class Study(Protocol):
    """A module that holds a study of one kind of settings."""

    COLUMNS: list[Column]
    CAPTION: str

    def run(self, chosen: Any, tell: Tell, /) -> Outcome:
        """Run it, and tell how far it is."""


def run_study(study: Study, base: Any, given: dict[str, Any], as_json: bool) -> None:
    """Run a study with the settings `base` and the options that were given, and print what it finds."""
    chosen = replace(base, **stated(given))
    with progress() as tell:
        outcome = study.run(chosen, tell)
    show(outcome, study.COLUMNS, caption=study.CAPTION, as_json=as_json)


def stated(given: dict[str, Any]) -> dict[str, Any]:
    """Keep the options that were given; the others keep what the setting says."""
    return {name: value for name, value in given.items() if value is not None}
