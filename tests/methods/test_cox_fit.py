# SPDX-License-Identifier: Apache-2.0
"""Cox models stratified by client: against lifelines and statsmodels."""

import warnings
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.config import options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.errors import ConfigError, DataError
from coterie.methods.fit import fit
from coterie.selection import compare

M, EACH = 16, 50


def rows(*, split: bool = False, ties: float = 8.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [N, 3], times and events [N, 2], clients; with `split` every other client's effects are reversed."""
    draw = np.random.default_rng(seed)
    groups, x = np.repeat(np.arange(M), EACH), draw.normal(size=(M * EACH, 3))
    base = np.exp(draw.normal(size=M))[groups]  # every client's own hazard
    sign = np.where(split & (groups % 2 == 1), -1.0, 1.0)
    event = draw.exponential(size=M * EACH) / (base * np.exp(sign * (x @ [0.9, -0.5, 0.1])))
    censored = draw.exponential(2 / base)
    times = np.ceil(np.minimum(event, censored) * ties) / ties
    return x, np.column_stack([times, event <= censored]).astype(float), groups


def clients(**how: Any) -> Clients:
    return from_arrays(*rows(), outcome=how.pop("outcome", "cox"), **{"test_size": 0.0, **how})


def plain(**more: Any) -> dict[str, Any]:
    return {"method": "fedavg", "baselines": False, "data": {"standardise": False}, **more}


def test_one_model_for_all_is_that_of_lifelines() -> None:
    lifelines, pandas = pytest.importorskip("lifelines"), pytest.importorskip("pandas")
    x, y, groups = rows()
    table = pandas.DataFrame(x, columns=["a", "b", "c"]).assign(time=y[:, 0], event=y[:, 1], client=groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what lifelines calls is deprecated in newer versions of pandas
        theirs = lifelines.CoxPHFitter().fit(
            table, "time", "event", strata=["client"], fit_options={"precision": 1e-10}
        )
    found = fit(clients(), options(plain()))
    np.testing.assert_allclose(found.models.theta[0, :3].numpy(), theirs.params_.to_numpy(), atol=1e-7)
    loss = float((found.per_client["train_loss"] * found.per_client["rows_train"]).sum())
    assert -loss == pytest.approx(theirs.log_likelihood_, abs=1e-7)


@pytest.mark.parametrize(("outcome", "ties"), [("cox", "efron"), ("cox-breslow", "breslow")])
def test_both_treatments_of_ties_are_those_of_statsmodels(outcome: str, ties: str) -> None:
    api = pytest.importorskip("statsmodels.api")
    x, y, groups = rows()
    theirs = api.PHReg(y[:, 0], x, status=y[:, 1], strata=groups, ties=ties).fit(disp=0)
    found = fit(clients(outcome=outcome), options(plain()))
    np.testing.assert_allclose(found.models.theta[0, :3].numpy(), theirs.params, atol=1e-7)
    loss = float((found.per_client["train_loss"] * found.per_client["rows_train"]).sum())
    assert -loss == pytest.approx(theirs.llf, abs=1e-7)


def test_penalised_local_models_are_those_of_lifelines() -> None:
    """A client's own model: lifelines penalises the mean loss of a row, with half of the squares."""
    lifelines, pandas = pytest.importorskip("lifelines"), pytest.importorskip("pandas")
    x, y, groups = rows()
    found = fit(clients(), options(plain(method="local", prior={"penalty": 2.0}))).models
    mine = groups == 5
    table = pandas.DataFrame(x[mine], columns=["a", "b", "c"]).assign(time=y[mine, 0], event=y[mine, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # lifelines scales features, and penalises n times penalizer / 2: undo both
        scale = table[["a", "b", "c"]].std().to_numpy()
        theirs = lifelines.CoxPHFitter(penalizer=2.0 / scale**2 / mine.sum()).fit(
            table, "time", "event", fit_options={"precision": 1e-10}
        )
    own = found.own[found.names.tolist().index("5")].numpy()
    np.testing.assert_allclose(own[:3], theirs.params_.to_numpy(), atol=1e-5)


def test_comparing_finds_clusters_of_effects() -> None:
    made = from_arrays(*rows(split=True), outcome="cox", test_size=0.2)
    found = compare(made, quick=True, structures=("clusters", "local", "shrunk"))
    assert found.metric == "concordance"
    assert found.chosen == "clusters"
    assert found["clusters"].setting == {"n_clusters": 2}
    labels = found.grouping.labels  # type: ignore[union-attr]
    even = np.array([int(name) % 2 == 0 for name in found.names])
    assert len(set(labels[even])) == len(set(labels[~even])) == 1
    assert found["clusters"].test_metric > found["global"].test_metric + 0.05  # type: ignore[operator]


def test_one_set_of_effects_is_enough_where_only_baselines_differ() -> None:
    found = compare(clients(test_size=0.2, new_clients=0.2), quick=True)
    assert found.chosen == "global"
    assert [trial.setting["prior"] for trial in found["shrunk"].trials] == ["same", "diagonal", "full"]


def test_predictions_are_hazard_ratios_and_scores_are_concordances() -> None:
    x, y, groups = rows(split=True)
    model = coterie.IFCA(2, outcome="cox").fit(x, y, groups)
    ratio = model.predict(x, groups)
    assert np.all(ratio > 0)
    mine = groups == 3  # its effects are reversed
    assert np.corrcoef(np.log(ratio[mine]), -(x[mine] @ [0.9, -0.5, 0.1]))[0, 1] > 0.95
    assert model.score(x, y, groups) > 0.7


def test_what_makes_no_sense_is_refused() -> None:
    x, y, groups = rows()
    with pytest.raises(ConfigError, match="baseline hazard of its own"):
        fit(clients(), options(plain(method="shrunk", prior={"spread": "intercept"})))
    with pytest.raises(DataError, match="need two columns"):
        from_arrays(x, y[:, 0], groups, outcome="cox")
    with pytest.raises(DataError, match="times must be above 0"):
        from_arrays(x, y * [[0.0, 1.0]], groups, outcome="cox")
    with pytest.raises(DataError, match=r"must be 1 \(it happened\) or 0"):
        from_arrays(x, np.column_stack([y[:, 0], y[:, 1] + 1]), groups, outcome="cox")
    with pytest.raises(DataError, match="needs to know whether the event happened"):
        from_arrays(x, y[:, 0], groups).with_outcome("cox")
