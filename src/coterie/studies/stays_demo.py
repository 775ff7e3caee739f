# SPDX-License-Identifier: Apache-2.0
"""What `coterie flower demo` compares and fits: invented stays in 48 hospitals, which work in three ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from coterie.config import FitOptions, options
from coterie.evaluate import adjusted_rand
from coterie.methods.cluster_models import ClusterModels
from coterie.methods.linear.structures import Effort

__all__ = ["EFFORT", "NAME", "demo_options", "demo_results", "write_stays"]

NAME = "invented stays in 48 hospitals"
EFFORT = Effort(rounds=2, mixture_rounds=10, steps=3, starts=2, max_clusters=4, max_rank=2, max_components=2)
_CLIENTS, _ROWS = 48, 40
_EFFECTS = np.array([[2.0, 0.5, 1.0], [-1.0, 0.5, 3.0], [0.5, -2.0, 2.0]])  # of age, severity and operation: days


def demo_options(seed: int) -> FitOptions:
    """How to fit whatever is found. A message takes seconds, so there are few rounds with long local training."""
    return options(
        {
            "seed": seed,
            "data": {"path": NAME, "client": "hospital", "target": "days"},
            "training": {"rounds": 2, "local_steps": 100},
        }
    )


def write_stays(path: Path, seed: int) -> None:
    """Write all rows of all hospitals to a Parquet file."""
    draw = np.random.default_rng(seed)
    hospital = np.repeat(np.arange(_CLIENTS), _ROWS)
    n = len(hospital)
    age, severity, operation = draw.normal(70, 12, n).round(), draw.gamma(2.0, size=n).round(2), draw.random(n) < 0.4
    seen = np.stack([(age - 70) / 12, severity, operation], 1)  # [N, 3]
    days = 8 + (seen * _EFFECTS[hospital % len(_EFFECTS)]).sum(1) + draw.normal(size=n)
    columns = {"age": age, "severity": severity, "operation": operation.astype(np.float64), "days": days.round(2)}
    pq.write_table(pa.table({"hospital": [f"hospital-{i:02d}" for i in hospital], **columns}), path)


def demo_results(found: ClusterModels) -> dict[str, Any]:
    """How well the groups were found, which nobody but the demo can know."""
    return {"adjusted_rand": adjusted_rand(found.belongs.label, torch.arange(_CLIENTS) % len(_EFFECTS))}
