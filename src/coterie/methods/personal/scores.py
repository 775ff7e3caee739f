# SPDX-License-Identifier: Apache-2.0
"""How what personal models do is spread over clients."""

from torch import Tensor

from coterie.methods.personal.measure import Distribution
from coterie.methods.session import Prepared
from coterie.models.outcomes import metric_of

__all__ = ["spread"]

_NAMED = {"metric": "", "metric_global": "global", "metric_local": "local"}


def spread(made: Prepared, method: str, per_client: dict[str, Tensor]) -> dict[str, Distribution]:
    """How the held-out metric of every method is spread over clients."""
    if "rows_test" not in per_client or not bool((per_client["rows_test"] > 0).any()):
        return {}
    better = metric_of(made.model.loss) != "rmse"
    return {
        name or method: Distribution.of(per_client[column], per_client["rows_test"], larger_is_better=better)
        for column, name in _NAMED.items()
        if column in per_client
    }
