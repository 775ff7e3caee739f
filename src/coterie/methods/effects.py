# SPDX-License-Identifier: Apache-2.0
"""Linear models of clients' own, drawn from what is known of everybody's: local, shrunk, and low-rank models.

The arithmetic is that of the comparison: a client's model is m + B v, with v ~ N(0, I) (`algorithms/random_effects.py`).
Here it is fitted to all training rows, kept, and used for clients that come later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.algorithms.intervals import uncertainty
from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.random_effects import Prior, adapt_effects_ask, as_dense, keeps_covariance
from coterie.config import PRIOR, FitOptions
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.engines.checkpoint import save_tensors
from coterie.engines.private import RemoteState
from coterie.errors import ConfigError, DataError, RunError
from coterie.methods.base import Fitted, Given
from coterie.methods.baselines import measure_beside, run_with_baselines
from coterie.methods.coefficients import prior_coefficients
from coterie.methods.linear.fitting import prior_phase, problem_of
from coterie.methods.linear.structures import Setting
from coterie.methods.measuring import Entry
from coterie.methods.personal.model import Adopted, Personal, PersonalWords
from coterie.methods.personal.scores import spread
from coterie.methods.predictions import Population, more_ask, population_of, predicted
from coterie.methods.session import Prepared, Session, model_for, prepare
from coterie.methods.stored import Stored
from coterie.models import Dense, Model
from coterie.protocol import Ask

__all__ = ["EffectModels", "FromPrior", "check_effects", "train_effects"]

_SETTINGS = {"local": "penalty", "shrunk": "prior", "representation": "rank"}  # what the comparison calls them
_UNCERTAIN = "models/uncertainty.safetensors"
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

    @property
    def spread(self) -> Tensor:
        """[P, P] how clients' models vary around the common one."""
        root = self.prior.root[-1, 0]
        return root @ root.T

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

    covariance: Tensor | None = None  # [M, P, P] how uncertain every client's model is, where that is known here

    def variance(self, rows: Ragged, known: Tensor) -> Tensor | None:
        """Variance of every row's prediction, in the order of storage; of clients that are new, how clients differ.  [N]

        None where that is not known; `known` [C] says who has a model of its own.
        """
        assert isinstance(self.fit, FromPrior)
        if self.covariance is None:
            return None
        place = {name: i for i, name in enumerate(self.names.tolist())}
        differ = torch.zeros_like(self.covariance[0]) if self.fit.structure == "local" else self.fit.spread
        made = [torch.zeros(0, dtype=torch.float64)]
        for block in rows.blocks():
            own = [
                self.covariance[place[str(rows.names[i])]] if known[i] and str(rows.names[i]) in place else differ
                for i in block.ids.tolist()
            ]
            made.append(uncertainty(block.x.double(), torch.stack(own))[block.real])
        return torch.cat(made)

    def joined(self, new: Adopted) -> "EffectModels":
        """Take clients in; of how uncertain their models are, nothing is kept, and as little is said as of new clients."""
        taken = super().joined(new)
        assert isinstance(taken, EffectModels)
        if self.covariance is None:
            return taken
        assert isinstance(self.fit, FromPrior)
        place = {name: i for i, name in enumerate(self.names.tolist()) if name not in set(new.names.tolist())}
        kept = [self.covariance[place[n]] if n in place else self.fit.spread for n in taken.names.tolist()]
        return replace(taken, covariance=torch.stack(kept))

    def save(self, folder: Path, schema: Schema) -> None:
        """Write how uncertain models are beside them."""
        super().save(folder, schema)
        if self.covariance is not None:
            save_tensors(folder / _UNCERTAIN, {"covariance": self.covariance}, {})

    @classmethod
    def load(cls, folder: Path, document: Mapping[str, Any], module: nn.Module | Model | None) -> tuple[Self, Schema]:
        """Read what `save` wrote."""
        found, schema = super().load(folder, document, module)
        if not (folder / _UNCERTAIN).exists() or isinstance(found.own, RemoteState):
            return found, schema
        p = found.model.n_parameters
        read = Stored(folder / _UNCERTAIN).tensor("covariance", len(found.names), p, p, dtype=torch.float64)
        return replace(found, covariance=read), schema

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
        fit = self.fit
        table = prior_coefficients(fit.structure, fit.prior, problem_of(fit.model), fitted.schema, self.scaling)
        return super().results(fitted) | {"setting": fit.setting, "coefficients": table}


def train_effects(session: Session, clients: Clients, given: Given) -> Fitted:
    """Fit linear models of clients' own, and measure them beside baselines."""
    options, made = session.options, prepare(session, clients, None)
    assert isinstance(made.model, Dense)
    problem = problem_of(made.model)
    phase = prior_phase(session, options.method, _setting(options), made.rows, made.scaling, problem)
    done, beside = run_with_baselines(session, made, phase)
    found = _from_prior(made, options.method, *done.states[0])
    assert isinstance(found.fit, FromPrior)
    judge, name = found.judge_ask(), (options.method, _title(found.fit))
    entry = Entry(0, judge, found.learn_ask(), more=more_ask(session, made, judge))
    start = found.fit.start
    outcome, scores, per_client, one = measure_beside(
        session, made, entry, name, beside,
        unknown=lambda one: start[None] if options.method != "local" else None if one is None else one[None],
    )  # fmt: skip
    uncertain, private = keeps_covariance(problem), outcome.private
    found = replace(found, own=found.parts_in(private))
    if uncertain and not isinstance(private, RemoteState):
        found = replace(found, covariance=private[0]["covariance"])
    found = replace(found, population=found.for_all(one) if options.method == "local" else found.fit.start)
    told = predicted(session, made, entry, outcome, _population(found, problem), uncertain=uncertain)
    extra = {"spread": spread(made, options.method, per_client), **told.extra}
    per_client |= told.per_client
    return Fitted(options, clients.schema, found, told.of(scores), per_client, extra=extra)


def _population(found: EffectModels, problem: Problem) -> Population | None:
    """The common model, and how clients differ from it; of local models nothing is known of that."""
    assert isinstance(found.fit, FromPrior)
    if found.fit.structure == "local" or not problem.is_regression:
        return population_of(found)
    return population_of(found, noise=float(found.fit.prior.noise[-1, 0]), covariance=found.fit.spread)


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
