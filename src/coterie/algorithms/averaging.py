# SPDX-License-Identifier: Apache-2.0
"""Rounds of averaging: the server's side of every algorithm whose clients send how far a common vector moved."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.algorithms.robust import Robust, robustly
from coterie.protocol import Ask, Replies, Save

__all__ = ["State", "averaged"]


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    theta: Tensor  # [P] what all clients share
    round: int = 0
    settled: bool = False  # whether it stopped before the last round: `tol`


def averaged(
    state: State, question: Callable[[State], Ask], *, rounds: int, tol: float, robust: Robust = "none"
) -> Generator[Ask | Save, Replies | None, State]:
    """Ask, and move by the clients' mean `update`, until the last round or a relative change of at most `tol`.

    Clients also answer with `loss`, and with `n`, the rows that they have; and where it may be that they have no say, with
    `left_out`, whether that is so. `robust` says how updates are averaged: see `robust.py`.
    """
    while state.round < rounds and not state.settled:
        got = yield robustly(question(state), robust, state.theta)
        if got is None or got.n == 0 or not got["n"]:  # everybody was late or has no rows: the round is lost
            state = replace(state, round=state.round + 1)
            yield Save(state, {"events": ["nobody answered"]})
            continue
        change = float(got["update"].norm() / state.theta.norm().clamp(min=1e-12))
        theta = state.theta + got["update"]
        state = replace(state, theta=theta, round=state.round + 1, settled=bool(tol) and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), **_left_out(int(got.values.get("left_out", 0)))})
    return state


def _left_out(clients: int) -> dict[str, Any]:
    """Say how many clients had no say, if any."""
    return (
        {"left_out": clients, "events": [f"clients left out because their steps diverged: {clients}"]}
        if clients
        else {}
    )
