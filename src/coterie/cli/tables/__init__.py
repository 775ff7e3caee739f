# SPDX-License-Identifier: Apache-2.0
"""What fitted models say of the rows and the clients of a file, by the kind of models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.cli.tables.clusters import assignments
from coterie.cli.tables.files import check_ending, write_rows
from coterie.cli.tables.mixture import adoptions, components
from coterie.cli.tables.personal import parts_fitted
from coterie.cli.tables.predicted import Asked, Said, predictions
from coterie.errors import ConfigError
from coterie.estimators import Federated, FederatedMixture, Personalised

__all__ = ["Asked", "assigned", "check_ending", "predicted", "write_rows"]

_PLACED: dict[type[Any], Callable[[Any, Path], Said]] = {
    Federated: assignments,
    Personalised: parts_fitted,
    FederatedMixture: adoptions,
}


def predicted(model: Federated | FederatedMixture | Personalised, path: Path, asked: Asked = Asked()) -> Said:  # noqa: B008
    """Predict every row of a file, in its order."""
    if not isinstance(model, FederatedMixture):
        return predictions(model, path, asked)
    if asked != Asked():
        raise ConfigError("mixtures have no thresholds and no intervals", "leave --threshold and --interval out")
    return components(model, path)


def assigned(model: Federated | FederatedMixture | Personalised, path: Path) -> Said:
    """Place every client of a file, old or new."""
    return next(tell for kind, tell in _PLACED.items() if isinstance(model, kind))(model, path)
