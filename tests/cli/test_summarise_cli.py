# SPDX-License-Identifier: Apache-2.0
"""One file a site on the command line: written, compared, and fitted like the rows."""

import json
from pathlib import Path

import pytest

from command import coterie, refused
from coterie import read
from coterie.selection import compare
from sites import Sites, planted_table, written

ROWS = ("--client", "who", "--target", "y")


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return written(tmp_path_factory.mktemp("sites"), planted_table(12), "who", n_sites=2, target="y", few_shot=5)


def test_what_a_file_reveals_is_said_when_it_is_written(sites: Sites, tmp_path: Path) -> None:
    said = coterie("summarise", sites.tables[0], *ROWS, "--min-rows", 20, "--round", 6, "--out", tmp_path / "site.json")
    assert said.code == 0
    head, *reveals = said.out.splitlines()
    assert head.endswith("site.json holds, and so reveals:")
    assert reveals[0].startswith("- means, variances and correlations of 8 numbers")
    assert "can be reconstructed in part" in reveals[1]
    assert "clients with too few rows are left out" in said.err
    assert json.loads((tmp_path / "site.json").read_text())["digits"] == 6


def test_the_same_is_said_as_json(sites: Sites, tmp_path: Path) -> None:
    said = coterie("summarise", sites.tables[0], *ROWS, "--out", tmp_path / "site.json", "--json")
    assert json.loads(said.out)["clients"] == 6
    assert json.loads(said.out)["reveals"]


def test_files_are_compared_like_the_rows_and_the_command_that_is_printed_fits(sites: Sites, tmp_path: Path) -> None:
    files = sorted(sites.summaries.iterdir())
    said = coterie("compare", *files, "--quick", "--json", "--out", tmp_path / "sums")
    assert said.code == 0, said.err
    ours = json.loads(said.out)
    rows = json.loads(coterie("compare", sites.pooled, *ROWS, "--quick", "--json", "--out", tmp_path / "rows").out)
    assert ours["chosen"] == rows["chosen"]
    assert ours["n_clients"] == rows["n_clients"] == 10  # two are new
    by_name = {row["structure"]: row for row in rows["rows"]}
    for row in ours["rows"]:
        known = by_name[row["structure"]]
        assert (row["score"], row["mean"], row["new_metric"]) == pytest.approx(
            (known["score"], known["mean"], known["new_metric"]), abs=1e-8
        )
    assert "mixture" not in {row["structure"] for row in ours["rows"]}
    words = ours["fit"].split()
    assert words[: 2 + len(files)] == ["coterie", "fit", *map(str, files)]
    fitted = coterie(*words[1:], "--out", tmp_path / "fit", "--json")
    assert fitted.code == 0, fitted.err
    assert coterie("resume", tmp_path / "fit").code == 0
    assert coterie("predict", tmp_path / "fit", sites.pooled).code == 0


def test_no_client_is_new_where_files_do_not_say_what_it_would_show(sites: Sites, tmp_path: Path) -> None:
    for number, table in enumerate(sites.tables):
        coterie("summarise", table, *ROWS, "--out", tmp_path / f"{number}.json")
    said = coterie("compare", tmp_path, "--quick", "--json", "--out", tmp_path / "found")
    assert json.loads(said.out)["n_clients"] == 12
    sentence, hint = refused("compare", tmp_path / "0.json", tmp_path / "1.json", "--new-clients", 0.2)
    assert "without what clients would show" in sentence
    assert "--few-shot" in hint


def test_the_best_structure_is_compared_and_fitted_at_once(sites: Sites, tmp_path: Path) -> None:
    said = coterie("fit", sites.summaries, "--method", "auto", "--no-baselines", "--json", "--out", tmp_path / "auto")
    assert said.code == 0, said.err
    rows = read(sites.pooled, client="who", target="y")
    of_sums = ("global", "clusters", "local", "shrunk", "representation")
    found = compare(rows, structures=of_sums)
    assert json.loads(said.out)["method"] == found[found.chosen].fit.method


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("fit", "SITES", "--method", "mixture"), "--method mixture needs rows"),
        (("fit", "SITES", "--method", "fedavg", "--set", "training.batch_size=8"), "training.batch_size needs rows"),
        (("compare", "SITES", "--hidden", "8"), "a network needs rows"),
        (("compare", "SITES", "--seed", "4"), "seed is 4, and site summaries were written with 0"),
        (("compare", "SITES", "--task", "classification"), "task is classification"),
        (("summarise", "TABLE", *ROWS, "--out", "OUT", "--missing", "mean"), "missing values are filled"),
        (("summarise", "TABLE", "--client", "who", "--target", "ward", "--out", "OUT"), "target 'ward' has classes"),
        (("summarise", "TABLE", "--client", "who", "--target", "z", "--out", "OUT"), "has no target column 'z'"),
    ],
)  # fmt: skip
def test_what_needs_rows_is_refused_and_nothing_is_written(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"SITES": sites.summaries, "TABLE": sites.tables[0], "OUT": tmp_path / "site.json"}
    assert sentence in refused(*(paths.get(word, word) for word in words))[0]
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_overwritten(sites: Sites, tmp_path: Path) -> None:
    (tmp_path / "site.json").write_text("mine")
    sentence, _ = refused("summarise", sites.tables[0], *ROWS, "--out", tmp_path / "site.json")
    assert "there is a file" in sentence
    assert (tmp_path / "site.json").read_text() == "mine"
