# SPDX-License-Identifier: Apache-2.0
"""Linear models of clients' own: local is ridge regression, others lie between it and one model for all."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone

import coterie as package
from command import coterie, refused
from coterie.algorithms.random_effects import as_dense
from coterie.data.clients import Clients
from coterie.data.readers import from_arrays
from coterie.models import Dense
from planted import planted


def heads(n_clients: int = 40, rows: int = 12, rank: int = 1, *, classes: bool = False) -> Clients:
    """Models that differ from a common one in `rank` of 6 directions."""
    draw = np.random.default_rng(0)
    basis = np.linalg.qr(draw.normal(size=(6, rank)))[0]
    own = 1.0 + 2 * draw.normal(size=(n_clients, rank)) @ basis.T  # [M, D]
    owner = np.repeat(np.arange(n_clients), rows)
    x = draw.normal(size=(len(owner), 6))
    y = (x * own[owner]).sum(1) + draw.normal(size=len(owner))
    target = np.where(y > 0, "yes", "no") if classes else y
    return from_arrays(x, target, owner, test_size=0.3, new_clients=0.2, task="auto" if classes else "regression")


def test_local_models_are_ridge_regressions() -> None:
    data, penalty = planted(4, 15), 3.0
    model = package.Local(penalty=penalty).fit(data.x, data.y, data.groups)
    scaling = model.scaling_
    x_all, y_all = (data.x - scaling.mean.numpy()) / scaling.scale.numpy(), scaling.target(torch.from_numpy(data.y))
    for name, theta in zip(model.client_names_.tolist(), model.personal_.own.numpy(), strict=True):
        mine, w = data.rows_of(name), theta[:-1]
        x = x_all[mine]
        residual = y_all.numpy()[mine] - x @ w - theta[-1]
        pull = x.T @ residual  # where ridge regression ends, this is alpha w
        alpha = (pull @ w) / (w @ w)
        np.testing.assert_allclose(pull, alpha * w, rtol=1e-6)
        assert 0.3 < alpha / penalty / residual.var() < 3  # alpha is the penalty times the noise, which is estimated


def test_shrunk_models_beat_both_ends_where_clients_differ_by_degrees() -> None:
    clients = heads()
    shrunk = package.RandomEffects(covariance="full", baselines=True).fit(clients).scores_
    assert shrunk["shrunk"].test < shrunk["global"].test
    assert shrunk["shrunk"].test < shrunk["local"].test
    assert shrunk["shrunk"].new_clients < shrunk["global"].new_clients


def test_representation_of_the_true_rank_spans_the_models() -> None:
    clients = heads()
    model = package.LowRank(rank=1).fit(clients)
    about = model.personal_.own - model.theta_
    assert int(torch.linalg.matrix_rank(about, rtol=1e-6)) == 1
    assert model.score(clients.test) > package.Local(penalty=1.0).fit(clients).score(clients.test)


def test_classes_are_served_too() -> None:
    clients = heads(rows=30, classes=True)
    model = package.RandomEffects(covariance="full", baselines=True).fit(clients)
    assert model.scores_["shrunk"].test > model.scores_["global"].test
    assert set(model.predict(clients.test)) == {"no", "yes"}


def test_settings_are_chosen_when_nobody_gives_them() -> None:
    fit = package.LowRank().fit(heads()).personal_.fit
    assert fit.setting == {"rank": 1}  # type: ignore[union-attr]


def test_new_clients_without_rows_get_the_common_model() -> None:
    model = package.RandomEffects(covariance="same").fit(heads())
    own, known = model.personal_.of(np.array(["stranger"]))
    assert not bool(known.any())
    torch.testing.assert_close(own[0], model.theta_)


def test_parameters_can_be_cloned() -> None:
    assert clone(package.LowRank(rank=3)).rank == 3


@pytest.mark.parametrize(
    ("method", "word", "value"),
    [("local", "penalty", 2.0), ("shrunk", "spread", "same"), ("representation", "rank", 1)],
)
def test_run_folder_is_read_back(method: str, word: str, value: object, tmp_path: Path) -> None:
    data = planted(8, 20)
    path = data.write(tmp_path / "sites.csv")
    words = ("fit", path, "--client", "site", "--target", "y", "--method", method, "--set", f"prior.{word}={value}")
    assert coterie(*words, "--out", tmp_path / "run").code == 0
    model = package.load(tmp_path / "run")
    assert isinstance(model, package.Local | package.RandomEffects | package.LowRank)
    name = {"spread": "covariance"}.get(word, word)  # in Python
    assert getattr(model, name) == value
    again = type(model)(**{name: value}).fit(package.read(path, client="site", target="y"))
    torch.testing.assert_close(model.personal_.own, again.personal_.own)
    new = planted(3, 12, seed=7, prefix="new-")
    new_path = new.write(tmp_path / "new.csv")
    assert len(coterie("predict", tmp_path / "run", new_path).out.splitlines()) == 1 + 36
    assert len(coterie("assign", tmp_path / "run", new_path).out.splitlines()) == 1 + 3
    fitted = model.assign(new.x, new.y, new.groups).own
    torch.testing.assert_close(fitted, again.assign(new.x, new.y, new.groups).own)
    assert coterie("resume", tmp_path / "run").code == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("local", "--rank", "2"), "prior.rank is set, and local has no use for it"),
        (("shrunk", "--hidden", "4"), "model.hidden is set, and shrunk has no use for it"),
        (("representation", "--rank", "9"), "rank 9 is more than the 3 features"),
        (("shrunk", "--rounds", "9"), "training.rounds is set"),
        (("ifca", "--rank", "2"), "prior.rank is set, and ifca has no use for it"),
        (("mixture", "--rank", "2"), "prior.rank is set, and mixture has no use for it"),
        (("maml", "--rank", "2"), "prior.rank is set, and maml has no use for it"),
    ],
)
def test_options_that_would_do_nothing_are_refused(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    path = planted(6, 10).write(tmp_path / "sites.csv")
    said, _ = refused("fit", path, "--client", "site", "--target", "y", "--method", *words, "--out", tmp_path / "run")
    assert sentence in said
    assert not (tmp_path / "run").exists()


def test_clients_too_small_to_choose_by_are_told(tmp_path: Path) -> None:
    path = planted(6, 3).write(tmp_path / "sites.csv")
    said, hint = refused(
        "fit", path, "--client", "site", "--target", "y", "--method", "local", "--out", tmp_path / "run"
    )
    assert "0 clients have 5 training rows" in said
    assert "prior.penalty" in hint


def test_layout_of_outputs_is_that_of_dense_models() -> None:
    three = Dense((2, 3), "cross_entropy", True, 0.0, torch.float64)
    theta = torch.arange(9.0, dtype=torch.float64)  # w, w, b of every class in turn
    assert as_dense(three, theta).tolist() == [0, 1, 3, 4, 6, 7, 2, 5, 8]
    two = Dense((2, 2), "cross_entropy", True, 0.0, torch.float64)
    assert as_dense(two, torch.tensor([1.0, 2.0, 3.0])).tolist() == [0, 0, 1, 2, 0, 3]


def test_the_setting_is_chosen_for_the_products_that_are_fitted() -> None:
    # y = a_i x1 x2 + 0.1 noise, a_i ~ N(0, 2^2): without products all clients look alike, with them they differ in one.
    draw = np.random.default_rng(0)
    own, owner = 2 * draw.normal(size=30), np.repeat(np.arange(30), 30)
    x = draw.normal(size=(len(owner), 2))
    y = own[owner] * x[:, 0] * x[:, 1] + 0.1 * draw.normal(size=len(owner))
    clients = from_arrays(x, y, owner, test_size=0.3, task="regression")
    chosen, full = (package.RandomEffects(degree=2, **how).fit(clients) for how in ({}, {"covariance": "full"}))
    # Noise is 0.01 of a variance of about 4: whoever has its own product explains nearly all.
    assert full.score(clients.test) > 0.98
    assert chosen.score(clients.test) > 0.98
    assert package.RandomEffects(degree=1).fit(clients).score(clients.test) < 0.3


def test_the_setting_is_chosen_at_the_scale_that_is_fitted() -> None:
    # Features of size 100 have coefficients of size 0.01: a penalty of 64 hardly holds them where they are not standardised.
    data = planted(6, 20)
    clients = from_arrays(100 * data.x, data.y, data.groups, task="regression")
    scaled, as_it_is = (package.Local(standardise=each).fit(clients) for each in (True, False))
    penalties = [model.personal_.fit.setting["penalty"] for model in (scaled, as_it_is)]
    assert penalties[0] != penalties[1]


def test_old_names_make_the_same_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="RandomEffects"):
        assert package.Shrunk(spread="full").get_params() == package.RandomEffects(covariance="full").get_params()
    with pytest.warns(DeprecationWarning, match="LowRank"):
        assert package.Representation(rank=2).get_params() == package.LowRank(rank=2).get_params()
