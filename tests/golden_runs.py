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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.numpy import load_file
from torch import nn

import coterie as package
from command import Said, coterie
from coterie.config import options

GOLDEN = Path(__file__).parent / "golden"
HERE = "@here@"  # stands for the folder in which commands are called, in what is kept
OFTEN = " --checkpoint-seconds 0"  # what runs that are to be interrupted say besides
ALL = "all.csv"
EXACT, FLOAT32, SHOWN = 1e-8, 1e-4, 1e-2  # see `differences`
# What a comparison says of a model has directions that only a ridge of 1e-9 pins down (all classes shifted together; all
# levels of a word against the intercept), which magnifies rounding; scores and predictions do not see them.
LOOSE = {"models": 1e-6}
PASSING = {"seconds", "versions", "started", "coterie", "id", "files", "sha256"}  # when, where, how fast; not what
SIGNS = {"map_x", "map_y"}  # principal axes have no sign
_INSIDE = (
    "models.safetensors",
    "clients.safetensors",
    "state.safetensors",
    "intervals.safetensors",
    "uncertainty.safetensors",
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


Y, LABEL = "--client site --target y", "--client site --target label --exclude sign"
SIGN = "--client site --target sign --exclude label"
PRICE, ROWS = "--client site --target price", "--client site"
STAGED = "--stragglers srpfl --set personal.n0=3 --set personal.stage_rounds=2 --set training.batch_size=6"
CASES: dict[str, Case] = {
    # one model for all, and clusters
    "fedavg": Case("lines", f"{Y} --method fedavg --rounds 4"),
    "fedavg-classes": Case("classes", f"{LABEL} --method fedavg --rounds 4 --new-clients 0.2", keep=False),
    "fedprox": Case(
        "lines", f"{Y} --method fedavg --rounds 4 --set training.proximal=0.5 --set model.degree=2", keep=False
    ),
    "fedprox-exact": Case(
        "lines", f"{Y} --method fedavg --rounds 4 --set training.proximal=0.5 --set training.exact=true", keep=False
    ),
    "ifca": Case("lines", f"{Y} --rounds 5 --starts 2 --new-clients 0.2"),
    "ifca-classes": Case("classes", f"{LABEL} --rounds 8 --set training.participation=0.7"),
    "ifca-network": Case("lines", f'{Y} --hidden 4 --rounds 3 --set clusters.shared_layers=[\\"0\\"]', float32=True),
    "ifca-gradient": Case(
        "lines", f"{Y} --rounds 8 --set clusters.averaging=gradient --set clusters.soft=true", keep=False
    ),
    "ifca-minibatch": Case(
        "lines",
        f"{Y} --rounds 5 --no-baselines --set training.epochs=2 --set training.batch_size=4 --set training.momentum=0.5 "
        "--set training.decay=0.9 --set training.weighting=rows --set clusters.init=random --seed 3",
        keep=False,
    ),
    "ifca-resample": Case("lines", f"{Y} --rounds 6 --set clusters.resample=2", keep=False),
    "moment-descent": Case("lines", f"{Y} --method moment-descent --rounds 3"),
    "moment-descent-given": Case(
        "lines", f"{Y} --method moment-descent --clusters 2 --rounds 3 --new-clients 0.2", keep=False
    ),
    # personal parts
    "fedrep": Case("lines", f"{Y} --method fedrep --hidden 4 --rounds 3 --new-clients 0.2", float32=True),
    "fedrep-linear": Case("lines", f"{Y} --method fedrep --layers 0.bias --rounds 4", keep=False),
    "fedrep-classes": Case("classes", f"{LABEL} --method fedrep --hidden 4 --rounds 3", float32=True, keep=False),
    "fedrep-stages": Case("lines", f"{Y} --method fedrep --layers 0.bias --rounds 8 {STAGED} --clock dynamic"),
    "maml-stages": Case(
        "lines", f"{Y} --method maml --rounds 8 {STAGED} --set personal.stages=adaptive --clock exponential", keep=False
    ),
    "lg-fedavg": Case("lines", f"{Y} --method lg-fedavg --hidden 4,3 --rounds 3", float32=True),
    "lg-fedavg-linear": Case("lines", f"{Y} --method lg-fedavg --layers 0.weight --rounds 4", keep=False),
    "maml": Case("lines", f"{Y} --method maml --rounds 4 --new-clients 0.2"),
    "maml-network": Case(
        "classes",
        f"{LABEL} --method maml --hidden 4 --rounds 3 --set personal.hessian=first-order",
        float32=True,
        keep=False,
    ),
    # linear models of clients' own
    "local": Case("different", f"{Y} --method local --new-clients 0.2"),
    "local-classes": Case("classes", f"{LABEL} --method local", keep=False),
    "shrunk": Case("different", f"{Y} --method shrunk --new-clients 0.2"),
    "shrunk-classes": Case("classes", f"{SIGN} --method shrunk"),
    "shrunk-given": Case("different", f"{Y} --method shrunk --set prior.spread=full", keep=False),
    "representation": Case("directions", f"{Y} --method representation --new-clients 0.2"),
    "representation-given": Case("directions", f"{Y} --method representation --rank 2", keep=False),
    # mixtures
    "mixture": Case(
        "rows", f"{ROWS} --method mixture --rounds 20 --set mixture.restarts=3 --set mixture.max_components=4"
    ),
    "mixture-regression": Case(
        "mixed", f"{PRICE} --method mixture --components 2 --rounds 20 --set mixture.restarts=3 --new-clients 0.2"
    ),
    "mixture-paper": Case(
        "rows",
        f"{ROWS} --method mixture --components 3 --rounds 20 --set mixture.restarts=3 --set mixture.c_lambda=0.5 "
        "--set mixture.penalty=norm --set mixture.covariance=diagonal --set mixture.reject=nobody",
        keep=False,
    ),
    # what the comparison chooses
    "auto": Case("lines", f"{Y} --method auto"),
    "auto-shrunk": Case("different", f"{Y} --method auto --new-clients 0.2", keep=False),
    "auto-mixture": Case("mixed", f"{PRICE} --method auto", keep=False),
    "compare": Case("lines", f"{Y} --quick", "compare"),
    "compare-directions": Case("directions", f"{Y} --quick --seed 1", "compare", keep=False),
    "compare-classes": Case("classes", f"{LABEL} --quick", "compare"),
    "compare-two-classes": Case("classes", f"{SIGN} --quick", "compare", keep=False),
    "compare-rows": Case("rows", f"{ROWS} --quick", "compare"),
    "compare-networks": Case("lines", f"{Y} --quick --hidden 3 --min-rows 13", "compare", float32=True),
}


# In Python, on arrays: a file of numbers, its target, and the estimator.
ESTIMATORS: dict[str, tuple[str, str | None, Callable[[], Any]]] = {
    "FedAvg": ("lines", "y", lambda: package.FedAvg(rounds=4)),
    "IFCA": ("lines", "y", lambda: package.IFCA(2, rounds=4)),
    "IFCA-classes": ("classes", "label", lambda: package.IFCA(2, rounds=8, random_state=1)),
    "IFCA-module": ("lines", "y", lambda: package.IFCA(2, model=_module(), rounds=3, local_steps=3)),
    "IFCA-warm": ("lines", "y", lambda: package.IFCA(2, init="warm", start=torch.eye(2, 4).double(), rounds=2)),
    "MixedRegression": ("lines", "y", lambda: package.MixedRegression(rounds=3)),
    "FedRep": ("lines", "y", lambda: package.FedRep(hidden=(), layers=("0.bias",), rounds=4)),
    "LGFedAvg": ("lines", "y", lambda: package.LGFedAvg(hidden=(), layers=("0.weight",), rounds=4)),
    "MAML": ("lines", "y", lambda: package.MAML(rounds=4)),
    "Local": ("different", "y", package.Local),
    "Shrunk": ("different", "y", package.RandomEffects),
    "Representation": ("directions", "y", package.LowRank),
    "FederatedMixture": ("rows", None, lambda: package.FederatedMixture(3, c_lambda="common", restarts=3)),
    "FederatedMixture-regression": ("mixed", "price", lambda: package.FederatedMixture(2, c_lambda=1.0, restarts=3)),
}


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


# -- running ----------------------------------------------------------------------------------------------------------
def run(name: str, here: Path) -> Said:
    """Run a case in a folder of its own, where its data and then its results are."""
    case = CASES[name]
    lay_out(case.data, here)
    with contextlib.chdir(here):
        return coterie(case.command, f"{case.data}.csv", *shlex.split(case.words), "--out", "run", "--json")


def lay_out(data: str, here: Path) -> None:
    """Put data where commands are called, and beside them a file with further clients, whose last rows have no target."""
    shutil.copy(GOLDEN / "data" / f"{data}.csv", here)
    old, new = ((GOLDEN / "data" / f"{name}.csv").read_text(encoding="utf-8") for name in (data, f"{data}-new"))
    (here / ALL).write_text(old + new.partition("\n")[2], encoding="utf-8")


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
    words = (f"{case.data}.csv", *shlex.split(case.words), "--out", "run", "--json", *OFTEN.split())
    with contextlib.chdir(here), interrupted_after(checkpoints):
        assert coterie("fit", *words).code == 130


def resume(here: Path) -> Said:
    with contextlib.chdir(here):
        return coterie("resume", "run", "--json")


# -- what is kept -----------------------------------------------------------------------------------------------------
def made(here: Path, said: Said) -> dict[str, Any]:
    """What a run said and wrote."""
    assert said.code == 0, said.err
    files, printed = written(here), _printed(json.loads(said.out), here)
    same = files.get("compare.json", {})  # what a comparison prints is this file, and where it is
    printed = {key: value for key, value in printed.items() if key not in same or same[key] != value}
    return {"said": printed, "warned": said.err.splitlines(), "written": files}


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
        elif path.is_file() and path.name != "report.html":  # see `shown`
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
            found["predict"] = _predictions(coterie("predict", "run", ALL))
            found["assign"] = _table(coterie("assign", "run", ALL))
            found["loaded"] = _loaded(Path("run"), Path(f"{case.data}.csv"))
    return found


def python(name: str) -> dict[str, Any]:
    """What an estimator finds."""
    data, target, made_ = ESTIMATORS[name]
    x, y, groups = _arrays(GOLDEN / "data" / f"{data}.csv", target)
    new = _arrays(GOLDEN / "data" / f"{data}-new.csv", target)
    model = made_().fit(x, y, groups)
    scores = {"score": model.score(x, y, groups), "score of new clients": model.score(*new)}
    return _fitted(model) | scores | {"predictions": model.predict(x, groups).tolist()}


def _arrays(file: Path, target: str | None) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Features that are numbers, the target, and the clients, of the rows that have a target."""
    with file.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if target is None or row[target]]
    names = [name for name in rows[0] if name != target and isinstance(_number(rows[0][name]), float)]
    x = np.array([[float(row[name]) for name in names] for row in rows])
    y = None if target is None else np.array([_number(row[target]) for row in rows])
    return x, y, np.array([row["site"] for row in rows])


def _loaded(folder: Path, data: Path) -> dict[str, Any]:
    """What a folder is in Python."""
    model = package.load(folder)
    return _fitted(model) | {"score": model.score(package.read_with(model.schema_, data))}


def _fitted(model: Any) -> dict[str, Any]:
    parameters = {name: value for name, value in model.get_params().items() if name not in ("model", "start")}
    scores = {name: vars(score) for name, score in model.scores_.items()}
    found = {"kind": type(model).__name__, "parameters": parameters, "scores": scores}
    found["clients"] = model.client_names_.tolist()
    named = ("labels_", "theta_", "classes_", "weights_", "means_", "centre_", "covariance_", "outlier_score_")
    found |= {key: np.asarray(getattr(model, key)).tolist() for key in named if getattr(model, key, None) is not None}
    return _printed(found, GOLDEN)


def _table(said: Said) -> dict[str, Any]:
    """The columns of a table that was printed."""
    assert said.code == 0, said.err
    rows = list(csv.DictReader(io.StringIO(said.out)))
    columns = {name: [_number(row[name]) for row in rows] for name in rows[0]}
    return columns | {"warned": said.err.splitlines()}


def _predictions(said: Said) -> dict[str, Any]:
    """Predictions in the order of the rows."""
    table = _table(said)
    rows = Path(ALL).read_text(encoding="utf-8").splitlines()[1:]
    assert table.pop("client") == [row.partition(",")[0] for row in rows]
    return table


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
    if isinstance(value, str):
        return value.replace(str(here.resolve()), HERE).replace(OFTEN, "")
    return value


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
class Difference(NamedTuple):
    """A field, what was kept of it, and what it is now."""

    field: str
    kept: Any
    now: Any

    @property
    def of_sentences(self) -> bool:
        """Whether both are sentences, or labels of several words."""
        return all(isinstance(value, str) and " " in value for value in self[1:])

    @property
    def of_words(self) -> bool:
        """Whether only what is said differs: a sentence, or a field that is new or gone."""
        return self.of_sentences or any(value is ABSENT for value in self[1:])

    def __str__(self) -> str:
        return f"{self.field} was {self.kept!r}, and now it is {self.now!r}"


ABSENT = type("Absent", (), {"__repr__": lambda _: "absent"})()


def differences(kept: Any, now: Any, tolerance: float, field: str = "") -> Iterator[Difference]:
    """Find the fields in which two documents differ.

    Numbers agree to `tolerance`, relative and absolute; those that a report shows, to the digits that it shows.
    """
    tolerance = SHOWN if field == "report" else tolerance
    if isinstance(kept, dict) and isinstance(now, dict):
        later = (key for key in now if key not in kept and not _is_later_option(f"{field}.{key}", now[key]))
        for key in [*kept, *later]:
            near = max(tolerance, LOOSE.get(key, 0.0))
            found = differences(kept.get(key, ABSENT), now.get(key, ABSENT), near, f"{field}.{key}".lstrip("."))
            if key in SIGNS and key in now:
                turned = [None if value is None else -value for value in now[key]]
                found = min(list(found), list(differences(kept.get(key), turned, tolerance, key)), key=len)
            yield from found
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for i, (a, b) in enumerate(zip(kept, now, strict=True)):
            yield from differences(a, b, tolerance, f"{field}[{i}]")
    elif not _alike(kept, now, tolerance):
        yield Difference(field, kept, now)


def _is_later_option(field: str, value: Any) -> bool:
    """Whether this is an option, or an estimator's parameter, of a later version, as it is if nobody says anything."""
    if field.rpartition(".")[0].endswith("parameters"):
        return value is None
    read = field.partition("compare.json.data.")[2]
    place = (f"data.{read}" if read else field.partition("run.json.config.")[2]).split(".")
    found: Any = options().model_dump(mode="json") if place != [""] else {}
    for name in place:
        found = found.get(name, ABSENT) if isinstance(found, dict) else ABSENT
    return bool(found == value)


def _alike(kept: Any, now: Any, tolerance: float) -> bool:
    if isinstance(kept, float) or isinstance(now, float):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (kept, now))
        return numbers and (
            math.isclose(kept, now, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(kept) and math.isnan(now))
        )
    return type(kept) is type(now) and bool(kept == now)


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
        f"{value:.10g}"
        if isinstance(value, float) and math.isfinite(value) and value % 1
        else json.dumps(value, ensure_ascii=False)
    )


def keep_folder(here: Path, kept: Path) -> None:
    """Keep a run folder for later versions, without its reports (they are written again) and without this machine's path."""
    shutil.copytree(here / "run", kept, ignore=shutil.ignore_patterns("report.html"))
    for path in kept.rglob("*.json"):
        said = json.loads(path.read_text(encoding="utf-8").replace(str(here.resolve()), HERE))
        said.pop("sha256", None)  # it is changed here, and when it is brought back
        path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def bring_back(kept: Path, data: str, here: Path) -> None:
    """Lay out a folder that was kept, and its data, as if it had been run here."""
    lay_out(data, here)
    shutil.copytree(kept, here / "run")
    for path in (here / "run").rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace(HERE, str(here.resolve())), encoding="utf-8")
