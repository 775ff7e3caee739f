# SPDX-License-Identifier: Apache-2.0
"""A few inputs of every target of `python -m benchmarks.fuzz`, which takes a hundred thousand: nothing escapes."""

import warnings

import pytest
from benchmarks.fuzz.__main__ import run, targets
from hypothesis import strategies as st

from coterie.errors import RunError

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_only_our_own_errors_come_out(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a stranger's numbers make numpy say
        counts, escaped = run(TARGETS[name], 25, 0)
    assert sum(counts.values()) >= 20
    assert not escaped, next(iter(escaped.items()))


def test_what_escapes_is_counted_and_shown() -> None:
    def target(value: int) -> None:
        if value % 3 == 0:
            raise RunError("no", "yes")
        if value % 3 == 1:
            raise ValueError("oops")

    counts, escaped = run((st.integers(0, 1000), target), 50, 0)
    assert min(counts["read"], counts["refused"], counts["escaped"]) > 0
    ((place, first),) = escaped.items()
    assert place.startswith("ValueError at ")
    assert "oops" in first
