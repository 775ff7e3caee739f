# SPDX-License-Identifier: Apache-2.0
"""IFCA, moment descent, and FedAvg, which has one cluster: choose among starts, fit, place clients, measure."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from coterie.algorithms import fedavg, ifca, moment_descent
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.moment_descent import Descent
from coterie.algorithms.starts import Start
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.engines.drive import Round
from coterie.errors import ConfigError, DataError
from coterie.evaluate import Measured, measure_placed_ask, measured_in, place_ask, place_together_ask
from coterie.methods.base import Fitted, Given
from coterie.methods.baselines import Beside, as_placed, fedavg_program, measure_beside, run_beside
from coterie.methods.choosing import best_start, first_bound, number_of_clusters
from coterie.methods.cluster_models import ClusterModels, Counted, Descended
from coterie.methods.linear.newton import newton_clusters
from coterie.methods.measuring import Entry
from coterie.methods.predictions import Population, more_ask, predicted
from coterie.methods.run_tables import diverged_because
from coterie.methods.session import Prepared, Session, has_closed_form, model_for, prepare
from coterie.models import Dense, Model
from coterie.models.outcomes import OUTCOMES
from coterie.protocol import Algorithm, Lockstep, Replies, Stack

__all__ = ["check_clusters", "clusters_title", "ifca_program", "train_clusters"]


@dataclass(frozen=True)
class _Trained:
    """What came of training."""

    theta: Tensor  # [K, P]
    rounds: list[Round]
    beside: Beside
    chosen_run: int | None = None
    descended: Descended | None = None
    counted: str | None = None


def train_clusters(session: Session, clients: Clients, given: Given) -> Fitted:
    """Prepare, train, place clients, and measure, beside baselines."""
    options, made = session.options, prepare(session, clients, given.module)
    train = {"ifca": _train_ifca, "moment-descent": _train_moment_descent, "fedavg": _train_fedavg}[options.method]
    done = train(session, made, given.start)
    name = (options.method, clusters_title(options, len(done.theta)))
    entry = _entry(session, made, done.theta)
    outcome, scores, per_client, _ = measure_beside(
        session, made, entry, name, done.beside, unknown=lambda _: done.theta
    )
    assert outcome.learnt is not None
    found, counted = None, None
    if options.secure:
        counted = Counted(outcome.learnt["count"], int(outcome.learnt["unsure"]))
    else:
        found = as_placed(outcome.learnt, made.rows)
    models = ClusterModels(made.model, made.scaling, done.theta, clients.names, found, done.descended, counted)
    population = Population(done.theta, models.shares, parameters=done.theta.numel())
    told = predicted(session, made, entry, outcome, population)
    extra = {"chosen_run": done.chosen_run, "counted": done.counted, **told.extra}
    warnings = _warnings(models, options, diverged_because(done.rounds))
    per_client |= told.per_client
    return Fitted(options, clients.schema, models, told.of(scores), per_client, done.rounds, warnings, extra)


def _entry(session: Session, made: Prepared, theta: Tensor) -> Entry:
    """Place clients by rows that they show, and judge the model that each is placed at."""
    learn, judge = place_ask(made.model, theta), measure_placed_ask(made.model, theta)
    if session.options.secure:
        learn = place_together_ask(made.model, theta)
        return Entry(0, judge, learn, measured_in, more=more_ask(session, made, judge))
    learn = replace(learn, fold={**learn.fold, "metric": Stack()})
    return Entry(0, judge, learn, _measured, more=more_ask(session, made, judge))


def _measured(got: Replies) -> Measured:
    """What clients that are being placed say of the model that is best for them."""
    loss = got["losses"].gather(1, got["label"][:, None])[:, 0]
    return Measured(loss, got["metric"], got["rows"])


# -- training ---------------------------------------------------------------------------------------------------------
def _train_fedavg(session: Session, made: Prepared, start: Tensor | None) -> _Trained:
    rounds = session.options.training.rounds
    done, beside = run_beside(session, made, fedavg_program(session, made), fedavg.State, rounds)
    return _Trained(done.states[0].theta[None], done.rounds, beside)


def _train_ifca(session: Session, made: Prepared, start: Tensor | None) -> _Trained:
    c = session.options.clusters
    if isinstance(made.model, Dense) and made.model.loss in OUTCOMES:
        return _train_outcome(session, made, made.model)
    begin = Start(c.init, start, c.candidates, step_size=made.step_size)
    rounds: list[Round] = []
    winner = None
    if c.n_init > 1:
        begin, winner, rounds = best_start(session, made, lambda seed: ifca_program(session, made, begin, seed))
    program = ifca_program(session, made, begin, session.options.seed)
    done, beside = run_beside(session, made, program, ifca.State, session.options.training.rounds)
    last = 0 if winner is None else c.n_init  # the starts' rounds are kept, the final fit comes after them
    return _Trained(done.states[0].theta, rounds + [replace(r, run=last) for r in done.rounds], beside, winner)


def _train_outcome(session: Session, made: Prepared, model: Dense) -> _Trained:
    """Clusters of linear models of an outcome."""
    t, c, k = session.options.training, session.options.clusters, session.options.n_clusters
    assert k is not None
    program = partial(
        newton_clusters, model=model, n_clusters=k, starts=c.n_init, rounds=t.rounds, seed=session.options.seed,
        drawn=session.options.secure,
    )  # fmt: skip
    done, beside = run_beside(session, made, program, fedavg.State, t.rounds)
    return _Trained(done.states[0].theta, done.rounds, beside)


def ifca_program(session: Session, made: Prepared, begin: Start, seed: int) -> partial[Algorithm]:
    """IFCA with the options of the fit."""
    t, c, k = session.options.training, session.options.clusters, session.options.n_clusters
    assert k is not None
    quiet = session.options.secure or session.account is not None
    patience = 0 if quiet else c.patience  # a cluster is reseeded from a client's own model
    return partial(
        ifca.ifca, model=made.model, n_clusters=k, rounds=t.rounds, step_size=made.step_size,
        seed=seed, averaging=c.averaging, training=made.training, decay=t.decay, weighting=t.weighting or "clients",
        average_over=c.average_over, shared_layers=c.shared_layers, soft=c.soft,
        temperature=c.temperature, start=begin, patience=patience, resample=c.resample, tol=t.tol, robust=t.robust,
    )  # fmt: skip


def _train_moment_descent(session: Session, made: Prepared, start: Tensor | None) -> _Trained:
    t, m, k = session.options.training, session.options.moments, session.options.clusters.n_clusters
    program, how = partial(_mixed_regression, session, made, start), None
    if k is None:
        k, how = number_of_clusters(session, made, program)
    total = m.iterations + 1 + t.rounds  # the iterations, one round that groups anchors, and Phase 2
    done, beside = run_beside(session, made, program(k, t.rounds), moment_descent.State, total)
    state: moment_descent.State = done.states[0]
    if not len(state.theta):
        raise DataError(
            "no participating client has two training rows, so there are no anchors",
            "raise training.participation, or use --method ifca",
        )
    spectra = [r.info["spectrum"] for r in done.rounds if "spectrum" in r.info]
    last = torch.tensor(spectra[-1] if spectra else [], dtype=torch.float64)
    descended = Descended(made.rows.names[state.anchors.numpy()], state.local, last)
    counted = None if how is None else f"{_clusters(k)}: {how}"
    return _Trained(state.theta, done.rounds, beside, descended=descended, counted=counted)


def _mixed_regression(
    session: Session, made: Prepared, start: Tensor | None, n_clusters: int | None, rounds: int
) -> partial[Lockstep]:
    t, c, m = session.options.training, session.options.clusters, session.options.moments
    assert isinstance(made.model, Dense)
    how = m.model_dump(exclude={"anchors", "min_rows", "further", "swaps", "max_clusters"})
    return partial(
        moment_descent.mixed_regression, model=made.model, n_clusters=n_clusters, rounds=rounds,
        step_size=made.step_size, seed=session.options.seed,
        descent=Descent(
            **how, max_clusters=first_bound(m.max_clusters), anchors=Anchors(m.anchors, m.min_rows, m.further, m.swaps)
        ),
        start=start, training=made.training, averaging=c.averaging, decay=t.decay, weighting=t.weighting or "rows",
        average_over=c.average_over, shared_layers=c.shared_layers, soft=c.soft,
        temperature=c.temperature, patience=c.patience, resample=c.resample, tol=t.tol, robust=t.robust,
    )  # fmt: skip


# -- what is refused, and what is said --------------------------------------------------------------------------------
def check_clusters(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what cannot work, before anything is written."""
    module, start = given.module, given.start
    if clients.schema.task == "none":
        raise DataError(f"{options.method} needs a target to learn", "name its column with --target, or pass y")
    model = model_for(clients, options, module)
    if options.method != "fedavg":
        _check_numbers(clients, options, model)
    if options.method == "ifca":
        _check_starts(clients, options, start)
    if options.method == "moment-descent":
        _check_moments(clients, options, model, start)
    if options.training.exact and not has_closed_form(model):
        raise ConfigError("training.exact works only for linear regression", "train in steps: leave it out")
    if options.training.exact and options.clusters.averaging == "gradient" and options.method != "fedavg":
        raise ConfigError(
            "training.exact needs local training, and clusters.averaging=gradient has none",
            "leave one of them out",
        )


def _check_numbers(clients: Clients, options: FitOptions, model: Model) -> None:
    k, n_clients = options.n_clusters, clients.n_clients
    if n_clients < 2:
        raise DataError("there is only one client, so there are no groups to find", "check the client column")
    if k is not None and k > n_clients:
        raise DataError(f"{k} clusters are more than the {n_clients} clients", f"ask for at most {n_clients} clusters")
    ifca.shared_parameters(model, options.clusters.shared_layers)
    parts, most = options.clusters.resample, int(clients.train.counts.max())
    if parts > most:
        raise DataError(
            f"clusters.resample is {parts}, and the largest client has {most} training rows",
            f"give at most {most - most % 2}, or 0 to use all rows in every round",
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
            "use --method ifca; if the classes are numbers, add --task regression",
        )
    if not has_closed_form(model):
        raise ConfigError(
            "moment-descent needs a linear model", "leave hidden layers out, or use --method ifca; see model.degree"
        )
    if m.anchors is not None and m.anchors < (c.n_clusters or 1):
        raise ConfigError(
            f"{m.anchors} anchors are too few for {c.n_clusters} clusters", "raise moments.anchors, or leave it out"
        )
    if start is not None and start.shape != (model.n_parameters,):
        raise ConfigError(f"start has shape {tuple(start.shape)}", f"give one vector of {model.n_parameters} numbers")
    if int(clients.train.counts.max()) < 2:
        raise DataError("no client has two training rows, and anchors need two", "use --method ifca, or more rows")


def clusters_title(options: FitOptions, k: int) -> str:
    """What a method is called in a score."""
    if options.method == "ifca":
        return f"IFCA, {_clusters(k)}"
    if options.method == "moment-descent":
        return f"moment descent, {_clusters(k)}"
    return "FedProx" if options.training.proximal else "FedAvg"


def _clusters(k: int) -> str:
    return f"{k} cluster{'s' * (k > 1)}"


def _warnings(models: ClusterModels, options: FitOptions, because: str) -> list[str]:
    out, theta, found = [], models.theta, models.placed
    sound = theta.isfinite().all(1)
    diverged = int((~(sound if found is None else sound & found.losses.isfinite().any(0))).sum())
    if diverged:
        out.append(f"{diverged} of {len(theta)} models diverged: {because}")
    if options.method == "fedavg":
        return out
    if options.n_clusters is not None and len(theta) < options.n_clusters:
        out.append(f"found {len(theta)} clusters instead of {options.n_clusters}: too few clients can be anchors")
    if len(theta) > 1 and found is not None and not found.knows_errors:
        out.append(
            "how certain clusters are is not known: it takes rows, and site summaries hold sums of products only"
        )
    unsure, sizes = models.uncertain, models.sizes
    if unsure:
        out.append(f"uncertain cluster for {unsure} of {len(models.names)} clients: margin within two standard errors")
    empty = sizes.count(0)
    if empty:
        way_out = "ask for fewer clusters" + (", or for more starts (n_init)" if options.method == "ifca" else "")
        out.append(f"{empty} of {len(sizes)} clusters are empty: {way_out}")
    return out
