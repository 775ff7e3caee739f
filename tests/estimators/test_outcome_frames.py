# SPDX-License-Identifier: Apache-2.0
"""Outcomes of data frames, and weights of their rows."""

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.algorithms.linear_by_fold import Problem, curves
from coterie.errors import ConfigError, DataError
from coterie.protocol import Block
from outcomes import rows


def _frame(outcome: str) -> pd.DataFrame:
    x, y, groups = rows(outcome)
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y, "site": groups})


def _times() -> pd.DataFrame:
    draw, made = np.random.default_rng(1), _frame("gamma")
    return made.assign(seen=draw.random(len(made)) < 0.7).astype({"seen": int})


@pytest.mark.parametrize("outcome", ["poisson", "ordinal"])
def test_a_frame_of_an_outcome_is_fitted_as_arrays_are(outcome: str):
    made = _frame(outcome)
    one = coterie.Local(penalty=1.0, outcome=outcome).fit(made, "y", "site")
    other = coterie.Local(penalty=1.0, outcome=outcome).fit(made[["a", "b", "c"]].to_numpy(), made.y, made.site)
    expected = other.predict(made[["a", "b", "c"]].to_numpy(), made.site)
    found = one.predict(made)
    if outcome == "ordinal":
        assert (found.astype(float) == expected).all()
    else:
        assert np.allclose(found, expected)


def test_times_and_events_are_two_columns_of_a_frame():
    made, x = _times(), ["a", "b", "c"]
    by_name = coterie.Local(penalty=1.0, outcome="cox").fit(made, ["y", "seen"], "site")
    by_value = coterie.Local(penalty=1.0, outcome="cox").fit(made[x], made[["y", "seen"]].to_numpy(), made.site)
    arrays = coterie.Local(penalty=1.0, outcome="cox").fit(made[x].to_numpy(), made[["y", "seen"]], made.site)
    expected = arrays.predict(made[x].to_numpy(), made.site)
    assert np.allclose(by_name.predict(made), expected)
    assert np.allclose(by_value.predict(made[x], made.site), expected)
    score = arrays.score(made[x].to_numpy(), made[["y", "seen"]], made.site)
    assert by_name.score(made) == pytest.approx(score)
    assert by_name.score(made[[*x, "site"]], made[["y", "seen"]].to_numpy()) == pytest.approx(score)
    with pytest.raises(DataError, match="two columns"):
        coterie.Local(outcome="cox").fit(made, "y", "site")


def test_a_frame_of_rows_tells_times_and_events():
    made = _times()
    clients = coterie.read(made, client="site", target="y", outcome="cox", event="seen", test_size=0.2)
    told = clients.test.frame()
    assert (told.y.to_numpy() == made.y[told.row].to_numpy()).all()
    assert (told.seen.to_numpy() == made.seen[told.row].to_numpy()).all()


def test_a_row_of_weight_two_counts_as_two_rows():
    made = _frame("negative-binomial")
    weight = np.random.default_rng(2).integers(1, 4, len(made))
    often = made.loc[made.index.repeat(weight)]
    one = coterie.Local(penalty=1.0, outcome="negative-binomial").fit(made, "y", "site", sample_weight=weight)
    other = coterie.Local(penalty=1.0, outcome="negative-binomial").fit(often, "y", "site")
    assert np.allclose(one.predict(made), other.predict(made))


def test_times_cannot_be_weighed():
    made = _times()
    with pytest.raises(ConfigError, match="cannot be weighed"):
        coterie.Local(outcome="cox").fit(made, ["y", "seen"], "site", sample_weight=np.ones(len(made)))
    clients = coterie.read(made, client="site", target="y", outcome="cox", event="seen", test_size=0.0)
    with pytest.raises(DataError, match="clients have their own targets"):
        coterie.Local().fit(clients, sample_weight=np.ones(len(made)))


@pytest.mark.parametrize("outcome", ["poisson", "negative-binomial", "ordinal", "cox"])
def test_derivatives_along_few_directions_are_those_in_all_of_them(outcome: str):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 2, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, (3, 20), generator=draw)
    target = y if outcome == "ordinal" else (y + 1.0) * (1 - 2 * (y == 0)) if outcome == "cox" else y.double()
    data = Block(torch.arange(3), torch.arange(3), x, target, torch.full((3,), 20), None, y % 2)
    problem = Problem(2, 4 if outcome == "ordinal" else 0, 2, (0, 1, 2), outcome)
    at, _ = curves(problem, {}, data)
    theta = 0.1 * torch.randn(3, 2, 3, problem.n_parameters, generator=draw, dtype=torch.float64)
    root = torch.randn(3, 2, problem.n_parameters, 2, generator=draw, dtype=torch.float64)
    loss, gradient, hessian = at.quadratic(theta)
    found = at.along(theta, root)
    assert torch.allclose(found[0], loss)
    for fit in range(3):
        for setting in range(2):
            b = root[fit, setting]
            assert torch.allclose(found[1][fit, setting], gradient[fit, setting] @ b)
            assert torch.allclose(found[2][fit, setting], b.T @ hessian[fit, setting] @ b)
