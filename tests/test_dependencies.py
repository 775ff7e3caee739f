# SPDX-License-Identifier: Apache-2.0
"""What is imported is declared, and what only an extra brings is imported by nothing that works without it."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTION = {
    "sklearn": "scikit-learn",
    "annotated_types": "annotated-types",
    "google": "protobuf",
    "dp_accounting": "dp-accounting",
}  # where it is not called like its module
OPTIONAL = ("coterie.engines.flower.",)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ;]", line)[0].lower() for line in requirements}


NEEDED = names(PROJECT["dependencies"])
EXTRA = names(PROJECT["optional-dependencies"]["flower"])


@cache
def modules() -> dict[str, ast.Module]:
    """All modules of the package by their names; a package's own code has the name of its folder."""
    files = {path: path.relative_to(SOURCE).with_suffix("").parts for path in sorted(SOURCE.rglob("*.py"))}
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): ast.parse(path.read_text(encoding="utf-8"))
        for path, parts in files.items()
    }


def imported(tree: ast.AST, *, at_once: bool = False) -> Iterator[str]:
    """What a module imports; `at_once`, when it is imported itself: not in functions, nor for the checker of types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_once and (isinstance(node, ast.FunctionDef) or is_for_types(node))):
            yield from imported(node, at_once=at_once)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def distribution(module: str) -> str | None:
    """Who brings a module; None for Python and this package."""
    top = module.partition(".")[0]
    return None if top in sys.stdlib_module_names or top == "coterie" else DISTRIBUTION.get(top, top)


def test_every_import_is_declared() -> None:
    undeclared = {
        (module, found)
        for module, tree in modules().items()
        for found in map(distribution, imported(tree))
        if found is not None and found not in NEEDED | (EXTRA if module.startswith(OPTIONAL) else set())
    }
    assert undeclared == set()


def test_every_dependency_is_imported() -> None:
    found = {distribution(name) for tree in modules().values() for name in imported(tree)}
    assert found - {None} == NEEDED | EXTRA


def imported_by_commands(tree: ast.Module) -> set[str]:
    """What a module imports with itself; commands import in their functions what they need."""
    at_once = set(imported(tree, at_once=True))
    return set(imported(tree)) if "typer" in at_once else at_once


def test_the_command_line_works_without_what_an_extra_brings() -> None:
    known = modules()
    reached, todo = set(), ["coterie.cli.commands", "coterie.__main__"]
    while todo:
        name = todo.pop()
        parents = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)]
        for module in set(parents) & known.keys() - reached:
            reached.add(module)
            todo += [found for found in imported_by_commands(known[module]) if found.startswith("coterie")]
    assert {"coterie", "coterie.cli.flower", "coterie.engines.flower.federation"} <= reached
    brought = {(name, distribution(found)) for name in reached for found in imported_by_commands(known[name])}
    assert {(name, found) for name, found in brought if found in EXTRA} == set()


def test_the_import_contract_has_every_package_in_at_most_twelve_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = settings["contracts"][0]["layers"]
    named = {name for layer in layers for name in re.split(r"\s*[:|]\s*", layer)}
    everything = {
        path.stem for path in (SOURCE / "coterie").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    engines = {
        f"engines.{path.stem}"
        for path in (SOURCE / "coterie" / "engines").iterdir()
        if path.suffix == ".py" or path.name == "flower"
    }
    wanted = everything - {"__init__", "__main__", "engines"} | engines - {"engines.__init__"}
    assert named == {f"coterie.{name}" for name in wanted}
    assert len(layers) <= 12
