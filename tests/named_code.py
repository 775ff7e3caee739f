# SPDX-License-Identifier: Apache-2.0
"""Resolve the files, functions and pieces of code that pages of the documentation name between backticks."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["stale"]

_CODE = Path(__file__).resolve().parents[1] / "src" / "coterie"
_OBJECT = "model"  # there are modules of this name too, but pages mean the model that is trained
_QUOTED = r"`([^`]+)`"
_LIST = rf"{_QUOTED}(?:(?:,| and|, and) {_QUOTED})?(?:(?:,| and|, and) {_QUOTED})? (?:in|of) `([\w/]+\.py|\w+)`"


def stale(text: str) -> list[str]:
    """What a page names and the code does not have."""
    return [*_missing_files(text), *_missing_names(text), *_misplaced(text)]


def _missing_files(text: str) -> Iterator[str]:
    for word in re.findall(r"`([\w./]+\.py|src/[\w./]+)`", text):
        if not _files(word):
            yield f"there is no file {word}"


def _missing_names(text: str) -> Iterator[str]:
    """Names that are defined nowhere: as a function, class, member, argument, constant, module, or field of a message."""
    for quoted in re.findall(_QUOTED, text):
        word = re.match(r"[A-Za-z_][\w.]*", quoted)
        if (
            word is None
            or "/" in quoted
            or quoted.endswith((".py", ".safetensors", ".parquet", ".csv"))
            or " " in quoted
        ):
            continue
        if not _known(word.group().rstrip(".")):
            yield f"there is no {quoted}"


def _misplaced(text: str) -> Iterator[str]:
    """`NAME` in `FILE.py`, or `CODE` in `FUNCTION`, where it is not there."""
    for *named, place in re.findall(_LIST, text):
        for quoted in filter(None, named):
            if place.endswith(".py"):
                name = re.match(r"[\w.]+", quoted)
                there = name is not None and any(name.group() in _defined(path) for path in _files(place))
            else:
                words = set(re.findall(r"[A-Za-z_]\w*", quoted))
                there = any(words <= source for source in _sources(place))
            if not there:
                yield f"{quoted} is not in {place}"


def _known(word: str) -> bool:
    first, _, last = word.rpartition(".")
    if not first:
        return word in _everywhere()
    owner = first.rpartition(".")[2]
    if owner[:1].isupper() or owner.startswith("_"):  # a class
        return any(f"{owner}.{last}" in _defined(path) for path in _modules())
    modules = [path for path in _modules() if path.stem == owner]
    if modules and owner != _OBJECT:
        return any(last in _defined(path) for path in modules)
    return last in _everywhere()  # a member of an object, or an option of a group


@cache
def _paths() -> list[Path]:
    return sorted([_CODE, *_CODE.rglob("*")])


@cache
def _modules() -> list[Path]:
    return [path for path in _paths() if path.suffix == ".py"]


def _files(word: str) -> list[Path]:
    """Files or folders whose path ends so."""
    return [path for path in _paths() if f"/{path.as_posix()}/".endswith(f"/{word.rstrip('/')}/")]


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """All of a module's syntax, itself first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def _defined(path: Path) -> frozenset[str]:
    """Functions, classes, their members and arguments, and what a module assigns."""
    found: set[str] = set()
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{member}" for member in _members(node))}
    module = _nodes(path)[0]
    assert isinstance(module, ast.Module)
    return frozenset(found | set(_targets(module.body)))


def _members(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield from (argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
        return
    yield from _targets(node.body)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def _targets(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        aims = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (aim.id for aim in aims if isinstance(aim, ast.Name))


@cache
def _everywhere() -> frozenset[str]:
    """All that is defined, all modules, and all words that code spells out: fields of messages, choices."""
    found: set[str] = set()
    for path in _modules():
        found |= {path.stem} | {part for name in _defined(path) for part in name.split(".")}
        for node in _nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w-]+", node.value):
                found.add(node.value)
    return frozenset(found)


def _sources(function: str) -> list[set[str]]:
    """Words of every function or class of this name."""
    return [set(re.findall(r"[A-Za-z_]\w*", "\n".join(lines))) for lines in _bodies().get(function, [])]


@cache
def _bodies() -> dict[str, list[list[str]]]:
    """Lines of every function and class, by name."""
    found: dict[str, list[list[str]]] = {}
    for path in _modules():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in _nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, []).append(lines[node.lineno - 1 : node.end_lineno])
    return found
