# SPDX-License-Identifier: Apache-2.0
"""SuperLink and ServerApp are killed, and the run continued: `python -m benchmarks.flower_faults.server_killed`.

The models must be those of a run that was not interrupted, to the last bit.
"""

import torch
from safetensors.torch import load_file

from benchmarks.flower_faults.common import Rounds, chosen, federation, fit
from coterie.engines.flower.federation import process_of, restart
from coterie.engines.flower.processes import kill
from coterie.errors import CoterieError


def main() -> None:
    with federation(nodes=3) as (made, folder):
        how = chosen(
            method="ifca",
            clusters={"n_clusters": 2, "init": "random"},
            training={"rounds": 5, "batch_size": 8, "step_size": 0.05},
        )
        print("-- uninterrupted")
        fit(made, folder / "whole", how, Rounds())

        def then(number: int) -> None:
            if number == 3:
                kill(process_of(made, "superlink"))
                print("-- SuperLink and ServerApp are killed after round 3", flush=True)

        print("-- interrupted")
        try:
            fit(made, folder / "killed", how, Rounds(then))
        except CoterieError as error:
            print(f"the command says: {error.message}")
        again = restart(made, "superlink")
        again.await_nodes(300.0)
        print("-- the SuperLink is started again, and the same command given")
        fit(again, folder / "killed", how, Rounds())
        one, two = (load_file(folder / name / "models" / "models.safetensors") for name in ("whole", "killed"))
        same = all(torch.equal(one[name], two[name]) for name in one)
    print(f"models are {'bit-equal' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
