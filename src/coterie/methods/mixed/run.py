# SPDX-License-Identifier: Apache-2.0
"""From clients and options to a mixed model: prepare, fit, predict random effects, measure beside baselines."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from coterie.algorithms.mixed_logistic import LaplaceState, mixed_logistic
from coterie.algorithms.mixed_model import State, mixed_model
from coterie.algorithms.profiled import factor
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.engines.private import RemoteState
from coterie.errors import ConfigError, DataError, RunError
from coterie.methods.base import Fitted, Given
from coterie.methods.baselines import measure_beside, run_beside
from coterie.methods.measuring import Entry
from coterie.methods.mixed.design import MOST_EFFECTS, Design, design, slopes_of
from coterie.methods.mixed.model import ClientEffects, FromEffects, MixedModels
from coterie.methods.mixed.quantities import best, classes_found, numbers_found
from coterie.methods.personal.model import copied
from coterie.methods.personal.scores import spread
from coterie.methods.predictions import more_ask, population_of, predicted
from coterie.methods.session import Prepared, Session, model_for, prepare
from coterie.models import Dense

__all__ = ["check_mixed", "train_mixed"]

_EXPECTED = 12  # messages that it takes, mostly
_NOTHING = 1e-9  # of the target's variance that is left to rows: below, it is rounding
_SEPARATED = 1e-3  # deviance of two classes: below, every row is told


def train_mixed(session: Session, clients: Clients, given: Given) -> Fitted:
    """Fit a mixed model, and measure it beside baselines."""
    options = session.options
    made = prepare(replace(session, options=_scaled(options)), clients, None)
    assert isinstance(made.model, Dense)
    how = design(clients.schema, made.scaling, options.mixed)
    classes, diagonal = made.model.loss == "cross_entropy", options.mixed.covariance == "diagonal"
    common: dict[str, Any] = {"basis": how.basis, "units": how.units, "order": how.order, "diagonal": diagonal}
    kind: Any = LaplaceState if classes else State
    program = partial(mixed_logistic, **common) if classes else partial(mixed_model, **common, reml=options.mixed.reml)
    done, beside = run_beside(session, made, program, kind, _EXPECTED)
    state = done.states[0]
    if not state.n:
        raise RunError("no client has answered", "see that the nodes are there, and fit again")
    _check_noise(state, how, options)
    found = _models(clients, made, how, state, options)
    judge, name = found.judge_ask(), (options.method, _title(how))
    entry = Entry(0, judge, found.learn_ask(), more=more_ask(session, made, judge))
    outcome, scores, per_client, _ = measure_beside(
        session, made, entry, name, beside, copied(beside.private),
        unknown=lambda _: None if found.population is None else found.population[None],
    )  # fmt: skip
    kept = outcome.private
    found = replace(found, own=found.parts_in(kept))
    if not isinstance(kept, RemoteState) and not options.secure:
        found = replace(found, client_effects=ClientEffects(made.rows.names, kept[0]["effects"], kept[0]["deviation"]))
    told = predicted(session, made, entry, outcome, population_of(found))
    extra = {"spread": spread(made, options.method, per_client), **told.extra}
    per_client |= told.per_client
    return Fitted(
        options, clients.schema, found, told.of(scores), per_client, done.rounds, _warnings(found, state), extra
    )  # fmt: skip


def _scaled(options: FitOptions) -> FitOptions:
    """Scale columns whatever the options say: estimates do not depend on it, and sums of products are more exact."""
    return options.model_copy(update={"data": options.data.model_copy(update={"standardise": True})})


def _models(
    clients: Clients, made: Prepared, how: Design, state: State | LaplaceState, options: FitOptions
) -> MixedModels:
    """Put together what all share, as if no client had shown anything yet."""
    assert isinstance(made.model, Dense)
    diagonal, reml = options.mixed.covariance == "diagonal", options.mixed.reml
    if isinstance(state, LaplaceState):
        beta, noise, root = state.beta, 1.0, state.root
        found = classes_found(clients.schema, made.scaling, how, state, diagonal=diagonal)
    else:
        at = best(state, how, reml)
        beta, noise, root = at.beta, at.squares / at.freedom, factor(state.theta, len(how.names), diagonal)
        found = numbers_found(clients.schema, made.scaling, how, state, reml=reml, diagonal=diagonal)
    fit = FromEffects(how.names, made.model, how.basis, how.units, beta, root, torch.tensor(noise, dtype=torch.float64))
    everyone = fit.start.expand(made.rows.n_clients, -1)
    return MixedModels(
        made.model, (), fit.start, made.rows.names, everyone, fit, made.scaling, fit.start, quantities=found
    )


def _check_noise(state: State | LaplaceState, how: Design, options: FitOptions) -> None:
    """Refuse a target that columns and clients tell exactly: nothing is left to estimate errors from."""
    if isinstance(state, LaplaceState):
        return
    at, y = best(state, how, options.mixed.reml), state.plain[-2:, -1] / state.n  # mean, and mean square
    if at.squares / at.freedom < _NOTHING * float(y[1] - y[0] ** 2):
        raise DataError("columns and clients tell the target exactly", "leave out columns that are made of the target")


def _title(how: Design) -> str:
    return f"mixed model, {len(how.names)} random effect{'s' * (len(how.names) > 1)}"


def _warnings(found: MixedModels, state: State | LaplaceState) -> list[str]:
    out, q = [], found.quantities
    if state.stage < (4 if isinstance(state, LaplaceState) else 3):
        out.append("the mixed model has not converged: fewer random effects, or mixed.covariance=diagonal, may help")
    if q["left_out"]:
        names = ", ".join(q["left_out"])
        out.append(f"without a fixed effect of their own, since other columns tell the same: {names}")
    if isinstance(state, LaplaceState) and float(state.deviance) < _SEPARATED:
        out.append("columns tell the two classes apart without error: coefficients have no finite estimates")
    if q["boundary"]:
        out.append("a variance of the random effects is zero, or a correlation is 1: the model has more than rows tell")
    return out


# -- what is refused --------------------------------------------------------------------------------------------------
def check_mixed(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what cannot work, before anything is written."""
    schema = clients.schema
    if schema.task == "none":
        raise DataError("mixed needs a target to learn", "name its column with --target, or pass y")
    if schema.task == "classification" and len(schema.classes) != 2:
        raise ConfigError(
            f"mixed is for numbers and for two classes, and target '{schema.target}' has {len(schema.classes)} classes",
            "use --method shrunk; if the classes are numbers, add --task regression",
        )
    model = model_for(clients, options, given.module)
    if not isinstance(model, Dense) or not model.is_linear or not model.intercept:
        raise ConfigError("mixed is for linear models with an intercept", "leave your own model out")
    effects = len(slopes_of(schema, options.mixed)) + options.mixed.random_intercept
    if options.mixed.covariance == "full" and effects > MOST_EFFECTS:
        raise ConfigError(
            f"{effects} random effects with a full covariance are too many; the limit is {MOST_EFFECTS}",
            "name fewer mixed.slopes, or set mixed.covariance=diagonal",
        )
    counts = clients.train.counts
    there = int((counts > 0).sum())
    if there < 2:
        raise DataError("random effects need two clients with training rows", "check the client column")
    if int(counts.sum()) < schema.n_features + 3:
        raise DataError(
            f"{int(counts.sum())} training rows are too few for {schema.n_features} columns", "leave columns out"
        )
    if schema.task == "regression" and int(counts.sum()) <= effects * there:
        raise DataError(
            f"{int(counts.sum())} training rows are too few for {effects} random effects of {there} clients",
            "there must be more rows than random effects: name fewer mixed.slopes",
        )
