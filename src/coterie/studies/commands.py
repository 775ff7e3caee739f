# SPDX-License-Identifier: Apache-2.0
"""`coterie study`: the studies on the command line. Results go to stdout, progress to stderr.

A study is a table of its options and a function that runs it with those that were given. All have `--seed`, `--quick` and
`--json`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import typer
from rich.table import Table

from coterie.errors import ConfigError
from coterie.studies.choices import VARIABLE
from coterie.studies.common import Column, Outcome, Tell, console, named, numbers, progress, show

if TYPE_CHECKING:
    from coterie.studies.rotated_settings import Settings, Task

__all__ = [
    "CLIENTS", "JOBS", "ROUNDS", "ROWS", "STEP_SIZE", "Given", "Shown", "app", "many", "ran", "some_of", "study",
]  # fmt: skip

app = typer.Typer(help="Run the papers' experiments; without a name, list them.", rich_markup_mode=None)


# -- options ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Given:
    """An option: its help, what the command line takes, and how that is read, given the option's name and a text."""

    help: str
    kind: type = str
    default: Any = None
    read: Callable[[str, str | None], Any] | None = None
    flags: tuple[str, ...] = ()
    envvar: str | None = None

    def parameter(self, name: str) -> Parameter:
        """The parameter of a command that stands for it."""
        flags = self.flags or ("--" + name.replace("_", "-"),)
        default = False if self.kind is bool else self.default
        kind: Any = self.kind if default is not None else self.kind | None
        told = typer.Option(*flags, help=self.help, envvar=self.envvar)
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, told])


def many(help_: str, kind: type[int] | type[float]) -> Given:
    """Comma-separated numbers."""
    return Given(help_, read=lambda option, text: numbers(option, text, kind))


def some_of(names: Sequence[str], rest: str = "", *, before: str = "Comma-separated, of ") -> Given:
    """Some of these names, comma-separated."""
    return Given(f"{before}{', '.join(names)}{rest}.", read=lambda option, text: named(option, text, names))


CLIENTS = Given("Training clients.", int)
ROWS = Given("Images of each client.", int)
ROUNDS = Given("Rounds of training.", int)
STEP_SIZE = Given("Step size of local training.", float)
JOBS = Given("Processes; as many as there are repetitions or cores by default.", int)
_SEED = Given("Seed of the first repetition; the next ones count up from it.", int, default=0)
_SEEDS = Given("Repetitions.", int, flags=("--seeds", "--reps"))
_QUICK = Given("A reduced setting that ends within a minute.", bool)
_JSON = Given("Print one JSON document instead of the table.", bool, flags=("--json",))


# -- commands ---------------------------------------------------------------------------------------------------------
class Shown(NamedTuple):
    """What a study found, and how its table is laid out."""

    outcome: Outcome
    columns: Sequence[Column]
    caption: str


Run = Callable[[dict[str, Any], bool, Tell], Shown]  # options that were given, whether it is to be quick, who is told


def study(name: str, options: dict[str, Given], *, repetitions: str | None = "seeds") -> Callable[[Run], Run]:
    """Put a study on the command line; `repetitions` is what its settings call their number, if they have one."""
    options = options | {"seed": _SEED} | ({repetitions: _SEEDS} if repetitions else {})
    shown = options | {"quick": _QUICK, "as_json": _JSON}

    def put(run: Run) -> Run:
        def command(*, quick: bool, as_json: bool, **values: Any) -> None:
            given = {}
            for each, value in values.items():
                read = options[each].read
                found = read("--" + each.replace("_", "-"), value) if read else value
                if found is not None:  # the others keep what the setting says
                    given[each] = found
            with progress() as tell:
                outcome, columns, caption = run(given, quick, tell)
            show(outcome, columns, caption=caption, as_json=as_json)

        parameters = [option.parameter(each) for each, option in shown.items()]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, help=run.__doc__)(command)
        return run

    return put


class Study(Protocol):
    """A module that holds a study of one kind of settings."""

    COLUMNS: list[Column]
    CAPTION: str

    def run(self, chosen: Any, tell: Tell, /) -> Outcome:
        """Run it, and tell how far it is."""


def ran(of: Study, base: Any, given: dict[str, Any], tell: Tell) -> Shown:
    """Run a study with the settings `base` and the options that were given."""
    return Shown(of.run(replace(base, **given), tell), of.COLUMNS, of.CAPTION)


@app.callback(invoke_without_command=True)
def list_studies(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help=_JSON.help)] = False
) -> None:
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


# -- IFCA -------------------------------------------------------------------------------------------------------------
@study(
    "ifca-synthetic",
    {
        "panel": Given("Panel of Figure 2: a, b, c or d.", default="a"),
        "preset": Given("Planted models as in the authors' code (official) or as in the text (paper)."),
        "init": some_of(("random", "spread", "balanced"), before="Comma-separated starts: "),
        "trials": Given("Trials at each point.", int, flags=("--trials", "--seeds", "--reps")),
        "starts": Given("Starts in each trial.", int),
        "rounds": ROUNDS,
        "r": many("Separations, comma-separated.", float),
        "sigma": many("Noise levels, comma-separated.", float),
        "clients": many("Numbers of clients, comma-separated.", int),
        "rows": many("Rows of each client, comma-separated.", int),
        "features": many("Numbers of features, comma-separated.", int),
        "steps": many("Step sizes to try with each start, comma-separated.", float),
        "dtype": Given("float32 or float64."),
        "jobs": JOBS,
    },
    repetitions=None,
)
def ifca_synthetic(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Figure 2 of IFCA: how often starts find planted linear models."""
    from coterie.studies import ifca_synthetic as synthetic

    return ran(synthetic, synthetic.settings(given.pop("panel"), quick=quick), given, tell)


_ROTATED = {
    "methods": some_of(("ifca", "global", "local"), "; all by default"),
    "init": some_of(("spread", "random", "balanced"), before="Starts of IFCA, comma-separated: "),
}
_LOOKED_AT = {
    "evaluate_every": Given("Rounds between tests; by default only after the last round.", int),
    "checkpoint": Given("Folder for checkpoints; run the command again to continue from them.", Path, envvar=VARIABLE),
}
_IMAGES = {
    "clients": CLIENTS,
    "rows": ROWS,
    "rounds": ROUNDS,
    "test_clients": Given("Test clients; as many as there are images for by default.", int),
    "step_size": STEP_SIZE,
    "local_steps": Given("Local steps per round (passes, if training is in batches).", int),
}


@study(
    "ifca-rotated-mnist",
    {
        **_IMAGES,
        **_ROTATED,
        "pixels": Given("raw (between 0 and 1, as in the authors' code; the default) or standardised."),
        "table": Given("Run all three sizes of Table 1.", bool),
        **_LOOKED_AT,
    },
)
def ifca_rotated_mnist(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Table 1 of IFCA: four rotations of MNIST, compared with one model for all and one each."""
    from coterie.studies import rotated_tasks as tasks

    table, checkpoint = given.pop("table"), given.pop("checkpoint", None)
    settings = replace(tasks.MNIST_QUICK if quick else tasks.MNIST_PAPER, **given)
    if "step_size" not in given:
        settings = replace(settings, step_size=tasks.mnist_step_size(settings.rounds))
    sizes = [replace(settings, clients=m, rows=n) for m, n in tasks.MNIST_TABLE] if table else [settings]
    return _rotated(tasks.MNIST, sizes, tell, checkpoint)


@study("ifca-rotated-digits", {"rounds": ROUNDS, **_ROTATED, **_LOOKED_AT})
def ifca_rotated_digits(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """The demo: the same on scikit-learn's digits, 144 clients, in seconds."""
    from coterie.studies import rotated_tasks as tasks

    checkpoint = given.pop("checkpoint", None)
    settings = replace(tasks.DIGITS_QUICK if quick else tasks.DIGITS_DEMO, **given)
    return _rotated(tasks.DIGITS, [settings], tell, checkpoint)


@study(
    "ifca-rotated-cifar",
    {
        **_IMAGES,
        "batch_size": Given("Images per local step.", int),
        "participation": Given("Share of the clients that take part in a round.", float),
        **_ROTATED,
        "kernel": Given("How clients train: vmap, loop, or measured (try both, take the faster)."),
        **_LOOKED_AT,
    },
)
def ifca_rotated_cifar(given: dict[str, Any], quick: bool, tell: Tell) -> Shown:
    """Table 1 of IFCA: two rotations of CIFAR-10 with a convolutional network (days on one core at full size)."""
    from coterie.studies import rotated_tasks as tasks

    checkpoint = given.pop("checkpoint", None)
    settings = replace(tasks.CIFAR_QUICK if quick else tasks.CIFAR_PAPER, **given)
    return _rotated(tasks.CIFAR, [settings], tell, checkpoint)


def _rotated(task: "Task", sizes: "list[Settings]", tell: Tell, checkpoint: Path | None) -> Shown:
    from coterie.studies import ifca_rotated as rotated

    return Shown(rotated.run(task, sizes, tell, checkpoint), rotated.COLUMNS, rotated.CAPTION)
