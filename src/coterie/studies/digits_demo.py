# SPDX-License-Identifier: Apache-2.0
"""What `coterie demo` fits: 144 clients made of scikit-learn's digits in four rotations, nobody told which."""

from typing import Any

import torch
from torch import Tensor

from coterie.config import FitOptions, options
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.schema import Column, Schema
from coterie.evaluate import adjusted_rand
from coterie.methods.cluster_models import ClusterModels
from coterie.studies.data.images import Rotated, digits, rotated

__all__ = ["NAME", "demo_clients", "demo_options", "demo_results"]

NAME = "scikit-learn digits in four rotations"
_CLIENTS, _ROWS, _TEST_ROWS = 144, 39, 9  # nearly all of the 1,797 images, each in all four rotations


def demo_options(seed: int) -> FitOptions:
    """The options of the demo: a small network, four clusters."""
    return options(
        {
            "seed": seed,
            "data": {"path": NAME, "client": "client", "target": "digit", "standardise": False},
            "model": {"hidden": (128,)},
            "training": {"rounds": 60, "step_size": 0.3, "local_steps": 10},
            "clusters": {"n_clusters": 4},
        }
    )


def demo_clients(seed: int) -> Clients:
    """Training rows, and test rows of other images in each client's own rotation."""
    made = _rotated(seed)
    n = made.train.shape[0]
    columns = tuple(Column(name=f"pixel{i}", kind="numeric") for i in range(n))
    schema = Schema(
        client="client",
        target="digit",
        columns=columns,
        task="classification",
        classes=tuple("0123456789"),
        missing="error",
    )
    return Clients(schema, made.train, _test_rows(made))


def demo_results(seed: int, found: ClusterModels) -> dict[str, Any]:
    """How well the groups were found, which nobody but the demo can know."""
    return {"adjusted_rand": adjusted_rand(found.belongs.label, _rotated(seed).truth)}


def _rotated(seed: int) -> Rotated:
    return rotated(
        digits(seed), n_clients=_CLIENTS, rows=_ROWS, n_test_clients=_CLIENTS, test_rows=_TEST_ROWS, seed=seed
    )


def _test_rows(made: Rotated) -> Ragged:
    """Hand every training client the rows of a test client with the same rotation."""
    order = torch.empty(_CLIENTS, dtype=torch.int64)
    for angle in range(4):
        order[made.truth == angle] = torch.nonzero(made.test_truth == angle)[:, 0]
    x, y = made.test.x, made.test.y
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    return Ragged.from_blocks(
        x.view(_CLIENTS, _TEST_ROWS, -1)[order], y.view(_CLIENTS, _TEST_ROWS)[order], made.train.names
    )
