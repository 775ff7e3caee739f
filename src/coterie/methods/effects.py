# SPDX-License-Identifier: Apache-2.0
"""Linear models of clients' own, drawn from what is known of everybody's: local, shrunk, and low-rank models.

The arithmetic is that of the comparison: a client's model is m + B v, with v ~ N(0, I) (`algorithms/random_effects.py`).
Here it is fitted to all training rows, kept, and used for clients that come later.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.random_effects import Prior, adapt_effects_ask, as_dense
from coterie.config import PRIOR, FitOptions
from coterie.data.clients import Clients
from coterie.errors import ConfigError, DataError, RunError
from coterie.methods.base import Fitted, Given
from coterie.methods.baselines import measure_beside, run_with_baselines
from coterie.methods.linear.fitting import prior_phase, problem_of
from coterie.methods.linear.structures import Setting
from coterie.methods.measuring import Entry
from coterie.methods.personal.model import Personal, PersonalWords
from coterie.methods.personal.scores import spread
from coterie.methods.session import Prepared, Session, model_for, prepare
from coterie.methods.stored import Stored
from coterie.models import Dense, Model
from coterie.protocol import Ask

__all__ = ["EffectModels", "FromPrior", "check_effects", "train_effects"]

_SETTINGS = {"local": "penalty", "shrunk": "prior", "representation": "rank"}  # what the comparison calls them
_PRIOR = ("mean", "root", "noise")  # fields of a prior
_TITLES = {"local": "one model each", "shrunk": "shrunk models", "representation": "representation"}


@dataclass(frozen=True)
class FromPrior:
    """How a client that has no model gets one: from the prior, and from its labelled rows.

    Attributes
    ----------
    structure : str
        "local", "shrunk" or "representation".
    setting : dict
        A penalty, what clients differ in, or a rank.
    prior : Prior
        One fit with one setting.
    model : Dense
        What the prior is about: linear regression, or log odds of classes.
    """

    structure: str
    setting: Setting
    prior: Prior
    model: Dense

    @property
    def start(self) -> Tensor:
        """[P] the model of a client that has shown nothing."""
        return as_dense(self.model, self.prior.mean[-1, 0])

    def record(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All of it, as tensors and words."""
        prior = {f"prior/{name}": getattr(self.prior, name) for name in _PRIOR}
        return prior, {"structure": self.structure, "setting": self.setting}

    def ask(self) -> Ask:
        """Ask clients to make models of their rows; they stay with the clients."""
        return adapt_effects_ask(self.prior, problem_of(self.model), self.model)


class EffectWords(PersonalWords):
    """What linear models of clients' own say of themselves."""

    structure: Literal["local", "shrunk", "representation"]
    setting: Annotated[dict[str, float | int | str], Field(min_length=1, max_length=1)]


@dataclass(frozen=True)
class EffectModels(Personal):
    """Linear models of clients' own, each drawn from one prior."""

    words: ClassVar[type[PersonalWords]] = EffectWords

    @staticmethod
    def read_fit(model: Model, common: Stored, said: Any, length: int) -> FromPrior:
        """Read how a client that has no model gets one."""
        if not isinstance(model, Dense) or not model.is_linear or not model.intercept:
            raise RunError(f"{common.path} has a prior of a model that is not linear", "start the run again")
        p = problem_of(model).n_parameters
        root = common.tensor("prior/root", 1, 1, p, None, dtype=torch.float64)
        mean, noise = (
            common.tensor(f"prior/{n}", 1, 1, *s, dtype=torch.float64) for n, s in (("mean", (p,)), ("noise", ()))
        )
        return FromPrior(said.structure, said.setting, Prior(mean, root, noise), model)

    def results(self, fitted: Fitted) -> dict[str, Any]:
        """What the run's document says of the models."""
        assert isinstance(self.fit, FromPrior)
        return super().results(fitted) | {"setting": self.fit.setting}


def train_effects(session: Session, clients: Clients, given: Given) -> Fitted:
    """Fit linear models of clients' own, and measure them beside baselines."""
    options, made = session.options, prepare(session, clients, None)
    assert isinstance(made.model, Dense)
    phase = prior_phase(session, options.method, _setting(options), made.rows, made.scaling, problem_of(made.model))
    done, beside = run_with_baselines(session, made, phase)
    found = _from_prior(made, options.method, *done.states[0])
    assert isinstance(found.fit, FromPrior)
    entry, name = Entry(0, found.judge_ask(), found.learn_ask()), (options.method, _title(found.fit))
    outcome, scores, per_client = measure_beside(session, made, entry, name, beside)
    found = replace(found, own=found.parts_in(outcome.private))
    extra = {"spread": spread(made, options.method, per_client)}
    return Fitted(options, clients.schema, found, scores, per_client, extra=extra)


def _from_prior(made: Prepared, structure: str, setting: Setting, prior: Prior) -> EffectModels:
    """Every client's model follows from the prior, which was fitted to all training rows, and from its own rows."""
    assert isinstance(made.model, Dense)
    fit = FromPrior(structure, setting, prior, made.model)
    everyone = fit.start.expand(made.rows.n_clients, -1)
    return EffectModels(made.model, (), fit.start, made.rows.names, everyone, fit, made.scaling)


def _setting(options: FitOptions) -> Setting | None:
    """The setting that the options give, as the comparison calls it."""
    value = getattr(options.prior, PRIOR[options.method])
    return None if value is None else {_SETTINGS[options.method]: value}


def _title(fit: FromPrior) -> str:
    """The method with its setting."""
    ((_, value),) = fit.setting.items()
    said = {"local": f"penalty {value:g}" if isinstance(value, float) else "", "representation": f"rank {value}"}
    return f"{_TITLES[fit.structure]}, {said.get(fit.structure, f'spread {value}')}"


# -- what is refused --------------------------------------------------------------------------------------------------
def check_effects(clients: Clients, options: FitOptions, given: Given) -> None:
    """Refuse what cannot work, before anything is written."""
    method = options.method
    if clients.schema.task == "none":
        raise DataError(f"{method} needs a target to learn", "name its column with --target, or pass y")
    model: Model = model_for(clients, options, given.module)
    if not isinstance(model, Dense) or not model.is_linear or not model.intercept:
        raise ConfigError(
            f"{method} is for linear models with an intercept", "leave hidden layers and model.intercept out"
        )
    if options.prior.rank is not None and options.prior.rank > model.sizes[0]:
        raise ConfigError(
            f"rank {options.prior.rank} is more than the {model.sizes[0]} features", "ask for a lower rank"
        )
    if options.prior.spread == "intercept" and problem_of(model).is_stratified:
        raise ConfigError(
            "every client has a baseline hazard of its own, so that there are no intercepts to differ",
            "give another prior.spread: same, diagonal or full",
        )
    enough = int((clients.train.counts >= 5).sum())
    if _setting(options) is None and enough < 2:
        raise DataError(
            f"{enough} clients have 5 training rows, and prior.{PRIOR[method]} is chosen by cross-validation within clients",
            f"give it: --set prior.{PRIOR[method]}=...",
        )
