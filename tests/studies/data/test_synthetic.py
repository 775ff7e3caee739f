# SPDX-License-Identifier: Apache-2.0
"""Planted mixed regression: the mathematics of the draws."""

import math
from typing import Any

import pytest
import torch

from coterie.errors import ConfigError
from coterie.studies.data.synthetic import Planted, bernoulli_starts, mixed_regression, unequal_mixture


def plant(**changes: Any) -> Planted:
    settings: dict[str, Any] = {
        "n_clients": 40,
        "rows": 50,
        "n_features": 30,
        "n_clusters": 4,
        "noise": 0.3,
        "separation": 2.0,
        "preset": "paper",
        "seed": 1,
    }
    return mixed_regression(**(settings | changes))


def rows_of(planted: Planted) -> tuple[torch.Tensor, torch.Tensor]:
    """[M * N, D] features and [M * N] targets."""
    x, y = planted.rows.x, planted.rows.y
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    return x, y


def residuals(planted: Planted) -> torch.Tensor:
    x, y = rows_of(planted)
    owner = planted.truth.repeat_interleave(planted.rows.counts)
    return y - (x * planted.theta[owner]).sum(1)


def test_paper_preset_gives_every_model_the_asked_norm_and_two_kinds_of_coordinates() -> None:
    theta = plant(separation=2.5).theta
    torch.testing.assert_close(theta.norm(dim=1), torch.full((4,), 2.5, dtype=torch.float64))
    for model in theta:
        assert len(set(model.tolist())) == 2
        assert model.min() == 0


def test_official_preset_multiplies_by_r_without_rescaling() -> None:
    theta = plant(n_features=1000, separation=0.1, preset="official").theta
    assert sorted(set(theta.flatten().tolist())) == [0.0, 0.1]
    # Norm is r sqrt(number of ones), with 500 +- 16 ones: about 22 r.
    assert theta.norm(dim=1).tolist() == pytest.approx([0.1 * math.sqrt(500)] * 4, rel=0.1)


def test_presets_plant_the_same_directions() -> None:
    paper, official = plant().theta, plant(preset="official").theta
    torch.testing.assert_close(paper / paper.norm(dim=1, keepdim=True), official / official.norm(dim=1, keepdim=True))


def test_half_of_the_coordinates_are_ones() -> None:
    share = (plant(n_features=5000).theta > 0).double().mean(1)
    # Standard error sqrt(0.25 / 5000) = 0.007; four of them.
    assert share.tolist() == pytest.approx([0.5] * 4, abs=0.03)


def test_noise_has_the_asked_variance_and_zero_mean() -> None:
    rest = residuals(plant(n_clients=100, rows=100, noise=0.3))
    # 10,000 residuals: the standard deviation is known to 0.3 / sqrt(20,000) = 0.002.
    assert float(rest.std()) == pytest.approx(0.3, abs=0.01)
    assert float(rest.mean()) == pytest.approx(0.0, abs=0.015)


def test_without_noise_targets_are_exact() -> None:
    assert float(residuals(plant(noise=0.0)).abs().max()) < 1e-12


def test_features_are_standard_normal() -> None:
    x, _ = rows_of(plant(n_clients=100, rows=100, n_features=5))
    # 10,000 rows: entries of mean and covariance are known to about 0.01 (0.014 on the diagonal).
    torch.testing.assert_close(x.mean(0), torch.zeros(5, dtype=torch.float64), atol=0.05, rtol=0)
    torch.testing.assert_close(x.T.cov(), torch.eye(5, dtype=torch.float64), atol=0.07, rtol=0)


@pytest.mark.parametrize(("n_clients", "sizes"), [(40, [10, 10, 10, 10]), (42, [11, 11, 10, 10])])
def test_clusters_are_balanced_and_interleaved(n_clients: int, sizes: list[int]) -> None:
    truth = plant(n_clients=n_clients).truth
    assert truth.dtype == torch.int64
    assert truth.bincount().tolist() == sizes
    assert truth[:8].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_names_ascend_and_rows_are_one_array_without_padding() -> None:
    planted = plant(n_clients=120)
    assert planted.rows.names[0] == "000"
    assert planted.rows.names.tolist() == sorted(planted.rows.names.tolist())
    block = next(planted.rows.blocks())
    assert block.x.shape == (120, 50, 30)
    assert block.mask is None
    assert block.x.data_ptr() == rows_of(planted)[0].data_ptr()


def test_same_seed_same_data_and_another_seed_other_data() -> None:
    a, b, c = plant(seed=5), plant(seed=5), plant(seed=6)
    assert all(torch.equal(u, v) for u, v in zip(rows_of(a), rows_of(b), strict=True))
    assert torch.equal(a.theta, b.theta)
    assert not torch.equal(a.theta, c.theta)
    assert not torch.equal(rows_of(a)[0], rows_of(c)[0])


def test_float32_plants_the_same_models() -> None:
    planted = plant(dtype=torch.float32)
    assert {value.dtype for value in (*rows_of(planted), planted.theta)} == {torch.float32}
    torch.testing.assert_close(planted.theta.double(), plant().theta, atol=1e-6, rtol=0)


def test_models_differ_and_are_not_zero_even_with_few_features() -> None:
    theta = plant(n_features=3, n_clusters=7).theta  # 7 is all there are
    assert len({tuple(model) for model in theta.tolist()}) == 7
    assert theta.norm(dim=1).tolist() == pytest.approx([2.0] * 7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"preset": "other"},
        {"rows": 0},
        {"noise": -1.0},
        {"separation": 0.0},
        {"n_clients": 3},
        {"n_features": 2},
    ],
)
def test_senseless_settings_are_refused_with_a_hint(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hint:"):
        plant(**wrong)


def test_starts_are_zeros_and_scale_in_equal_numbers() -> None:
    starts = bernoulli_starts(6, 2, 1000, seed=3, scale=0.25)
    assert starts.shape == (6, 2, 1000)
    assert sorted(set(starts.flatten().tolist())) == [0.0, 0.25]
    # 12,000 coordinates: the share of ones is known to 0.005.
    assert float((starts > 0).double().mean()) == pytest.approx(0.5, abs=0.02)


def test_starts_are_independent_of_each_other() -> None:
    signs = 2 * bernoulli_starts(6, 2, 5000, seed=3).flatten(0, 1) - 1
    agreement = signs @ signs.T / 5000 - torch.eye(12, dtype=torch.float64)
    # Standard error 0.014 for each of 66 pairs.
    assert float(agreement.abs().max()) < 0.07


def test_more_starts_keep_the_first_ones() -> None:
    assert torch.equal(bernoulli_starts(10, 3, 40, seed=3)[:4], bernoulli_starts(4, 3, 40, seed=3))
    assert not torch.equal(bernoulli_starts(4, 3, 40, seed=4), bernoulli_starts(4, 3, 40, seed=3))


def test_starts_know_nothing_of_the_planted_models_of_the_same_seed() -> None:
    theta = plant(n_features=5000, preset="official", separation=1.0).theta
    start = bernoulli_starts(1, 4, 5000, seed=1)[0]
    # Agreement of two fair coins: 0.5, with standard error 0.007.
    assert (theta[:, None] == start).double().mean(-1).flatten().tolist() == pytest.approx([0.5] * 16, abs=0.03)


def test_least_squares_with_known_clusters_finds_the_planted_models() -> None:
    planted = plant(n_clients=200, rows=50, n_features=20)
    x, y = rows_of(planted)
    own = (planted.truth == 0).repeat_interleave(50)
    fit = torch.linalg.lstsq(x[own], y[own, None]).solution[:, 0]
    # 2,500 rows: sigma sqrt(D / (N - D - 1)) = 0.3 sqrt(20 / 2479) = 0.0269, within 16 % for one standard deviation.
    assert float((fit - planted.theta[0]).norm()) == pytest.approx(0.0269, rel=0.5)


# -- clients of unequal length ----------------------------------------------------------------------------------------
LAWS = ("normal", "rademacher", "uniform", "laplace")


def mixture(**changes: Any) -> Planted:
    settings: dict[str, Any] = {
        "rows": torch.full((200,), 50),
        "shares": [0.2, 0.3, 0.5],
        "n_features": 5,
        "noise": 0.3,
    }
    return unequal_mixture(**(settings | {"seed": 1} | changes))


def rows_by_cluster(planted: Planted) -> list[torch.Tensor]:
    x, _ = rows_of(planted)
    owner = planted.truth[torch.from_numpy(planted.rows.owners)]
    return [x[owner == k] for k in range(len(planted.theta))]


@pytest.mark.parametrize("law", LAWS)
def test_features_of_every_law_are_centred_uncorrelated_and_of_variance_one(law: str) -> None:
    x, _ = rows_of(mixture(features=law))
    # 10,000 rows: entries of mean and covariance are known to 0.01 (0.022 on the diagonal for laplace, with kurtosis 6).
    torch.testing.assert_close(x.mean(0), torch.zeros(5, dtype=torch.float64), atol=0.05, rtol=0)
    torch.testing.assert_close(x.T.cov(), torch.eye(5, dtype=torch.float64), atol=0.09, rtol=0)


@pytest.mark.parametrize(
    ("law", "kurtosis"), [("normal", 3.0), ("rademacher", 1.0), ("uniform", 1.8), ("laplace", 6.0)]
)
def test_laws_are_told_apart_by_their_fourth_moment(law: str, kurtosis: float) -> None:
    x, _ = rows_of(mixture(features=law))
    # 50,000 draws: the fourth moment of laplace varies most, with standard error sqrt(2520 - 36) / 224 = 0.22.
    assert float((x**4).mean()) == pytest.approx(kurtosis, abs=0.9 if law == "laplace" else 0.2)
    if law == "rademacher":
        assert sorted(set(x.flatten().tolist())) == [-1.0, 1.0]
    if law == "uniform":
        assert float(x.abs().max()) <= math.sqrt(3)


@pytest.mark.parametrize("law", LAWS)
def test_covariances_that_differ_have_eigenvalues_within_a_half_and_two(law: str) -> None:
    planted = mixture(rows=torch.full((400,), 50), features=law, covariance="differs")
    found = [x.T.cov() for x in rows_by_cluster(planted)]
    for cov in found:
        values = torch.linalg.eigvalsh(cov)
        # 4,000 rows and more: eigenvalues are known to about sqrt(2 / 4000) = 2 %, under laplace 4 %.
        assert 0.44 < float(values.min()) < float(values.max()) < 2.25
    assert min(float((a - b).abs().max()) for i, a in enumerate(found) for b in found[:i]) > 0.2


def test_clients_are_drawn_by_their_shares() -> None:
    truth = mixture(rows=torch.full((10000,), 1)).truth
    assert truth.dtype == torch.int64
    # Standard error sqrt(0.25 / 10,000) = 0.005.
    assert (truth.bincount() / 10000).tolist() == pytest.approx([0.2, 0.3, 0.5], abs=0.02)
    assert mixture(rows=torch.full((50,), 1), shares=[0, 1]).truth.tolist() == [1] * 50


def test_every_client_has_the_rows_that_were_asked_for() -> None:
    counts = torch.tensor([3, 0, 1, 50, 0, 1, 3])
    planted = mixture(rows=counts, noise=0.0)
    assert planted.rows.counts.tolist() == counts.tolist()
    assert planted.rows.names.tolist() == list("0123456")
    for i in range(7):  # the rows of every client follow its own cluster's model
        block = planted.rows.client(i)
        assert block.x.shape == (1, int(counts[i]), 5)
        torch.testing.assert_close(block.target[0], block.x[0] @ planted.theta[planted.truth[i]])


def test_models_have_independent_coordinates_of_variance_four_over_d() -> None:
    theta = mixture(n_features=4000).theta
    # 12,000 coordinates: their variance is known to 1.3 %; squared lengths are 4, give or take 4 sqrt(2 / 4000) = 0.09.
    assert float(theta.var()) == pytest.approx(4 / 4000, rel=0.06)
    assert theta.square().sum(1).tolist() == pytest.approx([4.0] * 3, abs=0.4)
    assert float((theta[0] @ theta[1]).abs()) < 0.4  # standard error 4 / sqrt(4000) = 0.06


def test_mixture_noise_has_the_asked_variance() -> None:
    planted = mixture(covariance="differs")
    x, y = rows_of(planted)
    owner = planted.truth[torch.from_numpy(planted.rows.owners)]
    assert float((y - (x * planted.theta[owner]).sum(1)).std()) == pytest.approx(0.3, abs=0.01)


def test_features_and_lengths_leave_models_and_clusters_of_a_seed_as_they_are() -> None:
    base = mixture()
    for other in (mixture(features="laplace"), mixture(rows=torch.arange(200)), mixture(covariance="differs")):
        assert torch.equal(other.theta, base.theta)
        assert torch.equal(other.truth, base.truth)
    assert torch.equal(rows_of(mixture())[0], rows_of(base)[0])
    assert not torch.equal(mixture(seed=2).theta, base.theta)


@pytest.mark.parametrize(
    "wrong",
    [
        {"features": "cauchy"},
        {"covariance": "other"},
        {"rows": torch.zeros(0, dtype=torch.int64)},
        {"rows": torch.tensor([3, -1])},
        {"n_features": 0},
        {"noise": -0.1},
        {"noise": math.nan},
        {"shares": [0.0, 0.0]},
        {"shares": [0.5, -0.5]},
        {"shares": [math.nan, 1.0]},
    ],
)
def test_senseless_mixtures_are_refused_with_a_hint(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hint:"):
        mixture(**wrong)
