# SPDX-License-Identifier: Apache-2.0
"""Before a run: nodes that do not go together are refused by name, and levels and classes are those of all nodes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod

from coterie.data.clients import Clients, held_out
from coterie.data.readers import read, read_with
from coterie.data.schema import Schema
from coterie.engines.engine_for import engine_for
from coterie.engines.flower.client import NodeData, refuse_mods
from coterie.engines.flower.connect import connect
from coterie.engines.flower.messages import Introduction
from coterie.engines.flower.wire import from_records, to_records
from coterie.errors import ConfigError, RunError
from coterie.evaluate import target_ask
from flower_grid import MemoryGrid, connected, dealt
from helpers import federation

HOW: dict[str, Any] = {"run": "test", "nodes": 3, "test_size": 0.0, "timeout": 0.2, "wait": 0.3, "poll": 0.001}


def changed(**changes: Any) -> Any:
    """A node that says something else of itself."""

    def spoil(message: Message, reply: Message) -> Message:
        said = from_records(reply.content)
        return Message(
            to_records(replace(said, **changes) if isinstance(said, Introduction) else said), reply_to=message
        )

    return spoil


def refused(folder: Path, match: str, **changes: Any) -> None:
    grid = MemoryGrid(dealt(federation().rows, folder, nodes=3))
    odd = next(i for i, holding in grid.nodes.items() if holding.name == "node-1")
    grid.spoil[odd] = changed(**changes)
    with pytest.raises(RunError, match=match):
        connect(grid, **HOW)


def test_the_server_knows_who_is_there_and_how_much_they_have(tmp_path: Path) -> None:
    rows = federation().rows
    clients, _ = connected(rows, tmp_path, nodes=3)
    assert clients.names.tolist() == rows.names.tolist()
    assert torch.equal(clients.train.counts, rows.counts)
    assert torch.equal(clients.train.keys, rows.keys)
    assert clients.train.shape == (3,)
    assert clients.schema.task == "regression"
    with pytest.raises(RunError, match="cannot be read here"):
        clients.train.blocks()


def test_the_same_rows_and_clients_are_held_out_as_here(tmp_path: Path) -> None:
    rows = federation((9, 12, 7, 20, 15, 8, 11, 6)).rows
    clients, _ = connected(rows, tmp_path, nodes=3, test_size=0.3, new_clients=0.3, seed=5)
    here = held_out(rows, clients.schema, test_size=0.3, new_clients=0.3, seed=5)
    for name in ("train", "test", "newcomers"):
        far, near = getattr(clients, name), getattr(here, name)
        assert far.names.tolist() == near.names.tolist()
        assert far.layout.counts.tolist() == near.layout.counts.tolist()
        sums = [engine_for(part).ask(target_ask(torch.tensor(0.5, dtype=torch.float64))) for part in (far, near)]
        for field in ("n", "sum", "square"):
            torch.testing.assert_close(sums[0][field], sums[1][field], rtol=1e-12, atol=1e-12)


def test_versions_must_agree(tmp_path: Path) -> None:
    refused(tmp_path, "node 'node-1' has coterie 0.0.1", versions={"coterie": "0.0.1"})
    refused(tmp_path, "node 'node-1' has torch 1.0", versions={"torch": "1.0"})
    refused(tmp_path, "node 'node-1' speaks protocol 7", protocol=7)


def test_all_client_functions_must_be_known(tmp_path: Path) -> None:
    refused(
        tmp_path, "node 'node-1' does not know coterie.algorithms", steps=("coterie.algorithms.ifca.assign_and_train",)
    )


def test_names_must_be_distinct(tmp_path: Path) -> None:
    refused(tmp_path, "two nodes are called 'node-0'", node="node-0")
    names = tuple(federation().names[i] for i in (0, 4, 7))  # of node-1's three clients one is node-0's
    refused(tmp_path, "client 'site-000' is on node 'node-0' and on node 'node-1'", names=names)


def test_schemas_must_agree(tmp_path: Path) -> None:
    schema = connected(federation().rows, tmp_path, nodes=3)[0].schema
    other = schema.model_copy(update={"target": "z"})
    refused(tmp_path, "node 'node-1' has target 'z' and node 'node-0' has 'y'", schema=other.model_dump_json())
    other = schema.model_copy(update={"columns": schema.columns[:2]})
    refused(tmp_path, "node 'node-1' has 2 columns and node 'node-0' has 3", schema=other.model_dump_json())
    other = schema.model_copy(update={"columns": (schema.columns[1], *schema.columns[1:])})
    refused(tmp_path, "node 'node-1' has column 'x1'", schema=other.model_dump_json())
    other = schema.model_copy(update={"task": "classification"})
    refused(tmp_path, "node 'node-1' has task 'classification'", schema=other.model_dump_json())
    row = {"x": torch.zeros(0, 3, dtype=torch.float32), "y": torch.zeros(0, dtype=torch.float64)}
    refused(tmp_path, "node 'node-1' has x of torch.float32", row=row)


def test_too_few_nodes_are_an_error_after_a_while(tmp_path: Path) -> None:
    grid = MemoryGrid(dealt(federation().rows, tmp_path, nodes=3))
    with pytest.raises(RunError, match=r"3 of 4 nodes are online after 0\.3 seconds"):
        connect(grid, **{**HOW, "nodes": 4})


def test_a_node_that_cannot_read_its_rows_says_why(tmp_path: Path) -> None:
    def load(_: Schema | None) -> Clients:
        raise RunError("there is no file rows.parquet", "look for it")

    grid = MemoryGrid({**dealt(federation().rows, tmp_path, nodes=2), 7: NodeData("node-7", load, tmp_path / "7")})
    with pytest.raises(RunError, match=r"node 7 cannot take part: there is no file rows\.parquet"):
        connect(grid, **HOW)


def test_names_can_be_hidden(tmp_path: Path) -> None:
    rows = federation().rows
    holdings = {i: replace(holding, opaque=True) for i, holding in dealt(rows, tmp_path, nodes=3).items()}
    grid = MemoryGrid(holdings)
    clients = connect(grid, **HOW)
    assert not set(clients.names) & set(rows.names)
    assert sorted(clients.train.keys.tolist()) == sorted(rows.keys.tolist())
    assert not any("site-" in str(message.content) for message in grid.replied)
    here = {int(key): (int(n), float(y)) for key, n, y in zip(rows.keys, rows.counts, _sums(rows), strict=True)}
    far = zip(clients.train.keys, clients.train.counts, _sums(clients.train), strict=True)
    assert {int(key): (int(n), float(y)) for key, n, y in far} == here  # hidden names are in another order


def _sums(rows: Any) -> torch.Tensor:
    from coterie.evaluate import measure_ask
    from coterie.models import linear_regression

    ask = measure_ask(linear_regression(3), torch.zeros(1, 4, dtype=torch.float64), torch.zeros(rows.n_clients).long())
    found: torch.Tensor = engine_for(rows).ask(ask)["loss"]
    return found


def test_levels_and_classes_are_those_of_all_nodes(tmp_path: Path) -> None:
    texts = {
        "north": "client,ward,age,sick\na,icu,30,yes\na,er,41,no\nb,icu,52,no\nb,er,33,yes\n",
        "south": "client,ward,age,sick\nc,er,30,maybe\nc,er,41,no\nd,day,52,no\nd,er,33,maybe\n",
    }
    holdings = {}
    for i, (name, text) in enumerate(texts.items()):
        path = tmp_path / f"{name}.csv"
        path.write_text(text)

        def load(schema: Schema | None, path: Path = path) -> Clients:
            if schema is not None:
                return read_with(schema, path)
            return read(path, client="client", target="sick", test_size=0.0)

        holdings[i] = NodeData(name, load, tmp_path / name)
    clients = connect(MemoryGrid(holdings), **{**HOW, "nodes": 2})
    (tmp_path / "all.csv").write_text(texts["north"] + "\n".join(texts["south"].splitlines()[1:]) + "\n")
    here = read(tmp_path / "all.csv", client="client", target="sick", test_size=0.0)
    assert clients.schema == here.schema
    assert clients.schema.classes == ("maybe", "no", "yes")
    assert clients.train.shape == here.train.shape == (4,)
    for part in (clients.train, here.train):
        total = engine_for(part).ask(target_ask(torch.tensor(0.0, dtype=torch.float64)))
        assert float(total["sum"]) == 8.0  # class numbers 2 1 1 2 and 0 1 1 0, as in one file


def test_masking_mods_are_refused() -> None:
    for mod in (LocalDpMod(1.0, 1.0, 1.0, 1.0), fixedclipping_mod):
        with pytest.raises(ConfigError, match="does not mask"):
            refuse_mods(ClientApp(mods=[mod]))
    refuse_mods(ClientApp(mods=[message_size_mod]))


def test_nothing_else_needs_flower() -> None:
    code = (
        "import sys\n"
        "sys.modules['flwr'] = None\n"
        "import coterie, coterie.cli.commands, coterie.engines.flower.catalogue\n"
        "import coterie.estimators, coterie.studies.commands\n"
        "import coterie.engines.flower\n"
        "import os; print(os.environ['FLWR_TELEMETRY_ENABLED'], os.environ['RAY_USAGE_STATS_ENABLED'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"]


def test_rows_on_other_machines_are_not_changed_by_closures(tmp_path: Path) -> None:
    rows = connected(federation().rows, tmp_path, nodes=3)[0].train
    with pytest.raises(RunError, match="changed by values"):
        rows.changed(lambda x: x)
    with pytest.raises(RunError, match="chosen by what they have"):
        rows.only(np.array([0]))
