# SPDX-License-Identifier: Apache-2.0
"""Which structure do the clients of twelve real data sets have? How every structure does, what is chosen, and how surely.

With several seeds, everything is drawn again: test rows, new clients and folds. A headline is the same if its words are; and
seeds agree if what each of them chooses is among what every other says will do.

Columns that give the target away, or only number rows, are left out; four of the heart data's five degrees are sick.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from coterie.data.clients import Clients
from coterie.data.ragged import DiskRows, Ragged
from coterie.data.readers import read
from coterie.errors import ConfigError, DataError
from coterie.select import Paired, difference
from coterie.selection import ORDER, compare
from coterie.selection.facts import facts
from coterie.selection.result import Comparison
from coterie.selection.text import answer
from coterie.studies.common import Column, Outcome, Tell, silent
from coterie.studies.data.images import data_folder
from coterie.studies.parallel import side_by_side

__all__ = ["CAPTION", "COLUMNS", "NAME", "QUICK", "TASKS", "RealTask", "Settings", "run"]

NAME = "compare-real"


@dataclass(frozen=True)
class RealTask:
    """A data set: its file, and what its columns are."""

    name: str
    file: str
    client: str
    target: str
    task: Literal["regression", "classification"]
    exclude: tuple[str, ...] = ()
    missing: Literal["error", "mean", "drop"] = "error"
    new_clients: float = 0.2
    change: Callable[[Clients], Clients] | None = None


def _sick(clients: Clients) -> Clients:
    """Any degree of heart disease is sick."""

    def merged(rows: Ragged | None) -> Ragged | None:
        if rows is None:
            return None
        assert not isinstance(rows.y, DiskRows)
        return replace(rows, y=None if rows.y is None else (rows.y > 0).to(torch.int64))

    train = merged(clients.train)
    assert train is not None
    schema = clients.schema.model_copy(update={"classes": ("0", "1 to 4")})
    return replace(clients, schema=schema, train=train, test=merged(clients.test), newcomers=merged(clients.newcomers))


TASKS = (
    RealTask("school", "school_exam_139schools.csv.gz", "school", "score", "regression", ("x27",)),
    RealTask(
        "bdf", "bdf_131schools.csv.gz", "schoolNR", "langPOST", "regression",
        ("pupilNR", "classNR", "aritPOST", "aritdiff"), "drop",
    ),
    RealTask("radon", "radon_85counties.csv.gz", "county.name", "log.radon", "regression", ("county",)),
    RealTask(
        "computer survey", "computer_survey_190persons.csv.gz", "person", "likelihood_to_buy", "regression", ("profile",)
    ),
    RealTask(
        "heart", "heart_disease_4hospitals.csv.gz", "hospital", "num", "classification", missing="mean", new_clients=0.0,
        change=_sick,
    ),
    RealTask(
        "eICU", "eicu_demo_by_hospital.csv.gz", "hospitalid", "hospital_death", "classification",
        ("icu_death", "icu_los_days"), "mean",
    ),
    RealTask("landmine", "landmine_29fields.csv.gz", "field", "mine", "classification"),
    RealTask("vowel", "vowel_15speakers.csv.gz", "speaker", "vowel", "classification", ("test_flag", "sex")),
    RealTask("pen digits", "pendigits_writers.csv.gz", "writer", "digit", "classification", ("split", "seq")),
    RealTask("sleepstudy", "sleepstudy_18subjects.csv.gz", "Subject", "Reaction", "regression"),
    RealTask("Oxford boys", "oxboys_26subjects.csv.gz", "Subject", "height", "regression", ("Occasion",)),
    RealTask("Beijing air", "beijing_air_12stations.csv.gz", "station", "PM2.5", "regression", ("PM10",), "drop"),
)  # fmt: skip
QUICK: dict[str, Any] = {"data": ("radon", "bdf"), "quick": True}


@dataclass(frozen=True)
class Settings:
    """Which data, and where what is held out comes from."""

    data: tuple[str, ...] = tuple(task.name for task in TASKS)
    quick: bool = False
    jobs: int | None = None
    seeds: int = 1
    seed: int = 0
    folder: Path | None = None


def run(settings: Settings, tell: Tell = silent) -> Outcome:
    """Compare structures on every data set."""
    unknown = [name for name in settings.data if name not in {task.name for task in TASKS}]
    if unknown:
        raise ConfigError(f"there are no data '{unknown[0]}'", f"choose among {', '.join(task.name for task in TASKS)}")
    tasks = [
        (replace(settings, seed=settings.seed + i), task)
        for task in TASKS
        if task.name in settings.data
        for i in range(settings.seeds)
    ]
    found = side_by_side(_one, tasks, settings.jobs, lambda n: tell(NAME, n, len(tasks)))
    said = {key: value for key, value in asdict(settings).items() if key != "folder"}
    lines = [
        _over_seeds([line for _, line in found if line["data"] == task.name])
        for task in TASKS
        if task.name in settings.data
    ]
    return Outcome(NAME, said, [row for rows, _ in found for row in rows], lines)


def _over_seeds(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first seed's line, with how alike those of all seeds are, and mean seconds."""
    texts = [line["headline"] for line in lines]
    most = max(set(texts), key=texts.count)
    agree = [one["chosen_name"] in other["will_do"] for one in lines for other in lines if one is not other]
    return lines[0] | {
        "headlines": texts,
        "same_headline": texts.count(most) / len(texts),
        "agree": sum(agree) / len(agree) if agree else 1.0,
        "every_choice": ", ".join(sorted({str(line["chosen"]) for line in lines})),
        "behind": sum(line["behind"] for line in lines) / len(lines),
        "seconds": sum(line["seconds"] for line in lines) / len(lines),
    }


def _one(job: tuple[Settings, RealTask]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One data set: a row for every structure, and its line in the table."""
    settings, task = job
    began = time.process_time()
    found = compare(_read(settings, task), seed=settings.seed, quick=settings.quick)
    seconds = time.process_time() - began
    rows = [
        {
            "data": task.name, "seed": settings.seed, "structure": one.name, "setting": one.setting, "metric": found.metric,
            "mean": one.test_metric, "stderr": one.test_stderr, "test_score": one.test_score, "cv_score": one.score,
            "cv_stderr": one.stderr, "new_mean": one.new_metric, "new_stderr": one.new_stderr,
            "chosen": one.name == found.chosen, "as_good": one.as_good, "share": one.chosen_share, "df": one.df,
        }
        for one in found.structures
    ]  # fmt: skip
    return rows, _line(task, found, seconds)


def _read(settings: Settings, task: RealTask) -> Clients:
    path = (settings.folder or data_folder()) / task.file
    if not path.is_file():
        raise DataError(f"there is no file {path}", "set COTERIE_DATA to the folder with the data sets")
    clients = read(
        path, client=task.client, target=task.target, exclude=task.exclude, missing=task.missing, task=task.task,
        test_size=0.2, new_clients=task.new_clients, seed=settings.seed,
    )  # fmt: skip
    return clients if task.change is None else task.change(clients)


def _line(task: RealTask, found: Comparison, seconds: float) -> dict[str, Any]:
    """Test metric of every structure; how far the chosen one is from the best, in standard errors of the difference."""
    higher = found.metric == "accuracy"
    chosen = found[found.chosen]
    best = max(found.structures, key=lambda one: (1 if higher else -1) * _number(one.test_metric))
    own = [one.client_test_metric for one in (chosen, best)]
    gap = difference(Paired.of(torch.from_numpy(np.stack([one for one in own if one is not None]))), 0, 1)
    line: dict[str, Any] = {"data": task.name, "clients": len(found.names), "metric": found.metric}
    line |= {one.name: one.test_metric for one in found.structures}
    line |= {"chosen": f"{found.chosen} ({chosen.label})", "best": best.name, "stderr": best.test_stderr}
    line |= {"headline": answer(found).headline, "chosen_name": chosen.name, "share": chosen.chosen_share}
    line |= {"will_do": [chosen.name, *(one.name for one in facts(found).also)], "messages": found.traffic.messages}
    return line | {"behind": abs(gap.mean), "behind_stderr": gap.stderr, "new": chosen.new_metric,
                   "new_global": found["global"].new_metric, "seconds": seconds}  # fmt: skip


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _columns(names: Sequence[str]) -> list[Column]:
    return [Column(name, name, ".3f") for name in names]


CAPTION = (
    "Mean over clients of RMSE or accuracy on test rows. behind: by how much the chosen structure is worse than the best;\n"
    "se: standard error of the best one's mean. new: on held-out clients, with 5 labelled rows each. sure: share of\n"
    "repeated choices, with clients drawn again, that are the same. same: share of seeds with the most frequent headline.\n"
    "agree: share of pairs of seeds in which one chooses what the other says will do."
)
COLUMNS = [
    Column("data", "data"), Column("clients", "clients"), Column("metric", "metric"), *_columns(ORDER),
    Column("chosen", "chosen"), Column("share", "sure", ".0%"), Column("same_headline", "same", ".0%"),
    Column("agree", "agree", ".0%"), *_columns(("behind",)), Column("stderr", "se", ".3f"),
    Column("new", "new", ".3f"), Column("new_global", "new, global", ".3f"),
    Column("seconds", "CPU s", ".0f"),
]  # fmt: skip
