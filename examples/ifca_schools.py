# SPDX-License-Identifier: Apache-2.0
"""Do schools fall into groups? One model for all, one model each, and IFCA, compared on held-out pupils.

Run it on invented schools, `python examples/ifca_schools.py`, or on a table of your own:
`python examples/ifca_schools.py exams.csv --client school --target score --clusters 3`
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow.csv import write_csv

import coterie


def invent(path: Path) -> None:
    """Write 60 schools with 40 pupils each: homework counts in a third of the schools, lessons in the others."""
    draw = np.random.default_rng(0)
    school = np.repeat(np.arange(60), 40)
    lessons, homework = draw.normal(size=(2, len(school)))
    kind = draw.choice(["town", "village"], len(school))
    effect = np.where((school % 3 == 0)[:, None], [[0.2, 1.0]], [[1.0, -0.2]])
    score = effect[:, 0] * lessons + effect[:, 1] * homework + 0.3 * (kind == "town") + draw.normal(size=len(school))
    names = [f"school-{i:02d}" for i in school]
    table = {"school": names, "kind": kind, "lessons": lessons, "homework": homework, "score": score}
    write_csv(pa.table(table), path)


parser = argparse.ArgumentParser()
parser.add_argument("data", nargs="?", type=Path, help="CSV or Parquet; invented when not given")
parser.add_argument("--client", default="school")
parser.add_argument("--target", default="score")
parser.add_argument("--clusters", type=int, default=2)
chosen = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    data = chosen.data or Path(folder) / "schools.csv"
    if chosen.data is None:
        invent(data)
    clients = coterie.read(data, client=chosen.client, target=chosen.target, task="regression")

print(clients)
model = coterie.IFCA(chosen.clusters, baselines=True, random_state=0).fit(clients)
for score in model.scores_.values():
    print(f"{score.label:28} error on held-out rows {score.test:.4g}")
print("clients per cluster:", np.bincount(model.labels_, minlength=chosen.clusters).tolist())
print(f"too close to call: {int((~model.certain_).sum())} of {len(model.labels_)}")
