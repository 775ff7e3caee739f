# SPDX-License-Identifier: Apache-2.0
"""The report's table of coefficients: heads, numbers, and what is said of it."""

from typing import Any

import pytest

from coterie.documents import checked
from coterie.errors import RunError
from coterie.registry import METHODS
from coterie.report.coefficients import coefficient_table, coefficients
from coterie.report.run_document import Coefficients
from coterie.report.run_folder import Run

NAMES = ["(intercept)", "<age>"]


def found(kind: str, values: list[list[float]], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "of": "cost", "names": NAMES, "values": values, "total": 2, "baselines": [], **more}


@pytest.mark.parametrize(
    ("said", "head"),
    [
        (found("one", [[1], [2]]), ["coefficient"]),
        (found("clusters", [[1, 2, 3], [4, 5, 6]]), ["cluster 0", "cluster 1", "cluster 2"]),
        (found("spread", [[1, 2], [3, 0]]), ["common model", "std. dev. between clients"]),
        (
            found("directions", [[1, 2, 3], [4, 5, 6]], shares=[0.75, 0.25]),
            ["common model", "direction 1 (75.0\u00a0%)", "direction 2 (25.0\u00a0%)"],
        ),
    ],
)
def test_columns_are_what_was_fitted(said: dict[str, Any], head: list[str]) -> None:
    checked(Coefficients, said, "run.json", "")
    table = coefficient_table(said)
    assert table is not None
    assert [name for name, _ in table.head] == head
    assert all(len(cells) == len(head) for _, cells in table.rows)


def test_rows_have_four_digits_of_their_largest_number_and_names_are_escaped() -> None:
    said = found("spread", [[1234.5678, 0.0], [-0.0220812, 0.00001]], baselines=["ward=a"], total=100)
    run = Run("r", {"results": {"coefficients": said}}, {}, {})
    table, body = coefficient_table(said), coefficients(run)
    assert table is not None
    assert body is not None
    assert table.rows == [("(intercept)", ["1235", "0"]), ("<age>", ["\u22120.02208", "0.00001"])]
    assert "&lt;age&gt;" in body.body
    assert "<age>" not in body.body
    assert "ward=a" in body.body
    assert "2 of 100 rows" in body.body


def test_what_does_not_go_together_is_refused() -> None:
    for wrong in (found("one", [[1, 2], [3, 4]]), found("spread", [[1, 2]]), found("directions", [[1, 2], [3, 4]])):
        with pytest.raises(RunError):
            checked(Coefficients, wrong, "run.json", "")


def test_reports_of_linear_models_have_the_section_and_others_leave_it_out() -> None:
    for name in ("ifca", "moment-descent", "fedavg", "shrunk", "representation"):
        assert "coterie.report.coefficients:coefficients" in METHODS[name].sections
    assert coefficients(Run("r", {"results": {"coefficients": None}}, {}, {})) is None
