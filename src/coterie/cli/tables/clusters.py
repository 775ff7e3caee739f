# SPDX-License-Identifier: Apache-2.0
"""Where clusters' models place the clients of a file, as a table."""

from pathlib import Path

import pyarrow as pa

from coterie.cli.tables.files import left_out, read_labelled
from coterie.estimators import Federated

__all__ = ["assignments"]


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
