# SPDX-License-Identifier: Apache-2.0
"""Outcomes on the command line: comparing, fitting, predicting in the target's units, and what is refused."""

import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest

import coterie as library
from command import Said, coterie, refused
from outcomes import drawn

CLIENTS, EACH = 16, 40


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counts with own intercepts, ordered grades, and times with an event."""
    draw = np.random.default_rng(0)
    clinic, age = np.repeat(np.arange(CLIENTS), EACH), draw.normal(size=CLIENTS * EACH)
    eta = 0.7 + 0.4 * age + 0.6 * draw.normal(size=CLIENTS)[clinic]
    event, censored = draw.exponential(np.exp(-eta)), draw.exponential(2.0, size=len(eta))
    table = {
        "clinic": [f"c{i:02}" for i in clinic], "age": age, "sex": np.where(draw.random(len(age)) < 0.5, "f", "m"),
        "visits": drawn("poisson", eta).astype(int),
        "grade": np.array(["1 mild", "2 moderate", "3 severe", "4 critical"])[drawn("ordinal", eta).astype(int)],
        "days": np.minimum(event, censored), "died": (event <= censored).astype(int),
    }  # fmt: skip
    path = tmp_path_factory.mktemp("data") / "clinics.csv"
    pc.write_csv(pa.table(table), path)
    return path


def words(target: str, outcome: str, *more: str) -> list[str]:
    others = {"visits", "grade", "days", "died"} - {target} - set(more[1:2] if more[:1] == ("--event",) else ())
    away = [word for name in sorted(others) for word in ("--exclude", name)]
    return ["--client", "clinic", "--target", target, "--outcome", outcome, *away, *more]


def predicted(said: Said) -> pa.Table:
    assert said.code == 0, said.err
    return pc.read_csv(pa.BufferReader(said.out.encode()))


def test_a_comparison_of_counts_names_the_command_that_fits(data: Path, tmp_path: Path) -> None:
    done = coterie("compare", data, *words("visits", "poisson"), "--quick", "--out", tmp_path / "found")
    assert done.code == 0, done.err
    assert "root mean squared error" in done.out
    command = next(line for line in done.out.splitlines() if line.startswith("next: ")).removeprefix("next: ")
    assert "--outcome poisson" in command
    again = coterie(*shlex.split(command)[1:], "--out", tmp_path / "run")
    assert again.code == 0, again.err
    assert (tmp_path / "run" / "report.html").exists()


def test_auto_fits_counts_and_predicts_them_in_their_own_units(data: Path, tmp_path: Path) -> None:
    done = coterie("fit", data, *words("visits", "poisson"), "--method", "auto", "--out", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert said["metric"] == "rmse"
    assert said["target_scale"] is None  # counts are not scaled
    table = predicted(coterie("predict", tmp_path / "run", data))
    counts = pc.read_csv(data)["visits"].to_numpy()
    assert table["prediction"].to_numpy().mean() == pytest.approx(counts.mean(), rel=0.05)
    model = library.load(tmp_path / "run")
    assert model.outcome == "poisson"
    clients = library.read_with(model.schema_, data)
    assert 0.2 < model.score(clients) < 0.8


def test_ordered_classes_are_predicted_by_their_names(data: Path, tmp_path: Path) -> None:
    done = coterie("fit", data, *words("grade", "ordinal"), "--method", "ifca", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "accuracy" in done.out
    made = set(predicted(coterie("predict", tmp_path / "run", data))["prediction"].to_pylist())
    assert made <= {"1 mild", "2 moderate", "3 severe", "4 critical"}
    placed = coterie("assign", tmp_path / "run", data)
    assert placed.code == 0
    assert placed.out.splitlines()[0].startswith('"client","label"')


def test_times_to_an_event_are_read_with_their_events(data: Path, tmp_path: Path) -> None:
    asked = words("days", "cox", "--event", "died")
    done = coterie("fit", data, *asked, "--method", "shrunk", "--set", "prior.spread=same", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "concordance" in done.out
    table = predicted(coterie("predict", tmp_path / "run", data))
    age = pc.read_csv(data)["age"].to_numpy()
    assert np.corrcoef(np.log(table["prediction"].to_numpy()), age)[0, 1] > 0.8  # hazards grow with age
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "oncordance" in page


def test_the_same_run_gives_the_same_models_from_python(data: Path, tmp_path: Path) -> None:
    asked = words("visits", "negative-binomial")
    coterie("fit", data, *asked, "--method", "fedavg", "--no-baselines", "--out", tmp_path / "run")
    how = {"client": "clinic", "target": "visits", "exclude": ["grade", "days", "died"], "outcome": "negative-binomial"}
    model = library.FedAvg().fit(library.read(data, **how))  # type: ignore[arg-type]
    np.testing.assert_allclose(library.load(tmp_path / "run").theta_.numpy(), model.theta_.numpy(), rtol=1e-12)


def test_what_does_not_fit_is_refused_in_one_sentence(data: Path) -> None:
    cases = [
        (words("visits", "posson"), "data.outcome is 'posson'"),
        (words("visits", "gamma"), "is 0 in a row of client"),
        (words("visits", "poisson", "--event", "died"), "event is 'died', and outcome is poisson"),
        (words("days", "cox"), "needs to know whether the event happened"),
        (words("days", "cox", "--event", "visits"), "must be 1 (it happened) or 0 (censored)"),
        (words("visits", "poisson", "--task", "classification"), "task is classification, and outcome poisson"),
        (words("visits", "poisson", "--method", "ditto"), "ditto is not for counts"),
        (words("visits", "poisson", "--method", "fedavg", "--hidden", "8"), "is for linear models"),
    ]
    for asked, said in cases:
        sentence, _ = refused("fit", data, *asked)
        assert said in sentence
