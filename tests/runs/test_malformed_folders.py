# SPDX-License-Identifier: Apache-2.0
"""Run folders of strangers: whatever was changed in one, it is read, or refused in one sentence and left as it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from command import refused
from coterie import load
from coterie.errors import CoterieError
from coterie.report.comparison import write_comparison_report
from coterie.runs.fit import report_run
from golden_runs import GOLDEN

FOLDERS = sorted(path.name for path in (GOLDEN / "folders").iterdir())
RUNS = [name for name in FOLDERS if (GOLDEN / "folders" / name / "run.json").exists()]
ODD: list[Any] = [None, "x", -1, 10**9, 1e308, [], {}, [[]], [None], ["x"], [{}], True]


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        shutil.copytree(GOLDEN / "folders" / name, tmp_path / "run")
        return tmp_path / "run"

    return copied


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(change(document) or document), encoding="utf-8")


def read_or_refused(read: Callable[[Path], object], folder: Path) -> bool:
    """Whether it was refused: then nothing was written."""
    (folder / "report.html").unlink(missing_ok=True)
    try:
        read(folder)
    except CoterieError as error:
        said = error
    else:
        return False
    assert said.hint
    assert "\n" not in said.message
    assert not (folder / "report.html").exists()
    return True


# -- documents ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ifca", "moment-descent", "mixture", "fedrep-stages", "shrunk", "auto"])
def test_any_key_of_run_json_may_be_missing_or_anything(name: str, folder: Callable[[str], Path]) -> None:
    run = folder(name)
    good = json.loads((run / "run.json").read_text())
    assert not read_or_refused(report_run, run)
    n_refused = 0
    for part in (good, good["data"], good["results"]):
        for number, (key, value) in enumerate(list(part.items())):
            for odd in (ODD[number % len(ODD)], ODD[(number * 5 + 3) % len(ODD)]):
                part[key] = odd
                (run / "run.json").write_text(json.dumps(good))
                n_refused += read_or_refused(report_run, run) + read_or_refused(load, run)
            del part[key]
            (run / "run.json").write_text(json.dumps(good))
            n_refused += read_or_refused(report_run, run) + read_or_refused(load, run)
            part[key] = value
    assert n_refused > 50


@pytest.mark.parametrize("name", ["compare", "compare-classes", "compare-networks", "compare-rows"])
def test_any_key_of_compare_json_may_be_missing_or_anything(name: str, folder: Callable[[str], Path]) -> None:
    run = folder(name)
    good = json.loads((run / "compare.json").read_text())
    parts = [good, good["rows"][0], good["rows"][1], good["rows"][1]["versus_global"], good["rows"][1]["trials"][0]]
    n_refused = 0
    for part in [*parts, *([good["grouping"]] if good["grouping"] else [])]:
        for number, (key, value) in enumerate(list(part.items())):
            for odd in (ODD[number % len(ODD)], ODD[(number * 5 + 3) % len(ODD)]):
                part[key] = odd
                (run / "compare.json").write_text(json.dumps(good))
                n_refused += read_or_refused(write_comparison_report, run)
            del part[key]
            (run / "compare.json").write_text(json.dumps(good))
            n_refused += read_or_refused(write_comparison_report, run)
            part[key] = value
    assert n_refused > 30


def test_a_count_that_would_fill_the_memory_is_refused(folder: Callable[[str], Path]) -> None:
    run = folder("ifca")
    edited(run / "run.json", lambda d: d["results"].update(n_clusters=10**9))
    sentence, _ = refused("report", run)
    assert (
        sentence
        == f"{run}/run.json is not as it should be at results.n_clusters: input should be less than or equal to 10000"
    )


def test_options_of_a_stranger_are_bounded(folder: Callable[[str], Path]) -> None:
    run = folder("ifca")
    edited(run / "run.json", lambda d: d["config"]["clusters"].update(n_clusters=10**9) or d.update(status="running"))
    sentence, hint = refused("resume", run)
    assert sentence == f"{run}/run.json has unknown options"
    assert hint


def test_the_command_line_refuses_a_malformed_folder(folder: Callable[[str], Path]) -> None:
    run = folder("mixture")
    edited(run / "run.json", lambda d: d["results"].update(methods=[7]))
    for words in (
        ["report", run],
        ["resume", run],
        ["predict", run, run / "rows.csv"],
        ["assign", run, run / "rows.csv"],
    ):
        assert "results.methods.0" in refused(*words)[0]


def test_digests_are_those_of_files_in_the_folder(folder: Callable[[str], Path]) -> None:
    run = folder("ifca")
    for name in ("../../secret", "/etc/passwd", "x" * 5000, "a\0b"):
        edited(run / "run.json", lambda d, name=name: d.update(files={name: "0"}))
        assert "is not as it should be at files" in refused("report", run)[0]


def test_a_comparison_links_to_its_own_report(folder: Callable[[str], Path]) -> None:
    run = folder("auto")
    edited(run / "run.json", lambda d: d["results"]["why"].update(report="https://example.com"))
    assert "results.why.report" in refused("report", run)[0]
    edited(run / "run.json", lambda d: d["results"]["why"].update(report="comparison/report.html", id=7, title=[]))
    assert not read_or_refused(report_run, run)


# -- tables -------------------------------------------------------------------------------------------------------------
COLUMNS = {
    "text": pa.array(["a", "b"]), "lists": pa.array([[1], [2]]), "groups": pa.array([{"a": 1}] * 2),
    "times": pa.array([1, 2], pa.timestamp("s")), "nothing": pa.nulls(2), "huge": pa.array([2**62, -5]),
    "infinite": pa.array([np.inf, np.nan]), "long": pa.array(["n" * 5000] * 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("name", ["ifca", "mixture", "moment-descent"])
def test_any_column_may_hold_anything(name: str, kind: str, folder: Callable[[str], Path]) -> None:
    run = folder(name)
    for file in ("clients.parquet", "rounds.parquet"):
        good = pq.read_table(run / file).slice(0, 2)
        for place, column in enumerate(good.column_names):
            pq.write_table(good.set_column(place, column, COLUMNS[kind]), run / file)
            read_or_refused(report_run, run)
            read_or_refused(load, run)
            pq.write_table(good.remove_column(place), run / file)
            read_or_refused(report_run, run)
            read_or_refused(load, run)
        pq.write_table(good, run / file)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 5, b"x" * 1000])
def test_a_table_that_is_none_is_refused(content: bytes, folder: Callable[[str], Path]) -> None:
    run = folder("ifca")
    (run / "clients.parquet").write_bytes(content)
    assert read_or_refused(report_run, run)
    assert read_or_refused(load, run)


# -- models -------------------------------------------------------------------------------------------------------------
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shorter": lambda t: t[..., :-1] if t.ndim else t[None],
    "deeper": lambda t: t[None],
    "whole numbers": lambda t: t.to(torch.int64),
    "half": lambda t: t.half(),
    "doubled": lambda t: torch.cat([t, t]) if t.ndim else t[None],
    "empty": lambda t: t[:0] if t.ndim else t[None],
}


ALLOWED = {("theta", "doubled"), ("prior/root", "shorter")}  # more clusters, and a lower rank: that may be


@pytest.mark.parametrize("name", RUNS)
def test_tensors_of_other_shapes_and_types_are_refused(name: str, folder: Callable[[str], Path]) -> None:
    run = folder(name)
    for path in (run / "models").glob("*s.safetensors"):
        with safe_open(path, framework="pt") as file:
            own = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            said = file.metadata()
        for key, value in own.items():
            for how, change in TENSORS.items():
                save_file(own | {key: change(value).contiguous()}, path, metadata=said)
                assert read_or_refused(load, run) or (key, how) in ALLOWED or key == "mean_weights", (
                    f"{path.name} {key} {how}"
                )
            save_file({other: tensor for other, tensor in own.items() if other != key}, path, metadata=said)
            assert read_or_refused(load, run) or key == "mean_weights"
        save_file(own, path, metadata=said)
    assert not read_or_refused(load, run)


@pytest.mark.parametrize("name", ["ifca-classes", "fedrep", "shrunk", "mixture", "mixture-regression"])
def test_words_of_models_that_are_wrong_are_refused(name: str, folder: Callable[[str], Path]) -> None:
    run = folder(name)
    for path in (run / "models").glob("*s.safetensors"):
        with safe_open(path, framework="pt") as file:
            own = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            good = json.loads(file.metadata()["coterie"])
        for key, value in list(good.items()):
            for odd in ("x", -1, [], {}, 10**9, [[]]):
                good[key] = odd
                save_file(own, path, metadata={"coterie": json.dumps(good)})
                read_or_refused(load, run)
            del good[key]
            save_file(own, path, metadata={"coterie": json.dumps(good)})
            assert read_or_refused(load, run) or key == "degree"  # earlier versions did not say it
            good[key] = value
        for document in ("[]", "{", "7", json.dumps({**good, "x": [[[]]] * 3})):
            save_file(own, path, metadata={"coterie": document})
            read_or_refused(load, run)
        save_file(own, path, metadata={"coterie": json.dumps(good)})
    assert not read_or_refused(load, run)


def test_a_node_reads_nothing_outside_its_state_folder(tmp_path: Path) -> None:
    from coterie.engines.private import kept_on_node

    kept = {"store": "fit", "number": 1, "clients": ["a"]}
    for run, node in (("..", "n"), ("r", ".."), ("../../r", "n"), ("r", "/etc")):
        with pytest.raises(CoterieError, match="not as it should be"):
            kept_on_node(tmp_path, {"run": run, "field": "personal", "nodes": {node: kept}})
