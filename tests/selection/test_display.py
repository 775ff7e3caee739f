# SPDX-License-Identifier: Apache-2.0
"""How comparisons and fitted estimators show themselves."""

import numpy as np
import pytest

import coterie
from coterie.runs.screen import out
from coterie.runs.show import show_comparison
from coterie.selection.text import answer

_BAD = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def clients() -> coterie.Clients:
    draw = np.random.default_rng(0)
    x, owner = draw.normal(size=(600, 2)), draw.integers(0, 20, 600)
    y = x @ [1.0, -1.0] + draw.normal(0, 1.5, 20)[owner] + draw.normal(size=600)
    names = [_BAD, "weight"]
    return coterie.from_arrays(x, y, owner.astype(str), feature_names=names)


def test_a_comparison_shows_headline_and_table(clients: coterie.Clients) -> None:
    found = coterie.compare(clients, quick=True, structures=["shrunk", "local"])
    text, page = repr(found), found._repr_html_()
    with out.capture() as shown:
        show_comparison(found, None)
    for said in (text, page, shown.get()):
        assert "own intercepts" in said  # the same in text, table and report
    assert text.startswith(answer(found).headline)
    assert "* shrunk" in text
    assert "nats, the log-likelihood of a held-out row" in text
    assert "Setting: of all that were tried" in text
    assert page.count("<tr>") == 1 + len(found.structures)
    assert "nats per row: the log-likelihood of a held-out row" in shown.get()


def test_names_in_a_comparison_are_only_text(clients: coterie.Clients) -> None:
    from dataclasses import replace

    found = replace(coterie.compare(clients, quick=True, structures=["global"]), target=_BAD)
    assert "<script>" not in found._repr_html_()


def test_a_fitted_estimator_shows_its_scores(clients: coterie.Clients) -> None:
    model = coterie.Local(penalty=1.0)
    assert repr(model) == "Local(penalty=1.0)"
    assert "Local" in model._repr_html_()
    model.fit(clients)
    assert repr(model).splitlines()[:2] == [
        "Local(penalty=1.0)", "fitted to 20 clients, 2 features, regression of 'target'",
    ]  # fmt: skip
    assert f"{model.scores_['local'].test:.4g}" in repr(model)
    model.schema_ = model.schema_.model_copy(update={"target": _BAD})
    assert "<script>" not in model._repr_html_()
