# SPDX-License-Identifier: Apache-2.0
"""The figures of the report, each None when the run folder does not hold its data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from coterie.report.client_plots import signed_bars, whiskers
from coterie.report.frame import Key, swatch
from coterie.report.numbers import TickFormat, byte_ticks, count, decimals_for, fixed, human_bytes, plain_ticks
from coterie.report.plots import Line, cluster_keys, dot_keys, dots, line_chart, scatter, stacked_area
from coterie.report.run_folder import Floats, Run
from coterie.report.summary import Comparison

__all__ = ["Figure", "bytes_by_round", "client_map", "cluster_sizes", "gains", "margins", "methods", "training"]

MOST_MARKS = 3000
MOST_POINTS = 600  # a line has no more points than the screen has pixels for it


@dataclass(frozen=True)
class Figure:
    """A plot with its title, legend (drawn mark, name) and a sentence on how to read it."""

    title: str
    svg: Markup
    legend: list[tuple[Markup, str]] = field(default_factory=list)
    note: str = ""


def figure(title: str, svg: str, keys: Sequence[Key] = (), note: str = "") -> Figure:
    """Put a plot together; the plotting functions have escaped all text in it."""
    frame = '<svg class="swatch" viewBox="0 0 14 14" aria-hidden="true">{}</svg>'
    return Figure(title, Markup(svg), [(Markup(frame.format(swatch(key))), key.name) for key in keys], note)


def methods(run: Run, table: Comparison) -> Figure:
    """Draw the scores of the methods on one axis."""
    better = "higher" if run.metric.higher else "lower"
    svg = dots(
        [name for name, _, _ in table.rows],
        table.columns,
        strong=table.own,
        form=run.metric.form,
        x_label=f"{run.metric.name}, {better} is better",
        title=f"{run.metric.name} by method",
    )
    columns = list(table.columns)
    return figure(f"{run.metric.title} by method", svg, dot_keys(columns, columns, True) if len(columns) > 1 else ())


def training(run: Run) -> list[Figure]:
    """Draw loss and held-out metric by round, and by virtual time where there is a clock."""
    wanted = [
        _by_round(run, "loss", "Loss by round", "loss", plain_ticks, note=_stages_note(run)),
        _by_round(run, "test_metric", f"Held-out {run.metric.name} by round", run.metric.name, run.metric.form),
        _by_round(
            run,
            "test_metric",
            f"Held-out {run.metric.name} by virtual time",
            run.metric.name,
            run.metric.form,
            clock="virtual_time",
        ),
        _by_round(run, "loss", "Loss by virtual time", "loss", plain_ticks, clock="virtual_time"),
        _by_round(run, "change", "Largest move by round", "relative move of an estimate", plain_ticks),
    ]
    return [found for found in wanted if found is not None]


def _by_round(
    run: Run, column: str, title: str, y_label: str, form: TickFormat, clock: str = "round", note: str = ""
) -> Figure | None:
    """Draw one column over rounds or time, the chosen restart strong and the others faint."""
    lines = []
    for restart in run.restarts:
        x, y = run.round_column(clock, restart), run.round_column(column, restart)
        if x is None or y is None:
            continue
        # held-out rows are not looked at in every round; elsewhere what is missing breaks the line
        there = np.flatnonzero(np.isfinite(y)) if column == "test_metric" else np.arange(len(y))
        if len(there) > 1:
            keep = there[evenly(len(there), MOST_POINTS)]
            strong = restart == run.chosen
            lines.append(Line(x[keep].tolist(), y[keep].tolist(), colour=0, faint=not strong))
    if not any(not line.faint for line in lines):
        return None
    values = np.array([v for line in lines for v in line.y if np.isfinite(v)])
    log_y = column in ("loss", "change") and values.min() > 0 and values.max() > 50 * values.min()
    x_label = "round" if clock == "round" else "virtual time (seconds)"
    svg = line_chart(
        lines,
        x_label=x_label,
        y_label=y_label + (" (log scale)" if log_y else ""),
        title=title,
        y_form=form,
        log_y=bool(log_y),
        integer_x=clock == "round",
    )
    others = len(lines) - 1
    names = f"restart {run.chosen}, kept", f"{others} other restart{'s' * (others > 1)}"
    keys = [Key(names[0], "k0", "line"), Key(names[1], "plain faint", "line")] if others else []
    return figure(title, svg, keys, note)


def _stages_note(run: Run) -> str:
    """Say when more clients joined, where rounds began with few: the loss of who joins is that of an untrained part."""
    if run.chosen is None:
        return ""
    enough, rounds = (run.round_column(name, run.chosen) for name in ("enough", "round"))
    if enough is None or rounds is None or enough[0] == enough[-1]:
        return ""
    joined = rounds[1:][np.diff(enough) > 0]
    when = ", ".join(count(r) for r in joined)
    return (
        f"The fastest {count(enough[0])} clients begin, more join in round{'s' * (len(joined) > 1)} {when}, and "
        f"{count(enough[-1])} take part in the end. The loss rises when clients join, as they have not trained yet."
    )


def cluster_sizes(run: Run) -> Figure | None:
    """Draw how many clients each cluster had, round by round."""
    if run.chosen is None or "sizes" not in run.rounds:
        return None
    rows = [i for i in run.restarts[run.chosen] if run.rounds["sizes"][i]]
    if len(rows) < 2:
        return None
    rows = [rows[i] for i in evenly(len(rows), MOST_POINTS)]
    sizes = [run.rounds["sizes"][i] for i in rows]
    k = max(len(s) for s in sizes)
    if k < 2:
        return None
    layers = [[float(s[j]) if j < len(s) else 0.0 for s in sizes] for j in range(k)]
    rounds = [float(run.rounds["round"][i]) for i in rows]
    svg = stacked_area(rounds, layers, x_label="round", y_label="clients", title="Clients per cluster", integer_x=True)
    names = [f"{j} ({count(layers[j][-1])})" for j in range(k)]
    return figure(
        "Clients per cluster by round", svg, cluster_keys(k, names=names), "In parentheses: clients in the last round."
    )


def client_map(run: Run) -> Figure | None:
    """Draw the clients as points, close to each other when they are alike."""
    x, y = run.client_column("map_x"), run.client_column("map_y")
    if x is None or y is None:
        return None
    there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    if not len(there):
        return None
    keep = there[evenly(len(there), MOST_MARKS)]
    labels, certain = run.labels or [0] * len(x), _certain(run)
    names = run.clients.get("client", list(range(len(x))))
    svg = scatter(
        x[keep].tolist(),
        y[keep].tolist(),
        groups=[labels[i] for i in keep],
        hollow=None if certain is None else [not certain[i] for i in keep],
        titles=[f"{names[i]} (cluster {labels[i]})" if run.labels else str(names[i]) for i in keep],
        title="Map of the clients",
        axes=False,
        size=(480, 320),
    )
    keys = cluster_keys(max(labels) + 1, "dot", [str(k) for k in range(max(labels) + 1)]) if run.labels else []
    if certain is not None and not all(certain):
        keys.append(Key("too close to call", "plain hollow", "dot"))
    note = "Nearby clients are similar; the axes have no unit." + thinned(len(keep), len(there))
    return figure("Map of the clients", svg, keys, note)


def gains(run: Run) -> Figure | None:
    """Draw how much better or worse each client fares than with one model for all."""
    ours, theirs = run.client_column("metric"), run.client_column("metric_global")
    if ours is None or theirs is None:
        return None
    gain = run.metric.gain(ours, theirs)
    if not np.isfinite(gain).any() or run.info.get("method") == "global":
        return None
    return gain_bars(run, gain, f"gain ({run.metric.gain_unit})", _gain_note(run, gain))


def gain_bars(run: Run, gain: Floats, y_label: str, note: str) -> Figure:
    """Draw gains over one model for all, the largest first."""
    keep, there = ranked(-gain)
    decimals = decimals_for(gain.tolist())
    names = run.clients.get("client", list(range(len(gain))))
    title = f"Gain over one {run.noun} for all, client by client"
    svg = signed_bars(
        gain[keep].tolist(),
        titles=[f"{names[i]}: {fixed(gain[i], decimals)}" for i in keep],
        x_label="clients, largest gain first",
        y_label=y_label,
        title=title,
        total=there,
    )
    return figure(title, svg, [Key("better", "bar good"), Key("worse", "bar bad")], note + thinned(len(keep), there))


def _gain_note(run: Run, gain: Floats) -> str:
    """Count the clients that are better off."""
    finite = gain[np.isfinite(gain)]
    note = f"Better for {count((finite > 0).sum())} of {count(len(finite))} clients on held-out rows"
    if (finite == 0).any():
        note += f", the same for {count((finite == 0).sum())}"
    ours, alone = run.client_column("metric"), run.client_column("metric_local")
    if ours is None or alone is None:
        return note + "."
    over = run.metric.gain(ours, alone)
    over = over[np.isfinite(over)]
    return f"{note}; better than with one {run.noun} each for {count((over > 0).sum())} of {count(len(over))}."


def margins(run: Run) -> Figure | None:
    """Draw how clearly each client belongs to its cluster, with the noise of that."""
    margin = run.client_column("margin")
    if margin is None:
        return None
    error = run.client_column("margin_error")
    reach = np.full(len(margin), np.nan) if error is None else 2 * error
    keep, there = ranked(margin)
    certain = _certain(run)
    names, decimals = run.clients.get("client", list(range(len(margin)))), decimals_for(margin.tolist())
    svg = whiskers(
        margin[keep].tolist(),
        reach[keep].tolist(),
        doubtful=None if certain is None else [not certain[i] for i in keep],
        titles=[f"{names[i]}: {fixed(margin[i], decimals)}" for i in keep],
        x_label="clients, smallest margin first",
        y_label="margin (loss)",
        title="Margin of every client",
        total=there,
    )
    keys = [Key("clear", "plain", "dot"), Key("too close to call", "bad", "dot")] if certain is not None else []
    note = "How much higher the loss is under the second-best cluster."
    if error is not None:
        note += " Whiskers: two standard errors either way."
    return figure("How clearly clients belong to their cluster", svg, keys, note + thinned(len(keep), there))


def bytes_by_round(run: Run) -> tuple[Figure | None, str]:
    """Draw bytes by round when they vary; otherwise, or besides, say how many."""
    if run.chosen is None:
        return None, ""
    up, down = run.round_column("bytes_up", run.chosen), run.round_column("bytes_down", run.chosen)
    columns = [(c, name) for c, name in ((up, "up"), (down, "down")) if c is not None]
    if not columns:
        return None, ""
    words = " and ".join(f"{human_bytes(float(np.nanmean(c)))} {name}" for c, name in columns)
    met = run.round_column("participants", run.chosen)
    took_part = "" if met is None else f" {_took_part(run, met)}"
    took_part += _descent_bytes(run)
    if all(np.nanmax(c) <= 1.02 * np.nanmin(c) for c, _ in columns):
        return None, f"The same in every round: {words}.{took_part}"
    x = run.round_column("round", run.chosen)
    if x is None or len(x) < 2:
        return None, f"{words} a round.{took_part}"
    return _bytes_figure(x, columns), f"On average {words} a round.{took_part}"


def _descent_bytes(run: Run) -> str:
    """Say what an iteration of moment descent takes."""
    rows = [i for group in run.descents for i in group]
    pairs = [("bytes_up", "up"), ("bytes_down", "down")]
    sums = [(sum(run.rounds[name][i] or 0 for i in rows), way) for name, way in pairs if name in run.rounds]
    if not rows or not sums:
        return ""
    words = " and ".join(f"{human_bytes(total / len(rows))} {way}" for total, way in sums)
    return f" An iteration of moment descent takes {words} on average."


def _bytes_figure(x: Floats, columns: Sequence[tuple[Floats, str]]) -> Figure:
    """Draw bytes up and down over rounds."""
    keep = evenly(len(x), MOST_POINTS)
    svg = line_chart(
        [Line(x[keep].tolist(), c[keep].tolist()) for c, _ in columns],
        x_label="round",
        y_label="bytes",
        title="Bytes by round",
        y_form=byte_ticks,
        integer_x=True,
        from_zero=True,
    )
    whose = {"up": "up, from clients", "down": "down, to clients"}
    return figure("Bytes by round", svg, [Key(whose[name], f"k{i}", "line") for i, (_, name) in enumerate(columns)])


def _took_part(run: Run, met: Floats) -> str:
    """Say how many clients took part in a round."""
    everyone = run.n_clients or 0
    if np.nanmin(met) == np.nanmax(met):
        return "All clients took part in every round." if met[0] == everyone else f"{count(met[0])} clients a round."
    return f"From {count(np.nanmin(met))} to {count(np.nanmax(met))} clients took part in a round."


def _certain(run: Run) -> list[bool] | None:
    """Which clients are clear; a null counts as clear."""
    column = run.clients.get("certain")
    return None if column is None else [value is not False for value in column]


def evenly(n: int, most: int) -> list[int]:
    """Pick at most so many of n places, evenly spaced, first and last among them."""
    return list(range(n)) if n <= most else np.linspace(0, n - 1, most).round().astype(int).tolist()


def ranked(values: Floats) -> tuple[list[int], int]:
    """Clients in ascending order of a value, evenly thinned to what can be drawn, and how many have one."""
    there = np.flatnonzero(np.isfinite(values))
    order = there[np.argsort(values[there], kind="stable")]
    return order[evenly(len(order), MOST_MARKS)].tolist(), len(there)


def thinned(shown: int, there: int) -> str:
    return "" if shown == there else f" Shown: {count(shown)} of {count(there)} clients, evenly spaced."
