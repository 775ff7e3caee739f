# SPDX-License-Identifier: Apache-2.0
"""Outcomes on nodes of a federation: what is found there is what is found here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from coterie.config import options
from coterie.data.clients import Clients, held_out
from coterie.data.ragged import Ragged
from coterie.engines.flower.node_data import node_data
from coterie.errors import RunError
from coterie.methods.fit import fit
from coterie.selection import compare
from flower_grid import connected
from helpers import federation
from outcomes import drawn

SIZES = (20, 24, 30, 18, 26, 22, 20, 35, 28, 24)


def with_targets(outcome: str) -> Ragged:
    rows = federation(SIZES).rows
    assert isinstance(rows.x, Tensor)
    eta = 0.5 + 0.5 * rows.x[:, 0].numpy()
    if outcome == "cox":
        draw = np.random.default_rng(0)
        times = np.ceil(20 * draw.exponential(np.exp(-eta))) / 20
        return replace(rows, y=torch.from_numpy(np.where(draw.random(len(eta)) < 0.7, times, -times)))
    y = torch.from_numpy(drawn(outcome, eta))
    return replace(rows, y=y.long() if outcome == "ordinal" else y)


def both(outcome: str, folder: Path, **held: Any) -> tuple[Clients, Clients]:
    """The same clients on nodes and here."""
    rows = with_targets(outcome)
    far, _ = connected(rows, folder, classes=4 if outcome == "ordinal" else 0, **held)
    event = "happened" if outcome == "cox" else None
    schema = far.schema.model_copy(update={"outcome": outcome, "event": event})
    return replace(far, schema=schema), held_out(rows, schema, **held)


@pytest.mark.parametrize("outcome", ["poisson", "ordinal", "cox"])
def test_a_fit_of_clients_elsewhere_is_the_fit_of_clients_here(outcome: str, tmp_path: Path) -> None:
    held = {"test_size": 0.2, "new_clients": 0.2, "seed": 1}
    far, here = both(outcome, tmp_path, **held)
    for method in ("fedavg", "ifca", *(["shrunk"] if outcome == "poisson" else [])):
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


# -- what nodes read --------------------------------------------------------------------------------------------------
def node(folder: Path, target: str, **data: str) -> Any:
    """A node with a table of counts, times and events, which reads it as a run says."""
    draw = np.random.default_rng(0)
    rows = {"site": ["a"] * 20 + ["b"] * 20, "x": draw.normal(size=40), "days": draw.exponential(size=40) + 0.1}
    rows |= {"visits": draw.poisson(30.0, size=40), "died": draw.integers(0, 2, 40)}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    chosen = options({"data": {"client": "site", "target": target, **data}}).model_dump_json()
    config = {"name": "n", "data": str(folder / "rows.parquet"), "client": "site", "target": target}
    return node_data(Context(1, 0, config, RecordDict(), {"options": chosen})).load(None)  # type: ignore[arg-type]


def test_a_node_reads_the_outcome_that_the_run_says(tmp_path: Path) -> None:
    counts = node(tmp_path, "visits", outcome="poisson")
    assert counts.schema.outcome == "poisson"
    times = node(tmp_path, "days", outcome="cox", event="died")
    assert times.schema.feature_names == ("x", "visits")
    assert bool((times.train.y < 0).any())
    assert bool((times.train.y > 0).any())


def test_a_node_does_not_tell_numbers_as_the_names_of_ordered_classes(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="takes 'visits' as classes, whose names nodes tell"):
        node(tmp_path, "visits", outcome="ordinal")
