# SPDX-License-Identifier: Apache-2.0
"""What several test files share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Give the folder of real data sets, or skip the test."""
    named = os.environ.get("COTERIE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / "mnist.npz").is_file():
        pytest.skip(f"no real data in {folder}; COTERIE_DATA may name another folder")
    return folder
