# SPDX-License-Identifier: Apache-2.0
"""What fitted models say of the rows and the clients of a file, by the kind of models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from coterie.cli.tables.clusters import assignments, predictions
from coterie.cli.tables.files import check_ending, write_rows
from coterie.cli.tables.mixture import adoptions, components
from coterie.cli.tables.personal import parts_fitted, personal_predictions
from coterie.estimators import Federated, FederatedMixture, Personalised

__all__ = ["assigned", "check_ending", "predicted", "write_rows"]

Said = tuple[pa.Table, list[str]]  # a table, and what a user should know

_FILES: dict[type[Any], tuple[Callable[[Any, Path], Said], Callable[[Any, Path], Said]]] = {
    Federated: (predictions, assignments),
    Personalised: (personal_predictions, parts_fitted),
    FederatedMixture: (components, adoptions),
}


def predicted(model: Federated | FederatedMixture | Personalised, path: Path) -> Said:
    """Predict every row of a file, in its order."""
    return next(tell for kind, (tell, _) in _FILES.items() if isinstance(model, kind))(model, path)


def assigned(model: Federated | FederatedMixture | Personalised, path: Path) -> Said:
    """Place every client of a file, old or new."""
    return next(tell for kind, (_, tell) in _FILES.items() if isinstance(model, kind))(model, path)
