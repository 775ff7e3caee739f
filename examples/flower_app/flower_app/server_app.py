# SPDX-License-Identifier: Apache-2.0
"""A ServerApp that finds groups of sites with IFCA, and a model for each."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie.flower import CoterieStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Fit, and print what was found."""
    config = context.run_config
    strategy = CoterieStrategy("ifca", clusters={"n_clusters": config.get("clusters", 2)}, data={"test_size": 0.2})
    result = strategy.start(grid, num_rounds=int(config.get("rounds", 5)), nodes=4)
    fitted = strategy.fitted_
    print("sites by cluster:", fitted.models.placed.label.bincount().tolist())
    slopes = [array.numpy()[0, 1] for name, array in result.arrays.items() if name.endswith("/0.weight")]
    print("with the second column, the target", " or ".join("rises" if slope > 0 else "falls" for slope in slopes))
