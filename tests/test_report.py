# SPDX-License-Identifier: Apache-2.0
"""The report says what the run folder says, escapes what it does not trust, and stands alone."""

import json
import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coterie.errors import RunError
from coterie.report import write_report
from coterie.report.client_plots import signed_bars, whiskers
from coterie.report.numbers import byte_ticks, decimals_for, fixed, human_bytes, human_seconds, nice_ticks, plain_ticks
from coterie.report.plots import Line, bars, dots, line_chart, scatter, stacked_area

EVIL = "<script>alert('x')</script>"
VOID = {"meta", "input", "br", "link", "img", "hr"}


def run_info(n_clients: int, sizes: list[int]) -> dict[str, Any]:
    return {
        "coterie": "0.1.0",
        "method": "ifca",
        "status": "finished",
        "seed": 0,
        "command": "coterie fit schools.parquet --client school --target score --method ifca --clusters 3 --out schools-ifca",
        "started": "2026-03-04T14:05:31+00:00",
        "seconds": 12.3,
        "versions": {"python": "3.11.7", "torch": "2.5.1", "numpy": "2.4.6"},
        "config": {
            "method": "ifca",
            "ifca": {"n_clusters": 3, "step_size": 0.05, "local_steps": 10},
            "rounds": 60,
            "n_init": 5,
            "participation": {"policy": "everyone"},
        },
        "data": {
            "path": "schools.parquet",
            "n_clients": n_clients,
            "n_rows": 15362,
            "n_features": 27,
            "task": "regression",
            "client": "school",
            "target": "score",
            "metric": "rmse",
            "metric_better": "lower",
        },
        "results": {
            "methods": [
                {"method": "ifca", "label": "IFCA, 3 clusters", "train": 0.7712, "test": 0.7961, "new_clients": 0.8012},
                {"method": "global", "label": "one model for all", "train": 0.8011, "test": 0.8104, "new_clients": 0.8099},
                {"method": "local", "label": "one model per client", "train": 0.702, "test": 0.8544, "new_clients": None},
            ],
            "n_clusters": 3,
            "cluster_sizes": sizes,
            "chosen_run": 2,
            "adjusted_rand": None,
            "uncertain_clients": 12,
            "warnings": ["restart 4 did not converge within 60 rounds"],
            "events": [
                {"run": 0, "round": 17, "text": "cluster 2 was empty for 5 rounds; reseeded from client 'x'"},
                {"run": 4, "round": 60, "text": "stopped at the last round; the loss was still falling"},
            ],
            "profiles": {
                "features": [f"feature_{d}" for d in range(26)] + ["verbal reasoning band"],
                "coefficients": np.random.default_rng(3).normal(0, 0.4, (3, 27)).round(4).tolist(),
            },
        },
    }


def rounds_table(sizes: list[int], n_rounds: int = 60, n_runs: int = 5) -> pa.Table:
    rng = np.random.default_rng(1)
    rows = []
    for run in range(n_runs):
        level = 0.60 + 0.03 * abs(run - 2)
        for r in range(1, n_rounds + 1):
            fade = math.exp(-r / 8)
            first = np.full(len(sizes), sum(sizes) / len(sizes))
            now = np.floor(first * fade + np.array(sizes) * (1 - fade)).astype(int)
            now[-1] += sum(sizes) - now.sum()
            met = int(rng.integers(90, 140))
            rows.append(
                {
                    "run": run,
                    "round": r,
                    "loss": level + 0.9 * fade + rng.normal(0, 0.004),
                    "bytes_up": 432 * met,
                    "bytes_down": 3 * 224 * met,
                    "participants": met,
                    "seconds": 0.04,
                    "sizes": now.tolist(),
                    "test_metric": 0.7961 + 0.3 * fade + rng.normal(0, 0.003),
                }
            )
    return pa.Table.from_pylist(rows)


def clients_table(sizes: list[int]) -> pa.Table:
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    n = len(labels)
    margin = rng.gamma(1.6, 0.06, n)
    error = rng.uniform(0.01, 0.035, n)
    angle = 2 * np.pi * labels / len(sizes)
    overall = rng.normal(0.81, 0.05, n)
    metric = overall - rng.normal(0.015, 0.02, n)
    return pa.table(
        {
            "client": [EVIL] + [f"school {i:03d}" for i in range(1, n)],
            "label": labels,
            "margin": margin,
            "margin_error": error,
            "certain": margin > 2 * error,
            "rows_train": rng.integers(20, 200, n),
            "rows_test": rng.integers(5, 50, n),
            "train_loss": rng.normal(0.6, 0.05, n),
            "test_loss": rng.normal(0.63, 0.06, n),
            "metric": metric,
            "metric_global": overall,
            "metric_local": overall + rng.normal(0.04, 0.03, n),
            "map_x": 3 * np.cos(angle) + rng.normal(0, 1, n),
            "map_y": 3 * np.sin(angle) + rng.normal(0, 1, n),
        }
    )


def make_run(folder: Path, sizes: tuple[int, ...] = (50, 60, 29)) -> Path:
    """A run folder as the library writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run_info(sum(sizes), list(sizes))), encoding="utf-8")
    pq.write_table(rounds_table(list(sizes)), folder / "rounds.parquet")
    pq.write_table(clients_table(list(sizes)), folder / "clients.parquet")
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "cluster-0.safetensors").write_bytes(b"")
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change parts of run.json; None removes one."""
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for name, value in changes.items():
        info[name] = value
    (folder / "run.json").write_text(json.dumps({k: v for k, v in info.items() if v is not None}), encoding="utf-8")


class Checker(HTMLParser):
    """Collects text and fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def words(page: str) -> str:
    return " ".join("".join(parse(page).text).split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "schools-ifca")
