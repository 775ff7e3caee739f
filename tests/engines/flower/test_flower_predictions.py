# SPDX-License-Identifier: Apache-2.0
"""What predictions are worth is the same on nodes as in one process: probabilities, intervals, and new clients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from coterie.config import options
from coterie.data.clients import held_out
from coterie.data.ragged import Ragged
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from flower_grid import connected, plain_schema

METHODS: dict[str, dict[str, Any]] = {
    "ifca": {"clusters": {"n_clusters": 2}, "training": {"rounds": 5}},
    "shrunk": {"prior": {"spread": "intercept"}},
    "fedrep": {"model": {"hidden": [3]}, "training": {"rounds": 3}},
    "local": {"prior": {"penalty": 1.0}},
}


def rows(classes: int) -> Ragged:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 30, 3, generator=draw, dtype=torch.float64)
    own = torch.randn(20, 1, generator=draw, dtype=torch.float64)
    y = x.sum(-1) + own + torch.randn(20, 30, generator=draw, dtype=torch.float64)
    return Ragged.from_blocks(x, torch.bucketize(y, torch.linspace(-1, 1, classes - 1).double()) if classes else y)


def both(method: str, classes: int, folder: Path, **predictions: Any) -> tuple[Fitted, Fitted]:
    data, chosen = rows(classes), options({"method": method, **METHODS[method], "predictions": predictions})
    here = fit(held_out(data, plain_schema(data, classes), test_size=0.3, new_clients=0.2, seed=0), chosen)
    there, _ = connected(data, folder, nodes=3, classes=classes, test_size=0.3, new_clients=0.2)
    return here, fit(there, chosen)


def same(here: Any, far: Any, where: str = "") -> None:
    """Whether documents agree: networks in float32 differ in the last digits, and a row may change its bin."""
    if isinstance(here, dict):
        assert here.keys() == far.keys(), where
        for name, value in here.items():
            same(value, far[name], f"{where}.{name}")
    elif isinstance(here, list):
        assert len(here) == len(far), where
        for i, value in enumerate(here):
            same(value, far[i], f"{where}.{i}")
    elif here is not None:
        assert far == pytest.approx(here, abs=5e-3, rel=1e-3), where


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [2, 3])
def test_probabilities_are_worth_the_same_on_nodes(method: str, classes: int, tmp_path: Path) -> None:
    here, far = both(method, classes, tmp_path, class_weights="balanced")
    same(here.extra["probabilities"], far.extra["probabilities"])
    for name in ("auroc", "auroc_low", "average_precision", "log_loss", "brier", "base_rate"):
        np.testing.assert_allclose(far.per_client[name], here.per_client[name], atol=5e-3, err_msg=name)
    assert far.scores[0].new_clients_unlabelled == pytest.approx(here.scores[0].new_clients_unlabelled, abs=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_intervals_are_the_same_on_nodes(method: str, tmp_path: Path) -> None:
    here, far = both(method, 0, tmp_path, coverage=0.8)
    same(here.extra["coverage"], far.extra["coverage"])
    a, b = here.extra["intervals"], far.extra["intervals"]
    assert a.levels == b.levels
    for name in ("noise", "own", "pooled", "population"):
        np.testing.assert_allclose(getattr(b, name), getattr(a, name), rtol=0.02, err_msg=name)  # bins are 1 % wide
