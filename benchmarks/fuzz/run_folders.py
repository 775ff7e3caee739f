# SPDX-License-Identifier: Apache-2.0
"""Run folders: `run.json`, `compare.json`, tables and models of every method, changed a little."""

import atexit
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from benchmarks.fuzz.changes import as_json, changed, changed_bytes, edits, flips
from coterie.documents import parsed
from coterie.estimators import load
from coterie.report.comparison import read_comparison, render_comparison
from coterie.report.page import render
from coterie.report.run_folder import read_run, read_table
from coterie.runs.auto import advised
from coterie.runs.folder import read_options, summary

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "folders"
_MODELS = ("models/models.safetensors", "models/clients.safetensors")


@cache
def _place() -> Path:
    """Where folders are changed: in memory, if there is such a place."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@cache
def _folders(document: str) -> tuple[Path, ...]:
    """Good folders with such a document, to be changed."""
    made = []
    for kept in sorted(GOLDEN.iterdir()):
        if (kept / document).exists():
            shutil.copytree(kept, _place() / kept.name, dirs_exist_ok=True)
            made.append(_place() / kept.name)
    return tuple(made)


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _bytes(path: Path) -> bytes:
    return path.read_bytes()


class _Changed:
    """A file that is changed for a while."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.good = path, _bytes(path)
        self.path.write_bytes(content)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.good)


def _document(name: str, value: tuple[int, Any]) -> tuple[Path, _Changed]:
    folders = _folders(name)
    folder = folders[value[0] % len(folders)]
    text = _text_of(folder / name)
    return folder, _Changed(folder / name, as_json(changed(json.loads(text), value[1])))


@cache
def _text_of(path: Path) -> str:
    return _bytes(path).decode()


def run_document(value: tuple[int, Any]) -> None:
    """`run.json`, by all that read it: as far as the report's page, or its options and its summary."""
    folder, change = _document("run.json", value)
    with change:
        if value[1][0][-1] % 8 == 0:  # laying out takes five times as long as reading
            render(read_run(folder))
        else:
            read_options(folder)
            summary(folder)


def comparison_document(value: tuple[int, Any]) -> None:
    """`compare.json`, by all that read it: as far as the report's page, or what to fit."""
    folder, change = _document("compare.json", value)
    with change:
        if value[1][0][-1] % 8 == 0:
            render_comparison(folder)
        else:
            advised(read_comparison(folder))


def json_bytes(value: tuple[int, Any]) -> None:
    """A document of which single bytes are others."""
    folders = _folders("run.json")
    parsed(changed_bytes(_bytes(folders[value[0] % len(folders)] / "run.json"), value[1]), "it", "try again")


# -- tables -------------------------------------------------------------------------------------------------------------
_TABLES = ("clients.parquet", "rounds.parquet")
_COLUMNS = st.sampled_from(
    [
        pa.array([], pa.float64()), pa.array(["a", None, "c"]), pa.array([1, 2, 3]), pa.array([1.5, float("nan"), -1e308]),
        pa.array([[1], None, []]), pa.array([True, None, False]), pa.array([None, None, None]), pa.array([{"a": 1}] * 3),
        pa.array([0, 1, 2], pa.timestamp("s")), pa.array([b"a", b"", None]), pa.array(["x" * 5000] * 3),
        pa.array([2**63 - 1, -5, 0]), pa.array(["a", "b", "a"]).dictionary_encode(), pa.array([["a"], [], None]),
        pa.array([float("inf")] * 3, pa.float32()), pa.array([[1e300, None], [float("nan")], []]),
    ]
)  # fmt: skip


def table_columns(value: tuple[int, list[tuple[int, Any]]]) -> None:
    """A table of a run whose columns are others, and the report that is made of it."""
    folders = _folders("run.json")
    folder = folders[value[0] % len(folders)]
    path = folder / _TABLES[value[0] // len(folders) % 2]
    table = _table(path).slice(0, 3)
    for which, odd in value[1]:
        place = which % (table.num_columns + 1)
        column = pa.concat_arrays([odd] * 2)[: len(table)] if len(odd) else pa.nulls(len(table), odd.type)
        name = table.column_names[place] if place < table.num_columns else "new"
        table = (
            table.set_column(place, name, column) if place < table.num_columns else table.append_column(name, column)
        )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with _Changed(path, sink.getvalue().to_pybytes()):
        if value[0] % 4 == 0:
            render(read_run(folder))
        else:
            read_table(path)


def table_bytes(value: tuple[int, Any]) -> None:
    """A table of a run of which single bytes are others."""
    folders = _folders("run.json")
    path = folders[value[0] % len(folders)] / _TABLES[value[0] // len(folders) % 2]
    with _Changed(path, changed_bytes(_bytes(path), value[1])):
        read_table(path)


@cache
def _table(path: Path) -> pa.Table:
    return pq.read_table(pa.BufferReader(_bytes(path)))


# -- models -------------------------------------------------------------------------------------------------------------
@cache
def _stored(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    path.write_bytes(_bytes(path))
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["coterie"]  # noqa: SIM118


_TENSORS = (
    lambda t: t[..., :-1] if t.ndim else t[None], lambda t: t[None], lambda t: t.float(), lambda t: t.to(torch.int64),
    lambda t: torch.full_like(t.double(), torch.nan), torch.zeros_like, lambda t: t.reshape(-1),
    lambda t: torch.cat([t, t]) if t.ndim else t, lambda t: t[:0] if t.ndim else t, lambda t: t * 1e300, lambda t: t.half(),
)  # fmt: skip


def models(value: tuple[int, Any, list[tuple[int, int]]]) -> None:
    """Stored models whose words or tensors are others."""
    number, words, tensors = value
    folders = _folders("run.json")
    folder = folders[number % len(folders)]
    files = [name for name in _MODELS if (folder / name).exists()]
    path = folder / files[number // len(folders) % len(files)]
    own, said = _stored(path)
    made = dict(own)
    for which, kind in tensors:
        name = sorted(own)[which % len(own)]
        if kind == len(_TENSORS):
            made.pop(name, None)
        elif name in made:
            made[name] = _TENSORS[kind](made[name]).contiguous()
    document = changed(json.loads(said), words) if words else json.loads(said)
    with _Changed(path, save({n: t.clone() for n, t in made.items()}, metadata={"coterie": json.dumps(document)})):
        load(folder)


def model_bytes(value: tuple[int, Any]) -> None:
    """Stored models of which single bytes are others."""
    folders = _folders("run.json")
    folder = folders[value[0] % len(folders)]
    files = [name for name in _MODELS if (folder / name).exists()]
    path = folder / files[value[0] // len(folders) % len(files)]
    with _Changed(path, changed_bytes(_bytes(path), value[1])):
        load(folder)


_which = st.integers(0, 999)
_changes = st.tuples(_which, edits)
_flips = st.tuples(_which, flips)
TARGETS = {
    "run.json": (_changes, run_document),
    "run.json, bytes": (_flips, json_bytes),
    "compare.json": (_changes, comparison_document),
    "tables of a run, bytes": (_flips, table_bytes),
    "tables of a run": (
        st.tuples(_which, st.lists(st.tuples(st.integers(0, 99), _COLUMNS), min_size=1, max_size=3)), table_columns,
    ),
    "models of a run": (
        st.tuples(
            _which, st.none() | edits,
            st.lists(st.tuples(st.integers(0, 99), st.integers(0, len(_TENSORS))), max_size=2),
        ),
        models,
    ),
    "models of a run, bytes": (_flips, model_bytes),
}  # fmt: skip
