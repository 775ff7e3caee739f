# SPDX-License-Identifier: Apache-2.0
"""Outcomes on nodes of a federation: what is found there is what is found here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from coterie.config import options
from coterie.data.clients import Clients, held_out
from coterie.data.ragged import Ragged
from coterie.methods.fit import fit
from coterie.selection import compare
from flower_grid import connected
from helpers import federation
from outcomes import drawn

SIZES = (20, 24, 30, 18, 26, 22, 20, 35, 28, 24)


def with_targets(outcome: str) -> Ragged:
    rows = federation(SIZES).rows
    assert isinstance(rows.x, Tensor)
    y = torch.from_numpy(drawn(outcome, 0.5 + 0.5 * rows.x[:, 0].numpy()))
    return replace(rows, y=y.long() if outcome == "ordinal" else y)


def both(outcome: str, folder: Path, **held: Any) -> tuple[Clients, Clients]:
    """The same clients on nodes and here."""
    rows = with_targets(outcome)
    far, _ = connected(rows, folder, classes=4 if outcome == "ordinal" else 0, **held)
    return far.with_outcome(outcome), held_out(rows, far.schema, **held).with_outcome(outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", ["poisson", "gamma", "ordinal"])
def test_a_fit_of_clients_elsewhere_is_the_fit_of_clients_here(outcome: str, tmp_path: Path) -> None:
    held = {"test_size": 0.2, "new_clients": 0.2, "seed": 1}
    far, here = both(outcome, tmp_path, **held)
    for method in ("fedavg", "ifca", "shrunk"):
        chosen = options({"method": method, "seed": 1} | ({"prior": {"spread": "same"}} if method == "shrunk" else {}))
        ours, theirs = fit(far, chosen), fit(here, chosen)
        torch.testing.assert_close(ours.models.theta, theirs.models.theta, rtol=1e-7, atol=1e-7)
        for one, other in zip(ours.scores, theirs.scores, strict=True):
            assert (one.train, one.test) == pytest.approx((other.train, other.test), rel=1e-7)
        assert ours.scores[0].new_clients == pytest.approx(theirs.scores[0].new_clients, rel=1e-7)


def test_a_comparison_of_counts_elsewhere_finds_what_it_finds_here(tmp_path: Path) -> None:
    far, here = both("negative-binomial", tmp_path, test_size=0.2, new_clients=0.2, seed=1)
    how: dict[str, Any] = {"quick": True, "seed": 1, "max_clusters": 2, "max_rank": 1, "folds": 2}
    ours, theirs = compare(far, **how), compare(here, **how)
    assert ours.chosen == theirs.chosen
    for one, other in zip(ours.structures, theirs.structures, strict=True):
        assert one.setting == other.setting
        assert np.allclose(one.client_score, other.client_score, rtol=1e-6, atol=1e-6, equal_nan=True)
