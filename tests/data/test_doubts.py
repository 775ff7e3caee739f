# SPDX-License-Identifier: Apache-2.0
"""What `data check` warns of, and what it leaves in peace."""

import numpy as np
import pandas as pd
import pytest

from coterie.data.check import check

_DRAW = np.random.default_rng(0)
_N = 300
PLAIN = pd.DataFrame(
    {
        "site": _DRAW.choice(list("abcdef"), _N),
        "age": _DRAW.normal(50, 10, _N).round(1),
        "beds": _DRAW.integers(10, 900, _N),
        "ward": _DRAW.choice(["icu", "er"], _N),
        "score": _DRAW.normal(size=_N),
    }
)


def _said(frame: pd.DataFrame, target: str = "score", **how: object) -> list[str]:
    found = check(frame, client="site", target=target, **how)  # type: ignore[arg-type]
    return [f"{problem.severity}: {problem.sentence} | {problem.hint}" for problem in found.problems]


def test_nothing_is_said_of_plain_data() -> None:
    assert _said(PLAIN) == []


@pytest.mark.parametrize(
    "values",
    [np.arange(_N) + 1000, _DRAW.permutation(_N), _DRAW.choice(10**6, _N, replace=False) + 10**6],
    ids=["in order", "shuffled", "long"],
)
def test_ids_are_found(values: np.ndarray) -> None:
    (said,) = _said(PLAIN.assign(patient=values))
    assert said.startswith("warning: column 'patient' is different in (almost) every row: it looks like an id")
    assert said.endswith("--exclude patient")


def test_ids_that_are_text_are_found() -> None:
    some = PLAIN.iloc[:90].assign(patient=[f"P-{i}" for i in range(90)])
    assert any("column 'patient' is different in (almost) every row" in said for said in _said(some))


def test_copies_of_rows_are_counted() -> None:
    (said,) = _said(pd.concat([PLAIN] * 3))
    assert "600 of 900 rows (67%) repeat an earlier row exactly" in said
    few = PLAIN[["site", "ward"]].assign(score=_DRAW.integers(0, 50, _N))
    assert not any("repeat" in said for said in _said(few))  # such rows are equal by chance


def test_classes_and_categories_that_differ_in_case_only() -> None:
    said = _said(PLAIN.assign(out=_DRAW.choice(["No ", "no", "YES"], _N), ward=PLAIN.ward.replace("er", "ICU")), "out")
    assert any("classes of the target differ in case or blanks only: 'No ', 'no'" in one for one in said)
    assert any("categories of column 'ward' differ in case or blanks only: 'ICU', 'icu'" in one for one in said)


def test_dates_that_are_taken_for_categories() -> None:
    days = pd.Timestamp("2024-03-01") + pd.to_timedelta(_DRAW.integers(0, 40, _N), "D")
    for form in ("%d.%m.%Y", "%m/%d/%y", "%d %b %Y"):
        said = _said(PLAIN.assign(on=days.strftime(form)))
        assert any("column 'on' holds dates" in one and "--exclude on" in one for one in said), form


def test_rare_classes() -> None:
    said = _said(PLAIN.assign(out=np.where(np.arange(_N) % 60 == 0, "died", "lived")), "out")
    assert any("'died' has 1.7% of the rows" in one for one in said)


def test_counts_and_skewed_targets() -> None:
    (said,) = _said(PLAIN.assign(falls=_DRAW.poisson(8, _N)), "falls")
    assert "counts: --outcome poisson or negative-binomial may fit better" in said
    few = _said(PLAIN.assign(falls=_DRAW.poisson(1, _N)), "falls")
    assert any(
        "taken for classes" in one and "counts: --outcome poisson or negative-binomial may fit better" in one
        for one in few
    )
    (said,) = _said(PLAIN.assign(cost=np.exp(1.5 * _DRAW.normal(size=_N))), "cost")
    assert "positive and skewed: --outcome log-normal or gamma" in said
    assert _said(PLAIN.assign(year=_DRAW.integers(1990, 2020, _N)), "year") == []


def test_rows_in_the_order_of_time() -> None:
    (said,) = _said(PLAIN.assign(visit=PLAIN.groupby("site").cumcount()))
    assert said.startswith("note: column 'visit' grows from row to row within clients")
    assert "--split time" in said
    said_of_dates = _said(PLAIN.assign(on=pd.Timestamp("2024-03-01") + pd.to_timedelta(_DRAW.permutation(_N), "D")))
    assert any("column 'on' says when" in one and "--split time:on" in one for one in said_of_dates)
