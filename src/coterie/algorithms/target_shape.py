# SPDX-License-Identifier: Apache-2.0
"""What a target looks like, from sums alone: its skewness and whether it is positive, or the classes' entropy."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie.algorithms.linear_by_fold import Problem
from coterie.protocol import Algorithm, Ask, Block, Sum, Tensors, answers

__all__ = ["Shape", "target_shape", "target_sums"]


@dataclass(frozen=True)
class Shape:
    """Of the training rows' target.

    Attributes
    ----------
    skewness : float
        Of numbers: the third central moment over the cube of the standard deviation; 0 for classes.
    positive : bool
        Whether all of them are above 0.
    entropy : float or None
        Of classes, in nats: minus the score of a model that knows only how frequent they are. None for numbers.
    """

    skewness: float = 0.0
    positive: bool = False
    entropy: float | None = None


def target_shape(problem: Problem, zero: float) -> Algorithm:
    """Ask for the sums, and say what the target looks like.  -> Shape

    Parameters
    ----------
    zero : float
        What 0 became when targets were scaled.
    """
    names = ("powers", "low") if problem.is_regression else ("classes",)
    got = yield Ask(target_sums, {"problem": problem, "zero": zero}, {name: Sum() for name in names})
    if got is None or not got.n:
        return Shape()
    if not problem.is_regression:
        share = got["classes"] / got["classes"].sum().clamp(min=1)
        return Shape(entropy=float(torch.special.entr(share).sum()))
    n, *moments = got["powers"].tolist()
    first, second, third = (moment / max(n, 1.0) for moment in moments)
    variance = second - first**2
    skewness = (third - 3 * first * second + 2 * first**3) / variance**1.5 if variance > 1e-12 else 0.0
    return Shape(skewness if math.isfinite(skewness) else 0.0, float(got["low"]) == 0 and n > 0)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(powers=Sum(), low=Sum(), classes=Sum())
def target_sums(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of powers of the target, and rows that are not above zero; or rows of each class. Test rows are left out."""
    problem = shared["problem"]
    counted = (data.real & (data.folds != problem.n_folds)).to(torch.float64)  # [C, N]
    if not problem.is_regression:
        classes = one_hot(data.target, problem.n_classes).to(torch.float64)
        return {"classes": torch.einsum("cn,cnk->ck", counted, classes)[None]}, {}
    y: Tensor = data.target.to(torch.float64)
    powers = torch.stack([(counted * y**k).sum(1) for k in range(4)], 1)
    return {"powers": powers[None], "low": (counted * (y <= shared["zero"])).sum(1)[None]}, {}
