# SPDX-License-Identifier: Apache-2.0
"""Personal models stay on the nodes: predictions are made there, from the run folder and the node's own state."""

from pathlib import Path

import numpy as np
import pytest

import coterie
from command import coterie as command
from coterie.data.clients import Clients
from coterie.engines.flower.strategies import CoterieStrategy
from coterie.errors import ConfigError, RunError
from coterie.runs.fit import fit_run
from flower_grid import MemoryGrid, dealt, plain_schema
from planted import planted

NODES = 3
OPTIONS = {
    "fedrep": {"training": {"rounds": 3}, "model": {"hidden": [4]}, "baselines": False},
    "ditto": {"training": {"rounds": 3}, "baselines": False},
    "shrunk": {"prior": {"spread": "diagonal"}, "baselines": False},
    "mixed": {"mixed": {"slopes": ["x0"]}, "baselines": False},
}


@pytest.mark.parametrize("method", OPTIONS)
def test_a_node_predicts_as_if_all_were_fitted_here(method: str, tmp_path: Path) -> None:
    rows = planted(9, 20).clients(test_size=0.0).train
    schema, options = plain_schema(rows), {"seed": 1, "data": {"test_size": 0.0}, **OPTIONS[method]}
    holdings = dealt(rows, tmp_path / "state", nodes=NODES)
    strategy = CoterieStrategy(method, **options)  # type: ignore[arg-type]
    strategy.start(MemoryGrid(holdings), nodes=NODES, folder=tmp_path / "run")
    fit_run(
        tmp_path / "here", strategy.options, Clients(schema, rows), "test", every=1.0, watch=None, begun=lambda _: None
    )
    here = coterie.load(tmp_path / "here")
    for number in range(NODES):
        own = rows.only(np.arange(number, rows.n_clients, NODES))
        there = coterie.load(tmp_path / "run", state=_only(tmp_path, f"node-{number}"))
        assert there.personal_.names.tolist() == own.names.tolist()
        np.testing.assert_allclose(there.predict(Clients(schema, own)), here.predict(Clients(schema, own)), rtol=1e-4)
    with pytest.raises(RunError, match="keeps nothing of this run"):
        coterie.load(tmp_path / "run", state=tmp_path / "elsewhere")
    with pytest.raises(RunError, match="are in that folder"):
        coterie.load(tmp_path / "here", state=tmp_path / "state")


def _only(folder: Path, node: str) -> Path:
    """A machine that has one node's state."""
    place = folder / f"machine-{node}"
    place.mkdir()
    (place / node).symlink_to(folder / "state" / node)
    return place


def test_methods_that_leave_nothing_with_clients_have_no_state(tmp_path: Path) -> None:
    rows = planted(6, 20).clients(test_size=0.0).train
    strategy = CoterieStrategy("fedavg", training={"rounds": 1}, baselines=False)
    strategy.start(MemoryGrid(dealt(rows, tmp_path / "state", nodes=2)), nodes=2, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="fedavg leaves nothing with clients"):
        coterie.load(tmp_path / "run", state=tmp_path / "state")


def test_who_is_new_cannot_be_told_where_no_personal_parts_are(tmp_path: Path) -> None:
    rows = planted(6, 20).clients(test_size=0.0).train
    strategy = CoterieStrategy("ditto", training={"rounds": 1}, baselines=False)
    strategy.start(MemoryGrid(dealt(rows, tmp_path / "state", nodes=2)), nodes=2, folder=tmp_path / "run")
    block, names = rows.client(0), [str(rows.names[0])] * int(rows.counts[0])
    with pytest.raises(RunError, match="personal parameters are stored at the clients"):
        coterie.load(tmp_path / "run").predict(block.x[0].numpy(), names)
    there = coterie.load(tmp_path / "run", state=_only(tmp_path, "node-1"))
    assert there.predict(block.x[0].numpy(), ["new"] * len(names)).shape == (len(names),)  # by the common model
    lines = ["client,x0,x1,x2", *(",".join([names[0], *map(str, row)]) for row in block.x[0].tolist())]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    said = command("predict", tmp_path / "run", tmp_path / "rows.csv", "--state", _only(tmp_path, "node-0"))
    assert said.code == 0, said.err
    assert said.out.splitlines()[1].startswith(f'"{names[0]}",true,')
