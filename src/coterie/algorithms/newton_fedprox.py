# SPDX-License-Identifier: Apache-2.0
"""FedProx (Li et al., MLSys 2020) by Newton's method: clients, each held near a common model, on average leave it as it is.

A client minimises the mean loss of its rows and s/2 |w - m|^2, and the server averages by rows. With a large s that is the
model of all rows together; with a small one, the mean of local models. The fixed point is found from sums over clients:
exactly and at once for regression.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem, curves
from coterie.protocol import Algorithm, Ask, Block, Save, Sum, Tensors, answers, from_sums, one_run_at_a_time

__all__ = ["State", "fedprox_step", "newton_fedprox"]

_STEPS = 4  # for classification


@dataclass(frozen=True)
class State:
    """Models for all with each strength, after a round."""

    theta: Tensor  # [F, J, 1, P]
    round: int = 0


def newton_fedprox(state: State | None, *, start: Tensor, problem: Problem, strengths: tuple[float, ...]) -> Algorithm:
    """Fit with each strength s, from one model for all.  start [F, 1, 1, P]"""
    many, strength = len(strengths), torch.tensor(strengths, dtype=torch.float64)
    if state is None:
        state = State(start.expand(-1, many, -1, -1))
        yield Save(state)
    while state.round < (1 if problem.is_regression else _STEPS):
        got = yield Ask(
            fedprox_step, {"problem": problem, "theta": state.theta, "strength": strength},
            {"pull": Sum(), "slope": Sum()}, fresh=problem.fresh, scratch=problem.scratch(many, 2 * many),
        )  # fmt: skip
        state = replace(state, round=state.round + 1)
        if got is not None and got.n:
            little = 1e-9 * torch.eye(problem.n_parameters, dtype=torch.float64)
            step = torch.linalg.solve(got["slope"] + little, got["pull"])[:, :, None]
            state = replace(state, theta=state.theta + step)
        yield Save(state)
    return state


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(pull=Sum(), slope=Sum())
@from_sums
@one_run_at_a_time
def fedprox_step(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How far the client's rows would draw its model from the common one, and how that changes with the common one.

    With mean gradient g and second derivatives H: n (H + s)^-1 (-g) and n (H + s)^-1 H.  -> [C, F, J, P], [C, F, J, P, P]
    """
    at, kept = curves(shared["problem"], private, data)
    _, gradient, hessian = at.quadratic(shared["theta"])  # [F, J, C, P], [F, J | 1, C, P, P]
    n = at.n[..., None].clamp(min=1)  # [F, 1, C, 1]
    mean = (hessian / n[..., None]).expand(*gradient.shape, -1)
    held = mean + shared["strength"].view(1, -1, 1, 1, 1) * torch.eye(mean.shape[-1], dtype=mean.dtype)
    solved = torch.linalg.solve(held, torch.cat([-(gradient / n)[..., None], mean], -1)) * at.n[..., None, None]
    reply = {"pull": solved[..., 0], "slope": solved[..., 1:]}
    return {name: value.movedim(2, 0) for name, value in reply.items()}, kept
