# SPDX-License-Identifier: Apache-2.0
"""How well a fit does, and how well it would have done without clusters: one model for all, and one model each."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import fedavg
from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.data.stand_ins import StandIns
from coterie.evaluate import Measured, Placed, measure_ask, measure_own_ask, place_ask, target_ask
from coterie.local import worst_if_nan
from coterie.methods.base import Score
from coterie.methods.session import Prepared, Session, has_closed_form
from coterie.models import Dense, Model
from coterie.protocol import Algorithm

__all__ = [
    "add_baselines",
    "fedavg_program",
    "measure",
    "measured_models",
    "metric",
    "overall",
    "placed",
    "score",
    "target_variance",
]

_LOCAL_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


def placed(model: Model, theta: Tensor, rows: Ragged, session: Session | None = None) -> Placed:
    """Place clients among models theta [K, P] by the loss on their rows; how certain that is takes the rows themselves."""
    found = Placed(**(session or Session()).ask(rows, place_ask(model, theta)).values)
    unknown = torch.full_like(found.margin_error, torch.nan)
    return replace(found, margin_error=unknown) if isinstance(rows, StandIns) else found


def measured_models(
    model: Model, theta: Tensor, label: Tensor, rows: Ragged, session: Session | None = None
) -> Measured:
    """Measure model number `label` [M] of theta [K, P] on each client's rows."""
    return Measured(**(session or Session()).ask(rows, measure_ask(model, theta, label)).values)


def target_variance(rows: Ragged, session: Session | None = None) -> float:
    """Variance of all rows' targets, from sums."""
    if isinstance(rows, RemoteRows):
        return float(rows.once("target variance", lambda: _variance(rows, session or Session())))
    return _variance(rows, session or Session())


def _variance(rows: Ragged, session: Session) -> float:
    """Squares about zero will do, and are asked for once more about the mean where that would cost digits."""
    got = session.ask(rows, target_ask(torch.zeros((), dtype=torch.float64)))
    n = max(int(got["n"]), 1)
    mean, square = got["sum"] / n, float(got["square"]) / n
    variance = square - float(mean) ** 2
    return variance if variance > 1e-4 * square else float(session.ask(rows, target_ask(mean))["square"]) / n


def measure(
    session: Session, made: Prepared, theta: Tensor, found: Placed, label: str
) -> tuple[list[Score], dict[str, Tensor]]:
    """Measure the method and the baselines on training rows, held-out rows and new clients.  -> scores, [M] by name"""
    train, test = _on_rows(session, made, theta, found.label)
    per_client = {"train_loss": train.loss, "rows_train": train.rows}
    if test is not None:
        per_client |= {"test_loss": test.loss, "rows_test": test.rows, "metric": metric(made, test.metric)}
    method = session.options.method
    scores = [score(session, made, (method, label), train, test, _on_newcomers(session, made, theta))]
    if session.options.baselines:
        add_baselines(session, made, scores, per_client)
    return scores, per_client


def add_baselines(session: Session, made: Prepared, scores: list[Score], per_client: dict[str, Tensor]) -> None:
    """Fit one model for all, and one model each, but for what was fitted itself; add how they do."""
    if session.options.method != "fedavg":
        _add_global(session, made, scores, per_client)
    if session.options.method != "local":
        _add_local(session, made, scores, per_client)


def score(
    session: Session, made: Prepared, name: tuple[str, str], train: Measured, test: Measured | None,
    new: tuple[Measured, Ragged] | None = None,
) -> Score:  # fmt: skip
    """Put a score together: what was measured on three kinds of rows, those of new clients together with the rows."""
    sides = [(train, made.rows), (test, made.test), new or (None, None)]
    values = [None if m is None else overall(made, m) for m, _ in sides]
    return Score(*name, *values, *(_r2(session, made.model, *side) for side in sides))


def overall(made: Prepared, measured: Measured) -> float:
    """Accuracy or root mean squared error over all rows."""
    return float(metric(made, torch.tensor(measured.mean_metric, dtype=torch.float64)))


def metric(made: Prepared, right: Tensor) -> Tensor:
    """Clients' accuracy as it is, and of squared errors the root, in the target's units.  [...]"""
    if made.model.loss == "cross_entropy":
        return right
    return right.clamp(min=0).sqrt() * made.scaling.y_scale.to(right.dtype)


def _r2(session: Session, model: Model, measured: Measured | None, rows: Ragged | None) -> float | None:
    if measured is None or rows is None or model.loss == "cross_entropy":
        return None
    variance = target_variance(rows, session)
    return 1.0 - measured.mean_metric / variance if variance > 0 else None


def _on_rows(session: Session, made: Prepared, theta: Tensor, label: Tensor) -> tuple[Measured, Measured | None]:
    """Measure on training rows, and on test rows."""
    train = measured_models(made.model, theta, label, made.rows, session)
    return train, None if made.test is None else measured_models(made.model, theta, label, made.test, session)


def _on_newcomers(session: Session, made: Prepared, theta: Tensor) -> tuple[Measured, Ragged] | None:
    """Place new clients by half of their rows, and measure on the other half, which is handed over too."""
    if made.newcomers is None:
        return None
    support, query = made.newcomers
    label = placed(made.model, theta, support, session).label
    return measured_models(made.model, theta, label, query, session), query


# -- one model for all ------------------------------------------------------------------------------------------------
def fedavg_program(session: Session, made: Prepared) -> partial[Algorithm]:
    """FedAvg with the options of the fit."""
    t = session.options.training
    return partial(
        fedavg.fedavg, model=made.model, rounds=t.rounds, step_size=made.step_size, seed=session.options.seed,
        training=made.training, decay=t.decay, weighting=t.weighting or "rows", tol=t.tol,
    )  # fmt: skip


def _add_global(session: Session, made: Prepared, scores: list[Score], per_client: dict[str, Tensor]) -> None:
    model, closed = made.model, has_closed_form(made.model)
    program = fedavg_program(session, made)
    if isinstance(model, Dense) and closed:  # l2/2 |w|^2 is what training penalises
        program = partial(fedavg.pooled_ridge, model=model, l2=max(model.l2 / 2, 1e-6))
    rounds = 1 if closed else session.options.training.rounds
    theta = session.run("one model for all", made.rows, [program], fedavg.State, rounds).states[0].theta[None]
    everyone = torch.zeros(made.rows.n_clients, dtype=torch.int64)
    train, test = _on_rows(session, made, theta, everyone)
    if test is not None:
        per_client["metric_global"] = metric(made, test.metric)
    name = "one model for all" + (" (ridge)" if closed else "")
    new = _on_newcomers(session, made, theta)
    scores.append(score(session, made, ("global", name), train, test, new))


# -- one model each ---------------------------------------------------------------------------------------------------
def _add_local(session: Session, made: Prepared, scores: list[Score], per_client: dict[str, Tensor]) -> None:
    private = _trained_local(session, made, made.rows, [_local_ridge(session, made)], "one model each")
    (train,), test = _own_on(session, private, made.model, made.rows), None
    if made.test is not None:
        (test,) = _own_on(session, private, made.model, made.test)
        per_client["metric_local"] = metric(made, test.metric)
    scores.append(score(session, made, ("local", "one model each"), train, test))


def _local_ridge(session: Session, made: Prepared) -> float:
    """Choose the local models' penalty on held-out rows, all clients together."""
    if not has_closed_form(made.model):
        return 0.0
    part, held = made.validation
    private = _trained_local(session, made, part, _LOCAL_RIDGES, None)
    measured = _own_on(session, private, made.model, held, len(_LOCAL_RIDGES))
    return _LOCAL_RIDGES[int(worst_if_nan(torch.stack([(m.loss * m.rows).sum() for m in measured])).argmin())]


def _trained_local(
    session: Session, made: Prepared, rows: Ragged, penalties: Sequence[float], phase: str | None
) -> Any:
    """Let clients train alone, with each penalty side by side; what they keep. On other machines one message says it all."""
    t = session.options.training
    together = t.rounds if isinstance(rows, RemoteRows) else 1
    programs = [
        partial(
            fedavg.local_models, model=made.model, rounds=t.rounds, step_size=made.step_size, seed=session.options.seed,
            training=replace(made.training, proximal=0.0, exact=False), decay=t.decay, l2=l2,
            together=together,
        )
        for l2 in penalties
    ]  # fmt: skip
    total = 1 if has_closed_form(made.model) else t.rounds // together
    session.run(phase, rows, programs, fedavg.LocalState, total)
    return session.engine(rows).private


def _own_on(session: Session, private: Any, model: Model, rows: Ragged, runs: int = 1) -> list[Measured]:
    """Measure the private models that clients have learnt in some runs on these rows of theirs."""
    got = session.asks(rows, {run: measure_own_ask(model) for run in range(runs)}, private)
    return [Measured(**got[run].values) for run in range(runs)]
