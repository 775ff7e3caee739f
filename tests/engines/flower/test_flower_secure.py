# SPDX-License-Identifier: Apache-2.0
"""Secure sums on Flower's messages: the same models, masked parts only, nodes that drop out, and what nodes refuse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from coterie.algorithms.fedavg import fedavg
from coterie.config import options
from coterie.engines.flower import NodeWarning
from coterie.engines.flower.approvals import Asking, WaitsError, check_approved, decide
from coterie.engines.flower.client import answered
from coterie.engines.flower.identity import Identity
from coterie.engines.flower.ledger import read_ledger
from coterie.engines.flower.messages import Batch, PublicKeys, Refusal, Reply, Secure
from coterie.engines.flower.policy_file import Budget, Policy, Run, SecureSums, Sums
from coterie.engines.flower.question_log import entries
from coterie.engines.flower.wire import from_records, to_records
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError, RunError
from coterie.methods.fit import fit
from coterie.protocol import Stack
from coterie.secure.cost import Cost
from flower_grid import MemoryGrid, connected, kept
from helpers import CASES, LINE, federation

SUMS = [case for case in CASES if case.name in (
    "ifca-model", "ifca-clip", "fedavg", "fedavg-minibatch", "fedrep", "lg-fedavg", "maml", "mixed-model", "random-effects",
    "local-closed-form", "pooled-ridge",
)]  # fmt: skip


def on_flower(rows: Any, folder: Path, **how: Any) -> tuple[Any, MemoryGrid]:
    clients, grid = connected(rows, folder, **how)
    engine = clients.train.federation.engine(clients.train)
    engine.add_securely(Cost())
    return engine, grid


def program(state: Any) -> Any:
    return fedavg(state, model=LINE, rounds=3, step_size=0.1, seed=0)


@pytest.mark.parametrize("case", SUMS, ids=lambda case: case.name)
def test_the_same_is_found_on_four_nodes(case: Any, tmp_path: Path) -> None:
    rows = federation(classes=case.classes, folds=case.folds).rows
    clients, _ = connected(rows, tmp_path, classes=case.classes)
    remote = clients.train.with_folds(case.folds, seed=0) if case.folds else clients.train
    here = InProcess(rows.with_folds(case.folds, seed=0) if case.folds else rows).run([case.program(0)]).states[0]
    engine = clients.train.federation.engine(remote)
    engine.add_securely(Cost())
    found = engine.run([case.program(0)]).states[0]
    for name, value in vars(here).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(getattr(found, name), value, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_server_is_sent_masked_parts_and_no_others(tmp_path: Path) -> None:
    rows = federation().rows
    engine, grid = on_flower(rows, tmp_path)
    engine.run([program])
    replies = [said for one in grid.replied if isinstance(said := from_records(one.content), Reply)]
    asked = [said for one in grid.sent if isinstance(said := from_records(one.content), Batch)]
    assert {batch.secure.step for batch in asked if batch.secure} == {"keys", "letters", "mask", "unmask"}
    assert all(batch.secure for batch in asked)
    for reply in replies:
        for answers in reply.answers:
            assert not any(answers.parts.values())
            assert not answers.left_out
            assert not answers.lengths
    masked = [reply.sealed.words.numpy() for reply in replies if reply.sealed and reply.sealed.words is not None]
    assert len(masked) == 4 * 3
    assert len({words.tobytes() for words in masked}) == len(masked)
    small = np.concatenate([np.abs(words) < (1 << 40) for words in masked])  # words of a part are small, or of its sign
    assert small.mean() < 0.01
    cost = engine.secure.cost
    assert (cost.nodes, cost.threshold, cost.sums, cost.exchanges) == (4, 3, 3, 1)
    assert len(asked) == 4 * (2 + 2 * 3)


def test_a_node_that_does_not_answer_is_missing_and_keeps_what_it_had(tmp_path: Path) -> None:
    rows = federation((9,) * 8).rows
    case = next(one for one in CASES if one.name == "ifca-model")
    engine, grid = on_flower(rows, tmp_path, timeout=0.5)

    def lost(sent: Message, reply: Message) -> Message | None:
        said = from_records(sent.content)
        return None if isinstance(said, Batch) and said.secure and said.secure.step == "mask" else reply

    grid.spoil[100] = lost  # node-0
    with pytest.warns(NodeWarning, match="node 'node-0' has not answered in time"):
        done = engine.run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])
    there = torch.tensor([i for i in range(8) if i % 4])
    from coterie.participation import Participants

    class Three:
        def choose(self, *_: Any, **__: Any) -> Participants:
            return Participants(there, there)

    plain = InProcess(rows, participation=Three()).run(
        [lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)]
    )
    torch.testing.assert_close(done.states[0].theta, plain.states[0].theta, rtol=1e-9, atol=1e-9)
    assert engine.secure.cost.dropped == {"node-0": 1}
    assert case


def test_too_few_nodes_stop_the_run(tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path, timeout=0.3)
    for node in (100, 101):
        grid.spoil[node] = lambda sent, reply: None
    with pytest.raises(RunError, match="takes"):
        engine.run([program])


@pytest.mark.parametrize("step", ["keys", "letters", "mask", "unmask"])
def test_where_nobody_takes_a_step_there_is_no_sum_and_one_hears_why(step: str, tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path, timeout=0.3)

    def refused(sent: Message, reply: Message) -> Message:
        said = from_records(sent.content)
        taken = isinstance(said, Batch) and said.secure and said.secure.step == step
        return Message(to_records(Refusal("node", "not today")), reply_to=sent) if taken else reply

    grid.spoil = dict.fromkeys(grid.nodes, refused)
    with pytest.raises(RunError, match=r"takes.*; node 'node-0' is refused: not today; node 'node-1' is refused"):
        engine.run([program])


def test_private_state_is_kept_as_without_secure_sums(tmp_path: Path) -> None:
    rows = federation((9,) * 8).rows
    case = next(one for one in CASES if one.name == "ifca-model")
    engine, _ = on_flower(rows, tmp_path)
    engine.run([case.program(0)])
    here = InProcess(rows)
    here.run([case.program(0)])
    assert torch.equal(kept(engine, tmp_path, "label"), here.private[0]["label"])


def test_values_of_single_clients_are_refused(tmp_path: Path) -> None:
    from coterie.evaluate import place_ask

    engine, grid = on_flower(federation().rows, tmp_path)
    ask = place_ask(LINE, torch.zeros(2, 4, dtype=torch.float64))
    before = len(grid.sent)
    with pytest.raises(ConfigError, match="every client's own value"):
        engine.ask(ask)
    assert len(grid.sent) == before
    assert any(isinstance(how, Stack) for how in ask.fold.values())


def test_a_node_may_let_nothing_but_secure_sums_leave(tmp_path: Path) -> None:
    rows = federation().rows
    clients, grid = connected(rows, tmp_path)
    for address, holding in list(grid.nodes.items()):
        grid.nodes[address] = replace(holding, policy=Policy(secure=SecureSums(only=True)))
    engine = clients.train.federation.engine(clients.train)
    with pytest.warns(NodeWarning, match="'.*' of 'train_shared' would leave unmasked, .* sends masked sums only"):
        done = engine.run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])
    assert "nobody answered" in str(done.rounds[-1].info)
    engine.add_securely(Cost())
    assert bool(engine.run([program]).states[0].theta.isfinite().all())


# -- the owner's decisions --------------------------------------------------------------------------------------------
def decided(grid: MemoryGrid, policy: Policy) -> None:
    """Give all nodes a policy."""
    grid.nodes = {address: replace(holding, policy=policy) for address, holding in grid.nodes.items()}


def test_every_message_of_a_secure_run_is_in_the_log(tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path)
    decided(grid, Policy(secure=SecureSums(only=True)))
    engine.run([program])
    for holding in grid.nodes.values():
        lines, broken = entries(holding.folder)
        sums = ["train_shared", "secure-unmask"] * 3
        assert [line.function for line in lines] == ["introduction", "secure-keys", "secure-letters", *sums]
        assert (broken, {line.run for line in lines}, {line.refused for line in lines}) == (0, {"test"}, {""})
        asked = [line for line in lines if line.function == "train_shared"]
        assert all(line.fields and set(line.fields.values()) == {"masked"} for line in asked)
        assert [line.clients for line in asked] == [len(load.names) for load in [holding.load(None).train]] * 3
        replies = [said for one in grid.replied if isinstance(said := from_records(one.content), Reply)]
        parts = [one.sealed.words.nbytes for one in replies
                 if one.node == holding.name and one.sealed and one.sealed.words is not None]  # fmt: skip
        assert [line.bytes for line in asked] == parts
        assert all(line.bytes > 0 for line in lines)
        spent = read_ledger(holding.folder)
        assert (spent.questions, spent.runs["test"].questions) == (3, 3)


STEPS = {"keys": "secure-keys", "letters": "secure-letters", "mask": "train_shared", "unmask": "secure-unmask"}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("why", ["refused by its owner", "waits", "of another method"])
def test_every_step_is_refused_to_a_run_that_may_not_ask(step: str, why: str, tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path, timeout=0.3)
    holding = grid.nodes[100]
    if why == "refused by its owner":
        with pytest.raises(WaitsError):
            check_approved(holding.folder, Asking("test"))
        decide(holding.folder, "test", "refused")
    run = Run(methods=("ifca",)) if why == "of another method" else Run(approval=True)
    push = grid.push_messages

    def decided_now(messages: Any) -> Any:  # the owner changes the policy when this step is about to be asked
        messages = list(messages)
        said = from_records(messages[0].content)
        if isinstance(said, Batch) and said.secure and said.secure.step == step:
            grid.nodes[100] = replace(holding, policy=Policy(run=run))
        return push(messages)

    grid.push_messages = decided_now  # type: ignore[method-assign]
    sentence = {
        "refused by its owner": "has refused run test", "waits": "waits for the approval",
        "of another method": "does not say its method, and this node allows ifca",
    }[why]  # fmt: skip
    with pytest.warns(NodeWarning, match=f"'node-0' is refused: .*{sentence}"):
        done = engine.run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])
    assert bool(done.states[0].theta.isfinite().all())  # three of four nodes are enough
    last = entries(holding.folder)[0][-1]
    assert last.function == STEPS[step]
    assert sentence in last.refused
    assert last.bytes == 0


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(run=Run(functions=("column_sums",))), "'train_shared' is not a client function that this node allows"),
        (Policy(budget=Budget(questions=0)), "answers 0 questions of all runs together, and 0 are left"),
        (Policy(budget=Budget(epsilon_required=True)), "would be answered without noise"),
        (Policy(sums=Sums(rows=1000)), "this node wants at least 1000"),
    ],
)
def test_a_masked_part_is_refused_where_the_policy_says_so(policy: Policy, why: str, tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path, timeout=0.3)
    grid.nodes[100] = replace(grid.nodes[100], policy=policy)
    with pytest.warns(NodeWarning, match=f"'node-0' is refused: .*{why}"):
        engine.run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])
    line = next(one for one in entries(grid.nodes[100].folder)[0] if one.refused)
    assert (line.function, line.bytes, set(line.fields.values())) == ("train_shared", 0, {"masked"})
    assert why in line.refused
    assert read_ledger(grid.nodes[100].folder).questions == 0


def test_a_budget_holds_over_secure_sums(tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path, timeout=0.3)
    decided(grid, Policy(budget=Budget(questions=2)))
    with pytest.raises(RunError, match=r"takes .* 2 questions of all runs together, and 0 are left"):
        engine.run([program])
    for holding in grid.nodes.values():
        lines = [one for one in entries(holding.folder)[0] if one.function == "train_shared"]
        assert [bool(one.refused) for one in lines] == [False, False, True]
        assert read_ledger(holding.folder).questions == 2


def test_a_sum_that_was_answered_is_refused_and_not_counted_again(tmp_path: Path) -> None:
    engine, grid = on_flower(federation().rows, tmp_path)
    engine.run([program])
    for message in [one for one in grid.sent if one.metadata.dst_node_id == 100]:
        said = from_records(message.content)
        if isinstance(said, Batch):
            reply = from_records(answered(message.content, grid.nodes[100]))
            assert isinstance(reply, Refusal)
    assert read_ledger(grid.nodes[100].folder).questions == 3


def test_nodes_that_know_each_other_refuse_a_stranger(tmp_path: Path) -> None:
    rows = federation().rows
    clients, grid = connected(rows, tmp_path, timeout=0.5)
    keys = {}
    for holding in grid.nodes.values():
        from coterie.secure.masks import sign

        keys[holding.name] = sign(Identity.of(holding.folder).key("signing"), b"")[0].hex()
    for address, holding in list(grid.nodes.items()):
        grid.nodes[address] = replace(holding, policy=Policy(secure=SecureSums(peers=keys)))
    engine = clients.train.federation.engine(clients.train)
    engine.add_securely(Cost())
    assert bool(engine.run([program]).states[0].theta.isfinite().all())
    swapped = {**keys, "node-1": keys["node-2"]}
    for address, holding in list(grid.nodes.items()):
        grid.nodes[address] = replace(holding, policy=Policy(secure=SecureSums(peers=swapped)))
    with pytest.raises(RunError, match=r"have answered; .* node 'node-1' has another signing key"):
        engine.run([program])  # what a policy says holds at once, also for keys that were exchanged
    engine.link.sums, engine.secure = None, None
    engine.add_securely(Cost())
    with pytest.raises(RunError, match=r"have shared their keys; .* node 'node-1' has another signing key"):
        engine.run([program])


def test_a_node_that_was_restarted_goes_on(tmp_path: Path) -> None:
    from coterie.engines.flower import client

    rows = federation().rows
    engine, _ = on_flower(rows, tmp_path)

    def forget(_: Any) -> None:
        client._workers.clear()
        client._loaded.clear()

    found = engine.run([program], watch=forget)
    plain = InProcess(rows).run([program])
    torch.testing.assert_close(found.states[0].theta, plain.states[0].theta, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", [
    {"method": "fedavg", "training": {"rounds": 3}},
    {"method": "ifca", "training": {"rounds": 3}, "clusters": {"n_clusters": 2, "init": "balanced", "patience": 0}},
    {"method": "shrunk", "prior": {"spread": "diagonal"}},
], ids=lambda how: how["method"])  # fmt: skip
def test_a_whole_fit_is_the_same(how: dict[str, Any], tmp_path: Path) -> None:
    rows = federation((14,) * 12).rows
    clients, _ = connected(rows, tmp_path, test_size=0.2)
    plain, found = (fit(clients, options({**how, "secure": secure})) for secure in (False, True))
    for name, value in plain.models.arrays().items():
        torch.testing.assert_close(found.models.arrays()[name], value, rtol=1e-6, atol=1e-6)
    assert found.scores[0].test == pytest.approx(plain.scores[0].test, rel=1e-5)
    assert found.extra["secure"]["nodes"] == 4


GOOD = Secure("keys", "test", "0" * 32, sums=4)
KEYS = PublicKeys("a", *(torch.zeros(n, dtype=torch.uint8) for n in (32, 128, 128, 32, 64)), 1)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (replace(GOOD, step="everything"), "no step of a secure sum"),
        (replace(GOOD, step="mask"), "no step of a secure sum"),
        (replace(GOOD, run="r" * 2000), "of no run"),
        (replace(GOOD, run="../../etc"), "cannot be the name"),
        (replace(GOOD, epoch="zz"), "names no exchange"),
        (replace(GOOD, epoch=7), "names no exchange"),
        (replace(GOOD, sums=1 << 40), "counts what there cannot be"),
        (replace(GOOD, sums=0), "keys are wanted for 0 sums"),
        (replace(GOOD, sums=257), "at most 256"),
        (replace(GOOD, step="unmask", places=(-1,)), "of no nodes"),
        (replace(GOOD, step="unmask", places=tuple(range(9000))), "of no nodes"),
        (replace(GOOD, step="unmask", places=(0,)), "no keys of this exchange"),
        (replace(GOOD, step="letters", neighbours=(5,)), "a neighbour has no keys"),
        (replace(GOOD, step="letters", letters=torch.zeros(3)), "letters of a secure sum are none"),
        (replace(GOOD, step="letters", neighbours=(KEYS,), n_nodes=2, threshold=2), "no keys of this exchange"),
    ],
)
def test_steps_that_cannot_be_are_refused(asked: Any, why: str, tmp_path: Path) -> None:
    _, grid = connected(federation().rows, tmp_path)
    reply = from_records(answered(to_records(Batch((), asked)), grid.nodes[100]))
    assert isinstance(reply, Refusal)
    assert why in reply.why


@pytest.mark.parametrize("change", ["short", "kind", "layout", "none", "own part"])
def test_a_node_that_answers_what_cannot_be_drops_out(change: str, tmp_path: Path) -> None:
    rows = federation((9,) * 8).rows
    engine, grid = on_flower(rows, tmp_path, timeout=0.5)

    def spoil(sent: Message, reply: Message) -> Message:
        said = from_records(reply.content)
        if not isinstance(said, Reply) or said.sealed is None or said.sealed.words is None:
            return reply
        sealed = {
            "short": replace(said.sealed, words=said.sealed.words[:-1]),
            "kind": replace(said.sealed, words=said.sealed.words.double()),
            "layout": replace(said.sealed, layout=[["a", "float64", [1]]]),
            "none": None,
            "own part": said.sealed,
        }[change]
        answers = said.answers
        if change == "own part":
            answers = tuple(replace(one, parts={0: {"loss": {"sum": torch.zeros(1)}}}) for one in answers)
        return Message(to_records(Reply(said.node, answers, sealed)), reply_to=sent)

    grid.spoil[100] = spoil
    with pytest.warns(NodeWarning, match="node 'node-0' is refused"):
        done = engine.run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])
    assert bool(done.states[0].theta.isfinite().all())
    assert engine.secure.cost.dropped == {"node-0": 1}


def test_nodes_that_are_asked_different_things_do_not_add_up(tmp_path: Path) -> None:
    rows = federation((9,) * 8).rows
    engine, grid = on_flower(rows, tmp_path, timeout=0.5)
    push = grid.push_messages

    def dishonest(messages: Any) -> Any:
        changed = []
        for message in messages:
            said = from_records(message.content)
            if isinstance(said, Batch) and said.questions and message.metadata.dst_node_id != 100:
                (one,) = said.questions  # all but node-0 are asked with another model
                asks = {
                    at: replace(ask, shared={**ask.shared, "theta": ask.shared["theta"] + 1})
                    for at, ask in one.asks.items()
                }
                content = to_records(replace(said, questions=(replace(one, asks=asks),)))
                changed.append(Message(content, message.metadata.dst_node_id, message.metadata.message_type))
            else:
                changed.append(message)
        return push(changed)

    grid.push_messages = dishonest  # type: ignore[method-assign]
    with pytest.raises(RunError, match="larger than it can be"):  # noise is not a sum of counts
        engine.run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])


def test_new_clients_on_some_of_the_nodes_are_a_sum_of_their_own(tmp_path: Path) -> None:
    rows = federation((14,) * 16).rows
    clients, _ = connected(rows, tmp_path, test_size=0.2, new_clients=0.25)
    how = {"method": "fedavg", "training": {"rounds": 2}}
    plain, found = (fit(clients, options({**how, "secure": secure})) for secure in (False, True))
    assert found.scores[0].new_clients == pytest.approx(plain.scores[0].new_clients, rel=1e-6)


def test_a_share_of_the_clients_takes_part(tmp_path: Path) -> None:
    rows = federation((14,) * 16).rows
    clients, _ = connected(rows, tmp_path, test_size=0.2)
    how = {"method": "fedavg", "training": {"rounds": 3, "participation": 0.5}, "baselines": False}
    plain, found = (fit(clients, options({**how, "secure": secure})) for secure in (False, True))
    torch.testing.assert_close(found.models.theta, plain.models.theta, rtol=1e-6, atol=1e-6)


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    rows = federation((14,) * 8).rows
    how = options({"method": "fedavg", "training": {"rounds": 6}, "secure": True, "baselines": False})
    clients, grid = connected(rows, tmp_path / "nodes", test_size=0.2)
    whole = fit(clients, how)
    (tmp_path / "run").mkdir()

    def stop(phase: str, done: Any, total: int) -> None:
        if phase == "fit" and done.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(clients, how, folder=tmp_path / "run", every=0.0, watch=stop)
    from coterie.engines.flower.connect import connect

    again = connect(grid, run="test", nodes=4, test_size=0.2, timeout=30.0, wait=30.0, poll=0.001)
    found = fit(again, how, folder=tmp_path / "run", every=0.0)
    torch.testing.assert_close(found.models.theta, whole.models.theta, rtol=1e-9, atol=1e-9)


def test_whether_a_client_has_moved_is_not_told(tmp_path: Path) -> None:
    rows = federation((9,) * 4).rows  # a client on each node
    case = next(one for one in CASES if one.name == "ifca-model")
    engine, grid = on_flower(rows, tmp_path)
    engine.run([case.program(0)])
    replies = [said for one in grid.replied if isinstance(said := from_records(one.content), Reply)]
    said = {(answers.kept, answers.lost, len(answers.ids)) for reply in replies for answers in reply.answers}
    assert said == {(True, False, 1)}
