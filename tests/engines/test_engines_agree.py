# SPDX-License-Identifier: Apache-2.0
"""The same on every engine: in this process, through Flower's messages, and on its simulation engine. Rows stay put."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from agreement import ENGINES, PROGRAMS, ROWS
from coterie.config import options
from coterie.data.clients import held_out
from coterie.data.ragged import Ragged
from coterie.engines.checkpoint import load_tensors
from coterie.engines.engine_for import engine_for
from coterie.engines.flower.connect import connect
from coterie.engines.flower.registry import register_named
from coterie.engines.flower.server import OnFlower
from coterie.engines.flower.wire import tensors_in
from coterie.engines.in_process import InProcess
from coterie.methods.cluster_models import ClusterModels
from coterie.methods.fit import fit
from coterie.methods.personal.model import Personal
from coterie.participation import VirtualClock
from coterie.registry import METHODS
from coterie.runs.folder import begin_run, finish_run, load_run
from coterie.selection import compare
from flower_grid import MemoryGrid, connected, dealt, kept
from helpers import CASES, LAPLACE, MODULE, Case, assert_same_state, federation, state_tensors

DOUBLE, SINGLE = 1e-10, 1e-6
MANY = (60, 45, 0, 60, 52, 38, 60, 41, 77, 60)  # rows by client: more than anything that a client answers

register_named("module", MODULE.module)
register_named("laplace", LAPLACE)


# -- all algorithms, through Flower's messages ------------------------------------------------------------------------
def arrays(grid: MemoryGrid) -> Iterator[Tensor]:
    """All arrays of all messages."""
    for message in (*grid.sent, *grid.replied):
        yield from tensors_in(message.content).values()


def assert_no_row_in(grid: MemoryGrid, rows: Ragged) -> None:
    """No array holds a row, in any precision, nor is any as large as the rows of a node."""
    assert isinstance(rows.x, Tensor)
    forbidden = {row.to(kind).numpy().tobytes() for row in rows.x for kind in (torch.float64, torch.float32)}
    replies = [tensor for message in grid.replied for tensor in tensors_in(message.content).values()]
    least = min(int(rows.counts[i::4].sum()) for i in range(4)) * rows.x.shape[1]
    assert max(tensor.numel() for tensor in replies) < least
    width = {len(word) for word in forbidden}
    for array in arrays(grid):
        data = array.contiguous().numpy().tobytes()
        for size in width:
            assert not forbidden & {data[i : i + size] for i in range(0, len(data) - size + 1, array.element_size())}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_algorithm_gives_the_same_and_no_row_leaves_its_node(case: Case, tmp_path: Path) -> None:
    many = tuple(3 * n for n in MANY) if case.folds else MANY  # several fits' sums of products are larger
    rows = federation(many, classes=case.classes).rows
    clients, grid = connected(rows, tmp_path, classes=case.classes)
    how: dict[str, Any] = {"clock": VirtualClock(), "seed": 1} if case.name.startswith("srpfl") else {}
    there, near = (r.with_folds(case.folds, seed=0) if case.folds else r for r in (clients.train, rows))
    far, here = engine_for(there, **how), InProcess(near, **how)
    done, wanted = far.run([case.program(0)]), here.run([case.program(0)])
    assert_same_state(done.states[0], wanted.states[0], atol=case.rounding * DOUBLE)
    assert_no_row_in(grid, rows)
    assert isinstance(far, OnFlower)
    for name, value in here.private.get(0, {}).items():
        there_kept = kept(far, tmp_path, name)
        torch.testing.assert_close(there_kept, value, rtol=case.rounding * DOUBLE, atol=case.rounding * DOUBLE)


def test_a_row_in_a_message_would_be_noticed(tmp_path: Path) -> None:
    rows = federation(MANY).rows
    clients, grid = connected(rows, tmp_path)
    assert isinstance(rows.x, Tensor)
    program = PROGRAMS["ifca"]
    engine_for(clients.train).run([program])
    assert_no_row_in(grid, rows)
    leak = Ragged(rows.layout, rows.x.clone(), rows.y)
    assert isinstance(leak.x, Tensor)
    leak.x[5] = next(a for a in arrays(grid) if a.dtype == torch.float64 and a.numel() > 4).flatten()[1:4]
    with pytest.raises(AssertionError):
        assert_no_row_in(grid, leak)


# -- whole fits -------------------------------------------------------------------------------------------------------
QUICK: dict[str, Any] = {"training": {"rounds": 2}}
HIDDEN: dict[str, Any] = {"model": {"hidden": [4]}}
TWO: dict[str, Any] = {"clusters": {"n_clusters": 2}}
STAGES = {"stragglers": "srpfl", "clock": "exponential", "stage_rounds": 1, "n0": 2}
MIXTURE = {"n_components": 2, "rounds": 4, "restarts": 2, "iterations": 5, "c_lambda": 1.0}
FITS: dict[str, tuple[dict[str, Any], int]] = {
    "ifca": ({"method": "ifca", "clusters": {"n_clusters": 2, "n_init": 2}, **QUICK}, 0),
    "ifca-classes": ({"method": "ifca", **TWO, **QUICK, "baselines": False}, 3),
    "moment-descent": ({"method": "moment-descent", **TWO, **QUICK, "moments": {"iterations": 2}}, 0),
    "polynomial": ({"method": "fedavg", "model": {"degree": 2}, **QUICK}, 0),
    "fedrep": ({"method": "fedrep", **HIDDEN, "training": {"rounds": 3, "participation": 0.3}}, 0),
    "maml": ({"method": "maml", **HIDDEN, **QUICK, "baselines": False}, 0),
    "srpfl": ({"method": "fedrep", **HIDDEN, **QUICK, "baselines": False, "personal": STAGES}, 0),
    "mixture": ({"method": "mixture", "mixture": MIXTURE}, 0),
    "local": ({"method": "local", "prior": {"penalty": 1.0}, "baselines": False}, 0),
    "representation-classes": ({"method": "representation", "prior": {"rank": 2}, "baselines": False}, 2),
    "mixed-slopes": ({"method": "mixed", "mixed": {"slopes": ["x0", "x1"], "covariance": "diagonal"}}, 0),
    "mixed-classes": ({"method": "mixed", "baselines": False}, 2),
    "mixture-neighbours": (
        {"method": "mixture", "mixture": {**MIXTURE, "neighbours": 2}, "baselines": False},
        0,
    ),
}

FITS |= {  # methods as they are registered
    one.name: (
        {
            "method": one.name,
            **(QUICK if one.rounds else {}),
            **(HIDDEN if one.layers else {}),
            "baselines": False,
        },
        0,
    )
    for one in METHODS.values()
    if one.name not in FITS
}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_of_clients_elsewhere_gives_what_it_gives_here(name: str, tmp_path: Path) -> None:
    tree, classes = FITS[name]
    chosen, rows = options(tree), federation((20, 24, 30, 18, 26, 22, 20, 35, 28, 24), classes=classes).rows
    held: dict[str, Any] = {"test_size": 0.2, "new_clients": 0.2, "seed": chosen.seed}
    clients, _ = connected(rows, tmp_path, classes=classes, **held)
    folder = tmp_path / "run"
    begin_run(folder, chosen, "a test", clients)
    far = fit(clients, chosen, folder=folder, every=0.0)
    here = fit(held_out(rows, clients.schema, **held), chosen)
    for ours, theirs in zip(far.scores, here.scores, strict=True):
        for name_of, value in vars(theirs).items():
            if name_of == "new_clients_unlabelled" and getattr(ours, name_of) is None:
                continue  # the mean of models that stay on nodes is known here only
            near = pytest.approx(value, rel=SINGLE, abs=SINGLE) if isinstance(value, float) else value
            assert getattr(ours, name_of) == near, name_of
    assert far.per_client.keys() == here.per_client.keys()
    for column, value in here.per_client.items():
        torch.testing.assert_close(far.per_client[column], value, rtol=SINGLE, atol=SINGLE, equal_nan=True)
    assert far.warnings == here.warnings
    finish_run(folder, far)
    if isinstance(here.models, ClusterModels):
        torch.testing.assert_close(load_run(folder).models.theta, here.models.theta, rtol=DOUBLE, atol=DOUBLE)
    if isinstance(here.models, Personal):
        assert not len(load_run(folder).models.names)  # personal parts have stayed on their nodes


@pytest.mark.parametrize(
    ("classes", "target"),
    [
        pytest.param(0, True, id="numbers"),
        pytest.param(2, True, id="classes", marks=pytest.mark.study),
        pytest.param(0, False, id="rows", marks=pytest.mark.study),
    ],
)
def test_a_comparison_of_clients_elsewhere_finds_what_it_finds_here(classes: int, target: bool, tmp_path: Path) -> None:
    rows = federation((20, 24, 30, 18, 26, 22, 20, 35, 28, 24), classes=classes).rows
    rows = rows if target else replace(rows, y=None)
    held: dict[str, Any] = {"test_size": 0.2, "new_clients": 0.2, "seed": 1}
    clients, grid = connected(rows, tmp_path, classes=classes, **held)
    how: dict[str, Any] = {"quick": True, "seed": 1, "max_clusters": 2, "max_rank": 1, "max_components": 2, "folds": 2}
    how |= {} if classes or not target else {"structures": ("clusters", "mixture")}
    far = compare(clients, **how)
    here = compare(held_out(rows, clients.schema, **held), **how)
    assert far.chosen == here.chosen
    for ours, theirs in zip(far.structures, here.structures, strict=True):
        assert ours.setting == theirs.setting
        for name in ("client_score", "client_test_metric", "client_new_metric"):
            wanted = getattr(theirs, name)
            assert wanted is None or np.allclose(getattr(ours, name), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert np.array_equal(far.names, here.names)
    sizes = [tensor.shape for message in grid.replied for tensor in tensors_in(message.content).values()]
    assert all(not shape or shape[0] != rows.layout.n_rows for shape in sizes)


def test_a_network_of_ones_own_is_fitted_by_its_name(tmp_path: Path) -> None:
    rows = federation(classes=0).rows
    chosen = options({"method": "fedavg", "training": {"rounds": 2}, "baselines": False})
    clients, _ = connected(rows, tmp_path)
    far = fit(clients, chosen, module=MODULE)
    here = fit(held_out(rows, clients.schema, test_size=0.0, new_clients=0.0, seed=0), chosen, module=replace(MODULE))
    torch.testing.assert_close(far.models.theta, here.models.theta, rtol=DOUBLE, atol=DOUBLE)


def test_a_fit_that_was_killed_continues_elsewhere_too(tmp_path: Path) -> None:
    rows = federation(MANY).rows
    chosen = options({"method": "fedrep", "model": {"hidden": [4]}, "training": {"rounds": 4}, "baselines": False})
    how: dict[str, Any] = {"run": "r", "nodes": 4, "test_size": 0.2, "timeout": 30.0, "poll": 0.001}
    whole = fit(connected(rows, tmp_path / "a", test_size=0.2)[0], chosen)
    holdings, seen = dealt(rows, tmp_path / "b", nodes=4), []

    class Killed(Exception):  # noqa: N818
        pass

    def watch(phase: str, *_: Any) -> None:
        seen.append(phase)
        if seen.count("fit") == 3:
            raise Killed

    (tmp_path / "run").mkdir()
    with pytest.raises(Killed):
        fit(connect(MemoryGrid(holdings), **how), chosen, folder=tmp_path / "run", every=0.0, watch=watch)
    again = fit(connect(MemoryGrid(holdings), **how), chosen, folder=tmp_path / "run", every=0.0)
    assert torch.equal(again.models.theta, whole.models.theta)
    for column in whole.per_client:
        assert torch.equal(again.per_client[column].nan_to_num(-1.0), whole.per_client[column].nan_to_num(-1.0))


# -- Flower's simulation engine ---------------------------------------------------------------------------------------
def simulated(folder: Path, nodes: int, cases: list[str]) -> None:
    """Run cases in a process of its own: ray and Flower leave threads and signal handlers behind."""
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "FLWR_HOME": str(folder / "flwr"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "flower_simulation.py"), str(nodes), str(folder), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("nodes", "cases"),
    [
        (4, [*PROGRAMS]),
        pytest.param(10, ["ifca"], marks=pytest.mark.study),
    ],
)
def test_on_flowers_simulation_engine(nodes: int, cases: list[str], tmp_path: Path) -> None:
    """Four nodes with several clients each, and one client on each of ten."""
    simulated(tmp_path, nodes, cases)
    for case in cases:
        rows, tolerance = (ROWS.to(torch.float32), SINGLE) if case.endswith("float32") else (ROWS, DOUBLE)
        here = InProcess(rows, **ENGINES.get(case, {})).run([PROGRAMS[case]]).states[0]
        found, _ = load_tensors(tmp_path / f"{case}.safetensors")
        for name, value in state_tensors(here).items():
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
        assert found.keys() == state_tensors(here).keys()
