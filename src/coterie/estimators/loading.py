# SPDX-License-Identifier: Apache-2.0
"""From a run folder to a fitted estimator."""

from pathlib import Path

from torch import nn

from coterie.estimators.fedavg import FedAvg
from coterie.estimators.federated import Federated
from coterie.estimators.federated_mixture import FederatedMixture
from coterie.estimators.fedrep import FedRep
from coterie.estimators.ifca import IFCA
from coterie.estimators.lg_fedavg import LGFedAvg
from coterie.estimators.maml import MAML
from coterie.estimators.mixed_regression import MixedRegression
from coterie.estimators.parameters import parameters_of
from coterie.estimators.personal import Personalised
from coterie.models import Model
from coterie.runs import load_mixture, load_personal, load_run, read_options

__all__ = ["load"]

_KINDS: dict[str, type[Federated]] = {kind.method: kind for kind in (IFCA, MixedRegression, FedAvg)}
_PERSONAL: dict[str, type[Personalised]] = {kind.method: kind for kind in (FedRep, LGFedAvg, MAML)}


def load(folder: str | Path, *, model: nn.Module | Model | None = None) -> Federated | FederatedMixture | Personalised:
    """Load a finished run as a fitted estimator.

    Parameters
    ----------
    folder : str or Path
        What `coterie fit --out` wrote.
    model : nn.Module, optional
        The network that was trained, when it was your own.
    """
    method = read_options(Path(folder)).method
    if method in _PERSONAL:
        trained = load_personal(Path(folder), module=model)
        personal = _PERSONAL[method](model=model, **parameters_of(_PERSONAL[method], trained.options))
        personal._restore(trained)
        return personal
    if method == "mixture":
        found = load_mixture(Path(folder))
        mixture = FederatedMixture(**parameters_of(FederatedMixture, found.options))
        mixture._restore(found)
        return mixture
    run = load_run(Path(folder), module=model)
    kind = _KINDS[run.options.method]
    own = {"model": model} if "model" in kind._get_param_names() else {}
    made = kind(**parameters_of(kind, run.options), **own)
    made._restore(run)
    return made
