# SPDX-License-Identifier: Apache-2.0
"""Linear models of outcomes, fitted to all rows by Newton's method: one for all, one for each cluster, and one each.

Numbers and classes have methods of their own (`algorithms/fedavg.py`, `algorithms/ifca.py`); counts, skewed numbers and
ordered classes are fitted here, as `compare` fits them, until nothing moves.
"""

from dataclasses import replace
from typing import Any

import torch

from coterie.algorithms.averaging import State
from coterie.algorithms.fedavg import LocalState
from coterie.algorithms.newton_ifca import Clusters, newton_ifca
from coterie.algorithms.outcome_start import first_models
from coterie.algorithms.random_effects import (
    Prior,
    adapt_effects_ask,
    as_dense,
    judge_effects_ask,
    random_effects,
    ridge_prior,
)
from coterie.methods.linear.fitting import CLASSES, problem_of
from coterie.methods.linear.structures import around, with_noise
from coterie.models import Dense
from coterie.protocol import Algorithm, Save

__all__ = ["newton_alone", "newton_clusters", "newton_one"]

_STILL = 1e-9  # a move, relative to the largest parameter, after which nothing more is expected
_LOCAL_PENALTY = 1.0  # of one model each, which others are compared with
_FIT = "fit"


def newton_one(state: State | None, *, model: Dense, rounds: int) -> Algorithm:
    """One model for all rows, by maximum likelihood (with `model.l2`: penalised).  -> State with theta [P]"""
    return (yield from _once(state, _one(model, rounds)))


def newton_clusters(
    state: State | None, *, model: Dense, n_clusters: int, starts: int, rounds: int, seed: int, drawn: bool = False
) -> Algorithm:
    """A model for each of some clusters, which are grown one at a time.  -> State with theta [K, P]

    They grow from clients' own models, or, if `drawn`, from models that are drawn as these are.
    """
    return (yield from _once(state, _clusters(model, n_clusters, starts, rounds, seed, drawn)))


def newton_alone(state: LocalState | None, *, model: Dense, rounds: int) -> Algorithm:
    """One model for each client, drawn to nothing but zero weights; clients keep it as `theta`."""
    if state is None or not state.round:
        yield from _unsaved(_alone(model, rounds))
        state = LocalState(1)
        yield Save(state)
    return state


def _once(state: State | None, program: Algorithm) -> Algorithm:
    """Run what saves nothing on the way: a run that was interrupted begins again."""
    if state is None or not state.round:
        state = State((yield from _unsaved(program)), round=1)
        yield Save(state)
    return state


def _unsaved(program: Algorithm) -> Algorithm:
    """What a program returns, without what it saves on the way: its states are of other kinds."""
    answer = None
    while True:
        try:
            wanted = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = None if isinstance(wanted, Save) else (yield wanted)


def _one(model: Dense, rounds: int) -> Algorithm:
    fit: Clusters = yield from _pooled(model, rounds)
    return as_dense(model, fit.theta[-1, 0, 0])


def _pooled(model: Dense, rounds: int) -> Algorithm:
    problem = problem_of(model)
    how: dict[str, Any] = {"problem": problem, "n_clusters": 1, "penalties": (model.l2,), "rounds": rounds}
    start = yield from first_models(problem, 1)
    return (yield from newton_ifca(None, start=start, still=_STILL, **how))


def _clusters(model: Dense, n_clusters: int, starts: int, rounds: int, seed: int, drawn: bool) -> Algorithm:
    problem = problem_of(model)
    fit: Clusters = yield from _pooled(model, rounds)
    prior: Prior = around(problem, fit, 1)
    for kind in ("diagonal", "full"):
        prior = yield from random_effects(
            None, start=prior, problem=problem, kinds=(kind,), rounds=CLASSES.rounds, tag=f"{_FIT} {kind}"
        )
    if not drawn:
        keep = judge_effects_ask(prior, problem, f"{_FIT} own", keep=0)
        yield replace(keep, fold={}, limits={})  # clients keep models of their own, from which clusters grow
    how: dict[str, Any] = {"problem": problem, "n_clusters": n_clusters, "penalties": (model.l2,), "rounds": rounds}
    if n_clusters > 1:
        fit = yield from newton_ifca(None, start=fit, starts=starts, seed=seed, drawn=prior if drawn else None, **how)
        fit = yield from newton_ifca(None, start=fit, still=_STILL, **how)
    return as_dense(model, fit.theta[-1, 0])


def _alone(model: Dense, rounds: int) -> Algorithm:
    problem = problem_of(model)
    fit: Clusters = yield from _pooled(model, rounds)
    prior = ridge_prior(problem, (_LOCAL_PENALTY,), 1, torch.ones(1, dtype=torch.float64), fit.theta[:, 0, 0])
    prior = yield from with_noise(prior, problem, f"{_FIT} alone")
    yield adapt_effects_ask(prior, problem, model)
