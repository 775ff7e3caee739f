# SPDX-License-Identifier: Apache-2.0
"""The file that a site shares in place of its rows: counts, means and sums of products by client, as JSON.

A person can read what is in it. What is read here may come from anybody: it is bounded, and checked to be the sums of rows.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from torch import Tensor

from coterie.data.clients import left_out
from coterie.data.draws import DEALS, NEXT_DEAL, First, Fold, Rule, Share
from coterie.data.moments import Moments, spectrum
from coterie.data.schema import Column, Missing, Schema
from coterie.errors import DataError
from coterie.limits import MOST_NAME, MOST_SITE_BYTES, MOST_SITE_NUMBERS

__all__ = ["MOST_NUMBERS", "Drawn", "Site", "read_site"]

MOST_NUMBERS = 1000  # in a row
_LARGEST = 1e100
_AGAIN = "write it again with `coterie summarise`, of the same version"
_MOST_ROWS = 1 << 40
_DIGITS = 15  # of numbers that were not rounded
_ABOUT = {
    "file": "Counts, means and sums of products of rows, by client: what linear regression needs of a site. No rows.",
    "numbers": "A row of the data is these numbers, in this order. The last one is the target.",
    "part": "rows: how many. mean: of every number. products: sums over the rows of (number i - mean i) times "
    "(number j - mean j), the lower triangle.",
    "folds": "The training rows, dealt to folds.",
    "folds_again": "The training rows again, dealt to folds another time.",
    "test": "The rows that nothing is trained on.",
    "validation": "The training rows again: most of them, and the others, by which starts and penalties are chosen.",
    "few_shot": "All rows again, as if the client were new: those that judge, and the few that it shows.",
    "support": "All rows again, as if the client were new: the half that judges, and the half that it shows.",
}


_T = TypeVar("_T")
_Name = Annotated[str, Field(max_length=MOST_NAME)]
_List = Annotated[list[_T], FailFast()]  # the first fault is enough: a file may have millions


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class Drawn(_Model):
    """How rows were divided before they were summed: by the seed and the client's name."""

    seed: int = Field(0, ge=0)
    test_size: float = Field(0.2, ge=0, lt=1)
    folds: int = Field(ge=2, le=100)
    deals: int = Field(1, ge=1, le=DEALS)
    validation: float = Field(gt=0, lt=1)
    few_shot: int | None = Field(None, ge=1, le=1_000_000)
    support: float = Field(gt=0, lt=1)

    @property
    def rules(self) -> dict[str, Rule]:
        """Division -> how rows are taken, in the order of the file."""
        rules: dict[str, Rule] = {"folds": Fold(0, self.folds), "test": Share(self.test_size)}
        rules["validation"] = Share(self.validation)
        if self.deals > 1:
            rules["folds_again"] = Fold(0, self.folds)
        if self.few_shot is not None:
            rules |= {"few_shot": First(self.few_shot), "support": Share(self.support)}
        return rules

    def n_parts(self, division: str) -> int:
        """How many parts a division has: the training rows, which are left by `test`, are in the folds."""
        return {"folds": self.folds, "folds_again": self.folds, "test": 1}.get(division, 2)

    def seed_of(self, division: str) -> int:
        """By which rows are divided."""
        return self.seed + NEXT_DEAL if division == "folds_again" else self.seed


class _Part(_Model):
    rows: int = Field(ge=0, le=_MOST_ROWS)
    mean: _List[float]
    products: _List[_List[float]]


class _Client(_Model):
    client: str = Field(min_length=1, max_length=MOST_NAME)
    folds: _List[_Part]
    test: _List[_Part]
    validation: _List[_Part]
    folds_again: _List[_Part] = Field(default_factory=list)
    few_shot: _List[_Part] = Field(default_factory=list)
    support: _List[_Part] = Field(default_factory=list)


class _Column(_Model):
    name: _Name
    levels: _List[_Name] = Field(default_factory=list)  # of a categorical column


class _Rows(_Model):
    client: _Name
    target: _Name
    features: _List[_Column] = Field(min_length=1, max_length=MOST_NUMBERS)
    missing: Missing


class _LeftOut(_Model):
    rows_with_missing_values: int = Field(ge=0)
    clients_with_too_few_rows: int = Field(ge=0)


class _File(_Model):
    format: Literal["coterie site summary"]
    version: Literal[1]
    columns: _Rows
    numbers: _List[str] = Field(max_length=MOST_NUMBERS)
    drawn: Drawn
    digits: int | None = Field(None, ge=1, le=17)
    left_out: _LeftOut
    clients: _List[_Client] = Field(min_length=1)


@dataclass(frozen=True)
class Site:
    """What one site tells of its rows.

    Attributes
    ----------
    schema : Schema
        Its columns, with the levels that it has.
    names : ndarray
        [M] its clients.
    drawn : Drawn
        How rows were divided.
    moments : dict
        Division -> sums of its parts: "folds", "test", "validation", with a second deal "folds_again", and "few_shot" and
        "support" for new clients.
    digits : int or None
        To which numbers were rounded.
    dropped_rows, dropped_clients : int
        What was left out: rows with missing values, and clients with too few rows.
    """

    schema: Schema
    names: np.ndarray
    drawn: Drawn
    moments: dict[str, Moments]
    digits: int | None = None
    dropped_rows: int = 0
    dropped_clients: int = 0

    @property
    def unit(self) -> float:
        """How far a number may be from what it was, relative to it."""
        return 1e-9 + 10.0 ** (1 - (self.digits or _DIGITS))

    def rounded(self, digits: int) -> "Site":
        """Keep so many significant digits of means and products."""

        def some(values: Tensor) -> Tensor:
            flat = [float(f"{value:.{digits}g}") for value in values.flatten().tolist()]
            return torch.tensor(flat, dtype=torch.float64).view(values.shape)

        moments = {name: Moments(m.n, some(m.mean), some(m.products)) for name, m in self.moments.items()}
        return replace(self, moments=moments, digits=digits)

    def left_out(self) -> list[str]:
        """Say what was not summed."""
        return left_out(self.dropped_rows, self.dropped_clients)

    def reveals(self) -> list[str]:
        """Say what somebody can learn of the rows who has the file."""
        size = self.schema.n_features + 1
        parts = torch.cat([m.n for m in self.moments.values()], 1)  # [M, V]
        few = int(((parts > 0) & (parts < size + 1)).any(1).sum())
        single = int((parts == 1).any(1).sum())
        clients = f"{len(self.names)} client{'s' * (len(self.names) != 1)}"
        said = [f"means, variances and correlations of {size} numbers, for {clients} in {parts.shape[1]} parts each"]
        if few:
            said.append(
                f"{few} of {clients} have a part with fewer rows than columns + 1 ({size + 1}): its rows can be "
                "reconstructed in part"
            )
        if single:
            said.append(f"{single} of {clients} have a part of a single row, which can be read off")
        return said

    def text(self) -> str:
        """The file: a head that says what is what, and a line for every part."""
        columns = [
            {"name": c.name} if c.kind == "numeric" else {"name": c.name, "levels": list(c.levels)}
            for c in self.schema.columns
        ]
        unused = {"folds_again", "few_shot", "support"} - self.moments.keys()
        about = {name: said for name, said in _ABOUT.items() if name not in unused}
        head = {
            "format": "coterie site summary",
            "version": 1,
            "about": about | {"reveals": self.reveals()},
            "columns": {
                "client": self.schema.client, "target": self.schema.target, "features": columns,
                "missing": self.schema.missing,
            },
            "numbers": [*self.schema.feature_names, self.schema.target],
            "drawn": self.drawn.model_dump(),
            "digits": self.digits,
            "left_out": {
                "rows_with_missing_values": self.dropped_rows, "clients_with_too_few_rows": self.dropped_clients
            },
        }  # fmt: skip
        clients = ",\n".join(self._client(i) for i in range(len(self.names)))
        return f'{json.dumps(head, indent=1, ensure_ascii=False)[:-2]},\n "clients": [\n{clients}\n ]\n}}\n'

    def _client(self, number: int) -> str:
        lines = [f'   "client": {json.dumps(str(self.names[number]), ensure_ascii=False)}']
        for name, moments in self.moments.items():
            parts = ",\n    ".join(json.dumps(_part(moments, number, v)) for v in range(moments.n.shape[1]))
            lines.append(f'   "{name}": [\n    {parts}\n   ]')
        return "  {\n" + ",\n".join(lines) + "\n  }"


def _part(moments: Moments, number: int, part: int) -> dict[str, Any]:
    products = moments.products[number, part].tolist()
    triangle = [row[: i + 1] for i, row in enumerate(products)]
    return {"rows": int(moments.n[number, part]), "mean": moments.mean[number, part].tolist(), "products": triangle}


# -- reading ----------------------------------------------------------------------------------------------------------
def read_site(path: Path) -> Site:
    """Read a site's file, or refuse it in one sentence."""
    file, where = _parsed(path), f"site summary '{path}'"
    schema = _schema(file.columns)
    numbers = [*schema.feature_names, file.columns.target]
    if file.numbers != numbers or len(set(numbers)) != len(numbers):
        raise DataError(f"{where} names other numbers than its columns have", _AGAIN)
    if len(numbers) > MOST_NUMBERS:
        raise DataError(f"{where} has {len(numbers)} numbers a row; the limit is {MOST_NUMBERS}", "leave columns out")
    moments = {
        name: _moments(where, file.clients, name, file.drawn.n_parts(name), len(numbers)) for name in file.drawn.rules
    }
    names, left_out = np.array([one.client for one in file.clients]), file.left_out
    if len(set(names.tolist())) < len(names):
        raise DataError(f"{where} has a client twice", _AGAIN)
    dropped = (left_out.rows_with_missing_values, left_out.clients_with_too_few_rows)
    site = Site(schema, names, file.drawn, moments, file.digits, *dropped)
    _check_counts(where, site)
    _check_products(where, site)
    _check_totals(where, site)
    return site


def _parsed(path: Path) -> _File:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_SITE_BYTES + 1)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}", "check the path, and its permissions") from None
    if len(content) > MOST_SITE_BYTES:
        raise DataError(f"'{path}' is larger than {MOST_SITE_BYTES >> 20} MB", "no site summary is as large as that")
    if content.count(b",") + content.count(b"[") > MOST_SITE_NUMBERS:
        raise DataError(
            f"'{path}' has more than {MOST_SITE_NUMBERS:,} numbers",
            "summarise fewer clients, or fewer columns, in a file",
        )
    try:
        return _File.model_validate_json(content)
    except ValidationError as error:
        raise _complaint(path, error) from None


def _complaint(path: Path, error: ValidationError) -> DataError:
    first = error.errors(include_url=False, include_input=False)[0]
    at = ".".join(map(str, first["loc"]))
    if first["type"] == "json_invalid":
        return DataError(f"'{path}' is not JSON, or cut short", _AGAIN)
    if at in ("", "format", "version"):
        return DataError(f"'{path}' is not a site summary of this version", _AGAIN)
    said = str(first["msg"])
    return DataError(f"site summary '{path}' is not as it should be at {at}: {said[:1].lower()}{said[1:]}", _AGAIN)


def _schema(rows: _Rows) -> Schema:
    columns = tuple(
        Column(name=c.name, kind="categorical", levels=tuple(c.levels)) if c.levels else Column(name=c.name)
        for c in rows.features
    )
    return Schema(client=rows.client, target=rows.target, columns=columns, task="regression", missing=rows.missing)


def _moments(where: str, clients: list[_Client], name: str, parts: int, size: int) -> Moments:
    """Put the parts of a division together, of all clients."""
    every: list[_Part] = []
    for one in clients:
        own = getattr(one, name)
        fit = all(len(p.mean) == size and [len(row) for row in p.products] == [*range(1, size + 1)] for p in own)
        if len(own) != parts or not fit:
            raise DataError(
                f"{where} has a client '{one.client}' whose {name} are not {parts} parts of {size} numbers", _AGAIN
            )
        every += own
    shape = (len(clients), parts)
    products = torch.zeros(len(every), size, size, dtype=torch.float64)
    low = torch.tril_indices(size, size)
    triangles = [[value for row in p.products for value in row] for p in every]
    products[:, low[0], low[1]] = torch.tensor(triangles, dtype=torch.float64)
    products = products + products.tril(-1).transpose(-2, -1)
    mean = torch.tensor([p.mean for p in every], dtype=torch.float64)
    n = torch.tensor([p.rows for p in every], dtype=torch.int64)
    return Moments(n.view(shape), mean.view(*shape, size), products.view(*shape, size, size))


# -- checking ---------------------------------------------------------------------------------------------------------
def _check_counts(where: str, site: Site) -> None:
    """Parts have as many rows as the rules give them."""
    counts = {name: moments.n.numpy() for name, moments in site.moments.items()}
    train = counts["folds"].sum(1)
    total = train + counts["test"].sum(1)
    _refuse(where, site, total == 0, "has no rows")
    for name, rule in site.drawn.rules.items():
        own = total if name in ("test", "few_shot", "support") else train
        if isinstance(rule, Fold):
            expected = np.stack([replace(rule, number=v).taken(own) for v in range(rule.n_folds)], 1)
        else:
            taken = rule.taken(own)
            expected = taken[:, None] if name == "test" else np.stack([own - taken, taken], 1)
        _refuse(where, site, (counts[name] != expected).any(1), f"has other numbers of rows in {name} than are drawn")


def _check_products(where: str, site: Site) -> None:
    """Products are those of some rows: positive semidefinite, and of no larger rank than there are rows."""
    size = site.schema.n_features + 1
    allowed = 2 * size * site.unit
    for name, moments in site.moments.items():
        largest = moments.products.abs().amax((-2, -1)).sqrt().maximum(moments.mean.abs().amax(-1))
        nothing = (moments.n == 0) & (largest > 0)
        _refuse(where, site, ((largest > _LARGEST) | nothing).any(1), f"has impossible numbers in {name}")
        values, _ = spectrum(moments.products)  # [M, V, E]
        beyond = torch.arange(size) >= (moments.n - 1)[..., None]
        bad = (values < -allowed) | (beyond & (values > allowed))
        negative = moments.products.diagonal(dim1=-2, dim2=-1) < 0
        _refuse(where, site, (bad | negative).flatten(1).any(1), f"has products in {name} that no rows have")


def _check_totals(where: str, site: Site) -> None:
    """However rows are divided, their sums are the same."""
    moments = site.moments
    train = moments["folds"]
    every = Moments.side_by_side([train, moments["test"]])
    pairs = {"validation": train, "folds_again": train, "few_shot": every, "support": every}
    for name, other in pairs.items():
        if name in moments:
            one, two = _about_zero(moments[name]), _about_zero(other)
            scale = two.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
            off = (one - two).abs() > 8 * site.unit * scale[:, :, None] * scale[:, None]
            _refuse(where, site, off.flatten(1).any(1), f"has other sums in {name} than in folds and test")


def _about_zero(moments: Moments) -> Tensor:
    """Sums of products of all parts about zero, a column of ones among the numbers.  [M, E + 1, E + 1]"""
    z = torch.cat([moments.mean, torch.ones_like(moments.mean[..., :1])], -1)
    total = torch.einsum("mv,mve,mvf->mef", moments.n.to(torch.float64), z, z)
    total[:, :-1, :-1] += moments.products.sum(1)
    return total


def _refuse(where: str, site: Site, bad: np.ndarray | Tensor, what: str) -> None:
    if bool(bad.any()):
        name = site.names[int(np.asarray(bad).argmax())]
        raise DataError(f"{where} has a client '{name}' that {what}", _AGAIN)
