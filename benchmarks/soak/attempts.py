# SPDX-License-Identifier: Apache-2.0
"""One attempt to destroy something, and what came of it: `equal`, `refused`, or the fault in a word."""

import random
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.cases import CASES, DATA, RUN, Case, write_data
from benchmarks.soak.children import Ended, learn_modules, start
from benchmarks.soak.content import content

__all__ = ["GOOD", "Place"]

GOOD = ("equal", "refused")
_PREDICT = ["predict", RUN, f"../{DATA}"]
_MOST = 3  # kills of one command


@dataclass
class Place:
    """A folder for attempts, with what commands give that nobody disturbs."""

    folder: Path
    whole: dict[str, dict[str, str]] = field(default_factory=dict)  # case -> what its folder holds
    took: dict[str, Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_data(self.folder / DATA)
        here = self.clean()
        learn_modules([CASES["fedavg"].words, CASES["report"].words, _PREDICT], here)
        learn_modules([CASES["compare"].words], self.clean())

    def clean(self, name: str = "here") -> Path:
        """An empty folder beside the data."""
        here = self.folder / name
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        return here

    def know(self, name: str) -> Case:
        """Run a case without trouble, the first time it is asked for."""
        case = CASES[name]
        if name not in self.whole:
            here = self.clean()
            if case.before is not None:
                _fine(start(case.before, here).wait())
            self.took[name] = _fine(start(case.words, here).wait())
            self.whole[name] = content(here)
            shutil.rmtree(self.folder / f"whole-{name}", ignore_errors=True)
            here.rename(self.folder / f"whole-{name}")
        return case

    # -- kills --------------------------------------------------------------------------------------------------------
    def kill(self, name: str, how: str, draw: random.Random) -> tuple[str, int]:
        """Kill a command, go on, perhaps kill that too, and let it end.  -> what came of it, number of kills"""
        case, took = self.know(name), self.took[name]
        here = self.clean()
        if case.before is not None:
            _fine(start(case.before, here).wait())
            (here / RUN / "report.html").unlink()
        words, kills = case.words, 0
        while kills < _MOST and (kills == 0 or draw.random() < 0.4):
            if how == "random":
                done = start(words, here).wait(kill_after=draw.uniform(0.0, took.seconds))
            else:
                done = start(words, here, kill_at=draw.randint(1, max(1, took.operations))).wait()
            if done.code is not None:  # it ended before
                break
            kills += 1
            words = draw.choice(case.again)
            if words[0] == "resume" and not (here / RUN / "run.json").exists():
                words = case.words
        done = start(words, here).wait()
        if words[0] == "compare" and "is not empty" in done.err:  # it had ended
            done = start(["report", RUN], here).wait()
        return _judged(done, content(here), self.whole[name]), kills

    # -- flipped bits -------------------------------------------------------------------------------------------------
    def flip(self, name: str, what: str, draw: random.Random) -> str:
        """Flip a bit of a file, and let it be read: by `predict` or `report` after the end, by `resume` in the middle."""
        case = self.know(name)
        here = self.clean()
        shutil.rmtree(here)
        shutil.copytree(self.folder / f"whole-{name}", here)
        words, wanted = ([*_PREDICT] if what == "predict" else ["report", RUN]), self.whole[name]
        if what == "resume":
            here = self.clean()
            while True:  # until it is killed in its middle
                done = start(case.words, here, kill_at=draw.randint(8, self.took[name].operations - 12)).wait()
                if done.code is None and (here / RUN / "run.json").exists():
                    break
                here = self.clean()
            words = ["resume", RUN]
        before = start(words, here).wait() if what != "resume" else None
        page = (here / RUN / "report.html").read_bytes() if what == "report" else b""
        _flip(here / RUN, draw)
        done = start(words, here).wait()
        if done.code == 2 and _one_sentence(done.err):
            return "refused"
        if done.code != 0:
            return "crashed"
        if what == "resume":
            return "equal" if content(here) == wanted else "SILENT"
        now = (here / RUN / "report.html").read_bytes() if what == "report" else b""
        return "equal" if before is not None and (done.out, now) == (before.out, page) else "SILENT"

    # -- two processes ------------------------------------------------------------------------------------------------
    def pair(self, name: str, what: str, draw: random.Random) -> str:
        """Let two commands loose on one folder; afterwards it must be as if one of them had been alone."""
        case = self.know(name)
        here = self.clean()
        first, second = case.words, {"same": case.words, "report": ["report", RUN], "resume": ["resume", RUN]}[what]
        if what == "resume":
            start(first, here, kill_at=draw.randint(8, self.took[name].operations - 12)).wait()
        one = start(first, here, tag="one")
        if draw.random() < 0.6:  # else at the same time
            time.sleep(draw.uniform(0.0, 0.8 * self.took[name].seconds))
        two = start(second, here, tag="two")
        ended = [one.wait(), two.wait()]
        if any(done.code not in (0, 2) or (done.code == 2 and not _one_sentence(done.err)) for done in ended):
            return "crashed"
        if all(done.code for done in ended):  # each has seen the other in its way, at most
            _fine(start(case.words, here).wait())
        return "equal" if content(here) == self.whole[name] else "DESTROYED"


def _fine(done: Ended) -> Ended:
    if done.code != 0:
        raise RuntimeError(f"ended with {done.code}: {done.err}")
    return done


def _judged(done: Ended, found: dict[str, str], wanted: dict[str, str]) -> str:
    if done.code != 0:
        return f"crashed: {done.err.strip().splitlines()[-1:]}"
    if found.keys() - wanted.keys():
        return f"LEFTOVER: {sorted(found.keys() - wanted.keys())[0]}"
    return "equal" if found == wanted else f"DIFFERENT: {[k for k in wanted if found.get(k) != wanted[k]]}"


def _one_sentence(err: str) -> bool:
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    return len(said) == 1 and "Traceback" not in err


def _flip(folder: Path, draw: random.Random) -> None:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "report.html" and p.stat().st_size]
    path = draw.choice(files)
    held = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(held))
    held[bit // 8] ^= 1 << bit % 8
    path.write_bytes(held)
