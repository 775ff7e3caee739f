# SPDX-License-Identifier: Apache-2.0
"""What a section of the report is, and the templates that sections and pages are filled into."""

from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from coterie.report.numbers import count

__all__ = ["Section", "rendered", "section"]


class Section(NamedTuple):
    """One section: its anchor on the page, its title, and what it shows."""

    id: str
    title: str
    body: Markup


def section(id: str, title: str, **shown: Any) -> Section:
    """Fill in the template that has the section's name."""
    return Section(id, title, Markup(rendered(f"sections/{id}.html.j2", shown)))


def rendered(template: str, shown: dict[str, Any]) -> str:
    """Fill a template of this package in; what it shows is escaped."""
    return _environment().get_template(template).render(**shown)


@cache
def _environment() -> Environment:
    """Made once, since it keeps what it has compiled."""
    environment = Environment(
        loader=PackageLoader("coterie.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["count"] = count
    return environment
