# SPDX-License-Identifier: Apache-2.0
"""What every registered method can do, without a line of its own here: the command line, resuming, Python, the report."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import coterie as package
from command import coterie
from coterie.config import options
from coterie.data.readers import read
from coterie.estimators.base import estimator_of
from coterie.methods.fit import fit
from coterie.registry import METHODS
from coterie.runs.folder import begin_run, read_options
from planted import planted

DATA = planted(8, 14, seed=3)
SMALL = {
    "clusters": ["--rounds", "2"],
    "personal": ["--rounds", "2", "--set", "training.participation=0.6"],
    "mixture": ["--rounds", "3", "--components", "2", "--set", "mixture.restarts=2", "--set", "mixture.c_lambda=1"],
    "effects": [],
    "mixed": [],
}


class KilledError(Exception):
    """Stands for a killed process."""


def words_of(name: str) -> list[str]:
    method = METHODS[name]
    return ["--method", name, *SMALL[method.family], *(["--hidden", "3"] if method.layers else []), "--no-baselines"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_fitted_reported_used_and_found_again_by_its_estimator(name: str, tmp_path: Path) -> None:
    data, run = DATA.write(tmp_path / "sites.csv"), tmp_path / "run"
    said = coterie("fit", data, "--client", "site", "--target", "y", *words_of(name), "--out", run)
    assert said.code == 0, said.err
    assert METHODS[name].title in (run / "report.html").read_text(encoding="utf-8")
    made = package.load(run)
    assert type(made) is getattr(package, METHODS[name].estimator)
    assert coterie("predict", run, data, "--out", tmp_path / "made.csv").code == 0
    column = pc.read_csv(tmp_path / "made.csv")["prediction"].to_numpy()
    np.testing.assert_allclose(column, made.predict(DATA.x, groups=DATA.groups), rtol=1e-6, atol=1e-8)
    new = planted(2, 9, seed=5, prefix="new-").write(tmp_path / "new.csv")
    assert len(coterie("assign", run, new).out.splitlines()) == 1 + 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # after so few rounds
        again = estimator_of(read_options(run)).fit(read(data, client="site", target="y"))
    np.testing.assert_allclose(again.predict(DATA.x, groups=DATA.groups), column, rtol=1e-5)  # networks are in float32


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.rounds])
def test_a_killed_fit_ends_bit_equal(name: str, tmp_path: Path) -> None:
    method, clients = METHODS[name], DATA.clients(test_size=0.2)
    tree: dict[str, Any] = {"method": name, "baselines": False, str(method.rounds): {"rounds": 4}}
    if method.family == "mixture":
        tree["mixture"] |= {"n_components": 2, "restarts": 2, "c_lambda": 1.0}
    chosen = options(tree | ({"model": {"hidden": [3]}} if method.layers else {}))
    begin_run(tmp_path / "run", chosen, "a test", clients)

    def watch(phase: str, done: Any, total: int) -> None:
        if phase == "fit" and done.round == 2:
            raise KilledError

    with pytest.raises(KilledError):
        fit(clients, chosen, folder=tmp_path / "run", every=0.0, watch=watch)
    again, whole = fit(clients, chosen, folder=tmp_path / "run", every=0.0), fit(clients, chosen)
    for column, value in whole.per_client.items():
        assert torch.equal(again.per_client[column].nan_to_num(), value.nan_to_num()), column
