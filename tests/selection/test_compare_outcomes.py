# SPDX-License-Identifier: Apache-2.0
"""Does `compare` find what was planted in counts and in skewed costs?"""

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError
from coterie.methods.base import Fitted
from coterie.selection import compare
from coterie.selection.fit import fit_chosen
from coterie.selection.text import answer
from coterie.studies.data.planted import planted_costs, planted_counts

SIZES = {"n_clients": 40, "rows": 40, "n_features": 4}


def as_clients(rows: Ragged, outcome: str | None, **held: float) -> Clients:
    assert isinstance(rows.x, Tensor)
    assert isinstance(rows.y, Tensor)
    how = {"test_size": 0.2, **held}
    return from_arrays(rows.x.numpy(), rows.y.numpy(), rows.names[rows.owners], outcome=outcome, **how)  # type: ignore[arg-type]


# -- what is planted --------------------------------------------------------------------------------------------------
def test_counts_have_the_means_that_were_planted() -> None:
    rows = planted_counts(mean=3.0, n_clients=2, rows=20000, n_features=1, seed=0)
    assert isinstance(rows.y, Tensor)
    assert bool((rows.y == rows.y.floor()).all())
    assert bool((rows.y >= 0).all())
    api = pytest.importorskip("statsmodels.api")
    assert isinstance(rows.x, Tensor)
    fit = api.GLM(rows.y.numpy(), api.add_constant(rows.x.numpy()), family=api.families.Poisson()).fit()
    assert fit.params[0] == pytest.approx(np.log(3.0), abs=0.02)
    assert fit.pearson_chi2 / fit.df_resid == pytest.approx(1.0, abs=0.03)  # variance and mean are equal


def test_costs_are_log_normal_with_own_intercepts() -> None:
    rows = planted_costs(spread=0.5, n_clients=300, rows=200, n_features=1, seed=0)
    assert isinstance(rows.y, Tensor)
    own = rows.y.log().view(300, 200).mean(1)
    assert float(own.mean()) == pytest.approx(np.log(1000.0), abs=0.1)
    assert float(own.std()) == pytest.approx(0.5, abs=0.06)


def test_what_cannot_be_planted_in_outcomes_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot plant 5 groups at 2 clients"):
        planted_counts(5, n_clients=2, rows=2, n_features=1, seed=0)


# -- and what is found ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1])
def test_random_intercepts_of_counts_are_found(seed: int) -> None:
    found = compare(as_clients(planted_counts(spread=0.5, **SIZES, seed=seed), "poisson"), seed=seed)
    assert found.chosen == "shrunk"
    assert found["shrunk"].setting == {"prior": "intercept"}
    assert found.metric == "rmse"
    assert "mixture" not in [one.name for one in found.structures]


def test_groups_of_counts_are_found_and_fitted() -> None:
    clients = as_clients(planted_counts(2, **SIZES, seed=0), "poisson", new_clients=0.2)
    found = compare(clients)
    assert found.chosen == "clusters"
    assert found["clusters"].setting == {"n_clusters": 2}
    assert "2 groups" in answer(found).headline
    fitted: Fitted = fit_chosen(clients, found)
    assert fitted.models.theta.shape == (2, 5)
    test = next(score for score in fitted.scores if score.method == "ifca").test
    assert test == pytest.approx(found["clusters"].test_overall, rel=0.1)


def test_random_intercepts_of_skewed_costs_are_found_and_predict_better_than_one_model() -> None:
    found = compare(as_clients(planted_costs(spread=0.5, **SIZES, seed=0), "log-normal"))
    assert found.chosen == "shrunk"
    assert found["shrunk"].setting == {"prior": "intercept"}
    assert found["shrunk"].versus_global is not None
    assert found["shrunk"].versus_global.low > 0


def test_one_model_of_counts_is_enough_where_one_was_planted() -> None:
    assert compare(as_clients(planted_counts(**SIZES, seed=0), "poisson")).chosen == "global"


# -- scores -----------------------------------------------------------------------------------------------------------
def test_scores_of_outcomes_can_be_compared() -> None:
    """Costs that are log-normal are likelier as such than as gamma, and as likely as their density says."""
    rows = planted_costs(**SIZES, seed=1)
    quick = {"quick": True, "structures": ("global",)}
    normal, gamma = (
        compare(as_clients(rows, outcome), **quick)["global"].client_score.mean()  # type: ignore[arg-type]
        for outcome in ("log-normal", "gamma")
    )
    assert normal > gamma + 0.02
    assert isinstance(rows.y, Tensor)
    assert normal == pytest.approx(-float((rows.y.log() + 0.5 + 0.5 * np.log(2 * np.pi)).mean()), abs=0.05)


def test_larger_costs_are_no_outliers() -> None:
    """In cents, a client's costs have a density of a hundredth; with its own intercept it is served as well as others."""
    rows = planted_costs(spread=0.3, **SIZES, seed=2)
    assert isinstance(rows.y, Tensor)
    y = torch.where(torch.from_numpy(rows.owners % 4 == 0), 100 * rows.y, rows.y)
    clients = as_clients(Ragged(rows.layout, rows.x, y), "log-normal")
    found = compare(clients, quick=True, structures=("clusters", "shrunk"))
    in_cents = {name for i, name in enumerate(found.names.tolist()) if i % 4 == 0}
    assert in_cents.isdisjoint(found.outliers)


def test_structures_for_numbers_only_are_refused() -> None:
    clients = as_clients(planted_counts(**SIZES, seed=0), "poisson")
    with pytest.raises(ConfigError, match="mixtures of rows are not for counts"):
        compare(clients, structures=("mixture",))
    with pytest.raises(ConfigError, match="networks are not for counts"):
        compare(clients, hidden=(8,))
