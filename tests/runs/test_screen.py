# SPDX-License-Identifier: Apache-2.0
"""What is said of a run on a federation while it is under way."""

from io import StringIO
from threading import Event, active_count

import pytest
from rich.console import Console

from coterie.engines.in_process import Round
from coterie.runs import screen
from coterie.runs.screen import Follow, following, progress


def ended(number: int) -> Round:
    return Round(run=0, round=number, seconds=1.0, participants=4, bytes_up=1, bytes_down=1)


def test_a_line_tells_what_is_asked_and_how_long_it_will_take() -> None:
    now = 100.0
    follow = Follow(clock=lambda: now)
    assert str(follow) == "waiting for the nodes"
    follow.message("scaling sums")
    assert str(follow) == "message 1: scaling sums"
    follow.round("prepare", ended(1), 1)
    assert str(follow) == "message 1: scaling sums"  # a phase of one round needs no number
    for number in (1, 2, 3):
        follow.message("assign and train")
        now += 6.0
        follow.round("fit", ended(number), 10)
    assert str(follow) == "message 4: assign and train; fit: round 3 of 10, about 42 s left"  # 7 rounds of 6 s
    follow.round("fit", ended(10), 10)
    assert str(follow) == "message 4: assign and train; fit: round 10 of 10"


def test_lines_come_from_time_to_time_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before, told = active_count(), Event()

    def hear(line: str) -> None:
        if line == "message 1: assign and train":
            told.set()

    monkeypatch.delenv(screen.QUIET, raising=False)
    monkeypatch.setattr(screen.err, "print", hear)
    with following(every=0.001) as follow:
        follow.message("assign and train")
        assert told.wait(60)
    assert active_count() == before  # nobody speaks after the run


def test_a_fit_tells_its_rounds_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before, told = active_count(), Event()

    def hear(line: str) -> None:
        if line == "fit: round 3 of 10":
            told.set()

    monkeypatch.delenv(screen.QUIET, raising=False)
    monkeypatch.setattr(screen.err, "print", hear)
    with progress(every=0.001) as watch:
        assert watch is not None
        watch("fit", ended(3), 10)
        assert told.wait(60)
    assert active_count() == before


def test_nothing_is_told_when_quiet_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(screen.QUIET, "1")
    before = active_count()
    with progress(every=0.001) as watch, following(every=0.001) as follow:
        assert watch is None
        follow.message("assign and train")
        assert active_count() == before  # nobody who could speak


def test_bars_count_messages_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(screen.QUIET, raising=False)
    screened = StringIO()
    terminal = Console(force_terminal=True, width=120, file=screened)
    monkeypatch.setattr(screen, "err", terminal)
    with following() as follow:
        for number in (1, 2):
            follow.message("assign and train")
            follow.round("fit", ended(number), 3)
    shown = screened.getvalue()
    assert "messages" in shown
    assert "2/?" in shown
    assert "assign and train" in shown
    assert "2/3" in shown
