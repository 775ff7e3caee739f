# SPDX-License-Identifier: Apache-2.0
"""From clients and options to personal models: prepare, train (in stages, by a clock), compare with baselines, measure."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import averaging, srpfl
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.engines.drive import Program, Round, Traffic
from coterie.engines.engine_for import AnyEngine
from coterie.evaluate import measured_in, summed
from coterie.methods.base import Fitted, Given
from coterie.methods.baselines import measure_beside, run_beside
from coterie.methods.measuring import Entry, overall
from coterie.methods.personal.model import Personal, begun, copied
from coterie.methods.personal.plan import Plan, check_plan, plan, prepare_personal
from coterie.methods.personal.scores import spread
from coterie.methods.predictions import more_ask, population_of, predicted
from coterie.methods.run_tables import diverged_because
from coterie.methods.session import On, Prepared, Session
from coterie.participation import Clock, WallClock, select_participants
from coterie.protocol import Ask, Lockstep, Save

__all__ = ["check_personal", "train_personal"]

_LOOKS = 8  # at held-out rows on the way, at most: each is a message


def train_personal(session: Session, clients: Clients, given: Given) -> Fitted:
    """Prepare, train (in stages, by a clock), and measure, beside baselines."""
    options, clock = session.options, _clock(clients, session.options, given)
    made = prepare_personal(session, clients, given.module)
    how = plan(options, made, clock)
    program, rounds = _measured(how, made, session), options.training.rounds
    timed = how.clock is not None and not isinstance(how.clock, WallClock)
    done, beside = run_beside(
        session, made, program, how.state, rounds, policy=how.policy, clock=how.clock,
        apart=timed or options.personal.stragglers != "none",
    )  # fmt: skip
    took_part = _took_part(session.engine(made.rows), how.question, done.rounds)  # before others run on these rows
    found = _begun(how, made, done.states[0])
    judge, kept = found.judge_ask(), copied(beside.private)
    entry = Entry(0, judge, found.learn_ask(beside.private), more=more_ask(session, made, judge))
    outcome, scores, per_client, one = measure_beside(
        session, made, entry, (options.method, how.title), beside, kept, unknown=lambda one: _one(how, found, one)
    )
    found = replace(found, own=found.parts_in(outcome.private))
    found = replace(found, population=found.for_all(one) if how.layers else found.theta)
    told = predicted(session, made, entry, outcome, population_of(found))
    per_client |= took_part | told.per_client
    extra = {
        "spread": spread(made, options.method, per_client),
        "virtual_time": done.rounds[-1].time if timed and done.rounds else None,
        **told.extra,
    }
    warnings = _warnings(found, how, per_client["rounds"], done.rounds)
    return Fitted(options, clients.schema, found, told.of(scores), per_client, done.rounds, warnings, extra)


def check_personal(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what cannot work, before anything is written."""
    check_plan(clients, options, module=given.module, clock=_clock(clients, options, given))


def _clock(clients: Clients, options: FitOptions, given: Given) -> Clock | None:
    """The clock that is given; far away, some are faster than others without being told to be."""
    far = isinstance(clients.train, RemoteRows) and options.personal.clock is None
    return given.clock or (WallClock() if far else None)


# -- training ---------------------------------------------------------------------------------------------------------
def _measured(how: Plan, made: Prepared, session: Session) -> Program:
    """Look at held-out rows on the way, as clients would fare if training ended there; nothing is changed by it."""
    rounds = session.options.training.rounds
    step = max(1, math.ceil(rounds / _LOOKS))

    def judge(state: Any) -> dict[str, Any]:
        inner = _inner(state)
        if made.test is None or (inner.round % step and inner.round != rounds):
            return {}
        found, kept = _begun(how, made, state), copied(session.engine(made.rows).private)
        learn = On(made.rows, {0: found.learn_ask(kept)}, kept)
        traffic = Traffic()
        ask = found.judge_ask()
        ask = summed(ask) if session.options.secure else ask
        _, got = session.exchange([learn, On(made.test, {0: ask}, after=0)], traffic)
        return {"test_metric": overall(made, measured_in(got[0])), "traffic": vars(traffic)}

    return lambda state: _told(how.program(state), judge)


def _told(inner: Lockstep, judge: Callable[[Any], dict[str, Any]]) -> Lockstep:
    """Pass an algorithm on, and add to what a round says."""
    replies: Any = None
    while True:
        try:
            wanted = inner.send(replies)
        except StopIteration as end:
            return end.value
        if isinstance(wanted, Save) and "loss" in wanted.info:
            wanted = replace(wanted, info={**wanted.info, **judge(wanted.state)})
        replies = yield wanted


def _inner(state: Any) -> averaging.State:
    found: averaging.State = state.inner if isinstance(state, srpfl.State) else state
    return found


def _one(how: Plan, found: Personal, one: Tensor | None) -> Tensor | None:
    """What serves clients of which nothing is known, where that does not rest on all clients' own parts.  [1, P]"""
    theta = one if how.layers else found.theta
    return None if theta is None else theta[None]


def _begun(how: Plan, made: Prepared, state: Any) -> Personal:
    return begun(made.model, how.layers, _inner(state).theta, made.rows.names, how.fit, made.scaling)


# -- what is told -----------------------------------------------------------------------------------------------------
def _took_part(engine: AnyEngine, question: Ask, rounds: list[Round]) -> dict[str, Tensor]:
    """In how many rounds each client took part, and, with a clock that foretells, what a round took it on average.  [M]

    Who takes part is drawn by key, so that drawing again tells who did; engines whose clients can be late have counted.
    """
    clients = engine.keys
    count, total = torch.zeros(len(clients), dtype=torch.int64), torch.zeros(len(clients), dtype=torch.float64)
    asked = [r for r in rounds if r.participants]
    for done in asked:
        ask = replace(question, enough=done.info.get("enough"))
        who = select_participants(
            engine.participation, engine.clock, ask, round_=done.round, clients=clients, seed=engine.seed
        )
        count[who.answered] += 1
        times = None if engine.clock is None else engine.clock.arrivals(done.round, clients, engine.seed, ask.work)
        total += torch.nan if times is None else times
    found = {"rounds": count if engine.heard is None else engine.heard.clone()}
    if asked and bool(total.isfinite().all()):
        found["seconds"] = total / len(asked)
    return found


def _warnings(found: Personal, how: Plan, count: Tensor, rounds: list[Round]) -> list[str]:
    """What a user should know; count [M] is in how many rounds each client took part."""
    out = []
    if not bool(found.theta.isfinite().all()):
        out.append(f"the model diverged: {diverged_because(rounds)}")
    last = next((r.info["enough"] for r in reversed(rounds) if "enough" in r.info), how.n_clients)
    if last < how.n_clients:
        out.append(
            f"training ended with the fastest {last} of {how.n_clients} clients: raise training.rounds, or shorten stages"
        )
    if len(count) == 1:
        out.append("there is only one client, so nothing is shared: check the client column")
    never = int((count == 0).sum())
    if never:
        part = "fitted their personal layers" if how.layers else "adapted the model"
        out.append(f"{never} of {len(count)} clients never took part: they {part} after training")
    return out
