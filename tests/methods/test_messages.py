# SPDX-License-Identifier: Apache-2.0
"""How many messages a fit takes, with baselines, test rows and new clients: few, and as many on nodes as in process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from coterie.config import options
from coterie.data.clients import held_out
from coterie.data.ragged import Ragged
from coterie.engines.drive import Traffic
from coterie.engines.flower.messages import Batch
from coterie.engines.flower.wire import from_records
from coterie.evaluate import measure_placed_ask, place_ask, target_ask
from coterie.methods.fit import fit
from coterie.methods.linear.structures import Effort
from coterie.methods.session import On, Phase, Session
from coterie.models import linear_regression
from coterie.protocol import Lockstep, Save
from coterie.selection.run import compare
from coterie.studies.data.synthetic import mixed_regression
from flower_grid import MemoryGrid, connected, plain_schema
from helpers import federation
from planted_mixtures import clusters

BEYOND = 12  # messages beside the rounds and iterations themselves
ROUNDS, ITERATIONS = 5, 5
STARTED = ROUNDS + 4  # of mixtures: clients begin twice, and are numbered alike each time
POOLED, EM = Effort().steps, Effort().rounds  # rounds at most: of one model for all, and of each EM that follows


def rows(n_clients: int = 20, n_features: int = 4) -> Ragged:
    return mixed_regression(
        n_clients=n_clients,
        rows=30,
        n_features=n_features,
        n_clusters=3,
        noise=0.3,
        separation=4.0,
        preset="paper",
        seed=0,
    ).rows


ROWS = rows()
CHOSEN = 6  # of a setting: three for the noise, and for scores, who is an outlier, and scores of the others
THREE = {"clusters": {"n_clusters": 3}, "moments": {"iterations": ITERATIONS}}
MIXTURE: dict[str, dict[str, Any]] = {"mixture": {"n_components": 2, "restarts": 2, "rounds": ROUNDS}}
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "ifca": ({"clusters": {"n_clusters": 3}}, ROUNDS),
    "fedrep": ({"model": {"hidden": [3]}}, ROUNDS),
    "maml": ({}, ROUNDS),
    "fedavg": ({"model": {"hidden": [3]}}, ROUNDS),
    "moment-descent": (THREE, ROUNDS + ITERATIONS),
    "moment-descent, many features": (THREE, ROUNDS + ITERATIONS),
    "mixture": (MIXTURE, 2 * STARTED),  # C_lambda is chosen, and then there is the fit
    "mixture, no number": ({"mixture": {**MIXTURE["mixture"], "n_components": None, "max_components": 3}}, 3 * STARTED),
    "local": ({}, POOLED + CHOSEN),
    "shrunk": ({}, POOLED + 2 * EM + CHOSEN),
    "representation": ({}, POOLED + 2 * EM + EM // 2 + CHOSEN),
    "mixed": ({"mixed": {"slopes": ["x0"]}}, 15),
}
WITH_ROUNDS = {"ifca", "fedrep", "maml", "fedavg", "moment-descent"}
FEW = rows(n_clients=10)
OTHERS: dict[str, Ragged] = {
    "moment-descent, many features": rows(n_features=100), "mixture": FEW, "mixture, no number": replace(FEW, y=None),
}  # fmt: skip


def most_questions(grid: MemoryGrid) -> int:
    """Messages with questions to the node that had most."""
    asked = [m.metadata.dst_node_id for m in grid.sent if isinstance(from_records(m.content), Batch)]
    return max(asked.count(node) for node in set(asked))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fit_takes_few_messages_wherever_clients_are(name: str, tmp_path: Path) -> None:
    (given, rounds), data = SETTINGS[name], OTHERS.get(name, ROWS)
    method = name.partition(",")[0]
    training = {"training": {"rounds": ROUNDS}} if method in WITH_ROUNDS else {}
    chosen = options({"method": method, **training, **given})
    here = fit(held_out(data, plain_schema(data), test_size=0.2, new_clients=0.2, seed=0), chosen)
    there, grid = connected(data, tmp_path, nodes=3, test_size=0.2, new_clients=0.2)
    far = fit(there, chosen)
    assert here.traffic is not None
    assert far.traffic is not None
    assert here.traffic.messages == far.traffic.messages == most_questions(grid)
    assert far.traffic.messages <= rounds + BEYOND
    assert sum(r.messages for r in here.rounds) <= here.traffic.messages
    assert len(here.scores) == (2 if method in ("fedavg", "local") else 3)
    for a, b in zip(here.scores, far.scores, strict=True):
        assert (a.new_clients is None) == (a.method == "local" != method)
        sides = ["train", "test"] if a.new_clients is None else ["train", "test", "new_clients"]
        assert [getattr(b, side) for side in sides] == pytest.approx([getattr(a, side) for side in sides], rel=1e-6)


def test_a_comparison_without_a_target_takes_few_messages_wherever_clients_are(tmp_path: Path) -> None:
    data = clusters(6).clients().train
    here = compare(held_out(data, plain_schema(data), test_size=0.2, new_clients=0.2, seed=0), quick=True, folds=2)
    there, grid = connected(data, tmp_path, nodes=2, test_size=0.2, new_clients=0.2)
    far = compare(there, quick=True, folds=2)
    assert here.traffic.messages == far.traffic.messages == most_questions(grid)
    assert far.traffic.messages <= 120
    assert far.chosen == here.chosen
    for a, b in zip(here.structures, far.structures, strict=True):
        assert [b.score, b.test_score] == pytest.approx([a.score, a.test_score], rel=1e-6)
        assert (b.new_score or 0.0) == pytest.approx(a.new_score or 0.0, rel=1e-6)


def test_phases_on_several_sets_of_rows_share_their_messages() -> None:
    part, held = ROWS.split(0.3, seed=0)
    told: list[str] = []
    session = Session(watch=lambda phase, done, total: told.append(phase))

    def counting(rounds: int) -> Any:
        def program(state: Any) -> Lockstep:
            total = 0
            for _ in range(rounds):
                got = yield target_ask(torch.zeros((), dtype=torch.float64))
                total += int(got["n"])
                yield Save(None)
            return total

        return program

    phases = [
        Phase("short", part, [counting(2)], None, 2), Phase("long", held, [counting(5), counting(1)], None, 5, said=""),
    ]  # fmt: skip
    short, long = session.run_all(phases)
    n, n_held = part.layout.n_rows, held.layout.n_rows
    assert (short.states, long.states) == ([2 * n], [5 * n_held, n_held])
    assert [one.traffic.messages for one in (short, long)] == [2, 5]
    assert session.traffic.messages == 5
    assert session.traffic.bytes_up == short.traffic.bytes_up + long.traffic.bytes_up
    assert told == ["short"] * 2


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
