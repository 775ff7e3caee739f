# SPDX-License-Identifier: Apache-2.0
"""A node's policy file: what its owner lets a server ask. See `coterie.engines.flower.policy` for the checks."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.errors import ConfigError

__all__ = ["Data", "Individual", "Policy", "SecureSums", "Sums", "read_policy"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Sums(_Section):
    """What stands behind a sum over clients that leaves the node."""

    clients: int = Field(1, ge=1)  # a node with one client is the common case
    rows: int = Field(2, ge=1)  # the sum over one row is the row


class Individual(_Section):
    """What stands behind a value of a single client that leaves the node."""

    rows: int = Field(1, ge=1)  # a loss on one row is not the row
    updates: bool = False  # whether clients' own updates may leave, for trimmed means and medians


class Divisions(_Section):
    """How a server may divide rows: into test rows, folds and the like."""

    share: float = Field(0.05, ge=0, le=0.5)  # at least, on either side
    number: int = Field(24, ge=0)  # different ones in a run: each is another equation for the rows


class Data(_Section):
    """What a server may make of columns, beside the node's own client column and target."""

    categorical: tuple[str, ...] = ()  # columns of numbers that may be categories: the server is told all their values
    classes: bool = False  # whether a target of real numbers may be classes: likewise


class Run(_Section):
    """What one run may ask."""

    questions: int = Field(100_000, ge=1)


class Stored(_Section):
    """What clients keep of runs."""

    runs: int = Field(100, ge=1)
    days: float = Field(7.0, ge=0)


class SecureSums(_Section):
    """What secure sums must be."""

    only: bool = False  # whether nothing else than secure sums leaves the node, once rows were introduced
    nodes: int = Field(2, ge=2)  # in a sum, at least
    peers: dict[str, str] = {}  # name -> public key of the nodes that may be in a sum; empty: any


class Policy(_Section):
    """All that a node's owner may say; without a file, what stands here."""

    sums: Sums = Sums()
    individual: Individual = Individual()
    divisions: Divisions = Divisions()
    data: Data = Data()
    run: Run = Run()
    state: Stored = Stored()
    secure: SecureSums = SecureSums()


def read_policy(file: Path | None) -> Policy:
    """Read a node's policy file; None gives the defaults."""
    if file is None:
        return Policy()
    try:
        return Policy.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"the policy {file} cannot be read: {error.strerror}", "check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy {file} is not valid TOML: {error}", "a line looks like: rows = 5") from None
    except ValidationError as error:
        raise ConfigError(*_complaint(file, error)) from None


def _complaint(file: Path, error: ValidationError) -> tuple[str, str]:
    first: Any = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"the policy {file} says '{where}', which no policy has", f"there are {', '.join(_names(Policy))}"
    said = first["msg"][0].lower() + first["msg"][1:]
    return f"the policy {file}: {where} is {first['input']!r}: {said}", "docs/policy.md lists what it may say"


def _names(kind: type[BaseModel], before: str = "") -> list[str]:
    found = []
    for name, one in kind.model_fields.items():
        inner = one.annotation
        nested = isinstance(inner, type) and issubclass(inner, BaseModel)
        found += _names(inner, f"{before}{name}.") if nested else [before + name]  # type: ignore[arg-type]
    return found
