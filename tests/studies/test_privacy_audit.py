# SPDX-License-Identifier: Apache-2.0
"""The audit: below what is claimed with the noise that was asked for, and above it with less noise, or without bounds."""

from typing import Any

import pytest
from scipy.stats import norm

from coterie.privacy import bounds
from coterie.privacy.gaussian import gaussian_epsilon
from coterie.studies import privacy_audit as audit

pytestmark = pytest.mark.usefixtures("counted_noise")


def lines(**changed: Any) -> list[dict[str, Any]]:
    few: dict[str, Any] = {"epsilon": (2.0, 8.0), "clients": 20, "reps": 6, "jobs": 1}
    return audit.run(audit.Settings(**{**few, **changed})).summary


def test_what_is_measured_is_below_what_is_claimed_and_without_noise_far_above() -> None:
    found = lines()
    for line in found:
        assert line["claimed"] == pytest.approx(line["epsilon"], rel=5e-3)
        if line["noise"]:
            assert line["holds"], line
            assert line["measured"] > 0.3 * line["claimed"]  # nor is it a bound that says nothing
        else:
            assert not line["holds"]
            assert line["measured"] > 3 * line["claimed"]
            assert line["right"] == 1


def test_half_the_noise_that_the_account_asks_for_is_found_out() -> None:
    assert not any(line["holds"] for line in lines(noise=0.5))


def test_clients_who_are_not_shortened_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.worker.bounded", lambda ask, reply: reply)
    assert not any(line["holds"] for line in lines(methods=("fedavg",)))
    assert bounds.bounded is not None  # it is what stood there


def test_shares_that_are_not_shortened_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shortened = bounds.bounded

    def twice(ask: Any, reply: Any) -> Any:
        return {**shortened(ask, reply), "share": 2 * reply["share"]}

    monkeypatch.setattr("coterie.engines.worker.bounded", twice)
    assert not any(line["holds"] for line in lines(methods=("ifca",)))


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
def test_the_bound_is_below_the_truth_and_near_it_with_many_canaries(mu: float) -> None:
    wrong = float(norm.cdf(-mu / 2))
    several = [audit.epsilon_below(n, round(wrong * n), n, round(wrong * n)) for n in (100, 10_000, 1_000_000)]
    truth = gaussian_epsilon(mu**2, 1e-5)
    assert several == sorted(several)
    assert several[-1] < truth
    assert several[-1] == pytest.approx(truth, rel=0.05)


def test_guessing_measures_nothing() -> None:
    assert audit.epsilon_below(1000, 500, 1000, 500) == 0
    assert audit.epsilon_below(1000, 0, 1000, 1000) == 0  # who says of all that they are there
    assert audit.epsilon_below(0, 0, 0, 0) == 0
