# SPDX-License-Identifier: Apache-2.0
"""Federated learning where clients differ: find the hidden structure without moving the data, and train what fits."""

__version__ = "0.1.0"

from typing import TYPE_CHECKING, Any

import coterie.threads  # noqa: F401  isort: skip  (before torch)
from coterie.data.clients import Clients
from coterie.data.readers import from_arrays, read, read_with
from coterie.errors import ConfigError, CoterieError, DataError, RunError

if TYPE_CHECKING:
    from coterie.comparison import compare
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


def __getattr__(name: str) -> Any:
    """Import what is large when it is asked for: a node of a federation starts a process for every message, without it."""
    if name == "compare":
        from coterie.comparison import compare

        return compare
    if name in __all__:
        from coterie import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module 'coterie' has no attribute '{name}'")
