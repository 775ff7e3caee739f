# SPDX-License-Identifier: Apache-2.0
"""One account of what a run has asked: every question's cost is reserved before it is put, and the budget is never exceeded.

It is kept in a file, written before a question leaves. A run that is continued puts its last question again: where the same
noise is added to the same answer, that costs nothing.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from coterie.documents import Said, checked, parsed
from coterie.errors import RunError
from coterie.files import make_folder, owner_only, replace_file
from coterie.limits import MOST_NAME, MOST_STEPS
from coterie.privacy.accountant import Release, epsilon_of
from coterie.privacy.bounds import check_noise, word_of
from coterie.protocol import Ask

__all__ = ["Account", "forget_secret", "run_secret"]

_FILE, _SECRET = "account.json", "noise.key"
_AGAIN = "start the run again in another folder; what was spent is spent"
_WORD = 32  # hexadecimal digits of a question


class _Line(Said):
    purpose: Annotated[str, Field(max_length=MOST_NAME)]
    multiplier: Annotated[float, Field(gt=0)]
    sampling: Annotated[float, Field(gt=0, le=1)]
    times: Annotated[int, Field(ge=1, le=MOST_STEPS)]


class _Book(Said):
    epsilon: Annotated[float, Field(gt=0)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    spent: Annotated[list[_Line], Field(max_length=MOST_STEPS)]
    asked: Annotated[list[Annotated[str, Field(max_length=_WORD)]], Field(max_length=MOST_STEPS)]


class Account:
    """What clients' privacy has cost, and may.

    Parameters
    ----------
    epsilon, delta : float
        The budget.
    path : Path, optional
        Where it is kept; one that is there already is continued.
    replays : bool
        Whether a question that is put again gets the same answer, with the same noise.
    """

    def __init__(self, epsilon: float, delta: float, path: Path | None = None, *, replays: bool = False) -> None:
        self.epsilon, self.delta, self.path, self.replays = epsilon, delta, path, replays
        self.lines: Counter[tuple[str, Release]] = Counter()
        self._asked: dict[str, None] = {}
        if path is not None and path.exists():
            self._read(path)

    @property
    def spent(self) -> float:
        """Epsilon of all that was asked."""
        return epsilon_of(self._releases(self.lines), self.delta)

    def admit(self, asks: Mapping[int, Ask], rows: bytes = b"") -> dict[int, Ask]:
        """Reserve what questions to some rows cost, all of a message or none of it; they say what that is.

        Raises
        ------
        RunError
            A question has no bound for what a client adds, or costs more than is left.
        """
        told = {at: ask for at, ask in asks.items() if ask.fold}
        for ask in told.values():
            check_noise(ask)
        out, lines, asked, before = dict(asks), Counter(self.lines), dict(self._asked), self.spent
        for at, ask in told.items():
            assert ask.noise is not None
            word = hashlib.sha256(rows + word_of(ask)).hexdigest()[:_WORD]
            if self.replays and word in asked:
                out[at] = replace(ask, epsilon=None)
                continue
            asked[word] = None
            lines[ask.noise.purpose, Release(ask.noise.multiplier, ask.noise.sampling)] += 1
            after = epsilon_of(self._releases(lines), self.delta)
            if after > self.epsilon:
                raise RunError(
                    f"the question for {ask.noise.purpose} would spend an epsilon of {after:.4g}, and the budget is "
                    f"{self.epsilon:g}",
                    "every question that is not in the plan is refused; start anew with a larger privacy.epsilon",
                )
            out[at] = replace(ask, epsilon=max(after - before, 1e-12))
            before = after
        if lines != self.lines:
            self.lines, self._asked = lines, asked
            self._write()
        return out

    def told(self) -> dict[str, Any]:
        """What was spent, question by question; `alone` is what each kind would cost if nothing else had been asked."""
        purposes = dict.fromkeys(purpose for purpose, _ in self.lines)
        questions = []
        for purpose in purposes:
            own = Counter({key: n for key, n in self.lines.items() if key[0] == purpose})
            first = next(iter(own))[1]
            alone = epsilon_of(self._releases(own), self.delta)
            questions.append(
                {"purpose": purpose, "times": sum(own.values()), "multiplier": first.multiplier, "sampling": first.sampling,
                 "alone": alone}
            )  # fmt: skip
        return {"epsilon": self.epsilon, "delta": self.delta, "spent": self.spent, "questions": questions}

    @staticmethod
    def _releases(lines: Mapping[tuple[str, Release], int]) -> dict[Release, int]:
        found: Counter[Release] = Counter()
        for (_, one), n in lines.items():
            found[one] += n
        return dict(found)

    def _read(self, path: Path) -> None:
        found = checked(_Book, parsed(path.read_bytes(), str(path), _AGAIN), str(path), _AGAIN)
        if (found.epsilon, found.delta) != (self.epsilon, self.delta):
            raise RunError(
                f"{path} is the account of another budget", "continue with the options that it was begun with"
            )
        for line in found.spent:
            self.lines[line.purpose, Release(line.multiplier, line.sampling)] += line.times
        self._asked = dict.fromkeys(found.asked)

    def _write(self) -> None:
        if self.path is None:
            return
        spent = [
            {"purpose": purpose, "multiplier": one.multiplier, "sampling": one.sampling, "times": n}
            for (purpose, one), n in self.lines.items()
        ]
        document = {"epsilon": self.epsilon, "delta": self.delta, "spent": spent, "asked": list(self._asked)}
        make_folder(self.path.parent)
        replace_file(self.path, json.dumps(document).encode())


def run_secret(folder: Path | None) -> bytes:
    """What a run's noise and lots follow from: drawn by the operating system, and kept until the run is finished."""
    if folder is None:
        return os.urandom(32)
    path = folder / "checkpoints" / _SECRET
    make_folder(path.parent)
    if not path.exists():
        with owner_only():
            replace_file(path, os.urandom(32))
    secret = path.read_bytes()
    if len(secret) != 32:
        raise RunError(f"{path} is damaged", _AGAIN)
    return secret


def forget_secret(folder: Path | None) -> None:
    """Remove it: nobody can take the noise off any more, nor continue the run."""
    if folder is not None:
        (folder / "checkpoints" / _SECRET).unlink(missing_ok=True)
