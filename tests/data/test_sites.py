# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest
import torch
from pydantic import ValidationError

import coterie
from coterie import ConfigError, DataError, summarise
from coterie.data.draws import First, Share
from coterie.data.moments import moments_of
from coterie.data.site_files import _File, read_site
from coterie.data.stand_ins import StandIns
from coterie.evaluate import place
from coterie.local.parts import part_of
from sites import Sites, planted_table, written


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return written(tmp_path_factory.mktemp("sites"), planted_table(), "who", target="y", few_shot=5)


# -- what is written --------------------------------------------------------------------------------------------------
def test_a_person_finds_in_the_file_what_is_in_it(sites: Sites) -> None:
    said = json.loads((sites.summaries / "site-0.json").read_text())
    assert said["numbers"] == ["age", "dose", "ward=a", "ward=b", "ward=c", "length", "y"]
    assert said["columns"]["features"][2] == {"name": "ward", "levels": ["a", "b", "c"]}
    assert {"part", "folds", "test", "validation", "few_shot", "support", "reveals"} <= said["about"].keys()
    table = pc.read_csv(sites.tables[0])
    first = said["clients"][0]
    own = table.filter(pa.compute.equal(table["who"], first["client"]))
    rows = [part["rows"] for part in first["folds"] + first["test"]]
    assert sum(rows) == own.num_rows
    mean = np.average([part["mean"][1] for part in first["folds"] + first["test"]], weights=rows)
    assert mean == pytest.approx(own["dose"].to_numpy().mean())
    assert str(own["dose"][0].as_py()) not in (sites.summaries / "site-0.json").read_text()


def test_what_new_clients_would_show_is_written_only_when_asked_for(sites: Sites, tmp_path: Path) -> None:
    summarise(sites.tables[0], tmp_path / "site.json", client="who", target="y")
    said = json.loads((tmp_path / "site.json").read_text())
    assert not {"few_shot", "support"} & (said["about"].keys() | said["clients"][0].keys())
    with pytest.raises(ConfigError, match="without what clients would show"):
        coterie.read(tmp_path, new_clients=0.2)


def test_numbers_are_rounded_to_the_digits_asked_for(sites: Sites, tmp_path: Path) -> None:
    summarise(sites.tables[0], tmp_path / "site.json", client="who", target="y", digits=3)
    part = json.loads((tmp_path / "site.json").read_text())["clients"][0]["folds"][0]
    values = [*part["mean"], *(value for row in part["products"] for value in row)]
    assert all(value == float(f"{value:.3g}") for value in values)
    exact = read_site(sites.summaries / "site-0.json").moments["folds"]
    torch.testing.assert_close(read_site(tmp_path / "site.json").moments["folds"].mean, exact.mean, rtol=6e-3, atol=0)


def test_small_clients_are_left_out_and_counted(sites: Sites, tmp_path: Path) -> None:
    owner, counts = np.unique(pc.read_csv(sites.tables[0])["who"].to_numpy(zero_copy_only=False), return_counts=True)
    least = int(np.sort(counts)[2])
    site = summarise(sites.tables[0], tmp_path / "site.json", client="who", target="y", min_rows=least)
    assert site.left_out() == ["2 clients with too few rows are left out"]
    assert set(site.names) == set(owner[counts >= least])
    assert coterie.read(tmp_path).dropped_clients == 2


def test_what_the_file_reveals_counts_clients_with_few_rows(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    owner = np.repeat(["large", "small"], [200, 6])  # 160 rows in 5 folds, and 5 rows in 5 folds
    pc.write_csv(pa.table({"who": owner, "x": draw.normal(size=206), "y": draw.normal(size=206)}), tmp_path / "a.csv")
    said = summarise(tmp_path / "a.csv", tmp_path / "a.json", client="who", target="y").reveals()
    assert said == [
        "means, variances and correlations of 2 numbers, for 2 clients in 13 parts each",
        "1 of 2 clients have a part with fewer rows than columns + 1 (3): its rows can be reconstructed in part",
        "1 of 2 clients have a part of a single row, which can be read off",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"missing": "mean"}, "filled with the mean of all sites"),
        ({"target": "ward"}, "has classes"),
        ({"folds": 1}, "folds is 1"),
        ({"deals": 3}, "deals is 3"),
        ({"digits": 0}, "digits is 0"),
        ({"few_shot": 0}, "few_shot is 0"),
        ({"out": "site.csv"}, "is called otherwise"),
    ],
)
def test_what_cannot_be_summarised_is_refused_and_nothing_is_written(
    sites: Sites, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    out = tmp_path / options.pop("out", "site.json")
    with pytest.raises(ConfigError, match=sentence):
        summarise(sites.tables[0], out, **{"client": "who", "target": "y", **options})
    assert not list(tmp_path.iterdir())


# -- what is read -----------------------------------------------------------------------------------------------------
def test_clients_are_those_of_the_pooled_rows(sites: Sites) -> None:
    """The same clients are new, the same rows are held out, and levels are those of all sites."""
    rows = coterie.read(sites.pooled, client="who", target="y", new_clients=0.2)
    ours = coterie.read(sites.summaries, new_clients=0.2)
    assert ours.schema == rows.schema
    for name in ("train", "test", "newcomers"):
        one, other = getattr(ours, name), getattr(rows, name)
        assert isinstance(one, StandIns)
        assert one.names.tolist() == other.names.tolist()
        found, known = moments_of(one), moments_of(other)
        assert torch.equal(found.n, known.n)
        torch.testing.assert_close(found.mean, known.mean, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(found.products, known.products, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("part", "divided"),
    [
        ("train", lambda rows: rows.split(0.2, seed=0, purpose="validation")),
        ("train", lambda rows: [half for pair in rows.fold_by_fold(5, seed=0) for half in pair]),
        ("newcomers", lambda rows: rows.divide(First(5), seed=0, purpose="few shots")),
        ("newcomers", lambda rows: rows.at_least(14).divide(Share(0.5), seed=0, purpose="support")),
    ],
)
def test_rows_are_divided_as_they_would_have_been(sites: Sites, part: str, divided: Callable[..., Any]) -> None:
    pooled = coterie.read(sites.pooled, client="who", target="y", new_clients=0.2)
    ours = coterie.read(sites.summaries, new_clients=0.2)
    for one, other in zip(divided(getattr(ours, part)), divided(getattr(pooled, part)), strict=True):
        found, known = moments_of(one), moments_of(other)
        assert one.names.tolist() == other.names.tolist()
        assert torch.equal(found.n, known.n)
        torch.testing.assert_close(found.products, known.products, rtol=1e-8, atol=1e-8)


def test_rows_that_were_changed_are_divided_likewise(sites: Sites) -> None:
    rows = coterie.read(sites.summaries).train
    halved = rows.changed(lambda x: x / 2, lambda y: y - 1000)
    one, other = (some.split(0.2, seed=0, purpose="validation")[1] for some in (halved, rows))
    torch.testing.assert_close(one.x, other.x / 2)
    torch.testing.assert_close(one.y, other.y - 1000)


def test_several_files_are_a_folder_of_them(sites: Sites) -> None:
    files = sorted(sites.summaries.iterdir())
    assert coterie.read(files).fingerprint() == coterie.read(sites.summaries).fingerprint()


def test_clients_with_few_rows_can_be_left_out_later(sites: Sites) -> None:
    rows = coterie.read(sites.pooled, client="who", target="y", new_clients=0.2, min_rows=20)
    ours = coterie.read(sites.summaries, new_clients=0.2, min_rows=20)
    assert ours.names.tolist() == rows.names.tolist()
    assert ours.dropped_clients == rows.dropped_clients > 0


# -- what is refused --------------------------------------------------------------------------------------------------
def test_what_looks_at_single_rows_is_refused(sites: Sites) -> None:
    rows = coterie.read(sites.summaries).train
    rows.admit(place)
    for refused in (
        lambda: rows.admit(part_of),  # type: ignore[arg-type]  # no client function, and not marked as one
        lambda: rows.split(0.2, seed=0, purpose="thirds"),
        lambda: rows.split(0.2, seed=0, purpose="validation")[0].with_folds(5, seed=0),
        lambda: rows.thinned(3, seed=0),
    ):
        with pytest.raises(ConfigError, match="needs rows"):
            refused()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"seed": 1}, "seed is 1, and site summaries were written with 0"),
        ({"test_size": 0.5}, "test_size is 0.5, and site summaries were written with 0.2"),
        ({"target": "age"}, "target is age"),
        ({"client": "age"}, "client is age"),
        ({"task": "classification"}, "task is classification"),
        ({"missing": "mean"}, "missing is mean"),
        ({"exclude": ["age"]}, "exclude is given"),
    ],
)
def test_options_that_files_were_not_written_with_are_refused(
    sites: Sites, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        coterie.read(sites.summaries, **asked)


@pytest.mark.parametrize("asked", [(4, 0), (5, 1)])
def test_folds_that_files_were_not_written_with_are_refused(sites: Sites, asked: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="written for 5 folds and seed 0"):
        coterie.read(sites.summaries).train.with_folds(asked[0], seed=asked[1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"few_shot": 3}, "few_shot 3 and .* with 5"),
        ({"few_shot": 5, "seed": 1}, "seed 1 and .* with 0"),
        ({"few_shot": 5, "exclude": ["age"]}, "'dose' \\(numeric\\) where .* 'age'"),
        ({"few_shot": 5, "target": "length"}, "target 'length'"),
        ({"few_shot": 5}, "client 'c01' is in .* and in"),
    ],
)
def test_files_that_do_not_go_together_are_refused(
    sites: Sites, tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    """The last one is a file of clients that another file has."""
    summarise(sites.tables[1], tmp_path / "b.json", **{"client": "who", "target": "y", **options})
    other = sites.summaries / ("site-1.json" if options == {"few_shot": 5} else "site-0.json")
    with pytest.raises(DataError, match=sentence):
        coterie.read([other, tmp_path / "b.json"])


def _swapped(said: dict[str, Any]) -> None:
    said["clients"][0]["validation"] = said["clients"][1]["validation"]


def _with(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for word in way:
            said = said[int(word)] if isinstance(said, list) else said[word]
        said[int(last) if isinstance(said, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_with("format", "something"), "is not a site summary"),
        (_with("version", 2), "of this version"),
        (_with("drawn.folds", 10**9), "drawn.folds"),
        (_with("drawn.folds", 4), "are not 4 parts"),
        (_with("numbers.0", "other"), "names other numbers"),
        (_with("clients", []), "clients"),
        (_with("clients.0.client", "c04"), "has a client twice"),
        (_with("clients.0.folds.0.rows", -1), "clients.0.folds.0.rows"),
        (_with("clients.0.folds.0.rows", 10**30), "clients.0.folds.0.rows"),
        (_with("clients.0.folds.0.rows", 99), "other numbers of rows in folds"),
        (_with("clients.0.folds.0.mean", [1.0]), "parts of 7 numbers"),
        (_with("clients.0.folds.0.mean.0", "1"), "clients.0.folds.0.mean.0"),
        (_with("clients.0.folds.0.mean.0", 1e200), "impossible numbers in folds"),
        (_with("clients.0.folds.0.mean.0", 7.0), "other sums in validation"),
        (_with("clients.0.folds.0.products.0.0", -1.0), "that no rows have"),
        (_with("clients.0.folds.0.products.1.0", 1e9), "that no rows have"),
        (_with("clients.0.few_shot.1.products.5.5", 1e9), "no rows have|other sums"),
        (_swapped, "validation"),
    ],
)
def test_a_file_that_is_no_sum_of_rows_is_refused(
    sites: Sites, tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    said = json.loads((sites.summaries / "site-0.json").read_text())
    change(said)
    (tmp_path / "bad.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match=sentence) as refused:
        coterie.read(tmp_path / "bad.json")
    assert refused.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"format": NaN}', b"\xff\xfe", b"[1e999]", b"null"])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=r"is not JSON|is not a site summary"):
        coterie.read(tmp_path)


def test_of_many_faults_the_first_is_enough(sites: Sites, tmp_path: Path) -> None:
    """A list of all of them would be larger than the file."""
    said = json.loads((sites.summaries / "site-0.json").read_text())
    said["clients"][0]["folds"][0]["mean"] = ["no number"] * 100_000
    (tmp_path / "bad.json").write_text(json.dumps(said))
    with pytest.raises(ValidationError) as refused:
        _File.model_validate_json((tmp_path / "bad.json").read_bytes())
    assert refused.value.error_count() == 1


def test_a_file_that_says_more_than_may_be_held_is_refused(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.data.sites._MOST_MADE", 1000)
    with pytest.raises(DataError, match="the limit is 1,000"):
        coterie.read(sites.summaries)
    monkeypatch.setattr("coterie.data.site_files.MOST_SITE_BYTES", 1 << 10)
    with pytest.raises(DataError, match="is larger than"):
        coterie.read(sites.summaries)


def test_tables_and_summaries_are_not_read_together(sites: Sites) -> None:
    with pytest.raises(DataError, match="is no site summary"):
        coterie.read([sites.summaries / "site-0.json", sites.tables[1]])
