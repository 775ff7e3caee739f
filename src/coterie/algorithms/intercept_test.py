# SPDX-License-Identifier: Apache-2.0
"""Do clients' intercepts differ? A score test of their variance (as of Lin, 1997), from sums over clients alone.

Where intercepts differ, a client's gradients along the common model's intercept, of one fold of its rows and of another,
tend to have the same sign. Their products have mean 0 if rows are independent, whatever their distribution: so no variance
of rows need be known. A few hundredths of the variance between clients are seen long before held-out rows show what they
bring.
"""

import math
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem, curves, noise_level
from coterie.protocol import Algorithm, Ask, Block, Limit, Sum, Tensors, answers, from_sums, one_run_at_a_time

__all__ = ["intercept_products", "intercepts_differ"]

_LIMITS = {"products": Limit(), "chance": Limit(kind="positive")}


def intercepts_differ(problem: Problem, theta: Tensor, noise: Tensor) -> Algorithm:
    """Test it with a model for all.  -> float, about standard normal where they do not differ; NaN if nobody can tell

    A single client cannot bring it above the root of V (V - 1) / 2, of V folds.

    Parameters
    ----------
    theta, noise : Tensor
        [P] and [] the model, and the noise variance around it.
    """
    shared = {"problem": problem, "theta": theta, "noise": noise}
    fold = {"products": Sum(), "chance": Sum()}
    got = yield Ask(
        intercept_products, shared, fold, fresh=problem.fresh, scratch=problem.scratch(1, 1), limits=_LIMITS
    )
    if got is None or not got.n or not float(got["chance"]) > 0:
        return math.nan
    return float(got["products"]) / math.sqrt(float(got["chance"]))


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(products=Sum(), chance=Sum())
@from_sums
@one_run_at_a_time
def intercept_products(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """Products of the gradients of two folds along the intercepts, summed; and the variance of that, by chance alone."""
    problem: Problem = shared["problem"]
    at, kept = curves(problem, private, data)
    outputs, size = problem.n_outputs, problem.n_features + 1
    along = torch.zeros(problem.n_parameters, outputs, dtype=torch.float64)
    along[torch.arange(1, outputs + 1) * size - 1, torch.arange(outputs)] = 1.0  # a column for every output's intercept
    fits, others = len(problem.held), problem.n_folds - 1
    loss, gradient, _ = at.along(shared["theta"].expand(fits, 1, 1, -1), along.expand(fits, 1, -1, -1))
    loss, rows, gradient = (value[: problem.n_folds, 0] for value in (loss, at.n, gradient))  # of all folds but one
    folds = gradient.sum(0) / others - gradient  # [V, C, O]
    if problem.is_regression:  # squared errors; a client of much noise is not to outweigh the others
        folds = folds / noise_level(loss.sum(0) / others, rows.sum(0) / others, shared["noise"])[:, None]
    pairs = torch.einsum("vco,wco->cvw", folds, folds)
    pairs.diagonal(dim1=1, dim2=2).zero_()
    return {"products": pairs.sum((1, 2)), "chance": 2 * pairs.square().sum((1, 2))}, kept
