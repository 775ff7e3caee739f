# SPDX-License-Identifier: Apache-2.0
"""Run studies and write results/NAME.json: `make results`, or `python -m tools.results [NAME ...]`.

One study after the other, one thread, lowest priority. It may be stopped at any time, also by force: what a study has
finished (its tasks, or its checkpoints) is kept in a folder of its own under .results (COTERIE_RESULTS names another), and
the next call goes on from there. The file appears when the study has ended, whole. A result is of one state of the sources:
what was begun with others is only continued if asked to (--mixed), and then all of them are named.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from coterie.files import replace_file
from coterie.studies.ledger import VARIABLE
from tools.plan import RESULTS, ROOT, Entry, plan
from tools.reduce import REDUCE

__all__ = ["main", "run"]

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "coterie")
DIGITS = 6  # significant ones, of what is kept
_BEAT = 20.0  # seconds between two notes of the time that was spent
_PASSING = {"seconds_all"}  # fields of rows that say how long this process took


def main() -> None:
    """Run what is asked for, or what is missing."""
    asked = _arguments()
    entries = plan()
    unknown = [name for name in asked.names if name not in entries]
    if unknown:
        sys.exit(f"error: there is no result {unknown[0]}\nhint: `python -m tools.results --list` shows what there is")
    if asked.list:
        _list(entries)
        return
    os.nice(19)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    torch.set_num_threads(1)
    names = asked.names or [name for name in entries if not (RESULTS / f"{name}.json").exists()]
    failed = [name for name in names if not run(entries[name], jobs=asked.jobs, fresh=asked.fresh, mixed=asked.mixed)]
    if failed:
        sys.exit(f"error: no result of {', '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.results", description="Run studies and write results/.")
    parser.add_argument("names", nargs="*", help="which results; those that are missing by default")
    parser.add_argument("--list", action="store_true", help="say what there is, what is missing, and what it costs")
    parser.add_argument("--fresh", action="store_true", help="forget what was begun")
    parser.add_argument("--mixed", action="store_true", help="go on with what was begun with other sources")
    parser.add_argument("--jobs", type=int, default=1, help="processes of a study")
    return parser.parse_args()


def _list(entries: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        begun = list((_cache(entry) / "tasks").glob("*.json"))
        there = (
            "there" if (RESULTS / f"{name}.json").exists() else f"begun ({len(begun)} tasks)" if begun else "missing"
        )
        print(f"{name:34} {there:18} {entry.cost:>12}  {entry.paper}")


# -- one study --------------------------------------------------------------------------------------------------------
def run(entry: Entry, *, jobs: int = 1, fresh: bool = False, mixed: bool = False, results: Path = RESULTS) -> bool:
    """Run a study to its end and write its file; say whether it was written."""
    cache = _cache(entry)
    if fresh:
        shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache) as alone:
        if not alone:
            return _refuse(entry, "it is being run by another process")
        parts = _Parts(cache / "parts.json", entry.command)
        if parts.command != entry.command:
            return _refuse(entry, "it was begun with another command; --fresh begins again")
        if not mixed and parts.others():
            return _refuse(entry, "it was begun with other sources; --fresh begins again, --mixed goes on")
        print(f"{datetime.now():%H:%M} {entry.name}: {entry.command}", file=sys.stderr, flush=True)
        with parts.counting():
            document = _printed(entry, cache, jobs)
        if document is None:
            return _refuse(entry, "the study ended with an error")
        results.mkdir(exist_ok=True)
        replace_file(results / f"{entry.name}.json", _written(entry, document, parts).encode())
        shutil.rmtree(cache / "tasks", ignore_errors=True)
    shutil.rmtree(cache, ignore_errors=True)
    return True


def _refuse(entry: Entry, why: str) -> bool:
    print(f"{entry.name}: {why}", file=sys.stderr, flush=True)
    return False


def _cache(entry: Entry) -> Path:
    return Path(os.environ.get("COTERIE_RESULTS", ROOT / ".results")) / entry.name


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Hold a lock that the system takes back when the process ends, however it ends."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _printed(entry: Entry, cache: Path, jobs: int) -> dict[str, Any] | None:
    """Run the command in this process, and read the document that it prints."""
    from coterie import cli

    os.environ[VARIABLE] = str(cache)
    sys.argv = [*entry.words, *_jobs(entry, jobs)]
    text = io.StringIO()
    try:
        with redirect_stdout(text), _stoppable():
            cli.main()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code >= 128:  # a signal: the others are not begun either
            raise
        if end.code:
            return None
    except Exception:
        traceback.print_exc()
        return None
    document: dict[str, Any] = json.loads(text.getvalue())
    return document


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let signals end the process in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _jobs(entry: Entry, jobs: int) -> list[str]:
    """Say how many processes, to studies that can be told."""
    import typer

    from coterie import cli

    group: Any = typer.main.get_command(cli.app)
    for word in entry.words[1:]:
        group = getattr(group, "commands", {}).get(word, group)
    return ["--jobs", str(jobs)] if any("--jobs" in option.opts for option in group.params) else []


# -- the time that was spent ------------------------------------------------------------------------------------------
class _Parts:
    """When a study ran, with which sources, and how long: one part for each time that it was begun."""

    def __init__(self, path: Path, command: str) -> None:
        said: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"command": command, "parts": []}
        )
        self._path = path
        self.command: str = said["command"]
        self.parts: list[dict[str, Any]] = said["parts"]
        self.now = {**_sources(), "started": datetime.now(UTC).isoformat(timespec="seconds"), "wall": 0.0, "cpu": 0.0}

    def others(self) -> bool:
        """Say whether an earlier part had other sources."""
        return any(part["source"] != self.now["source"] for part in self.parts)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Note the time every now and then, so that little is lost when the process is killed."""
        self.parts.append(self.now)
        wall, cpu, over = time.perf_counter(), _cpu(), threading.Event()

        def note() -> None:
            self.now |= {"wall": time.perf_counter() - wall, "cpu": _cpu() - cpu}
            replace_file(self._path, json.dumps({"command": self.command, "parts": self.parts}).encode())

        def beat() -> None:
            while not over.wait(_BEAT):
                note()

        note()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            note()


def _cpu() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@cache
def _sources() -> dict[str, Any]:
    """Which state of the package runs: its commit, whether files differ from it, and a hash of the files."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    commit = _git("log", "-1", "--format=%h", "--", "src")
    return {
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain", "--", "src")),
        "source": total.hexdigest()[:12],
    }


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


# -- the file ---------------------------------------------------------------------------------------------------------
def _written(entry: Entry, document: dict[str, Any], parts: _Parts) -> str:
    """Lay the file out: what was run where and when, then settings, and a line for every row."""
    states = [{key: part[key] for key in ("commit", "dirty", "source")} for part in parts.parts]
    before = [state for i, state in enumerate(states[:-1]) if state not in states[:i] and state != states[-1]]
    head = {
        "name": entry.name,
        "command": entry.command,
        "seed": document["settings"].get("seed"),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "processor": {"model": _processor(), "vectors": torch.backends.cpu.get_cpu_capability()},
        "threads": torch.get_num_threads(),
        **states[-1],
        **({"begun_with": before} if before else {}),
        "started": parts.parts[0]["started"],
        "seconds": {kind: round(sum(part[kind] for part in parts.parts), 1) for kind in ("cpu", "wall")},
        "settings": document["settings"],
    }
    if entry.reduce:
        document = REDUCE[entry.reduce](document)
    lines = [f"  {json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in head.items()]
    for key in ("rows", "summary"):
        if document.get(key) is not None:
            kept = [{k: v for k, v in row.items() if k not in _PASSING} for row in document[key]]
            inside = ",\n".join(f"    {json.dumps(rounded(row))}" for row in kept)
            lines.append(f"  {json.dumps(key)}: [\n{inside}\n  ]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def rounded(value: Any) -> Any:
    """Round numbers to a few significant digits, at any depth."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    return value


def _processor() -> str:
    """Name the processor, as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
