# SPDX-License-Identifier: Apache-2.0
"""Where Newton's method begins for outcomes: at the model that knows no features, from sums over clients' targets."""

from dataclasses import replace
from typing import Any

import torch

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_ifca import Clusters, nobody_yet
from coterie.models.outcomes import ROWS
from coterie.protocol import Algorithm, Ask, Block, Sum, Tensors, answers

__all__ = ["first_models", "outcome_sums"]


def first_models(problem: Problem, settings: int) -> Algorithm:
    """One model for all to begin with, in every fit and setting; of numbers, classes and times, all zeros.  -> Clusters"""
    start: Clusters = nobody_yet(problem, settings)
    if not problem.outcome or problem.is_stratified:
        return start
    got = yield Ask(outcome_sums, {"problem": problem}, {"sums": Sum()})
    if got is None or not got.n:
        return start
    begin = ROWS[problem.outcome].start(got["sums"])  # [F, 1 + Q]
    theta = start.theta.clone()
    theta[..., problem.n_features :] = begin[:, None, None]
    return replace(start, theta=theta)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(sums=Sum())
def outcome_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Number of training rows and sums over their targets, in every fit.  -> [1, C, F, S]"""
    problem = shared["problem"]
    train, _ = problem.masks(data)  # [F, C, N]
    about = ROWS[problem.outcome].statistics(data.target.to(torch.float64), problem.n_classes)  # [C, N, S]
    about = torch.where(data.real[..., None], about, 0.0)
    return {"sums": torch.einsum("fcn,cns->cfs", train, about)[None]}, {}
