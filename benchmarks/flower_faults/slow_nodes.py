# SPDX-License-Identifier: Apache-2.0
"""Nodes that sleep before they train, and SRPFL: `python -m benchmarks.flower_faults.slow_nodes`.

SRPFL begins with the fastest clients and doubles their number in stages: the time of a round must follow the n-th fastest
node, not the slowest, whose late answers are ignored. Beside it FedRep, which waits for everybody.
"""

from benchmarks.flower_faults.common import Rounds, chosen, federation, fit

SLEEP = (0, 8, 16, 60)  # seconds, by node


def main() -> None:
    with federation(nodes=4, clients=4) as (made, folder):
        said = ",".join(map(str, SLEEP))
        model = {"model": {"hidden": [4]}, "training": {"rounds": 6, "step_size": 0.05}}
        srpfl = {"stragglers": "srpfl", "n0": 1, "stage_rounds": 2}
        told = Rounds()
        fit(made, folder / "srpfl", chosen(method="fedrep", personal=srpfl, **model), told, fault="sleep", sleep=said)
        model["training"]["rounds"] = 1
        everybody = Rounds()
        fit(made, folder / "all", chosen(method="fedrep", **model), everybody, fault="sleep", sleep=said)
    print("nodes sleep", ", ".join(f"{seconds} s" for seconds in SLEEP))
    for done in told.rounds:
        n = done["participants"]
        print(
            f"SRPFL, round {done['round']}: {n} clients, {done['seconds']:.1f} s; the {n}. fastest sleeps {SLEEP[n - 1]} s"
        )
    print(f"FedRep, everybody: {everybody.rounds[0]['seconds']:.1f} s")


if __name__ == "__main__":
    main()
