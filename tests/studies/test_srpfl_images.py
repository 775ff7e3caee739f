# SPDX-License-Identifier: Apache-2.0
"""The study of stragglers on images: its clients, its rows, its times by hand, and its command."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command import coterie, refused
from coterie.errors import ConfigError
from coterie.models import Network
from coterie.participation import Exponential
from coterie.studies import srpfl_images as study
from coterie.studies import srpfl_images_settings as parts
from coterie.studies.data.images import Images, digits
from coterie.studies.srpfl_images import METHODS, Settings, run, settings

SMALL = Settings(
    clients=8, shards=3, rows=30, hidden=(16, 12, 8), rounds=10, step_size=0.05, epochs=2, head_epochs=4, tune_epochs=2,
    first=2, stage_rounds=2, evaluate_every=2, curves=True, jobs=1,
)  # fmt: skip


def idx(values: np.ndarray) -> bytes:
    """Write an idx file: 0, 0, 8 (bytes), number of axes, big-endian sizes, bytes."""
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()


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


def test_clients_that_diverge_are_counted_over_rounds_and_seeds() -> None:
    wild = replace(SMALL, methods=("hf-maml", "fedavg"), rounds=3, evaluate_every=1, meta_step_size=1e30, seeds=2)
    maml, fedavg = run(wild).rows
    # Two steps of 1e30 leave the range of float32 for everyone, so that the model stays: 8 clients, 3 rounds, 2 seeds.
    assert [[point["left_out"] for point in curve] for curve in maml["curves"]] == [[8, 16, 24]] * 2
    assert (maml["left_out"], fedavg["left_out"]) == (48, 0)


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


# -- what the authors' scripts say ------------------------------------------------------------------------------------
def test_the_authors_settings_are_those_of_their_scripts() -> None:
    mnist = settings("mnist", preset="authors")
    assert (mnist.rounds, mnist.seeds, mnist.first, mnist.stage_rounds, mnist.evaluate_every) == (150, 4, 10, 10, 10)
    assert (mnist.step_size, mnist.batch_size, mnist.momentum, mnist.meta_step_size) == (0.01, 10, 0.5, 0.1)
    assert (mnist.epochs, mnist.head_epochs, mnist.tune_epochs, mnist.until) == (5, 10, 10, "rounds")
    rows = {name: (each.rows, each.shards) for name in study.DATASETS for each in [settings(name, preset="authors")]}
    assert rows["emnist"] == (480, 5)
    assert rows["femnist"] == (135, 3)
    assert settings("cifar", preset="authors").epochs == 1
    assert settings("mnist") == Settings()


def test_the_authors_heads_are_trained_before_each_pass_of_the_representation() -> None:
    trial = study._Trial(replace(SMALL, epochs=5, head_epochs=10, momentum=0.5, interleaved=True), "fedrep", 0)
    one = [("personal", 10, 0.5), ("shared", 1, 0.5)]
    assert [(part, how.epochs, how.momentum) for part, how in trial._turns()] == 5 * one
    together = study._Trial(replace(SMALL, epochs=5, head_epochs=10), "fedrep", 0)
    assert [(part, how.epochs, how.momentum) for part, how in together._turns()] == [
        ("personal", 10, 0.0),
        ("shared", 5, 0.0),
    ]


def test_with_the_authors_settings_stages_have_as_many_rounds_and_take_less_time() -> None:
    chosen = replace(
        SMALL, scaled=True, until="rounds", momentum=0.5, interleaved=True, meta_step_size=0.1, tuning="head",
        evaluate_every=5,
    )  # fmt: skip
    found = {row["method"]: row for row in run(chosen).rows}
    assert tuple(found) == METHODS
    assert {row["rounds"] for row in found.values()} == {10}
    times = Exponential().times(0, parts.clients("mnist", 8, 3, 30, 0).train.keys, 0).sort().values
    # Two rounds with the two fastest, two with four, and six with all eight.
    staged = 2 * float(times[1]) + 2 * float(times[3]) + 6 * float(times[7])
    assert found["flanp"]["virtual_time"] == pytest.approx(staged)
    assert found["fedavg"]["virtual_time"] == pytest.approx(10 * float(times[7]))
    # Only the last layer of 8 x 10 + 10 parameters is fine-tuned, and yet clients with 3 of 10 classes gain by it.
    assert found["fedavg-ft"]["final_accuracy"] > found["fedavg"]["final_accuracy"]


def test_grey_pixels_are_scaled_where_that_is_wanted() -> None:
    plain, scaled = (parts.clients("mnist", 8, 3, 30, 0, scaled=each) for each in (False, True))
    x = scaled.train.x
    assert isinstance(x, torch.Tensor)
    assert isinstance(plain.train.x, torch.Tensor)
    assert float(x.mean()) == pytest.approx(0.0, abs=1e-5)  # float32
    assert float(x.std()) == pytest.approx(1.0, abs=1e-5)
    assert 0.0 <= float(plain.train.x.min()) <= float(plain.train.x.max()) <= 1.0


# -- letters ----------------------------------------------------------------------------------------------------------
def test_emnists_first_ten_letters_are_dealt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "emnist"
    place.mkdir()
    labels = np.repeat(np.arange(1, 13), 3)  # a to l, three each; every pixel of a letter is its number
    for part in ("train", "test"):
        pixels = np.broadcast_to(labels[:, None, None], (36, 28, 28))
        (place / f"emnist-letters-{part}-images-idx3-ubyte").write_bytes(idx(pixels))
        (place / f"emnist-letters-{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    dealt = parts.clients("emnist", 4, 5, 5, 0)
    for i in range(4):
        held = dealt.train.client(i)
        assert len(set(held.target[0].tolist())) == 5
        assert max(held.target[0].tolist()) <= 9
        assert torch.allclose(held.x[0, :, 0] * 255, held.target[0] + 1.0)
    assert parts.model(settings("emnist"), dealt.train.shape).n_outputs == 10


def test_femnists_small_letters_are_dealt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = [0, 35, *range(36, 46), 46]  # a digit, Z, a to j, k
    for part in ("train", "test"):
        users = {who: {"x": [[c / 255] * 784 for c in classes], "y": classes} for who in ("anna", "ben", "carl")}
        folder = tmp_path / "femnist" / part
        folder.mkdir(parents=True)
        (folder / "all.json").write_text(json.dumps({"users": list(users), "user_data": users}))
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    dealt = parts.clients("femnist", 10, 3, 3, 0)
    for i in range(10):
        held = dealt.train.client(i)
        assert torch.allclose(held.x[0, :, 0] * 255, held.target[0] + 36.0)


@pytest.mark.parametrize("dataset", ["emnist", "femnist"])
def test_letters_that_are_not_there_are_refused(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    said = " ".join(refused("study", study.NAME, "--dataset", dataset, "--preset", "authors"))
    assert "COTERIE_DATA" in said


def test_an_unknown_preset_is_refused() -> None:
    assert "'theirs'" in refused("study", study.NAME, "--preset", "theirs")[0]


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
        {"until": "never"},
        {"tuning": "all"},
        {"momentum": 1.0},
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
    assert document["rows"][0]["curves"][0][0].keys() == {
        "round", "virtual_time", "left_out", "accuracy", "worst_decile"
    }  # fmt: skip
    assert document["settings"]["communication"] == 10
    assert (settings("mnist").rounds, settings("mnist").hidden) == (55, (512, 256, 64))


def test_an_unknown_data_set_is_refused() -> None:
    assert "'faces'" in refused("study", study.NAME, "--dataset", "faces")[0]
