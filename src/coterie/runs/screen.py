# SPDX-License-Identifier: Apache-2.0
"""The screen: results go to stdout, progress and words to stderr."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from coterie.engines.in_process import Round
    from coterie.methods.session import Watch

__all__ = ["complain", "err", "out", "progress", "warn"]

_PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}  # names are names
out, err = Console(**_PLAIN), Console(stderr=True, **_PLAIN)


def warn(sentences: list[str]) -> None:
    """Say what a user should know."""
    for said in sentences:
        err.print(f"warning: {said}")


@contextmanager
def progress() -> "Iterator[Watch | None]":
    """Show a bar per phase on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    if not err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=err) as bar:
        tasks: dict[str, TaskID] = {}

        def watch(phase: str, done: "Round", total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total, said="")
            completed = min(done.round if total > 1 else 1, total)
            bar.update(tasks[phase], completed=completed, total=total, said=_said(done.info))

        yield watch


def _said(info: Mapping[str, Any]) -> str:
    """What a round says beside its bar."""
    if "movement" in info:
        moved = sorted(info["movement"])
        return f"moment descent: {len(moved)} anchors, moved by {moved[len(moved) // 2]:.3g}"
    said = f"loss {info['loss']:.4g}" if "loss" in info else ""
    if "sizes" in info:
        said += f"  sizes {' '.join(map(str, info['sizes']))}"
    return said


def complain(message: str, hint: str) -> None:
    """Say what is wrong, and the way out."""
    err.print(f"error: {message}")
    if hint:
        err.print(f"hint: {hint}")
