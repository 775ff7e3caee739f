# SPDX-License-Identifier: Apache-2.0
"""From clients and options to a finished run folder, whatever the method, wherever the clients are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.errors import CoterieError, RunError
from coterie.methods.base import Fitted, Given
from coterie.methods.cluster_models import ClusterModels
from coterie.methods.fit import check, train
from coterie.methods.session import Session, Watch
from coterie.models import Model
from coterie.report import write_report
from coterie.runs.auto import why
from coterie.runs.folder import begin_run, checkpoints_of, finish_run, summary
from coterie.runs.holding import holding, remove_run
from coterie.runs.show import show
from coterie.studies import digits_demo, stays_demo

__all__ = ["fit_run", "report_run", "show_fitted", "show_report"]


def fit_run(
    folder: Path,
    chosen: FitOptions,
    clients: Clients,
    command: str,
    *,
    every: float,
    watch: Watch | None,
    begun: Callable[[list[str]], None],
    module: nn.Module | Model | None = None,
) -> tuple[Fitted, dict[str, Any]]:
    """Begin a run, or continue it, and bring it to its end.  -> what came of it, and what only a demo can know

    Parameters
    ----------
    folder : Path
        The run.
    chosen : FitOptions
        What to fit.
    clients : Clients
        Whom to learn from.
    command : str
        What was asked for, to be written down.
    every : float
        Seconds between checkpoints.
    watch : callable or None
        Told of every round.
    begun : callable
        Told that the run has begun, and what is not used of the data.
    module : nn.Module or Model, optional
        The model, in place of the one that the options describe.
    """
    given = Given(module)
    check(clients, chosen, given)
    with holding(folder):
        new = begin_run(folder, chosen, command, clients)
        begun(clients.left_out())
        try:
            fitted = train(clients, Session(chosen, folder, every, watch, of=checkpoints_of(folder)), given)
        except CoterieError as error:
            if new and not isinstance(error, RunError):  # nodes that were lost may come back, and the run be continued
                remove_run(folder)  # nothing half-written
            raise
        more: dict[str, Any] = why(folder)
        if isinstance(fitted.models, ClusterModels):
            more |= _known(chosen, fitted.models)
        finish_run(folder, fitted, more)
    return fitted, more


def _known(chosen: FitOptions, models: ClusterModels) -> dict[str, Any]:
    """What only a demo can know: how well groups were found."""
    if chosen.data.path == digits_demo.NAME:
        return digits_demo.demo_results(chosen.seed, models)
    return stays_demo.demo_results(models) if chosen.data.path == stays_demo.NAME else {}


def show_fitted(fitted: Fitted, more: dict[str, Any]) -> None:
    """Show how models do, beside baselines."""
    if "why" in more:
        print(more["why"]["headline"])
    show(fitted, more)


def report_run(folder: Path) -> dict[str, Any]:
    """Write the report; say where it is, and all that the run found."""
    with holding(folder):
        found = summary(folder)  # first, since it refuses what no run has written
        return {"run": str(folder), "report": str(write_report(folder)), **found}


def show_report(found: dict[str, Any], as_json: bool) -> None:
    """Print the path of the report, or all that the run found as one JSON document."""
    print(json.dumps(found, indent=2, allow_nan=False) if as_json else f"report: {found['report']}")
