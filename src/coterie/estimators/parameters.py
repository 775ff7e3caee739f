# SPDX-License-Identifier: Apache-2.0
"""Where a constructor's parameters stand among the options, and back."""

from typing import Any

from pydantic import BaseModel
from sklearn.base import BaseEstimator

from coterie.config import (
    PERSONAL,
    PRIOR,
    ClusterOptions,
    FitOptions,
    MixtureOptions,
    ModelOptions,
    MomentOptions,
    PersonalOptions,
    PriorOptions,
    TrainingOptions,
    options,
)

__all__ = ["options_of", "parameters_of"]

_GROUPS: dict[str, type[BaseModel]] = {
    "moments": MomentOptions,
    "clusters": ClusterOptions,
    "training": TrainingOptions,
    "model": ModelOptions,
}
_PLACES = {name: (group, name) for group, kind in _GROUPS.items() for name in kind.model_fields}
_PLACES |= {
    "random_state": ("", "seed"),
    "baselines": ("", "baselines"),
    "standardise": ("data", "standardise"),
    "descent_step_size": ("moments", "step_size"),  # `step_size` is that of training, `resample` that of clusters
    "descent_resample": ("moments", "resample"),
}
_MIXTURE = _PLACES | {name: ("mixture", name) for name in MixtureOptions.model_fields}  # it has rounds of its own


_PERSONAL = _PLACES | {name: ("personal", name) for name in PersonalOptions.model_fields}
_PRIOR = _PLACES | {name: ("prior", name) for name in PriorOptions.model_fields}
_KINDS = {"mixture": _MIXTURE} | dict.fromkeys(PERSONAL, _PERSONAL) | dict.fromkeys(PRIOR, _PRIOR)


def options_of(estimator: BaseEstimator, method: str, **instead: Any) -> FitOptions:
    """Put the options together that an estimator's parameters stand for; some may be said `instead`."""
    tree: dict[str, Any] = {"method": method}
    places = _KINDS.get(method, _PLACES)
    for name, value in (estimator.get_params(deep=False) | instead).items():
        if name in places:
            group, option = places[name]
            (tree.setdefault(group, {}) if group else tree)[option] = value
    return options(tree)


def parameters_of(kind: type[BaseEstimator], chosen: FitOptions) -> dict[str, Any]:
    """Find the parameters that options stand for; what they leave open is left to the constructor."""
    found = {}
    places = _KINDS.get(chosen.method, _PLACES)
    for name in kind._get_param_names():
        if name in places:
            group, option = places[name]
            found[name] = getattr(getattr(chosen, group) if group else chosen, option)
    return {name: value for name, value in found.items() if value is not None}
