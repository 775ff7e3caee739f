# SPDX-License-Identifier: Apache-2.0
"""The names of outcomes: what a target is, where that is neither a plain number nor one of several classes.

Nothing large is imported here, so that the command line answers at once; the likelihoods are in `coterie.models.outcomes`.
"""

from typing import Literal, get_args

__all__ = ["ABOUT", "CLASSES", "COUNTS", "NAMES", "POSITIVE", "TIMES", "OutcomeName", "task_of"]

OutcomeName = Literal["poisson", "negative-binomial", "gamma", "log-normal", "ordinal", "cox", "cox-breslow"]

NAMES: tuple[str, ...] = get_args(OutcomeName)
COUNTS = ("poisson", "negative-binomial")  # 0, 1, 2, ...
POSITIVE = ("gamma", "log-normal")  # above 0, and skewed
CLASSES = ("ordinal",)  # classes in an order
TIMES = (
    "cox",
    "cox-breslow",
)  # until an event, or until it was last known not to have happened; ties by Efron, Breslow

ABOUT = {
    "poisson": "counts",
    "negative-binomial": "counts",
    "gamma": "positive numbers",
    "log-normal": "positive numbers",
    "ordinal": "classes in an order",
    "cox": "times to an event",
    "cox-breslow": "times to an event",
}


def task_of(outcome: str) -> Literal["regression", "classification"]:
    """What a target with this outcome is read as."""
    return "classification" if outcome in CLASSES else "regression"
