# SPDX-License-Identifier: Apache-2.0
"""What can be fitted to outcomes that are neither plain numbers nor classes: linear models, by Newton's method."""

from coterie.config import FitOptions, first_given
from coterie.data.clients import Clients
from coterie.data.stand_ins import StandIns, needs_rows
from coterie.errors import ConfigError
from coterie.methods.base import Given
from coterie.outcome_names import ABOUT

__all__ = ["check_outcome"]

_METHODS = ("fedavg", "ifca", "local", "shrunk", "representation")


def check_outcome(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what is only for numbers and classes."""
    outcome = clients.schema.outcome
    if outcome is None:
        return
    if options.method not in _METHODS:
        raise ConfigError(
            f"{options.method} is not for {ABOUT[outcome]} (outcome {outcome})",
            f"use --method {', '.join(_METHODS[:-1])} or {_METHODS[-1]}",
        )
    if isinstance(clients.train, StandIns):
        raise needs_rows(f"outcome {outcome}")
    if given.module is not None or options.model.hidden or not options.model.intercept:
        raise ConfigError(
            f"outcome {outcome} is for linear models with an intercept",
            "leave model, model.hidden and model.intercept out",
        )
    for group, known in (("training", ("rounds", "weighting")), ("clusters", ("n_clusters", "n_init"))):
        if name := first_given(options, group, known):
            raise ConfigError(
                f"{group}.{name} is set, and outcome {outcome} is fitted by Newton's method", "leave it out"
            )
