# SPDX-License-Identifier: Apache-2.0
"""Run all benches, print a table, write benchmarks/results/bench.json."""

import argparse
import json
import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import fedgrem, fedrep, local_training, lockstep, many_clients, many_small, moment_descent, startup

BENCHES = {
    "lockstep": lockstep.run,
    "local-training": local_training.run,
    "many-clients": many_clients.run,
    "many-small": many_small.run,
    "moment-descent": moment_descent.run,
    "fedgrem": fedgrem.run,
    "fedrep": fedrep.run,
    "startup": startup.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help="all by default")
    rows = [row for name in parser.parse_args().names or BENCHES for row in BENCHES[name]()]
    console = Console()
    for row in rows:
        table = Table("", title=row["bench"], show_header=False)
        for name, value in row.items():
            if name != "bench":
                table.add_row(name, f"{value:.4g}")
        console.print(table)
    machine = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": platform.processor(),
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "bench.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    console.print(f"written: {folder / 'bench.json'}")


main()
