# SPDX-License-Identifier: Apache-2.0
"""What do 30 % of bad clients do to the others? Every method, every attack, every way to average.

40 clients with 60 rows (12 of them test rows), 6 features, noise of 0.28 of the signal's deviation; 12 of the clients answer
wrongly (`bad_replies.py`), of planted groups as many of each: where most of a group are bad, its model is theirs. The metric
is the held-out error of the 28 others: with every seed within 10 % of that of a fit without the 12; and without bad clients
within 1 % of that of plain means, in the median over seeds (one network differs from the next by more). LG-FedAvg's clients
have networks of their own, with 16 hidden units and 240 rows: with two layers of 8 and 60 rows one client's network is now
and then far off, also without bad clients.
Which way of averaging is recommended for a method was fixed on seeds from 1000, and is reported on others.
"""

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie import keys
from coterie.config import options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.engines.screening import ClientWarning
from coterie.methods.fit import fit
from coterie.selection import compare
from coterie.studies.bad_replies import ATTACKS, answering_wrongly
from coterie.studies.common import Column, Outcome, Tell, one_of, silent
from coterie.studies.data.planted import Truth, planted_structure
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "METHODS", "NAME", "QUICK", "Settings", "run"]

NAME = "bad-clients"
WITHIN, COSTS = 0.10, 0.01  # of the error: with bad clients, and without
NOBODY = "nobody"

_NETWORK = {"model": {"hidden": (8,)}, "training": {"rounds": 100}}


@dataclass(frozen=True)
class Case:
    """A method, the truth that it is for, its options, and the way of averaging that is recommended for it.

    `rows` are in place of those of the settings.
    """

    method: str
    truth: Truth
    size: int
    given: dict[str, Any]
    recommended: str | None
    rows: int | None = None


METHODS = {
    case.method: case
    for case in (
        Case("fedavg", "global", 1, {}, "near"),
        Case("ifca", "clusters", 3, {"clusters": {"n_clusters": 3, "n_init": 3}}, "near"),
        Case("fedrep", "representation", 2, _NETWORK, "near"),
        Case("lg-fedavg", "representation", 2, {**_NETWORK, "model": {"hidden": (16,)}}, "near", rows=240),
        Case("moment-descent", "clusters", 3, {"clusters": {"n_clusters": 3}}, "near"),
        Case("shrunk", "shrunk", 1, {}, None),
        Case("compare", "clusters", 3, {}, None),
    )
}
QUICK: dict[str, Any] = {"methods": ("fedavg", "ifca", "shrunk"), "reps": 1}


@dataclass(frozen=True)
class Settings:
    """What is run, and how often."""

    methods: tuple[str, ...] = tuple(METHODS)
    robust: tuple[str, ...] = ("clip", "trimmed", "median", "near")
    attacks: tuple[str, ...] = ATTACKS
    reps: int = 5
    clients: int = 40
    bad: float = 0.3
    rows: int = 60
    features: int = 6
    noise: float = 0.28
    jobs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.methods:
            one_of("--methods", name, tuple(METHODS))


def run(settings: Settings, tell: Tell = silent) -> Outcome:
    """Fit with and without bad clients, and hold the others' errors against each other."""
    tasks = [
        (settings, name, robust, attack, settings.seed + rep)
        for name in settings.methods
        for rep in range(settings.reps)
        for robust in ((None,) if METHODS[name].recommended is None else ("none", *settings.robust))
        for attack in ((NOBODY, "absent") if robust == "none" else (NOBODY, "absent", *settings.attacks))
    ]
    cells = side_by_side(_one, tasks, settings.jobs, lambda n: tell(NAME, n, len(tasks)))
    rows = [row for name in settings.methods for row in _rows([c for c in cells if c["method"] == name])]
    return Outcome(NAME, asdict(settings), rows, _summary(rows))


def _one(task: tuple[Settings, str, str | None, str, int]) -> dict[str, Any]:
    """One fit: honest clients' error, and what was chosen."""
    settings, name, robust, attack, seed = task
    case, began = METHODS[name], time.process_time()
    clients, bad = _clients(settings, case, seed, without_bad=attack == "absent")
    nobody = torch.zeros(0, dtype=torch.int64)
    honest = ~torch.isin(clients.train.keys, nobody if attack == "absent" else bad)
    answering = answering_wrongly(bad, attack) if attack in ATTACKS else nullcontext()
    with warnings.catch_warnings(), answering:
        warnings.simplefilter("ignore", ClientWarning)
        error, rows, chosen = _fitted(case, clients, robust, seed)
    error, rows = torch.as_tensor(error)[honest].double(), torch.as_tensor(rows)[honest].double()
    overall = float((error.square() * rows).sum().div(rows.sum()).sqrt())
    return {
        "method": name, "robust": robust, "attack": attack, "seed": seed, "error": overall, "chosen": chosen,
        "seconds": time.process_time() - began,
    }  # fmt: skip


def _fitted(case: Case, clients: Clients, robust: str | None, seed: int) -> tuple[Any, Any, str | None]:
    """Clients' errors on their held-out rows, how many these are, and what `compare` has chosen."""
    assert clients.test is not None
    if case.method == "compare":
        found = compare(clients, seed=seed, quick=True)
        return found[found.chosen].client_test_metric, clients.test.counts, found.chosen
    given = {**case.given, "method": case.method, "seed": seed, "baselines": False}
    if robust is not None:
        given["training"] = {**given.get("training", {}), "robust": robust}
    fitted = fit(clients, options(given))
    return fitted.per_client["metric"], fitted.per_client["rows_test"], None


def _clients(settings: Settings, case: Case, seed: int, *, without_bad: bool) -> tuple[Clients, Tensor]:
    """Clients, all or the honest ones, and the keys of the bad ones."""
    rows = planted_structure(
        case.truth, case.size, n_clients=settings.clients, rows=case.rows or settings.rows, n_features=settings.features,
        noise=settings.noise, seed=seed,
    )  # fmt: skip
    assert isinstance(rows.x, Tensor)
    assert isinstance(rows.y, Tensor)
    order = torch.randperm(settings.clients, generator=keys.generator(seed, "bad clients")).numpy()
    group = order % (case.size if case.truth == "clusters" else 1)
    turn = np.array(
        [(group[:i] == group[i]).sum() for i in range(len(order))]
    )  # the first of every group, then the second
    bad = order[np.argsort(turn, kind="stable")][: round(settings.bad * settings.clients)]
    there = ~np.isin(rows.owners, bad) if without_bad else np.ones(len(rows.owners), dtype=bool)
    made = from_arrays(
        rows.x.numpy()[there], rows.y.numpy()[there], rows.names[rows.owners][there], task="regression", test_size=0.2,
        seed=seed,
    )  # fmt: skip
    return made, rows.keys[torch.from_numpy(bad)]


def _rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every cell beside the fit that it is held against: the median over seeds of the ratio of errors."""
    found = {(c["robust"], c["attack"], c["seed"]): c for c in cells}
    seeds = sorted({c["seed"] for c in cells})
    plain = "none" if any(c["robust"] == "none" for c in cells) else None
    out = []
    for robust, attack in dict.fromkeys((c["robust"], c["attack"]) for c in cells):
        if attack == "absent" or (robust == "none" and attack == NOBODY):
            continue
        against = (plain, NOBODY) if attack == NOBODY else (plain, "absent")
        mine, base = ([found[(*cell, seed)] for seed in seeds] for cell in ((robust, attack), against))
        ratios = [a["error"] / b["error"] for a, b in zip(mine, base, strict=True)]
        same = all(a["chosen"] == b["chosen"] for a, b in zip(mine, base, strict=True))
        fine = float(np.median(ratios)) <= 1 + COSTS if attack == NOBODY else max(ratios) <= 1 + WITHIN
        case = METHODS[cells[0]["method"]]
        out.append(
            {
                "method": case.method,
                "robust": robust,
                "recommended": robust == case.recommended,
                "attack": attack,
                "error": float(np.median([c["error"] for c in mine])),
                "without": float(np.median([c["error"] for c in base])),
                "excess": float(np.median(ratios)) - 1,
                "worst": max(ratios) - 1,
                "same_choice": same if case.method == "compare" else None,
                "holds": fine and same,
                "seconds": sum(c["seconds"] for c in mine) / len(mine),
            }
        )
    return out


def _summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every method and way of averaging."""
    out = []
    for method, robust in dict.fromkeys((row["method"], row["robust"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["robust"]) == (method, robust)]
        usual = {row["attack"]: row["excess"] for row in mine}
        worst = max(row["worst"] for row in mine if row["attack"] != NOBODY)
        broken = [row["attack"] for row in mine if not row["holds"]]
        out.append(
            {
                "method": method, "robust": robust or "-", "recommended": mine[0]["recommended"], **usual, "worst": worst,
                "holds": not broken, "broken": ", ".join(broken) or None,
            }
        )  # fmt: skip
    return out


CAPTION = (
    "excess of honest clients' held-out error, median over seeds: 30 % of the clients answer so, against fits without them\n"
    "(worst: of any attack and seed; bar: 10 %); nobody: without bad clients, against means (bar: 1 %). *: recommended."
)
COLUMNS = [
    Column("method", "method"), Column("robust", "robust"), Column("recommended", "*", lambda yes: "*" if yes else ""),
    Column(NOBODY, "nobody", ".1%"), *(Column(attack, attack, ".1%") for attack in ATTACKS),
    Column("worst", "worst", ".1%"), Column("holds", "bar", lambda yes: "holds" if yes else "fails"),
    Column("broken", "broken by"),
]  # fmt: skip
