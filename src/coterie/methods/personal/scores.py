# SPDX-License-Identifier: Apache-2.0
"""How well personal models do, overall and spread over clients."""

from torch import Tensor

from coterie.methods.base import Score
from coterie.methods.baselines import metric, score
from coterie.methods.personal.measure import Distribution
from coterie.methods.personal.model import Personal
from coterie.methods.session import Prepared, Session

__all__ = ["measure_personal", "spread"]

_NAMED = {"metric": "", "metric_global": "global", "metric_local": "local"}


def measure_personal(
    session: Session, made: Prepared, title: str, found: Personal
) -> tuple[list[Score], dict[str, Tensor]]:
    """Measure personal models on training rows, held-out rows and new clients.  -> scores, [M] by name"""
    train, test, new = found.measured(made.rows, found.own, session), None, None
    per_client = {"train_loss": train.loss, "rows_train": train.rows}
    if made.test is not None:
        test = found.measured(made.test, found.own, session)
        per_client |= {"test_loss": test.loss, "rows_test": test.rows, "metric": metric(made, test.metric)}
    if made.newcomers is not None:
        support, query = made.newcomers
        new = found.measured(query, found.adapted(support, session=session), session), query
    return [score(session, made, (session.options.method, title), train, test, new)], per_client


def spread(made: Prepared, method: str, per_client: dict[str, Tensor]) -> dict[str, Distribution]:
    """How the held-out metric of every method is spread over clients."""
    if "rows_test" not in per_client or not bool((per_client["rows_test"] > 0).any()):
        return {}
    better = made.model.loss == "cross_entropy"
    return {
        name or method: Distribution.of(per_client[column], per_client["rows_test"], larger_is_better=better)
        for column, name in _NAMED.items()
        if column in per_client
    }
