# SPDX-License-Identifier: Apache-2.0
"""What all estimators share: scikit-learn's manners around fitting."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, dataclass_transform, get_type_hints

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from coterie.config import FitOptions, options
from coterie.data.ragged import Ragged
from coterie.data.values import name_of
from coterie.errors import ConfigError
from coterie.estimators.display import fitted_html, fitted_text
from coterie.estimators.rows import as_clients, as_rows, classes_of, target_values
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.methods.session import Watch
from coterie.option_fields import abouts, options_in, parameters
from coterie.outcome_names import OutcomeName
from coterie.registry import METHODS

__all__ = ["ESTIMATORS", "Budgeted", "Estimator", "OfOutcomes", "estimator", "estimator_of", "options_of"]

_Class = TypeVar("_Class", bound="Estimator")


ESTIMATORS: dict[str, type["Estimator"]] = {}  # by the method that they fit


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def estimator(kind: type[_Class]) -> type[_Class]:
    """Make a class the estimator of its method: a constructor of its options, and a docstring that tells them all."""
    made = dataclass(kw_only=True, eq=False, repr=False, match_args=False)(kind)
    told = "".join(f"\n    {name}\n        {about}." for name, about in abouts(made).items())
    head, found, rest = (made.__doc__ or "").partition("\n    Attributes\n")
    made.__doc__ = f"{head.rstrip()}\n\n    Parameters\n    ----------{told}\n{found}{rest}"
    made.__init__.__annotations__ = get_type_hints(made.__init__)  # without what is said about options
    ESTIMATORS[made.method] = made
    return made


@parameters
class Estimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What all estimators share; what is special about a kind of models is in a few methods of a subclass."""

    method: ClassVar[str]  # what it is called in the options
    task: ClassVar[Literal["auto", "regression"]] = "auto"  # what targets in arrays are read as
    doubts: ClassVar[tuple[str, ...]] = ()  # words of the fit's warnings that are about convergence

    standardise: Annotated[bool, "whether columns are centred and scaled, from federated sums"] = True
    baselines: Annotated[bool, "whether one model for all and one model each are fitted too, for `scores_`"] = False
    secure: Annotated[bool, "whether nodes add up securely, so that only sums over all of them are known"] = False
    random_state: Annotated[int, "seed of everything random"] = 0

    def fit(
        self, clients: Any, y: Any = None, groups: Any = None, *, sample_weight: Any = None, watch: Watch | None = None
    ) -> Self:
        """Fit to clients.

        Parameters
        ----------
        clients : Clients, array or data frame
            From `coterie.read`, or features [N, ...] together with y [N] and groups [N] (the client of each row); or a data
            frame of pandas or polars, or an Arrow table, of which y and groups may name columns.
        sample_weight : array, optional
            [N] how many rows each counts as, in all sums and losses; for linear models of clients' own (`Local`,
            `RandomEffects`, `LowRank`).
        watch : callable, optional
            Told of every round.
        """
        if sample_weight is not None and METHODS[self.method].family != "effects":
            raise ConfigError(f"{type(self).__name__} cannot weigh rows", "use Local, RandomEffects or LowRank")
        start, clock = getattr(self, "start", None), getattr(self, "clock", None)
        given = as_clients(clients, y, groups, self.task, getattr(self, "outcome", None), sample_weight)
        self.fitted_ = fit(
            given, options_of(self), module=getattr(self, "model", None),
            start=None if start is None else torch.as_tensor(start), clock=None if isinstance(clock, str) else clock,
            watch=watch,
        )  # fmt: skip
        self.history_ = self.fitted_.rounds
        self._restore(self.fitted_, target_values(clients, y))
        for said in self.fitted_.warnings:
            if any(words in said for words in self.doubts):
                warnings.warn(said, ConvergenceWarning, stacklevel=2)
        return self

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        """How it was made and, once it is fitted, what it was fitted to and how it does."""
        made: str = super().__repr__(N_CHAR_MAX)
        return f"{made}\n{fitted_text(self)}" if hasattr(self, "scores_") else made

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        if hasattr(self, "scores_"):
            return fitted_html(self, super().__repr__())
        drawn: str = super()._repr_html_()
        return drawn

    @abstractmethod
    def predict(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Predict every row, in the order of the rows given."""

    @abstractmethod
    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """How well clients are served; the higher the better."""

    # -- inside -------------------------------------------------------------------------------------------------------
    def _restore(self, found: Fitted, y: Any = None) -> None:
        """Become what was fitted, now or in a finished run; y are the targets in arrays that were given."""
        self.schema_, self.scaling_, self.client_names_ = found.schema, found.models.scaling, found.models.names
        names = [column.name for column in found.schema.columns]
        self.n_features_in_ = len(names)
        if names != [f"x{i}" for i in range(len(names))]:
            self.feature_names_in_ = np.asarray(names, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        self.scores_ = {score.method: score for score in found.scores}
        if self.task == "auto":
            self.classes_ = classes_of(found.schema, y)
        self._know(found)

    @abstractmethod
    def _know(self, found: Fitted) -> None:
        """Take note of what this kind of models has."""

    def _rows(self, data: Any, y: Any, groups: Any, *, alone: bool = False) -> Ragged:
        """Take rows of known columns; `alone` says that their clients need not be named."""
        if not hasattr(self, "schema_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted: call fit first")
        return as_rows(data, y, groups, self.schema_, alone=alone)


@parameters
class Budgeted:
    """Of estimators that can be differentially private for clients."""

    epsilon: Annotated[
        float | None, "privacy budget of every client (differential privacy, with `delta`); without, no noise is added"
    ] = None
    delta: Annotated[float | None, "of the privacy budget; by default 1e-5, or a tenth of one over the clients"] = None


@parameters
class OfOutcomes:
    """Of estimators whose target may be something else than a number or one of several classes."""

    outcome: Annotated[
        OutcomeName | None,
        "what the target is, if no plain number or class: poisson, negative-binomial, gamma, log-normal, ordinal or cox",
    ] = None


def options_of(made: Estimator) -> FitOptions:
    """Put the options together that an estimator's parameters stand for."""
    tree: dict[str, Any] = {
        "method": made.method, "seed": made.random_state, "baselines": made.baselines,
        "secure": made.secure,
        "data": {"standardise": made.standardise, "outcome": getattr(made, "outcome", None)},
        "privacy": {"epsilon": made.epsilon, "delta": made.delta} if isinstance(made, Budgeted) else {},
    }  # fmt: skip
    for name, option in options_in(type(made)).items():
        value = getattr(made, name)
        if name == "class_weights" and isinstance(value, dict):
            value = {name_of(key): number for key, number in value.items()}  # classes in arrays may be numbers
        if name != "clock" or isinstance(value, str):  # a clock of one's own has no word
            tree.setdefault(option.group, {})[option.name] = value
    return options(tree)


def estimator_of(chosen: FitOptions, model: Any = None) -> Estimator:
    """Make the estimator that options stand for; what they leave open is left to its constructor."""
    if chosen.method not in ESTIMATORS:
        raise ConfigError(f"there is no estimator for {chosen.method}", "import the module that defines it first")
    kind = ESTIMATORS[chosen.method]
    given = {name: getattr(getattr(chosen, option.group), option.name) for name, option in options_in(kind).items()}
    given |= {"random_state": chosen.seed, "baselines": chosen.baselines, "standardise": chosen.data.standardise}
    given |= {"secure": chosen.secure}
    given |= {"epsilon": chosen.privacy.epsilon, "delta": chosen.privacy.delta} if issubclass(kind, Budgeted) else {}
    given |= {"outcome": chosen.data.outcome} if "outcome" in kind._get_param_names() else {}
    given |= {"model": model} if "model" in kind._get_param_names() else {}
    return kind(**{name: value for name, value in given.items() if value is not None})
