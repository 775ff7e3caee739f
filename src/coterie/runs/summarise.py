# SPDX-License-Identifier: Apache-2.0
"""`coterie summarise`: write what linear regression needs of a site to one file, for sites that may not run a server."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from coterie.data.draws import DEALS, FOLDS
from coterie.data.readers import read
from coterie.data.schema import Missing, Task
from coterie.data.site_files import Site
from coterie.data.sites import summed
from coterie.errors import ConfigError
from coterie.files import replace_file

__all__ = ["summarise"]


def summarise(
    path: str | Path,
    out: str | Path,
    *,
    client: str | None = None,
    target: str,
    features: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    categorical: Collection[str] = (),
    missing: Missing = "error",
    task: Task | Literal["auto"] = "auto",
    min_rows: int = 1,
    test_size: float = 0.2,
    folds: int = FOLDS,
    few_shot: int | None = None,
    deals: int = DEALS,
    seed: int = 0,
    digits: int | None = None,
) -> Site:
    """Write counts, means and sums of products of a site's rows, by client, to a file that a person can read.

    `coterie.read` reads the files of several sites, and `compare` and the linear methods give the answers that they would
    give on the rows.

    Parameters
    ----------
    path : str or Path
        The site's rows.
    out : str or Path
        The file to write; it ends in ``.json``.
    client, target, features, exclude, categorical, missing, task, min_rows, test_size, seed
        As for `read`. All sites must give the same `seed`, `test_size`, `folds`, `deals` and `few_shot`. What is
        missing cannot be filled with a mean that is not known yet.
    folds : int
        Of the comparison's cross-validation.
    few_shot : int, optional
        Rows that a client would show if it were held out as a new one; without it no clients can be held out.
    deals : int
        How often training rows are dealt to folds: twice, as the comparison of rows does, or once, which reveals less.
    digits : int, optional
        Significant digits of means and products; all by default.
    """
    out = Path(out)
    if out.suffix.lower() != ".json":
        raise ConfigError(f"a site summary is a JSON file, and '{out}' is called otherwise", "--out site.json")
    if out.exists():
        raise ConfigError(f"there is a file '{out}' already", "name a new file with --out")
    if missing == "mean":
        raise ConfigError(
            "missing values are filled with the mean of all sites, which a single site does not know",
            "--missing drop leaves those rows out",
        )
    for option, value, least, most in (
        ("folds", folds, 2, 100),
        ("deals", deals, 1, DEALS),
        ("few_shot", few_shot, 1, 10**6),
        ("digits", digits, 1, 17),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{option} is {value}", f"give a number from {least} to {most}")
    clients = read(
        path, client=client, target=target, features=features, exclude=exclude, categorical=categorical, missing=missing,
        task=task, min_rows=min_rows, test_size=0.0, seed=seed,
    )  # fmt: skip
    if clients.schema.task != "regression":
        raise ConfigError(
            f"target '{target}' has classes, and sums of products are enough for linear regression only",
            "if the classes are numbers to be predicted, add --task regression; else run `coterie flower`",
        )
    site = summed(clients, seed=seed, test_size=test_size, folds=folds, few_shot=few_shot, deals=deals)
    site = site if digits is None else site.rounded(digits)
    replace_file(out, site.text().encode())
    return site
