# SPDX-License-Identifier: Apache-2.0
"""Clients whose images are rotated, nobody told how: IFCA against one model for all and one model each.

Ghosh et al., NeurIPS 2020, Section 6.2 and Table 1. What the three data sets differ in stands in rotated_tasks.py.

IFCA starts from `spread` unless asked otherwise; each start that is asked for is a row of the table. On rotated MNIST (80
clients x 100 images and 160 x 50, raw pixels, seeds 0 to 19) `spread` placed every client right within three rounds in all
40 runs, while `balanced` lost a cluster in 3 of 20 and one random start in 1 of 5. With `random` and `balanced`, empty
clusters are not reseeded: that is the paper's algorithm.
"""

import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from coterie.errors import RunError
from coterie.files import replace_file
from coterie.lock import LOCK, held
from coterie.models import Model
from coterie.studies.common import Column, Outcome, Tell, at_least, json_safe, one_of, silent
from coterie.studies.data.images import Rotated, rotated
from coterie.studies.rotated_fit import Fit, Score, fit
from coterie.studies.rotated_settings import Settings, Task

__all__ = ["CAPTION", "COLUMNS", "Repetition", "repeat", "run"]

_MAY_CHANGE = {"rounds", "seed", "seeds", "methods", "init", "evaluate_every"}  # when a checkpoint is continued


@dataclass(frozen=True, eq=False)
class Repetition:
    """One dealing of the images with everything that was trained on it: "ifca-spread" (or another start), "global", ..."""

    seed: int
    data: Rotated
    model: Model
    fits: dict[str, Fit]


def run(task: Task, sizes: Sequence[Settings], tell: Tell = silent, checkpoint: Path | None = None) -> Outcome:
    """Run a study with one or several settings (which differ in clients and rows) and all their seeds.

    Parameters
    ----------
    checkpoint : Path, optional
        Folder where states are kept; a run that was stopped goes on from there.
    """
    with nullcontext() if checkpoint is None else held(checkpoint / LOCK, checkpoint):
        rows = _rows(task, sizes, tell, checkpoint)
    said = asdict(sizes[0])
    if len(sizes) > 1:
        said |= {name: [getattr(settings, name) for settings in sizes] for name in ("clients", "rows")}
    return Outcome(task.name, said, rows)


def _rows(task: Task, sizes: Sequence[Settings], tell: Tell, checkpoint: Path | None) -> list[dict[str, Any]]:
    rows = []
    for settings in sizes:
        scores: dict[tuple[str, str | None], list[Score]] = {run: [] for run in settings.trained}
        for seed in range(settings.seed, settings.seed + settings.seeds):
            for made in repeat(task, settings, seed, tell, checkpoint).fits.values():
                scores[made.method, made.init].append(made.score)
        rows += [_row(task, settings, method, init, found) for (method, init), found in scores.items()]
    return rows


def repeat(
    task: Task, settings: Settings, seed: int, tell: Tell = silent, checkpoint: Path | None = None
) -> Repetition:
    """Deal the images once and train every method on them."""
    data = _deal(task, settings, seed)
    model = task.model(settings, data)
    if checkpoint is not None:
        _claim(checkpoint, task, settings)
    fits = {}
    for method, init in settings.trained:
        name = method if init is None else f"{method}-{init}"
        what = f"{settings.clients}x{settings.rows}-seed{seed}-{name}"
        path = None if checkpoint is None else checkpoint / f"{what}.safetensors"
        fits[name] = fit(method, settings, data, model, seed, init=init, checkpoint=path, tell=partial(tell, what))
    return Repetition(seed, data, model, fits)


def _deal(task: Task, settings: Settings, seed: int) -> Rotated:
    at_least(len(task.angles), clients=settings.clients, test_clients=settings.test_clients)  # one for each angle
    one_of("--pixels", settings.pixels, tuple(task.pixels))
    data = rotated(
        task.images(seed),
        n_clients=settings.clients,
        rows=settings.rows,
        angles=task.angles,
        n_test_clients=settings.test_clients,
        test_rows=settings.test_rows,
        seed=seed,
        flat=task.flat,
    )
    prepare = task.pixels[settings.pixels]
    if prepare is None:
        return data
    return replace(data, train=data.train.changed(prepare), test=data.test.changed(prepare))


def _claim(folder: Path, task: Task, settings: Settings) -> None:
    """Note whose checkpoints these are, and refuse those of other settings."""
    fixed = {name: value for name, value in asdict(settings).items() if name not in _MAY_CHANGE}
    mine = json_safe({"study": task.name, **fixed})
    path = folder / f"{settings.clients}x{settings.rows}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        replace_file(path, json.dumps(mine, indent=2).encode())
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    differ = sorted(name for name in {*mine, *before} if mine.get(name) != before.get(name))
    if differ:
        known = differ[0] in before
        option = f"--{differ[0].replace('_', '-')} {before[differ[0]]}, or " if known else ""
        raise RunError(
            f"the checkpoints in {folder} were made with another {differ[0]}", f"give {option}another --checkpoint"
        )


# -- the table --------------------------------------------------------------------------------------------------------
def _row(task: Task, settings: Settings, method: str, init: str | None, scores: Sequence[Score]) -> dict[str, Any]:
    accuracies = [score.accuracy for score in scores]
    rand = [score.adjusted_rand for score in scores if score.adjusted_rand is not None]
    paper, paper_std = task.paper.get(settings.rows, {}).get(method, (None, None))
    row: dict[str, Any] = {
        "method": method,
        "init": init,
        "clients": settings.clients,
        "rows": settings.rows,
        "rounds": settings.rounds,
        "step_size": settings.step_size,
        "seeds": len(scores),
        "accuracy": statistics.mean(accuracies),
        "std": statistics.pstdev(accuracies) if len(scores) > 1 else None,
        "adjusted_rand": statistics.mean(rand) if rand else None,
        "paper": paper,
        "paper_std": paper_std,
        "seconds_per_round": round(statistics.mean(score.seconds_per_round for score in scores), 4),
        "accuracies": accuracies,
    }
    if settings.evaluate_every:
        row["curves"] = [score.curve for score in scores]
    return row


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


CAPTION = (
    "accuracy on test clients, mean and standard deviation over seeds; paper: Table 1 at as many images a client,\n"
    "with all images, all rounds and five seeds"
)
COLUMNS = [
    Column("method", "method"), Column("init", "start"), Column("clients", "clients"), Column("rows", "images each"),
    Column("rounds", "rounds"), Column("step_size", "step", "g"), Column("seeds", "seeds"),
    Column("accuracy", "accuracy", _percent), Column("std", "+-", _percent), Column("paper", "paper", _percent),
    Column("paper_std", "+-", _percent), Column("adjusted_rand", "adjusted Rand", ".3f"),
    Column("seconds_per_round", "s/round", ".2f"),
]  # fmt: skip
