# SPDX-License-Identifier: Apache-2.0
"""The report page: reads a run folder, lays its sections out, and writes one HTML file that works offline."""

import base64
import hashlib
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from coterie.files import replace_file
from coterie.registry import METHODS
from coterie.report import predictions, privacy, sections, summary
from coterie.report.frame import style
from coterie.report.run_folder import Run, read_run
from coterie.report.section import Section, rendered

__all__ = ["page", "render", "write_page", "write_report"]

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
    replace_file(path, page.encode("utf-8", "replace"))  # JSON can smuggle half a surrogate pair in
    return path


def render(run: Run) -> str:
    """Lay a run out as HTML."""
    return page(
        "report.html.j2",
        run=run,
        method=summary.method_name(run),
        headline=summary.headline(run),
        started=summary.started(run),
        facts=summary.facts(run),
        warnings=[str(w) for w in run.results.get("warnings") or []],
        sections=[found for lay_out in _sections(run) if (found := lay_out(run)) is not None],
    )


def _sections(run: Run) -> list[Callable[[Run], Section | None]]:
    """The sections of every report, and between them those that the method names."""
    return [
        sections.why,
        sections.comparison,
        predictions.probabilities,
        predictions.intervals,
        *map(_named, _names(run)),
        sections.clients,
        privacy.privacy,
        sections.traffic,
        sections.events,
        sections.use,
        sections.settings,
    ]


def _names(run: Run) -> Iterable[str]:
    """The sections of the run's method, or of any method where it is not registered here."""
    method = METHODS.get(str(run.info.get("method")))
    if method is not None:
        return method.sections
    return dict.fromkeys(name for known in METHODS.values() for name in known.sections)


def _named(where: str) -> Callable[[Run], Section | None]:
    """Import a section that is given as "module:function"."""
    module, _, name = where.partition(":")
    found: Callable[[Run], Section | None] = getattr(import_module(module), name)
    return found


def page(template: str, **shown: Any) -> str:
    """Fill a page in, with its style and its script."""
    script = _file("report.js")
    parts = {
        "style": Markup(style() + _file("report.css")),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    return rendered(template, shown | parts).translate(_CONTROL)


def _file(name: str) -> str:
    """Read a file of this package."""
    return files("coterie.report").joinpath(name).read_text(encoding="utf-8")
