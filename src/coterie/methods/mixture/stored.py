# SPDX-License-Identifier: Apache-2.0
"""Mixtures in a run folder, and what is said of them: the part of `Mixtures` that computes nothing."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from pydantic import AllowInfNan, Field, model_validator
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.data.schema import Schema
from coterie.documents import Said
from coterie.engines.checkpoint import save_tensors
from coterie.errors import RunError
from coterie.limits import MOST_FEATURES
from coterie.methods.base import Fitted
from coterie.methods.mixture.results import OUTLIER, Choice, MixtureFit
from coterie.methods.run_tables import rounds_table
from coterie.methods.stored import Stored, StoredNames, scaling_record
from coterie.models import Model
from coterie.models.mixtures import Family, Gaussian, Regression

__all__ = ["StoredMixtures", "Typical", "read_choice"]

_COMMON = "models/models.safetensors"  # what a newcomer needs
_CLIENTS = "models/clients.safetensors"  # what is each client's own
_AGAIN = "copy the whole folder of the run again, or start it again with `coterie fit`"
_CHOSEN = {"held-out": "chosen on held-out rows", "bic": "chosen by BIC"}


class _Gaussian(Said):
    family: Literal["gaussian"]
    n_features: Annotated[int, Field(ge=1, le=MOST_FEATURES)]
    covariance: Literal["unit", "diagonal", "full"]

    def made(self) -> Gaussian:
        return Gaussian(self.n_features, self.covariance)


class _Regression(Said):
    family: Literal["regression"]
    n_features: Annotated[int, Field(ge=1, le=MOST_FEATURES)]
    intercept: bool
    variance: Literal["unit", "estimated"]

    def made(self) -> Regression:
        return Regression(self.n_features, self.intercept, self.variance)


class _Typical(Said):
    likelihood: Annotated[float, AllowInfNan(True)]  # there may be too few clients to say
    spread: Annotated[float, AllowInfNan(True)]
    deviation: Annotated[float, AllowInfNan(True)]


class _Words(Said):
    family: _Gaussian | _Regression = Field(discriminator="family")
    schema_: Annotated[Schema, Field(alias="schema")]
    typical: _Typical
    rounds: Annotated[int, Field(ge=0)]
    c_lambda: Annotated[float, Field(ge=0)] | Literal["common"] | None

    @model_validator(mode="after")
    def _has_its_target(self) -> Self:
        if (self.schema_.task == "regression") != (self.family.family == "regression"):
            raise ValueError(f"a mixture of {self.family.family} does not fit the task {self.schema_.task}")
        return self


@dataclass(frozen=True)
class Typical:
    """How well the centre's components fit the clients of the training: what newcomers are compared with."""

    likelihood: float  # median over clients of the mean log-likelihood of a row
    spread: float  # of these means: 1.4826 times their median absolute deviation
    deviation: float  # of single rows within a client, median over clients


@dataclass(frozen=True)
class StoredMixtures:
    """Everybody's mixture, for rows that are scaled.

    Attributes
    ----------
    fit : MixtureFit
        Of scaled rows.
    scaling : Scaling
        Of the columns.
    names : ndarray
        [M] clients, ascending.
    new_scale : Tensor
        [...] of a client that was not there: wider, since its components are not quite the centre's.
    typical : Typical
        How well the centre fits them.
    """

    summary: ClassVar[tuple[str, ...]] = (
        "methods", "n_components", "c_lambda", "outliers", "rounds", "settled", "warnings",
    )  # fmt: skip
    metric: ClassVar[str] = "log_likelihood"

    fit: MixtureFit
    scaling: Scaling
    names: np.ndarray
    new_scale: Tensor
    typical: Typical

    # -- parameters in the columns' own units -------------------------------------------------------------------------
    def raw(self, theta: Tensor) -> Tensor:
        """Means, or coefficients with the intercept last.  [..., P]"""
        s, family = self.scaling, self.fit.family
        if not isinstance(family, Regression):
            return theta * s.scale + s.mean
        slope = theta[..., : family.n_features] * s.y_scale / s.scale
        if not family.intercept:
            return slope
        base = s.back(theta[..., family.n_features]) - (slope * s.mean).sum(-1)
        return torch.cat([slope, base[..., None]], -1)

    @property
    def covariance(self) -> Tensor:
        """[D, D] within a component; for regressions [1, 1], of the residuals."""
        scale, unit = self.fit.scale[0], self.scaling.scale
        if isinstance(self.fit.family, Regression):
            return (self.scaling.y_scale / scale).square().reshape(1, 1)
        inverse: Tensor = torch.linalg.inv(scale)
        return (inverse.T @ inverse) * unit[:, None] * unit

    @property
    def mean_weights(self) -> Tensor:
        """[R] mean proportions of the clients that are no outliers."""
        good = ~self.fit.outliers & self.fit.outlier_score.isfinite()
        return self.fit.weights[good if bool(good.any()) else slice(None)].mean(0)

    @property
    def shift(self) -> float:
        """Log-likelihood of a scaled row minus that of the row itself."""
        scale = self.scaling.y_scale if isinstance(self.fit.family, Regression) else self.scaling.scale
        return float(scale.log().sum())

    # -- the run folder -----------------------------------------------------------------------------------------------
    def save(self, folder: Path, schema: Schema) -> None:
        """Write what is common, and what is each client's own, in units of scaled rows."""
        fit, (scaling, _) = self.fit, scaling_record(self.scaling)
        common = {"centre": fit.centre, "mean_weights": self.mean_weights, "scale": fit.scale}
        said = {
            "family": _said(fit.family), "schema": schema.model_dump(mode="json"), "typical": asdict(self.typical),
            "rounds": fit.rounds, "c_lambda": _word(fit.c_lambda),
        }  # fmt: skip
        save_tensors(folder / _COMMON, {**common, "new_scale": self.new_scale, **scaling}, said)
        own = {name: getattr(fit, name) for name in ("theta", "weights", "freedom", "outlier_score")}
        save_tensors(folder / _CLIENTS, own, {"names": self.names.tolist()})

    @classmethod
    def load(cls, folder: Path, document: Mapping[str, Any], module: nn.Module | Model | None) -> tuple[Self, Schema]:
        """Read what `save` wrote."""
        for name, what in ((_COMMON, "the centre"), (_CLIENTS, "every client's own components")):
            if not (folder / name).exists():
                way_out = "copy the whole folder of the run, or start it again with `coterie fit`"
                raise RunError(f"{folder} has no {name}, which holds {what}", way_out)
        common, own = Stored(folder / _COMMON), Stored(folder / _CLIENTS)
        said, who = common.words(_Words), own.words(StoredNames)
        family, m, d = said.family.made(), len(who.names), said.schema_.n_features
        if family.n_features != d:
            raise RunError(f"{common.path} has a mixture of {family.n_features} numbers, and rows of {d}", _AGAIN)
        centre = common.tensor("centre", None, family.n_parameters)
        r, each = len(centre), (d, d) if isinstance(family, Gaussian) else ()
        shapes: dict[str, tuple[int, ...]] = {
            "theta": (m, r, family.n_parameters), "weights": (m, r), "outlier_score": (m,), "freedom": (m, r),
        }  # fmt: skip
        mine = {name: own.tensor(name, *shape) for name, shape in shapes.items()}
        fit = MixtureFit(
            "fedgrem", family, centre, scale=_invertible(common, "scale", 1, *each), rounds=said.rounds,
            c_lambda=math.inf if said.c_lambda == "common" else said.c_lambda,
            choice=read_choice(document["results"].get("c_lambda_choice")), **mine,
        )  # fmt: skip
        usual, new_scale = Typical(**said.typical.model_dump()), _invertible(common, "new_scale", *each)
        return cls(fit, common.scaling(said.schema_, 1), who.array, new_scale, usual), said.schema_

    def results(self, fitted: Fitted) -> dict[str, Any]:
        """What the run's document says of the mixtures."""
        fit, by, counted = self.fit, {"by": fitted.options.mixture.choose_by}, fitted.extra["counted"]
        return {
            **{key: said for key, said in _said(fit.family).items() if key in ("family", "covariance", "variance")},
            "n_components": len(fit.centre),
            "c_lambda": _word(fit.c_lambda),
            "c_lambda_choice": None if fit.choice is None else _choice(fit.choice),
            "components_choice": None if counted is None else _choice(counted) | by,
            "rounds": fit.rounds,
            "settled": fitted.extra["settled"],
            "outlier_threshold": OUTLIER,
            "outliers": self._outliers(),
            "components": self._components(fitted.schema),
        }

    def _outliers(self) -> list[dict[str, Any]]:
        score = self.fit.outlier_score
        far = torch.argsort(score, descending=True)[: int(self.fit.outliers.sum())].tolist()
        return [{"client": str(self.names[k]), "score": float(score[k])} for k in far]

    def _components(self, schema: Schema) -> dict[str, Any]:
        """The centre in the columns' own units."""
        names, spread = list(schema.feature_names), self.covariance.diagonal().sqrt()
        about: dict[str, Any] = {"deviation": spread.tolist()}
        if isinstance(self.fit.family, Regression):
            names, about = names + ["intercept"] * self.fit.family.intercept, {"noise": float(spread)}
        centre = self.raw(self.fit.centre).tolist()
        return {"parameters": names, "centre": centre, "weights": self.mean_weights.tolist(), **about}

    def clients(self, fitted: Fitted) -> dict[str, Any]:
        """Who is an outlier, how much is each client's own, and its proportions."""
        fit, score = self.fit, self.fit.outlier_score.numpy()
        columns: dict[str, Any] = {
            "outlier_score": pa.array(score, mask=np.isneginf(score)),  # who was never heard has none
            "outlier": fit.outliers.numpy(),
            "own": fit.freedom.mean(1).numpy(),
        }
        return columns | {f"weight_{r}": fit.weights[:, r].numpy() for r in range(fit.weights.shape[1])}

    def rounds(self, fitted: Fitted) -> pa.Table:
        """The rounds, with losses in the columns' own units."""
        told = [r for r in fitted.rounds if "loss" in r.info]
        table = rounds_table([replace(r, info={**r.info, "loss": r.info["loss"] + self.shift}) for r in told])
        return table.append_column("change", pa.array([r.info["change"] for r in told], pa.float64()))

    # -- faces --------------------------------------------------------------------------------------------------------
    def remarks(self, fitted: Fitted) -> list[str]:
        """How many components there are, how much clients share, and how that was chosen."""
        fit, counted, said = self.fit, fitted.extra["counted"], []
        if counted is not None:
            how = _CHOSEN[fitted.options.mixture.choose_by]
            said.append(f"{len(fit.centre)} of at most {len(counted.values)} components: {how}")
        how = "as given" if fit.choice is None else _CHOSEN["held-out"]
        means = {0.0: " (every client alone)", math.inf: " (common components)"}.get(fit.c_lambda or 0.0, "")
        return [*said, f"C_lambda {fit.c_lambda:g}{means}: {how}"]

    def arrays(self) -> dict[str, Tensor]:
        """What all clients share."""
        return {"centre": self.fit.centre}


def _word(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "common" if value == math.inf else value


def _choice(choice: Choice) -> dict[str, Any]:
    values = [_word(value) for value in choice.values]
    return {"values": values, "scores": list(choice.scores), "chosen": choice.best}


def read_choice(said: Mapping[str, Any] | None) -> Choice | None:
    """Read back what a run's document says of a choice."""
    if said is None:
        return None
    values = tuple(math.inf if value == "common" else float(value) for value in said["values"])
    return Choice(values, tuple(math.nan if score is None else score for score in said["scores"]), said["chosen"])


def _said(family: Family) -> dict[str, Any]:
    """A family in words and numbers."""
    assert isinstance(family, Gaussian | Regression)
    return {"family": "regression" if isinstance(family, Regression) else "gaussian", **asdict(family)}


def _invertible(stored: Stored, name: str, *shape: int) -> Tensor:
    """A scale, or several, whose inverse there is."""
    found = stored.tensor(name, *shape)
    singular = torch.linalg.inv_ex(found).info.any() if len(shape) > 1 else (found == 0).any()
    if bool(singular) or not bool(found.isfinite().all()):
        raise RunError(f"{stored.path} has a tensor '{name}' that is no scale: it has no inverse", _AGAIN)
    return found
