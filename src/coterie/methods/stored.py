# SPDX-License-Identifier: Apache-2.0
"""Models and scalings as tensors and words, for run folders of every kind.

What is read back may come from anybody: words are checked against a model of them, and tensors for their shapes.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.data.schema import Schema
from coterie.documents import FirstFault, Said, checked
from coterie.engines.checkpoint import load_tensors, to_record
from coterie.errors import ConfigError, RunError
from coterie.limits import MOST_FEATURES, MOST_LAYERS, MOST_NAME
from coterie.local.monomials import n_monomials
from coterie.methods.session import target_of
from coterie.models import Dense, Loss, Model, Network

__all__ = ["Stored", "StoredNames", "StoredWords", "describe", "named_parameters", "scaling_record"]

_SCALING = "scaling/"
_AGAIN = "copy the whole folder of the run again, or start it again with `coterie fit`"
_M = TypeVar("_M", bound=BaseModel)


# -- what is written ----------------------------------------------------------------------------------------------------
def scaling_record(scaling: Scaling) -> tuple[dict[str, Tensor], int]:
    """How features and target are scaled, as tensors, and the degree of products."""
    tensors, said = to_record(scaling)
    return {f"{_SCALING}{name}": value for name, value in tensors.items()}, int(said["degree"])


def named_parameters(model: Model, theta: Tensor) -> dict[str, Tensor]:
    """One model's parameters by name, in their own shapes: what `load_state_dict` takes."""
    if isinstance(model, Network):
        return model.unpack(theta)
    parts = [part for layer in model.unpack(theta) for part in layer if part is not None]
    return dict(zip(model.layers, parts, strict=True))


def describe(model: Model) -> dict[str, Any]:
    """A model in words and numbers; of a user's own network, how it is used."""
    if isinstance(model, Network):
        said = {"kind": "network", "loss": model.loss, "shape": model.shape, "kernel": model.kernel}
        return said | {"class_weights": model.class_weights, "threshold": model.threshold}
    made = asdict(model)
    return {"kind": "dense", **made, "dtype": str(model.dtype).removeprefix("torch.")}


# -- what is read -------------------------------------------------------------------------------------------------------
class _Dense(Said):
    kind: Literal["dense"]
    sizes: Annotated[
        list[Annotated[int, Field(ge=1, le=MOST_FEATURES)]], Field(min_length=2, max_length=MOST_LAYERS + 2)
    ]
    loss: Loss
    intercept: bool
    l2: Annotated[float, Field(ge=0)]
    dtype: Literal["float32", "float64"]
    class_weights: Annotated[list[float], Field(max_length=MOST_FEATURES)] = Field(default_factory=list)
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5


class _Network(Said):
    kind: Literal["network"]
    loss: Literal["squared", "cross_entropy"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MOST_FEATURES)]], Field(max_length=4)] | None
    kernel: Literal["vmap", "loop"]
    class_weights: Annotated[list[float], Field(max_length=MOST_FEATURES)] = Field(default_factory=list)
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5


class StoredWords(Said):
    """What models say of themselves: their kind, and the rows that they take."""

    model: _Dense | _Network = Field(discriminator="kind")
    schema_: Annotated[Schema, Field(alias="schema")]
    degree: Annotated[int, Field(ge=1, le=1000)] = 1


class StoredNames(Said):
    """Whose tensors these are."""

    names: Annotated[list[Annotated[str, Field(max_length=MOST_NAME)]], FirstFault()]
    kept: dict[str, Any] | None = None  # where clients keep their own: see `RemoteState.record`

    @model_validator(mode="after")
    def _different(self) -> Self:
        if len(set(self.names)) < len(self.names):
            raise ValueError("a client is named twice")
        return self

    @property
    def array(self) -> np.ndarray:
        """[M]"""
        return np.asarray(self.names, dtype=str)


class Stored:
    """Tensors and words in a file, which anybody may have written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors, self._said = load_tensors(path)

    def words(self, kind: type[_M]) -> _M:
        """All that is said, checked."""
        return checked(kind, self._said, str(self.path), _AGAIN)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, *shape: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of this shape, of which None is any length above 0; of this precision, or of any."""
        found = self._tensors.get(name)
        if found is None:
            raise RunError(f"{self.path} has no tensor '{name}'", _AGAIN)
        fits = len(found.shape) == len(shape) and all(
            there == asked if asked is not None else there > 0 for there, asked in zip(found.shape, shape, strict=False)
        )
        if not fits:
            asked = ", ".join("n" if n is None else str(n) for n in shape)
            raise RunError(
                f"{self.path} has a tensor '{name}' of shape {list(found.shape)} in place of [{asked}]", _AGAIN
            )
        if found.dtype not in (torch.float32, torch.float64) if dtype is None else found.dtype != dtype:
            wanted = "real numbers" if dtype is None else str(dtype).removeprefix("torch.")
            raise RunError(f"{self.path} has a tensor '{name}' of {found.dtype} in place of {wanted}", _AGAIN)
        return found

    def model(self, said: StoredWords, module: nn.Module | Model | None) -> Model:
        """The model that `describe` described, which fits its rows; the user's own network is given."""
        schema = said.schema_
        loss, outputs = target_of(schema)
        if schema.task == "none" or said.model.loss != loss:
            raise RunError(f"{self.path} has a model of {said.model.loss} for the task {schema.task}", _AGAIN)
        if isinstance(said.model, _Dense):
            one, inputs = said.model, n_monomials(schema.n_features, said.degree)
            if (one.sizes[0], one.sizes[-1]) != (inputs, outputs):
                raise RunError(
                    f"{self.path} has a model of {one.sizes[0]} numbers and {one.sizes[-1]} outputs, and rows of {inputs} "
                    f"numbers and {outputs} outputs",
                    _AGAIN,
                )
            weights, dtype = tuple(one.class_weights), getattr(torch, one.dtype)
            return Dense(tuple(one.sizes), one.loss, one.intercept, one.l2, dtype, weights, one.threshold)
        if isinstance(module, Network):
            return module
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "this run trained a torch module, whose code is not in the folder",
                "load it in Python: coterie.load(RUN, model=MyNet())",
            )
        shape = None if said.model.shape is None else tuple(said.model.shape)
        deciding = {"class_weights": tuple(said.model.class_weights), "threshold": said.model.threshold}
        return Network(module, said.model.loss, shape, said.model.kernel, **deciding)  # type: ignore[arg-type]

    def scaling(self, schema: Schema, degree: int) -> Scaling:
        """What `scaling_record` made: of features in the shape that rows have, of the target, and of products."""
        mean = self._tensors.get(f"{_SCALING}mean")
        shape = (schema.n_features,) if mean is None else tuple(mean.shape)  # images have several dimensions
        if mean is not None and mean.numel() != schema.n_features:
            raise RunError(f"{self.path} scales {mean.numel()} features of {schema.n_features}", _AGAIN)
        made = {name: self.tensor(f"{_SCALING}{name}", *shape) for name in ("fill", "mean", "scale")}
        made |= {name: self.tensor(f"{_SCALING}{name}") for name in ("y_mean", "y_scale")}
        if degree > 1:
            products = n_monomials(schema.n_features, degree)
            made |= {n: self.tensor(f"{_SCALING}{n}", products) for n in ("monomial_mean", "monomial_scale")}
        return Scaling(**made, degree=degree)
