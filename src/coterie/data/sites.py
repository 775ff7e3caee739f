# SPDX-License-Identifier: Apache-2.0
"""From a site's rows to the file that it shares, and from the files of several sites to clients.

Who is a new client depends on all of them, so every client's file says what it would show as one.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.data.clients import Clients
from coterie.data.draws import DEALS, SUPPORT, VALIDATION
from coterie.data.moments import Moments, moments_of
from coterie.data.ragged import Ragged, lots, newcomers_below
from coterie.data.schema import Schema, disagreement, joined
from coterie.data.site_files import MOST_NUMBERS, Drawn, Site, read_site
from coterie.data.sources import is_table
from coterie.data.stand_ins import FOLDS_AGAIN, Division, StandIns
from coterie.errors import ConfigError, DataError

__all__ = ["few_shot_of", "read_sites", "site_files", "summed"]

_MOST_MADE = 1 << 27  # numbers of rows, or of sums, that are held at once: 1 GiB
_PURPOSES = {
    "folds": "folds", "folds_again": FOLDS_AGAIN, "validation": "validation", "few_shot": "few shots", "support": "support",
}  # fmt: skip


# -- at the site ------------------------------------------------------------------------------------------------------
def summed(
    clients: Clients, *, seed: int, test_size: float, folds: int, few_shot: int | None, deals: int = DEALS
) -> Site:
    """Sum the rows of clients of whom nothing is held out yet, in all the ways in which they will be divided."""
    drawn = Drawn(
        seed=seed, test_size=test_size, folds=folds, deals=deals, validation=VALIDATION, few_shot=few_shot,
        support=SUPPORT,
    )  # fmt: skip
    rules, rows, size = drawn.rules, clients.train, clients.schema.n_features + 1
    if size > MOST_NUMBERS:
        raise DataError(f"rows have {size} numbers; the limit is {MOST_NUMBERS}", "leave columns out with --exclude")
    train, test = rows.divide(rules["test"], seed=seed, purpose="test")
    parts: dict[str, Sequence[Ragged]] = {
        "folds": [own for _, own in train.fold_by_fold(folds, seed=seed)],
        "test": [test],
        "validation": train.divide(rules["validation"], seed=seed, purpose="validation"),
    }
    if deals > 1:
        parts["folds_again"] = [own for _, own in train.fold_by_fold(folds, seed=drawn.seed_of("folds_again"))]
    for name in ("few_shot", "support"):
        if name in rules:
            parts[name] = rows.divide(rules[name], seed=seed, purpose=_PURPOSES[name])
    moments = {name: Moments.side_by_side([moments_of(part) for part in some]) for name, some in parts.items()}
    dropped = {"dropped_rows": clients.dropped_rows, "dropped_clients": clients.dropped_clients}
    return Site(clients.schema, clients.names, drawn, moments, **dropped)


# -- where files are put together -------------------------------------------------------------------------------------
def site_files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The site summaries that are meant: files that end in .json, or a folder of them; none where tables are meant."""
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if len(paths) == 1 and paths[0].is_dir():
        inside = sorted(file for file in paths[0].iterdir() if not file.name.startswith("."))
        return [] if any(map(is_table, inside)) else [file for file in inside if file.suffix.lower() == ".json"]
    summaries = [one for one in paths if one.suffix.lower() == ".json"]
    if len(paths) > 1 and len(summaries) < len(paths):
        other = next(one for one in paths if one not in summaries)
        raise DataError(
            f"several files are given, and '{other}' is no site summary",
            "put tables into one file, or one folder; site summaries end in .json",
        )
    return summaries


def few_shot_of(path: str | Path | Sequence[str | Path]) -> int | None:
    """How many rows a new client would show, as the first of some site summaries says."""
    return read_site(site_files(path)[0]).drawn.few_shot


def read_sites(
    files: Sequence[Path], *, new_clients: float = 0.0, min_rows: int = 1, dtype: torch.dtype = torch.float64, **asked: Any
) -> Clients:  # fmt: skip
    """Read site summaries, and refuse what they were not written for: see `coterie.read` for what can be asked."""
    sites = [(f"site summary '{file}'", read_site(file)) for file in files]
    _check_agreement(sites)
    _check_asked(sites[0][1], new_clients=new_clients, **asked)
    clients = _joined([site for _, site in sites], new_clients=new_clients, min_rows=min_rows)
    train, test, new = (
        None if rows is None else rows.to(dtype) for rows in (clients.train, clients.test, clients.newcomers)
    )
    assert train is not None
    return replace(clients, train=train, test=test, newcomers=new)


def _joined(sites: Sequence[Site], *, new_clients: float = 0.0, min_rows: int = 1) -> Clients:
    """Put sites that agree together, and hold out clients as `coterie.read` would."""
    schema, drawn = joined([site.schema for site in sites]), sites[0].drawn
    names, moments = _together(sites, schema)
    counts = (moments["folds"].n.sum(1) + moments["test"].n.sum(1)).numpy()
    enough = counts >= min_rows
    if not enough.any():
        raise DataError(f"no client has {min_rows} rows or more; the largest has {counts.max()}", "lower --min-rows")
    new = np.zeros(len(names), dtype=bool)
    if new_clients:
        key = keys.name_keys(names[enough])
        new[enough] = (lots(key, drawn.seed) < newcomers_below(key, new_clients, drawn.seed)).numpy()
    old = np.flatnonzero(enough & ~new)
    if not len(old):
        raise DataError(
            f"holding out {new_clients:g} of the clients leaves no clients to train on", "lower --new-clients"
        )
    test = StandIns.of(names[old], moments["test"].clients(old))
    divisions = tuple(name for name in ("folds", "folds_again", "validation") if name in moments)
    return Clients(
        schema,
        _rows(names, moments, drawn, divisions, old, draw="validation"),
        test if test.layout.n_rows else None,
        _rows(names, moments, drawn, ("few_shot", "support"), np.flatnonzero(new)) if new.any() else None,
        dropped_rows=sum(site.dropped_rows for site in sites),
        dropped_clients=sum(site.dropped_clients for site in sites) + int((~enough).sum()),
    )


def _rows(
    names: np.ndarray, moments: dict[str, Moments], drawn: Drawn, divisions: tuple[str, ...], ids: np.ndarray, *,
    draw: str = "",
) -> StandIns:  # fmt: skip
    """Rows of some clients, which can be divided in these ways, and by the clients themselves in the one of `draw`."""
    some = {name: moments[name].clients(ids) for name in divisions}
    known = {_PURPOSES[name]: Division(drawn.rules[name], drawn.seed_of(name), one) for name, one in some.items()}
    return StandIns.for_draw(names[ids], known, draw) if draw else StandIns.of(names[ids], some[divisions[0]], known)


def _together(sites: Sequence[Site], schema: Schema) -> tuple[np.ndarray, dict[str, Moments]]:
    """All clients, ascending by name, with their sums in the columns of all sites."""
    place = {name: number for number, name in enumerate((*schema.feature_names, schema.target))}
    size = len(place)
    names = np.concatenate([site.names for site in sites])
    order = np.argsort(names, kind="stable")
    n_parts = sum(moments.n.shape[1] for moments in sites[0].moments.values())
    n_rows = sum(int(site.moments[name].n.sum()) for site in sites for name in ("folds", "test"))
    for what, many, most in (
        ("numbers in a row", size, MOST_NUMBERS),
        ("numbers in all rows", n_rows * size, _MOST_MADE),
        ("numbers in all sums", len(names) * n_parts * size**2, _MOST_MADE),
    ):
        if many > most:
            raise DataError(
                f"{len(names)} clients of {len(sites)} sites have {many:,} {what}; the limit is {most:,}",
                "put fewer sites together, or leave columns out",
            )
    moments = {}
    for name in sites[0].moments:
        each = [_in_columns(site, site.moments[name], place) for site in sites]
        stacked = Moments(*(torch.cat([getattr(one, part) for one in each]) for part in ("n", "mean", "products")))
        moments[name] = stacked.clients(order)
    return names[order], moments


def _in_columns(site: Site, moments: Moments, place: dict[str | None, int]) -> Moments:
    """A level that a site does not have is zero in all its rows."""
    at = torch.tensor([place[name] for name in (*site.schema.feature_names, site.schema.target)])

    def spread(values: Tensor, dims: int) -> Tensor:
        wide = values.new_zeros(*values.shape[:2], *(len(place),) * dims)
        wide[(..., at) if dims == 1 else (..., at[:, None], at)] = values
        return wide

    return Moments(moments.n, spread(moments.mean, 1), spread(moments.products, 2))


# -- what is refused --------------------------------------------------------------------------------------------------
def _check_agreement(sites: Sequence[tuple[str, Site]]) -> None:
    """Refuse files that do not go together."""
    (first, one), seen = sites[0], dict[str, str]()
    for where, site in sites:
        if said := disagreement((first, one.schema), (where, site.schema)):
            raise DataError(*said)
        for option, value in site.drawn:
            if value != (other := getattr(one.drawn, option)):
                raise DataError(
                    f"{where} was written with {option} {value} and {first} with {other}",
                    "write both with the same options of `coterie summarise`",
                )
        for name in site.names.tolist():
            if name in seen:
                raise DataError(
                    f"client '{name}' is in {seen[name]} and in {where}",
                    "give clients distinct names; a client's rows lie at one site",
                )
            seen[name] = where


def _check_asked(
    site: Site, *, client: str | None, target: str | None, features: Collection[str] | None, exclude: Collection[str],
    categorical: Collection[str], missing: str, task: str, test_size: float, new_clients: float, seed: int,
) -> None:  # fmt: skip
    """Refuse what was settled otherwise when the summaries were written."""
    again = "leave it out, or write the summaries again with it: `coterie summarise --help`"
    settled = {
        "client": (client, None, site.schema.client), "target": (target, None, site.schema.target),
        "missing": (missing, "error", site.schema.missing), "task": (task, "auto", "regression"),
        "test_size": (test_size, site.drawn.test_size, site.drawn.test_size),
        "seed": (seed, site.drawn.seed, site.drawn.seed),
    }  # fmt: skip
    for option, (value, unsaid, known) in settled.items():
        if value not in (unsaid, known):
            flag = f"--{option.replace('_', '-')}"
            hint = f"give {flag} {known}, or write the summaries again" if option in ("test_size", "seed") else again
            raise ConfigError(f"{option} is {value}, and site summaries were written with {known}", hint)
    for option, columns in (("features", features), ("exclude", exclude), ("categorical", categorical)):
        if columns:
            raise ConfigError(f"{option} is given, and site summaries have the columns they were written with", again)
    if new_clients and site.drawn.few_shot is None:
        raise ConfigError(
            "new clients are asked for, and site summaries were written without what clients would show as new ones",
            "leave --new-clients out, or write the summaries with `coterie summarise --few-shot 5`",
        )
