# SPDX-License-Identifier: Apache-2.0
"""What the tests of reports have in common: names that attack, changes to run.json, and reading a page."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

EVIL = "<script>alert('x')</script>"
VOID = {"meta", "input", "br", "link", "img", "hr"}


def edit(folder: Path, **changes: Any) -> None:
    """Change parts of run.json; None removes one."""
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for name, value in changes.items():
        info[name] = value
    (folder / "run.json").write_text(json.dumps({k: v for k, v in info.items() if v is not None}), encoding="utf-8")


class Checker(HTMLParser):
    """Collects text and fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def words(page: str) -> str:
    return " ".join("".join(parse(page).text).split())


def section(page: str, name: str) -> str:
    """One section of a page, by its id."""
    return page.split(f'<section id="{name}">')[1].split("</section>", maxsplit=1)[0]
