# SPDX-License-Identifier: Apache-2.0
"""The papers' figures, drawn from results: one function for each kind, a result -> name of the file -> SVG."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coterie.report.numbers import percent_ticks
from coterie.report.plots import Line, dots, line_chart
from tools.tables import values, where

__all__ = ["FIGURES"]

Result = Mapping[str, Any]
SIZE = (560.0, 320.0)
LEFT = ("moment-descent-fedavg", "moment-descent-fedprox")  # methods of the left panels, all local steps
ROTATED = {"ifca": "IFCA", "global": "One model for all", "local": "One model each"}
STEPS = 5  # local steps of the right panels


def mixed(result: Result) -> dict[str, str]:
    """Su, Xu, Yang, Figures 1 to 3: error by round, ours with several local steps, and against the others."""
    lines = result["summary"]
    left = [
        line for line in lines if line["method"] in LEFT or (line["method"], line["local_steps"]) == ("oracle", STEPS)
    ]
    right = [line for line in lines if line["local_steps"] == STEPS or line["method"] == LEFT[1]]
    panels = {"left": (left, _with_steps), "right": (right, lambda line: line["method"])}
    setting = lines[0]["setting"]
    return {
        f"{result['name']}-{side}.svg": line_chart(
            [_quantiles(line, named(line)) for line in shown],
            x_label="round, those of Phase 1 counted", y_label="error of the worst cluster: median and 80 % of the seeds",
            title=f"Mixed regression, setting {setting}", log_y=True, integer_x=True, size=SIZE, standalone=True,
        )
        for side, (shown, named) in panels.items()
    }  # fmt: skip


def _with_steps(line: Mapping[str, Any]) -> str:
    steps = line["local_steps"]
    return (
        line["method"]
        if steps is None or line["method"] == "oracle"
        else f"{line['method']}, {steps} step{'s' * (steps > 1)}"
    )


def _quantiles(line: Mapping[str, Any], name: str) -> Line:
    low, median, high = ([math.nan if v is None else v for v in line[key]] for key in ("low", "median", "high"))
    return Line(range(len(median)), median, name, low=low, high=high, dashed=line["method"] == "oracle")


def synthetic(result: Result) -> dict[str, str]:
    """IFCA, Figure 2: share of trials that succeed; random starts in full, spread ones dashed."""
    rows = result["rows"]
    across, group = ("r", "sigma") if len(values(rows, "r")) > 1 else ("n_clients", "rows")
    label = {"r": "separation r", "n_clients": "clients m"}[across]
    names = {"sigma": "sigma", "rows": "n"}
    lines = []
    for init in values(rows, "init"):
        for k, value in enumerate(values(rows, group)):
            own = where(rows, init=init, **{group: value})
            lines.append(Line([row[across] for row in own], [row["trial_success"] for row in own],
                              f"{init}, {names[group]} = {value:g}", colour=k, dashed=init != "random"))  # fmt: skip
    title = f"IFCA, panel {rows[0]['panel']}: trials that find the planted models"
    chart = line_chart(lines, x_label=label, y_label="share of trials", title=title, y_form=percent_ticks, from_zero=True,
                       size=SIZE, standalone=True)  # fmt: skip
    return {f"{result['name']}.svg": chart}


def rotated(result: Result) -> dict[str, str]:
    """Accuracy of every method on test images: mean, and the seeds that fare worst and best."""
    rows, said = result["rows"], result["settings"]
    columns = {
        f"mean of {said['seeds']} seeds": [row["accuracy"] for row in rows],
        "lowest": [min(row["accuracies"]) for row in rows],
        "highest": [max(row["accuracies"]) for row in rows],
    }
    names = [ROTATED[row["method"]] + (f", {row['init']} start" if row["init"] else "") for row in rows]
    title = f"{said['clients']} clients, digits in four rotations that nobody was told of"
    chart = dots(names, columns, strong=0, form=percent_ticks, x_label="accuracy on test images, higher is better",
                 title=title, width=640, standalone=True)  # fmt: skip
    return {f"{result['name']}.svg": chart}


def simulation(result: Result) -> dict[str, str]:
    """FedGrEM, Figure 3: error by h, of every method."""
    rows = result["rows"]
    lines: list[Line] = []
    for method in values(rows, "method"):
        own = where(rows, method=method)
        mean, error = ([row[field] or 0.0 for row in own] for field in ("theta_error", "theta_error_se"))
        lines.append(Line([row["h"] for row in own], mean, method, dashed=len(lines) >= 8,
                          low=[m - 2 * e for m, e in zip(mean, error, strict=True)],
                          high=[m + 2 * e for m, e in zip(mean, error, strict=True)]))  # fmt: skip
    chart = line_chart(
        lines, x_label="h, distance of clients' parameters from common ones",
        y_label="largest error of a component: mean and two standard errors",
        title=f"FedGrEM, planted mixtures: {rows[0]['model']}", log_y=True, size=SIZE, standalone=True,
    )  # fmt: skip
    return {f"{result['name']}.svg": chart}


def images(result: Result) -> dict[str, str]:
    """SRPFL, Figures 3 to 6: accuracy by virtual time, mean over seeds of both, round by round."""
    lines = [_by_time(row) for row in result["rows"]]
    shortest = min(line.x[-1] for line in lines if line.name in ("fedrep", "fedavg", "lg-fedavg")) if lines else 0.0
    shown = [_until(line, shortest) for line in lines]
    said = result["settings"]
    title = f"{said['dataset']}: {said['speeds']} speeds, {100 * said['participation']:g} % of the clients in a round"
    chart = line_chart(shown, x_label="virtual time", y_label="accuracy, mean over clients", title=title,
                       y_form=percent_ticks, size=SIZE, standalone=True)  # fmt: skip
    return {f"{result['name']}.svg": chart}


def _by_time(row: Mapping[str, Any]) -> Line:
    rounds = set.intersection(*({point["round"] for point in curve} for curve in row["curves"]))
    points = [[point for point in curve if point["round"] in rounds] for curve in row["curves"]]
    time, accuracy = (
        np.mean([[point[field] for point in curve] for curve in points], axis=0).tolist()
        for field in ("virtual_time", "accuracy")
    )
    return Line(time, accuracy, row["method"], dashed=row["method"].endswith("-ft"))


def _until(line: Line, end: float) -> Line:
    """Cut a line off where everyone's rounds have ended, and keep one point at least."""
    kept = max(1, sum(time <= end for time in line.x))
    return Line(line.x[:kept], line.y[:kept], line.name, dashed=line.dashed)


FIGURES: dict[str, Callable[[Result], dict[str, str]]] = {
    "rotated": rotated, "mixed": mixed, "synthetic": synthetic, "simulation": simulation, "images": images,
}  # fmt: skip
