# SPDX-License-Identifier: Apache-2.0
"""A node is killed in the middle of a round, and started again: `python -m benchmarks.flower_faults.node_killed`.

FedRep, whose clients keep heads of their own. The round must end within its timeout without the node's clients, the run must
go on, and the node must be back with the heads that it had.
"""

import time

from benchmarks.flower_faults.common import Rounds, chosen, federation, fit
from coterie.engines.flower.federation import process_of, restart
from coterie.engines.flower.processes import kill

TIMEOUT = 90.0
VICTIM = "node-1"


def main() -> None:
    with federation(nodes=3) as (made, folder):
        state = {"made": made}

        def then(number: int) -> None:
            if number == 2:
                time.sleep(5.0)  # until the next round's question is there
                kill(process_of(state["made"], VICTIM))
                print(f"-- {VICTIM} is killed in round 3", flush=True)
            elif number == 3:
                state["made"] = restart(state["made"], VICTIM)
                print(f"-- {VICTIM} is started again", flush=True)

        told = Rounds(then)
        how = chosen(method="fedrep", model={"hidden": [4]}, training={"rounds": 7, "step_size": 0.05})
        fit(made, folder / "run", how, told, timeout=TIMEOUT)
    took = [done["participants"] for done in told.rounds]
    third = told.rounds[2]
    lost = [said for said in told.warnings if "lost its private state" in said]
    print(f"clients by round: {took}")
    kept = "within" if third["seconds"] < TIMEOUT + 15 else "NOT within"
    print(f"round 3 took {third['seconds']:.1f} s, {kept} its timeout of {TIMEOUT:.0f} s")
    print(f"the node is back: {'yes' if took[-1] == took[0] and took[2] < took[0] else 'NO'}")
    print(f"with its private state: {'yes' if not lost else 'NO'}")


if __name__ == "__main__":
    main()
