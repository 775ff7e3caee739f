# SPDX-License-Identifier: Apache-2.0
"""A run with secure sums: its folder says what they cost, has no value of a single client, and is read back."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import coterie
from command import coterie as command
from planted import planted

WORDS = ("--client", "site", "--target", "y", "--rounds", "3", "--secure", "--no-baselines")


def test_a_run_folder_of_secure_sums(tmp_path: Path) -> None:
    data, run = planted(12, 20).write(tmp_path / "a.csv"), tmp_path / "run"
    how = ("--method", "ifca", "--clusters", "2", "--set", "clusters.init=balanced")
    assert command("fit", str(data), *WORDS, *how, "--out", str(run)).code == 0
    document = json.loads((run / "run.json").read_text(encoding="utf-8"))
    cost = document["results"]["secure"]
    assert (cost["nodes"], cost["threshold"], cost["dropped"]) == (8, 6, {})
    assert set(pq.read_table(run / "clients.parquet").column_names) == {"client", "rows_train", "rows_test"}
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Nodes added up securely" in page
    assert "Nobody dropped out." in page
    model = coterie.load(run)
    assert sum(model.cluster_sizes_) == 12
    assert not hasattr(model, "labels_")
    assert model.secure is True
    assert len(model.predict(coterie.read(data, client="site", target="y"))) > 0


@pytest.mark.parametrize(
    ("how", "way_out"),
    [
        (("--method", "ifca"), "clusters.init=balanced"),
        (("--method", "mixture"), "leave secure out"),
    ],
)
def test_what_secure_sums_do_not_tell_is_refused_with_a_way_out(
    how: tuple[str, ...], way_out: str, tmp_path: Path
) -> None:
    data = planted(12, 20).write(tmp_path / "a.csv")
    words = [word for word in WORDS if word != "--no-baselines"]
    if how[1] != "ifca":
        words = [word for word in words if word not in ("--rounds", "3")]
    found = command("fit", str(data), *words, *how, "--out", str(tmp_path / "run"))
    assert found.code == 2
    assert way_out in found.err
    assert not (tmp_path / "run" / "run.json").exists()
