# SPDX-License-Identifier: Apache-2.0
"""What a finished run says, and the two tables of its folder: a row for each round, and a row for each client."""

from typing import Any

import pyarrow as pa

from coterie.engines.drive import Round

__all__ = ["diverged_because", "events", "hide_undefined", "hide_untested", "rounds_table"]


def events(rounds: list[Round]) -> list[dict[str, Any]]:
    """What was worth a sentence, and when."""
    return [{"run": r.run, "round": r.round, "text": text} for r in rounds for text in r.info.get("events", ())]


def diverged_because(rounds: list[Round]) -> str:
    """What to do about a model that diverged: with bad clients, a smaller step would not help."""
    times = max((r.info.get("longest", 0.0) for r in rounds), default=0.0)
    if times:
        return f"an update was {times:.0f} times as long as usual; limit those of bad clients with training.robust"
    return "lower training.step_size"


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
            "messages": pa.array([r.messages for r in rows], pa.int64()),
            "bytes_up": pa.array([r.bytes_up for r in rows], pa.int64()),
            "bytes_down": pa.array([r.bytes_down for r in rows], pa.int64()),
            "seconds": pa.array([r.seconds for r in rows], pa.float64()),
            "moved": pa.array([r.info.get("moved") for r in rows], pa.int64()),
            "sizes": pa.array([r.info.get("sizes") for r in rows], pa.list_(pa.int64())),
            "movement": pa.array([r.info.get("movement") for r in rows], floats),
            "spectrum": pa.array([r.info.get("spectrum") for r in rows], floats),
        }
    )


def hide_untested(columns: dict[str, Any]) -> None:
    """Make null what a client without held-out rows does not have."""
    if "rows_test" in columns:
        for name in {"metric", "metric_global", "metric_local", "rmse", "test_loss"} & columns.keys():
            columns[name] = pa.array(columns[name], mask=columns["rows_test"] == 0)


def hide_undefined(columns: dict[str, Any]) -> None:
    """Make null what is not defined for a client, such as the area under the ROC curve where all rows are of one class."""
    for name in ("auroc", "average_precision", "base_rate", "brier", "coverage", "log_loss", "metric"):
        for one in (name, f"{name}_low", f"{name}_high"):
            if one in columns and not (name == one == "metric"):
                columns[one] = pa.array(columns[one], pa.float64(), from_pandas=True)
