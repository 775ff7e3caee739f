# SPDX-License-Identifier: Apache-2.0
"""From a run folder to a fitted estimator."""

from pathlib import Path
from typing import Any

from torch import nn

from coterie.config import FitOptions
from coterie.estimators.fedavg import FedAvg
from coterie.estimators.federated import Federated
from coterie.estimators.federated_mixture import FederatedMixture
from coterie.estimators.fedrep import FedRep
from coterie.estimators.ifca import IFCA
from coterie.estimators.lg_fedavg import LGFedAvg
from coterie.estimators.linear import Local, Representation, Shrunk
from coterie.estimators.maml import MAML
from coterie.estimators.mixed_regression import MixedRegression
from coterie.estimators.parameters import parameters_of
from coterie.estimators.personal import Personalised
from coterie.models import Model
from coterie.runs.folder import load_run

__all__ = ["load"]

_ESTIMATORS: dict[str, type[Any]] = {
    kind.method: kind
    for kind in (
        IFCA, MixedRegression, FedAvg, FedRep, LGFedAvg, MAML, Local, Shrunk, Representation, FederatedMixture,
    )
}  # fmt: skip


def load(folder: str | Path, *, model: nn.Module | Model | None = None) -> Federated | FederatedMixture | Personalised:
    """Load a finished run as a fitted estimator.

    Parameters
    ----------
    folder : str or Path
        What `coterie fit --out` wrote.
    model : nn.Module, optional
        The network that was trained, when it was your own.
    """
    run = load_run(Path(folder), module=model)
    made: Federated | FederatedMixture | Personalised = _made(_ESTIMATORS[run.options.method], run.options, model)
    made._restore(run)
    return made


def _made(kind: type[Any], options: FitOptions, model: nn.Module | Model | None) -> Any:
    """Make an estimator with the parameters of a run, and with the user's own network where it takes one."""
    own = {"model": model} if "model" in kind._get_param_names() else {}
    return kind(**parameters_of(kind, options), **own)
