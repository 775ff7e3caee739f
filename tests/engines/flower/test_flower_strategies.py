# SPDX-License-Identifier: Apache-2.0
"""For people who use Flower: the strategy in a ServerApp, `register` for a ClientApp, and what is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from torch import nn

from coterie.config import options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.data.readers import read
from coterie.engines.flower.connect import connect
from coterie.engines.flower.node_data import node_data
from coterie.engines.flower.superlink import QUIET
from coterie.errors import ConfigError, CoterieError
from coterie.flower import CoterieStrategy, register
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.runs.folder import load_run
from flower_grid import MemoryGrid

IFCA: dict[str, Any] = {
    "clusters": {"n_clusters": 2}, "training": {"rounds": 3}, "data": {"client": "site", "target": "y"}, "baselines": False,
}  # fmt: skip


def table(n_clients: int = 8, rows: int = 20) -> dict[str, np.ndarray]:
    """Two planted groups of linear clients, and a column of levels that not every client has."""
    draw = np.random.default_rng(0)
    sites = np.repeat([f"s{i}" for i in range(n_clients)], rows)
    a, b = draw.normal(size=(2, len(sites)))
    sign = np.repeat([1.0 if i % 2 else -1.0 for i in range(n_clients)], rows)
    level = np.array(["low", "high", "odd"])[np.repeat(np.arange(n_clients) % 3, rows)]
    return {"site": sites, "a": a, "b": b, "ward": level, "y": a + sign * b + 0.1 * draw.normal(size=len(sites))}


def context(node: int, run_config: dict[str, Any] | None = None, **config: Any) -> Context:
    return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config=run_config or {})


def on_nodes(folder: Path, n: int = 3, chosen: str = "{}") -> MemoryGrid:
    """Nodes with a Parquet file each."""
    rows = table()
    held = {}
    for node in range(n):
        own = np.isin(rows["site"], np.unique(rows["site"])[node::n])
        file = folder / f"rows-{node}.parquet"
        pq.write_table(pa.table({name: value[own] for name, value in rows.items()}), file)
        about = context(
            node, {"options": chosen}, name=f"node-{node}", data=str(file), client="site", target="y", state=str(folder)
        )
        held[10 + node] = node_data(about)
    return MemoryGrid(held)


def whole(folder: Path) -> Clients:
    pq.write_table(pa.table(table()), folder / "whole.parquet")
    return read(folder / "whole.parquet", client="site", target="y")


def test_strategy_gives_what_the_fit_in_process_gives(tmp_path: Path) -> None:
    strategy = CoterieStrategy("ifca", **IFCA)
    result = strategy.start(on_nodes(tmp_path), nodes=3)
    fitted = strategy.fitted_
    assert isinstance(fitted, Fitted)
    here = fit(whole(tmp_path), strategy.options)
    assert fitted.schema == here.schema  # with the levels of all nodes
    torch.testing.assert_close(fitted.models.theta, here.models.theta, atol=1e-10, rtol=1e-10)
    assert torch.equal(fitted.models.placed.label, here.models.placed.label)
    assert fitted.scores[0].test == pytest.approx(here.scores[0].test, rel=1e-9)
    assert set(result.arrays) == {"0/0.weight", "0/0.bias", "1/0.weight", "1/0.bias"}
    weight = torch.from_numpy(result.arrays["1/0.weight"].numpy())
    torch.testing.assert_close(weight.flatten(), fitted.models.theta[1, fitted.models.model.layers["0.weight"]])
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert result.train_metrics_clientapp[3]["clients"] == 8


def test_a_strategy_may_write_a_run_folder_and_continue_it(tmp_path: Path) -> None:
    grid = on_nodes(tmp_path)

    def stop(phase: str, done: Any, total: int) -> None:
        if phase == "fit" and done.round == 2:
            raise KeyboardInterrupt

    first = CoterieStrategy("ifca", **IFCA)
    with pytest.raises(KeyboardInterrupt):
        first.start(grid, nodes=3, folder=tmp_path / "run", every=0.0, watch=stop)
    name = (tmp_path / "run" / "flower-run").read_text()
    again = CoterieStrategy("ifca", **IFCA)
    again.start(grid, nodes=3, folder=tmp_path / "run", every=0.0)
    assert (tmp_path / "run" / "flower-run").read_text() == name
    alone = CoterieStrategy("ifca", **IFCA)
    alone.start(on_nodes(tmp_path), nodes=3)
    assert isinstance(alone.fitted_, Fitted)
    assert torch.equal(load_run(tmp_path / "run").models.theta, alone.fitted_.models.theta)


def test_rounds_may_be_given_in_the_manner_of_flower(tmp_path: Path) -> None:
    strategy = CoterieStrategy("ifca", **IFCA)
    result = strategy.start(on_nodes(tmp_path), nodes=3, num_rounds=2)
    assert len(result.train_metrics_clientapp) == 2
    with pytest.raises(ConfigError, match="there is no option 'n_clusters'"):
        CoterieStrategy("ifca", n_clusters=3)


def test_stragglers_need_no_clock_where_nodes_are_fast_or_slow_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.engines.flower.strategies.connect", partial(connect, poll=0.001))
    stages = {"stragglers": "srpfl", "n0": 2, "stage_rounds": 1}
    how = {key: value for key, value in IFCA.items() if key != "clusters"}
    strategy = CoterieStrategy("fedrep", personal=stages, model={"hidden": [2]}, **how)
    grid = on_nodes(tmp_path)
    grid.delay = {11: 1, 12: 2}
    result = strategy.start(grid, nodes=3, timeout=20.0)  # who is busy is waited for: no answer is lost
    heard = [result.train_metrics_clientapp[number]["clients"] for number in (1, 2, 3)]
    assert heard[0] == 3  # the first node's three clients are the two that were enough
    assert heard[-1] == 8
    with pytest.raises(ConfigError, match="which needs a clock"):
        fit(whole(tmp_path), strategy.options)


# -- register ---------------------------------------------------------------------------------------------------------
def test_an_app_keeps_its_own_functions() -> None:
    app = ClientApp(mods=[message_size_mod])

    @app.train()
    def train(message: Message, about: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    register(app, lambda about: "rows.parquet")
    assert sorted(app._registered_funcs) == ["query.coterie", "train.coterie", "train.default"]


@pytest.mark.parametrize("mod", [secaggplus_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5)], ids=["secagg", "dp"])
def test_mods_that_would_not_mask_our_messages_are_refused(mod: Any) -> None:
    with pytest.raises(ConfigError, match="does not mask coterie's messages"):
        register(ClientApp(mods=[mod]))


def test_flowers_wrappers_of_strategies_are_refused(tmp_path: Path) -> None:
    wrapped = DifferentialPrivacyServerSideFixedClipping(CoterieStrategy("ifca"), 1.0, 1.0, 2)
    with pytest.raises(ConfigError, match="send their own messages"):
        wrapped.configure_evaluate(1, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 modules are given"):
        CoterieStrategy("ifca", module={"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})


# -- holdings ---------------------------------------------------------------------------------------------------------
def loaders(folder: Path) -> dict[str, Callable[[Context], Any]]:
    rows = table()
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    x = np.stack([rows["a"], rows["b"]], 1)
    return {
        "file": lambda about: folder / "rows.parquet",
        "arrays": lambda about: from_arrays(x, rows["y"], rows["site"], test_size=0),
        "one client": lambda about: from_arrays(x, rows["y"], test_size=0),
    }


@pytest.mark.parametrize(("kind", "clients", "features"), [("file", 8, 5), ("arrays", 8, 2), ("one client", 1, 2)])
def test_a_node_holds_what_load_data_gives(kind: str, clients: int, features: int, tmp_path: Path) -> None:
    about = context(3, name="hospital 3", client="site", target="y", state=str(tmp_path / "state"))
    held = node_data(about, loaders(tmp_path)[kind])
    assert held.name == "hospital-3"
    assert held.folder == tmp_path / "state" / "hospital-3"  # nodes of one machine may share the folder
    found = held.load(None)
    assert (found.n_clients, found.schema.n_features) == (clients, features)
    assert found.test is None


def test_a_node_reads_as_the_run_says(tmp_path: Path) -> None:
    loaders(tmp_path)
    chosen = options({"data": {"exclude": ("ward",), "min_rows": 3}}).model_dump_json()
    about = context(0, {"options": chosen}, data=str(tmp_path / "rows.parquet"), client="site", target="y")
    found = node_data(about).load(None)
    assert found.schema.feature_names == ("a", "b")
    assert found.schema.target == "y"
    wider = found.schema.model_copy(update={"missing": "mean"})
    assert node_data(about).load(wider).schema == wider


def test_a_node_without_rows_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="node-0 has no data path"):
        node_data(context(0, **{"partition-id": 0})).load(None)


# -- the example ------------------------------------------------------------------------------------------------------
SIMULATE = """\
from flower_app.client_app import app as client
from flower_app.server_app import app as server
from flwr.simulation import run_simulation
run_simulation(server_app=server, client_app=client, num_supernodes=4)
"""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(__file__).resolve().parents[3] / "examples" / "flower_app"
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_example_finds_its_groups(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from flower_app.client_app import load_data
    from flower_app.server_app import app

    nodes = {i: node_data(context(i, **{"partition-id": i, "state": str(tmp_path)}), load_data) for i in range(4)}
    app(MemoryGrid(nodes), context(0, {"rounds": 5, "clusters": 2}))
    first, second = capsys.readouterr().out.splitlines()
    assert first == "sites by cluster: [6, 6]"
    assert second.removeprefix("with the second column, the target ") in ("rises or falls", "falls or rises")


def test_the_example_runs_in_simulation(example: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    paths = [str(example), os.environ.get("PYTHONPATH", "")]
    around = {**os.environ, **QUIET, "FLWR_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE],
        env=around,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sites by cluster: [6, 6]" in done.stdout


@pytest.mark.parametrize("method", ["local", "shrunk", "representation"])
def test_linear_models_of_single_clients_are_what_they_are_here(method: str, tmp_path: Path) -> None:
    strategy = CoterieStrategy(method)
    strategy.start(on_nodes(tmp_path), nodes=3)
    assert strategy.fitted_ is not None
    here = fit(whole(tmp_path), strategy.options)
    assert strategy.fitted_.scores[0].test == pytest.approx(here.scores[0].test, rel=1e-8)
    torch.testing.assert_close(strategy.fitted_.per_client["metric"], here.per_client["metric"], rtol=1e-7, atol=1e-9)
