# SPDX-License-Identifier: Apache-2.0
"""How many messages a fit takes, with baselines, test rows and new clients: few, and as many on nodes as in process."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from coterie.config import options
from coterie.data.clients import held_out
from coterie.engines.drive import Traffic
from coterie.engines.flower.messages import Batch
from coterie.engines.flower.wire import from_records
from coterie.evaluate import measure_placed_ask, place_ask
from coterie.methods.fit import fit
from coterie.methods.session import On, Session
from coterie.models import linear_regression
from coterie.studies.data.synthetic import mixed_regression
from flower_grid import MemoryGrid, connected, plain_schema
from helpers import federation

BEYOND = 12  # messages beside the rounds and iterations themselves
ROUNDS, ITERATIONS = 6, 3
ROWS = mixed_regression(
    n_clients=20, rows=30, n_features=4, n_clusters=3, noise=0.3, separation=4.0, preset="paper", seed=0
).rows
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "ifca": ({"clusters": {"n_clusters": 3}}, ROUNDS),
    "fedrep": ({"model": {"hidden": [3]}}, ROUNDS),
    "maml": ({}, ROUNDS),
    "fedavg": ({"model": {"hidden": [3]}}, ROUNDS),
    "moment-descent": ({"clusters": {"n_clusters": 3}, "moments": {"iterations": ITERATIONS}}, ROUNDS + ITERATIONS),
}


def most_questions(grid: MemoryGrid) -> int:
    """Messages with questions to the node that had most."""
    asked = [m.metadata.dst_node_id for m in grid.sent if isinstance(from_records(m.content), Batch)]
    return max(asked.count(node) for node in set(asked))


@pytest.mark.parametrize("method", SETTINGS)
def test_a_fit_takes_few_messages_wherever_clients_are(method: str, tmp_path: Path) -> None:
    given, rounds = SETTINGS[method]
    chosen = options({"method": method, "training": {"rounds": ROUNDS}, **given})
    here = fit(held_out(ROWS, plain_schema(ROWS), test_size=0.2, new_clients=0.2, seed=0), chosen)
    there, grid = connected(ROWS, tmp_path, test_size=0.2, new_clients=0.2)
    far = fit(there, chosen)
    assert here.traffic is not None
    assert far.traffic is not None
    assert here.traffic.messages == far.traffic.messages == most_questions(grid)
    assert far.traffic.messages <= rounds + BEYOND
    assert sum(r.messages for r in here.rounds) <= here.traffic.messages
    assert len(here.scores) == (2 if method == "fedavg" else 3)
    for a, b in zip(here.scores, far.scores, strict=True):
        assert (a.new_clients is None) == (a.method == "local")
        sides = ["train", "test"] if a.new_clients is None else ["train", "test", "new_clients"]
        assert [getattr(b, side) for side in sides] == pytest.approx([getattr(a, side) for side in sides], rel=1e-6)


def test_what_clients_learn_on_some_rows_is_used_on_others_of_the_same_message(tmp_path: Path) -> None:
    model, data = linear_regression(3), federation((14, 22, 17, 12))
    theta = torch.tensor([[1.0, -2.0, 0.5, 0.3], [-1.0, 1.0, 2.0, 0.3]], dtype=torch.float64)
    for rows in (data.rows, connected(data.rows, tmp_path, nodes=2)[0].train):
        part, held = rows.split(0.3, seed=0)
        session = Session()
        place, judge = place_ask(model, theta), measure_placed_ask(model, theta)
        placed, judged, alone = session.exchange(
            [On(part, {0: place}), On(held, {0: judge}, after=0), On(rows, {0: judge})]
        )
        assert session.traffic.messages == 1
        label = placed[0]["label"]
        assert sorted(set(label.tolist())) == [0, 1]
        want = session.ask(held, place)["losses"].gather(1, label[:, None])[:, 0]
        torch.testing.assert_close(judged[0]["loss"], want)
        first = session.ask(rows, place)["losses"][:, 0]
        torch.testing.assert_close(alone[0]["loss"], first)  # who was not placed has the first model


def test_traffic_adds_up() -> None:
    total = Traffic(1, 10, 100)
    total.add(Traffic(2, 20, 200))
    assert total == Traffic(3, 30, 300)
