# SPDX-License-Identifier: Apache-2.0
"""What was chosen is what is handed back: by the printed command, by `auto`, and from Python."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from command import coterie
from coterie import read
from coterie.config import options
from coterie.selection import Comparison, compare, fit_chosen
from coterie.selection.text import fit_command
from planted import planted

HELD: dict[str, Any] = {"test_size": 0.25, "new_clients": 0.2, "seed": 3}
SAME = 1e-8  # the same options fitted again
METRIC = {"local": 2e-3, "shrunk": 1e-4, "representation": 1e-4}  # EM begins elsewhere: see decision 0008


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(12, 24, noise=0.5).write(tmp_path_factory.mktemp("data") / "sites.csv")


@pytest.fixture(scope="module")
def found(data: Path) -> Comparison:
    return compare(clients_of(data), seed=3, max_clusters=2, max_rank=1, max_components=2)


def clients_of(data: Path) -> Any:
    return read(data, client="site", target="y", **HELD)


def per_client(folder: Path) -> dict[str, np.ndarray]:
    table = pq.read_table(folder / "clients.parquet")
    told = {"train_loss", "test_loss", "metric"} & {*table.column_names}  # mixtures have no losses
    return {name: table.column(name).to_numpy() for name in sorted(told)}


@pytest.mark.parametrize(
    "structure",
    ["global", "clusters", "local", "shrunk", "representation", pytest.param("mixture", marks=pytest.mark.study)],
)
def test_the_printed_command_fits_what_python_hands_over(
    structure: str, data: Path, found: Comparison, tmp_path: Path
) -> None:
    asked = options(
        {"data": {"path": str(data), "client": "site", "target": "y", "test_size": 0.25, "new_clients": 0.2}}
    )
    command = fit_command(asked.data, found[structure].fit, seed=found.seed)
    assert command is not None
    done = coterie(*shlex.split(command)[1:], "--no-baselines", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    handed = fit_chosen(clients_of(data), found, structure)
    for name, values in per_client(tmp_path / "run").items():
        np.testing.assert_allclose(handed.per_client[name].numpy(), values, rtol=SAME, atol=SAME)
    if structure in METRIC:  # and that is, but for where it began, what was judged
        np.testing.assert_allclose(
            handed.per_client["metric"].numpy(), found[structure].client_test_metric, rtol=METRIC[structure]
        )


def test_auto_fits_what_the_printed_command_of_the_comparison_fits(data: Path, tmp_path: Path) -> None:
    about = (data, "--client", "site", "--target", "y", "--new-clients", "0.2")
    assert coterie("fit", *about, "--method", "auto", "--no-baselines", "--out", tmp_path / "auto").code == 0
    done = coterie("compare", *about, "--json", "--out", tmp_path / "compared")
    command = shlex.split(json.loads(done.out)["fit"])[1:]
    assert coterie(*command, "--no-baselines", "--out", tmp_path / "printed").code == 0
    one, other = (per_client(tmp_path / name) for name in ("auto", "printed"))
    for name, values in one.items():
        np.testing.assert_allclose(other[name], values, rtol=SAME, atol=SAME)
