# SPDX-License-Identifier: Apache-2.0
"""The soak counts what it has done, goes on where it stopped, and knows a loss when it sees one."""

import json
import os
import subprocess
import sys
from pathlib import Path


def soak(folder: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--folder", str(folder), "--cases", "fedavg", *map(str, words)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), "."]))},
    )  # fmt: skip


def test_soak_counts_goes_on_and_sees_losses(tmp_path: Path) -> None:
    done = soak(tmp_path / "s", "--kills", 2, "--flips", 2, "--pairs", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()[-3:]
    assert said[0].endswith(" kills: 0 differences or leftovers")
    assert said[1:] == ["2 flipped bits: 0 silent or crashed", "1 pairs: 0 destroyed or crashed"]
    notes = tmp_path / "s" / "attempts.jsonl"
    before = notes.read_text()
    with notes.open("a") as file:
        file.write(
            json.dumps({"kind": "pair", "number": 1, "case": "fedavg", "how": "same", "came": "DESTROYED"}) + "\n"
        )
    done = soak(tmp_path / "s", "--kills", 2, "--flips", 2, "--pairs", 2)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "2 pairs: 1 destroyed or crashed"
    assert notes.read_text().startswith(before)
