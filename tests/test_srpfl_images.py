# SPDX-License-Identifier: Apache-2.0
"""The study of stragglers on images: its clients, its rows, its times by hand, and its command."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from command import coterie, refused
from coterie.data.images import Images, digits
from coterie.errors import ConfigError
from coterie.models import Network
from coterie.participation import Exponential
from coterie.studies import srpfl_images as study
from coterie.studies import srpfl_images_settings as parts
from coterie.studies.srpfl_images import METHODS, Settings, run, settings

SMALL = Settings(
    clients=8, shards=3, rows=30, hidden=(16, 12, 8), rounds=10, step_size=0.05, epochs=2, head_epochs=4, tune_epochs=2,
    first=2, stage_rounds=2, evaluate_every=2, curves=True, jobs=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scikit-learn's digits stand in for MNIST, and noise for CIFAR-10, which need files."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (400, 32, 32, 3), dtype=np.uint8), np.arange(400) % 10
    monkeypatch.setitem(parts.DATASETS, "mnist", lambda: digits(0))
    monkeypatch.setitem(parts.DATASETS, "cifar", lambda: Images(x[:300], y[:300], x[300:], y[300:]))
    parts.clients.cache_clear()
    yield
    parts.clients.cache_clear()


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parts.DATASETS, "mnist", lambda: digits(0))
        parts.clients.cache_clear()
        return {row["method"]: dict(row) for row in run(SMALL).rows}


def test_every_method_has_a_row(found: dict[str, dict[str, Any]]) -> None:
    assert tuple(found) == METHODS
    for row in found.values():
        assert {"final_accuracy", "worst_decile", "time_to_target", "virtual_time", "target"} <= row.keys()
        assert 0 <= row["worst_decile"] <= row["final_accuracy"] <= 1
        seen = [point["round"] for point in row["curves"][0]]
        assert seen[:5] == [2, 4, 6, 8, 10]
        assert (seen[-1] > 10) == ("srpfl" in row["method"] or "flanp" in row["method"])  # its rounds are shorter


def test_time_is_the_slowest_participants_by_its_passes(found: dict[str, dict[str, Any]]) -> None:
    dealt = parts.clients("mnist", 8, 3, 30, 0)
    times = Exponential().times(0, dealt.train.keys, 0).sort().values
    slowest = float(times[-1])
    # Two passes are the unit; FedRep makes four more through its head alone, HF-MAML has four gradients a step.
    head, all_layers = 8 * 10 + 10, (64 * 16 + 16) + (16 * 12 + 12) + (12 * 8 + 8) + (8 * 10 + 10)
    fedrep = (2 + 4 * head / all_layers) / 2
    assert found["fedrep"]["virtual_time"] == pytest.approx(10 * slowest * fedrep)
    assert found["fedavg"]["virtual_time"] == pytest.approx(10 * slowest)
    assert found["lg-fedavg"]["virtual_time"] == pytest.approx(10 * slowest)
    assert found["hf-maml"]["virtual_time"] == pytest.approx(10 * slowest * 4)
    # Two rounds with the two fastest, two with four, and the others with all eight, until FedRep's time is over.
    short = 2 * float(times[1]) + 2 * float(times[3])
    full = math.ceil(10 - short / slowest)
    staged = short + full * slowest
    assert found["srpfl"]["rounds"] == 4 + full
    assert found["srpfl"]["virtual_time"] == pytest.approx(staged * fedrep)
    assert found["flanp"]["virtual_time"] == pytest.approx(staged)


def test_the_target_is_a_point_below_the_reference(found: dict[str, dict[str, Any]]) -> None:
    for method, row in found.items():
        base = found["lg-fedavg" if method.startswith("lg-") else "fedrep"]
        assert row["target"] == pytest.approx(base["final_accuracy"] - 0.01)
        times = [point["virtual_time"] for point in row["curves"][0] if point["accuracy"] >= row["target"]]
        assert row["time_to_target"] == (times[0] if times else None)
    assert found["fedrep"]["time_ratio"] == found["lg-fedavg"]["time_ratio"] == 1.0


def test_fine_tuning_is_judged_on_the_same_training(found: dict[str, dict[str, Any]]) -> None:
    for common in ("fedavg", "flanp"):
        assert found[f"{common}-ft"]["virtual_time"] == found[common]["virtual_time"]
        assert found[f"{common}-ft"]["final_accuracy"] != found[common]["final_accuracy"]


def test_a_method_alone_is_compared_with_its_reference(found: dict[str, dict[str, Any]]) -> None:
    (row,) = run(replace(SMALL, methods=("srpfl",), curves=False)).rows
    assert row == {name: value for name, value in found["srpfl"].items() if name != "curves"}


def test_processes_do_not_change_the_rows(found: dict[str, dict[str, Any]]) -> None:
    rows = run(replace(SMALL, methods=("lg-srpfl", "flanp-ft"), jobs=2)).rows
    assert rows == [found["lg-srpfl"], found["flanp-ft"]]


def test_seeds_are_averaged() -> None:
    one = replace(SMALL, methods=("fedrep",), rounds=2, curves=False)
    first, second, both = (run(replace(one, seed=a, seeds=n)).rows[0] for a, n in ((0, 1), (1, 1), (0, 2)))
    assert both["final_accuracy"] == pytest.approx((first["final_accuracy"] + second["final_accuracy"]) / 2)
    assert both["virtual_time"] == pytest.approx((first["virtual_time"] + second["virtual_time"]) / 2)
    assert (first["std"], both["seeds"], both["time_ratio"]) == (None, 2, 1.0)  # of each seed, not of mean times
    assert both["std"] == pytest.approx(abs(first["final_accuracy"] - second["final_accuracy"]) / 2**0.5)


def test_fewer_clients_are_drawn_and_communication_is_charged_every_round() -> None:
    some = replace(SMALL, methods=("fedrep",), participation=0.5, rounds=6)
    assert some.drawn == 4
    (free,), (dear,) = (run(replace(some, communication=c)).rows for c in (0.0, 10.0))
    assert dear["virtual_time"] == pytest.approx(free["virtual_time"] + 6 * 10)
    assert dear["final_accuracy"] == free["final_accuracy"]  # who is fast does not depend on it
    (changing,) = run(replace(some, speeds="dynamic")).rows
    assert changing["virtual_time"] != free["virtual_time"]


def test_clients_have_few_classes_and_test_images_of_the_same() -> None:
    dealt = parts.clients("mnist", 8, 3, 30, 0)
    for i in range(8):
        train, test = dealt.train.client(i), dealt.test.client(i)
        assert set(train.target[0].tolist()) == set(test.target[0].tolist())
        assert len(set(train.target[0].tolist())) == 3
        assert int(train.n) == 30


def test_pictures_go_through_lenet() -> None:
    chosen = replace(
        settings("cifar", quick=True), clients=3, shards=2, rows=8, rounds=1, channels=4, hidden=(8, 6), first=1,
        batch_size=4, jobs=1, methods=("srpfl", "lg-srpfl", "fedavg-ft"),
    )  # fmt: skip
    assert all(0 <= row["final_accuracy"] <= 1 for row in run(chosen).rows)
    full = parts.model(settings("cifar"), (3, 32, 32))
    assert isinstance(full, Network)
    shapes = [tuple(p.shape) for name, p in full.module.named_parameters() if name.endswith("weight")]
    assert shapes == [(64, 3, 5, 5), (64, 64, 5, 5), (120, 1600), (64, 120), (10, 64)]
    assert full.outputs(full.initial(1, torch.Generator()), torch.zeros(2, 3, 32, 32)).shape == (1, 2, 10)


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": "faces"},
        {"speeds": "none"},
        {"methods": ("sgd",)},
        {"participation": 0.0},
        {"participation": 0.02},
        {"step_size": 0.0},
        {"communication": -1.0},
        {"evaluate_every": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Settings(**changes)


def test_the_command_prints_one_document() -> None:
    said = coterie(
        "study", study.NAME, "--json", "--quick", "--methods", "fedrep,srpfl", "--clients", 8, "--rows", 30, "--shards", 3,
        "--rounds", 2, "--first", 2, "--communication", 10, "--curves", "--jobs", 1,
    )  # fmt: skip
    document = json.loads(said.out)
    assert document["study"] == "srpfl-images"
    assert [row["method"] for row in document["rows"]] == ["fedrep", "srpfl"]
    assert document["rows"][0]["curves"][0][0].keys() == {"round", "virtual_time", "accuracy", "worst_decile"}
    assert document["settings"]["communication"] == 10
    assert (settings("mnist").rounds, settings("mnist").hidden) == (55, (512, 256, 64))


def test_an_unknown_data_set_is_refused() -> None:
    assert "'faces'" in refused("study", study.NAME, "--dataset", "faces")[0]
