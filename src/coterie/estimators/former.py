# SPDX-License-Identifier: Apache-2.0
"""Estimators by their old names, which warn."""

import warnings
from typing import Any

from coterie.estimators.personal import LowRank, RandomEffects

__all__ = ["Representation", "Shrunk"]


def Shrunk(*, spread: str | None = None, **more: Any) -> RandomEffects:  # noqa: N802
    """Make a `RandomEffects`."""
    warnings.warn("Shrunk(spread=) is now RandomEffects(covariance=)", DeprecationWarning, stacklevel=2)
    return RandomEffects(**{"covariance": spread, **more})


def Representation(**more: Any) -> LowRank:  # noqa: N802
    """Make a `LowRank`."""
    warnings.warn("Representation is now LowRank", DeprecationWarning, stacklevel=2)
    return LowRank(**more)
