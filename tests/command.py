# SPDX-License-Identifier: Apache-2.0
"""The command line, called in this process (fast) or in one of its own (real)."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from coterie.cli.commands import main


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def coterie(*words: object) -> Said:
    """Call the command line here."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["coterie", *map(str, words)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    assert isinstance(code, int)
    return Said(code, out.getvalue(), err.getvalue())


def process(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start the command line as users do."""
    return subprocess.run(
        [sys.executable, "-m", "coterie", *map(str, words)],
        cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def refused(*words: object) -> tuple[str, str]:
    """Call a command that must be refused: exit 2, one sentence, one hint, and nothing else.  -> sentence, hint"""
    said = coterie(*words)
    assert said.code == 2, said
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 2, said.err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    for noise in ("Traceback", "Arrow", "arrow", "Errno", "pydantic", "0x", "<class"):
        assert noise not in said.err
    return lines[0].removeprefix("error: "), lines[1].removeprefix("hint: ")
