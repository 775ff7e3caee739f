# SPDX-License-Identifier: Apache-2.0
"""The report page: reads a run folder, lays its sections out, and writes one HTML file that works offline."""

import base64
import hashlib
import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from coterie.report import figures, summary, tables
from coterie.report.descent import descent
from coterie.report.frame import style
from coterie.report.mixture import components
from coterie.report.numbers import count
from coterie.report.outliers import outliers
from coterie.report.personal import personal
from coterie.report.run_folder import Run, read_run

__all__ = ["page_parts", "render", "rendered", "write_page", "write_report"]

# Names may hold anything; control characters have no place in HTML.
_CONTROL = {code: "\ufffd" for code in range(32) if chr(code) not in "\t\n\r"}


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder, from what the folder holds, and return its path.

    Parameters
    ----------
    folder : Path
        A run folder with `run.json` and, as far as the run has come, `rounds.parquet` and `clients.parquet`.

    Raises
    ------
    RunError
        The folder is not a run folder, or a file in it is broken.
    """
    folder = Path(folder)
    return write_page(folder, render(read_run(folder)))


def write_page(folder: Path, page: str) -> Path:
    """Write `report.html` into a folder, whole or not at all, and return its path."""
    path = folder / "report.html"
    draft = folder / f".report.{os.getpid()}.tmp"
    try:
        draft.write_bytes(page.encode("utf-8", "replace"))  # JSON can smuggle half a surrogate pair in
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def render(run: Run) -> str:
    """Lay a run out as HTML."""
    return rendered("report.html.j2", _context(run))


def rendered(template: str, context: dict[str, Any]) -> str:
    """Fill a template of this package in."""
    return _template(template).render(**context).translate(_CONTROL)


@cache
def _template(name: str) -> Template:
    """Compile a template once."""
    environment = Environment(
        loader=PackageLoader("coterie.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _context(run: Run) -> dict[str, Any]:
    """Everything the template shows; what is None or empty is left out there."""
    table = summary.comparison(run)
    traffic, traffic_words = figures.bytes_by_round(run)
    happened, n_events = tables.events(run)
    python, shell = tables.how_to_load(run)
    return {
        **page_parts(),
        "run": run,
        "method": summary.method_name(run),
        "headline": summary.headline(run),
        "started": summary.started(run),
        "facts": summary.facts(run),
        "why": run.results.get("why"),
        "warnings": [str(w) for w in run.results.get("warnings") or []],
        "comparison": table,
        "methods": None if table is None else figures.methods(run, table),
        "gains": figures.gains(run),
        "descent": descent(run),
        "components": components(run),
        "outliers": outliers(run),
        "personal": personal(run),
        "training": [f for f in (*figures.training(run), figures.cluster_sizes(run)) if f],
        "placing": [f for f in (figures.client_map(run), figures.margins(run)) if f],
        "clusters": tables.cluster_table(run),
        "profiles": tables.profiles(run),
        "clients": tables.client_table(run),
        "traffic": traffic,
        "traffic_words": traffic_words,
        "traffic_facts": summary.traffic(run),
        "events": happened,
        "n_events": n_events,
        "settings": tables.settings(run.part("config")),
        "data": tables.settings(run.part("data")),
        "versions": tables.settings({"coterie": run.info.get("coterie"), **run.part("versions")}),
        "python": python,
        "shell": shell,
    }


def page_parts() -> dict[str, Any]:
    """What every page has: style, script, and how counts are written."""
    script = _file("report.js")
    return {
        "count": count,
        "style": Markup(style() + _file("report.css")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _file(name: str) -> str:
    """Read a file of this package."""
    return files("coterie.report").joinpath(name).read_text(encoding="utf-8")
