# SPDX-License-Identifier: Apache-2.0
"""The table of coefficients: planted ones are recovered, and it agrees with models turned back by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
import torch

import coterie
from coterie.config import options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.methods.base import Fitted
from coterie.methods.coefficients import MOST_ROWS
from coterie.methods.fit import fit
from coterie.selection import compare

CLIENTS, ROWS = 12, 40


def table_of(found: Fitted) -> dict[str, Any]:
    made: dict[str, Any] = found.models.results(found)["coefficients"]
    return made


def values_of(table: dict[str, Any]) -> dict[str, list[float]]:
    return dict(zip(table["names"], table["values"], strict=True))


def fitted(clients: Clients, method: str, **more: Any) -> Fitted:
    return fit(clients, options({"method": method, "baselines": False, **more}))


def two_groups(tmp_path: Path, noise: float = 0.0) -> Clients:
    """y = 3 + 2 x + 4 [b] in the first group, -5 - 1.5 x + 4 [b] in the second."""
    draw = np.random.default_rng(0)
    who, group = (np.repeat(of, ROWS) for of in (np.arange(CLIENTS), np.arange(CLIENTS) % 2))
    x, ward = draw.normal(50, 10, len(who)), draw.choice(["a", "b"], len(who))
    y = np.where(group == 0, 3 + 2 * x, -5 - 1.5 * x) + 4 * (ward == "b") + noise * draw.normal(size=len(who))
    path = tmp_path / "t.csv"
    pc.write_csv(pa.table({"who": [f"c{i:02d}" for i in who], "x": x, "ward": ward, "y": y}), path)
    return coterie.read(path, client="who", target="y", test_size=0.0)


def lines(n_features: int = 3, own: float = 0.0, slope: float = 0.0) -> Clients:
    """y = 1 + sum of features + noise, with intercepts or slopes of the first feature of clients' own."""
    draw = np.random.default_rng(1)
    who = np.repeat(np.arange(CLIENTS), ROWS)
    x = draw.normal(2, 3, (len(who), n_features))
    mine = np.repeat(draw.normal(size=CLIENTS), ROWS)
    y = 1 + x.sum(1) + own * mine + slope * mine * x[:, 0] + 0.1 * draw.normal(size=len(who))
    return from_arrays(x, y, who, test_size=0.0)


@pytest.mark.parametrize("method", ["ifca", "moment-descent"])
def test_each_group_has_its_own_line_in_the_units_of_the_data(method: str, tmp_path: Path) -> None:
    found = fitted(two_groups(tmp_path), method, clusters={"n_clusters": 2}, training={"rounds": 200})
    table = table_of(found)
    assert (table["kind"], table["of"], table["baselines"]) == ("clusters", "y", ["ward=a"])
    order = np.argsort([-slope for slope in values_of(table)["x"]])
    got = {name: [row[k] for k in order] for name, row in values_of(table).items()}
    assert list(got) == ["(intercept)", "x", "ward=b"]
    # Gradient descent from scaled features: three digits of intercepts that lie five deviations away.
    np.testing.assert_allclose(got["(intercept)"], [3, -5], atol=2e-2)
    np.testing.assert_allclose(got["x"], [2, -1.5], atol=1e-3)
    np.testing.assert_allclose(got["ward=b"], [4, 4], atol=2e-2)


def test_one_model_predicts_what_its_table_says() -> None:
    clients = lines()
    found = fitted(clients, "fedavg")
    table, models = table_of(found), found.models
    assert table["kind"] == "one"
    x = np.array([[1.0, -2.0, 3.0]])
    by_hand = values_of(table)["(intercept)"][0] + sum(
        row[0] * v for row, v in zip(table["values"][1:], x[0], strict=True)
    )
    scaled = models.scaling.features(torch.from_numpy(x))
    assert by_hand == pytest.approx(float(models.scaling.back(models.model.outputs(models.theta, scaled))[0, 0, 0]))


def test_own_intercepts_vary_and_slopes_do_not() -> None:
    found = fitted(lines(own=2.0), "shrunk", prior={"spread": "intercept"})
    table, fit_of = table_of(found), found.models.fit
    assert table["kind"] == "spread"
    got = values_of(table)
    for name in ("x0", "x1", "x2"):
        assert got[name][0] == pytest.approx(1.0, abs=0.01)
        assert got[name][1] == 0.0
    scale = float(found.models.scaling.y_scale)
    assert got["(intercept)"][1] == pytest.approx(scale * float(fit_of.spread[-1, -1]) ** 0.5)
    drawn = np.random.default_rng(1)
    drawn.normal(2, 3, (CLIENTS * ROWS, 3))
    assert got["(intercept)"][1] == pytest.approx(2 * drawn.normal(size=CLIENTS).std(), rel=0.1)


def test_deviations_are_those_of_the_covariance_in_the_units_of_the_data() -> None:
    found = fitted(lines(own=1.0, slope=0.5), "shrunk", prior={"spread": "full"})
    scaling, spread = found.models.scaling, found.models.fit.spread
    unit = torch.diag(torch.cat([1 / scaling.scale, torch.ones(1, dtype=torch.float64)]))
    unit[-1, :-1] = -scaling.mean / scaling.scale
    by_hand = (scaling.y_scale * unit @ spread @ unit.T * scaling.y_scale).diagonal().sqrt()
    got = values_of(table_of(found))
    for k, name in enumerate(("x0", "x1", "x2", "(intercept)")):
        assert got[name][1] == pytest.approx(float(by_hand[k]))


def test_a_direction_is_the_planted_one_and_has_its_variance() -> None:
    found = fitted(lines(slope=0.5), "representation", prior={"rank": 2})
    table = table_of(found)
    assert table["kind"] == "directions"
    assert sum(table["shares"]) == pytest.approx(1.0)
    assert table["shares"][0] > 0.95  # clients differ in one slope only
    loading = {name: row[1] for name, row in values_of(table).items()}
    assert max(loading, key=lambda name: abs(loading[name])) == "x0"
    # All directions together have the variances of the prior.
    scaling, spread = found.models.scaling, found.models.fit.spread
    slopes = (scaling.y_scale**2 * spread.diagonal()[:-1] / scaling.scale**2).tolist()
    got = [sum(v**2 for v in values_of(table)[f"x{k}"][1:]) for k in range(3)]
    np.testing.assert_allclose(got, slopes, rtol=1e-6, atol=1e-12)


def test_two_classes_have_log_odds_of_the_second() -> None:
    x, who = np.random.default_rng(2).normal(size=(480, 2)), np.repeat(np.arange(CLIENTS), ROWS)
    y = np.where(x[:, 0] + np.random.default_rng(3).logistic(size=480) > 0.5, "yes", "no")
    clients = from_arrays(x, y, who, test_size=0.0)
    found = fitted(clients, "fedavg", training={"rounds": 300})
    table = table_of(found)
    assert table["of"] == "the log odds of yes against no"
    ((weight, bias),) = found.models.model.unpack(found.models.theta)
    scaling = found.models.scaling
    slopes = (weight[0, 1] - weight[0, 0]) / scaling.scale
    assert [row[0] for row in table["values"][1:]] == pytest.approx(slopes.tolist())
    intercept = float(bias[0, 1] - bias[0, 0] - (slopes * scaling.mean).sum())
    assert table["values"][0][0] == pytest.approx(intercept)


def test_several_classes_have_a_row_each_but_the_first() -> None:
    x, who = np.random.default_rng(2).normal(size=(480, 1)), np.repeat(np.arange(CLIENTS), ROWS)
    y = np.array(["low", "middle", "top"])[np.digitize(x[:, 0] + np.random.default_rng(3).normal(size=480), [-1, 1])]
    names = table_of(fitted(from_arrays(x, y, who, test_size=0.0), "fedavg"))["names"]
    assert names == ["(intercept), middle", "(intercept), top", "x0, middle", "x0, top"]


def test_levels_keep_their_own_coefficients_where_some_rows_have_none(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "who,ward,y\n" + "".join(f"c{i % 2},{w},{v}\n" for i, (w, v) in enumerate([("a", 1), ("b", 2), ("", 3)] * 20))
    )
    found = fitted(
        coterie.read(path, client="who", target="y", test_size=0.0, missing="mean", task="regression"), "fedavg"
    )
    table = table_of(found)
    assert table["baselines"] == []
    got = values_of(table)
    np.testing.assert_allclose([got["(intercept)"][0], got["ward=a"][0], got["ward=b"][0]], [3, -2, -1], atol=1e-2)


def test_of_many_features_the_largest_are_kept() -> None:
    table = table_of(fitted(lines(n_features=60), "fedavg"))
    assert (len(table["names"]), table["total"]) == (MOST_ROWS + 1, 61)
    assert table["names"][0] == "(intercept)"


def test_networks_and_products_of_features_have_no_table() -> None:
    clients = lines()
    assert table_of(fitted(clients, "fedavg", model={"hidden": [4]}, training={"rounds": 2})) is None
    assert table_of(fitted(clients, "fedavg", model={"degree": 2}, training={"rounds": 2})) is None
    assert table_of(fitted(clients, "local", prior={"penalty": 1.0})) is None


def test_hazards_have_no_intercept() -> None:
    draw = np.random.default_rng(4)
    x, who = draw.normal(size=(480, 2)), np.repeat(np.arange(CLIENTS), ROWS)
    y = np.stack([draw.exponential(np.exp(-x[:, 0])) + 0.01, np.ones(480)], 1)
    table = table_of(fitted(from_arrays(x, y, who, outcome="cox", test_size=0.0), "fedavg"))
    assert (table["names"], table["of"]) == (["x0", "x1"], "the log hazard")


def test_a_comparison_has_the_coefficients_of_what_it_chose(tmp_path: Path) -> None:
    found = compare(two_groups(tmp_path, noise=0.5), quick=True)
    assert found.chosen == "clusters"
    assert found.coefficients is not None
    models = found["clusters"].models
    assert models is not None
    got = values_of(found.coefficients)
    np.testing.assert_allclose(got["x"], models[:, 0])
    np.testing.assert_allclose(got["(intercept)"], models[:, -1] + models[:, 1])  # ward=a is in the intercept
    np.testing.assert_allclose(got["ward=b"], models[:, 2] - models[:, 1])
