# SPDX-License-Identifier: Apache-2.0
"""Bad clients: what they do to the others, what is said of them, and the study that counts it."""

import math
import warnings
from typing import Any

import pytest

from coterie.config import options
from coterie.engines.screening import ClientWarning
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.selection import compare
from coterie.studies import bad_clients
from coterie.studies.bad_clients import METHODS, Settings
from coterie.studies.bad_replies import answering_wrongly

SMALL = Settings(clients=20, rows=40, features=3, reps=1, bad=0.05)


def fitted(method: str, attack: str | None, **training: Any) -> tuple[Fitted, str]:
    """Fit with one bad client, if any; and its name."""
    case = METHODS[method]
    clients, bad = bad_clients._clients(SMALL, case, 0, without_bad=False)
    given = options({**case.given, "method": method, "baselines": False, "training": {"rounds": 15, **training}})
    name = str(clients.names[(clients.train.keys == bad).nonzero()[0, 0]])
    if attack is None:
        return fit(clients, given), name
    with answering_wrongly(bad, attack), warnings.catch_warnings():
        warnings.simplefilter("ignore", ClientWarning)
        return fit(clients, given), name


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
@pytest.mark.parametrize("attack", ["scale back", "nan"])
def test_one_bad_client_is_named_and_does_no_harm(method: str, attack: str) -> None:
    """Its update times -100, or no number, took errors to 1e40 and NaN."""
    found, name = fitted(method, attack)
    honest, _ = fitted(method, None)
    assert found.scores[0].test == pytest.approx(honest.scores[0].test, rel=0.1)
    assert any(text.startswith(f"client '{name}' left out: ") for text in found.warnings)


@pytest.mark.parametrize("method", ["fedavg", "ifca"])
def test_honest_clients_get_the_same_with_and_without_limits(method: str) -> None:
    assert fitted(method, None)[0].scores == fitted(method, None, robust="none")[0].scores


def test_after_a_bad_answer_nobody_is_told_to_lower_the_step_size() -> None:
    found, _ = fitted("fedavg", "scale back", robust="none", rounds=600)
    (said,) = [text for text in found.warnings if "diverged" in text]
    assert "times as long as usual" in said
    assert "step_size" not in said


def test_a_step_that_is_too_large_is_still_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClientWarning)  # some clients' numbers may overflow a round before others'
        found, _ = fitted("fedavg", None, step_size=1e3, rounds=200)
    assert any("diverged: lower training.step_size" in text for text in found.warnings)


@pytest.mark.parametrize("attack", ["scale", "scale back", "nan"])
def test_a_comparison_keeps_its_answer_and_names_who_was_left_out(attack: str) -> None:
    clients, bad = bad_clients._clients(SMALL, METHODS["compare"], 0, without_bad=False)
    name = str(clients.names[(clients.train.keys == bad).nonzero()[0, 0]])
    with answering_wrongly(bad, attack), pytest.warns(ClientWarning, match=name):
        found = compare(clients, seed=0, quick=True, structures=("global", "clusters", "shrunk"))
    assert found.chosen == "clusters"
    assert any(f"'{name}'" in note for note in found.notes)


def test_the_study_holds_cells_against_fits_without_the_bad_clients() -> None:
    chosen = Settings(methods=("fedavg",), robust=("clip",), attacks=("scale back", "nan"), reps=1, jobs=1)
    outcome = bad_clients.run(chosen)
    assert [row["attack"] for row in outcome.rows] == ["nobody", "scale back", "nan"]
    assert all(row["holds"] for row in outcome.rows)
    assert outcome.rows[0]["excess"] == 0.0
    assert all(math.isfinite(row["error"]) for row in outcome.rows)
    (line,) = outcome.summary or ()
    assert line["holds"]
    assert line["broken"] is None
