# SPDX-License-Identifier: Apache-2.0
"""The report says what the run folder says, escapes what it does not trust, and stands alone."""

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import Markup

from coterie.errors import RunError
from coterie.registry import METHODS, FedAvgOptions, Method
from coterie.report import write_report
from coterie.report.client_plots import signed_bars, whiskers
from coterie.report.columns import columns
from coterie.report.numbers import byte_ticks, decimals_for, fixed, human_bytes, human_seconds, nice_ticks, plain_ticks
from coterie.report.plots import Line, dots, line_chart, scatter, stacked_area
from coterie.report.run_folder import Run
from coterie.report.section import Section
from report_page import EVIL, edit, parse, section, words


def run_info(n_clients: int, sizes: list[int]) -> dict[str, Any]:
    return {
        "coterie": "0.1.0",
        "method": "ifca",
        "status": "finished",
        "seed": 0,
        "command": "coterie fit schools.parquet --client school --target score --clusters 3 --out schools",
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
                {"method": "global", "label": "one model for all", "train": 0.8011, "test": 0.8104},
                {"method": "local", "label": "one model per client", "train": 0.702, "test": 0.8544},
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
                "features": ["verbal reasoning band"] + [f"feature_{d}" for d in range(1, 27)],
                "coefficients": [[1 - k, *np.linspace(-0.3, 0.3 * k, 26).round(4)] for k in range(3)],
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "schools")


def test_headline_says_groups_and_both_scores(folder: Path) -> None:
    text = words(write_report(folder).read_text(encoding="utf-8"))
    assert "3 groups among 139 clients; on held-out rows RMSE 0.796 against 0.810 with one model for all." in text


def test_shows_every_part_of_a_full_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    page = write_report(folder).read_text(encoding="utf-8")
    text = words(page)
    for part in ("comparison", "training", "clusters", "clients", "traffic", "events", "use", "settings"):
        assert f'<section id="{part}">' in page
    for said in (
        "2026-03-04 14:05 UTC",
        "coterie fit schools.parquet --client school",
        "restart 4 did not converge within 60 rounds",
        "reseeded from client 'x'",
        "best of 5 restarts (number 2)",
        'model = coterie.load("schools")',
        "coterie assign schools DATA",
        "ifca.step_size",
        "torch",
        "verbal reasoning band",
    ):
        assert said in text
    clients = pq.read_table(folder / "clients.parquet").to_pydict()
    better = sum(a < b for a, b in zip(clients["metric"], clients["metric_global"], strict=True))
    assert f"Better for {better} of 139 clients" in text


def test_r2_stands_in_the_table_and_not_on_the_axis_of_the_errors(folder: Path) -> None:
    results = run_info(139, [50, 60, 29])["results"]
    for entry, share in zip(results["methods"], (0.366, 0.342, 0.27), strict=True):
        entry["test_r2"] = share
    edit(folder, results=results)
    page = write_report(folder).read_text(encoding="utf-8")
    assert "held-out R²" in words(page)
    assert '<td class="num best">0.366</td>' in page
    assert '<td class="num">0.270</td>' in page
    assert page.count(">held-out R²<") == 1  # in the head of the table only


# -- moment descent ---------------------------------------------------------------------------------------------------
def add_descent(folder: Path) -> None:
    """Two descents of 3 and of 2 anchors, five iterations each, before the 60 rounds of one fit."""
    fit = rounds_table([50, 60, 29], n_runs=1).to_pylist()
    first = [{"round": t, "movement": [0.5**t, 0.4**t, 0.0], "spectrum": [3.0 / t, 1.0, 0.1]} for t in range(1, 6)]
    more = [{"round": t + 6, "movement": [0.5**t, 0.6**t], "spectrum": [2.0 / t, 0.5, 0.1]} for t in range(1, 6)]
    rows = [{"run": 0, "bytes_up": 1000, "bytes_down": 3000, **row} for row in first + more]
    rows += [{**row, "round": row["round"] + 12} for row in fit]
    known = dict.fromkeys(name for row in rows for name in row)
    table = {name: [row.get(name) for row in rows] for name in known}
    pq.write_table(pa.table(table), folder / "rounds.parquet")
    results = run_info(139, [50, 60, 29])["results"]
    results["anchors"] = [EVIL, "school 060", "school 130", "school 061", "school 131"]  # of clusters 0, 1, 2, 1, 2
    results["events"] = [
        {"run": 0, "round": 6, "text": "many clients have a high loss: 2 more anchors among them"},
        {"run": 0, "round": 12, "text": "5 anchors make 3 clusters: their tree is cut at the number asked for"},
        {"run": 0, "round": 40, "text": "cluster 2 was empty for 5 rounds"},
    ]
    edit(folder, method="moment-descent", results={**results, "chosen_run": 0})


def test_moment_descent_has_a_section_of_its_own(folder: Path) -> None:
    add_descent(folder)
    page = write_report(folder).read_text(encoding="utf-8")
    text, own = words(page), section(page, "descent")
    assert "<h1>Moment descent</h1>" in page
    assert "5 anchors make 3 clusters: their tree is cut at the number asked for." in own
    assert "many clients have a high loss: 2 more anchors among them." in own
    assert "cluster 2 was empty" not in own
    assert "after 10 iterations of moment descent" in text
    assert "An iteration of moment descent takes 1.00 kB up and 3.00 kB down on average." in text
    assert 'href="#descent"' in page


def test_every_anchor_has_a_line_in_the_colour_of_its_cluster(folder: Path) -> None:
    add_descent(folder)
    own = section(write_report(folder).read_text(encoding="utf-8"), "descent")
    drawn = re.findall(r'class="line (k\d) thin" d="([^"]*)"', own)
    assert [tone for tone, _ in drawn] == ["k0", "k1", "k2", "k1", "k2"]
    assert [path.count("L") for _, path in drawn] == [4, 4, 0, 4, 4]  # the third stood still
    for legend in ("0 (1 anchor)", "1 (2 anchors)", "2 (2 anchors)", "iteration 1", "iteration 10"):
        assert f"{legend}</li>" in own
    assert own.count("<rect") == 2 * 3 + 2  # two spectra of three values, and their legend


def test_rounds_of_training_are_those_of_phase_two(folder: Path) -> None:
    add_descent(folder)
    page = write_report(folder).read_text(encoding="utf-8")
    line = re.search(r'class="line k0" d="M([\d.]+) ', section(page, "training"))
    start = re.search(r'<path class="base" d="M([\d.]+) ', section(page, "training"))
    assert line is not None
    assert start is not None
    assert line[1] == start[1]  # the axis begins where Phase 2 does


def test_any_part_of_moment_descent_may_be_missing(folder: Path) -> None:
    add_descent(folder)
    full = pq.read_table(folder / "rounds.parquet")
    for column in full.column_names:
        where = full.column_names.index(column)
        null = pa.nulls(len(full), full.schema.field(column).type)
        for table in (full.drop_columns([column]), full.set_column(where, column, null)):
            pq.write_table(table, folder / "rounds.parquet")
            parse(write_report(folder).read_text(encoding="utf-8"))
    pq.write_table(full, folder / "rounds.parquet")
    for name in ("anchors", "events"):
        results = json.loads((folder / "run.json").read_text(encoding="utf-8"))["results"]
        edit(folder, results={**results, name: None})
        parse(write_report(folder).read_text(encoding="utf-8"))
    pq.write_table(full.slice(0, 10), folder / "rounds.parquet")  # it has only begun
    assert '<section id="descent">' in write_report(folder).read_text(encoding="utf-8")


def test_accuracy_is_written_in_percent_and_higher_is_better(folder: Path) -> None:
    info = run_info(139, [50, 60, 29])
    scores = [{"method": "ifca", "test": 0.9712}, {"method": "global", "test": 0.88}]
    data = {**info["data"], "metric": "accuracy", "metric_better": "higher"}
    edit(folder, data=data, results={**info["results"], "methods": scores})
    text = words(write_report(folder).read_text(encoding="utf-8"))
    assert "accuracy 97.1 % against 88.0 % with one model for all" in text
    clients = pq.read_table(folder / "clients.parquet").to_pydict()
    better = sum(a > b for a, b in zip(clients["metric"], clients["metric_global"], strict=True))
    assert f"Better for {better} of 139 clients" in text


def test_names_are_escaped_everywhere(folder: Path) -> None:
    info = run_info(139, [50, 60, 29])
    results = info["results"]
    results["warnings"] = results["events"] = [EVIL]
    results["events"] = [{"run": 0, "round": 1, "text": EVIL}]
    results["methods"][0]["label"] = EVIL
    results["profiles"]["features"] = [EVIL] * 27
    edit(folder, command=EVIL, method=EVIL, started=EVIL, status='"><b>', config={EVIL: EVIL}, results=results)
    page = write_report(folder).read_text(encoding="utf-8")
    checker = parse(page)
    assert EVIL not in page
    assert [tag for tag, _ in checker.tags].count("script") == 1
    assert "b" not in [tag for tag, _ in checker.tags]
    assert "&lt;script&gt;alert" in page


def test_control_characters_and_half_surrogates_do_not_break_the_page(folder: Path) -> None:
    table = pq.read_table(folder / "clients.parquet").to_pydict()
    table["client"][1] = "a\x00\x1bb"
    pq.write_table(pa.table(table), folder / "clients.parquet")
    edit(folder, command="\ud800")
    page = write_report(folder).read_bytes()
    assert b"\x00" not in page
    assert b"\x1b" not in page


def test_page_loads_nothing_from_outside(folder: Path) -> None:
    page = write_report(folder).read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert "src=" not in page
    assert "url(" not in page
    assert "@import" not in page
    for tag, attributes in parse(page).tags:
        assert tag not in {"link", "img", "iframe", "object", "image"}
        assert (attributes.get("href") or "#").startswith("#")


def test_output_is_deterministic_and_leaves_no_draft(folder: Path) -> None:
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert sorted(p.name for p in folder.iterdir()) == [
        "clients.parquet",
        "models",
        "report.html",
        "rounds.parquet",
        "run.json",
    ]


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"method": "fedrep", "status": "running"}', encoding="utf-8")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "not finished yet" in words(page)
    assert "<svg" not in page


@pytest.mark.parametrize("missing", sorted(run_info(139, [1])["results"]))
def test_any_result_may_be_missing(folder: Path, missing: str) -> None:
    results = run_info(139, [50, 60, 29])["results"]
    del results[missing]
    edit(folder, results=results)
    parse(write_report(folder).read_text(encoding="utf-8"))
    edit(folder, results={**results, missing: None})
    parse(write_report(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["rounds.parquet", "clients.parquet"])
def test_any_column_may_be_missing_or_null(folder: Path, name: str) -> None:
    make_run(folder, sizes=(9, 7, 4))
    full = pq.read_table(folder / name)
    for column in full.column_names:
        where = full.column_names.index(column)
        null = pa.nulls(len(full), full.schema.field(column).type)
        for table in (full.drop_columns([column]), full.set_column(where, column, null)):
            pq.write_table(table, folder / name)
            parse(write_report(folder).read_text(encoding="utf-8"))


def share_of_three(run: Run) -> Section | None:
    """A section that is not the library's, as a method's entry names it."""
    return Section("thirds", "Thirds", Markup("<p>{}</p>").format(EVIL)) if run.n_clients else None


def test_a_method_brings_sections_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{__name__}:share_of_three"
    thirds = Method("thirds", "Thirds", "a third of each", "global", "clusters", FedAvgOptions, sections=(here,))
    monkeypatch.setitem(METHODS, "thirds", thirds)
    edit(folder, method="thirds")
    page = write_report(folder).read_text(encoding="utf-8")
    found = [attributes["id"] for tag, attributes in parse(page).tags if tag == "section"]
    assert found == ["comparison", "thirds", "clients", "traffic", "events", "use", "settings"]
    assert '<a href="#thirds">Thirds</a>' in page
    assert words(section(page, "thirds")) == f"Thirds {EVIL}"


def test_empty_tables_leave_their_sections_out(folder: Path) -> None:
    for name in ("rounds.parquet", "clients.parquet"):
        pq.write_table(pq.read_table(folder / name).slice(0, 0), folder / name)
    page = write_report(folder).read_text(encoding="utf-8")
    assert 'id="clients"' not in page
    assert 'id="training"' not in page


def test_unknown_columns_of_clients_are_shown(folder: Path) -> None:
    table = pq.read_table(folder / "clients.parquet")
    table = table.append_column("outlier_score", pa.array(np.linspace(0, 1, len(table))))
    pq.write_table(table, folder / "clients.parquet")
    assert "outlier score" in words(write_report(folder).read_text(encoding="utf-8"))


def test_twenty_thousand_clients_make_a_small_page(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "large", sizes=(9000, 6000, 5000)))
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 3_000_000
    text = words(page)
    assert "The 2,000 of 20,000 clients with the smallest margin" in text
    assert "Shown: 3,000 of 20,000 clients" in text
    assert page.count("<tr data-k=") == 2000


def test_more_clusters_than_colours_get_other_shapes(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "many", sizes=(4,) * 11)).read_text(encoding="utf-8")
    assert 'class="chip k2 again"' in page  # cluster 10
    assert '<path class="mark k2' in page


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no run\.json"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match="cannot be read"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "rounds.parquet").write_bytes(b"PAR?")
    with pytest.raises(RunError, match=r"rounds\.parquet' cannot be read"):
        write_report(tmp_path)


def test_plots_are_well_formed() -> None:
    nan = math.nan
    plots = [
        line_chart([Line([1, 2, 3], [1.0, nan, 3.0], EVIL, low=[0, nan, 2], high=[2, 3, nan])], title=EVIL),
        line_chart([Line([1, 10, 100], [1e-6, 1.0, 1e3], "a")], log_x=True, log_y=True),
        dots(["a", EVIL * 3], {"held-out": [0.1, 0.2], "train": [0.1, nan]}),
        scatter([0.0, nan, 1.0], [1.0, 2.0, 3.0], groups=[0, 1, 17], titles=[EVIL] * 3),
        stacked_area([1, 2, 3], [[1, 2, 3], [3, 2, 1]], names=[EVIL, "b"]),
        signed_bars([0.3, -0.2, nan], titles=[EVIL] * 3),
        whiskers([0.3, 0.2, nan], [0.1, nan, 0.1], titles=[EVIL] * 3),
        columns({EVIL: [0.3, nan, -0.1], "b": [1.0]}, title=EVIL),
    ]
    for plot in plots:
        root = ET.fromstring(plot)
        assert root.tag == "svg"
        assert "nan" not in plot
        assert root.find(".//script") is None


def test_standalone_plots_are_files_with_title_and_legend() -> None:
    for plot in (
        line_chart([Line([1, 2], [1.0, 3.0], EVIL)], title=EVIL, standalone=True),
        dots(["a"], {EVIL: [0.1], "train": [0.2]}, title=EVIL, standalone=True),
    ):
        root = ET.fromstring(plot)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        said = [part.text for part in root.iter("{http://www.w3.org/2000/svg}text")]
        assert said.count(EVIL) == 2
        assert root.find(".//{http://www.w3.org/2000/svg}script") is None


def test_constant_and_single_values_can_be_drawn() -> None:
    for y in ([0.0, 0.0], [5.0, 5.0], [-2.0, -2.0]):
        assert "nan" not in line_chart([Line([1, 2], y)])
    assert "nan" not in line_chart([Line([3], [1.0])], log_y=True)
    assert "<circle" in scatter([1.0], [1.0])
    assert signed_bars([]).startswith("<svg")
    assert columns({}).startswith("<svg")


def test_ticks_are_round_and_labels_have_units() -> None:
    assert nice_ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0.71, 0.86) == [0.725, 0.75, 0.775, 0.8, 0.825, 0.85]
    assert nice_ticks(1, 4, integer=True) == [1, 2, 3, 4]
    assert plain_ticks([0, 5000, 10000]) == ["0", "5k", "10k"]
    assert plain_ticks([0.0, 0.5, 1.0]) == ["0", "0.5", "1.0"]
    assert byte_ticks([0, 500_000, 1_000_000]) == ["0", "0.5\u00a0MB", "1.0\u00a0MB"]


def test_numbers_have_sensible_precision() -> None:
    assert decimals_for([0.7961, 0.8104]) == 3
    assert decimals_for([0.79612, 0.79619]) == 4  # otherwise they would look equal
    assert [fixed(v, 2) for v in (-0.001, -1.5, None, math.nan)] == ["0.00", "\u22121.50", "\u2013", "\u2013"]
    assert [human_bytes(v) for v in (999, 1000, 1_234_567)] == ["999\u00a0B", "1.00\u00a0kB", "1.23\u00a0MB"]
    assert [human_seconds(v) for v in (0.42, 12.3, 200, 7500)] == [
        "0.42\u00a0s",
        "12\u00a0s",
        "3\u00a0min 20\u00a0s",
        "2\u00a0h 5\u00a0min",
    ]
