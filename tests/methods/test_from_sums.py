# SPDX-License-Identifier: Apache-2.0
"""Linear regression is fitted to what sites share in place of their rows as it is to the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie import ConfigError
from coterie.algorithms.fedavg import try_penalties
from coterie.cli.tables import predicted
from coterie.config import options
from coterie.data.draws import VALIDATION
from coterie.engines.in_process import InProcess
from coterie.methods.fit import fit
from coterie.models import linear_regression
from coterie.protocol import Ask, Sum
from coterie.registry import METHODS
from coterie.runs.fit import fit_run
from sites import Sites, planted_table, written


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return written(tmp_path_factory.mktemp("sites"), planted_table(), "who", target="y", few_shot=5)


@pytest.fixture(scope="module")
def both(sites: Sites) -> tuple[coterie.Clients, coterie.Clients]:
    rows = coterie.read(sites.pooled, client="who", target="y", new_clients=0.2)
    return coterie.read(sites.summaries, new_clients=0.2), rows


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("fedavg", {"training": {"proximal": 0.2, "exact": True}}),
        ("ifca", {"clusters": {"n_clusters": 2, "n_init": 3}}),
        ("local", {}),
        ("shrunk", {}),
        ("representation", {"prior": {"rank": 1}}),
        ("mixed", {"mixed": {"slopes": ["age"]}}),
    ],
)
def test_predictions_and_scores_are_those_of_the_rows(
    sites: Sites, both: tuple[coterie.Clients, coterie.Clients], tmp_path: Path, method: str, more: dict[str, Any]
) -> None:
    """In the units of the target, whose standard deviation is about 25."""
    chosen = options({"method": method, **more})
    fitted = []
    for name, clients in zip(("sums", "rows"), both, strict=True):
        fitted.append(fit_run(tmp_path / name, chosen, clients, "", every=1e9, watch=None, begun=lambda said: None)[0])
    ours, rows = fitted
    for one, other in zip(ours.scores, rows.scores, strict=True):
        for score in ("train", "test", "new_clients", "test_r2", "new_clients_r2", "new_clients_unlabelled"):
            assert getattr(one, score) == pytest.approx(getattr(other, score), abs=1e-8), (one.label, score)
    assert set(rows.per_client) - set(ours.per_client) == {
        "coverage"
    }  # of which rows lie in intervals, sums say nothing
    for column, value in rows.per_client.items():
        if column == "coverage":
            continue
        np.testing.assert_allclose(ours.per_client[column], value, atol=1e-8, err_msg=column)
    found = [predicted(coterie.load(tmp_path / name), sites.pooled)[0]["prediction"] for name in ("sums", "rows")]
    np.testing.assert_allclose(*(column.to_numpy() for column in found), atol=1e-8)


def test_rows_that_a_client_draws_itself_have_the_sums_of_those_it_would_have_drawn(
    both: tuple[coterie.Clients, coterie.Clients],
) -> None:
    """Losses on validation rows, which are drawn on the client; also of some of the clients, and of changed rows."""
    shared = {"model": linear_regression(7), "penalties": (0.1, 1.0), "share": VALIDATION, "seed": torch.tensor(0)}
    ours, rows = (
        InProcess(clients.train.at_least(20).changed(lambda x: x / 10)).ask(Ask(try_penalties, shared, {"loss": Sum()}))
        for clients in both
    )
    assert ours["loss"].tolist() == pytest.approx(rows["loss"].tolist(), rel=1e-9)


@pytest.mark.parametrize(
    "method", sorted(set(METHODS) - {"fedavg", "ifca", "local", "shrunk", "representation", "mixed"})
)
def test_methods_that_look_at_single_rows_are_refused(
    both: tuple[coterie.Clients, coterie.Clients], method: str
) -> None:
    with pytest.raises(ConfigError, match=f"--method {method} needs rows"):
        fit(both[0], options({"method": method}))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"training": {"batch_size": 4}}, "training.batch_size"),
        ({"clusters": {"resample": 4}}, "clusters.resample"),
        ({"model": {"degree": 2}}, "model.degree"),
        ({"model": {"hidden": [4]}}, "a network"),
    ],
)
def test_options_that_look_at_single_rows_are_refused(
    both: tuple[coterie.Clients, coterie.Clients], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=f"{what} needs rows"):
        fit(both[0], options({"method": "ifca", **more}))


def test_how_certain_clusters_are_is_not_made_up(both: tuple[coterie.Clients, coterie.Clients]) -> None:
    """Standard errors of margins take fourth powers of residuals, which sums of products do not tell."""
    fitted = fit(both[0], options({"method": "ifca", "baselines": False}))
    assert fitted.models.placed.margin_error.isnan().all()
    assert fitted.models.results(fitted)["uncertain_clients"] is None
    assert "certain" not in fitted.models.clients(fitted)
    assert "how certain clusters are is not known" in fitted.warnings[0]


def test_estimators_score_sums_and_predict_rows_only(both: tuple[coterie.Clients, coterie.Clients]) -> None:
    model = coterie.RandomEffects(covariance="diagonal").fit(both[0])
    assert model.score(both[0]) == pytest.approx(model.score(both[1]), abs=1e-8)
    assert len(model.predict(both[1])) == both[1].test.layout.n_rows
    with pytest.raises(ConfigError, match="a value for every row needs rows"):
        model.predict(both[0])
