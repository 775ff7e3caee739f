# SPDX-License-Identifier: Apache-2.0
"""The engine on Flower: who is late, lost or wrong is missing and named, and the run goes on as it would without them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import Error, Message

from coterie.algorithms.fedrep import fedrep
from coterie.algorithms.ifca import State, ifca
from coterie.algorithms.starts import Start
from coterie.engines.drive import Program
from coterie.engines.engine_for import engine_for
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.client import _loaded, _workers
from coterie.engines.flower.connect import connect
from coterie.engines.flower.messages import Answers, Batch, Refusal, Reply
from coterie.engines.flower.registry import register_step
from coterie.engines.flower.server import OnFlower
from coterie.engines.flower.wire import from_records, to_records
from coterie.engines.in_process import InProcess
from coterie.errors import RunError
from coterie.evaluate import place_ask
from coterie.local import Training
from coterie.models import Dense, linear_regression
from coterie.participation import Deadline, FirstReplies, Sampled, VirtualClock
from coterie.protocol import Algorithm, Ask, Replies, Save, Stack, Sum, answers
from flower_grid import MemoryGrid, connected, dealt, kept
from helpers import KilledError, Only, assert_same_state, federation, interrupt_after

LINE = linear_regression(3)
COUNTS = (5, 6, 7, 8, 7, 6, 9, 7)
ROWS = federation(COUNTS).rows  # eight clients; node-i of four has the clients i and i + 4


def program(rounds: int = 3) -> Program:
    start = Start("warm", theta=LINE.initial(2, torch.Generator().manual_seed(3)))
    return lambda state: ifca(state, model=LINE, n_clusters=2, rounds=rounds, step_size=0.05, seed=0, start=start)


def personal(rounds: int = 3) -> Program:
    net = Dense((3, 4, 1), "squared")
    how: dict[str, Any] = {"personal": ("1",), "head": Training(steps=2), "body": Training(steps=2)}
    return lambda state: fedrep(state, model=net, rounds=rounds, step_size=0.05, seed=0, **how)


def without(*clients: int, rounds: int = 3) -> State:
    """What comes of a run in this process in which these clients are not asked."""
    there = tuple(i for i in range(8) if i not in clients)
    state: State = InProcess(ROWS, participation=Only(there)).run([program(rounds)]).states[0]
    return state


def far(folder: Path, **engine: Any) -> tuple[OnFlower, MemoryGrid]:
    clients, grid = connected(ROWS, folder, **{k: engine.pop(k) for k in ("timeout", "run") if k in engine})
    made = engine_for(clients.train, **engine)
    assert isinstance(made, OnFlower)
    return made, grid


def address(grid: MemoryGrid, name: str) -> int:
    return next(i for i, holding in grid.nodes.items() if holding.name == name)


def replying(change: Callable[[Reply], Any]) -> Callable[[Message, Message], Message]:
    """A node whose replies are changed on their way."""

    def spoil(message: Message, reply: Message) -> Message:
        said = from_records(reply.content)
        return Message(to_records(change(said) if isinstance(said, Reply) else said), reply_to=message)

    return spoil


def answering(change: Callable[[Answers], Any]) -> Callable[[Message, Message], Message]:
    """A node whose answers are changed on their way."""
    return replying(lambda said: replace(said, answers=tuple(change(one) for one in said.answers)))


def with_update(change: Callable[[Tensor], Tensor]) -> Callable[[Answers], Answers]:
    return with_part("update", "sum", change)


def with_part(field: str, key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Answers], Answers]:
    def changed(said: Answers) -> Answers:
        parts = {run: dict(fields) for run, fields in said.parts.items()}
        for fields in parts.values():
            fields[field] = {**fields[field], key: change(fields[field][key])}
        return replace(said, parts=parts)

    return changed


def with_weights(change: Callable[[Tensor], Tensor]) -> Callable[[Answers], Answers]:
    return with_part("loss", "weight", change)


def with_counts(change: Callable[[Tensor], Tensor]) -> Callable[[Answers], Answers]:
    return with_part("count", "sum", change)


def more_fields(said: Answers) -> Answers:
    return replace(
        said, parts={run: {**fields, "rows": {"stack": torch.zeros(1, 2)}} for run, fields in said.parts.items()}
    )


# -- answers that cannot be used --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (answering(with_update(lambda v: v * torch.nan)), "'update' is not finite, and others' is"),
        (answering(with_update(lambda v: v[..., :-1])), r"is torch.float64 \[1, 2, 3\] and not torch.float64 \[1, 2, 4\]"),
        (answering(with_update(lambda v: v.repeat(1, 10, 1))), r"'update' is torch.float64 \[1, 20, 4\]"),
        (answering(with_update(lambda v: v.float())), "'update' is torch.float32"),
        (answering(more_fields), r"answers \['count', 'loss', 'moved', 'rows', 'update'\] where"),
        (answering(with_weights(lambda v: v + 1e12)), "the weight of 'loss' is 1e.12, and must be 0 to 1[0-9]"),
        (answering(with_weights(lambda v: -v)), "a weight of 'loss' is -[0-9]+, and must be 0 to inf"),
        (answering(with_weights(lambda v: v * torch.nan)), "a weight of 'loss' is nan"),
        (answering(with_counts(lambda v: v * 1000)), "'count' is [12]000, and must be 0 to 1[0-9]"),
        (answering(with_counts(lambda v: v - 9)), "'count' is -[0-9], and must be 0 to"),
        (answering(lambda said: replace(said, lost=10**9)), "it does not say to what, or for whom"),
        (answering(lambda said: replace(said, ids=None)), "it does not say to what, or for whom"),
        (answering(lambda said: replace(said, left_out=5)), "its answer is malformed"),
        (answering(lambda said: replace(said, left_out={0: {"a": "b"}})), "a client is left out without a reason"),
        (answering(lambda said: replace(said, left_out={0: {77: "b"}})), "it leaves out other clients"),
        (answering(lambda said: replace(said, lengths={0: {"update": 5}})), "lengths are no tensors"),
        (answering(lambda said: replace(said, parts={**said.parts, "a": {}})), "its answer is malformed"),
        (answering(lambda said: replace(said, number=77)), "answers another request"),
        (answering(lambda said: replace(said, parts={0: 5})), "its answer is malformed"),
        (answering(lambda said: replace(said, parts=7)), "its answer is malformed"),
        (answering(lambda said: replace(said, ids=said.ids[:1])), "for other clients"),
        (replying(lambda said: replace(said, node="node-2")), "answers another request"),
        (replying(lambda said: replace(said, answers=said.answers * 2)), "answers another request"),
        (replying(lambda said: replace(said, answers=())), "answers another request"),
        (replying(lambda said: replace(said, answers=(5,))), "its answer is malformed"),
        (replying(lambda said: Refusal(said.node, "the disk is full")), "the disk is full"),
        (lambda message, _: Message(Error(2, "ValueError: x"), reply_to=message), r"Flower says: ValueError: x \(code 2\)"),
    ],
)  # fmt: skip
def test_a_node_whose_answers_cannot_be_used_is_named_and_left_out(tmp_path: Path, spoil: Any, said: str) -> None:
    engine, grid = far(tmp_path)
    grid.spoil[address(grid, "node-1")] = spoil
    with pytest.warns(NodeWarning, match=f"node 'node-1' is refused: .*{said}"):
        done = engine.run([program()])
    assert_same_state(done.states[0], without(1, 5), atol=1e-10)
    assert all("node-1" in event for r in done.rounds[1:] for event in r.info["events"])
    assert all(r.participants == 6 for r in done.rounds[1:])


def test_an_unknown_step_is_refused_by_the_node(tmp_path: Path) -> None:
    _, grid = far(tmp_path)
    question = from_records(_some_question(tmp_path / "other", grid).content)
    records = to_records(question)
    text = str(records["coterie-document"]["json"]).replace("ifca.assign_and_train", "os.system")
    records["coterie-document"]["json"] = text
    (name,) = grid.push_messages([Message(records, address(grid, "node-0"), "train.coterie")])
    (reply,) = grid.pull_messages([name])
    refusal = from_records(reply.content)
    assert isinstance(refusal, Refusal)
    assert "no client function 'coterie.algorithms.os.system'" in refusal.why


def _some_question(folder: Path, _: MemoryGrid) -> Message:
    engine, grid = far(folder)
    engine.run([program(1)])
    return next(m for m in grid.sent if isinstance(from_records(m.content), Batch))


def test_where_all_diverge_nobody_is_refused(tmp_path: Path) -> None:
    engine, grid = far(tmp_path)
    for node in grid.nodes:
        grid.spoil[node] = answering(with_update(lambda v: v * torch.nan))
    state = engine.run([program(1)]).states[0]
    assert bool(state.theta.isnan().any())  # as in process: the model has diverged, and not a node


# -- late and lost ----------------------------------------------------------------------------------------------------
def test_a_late_answer_is_drained_and_ignored(tmp_path: Path) -> None:
    engine, grid = far(tmp_path, timeout=0.02)
    slow = address(grid, "node-2")
    answered = [0]

    def first_late(message: Message, reply: Message) -> Message:
        if isinstance(from_records(message.content), Batch):
            answered[0] += 1
            grid.delay[slow] = 0
        return reply

    grid.spoil[slow], grid.delay[slow] = first_late, 10**6
    with pytest.warns(NodeWarning, match="node 'node-2' has not answered in time"):
        engine.run([program(1)])
    grid._waiting = {name: (0, message) for name, (_, message) in grid._waiting.items()}  # now it has answered
    grid.delay[slow] = 0
    state = engine.run([program(2)]).states[0]
    assert answered[0] > 1
    assert_same_state(state, without(rounds=2), atol=1e-10)  # the late one had no effect, not even on labels


def test_a_node_is_asked_one_thing_at_a_time(tmp_path: Path) -> None:
    engine, grid = far(tmp_path, timeout=0.02)
    slow = address(grid, "node-2")
    grid.delay[slow] = 10**6
    with pytest.warns(NodeWarning) as told:
        state = engine.run([program()]).states[0]
    said = [str(warning.message) for warning in told]
    assert said == [
        "node 'node-2' has not answered in time",
        *["node 'node-2' is still busy with an earlier question"] * 2,
    ]
    assert sum(m.metadata.dst_node_id == slow and m.metadata.message_type == "train.coterie" for m in grid.sent) == 1
    assert_same_state(state, without(2, 6), atol=1e-10)


def test_a_lost_node_is_missing_and_comes_back_under_another_id_with_its_state(tmp_path: Path) -> None:
    engine, grid = far(tmp_path)
    was = address(grid, "node-3")
    holding = grid.nodes[was]

    def watch(done: Any) -> None:
        if done.round == 1:
            grid.drop(was)
        if done.round == 2:
            _loaded.clear()  # another process
            _workers.clear()
            grid.join(999, holding)

    with pytest.warns(NodeWarning, match="node 'node-3' is away"):
        done = engine.run([personal(4)], watch=watch)
    assert [r.participants for r in done.rounds[1:]] == [8, 6, 8, 8]
    assert kept(engine, tmp_path, "visits").tolist() == [4, 4, 4, 3, 4, 4, 4, 3]


def test_a_node_that_lost_its_files_begins_anew_and_it_is_said(tmp_path: Path) -> None:
    engine, _ = far(tmp_path)
    engine.run([personal(2)])
    for path in (tmp_path / "node-0").rglob("*.safetensors"):
        path.unlink()
    register_step(tell_visits)
    with pytest.warns(NodeWarning, match="node 'node-0' has lost its private state"):
        got = engine.ask(Ask(tell_visits, {}, {"visits": Stack()}, fresh={"visits": torch.tensor(0)}))
    assert got["visits"].tolist() == [0, 2, 2, 2, 0, 2, 2, 2]


def test_a_question_outside_rounds_takes_who_cannot_be_reached_for_clients_without_rows(tmp_path: Path) -> None:
    engine, grid = far(tmp_path, timeout=0.02)
    grid.drop(address(grid, "node-3"))
    theta = torch.zeros(2, 4, dtype=torch.float64)
    theta[1] = 1.0
    with pytest.warns(NodeWarning, match="node-3"):
        got = engine.ask(place_ask(LINE, theta))
    here = InProcess(ROWS).ask(place_ask(LINE, theta))
    there = torch.tensor([0, 1, 2, 4, 5, 6])
    torch.testing.assert_close(got["losses"][there], here["losses"][there], rtol=1e-12, atol=1e-12)
    assert got["rows"].tolist() == [5, 6, 7, 0, 7, 6, 9, 0]
    for node in list(grid.nodes):
        grid.drop(node)
    with pytest.raises(RunError, match="no node answers"), pytest.warns(NodeWarning):
        engine.ask(place_ask(LINE, theta))


# -- who takes part ---------------------------------------------------------------------------------------------------
def test_the_first_answers_are_enough_and_clients_count(tmp_path: Path) -> None:
    engine, grid = far(tmp_path, participation=FirstReplies(3))
    for name, pulls in (("node-0", 5), ("node-1", 0), ("node-2", 7), ("node-3", 2)):
        grid.delay[address(grid, name)] = pulls
    heard: list[Replies] = []

    def once(_: Any) -> Algorithm:
        theta = torch.zeros(1, 4, dtype=torch.float64)
        got = yield replace(place_ask(LINE, theta), fold={"rows": Stack()})
        heard.append(got)
        yield Save(State(*(torch.zeros(1),) * 4))

    engine.run([once])  # who is not waited for has done nothing wrong
    assert heard[0].ids.tolist() == [1, 3, 5, 7]  # node-1, then node-3: four clients are three
    assert heard[0].missing.tolist() == [0, 2, 4, 6]
    assert heard[0].elapsed > 0  # by the wall
    assert heard[0]["rows"].tolist() == [6, 8, 6, 7]


def test_who_is_busy_is_waited_for_where_the_others_are_too_few(tmp_path: Path) -> None:
    engine, grid = far(tmp_path, participation=FirstReplies(4))
    grid.delay = {address(grid, "node-0"): 50, address(grid, "node-1"): 5}
    assert engine.run([program(1)]).rounds[-1].participants == 4  # node-0 and node-1 are still busy
    engine.participation = FirstReplies(6)
    assert engine.run([program(1)]).rounds[-1].participants == 6  # node-1 ends its old work, and is asked anew


def test_a_deadline_is_kept(tmp_path: Path) -> None:
    engine, grid = far(tmp_path, timeout=600.0, participation=Deadline(0.02))
    grid.delay[address(grid, "node-0")] = 10**6
    with pytest.warns(NodeWarning, match="node 'node-0'"):
        state = engine.run([program()]).states[0]
    assert_same_state(state, without(0, 4), atol=1e-10)


@pytest.mark.parametrize("how", [{"participation": Sampled(0.4), "seed": 3}, {"clock": VirtualClock(), "seed": 5}])
def test_who_is_drawn_is_drawn_as_in_process(tmp_path: Path, how: Any) -> None:
    engine, _ = far(tmp_path, **how)
    far_away, here = engine.run([personal()]), InProcess(ROWS, **how).run([personal()])
    assert_same_state(far_away.states[0], here.states[0], atol=1e-10)
    assert [r.participants for r in far_away.rounds] == [r.participants for r in here.rounds]
    if "clock" in how:
        assert [r.time for r in far_away.rounds] == [r.time for r in here.rounds]


def test_answers_are_merged_in_one_order_whoever_comes_first(tmp_path: Path) -> None:
    states = []
    for delays in ((0, 1, 2, 3), (3, 2, 1, 0)):
        engine, grid = far(tmp_path / str(delays[0]))
        grid.delay = dict(zip(sorted(grid.nodes), delays, strict=True))
        states.append(engine.run([program()]).states[0])
    assert_same_state(states[0], states[1])  # to the last bit


def test_runs_in_lockstep_share_a_message(tmp_path: Path) -> None:
    engine, grid = far(tmp_path)
    done = engine.run([program(2), program(3)])
    assert_same_state(done.states[0], without(rounds=2), atol=1e-10)
    assert_same_state(done.states[1], without(rounds=3), atol=1e-10)
    questions = [m for m in grid.sent if m.metadata.message_type == "train.coterie"]
    assert len(questions) == 3 * 4


def test_bytes_are_those_of_the_messages(tmp_path: Path) -> None:
    engine, _ = far(tmp_path)
    first = engine.run([program(1)]).rounds[-1]
    # down to each of 4 nodes: theta 2 x 4, step size, temperature (float64), key and fresh label (int64)
    assert first.bytes_down == 4 * 8 * (8 + 1 + 1 + 1 + 1)
    # up from each: update 2 x 4 and weights 2, loss and its weight, moved, two counts; all of 8 bytes
    assert first.bytes_up == 4 * 8 * (8 + 2 + 2 + 1 + 2)


# -- checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("every", [0.0, 1e6])
def test_a_run_whose_server_was_killed_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, stop: int, every: float
) -> None:
    """Also when the checkpoint is older than what nodes have done since."""
    path = tmp_path / "state"
    whole, _ = far(tmp_path / "whole")
    expected = whole.run([personal(4)])
    heads = {name: kept(whole, tmp_path / "whole", name) for name in ("personal", "visits")}
    grid = MemoryGrid(dealt(ROWS, tmp_path / "killed", nodes=4))
    how: dict[str, Any] = {"run": "r", "nodes": 4, "test_size": 0.0, "timeout": 30.0, "poll": 0.001}
    engine = engine_for(connect(grid, **how).train, store="fit")
    state_type = type(expected.states[0])
    if every:  # a checkpoint of the first round, and then none for a long time
        with pytest.raises(KilledError):
            engine.run([personal(4)], checkpoint=path, state_type=state_type, watch=interrupt_after(2))
    with pytest.raises(KilledError):
        engine.run([personal(4)], checkpoint=path, every=every, state_type=state_type, watch=interrupt_after(stop + 1))
    again = engine_for(connect(MemoryGrid(grid.nodes), **how).train, store="fit")
    done = again.run([personal(4)], checkpoint=path, state_type=state_type)
    assert_same_state(done.states[0], expected.states[0])
    assert isinstance(again, OnFlower)
    for name, value in heads.items():
        assert torch.equal(kept(again, tmp_path / "killed", name), value)
    assert not any(name.startswith("private/0/personal") and v.dim() > 1 for name, v in _tensors(path).items())


def _tensors(path: Path) -> dict[str, Tensor]:
    from coterie.engines.checkpoint import load_tensors

    return load_tensors(path)[0]


def test_a_new_run_starts_fresh(tmp_path: Path) -> None:
    first, grid = far(tmp_path)
    first.run([personal(2)])
    again = engine_for(connect(grid, run="another", nodes=4, test_size=0.0, timeout=30.0, poll=0.001).train)
    again.run([personal(1)])
    assert isinstance(again, OnFlower)
    assert kept(again, tmp_path, "visits").tolist() == [1] * 8


# -- what leaves a node -----------------------------------------------------------------------------------------------
def test_one_client_on_a_node_is_a_batch_of_one(tmp_path: Path) -> None:
    clients, _ = connected(ROWS, tmp_path, nodes=8)
    assert_same_state(engine_for(clients.train).run([program()]).states[0], without(), atol=1e-10)


def test_users_steps_are_run_once_registered(tmp_path: Path) -> None:
    engine, _ = far(tmp_path)
    register_step(count_rows)
    assert int(engine.ask(Ask(count_rows, {}, {"n": Sum()}))["n"]) == sum(COUNTS)


@answers(n=Sum())
def count_rows(shared: Any, each: Any, private: Any, data: Any, /) -> Any:
    return {"n": data.n[None]}, {}


@answers(visits=Stack())
def tell_visits(shared: Any, each: Any, private: Any, data: Any, /) -> Any:
    return dict(private), {}
