# SPDX-License-Identifier: Apache-2.0
"""A run that is killed with SIGKILL and resumed ends with the models of one that was left in peace, to the last bit."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.kill_and_resume import COTERIE, fit_command, same, write_data
from safetensors.torch import save_file

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


def run_with_kills(command: list[str], out: Path, *writes: int) -> None:
    """Run, but kill it when it has written so many checkpoints, and resume it, each time; then let it end."""
    for wanted in writes:
        words = command[len(COTERIE) :]
        done = subprocess.run([sys.executable, "-c", KILLED, str(wanted), *words], capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert list(out.rglob("*.tmp"))
        command = [*COTERIE, "resume", str(out), "--checkpoint-seconds", "0"]
    subprocess.run(command, check=True, capture_output=True)


def test_a_killed_run_ends_bit_equal(tmp_path: Path) -> None:
    data, whole, killed = tmp_path / "data.csv", tmp_path / "whole", tmp_path / "killed"
    write_data(data, clients=30, rows=20)
    subprocess.run(fit_command(data, whole, rounds=15), check=True, capture_output=True)
    run_with_kills(fit_command(data, killed, rounds=15), killed, 4, 7)
    assert same(whole, killed)
    assert not list(killed.rglob("*.tmp"))


METHODS = {
    "moment-descent": ["--set", "moments.iterations=20"],
    "mixture": ["--components", "2", "--set", "mixture.tol=0", "--set", "mixture.restarts=3"],
    "fedrep": ["--hidden", "8", "--stragglers", "srpfl", "--clock", "dynamic", "--set", "personal.n0=5"],
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_end_bit_equal_too(method: str, tmp_path: Path) -> None:
    def command(out: Path) -> list[str]:
        return [
            *COTERIE, "fit", str(data), "--client", "site", "--target", "y", "--method", method, *METHODS[method],
            "--rounds", "30", "--out", str(out), "--checkpoint-seconds", "0", "--set", "training.participation=0.7",
        ]  # fmt: skip

    data, whole, killed = tmp_path / "data.csv", tmp_path / "whole", tmp_path / "killed"
    write_data(data, clients=30, rows=20)
    subprocess.run(command(whole), check=True, capture_output=True)
    run_with_kills(command(killed), killed, 6)
    assert same(whole, killed)
    own = "models/clients.safetensors"  # what stays with clients, where something does
    assert (whole / own).exists() == (method != "moment-descent")
    assert not (whole / own).exists() or (whole / own).read_bytes() == (killed / own).read_bytes()


def test_the_comparison_sees_a_single_bit(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-52)):
        (tmp_path / name / "models").mkdir(parents=True)
        for file in ("models/models.safetensors", "state.safetensors"):
            save_file({"theta": torch.tensor([value], dtype=torch.float64)}, tmp_path / name / file)
    assert same(tmp_path / "a", tmp_path / "b")
    assert not same(tmp_path / "a", tmp_path / "c")
