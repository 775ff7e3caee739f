# SPDX-License-Identifier: Apache-2.0
"""What cannot be fitted with secure sums, since it rests on values of single clients; and the way out."""

from coterie.config import PRIOR, FitOptions
from coterie.data.clients import Clients
from coterie.errors import ConfigError, DataError

__all__ = ["check_secure"]

_EXAMPLES = {"local": "1.0", "shrunk": "diagonal", "representation": "2"}


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
    if options.method in PRIOR and getattr(options.prior, PRIOR[options.method]) is None:
        raise ConfigError(
            f"prior.{PRIOR[options.method]} is chosen by scores of single clients, which secure sums do not tell",
            f"give it: --set prior.{PRIOR[options.method]}={_EXAMPLES[options.method]}",
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


def _check_starts(clients: Clients, options: FitOptions) -> None:
    if clients.schema.outcome is not None:
        raise ConfigError(
            f"clusters of {clients.schema.outcome} outcomes begin with models of clients, which secure sums do not tell",
            "use --method shrunk, or leave secure out",
        )
    if options.clusters.init == "spread" and (options.n_clusters or 1) > 1:
        raise ConfigError(
            "clusters.init=spread begins with models of single clients, which secure sums do not tell",
            "use --set clusters.init=balanced, or random, with several starts: --starts 5",
        )
