# SPDX-License-Identifier: Apache-2.0
"""What can be fitted where sites share sums of products in place of rows: linear regression, with all rows in every step."""

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.stand_ins import StandIns, needs_rows
from coterie.methods.base import Given

__all__ = ["check_sums"]

_METHODS = ("fedavg", "ifca", "local", "shrunk", "representation", "mixed")


def check_sums(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what looks at single rows, where there are none; what gets past this, a client function refuses."""
    if not isinstance(clients.train, StandIns):
        return
    if options.method not in _METHODS:
        raise needs_rows(f"--method {options.method}")
    if given.module is not None or options.model.hidden:
        raise needs_rows("a network")
    if options.model.degree > 1:
        raise needs_rows("model.degree")
    if options.training.batch_size is not None:
        raise needs_rows("training.batch_size")
    if options.clusters.resample:
        raise needs_rows("clusters.resample")
