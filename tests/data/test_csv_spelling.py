# SPDX-License-Identifier: Apache-2.0
"""CSV files as they are written: what a hint says, works."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import coterie
from coterie.data.check import check
from coterie.errors import ConfigError, DataError

_DRAW = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "site": _DRAW.choice(list("abc"), 240),
        "age": _DRAW.normal(50, 10, 240).round(2),
        "cost": _DRAW.normal(size=240).round(3),
    }
)
HOW = {"client": "site", "target": "cost"}


def _same(path: Path, **written: str) -> None:
    made = coterie.read(path, **HOW, test_size=0.0, **written).train.frame().sort_values("row")
    assert np.allclose(made.age, FRAME.age)
    assert np.allclose(made.cost, FRAME.cost)


@pytest.mark.parametrize(
    ("how", "hint", "written"),
    [
        ({"sep": ";"}, "--sep ';'", {"sep": ";"}),
        ({"sep": ";", "decimal": ","}, "--sep ';', and --decimal ,", {"sep": ";", "decimal": ","}),
        ({"sep": "|"}, "--sep '|'", {"sep": "|"}),
        ({"sep": "\t"}, "--sep tab", {"sep": "tab"}),
        ({"encoding": "utf-16"}, "--encoding utf-16", {"encoding": "utf-16"}),
    ],
)
def test_files_are_read_as_their_hint_says(
    tmp_path: Path, how: dict[str, str], hint: str, written: dict[str, str]
) -> None:
    path = tmp_path / "t.csv"
    FRAME.to_csv(path, index=False, **how)
    with pytest.raises(DataError) as refused:
        coterie.read(path, **HOW)
    assert hint in refused.value.hint
    assert hint in check(path, **HOW).problems[0].hint
    _same(path, **written)


def test_umlauts_of_an_older_encoding(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    FRAME.assign(site=FRAME.site + "é").to_csv(path, index=False, encoding="latin-1")
    with pytest.raises(DataError, match="not UTF-8") as refused:
        coterie.read(path, **HOW)
    assert "--encoding latin-1" in refused.value.hint
    assert coterie.read(path, **HOW, encoding="latin-1").names.tolist() == ["aé", "bé", "cé"]


@pytest.mark.parametrize(
    ("spelled", "hint", "written"),
    [
        ("{:,.2f}", "--thousands ,", {"thousands": ","}),
        ("{:.2f}", "--decimal ,", {"decimal": ","}),
        ("{:,.2f}", "--decimal , --thousands .", {"decimal": ",", "thousands": "."}),
    ],
)
def test_numbers_that_are_written_otherwise(tmp_path: Path, spelled: str, hint: str, written: dict[str, str]) -> None:
    big = np.abs(FRAME.cost) * 10_000 + 1000
    text = [spelled.format(value) for value in big]
    if "decimal" in written:
        text = [value.replace(",", "_").replace(".", ",").replace("_", ".") for value in text]
    path = tmp_path / "t.csv"
    FRAME.assign(big=text, names=FRAME.site).to_csv(path, index=False)
    with pytest.raises(DataError, match="column 'big' has more than") as refused:
        coterie.read(path, **HOW)
    assert hint in refused.value.hint
    assert any(hint in problem.hint for problem in check(path, **HOW).problems)
    made = coterie.read(path, **HOW, test_size=0.0, **written).train.frame().sort_values("row")
    assert np.allclose(made.big, big.round(2))


def test_names_of_clients_are_not_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    FRAME.assign(site=FRAME.site.map({"a": "1,5", "b": "2", "c": "3"})).to_csv(path, index=False)
    assert coterie.read(path, **HOW, decimal=",").names.tolist() == ["1,5", "2", "3"]


@pytest.mark.parametrize("wrong", [{"sep": ";;"}, {"decimal": "x"}, {"thousands": "."}, {"encoding": "utf-99"}])
def test_nonsense_is_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ConfigError):
        coterie.read(tmp_path / "t.csv", **HOW, **wrong)
