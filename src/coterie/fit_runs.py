# SPDX-License-Identifier: Apache-2.0
"""From clients and options to a finished run folder, whatever the method, wherever the clients are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from coterie.arguments import left_out
from coterie.auto import why
from coterie.config import PERSONAL, FitOptions
from coterie.data.clients import Clients
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.fitting import Fitted, Watch, check_fit, fit
from coterie.mixture.run import FittedMixture, check_mixture, fit_clients
from coterie.models import Model
from coterie.personal.run import check_personal, fit_personal
from coterie.report import write_report
from coterie.runs import AnyFitted, begin_run, finish_run, summary
from coterie.show import show, show_mixture, show_personal
from coterie.studies import digits_demo

__all__ = ["fit_any", "fit_run", "report_run", "show_fitted", "show_report"]


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
) -> tuple[AnyFitted, dict[str, Any]]:
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
    _check(clients, chosen, module)
    new = begin_run(folder, chosen, command, clients)
    begun(left_out(clients))
    try:
        fitted = fit_any(clients, chosen, folder=folder, every=every, watch=watch, module=module)
    except CoterieError as error:
        if new and not isinstance(error, RunError):  # nodes that were lost may come back, and the run be continued
            shutil.rmtree(folder)  # nothing half-written
        raise
    more: dict[str, Any] = why(folder)
    if isinstance(fitted, Fitted) and chosen.data.path == digits_demo.NAME:
        more |= digits_demo.demo_results(chosen.seed, fitted)
    finish_run(folder, fitted, more)
    return fitted, more


def fit_any(
    clients: Clients,
    chosen: FitOptions,
    *,
    folder: Path | None = None,
    every: float = 2.0,
    watch: Watch | None = None,
    module: nn.Module | Model | None = None,
) -> AnyFitted:
    """Fit what the options say, by whatever method; see `fitting.fit`."""
    _check(clients, chosen, module)
    if chosen.method == "mixture":
        return fit_clients(clients, chosen, folder=folder, every=every, watch=watch)
    run = fit_personal if chosen.method in PERSONAL else fit
    return run(clients, chosen, folder=folder, every=every, watch=watch, module=module)


def show_fitted(fitted: AnyFitted, more: dict[str, Any]) -> None:
    """Show how models do, beside baselines."""
    if "why" in more:
        print(more["why"]["headline"])
    if isinstance(fitted, Fitted):
        show(fitted, more)
    elif isinstance(fitted, FittedMixture):
        show_mixture(fitted)
    else:
        show_personal(fitted)


def report_run(folder: Path) -> dict[str, Any]:
    """Write the report; say where it is, and all that the run found."""
    report = write_report(folder)
    return {"run": str(folder), "report": str(report), **summary(folder)}


def show_report(folder: Path, as_json: bool) -> None:
    """Write the report; print its path, or all that the run found as one JSON document."""
    found = report_run(folder)
    print(json.dumps(found, indent=2, allow_nan=False) if as_json else f"report: {found['report']}")


def _check(clients: Clients, chosen: FitOptions, module: nn.Module | Model | None) -> None:
    """Refuse what cannot work, before anything is written."""
    if chosen.method == "auto":
        raise ConfigError(
            "--method auto compares structures, and that is done where the rows are at hand",
            "run `coterie compare` on some of the clients, and name the method",
        )
    if chosen.method == "mixture":
        check_mixture(clients, chosen)
    elif chosen.method in PERSONAL:
        check_personal(clients, chosen, module=module)
    else:
        check_fit(clients, chosen, module=module)
