# SPDX-License-Identifier: Apache-2.0
"""Numbers come from files: what studies have finished is kept, results say where they are from, and docs show them."""

import json
import math
import os
import re
import signal
import threading
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from tools import docs, results
from tools.figures import FIGURES
from tools.plan import RESULTS, ROOT, Entry, plan, read
from tools.reduce import quantile_curves
from tools.tables import TABLES

from coterie import cli
from coterie.errors import RunError
from coterie.studies.ledger import VARIABLE, Ledger
from coterie.studies.parallel import side_by_side

PLAN = plan()
FILES = sorted(path.stem for path in RESULTS.glob("*.json"))
PAGE = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")


# -- what is finished is kept -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Settings:
    factor: float
    jobs: int | None = None


@dataclass(frozen=True)
class Found:
    curve: list[tuple[int, float]]
    rest: dict[str, Any]


DONE: list[int] = []


def work(chosen: Settings, task: int) -> Found:
    if task < 0:
        raise RuntimeError("stopped")
    DONE.append(task)
    return Found([(task, chosen.factor * task / 3)], {"never": math.inf, "no": None, "no number": math.nan})


def no_news(done: int) -> None:
    pass


def test_tasks_that_were_finished_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    DONE.clear()
    with pytest.raises(RuntimeError, match="stopped"):
        side_by_side(partial(work, Settings(0.1)), [5, 7, -1, 8], 1, no_news)
    told: list[int] = []
    found = side_by_side(partial(work, Settings(0.1, jobs=3)), [8, 5, 7], 1, told.append)
    assert DONE == [5, 7, 8]
    assert told == [2, 3]
    assert [each.curve for each in found] == [[(8, 0.1 * 8 / 3)], [(5, 0.1 * 5 / 3)], [(7, 0.1 * 7 / 3)]]  # to the bit
    assert found[1].rest["never"] == math.inf
    assert math.isnan(found[1].rest["no number"])


def test_other_settings_are_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    first, second = (side_by_side(partial(work, Settings(f)), [3], 1, no_news)[0].curve[0][1] for f in (1.0, 2.0))
    assert (first, second) == (1.0, 2.0)


def test_two_studies_do_not_share_a_folder_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    tasks = tmp_path / "tasks"
    said: list[str] = []

    def second(done: int) -> None:  # while the first is at work
        def study() -> None:
            try:
                side_by_side(partial(work, Settings(1.0)), [4], 1, no_news)
            except RunError as error:
                said.append(error.message)

        thread = threading.Thread(target=study)
        thread.start()
        thread.join()

    tasks.mkdir()
    (tasks / ".0.json.123.tmp").write_text("{")  # of one that was killed
    side_by_side(partial(work, Settings(1.0)), [3], 1, second)
    assert said == [f"{tasks} is in use by process {os.getpid()}"]
    assert [path.suffix for path in tasks.iterdir()] == [".json"]


def test_nothing_is_kept_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    side_by_side(partial(work, Settings(1.0)), [3], 1, no_news)
    assert not list(tmp_path.iterdir())


# -- results ----------------------------------------------------------------------------------------------------------
TINY = Entry(
    "tiny",
    "coterie study srpfl-linear --clients 8 --rows 40 --features 6 --rank 2 --rounds 4 --first 4 --batch-size 10 --seeds 3"
    " --methods srpfl --json",
    1.0,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_RESULTS", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # to be put back as it was
    monkeypatch.setattr("sys.argv", ["coterie"])
    return tmp_path / "cache"


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results.run(TINY, results=tmp_path / "whole")
    keep = Ledger.keep

    def keep_and_stop(self: Ledger[Any, Any], task: Any, result: Any) -> Any:
        kept = keep(self, task, result)
        os.kill(os.getpid(), signal.SIGTERM)
        return kept

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "keep", keep_and_stop)
        with pytest.raises(SystemExit) as left:
            results.run(TINY, results=tmp_path / "stopped")
    assert left.value.code == 128 + signal.SIGTERM
    assert not (tmp_path / "stopped").exists()
    assert len(list((cache / "tiny" / "tasks").glob("*.json"))) == 1

    assert results.run(TINY, results=tmp_path / "stopped")
    whole, stopped = (read("tiny", tmp_path / folder) for folder in ("whole", "stopped"))
    assert whole is not None
    assert stopped is not None
    differ = {key for key in {*whole, *stopped} if whole.get(key) != stopped.get(key)}
    assert differ <= {"started", "seconds"}
    assert not (cache / "tiny").exists()


def test_what_was_begun_with_other_sources_is_not_mixed_with_these(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = cache / "tiny" / "parts.json"
    parts.parent.mkdir(parents=True)
    begun = {"commit": "abc", "dirty": False, "source": "old", "started": "2026-01-01", "wall": 5.0, "cpu": 4.0}
    parts.write_text(json.dumps({"command": TINY.command, "parts": [begun]}))
    assert not results.run(TINY, results=tmp_path)
    assert "other sources" in capsys.readouterr().err
    assert results.run(TINY, mixed=True, results=tmp_path)
    made = read("tiny", tmp_path)
    assert made is not None
    assert made["begun_with"] == [{"commit": "abc", "dirty": False, "source": "old"}]
    assert made["seconds"]["cpu"] > 4
    assert made["started"] == "2026-01-01"


def test_numbers_are_rounded_to_six_digits() -> None:
    assert results.rounded({"a": [1 / 3, 123456789.0, None, 7, "x"]}) == {"a": [0.333333, 123457000.0, None, 7, "x"]}


def test_curves_become_quantiles_over_seeds() -> None:
    rows = [{"method": "m", "local_steps": 5, "seed": s, "curve": [float(s), 1.0]} for s in range(11)]
    made = quantile_curves({"rows": rows, "summary": [{"method": "m", "local_steps": 5}]})
    assert made["summary"][0]["low"] == [1.0, 1.0]  # the tenth of 0, ..., 10
    assert made["summary"][0]["median"] == [5.0, 1.0]
    assert made["summary"][0]["high"] == [9.0, 1.0]
    assert "curve" not in made["rows"][0]


def test_a_curve_that_ended_earlier_stays_where_it_ended() -> None:
    rows = [{"method": "m", "local_steps": 5, "curve": curve} for curve in ([4.0, 2.0], [4.0, 3.0, 1.0], [4.0, 3.0])]
    made = quantile_curves({"rows": rows, "summary": [{"method": "m", "local_steps": 5}]})
    assert made["summary"][0]["median"] == [4.0, 3.0, 2.0]  # of 2, 1 and 3 in the end


@pytest.mark.parametrize("name", PLAN)
def test_every_command_of_the_plan_is_understood(name: str) -> None:
    program, *words = PLAN[name].words
    assert program == "coterie"
    assert words[-1] == "--json"
    command: Any = typer.main.get_command(cli.app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command.make_context(name, words).params["as_json"]


@pytest.mark.parametrize("name", FILES)
def test_a_result_says_where_it_is_from(name: str) -> None:
    path = RESULTS / f"{name}.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    assert said["name"] == name
    assert said["command"] == PLAN[name].command
    assert set(said["versions"]) == {"python", *results.PACKAGES}
    assert said["processor"]["model"]
    assert said["commit"]
    assert said["threads"] == 1
    assert said["seconds"]["cpu"] > 0
    assert said["rows"]
    assert path.stat().st_size < 1_000_000


# -- the page ---------------------------------------------------------------------------------------------------------
def found() -> dict[str, dict[str, Any]]:
    return {name: result for name in PLAN if (result := read(name)) is not None}


def test_page_and_figures_are_what_results_say() -> None:
    """If this fails, run `make docs`."""
    text, figures = docs.written(PAGE, PLAN, found())
    assert text == PAGE
    folder = ROOT / "docs" / "figures"
    assert {path.name for path in folder.glob("*.svg")} == set(figures)
    for name, drawn in figures.items():
        assert (folder / name).read_text(encoding="utf-8") == drawn


def test_every_result_of_the_plan_is_on_the_page() -> None:
    assert {name for block in docs.BLOCK.finditer(PAGE) for name in block[3].split()} == set(PLAN)


def test_no_numbers_stand_in_tables_that_were_typed() -> None:
    for typed in typed_tables(docs.BLOCK.sub("", PAGE)):
        assert not any(is_numeric(row) for row in typed), typed[0]


def typed_tables(page: str) -> list[list[str]]:
    """Tables without those that are quoted from a paper."""
    tables: list[list[str]] = []
    before = ""
    for line in page.splitlines():
        if line.startswith("|") and before.startswith("|"):
            tables[-1].append(line)
        elif line.startswith("|"):
            tables.append(["quoted" if before.startswith("<!-- quoted: ") else "", line])
        before = line
    return [rows for quoted, *rows in tables if not quoted]


def is_numeric(row: str) -> bool:
    """Two cells that begin with a decimal number or a percentage."""
    return sum(bool(re.match(r"\**-?(\d+\.\d|\d+ ?%)", cell.strip())) for cell in row.split("|")) > 1


def test_a_typed_table_of_numbers_is_noticed() -> None:
    typed = "| | a | b |\n|---|---|---|\n| x | 0.93 | **0.81** (0.02) |\n"
    assert [is_numeric(row) for row in typed_tables(typed)[0]] == [False, False, True]
    assert typed_tables(f"<!-- quoted: Table 1 -->\n{typed}") == []


# -- kinds of tables and figures --------------------------------------------------------------------------------------
def result(rows: list[dict[str, Any]] | None = None, summary: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    head = {"command": "coterie study x --json", "commit": "abc1234", "dirty": False, "threads": 1}
    head |= {"processor": {"model": "A", "vectors": "AVX2"}, "seconds": {"cpu": 125.0, "wall": 300.0}}
    return {"name": "x", **head, "settings": {}, "rows": rows or [], "summary": summary, **more}


def ratio_line(
    setting: str, method: str, steps: int | None, mean: float, share: float, largest: float
) -> dict[str, Any]:
    curves = {"low": [1.0, 0.4], "median": [2.0, 0.5], "high": [3.0, 0.6]}
    line = {"setting": setting, "method": method, "local_steps": steps, "mean_ratio": mean, "success": share}
    return {**line, "max_ratio": largest, **curves}


def test_a_table_of_ratios() -> None:
    one = result(
        summary=[
            ratio_line("c1", "moment-descent-fedavg", 1, 9.0, 0.0, 9.0),
            ratio_line("c1", "moment-descent-fedavg", 5, 1.0004, 1.0, 1.0012),
            ratio_line("c1", "oracle", 5, 1.0, 1.0, 1.0),
        ]
    )
    two = result(summary=[ratio_line("c2", "moment-descent-fedavg", 5, 3.6, 0.96, 67.3)])
    assert TABLES["ratios"]({"one": one, "two": two}) == [
        "|  | `c1` | `c2` |",
        "|---|---|---|",
        "| `moment-descent-fedavg` | 1.000 (100 %, 1) | 3.600 (96 %, 67.3) |",
    ]


def test_a_table_of_errors_by_h_with_the_paper_s() -> None:
    rows = [
        {"method": m, "h": h, "theta_error": e, "theta_error_se": 0.012, "paper_theta_error": p, "model": "gmm"}
        for m, h, e, p in [("fedgrem", 0.0, 0.256, None), ("fedgrem-paper", 0.0, 0.64, 1.13),
                           ("fedgrem", 0.25, 0.5, None), ("fedgrem-paper", 0.25, 0.7, None)]
    ]  # fmt: skip
    assert TABLES["simulation"]({"x": result(rows)}) == [
        "|  | h = 0 | h = 0.25 |",
        "|---|---|---|",
        "| `fedgrem` | 0.26 (0.01) | 0.50 (0.01) |",
        "| `fedgrem-paper` | 0.64 (0.01) | 0.70 (0.01) |",
        "| the paper's FedGrEM | 1.13 |  |",
    ]
    assert drawn("simulation", result(rows)) == ["x.svg"]


def test_a_table_of_errors_by_c_eta_with_the_paper_s() -> None:
    cells = [("fedgrem-paper", 0.55, 0.0, 0.64, 1.36), ("fedgrem-exact", 0.55, 0.0, 0.65, None),
             ("fedgrem-paper", 1.35, 0.0, 0.6, 1.21), ("fedgrem-exact", 1.35, 0.0, 0.61, None),
             ("fedgrem-paper", 0.55, 0.5, 0.704, 1.62), ("fedgrem-exact", 0.55, 0.5, 0.904, None),
             ("fedgrem-paper", 1.35, 0.5, 0.667, None), ("fedgrem-exact", 1.35, 0.5, 0.715, None)]  # fmt: skip
    rows, more = (
        [
            {"method": m, "c_eta": c, "h": h, "theta_error": e, "theta_error_se": 0.012, "paper_theta_error": p}
            | {"w_error": e / 10, "w_error_se": None, "paper_w_error": p and p / 10}
            for m, c, h, e, p in some
        ]
        for some in (cells, [("fedgrem", 0.55, 0.25, 0.256, None)])
    )
    both = {"x": result(rows), "y": result(more)}
    assert TABLES["step-sizes"](both) == [
        "|  | C_eta | h = 0 | h = 0.25 | h = 0.5 |",
        "|---|---|---|---|---|",
        "| `fedgrem-paper` | 0.55 | 0.64 (0.01) |  | 0.70 (0.01) |",
        "| `fedgrem-paper` | 1.35 | 0.60 (0.01) |  | 0.67 (0.01) |",
        "| `fedgrem-exact` | 0.55 | 0.65 (0.01) |  | 0.90 (0.01) |",
        "| `fedgrem-exact` | 1.35 | 0.61 (0.01) |  | 0.71 (0.01) |",
        "| `fedgrem` | 0.55 |  | 0.26 (0.01) |  |",
        "| the paper's FedGrEM | 0.55 | 1.36 |  | 1.62 |",
        "| the paper's FedGrEM | 1.35 | 1.21 |  |  |",
    ]
    assert TABLES["step-sizes-weights"](both)[2] == "| `fedgrem-paper` | 0.55 | 0.064 |  | 0.070 |"
    assert TABLES["step-sizes-weights"](both)[-2] == "| the paper's FedGrEM | 0.55 | 0.136 |  | 0.162 |"


def test_a_table_of_times_with_the_paper_s() -> None:
    rows = [
        {"method": m, "contamination": c, "seconds": s, "seconds_se": e, "paper_seconds": p}
        for m, c, s, e, p in [("local-em", 0.0, 1.054, 0.041, 26.01), ("fedgmm", 0.0, 0.99, None, None),
                              ("local-em", 20.5, 1.14, 0.05, 25.62), ("fedgmm", 20.5, 1.25, 0.06, None)]
    ]  # fmt: skip
    assert TABLES["fit-times"]({"x": result(rows)}) == [
        "| contaminated | `local-em` | `fedgmm` |",
        "|---|---|---|",
        "| 0 % | 1.05 (0.04) | 0.99 |",
        "| 0 %, paper | 26.01 |  |",
        "| 20.5 % | 1.14 (0.05) | 1.25 (0.06) |",
        "| 20.5 %, paper | 25.62 |  |",
    ]


def test_a_table_of_images_tells_who_was_left_out() -> None:
    row = {"method": "hf-maml", "final_accuracy": 0.8314, "std": 0.012, "worst_decile": 0.5, "rounds_to_target": None}
    row |= {"time_to_target": None, "time_ratio": None, "virtual_time": 3071.6, "left_out": 17}
    lines = TABLES["images"]({"x": result([row], settings={"dataset": "mnist"})})
    assert lines[2] == "| `mnist` | `hf-maml` | 0.831 ± 0.012 | 0.500 | never |  |  | 3072 | 17 |"


def drawn(kind: str, made: Any) -> list[str]:
    figures = FIGURES[kind](made)
    assert figures == FIGURES[kind](made)
    for text in figures.values():
        assert ET.fromstring(text).tag.endswith("svg")
    return list(figures)


def test_figures_of_mixed_regression_have_two_panels() -> None:
    lines = [ratio_line("c1", "moment-descent-fedavg", steps, 1.0, 1.0, 1.0) for steps in (1, 5, 10)]
    lines += [ratio_line("c1", m, s, 1.0, 1.0, 1.0) for m, s in (("moment-descent-fedprox", None), ("oracle", 5))]
    figures = FIGURES["mixed"](result(summary=lines))
    assert list(figures) == ["x-left.svg", "x-right.svg"]
    assert "moment-descent-fedavg, 10 steps" in figures["x-left.svg"]
    assert "10 steps" not in figures["x-right.svg"]


def test_a_figure_of_rotations_has_a_row_for_each_method_and_start() -> None:
    rows = [
        {"method": m, "init": init, "accuracy": (low + high) / 2, "accuracies": [high, low]}
        for m, init, low, high in [("ifca", "spread", 0.95, 0.97), ("local", None, 0.77, 0.79)]
    ]
    (text,) = FIGURES["rotated"](result(rows, settings={"clients": 144, "seeds": 2})).values()
    for words in ("IFCA, spread start", "One model each", "mean of 2 seeds", "lowest", "144 clients"):
        assert words in text
    assert drawn("rotated", result(rows, settings={"clients": 144, "seeds": 2})) == ["x.svg"]


def test_figures_of_starts_and_of_images_are_drawn() -> None:
    rows = [
        {"panel": "a", "init": init, "n_clients": 100, "rows": 100, "r": r, "sigma": s, "trial_success": r}
        for init in ("random", "spread") for r in (0.1, 0.5) for s in (0.1, 0.2)
    ]  # fmt: skip
    assert drawn("synthetic", result(rows)) == ["x.svg"]
    curve = [{"round": t, "virtual_time": 2.0 * t, "accuracy": 0.1 * t} for t in (5, 10)]
    said = {"dataset": "mnist", "speeds": "fixed", "participation": 0.2}
    curves = [{"method": m, "curves": [curve, curve]} for m in ("fedrep", "srpfl")]
    assert drawn("images", result(curves, settings=said)) == ["x.svg"]


def test_a_block_says_where_numbers_are_from_or_what_they_would_cost() -> None:
    page = "<!-- table: planted x y -->\nold\n<!-- end -->\n\n<!-- table: planted y -->\n<!-- end -->\n"
    line = {"case": "one group", "chosen": "global", "reps": 30, "correct": 1.0, "correct_size": 0.9, "share": 0.97}
    entries = {
        "x": Entry("x", "coterie study x --json", 2, short="one seed in place of five"),
        "y": Entry("y", "coterie study y --json", 480),
    }
    text, figures = docs.written(page, entries, {"x": result(summary=[{**line, "worst_excess": None}])})
    assert not figures
    assert text.splitlines() == [
        "<!-- table: planted x y -->",
        "",
        "| Truth | chosen | repetitions | correct | right size | sure | excess |",
        "|---|---|---|---|---|---|---|",
        "| one group | global | 30 | 100 % | 90 % | 97 % |  |",
        "",
        "From [`coterie study x --json`](../results/x.json): commit abc1234, A with AVX2, 1 thread, 2 min of CPU."
        " Smaller than the paper's: one seed in place of five.",
        "",
        "Not run yet: `coterie study y --json` takes about 8 hours of one core.",
        "",
        "<!-- end -->",
        "",
        "<!-- table: planted y -->",
        "",
        "Not run yet: see above.",
        "",
        "<!-- end -->",
    ]
    assert docs.written(text, entries, {"x": result(summary=[{**line, "worst_excess": None}])})[0] == text
