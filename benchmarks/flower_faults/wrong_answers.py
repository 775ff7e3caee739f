# SPDX-License-Identifier: Apache-2.0
"""A node answers what cannot be used, in a new way every round: `python -m benchmarks.flower_faults.wrong_answers`.

Each answer must be refused with the node's name and the reason, and the run must go on with the others.
"""

from benchmarks.flower_faults.app import FAULTS
from benchmarks.flower_faults.common import Rounds, chosen, federation, fit


def main() -> None:
    with federation(nodes=3) as (made, folder):
        how = chosen(
            method="ifca",
            clusters={"n_clusters": 2, "init": "random"},
            training={"rounds": len(FAULTS), "step_size": 0.05},
        )
        told = Rounds()
        result = fit(made, folder / "run", how, told, fault="answers")
    for number, (fault, done) in enumerate(zip(FAULTS, told.rounds, strict=True)):
        print(f"round {number + 1}, node-1 answers with {fault}: {done['participants']} of 8 clients count")
    refused = [said for said in told.warnings if "node-1" in said and "refused" in said]
    print(f"{len(refused)} answers of node-1 are refused by name; the run has {'ended' if result else 'NOT ended'}")


if __name__ == "__main__":
    main()
