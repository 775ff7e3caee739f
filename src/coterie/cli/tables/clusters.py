# SPDX-License-Identifier: Apache-2.0
"""What clusters' models say of the rows and the clients of a file, as tables in the file's order."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from coterie.cli.tables.files import left_out, read_features, read_filled, read_labelled, unknown_levels
from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.estimators import Federated

__all__ = ["assignments", "predictions"]


def predictions(model: Federated, path: Path) -> tuple[pa.Table, list[str]]:
    """Predict every row of a file, labelled or not.  -> (client, label, prediction) in the file's order, warnings"""
    clients, names = read_features(model.schema_, path)
    rows = clients.train
    labels = _labels(model, path, rows)
    order = rows.order_of(names)
    made = np.empty(len(names), dtype=object)
    made[order] = model.predict_stored(rows, labels)
    label = np.empty(len(names), dtype=np.int64)
    label[order] = labels.numpy()[rows.owners]
    return pa.table({"client": names, "label": label, "prediction": made.tolist()}), unknown_levels(clients)


def assignments(model: Federated, path: Path) -> tuple[pa.Table, list[str]]:
    """Place every client of a file.  -> (client, label, margin, margin_error, certain, rows), warnings"""
    clients = read_labelled(model.schema_, path, "clients are assigned by their labelled rows")
    rows = clients.train
    found = model.assign(rows)
    table = pa.table(
        {
            "client": rows.names.tolist(),
            "label": found.label.numpy(),
            "margin": found.margin.double().numpy(),
            "margin_error": found.margin_error.double().numpy(),
            "certain": found.certain.numpy(),
            "rows": found.rows.numpy(),
        }
    )
    said = left_out(clients)
    if unsure := int((~found.certain).sum()):
        said.append(f"uncertain cluster for {unsure} of {table.num_rows} clients: margin within two standard errors")
    return table, said


def _labels(model: Federated, path: Path, rows: Ragged) -> Tensor:
    """[M] each client's cluster: known from training, or found from its labelled rows in the same file."""
    known = model.known_labels(rows.names)
    strangers = rows.names[(known < 0).numpy()]
    if not len(strangers):
        return known
    labelled = read_filled(model.schema_, path).train
    found = {}
    if labelled.y is not None:
        found = dict(zip(labelled.names.tolist(), model.assign(labelled).label.tolist(), strict=True))
    lost = [name for name in strangers.tolist() if name not in found]
    if lost:
        raise DataError(
            f"client '{lost[0]}' is new and has no row with a '{model.schema_.target}' to assign it by",
            f"fill in '{model.schema_.target}' in some of its rows",
        )
    new = torch.tensor([found.get(name, -1) for name in rows.names.tolist()])
    return torch.where(known < 0, new, known)
