# SPDX-License-Identifier: Apache-2.0
"""A comparison of what sites share in place of their rows is the comparison of the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
import pytest

import coterie
from coterie import ConfigError
from coterie.selection import Comparison, compare
from coterie.selection.fit import fit_chosen
from sites import Sites, planted_table, written

FROM_SUMS = ("global", "clusters", "local", "shrunk", "representation")


def assert_same(ours: Comparison, rows: Comparison) -> None:
    """To 1e-8, in all that is said of structures and clients."""
    assert ours.chosen == rows.chosen
    assert ours.outliers == rows.outliers
    assert [one.name for one in ours.structures] == list(FROM_SUMS)
    for one, other in zip(ours.structures, rows.structures, strict=True):
        assert (one.setting, one.as_good, one.fit) == (other.setting, other.as_good, other.fit)
        for name in ("score", "stderr", "metric", "test_metric", "test_score", "test_r2", "new_metric", "new_score"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-8), (one.name, name)
        np.testing.assert_allclose(one.client_score, other.client_score, atol=1e-8)
        np.testing.assert_allclose(one.client_test_metric, other.client_test_metric, atol=1e-8)
        assert [trial.score for trial in one.trials] == pytest.approx([t.score for t in other.trials], abs=1e-8)
    assert ours.grouping is not None
    assert rows.grouping is not None
    assert ours.grouping.labels.tolist() == rows.grouping.labels.tolist()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return written(tmp_path_factory.mktemp("sites"), planted_table(), "who", target="y", few_shot=5, seed=2)


@pytest.fixture(scope="module")
def clients(sites: Sites) -> coterie.Clients:
    return coterie.read(sites.summaries, new_clients=0.2, seed=2)


@pytest.mark.parametrize("deals", [1, 2])
def test_planted_groups_are_found_as_on_the_rows(sites: Sites, clients: coterie.Clients, deals: int) -> None:
    pooled = coterie.read(sites.pooled, client="who", target="y", new_clients=0.2, seed=2)
    ours = compare(clients, quick=True, seed=2, deals=deals)
    rows = compare(pooled, quick=True, seed=2, deals=deals, structures=FROM_SUMS)
    assert ours.chosen == "clusters"
    assert_same(ours, rows)
    assert "Mixtures within clients were not compared" in ours.notes[-1]
    models = [fit_chosen(some, ours).models for some in (clients, pooled)]
    assert models[0].placed.label.tolist() == models[1].placed.label.tolist()
    np.testing.assert_allclose(models[0].theta, models[1].theta, atol=1e-8)


def test_rows_are_dealt_twice_if_the_files_say_how(sites: Sites, clients: coterie.Clients, tmp_path: Path) -> None:
    few: dict[str, Any] = {"seed": 2, "max_clusters": 2, "max_rank": 1, "repetitions": 0}
    assert compare(clients, **few).settings["deals"] == 2
    for number, table in enumerate(sites.tables):
        coterie.summarise(table, tmp_path / f"{number}.json", client="who", target="y", seed=2, deals=1)
    once = compare(coterie.read(tmp_path, seed=2), **few)
    assert once.settings["deals"] == 1


def test_schools_are_compared_as_on_the_rows(shared_data: Path, tmp_path: Path) -> None:
    table = pc.read_csv(shared_data / "school_exam_139schools.csv.gz")
    schools = written(tmp_path, table, "school", target="score", exclude=["x27"], few_shot=5)
    pooled = coterie.read(schools.pooled, client="school", target="score", exclude=["x27"], new_clients=0.2)
    few = {"quick": True, "max_clusters": 2, "max_rank": 2}
    ours = compare(coterie.read(schools.summaries, new_clients=0.2), **few)
    assert_same(ours, compare(pooled, structures=FROM_SUMS, **few))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"structures": ["mixture"]}, "the structure 'mixture' needs rows"),
        ({"hidden": (4,)}, "a network needs rows"),
        ({"folds": 4, "seed": 2}, "written for 5 folds"),
        ({"seed": 1}, "and seed 2, and .* seed 1 are asked for"),
        ({"few_shot": 3, "seed": 2}, "written for 5 rows of a new client"),
    ],
)
def test_what_summaries_cannot_tell_is_refused(clients: coterie.Clients, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compare(clients, quick=True, **asked)
