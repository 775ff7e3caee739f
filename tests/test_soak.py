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
    notes = tmp_path / "attempts.jsonl"
    lost = {"kind": "pair", "number": 0, "case": "fedavg", "how": "same", "came": "DESTROYED"}
    notes.write_text(json.dumps(lost) + "\n")
    done = soak(tmp_path, "--kills", 1, "--flips", 1, "--pairs", 2)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout.splitlines()[-3:]
    assert said[0].endswith(" kills: 0 differences or leftovers")
    assert said[1:] == ["1 flipped bits: 0 silent or crashed", "2 pairs: 1 destroyed or crashed"]
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    assert found[0] == lost
    assert {one["came"] for one in found[1:]} <= {"equal", "refused"}
    assert [one["number"] for one in found if one["kind"] == "pair"] == [0, 1]
