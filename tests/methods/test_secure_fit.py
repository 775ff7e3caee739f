# SPDX-License-Identifier: Apache-2.0
"""Fits with secure sums: the same models and scores as without, and no value of a single client among what is found."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.config import options
from coterie.engines.secure import SecureWorker
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.methods.base import Fitted, Given
from coterie.methods.fit import check, fit
from planted import planted

FEW: dict[str, Any] = {"training": {"rounds": 4}}
NET: dict[str, Any] = {"training": {"rounds": 3}, "model": {"hidden": [4]}}
BALANCED: dict[str, Any] = {"clusters": {"n_clusters": 2, "init": "balanced", "patience": 0}}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg", **FEW},
    "fedprox": {"method": "fedavg", "training": {"rounds": 4, "proximal": 0.1, "local_steps": 3}},
    "ifca": {"method": "ifca", **FEW, **BALANCED},
    "ifca-starts": {"method": "ifca", **FEW, "clusters": {**BALANCED["clusters"], "init": "random", "n_init": 3}},
    "fedrep": {"method": "fedrep", **NET},
    "fedper": {"method": "fedper", **NET},
    "lg-fedavg": {"method": "lg-fedavg", **NET},
    "maml": {"method": "maml", **NET},
    "ditto": {"method": "ditto", **NET},
    "mixed": {"method": "mixed"},
    "shrunk": {"method": "shrunk", "prior": {"spread": "diagonal"}},
    "local": {"method": "local", "prior": {"penalty": 1.0}},
    "representation": {"method": "representation", "prior": {"rank": 2}},
    "shrunk-chosen": {"method": "shrunk"},
    "local-chosen": {"method": "local"},
    "representation-chosen": {"method": "representation"},
}


def fitted(how: dict[str, Any], *, secure: bool, classes: bool = False, new: float = 0.0) -> Fitted:
    clients = planted(16, 24, classes=classes).clients(test_size=0.25, new_clients=new, seed=0)
    return fit(clients, options({**how, "secure": secure}))


def shared(found: Fitted) -> dict[str, Tensor]:
    return found.models.arrays()


@pytest.mark.parametrize("classes", [False, True], ids=["numbers", "classes"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_the_same(name: str, classes: bool) -> None:
    if classes and name == "mixed":
        pytest.skip("Laplace's approximation is compared in the engine's tests")
    plain, found = (fitted(METHODS[name], secure=secure, classes=classes) for secure in (False, True))
    for key, value in shared(plain).items():
        torch.testing.assert_close(shared(found)[key], value, rtol=1e-6, atol=1e-6)
    for one, other in zip(found.scores, plain.scores, strict=True):
        assert one.method == other.method
        assert found.options.prior == plain.options.prior  # what was chosen
        for side in ("train", "test", "train_r2", "test_r2"):
            ours, theirs = getattr(one, side), getattr(other, side)
            assert (ours is None) == (theirs is None)
            assert ours is None or ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedrep", "shrunk"])
def test_new_clients_are_measured_together(name: str) -> None:
    plain, found = (fitted(METHODS[name], secure=secure, new=0.25) for secure in (False, True))
    assert found.scores[0].new_clients == pytest.approx(plain.scores[0].new_clients, rel=1e-5)
    classes = fitted(METHODS[name], secure=True, classes=True, new=0.25).scores[0]
    assert classes.new_clients_unlabelled is not None
    assert found.scores[0].new_clients_unlabelled == pytest.approx(plain.scores[0].new_clients_unlabelled, rel=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_nothing_that_is_found_is_of_a_single_client_but_its_rows(name: str) -> None:
    found = fitted(METHODS[name], secure=True)
    assert found.per_client.keys() <= {"rows_train", "rows_test", "rounds"}
    assert not found.models.clients(found)


def test_the_groups_of_ifca_are_known_by_their_sizes_only() -> None:
    plain, found = (fitted(METHODS["ifca"], secure=secure) for secure in (False, True))
    assert found.models.placed is None
    assert found.models.labels == {}
    assert found.models.sizes == plain.models.sizes
    assert found.models.uncertain == plain.models.uncertain
    assert plain.models.labels
    with pytest.raises(CoterieError, match="keep their clusters to themselves"):
        _ = found.models.belongs


def test_what_it_cost_is_told() -> None:
    cost = fitted(METHODS["ifca"], secure=True).extra["secure"]
    assert (cost["nodes"], cost["threshold"], cost["dropped"]) == (8, 6, {})
    assert cost["sums"] >= 8
    assert cost["bytes_up"] > 0
    assert "secure" not in fitted(METHODS["ifca"], secure=False).extra


def test_the_second_phase_of_moment_descent_is_ifca_from_its_models() -> None:
    clients = planted(16, 24).clients(test_size=0.25, seed=0)
    start = fit(
        clients, options({"method": "moment-descent", "clusters": {"n_clusters": 2}, "training": {"rounds": 1}})
    )
    how = {"method": "ifca", **FEW, "clusters": {"n_clusters": 2, "init": "warm", "patience": 0}}
    plain, found = (fit(clients, options({**how, "secure": s}), start=start.models.theta) for s in (False, True))
    torch.testing.assert_close(found.models.theta, plain.models.theta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "why", "way_out"),
    [
        ({"method": "moment-descent"}, "anchors", "init=balanced"),
        ({"method": "mixture"}, "robust centre", "--method ifca"),
        ({"method": "ifca"}, "init=spread", "balanced"),
        ({"method": "fedavg", "training": {"robust": "median"}}, "robust=median", "clip"),
        ({"method": "fedavg", "predictions": {"coverage": 0.9}}, "coverage", "leave it out"),
    ],
)
def test_what_needs_values_of_single_clients_is_refused_with_a_way_out(
    how: dict[str, Any], why: str, way_out: str
) -> None:
    clients = planted(8, 20).clients(test_size=0.25, seed=0)
    with pytest.raises(ConfigError, match=why) as error:
        check(clients, options({**how, "secure": True}), Given())
    assert way_out in error.value.hint


def test_one_client_alone_is_refused() -> None:
    clients = planted(2, 20).clients(test_size=0.25, seed=0)
    one = clients.train.only(np.array([0]))
    from dataclasses import replace

    with pytest.raises(DataError, match="a secure sum takes two"):
        check(replace(clients, train=one, test=None), options({"method": "fedavg", "secure": True}), Given())


def test_only_secure_workers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.engines import in_process

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a worker without secure sums")

    monkeypatch.setattr(in_process, "Worker", never)
    assert isinstance(fitted(METHODS["fedavg"], secure=True), Fitted)
    assert SecureWorker.__name__ == "SecureWorker"


def test_a_share_of_the_clients_takes_part() -> None:
    how = {"method": "ifca", **BALANCED, "training": {"rounds": 4, "participation": 0.6}}
    plain, found = (fitted(how, secure=secure) for secure in (False, True))
    torch.testing.assert_close(found.models.theta, plain.models.theta, rtol=1e-6, atol=1e-6)


def test_probabilities_are_measured_over_all_rows() -> None:
    plain, found = (
        fitted(METHODS["ifca"], secure=s, classes=True, new=0.25).extra["probabilities"] for s in (False, True)
    )
    assert found.keys() == plain.keys() == {"test", "new", "unlabelled"}
    for side, one in found.items():
        assert (one["rows"], one["clients"]) == (plain[side]["rows"], plain[side]["clients"])
        for name in ("accuracy", "auroc", "average_precision", "log_loss", "brier"):
            assert one[name]["value"] == pytest.approx(plain[side][name]["value"], rel=1e-6)
            assert "low" not in one[name]
        assert one["calibration"] == plain[side]["calibration"]
