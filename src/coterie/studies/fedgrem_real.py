# SPDX-License-Identifier: Apache-2.0
"""FedGrEM on real data with contaminated clients: how many rows end in a wrong cluster?

Tian, Weng, Feng, ICML 2024, Section 4.2 and Tables 1 to 3. In every repetition a fifth of each client's rows are test rows,
some clients' training rows are spoiled (data/contamination.py; the paper does not say how), every method fits R = 10
components without the classes, and a good client's error is the share of its test rows in a wrong component. Components are
numbered alike at all clients, and matched one to one to classes once for all of them, as well as possible on the good
clients' training rows; `own_percent` matches each client's for itself, on its training rows. The paper does not say which it
has. What is told is the mean over the good clients.

Features are centred and scaled by medians, over clients, of clients' means and deviations, which bad clients hardly move.
Components share a covariance, full by default, which every method estimates in its own way: FedGrEM from the clients within
reach of the centre, local methods each for itself, pooled ones from everybody. `--covariance unit` is the paper's model.

With `--times` every method is fitted on its own, with its start and all its choices, and its CPU seconds are told beside
those of Tables 6 to 8.
"""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from coterie.algorithms import alignment
from coterie.data.ragged import Ragged
from coterie.methods.mixture.fit import fit_methods
from coterie.models.mixtures import Gaussian
from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.data.contamination import KINDS, Contamination, drawn_clients, spoiled
from coterie.studies.mixture_common import METHODS, mean_and_error, misclustering
from coterie.studies.mixture_tasks import N_CLASSES, MixtureTask
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "TEST_SHARE", "TIMED", "Covariance", "Settings", "run", "standardised"]

CAPTION = (
    "Mis-clustered test rows of the good clients in percent: mean over repetitions and its standard error (se).\n"
    "error: components matched to classes once for all clients; own: for each client; both on training rows\n"
    "paper: Tables 1 to 3, whose embedding of images (t-SNE) and contamination differ"
)
TEST_SHARE = 0.2  # share of rows

Covariance = Literal["unit", "diagonal", "full"]
_Measured = tuple[float, float, float]  # error with one matching, with every client's own, and seconds


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes
    ----------
    bad : tuple of int
        Numbers of contaminated clients, each a block of the table.
    contamination : str
        How they are spoiled (data/contamination.py).
    covariance : {"unit", "diagonal", "full"}
        That components share.
    methods : tuple of str
        Which methods.
    rows : int, optional
        Images of every client; all by default.
    reps, rounds : int
        Repetitions, and T; repetition t has the seed `seed` + t.
    tol : float
        Rounds end when no estimate moves by more than this.
    jobs : int, optional
        Processes; see `side_by_side`.
    times : bool
        Whether methods are fitted one by one, and their CPU seconds told; else they advance in lockstep, from one start.
    """

    bad: tuple[int, ...]
    contamination: Contamination = "noise"
    covariance: Covariance = "full"
    methods: tuple[str, ...] = METHODS
    rows: int | None = None
    reps: int = 5
    rounds: int = 200
    tol: float = 1e-3
    seed: int = 0
    jobs: int | None = None
    times: bool = False

    def __post_init__(self) -> None:
        one_of("--contamination", self.contamination, KINDS)
        one_of("--covariance", self.covariance, get_args(Covariance))
        at_least(1, reps=self.reps, rounds=self.rounds, rows=self.rows, jobs=self.jobs)
        at_least(0, bad=min(self.bad), tol=self.tol)


def run(task: MixtureTask, chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run every repetition with every number of bad clients and all methods."""
    begin = time.perf_counter()
    n_clients = task.read(chosen.seed, chosen.rows).n_clients  # also reads images once for all processes
    at_least(max(chosen.bad) + 1, clients=n_clients)
    cells = [(task, chosen, bad, chosen.seed + rep) for bad in chosen.bad for rep in range(chosen.reps)]
    found = side_by_side(_repetition, cells, chosen.jobs, lambda done: tell(task.name, done, len(cells)))
    seconds = round(time.perf_counter() - begin, 3)
    rows = []
    for i, bad in enumerate(chosen.bad):
        own = found[i * chosen.reps : (i + 1) * chosen.reps]
        for method in chosen.methods:
            row = _row(task, chosen, method, bad, n_clients, [measured[method] for measured in own])
            rows.append(row | {"reps": chosen.reps, "clients": n_clients, "seconds_all": seconds})
    return Outcome(task.name, asdict(chosen), rows)


def _row(
    task: MixtureTask, chosen: Settings, method: str, bad: int, n_clients: int, measured: list[_Measured]
) -> dict[str, Any]:
    common, own, seconds = zip(*measured, strict=True)
    (error, error_se), (alone, alone_se) = mean_and_error(common), mean_and_error(own)
    row = {
        "method": method, "bad_clients": bad, "contamination": round(100 * bad / n_clients, 1),
        "error_percent": error, "error_percent_se": error_se, "own_percent": alone, "own_percent_se": alone_se,
        "paper": task.paper.get(bad, {}).get(method),
    }  # fmt: skip
    if chosen.times:
        mean, mean_se = mean_and_error(seconds)
        row |= {"seconds": mean, "seconds_se": mean_se, "paper_seconds": task.paper_seconds.get(bad, {}).get(method)}
    return row


def _repetition(cell: tuple[MixtureTask, Settings, int, int]) -> dict[str, _Measured]:
    """Mis-clustering of every method on the same split, in percent, and CPU seconds (of all, where fits are in lockstep)."""
    task, chosen, n_bad, seed = cell
    rows = task.read(seed, chosen.rows)
    train, test = rows.split(TEST_SHARE, seed=seed)
    bad, classes = drawn_clients(rows.n_clients, n_bad, seed), train.y
    train, test = standardised(spoiled(replace(train, y=None), bad.tolist(), chosen.contamination, seed=seed), test)
    good = ~torch.isin(torch.arange(rows.n_clients), bad)
    known, family, found = replace(train, y=classes), Gaussian(train.shape[0], chosen.covariance), {}
    for methods in [(method,) for method in chosen.methods] if chosen.times else [chosen.methods]:
        alignment.forget()
        began = time.process_time()
        fits = fit_methods(train, family, N_CLASSES, methods, rounds=chosen.rounds, tol=chosen.tol, seed=seed)
        seconds = time.process_time() - began
        for method, fit in fits.items():
            common, own = misclustering(fit, known, test, good)
            found[method] = (100 * common, 100 * own, seconds)
    return found


def standardised(train: Ragged, test: Ragged) -> tuple[Ragged, Ragged]:
    """Centre and scale features by medians, over clients, of clients' means and deviations of training rows."""
    assert isinstance(train.x, Tensor)
    owner = torch.from_numpy(train.owners)
    n = train.counts.clamp(min=1).double()[:, None]  # [M, 1]
    zero = torch.zeros(train.n_clients, train.shape[0], dtype=torch.float64)
    mean = zero.index_add(0, owner, train.x) / n
    variance = zero.index_add(0, owner, (train.x - mean[owner]).square()) / n
    centre, scale = mean.median(0).values, variance.sqrt().median(0).values
    scale = torch.where(scale > 0, scale, 1.0)
    return train.changed(lambda x: (x - centre) / scale), test.changed(lambda x: (x - centre) / scale)


COLUMNS = [
    Column("contamination", "contaminated %", ".1f"), Column("method", "method"),
    Column("error_percent", "error %", ".2f"), Column("error_percent_se", "se", ".2f"),
    Column("own_percent", "own %", ".2f"), Column("own_percent_se", "se", ".2f"), Column("paper", "paper %", ".2f"),
    Column("reps", "reps"), Column("seconds_all", "seconds, all", ".1f"),
]  # fmt: skip
TIMED = [
    *COLUMNS[:-1], Column("seconds", "CPU seconds", ".2f"), Column("seconds_se", "se", ".2f"),
    Column("paper_seconds", "paper", ".2f"), COLUMNS[-1],
]  # fmt: skip
