# SPDX-License-Identifier: Apache-2.0
"""The polynomial feature map: all products of features up to a degree, made where the rows are."""

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

import torch
from torch import Tensor

__all__ = ["MOST", "monomial_names", "monomials", "n_monomials"]

MOST = 5_000  # more of them than this are a slip: 100 features have 176,850 of degree 3


def n_monomials(n_features: int, degree: int) -> int:
    """Count the monomials of degree 1 to `degree`."""
    return math.comb(n_features + degree, degree) - 1


def monomials(x: Tensor, degree: int) -> Tensor:
    """Multiply features in all ways, the lower degrees first; the features themselves come first of all.

    Parameters
    ----------
    x : Tensor
        [..., D]
    degree : int
        At least 1.

    Returns
    -------
    Tensor
        [..., M]
    """
    levels = [x]
    first = torch.arange(x.shape[-1])  # [m] the smallest feature number in each monomial of the level
    for _ in range(degree - 1):
        # A monomial of the next degree is a feature times one of this level whose features are not smaller.
        factor, parent = torch.nonzero(torch.arange(x.shape[-1])[:, None] <= first, as_tuple=True)
        levels.append(x[..., factor] * levels[-1][..., parent])
        first = factor
    return torch.cat(levels, -1)


def monomial_names(names: Sequence[str], degree: int) -> tuple[str, ...]:
    """Name what `monomials` makes, in its order: ``age``, ``age^2``, ``age*dose``."""
    out = []
    for d in range(1, degree + 1):
        for group in combinations_with_replacement(range(len(names)), d):
            powers = {i: group.count(i) for i in group}
            out.append("*".join(names[i] if n == 1 else f"{names[i]}^{n}" for i, n in powers.items()))
    return tuple(out)
