# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, progress and words to stderr, exit code 2 on misuse.

What a command needs is imported when it runs: help, completion and complaints about words come without torch.
"""

import itertools
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from coterie import __version__
from coterie.cli import flower as flower_commands
from coterie.cli import node as node_commands
from coterie.cli.arguments import (
    AsJson,
    Categorical,
    Client,
    Data,
    DataOrSites,
    Decimal,
    Encoding,
    Exclude,
    Sep,
    Target,
    Thousands,
    free_folder,
    given,
    read_clients,
    stem_of,
)
from coterie.cli.compare import compare_command
from coterie.cli.fit_options import Every, takes_fit_options
from coterie.cli.summarise import summarise_command
from coterie.errors import ConfigError, CoterieError
from coterie.runs.screen import QUIET, complain, err, progress, warn
from coterie.studies import privacy_commands as studies

if TYPE_CHECKING:
    from coterie.config import FitOptions
    from coterie.data.clients import Clients

__all__ = ["app", "main"]

app = typer.Typer(
    help="Federated learning for clients that differ: find how, without moving data, and train models to match.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Inspect data before fitting.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(studies.app, name="study")
app.add_typer(flower_commands.app, name="flower")
app.add_typer(node_commands.app, name="node")
app.command("compare")(compare_command)
app.command("summarise")(summarise_command)

Run = Annotated[Path, typer.Argument(help="A run folder.")]
Out = Annotated[Path | None, typer.Option("--out", help="A .csv or .parquet file; CSV to stdout by default.")]
NodeState = Annotated[
    Path | None,
    typer.Option(
        "--state", help="On a node of a federation: its state folder, with personal models that stayed there."
    ),
]

# Misuse raises click's errors. Older versions of typer depend on click, newer ones carry it inside: what both give out by
# name is one kind of usage error, whose base is the base of all.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not tell on stderr how far a command has come.")] = False,
) -> None:
    if quiet:
        os.environ[QUIET] = "1"


@app.command("demo")
def demo_command(
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    every: Every = 1.0,
    as_json: AsJson = False,
) -> None:
    """Cluster 144 clients that hold scikit-learn's digits in four hidden rotations."""
    from coterie.studies import digits_demo

    chosen = digits_demo.demo_options(seed)
    folder = out_ or free_folder("demo")
    _fit_into(folder, chosen, digits_demo.demo_clients(seed), every, as_json)


@app.command("fit")
@takes_fit_options
def fit_command(
    data: DataOrSites,
    chosen: "FitOptions",
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder; a new one under runs/ by default.")] = None,
    every: Every = 1.0,
    as_json: AsJson = False,
) -> None:
    """Fit models to clients, compare with baselines, and write a run folder with a report."""
    clients = read_clients(chosen)
    _fit_into(out_ or free_folder(f"{stem_of(data)}-{chosen.method}"), chosen, clients, every, as_json)


@app.command("resume")
def resume_command(run: Run, every: Every = 1.0, as_json: AsJson = False) -> None:
    """Continue an interrupted run; the result is the same as without the interruption."""
    from coterie.runs.fit import report_run, show_report
    from coterie.runs.folder import is_finished, read_options

    chosen = read_options(run)
    if is_finished(run):
        err.print("the run has finished; only its report is written again")
        show_report(report_run(run), as_json)
        return
    _fit_into(run, chosen, read_clients(chosen), every, as_json)


@app.command("predict")
def predict_command(
    run: Run,
    data: Data,
    out_: Out = None,
    state: NodeState = None,
    interval: Annotated[
        float | None,
        typer.Option(help="Of numbers: write lower and upper ends that cover this share of rows, like 0.9."),
    ] = None,
    how: Annotated[
        str | None, typer.Option(help="Intervals from calibration rows (conformal) or from the model (model).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of two classes: predict the second from this probability on.")
    ] = None,
    sep: Sep = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
) -> None:
    """Predict every row of DATA with its client's model: that of its cluster, its mixture, or its personal model."""
    from coterie.cli.tables import Asked

    if how not in (None, "conformal", "model"):
        raise ConfigError(f"--how is '{how}'", "choose conformal or model")
    asked = Asked(threshold, interval, how)  # type: ignore[arg-type]
    written = {"sep": sep, "decimal": decimal, "thousands": thousands, "encoding": encoding}
    _write("predicted", run, data, out_, state, written, asked=asked)


@app.command("assign")
def assign_command(
    run: Run,
    data: Data,
    out_: Out = None,
    state: NodeState = None,
    sep: Sep = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
) -> None:
    """Assign clients, old or new, by their labelled rows: to clusters, mixture proportions, or personal models."""
    written = {"sep": sep, "decimal": decimal, "thousands": thousands, "encoding": encoding}
    _write("assigned", run, data, out_, state, written)


def _write(
    table: Literal["predicted", "assigned"], run: Path, data: Path, out_: Path | None, state: Path | None,
    written: dict[str, str | None], **more: Any,
) -> None:  # fmt: skip
    """Write what a run's models make of rows; a CSV file is written as the run's was, unless it is said."""
    from coterie.cli import tables
    from coterie.data.sources import Csv, written_as
    from coterie.estimators import load
    from coterie.runs.folder import read_options

    tables.check_ending(out_)
    model = load(run, state=state)
    with written_as(Csv(**(read_options(run).data.written | given(written)))):
        rows, said = getattr(tables, table)(model, data, **more)
    tables.write_rows(rows, out_)
    warn(said)


@app.command("report")
def report_command(run: Run) -> None:
    """Write the HTML report of a run or a comparison again, and print its path."""
    from coterie.report import write_report
    from coterie.report.comparison import is_comparison, write_comparison_report
    from coterie.runs.folder import is_finished
    from coterie.runs.holding import holding

    if not is_comparison(run) and not is_finished(run):
        err.print(f"warning: the run has not finished; continue it with: coterie resume {run}")
    with holding(run):
        page = write_comparison_report(run) if is_comparison(run) else write_report(run)
    print(page)


@data_app.command("check")
def check_command(
    data: Data,
    client: Client = None,
    target: Target = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    missing: Annotated[str, typer.Option(help="Missing values: error, mean or drop.")] = "error",
    task: Annotated[str, typer.Option(help="auto, regression or classification.")] = "auto",
    min_rows: Annotated[int, typer.Option(help="Leave out clients with fewer rows.")] = 1,
    sep: Sep = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
    as_json: AsJson = False,
) -> None:
    """Describe the data and report problems."""
    from coterie.data.check import check
    from coterie.runs.show import show_findings

    found = check(
        data, client=client, target=target, exclude=exclude or (), categorical=categorical or (),
        missing=missing, task=task, min_rows=min_rows,  # type: ignore[arg-type]
        **given({"sep": sep, "decimal": decimal, "thousands": thousands, "encoding": encoding}),
    )  # fmt: skip
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        show_findings(found)
    if not found.ok:
        raise typer.Exit(2)


# -- fitting ----------------------------------------------------------------------------------------------------------
def _fit_into(folder: Path, chosen: "FitOptions", clients: "Clients", every: float, as_json: bool) -> None:
    from coterie.runs.auto import settled_run
    from coterie.runs.fit import fit_run, report_run, show_fitted, show_report
    from coterie.runs.holding import holding

    def begun(left_out: list[str]) -> None:
        if err.is_terminal:
            err.print(f"{clients!r}; seed {chosen.seed}; run folder {folder}")
        warn(left_out)

    command = "coterie " + shlex.join(sys.argv[1:])
    try:
        with holding(folder):
            if chosen.method == "auto":
                with progress() as tell:
                    chosen = settled_run(folder, chosen, clients, command, watch=tell)
            with progress() as watch:
                fitted, more = fit_run(folder, chosen, clients, command, every=every, watch=watch, begun=begun)
            found = report_run(folder)  # before anything is printed: nobody may be reading
    except KeyboardInterrupt:
        err.print(f"interrupted; continue with: coterie resume {folder}")
        raise
    if not as_json:
        show_fitted(fitted, more)
        warn(fitted.warnings)
    show_report(found, as_json)


# -- the entry ---------------------------------------------------------------------------------------------------------
def main() -> None:
    """Run the command line."""
    _open_streams()
    try:
        if (name := _asked_method(sys.argv[1:])) is not None:
            from coterie.cli.fit_options import tell_method

            tell_method(name)
        code = app(prog_name="coterie", standalone_mode=False)
        sys.stdout.flush()  # here, where a broken pipe is caught
        sys.exit(code)
    except CoterieError as error:
        complain(error.message, error.hint)
    except _UsageError as error:
        _explain(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" '{error.filename}'" if error.filename else ""
        complain(f"cannot read or write{where}: {error.strerror or error}", "check the path, its permissions, the disk")
    sys.exit(2)


def _open_streams() -> None:
    """Let what is said go nowhere if a stream was closed: a file that is opened later would take its place."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _asked_method(words: list[str]) -> str | None:
    """The method that `fit --method M --help` asks about, if it is asked."""
    if "fit" not in words[:1] or "--help" not in words:
        return None
    pairs = itertools.pairwise(words)
    given = [after for word, after in pairs if word == "--method"]
    given += [word.partition("=")[2] for word in words if word.startswith("--method=")]
    return given[-1] if given else None


def _explain(error: Any) -> None:
    """Say in our own manner what click has to say."""
    if type(error).__name__ == "NoArgsIsHelpError":  # nothing was asked for
        error.show()
        return
    path = error.ctx.command_path if error.ctx is not None else "coterie"
    way_out = f"`{path} --help` shows what there is"
    if type(error).__name__ == "NoSuchOption":
        near = " or ".join(error.possibilities or ())
        complain(f"there is no option {error.option_name}", f"did you mean {near}?" if near else way_out)
        return
    said = error.format_message().rstrip(".")
    complain(said[0].lower() + said[1:], way_out)
