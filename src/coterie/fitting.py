# SPDX-License-Identifier: Apache-2.0
"""From clients and options to fitted models: prepare, choose among starts, fit, compare with baselines, measure."""

import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from coterie.algorithms import fedavg, ifca, moment_descent
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.moment_descent import Descent
from coterie.algorithms.preparation import Scaling
from coterie.algorithms.starts import Start
from coterie.baselines import Score, fedavg_program, measure, measured_models, placed
from coterie.choosing import best_start, first_bound, number_of_clusters
from coterie.config import PERSONAL, PRIOR, FitOptions, first_given
from coterie.data.clients import Clients
from coterie.data.schema import Schema
from coterie.engines.in_process import Round
from coterie.errors import ConfigError, DataError
from coterie.evaluate import Placed
from coterie.models import Dense, Model
from coterie.phases import Phases, Prepared, Watch, has_closed_form, model_for, prepare
from coterie.protocol import Algorithm

__all__ = ["Descended", "Fitted", "Score", "Watch", "check_fit", "fit", "measured_models", "placed"]


@dataclass(frozen=True)
class Descended:
    """What Phase 1 of moment descent left behind."""

    anchors: np.ndarray  # [A] their names
    theta: Tensor  # [A, P] their models
    spectrum: Tensor  # [L] singular values that the last iteration saw


@dataclass(frozen=True)
class Fitted:
    """All that came of a fit."""

    options: FitOptions
    schema: Schema
    model: Model
    scaling: Scaling
    theta: Tensor  # [K, P]
    names: np.ndarray  # [M]
    placed: Placed
    scores: list[Score]
    per_client: dict[str, Tensor]  # [M] each
    rounds: list[Round]
    seconds: float
    chosen_run: int | None = None
    warnings: list[str] = field(default_factory=list)
    descended: Descended | None = None
    counted: str | None = None  # how the number of clusters came about, when it was not given

    @property
    def metric(self) -> str:
        """What scores count."""
        return "accuracy" if self.model.loss == "cross_entropy" else "rmse"


@dataclass(frozen=True)
class _Trained:
    """What came of training."""

    theta: Tensor  # [K, P]
    rounds: list[Round]
    chosen_run: int | None = None
    descended: Descended | None = None
    counted: str | None = None


def fit(
    clients: Clients,
    options: FitOptions,
    *,
    module: nn.Module | Model | None = None,
    start: Tensor | None = None,
    folder: Path | None = None,
    every: float = 2.0,
    watch: Watch | None = None,
) -> Fitted:
    """Fit what the options say.

    Parameters
    ----------
    clients : Clients
        Training rows, and held-out ones where there are.
    options : FitOptions
        What to fit, and how.
    module : nn.Module or Model, optional
        The model, in place of the one that `options.model` describes.
    start : Tensor, optional
        Where to begin: [K, P] models for IFCA with `init="warm"`, [P] one model for moment descent.
    folder : Path, optional
        Where checkpoints are kept and found.
    every : float
        Seconds between checkpoints.
    watch : callable, optional
        Told of every round.
    """
    began = time.perf_counter()
    check_fit(clients, options, module=module, start=start)
    phases = Phases(options, folder, every, watch)
    made = prepare(phases, clients, module)
    train = {"ifca": _train_ifca, "moment-descent": _train_moment_descent, "fedavg": _train_fedavg}[options.method]
    done = train(phases, made, start)
    found = placed(made.model, done.theta, made.rows)
    scores, per_client = measure(phases, made, done.theta, found, _title(options, len(done.theta)))
    warnings = _warnings(done.theta, found, options)
    seconds = time.perf_counter() - began
    return Fitted(
        options, clients.schema, made.model, made.scaling, done.theta, clients.names, found,
        scores, per_client, done.rounds, seconds, done.chosen_run, warnings, done.descended, done.counted,
    )  # fmt: skip


# -- training ---------------------------------------------------------------------------------------------------------
def _train_fedavg(phases: Phases, made: Prepared, start: Tensor | None) -> _Trained:
    rounds = phases.options.training.rounds
    done = phases.run("fit", made.rows, [fedavg_program(phases, made)], fedavg.State, rounds)
    return _Trained(done.states[0].theta[None], done.rounds)


def _train_ifca(phases: Phases, made: Prepared, start: Tensor | None) -> _Trained:
    c = phases.options.clusters
    begin = Start(c.init, start, c.candidates, step_size=made.step_size)
    rounds: list[Round] = []
    winner = None
    if c.n_init > 1:
        begin, winner, rounds = best_start(phases, made, lambda seed: _ifca(phases, made, begin, seed))
    program = _ifca(phases, made, begin, phases.options.seed)
    done = phases.run("fit", made.rows, [program], ifca.State, phases.options.training.rounds)
    last = 0 if winner is None else c.n_init  # the starts' rounds are kept, the final fit comes after them
    return _Trained(done.states[0].theta, rounds + [replace(r, run=last) for r in done.rounds], winner)


def _ifca(phases: Phases, made: Prepared, begin: Start, seed: int) -> partial[Algorithm]:
    t, c, k = phases.options.training, phases.options.clusters, phases.options.n_clusters
    assert k is not None
    return partial(
        ifca.ifca, model=made.model, n_clusters=k, rounds=t.rounds, step_size=made.step_size,
        seed=seed, averaging=c.averaging, training=made.training, decay=t.decay, weighting=t.weighting or "clients",
        average_over=c.average_over, shared_layers=c.shared_layers, soft=c.soft,
        temperature=c.temperature, start=begin, patience=c.patience, resample=c.resample, tol=t.tol,
    )  # fmt: skip


def _train_moment_descent(phases: Phases, made: Prepared, start: Tensor | None) -> _Trained:
    t, m, k = phases.options.training, phases.options.moments, phases.options.clusters.n_clusters
    program, how = partial(_mixed_regression, phases, made, start), None
    if k is None:
        k, how = number_of_clusters(phases, made, program)
    total = m.iterations + 1 + t.rounds  # the iterations, one round that groups anchors, and Phase 2
    done = phases.run("fit", made.rows, [program(k, t.rounds)], moment_descent.State, total)
    state: moment_descent.State = done.states[0]
    if not len(state.theta):
        raise DataError(
            "nobody who took part has two training rows, so there are no anchors to descend from",
            "raise training.participation, or use --method ifca",
        )
    spectra = [r.info["spectrum"] for r in done.rounds if "spectrum" in r.info]
    last = torch.tensor(spectra[-1] if spectra else [], dtype=torch.float64)
    descended = Descended(made.rows.names[state.anchors.numpy()], state.local, last)
    counted = None if how is None else f"{_clusters(k)}: {how}"
    return _Trained(state.theta, done.rounds, descended=descended, counted=counted)


def _mixed_regression(
    phases: Phases, made: Prepared, start: Tensor | None, n_clusters: int | None, rounds: int
) -> partial[Algorithm]:
    t, c, m = phases.options.training, phases.options.clusters, phases.options.moments
    assert isinstance(made.model, Dense)
    how = m.model_dump(exclude={"anchors", "min_rows", "further", "swaps", "max_clusters"})
    return partial(
        moment_descent.mixed_regression, model=made.model, n_clusters=n_clusters, rounds=rounds,
        step_size=made.step_size, seed=phases.options.seed,
        descent=Descent(
            **how, max_clusters=first_bound(m.max_clusters), anchors=Anchors(m.anchors, m.min_rows, m.further, m.swaps)
        ),
        start=start, training=made.training, averaging=c.averaging, decay=t.decay, weighting=t.weighting or "rows",
        average_over=c.average_over, shared_layers=c.shared_layers, soft=c.soft,
        temperature=c.temperature, patience=c.patience, resample=c.resample, tol=t.tol,
    )  # fmt: skip


# -- what is refused, and what is said --------------------------------------------------------------------------------
def check_fit(
    clients: Clients, options: FitOptions, *, module: nn.Module | Model | None = None, start: Tensor | None = None
) -> None:
    """Refuse what cannot work, before anything is written."""
    if options.mixture.n_components is not None:
        raise ConfigError(
            f"mixture.n_components is set, and {options.method} has no components",
            "use --method mixture; groups of clients are counted by --clusters",
        )
    for group, others in (("personal", [name for name in PERSONAL if name not in PRIOR]), ("prior", list(PRIOR))):
        own = first_given(options, group)
        if own is not None:
            raise ConfigError(
                f"{group}.{own} is set, and {options.method} has no personal models",
                f"use --method {' or '.join(others)}",
            )
    if clients.schema.task == "none":
        raise DataError(f"{options.method} needs a target to learn", "name its column with --target, or pass y")
    model = model_for(clients, options, module)
    if options.method != "fedavg":
        _check_clusters(clients, options, model)
    if options.method == "ifca":
        _check_starts(clients, options, start)
    if options.method == "moment-descent":
        _check_moments(clients, options, model, start)
    if options.training.exact and not has_closed_form(model):
        raise ConfigError("training.exact is a closed form for linear regression", "train in steps: leave it out")
    if options.training.exact and options.clusters.averaging == "gradient" and options.method != "fedavg":
        raise ConfigError(
            "training.exact is about local training, and with clusters.averaging=gradient there is none",
            "leave one of them out",
        )


def _check_clusters(clients: Clients, options: FitOptions, model: Model) -> None:
    k, n_clients = options.n_clusters, clients.n_clients
    if n_clients < 2:
        raise DataError("there is only one client, so there are no groups to find", "check the client column")
    if k is not None and k > n_clients:
        raise DataError(f"{k} clusters are more than the {n_clients} clients", f"ask for at most {n_clients} clusters")
    ifca.shared_parameters(model, options.clusters.shared_layers)
    parts, most = options.clusters.resample, int(clients.train.counts.max())
    if parts > most:
        raise DataError(
            f"no client has training rows for {parts} parts, of which each round takes two: the largest has {most}",
            f"ask for clusters.resample of at most {most - most % 2}; all rows in every round are 0",
        )


def _check_starts(clients: Clients, options: FitOptions, start: Tensor | None) -> None:
    c, small = options.clusters, int(clients.train.counts.min())
    if (c.init == "warm") != (start is not None):
        raise ConfigError(
            f"init is '{c.init}' and start models are {'not ' if start is None else ''}given",
            "warm starts are for Python: IFCA(init='warm', start=theta)",
        )
    if c.n_init > 1 and small < 2:
        name = clients.names[int(clients.train.counts.argmin())]
        raise DataError(
            f"client '{name}' has {small} training row; several starts are compared on held-out rows and need 2",
            "drop small clients with --min-rows 2, or use one start",
        )


def _check_moments(clients: Clients, options: FitOptions, model: Model, start: Tensor | None) -> None:
    c, m = options.clusters, options.moments
    if clients.schema.task != "regression":
        raise ConfigError(
            f"moment-descent is for regression, and target '{clients.schema.target}' has classes",
            "use --method ifca; numbers that were taken for classes need --task regression",
        )
    if not has_closed_form(model):
        raise ConfigError(
            "moment-descent needs a linear model", "leave hidden layers out, or use --method ifca; see model.degree"
        )
    if c.n_init > 1 or c.init != "spread":
        word = f"n_init={c.n_init}" if c.n_init > 1 else f"init={c.init}"
        raise ConfigError(f"moment-descent makes its own start, and clusters.{word} is for ifca", "leave it out")
    if m.anchors is not None and m.anchors < (c.n_clusters or 1):
        raise ConfigError(
            f"{m.anchors} anchors cannot lead to {c.n_clusters} clusters", "raise moments.anchors, or leave it out"
        )
    if start is not None and start.shape != (model.n_parameters,):
        raise ConfigError(
            f"start has shape {tuple(start.shape)}", f"give one model of {model.n_parameters} numbers, where all begin"
        )
    if int(clients.train.counts.max()) < 2:
        raise DataError("no client has two training rows, and anchors need two", "use --method ifca, or more rows")


def _title(options: FitOptions, k: int) -> str:
    if options.method == "ifca":
        return f"IFCA, {_clusters(k)}"
    if options.method == "moment-descent":
        return f"moment descent, {_clusters(k)}"
    return "FedProx" if options.training.proximal else "FedAvg"


def _clusters(k: int) -> str:
    return f"{k} cluster{'s' * (k > 1)}"


def _warnings(theta: Tensor, found: Placed, options: FitOptions) -> list[str]:
    out = []
    diverged = int((~(theta.isfinite().all(1) & found.losses.isfinite().any(0))).sum())
    if diverged:
        out.append(f"{diverged} of {len(theta)} models diverged: lower training.step_size")
    if options.method == "fedavg":
        return out
    if options.n_clusters is not None and len(theta) < options.n_clusters:
        out.append(f"there are {len(theta)} clusters and not {options.n_clusters}: so few clients could be anchors")
    unsure = int((~found.certain).sum())
    if unsure:
        out.append(
            f"{unsure} of {len(found.label)} clients could as well belong to another cluster: margin within noise"
        )
    sizes = torch.bincount(found.label, minlength=len(theta))
    empty = int((sizes == 0).sum())
    if empty:
        way_out = "ask for fewer clusters" + (", or for more starts (n_init)" if options.method == "ifca" else "")
        out.append(f"{empty} of {len(sizes)} clusters ended empty: {way_out}")
    return out
