# SPDX-License-Identifier: Apache-2.0
"""What personal models say of the rows and the clients of a file, as tables in the file's order."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from coterie.cli.tables.files import left_out, read_features, read_filled, read_labelled, unknown_levels
from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.estimators import Personalised
from coterie.models.outcomes import metric_of

__all__ = ["parts_fitted", "personal_predictions"]


def personal_predictions(model: Personalised, path: Path) -> tuple[pa.Table, list[str]]:
    """Predict every row of a file, labelled or not.  -> (client, known, prediction) in the file's order, warnings

    A client that is not known fits its personal part to those of its rows that have a target.
    """
    clients, names = read_features(model.schema_, path)
    rows = clients.train
    own, known = _parts(model, path, rows)
    order = rows.order_of(names)
    made, there = np.empty(len(names), dtype=object), np.empty(len(names), dtype=bool)
    made[order], there[order] = model.predict_stored(rows, own), known.numpy()[rows.owners]
    return pa.table({"client": names, "known": there, "prediction": made.tolist()}), unknown_levels(clients)


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


def _parts(model: Personalised, path: Path, rows: Ragged) -> tuple[Tensor, Tensor]:
    """[M, ...] each client's personal part, and [M] whether it has had one."""
    own, known = model.personal_.of(rows.names)
    strangers = np.flatnonzero(~known.numpy())
    if not len(strangers):
        return own, known
    clients = read_filled(model.schema_, path).train
    place = {} if clients.y is None else {name: i for i, name in enumerate(clients.names.tolist())}
    lost = [name for name in rows.names[strangers].tolist() if name not in place]
    if lost:
        raise DataError(
            f"client '{lost[0]}' is new and has no row with a '{model.schema_.target}' to fit its parameters to",
            f"fill in '{model.schema_.target}' in some of its rows",
        )
    labelled = clients.only(np.array([place[name] for name in rows.names[strangers].tolist()]))
    own = own.clone()
    own[torch.from_numpy(strangers)] = model.assign(labelled).own
    return own, known
