# SPDX-License-Identifier: Apache-2.0
"""Small runs of every method and of every kind of comparison, all that they say and write, and how two of them differ.

Everything goes the way that users go: the command line, `coterie.load`, and the files that users find.
"""

import contextlib
import csv
import io
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

import coterie as package
from command import Said, coterie

GOLDEN = Path(__file__).parent / "golden"
HERE = "@here@"  # stands for the folder in which commands are called, in what is kept
EXACT, FLOAT32, SHOWN = 1e-8, 1e-4, 1e-2  # see `differences`
PASSING = {"seconds", "versions", "started", "coterie"}  # what says when, where and how fast, but not what
SIGNS = {"map_x", "map_y"}  # principal axes have no sign
_INSIDE = (
    "models.safetensors",
    "clients.safetensors",
    "state.safetensors",
)  # how a model is stored is our own business


@dataclass(frozen=True)
class Case:
    """A command on one of the files in tests/golden/data."""

    data: str
    words: str
    command: str = "fit"
    float32: bool = False  # networks: sums in another order differ by 1e-7, and a few steps carry that on
    keep: bool = True  # whether its folder is kept, to be read by later versions

    @property
    def tolerance(self) -> float:
        return FLOAT32 if self.float32 else EXACT


LINES, LABEL, SIGN = (
    "--client site --target y",
    "--client site --target label --exclude sign",
    "--client site --target sign --exclude label",
)
PRICE, ROWS = "--client site --target price", "--client site"
CASES: dict[str, Case] = {
    "ifca": Case("lines", f"{LINES} --rounds 5 --starts 2 --new-clients 0.2"),
    "fedrep": Case("lines", f"{LINES} --method fedrep --hidden 4 --rounds 3 --new-clients 0.2", float32=True),
}


# -- running ----------------------------------------------------------------------------------------------------------
def run(name: str, here: Path) -> Said:
    """Run a case in a folder of its own, where its data and then its results are."""
    case = CASES[name]
    lay_out(case.data, here)
    with contextlib.chdir(here):
        return coterie(case.command, f"{case.data}.csv", *shlex.split(case.words), "--out", "run", "--json")


def lay_out(data: str, here: Path) -> None:
    """Put data where commands are called."""
    for file in (GOLDEN / "data").glob(f"{data}*.csv"):
        shutil.copy(file, here)


@contextlib.contextmanager
def interrupted_after(checkpoints: int) -> Iterator[None]:
    """Press Ctrl-C when so many checkpoints have been written."""
    put, left = os.replace, checkpoints

    def replace(source: Any, target: Any) -> None:
        nonlocal left
        put(source, target)
        path = Path(target)
        left -= path.suffix == ".safetensors" and path.parent.name != "models"
        if left == 0:
            left = -1
            raise KeyboardInterrupt

    with patch("os.replace", replace):
        yield


def run_interrupted(name: str, here: Path, checkpoints: int) -> None:
    """Begin a case, and leave it unfinished."""
    case = CASES[name]
    lay_out(case.data, here)
    words = (f"{case.data}.csv", *shlex.split(case.words), "--out", "run", "--json", "--checkpoint-seconds", "0")
    with contextlib.chdir(here), interrupted_after(checkpoints):
        assert coterie("fit", *words).code == 130


def resume(here: Path) -> Said:
    with contextlib.chdir(here):
        return coterie("resume", "run", "--json")


# -- what is kept -----------------------------------------------------------------------------------------------------
def everything(name: str, here: Path, said: Said) -> dict[str, Any]:
    """All that a run said and wrote, and what comes of its folder."""
    assert said.code == 0, said.err
    document = {"said": _printed(json.loads(said.out), here), "warned": said.err.splitlines()}
    return document | {"written": written(here), **used(name, here)}


def written(here: Path) -> dict[str, Any]:
    """What is in the files of a folder."""
    found: dict[str, Any] = {}
    for path in sorted((here / "run").rglob("*")):
        where = path.relative_to(here / "run").as_posix()
        if path.suffix == ".json":
            found[where] = _printed(json.loads(path.read_text(encoding="utf-8")), here)
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            found[where] = {column: table[column].to_pylist() for column in table.column_names if column not in PASSING}
        elif path.suffix == ".safetensors" and path.name not in _INSIDE:
            found[where] = {key: value.tolist() for key, value in sorted(load_file(path).items())}
        elif path.is_file():
            found[where] = "a file"
    return found


def used(name: str, here: Path) -> dict[str, Any]:
    """What comes of a folder: its report, and of a fit the predictions for old and for new clients."""
    case = CASES[name]
    found: dict[str, Any] = {}
    with contextlib.chdir(here):
        page = coterie("report", "run")
        assert (page.code, page.out) == (0, f"{Path('run') / 'report.html'}\n"), page
        found["report"] = shown(Path("run/report.html").read_text(encoding="utf-8"))
        if case.command == "fit":
            for title, words in (
                ("predict", ("predict", "run", f"{case.data}.csv")),
                ("predict new", ("predict", "run", f"{case.data}-new.csv")),
                ("assign", ("assign", "run", f"{case.data}.csv")),
                ("assign new", ("assign", "run", f"{case.data}-new.csv")),
            ):
                found[title] = _table(coterie(*words))
            found["loaded"] = _loaded(Path("run"), Path(f"{case.data}.csv"))
    return found


def _loaded(folder: Path, data: Path) -> dict[str, Any]:
    """What a folder is in Python."""
    model = package.load(folder)
    clients = package.read_with(model.schema_, data)
    found = {
        "kind": type(model).__name__, "parameters": model.get_params(), "clients": model.client_names_.tolist(),
        "score": model.score(clients), "scores": {name: vars(score) for name, score in model.scores_.items()},
    }  # fmt: skip
    named = ("labels_", "theta_", "classes_", "weights_", "means_", "centre_", "covariance_", "outlier_score_")
    found |= {key: np.asarray(getattr(model, key)).tolist() for key in named if getattr(model, key, None) is not None}
    return _printed(found, folder)


def _table(said: Said) -> dict[str, Any]:
    """The columns of a table that was printed."""
    assert said.code == 0, said.err
    rows = list(csv.DictReader(io.StringIO(said.out)))
    columns = {name: [_number(row[name]) for row in rows] for name in rows[0]}
    return columns | {"warned": said.err.splitlines()}


def _number(text: str) -> Any:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _printed(value: Any, here: Path) -> Any:
    """A document without what is passing, and without the path of this machine."""
    if isinstance(value, dict):
        return {key: _printed(inner, here) for key, inner in value.items() if key not in PASSING}
    if isinstance(value, list | tuple):
        return [_printed(inner, here) for inner in value]
    return value.replace(str(here.resolve()), HERE) if isinstance(value, str) else value


class _Page(HTMLParser):
    """The sections of a page, with how many charts they have, and what is in the cells of their tables."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: dict[str, dict[str, Any]] = {}
        self.here: dict[str, Any] = {"charts": 0, "tables": []}
        self.cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.here = self.sections[str(dict(attrs)["id"])] = {"charts": 0, "tables": []}
        elif tag == "svg":
            self.here["charts"] += 1
        elif tag == "table":
            self.here["tables"].append([])
        elif tag == "tr":
            self.here["tables"][-1].append([])
        elif tag in ("td", "th"):
            self.cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.cell is not None:
            self.here["tables"][-1][-1].append(_number(" ".join("".join(self.cell).split())))
            self.cell = None

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell.append(data)


def shown(page: str) -> dict[str, Any]:
    """What a report shows, but for its settings, which are those of run.json."""
    read = _Page()
    read.feed(page)
    return {name: found for name, found in read.sections.items() if name != "settings"}


# -- comparing --------------------------------------------------------------------------------------------------------
def differences(want: Any, got: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Name every field in which two documents differ, with both values.

    Numbers agree to `tolerance`, relative and absolute; those that a report shows, to the digits that it shows.
    """
    tolerance = SHOWN if where == "report" else tolerance
    if isinstance(want, dict) and isinstance(got, dict):
        for key in [*want, *(key for key in got if key not in want)]:
            inside = f"{where}.{key}" if where else str(key)
            if key not in got or key not in want:
                yield f"{inside}: {'is gone' if key in want else 'is new'}"
            elif key in SIGNS:
                yield from _up_to_sign(want[key], got[key], tolerance, inside)
            else:
                yield from differences(want[key], got[key], tolerance, inside)
    elif isinstance(want, list) and isinstance(got, list):
        if len(want) != len(got):
            yield f"{where}: {len(want)} entries were kept, and there are {len(got)}"
        for i, (a, b) in enumerate(zip(want, got, strict=False)):
            yield from differences(a, b, tolerance, f"{where}[{i}]")
    elif not _alike(want, got, tolerance):
        yield f"{where}: {want!r} was kept, and now it is {got!r}"


def _up_to_sign(want: Any, got: Any, tolerance: float, where: str) -> Iterator[str]:
    other = [value if value is None else -value for value in got]
    if next(differences(want, other, tolerance, where), None) is not None:
        yield from differences(want, got, tolerance, where)


def _alike(want: Any, got: Any, tolerance: float) -> bool:
    if isinstance(want, float) or isinstance(got, float):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (want, got))
        return numbers and (
            math.isclose(want, got, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(want) and math.isnan(got))
        )
    return type(want) is type(got) and bool(want == got)


# -- files ------------------------------------------------------------------------------------------------------------
def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write a document to be read by people too: a list of numbers on one line, with as many digits as are compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(document, "") + "\n", encoding="utf-8")


def _text(value: Any, margin: str) -> str:
    inner = margin + " "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {_text(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return "[\n" + ",\n".join(f"{inner}{_text(one, inner)}" for one in value) + f"\n{margin}]"
    if isinstance(value, list):
        return "[" + ",".join(_text(one, inner) for one in value) + "]"
    return (
        f"{value:.12g}"
        if isinstance(value, float) and math.isfinite(value) and value % 1
        else json.dumps(value, ensure_ascii=False)
    )


def keep_folder(here: Path, kept: Path) -> None:
    """Keep a run folder for later versions, without its reports (they are written again) and without this machine's path."""
    shutil.copytree(here / "run", kept, ignore=shutil.ignore_patterns("report.html"))
    for path in kept.rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace(str(here.resolve()), HERE), encoding="utf-8")


def bring_back(kept: Path, data: str, here: Path) -> None:
    """Lay out a folder that was kept, and its data, as if it had been run here."""
    lay_out(data, here)
    shutil.copytree(kept, here / "run")
    for path in (here / "run").rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace(HERE, str(here.resolve())), encoding="utf-8")
