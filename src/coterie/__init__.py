# SPDX-License-Identifier: Apache-2.0
"""Federated learning where clients differ: find the hidden structure without moving the data, and train what fits."""

__version__ = "0.1.0"

from coterie.compare import compare
from coterie.data.clients import Clients
from coterie.data.readers import from_arrays, read, read_with
from coterie.errors import ConfigError, CoterieError, DataError, RunError
from coterie.estimators import (
    IFCA,
    MAML,
    FedAvg,
    FederatedMixture,
    FedRep,
    LGFedAvg,
    Local,
    MixedRegression,
    Representation,
    Shrunk,
    load,
)

__all__ = [
    "IFCA",
    "MAML",
    "Clients",
    "ConfigError",
    "CoterieError",
    "DataError",
    "FedAvg",
    "FedRep",
    "FederatedMixture",
    "LGFedAvg",
    "Local",
    "MixedRegression",
    "Representation",
    "RunError",
    "Shrunk",
    "__version__",
    "compare",
    "from_arrays",
    "load",
    "read",
    "read_with",
]
