# SPDX-License-Identifier: Apache-2.0
"""The server's half of what `coterie flower run` runs: what the command line would do, with clients elsewhere."""

import json
import warnings
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie.config import FitOptions
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.events import tell
from coterie.engines.flower.strategies import CoterieStrategy, compare
from coterie.engines.in_process import Round
from coterie.errors import CoterieError
from coterie.methods.linear.structures import Effort
from coterie.runs.comparison import Compared
from coterie.runs.fit import report_run, show_fitted
from coterie.runs.screen import out
from coterie.runs.show import show_comparison

__all__ = ["server"]

server = ServerApp()

_SHOWN = ("loss", "sizes", "movement", "running")  # of a round, beside its progress bar


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Fit or compare, write the folder, and tell the command that started this what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", NodeWarning)
        warnings.showwarning = _pass_on  # type: ignore[assignment]  # where a warning came from does not matter here
        try:
            (_compare if context.run_config.get("task") == "compare" else _fit)(grid, context.run_config)
        except CoterieError as error:
            tell("error", kind=type(error).__name__, message=error.message, hint=error.hint)
            raise


def _compare(grid: Grid, config: Any) -> None:
    effort = Effort(**json.loads(config["effort"])) if "effort" in config else None
    read = FitOptions.model_validate_json(config.get("options", "{}")).data.model_dump(exclude_unset=True)
    done = compare(
        grid, folder=Path(config["out"]), nodes=config["nodes"], timeout=config["timeout"], command=config["command"],
        effort=effort, watch=_watch, told=_asked, **{**read, **json.loads(config["compare"])},
    )  # fmt: skip
    assert isinstance(done, Compared)
    with out.capture() as shown:
        show_comparison(done.found, done.fit)
    found = {"folder": config["out"], "report": str(done.report), **done.document}
    tell("result", text=shown.get(), warnings=[], found=found)


def _fit(grid: Grid, config: Any) -> None:
    folder = Path(config["out"])
    chosen = FitOptions.model_validate_json(config["options"])
    strategy = CoterieStrategy(**chosen.model_dump(exclude_unset=True))
    strategy.start(
        grid, nodes=config["nodes"], timeout=config["timeout"], folder=folder, command=config["command"],
        every=config["every"], watch=_watch, begun=_begun, told=_asked,
    )  # fmt: skip
    fitted = strategy.fitted_
    assert fitted is not None
    found = report_run(folder)
    with out.capture() as shown:
        show_fitted(fitted, strategy.more_)
    tell("result", text=shown.get(), warnings=fitted.warnings, found=found)


def _watch(phase: str, done: Round, total: int) -> None:
    shown = {name: done.info[name] for name in _SHOWN if name in done.info}
    counted = {"run": done.run, "round": done.round, "seconds": done.seconds, "participants": done.participants}
    counted |= {"bytes_up": done.bytes_up, "bytes_down": done.bytes_down, "time": done.time}
    tell("round", phase=phase, total=total, done={**counted, "info": shown})


def _asked(what: str) -> None:
    tell("message", asked=what)


def _begun(left_out: list[str]) -> None:
    for said in left_out:
        tell("warning", text=said)


def _pass_on(message: Warning | str, category: type[Warning], *where: Any) -> None:
    if issubclass(category, NodeWarning):
        tell("warning", text=str(message))
