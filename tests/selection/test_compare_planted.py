# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from command import coterie
from coterie.errors import ConfigError
from coterie.studies import compare_planted as study
from coterie.studies.data.planted import planted_structure

SIZES = {"n_clients": 40, "rows": 200, "n_features": 4, "noise": 0.5}


def local_fits(truth: str, size: int = 1, **more: float) -> Tensor:
    """Least squares at every client: near the planted models, since there are many rows.  [M, 5]"""
    made = planted_structure(truth, size, seed=0, **SIZES, **more)  # type: ignore[arg-type]
    assert isinstance(made.x, Tensor)
    assert isinstance(made.y, Tensor)
    x = torch.cat([made.x, torch.ones(len(made.x), 1, dtype=torch.float64)], 1).view(40, 200, 5)
    return torch.linalg.lstsq(x, made.y.view(40, 200, 1)).solution[..., 0]


def test_planted_models_have_the_structure_that_they_should() -> None:
    one = local_fits("global")
    assert float((one - one.mean(0)).abs().max()) < 0.2  # standard error 0.5 / sqrt(200) = 0.035
    three = local_fits("clusters", 3)
    assert float((three[::3] - three[0]).abs().max()) < 0.2
    assert float((three[1] - three[0]).norm()) > 0.5
    values = torch.linalg.svdvals(local_fits("representation", 2))
    assert float(values[1]) > 5 * float(values[2])
    values = torch.linalg.svdvals(local_fits("local"))
    assert float(values[0]) < 3 * float(values[-1])
    around = local_fits("shrunk")
    assert 0.3 < float(around.var(0).sum()) < 0.8  # half of the signal's variance


def test_signal_has_unit_variance_and_noise_is_relative_to_it() -> None:
    made = planted_structure("local", n_clients=400, rows=50, n_features=4, noise=0.5, seed=0)
    assert isinstance(made.y, Tensor)
    assert float(made.y.var()) == pytest.approx(1.25, abs=0.1)


def test_outliers_are_long_and_as_many_as_asked_for() -> None:
    moved = (local_fits("clusters", 2, outliers=0.1) - local_fits("clusters", 2)).norm(dim=1)
    assert int((moved > 0.5).sum()) == 4
    assert int((moved < 0.3).sum()) == 36  # other noise, of 0.035 for each of 5 numbers


def test_mixtures_have_rows_of_every_component_at_every_client() -> None:
    made = planted_structure("mixture", 2, n_clients=5, rows=300, n_features=2, noise=0.0, seed=0)
    clean = planted_structure("mixture", 2, n_clients=5, rows=300, n_features=2, noise=0.0, seed=0)
    assert isinstance(made.y, Tensor)
    assert isinstance(clean.y, Tensor)
    assert torch.equal(made.y, clean.y)
    assert isinstance(made.x, Tensor)
    x = torch.cat([made.x, torch.ones(1500, 1, dtype=torch.float64)], 1).view(5, 300, 3)
    y = made.y.view(5, 300)
    for client in range(5):  # without noise, no single model fits
        fit = torch.linalg.lstsq(x[client], y[client, :, None]).solution
        assert float((y[client] - (x[client] @ fit)[:, 0]).abs().max()) > 0.1


def test_what_cannot_be_planted_is_refused() -> None:
    with pytest.raises(ConfigError, match="trees"):
        planted_structure("trees", n_clients=2, rows=2, n_features=1, noise=0.1, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="size 5"):
        planted_structure("clusters", 5, n_clients=2, rows=2, n_features=1, noise=0.1, seed=0)
    with pytest.raises(ConfigError, match="no case"):
        study.run(study.Settings(cases=("two moons",)))


SMALL = replace(
    study.Settings(), cases=("one group", "2 groups"), clients=12, rows=30, features=3, reps=2, quick=True, jobs=1
)


def test_a_small_study_counts_what_was_found() -> None:
    found = study.run(SMALL)
    assert [(row["case"], row["seed"]) for row in found.rows] == [
        ("one group", 0), ("one group", 1), ("2 groups", 0), ("2 groups", 1)
    ]  # fmt: skip
    for row in found.rows:
        assert row["correct"] == (row["chosen"] == row["truth"])
        assert row["correct_size"] == (row["correct"] and row["chosen_size"] == row["truth_size"])
        assert row["loss"] >= row["best_loss"]
        assert row["excess"] >= 0
    assert found.summary is not None
    line = found.summary[-1]
    assert line["case"] == "all"
    assert line["correct"] == sum(row["correct"] for row in found.rows) / 4


def test_the_command_prints_one_document() -> None:
    words = [
        "study",
        study.NAME,
        "--cases",
        "one group",
        "--clients",
        "8",
        "--rows",
        "20",
        "--features",
        "2",
        "--jobs",
        "1",
    ]
    said = coterie(*words, "--quick", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["study"] == study.NAME
    assert {"truth", "chosen", "correct"} <= found["rows"][0].keys()
