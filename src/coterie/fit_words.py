# SPDX-License-Identifier: Apache-2.0
"""The words that say what to fit, for every command that fits."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.config import FitOptions, options
from coterie.errors import ConfigError

__all__ = ["AsJson", "Client", "Every", "Target", "fit_options", "takes_fit_options"]

Client = Annotated[str | None, typer.Option(help="Column that names the client of each row.")]
Target = Annotated[str | None, typer.Option(help="Column to predict.")]
Every = Annotated[float, typer.Option("--checkpoint-seconds", help="Seconds between checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]


def takes_fit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the words of `fit_options` in place of its parameter `chosen`; it may have the argument `data`."""
    own = {name: p for name, p in inspect.signature(command).parameters.items() if name != "chosen"}
    words = {name: p for name, p in inspect.signature(fit_options).parameters.items() if name != "data"}

    @wraps(command)
    def called(**values: Any) -> None:
        said = {name: values.pop(name) for name in words}
        command(**values, chosen=fit_options(values.get("data"), **said))

    order = sorted((*words.values(), *own.values()), key=lambda p: p.name != "data")  # its argument first
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in order]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def fit_options(
    data: Path | None,
    client: Client = None,
    target: Target = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="ifca, moment-descent, mixture, fedrep, lg-fedavg, maml, "
            "fedavg (with --set training.proximal=...: FedProx)."
        ),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Number of clusters; moment-descent can estimate it, ifca takes 2.")
    ] = None,
    n_components: Annotated[
        int | None, typer.Option("--components", help="Components of a mixture; by default chosen on held-out rows.")
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Starts to compare on held-out rows.")] = None,
    hidden: Annotated[
        str | None, typer.Option(help="Hidden layers of a network, like 64 or 64,32; none is linear.")
    ] = None,
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
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    missing: Annotated[str | None, typer.Option(help="Missing values: error, mean or drop.")] = None,
    task: Annotated[str | None, typer.Option(help="auto, regression or classification.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Column to leave out; may be repeated.")] = None,
    categorical: Annotated[list[str] | None, typer.Option(help="Numeric column to treat as categories.")] = None,
    min_rows: Annotated[int | None, typer.Option(help="Leave out clients with fewer rows.")] = None,
    test_size: Annotated[float | None, typer.Option(help="Share of each client's rows to hold out.")] = None,
    new_clients: Annotated[float | None, typer.Option(help="Share of the clients to hold out.")] = None,
    baselines: Annotated[bool | None, typer.Option(help="Compare with one model for all and one model each.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of options.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Any option, like training.batch_size=32.")] = None,
) -> FitOptions:
    """Make options of the words of the command line."""
    tree: dict[str, Any] = {
        "method": method, "seed": seed, "baselines": baselines,
        "data": {
            "path": None if data is None else str(data.resolve()), "client": client, "target": target,
            "missing": missing, "task": task, "exclude": tuple(exclude or ()) or None,
            "categorical": tuple(categorical or ()) or None, "min_rows": min_rows,
            "test_size": test_size, "new_clients": new_clients,
        },
        "model": {"hidden": _numbers(hidden)}, "clusters": {"n_clusters": clusters, "n_init": starts},
        "training": {}, "mixture": {"n_components": n_components},
        "personal": {
            "layers": None if layers is None else tuple(word.strip() for word in layers.split(",") if word.strip()),
            "stragglers": stragglers, "communication": communication,
            "clock": "trace" if trace is not None and clock is None else clock,
            "trace": None if trace is None else str(trace.resolve()),
        },
    }  # fmt: skip
    chosen = options(_given(tree), file=config, sets=sets or ())
    if rounds is not None:  # whose they are depends on the method, which a file may say
        tree["mixture" if chosen.method == "mixture" else "training"]["rounds"] = rounds
        chosen = options(_given(tree), file=config, sets=sets or ())
    return chosen


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
