# SPDX-License-Identifier: Apache-2.0
"""What cannot be fitted with a privacy budget, since it asks what no noise hides; and the way out."""

import importlib.util

from coterie.config import FitOptions, first_given
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.errors import ConfigError, DataError

__all__ = ["METHODS", "check_budget", "check_private"]

METHODS = ("fedavg", "ifca", "fedrep", "fedper", "lg-fedavg", "ditto", "shrunk", "local")
_LEAST = 30  # clients in a round on average: none at all is then as good as impossible
_DOCS = "see docs/differential-privacy.md"


def check_private(clients: Clients, options: FitOptions) -> None:
    """Refuse what would ask without noise, before anything is asked."""
    if options.privacy.epsilon is None:
        if name := first_given(options, "privacy"):
            raise ConfigError(f"privacy.{name} is set, and there is no budget", "give --epsilon, or leave it out")
        return
    if options.method not in METHODS:
        raise ConfigError(
            f"{options.method} asks clients what noise cannot hide, and has no form with privacy.epsilon",
            f"use one of {', '.join(METHODS)}; {_DOCS}",
        )
    check_budget(clients, options)
    _check_asked(clients, options)
    if options.method in ("ifca", "shrunk", "local"):
        _check_own(clients, options)


def check_budget(clients: Clients, options: FitOptions) -> None:
    """Refuse data of which nothing can be asked with noise."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError("a privacy budget needs dp-accounting, which is not installed", "pip install dp-accounting")
    if clients.schema.outcome is not None:
        raise ConfigError(
            f"models of {clients.schema.outcome} outcomes have no form with privacy.epsilon",
            "leave outcome out: the target is then a number",
        )
    if clients.n_clients < 2:
        raise DataError("there is one client, and no noise hides it", "check the client column")


def _check_asked(clients: Clients, options: FitOptions) -> None:
    """What all methods have in common."""
    t = options.training
    if t.robust not in ("none", "clip"):
        raise ConfigError(
            f"training.robust={t.robust} needs every client's own update, which no noise hides",
            "leave it out: privacy bounds every update",
        )
    if first_given(options, "predictions"):
        raise ConfigError("what predictions are worth is asked without noise", "leave predictions.* out")
    if options.model.degree > 1:
        raise ConfigError("products of features are scaled without noise", "leave model.degree out")
    if options.personal.clock is not None or options.personal.stragglers != "none":
        raise ConfigError("times of clients are told without noise", "leave clocks and personal.stragglers out")
    if t.participation == 1:
        return
    if options.secure or isinstance(clients.train, RemoteRows):
        raise ConfigError(
            "who takes part hides nobody from a server that draws the lots", "leave training.participation out"
        )
    if t.participation * clients.n_clients < _LEAST:
        raise ConfigError(
            f"a round would be of {t.participation * clients.n_clients:.0f} clients on average, and noise hides "
            f"{_LEAST} or more",
            "raise training.participation",
        )


def _check_own(clients: Clients, options: FitOptions) -> None:
    c = options.clusters
    if options.method == "shrunk":
        if clients.schema.task != "regression":
            raise ConfigError(
                "shrunk models of classes have no form with privacy.epsilon", "use --method fedavg, or ditto"
            )
        if options.prior.spread not in (None, "diagonal"):
            raise ConfigError(
                f"prior.spread={options.prior.spread} has no form with privacy.epsilon", "leave it out: it is diagonal"
            )
    if options.method != "ifca":
        return
    if c.n_init > 1 or c.init == "balanced":
        raise ConfigError(
            "starts are compared by scores that cost privacy",
            "leave clusters.n_init and clusters.init out: one is found",
        )
    if c.soft:
        raise ConfigError("soft labels have no form with privacy.epsilon", "leave clusters.soft out")
