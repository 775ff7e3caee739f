# SPDX-License-Identifier: Apache-2.0
"""`coterie summarise`: one file a site, for sites that may not run a server."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.arguments import AsJson, Categorical, Client, Data, Exclude
from coterie.runs.screen import warn

__all__ = ["summarise_command"]


def summarise_command(
    data: Data,
    target: Annotated[str, typer.Option(help="Column to predict: a number.")],
    out_: Annotated[Path, typer.Option("--out", help="The file to write, like site.json.")],
    client: Client = None,
    exclude: Exclude = None,
    categorical: Categorical = None,
    missing: Annotated[str, typer.Option(help="Missing values: error or drop.")] = "error",
    task: Annotated[str, typer.Option(help="auto or regression.")] = "auto",
    min_rows: Annotated[int, typer.Option(help="Leave out clients with fewer rows.")] = 1,
    digits: Annotated[int | None, typer.Option("--round", help="Significant digits to keep; all by default.")] = None,
    few_shot: Annotated[
        int | None, typer.Option(help="Rows that a client would show as a new one; for compare --new-clients.")
    ] = None,
    test_size: Annotated[float, typer.Option(help="Share of each client's rows to hold out.")] = 0.2,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation.")] = 5,
    deals: Annotated[int, typer.Option(help="How often rows are dealt to folds: 2, or 1, which reveals less.")] = 2,
    seed: Annotated[int, typer.Option(help="Random seed; the same at all sites.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write what linear regression needs of a site, and no rows, to one file for `coterie compare` and `coterie fit`."""
    from coterie.runs.summarise import summarise

    site = summarise(
        data, out_, client=client, target=target, exclude=exclude or (), categorical=categorical or (),
        missing=missing, task=task, min_rows=min_rows, test_size=test_size, folds=folds,  # type: ignore[arg-type]
        few_shot=few_shot, deals=deals, seed=seed, digits=digits,
    )  # fmt: skip
    if as_json:
        print(json.dumps({"file": str(out_), "clients": len(site.names), "reveals": site.reveals()}, indent=2))
        return
    warn(site.left_out())
    print(f"{out_} holds, and so reveals:")
    for said in site.reveals():
        print(f"- {said}")
