# SPDX-License-Identifier: Apache-2.0
"""Kill a run at random moments with SIGKILL, resume it until it ends, and compare its models bit by bit.

`python -m benchmarks.kill_and_resume [TIMES]`
"""

import csv
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

COTERIE = [sys.executable, "-m", "coterie"]


def write_data(path: Path, *, clients: int = 60, rows: int = 40, features: int = 12) -> None:
    draw = np.random.default_rng(0)
    theta = draw.normal(size=(3, features))
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["site", *(f"x{i}" for i in range(features)), "y"])
        for c in range(clients):
            x = draw.normal(size=(rows, features))
            y = x @ theta[c % 3] + 0.1 * draw.normal(size=rows)
            out.writerows([f"site-{c}", *map(repr, row.tolist()), repr(float(t))] for row, t in zip(x, y, strict=True))


def fit_command(data: Path, out: Path, *, rounds: int = 60) -> list[str]:
    """A run with everything that could differ: minibatches, sampled clients, several starts, private local models."""
    return [
        *COTERIE, "fit", str(data), "--client", "site", "--target", "y", "--clusters", "3", "--starts", "2",
        "--hidden", "32", "--rounds", str(rounds), "--out", str(out), "--checkpoint-seconds", "0",
        "--set", "training.batch_size=8", "--set", "training.epochs=2", "--set", "training.participation=0.5",
        "--set", "training.momentum=0.5", "--set", "training.step_size=0.02",
    ]  # fmt: skip


def run_with_kills(data: Path, out: Path, draw: random.Random, *, longest: float, rounds: int = 60) -> int:
    """Start, kill at a random moment, resume, kill again, ... until the run ends by itself.  -> number of kills"""
    kills = 0
    command = fit_command(data, out, rounds=rounds)
    while True:
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _, said = started.communicate(timeout=draw.uniform(0.3, 1.0) * longest if kills < 6 else None)
            assert started.returncode == 0, said.decode()
            return kills
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()
            kills += 1
        if (out / "run.json").exists():
            command = [*COTERIE, "resume", str(out), "--checkpoint-seconds", "0"]


def same(a: Path, b: Path) -> bool:
    """Whether models and final states of two runs are equal to the last bit."""
    pairs = [(load_file(a / name), load_file(b / name)) for name in ("models/models.safetensors", "state.safetensors")]
    return all(one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one) for one, two in pairs)


def main(times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data, whole = Path(folder) / "data.csv", Path(folder) / "whole"
        write_data(data)
        begin = time.perf_counter()
        subprocess.run(fit_command(data, whole), check=True, capture_output=True)
        seconds = time.perf_counter() - begin
        print(f"uninterrupted: {seconds:.1f} s")
        equal = 0
        for number in range(times):
            out = Path(folder) / f"killed-{number}"
            kills = run_with_kills(data, out, random.Random(number), longest=seconds)
            ok = same(whole, out)
            equal += ok
            print(f"run {number + 1}: killed {kills} times, {'bit-equal' if ok else 'DIFFERENT'}", flush=True)
    print(f"{equal} of {times} bit-equal")
    sys.exit(equal != times)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
