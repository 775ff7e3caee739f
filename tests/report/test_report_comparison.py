# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison says what its folder says, escapes what it does not trust, and stands alone."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from comparisons import comparison
from coterie.errors import ConfigError, RunError
from coterie.registry import METHODS
from coterie.report.comparison import is_comparison, write_comparison_report
from coterie.report.intervals import intervals
from coterie.runs.comparison import about, write_comparison
from coterie.selection.result import Comparison
from report_page import EVIL, parse, section, words


def written(folder: Path, found: Comparison, **data: Any) -> str:
    document = about(found, data={"path": "x.csv", **data}, command="coterie compare x.csv", fit="coterie fit x.csv")
    return write_comparison(folder, found, document).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("made") / "found", comparison())


def test_page_stands_alone(page: str) -> None:
    tags = parse(page).tags
    assert not [name for name, _ in tags if name in ("img", "link", "iframe")]
    assert not [href for _, given in tags if (href := given.get("href")) and not href.startswith("#")]
    assert not [src for _, given in tags if (src := given.get("src"))]


def test_answer_and_command_are_there(page: str) -> None:
    said = words(section(page, "answer"))
    assert "1.350 times as likely" in said
    assert "Before you rely on it" in said
    assert "coterie fit x.csv" in said
    assert "Clients fall into 3 groups" in words(page)


def test_all_methods_for_the_chosen_structure_are_named(tmp_path: Path) -> None:
    for chosen in {method.structure for method in METHODS.values()} - {"mixture"}:  # which the example has not
        said = words(section(written(tmp_path / chosen, comparison(chosen)), "answer"))
        for method in METHODS.values():
            assert (f"{method.name}: {method.about}" in said) == (method.structure == chosen)


def test_table_has_every_structure_with_interval(page: str) -> None:
    said = words(section(page, "comparison"))
    for text in ("globalone model for all1.500 ± 0.012", "clusters3 clusters1.200 ± 0.0120.3000.260 to 0.340"):
        assert text in said, text
    assert '<tr class="own"><th scope="row">clusters</th>' in page
    assert page.count('class="num best"') == 2  # clusters and shrunk are as good as the best


def test_groups_have_map_stability_and_profile(page: str) -> None:
    said = words(section(page, "groups"))
    assert "adjusted Rand index 0.93" in said
    assert "Map of the clients" in said
    assert "How often each client is in the same group" in said
    assert "ward=icu" in said
    assert "Groups were not chosen" not in said


def test_settings_that_were_tried_are_drawn(page: str) -> None:
    said = words(section(page, "trials"))
    assert "Clusters: score by number of clusters" in said
    assert "Representation: score by rank" in said


def test_groups_that_were_not_chosen_are_called_so(tmp_path: Path) -> None:
    assert "Groups were not chosen" in words(section(written(tmp_path / "a", comparison("shrunk")), "groups"))


def test_one_model_for_all_has_no_gains_to_draw(tmp_path: Path) -> None:
    page = written(tmp_path / "a", replace(comparison("global"), grouping=None))
    assert "client by client" not in page
    assert 'id="groups"' not in page


def test_profiles_of_several_classes_have_a_line_each(tmp_path: Path) -> None:
    found = comparison(metric="accuracy")
    assert found.grouping is not None
    by_class = np.arange(3 * 2 * 3, dtype=float).reshape(3, 2, 3)
    page = written(tmp_path / "a", replace(found, grouping=replace(found.grouping, profile=by_class)))
    said = words(section(page, "groups"))
    assert "age, class 0" in said
    assert "ward=icu, class 1" in said
    assert "68.0 ± 1.2" in words(section(page, "comparison"))


def test_names_cannot_attack(tmp_path: Path) -> None:
    found = comparison()
    names = found.names.astype(object)
    names[3] = EVIL
    page = written(tmp_path / "a", replace(found, names=names, outliers=(EVIL,), target=EVIL), client=EVIL)
    assert EVIL not in page
    assert EVIL in words(page)


def test_folder_holds_document_and_clients(tmp_path: Path) -> None:
    found = comparison()
    written(tmp_path / "a", found)
    said = json.loads((tmp_path / "a" / "compare.json").read_text())
    assert said["chosen"] == "clusters"
    assert [row["structure"] for row in said["rows"]] == [one.name for one in found.structures]
    assert {"setting", "metric", "mean", "stderr"} <= said["rows"][1].keys()
    table = pq.read_table(tmp_path / "a" / "clients.parquet")
    assert table["client"].to_pylist() == found.names.tolist()
    assert table["gain"].to_pylist()[:2] == [None, None]  # not judged
    assert table["metric_shrunk"].to_pylist() == found["shrunk"].client_test_metric.tolist()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "clients.parquet",
        "compare.json",
        "report.html",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("full")

    monkeypatch.setattr("pyarrow.parquet.write_table", fail)
    with pytest.raises(OSError, match="full"):
        written(tmp_path / "a", comparison())
    assert not list(tmp_path.iterdir())


def test_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        written(tmp_path, comparison())


def test_page_can_be_written_again(tmp_path: Path) -> None:
    first = written(tmp_path / "a", comparison())
    assert is_comparison(tmp_path / "a")
    assert write_comparison_report(tmp_path / "a").read_text(encoding="utf-8") == first


def test_broken_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        write_comparison_report(tmp_path)
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(RunError, match="not the document of a comparison"):
        write_comparison_report(tmp_path)


def test_intervals_lie_where_their_numbers_say() -> None:
    drawn = ET.fromstring(intervals(["a", "b"], [1.0, float("nan")], [0.0, 0.0], [2.0, 1.0], strong=0))
    circles = [part for part in drawn.iter() if part.tag.endswith("circle")]
    line = next(part for part in drawn.iter() if part.get("class") == "line k0")
    start, end = (float(v) for v in line.get("d", "").removeprefix("M").replace("H", " ").split()[::2])
    assert len(circles) == 1  # b has no mean
    assert float(circles[0].get("cx", "")) == pytest.approx((start + end) / 2, abs=0.1)
