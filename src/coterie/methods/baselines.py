# SPDX-License-Identifier: Apache-2.0
"""How well a fit would have done otherwise: one model for all, and one model each, which are fitted beside the method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import fedavg
from coterie.data.draws import VALIDATION
from coterie.data.ragged import Ragged
from coterie.data.remote import RemoteRows
from coterie.data.stand_ins import StandIns
from coterie.engines.drive import Finished, Program
from coterie.evaluate import (
    Measured,
    Placed,
    measure_ask,
    measure_own_ask,
    measure_placed_ask,
    place_ask,
    residual_products_ask,
)  # fmt: skip
from coterie.methods.base import Score
from coterie.methods.linear.newton import newton_alone, newton_one
from coterie.methods.measuring import Entry, Outcome, measure, metric, score
from coterie.methods.session import Phase, Prepared, Session, has_closed_form
from coterie.models import Dense, Model
from coterie.models.outcomes import OUTCOMES
from coterie.participation import Clock, Participation
from coterie.protocol import Replies

__all__ = [
    "Beside",
    "as_placed",
    "fedavg_program",
    "measure_beside",
    "measured_models",
    "placed",
    "run_beside",
    "run_with_baselines",
]

_LOCAL_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
_LABELS = {"global": "one model for all", "local": "one model each"}
_GLOBAL = 1 << 9  # the run as which one model for all is measured; as such it has left nothing with clients


def placed(model: Model, theta: Tensor, rows: Ragged, session: Session | None = None) -> Placed:
    """Place clients among models theta [K, P] by the loss on their rows."""
    return as_placed((session or Session()).ask(rows, place_ask(model, theta)), rows)


def as_placed(got: Replies, rows: Ragged) -> Placed:
    """What clients said when they were placed by these rows; of rows made of sums, errors of margins are not known."""
    found = Placed(**{name: value for name, value in got.values.items() if name != "metric"})
    return replace(found, margin_error=found.margin_error * torch.nan) if isinstance(rows, StandIns) else found


def measured_models(
    model: Model, theta: Tensor, label: Tensor, rows: Ragged, session: Session | None = None
) -> Measured:
    """Measure model number `label` [M] of theta [K, P] on each client's rows."""
    return Measured(**(session or Session()).ask(rows, measure_ask(model, theta, label)).values)


# -- fitting ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Beside:
    """Baselines that were fitted beside a method.

    Attributes
    ----------
    private : dict or RemoteState
        What clients keep of all runs, by their numbers; that of the method is 0.
    theta : Tensor or None
        [P] one model for all; None where it has not been fitted.
    local : int or None
        The run that has left every client's own model with it.
    """

    private: Any = None
    theta: Tensor | None = None
    local: int | None = None


def fedavg_program(session: Session, made: Prepared) -> Program:
    """FedAvg with the options of the fit; of outcomes, Newton's method."""
    t = session.options.training
    if isinstance(made.model, Dense) and made.model.loss in OUTCOMES:
        return partial(newton_one, model=made.model, rounds=t.rounds)
    return partial(
        fedavg.fedavg, model=made.model, rounds=t.rounds, step_size=made.step_size, seed=session.options.seed,
        training=made.training, decay=t.decay, weighting=t.weighting or "rows", tol=t.tol, robust=t.robust,
    )  # fmt: skip


def run_beside(
    session: Session, made: Prepared, program: Program, state: Any, total: int, *, policy: Participation | None = None,
    clock: Clock | None = None, apart: bool = False,
) -> tuple[Finished, Beside]:  # fmt: skip
    """Run a method as the phase "fit", and baselines beside it, so that they share its messages.

    Parameters
    ----------
    program, state, total
        The method's, and how many rounds are expected.
    policy, clock
        Who takes part in the method's rounds.
    apart : bool
        Whether that is not for baselines; they are then fitted when they are measured.
    """
    everyone = session.options.training.participation == 1  # else own models, which need everyone, are fitted later
    names = [name for name in _wanted(session) if not apart and (everyone or name == "global")]
    programs, states = [program, *(_program(session, made, name) for name in names)], [state, *map(_state(made), names)]
    done = session.run("fit", made.rows, programs, states, total, policy=policy, clock=clock)
    found = _taken(Beside(), session, made, names, done.states[1:], first=1)
    return replace(done, rounds=done.rounds_of(0)), found


def run_with_baselines(session: Session, made: Prepared, phase: Phase) -> tuple[Finished, Beside]:
    """Run a method's phase on rows of its own, and baselines beside it on training rows, unless not everyone takes part."""
    names = _wanted(session) if session.options.training.participation == 1 else []
    if not names:
        return session.run_all([phase])[0], Beside()
    done, other = session.run_all([phase, _phase(session, made, names)])
    return done, _taken(Beside(), session, made, names, other.states, first=0)


def _phase(session: Session, made: Prepared, names: Sequence[str]) -> Phase:
    """Baselines by themselves."""
    programs, states = [_program(session, made, name) for name in names], [*map(_state(made), names)]
    total = 2 if has_closed_form(made.model) else session.options.training.rounds
    return Phase("baselines" if len(names) > 1 else _LABELS[names[0]], made.rows, programs, states, total)


def _taken(
    found: Beside, session: Session, made: Prepared, names: Sequence[str], states: Sequence[Any], first: int
) -> Beside:
    """Note what has been fitted as the runs from `first` on."""
    runs = {name: first + at for at, name in enumerate(names)}
    if "global" in runs:
        found = replace(found, theta=states[runs["global"] - first].theta)
    return replace(found, private=session.engine(made.rows).private, local=runs.get("local"))


def _wanted(session: Session) -> list[str]:
    """What the options ask for, but for what is fitted itself."""
    itself = {"fedavg": "global", "local": "local"}.get(session.options.method)
    return [name for name in _LABELS if session.options.baselines and name != itself]


def _program(session: Session, made: Prepared, name: str) -> Program:
    model, seed, t = made.model, session.options.seed, session.options.training
    if isinstance(model, Dense) and model.loss in OUTCOMES:
        return partial(newton_one if name == "global" else newton_alone, model=model, rounds=t.rounds)
    if isinstance(model, Dense) and has_closed_form(model):
        if name == "global":  # l2/2 |w|^2 is what training penalises
            return partial(fedavg.pooled_ridge, model=model, l2=max(model.l2 / 2, 1e-6))
        return partial(fedavg.local_ridge, model=model, penalties=_LOCAL_RIDGES, share=VALIDATION, seed=seed)
    if name == "global":
        return fedavg_program(session, made)
    return partial(
        fedavg.local_models, model=model, rounds=t.rounds, step_size=made.step_size, seed=seed,
        training=replace(made.training, proximal=0.0, exact=False), decay=t.decay,
        together=t.rounds if isinstance(made.rows, RemoteRows) else 1,
    )  # fmt: skip


def _state(made: Prepared) -> Callable[[str], type]:
    """The types of the baselines' states, by name."""
    local = fedavg.RidgeState if has_closed_form(made.model) else fedavg.LocalState
    return {"global": fedavg.State, "local": local}.__getitem__


# -- measuring --------------------------------------------------------------------------------------------------------
def measure_beside(
    session: Session, made: Prepared, entry: Entry, name: tuple[str, str], beside: Beside, private: Any = None, *,
    unknown: Callable[[Tensor | None], Tensor | None] | None = None,
) -> tuple[Outcome, list[Score], dict[str, Tensor], Tensor | None]:  # fmt: skip
    """Measure a method and the baselines, in one message if they were fitted together.

    -> its outcome, scores, [M] by name, and [P] one model for all where that is a baseline

    Parameters
    ----------
    entry, name
        The method, and what its score is called.
    beside : Beside
        The baselines that have been fitted; others are now.
    private : dict or RemoteState, optional
        What clients keep of the method, in place of what `beside` has.
    unknown : callable, optional
        Of [P] one model for all, makes the models [K, P] that serve clients of which nothing is known, in some shares.
    """
    kept, later = beside.private if private is None else private, _later(session, made, beside)
    mixed = None if unknown is None or made.model.loss != "squared" else unknown(later.theta)
    if mixed is not None:
        entry = replace(entry, mixed=residual_products_ask(made.model, mixed))
    entries = {"": entry}
    if later.theta is not None:
        entries["global"] = Entry(_GLOBAL, measure_placed_ask(made.model, later.theta[None]))
    own = {} if later.local is None else {"local": Entry(later.local, measure_own_ask(made.model), newcomers=False)}
    apart = later.private is not beside.private
    alone = _measured(session, made, own, later.private) if apart and own else {}
    found = (
        _measured(session, made, entries if apart else entries | own, kept) | alone
    )  # last: its state is asked again
    names = {"": name} | {which: (which, _label(made, which)) for which in _LABELS}
    per_client = _rows_known(made) if session.options.secure else _per_client(made, found[""])
    for which in _LABELS:
        if not session.options.secure and which in found and (test := found[which].test) is not None:
            per_client[f"metric_{which}"] = metric(made, test.metric)
    return found[""], [score(made, names[which], one) for which, one in found.items()], per_client, later.theta


def _measured(session: Session, made: Prepared, entries: dict[str, Entry], private: Any) -> dict[str, Outcome]:
    return dict(zip(entries, measure(session, made, list(entries.values()), private), strict=True))


def _later(session: Session, made: Prepared, beside: Beside) -> Beside:
    """Fit baselines that could not run beside the method: together, or one after the other where not all take part."""
    lacking = {"global": beside.theta is None, "local": beside.local is None}
    names = [name for name in _wanted(session) if lacking[name]]
    everyone = session.options.training.participation == 1
    for some in [names] if everyone and names else [[name] for name in names]:
        (done,) = session.run_all([_phase(session, made, some)])
        beside = _taken(beside, session, made, some, done.states, first=0)
    return beside


def _per_client(made: Prepared, found: Outcome) -> dict[str, Tensor]:
    """What was measured of every client.  [M] each"""
    per_client = {"train_loss": found.train.loss, "rows_train": found.train.rows}
    if found.test is None:
        return per_client
    return per_client | {
        "test_loss": found.test.loss, "rows_test": found.test.rows, "metric": metric(made, found.test.metric),
    }  # fmt: skip


def _rows_known(made: Prepared) -> dict[str, Tensor]:
    """What is known of every client without asking.  [M] each"""
    rows = {"rows_train": made.rows.counts}
    return rows if made.test is None else rows | {"rows_test": made.test.counts}


def _label(made: Prepared, name: str) -> str:
    return _LABELS[name] + (" (ridge)" if name == "global" and has_closed_form(made.model) else "")
