# SPDX-License-Identifier: Apache-2.0
"""Before a run: nodes that do not go together are refused by name, and levels and classes are those of all nodes."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
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
from coterie.data.ragged import Ragged
from coterie.data.readers import read, read_with
from coterie.data.schema import Schema
from coterie.engines.engine_for import engine_for
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.client import NodeData, _loaded, refuse_mods
from coterie.engines.flower.connect import connect
from coterie.engines.flower.identity import Identity, is_proven, read_secret
from coterie.engines.flower.link import Link
from coterie.engines.flower.messages import Hello, Introduction
from coterie.engines.flower.wire import from_records, to_records
from coterie.errors import ConfigError, RunError
from coterie.evaluate import target_ask
from flower_grid import MemoryGrid, connected, dealt, plain_schema
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


def spoilt(folder: Path, spoil: Any, *, nodes: int = 3) -> MemoryGrid:
    """A federation with one odd node."""
    grid = MemoryGrid(dealt(federation().rows, folder, nodes=nodes))
    grid.spoil[next(i for i, holding in grid.nodes.items() if holding.name == "node-1")] = spoil
    return grid


def refused(folder: Path, match: str, spoil: Any = None, **changes: Any) -> None:
    """The run goes on without the odd node, and says why."""
    grid = spoilt(folder, spoil or changed(**changes))
    with pytest.warns(NodeWarning, match=f"{match}.*the run goes on without it"):
        clients = connect(grid, **HOW)
    assert set(clients.train.federation.link.nodes) == {"node-0", "node-2"}
    assert clients.names.tolist() == [name for i, name in enumerate(federation().names) if i % 3 != 1]
    assert clients.train.shape == (3,)
    engine_for(clients.train).ask(target_ask(torch.tensor(0.5, dtype=torch.float64)))


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
    refused(tmp_path, "node 'node-1' has torch 1.0", versions={"coterie": version("coterie"), "torch": "1.0"})
    refused(tmp_path, "node 'node-1' speaks protocol 7", protocol=7)


def test_all_client_functions_must_be_known(tmp_path: Path) -> None:
    refused(
        tmp_path, "node 'node-1' does not know coterie.algorithms", steps=("coterie.algorithms.ifca.assign_and_train",)
    )


def test_who_claims_what_others_claim_is_left_out(tmp_path: Path) -> None:
    names = tuple(sorted(federation().names))  # everybody's clients: the others claim what one node claims only
    counts = {"train": torch.ones(len(names), dtype=torch.int64)}
    refused(tmp_path, "client 'site-000' is on node 'node-0' and on node 'node-1'", names=names, counts=counts)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"names": tuple(federation().names[i] for i in (0, 4, 7))}, "client 'site-000' is on node 'node-0' and on"),
        ({"node": "node-0"}, "does not prove"),  # of the name that it has signed
    ],
)
def test_of_two_with_one_claim_nobody_knows_who_is_right(tmp_path: Path, claim: Any, said: str) -> None:
    grid = spoilt(tmp_path, changed(**claim), nodes=3)
    with pytest.warns(NodeWarning, match=said) as told:
        clients = connect(grid, **{**HOW, "nodes": 2})
    left = {"node-2"} if "names" in claim else {"node-0", "node-2"}
    assert set(clients.train.federation.link.nodes) == left
    assert len(told) == 3 - len(left)


def test_two_nodes_of_one_name_are_both_left_out(tmp_path: Path) -> None:
    holdings = dealt(federation().rows, tmp_path, nodes=3)
    odd = next(i for i, holding in holdings.items() if holding.name == "node-1")
    holdings[odd] = replace(holdings[odd], name="node-0")
    with pytest.warns(NodeWarning, match="two nodes are called 'node-0'"):
        clients = connect(MemoryGrid(holdings), **{**HOW, "nodes": 1})
    assert set(clients.train.federation.link.nodes) == {"node-2"}


def test_schemas_must_agree(tmp_path: Path) -> None:
    schema = connected(federation().rows, tmp_path, nodes=3)[0].schema
    other = schema.model_copy(update={"target": "z"})
    refused(tmp_path, "node 'node-1' has target 'z' and node 'node-0' has 'y'", schema=other.model_dump_json())
    other = schema.model_copy(update={"columns": schema.columns[:2]})
    row = {"x": torch.zeros(0, 2, dtype=torch.float64), "y": torch.zeros(0, dtype=torch.float64)}
    refused(tmp_path, "node 'node-1' has 2 columns and node 'node-0' has 3", schema=other.model_dump_json(), row=row)
    other = schema.model_copy(update={"columns": (schema.columns[1], schema.columns[0], schema.columns[2])})
    refused(tmp_path, "node 'node-1' has column 'x1'", schema=other.model_dump_json())
    other = schema.model_copy(update={"task": "classification"})
    refused(tmp_path, "node 'node-1' has task 'classification'", schema=other.model_dump_json())
    row = {"x": torch.zeros(0, 3, dtype=torch.float32), "y": torch.zeros(0, dtype=torch.float64)}
    refused(tmp_path, "node 'node-1' has x of torch.float32", row=row)


def test_of_two_that_differ_nobody_knows_who_is_right(tmp_path: Path) -> None:
    schema = connected(federation().rows, tmp_path, nodes=3)[0].schema
    other = schema.model_copy(update={"target": "z"}).model_dump_json()
    with pytest.raises(RunError, match="node 'node-1' has target 'z' and node 'node-0' has 'y'"):
        connect(spoilt(tmp_path, changed(schema=other), nodes=2), **{**HOW, "nodes": 2})


def test_half_of_the_nodes_that_were_asked_for_must_be_left(tmp_path: Path) -> None:
    grid = spoilt(tmp_path, changed(protocol=7), nodes=3)
    for address in grid.nodes:
        grid.spoil[address] = changed(protocol=7)
    with pytest.raises(RunError, match="0 of 3 nodes can take part: node 'node-0' speaks protocol 7"):
        connect(grid, **HOW)


def test_too_few_nodes_are_an_error_after_a_while(tmp_path: Path) -> None:
    grid = MemoryGrid(dealt(federation().rows, tmp_path, nodes=3))
    with pytest.raises(RunError, match=r"3 of 4 nodes are online after 0\.3 seconds"):
        connect(grid, **{**HOW, "nodes": 4})


def test_a_node_that_cannot_read_its_rows_says_why(tmp_path: Path) -> None:
    def load(_: Schema | None) -> Clients:
        raise RunError("there is no file rows.parquet", "look for it")

    grid = MemoryGrid({**dealt(federation().rows, tmp_path, nodes=2), 7: NodeData("node-7", load, tmp_path / "7")})
    with pytest.warns(NodeWarning, match=r"node 7 cannot take part: there is no file rows\.parquet"):
        assert connect(grid, **HOW).n_clients == len(federation().names)
    with pytest.raises(RunError, match=r"node 7 cannot take part: there is no file rows\.parquet"):
        connect(MemoryGrid({7: grid.nodes[7]}), **{**HOW, "nodes": 1})


def test_a_node_that_does_not_answer_is_waited_for_and_left_out(tmp_path: Path) -> None:
    refused(
        tmp_path, r"node \d+ cannot take part: it has not said who it is in 0.3 seconds", lambda message, reply: None
    )


def test_a_message_that_flower_cannot_read_takes_no_others_with_it(tmp_path: Path) -> None:
    def unreadable(message: Message, reply: Message) -> Message:
        raise ValueError("invalid object")

    refused(tmp_path, r"node \d+ cannot take part: it has not said who it is in 0.3 seconds", unreadable)


# -- introductions that cannot be -------------------------------------------------------------------------------------
COLUMN = {"name": "a", "kind": "categorical", "levels": ["l"]}
ONES = torch.ones(3, dtype=torch.int64)


def columns(*said: dict[str, Any], **more: Any) -> str:
    return json.dumps({"client": "c", "target": "y", "columns": said, **more})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"node": 3}, "its name is not a word of at most 1000 characters"),
        ({"node": "n" * 1001}, "its name is not a word of at most 1000 characters"),
        ({"node": "n\x1b[2J"}, "its name is not a word"),
        ({"protocol": "3"}, "its protocol is not a number"),
        ({"versions": None}, "its versions are no words"),
        ({"versions": {"no-such-package": "1"}}, "has coterie none and the server"),
        ({"steps": None}, "its client functions are not at most 10,000 words"),
        ({"names": None}, "it has no clients, or more than 100,000"),
        ({"names": ()}, "it has no clients, or more than 100,000"),
        ({"names": (1, 2, 3)}, "the name of a client is 1, and not a word"),
        ({"names": ("a", None, "c")}, "the name of a client is None, and not a word"),
        ({"names": ("a", "b" * 100_000, "c")}, "the name of a client is 'bbb"),
        ({"names": ("a", "a\0", "b")}, "the name of a client is 'a.x00'"),
        ({"names": ("n" * 1000, *map(str, range(20_000)))}, "clients take 20,001,000 characters; at most 20,000,000"),
        ({"names": ("a", "a", "b")}, "two of its clients have one name"),
        ({"counts": {}}, "it counts other rows than it has"),
        ({"counts": {"train": ONES, "all": ONES}}, "it counts other rows than it has"),
        ({"counts": {"train": ONES.float()}}, "its train rows are not counted by client"),
        ({"counts": {"train": torch.ones(9, dtype=torch.int64)}}, "its train rows are not counted by client"),
        ({"counts": {"train": -ONES}}, "a client has -1 or -1 train rows; at most 4,294,967,296"),
        ({"counts": {"train": ONES << 62}}, "at most 4,294,967,296"),
        ({"schema": 5}, "its columns are not told in at most 8,388,608 characters"),
        ({"schema": "[" * 100_000}, "its columns cannot be understood"),
        ({"schema": "{}"}, "its columns cannot be understood"),
        ({"schema": columns({**COLUMN, "levels": list(map(str, range(3_000)))})}, "'a' has 3,000 levels; at most 100"),
        ({"schema": columns({**COLUMN, "kind": "numeric"})}, "column 'a' has 1 levels"),
        ({"schema": columns(COLUMN, COLUMN)}, "two of its columns have one name"),
        ({"schema": columns({"name": "a" * 1001})}, "its columns cannot be understood"),
        ({"schema": columns(COLUMN, classes=[str(i) for i in range(1_001)])}, "it has 1,001 classes; at most 1,000"),
        ({"schema": columns(*({**COLUMN, "name": str(i), "levels": list(map(str, range(100)))} for i in range(1_200)))},
         "its rows have 120,000 features; at most 100,000"),
        ({"row": {}}, "it does not say what its rows look like"),
        ({"row": {"x": None}}, "its 'x' is no row"),
        ({"row": {"x": torch.zeros(1, 3)}}, "its 'x' is no row"),
        ({"row": {"x": torch.zeros(0, 4)}}, "its rows have 4 features, and its columns 3"),
        ({"row": {"x": torch.zeros(0, 3, dtype=torch.int64)}}, "its features are of torch.int64"),
        ({"row": {"x": torch.zeros(0, 1 << 19)}}, "its 'x' is no row of at most 100,000"),
        ({"row": {"x": torch.zeros(0, 25_000_000_000)}}, "at most 4,294,967,296 numbers"),
        ({"fingerprint": None}, "its fingerprint is not a text"),
        ({"proof": ""}, "calls itself 'node-1', and does not prove that it has the key that it shows"),
        ({"public": "00" * 32}, "does not prove"),
    ],
)  # fmt: skip
def test_an_introduction_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    refused(tmp_path, f"(node \\d+ cannot take part: |node 'node-1' ).*{said}", **changes)


def test_a_node_cannot_make_everybodys_rows_long(tmp_path: Path) -> None:
    def node(name: str, n: int) -> NodeData:
        levels = [f"level-{i:02d}" for i in range(n)]
        schema = Schema.model_validate_json(columns(*({**COLUMN, "name": str(i), "levels": levels} for i in range(20))))
        x = torch.zeros(1, 4, schema.n_features, dtype=torch.float64)
        clients = Clients(schema, Ragged.from_blocks(x, None, np.array([f"client of {name}"])))
        return NodeData(name, lambda _: clients, tmp_path / name)

    grid = MemoryGrid({i: node(f"node-{i}", n) for i, n in enumerate((3, 80, 4, 3))})
    with pytest.warns(NodeWarning, match="node 'node-1' brings 1,520 levels that no other node has; at most 100"):
        assert connect(grid, **HOW).schema.n_features == 80
    few = MemoryGrid({i: node(f"another-{i}", n) for i, n in enumerate((3, 7))})
    assert connect(few, **{**HOW, "nodes": 2}).schema.n_features == 140


# -- hidden names -----------------------------------------------------------------------------------------------------
def test_names_can_be_hidden(tmp_path: Path) -> None:
    rows = federation().rows
    holdings = {i: replace(holding, opaque=True) for i, holding in dealt(rows, tmp_path, nodes=3).items()}
    grid = MemoryGrid(holdings)
    clients = connect(grid, **HOW)
    assert not set(clients.names) & set(rows.names)
    assert not set(clients.train.keys.tolist()) & set(rows.keys.tolist())  # they would tell names to who tries them
    assert not any("site-" in str(message.content) for message in grid.replied)
    here = sorted((int(n), round(float(y), 6)) for n, y in zip(rows.counts, _sums(rows), strict=True))
    far = zip(clients.train.counts, _sums(clients.train), strict=True)
    assert sorted((int(n), round(float(y), 6)) for n, y in far) == here  # hidden names are in another order


def test_hidden_names_are_the_same_after_a_restart_and_others_at_another_node(tmp_path: Path) -> None:
    clients = Clients(plain_schema(federation().rows), federation().rows)

    def names(folder: Path, secret: bytes = b"") -> list[str]:
        node = NodeData("node", lambda _: clients, folder, opaque=True, secret=secret)
        _loaded.clear()  # another process
        return connect(MemoryGrid({1: node}), **{**HOW, "nodes": 1}).names.tolist()

    one = names(tmp_path / "one")
    assert names(tmp_path / "one") == one
    assert not set(names(tmp_path / "other")) & set(one)
    assert names(tmp_path / "one", b"of the federation") == names(tmp_path / "other", b"of the federation") != one
    kept = tmp_path / "one" / "identity"
    assert kept.stat().st_mode & 0o077 == 0
    kept.write_bytes(b"short")
    with pytest.raises(RunError, match="is not a node's secret"):
        names(tmp_path / "one")


def test_with_a_secret_of_the_federation_a_client_on_two_nodes_is_seen(tmp_path: Path) -> None:
    holdings = {
        i: replace(holding, opaque=True, secret=b"of all nodes")
        for i, holding in dealt(federation().rows, tmp_path, nodes=3).items()
    }
    odd, other = list(holdings)[:2]
    holdings[odd] = replace(holdings[odd], load=holdings[other].load)
    with pytest.warns(NodeWarning, match="client '[0-9a-f]{32}' is on node"):
        assert len(connect(MemoryGrid(holdings), **{**HOW, "nodes": 1}).train.federation.link.nodes) == 1


def test_a_secret_is_long_enough(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="has 5 bytes"):
        read_secret(tmp_path / "secret")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "nothing")


# -- names belong to keys ---------------------------------------------------------------------------------------------
def link_with(folder: Path) -> tuple[Link, MemoryGrid, int]:
    clients, grid = connected(federation().rows, folder, nodes=3)
    return clients.train.federation.link, grid, next(i for i, h in grid.nodes.items() if h.name == "node-1")


def test_nobody_takes_over_the_name_of_an_absent_node(tmp_path: Path) -> None:
    link, grid, address = link_with(tmp_path)
    genuine = grid.nodes[address]
    grid.drop(address)
    grid.join(900, replace(genuine, folder=tmp_path / "stolen"))  # name, rows, everything but the key
    with pytest.warns(NodeWarning, match="node 'node-1' is not taken back: it does not have the key") as told:
        link.greet()
    assert len(told) == 1
    assert link.nodes["node-1"].address is None
    grid.join(901, genuine)
    link.greet()
    assert link.nodes["node-1"].address == 901


def test_a_node_with_other_rows_is_not_taken_back(tmp_path: Path) -> None:
    link, grid, address = link_with(tmp_path)
    genuine = grid.nodes[address]
    grid.drop(address)
    other = genuine.load(None)
    grid.join(900, replace(genuine, load=lambda _: replace(other, train=other.train.to(torch.float32)), version="2"))
    with pytest.warns(NodeWarning, match="node 'node-1' is not taken back: it has other clients or rows than before"):
        link.greet()


def test_a_proof_is_for_one_greeting_at_one_address(tmp_path: Path) -> None:
    link, grid, address = link_with(tmp_path)
    heard = next(r for r in grid.replied if from_records(r.content).node == "node-1")
    grid.join(900, grid.nodes[address])
    grid.drop(address)
    grid.spoil[900] = lambda message, _: Message(heard.content, reply_to=message)
    link.greet()
    assert link.nodes["node-1"].address is None
    assert "does not prove" in link.refusals[900]
    asked = Hello("run", "c")
    said = Identity.of(tmp_path / "node-1").introduced(from_records(heard.content), asked, 5)
    assert is_proven(said, asked, 5)
    assert not is_proven(said, asked, 6)
    assert not is_proven(said, replace(asked, challenge="d"), 5)
    assert not is_proven(said, replace(asked, run="other"), 5)
    assert not is_proven(replace(said, node="node-2"), asked, 5)


def test_a_run_is_continued_by_those_who_began_it(tmp_path: Path) -> None:
    link, grid, address = link_with(tmp_path)
    known = [node.said for node in link.nodes.values()]
    before = connect(grid, **HOW, known=known)
    genuine = grid.nodes[address]
    grid.join(55, NodeData("node-9", genuine.load, tmp_path / "node-9"))  # claims what node-1 has, and is nobody
    grid.nodes[address] = replace(genuine, folder=tmp_path / "stolen")
    with pytest.warns(NodeWarning) as told:
        clients = connect(grid, **HOW, known=known)
    said = sorted(str(one.message).removesuffix(": the run goes on without it") for one in told)
    assert said == [
        "node 'node-1' cannot take part: it does not have the key that it had when the run began",
        "node 'node-1' is away",
        "node 'node-9' cannot take part: it was not there when the run began",
    ]
    assert clients.fingerprint() == before.fingerprint()  # the same clients, of whom some are missing
    assert clients.train.federation.link.nodes["node-1"].address is None
    grid.nodes = {55: grid.nodes[55]}
    with pytest.raises(RunError, match="no node is there with which the run was begun"), pytest.warns(NodeWarning):
        connect(grid, **HOW, known=known)


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
