# SPDX-License-Identifier: Apache-2.0
"""How near the mixed model is to lme4: largest relative differences by quantity, messages and seconds, as a table.

``python -m benchmarks.lme4 [FOLDER]`` reads the data sets from this folder, or from COTERIE_DATA, or ../shared/data.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.lme4_numbers import REFERENCES, Reference

import coterie

HEAD = ("model", "log-likelihood", "fixed effects", "their errors", "SD of effects", "residual SD", "BLUPs", "their SD")


def fitted(one: Reference, folder: Path) -> coterie.MixedModel:
    clients = coterie.read(
        folder / one.file, client=one.client, target=one.target, features=list(one.features), test_size=0.0,
        task="regression",
    )  # fmt: skip
    return coterie.MixedModel(slopes=one.slopes, reml=one.reml).fit(clients)


def apart(ours: Any, theirs: Any) -> float:
    return float(np.max(np.abs(np.asarray(ours) - theirs) / np.abs(theirs)))


def differences(one: Reference, model: coterie.MixedModel) -> list[float]:
    """One for each quantity; of client effects, which may be near zero, relative to the largest."""
    said, size = model.summary_, len(model.variance_)
    kept = [name for name in one.features if name not in said["left_out"]]
    fixed = [model.fixed_effects_[name] for name in ("(intercept)", *kept)]
    own = model.client_effects()
    at = [own["client"].tolist().index(name) for name in one.effects_of]
    effects, theirs = (np.stack([own[n][at] for n in model.variance_], 1), np.reshape(one.effects, (-1, size)))
    deviations = np.stack([own[f"{n} deviation"][at] for n in model.variance_], 1)
    return [
        apart(said["log_likelihood"], one.log_likelihood),
        apart([line["estimate"] for line in fixed], one.fixed),
        apart([line["error"] for line in fixed], one.error),
        apart([line["sd"] for line in said["random"]], np.sqrt(np.diag(np.reshape(one.covariance, (size, size))))),
        apart(said["residual_sd"], one.residual_sd),
        float((np.abs(effects - theirs).max(0) / np.abs(theirs).max(0)).max()),
        apart(deviations, np.sqrt(np.reshape(one.effects_variance, (-1, size)))),
    ]


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COTERIE_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    print("| " + " | ".join((*HEAD, "messages", "seconds")) + " |\n|" + "---|" * (len(HEAD) + 2))
    for one in REFERENCES:
        began = time.perf_counter()
        model = fitted(one, folder)
        seconds = time.perf_counter() - began
        assert model.fitted_.traffic is not None
        cells = [f"`{one.name}`, {'REML' if one.reml else 'ML'}", *(f"{v:.0e}" for v in differences(one, model))]
        print("| " + " | ".join((*cells, str(model.fitted_.traffic.messages), f"{seconds:.2f}")) + " |")


if __name__ == "__main__":
    main()
