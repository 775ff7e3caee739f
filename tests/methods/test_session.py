# SPDX-License-Identifier: Apache-2.0
"""Who makes engines: only a session, and few."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.algorithms.preparation import Scaling, learn_scaling
from coterie.config import options
from coterie.data.ragged import Ragged
from coterie.engines.engine_for import AnyEngine
from coterie.methods import session
from coterie.methods.fit import fit
from coterie.protocol import Algorithm
from coterie.selection import compare
from planted import planted

SOURCE = Path(coterie.__file__).parent
MAKERS = ("InProcess(", "engine_for(", "OnFlower(")


def test_only_a_session_makes_engines() -> None:
    """Studies drive algorithms by themselves, without options of a fit."""
    found = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in ("engines", "studies")
        and any(maker in path.read_text(encoding="utf-8") for maker in MAKERS)
    ]
    assert found == ["methods/session.py"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Ragged]:
    """The rows of every engine that is made."""
    rows_of: list[Ragged] = []
    real = session.engine_for

    def engine_for(rows: Ragged, **how: Any) -> AnyEngine:
        rows_of.append(rows)
        return real(rows, **how)

    monkeypatch.setattr(session, "engine_for", engine_for)
    return rows_of


def test_rows_have_one_engine_that_is_run_and_one_that_is_asked(made: list[Ragged]) -> None:
    data = planted(10, 12).clients(test_size=0.25, new_clients=0.2)
    fit(data, options({"method": "ifca", "clusters": {"n_clusters": 2, "n_init": 2}, "training": {"rounds": 2}}))
    assert max(Counter(map(id, made)).values()) <= 2
    assert len(made) <= 9  # training rows as read and scaled, without and with held-out ones, test rows, new clients


def test_a_comparison_goes_through_one_engine_for_all_linear_structures(made: list[Ragged]) -> None:
    data = planted(10, 12).clients(test_size=0.25)
    compare(data, quick=True, structures=("clusters", "representation"), folds=2, max_clusters=2, max_rank=1)
    assert len(made) == 4  # for the scaling, for the fits, for what they are worth, and for the variance of test rows


def test_an_engine_that_runs_is_kept_however_many_others_are_asked(made: list[Ragged]) -> None:
    rows = planted(10, 12).clients().train
    parts = [rows.only(np.array([i % 10])) for i in range(20)]  # more than a session keeps
    here = session.Session()

    def program(state: Scaling | None) -> Algorithm:
        for part in parts:
            here.engine(part, asks=True)
        return (yield from learn_scaling(state, shape=rows.shape, divide=True, real_target=True))

    here.run(None, rows, [program], Scaling, 1)
    here.engine(rows)
    assert sum(one is rows for one in made) == 1
    here.engine(parts[0], asks=True)  # of the others, those that were used last
    assert len(made) == 1 + 20 + 1
