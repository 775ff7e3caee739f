# SPDX-License-Identifier: Apache-2.0
"""What commands have in common: the words they take, and what is made of these: options, clients, a free folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.errors import ConfigError
from coterie.outcome_names import NAMES

if TYPE_CHECKING:
    from coterie.config import FitOptions
    from coterie.data.clients import Clients

__all__ = [
    "AsJson",
    "Categorical",
    "Client",
    "Data",
    "DataOrSites",
    "Decimal",
    "Delta",
    "Encoding",
    "Epsilon",
    "Event",
    "Exclude",
    "Hidden",
    "MinRows",
    "Missing",
    "NewClients",
    "OutcomeWord",
    "Secure",
    "Seed",
    "Sep",
    "Split",
    "Target",
    "TaskName",
    "TestSize",
    "Thousands",
    "as_written",
    "data_tree",
    "free_folder",
    "given",
    "layer_sizes",
    "read_clients",
    "stem_of",
    "weights_of",
]

Data = Annotated[Path, typer.Argument(help="Parquet, CSV(.gz), or a folder with one file per client.")]
DataOrSites = Annotated[
    list[Path],
    typer.Argument(
        help="Parquet, CSV(.gz), a folder with one file per client, or site summaries: files (.json) or a folder of them.",
        metavar="DATA",
    ),
]
Client = Annotated[str | None, typer.Option(help="Column that names the client of each row.")]
Target = Annotated[str | None, typer.Option(help="Column to predict.")]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Privacy budget: differential privacy for clients, like 8; smaller is stricter."),
]
Delta = Annotated[float | None, typer.Option(help="Of the privacy budget; by default 1e-5 or less.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
Hidden = Annotated[str | None, typer.Option(help="Hidden layers of a network, like 64 or 64,32; linear by default.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Missing = Annotated[str | None, typer.Option(help="Missing values: error, mean or drop.")]
Secure = Annotated[
    bool, typer.Option("--secure", help="Add up securely: only sums over all nodes are known to the server.")
]
TaskName = Annotated[str | None, typer.Option(help="auto, regression or classification.")]
OutcomeWord = Annotated[
    str | None, typer.Option("--outcome", help=f"What the target is, if no plain number or class: {', '.join(NAMES)}.")
]
Event = Annotated[
    str | None,
    typer.Option(help="With --outcome cox: column that is 1 if the event happened, 0 if the time is censored."),
]
Exclude = Annotated[list[str] | None, typer.Option(help="Column to leave out; may be repeated.")]
Categorical = Annotated[list[str] | None, typer.Option(help="Numeric column to treat as categories; may be repeated.")]
MinRows = Annotated[int | None, typer.Option(help="Leave out clients with fewer rows.")]
TestSize = Annotated[float | None, typer.Option(help="Share of each client's rows to hold out.")]
NewClients = Annotated[float | None, typer.Option(help="Share of the clients to hold out as new clients.")]
Split = Annotated[
    str | None,
    typer.Option(
        help="Rows to hold out: random; time, the last ones of each client in the order of the file; or time:COLUMN."
    ),
]
Sep = Annotated[str | None, typer.Option(help="CSV: what stands between cells, like ';' or tab.")]
Decimal = Annotated[str | None, typer.Option(help="CSV: the decimal separator, . or a comma.")]
Thousands = Annotated[str | None, typer.Option(help="CSV: what stands between groups of three digits, if anything.")]
Encoding = Annotated[str | None, typer.Option(help="CSV: the encoding, like utf-16 or latin-1; UTF-8 by default.")]


def data_tree(
    data: list[Path] | None, exclude: list[str] | None, categorical: list[str] | None, **said: Any
) -> dict[str, Any]:
    """The options of reading, as far as they were said."""
    columns = {"exclude": tuple(exclude or ()) or None, "categorical": tuple(categorical or ()) or None}
    return {"path": None if data is None else as_written([one.resolve() for one in data]), **columns, **said}


def as_written(data: list[Path]) -> str | tuple[str, ...]:
    """One path, or those of several site summaries, as options have them."""
    return str(data[0]) if len(data) == 1 else tuple(map(str, data))


def stem_of(data: list[Path]) -> str:
    """What a run on this data is called: like its file, or like the folder of several."""
    return data[0].name.split(".")[0] if len(data) == 1 else data[0].resolve().parent.name


def given(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out what was not said."""
    kept = {name: given(value) if isinstance(value, dict) else value for name, value in tree.items()}
    return {name: value for name, value in kept.items() if value is not None}


def layer_sizes(text: str | None) -> tuple[int, ...] | None:
    """Read a list like 64,32."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of layer sizes", "write it like --hidden 64,32") from None


def weights_of(text: str | None) -> str | dict[str, float] | None:
    """Read weights of classes: a word, or a list like yes=5,no=1."""
    if text is None or "=" not in text:
        return text
    pairs = [part.rpartition("=")[::2] for part in text.split(",")]
    try:
        return {name.strip(): float(number) for name, number in pairs}
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of weights", "write it like --class-weights yes=5,no=1") from None


def free_folder(stem: str) -> Path:
    """Name a folder under runs/ that is not there yet."""
    number = 1
    while (folder := Path("runs") / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


def read_clients(chosen: "FitOptions") -> "Clients":
    """Read what the options name."""
    from coterie.data.readers import read
    from coterie.studies import digits_demo

    d = chosen.data
    if d.path == digits_demo.NAME:
        return digits_demo.demo_clients(chosen.seed)
    if d.path is None:
        raise ConfigError("the run does not say which data it read", "start it again with `coterie fit DATA`")
    return read(
        d.path, client=d.client, target=d.target, features=d.features, exclude=d.exclude, categorical=d.categorical,
        missing=d.missing, task=chosen.task, outcome=d.outcome, event=d.event, min_rows=d.min_rows, test_size=d.test_size,
        new_clients=d.new_clients, split=d.split, seed=chosen.seed, **d.written,
    )  # fmt: skip
