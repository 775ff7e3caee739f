# SPDX-License-Identifier: Apache-2.0
"""What a finished run says, and the two tables of its folder: a row for each round, and a row for each client."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from coterie.engines.in_process import Round
from coterie.evaluate import Placed
from coterie.fitting import Fitted

__all__ = ["Contents", "clients_table", "events", "hide_untested", "rounds_table"]

_FAR = 1e12  # the loss of a diverged model, on the map


@dataclass(frozen=True)
class Contents:
    """What goes into `run.json` about the data and the results, and the tables."""

    data: dict[str, Any]
    results: dict[str, Any]
    rounds: pa.Table
    clients: pa.Table


def events(rounds: list[Round]) -> list[dict[str, Any]]:
    """What was worth a sentence, and when."""
    return [{"run": r.run, "round": r.round, "text": text} for r in rounds for text in r.info.get("events", ())]


def rounds_table(rounds: list[Round]) -> pa.Table:
    """Lay out rounds; those that only made ready or grouped anchors have no row."""
    rows = [r for r in rounds if not {"loss", "sizes", "movement"}.isdisjoint(r.info)]
    floats = pa.list_(pa.float64())
    return pa.table(
        {
            "run": pa.array([r.run for r in rows], pa.int64()),
            "round": pa.array([r.round for r in rows], pa.int64()),
            "loss": pa.array([r.info.get("loss") for r in rows], pa.float64()),
            "participants": pa.array([r.participants for r in rows], pa.int64()),
            "bytes_up": pa.array([r.bytes_up for r in rows], pa.int64()),
            "bytes_down": pa.array([r.bytes_down for r in rows], pa.int64()),
            "seconds": pa.array([r.seconds for r in rows], pa.float64()),
            "moved": pa.array([r.info.get("moved") for r in rows], pa.int64()),
            "sizes": pa.array([r.info.get("sizes") for r in rows], pa.list_(pa.int64())),
            "movement": pa.array([r.info.get("movement") for r in rows], floats),
            "spectrum": pa.array([r.info.get("spectrum") for r in rows], floats),
        }
    )


def clients_table(fitted: Fitted) -> pa.Table:
    """Lay out clients in the order of their names."""
    found = fitted.placed
    x, y = _map(found)
    columns: dict[str, Any] = {
        "client": fitted.names.tolist(),
        "label": found.label.numpy(),
        "margin": found.margin.double().numpy(),
        "margin_error": pa.array(found.margin_error.double().tolist(), pa.float64()),
        "certain": found.certain.numpy(),
    }
    columns |= {name: value.numpy() for name, value in fitted.per_client.items()}
    hide_untested(columns)
    return pa.table(columns | {"map_x": x, "map_y": y})


def hide_untested(columns: dict[str, Any]) -> None:
    """Make null what a client without held-out rows does not have."""
    if "rows_test" in columns:
        for name in {"metric", "metric_global", "metric_local", "test_loss"} & columns.keys():
            columns[name] = pa.array(columns[name], mask=columns["rows_test"] == 0)


def _map(found: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Lay clients out by how they fare under all models: principal axes of the losses, each relative to the mean."""
    losses = found.losses.double().nan_to_num(nan=_FAR).clamp(1e-12, _FAR).log().numpy()  # [M, K]
    about = losses - losses.mean(1, keepdims=True)
    about = about - about.mean(0)
    _, _, axes = np.linalg.svd(about, full_matrices=False)
    across = about @ axes.T
    second = across[:, 1] if losses.shape[1] > 2 else losses.min(1)
    return across[:, 0], second
