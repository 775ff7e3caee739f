# SPDX-License-Identifier: Apache-2.0
"""Federated learning where clients differ: find the hidden structure without moving the data, and train what fits."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

import coterie.threads  # noqa: F401  (before torch)
from coterie.errors import ConfigError, CoterieError, DataError, RunError

if TYPE_CHECKING:
    from coterie.data.clients import Clients
    from coterie.data.readers import from_arrays, read, read_with
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
    from coterie.selection import compare

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


_ELSEWHERE = {  # the other names are estimators
    "Clients": "data.clients",
    "compare": "selection",
    "from_arrays": "data.readers",
    "read": "data.readers",
    "read_with": "data.readers",
}


def __getattr__(name: str) -> Any:
    """Import what is large when it is asked for: the command line answers at once, and so does a node of a federation."""
    if name not in __all__:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    return getattr(import_module(f"coterie.{_ELSEWHERE.get(name, 'estimators')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
