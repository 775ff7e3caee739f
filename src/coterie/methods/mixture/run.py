# SPDX-License-Identifier: Apache-2.0
"""From clients and options to fitted mixtures: prepare, choose, fit, compare with baselines, measure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import em
from coterie.algorithms.mixture_starts import REVEALED, MixtureStart
from coterie.algorithms.preparation import Scaling
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.engines.drive import Program, Round
from coterie.errors import ConfigError, DataError
from coterie.methods.base import Fitted, Given
from coterie.methods.mixture.fit import Choice, choose_components, fit_mixture
from coterie.methods.mixture.model import Mixtures, ready
from coterie.methods.mixture.results import EM_METHODS, of_baseline
from coterie.methods.mixture.scores import MixtureScore, row_counts, scored
from coterie.methods.session import Session, learnt_scaling, newcomers
from coterie.models.mixtures import Family, Gaussian, Regression
from coterie.protocol import Tensors

__all__ = ["check_mixture", "train_mixture"]

_BASELINES = {"global": ("pooled-em", "one mixture for all"), "local": ("local-em", "one mixture each")}
_PENALTY = 2.0  # C_lambda while components are counted; the paper's
_COUNTING = 300  # rounds at most while components are counted, from a quarter of the starts: differences are large
_NAMED = 5  # outliers that a warning names


@dataclass(frozen=True)
class _Prepared:
    """Scaled rows, and the family that is fitted to them."""

    family: Family
    scaling: Scaling
    rows: Ragged
    test: Ragged | None
    newcomers: tuple[Ragged, Ragged] | None


@dataclass(frozen=True)
class _Driven:
    """Runs programs as session of a run folder, and keeps their rounds."""

    session: Session
    rounds: dict[str, list[Round]] = field(default_factory=dict)

    def __call__(
        self, phase: str, rows: Ragged, programs: Sequence[Program], state: type, /
    ) -> tuple[list[Any], list[Tensors]]:
        rounds = self.session.options.mixture.rounds
        total = min(rounds, _COUNTING) if phase.startswith("choose") else rounds  # candidates are not led to the end
        done = self.session.run(phase, rows, programs, state, total)
        self.rounds[phase] = done.rounds
        return done.states, self.session.revealed(rows, range(len(programs)), REVEALED)


def train_mixture(session: Session, clients: Clients, given: Given) -> Fitted:
    """Prepare, choose, fit, and measure, beside baselines."""
    options, made, drive = session.options, _prepare(session, clients), _Driven(session)
    n_components, counted = _counted(drive, made, options)
    c_lambda = _number(options.mixture.c_lambda)
    fit = fit_mixture(made.rows, made.family, n_components, c_lambda=c_lambda, **_how(options), drive=drive)
    found = ready(fit, made.scaling, made.rows, session)
    found = replace(found, fit=replace(fit, choice=_in_units(fit.choice, found.shift)))
    if options.mixture.choose_by == "held-out":
        counted = _in_units(counted, found.shift)
    scores, per_client = _measure(session, made, ("mixture", f"FedGrEM, {_components(n_components)}"), found)
    if options.baselines:
        _add_baselines(drive, made, n_components, scores, per_client)
    settled = fit.rounds < options.mixture.rounds
    extra, warnings = {"counted": counted, "settled": settled}, _warnings(found, options, settled)
    return Fitted(options, clients.schema, found, scores, per_client, drive.rounds["fit"], warnings, extra)


# -- before the fit ---------------------------------------------------------------------------------------------------
def _prepare(session: Session, clients: Clients) -> _Prepared:
    """Learn the scaling from federated sums; what has unit variance by assumption keeps its units."""
    options, train, regression = session.options, clients.train, clients.schema.task == "regression"
    m, d = options.mixture, train.shape[0]
    family: Family = Regression(d, options.model.intercept, m.variance) if regression else Gaussian(d, m.covariance)
    divide = options.data.standardise and (regression or m.covariance != "unit")
    scaling = learnt_scaling(session, clients, divide=divide)
    if regression and m.variance == "unit":
        scaling = replace(scaling, y_scale=torch.ones_like(scaling.y_scale))
    if regression and not options.model.intercept:  # lines through the origin: it must stay where it is
        scaling = replace(scaling, mean=torch.zeros_like(scaling.mean), y_mean=torch.zeros_like(scaling.y_mean))

    def scaled(rows: Ragged) -> Ragged:
        return rows.to(torch.float64).scaled(scaling)

    test, new = (None if part is None else scaled(part) for part in (clients.test, clients.newcomers))
    return _Prepared(family, scaling, scaled(train), test, newcomers(new, options.seed))


def _how(options: FitOptions) -> dict[str, Any]:
    """What choosing and fitting have in common."""
    m = options.mixture
    return {
        "rounds": m.rounds, "tol": m.tol, "seed": options.seed, "start": MixtureStart(m.restarts, m.iterations),
        "reject": _number(m.reject), "penalty": m.penalty, "c_eta": m.c_eta, "kappa": m.kappa,
        "together": m.together, "robust": _number(m.robust),
        "share_weights": m.share_weights, "sparse": m.sparse, "neighbours": m.neighbours,
        "batch_size": m.batch_size,
    }  # fmt: skip


def _number(value: float | str | None) -> Any:
    """A number, infinite where there is a word for it."""
    return math.inf if isinstance(value, str) else value


def _counted(drive: _Driven, made: _Prepared, options: FitOptions) -> tuple[int, Choice | None]:
    """The number of components: as given, or chosen."""
    m = options.mixture
    if m.n_components is not None:
        return m.n_components, None
    penalty = _PENALTY if m.c_lambda is None else _number(m.c_lambda)
    candidates = range(1, min(m.max_components, made.rows.layout.n_rows) + 1)
    rough = _how(options) | {
        "rounds": min(m.rounds, _COUNTING), "start": MixtureStart(-(-m.restarts // 4), m.iterations), "tol": 10 * m.tol,
    }  # fmt: skip
    choice = choose_components(
        made.rows, made.family, candidates, by=m.choose_by, c_lambda=penalty, **rough, drive=drive
    )
    return int(choice.value), choice


def _in_units(choice: Choice | None, shift: float) -> Choice | None:
    """Held-out log-likelihoods in the columns' own units."""
    return None if choice is None else replace(choice, scores=tuple(score - shift for score in choice.scores))


# -- measuring --------------------------------------------------------------------------------------------------------
def _measure(
    session: Session, made: _Prepared, name: tuple[str, str], found: Mixtures
) -> tuple[list[MixtureScore], dict[str, Tensor]]:
    """Measure FedGrEM on training rows, held-out rows and new clients.  -> scores, [M] by name"""
    train, test, new = found.log_likelihood(made.rows, session), None, None
    per_client = {"rows_train": row_counts(made.rows), "train_log_likelihood": train}
    if made.test is not None:
        test = found.log_likelihood(made.test, session)
        per_client |= {"rows_test": row_counts(made.test), "metric": test}
        if isinstance(made.family, Regression):
            per_client["rmse"] = found.squared_errors(made.test, session).sqrt() * made.scaling.y_scale
    if made.newcomers is not None:
        support, query = made.newcomers
        own = found.adopt(support, session).weights
        placed = replace(found, fit=replace(found.of(query.names), weights=own), names=query.names)
        new = (placed, query)
    return [scored(session, name, found, made.rows, made.test, new)], per_client


def _add_baselines(
    drive: _Driven, made: _Prepared, n_components: int, scores: list[MixtureScore], per_client: dict[str, Tensor]
) -> None:
    """One mixture for all rows, and one for every client alone, in lockstep."""
    how = {k: v for k, v in _how(drive.session.options).items() if k in ("rounds", "tol", "seed", "start")}
    programs = [
        partial(em.em, family=made.family, n_components=n_components, sharing=EM_METHODS[method][0], **how)
        for method, _ in _BASELINES.values()
    ]
    states, private = drive("baselines", made.rows, programs, em.State)
    for run, (name, (method, label)) in enumerate(_BASELINES.items()):
        fit = of_baseline(method, made.family, made.rows, states[run], private[run])
        found = ready(fit, made.scaling, made.rows, drive.session)
        if made.test is not None:
            per_client[f"metric_{name}"] = found.log_likelihood(made.test, drive.session)
        new = (found, made.newcomers[1]) if name == "global" and made.newcomers is not None else None
        scores.append(scored(drive.session, (name, label), found, made.rows, made.test, new))


# -- what is refused, and what is said --------------------------------------------------------------------------------
def check_mixture(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what cannot work, before anything is written."""
    m, schema, rows = options.mixture, clients.schema, clients.train.layout.n_rows
    if schema.task == "classification":
        raise ConfigError(
            f"a mixture needs a numeric target, and '{schema.target}' has classes",
            "leave --target out to cluster rows; if the classes are numbers, add --task regression",
        )
    if len(clients.train.shape) != 1:
        raise ConfigError(f"rows of shape {clients.train.shape} are not feature vectors", "flatten them")
    if m.sparse and m.covariance == "full" and schema.target is None:
        raise ConfigError(
            "mixture.sparse is set, and it does not work with a full covariance",
            "add --set mixture.covariance=diagonal, or unit",
        )
    if m.neighbours and m.c_lambda == 0:
        raise ConfigError(
            "mixture.neighbours is set, and with mixture.c_lambda=0 there is no shrinkage towards a centre",
            "give a larger mixture.c_lambda, or leave one of the two out",
        )
    if m.n_components is not None and m.n_components > rows:
        raise DataError(f"{m.n_components} components are more than the {rows} training rows", "ask for fewer")
    choosing = [name for name in ("n_components", "c_lambda") if getattr(m, name) is None]
    if m.n_components is None and m.choose_by == "bic":
        choosing.remove("n_components")
    if choosing and int(clients.train.counts.max()) < 3:
        raise DataError(
            f"no client has 3 training rows, and mixture.{choosing[0]} is chosen on held-out rows",
            f"give it, like --set mixture.{choosing[0]}=1",
        )


def _components(r: int) -> str:
    return f"{r} component{'s' * (r > 1)}"


def _warnings(found: Mixtures, options: FitOptions, settled: bool) -> list[str]:
    out, fit, m = [], found.fit, options.mixture
    if m.tol and not settled and m.batch_size is None:
        out.append(f"not converged after {m.rounds} rounds: raise mixture.rounds or mixture.tol")
    far = torch.argsort(fit.outlier_score, descending=True)[: int(fit.outliers.sum())]
    if len(far):
        names = [f"'{name}'" for name in found.names[far.numpy()][:_NAMED].tolist()]
        more = ", ..." if len(far) > _NAMED else ""
        are = "are outliers" if len(far) > 1 else "is an outlier"
        out.append(f"{len(far)} of {len(fit.weights)} clients {are}: {', '.join(names)}{more}")
    empty = int((found.mean_weights < 1e-6).sum())
    if empty:
        out.append(f"{empty} of {len(fit.centre)} components are empty: ask for fewer")
    return out
