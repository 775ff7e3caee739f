# SPDX-License-Identifier: Apache-2.0
"""The words that say what to fit, for every command that fits."""

import inspect
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from coterie.cli.arguments import (
    Categorical,
    Client,
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
    Seed,
    Sep,
    Split,
    Target,
    TaskName,
    TestSize,
    Thousands,
    data_tree,
    given,
    layer_sizes,
    weights_of,
)
from coterie.errors import ConfigError
from coterie.registry import METHODS, method_of

if TYPE_CHECKING:
    from coterie.config import FitOptions

__all__ = ["Every", "fit_options", "takes_fit_options", "tell_method"]

Every = Annotated[float, typer.Option("--checkpoint-seconds", help="Seconds between checkpoints.")]


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
    data: list[Path] | None,
    client: Client = None,
    target: Target = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"auto (compare, then fit what was chosen), {', '.join(METHODS)}; with --help, the options of one."
        ),
    ] = None,
    clusters: Annotated[
        int | None, typer.Option(help="Number of clusters; by default moment-descent estimates it, and ifca uses 2.")
    ] = None,
    n_components: Annotated[
        int | None, typer.Option("--components", help="Mixture components; by default chosen on held-out rows.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Rank of low-rank models (representation); by default chosen on held-out rows.")
    ] = None,
    slopes: Annotated[
        str | None, typer.Option(help="Columns with random slopes (mixed), like days,age; all for every column.")
    ] = None,
    starts: Annotated[int | None, typer.Option(help="Starts to compare on held-out rows.")] = None,
    hidden: Hidden = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Personal layers, by the prefixes of their names, like 2,3."),
    ] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(help="none, or srpfl: begin with the fastest clients, and double their number in stages."),
    ] = None,
    clock: Annotated[
        str | None, typer.Option(help="Simulated times of clients per round: exponential, dynamic or lognormal.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="File of clients' times per round, instead of --clock.")] = None,
    communication: Annotated[float | None, typer.Option(help="Simulated seconds added to every round.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    seed: Seed = None,
    missing: Missing = None,
    task: TaskName = None,
    outcome: OutcomeWord = None,
    event: Event = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    min_rows: MinRows = None,
    test_size: TestSize = None,
    new_clients: NewClients = None,
    class_weights: Annotated[
        str | None, typer.Option(help="What rows of a class count in training: balanced, or numbers like yes=5,no=1.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Of two classes: predict the second from this probability on.")
    ] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="Of numbers: hold out calibration rows, for intervals that cover this share of rows, like 0.9."
        ),
    ] = None,
    split: Split = None,
    sep: Sep = None,
    decimal: Decimal = None,
    thousands: Thousands = None,
    encoding: Encoding = None,
    baselines: Annotated[bool | None, typer.Option(help="Compare with one model for all and one model each.")] = None,
    secure: Annotated[
        bool | None, typer.Option(help="Add up securely: only sums over all nodes are known to the server.")
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of options.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="Any option, like training.batch_size=32.")] = None,
) -> "FitOptions":
    """Make options of the words of the command line."""
    from coterie.config import options

    tree: dict[str, Any] = {
        "method": method, "seed": seed, "baselines": baselines, "secure": secure,
        "data": data_tree(
            data, exclude, categorical, client=client, target=target, missing=missing, task=task, outcome=outcome,
            event=event, min_rows=min_rows, test_size=test_size, new_clients=new_clients, split=split, sep=sep,
            decimal=decimal, thousands=thousands, encoding=encoding,
        ),
        "model": {"hidden": layer_sizes(hidden)}, "clusters": {"n_clusters": clusters, "n_init": starts},
        "training": {}, "mixture": {"n_components": n_components}, "prior": {"rank": rank},
        "mixed": {"slopes": slopes},
        "personal": {
            "layers": None if layers is None else tuple(word.strip() for word in layers.split(",") if word.strip()),
            "stragglers": stragglers, "communication": communication,
            "clock": "trace" if trace is not None and clock is None else clock,
            "trace": None if trace is None else str(trace.resolve()),
        },
        "privacy": {"epsilon": epsilon, "delta": delta},
        "predictions": {"class_weights": weights_of(class_weights), "threshold": threshold, "coverage": coverage},
    }  # fmt: skip
    chosen = options(given(tree), file=config, sets=sets or ())
    if rounds is not None:  # whose they are depends on the method, which a file may say
        tree[method_of(chosen.method).rounds or "training"]["rounds"] = rounds
        chosen = options(given(tree), file=config, sets=sets or ())
    return chosen


def tell_method(name: str) -> NoReturn:
    """Print the options of a method, with their defaults, and leave."""
    if name not in METHODS:
        raise ConfigError(f"there is no method '{name}' with its own options", f"there are {', '.join(METHODS)}")
    method = METHODS[name]
    print(f"coterie fit DATA --method {name}: {method.about}")
    print(
        "Options of this method with their defaults, for --set or --config; `coterie fit --help` lists the common options."
    )
    for group, options in method.takes.items():
        for option in options:
            value = " (not set)" if option.default is None else f" = {_toml(option.default)}"
            print(f"  {f'{group}.{option.name}{value}':<40}  # {option.about}")
    raise SystemExit(0)


def _toml(value: Any) -> str:
    """A value as a configuration file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(list(value) if isinstance(value, tuple) else value)
