# SPDX-License-Identifier: Apache-2.0
"""From clients, options and a budget to models: prepare, train and measure, every question from one account.

Nothing is asked that the plan has no noise for: no baselines, no scores on training rows where there are held-out ones, no
cross-validation, no scores of single clients.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms import averaging, fedavg, ifca
from coterie.algorithms.preparation import Scaling, steepness
from coterie.algorithms.private_k_means import Begun, private_start
from coterie.algorithms.private_moments import Spread, private_spread
from coterie.algorithms.private_rounds import State, privately
from coterie.algorithms.private_scaling import private_scaling
from coterie.algorithms.random_effects import Prior, ridge_prior
from coterie.algorithms.starts import Start
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.engines.drive import Round
from coterie.evaluate import measure_placed_ask, place_together_ask
from coterie.methods.base import Fitted, Given, Score
from coterie.methods.baselines import fedavg_program
from coterie.methods.cluster_models import ClusterModels, Counted
from coterie.methods.clusters import clusters_title, ifca_program
from coterie.methods.effects import EffectModels, FromPrior
from coterie.methods.linear.fitting import problem_of
from coterie.methods.measuring import Entry, metric
from coterie.methods.personal.model import begun
from coterie.methods.personal.plan import passes, plan, shared_parameters
from coterie.methods.private.plan import FAINT, PlannedQuestions, delta_of, planned, starts_privately
from coterie.methods.session import On, Prepared, Session, model_for, newcomers
from coterie.models import Dense, Model
from coterie.participation import Everyone, Lots, Participation
from coterie.privacy.account import Account, run_secret
from coterie.protocol import Ask, Noise, Sum, slot

__all__ = ["scaled_privately", "shares", "train_private", "with_account"]

_CAP = 2.0  # a client's mean squared error, in units of the target's variance: who is worse counts as that
_PENALTY = 1.0  # of local models, when nobody says


def with_account(session: Session, clients: Clients) -> Session:
    """The session with an account of its budget, which a run that is continued finds again."""
    options, folder = session.options, session.folder
    assert options.privacy.epsilon is not None
    here = folder is not None and not isinstance(clients.train, RemoteRows)
    path = None if folder is None else folder / "account.json"
    account = Account(options.privacy.epsilon, delta_of(clients, options), path, replays=here)
    return replace(session, account=account, secret=run_secret(folder) if here else None, every=0.0)


def shares(clients: Clients, options: FitOptions, given: Given) -> PlannedQuestions:
    """What the budget is spent on; one of which nothing useful comes is refused."""
    model = model_for(clients, options, given.module)
    return planned(clients, options, model, shared_parameters(options, model))


def train_private(session: Session, clients: Clients, given: Given) -> Fitted:
    """Fit with a budget."""
    options, asked = session.options, shares(clients, session.options, given)
    made = _prepare(session, clients, given, asked)
    family = {"fedavg": _one_model, "ifca": _clusters, "shrunk": _shrunk, "local": _local}
    fitted = family.get(options.method, _personal)(session, clients, made, given, asked)
    assert session.account is not None
    return replace(fitted, extra={**fitted.extra, "privacy": session.account.told()}, warnings=_warnings(asked))


def _warnings(asked: PlannedQuestions) -> list[str]:
    if asked.signal >= FAINT:
        return []
    return [
        f"much of the models is noise: all that clients can say is {asked.signal:.1f} times as long as the noise in it"
    ]


def _prepare(session: Session, clients: Clients, given: Given, asked: PlannedQuestions) -> Prepared:
    """Scale columns, and take a step size that suits them: curvatures of clients are not asked for."""
    options, t = session.options, session.options.training
    model = model_for(clients, options, given.module)
    scaling = scaled_privately(session, clients, asked.scaling, asked.louder)

    def scaled(rows: Ragged) -> Ragged:
        return rows.scaled(scaling).to(model.dtype)

    how = passes(options, t)
    test, new = (None if part is None else scaled(part) for part in (clients.test, clients.newcomers))
    step_size = t.step_size or _step_size(model)
    shown = newcomers(new, options.seed)
    return Prepared(model, scaling, scaled(clients.train), test, shown, how, step_size, options.seed)


def scaled_privately(session: Session, clients: Clients, multiplier: float | None, louder: float) -> Scaling:
    """Means and scales of the columns, with noise; columns stay as they are where there is nothing to spend on it."""
    shape = clients.train.shape
    if multiplier is None:
        nothing, one = torch.zeros(shape, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        return Scaling(nothing, nothing, torch.ones_like(nothing), torch.zeros_like(one), one)
    program = partial(
        private_scaling, shape=shape, real_target=clients.schema.task == "regression", multiplier=multiplier,
        n_clients=clients.n_clients, louder=louder,
    )  # fmt: skip
    found: Scaling = session.run("prepare", clients.train, [program], Scaling, 1).states[0]
    return found


def _step_size(model: Model) -> float:
    """Of linear models, what standardised columns allow whichever way they are correlated."""
    if not isinstance(model, Dense) or not model.is_linear:
        return 0.1
    return steepness(model, float(model.sizes[0] + model.intercept))


# -- training ---------------------------------------------------------------------------------------------------------
def _run_rounds(
    session: Session, made: Prepared, asked: PlannedQuestions, program: Any, state: Any
) -> tuple[Any, list[Round]]:
    """Train in rounds with noise.  -> the algorithm's last state, and the rounds"""
    assert asked.rounds is not None
    policy: Participation = Everyone()
    if asked.rounds.sampling < 1:
        secret = keys.new_secret() if session.secret is None else session.secret.hex()
        policy = Lots(asked.rounds.sampling, secret)
    hidden: Any = partial(privately, program=program, rounds=asked.rounds)
    total = session.options.training.rounds
    done = session.run("fit", made.rows, [hidden], State[state], total, policy=policy)
    return done.states[0].inner, done.rounds


def _one_model(session: Session, clients: Clients, made: Prepared, given: Given, asked: PlannedQuestions) -> Fitted:
    last, rounds = _run_rounds(session, made, asked, fedavg_program(session, made), fedavg.State)
    return _with_models(session, clients, made, asked, last.theta[None], rounds)


def _clusters(session: Session, clients: Clients, made: Prepared, given: Given, asked: PlannedQuestions) -> Fitted:
    options = session.options
    begin = Start("warm" if given.start is not None else "random", given.start)
    if given.start is None and starts_privately(options, made.model):
        assert asked.start is not None
        assert options.n_clusters is not None
        program = partial(
            private_start, model=made.model, n_clusters=options.n_clusters, multiplier=asked.start,
            n_clients=clients.n_clients, step_size=made.step_size, seed=options.seed, louder=asked.louder,
        )  # fmt: skip
        found: Begun = session.run("start", made.rows, [program], Begun, 1, policy=Everyone()).states[0]
        begin = Start("warm", found.theta)
    last, rounds = _run_rounds(session, made, asked, ifca_program(session, made, begin, options.seed), ifca.State)
    return _with_models(session, clients, made, asked, last.theta, rounds)


def _with_models(
    session: Session, clients: Clients, made: Prepared, asked: PlannedQuestions, theta: Tensor, rounds: list[Round]
) -> Fitted:
    """Let clients choose among the models, and measure these; how many choose each has noise."""
    options = session.options
    entry = Entry(0, measure_placed_ask(made.model, theta), place_together_ask(made.model, theta))
    name = (options.method, clusters_title(options, len(theta)))
    score, counted, _ = _measure(session, made, asked, entry, name, None, count=len(theta) > 1)
    sizes = torch.tensor([clients.n_clients]) if counted is None else counted.clamp(min=0).round().to(torch.int64)
    models = ClusterModels(made.model, made.scaling, theta, clients.names, None, None, Counted(sizes, 0))
    return Fitted(options, clients.schema, models, [score], _rows(made), rounds)


def _personal(session: Session, clients: Clients, made: Prepared, given: Given, asked: PlannedQuestions) -> Fitted:
    """Personal layers and models stay with clients; what all share has noise."""
    options = session.options
    how = plan(options, made, None)
    last, rounds = _run_rounds(session, made, asked, how.program, averaging.State)
    found = begun(made.model, how.layers, last.theta, made.rows.names, how.fit, made.scaling)
    private = session.engine(made.rows).private
    entry = Entry(0, found.judge_ask(), found.learn_ask(private))
    score, _, kept = _measure(session, made, asked, entry, (options.method, how.title), private)
    found = replace(found, own=found.parts_in(kept), population=None if how.layers else found.theta)
    return Fitted(options, clients.schema, found, [score], _rows(made), rounds, extra={"spread": {}})


def _shrunk(session: Session, clients: Clients, made: Prepared, given: Given, asked: PlannedQuestions) -> Fitted:
    assert asked.moments is not None
    assert isinstance(made.model, Dense)
    enough = int((made.rows.counts > made.model.n_parameters).sum())
    program = partial(
        private_spread, model=made.model, multiplier=asked.moments, n_clients=max(enough, 1), louder=asked.louder
    )
    found: Spread = session.run("fit", made.rows, [program], Spread, 1).states[0]
    root, noise = torch.diag(found.variance.sqrt()), torch.tensor([[found.noise]], dtype=torch.float64)
    return _effects(session, clients, made, asked, Prior(found.mean[None, None], root[None, None], noise), "diagonal")


def _local(session: Session, clients: Clients, made: Prepared, given: Given, asked: PlannedQuestions) -> Fitted:
    assert isinstance(made.model, Dense)
    penalty = session.options.prior.penalty or _PENALTY
    prior = ridge_prior(problem_of(made.model), (penalty,), 1, torch.ones(1, dtype=torch.float64))
    return _effects(session, clients, made, asked, prior, penalty)


def _effects(
    session: Session, clients: Clients, made: Prepared, asked: PlannedQuestions, prior: Prior, setting: float | str
) -> Fitted:
    """Every client makes its model of the prior and its own rows, and keeps it."""
    options = session.options
    assert isinstance(made.model, Dense)
    fit = FromPrior(options.method, {"prior" if isinstance(setting, str) else "penalty": setting}, prior, made.model)
    everyone = fit.start.expand(clients.n_clients, -1)
    found = EffectModels(made.model, (), fit.start, made.rows.names, everyone, fit, made.scaling, fit.start)
    entry = Entry(0, found.judge_ask(), found.learn_ask())
    title = "shrunk models" if options.method == "shrunk" else "one model each"
    score, _, kept = _measure(session, made, asked, entry, (options.method, title), None)
    found = replace(found, own=found.parts_in(kept))
    return Fitted(options, clients.schema, found, [score], _rows(made), extra={"spread": {}})


# -- measuring --------------------------------------------------------------------------------------------------------
def _measure(
    session: Session, made: Prepared, asked: PlannedQuestions, entry: Entry, name: tuple[str, str], private: Any, *,
    count: bool = False,
) -> tuple[Score, Tensor | None, Any]:  # fmt: skip
    """Measure on held-out rows, or training rows where there are none, and on rows of new clients.

    -> score, clients of each cluster if these are counted, and what clients keep
    """
    assert asked.measure is not None
    assert entry.learn is not None
    first = {entry.run: replace(entry.learn, fold={}, limits={})}
    if count:
        first[entry.run] = _counting(entry.learn, asked.measure)
    judge, at = _judging(made, entry.judge, asked.measure), slot(entry.run, 1)
    parts = {"train": On(made.rows, first, private)}
    if made.test is not None:
        parts["test"] = On(made.test, {at: judge}, after=0)
    else:
        parts["train"] = On(made.rows, {**first, at: judge}, private)
    if made.newcomers is not None:
        shown, judged = made.newcomers
        parts["shown"] = On(shown, {entry.run: replace(entry.learn, fold={}, limits={})})
        parts["new"] = On(judged, {at: judge}, after=len(parts) - 1)
    answered = dict(zip(parts, session.exchange(list(parts.values())), strict=True))
    values: dict[str, float] = {}
    for side, got in answered.items():
        if at in got.replies and got.replies[at].values:
            there = max(int((parts[side].rows.counts > 0).sum()), 1)
            values[side] = _value(made, got.replies[at]["metric"] / there)
    sizes = answered["train"][entry.run]["count"] if count else None
    score = Score(*name, values.get("train"), values.get("test"), values.get("new"))
    return score, sizes, answered["train"].private


def _judging(made: Prepared, ask: Ask, multiplier: float) -> Ask:
    """Every client's metric, bounded: shares of right rows are at most 1."""
    bound = _CAP if made.model.loss == "squared" else 1.0
    noise = Noise(multiplier, {"metric": bound}, {"metric": 1.0}, purpose="scores")
    return replace(ask, fold={"metric": Sum()}, noise=noise, limits={})


def _counting(ask: Ask, multiplier: float) -> Ask:
    noise = Noise(multiplier, {"count": 1.0}, {"count": 1.0}, purpose="sizes of clusters")
    return replace(ask, fold={"count": Sum()}, noise=noise, limits={})


def _value(made: Prepared, mean: Tensor) -> float:
    """As a score, within what it can be: clients count alike."""
    high = _CAP if made.model.loss == "squared" else 1.0
    return float(metric(made, mean.clamp(0.0, high).to(torch.float64)))


def _rows(made: Prepared) -> dict[str, Tensor]:
    """What nodes tell when a run begins, and no noise hides."""
    rows = {"rows_train": made.rows.counts}
    return rows if made.test is None else rows | {"rows_test": made.test.counts}
