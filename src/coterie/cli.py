# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, progress and words to stderr, exit code 2 on misuse."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from coterie import __version__
from coterie.arguments import (
    AsJson,
    Categorical,
    Client,
    Data,
    Exclude,
    Hidden,
    MinRows,
    Missing,
    NewClients,
    Seed,
    Target,
    TaskName,
    TestSize,
    data_tree,
    free_folder,
    given,
    layer_sizes,
    left_out,
    read_clients,
)
from coterie.auto import check_auto, settled, why
from coterie.compare_commands import compare_command
from coterie.config import PERSONAL, FitOptions, options
from coterie.data.check import check
from coterie.data.clients import Clients
from coterie.errors import CoterieError
from coterie.estimators import FederatedMixture, Personalised, load
from coterie.fitting import Fitted, check_fit, fit
from coterie.mixture.run import FittedMixture, check_mixture, fit_clients
from coterie.mixture.tables import adoptions, components
from coterie.personal.run import check_personal, fit_personal
from coterie.personal.tables import parts_fitted, personal_predictions
from coterie.report import write_report
from coterie.report.comparison import is_comparison, write_comparison_report
from coterie.runs import AnyFitted, begin_run, finish_run, is_finished, read_options, settle_run, summary
from coterie.screen import complain, counting, err, progress, show, show_findings, show_mixture, show_personal, warn
from coterie.studies import compare_commands, digits_demo
from coterie.tables import assignments, check_ending, predictions, write_rows

__all__ = ["app", "main"]

app = typer.Typer(
    help="Federated learning where clients differ: find the hidden structure without moving the data, train what fits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data before fitting.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(compare_commands.app, name="study")
app.command("compare")(compare_command)

Run = Annotated[Path, typer.Argument(help="A run folder.")]
Every = Annotated[float, typer.Option("--checkpoint-seconds", help="Seconds between checkpoints.")]
Out = Annotated[Path | None, typer.Option("--out", help="A .csv or .parquet file; CSV to stdout by default.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("demo")
def demo_command(
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    every: Every = 1.0,
    as_json: AsJson = False,
) -> None:
    """Cluster 144 clients made of scikit-learn's digits in four rotations, nobody told which."""
    chosen = digits_demo.demo_options(seed)
    folder = out_ or free_folder("demo")
    _fit_into(folder, chosen, digits_demo.demo_clients(seed), every, as_json)


@app.command("fit")
def fit_command(
    data: Data,
    client: Client = None,
    target: Target = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="auto (compare, then fit what was chosen), ifca, moment-descent, mixture, fedrep, lg-fedavg, maml, local, "
            "shrunk, representation, fedavg (with --set training.proximal=...: FedProx)."
        ),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Number of clusters; moment-descent can estimate it, ifca takes 2.")
    ] = None,
    n_components: Annotated[
        int | None, typer.Option("--components", help="Components of a mixture; by default chosen on held-out rows.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Directions of a linear representation; by default chosen on held-out rows.")
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Starts to compare on held-out rows.")] = None,
    hidden: Hidden = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Personal layers of fedrep or lg-fedavg, by the beginnings of their names, like 2,3."),
    ] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(help="none, or srpfl: begin with the fastest clients, and double their number in stages."),
    ] = None,
    clock: Annotated[
        str | None, typer.Option(help="What time a round takes clients: exponential, dynamic or lognormal.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A file of what time rounds take clients, in place of --clock.")
    ] = None,
    communication: Annotated[float | None, typer.Option(help="Seconds that are added to every round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.")] = None,
    seed: Seed = None,
    missing: Missing = None,
    task: TaskName = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    min_rows: MinRows = None,
    test_size: TestSize = None,
    new_clients: NewClients = None,
    baselines: Annotated[bool | None, typer.Option(help="Compare with one model for all and one model each.")] = None,
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder; a new one under runs/ by default.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of options.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Any option, like training.batch_size=32.")] = None,
    every: Every = 1.0,
    as_json: AsJson = False,
) -> None:
    """Fit models to clients that differ, and write a run folder with a report."""
    tree: dict[str, Any] = {
        "method": method, "seed": seed, "baselines": baselines,
        "data": data_tree(
            data.resolve(), exclude, categorical, client=client, target=target, missing=missing, task=task,
            min_rows=min_rows, test_size=test_size, new_clients=new_clients,
        ),
        "model": {"hidden": layer_sizes(hidden)}, "clusters": {"n_clusters": clusters, "n_init": starts},
        "training": {}, "mixture": {"n_components": n_components}, "prior": {"rank": rank},
        "personal": {
            "layers": None if layers is None else tuple(word.strip() for word in layers.split(",") if word.strip()),
            "stragglers": stragglers, "clock": clock if trace is None else "trace", "communication": communication,
            "trace": None if trace is None else str(trace.resolve()),
        },
    }  # fmt: skip
    chosen = options(given(tree), file=config, sets=sets or ())
    if rounds is not None:  # whose they are depends on the method, which a file may say
        tree["mixture" if chosen.method == "mixture" else "training"]["rounds"] = rounds
        chosen = options(given(tree), file=config, sets=sets or ())
    clients = read_clients(chosen)
    stem = data.name.split(".")[0]
    _fit_into(out_ or free_folder(f"{stem}-{chosen.method}"), chosen, clients, every, as_json)


@app.command("resume")
def resume_command(run: Run, every: Every = 1.0, as_json: AsJson = False) -> None:
    """Continue a run that was interrupted; the result is what it would have been."""
    chosen = read_options(run)
    if is_finished(run):
        err.print("the run has finished; only its report is written again")
        _show_report(run, as_json)
        return
    _fit_into(run, chosen, read_clients(chosen), every, as_json)


@app.command("predict")
def predict_command(run: Run, data: Data, out_: Out = None) -> None:
    """Predict every row of DATA, each client by its own cluster's model, by its own mixture, or by its personal model."""
    check_ending(out_)
    model = load(run)
    if isinstance(model, FederatedMixture):
        table, said = components(model, data)
    elif isinstance(model, Personalised):
        table, said = personal_predictions(model, data)
    else:
        table, said = predictions(model, data)
    write_rows(table, out_)
    warn(said)


@app.command("assign")
def assign_command(run: Run, data: Data, out_: Out = None) -> None:
    """Place clients, also new ones, by their labelled rows: among clusters or components, or with a part of their own."""
    check_ending(out_)
    model = load(run)
    if isinstance(model, FederatedMixture):
        table, said = adoptions(model, data)
    elif isinstance(model, Personalised):
        table, said = parts_fitted(model, data)
    else:
        table, said = assignments(model, data)
    write_rows(table, out_)
    warn(said)


@app.command("report")
def report_command(run: Run) -> None:
    """Write the HTML report of a run, or of a comparison, again, and print its path."""
    if is_comparison(run):
        print(write_comparison_report(run))
        return
    if not is_finished(run):
        err.print(f"warning: the run has not finished; continue it with: coterie resume {run}")
    print(write_report(run))


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
    as_json: AsJson = False,
) -> None:
    """Say what is in the data and what would go wrong."""
    found = check(
        data, client=client, target=target, exclude=exclude or (), categorical=categorical or (),
        missing=missing, task=task, min_rows=min_rows,  # type: ignore[arg-type]
    )  # fmt: skip
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        show_findings(found)
    if not found.ok:
        raise typer.Exit(2)


# -- fitting ----------------------------------------------------------------------------------------------------------
def _fit_into(folder: Path, chosen: FitOptions, clients: Clients, every: float, as_json: bool) -> None:
    _check(clients, chosen)
    command = "coterie " + shlex.join(sys.argv[1:])
    new = begin_run(folder, chosen, command, clients)
    if err.is_terminal:
        err.print(f"{clients!r}; seed {chosen.seed}; run folder {folder}")
    warn(left_out(clients))
    try:
        if chosen.method == "auto":
            with counting() as tell:
                chosen = settled(clients, chosen, folder, command, tell)
            _check(clients, chosen)
            settle_run(folder, chosen)
        fitted = _fitted(clients, chosen, folder, every)
    except CoterieError:
        if new:
            shutil.rmtree(folder)  # nothing half-written
        raise
    except KeyboardInterrupt:
        err.print(f"interrupted; continue with: coterie resume {folder}")
        raise
    more: dict[str, Any] = why(folder)
    if isinstance(fitted, Fitted) and chosen.data.path == digits_demo.NAME:
        more |= digits_demo.demo_results(chosen.seed, fitted)
    finish_run(folder, fitted, more)
    if not as_json:
        _show(fitted, more)
        warn(fitted.warnings)
    _show_report(folder, as_json)


def _fitted(clients: Clients, chosen: FitOptions, folder: Path, every: float) -> AnyFitted:
    with progress() as watch:
        if chosen.method == "mixture":
            return fit_clients(clients, chosen, folder=folder, every=every, watch=watch)
        if chosen.method in PERSONAL:
            return fit_personal(clients, chosen, folder=folder, every=every, watch=watch)
        return fit(clients, chosen, folder=folder, every=every, watch=watch)


def _check(clients: Clients, chosen: FitOptions) -> None:
    """Refuse what cannot work, before anything is written."""
    if chosen.method == "auto":
        check_auto(clients, chosen)
    elif chosen.method == "mixture":
        check_mixture(clients, chosen)
    elif chosen.method in PERSONAL:
        check_personal(clients, chosen)
    else:
        check_fit(clients, chosen)


def _show(fitted: AnyFitted, more: dict[str, Any]) -> None:
    if "why" in more:
        print(more["why"]["headline"])
    if isinstance(fitted, Fitted):
        show(fitted, more)
    elif isinstance(fitted, FittedMixture):
        show_mixture(fitted)
    else:
        show_personal(fitted)


def _show_report(folder: Path, as_json: bool) -> None:
    """Write the report; print its path, or all that the run found as one JSON document."""
    report = write_report(folder)
    if as_json:
        print(json.dumps({"run": str(folder), "report": str(report), **summary(folder)}, indent=2, allow_nan=False))
    else:
        print(f"report: {report}")


def main() -> None:
    """Run the command line."""
    try:
        code = app(prog_name="coterie", standalone_mode=False)
        sys.stdout.flush()  # here, where a broken pipe is caught
        sys.exit(code)
    except CoterieError as error:
        complain(error.message, error.hint)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.UsageError as error:
        complain(*_usage(error))
    except (KeyboardInterrupt, click.exceptions.Abort):
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" '{error.filename}'" if error.filename else ""
        complain(f"cannot read or write{where}: {error.strerror or error}", "check the path, its permissions, the disk")
    sys.exit(2)


def _usage(error: click.UsageError) -> tuple[str, str]:
    """Say in our own manner what click has to say."""
    path = error.ctx.command_path if error.ctx is not None else "coterie"
    way_out = f"`{path} --help` shows what there is"
    if isinstance(error, click.NoSuchOption):
        near = " or ".join(error.possibilities or ())
        return f"there is no option {error.option_name}", f"did you mean {near}?" if near else way_out
    said = error.format_message().rstrip(".")
    return said[0].lower() + said[1:], way_out
