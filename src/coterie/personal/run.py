# SPDX-License-Identifier: Apache-2.0
"""From clients and options to personal models: prepare, train (in stages, by a clock), compare with baselines, measure."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.algorithms import averaging, srpfl
from coterie.algorithms.preparation import Scaling
from coterie.baselines import Score, add_baselines, metric, newcomers, overall, score
from coterie.config import PRIOR, FitOptions
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.data.schema import Schema
from coterie.engines.chosen import AnyEngine, engine_on
from coterie.engines.drive import Program, Round
from coterie.engines.private import Kept
from coterie.models import Model
from coterie.participation import Clock, WallClock, turn_out
from coterie.personal.measure import Distribution
from coterie.personal.model import Personal, trained
from coterie.personal.plan import Plan, check_plan, plan, prepare_personal
from coterie.personal.prior import FromPrior, check_prior, from_prior, prior_title
from coterie.phases import Phases, Prepared, Watch, prepare
from coterie.protocol import Ask, Replies, Save

__all__ = ["FittedPersonal", "check_personal", "fit_personal"]

_MEASURES = 50  # times that held-out rows are looked at on the way, about
_FAR_MEASURES = 5  # where every look is two messages
_NAMED = {"metric": "", "metric_global": "global", "metric_local": "local"}


@dataclass(frozen=True)
class FittedPersonal:
    """All that came of a fit."""

    options: FitOptions
    schema: Schema
    scaling: Scaling
    personal: Personal
    scores: list[Score]
    per_client: dict[str, Tensor]  # [M] each
    spread: dict[str, Distribution]  # by method: how its held-out metric is spread over clients
    rounds: list[Round]
    seconds: float
    timed: bool  # whether there was a clock
    warnings: list[str] = field(default_factory=list)

    @property
    def metric(self) -> str:
        """What scores count."""
        return "accuracy" if self.personal.model.loss == "cross_entropy" else "rmse"

    @property
    def virtual_time(self) -> float | None:
        """When the last round ended, by the clock."""
        return self.rounds[-1].time if self.timed and self.rounds else None


def fit_personal(
    clients: Clients,
    options: FitOptions,
    *,
    module: nn.Module | Model | None = None,
    clock: Clock | None = None,
    folder: Path | None = None,
    every: float = 2.0,
    watch: Watch | None = None,
) -> FittedPersonal:
    """Fit what the options say.

    Parameters
    ----------
    clock : Clock, optional
        What time it takes clients, in place of what the options say.
    clients, options, module, folder, every, watch
        As for `fitting.fit`.
    """
    began = time.perf_counter()
    if isinstance(clients.train, RemoteRows) and options.personal.clock is None:
        clock = clock or WallClock()  # far away, some are faster than others without being told to be
    check_personal(clients, options, module=module, clock=clock)
    phases = Phases(options, folder, every, watch)
    if options.method in PRIOR:
        return _fit_prior(phases, clients, began)
    made = prepare_personal(phases, clients, module)
    how = plan(options, made, clock)
    engine = engine_on(made.rows, participation=how.policy, clock=how.clock, seed=options.seed, store="fit")
    program = _measured(how, made, engine, options.training.rounds)
    done = phases.run("fit", made.rows, [program], how.state, options.training.rounds, engine)
    found = _personal(how, made, engine, done.states[0])
    scores, per_client = _measure(made, how.title, options, found)
    per_client |= _took_part(engine, how.question, done.rounds)
    if options.baselines:
        add_baselines(phases, made, scores, per_client)
    fitted = FittedPersonal(
        options, clients.schema, made.scaling, found, scores, per_client, _spread(made, options.method, per_client),
        done.rounds, time.perf_counter() - began, how.clock is not None and not isinstance(how.clock, WallClock),
    )  # fmt: skip
    return replace(fitted, warnings=_warnings(fitted, how))


def check_personal(
    clients: Clients, options: FitOptions, *, module: nn.Module | Model | None = None, clock: Clock | None = None
) -> None:
    """Refuse what cannot work, before anything is written."""
    if options.method in PRIOR:
        check_prior(clients, options, module=module)
    else:
        check_plan(clients, options, module=module, clock=clock)


def _fit_prior(phases: Phases, clients: Clients, began: float) -> FittedPersonal:
    """Fit linear models of clients' own."""
    options, made = phases.options, prepare(phases, clients, None)
    found = from_prior(phases, made)
    assert isinstance(found.fit, FromPrior)
    scores, per_client = _measure(made, prior_title(found.fit), options, found)
    if options.baselines:
        add_baselines(phases, made, scores, per_client)
    return FittedPersonal(
        options, clients.schema, made.scaling, found, scores, per_client, _spread(made, options.method, per_client),
        [], time.perf_counter() - began, False,
    )  # fmt: skip


# -- training ---------------------------------------------------------------------------------------------------------
def _measured(how: Plan, made: Prepared, engine: AnyEngine, rounds: int) -> Program:
    """Look at held-out rows on the way, as clients would fare if training ended there; nothing is changed by it."""
    step = max(1, rounds // (_FAR_MEASURES if isinstance(made.rows, RemoteRows) else _MEASURES))

    def judge(state: Any) -> dict[str, float]:
        inner = _inner(state)
        if made.test is None or (inner.round % step and inner.round != rounds):
            return {}
        found = _personal(how, made, engine, state)
        return {"test_metric": overall(made, found.measured(made.test, found.own))}

    return lambda state: _told(how.program(state), judge)


def _told(
    inner: Generator[Ask | Save, Replies | None, Any], judge: Callable[[Any], dict[str, float]]
) -> Generator[Ask | Save, Replies | None, Any]:
    """Pass an algorithm on, and add to what a round says."""
    replies: Replies | None = None
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


def _personal(how: Plan, made: Prepared, engine: AnyEngine, state: Any) -> Personal:
    private = engine.private if isinstance(engine.private, Kept) else engine.private.get(0, {})
    return trained(made.model, how.layers, _inner(state).theta, private, made.rows, how.fit)


# -- measuring --------------------------------------------------------------------------------------------------------
def _measure(made: Prepared, title: str, options: FitOptions, found: Personal) -> tuple[list[Score], dict[str, Tensor]]:
    """Measure personal models on training rows, held-out rows and new clients.  -> scores, [M] by name"""
    train, test, new = found.measured(made.rows, found.own), None, None
    per_client = {"train_loss": train.loss, "rows_train": train.rows}
    if made.test is not None:
        test = found.measured(made.test, found.own)
        per_client |= {"test_loss": test.loss, "rows_test": test.rows, "metric": metric(made, test.right)}
    parts = newcomers(made, options.seed)
    if parts is not None:
        support, query = parts
        new = found.measured(query, found.adapted(support)), query
    return [score(made, (options.method, title), train, test, new)], per_client


def _took_part(engine: AnyEngine, question: Ask, rounds: list[Round]) -> dict[str, Tensor]:
    """In how many rounds each client took part, and, with a clock that foretells, what a round took it on average.  [M]

    Who takes part is drawn by key, so that drawing again tells who did; engines whose clients can be late have counted.
    """
    clients = engine.keys
    count, total = torch.zeros(len(clients), dtype=torch.int64), torch.zeros(len(clients), dtype=torch.float64)
    asked = [r for r in rounds if r.participants]
    for done in asked:
        ask = replace(question, enough=done.info.get("enough"))
        who = turn_out(engine.participation, engine.clock, ask, round_=done.round, clients=clients, seed=engine.seed)
        count[who.answered] += 1
        times = None if engine.clock is None else engine.clock.arrivals(done.round, clients, engine.seed, ask.work)
        total += torch.nan if times is None else times
    found = {"rounds": count if engine.heard is None else engine.heard.clone()}
    if asked and bool(total.isfinite().all()):
        found["seconds"] = total / len(asked)
    return found


def _spread(made: Prepared, method: str, per_client: dict[str, Tensor]) -> dict[str, Distribution]:
    """How the held-out metric of every method is spread over clients."""
    if "rows_test" not in per_client or not bool((per_client["rows_test"] > 0).any()):
        return {}
    better = made.model.loss == "cross_entropy"
    return {
        name or method: Distribution.of(per_client[column], per_client["rows_test"], larger_is_better=better)
        for column, name in _NAMED.items()
        if column in per_client
    }


def _warnings(fitted: FittedPersonal, how: Plan) -> list[str]:
    out, count = [], fitted.per_client["rounds"]
    if not bool(fitted.personal.theta.isfinite().all()):
        out.append("the model diverged: lower training.step_size")
    last = next((r.info["enough"] for r in reversed(fitted.rounds) if "enough" in r.info), how.n_clients)
    if last < how.n_clients:
        out.append(
            f"training ended with the fastest {last} of {how.n_clients} clients: raise training.rounds, or shorten stages"
        )
    if len(count) == 1:
        out.append("there is only one client, so nothing is shared: check the client column")
    never = int((count == 0).sum())
    if never:
        part = "fitted their part of the model" if how.layers else "went on from the model"
        out.append(f"{never} of {len(count)} clients never took part: they {part} after training")
    return out
