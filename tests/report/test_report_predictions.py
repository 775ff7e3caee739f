# SPDX-License-Identifier: Apache-2.0
"""What reports show of predictions: measures of probabilities with their calibration, and what intervals cover."""

import json
from pathlib import Path

import pytest

from coterie.config import options
from coterie.data.clients import Clients
from coterie.report import write_report
from coterie.report.run_folder import read_run
from coterie.report.tables import client_table
from coterie.runs.fit import fit_run
from planted import planted


def run(folder: Path, clients: Clients, **chosen: object) -> str:
    """Fit into a folder, and read its report."""
    fit_run(folder, options({"method": "fedavg", "training": {"rounds": 10}, **chosen}), clients, "", every=1e9, watch=None,
            begun=lambda _: None)  # fmt: skip
    return write_report(folder).read_text(encoding="utf-8")


def test_probabilities_are_shown_with_their_calibration(tmp_path: Path) -> None:
    clients = planted(12, 60, classes=True, noise=2.0).clients(test_size=0.4, new_clients=0.2)
    page = run(tmp_path, clients, predictions={"threshold": 0.3})
    for words in (
        "<h2>Probabilities</h2>", "AUROC", "Brier score", "share of the largest class", "new clients without labels",
        "Calibration on held-out rows", "perfectly calibrated", "From a probability of 0.3 on",
    ):  # fmt: skip
        assert words in page, words
    assert "Prediction intervals" not in page
    said = json.loads((tmp_path / "run.json").read_text())["results"]["probabilities"]["test"]
    assert f"{said['auroc']['value']:.3f} ({said['auroc']['low']:.3f} to {said['auroc']['high']:.3f})" in page
    table = client_table(read_run(tmp_path))
    assert table is not None
    titles = [title for title, _ in table.head]
    assert "AUROC" in titles
    assert not any("low" in title or "high" in title for title in titles)  # ends stand beside their values
    assert " to " in table.rows[0][titles.index("AUROC")]


@pytest.mark.parametrize("coverage", [None, 0.8])
def test_what_intervals_cover_is_shown(tmp_path: Path, coverage: float | None) -> None:
    clients = planted(12, 60, noise=2.0).clients(test_size=0.3, new_clients=0.2)
    page = run(tmp_path, clients, predictions={"coverage": coverage})
    assert "<h2>Prediction intervals</h2>" in page
    assert "<h2>Probabilities</h2>" not in page
    assert ("conformal, held-out rows" in page) == (coverage is not None)
    assert ("fit with --coverage" in page) == (coverage is None)
    assert "from the model, new clients without labels" in page
    assert ("to calibrate" in page) == (coverage is not None)
