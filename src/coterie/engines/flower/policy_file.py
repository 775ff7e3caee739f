# SPDX-License-Identifier: Apache-2.0
"""A node's policy file: what its owner lets a server ask. See `coterie.engines.flower.policy` for the checks."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.errors import ConfigError
from coterie.limits import MOST_CONFIG_BYTES

__all__ = ["Budget", "Data", "Individual", "Policy", "Run", "SecureSums", "Sums", "WholeClients", "read_policy"]

Patterns = tuple[str, ...]  # names; * stands for any letters


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WholeClients(_Section):
    """Which of the node's clients take part at all."""

    rows: int = Field(1, ge=1)  # at least; the server never hears of others


class Sums(_Section):
    """What stands behind a sum over clients that leaves the node."""

    clients: int = Field(1, ge=1)  # a node with one client is the common case
    rows: int = Field(2, ge=1)  # the sum over one row is the row


class Individual(_Section):
    """What stands behind a value of a single client that leaves the node."""

    rows: int = Field(1, ge=1)  # a loss on one row is not the row
    fields: Patterns = ("*",)  # which may leave: "field", or "function.field"
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
    """What one run may ask, and whether somebody looks at it first."""

    methods: Patterns = ("*",)  # by what the run says of itself
    functions: Patterns = ("*",)  # client functions: "function", or "module.function"
    questions: int = Field(100_000, ge=1)
    approval: bool = False  # whether a run waits until the node's owner has approved it


class Budget(_Section):
    """What all runs may ask together; no limit where nothing is said."""

    questions: int | None = Field(None, ge=0)
    epsilon: float | None = Field(None, ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)  # that goes with it
    epsilon_required: bool = False  # whether answers without noise, which have no epsilon, are refused


class SecureSums(_Section):
    """What secure sums must be, and whether anything else may leave."""

    only: bool = False  # whether only masked sums may leave, once rows were introduced
    nodes: int = Field(2, ge=2)  # in a sum, at least
    peers: dict[str, str] = {}  # name -> public key of the nodes that may be in a sum; empty: any


class Log(_Section):
    """How much of what was asked is kept."""

    megabytes: float = Field(64.0, ge=0.1, le=100_000)


class Stored(_Section):
    """What clients keep of runs."""

    runs: int = Field(100, ge=1)
    days: float = Field(7.0, ge=0)


class Policy(_Section):
    """All that a node's owner may say; without a file, what stands here."""

    clients: WholeClients = WholeClients()
    sums: Sums = Sums()
    individual: Individual = Individual()
    divisions: Divisions = Divisions()
    data: Data = Data()
    run: Run = Run()
    budget: Budget = Budget()
    secure: SecureSums = SecureSums()
    log: Log = Log()
    state: Stored = Stored()


def read_policy(file: Path | None) -> Policy:
    """Read a node's policy file; None gives the defaults."""
    if file is None:
        return Policy()
    try:
        with file.open("rb") as opened:
            said = opened.read(MOST_CONFIG_BYTES + 1)
        if len(said) > MOST_CONFIG_BYTES:
            raise ConfigError(
                f"the policy {file} has more than {MOST_CONFIG_BYTES:,} bytes", "a policy is a short text"
            )
        return Policy.model_validate(tomllib.loads(said.decode()))
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
