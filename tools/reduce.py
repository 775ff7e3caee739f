# SPDX-License-Identifier: Apache-2.0
"""Make the rows of a result smaller before they are kept: what tables and figures need, and nothing else."""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["REDUCE"]

Document = dict[str, Any]
LOW, HIGH = 0.1, 0.9


def quantile_curves(document: Document) -> Document:
    """Replace the curves of rows by quantiles over seeds, a line of the summary's for each method and local steps."""
    rows = [{key: value for key, value in row.items() if key != "curve"} for row in document["rows"]]
    summary = []
    for line in document["summary"]:
        own = (line["method"], line["local_steps"])
        curves = [row["curve"] for row in document["rows"] if (row["method"], row["local_steps"]) == own]
        low, median, high = np.quantile(_equally_long(curves), [LOW, 0.5, HIGH], axis=0)
        summary.append({**line, "low": low.tolist(), "median": median.tolist(), "high": high.tolist()})
    return {**document, "rows": rows, "summary": summary}


def _equally_long(curves: list[list[float]]) -> np.ndarray:
    """Curves of runs, some of which came to their end earlier than others: from then on nothing changes."""
    longest = max(map(len, curves))
    return np.array([[*curve, *curve[-1:] * (longest - len(curve))] for curve in curves], float)


REDUCE: dict[str, Callable[[Document], Document]] = {"quantile-curves": quantile_curves}
