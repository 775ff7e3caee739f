# SPDX-License-Identifier: Apache-2.0
"""A run that is killed with SIGKILL and resumed ends with the models of one that was left in peace, to the last bit."""

import random
import subprocess
import time
from pathlib import Path

import pytest
import torch
from benchmarks import kill_and_resume
from benchmarks.kill_and_resume import COTERIE, fit_command, run_with_kills, same, write_data
from safetensors.torch import save_file


class Moments(random.Random):
    """The moments of kills, as parts of a whole run, most of which is Python starting; after that, peace."""

    def __init__(self, *parts: float) -> None:
        super().__init__(0)
        self.left = list(parts)

    def uniform(self, a: float, b: float) -> float:
        return self.left.pop(0) if self.left else 100.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the killed process's pipe, which the script leaves open
def test_a_killed_run_ends_bit_equal(tmp_path: Path) -> None:
    data, whole, killed = tmp_path / "data.csv", tmp_path / "whole", tmp_path / "killed"
    write_data(data, clients=30, rows=20)
    begin = time.perf_counter()
    subprocess.run(fit_command(data, whole, rounds=15), check=True, capture_output=True)
    seconds = time.perf_counter() - begin
    assert run_with_kills(data, killed, Moments(0.7, 0.85), longest=seconds, rounds=15) >= 1
    assert same(whole, killed)
    assert not list(killed.rglob("*.tmp"))


METHODS = {
    "moment-descent": (["--set", "moments.iterations=20"], (0.8,)),
    "mixture": (["--components", "2", "--set", "mixture.tol=0", "--set", "mixture.restarts=3"], (0.7, 0.8)),
    "fedrep": (
        ["--hidden", "8", "--stragglers", "srpfl", "--clock", "dynamic", "--set", "personal.n0=5"], (0.7, 0.8),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("method", METHODS)
def test_other_methods_end_bit_equal_too(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, moments = METHODS[method]

    def command(data: Path, out: Path, *, rounds: int) -> list[str]:
        return [
            *COTERIE, "fit", str(data), "--client", "site", "--target", "y", "--method", method, *words,
            "--rounds", str(rounds), "--out", str(out), "--checkpoint-seconds", "0",
            "--set", "training.participation=0.7",
        ]  # fmt: skip

    monkeypatch.setattr(kill_and_resume, "fit_command", command)
    data, whole, killed = tmp_path / "data.csv", tmp_path / "whole", tmp_path / "killed"
    write_data(data, clients=30, rows=20)
    begin = time.perf_counter()
    subprocess.run(command(data, whole, rounds=30), check=True, capture_output=True)
    seconds = time.perf_counter() - begin
    assert run_with_kills(data, killed, Moments(*moments), longest=seconds, rounds=30) >= 1
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
