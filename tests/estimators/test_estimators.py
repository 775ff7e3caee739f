# SPDX-License-Identifier: Apache-2.0
"""The estimators: scikit-learn's manners, and predictions in the order and the words of what was given."""

import ast
import inspect
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.validation import check_is_fitted
from torch import nn

import coterie
from coterie import (
    IFCA,
    FedAvg,
    MixedRegression,
)  # fmt: skip
from coterie.config import options
from coterie.data.readers import from_arrays, read, read_with
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.estimators import ESTIMATORS
from coterie.estimators.base import options_of
from coterie.methods.fit import fit
from coterie.option_fields import options_in
from coterie.registry import METHODS
from coterie.runs.folder import begin_run, finish_run
from planted import Planted, planted

NUMBERS = planted(10, 20)
WORDS = planted(10, 30, classes=True)


def ifca(**options: Any) -> IFCA:
    return IFCA(**{"rounds": 15, **options})


@pytest.fixture(scope="module")
def regression() -> IFCA:
    return ifca().fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)


@pytest.fixture(scope="module")
def classifier() -> IFCA:
    return ifca(rounds=30).fit(WORDS.x, WORDS.y, groups=WORDS.groups)


def by_hand(model: IFCA, made: Planted) -> np.ndarray:
    """[N] predictions by numpy, row by row, in the order of the data."""
    label = dict(zip(model.client_names_, model.labels_, strict=True))
    x = (made.x - model.scaling_.mean.numpy()) / model.scaling_.scale.numpy()
    theta = model.theta_.numpy()
    rows = [x[i] @ theta[label[g]][:3] + theta[label[g]][3] for i, g in enumerate(made.groups)]
    return np.array(rows) * float(model.scaling_.y_scale) + float(model.scaling_.y_mean)


# -- scikit-learn's manners -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [IFCA, FedAvg, MixedRegression])
def test_constructor_stores_every_parameter_as_it_is_and_nothing_else(kind: type) -> None:
    names = [name for name in inspect.signature(kind.__init__).parameters if name != "self"]
    markers = {name: object() for name in names}  # nothing is looked at before fit
    made = kind(**markers)
    assert vars(made) == markers
    assert made.get_params(deep=False) == markers


@pytest.mark.parametrize("kind", [IFCA, FedAvg, MixedRegression])
def test_defaults_are_those_of_the_options(kind: type) -> None:
    # What options leave open (None) is up to the method, and the constructor says what that is.
    made, plain = options_of(kind()), options({"method": kind.method, "baselines": False})
    filled = {"n_clusters", "weighting"}
    for group in ("data", "model", "training", "clusters", "moments"):
        own, default = (getattr(one, group).model_dump() for one in (made, plain))
        assert {name: value for name, value in own.items() if value != default[name]}.keys() <= filled, group


def test_clone_and_set_params() -> None:
    model = IFCA(3, hidden=(8,), model=nn.Linear(3, 1), random_state=7)
    twin = clone(model)
    assert twin is not model
    assert (twin.n_clusters, twin.hidden, twin.random_state) == (3, (8,), 7)
    assert isinstance(twin.model, nn.Linear)
    assert twin.set_params(n_clusters=4).n_clusters == 4
    assert model.n_clusters == 3
    with pytest.raises(ValueError, match="Invalid parameter 'clusters'"):
        model.set_params(clusters=3)


def test_clone_of_a_fitted_model_is_not_fitted(regression: IFCA) -> None:
    check_is_fitted(regression)
    with pytest.raises(NotFittedError):
        check_is_fitted(clone(regression))


@pytest.mark.parametrize("call", ["predict", "assign", "score"])
def test_an_unfitted_model_says_so(call: str) -> None:
    with pytest.raises(NotFittedError, match="this IFCA is not fitted: call fit first"):
        getattr(IFCA(), call)(NUMBERS.x)


def test_bad_parameters_are_told_when_fitting() -> None:
    with pytest.raises(ConfigError, match=r"clusters\.n_clusters is 0"):
        IFCA(0).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
    with pytest.raises(ConfigError, match="seed is None: input should be a valid integer"):
        IFCA(random_state=None).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)  # type: ignore[arg-type]


def test_an_empty_cluster_is_a_convergence_warning() -> None:
    start = torch.zeros(3, 4)
    start[2] = 1e6
    model = ifca(n_clusters=3, init="warm", start=start, patience=0, rounds=2)
    with pytest.warns(ConvergenceWarning, match="clusters are empty") as told:
        model.fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
    assert told[0].filename == __file__  # points at the call of fit


def test_a_good_fit_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ifca(rounds=3).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)


def test_parts_that_rows_are_cut_into_are_an_option() -> None:
    whole, parts = (
        ifca(rounds=3, resample=resample).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups).theta_ for resample in (0, 4)
    )
    assert not torch.equal(whole, parts)


def test_random_state_decides_everything() -> None:
    def theta(seed: int) -> torch.Tensor:
        model = ifca(init="random", participation=0.5, batch_size=4, epochs=1, rounds=3, random_state=seed)
        return model.fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups).theta_

    assert torch.equal(theta(3), theta(3))
    assert not torch.equal(theta(3), theta(4))


def test_fitting_leaves_the_module_and_the_arrays_as_they_were() -> None:
    module = nn.Linear(3, 1)
    before, x = module.weight.detach().clone(), NUMBERS.x.copy()
    ifca(model=module, rounds=2).fit(x, NUMBERS.y, groups=NUMBERS.groups)
    assert torch.equal(module.weight, before)
    assert np.array_equal(x, NUMBERS.x)


# -- fitting ----------------------------------------------------------------------------------------------------------
def test_arrays_and_clients_give_the_same_model(regression: IFCA) -> None:
    other = ifca().fit(NUMBERS.clients(test_size=0.0))
    assert torch.equal(other.theta_, regression.theta_)
    assert other.labels_.tolist() == regression.labels_.tolist()


def test_results_stand_in_the_order_of_client_names(regression: IFCA) -> None:
    assert regression.client_names_.tolist() == NUMBERS.names
    assert NUMBERS.agrees(NUMBERS.names, regression.labels_.tolist())
    assert regression.margins_.shape == regression.certain_.shape == (10,)
    assert regression.certain_.all()
    assert (regression.margins_ > 0).all()
    assert regression.theta_.shape == (2, 4)
    assert len([r for r in regression.history_ if "loss" in r.info]) == 15
    assert set(regression.scores_) == {"ifca"}


def test_baselines_on_demand() -> None:
    model = ifca(baselines=True, rounds=2).fit(NUMBERS.clients())
    assert set(model.scores_) == {"ifca", "global", "local"}


@pytest.mark.parametrize("kind", [np.float32, np.int32, np.int64, np.uint8])
def test_features_of_any_number_type(kind: type) -> None:
    x = np.clip(NUMBERS.x * [20, 1, 100] + 100, 0, 255).astype(kind)
    model = ifca(rounds=5).fit(x, NUMBERS.y, groups=NUMBERS.groups)
    assert NUMBERS.agrees(NUMBERS.names, model.labels_.tolist())
    assert model.predict(x, groups=NUMBERS.groups).dtype == np.float64
    same = model.predict(x.astype(np.float32), groups=NUMBERS.groups)
    assert np.array_equal(model.predict(x, groups=NUMBERS.groups), same)


def test_tensors_and_lists_are_arrays_too(regression: IFCA) -> None:
    model = ifca().fit(torch.from_numpy(NUMBERS.x), torch.from_numpy(NUMBERS.y), groups=NUMBERS.groups.tolist())
    assert torch.equal(model.theta_, regression.theta_)


def test_warm_start_from_another_fit(regression: IFCA) -> None:
    other = ifca(init="warm", start=regression.theta_.flip(0).numpy(), rounds=1)
    other.fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
    assert other.labels_.tolist() == (1 - regression.labels_).tolist()


def test_fedavg_is_one_model_for_all() -> None:
    model = FedAvg(rounds=300, local_steps=1).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
    assert set(model.labels_.tolist()) == {0}
    # With one local step and means by rows, FedAvg is gradient descent on pooled rows, so it ends at least squares.
    full = np.c_[NUMBERS.x, np.ones(len(NUMBERS.x))]
    want = full @ np.linalg.lstsq(full, NUMBERS.y, rcond=None)[0]
    np.testing.assert_allclose(model.predict(NUMBERS.x), want, atol=1e-6)
    assert np.array_equal(model.predict(NUMBERS.x), model.predict(NUMBERS.x, groups=NUMBERS.groups))


def test_fedprox_stays_nearer_to_the_start() -> None:
    def moved(**more: Any) -> float:
        far = FedAvg(rounds=1, step_size=0.05, **more).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
        start = FedAvg(rounds=1, step_size=1e-30).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
        return float((far.theta_ - start.theta_).norm())

    assert 0 < moved(proximal=5.0) < 0.5 * moved()


# -- predicting -------------------------------------------------------------------------------------------------------
def test_predictions_stand_in_the_order_of_the_rows(regression: IFCA) -> None:
    assert len(set(NUMBERS.groups[:10])) > 4  # clients are interleaved
    np.testing.assert_allclose(
        regression.predict(NUMBERS.x, groups=NUMBERS.groups), by_hand(regression, NUMBERS), rtol=1e-10
    )


def test_rows_of_unequal_clients_in_any_order(regression: IFCA) -> None:
    pick = np.random.default_rng(0).permutation(len(NUMBERS.x))[:57]  # clients with 3 to 9 rows
    some = Planted(NUMBERS.x[pick], NUMBERS.y[pick], NUMBERS.groups[pick], NUMBERS.truth)
    assert len(set(np.unique(some.groups, return_counts=True)[1])) > 3
    np.testing.assert_allclose(regression.predict(some.x, groups=some.groups), by_hand(regression, some), rtol=1e-10)


def test_clients_are_predicted_one_after_the_other(regression: IFCA) -> None:
    made = regression.predict(NUMBERS.clients(test_size=0.0))
    order = np.argsort(NUMBERS.groups, kind="stable")
    np.testing.assert_allclose(made, by_hand(regression, NUMBERS)[order], rtol=1e-10)


def test_test_rows_are_what_is_predicted_of_clients_with_some(regression: IFCA) -> None:
    clients = NUMBERS.clients(test_size=0.25)
    assert clients.test is not None
    assert len(regression.predict(clients)) == clients.test.layout.n_rows == 50
    assert np.array_equal(regression.predict(clients), regression.predict(clients.test))


def test_names_of_classes_come_back(classifier: IFCA) -> None:
    made = classifier.predict(WORDS.x, groups=WORDS.groups)
    assert set(made.tolist()) == {"no", "yes"}
    assert classifier.classes_.tolist() == ["no", "yes"]
    assert accuracy_score(WORDS.y, made) > 0.9


@pytest.mark.parametrize(
    ("values", "kind"),
    [([7, 3], "i"), ([2.0, 5.0], "f"), ([False, True], "b"), ([10, 9], "i"), (["b", "a"], "U")],
)
def test_classes_come_back_as_what_they_were(values: list[Any], kind: str) -> None:
    y = np.array(values)[(WORDS.y == "yes").astype(int)]
    model = ifca(rounds=30).fit(WORDS.x, y, groups=WORDS.groups)
    made = model.predict(WORDS.x, groups=WORDS.groups)
    assert made.dtype.kind == kind
    assert model.classes_.tolist() == sorted(values)
    assert accuracy_score(y, made) > 0.9


def test_groups_are_recognised_whatever_their_type(regression: IFCA) -> None:
    numbers = np.array([int(name[1:]) for name in NUMBERS.groups])
    model = ifca().fit(NUMBERS.x, NUMBERS.y, groups=numbers)
    want = model.predict(NUMBERS.x, groups=numbers)
    np.testing.assert_allclose(want, regression.predict(NUMBERS.x, groups=NUMBERS.groups), rtol=1e-6)
    for groups in (numbers.astype(float), numbers.astype(str), numbers.astype(object), numbers.tolist()):
        assert np.array_equal(model.predict(NUMBERS.x, groups=groups), want)


def test_missing_features_count_as_the_mean(regression: IFCA) -> None:
    x = NUMBERS.x.copy()
    x[3, 1] = np.nan
    filled = NUMBERS.x.copy()
    filled[3, 1] = NUMBERS.x[:, 1].mean()
    made = regression.predict(x, groups=NUMBERS.groups)
    np.testing.assert_allclose(made, regression.predict(filled, groups=NUMBERS.groups), rtol=1e-10)


# -- scoring ----------------------------------------------------------------------------------------------------------
def test_score_of_numbers_is_r_squared(regression: IFCA) -> None:
    made = regression.predict(NUMBERS.x, groups=NUMBERS.groups)
    want = r2_score(NUMBERS.y, made)
    assert 0.9 < want < 1
    assert regression.score(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups) == pytest.approx(want, rel=1e-9)
    clients = NUMBERS.clients(test_size=0.3)
    assert clients.test is not None
    y = np.concatenate([clients.test.client(i).target[0] for i in range(10)])
    assert regression.score(clients) == pytest.approx(r2_score(y, regression.predict(clients)), rel=1e-9)


def test_score_of_classes_is_accuracy(classifier: IFCA) -> None:
    want = accuracy_score(WORDS.y, classifier.predict(WORDS.x, groups=WORDS.groups))
    assert classifier.score(WORDS.x, WORDS.y, groups=WORDS.groups) == pytest.approx(want)
    wrong = np.where(WORDS.y == "yes", "no", "yes")
    assert classifier.score(WORDS.x, wrong, groups=WORDS.groups) == pytest.approx(1 - want)


# -- new clients ------------------------------------------------------------------------------------------------------
def test_new_clients_are_placed_in_their_planted_group_with_a_margin(regression: IFCA) -> None:
    new = planted(6, 40, seed=9, prefix="new")
    found = regression.assign(new.x, new.y, groups=new.groups)
    group = dict(zip(range(2), (regression.labels_[0], regression.labels_[1]), strict=True))  # s00 and s01
    assert found.label.tolist() == [group[new.truth[name]] for name in new.names]
    assert found.certain.all()
    x = (new.x - regression.scaling_.mean.numpy()) / regression.scaling_.scale.numpy()
    y = (new.y - float(regression.scaling_.y_mean)) / float(regression.scaling_.y_scale)
    own = new.groups == "new03"
    losses = [((x[own] @ t[:3].numpy() + float(t[3]) - y[own]) ** 2) for t in regression.theta_]
    difference = losses[1 - int(found.label[3])] - losses[int(found.label[3])]
    assert float(found.margin[3]) == pytest.approx(difference.mean(), rel=1e-9)
    assert float(found.margin_error[3]) == pytest.approx(difference.std(ddof=1) / np.sqrt(40), rel=1e-9)


def test_labelled_new_clients_are_placed_and_scored(regression: IFCA) -> None:
    new = planted(6, 12, seed=9, prefix="new")
    assert regression.score(new.x, new.y, groups=new.groups) > 0.9
    made = regression.predict(new.clients(test_size=0.0))
    y = new.y[np.argsort(new.groups, kind="stable")]
    assert r2_score(y, made) > 0.9


def test_known_clients_keep_their_model_whatever_their_rows_say(regression: IFCA) -> None:
    other = planted(10, 20, seed=4)
    swapped = np.array([f"s{int(name[1:]) ^ 1:02d}" for name in other.groups])  # s00's rows are now s01's
    assert regression.score(other.x, other.y, groups=swapped) < 0
    assert regression.score(other.x, other.y, groups=other.groups) > 0.9


def test_a_new_client_without_targets_cannot_be_predicted(regression: IFCA) -> None:
    with pytest.raises(DataError, match="client 'zz' is new and has no targets"):
        regression.predict(NUMBERS.x[:2], groups=["s00", "zz"])
    model = FedAvg(rounds=2).fit(NUMBERS.x, NUMBERS.y, groups=NUMBERS.groups)
    assert model.predict(NUMBERS.x[:2], groups=["s00", "zz"]).shape == (2,)  # one model needs no placing


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: m.predict(NUMBERS.x), "the client of each row is not given"),
        (lambda m: m.predict(NUMBERS.x, groups=NUMBERS.groups[:-1]), "groups has 199 values and X has 200 rows"),
        (lambda m: m.predict(NUMBERS.x[:, :2], groups=NUMBERS.groups), r"X has 2 features, but \w+ is expecting"),
        (lambda m: m.predict(NUMBERS.x[0], groups=["s00"]), "X has shape"),
        (lambda m: m.predict(NUMBERS.x * np.inf, groups=NUMBERS.groups), "X has infinite values"),
        (lambda m: m.predict(NUMBERS.x.astype(str), groups=NUMBERS.groups), "X has dtype"),
        (lambda m: m.predict(NUMBERS.x[:2], groups=["s00", None]), "groups has missing values"),
        (lambda m: m.score(NUMBERS.x, groups=NUMBERS.groups), "there are no targets"),
        (lambda m: m.assign(NUMBERS.x, groups=NUMBERS.groups), "there are no targets"),
        (lambda m: m.score(NUMBERS.x, NUMBERS.y[:-1], groups=NUMBERS.groups), r"y has shape \(199,\)"),
        (lambda m: m.score(NUMBERS.x, NUMBERS.y * np.nan, groups=NUMBERS.groups), "not finite numbers"),
        (lambda m: m.score(NUMBERS.x, WORDS.y[:200], groups=NUMBERS.groups), "not finite numbers"),
        (lambda m: m.fit(NUMBERS.x, NUMBERS.y), "fit needs to know the client of each row"),
        (lambda m: m.fit(NUMBERS.x, groups=NUMBERS.groups), "ifca needs a target to learn"),
        (lambda m: m.fit(NUMBERS.clients(), NUMBERS.y), "clients have their own targets"),
    ],
)
def test_bad_arguments_stop_at_the_door(regression: IFCA, call: Any, said: str) -> None:
    fresh = clone(regression)
    vars(fresh).update({k: v for k, v in vars(regression).items() if k not in vars(fresh)})
    with pytest.raises(CoterieError, match=said) as caught:
        call(fresh)
    assert caught.value.hint


def test_an_unknown_class_is_named(classifier: IFCA) -> None:
    y = np.where(np.arange(len(WORDS.y)) == 5, "maybe", WORDS.y)
    with pytest.raises(DataError, match="class 'maybe' was not in the training data") as caught:
        classifier.score(WORDS.x, y, groups=WORDS.groups)
    assert caught.value.hint == "training had no, yes"


def test_clients_with_other_classes_or_levels_are_refused_and_read_with_accepts_them(tmp_path: Path) -> None:
    # A new hospital that has only some of the classes would number them differently, without a word.
    rows = [f"h{i % 4},{i / 7:.3f},{'ab'[i % 2]},{'xyz'[i % 3]}" for i in range(60)]
    (tmp_path / "old.csv").write_text("who,a,ward,y\n" + "\n".join(rows))
    (tmp_path / "new.csv").write_text(
        "who,a,ward,y\n" + "\n".join(f"n,{i},{'ab'[i % 2]},{'xz'[i % 2]}" for i in range(9))
    )
    (tmp_path / "ward.csv").write_text(
        "who,a,ward,y\n" + "\n".join(f"n,{i},{'ac'[i % 2]},{'xyz'[i % 3]}" for i in range(9))
    )
    model = ifca(rounds=2).fit(read(tmp_path / "old.csv", client="who", target="y"))
    for name, what in (("new.csv", "classes"), ("ward.csv", "features or category levels")):
        with pytest.raises(DataError, match=f"these clients have other {what} than the training data") as caught:
            model.assign(read(tmp_path / name, client="who", target="y"))
        assert "read_with" in caught.value.hint
        right = read_with(model.schema_, tmp_path / name)
        assert model.assign(right).rows.tolist() == [9]
        assert set(model.predict(right)) <= {"x", "y", "z"}


# -- runs -------------------------------------------------------------------------------------------------------------
def written(folder: Path, model: Any, clients: coterie.Clients) -> Path:
    asked = options_of(model)
    begin_run(folder, asked, "test", clients)
    finish_run(folder, fit(clients, asked, module=model.model, folder=folder))
    return folder


@pytest.mark.parametrize("data", [NUMBERS, WORDS])
@pytest.mark.parametrize("hidden", [(), (5,)])
def test_a_loaded_run_predicts_the_same_to_the_last_bit(tmp_path: Path, data: Planted, hidden: tuple[int, ...]) -> None:
    clients = data.clients()
    fresh = ifca(rounds=3, hidden=hidden, n_init=2, l2=0.01, averaging="gradient", momentum=0.1, baselines=True)
    loaded = coterie.load(written(tmp_path / "run", fresh, clients))
    model = clone(fresh).fit(clients)
    assert np.array_equal(
        loaded.predict(data.x, groups=data.groups),
        model.predict(data.x, groups=data.groups).astype(loaded.predict(clients).dtype),
    )
    assert torch.equal(loaded.theta_, model.theta_)
    for name in ("client_names_", "labels_", "margins_", "certain_", "classes_"):
        assert np.array_equal(getattr(loaded, name), getattr(model, name)), name
    assert loaded.scores_ == model.scores_
    assert loaded.get_params() == fresh.get_params()


def test_a_loaded_fedavg_run(tmp_path: Path) -> None:
    model = FedAvg(rounds=3, proximal=0.5, weighting="clients", decay=0.9)
    loaded = coterie.load(str(written(tmp_path / "run", model, NUMBERS.clients())))
    assert isinstance(loaded, FedAvg)
    assert loaded.get_params() == model.get_params()
    want = clone(model).fit(NUMBERS.clients()).predict(NUMBERS.x)
    assert np.array_equal(loaded.predict(NUMBERS.x), want)


def test_a_run_of_an_own_module_needs_it_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    folder = written(tmp_path / "run", ifca(model=module, rounds=2), NUMBERS.clients())
    with pytest.raises(ConfigError, match="this run trained a torch module, whose code is not in the folder"):
        coterie.load(folder)
    loaded = coterie.load(folder, model=module)
    x = torch.from_numpy((NUMBERS.x - loaded.scaling_.mean.numpy()) / loaded.scaling_.scale.numpy()).float()
    label = dict(zip(loaded.client_names_, loaded.labels_, strict=True))
    made = loaded.predict(NUMBERS.x, groups=NUMBERS.groups)
    for k in range(2):
        state = {name: loaded.theta_[k][part] for name, part in loaded.model_.layers.items()}
        module.load_state_dict({n: v.view(dict(module.named_parameters())[n].shape) for n, v in state.items()})
        own = np.array([label[g] == k for g in NUMBERS.groups])
        want = module(x).detach().numpy()[:, 0] * float(loaded.scaling_.y_scale) + float(loaded.scaling_.y_mean)
        np.testing.assert_allclose(made[own], want[own], rtol=1e-4)


def test_clients_from_arrays_keep_images_whole() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 1, 4, 4)).astype(np.float32)
    y = np.where(x[:, 0, 0, 0] > 0, "up", "down")
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    model = FedAvg(model=net, rounds=2, local_steps=2).fit(from_arrays(x, y, np.arange(80) % 4))
    assert set(model.predict(x, groups=np.arange(80) % 4)) <= {"up", "down"}


# -- parameters -------------------------------------------------------------------------------------------------------
OWN_DEFAULTS = {
    "n_clusters": {2},
    "hidden": {(64,)},
    "weighting": {"clients", "rows"},
}  # what an estimator decides where the options leave it open


@pytest.mark.parametrize("kind", ESTIMATORS.values(), ids=ESTIMATORS)
def test_parameters_are_the_options_with_their_defaults(kind: type[Any]) -> None:
    made = kind()
    found, plain = options_of(made), options({"method": kind.method})
    for name, option in options_in(kind).items():
        value = getattr(made, name)
        assert getattr(getattr(found, option.group), option.name) == value
        assert value == getattr(getattr(plain, option.group), option.name) or value in OWN_DEFAULTS[name]
    assert (found.seed, found.baselines, found.data.standardise) == (0, False, True)
    assert clone(made).get_params() == made.get_params()


@pytest.mark.parametrize("kind", ESTIMATORS.values(), ids=ESTIMATORS)
def test_signatures_and_docstrings_tell_every_parameter(kind: type[Any]) -> None:
    told = inspect.signature(kind).parameters
    assert told.keys() == kind().get_params().keys()
    assert all("Annotated" not in str(parameter) for parameter in told.values())
    for name in told:
        assert name in ("model", "start") or f"\n    {name}\n        " in kind.__doc__, name


# -- public names -----------------------------------------------------------------------------------------------------
def test_public_names_are_there_and_type_checkers_know_them() -> None:
    space: dict[str, Any] = {}
    exec("from coterie import *", space)
    assert space.keys() - {"__builtins__"} == set(coterie.__all__)
    assert {method.estimator for method in METHODS.values()} <= set(coterie.__all__) <= set(dir(coterie))
    tree = ast.parse(Path(coterie.__file__).read_text(encoding="utf-8"))
    said = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    known = {alias.name for node in said for alias in node.names}
    known |= {name for node in said if node.names[0].name == "*" for name in import_module(str(node.module)).__all__}
    assert set(coterie.__all__) - known == {"__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'Dito'"):
        _ = coterie.Dito
