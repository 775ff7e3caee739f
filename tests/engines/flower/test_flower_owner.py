# SPDX-License-Identifier: Apache-2.0
"""What the owner of a node decides beside the checks of rows: who may ask, how much, after whose look; what is written."""

import json
import stat
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from pydantic import BaseModel

pytest.importorskip("flwr")

from benchmarks.attacks.policy import ATTACKS, CASES, lots, refused_line, state
from benchmarks.attacks.reading_rows import WARDS, Refused, Victim, got, question, sums

from coterie.algorithms.fedavg import train_shared
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.approvals import MOST_WAITING, Asking, WaitsError, check_approved, decide, pending
from coterie.engines.flower.client import answered
from coterie.engines.flower.connect import connect
from coterie.engines.flower.ledger import FILE as LEDGER
from coterie.engines.flower.ledger import read_ledger
from coterie.engines.flower.messages import Hello, Refusal, Secure
from coterie.engines.flower.node_data import node_data
from coterie.engines.flower.policy_file import Policy, Run, SecureSums, read_policy
from coterie.engines.flower.question_log import FILE as LOG
from coterie.engines.flower.question_log import Entry, entries, write
from coterie.engines.flower.strategies import CoterieStrategy
from coterie.engines.flower.wire import from_records
from coterie.errors import ConfigError, RunError
from coterie.local import Training
from coterie.models import linear_regression
from coterie.protocol import Ask, WeightedMean
from flower_grid import MemoryGrid, connected, dealt
from helpers import federation

ROOT = Path(__file__).parents[3]
EVERY = range(WARDS)


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ATTACKS)
def test_what_the_policy_does_not_allow_is_refused_and_in_the_log(name: str) -> None:
    assert ATTACKS[name]()


def test_at_least_ten_requests_are_refused_each_in_its_own_words() -> None:
    said = {name: refused_line(run, policy=text)[0] for name, (run, text) in CASES.items()}
    assert len(set(said.values()) - {said["without-a-greeting"], said["single-values"]}) >= 10


def test_a_greeting_of_an_allowed_method_is_answered(tmp_path: Path) -> None:
    victim = Victim(tmp_path, options={"method": "fedavg"}, policy='[run]\nmethods = ["fedavg"]\n')
    assert len(victim.asked(Hello("run")).names) == WARDS


def test_a_run_that_does_not_say_its_method_is_refused_where_methods_are_listed(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy='[run]\nmethods = ["ifca"]\n')
    victim.context.run_config = {}
    with pytest.raises(Refused, match="does not say its method, and this node allows ifca"):
        victim.asked(Hello("run"))


def test_only_masked_sums_leave_where_the_policy_says_so(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[secure]\nonly = true\n")
    with pytest.raises(Refused, match="'sum' of 'column_sums' would leave unmasked"):
        victim.asked(question(sums(), EVERY))
    with pytest.raises(Refused, match="'lot' of 'answer_to' would leave unmasked"):
        victim.asked(question(lots(), EVERY))
    mask = Secure("mask", "run", "0" * 32)
    with pytest.raises(Refused, match="'lot' of 'answer_to' would leave unmasked"):
        victim.asked(replace(question(lots(), EVERY), secure=mask))  # no secure sum hides it
    with pytest.raises(Refused, match="has no keys of this exchange"):
        victim.asked(replace(question(sums(), EVERY), secure=mask))
    lines = entries(state(victim))[0]
    assert [line.fields for line in lines] == [{"sum": "sum"}, *[{"lot": "individual"}] * 2, {"sum": "masked"}]
    assert all(line.refused and not line.bytes for line in lines)
    assert read_ledger(state(victim)).questions == 0


def test_only_clients_with_enough_rows_are_told_of(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[clients]\nrows = 10\n")
    rows = Path(str(victim.context.node_config["data"]))
    rows.write_text(rows.read_text(encoding="utf-8") + "r40,small,1,2,3\nr41,small,1,2,4\n", encoding="utf-8")
    said = victim.asked(Hello("run"))
    assert said.names == tuple(f"w{i}" for i in range(WARDS))
    assert said.counts["train"].tolist() == [10] * WARDS
    with pytest.raises(Refused, match="a client that is not on this node"):
        victim.asked(question(sums(), range(WARDS + 1)))


# -- the ledger -------------------------------------------------------------------------------------------------------
def test_what_is_refused_is_not_counted(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[run]\nquestions = 1\n[sums]\nclients = 2\n")
    with pytest.raises(Refused):
        victim.asked(question(sums(), [0]))
    victim.asked(question(sums(), EVERY))
    with pytest.raises(Refused):
        victim.asked(question(sums(), EVERY, number=2))
    spent = read_ledger(state(victim))
    assert (spent.questions, spent.runs["run"].questions) == (1, 1)


def test_a_budget_of_epsilon_is_spent_to_the_last_tenth_and_no_further(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[budget]\nepsilon = 0.3\n")
    cost = replace(sums(), epsilon=0.1)
    for number in (1, 2, 3):  # their sum is a little above 0.3 in floating point
        victim.asked(question(cost, EVERY, number=number))
    with pytest.raises(Refused, match=r"an epsilon of 0\.3 on all runs together; 0 is left, and this costs 0\.1"):
        victim.asked(question(cost, EVERY, number=4))
    victim.asked(question(sums(), EVERY, number=5))  # it costs nothing


@pytest.mark.parametrize("epsilon", [float("nan"), float("inf"), 0.0, -1.0, True, "1"])
def test_an_epsilon_that_is_none_is_refused(epsilon: Any, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="epsilon is not a number above 0"):
        Victim(tmp_path).asked(question(replace(sums(), epsilon=epsilon), EVERY))


def test_a_ledger_that_cannot_be_read_lets_nothing_leave(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[budget]\nquestions = 5\n")
    victim.asked(question(sums(), EVERY))
    for text in ("", "{}", '{"questions": -1, "epsilon": 0, "runs": {}}', '{"questions": 0, "epsilon": 0, "runs": []}'):
        (state(victim) / LEDGER).write_text(text, encoding="utf-8")
        with pytest.raises(Refused, match=r"ledger\.json of this node cannot be read"):
            victim.asked(question(sums(), EVERY))


SPEND = """\
import sys
from pathlib import Path
from benchmarks.attacks.reading_rows import Refused, Victim, question, sums
from benchmarks.attacks.policy import state
victim = Victim(Path(sys.argv[1]), policy="[budget]\\nquestions = 30\\n[log]\\nmegabytes = 0.1\\n")
print("ready", flush=True)
sys.stdin.readline()
done = 0
for number in range(25):
    try:
        victim.asked(question(sums(), range(4), run=sys.argv[2], number=number + 1))
        done += 1
    except Refused:
        pass
print(done)
"""


def test_two_processes_never_exceed_a_budget_and_lose_no_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPEND, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    both = [subprocess.Popen([*command, name], **pipes) for name in ("one", "two")]
    for one in both:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    done = [int(one.communicate("go\n")[0]) for one in both]
    assert sum(done) == 30
    folder = tmp_path / "state" / "ward-7"
    lines, broken = entries(folder)
    assert (len(lines), broken, sum(not line.refused for line in lines)) == (50, 0, 30)
    assert read_ledger(folder).questions == 30


# -- the log ----------------------------------------------------------------------------------------------------------
def test_the_log_says_who_asked_what_and_what_left(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    victim.context.run_config = {**victim.context.run_config, "submitter": "fpk_1"}
    victim.asked(Hello("greeted"))
    reply = victim.asked(question(replace(sums(), epsilon=0.5), [0, 2]))
    hello, asked = entries(state(victim))[0]
    assert (hello.run, hello.flower, hello.method, hello.submitter) == ("greeted", 1, "ifca", "fpk_1")
    assert (hello.function, hello.clients, hello.refused) == ("introduction", WARDS, "")
    assert hello.bytes > 100
    assert (asked.run, asked.function, asked.asks, asked.clients) == ("run", "column_sums", 1, 2)
    assert (asked.fields, asked.bytes, asked.epsilon) == ({"sum": "sum"}, got(reply).nbytes, 0.5)


def test_a_message_that_cannot_be_read_is_in_the_log(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    record = RecordDict({"coterie-document": ConfigRecord({"json": "[", "tensors": b""})})
    assert isinstance(from_records(answered(record, node_data(victim.context))), Refusal)
    (line,) = entries(state(victim))[0]
    assert line.function == ""
    assert line.refused.startswith("a message cannot be read")


def test_what_cannot_be_logged_does_not_leave(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    victim.asked(Hello("run"))
    (state(victim) / LOG).unlink()
    (state(victim) / LOG).mkdir()
    with pytest.raises(Refused, match="cannot write its log: Is a directory"):
        victim.asked(question(sums(), EVERY))


def test_a_line_that_was_cut_costs_no_other(tmp_path: Path) -> None:
    write(tmp_path, [Entry(run="a")], 1.0)
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"run": "cut", "flo')
    assert [line.run for line in entries(tmp_path)[0]] == ["a"]
    write(tmp_path, [Entry(run="b"), Entry(run="c")], 1.0)
    lines, broken = entries(tmp_path)
    assert ([line.run for line in lines], broken) == (["a", "b", "c"], 1)


def test_the_log_is_bounded_and_its_newest_lines_are_kept(tmp_path: Path) -> None:
    for number in range(1000):
        write(tmp_path, [Entry(run=f"run{number}", refused="x" * 100)], 0.1)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 120_000
    runs = [line.run for line in entries(tmp_path)[0]]
    assert runs == [f"run{number}" for number in range(1000 - len(runs), 1000)]
    assert len(runs) > 200
    assert [line.run for line in entries(tmp_path, last=3)[0]] == ["run997", "run998", "run999"]
    assert [line.run for line in entries(tmp_path, run="run998")[0]] == ["run998"]


def test_what_is_kept_of_a_node_is_for_its_owner_only(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[run]\napproval = true\n")
    with pytest.raises(Refused):
        victim.asked(Hello("run"))
    decide(state(victim), "run", "approved")
    victim.asked(question(sums(), EVERY))
    names = {path.name for path in state(victim).iterdir() if path.is_file()}
    assert names == {LOG, LEDGER, "runs.json"}
    for path in (state(victim), *state(victim).iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# -- approval ---------------------------------------------------------------------------------------------------------
def test_a_run_is_answered_as_soon_as_it_is_approved(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[run]\napproval = true\n")
    with pytest.raises(Refused, match="run mine waits for the approval of this node's owner"):
        victim.asked(Hello("mine"))
    (one,) = pending(state(victim))
    assert (one.run, one.flower, one.method) == ("mine", 1, "ifca")
    decide(state(victim), "mine", "approved")
    assert pending(state(victim)) == []
    victim.asked(Hello("mine"))
    victim.asked(question(sums(), EVERY, run="mine"))
    with pytest.raises(Refused, match="run other waits"):
        victim.asked(question(sums(), EVERY, run="other"))


def test_runs_that_wait_do_not_fill_the_disk(tmp_path: Path) -> None:
    for number in range(MOST_WAITING):
        with pytest.raises(WaitsError):
            check_approved(tmp_path, Asking(f"run{number}"))
    with pytest.raises(RunError, match="100 runs wait for approval at this node, and it takes no more"):
        check_approved(tmp_path, Asking("another"))
    assert len(pending(tmp_path)) == MOST_WAITING


def test_a_run_that_never_asked_cannot_be_approved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run 'mine' has asked this node"):
        decide(tmp_path, "mine", "approved")


def test_decisions_that_cannot_be_read_approve_nothing(tmp_path: Path) -> None:
    for text in ("", '{"runs": [{"run": "a", "decision": "maybe"}]}', '{"runs": [1]}'):
        (tmp_path / "runs.json").write_text(text, encoding="utf-8")
        with pytest.raises(RunError, match=r"runs\.json cannot be read"):
            check_approved(tmp_path, Asking("a"))


@pytest.fixture
def waiting(tmp_path: Path) -> MemoryGrid:
    """Two nodes, of which one has an owner who looks first."""
    grid = MemoryGrid(dealt(federation((5, 3, 7, 8)).rows, tmp_path, nodes=2))
    careful = next(address for address, node in grid.nodes.items() if node.name == "node-1")
    grid.nodes[careful] = replace(grid.nodes[careful], policy=Policy(run=Run(approval=True)))
    return grid


HOW: dict[str, Any] = {"nodes": 2, "test_size": 0.0, "timeout": 5.0, "poll": 0.001}


def test_the_server_says_who_waits_and_goes_on_without_it(waiting: MemoryGrid) -> None:
    with pytest.warns(NodeWarning) as told:
        clients = connect(waiting, run="mine", wait=0.2, **HOW)
    assert clients.n_clients == 2
    first, last = (str(one.message) for one in told)
    assert first == "node 'node-1': run mine waits for the approval of this node's owner"
    assert last == f"{first}: the run goes on without it"


def test_the_server_waits_for_an_owner_who_approves_in_time(waiting: MemoryGrid, tmp_path: Path) -> None:
    calls = 0

    def approve() -> str:
        nonlocal calls
        calls += 1
        if calls == 3:
            decide(tmp_path / "node-1", "mine", "approved")
        return ""

    with pytest.warns(NodeWarning, match="run mine waits"):
        clients = connect(waiting, run="mine", wait=30.0, waits=approve, **HOW)
    assert clients.n_clients == 4


def test_a_run_that_had_to_wait_is_repeated_under_its_name(waiting: MemoryGrid, tmp_path: Path) -> None:
    for address, node in waiting.nodes.items():
        waiting.nodes[address] = replace(node, policy=Policy(run=Run(approval=True)))
    strategy = CoterieStrategy("fedavg", training={"rounds": 1}, data={"test_size": 0.0})
    how: dict[str, Any] = {"nodes": 2, "folder": tmp_path / "out", "timeout": 5.0}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", NodeWarning)
        patch.setattr(connect, "__kwdefaults__", {**(connect.__kwdefaults__ or {}), "wait": 0.1, "poll": 0.001})
        with pytest.raises(RunError, match="waits for the approval") as refused:
            strategy.start(waiting, **how)
        (one,) = pending(tmp_path / "node-0")
        assert f"coterie node approve {one.run}" in refused.value.hint
        assert f"repeat the command with --out {tmp_path / 'out'}" in refused.value.hint
        for name in ("node-0", "node-1"):
            decide(tmp_path / name, one.run, "approved")
        strategy.start(waiting, **how)
    assert strategy.fitted_ is not None
    assert json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["status"] == "finished"


def test_a_fit_that_all_nodes_refuse_ends_with_a_sentence(tmp_path: Path) -> None:
    grid = MemoryGrid(dealt(federation((5, 3, 7, 8)).rows, tmp_path, nodes=2))
    for address, node in grid.nodes.items():
        grid.nodes[address] = replace(node, policy=Policy(secure=SecureSums(only=True)))
    strategy = CoterieStrategy("fedavg", training={"rounds": 1}, data={"test_size": 0.0})
    with (
        pytest.warns(NodeWarning, match="is refused: .* this node sends masked sums only"),
        pytest.raises(RunError, match="no client has answered"),
    ):
        strategy.start(grid, nodes=2, timeout=5.0)


def test_every_node_of_a_federation_has_its_own_log(tmp_path: Path) -> None:
    clients, grid = connected(federation((5, 3, 7, 8)).rows, tmp_path, nodes=2)
    asked = Ask(sums().step, {**sums(d=int(clients.train.shape[0])).shared}, dict(sums().fold))
    clients.train.federation.engine(clients.train).ask(asked)
    for node in grid.nodes.values():
        assert [line.function for line in entries(node.folder)[0]] == ["introduction", "column_sums"]


# -- what no policy prevents: docs/threat-model.md --------------------------------------------------------------------
def test_a_server_still_learns_one_client_as_a_difference_of_sums(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[sums]\nclients = 3\n")
    every, three = (got(victim.asked(question(sums(), ids))) for ids in (EVERY, [0, 1, 2]))
    np.testing.assert_allclose((every - three).numpy(), victim.table[3::WARDS, :2].sum(0), atol=1e-9)


def test_without_a_policy_a_group_of_one_is_told(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    np.testing.assert_allclose(got(victim.asked(question(sums(), [1]))).numpy(), victim.table[1::WARDS, :2].sum(0))


def test_a_server_still_learns_sums_of_products_from_models_made_for_it(tmp_path: Path) -> None:
    """Of a linear model a step from 0 is by X'y, and steps from unit vectors differ from it by the columns of X'X."""
    victim = Victim(tmp_path)

    def moved(theta: torch.Tensor) -> torch.Tensor:
        shared = {
            "model": linear_regression(2), "theta": theta, "step_size": torch.tensor(1.0, dtype=torch.float64),
            "key": torch.tensor(0), "training": Training(steps=1), "by_rows": True,
        }  # fmt: skip
        ask = Ask(train_shared, shared, {"update": WeightedMean("weight")})
        part = victim.asked(question(ask, [0])).answers[0].parts[0]["update"]
        return part["sum"][0] / part["weight"][0]

    own = np.column_stack([victim.table[::WARDS, :2], np.ones(10)])
    start = moved(torch.zeros(3, dtype=torch.float64))
    gram = torch.stack([start - moved(unit) for unit in torch.eye(3, dtype=torch.float64)])
    scale = (own.T @ own)[2, 2] / float(gram[2, 2])  # the loss may count squares in halves
    np.testing.assert_allclose(scale * gram.numpy(), own.T @ own, atol=1e-8)


# -- the file ---------------------------------------------------------------------------------------------------------
def keys(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, one in kind.model_fields.items():
        inner = one.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, f"{before}{name}.")
        else:
            yield before + name


def test_the_example_and_the_page_have_every_key() -> None:
    file = ROOT / "examples" / "policy.toml"
    read_policy(file)
    said = tomllib.loads(file.read_text(encoding="utf-8"))
    there = {
        f"{s}.{k}" if isinstance(v, dict) else s for s, v in said.items() for k in (v if isinstance(v, dict) else [s])
    }
    assert there == set(keys(Policy))
    page = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    assert [key for key in keys(Policy) if f"`{key}`" not in page] == []


@pytest.mark.parametrize("method", ["fedavg", "mixed"])
def test_the_example_lets_its_methods_fit_and_leaves_small_clients_out(method: str, tmp_path: Path) -> None:
    said = read_policy(ROOT / "examples" / "policy.toml")
    assert said.run.methods == ("fedavg", "mixed")
    grid = MemoryGrid(dealt(federation((25, 30, 24, 26, 40, 25)).rows, tmp_path, nodes=1))
    policy = said.model_copy(update={"run": Run(functions=said.run.functions)})  # the grid has no run to approve
    grid.nodes = {address: replace(node, policy=policy) for address, node in grid.nodes.items()}
    strategy = CoterieStrategy(method)
    strategy.start(grid, nodes=1, num_rounds=3 if method == "fedavg" else None, timeout=5.0)
    assert strategy.fitted_ is not None
    assert len(strategy.fitted_.models.names) == 5
    assert not [line for line in entries(tmp_path / "node-0")[0] if line.refused]


def test_a_policy_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ConfigError, match="has more than 1,048,576 bytes"):
        read_policy(tmp_path / "policy.toml")
