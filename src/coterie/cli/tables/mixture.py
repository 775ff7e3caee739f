# SPDX-License-Identifier: Apache-2.0
"""What a mixture says of the rows and the clients of a file, as tables in the file's order."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from coterie.cli.tables.files import left_out, read_features, read_filled, read_labelled, unknown_levels, with_target
from coterie.estimators import FederatedMixture

__all__ = ["adoptions", "components"]


def components(model: FederatedMixture, path: Path) -> tuple[pa.Table, list[str]]:
    """Tell the component of every row of a file; of regressions, predict the target.  -> table in the file's order, warnings

    Columns: client, [prediction,] component, probability. Of regressions, only rows with a target have a component.
    """
    clients, names = read_features(model.schema_, path)
    rows = clients.train
    columns: dict[str, Any] = {"client": names}
    known = np.ones(len(names), dtype=bool)
    if model.schema_.task == "regression":
        prediction = np.empty(len(names))
        prediction[rows.order_of(names)] = model.mixtures_.expected(model.mixtures_.prepared(rows)).numpy()
        columns["prediction"] = prediction
        known = with_target(model.schema_, path, len(names))
        if known.any():
            rows = read_filled(model.schema_, path).train
    component, probability = np.zeros(len(names), dtype=np.int64), np.zeros(len(names))
    if known.any():
        found = model.mixtures_.probabilities(model.mixtures_.prepared(rows)).numpy()  # [N, R]
        at = np.flatnonzero(known)[rows.order_of(names[known])]
        component[at], probability[at] = found.argmax(1), found.max(1)
    columns |= {"component": pa.array(component, mask=~known), "probability": pa.array(probability, mask=~known)}
    return pa.table(columns), unknown_levels(clients)


def adoptions(model: FederatedMixture, path: Path) -> tuple[pa.Table, list[str]]:
    """Place every client of a file among the centre's components.  -> table, warnings

    Columns: client, weight_0, ..., log_likelihood, misfit, fits, rows.
    """
    clients = read_labelled(model.schema_, path, "components are regressions of it")
    rows = clients.train
    found = model.assign(rows)
    columns: dict[str, Any] = {"client": rows.names.tolist()}
    columns |= {f"weight_{r}": found.weights[:, r].numpy() for r in range(found.weights.shape[1])}
    columns |= {"log_likelihood": found.log_likelihood.numpy(), "misfit": found.misfit.numpy()}
    columns |= {"fits": found.fits.numpy(), "rows": found.rows.numpy()}
    said = left_out(clients)
    if strange := int((~found.fits).sum()):
        not_, whose = ("do not fit", "their") if strange > 1 else ("does not fit", "its")
        said.append(f"{strange} of {len(rows.names)} clients {not_}: {whose} rows are unlike those of the training")
    return pa.table(columns), said
