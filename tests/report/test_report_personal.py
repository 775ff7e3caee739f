# SPDX-License-Identifier: Apache-2.0
"""The report of personal models: how clients fare, who took part, what joined when, and time by the clock."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coterie.report import write_report
from report_page import EVIL, edit, parse, section, words

N_CLIENTS, ROUNDS = 8, 9
SECONDS = [0.1, 0.2, 0.4, 0.8, 1.1, 1.5, 2.5, 4.0]


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "median": mean + 0.01, "worst_decile": mean - 0.2, "best_decile": 1.0}


def run_info() -> dict[str, Any]:
    labels = {"fedrep": "SRPFL", "global": "one model for all", "local": "one model each"}
    return {
        "coterie": "0.1.0", "method": "fedrep", "status": "finished", "seed": 0, "seconds": 3.2,
        "config": {"method": "fedrep", "personal": {"stragglers": "srpfl", "clock": "exponential"}},
        "data": {"n_clients": N_CLIENTS, "n_rows": 400, "n_features": 3, "metric": "accuracy", "metric_better": "higher"},
        "results": {
            "methods": [{"method": m, "label": name, "train": 0.9, "test": 0.85} for m, name in labels.items()],
            "spread": {"fedrep": spread(0.9), "global": spread(0.7), "local": spread(0.8)},
            "layers": ["2"], "rounds": ROUNDS, "virtual_time": 17.5, "never_visited": 0,
        },
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps(run_info()))
    enough = [2] * 3 + [4] * 3 + [8] * 3
    time = [sum(SECONDS[n - 1] for n in enough[: t + 1]) for t in range(ROUNDS)]
    rounds = {
        "run": [0] * ROUNDS, "round": list(range(1, ROUNDS + 1)), "loss": [1 / (t + 1) for t in range(ROUNDS)],
        "test_metric": [0.5 + t / 20 for t in range(ROUNDS)], "participants": enough, "enough": enough,
        "stage": [0] * 3 + [1] * 3 + [2] * 3, "virtual_time": time, "bytes_up": [8] * ROUNDS, "bytes_down": [8] * ROUNDS,
    }  # fmt: skip
    clients = {
        "client": [EVIL, *(f"site {i}" for i in range(1, N_CLIENTS))], "rows_train": [40] * N_CLIENTS,
        "rows_test": [10] * N_CLIENTS, "metric": [0.6 + i / 20 for i in range(N_CLIENTS)],
        "metric_global": [0.5] * N_CLIENTS, "rounds": [9, 9, 6, 6, 3, 3, 3, 3], "seconds": SECONDS,
    }  # fmt: skip
    pq.write_table(pa.table(rounds), tmp_path / "rounds.parquet")
    pq.write_table(pa.table(clients), tmp_path / "clients.parquet")
    return tmp_path


def page(run: Path) -> str:
    return write_report(run).read_text()


def change(run: Path, **changes: Any) -> None:
    edit(run, results={**run_info()["results"], **changes})


def test_the_spread_over_clients_is_written_with_common_decimals(run: Path) -> None:
    cells = re.findall(r'<td class="num">(.*?)</td>', section(page(run), "personal").replace("\u00a0", " "))
    assert cells[:4] == ["90.0 %", "91.0 %", "70.0 %", "100.0 %"]
    assert cells[4:8] == ["70.0 %", "71.0 %", "50.0 %", "100.0 %"]
    assert len(cells) == 12


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (["2"], "Layer 2 is personal; all clients share the others."),
        (["0", "1"], "Layers 0, 1 are personal; all clients share the others."),
    ],
)
def test_what_is_a_clients_own_is_said(run: Path, layers: list[str], sentence: str) -> None:
    change(run, layers=layers)
    assert sentence in words(section(page(run), "personal"))


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("maml", "A model that each client fine-tunes in a few steps."),
        ("local", "A linear model for each client alone."),
        ("unknown", "Each client has a model of its own."),
    ],
)
def test_methods_without_personal_layers_say_what_they_are(run: Path, method: str, sentence: str) -> None:
    change(run, layers=[])
    edit(run, method=method)
    assert sentence in words(section(page(run), "personal"))


@pytest.mark.parametrize(("never", "sentence"), [(0, ""), (1, "1 client never took part"), (5, "5 clients never took")])
def test_who_never_took_part_is_counted(run: Path, never: int, sentence: str) -> None:
    change(run, never_visited=never)
    told = words(section(page(run), "personal"))
    assert sentence in told
    assert ("never took part" in told) == bool(never)


def test_the_picture_of_participation_has_a_mark_for_every_client(run: Path) -> None:
    made = page(run)
    personal = section(made, "personal")
    assert "site 7: 3 rounds, 4.00 s" in personal
    assert personal.count(" rounds, ") == N_CLIENTS
    assert "From 3 to 9 rounds; the slowest are at the right." in words(personal)
    assert EVIL not in made  # a client's name is text
    ticks = [tick for tick in ("3", "4", "5", "6", "7", "8", "9") if f">{tick}</text>" in personal]
    assert len(ticks) > 2  # rounds are whole
    assert ">7.5</text>" not in personal


def test_without_a_clock_participation_is_drawn_as_bars(run: Path) -> None:
    table = pq.read_table(run / "clients.parquet").drop_columns("seconds")
    pq.write_table(table, run / "clients.parquet")
    told = words(section(page(run), "personal"))
    assert "clients, most often first" in told
    assert "seconds that a round takes" not in told


def test_training_is_drawn_by_round_and_by_time_and_says_who_joined_when(run: Path) -> None:
    told = words(section(page(run), "training"))
    assert "Held-out accuracy by virtual time" in told
    assert "virtual time (seconds)" in told
    assert "The fastest 2 clients begin, more join in rounds 4, 7, and 8 take part in the end." in told
    table = pq.read_table(run / "rounds.parquet").drop_columns(["enough", "stage", "virtual_time"])
    pq.write_table(table, run / "rounds.parquet")
    plain = words(section(page(run), "training"))
    assert "virtual time" not in plain
    assert "join" not in plain


def test_the_method_is_named_with_its_stages(run: Path) -> None:
    assert "FedRep in stages (SRPFL)" in words(page(run))
    edit(run, config={"method": "fedrep", "personal": {"stragglers": "none"}})
    assert "in stages" not in words(page(run))
    assert "rounds taken part in" in words(page(run))
    parse(page(run))  # every tag is closed
