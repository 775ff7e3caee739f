# SPDX-License-Identifier: Apache-2.0
"""Federated learning where clients differ: find the hidden structure without moving the data, and train what fits."""

__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING, Any

import coterie.threads  # noqa: F401  (before torch)
from coterie.errors import ConfigError, CoterieError, DataError, RunError  # noqa: F401  (in `__all__`)

if TYPE_CHECKING:
    from coterie.data.clients import Clients as Clients
    from coterie.data.readers import from_arrays as from_arrays
    from coterie.data.readers import read as read
    from coterie.data.readers import read_with as read_with
    from coterie.estimators.federated import *  # noqa: F403
    from coterie.estimators.federated_mixture import *  # noqa: F403
    from coterie.estimators.loading import *  # noqa: F403
    from coterie.estimators.mixed import *  # noqa: F403
    from coterie.estimators.personal import *  # noqa: F403
    from coterie.runs.summarise import summarise as summarise
    from coterie.selection import compare as compare

_HERE = ("ConfigError", "CoterieError", "DataError", "RunError", "__version__")
_ELSEWHERE = {
    "Clients": "data.clients", "compare": "selection", "from_arrays": "data.readers", "load": "estimators",
    "read": "data.readers", "read_with": "data.readers", "summarise": "runs.summarise",
}  # fmt: skip
_FORMER = ("Shrunk", "Representation")  # old names, which warn

if not TYPE_CHECKING:  # type checkers know the names from above

    def __getattr__(name: str) -> Any:
        """Import what is large when it is asked for: the command line answers at once, and so does a federation's node."""
        if name in _ELSEWHERE:
            return getattr(import_module(f"coterie.{_ELSEWHERE[name]}"), name)
        if name in _FORMER:
            return getattr(import_module("coterie.estimators.former"), name)
        if name.startswith("__") and name != "__all__":  # what Python asks of any module
            raise AttributeError(f"module 'coterie' has no attribute '{name}'")
        estimators = {method.estimator: method.name for method in import_module("coterie.registry").METHODS.values()}
        if name == "__all__":
            return sorted({*_HERE, *_ELSEWHERE, *filter(None, estimators)})
        if name not in estimators:
            raise AttributeError(f"module 'coterie' has no attribute '{name}'")
        return import_module("coterie.estimators").ESTIMATORS[estimators[name]]


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("coterie").__all__})
