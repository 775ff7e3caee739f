# SPDX-License-Identifier: Apache-2.0
"""The screen: results go to stdout, progress and words to stderr."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from coterie.engines.in_process import Round
    from coterie.methods.session import Watch

__all__ = ["QUIET", "Follow", "complain", "err", "following", "is_quiet", "out", "progress", "warn"]

QUIET = "COTERIE_QUIET"  # in the environment

_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}  # names are names


class _Screen(Console):
    """A console that falls silent when nobody reads it any more: what is computed and written goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


out, err = _Screen(**_PLAIN), _Screen(stderr=True, **_PLAIN)


def warn(sentences: list[str]) -> None:
    """Say what a user should know."""
    for said in sentences:
        err.print(f"warning: {said}")


def is_quiet() -> bool:
    """Whether nobody wants to hear how far a command has come: `--quiet`, or COTERIE_QUIET in the environment."""
    return os.environ.get(QUIET, "") not in ("", "0")


@contextmanager
def progress(every: float = 10.0) -> "Iterator[Watch | None]":
    """Show how far a fit has come: a bar per phase on a terminal, elsewhere a line from time to time."""
    if is_quiet():
        yield None
    elif err.is_terminal:
        with _bars() as bar:
            yield _watch(bar)
    else:
        with _spoken(Follow(begins="preparing"), every) as follow:
            yield follow.round


@dataclass
class Follow:
    """How far a run has come, by what it tells."""

    begins: str = "waiting for the nodes"
    clock: Callable[[], float] = time.monotonic
    show: "Callable[[Follow], None]" = lambda self: None
    watch: "Watch | None" = None
    messages: int = 0
    asked: str = ""
    phase: str = ""
    rounds: tuple[int, int] = (0, 0)  # done, of
    since: float = field(init=False)  # when the first round of the phase had ended
    first: int = 0

    def message(self, asked: str) -> None:
        """All nodes are asked something."""
        self.messages, self.asked = self.messages + 1, asked
        self.show(self)

    def round(self, phase: str, done: "Round", total: int) -> None:
        """A round of a phase has ended."""
        if phase != self.phase:
            self.phase, self.since, self.first = phase, self.clock(), done.round
        self.rounds = (min(done.round, total), total)
        if self.watch is not None:
            self.watch(phase, done, total)

    def __str__(self) -> str:
        """One line."""
        said = [f"message {self.messages}: {self.asked}"] if self.messages else []
        done, total = self.rounds
        if self.phase and total > 1:
            far = f"{self.phase}: round {done} of {total}"
            if self.first < done < total:
                left = (self.clock() - self.since) / (done - self.first) * (total - done)
                far += f", about {left:.0f} s left"
            said.append(far)
        return "; ".join(said) or self.begins


@contextmanager
def following(every: float = 10.0) -> Iterator[Follow]:
    """Show how far a run on a federation has come: bars on a terminal, elsewhere a line from time to time."""
    if is_quiet():
        yield Follow()
        return
    if err.is_terminal:
        with _bars() as bar:
            messages = bar.add_task("messages", total=None, said="")

            def show(follow: Follow) -> None:
                bar.update(messages, completed=follow.messages, said=follow.asked)

            yield Follow(show=show, watch=_watch(bar))
        return
    with _spoken(Follow(), every) as follow:
        yield follow


@contextmanager
def _spoken(follow: Follow, every: float) -> Iterator[Follow]:
    """Say a line every so many seconds."""
    ended = Event()

    def speak() -> None:
        while not ended.wait(every):
            err.print(str(follow))

    speaker = Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield follow
    finally:
        ended.set()
        speaker.join()


def _bars() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    return Progress(*columns, console=err)


def _watch(bar: "Progress") -> "Watch":
    """Let rounds move the bar of their phase."""
    tasks: dict[str, TaskID] = {}

    def watch(phase: str, done: "Round", total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total, said="")
        completed = min(done.round if total > 1 else 1, total)
        bar.update(tasks[phase], completed=completed, total=total, said=_said(done.info))

    return watch


def _said(info: Mapping[str, Any]) -> str:
    """What a round says beside its bar."""
    if "movement" in info:
        moved = sorted(info["movement"])
        return f"moment descent: {len(moved)} anchors, moved by {moved[len(moved) // 2]:.3g}"
    if "running" in info:
        return ", ".join(info["running"])
    said = f"loss {info['loss']:.4g}" if info.get("loss") is not None else ""
    if "sizes" in info:
        said += f"  sizes {' '.join(map(str, info['sizes']))}"
    return said


def complain(message: str, hint: str) -> None:
    """Say what is wrong, and the way out."""
    err.print(f"error: {message}")
    if hint:
        err.print(f"hint: {hint}")
