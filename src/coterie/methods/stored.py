# SPDX-License-Identifier: Apache-2.0
"""Models and scalings as tensors and words, for run folders of every kind."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from coterie.algorithms.preparation import Scaling
from coterie.engines.checkpoint import to_record
from coterie.errors import ConfigError
from coterie.models import Dense, Model, Network

__all__ = ["describe", "model_from", "named_parameters", "scaling_from", "scaling_record"]

_SCALING = "scaling/"


def scaling_record(scaling: Scaling) -> tuple[dict[str, Tensor], int]:
    """How features and target are scaled, as tensors, and the degree of products."""
    tensors, said = to_record(scaling)
    return {f"{_SCALING}{name}": value for name, value in tensors.items()}, int(said["degree"])


def scaling_from(tensors: dict[str, Tensor], said: dict[str, Any]) -> Scaling:
    """Read what `scaling_record` made."""
    scaled = {name.removeprefix(_SCALING): value for name, value in tensors.items() if name.startswith(_SCALING)}
    return Scaling(**scaled, degree=said.get("degree", 1))


def named_parameters(model: Model, theta: Tensor) -> dict[str, Tensor]:
    """One model's parameters by name, in their own shapes: what `load_state_dict` takes."""
    if isinstance(model, Network):
        return model.unpack(theta)
    parts = [part for layer in model.unpack(theta) for part in layer if part is not None]
    return dict(zip(model.layers, parts, strict=True))


def describe(model: Model) -> dict[str, Any]:
    """A model in words and numbers; of a user's own network, how it is used."""
    if isinstance(model, Network):
        return {"kind": "network", "loss": model.loss, "shape": model.shape, "kernel": model.kernel}
    made = asdict(model)
    return {"kind": "dense", **made, "dtype": str(model.dtype).removeprefix("torch.")}


def model_from(said: dict[str, Any], module: nn.Module | Model | None) -> Model:
    """Make the model that `describe` described; the user's own network is given."""
    if said["kind"] == "dense":
        own = {name: said[name] for name in ("loss", "intercept", "l2")}
        return Dense(tuple(said["sizes"]), dtype=getattr(torch, said["dtype"]), **own)
    if isinstance(module, Network):
        return module
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "this run trained a torch module, whose code is not in the folder",
            "load it in Python: coterie.load(RUN, model=MyNet())",
        )
    shape = None if said["shape"] is None else tuple(said["shape"])
    return Network(module, said["loss"], shape, said["kernel"])
