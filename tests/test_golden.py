# SPDX-License-Identifier: Apache-2.0
"""What was found before is found again: by every method, every kind of comparison, and every estimator.

`pytest tests/test_golden.py --write-golden words` writes down anew what is expected (tests/golden/expected) as far as only
sentences differ, or whole fields are new or gone; `--write-golden all`, whatever differs. Read the difference before you
commit it. Folders of runs (tests/golden/folders, tests/golden/interrupted) are what the first version that had the method
wrote, and later ones must be able to read them: they are only written where there are none. Where later versions find
something else, because they begin elsewhere, what these folders hold and end as is in tests/golden/before.

Linear models and mixtures agree to 1e-8, relative and absolute, on any processor. Networks are trained in float32, and
kernels of other processors add in another order: 1e-7 in the first step, and up to 1e-4 after the few that are taken here.
How models are stored is not compared; what they predict is.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from golden_runs import (
    CASES,
    ESTIMATORS,
    EXACT,
    FLOAT32,
    GOLDEN,
    bring_back,
    differences,
    keep_folder,
    made,
    python,
    resume,
    run,
    run_interrupted,
    used,
    write_document,
)

# After so many checkpoints: in the middle of training, but for `auto` (choosing a start) and `shrunk` (baselines).
INTERRUPTED = {
    "ifca": 14, "moment-descent": 27, "fedrep": 4, "fedrep-stages": 10, "shrunk": 5, "mixture-regression": 75, "auto": 9,
}  # fmt: skip


MEASURES = ("metric", "auroc", "average_precision", "log_loss", "brier")
LATER = {
    "messages", "bytes_up", "bytes_down", "report", "config", "new_clients_unlabelled", "probabilities", "coverage",
    "secure", "class_weights", "threshold", "base_rate", "models/intervals.safetensors", "models/uncertainty.safetensors",
    *(f"{name}_{end}" for name in MEASURES for end in ("low", "high")), *MEASURES[1:],
}  # fmt: skip


@pytest.fixture
def writing(request: pytest.FixtureRequest) -> str | None:
    asked: str | None = request.config.getoption("--write-golden")
    return asked


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / "expected" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def expected_before(name: str) -> dict[str, Any]:
    """What was found when the folders were written; messages were not counted then."""
    path = GOLDEN / "before" / f"{name}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else expected(name)
    return what_matters(kept)


def what_matters(found: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on how many messages there were, nor on options and measures that came later."""
    return {
        key: [what_matters(one) if isinstance(one, dict) else one for one in inner]
        if isinstance(inner, list)
        else what_matters(inner)
        if isinstance(inner, dict)
        else inner
        for key, inner in found.items()
        if key not in LATER and not key.startswith("probability_") and not _is_later_table(key, inner)
    }


def _is_later_table(key: str, inner: Any) -> bool:
    """Whether this is the table of coefficients of a run; the lists of that name, in its profiles, are older."""
    return key == "coefficients" and not isinstance(inner, list)


def assert_same(
    name: str, kept: dict[str, Any], now: dict[str, Any], tolerance: float, *, sentences: bool = True
) -> None:
    """Compare; folders of before keep the sentences of their version, which then may differ."""
    found = [one for one in differences(kept, now, tolerance) if sentences or not one.of_sentences]
    if found:
        pytest.fail(f"{name}: {found[0]} ({len(found)} fields differ)", pytrace=False)


def assert_expected(name: str, now: dict[str, Any], tolerance: float, writing: str | None) -> None:
    """Compare with what was kept, or keep it."""
    path = GOLDEN / "expected" / f"{name}.json"
    if writing and path.exists():
        found = [one for one in differences(expected(name), now, tolerance) if writing != "all" and not one.of_words]
        if found:
            pytest.fail(f"{name}: not only words differ: {found[0]} ({len(found)} fields)", pytrace=False)
    if writing:
        write_document(path, now)
    assert_same(name, expected(name), now, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_found_again(name: str, tmp_path: Path, writing: str | None) -> None:
    found = made(tmp_path, run(name, tmp_path)) | used(name, tmp_path)
    kept = GOLDEN / "folders" / name
    if writing and CASES[name].keep and not kept.exists():
        keep_folder(tmp_path, kept)
    assert_expected(name, found, CASES[name].tolerance, writing)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keep])
def test_folders_of_before_are_read(name: str, tmp_path: Path) -> None:
    bring_back(GOLDEN / "folders" / name, CASES[name].data, tmp_path)
    found = used(name, tmp_path)
    if CASES[name].command == "fit":
        found["said"] = made(tmp_path, resume(tmp_path))["said"]  # it has finished, and says again what it found
    before, found = expected_before(name), what_matters(found)
    assert_same(name, {key: before[key] for key in found}, found, CASES[name].tolerance, sentences=False)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_run_ends_the_same(name: str, tmp_path: Path, writing: str | None) -> None:
    run_interrupted(name, tmp_path, INTERRUPTED[name])
    kept = GOLDEN / "interrupted" / name
    if writing and not kept.exists():
        keep_folder(tmp_path, kept)
    assert_ends_as_expected(name, tmp_path)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupted_runs_of_before_are_resumed(name: str, tmp_path: Path) -> None:
    bring_back(GOLDEN / "interrupted" / name, CASES[name].data, tmp_path)
    before, found = expected_before(name), what_matters(made(tmp_path, resume(tmp_path)))
    assert_same(name, {key: before[key] for key in found}, found, CASES[name].tolerance, sentences=False)


def assert_ends_as_expected(name: str, here: Path) -> None:
    found = made(here, resume(here))
    assert_same(name, {key: expected(name)[key] for key in found}, found, CASES[name].tolerance)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_find_the_same(name: str, writing: str | None) -> None:
    tolerance = FLOAT32 if name == "IFCA-module" else EXACT
    assert_expected(f"python/{name}", python(name), tolerance, writing)
