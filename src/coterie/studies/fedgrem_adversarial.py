# SPDX-License-Identifier: Apache-2.0
"""FedGrEM among adversaries: what do good clients lose when up to three in ten clients are bad, in many ways?

The good clients are fitted with the bad ones among them and without; an adversary costs the ratio of the errors. On planted
mixtures (`gmm`, `mor`: Tian, Weng, Feng, ICML 2024, appendix B.1, ten clients) the error is the largest distance of a
component from the truth; on `pendigits` it is mis-clustering of test rows, each writer's components matched to digits on its
training rows. Not in the paper, which has one kind of outlier.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.errors import ConfigError
from coterie.methods.mixture.fit import MixtureFit, fit_methods
from coterie.models.mixtures import Family, Gaussian
from coterie.studies.common import Column, Outcome, Tell, at_least, one_of, silent
from coterie.studies.data.contamination import KINDS, Contamination, drawn_clients, spoiled
from coterie.studies.data.mixtures import CENTRES, Kind, matched, planted_mixture
from coterie.studies.fedgrem_real import TEST_SHARE, standardised
from coterie.studies.fedgrem_simulation import family_of
from coterie.studies.mixture_common import mean_and_error, misclustering
from coterie.studies.mixture_tasks import N_CLASSES, pendigits
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "QUICK", "Data", "Settings", "run"]

NAME = "fedgrem-adversarial"
CAPTION = (
    "Error of the good clients with bad ones among them, without them, and the ratio of these means.\n"
    "gmm, mor: largest distance of a component from the truth; pendigits: mis-clustered test rows in percent"
)
Data = Literal["gmm", "mor", "pendigits"]


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes
    ----------
    data : {"gmm", "mor", "pendigits"}
        Which clients.
    kinds : tuple of str
        What bad clients have in place of their rows (data/contamination.py).
    shares : tuple of float
        Shares of the clients that are bad, up to below one half.
    h : float
        Distance of planted parameters from common ones.
    methods : tuple of str
        Which methods.
    reps, rounds, tol, seed, jobs
        As in the other studies.
    """

    data: Data = "gmm"
    kinds: tuple[Contamination, ...] = KINDS
    shares: tuple[float, ...] = (0.1, 0.2, 0.3)
    h: float = 0.5
    methods: tuple[str, ...] = ("fedgrem",)
    reps: int = 10
    rounds: int = 200
    tol: float = 1e-3
    seed: int = 0
    jobs: int | None = None

    def __post_init__(self) -> None:
        one_of("--data", self.data, get_args(Data))
        at_least(1, reps=self.reps, rounds=self.rounds, jobs=self.jobs)
        at_least(0, shares=min(self.shares), h=self.h, tol=self.tol)
        if max(self.shares) >= 0.5:
            raise ConfigError("half of the clients or more cannot be bad", "give --shares below 0.5")


QUICK: Mapping[str, Any] = {"reps": 2, "shares": (0.3,)}


def run(chosen: Settings, tell: Tell = silent) -> Outcome:
    """Run every share and kind of bad clients, each with and without them."""
    begin = time.perf_counter()
    kinds = (None, *chosen.kinds)
    cells = [
        (chosen, share, kind, chosen.seed + rep)
        for share, kind, rep in itertools.product(chosen.shares, kinds, range(chosen.reps))
    ]
    found = side_by_side(_errors, cells, chosen.jobs, lambda done: tell(f"{NAME} {chosen.data}", done, len(cells)))
    every = iter([found[i : i + chosen.reps] for i in range(0, len(found), chosen.reps)])
    seconds = round(time.perf_counter() - begin, 3)
    rows: list[dict[str, Any]] = []
    for share in chosen.shares:
        without = next(every)
        for kind in chosen.kinds:
            rows += _rows(chosen, share, kind, next(every), without)
    return Outcome(NAME, asdict(chosen), [row | {"seconds_all": seconds} for row in rows])


def _rows(
    chosen: Settings, share: float, kind: Contamination, among: list[dict[str, float]], without: list[dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """One for every method, of errors in all repetitions."""
    for method in chosen.methods:
        error, error_se = mean_and_error([errors[method] for errors in among])
        alone, alone_se = mean_and_error([errors[method] for errors in without])
        row: dict[str, Any] = {"data": chosen.data, "method": method, "kind": kind, "bad_percent": 100 * share}
        row |= {"error": error, "error_se": error_se, "error_without": alone, "error_without_se": alone_se}
        yield row | {"ratio": error / alone, "reps": chosen.reps}


def _errors(cell: tuple[Settings, float, Contamination | None, int]) -> dict[str, float]:
    """Error of the good clients under every method, with bad clients of a kind among them, or (None) without."""
    return (_on_writers if cell[0].data == "pendigits" else _on_planted)(*cell)


def _on_planted(chosen: Settings, share: float, kind: Contamination | None, seed: int) -> dict[str, float]:
    model: Kind = "gmm" if chosen.data == "gmm" else "mor"
    planted = planted_mixture(model, n_outliers=0, h=chosen.h, seed=seed)
    rows, ids, good = _clients(planted.rows, share, kind, seed)
    truth = replace(planted, theta=planted.theta[ids], weights=planted.weights[ids], good=good)
    fits = _fits(chosen, rows, family_of(model), len(CENTRES), seed)
    return {method: matched(fit.theta, fit.weights, truth)[0] for method, fit in fits.items()}


def _on_writers(chosen: Settings, share: float, kind: Contamination | None, seed: int) -> dict[str, float]:
    whole, test = pendigits().split(TEST_SHARE, seed=seed)
    train, ids, good = _clients(replace(whole, y=None), share, kind, seed)
    train, test = standardised(train, test.only(ids.numpy()))
    fits = _fits(chosen, train, Gaussian(train.shape[0], "full"), N_CLASSES, seed)
    known = replace(train, y=whole.only(ids.numpy()).y)
    return {method: 100 * misclustering(fit, known, test, good)[1] for method, fit in fits.items()}


def _clients(rows: Ragged, share: float, kind: Contamination | None, seed: int) -> tuple[Ragged, Tensor, Tensor]:
    """Spoil the bad clients, or leave them out: rows, who they are of, and who of them is good.  ..., [M], [M]"""
    bad = drawn_clients(rows.n_clients, round(share * rows.n_clients), seed)
    everybody = torch.arange(rows.n_clients)
    good = ~torch.isin(everybody, bad)
    if kind is None:
        return rows.only(everybody[good].numpy()), everybody[good], good[good]
    return spoiled(rows, bad.tolist(), kind, seed=seed), everybody, good


def _fits(chosen: Settings, rows: Ragged, family: Family, n_components: int, seed: int) -> dict[str, MixtureFit]:
    options: dict[str, Any] = {"rounds": chosen.rounds, "tol": chosen.tol, "seed": seed}
    return fit_methods(rows, family, n_components, chosen.methods, **options)


COLUMNS = [
    Column("data", "data"), Column("method", "method"), Column("bad_percent", "bad %", ".0f"),
    Column("kind", "kind"), Column("error", "error", ".3f"), Column("error_se", "se", ".3f"),
    Column("error_without", "without", ".3f"), Column("ratio", "ratio", ".2f"), Column("reps", "reps"),
    Column("seconds_all", "seconds, all", ".1f"),
]  # fmt: skip
