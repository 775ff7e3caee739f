# SPDX-License-Identifier: Apache-2.0
"""What several test files share."""

import hashlib
import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on small problems threads cost more than they bring
os.environ.setdefault("COTERIE_QUIET", "1")  # no test depends on how long it takes

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples every time, and no deadline: the first call of a torch function may take a second.
settings.register_profile("coterie", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("coterie")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let what tests/test_golden.py expects be written anew."""
    parser.addoption(
        "--write-golden", choices=["words", "all"], help="write tests/golden/expected anew: see test_golden.py"
    )


@pytest.fixture(autouse=True, scope="session")
def _everything_that_is_asked_is_declared() -> Iterator[None]:
    """Let every test fail that asks one of coterie's client functions for more than it says may leave a client."""
    from coterie.engines import worker
    from coterie.engines.private import reveal
    from coterie.protocol import not_declared
    from coterie.robust_folds import plainly

    answer = worker.Worker.answer

    def checked(self: worker.Worker, asks: Any, ids: Any, bounds: Any = None) -> Any:
        for ask in asks.values():
            if ask.step.__module__.startswith("coterie.") and ask.step is not reveal:
                assert (why := not_declared(plainly(ask))) is None, why
        return answer(self, asks, ids, bounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Worker, "answer", checked)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Give the folder of real data sets, or skip the test."""
    named = os.environ.get("COTERIE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "mnist.npz").is_file():
        pytest.skip(f"no real data in {folder}; COTERIE_DATA may name another folder")
    return folder


@pytest.fixture
def counted_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise from a counter, so that a test does the same every time: outside tests it is the operating system's."""
    counter = itertools.count()
    monkeypatch.setattr(
        "coterie.privacy.noise.token_bytes", lambda n: hashlib.sha256(b"%d" % next(counter)).digest()[:n]
    )
