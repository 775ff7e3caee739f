# SPDX-License-Identifier: Apache-2.0
"""The question asked where the data is: the same answer as of all rows together, whatever happens on the way."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.data.clients import held_out
from coterie.data.ragged import Ragged
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.strategies import CoterieStrategy, compare
from coterie.errors import RunError
from coterie.runs.comparison import Compared, answers_of
from coterie.selection.result import Comparison
from coterie.studies.compare_planted import CASES, Settings, planted_clients
from flower_grid import MemoryGrid, connected, dealt, plain_schema
from planted import planted

NODES = 4
HOW: dict[str, Any] = {"nodes": NODES, "quick": True, "seed": 3}


@pytest.fixture(scope="module")
def rows() -> Ragged:
    return planted(16, 30, noise=0.5).clients(test_size=0.0).train


@pytest.fixture(scope="module")
def here(rows: Ragged) -> Comparison:
    clients = held_out(rows, plain_schema(rows), test_size=0.2, new_clients=0.2, seed=3)
    return coterie.compare(clients, quick=True, seed=3)


class Dies(MemoryGrid):
    """A server that is killed after so many messages."""

    left = 10**9

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        self.left -= len(messages)
        if self.left < 0:
            raise KeyboardInterrupt
        return super().push_messages(messages)


def numbers(found: Comparison) -> dict[str, Any]:
    said = found.document()
    del said["seconds"]
    return said


def test_the_answer_is_that_of_all_rows_together(rows: Ragged, here: Comparison, tmp_path: Path) -> None:
    grid = MemoryGrid(dealt(rows, tmp_path, nodes=NODES))
    there = compare(grid, **HOW)
    assert isinstance(there, Comparison)
    assert there.chosen == here.chosen
    for one in there.structures:
        same = here[one.name]
        assert one.setting == same.setting
        assert one.score == pytest.approx(same.score, abs=1e-6)
        assert one.test_metric == pytest.approx(same.test_metric, rel=1e-6)
        assert one.new_metric == pytest.approx(same.new_metric, rel=1e-6)
        np.testing.assert_allclose(one.client_score, same.client_score, atol=1e-6)
    assert there.grouping is not None
    assert here.grouping is not None
    np.testing.assert_array_equal(there.grouping.labels, here.grouping.labels)


def test_deals_of_the_folds_share_their_messages_and_give_the_same_answer(rows: Ragged, tmp_path: Path) -> None:
    how: dict[str, Any] = {"quick": True, "seed": 3, "structures": ("clusters", "shrunk"), "max_clusters": 2}
    here = coterie.compare(held_out(rows, plain_schema(rows), test_size=0.2, new_clients=0.2, seed=3), deals=2, **how)
    clients, _ = connected(rows, tmp_path, nodes=NODES, test_size=0.2, new_clients=0.2, seed=3)
    there = coterie.compare(clients, deals=2, **how)
    assert there.settings["deals"] == 2
    assert there.traffic.messages == here.traffic.messages
    assert there.chosen == here.chosen
    for one in there.structures:
        np.testing.assert_allclose(one.client_score, here[one.name].client_score, atol=1e-6)
        assert one.chosen_share == here[one.name].chosen_share
        assert one.df == pytest.approx(here[one.name].df, rel=1e-6)


def test_nodes_hold_out_the_last_rows_where_these_are_in_time_order(rows: Ragged, tmp_path: Path) -> None:
    timed = replace(rows, in_time=True)
    clients = held_out(timed, plain_schema(rows), test_size=0.2, new_clients=0.2, seed=3)
    only = ["global", "shrunk"]
    here = coterie.compare(clients, quick=True, seed=3, structures=only)
    far, _ = connected(timed, tmp_path, nodes=NODES, test_size=0.2, new_clients=0.2, seed=3)
    there = coterie.compare(far, quick=True, seed=3, structures=only)
    random = coterie.compare(
        held_out(rows, plain_schema(rows), test_size=0.2, new_clients=0.2, seed=3), quick=True, seed=3, structures=only
    )
    for one in there.structures:
        assert one.score == pytest.approx(here[one.name].score, abs=1e-6)
        assert one.test_metric == pytest.approx(here[one.name].test_metric, rel=1e-6)
        assert one.new_metric == pytest.approx(here[one.name].new_metric, rel=1e-6)
        assert one.test_metric != pytest.approx(random[one.name].test_metric, rel=1e-6)


def test_one_that_was_interrupted_ends_the_same(rows: Ragged, tmp_path: Path) -> None:
    """Killed at different messages, and once more after that."""
    whole = compare(
        MemoryGrid(dealt(rows, tmp_path / "a", nodes=NODES)), folder=tmp_path / "whole", exclude=("notes",), **HOW
    )
    holdings, folder = dealt(rows, tmp_path / "b", nodes=NODES), tmp_path / "killed"
    sent = []
    for after in (30, 61, 10**9):
        grid = Dies(holdings)
        grid.left = after
        try:
            done = compare(grid, folder=folder, exclude=("notes",), **HOW)
        except KeyboardInterrupt:
            assert not folder.exists()
            assert answers_of(folder).exists()
        sent.append(len(grid.sent))
    assert isinstance(whole, Compared)
    assert isinstance(done, Compared)
    assert done.fit is not None
    assert "--exclude notes" in done.fit  # as nodes have read their rows
    assert numbers(done.found) == numbers(whole.found)
    for one in done.found.structures:
        np.testing.assert_array_equal(one.client_score, whole.found[one.name].client_score)
    assert sorted(path.name for path in folder.iterdir()) == ["clients.parquet", "compare.json", "report.html"]
    assert not answers_of(folder).exists()
    alone = MemoryGrid(dealt(rows, tmp_path / "c", nodes=NODES))
    compare(alone, **HOW)
    assert sent[-1] < len(alone.sent) - 60  # what was answered before is not asked again


def test_answers_to_another_question_are_not_taken(rows: Ragged, tmp_path: Path) -> None:
    grid = Dies(dealt(rows, tmp_path, nodes=NODES))
    grid.left = 20
    with pytest.raises(KeyboardInterrupt):
        compare(grid, folder=tmp_path / "out", **HOW)
    with pytest.raises(RunError, match="another question"):
        compare(MemoryGrid(grid.nodes), folder=tmp_path / "out", **{**HOW, "seed": 4})


def test_who_never_answers_is_named_and_left_out(rows: Ragged, here: Comparison, tmp_path: Path) -> None:
    """From some message on a node is silent; the others decide."""
    clients, grid = connected(rows, tmp_path, nodes=NODES, test_size=0.2, new_clients=0.2, seed=3, timeout=0.05)
    lost = next(node for node, holding in grid.nodes.items() if holding.name == "node-2")
    answered = 0

    def silent(message: Any, reply: Any) -> Any:
        nonlocal answered
        answered += 1
        return reply if answered <= 20 else None

    grid.spoil[lost] = silent
    with pytest.warns(NodeWarning, match="node-2"):
        found = coterie.compare(clients, quick=True, seed=3)
    own = set(grid.nodes[lost].load(None).train.names.tolist()) & set(clients.names.tolist())
    assert set(found.absent) == own
    assert found.chosen == here.chosen
    assert f"{len(own)} clients did not answer" in " ".join(coterie.selection.text.answer(found).doubts)
    assert found.grouping is not None
    assert set(found.names[found.grouping.labels < 0].tolist()) == own
    assert int(found.grouping.sizes.sum()) == len(found.names) - len(own)


def test_auto_fits_what_is_found(rows: Ragged, tmp_path: Path) -> None:
    strategy, folder = CoterieStrategy("auto", seed=3), tmp_path / "run"
    strategy.start(MemoryGrid(dealt(rows, tmp_path / "nodes", nodes=NODES)), nodes=NODES, folder=folder)
    assert strategy.fitted_ is not None
    assert strategy.fitted_.options.method == "ifca"
    assert len(strategy.fitted_.models.theta) == 2
    document = json.loads((folder / "run.json").read_text())
    assert document["method"] == "ifca"
    assert document["results"]["why"]["chosen"] == "clusters"
    assert (folder / "comparison" / "report.html").exists()
    assert not (folder / "checkpoints").exists()


def test_auto_needs_no_folder(rows: Ragged, here: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.selection.compare", lambda *_, **__: replace(here, chosen="shrunk"))
    strategy = CoterieStrategy("auto", seed=3)
    strategy.start(MemoryGrid(dealt(rows, tmp_path, nodes=NODES)), nodes=NODES)
    assert strategy.fitted_ is not None
    assert strategy.fitted_.options.method == "shrunk"


def test_networks_are_compared_alike(rows: Ragged, tmp_path: Path) -> None:
    """In float32, and after a few rounds: scores agree to a few digits, choices in full."""
    how: dict[str, Any] = {
        "quick": True,
        "seed": 3,
        "hidden": (4,),
        "folds": 2,
        "structures": ("local", "representation"),
    }
    clients, _ = connected(rows, tmp_path, nodes=NODES, test_size=0.2, new_clients=0.2, seed=3)
    here = coterie.compare(held_out(rows, plain_schema(rows), test_size=0.2, new_clients=0.2, seed=3), **how)
    there = coterie.compare(clients, **how)
    assert there.chosen == here.chosen
    for one in there.structures:
        assert one.setting == here[one.name].setting
        assert one.score == pytest.approx(here[one.name].score, abs=2e-3)
        assert one.new_metric == pytest.approx(here[one.name].new_metric, rel=1e-2)


@pytest.mark.study
@pytest.mark.parametrize("number", range(20))
def test_planted_structures_are_found_alike_by_nodes_with_one_client_each(number: int, tmp_path: Path) -> None:
    """Every case of the study compare-planted with numbers or classes, once or twice."""
    plain = [case for case in CASES if case.outcome is None]
    settings, case = Settings(), plain[number % len(plain)]
    classes = 2 if case.rare else 0
    pooled = planted_clients(settings, case, number)
    rows = planted_clients(settings, case, number, test_size=0.0).train
    here = coterie.compare(pooled, quick=True, seed=number)
    clients, _ = connected(rows, tmp_path, nodes=settings.clients, classes=classes, test_size=0.2, seed=number)
    there = coterie.compare(clients, quick=True, seed=number)
    assert there.chosen == here.chosen
    for one in there.structures:
        assert one.setting == here[one.name].setting
        assert one.score == pytest.approx(here[one.name].score, abs=1e-6)
    print(f"{case.name}, seed {number}: {there.chosen} {there[there.chosen].setting}")
