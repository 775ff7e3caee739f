# SPDX-License-Identifier: Apache-2.0
"""What was found before is found again: every method and every kind of comparison, to eight digits.

`pytest tests/test_golden.py --write-golden` writes down anew what is expected (tests/golden/expected; read the difference
before you commit it). Folders of runs (tests/golden/folders, tests/golden/interrupted) are as the first version that had the
method wrote them, and are only written where there are none: later versions must be able to read them.

Linear models and mixtures agree to 1e-8, relative and absolute, on any processor. Networks are trained in float32, and
kernels of other processors add in another order: 1e-7 in the first step, and up to 1e-4 after the few that are taken here.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from golden_runs import (
    CASES,
    GOLDEN,
    bring_back,
    differences,
    everything,
    keep_folder,
    resume,
    run,
    run_interrupted,
    used,
    write_document,
)

INTERRUPTED = {"ifca": 3, "fedrep": 2}  # after so many checkpoints


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "expected" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def assert_same(name: str, want: dict[str, Any], got: dict[str, Any]) -> None:
    found = list(differences(want, got, CASES[name].tolerance))
    assert not found, f"{name}: {found[0]} ({len(found)} fields differ)"


@pytest.fixture
def writing(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--write-golden"))


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_found_again(name: str, tmp_path: Path, writing: bool) -> None:
    found = everything(name, tmp_path, run(name, tmp_path))
    kept = GOLDEN / "folders" / name
    if writing:
        write_document(GOLDEN / "expected" / f"{name}.json", found)
    if writing and CASES[name].keep and not kept.exists():
        keep_folder(tmp_path, kept)
    assert_same(name, expected(name), found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keep])
def test_folders_of_before_are_read(name: str, tmp_path: Path) -> None:
    bring_back(GOLDEN / "folders" / name, CASES[name].data, tmp_path)
    found = used(name, tmp_path)
    assert_same(name, {key: value for key, value in expected(name).items() if key in found}, found)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_run_ends_the_same(name: str, tmp_path: Path, writing: bool) -> None:
    run_interrupted(name, tmp_path, INTERRUPTED[name])
    kept = GOLDEN / "interrupted" / name
    if writing and not kept.exists():
        keep_folder(tmp_path, kept)
    assert_ends_as_expected(name, tmp_path)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupted_runs_of_before_are_resumed(name: str, tmp_path: Path) -> None:
    bring_back(GOLDEN / "interrupted" / name, CASES[name].data, tmp_path)
    assert_ends_as_expected(name, tmp_path)


def assert_ends_as_expected(name: str, here: Path) -> None:
    found, want = everything(name, here, resume(here)), expected(name)
    for document in (found, want):
        del document["written"]["run.json"]["command"]  # it has --checkpoint-seconds 0
    assert_same(name, want, found)
