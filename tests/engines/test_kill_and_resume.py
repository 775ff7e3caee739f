# SPDX-License-Identifier: Apache-2.0
"""A run that is killed with SIGKILL and resumed ends with the folder of one that was left in peace, to the last bit.

`python -m benchmarks.soak` does this a thousand times, to every method and at every moment.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.soak.cases import write_data
from benchmarks.soak.content import content, same
from safetensors.torch import save_file

COTERIE = [sys.executable, "-m", "coterie"]
OFTEN = ["--checkpoint-seconds", "0"]

# The command line, in a process that is killed in the middle of writing a checkpoint, after so many whole ones.
KILLED = """\
import os, signal, sys
left, put = int(sys.argv.pop(1)), os.replace
def replace(source, target):
    global left
    if os.path.basename(target) == "state.safetensors":
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    put(source, target)
os.replace = replace
from coterie.cli.commands import main
main()
"""

METHODS = {
    # everything that could differ: minibatches, sampled clients, several starts, private local models
    "ifca": [
        "--clusters", "3", "--starts", "2", "--hidden", "32", "--set", "training.batch_size=8",
        "--set", "training.epochs=2", "--set", "training.momentum=0.5", "--set", "training.step_size=0.02",
    ],
    "moment-descent": ["--set", "moments.iterations=20"],
    "mixture": ["--components", "2", "--set", "mixture.tol=0", "--set", "mixture.restarts=3"],
    "fedrep": ["--hidden", "8", "--stragglers", "srpfl", "--clock", "dynamic", "--set", "personal.n0=5"],
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_bit_equal(method: str, tmp_path: Path) -> None:
    data, whole, killed = tmp_path / "data.csv", tmp_path / "whole", tmp_path / "killed"
    write_data(data, clients=30, rows=20)
    words = ["fit", str(data), "--client", "site", "--target", "y", "--method", method, *METHODS[method], *OFTEN]
    words += ["--rounds", "15", "--set", "training.participation=0.7", "--out", "run"]
    for here in (whole, killed):
        here.mkdir()
    subprocess.run([*COTERIE, *words], cwd=whole, check=True, capture_output=True)
    for writes in (4, 7) if method == "ifca" else (6,):
        command = [sys.executable, "-c", KILLED, str(writes), *words]
        done = subprocess.run(command, cwd=killed, capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert list(killed.rglob("*.tmp"))
        words = ["resume", "run", *OFTEN]
    subprocess.run([*COTERIE, *words], cwd=killed, check=True, capture_output=True)
    assert same(whole, killed)
    assert "run/models/models.safetensors" in content(killed)
    assert not list(killed.rglob("*.tmp"))


def test_the_comparison_sees_a_single_bit(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-52)):
        (tmp_path / name).mkdir()
        save_file({"theta": torch.tensor([value], dtype=torch.float64)}, tmp_path / name / "state.safetensors")
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")
    (tmp_path / "b" / ".left.tmp").touch()
    assert not same(tmp_path / "a", tmp_path / "b")
