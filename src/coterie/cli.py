# SPDX-License-Identifier: Apache-2.0
"""The command line: results to stdout, progress and words to stderr, exit code 2 on misuse."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from coterie import __version__
from coterie.config import FitOptions, options
from coterie.data.check import Findings, check
from coterie.data.clients import Clients
from coterie.data.readers import read
from coterie.engines.in_process import Round
from coterie.errors import ConfigError, CoterieError
from coterie.estimators import load
from coterie.fitting import Fitted, Watch, check_fit, fit
from coterie.report import write_report
from coterie.runs import begin_run, finish_run, is_finished, read_options, summary
from coterie.studies import digits_demo, mixture_commands
from coterie.tables import assignments, check_ending, predictions, write_rows

__all__ = ["app", "main"]

app = typer.Typer(
    help="Federated learning where clients differ: find the hidden structure without moving the data, train what fits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data before fitting.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(mixture_commands.app, name="study")

_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}  # names are names
out, err = Console(**_PLAIN), Console(stderr=True, **_PLAIN)

Data = Annotated[Path, typer.Argument(help="Parquet, CSV(.gz), or a folder with one file per client.")]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Client = Annotated[str | None, typer.Option(help="Column that names the client of each row.")]
Target = Annotated[str | None, typer.Option(help="Column to predict.")]
Every = Annotated[float, typer.Option("--checkpoint-seconds", help="Seconds between checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
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
    folder = out_ or _free_folder("demo")
    _fit_into(folder, chosen, digits_demo.demo_clients(seed), every, as_json)


@app.command("fit")
def fit_command(
    data: Data,
    client: Client = None,
    target: Target = None,
    method: Annotated[
        str | None, typer.Option(help="ifca, moment-descent, fedavg (with --set training.proximal=...: FedProx).")
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Number of clusters; moment-descent can estimate it, ifca takes 2.")
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Starts to compare on held-out rows.")] = None,
    hidden: Annotated[
        str | None, typer.Option(help="Hidden layers of a network, like 64 or 64,32; none is linear.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    missing: Annotated[str | None, typer.Option(help="Missing values: error, mean or drop.")] = None,
    task: Annotated[str | None, typer.Option(help="auto, regression or classification.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Column to leave out; may be repeated.")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="Numeric column to treat as categories.")] = None,
    min_rows: Annotated[int | None, typer.Option(help="Leave out clients with fewer rows.")] = None,
    test_size: Annotated[float | None, typer.Option(help="Share of each client's rows to hold out.")] = None,
    new_clients: Annotated[float | None, typer.Option(help="Share of the clients to hold out.")] = None,
    baselines: Annotated[bool | None, typer.Option(help="Compare with one model for all and one model each.")] = None,
    out_: Annotated[Path | None, typer.Option("--out", help="Run folder; a new one under runs/ by default.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of options.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Any option, like training.batch_size=32.")] = None,
    every: Every = 1.0,
    as_json: AsJson = False,
) -> None:
    """Fit models to clients that differ, and write a run folder with a report."""
    tree = {
        "method": method, "seed": seed, "baselines": baselines,
        "data": {
            "path": str(data.resolve()), "client": client, "target": target, "missing": missing, "task": task,
            "exclude": tuple(exclude or ()) or None, "categorical": tuple(categorical or ()) or None,
            "min_rows": min_rows, "test_size": test_size, "new_clients": new_clients,
        },
        "model": {"hidden": _numbers(hidden)}, "training": {"rounds": rounds},
        "clusters": {"n_clusters": clusters, "n_init": starts},
    }  # fmt: skip
    chosen = options(_given(tree), file=config, sets=sets or ())
    clients = _read(chosen)
    stem = data.name.split(".")[0]
    _fit_into(out_ or _free_folder(f"{stem}-{chosen.method}"), chosen, clients, every, as_json)


@app.command("resume")
def resume_command(run: Run, every: Every = 1.0, as_json: AsJson = False) -> None:
    """Continue a run that was interrupted; the result is what it would have been."""
    chosen = read_options(run)
    if is_finished(run):
        err.print("the run has finished; only its report is written again")
        _show_report(run, as_json)
        return
    _fit_into(run, chosen, _read(chosen), every, as_json)


@app.command("predict")
def predict_command(run: Run, data: Data, out_: Out = None) -> None:
    """Predict every row of DATA, each client by its own cluster's model."""
    check_ending(out_)
    table, said = predictions(load(run), data)
    write_rows(table, out_)
    _warn(said)


@app.command("assign")
def assign_command(run: Run, data: Data, out_: Out = None) -> None:
    """Place clients, also new ones, by the loss on their labelled rows."""
    check_ending(out_)
    table, said = assignments(load(run), data)
    write_rows(table, out_)
    _warn(said)


@app.command("report")
def report_command(run: Run) -> None:
    """Write the HTML report of a run again, and print its path."""
    if not is_finished(run):
        err.print(f"warning: the run has not finished; continue it with: coterie resume {run}")
    print(write_report(run))


@data_app.command("check")
def check_command(
    data: Data,
    client: Client = None,
    target: Target = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Column to leave out; may be repeated.")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="Numeric column to treat as categories.")] = None,
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
        _show_findings(found)
    if not found.ok:
        raise typer.Exit(2)


# -- fitting ----------------------------------------------------------------------------------------------------------
def _read(chosen: FitOptions) -> Clients:
    """Read what the options name."""
    d = chosen.data
    if d.path == digits_demo.NAME:
        return digits_demo.demo_clients(chosen.seed)
    if d.path is None:
        raise ConfigError("the run does not say which data it read", "start it again with `coterie fit DATA`")
    return read(
        d.path, client=d.client, target=d.target, features=d.features, exclude=d.exclude, categorical=d.categorical,
        missing=d.missing, task=d.task, min_rows=d.min_rows, test_size=d.test_size, new_clients=d.new_clients,
        seed=chosen.seed,
    )  # fmt: skip


def _fit_into(folder: Path, chosen: FitOptions, clients: Clients, every: float, as_json: bool) -> None:
    check_fit(clients, chosen)
    new = begin_run(folder, chosen, "coterie " + shlex.join(sys.argv[1:]), clients)
    if err.is_terminal:
        err.print(f"{clients!r}; seed {chosen.seed}; run folder {folder}")
    _warn(_left_out(clients))
    try:
        with _progress() as watch:
            fitted = fit(clients, chosen, folder=folder, every=every, watch=watch)
    except CoterieError:
        if new:
            shutil.rmtree(folder)  # nothing half-written
        raise
    except KeyboardInterrupt:
        err.print(f"interrupted; continue with: coterie resume {folder}")
        raise
    more = digits_demo.demo_results(chosen.seed, fitted) if chosen.data.path == digits_demo.NAME else {}
    finish_run(folder, fitted, more)
    if not as_json:
        _show(fitted, more)
        _warn(fitted.warnings)
    _show_report(folder, as_json)


def _show_report(folder: Path, as_json: bool) -> None:
    """Write the report; print its path, or all that the run found as one JSON document."""
    report = write_report(folder)
    if as_json:
        print(json.dumps({"run": str(folder), "report": str(report), **summary(folder)}, indent=2, allow_nan=False))
    else:
        print(f"report: {report}")


def _show(fitted: Fitted, more: dict[str, Any]) -> None:
    accuracy = fitted.metric == "accuracy"
    form = ".1%" if accuracy else ".4g"
    scale = float(fitted.scaling.y_scale)
    columns = {
        "training rows": [(s.train, form) for s in fitted.scores],
        "held-out rows": [(s.test, form) for s in fitted.scores],
        "in std. dev.": [(None if accuracy or s.test is None else s.test / scale, form) for s in fitted.scores],
        "R²": [(s.test_r2, ".3f") for s in fitted.scores],
        "new clients": [(s.new_clients, form) for s in fitted.scores],
    }
    shown = {name: cells for name, cells in columns.items() if any(value is not None for value, _ in cells)}
    table = Table(Column(no_wrap=True), *("\n".join(name.rsplit(" ", 1)) for name in shown))  # fits 80 columns
    for i, score in enumerate(fitted.scores):
        cells = [column[i] for column in shown.values()]
        table.add_row(score.label, *("-" if value is None else format(value, how) for value, how in cells))
    out.print(f"{'accuracy' if accuracy else 'root mean squared error'}, seed {fitted.options.seed}")
    out.print(table, soft_wrap=False)
    if fitted.counted is not None:
        out.print(fitted.counted)
    if len(fitted.theta) > 1:
        sizes = fitted.placed.label.bincount(minlength=len(fitted.theta)).tolist()
        out.print(f"clients per cluster: {', '.join(map(str, sizes))}")
    if "adjusted_rand" in more:
        out.print(f"adjusted Rand index against the true groups: {more['adjusted_rand']:.3f}")


def _left_out(clients: Clients) -> list[str]:
    """Say what was not used."""
    said = []
    if clients.dropped_rows:
        said.append(f"{clients.dropped_rows} rows with missing values are left out")
    if clients.dropped_clients:
        said.append(f"{clients.dropped_clients} clients with too few rows are left out")
    return said


def _warn(sentences: list[str]) -> None:
    for said in sentences:
        err.print(f"warning: {said}")


@contextmanager
def _progress() -> Iterator[Watch | None]:
    """Show a bar per phase on a terminal; nothing elsewhere."""
    if not err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=err) as bar:
        tasks: dict[str, TaskID] = {}

        def watch(phase: str, done: Round, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total, said="")
            completed = min(done.round if total > 1 else 1, total)
            bar.update(tasks[phase], completed=completed, total=total, said=_said(done.info))

        yield watch


def _said(info: Mapping[str, Any]) -> str:
    """What a round says beside its bar."""
    if "movement" in info:
        moved = sorted(info["movement"])
        return f"moment descent: {len(moved)} anchors, moved by {moved[len(moved) // 2]:.3g}"
    said = f"loss {info['loss']:.4g}" if "loss" in info else ""
    if "sizes" in info:
        said += f"  sizes {' '.join(map(str, info['sizes']))}"
    return said


# -- small helpers ----------------------------------------------------------------------------------------------------
def _given(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not said."""
    kept = {name: _given(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in kept.items() if value is not None}


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of layer sizes", "write it like --hidden 64,32") from None


def _free_folder(stem: str) -> Path:
    number = 1
    while (folder := Path("runs") / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


def _show_findings(found: Findings) -> None:
    if found.features:
        per = ", ".join(f"{name} {value:g}" for name, value in found.rows_per_client.items())
        out.print(f"{found.rows} rows, {found.clients} clients; rows per client: {per}")
        out.print(_feature_table(found), soft_wrap=False)
    if found.target is not None:
        classes = f" of {', '.join(found.target.classes)}" if found.target.classes else ""
        out.print(f"target {found.target.name}: {found.target.task}{classes}")
    for problem in found.problems:
        out.print(f"{problem.severity}: {problem.sentence}")
        if problem.hint:
            out.print(f"hint: {problem.hint}")
    if found.ok:
        out.print("ready to fit")


def _feature_table(found: Findings) -> Table:
    table = Table("column", "kind", "missing", "levels", "")
    for f in found.features:
        levels = str(len(f.levels)) if f.levels else "-"
        table.add_row(f.name, f.kind or "-", str(f.missing), levels, "constant" if f.constant else "")
    return table


def main() -> None:
    """Run the command line."""
    try:
        code = app(prog_name="coterie", standalone_mode=False)
        sys.stdout.flush()  # here, where a broken pipe is caught
        sys.exit(code)
    except CoterieError as error:
        _complain(error.message, error.hint)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.UsageError as error:
        _complain(*_usage(error))
    except (KeyboardInterrupt, click.exceptions.Abort):
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" '{error.filename}'" if error.filename else ""
        _complain(
            f"cannot read or write{where}: {error.strerror or error}", "check the path, its permissions, the disk"
        )
    sys.exit(2)


def _complain(message: str, hint: str) -> None:
    err.print(f"error: {message}")
    if hint:
        err.print(f"hint: {hint}")


def _usage(error: click.UsageError) -> tuple[str, str]:
    """Say in our own manner what click has to say."""
    path = error.ctx.command_path if error.ctx is not None else "coterie"
    way_out = f"`{path} --help` shows what there is"
    if isinstance(error, click.NoSuchOption):
        near = " or ".join(error.possibilities or ())
        return f"there is no option {error.option_name}", f"did you mean {near}?" if near else way_out
    said = error.format_message().rstrip(".")
    return said[0].lower() + said[1:], way_out
