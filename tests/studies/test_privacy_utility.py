# SPDX-License-Identifier: Apache-2.0
"""The study of what a budget leaves: its lines, and that they are judged without noise."""

from typing import Any

import pytest

from coterie.studies import privacy_utility as utility

pytestmark = pytest.mark.usefixtures("counted_noise")


def test_every_case_has_a_line_for_each_budget() -> None:
    found = utility.run(utility.Settings(epsilon=(8.0,), clients=300, reps=1, jobs=1, seed=5))
    lines: dict[tuple[str, Any], dict[str, Any]] = {(one["case"], one["epsilon"]): one for one in found.summary}
    assert len(lines) == 2 * len(utility.CASES)
    for (name, epsilon), line in lines.items():
        assert (line["spent"] is None) == (epsilon is None)
        assert line["spent"] is None or line["spent"] <= epsilon
        assert (line["rmse"] is None) == name.startswith("compare")
    for epsilon in (8.0, None):
        assert lines["fedavg", epsilon]["rmse"] == pytest.approx(0.5, abs=0.03)
        assert lines["ifca, 3 groups", epsilon]["right"] == 1
        assert lines["compare, 3 groups", epsilon]["chosen"] == "clusters 3"
    noisy, plain = (lines["shrunk", epsilon]["rmse"] for epsilon in (8.0, None))
    assert plain - 0.01 < noisy < 1.2 * plain
