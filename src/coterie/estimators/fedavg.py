# SPDX-License-Identifier: Apache-2.0
"""FedAvg and FedProx as an estimator."""

from typing import ClassVar, Literal

from coterie.estimators.federated import Federated
from coterie.estimators.groups import Networks, Rounds, Steps, parameters

__all__ = ["FedAvg"]


@parameters
class FedAvg(Federated, Rounds, Steps, Networks):
    """One model for all clients; with `proximal` > 0 this is FedProx.

    Parameters
    ----------
    model, hidden, degree, l2, rounds, step_size, ... :
        As for `IFCA`.
    proximal : float
        mu of FedProx.
    exact : bool
        Whether a client's proximal step is solved in closed form: for linear regression.
    """

    method: ClassVar[str] = "fedavg"

    weighting: Literal["clients", "rows"] = "rows"
