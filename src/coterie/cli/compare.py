# SPDX-License-Identifier: Apache-2.0
"""`coterie compare`: which structure do my clients have?"""

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.arguments import (
    AsJson,
    Categorical,
    Client,
    DataOrSites,
    Decimal,
    Delta,
    Encoding,
    Epsilon,
    Event,
    Exclude,
    Hidden,
    MinRows,
    Missing,
    NewClients,
    OutcomeWord,
    Secure,
    Sep,
    Split,
    Target,
    TaskName,
    TestSize,
    Thousands,
    as_written,
    data_tree,
    free_folder,
    given,
    layer_sizes,
    read_clients,
    stem_of,
)
from coterie.errors import ConfigError
from coterie.runs.screen import err, progress, warn

if TYPE_CHECKING:
    from coterie.config import FitOptions
    from coterie.data.clients import Clients

__all__ = ["compare_command"]


def compare_command(
    data: DataOrSites,
    client: Client = None,
    target: Target = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="Results folder; a new one under runs/ by default.")
    ] = None,
    hidden: Hidden = None,
    quick: Annotated[bool, typer.Option("--quick", help="Try fewer starts and settings.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    secure: Secure = False,
    missing: Missing = None,
    task: TaskName = None,
    outcome: OutcomeWord = None,
    event: Event = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    min_rows: MinRows = None,
    test_size: TestSize = None,
    new_clients: NewClients = None,
    split: Split = None,
    sep: Sep = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    as_json: AsJson = False,
) -> None:
    """Find how clients differ: one model for all, groups, random effects, low rank, mixtures, or one model each."""
    from coterie.config import options
    from coterie.runs.comparison import check_free, compare_run, holding_place
    from coterie.runs.show import show_comparison
    from coterie.selection.run import NEW_CLIENTS

    said = data_tree(
        data, exclude, categorical, client=client, target=target, missing=missing, task=task, outcome=outcome, event=event,
        min_rows=min_rows, test_size=test_size, new_clients=NEW_CLIENTS if new_clients is None else new_clients,
        split=split, sep=sep, decimal=decimal, thousands=thousands, encoding=encoding,
    )  # fmt: skip
    chosen = options(given({"seed": seed, "secure": secure, "data": said, "model": {"hidden": layer_sizes(hidden)}}))
    if delta is not None and epsilon is None:
        raise ConfigError("--delta is given, and there is no budget", "give --epsilon, or leave it out")
    if epsilon is not None:
        compare_privately(chosen, out_, epsilon, delta, hidden=hidden, as_json=as_json)
        return
    folder = out_ or free_folder(f"{stem_of(data)}-compare")
    with holding_place(folder):
        check_free(folder)
        clients, read = _read(chosen, default=new_clients is None)
        if err.is_terminal:
            err.print(f"{clients!r}; seed {seed}")
        warn(clients.left_out())
        path = as_written(data)  # as it was called here, where the command will be run
        named = read.data.model_copy(update={"path": path})
        command = "coterie " + shlex.join(sys.argv[1:])
        with progress() as watch:
            done = compare_run(folder, clients, chosen, command, named=named, quick=quick, watch=watch)
    if as_json:
        paths: dict[str, Any] = {"folder": str(folder), "report": str(done.report)}
        print(json.dumps(paths | done.document, indent=2, allow_nan=False))
    else:
        show_comparison(done.found, done.fit)
        print(f"report: {done.report}")


def compare_privately(
    chosen: "FitOptions", folder: Path | None, epsilon: float, delta: float | None, *, hidden: str | None, as_json: bool
) -> None:
    """Compare with a privacy budget: few candidates, and no report."""
    from coterie.runs.private_comparison import private_run, show_private

    if hidden is not None:
        raise ConfigError("a comparison with a privacy budget is of linear regressions", "leave --hidden out")
    nobody = chosen.model_copy(update={"data": chosen.data.model_copy(update={"new_clients": 0.0})})
    clients = read_clients(nobody)
    warn(clients.left_out())
    found = private_run(clients, nobody, folder, epsilon=epsilon, delta=delta)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))
    else:
        show_private(found)


def _read(chosen: "FitOptions", *, default: bool) -> "tuple[Clients, FitOptions]":
    """Read clients; of very few, none is held out unless that was asked for. What was done is said too.

    Nor is one where site summaries do not say what a client would show as a new one.
    """
    from coterie.data.sites import few_shot_of, site_files
    from coterie.selection.run import FEW

    nobody = chosen.model_copy(update={"data": chosen.data.model_copy(update={"new_clients": 0.0})})
    path = chosen.data.path
    if default and path is not None and site_files(path) and few_shot_of(path) is None:
        chosen = nobody
    clients = read_clients(chosen)
    held = 0 if clients.newcomers is None else clients.newcomers.n_clients
    if default and held and clients.n_clients + held < FEW:
        chosen = nobody
        clients = read_clients(chosen)
    return clients, chosen
