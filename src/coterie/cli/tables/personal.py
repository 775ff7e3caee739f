# SPDX-License-Identifier: Apache-2.0
"""What the clients of a file make of personal models, as a table."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from coterie.cli.tables.files import left_out, read_labelled
from coterie.estimators import Personalised
from coterie.models.outcomes import metric_of

__all__ = ["parts_fitted"]


def parts_fitted(model: Personalised, path: Path) -> tuple[pa.Table, list[str]]:
    """Fit every client's personal part to its labelled rows in a file.  -> table, warnings

    Columns: client, known, loss, accuracy or rmse, rows.
    """
    clients = read_labelled(model.schema_, path, "clients fit personal parameters to labelled rows")
    rows = clients.train
    found = model.assign(rows)
    right = found.measured.metric.double()
    classes = metric_of(model.personal_.model.loss) != "rmse"
    columns: dict[str, Any] = {
        "client": rows.names.tolist(),
        "known": found.known.numpy(),
        "loss": found.measured.loss.double().numpy(),
        "accuracy" if classes else "rmse": (right if classes else right.sqrt() * model.scaling_.y_scale).numpy(),
        "rows": found.measured.rows.numpy(),
    }
    return pa.table(columns), left_out(clients)
