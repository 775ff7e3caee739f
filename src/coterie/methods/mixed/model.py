# SPDX-License-Identifier: Apache-2.0
"""The mixed model in use: fixed effects for all, random effects of every client, and how a new client gets them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from coterie.algorithms.mixed_clients import adapt_mixed_ask
from coterie.algorithms.mixed_logistic import adapt_logit_ask
from coterie.algorithms.random_effects import as_dense
from coterie.data.schema import Schema
from coterie.engines.checkpoint import save_tensors
from coterie.errors import RunError
from coterie.limits import MOST_COLUMNS, MOST_NAME
from coterie.methods.base import Fitted
from coterie.methods.mixed.quantities import WIDE
from coterie.methods.personal.model import Personal, PersonalWords
from coterie.methods.stored import Stored, StoredNames
from coterie.models import Dense, Model
from coterie.protocol import Ask
from coterie.report.numbers import decimals_for, fixed

__all__ = ["ClientEffects", "FromEffects", "MixedModels"]

_EFFECTS = "models/effects.safetensors"


@dataclass(frozen=True)
class FromEffects:
    """How a client gets its model: the fixed effects, and what its labelled rows say of its random effects.

    Attributes
    ----------
    names : tuple of str
        [R] what has random effects.
    model : Dense
        What is kept of a client.
    basis : Tensor
        [R, D + 1] what makes columns of random effects of scaled features and intercept.
    units : Tensor
        [R, R] what makes random effects those of the data's own units.
    beta : Tensor
        [D + 1] fixed effects, of scaled features and intercept.
    root : Tensor
        [R, R] A, of the covariance A A^T of random effects; of numbers, over the variance of the noise.
    noise : Tensor
        [] variance of the noise, of scaled targets; 1 for classes.
    """

    names: tuple[str, ...]
    model: Dense
    basis: Tensor
    units: Tensor
    beta: Tensor
    root: Tensor
    noise: Tensor

    @property
    def start(self) -> Tensor:
        """[P] the model of a client that has shown nothing: that of the population."""
        return as_dense(self.model, self.beta)

    def ask(self) -> Ask:
        """Ask clients for their random effects, which stay with them."""
        if self.model.loss == "cross_entropy":
            return adapt_logit_ask(self.model, self.basis, self.units, self.beta, self.root)
        covariance = self.root @ self.root.T
        return adapt_mixed_ask(self.model, self.basis, self.units, self.beta, covariance, self.noise)

    def record(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All of it, as tensors and words."""
        tensors = {f"mixed/{name}": getattr(self, name) for name in ("basis", "units", "beta", "root", "noise")}
        return tensors, {"random": list(self.names)}


@dataclass(frozen=True)
class ClientEffects:
    """Random effects of the clients of the training, in the data's own units.

    Attributes
    ----------
    names : ndarray
        [M] of the clients.
    effects, deviation : Tensor
        [M, R] predicted effects (BLUPs), and their standard deviations given the rows and all that is common.
    """

    names: np.ndarray
    effects: Tensor
    deviation: Tensor


class MixedWords(PersonalWords):
    """What a mixed model says of itself."""

    random: Annotated[
        list[Annotated[str, Field(max_length=MOST_NAME)]], Field(min_length=1, max_length=MOST_COLUMNS)
    ]  # fmt: skip


@dataclass(frozen=True)
class MixedModels(Personal):
    """Fixed effects, and what is each client's own.

    Attributes
    ----------
    quantities : dict
        Estimates, intervals, likelihood and tests, as the run's document has them under `mixed`.
    client_effects : ClientEffects or None
        Of the clients of the training; None where they stay on other machines.
    """

    words: ClassVar[type[PersonalWords]] = MixedWords
    summary: ClassVar[tuple[str, ...]] = (*Personal.summary, "mixed")

    quantities: dict[str, Any] = field(default_factory=dict)
    client_effects: ClientEffects | None = None

    @staticmethod
    def read_fit(model: Model, common: Stored, said: Any, length: int) -> FromEffects:
        """Read how a client gets its model."""
        if not isinstance(model, Dense) or not model.is_linear or not model.intercept:
            raise RunError(f"{common.path} has random effects of a model that is not linear", "start the run again")
        size, columns = len(said.random), model.sizes[0] + 1
        shapes: dict[str, tuple[int, ...]] = {
            "basis": (size, columns), "units": (size, size), "beta": (columns,), "root": (size, size), "noise": (),
        }  # fmt: skip
        read = {name: common.tensor(f"mixed/{name}", *shape, dtype=torch.float64) for name, shape in shapes.items()}
        return FromEffects(tuple(said.random), model, **read)

    def save(self, folder: Path, schema: Schema) -> None:
        """Write what all share, what is each client's own, and beside it their random effects."""
        super().save(folder, schema)
        if self.client_effects is not None:
            tensors = {name: getattr(self.client_effects, name) for name in ("effects", "deviation")}
            save_tensors(folder / _EFFECTS, tensors, {"names": self.client_effects.names.tolist()})

    @classmethod
    def load(cls, folder: Path, document: Mapping[str, Any], module: nn.Module | Model | None) -> tuple[Self, Schema]:
        """Read what `save` wrote."""
        found, schema = super().load(folder, document, module)
        own = None
        if (folder / _EFFECTS).exists():
            assert isinstance(found.fit, FromEffects)
            stored = Stored(folder / _EFFECTS)
            names = stored.words(StoredNames).array
            shape = (len(names), len(found.fit.names))
            own = ClientEffects(
                names, *(stored.tensor(name, *shape, dtype=torch.float64) for name in ("effects", "deviation"))
            )
        return replace(found, quantities=document["results"].get("mixed") or {}, client_effects=own), schema

    def results(self, fitted: Fitted) -> dict[str, Any]:
        """What the run's document says of the model."""
        return super().results(fitted) | {"mixed": self.quantities}

    def clients(self, fitted: Fitted) -> dict[str, Any]:
        """Every client's random effects and their standard deviations, where they are here."""
        if self.client_effects is None:
            return {}
        assert isinstance(self.fit, FromEffects)
        own, names = self.client_effects, list(enumerate(self.fit.names))
        columns = {f"effect {name}": own.effects[:, r].numpy() for r, name in names}
        return columns | {f"deviation {name}": own.deviation[:, r].numpy() for r, name in names}

    def remarks(self, fitted: Fitted) -> list[str]:
        """The estimates in short, after what is said of all personal models."""
        return [*super().remarks(fitted), *_told(self.quantities)]


def _told(found: Mapping[str, Any]) -> list[str]:
    """A table of estimates for the screen."""
    how = "REML" if found["reml"] else "maximum likelihood" if found["residual_sd"] else "Laplace's approximation"
    lines = [f"mixed model by {how}, {found['rows']} training rows of {found['clients']} clients"]
    table = [("fixed effect", "estimate", "std. error", "95 % interval")]
    for one in found["fixed"]:
        digits = decimals_for([one["error"]], 3, most=9)
        estimate, error, low, high = (fixed(one[name], digits) for name in ("estimate", "error", "low", "high"))
        table.append((one["name"], estimate, error, f"{low} to {high}"))
    wide = [max(len(row[k]) for row in table) for k in range(4)]
    lines += ["  " + "  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]) for row in table]
    sd = ", ".join(f"{one['name']} {one['sd']:.4g}" for one in found["random"])
    noise = "" if found["residual_sd"] is None else f"; of rows: {found['residual_sd']:.4g}"
    lines.append(f"standard deviations between clients: {sd}{noise}; intraclass correlation {found['icc']:.3f}")
    test = found["test"]
    lines.append(
        f"log-likelihood {found['log_likelihood']:.2f}, AIC {found['aic']:.2f}, BIC {found['bic']:.2f}; against no random "
        f"effects: likelihood ratio {test['statistic']:.2f}, p {_p(test['p'])}"
    )
    for one in found["heterogeneity"]:
        lines.append(
            f"heterogeneity of {one['name']}: Q {one['q']:.1f} on {one['freedom']}, p {_p(one['p'])}, "
            f"I² {one['i2']:.1%}, tau² {one['tau2']:.4g}{_without(one)}"
        )
    return lines


def _without(one: Mapping[str, Any]) -> str:
    """How many clients have no estimate of their own."""
    left_out = one.get("left_out")
    return f"; without estimates of their own: {left_out} of {left_out + one['clients']} clients" if left_out else ""


def _p(value: float) -> str:
    return "below 0.001" if value < 0.001 else f"{value:.3f}"


def interval_of(effects: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """95 % intervals of random effects, given all that is common."""
    return effects - WIDE * deviation, effects + WIDE * deviation
