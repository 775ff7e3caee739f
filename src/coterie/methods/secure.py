# SPDX-License-Identifier: Apache-2.0
"""What cannot be fitted with secure sums, since it rests on values of single clients; and the way out."""

from collections.abc import Sequence

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.errors import ConfigError, DataError

__all__ = ["check_secure", "check_secure_comparison"]


def check_secure(clients: Clients, options: FitOptions) -> None:
    """Refuse what needs values of single clients, before anything is asked."""
    if not options.secure:
        return
    if clients.n_clients < 2:
        raise DataError("there is one client, and a secure sum takes two", "check the client column")
    if options.method == "moment-descent":
        raise ConfigError(
            "moment-descent moves models of single clients, its anchors, which secure sums do not tell",
            "use --method ifca with clusters.init=balanced and --starts 5; from models that you have, IFCA(init='warm') is "
            "its second phase",
        )
    if options.method == "mixture":
        raise ConfigError(
            "mixture (FedGrEM) takes a robust centre of every client's components, which secure sums do not tell",
            "leave secure out, or use --method ifca with clusters.init=balanced",
        )
    if options.training.robust in ("trimmed", "median", "near"):
        raise ConfigError(
            f"training.robust={options.training.robust} needs every client's update, which secure sums do not tell",
            "use training.robust=clip",
        )
    if options.predictions.coverage is not None:
        raise ConfigError(
            "predictions.coverage asks clients for quantiles of their residuals, which secure sums do not tell",
            "leave it out: intervals then follow from the model",
        )
    if options.method == "ifca":
        _check_starts(clients, options)


def check_secure_comparison(clients: Clients, hidden: Sequence[int], *, secure: bool) -> None:
    """Refuse comparisons that need values of single clients."""
    if not secure:
        return
    if clients.n_clients < 2:
        raise DataError("there is one client, and a secure sum takes two", "check the client column")
    if hidden:
        raise ConfigError(
            "networks are compared by every client's own scores, which secure sums do not tell",
            "leave hidden layers out, or leave secure out",
        )
    if clients.schema.task == "none":
        raise ConfigError(
            "mixtures of rows are compared by every client's own, which secure sums do not tell",
            "name a target with --target, or leave secure out",
        )


def _check_starts(clients: Clients, options: FitOptions) -> None:
    if clients.schema.outcome is not None:
        return  # they begin with models that are drawn
    if options.clusters.init == "spread" and (options.n_clusters or 1) > 1:
        raise ConfigError(
            "clusters.init=spread begins with models of single clients, which secure sums do not tell",
            "use --set clusters.init=balanced, or random, with several starts: --starts 5",
        )
