# SPDX-License-Identifier: Apache-2.0
"""A shared machine: fits and comparisons alone, beside busy processes, and two at a time (`python -m benchmarks.busy`).

Every run is a process of its own with the threads that coterie chooses, with one, or with as many as there are cores (which
wait as OpenMP's default has it, or passively). What is timed is the work without imports, the longer of two side by side. A
ratio is coterie's choice over the best of the others in the same situation: at most 1.1 alone, 1.5 otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SITUATIONS = {"alone": 1.1, "beside a busy process per core": 1.5, "two at a time": 1.5}
_SET = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def threads() -> dict[str, dict[str, str]]:
    """Name -> environment."""
    cores = str(os.cpu_count())
    passive = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    return {
        "coterie's choice": {},
        "1 thread": {"OMP_NUM_THREADS": "1"},
        f"{cores} threads": {"OMP_NUM_THREADS": cores, "GOMP_SPINCOUNT": "300000"},
        f"{cores} threads, passive": {"OMP_NUM_THREADS": cores, **passive},
    }


# -- the work, in a process of its own --------------------------------------------------------------------------------
def network(rounds: int = 4) -> float:
    """FedAvg of 120 clients x 200 rows, MLP 784-200-10, 10 full-batch steps: seconds a round."""
    import coterie.threads  # noqa: F401, I001  (before torch)
    import torch

    from coterie.algorithms.fedavg import fedavg
    from coterie.data.ragged import Ragged
    from coterie.engines.in_process import InProcess
    from coterie.local import Training
    from coterie.models import mlp

    draw = torch.Generator().manual_seed(0)
    rows = Ragged.from_blocks(torch.randn(120, 200, 784, generator=draw), torch.randint(10, (120, 200), generator=draw))
    model = mlp(784, 200, n_outputs=10)
    engine = InProcess(rows)

    def program(state):
        return fedavg(state, model=model, rounds=rounds + 1, training=Training(10), step_size=0.1, seed=0)

    ends: list[float] = []
    engine.run([program], watch=lambda _: ends.append(time.perf_counter()))
    return (ends[-1] - ends[-1 - rounds]) / rounds


def linear() -> float:
    """IFCA of 200 clients x 50 rows with 20 features, 3 clusters, 200 rounds: seconds."""
    import numpy as np

    import coterie

    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 50, 20))
    y = np.einsum("cnd,cd->cn", x, draw.normal(size=(3, 20))[np.arange(200) % 3]) + draw.normal(size=(200, 50))
    clients = coterie.from_arrays(x.reshape(-1, 20), y.ravel(), np.repeat(np.arange(200), 50))
    begin = time.perf_counter()
    coterie.IFCA(n_clusters=3, rounds=200, random_state=0).fit(clients)
    return time.perf_counter() - begin


def comparison() -> float:
    """`coterie compare --quick` on the school data: seconds."""
    import coterie

    data = Path(os.environ.get("COTERIE_DATA", "../shared/data"))
    clients = coterie.read(data / "school_exam_139schools.csv.gz", client="school", target="score", new_clients=0.2)
    begin = time.perf_counter()
    coterie.compare(clients, seed=0, quick=True)
    return time.perf_counter() - begin


WORK = {"network": network, "linear": linear, "comparison": comparison}


# -- situations -------------------------------------------------------------------------------------------------------
@contextmanager
def situation(name: str) -> Iterator[None]:
    """Keep every core busy with another process, where that is the situation."""
    line = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(line) for _ in range(os.cpu_count() or 1)] if name.startswith("beside") else []
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def seconds(work: str, environment: dict[str, str], copies: int) -> float:
    """The longest of several copies of the work, begun together."""
    clean = {name: value for name, value in os.environ.items() if name not in _SET}
    line = [sys.executable, "-m", "benchmarks.busy", "--work", work]
    running = [
        subprocess.Popen(line, env=clean | environment, stdout=subprocess.PIPE, text=True) for _ in range(copies)
    ]
    told = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"the work '{work}' failed")
    return max(float(text) for text in told)


def measured(work: str, where: str, repetitions: int) -> dict[str, object]:
    """Interleaved repetitions, the median of each."""
    seen: dict[str, list[float]] = {name: [] for name in threads()}
    with situation(where):
        for _ in range(repetitions):
            for name, environment in threads().items():
                seen[name].append(seconds(work, environment, 2 if where.startswith("two") else 1))
    middle = {name: sorted(values)[len(values) // 2] for name, values in seen.items()}
    ours, *others = middle.values()
    return {"work": work, "situation": where, **middle, "ratio": ours / min(others), "limit": SITUATIONS[where]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("works", nargs="*", choices=[*WORK, []], help="all by default")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        print(WORK[given.work]())
        return
    rows = []
    for work in given.works or WORK:
        for where in SITUATIONS:
            rows.append(measured(work, where, given.repetitions))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "busy.json").write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
