# SPDX-License-Identifier: Apache-2.0
"""`--epsilon` on the command line: what is said, and what is refused with a sentence."""

import csv
import json
from pathlib import Path

import pytest
import torch

from command import coterie as run
from coterie.studies.data.planted import planted_structure

pytestmark = pytest.mark.usefixtures("counted_noise")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("private") / "sites.csv"
    made = planted_structure("clusters", 2, n_clients=300, rows=20, n_features=3, noise=0.5, seed=1)
    assert isinstance(made.x, torch.Tensor)
    assert isinstance(made.y, torch.Tensor)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["site", "a", "b", "c", "y"])
        for x, y, owner in zip(made.x.tolist(), made.y.tolist(), made.owners.tolist(), strict=True):
            rows.writerow([f"s{owner}", *x, y])
    return path


def fit(table: Path, *words: str) -> tuple[int, str, str]:
    done = run("fit", str(table), "--client", "site", "--target", "y", *words)
    return done.code, done.out, done.err


def test_a_fit_says_what_it_spent(table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, err = fit(
        table, "--method", "ifca", "--clusters", "2", "--rounds", "5", "--epsilon", "8", "--out", str(folder)
    )
    assert (code, err) == (0, "")
    assert "privacy of every client: epsilon 7.99 of 8, delta 1e-05" in out
    said = json.loads((folder / "run.json").read_text(encoding="utf-8"))["results"]["privacy"]
    assert said["spent"] <= 8
    assert [one["purpose"] for one in said["questions"]][-1] == "scores"
    page = (folder / "report.html").read_text(encoding="utf-8") if (folder / "report.html").exists() else ""
    if not page:
        assert run("report", str(folder)).code == 0
        page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Differential privacy of every client" in page
    assert "scales of columns" in page
    assert not (folder / "checkpoints" / "noise.key").exists()
    placed = run("predict", str(folder), str(table), "--out", str(tmp_path / "p.csv"))
    assert placed.code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--method", "mixture", "--epsilon", "8"), "mixture asks clients what noise cannot hide"),
        (("--method", "auto", "--epsilon", "8"), "auto"),
        (("--method", "fedavg", "--epsilon", "0.05"), "times as long as all that clients can say"),
        (("--method", "fedavg", "--delta", "1e-6"), "privacy.delta is set, and there is no budget"),
        (("--method", "fedavg", "--epsilon", "0"), "privacy.epsilon is 0.0"),
        (("--method", "fedavg", "--epsilon", "8", "--coverage", "0.9"), "asked without noise"),
        (("--method", "ifca", "--clusters", "2", "--epsilon", "8", "--starts", "5"), "starts are compared"),
    ],
)
def test_what_cannot_be_private_is_refused(words: tuple[str, ...], why: str, table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, out, err = fit(table, *words, "--out", str(folder))
    assert (code, out) == (2, "")
    assert why in err
    assert "hint: " in err
    assert not (folder / "account.json").exists()  # nothing was spent


def test_a_comparison_tells_all_candidates(table: Path, tmp_path: Path) -> None:
    words = ("compare", str(table), "--client", "site", "--target", "y", "--epsilon", "8")
    done = run(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Clients fall into 2 groups, with one model per group.")
    assert "*2 groups" in done.out
    again = run(*words, "--json", "--out", str(tmp_path / "found"))
    assert json.loads(again.out) == json.loads((tmp_path / "found" / "compare.json").read_text(encoding="utf-8"))
    twice = run(*words, "--out", str(tmp_path / "found"))
    assert twice.code == 2
    assert "a budget is spent once" in twice.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--epsilon", "8", "--hidden", "4"), "of linear regressions"),
        (("--epsilon", "0.1"), "as large as what tells them apart"),
        (("--delta", "1e-6"), "there is no budget"),
    ],
)
def test_comparisons_without_use_are_refused(words: tuple[str, ...], why: str, table: Path) -> None:
    done = run("compare", str(table), "--client", "site", "--target", "y", *words)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
