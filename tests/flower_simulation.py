# SPDX-License-Identifier: Apache-2.0
"""Programs on Flower's simulation engine (ray): run as a script by test_engines_agree.py, in a process of its own.

    python flower_simulation.py NODES FOLDER CASE...

Writes the states that the cases end with to FOLDER/<case>.safetensors.
"""

import sys
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

import coterie.engines.flower.catalogue  # noqa: F401
from coterie.engines.checkpoint import save_tensors
from coterie.engines.engine_for import engine_for
from coterie.engines.flower.connect import connect
from helpers import state_tensors


def app_of(nodes: int, folder: Path) -> ClientApp:
    """A client app whose nodes have a share of the clients each."""
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        from agreement import ROWS
        from coterie.engines.flower.client import answer
        from flower_grid import dealt

        holdings = {holding.name: holding for holding in dealt(ROWS, folder, nodes=nodes).values()}
        return answer(message, holdings[f"node-{context.node_config['partition-id']}"])

    app.query("coterie")(reply)
    app.train("coterie")(reply)
    return app


def main(nodes: int, folder: Path, cases: list[str]) -> None:
    """Run the cases one after the other in one simulation."""
    server = ServerApp()

    @server.main()
    def run(grid: Grid, _: Context) -> None:
        from agreement import ENGINES, PROGRAMS

        clients = connect(grid, run="agree", nodes=nodes, test_size=0.0, timeout=300.0, wait=300.0, poll=0.02)
        for case in cases:
            rows = clients.train.to(torch.float32) if case.endswith("float32") else clients.train
            done = engine_for(rows, store=case, **ENGINES.get(case, {})).run([PROGRAMS[case]])
            save_tensors(folder / f"{case}.safetensors", state_tensors(done.states[0]), {})

    run_simulation(server, app_of(nodes, folder), nodes, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
