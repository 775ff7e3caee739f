# SPDX-License-Identifier: Apache-2.0
"""Secure sums under the folds: every algorithm that asks for sums finds the same, and the server sees no client's part."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.em import em
from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.ifca import ifca
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.engines.in_process import InProcess
from coterie.engines.screening import ClientWarning
from coterie.engines.secure import SecureWorker
from coterie.engines.worker import Worker
from coterie.errors import ConfigError, RunError
from coterie.models.mixtures import Gaussian, Regression
from coterie.protocol import Ask, Block, ByCluster, Mean, Stack, Sum, Tensors, WeightedMean
from coterie.secure.in_memory import NodesInMemory
from helpers import CASES, LINE, STEPS, Case, federation, run_one, warm

# What asks for clients' own values, and so cannot be summed: anchors, robust centres, medians, starts from clients' models.
INDIVIDUAL = {
    "ifca-spread", "ifca-reseeding", "ifca-median", "ifca-soft-trimmed", "fedavg-trimmed", "moment-descent-pairs",
    "moment-descent-halves", "moment-descent-two", "moment-descent-orthogonal", "moment-descent-noise",
    "moment-descent-unknown", "mixed-regression", "mixed-regression-exact", "one-shot", "one-shot-network", "fedgrem",
    "fedgrem-full", "fedgrem-minibatch", "fedgrem-sparse", "fedgrem-neighbours", "fedgrem-exact", "fedgrem-own-family",
    "fedgrem-regression", "local-em", "local-grem", "pooled-em", "pooled-grem", "pooled-components", "fedem", "tgmm",
    "tgmm-mutual", "fedgmm", "fedgmm-rows", "newton-ifca-growing", "srpfl-ifca-spread", "srpfl-fedgrem",
}  # fmt: skip


def secure(rows: Any, **how: Any) -> SecureWorker:
    return SecureWorker(rows, nodes=NodesInMemory(**how))


def run_secure(case: Case, rows: Any, **how: Any) -> Any:
    return InProcess(rows, worker=secure(rows, **how)).run([case.program(0)]).states[0]


def tensors(state: Any) -> dict[str, Tensor]:
    found = vars(state) if hasattr(state, "__dict__") else {}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in INDIVIDUAL], ids=lambda case: case.name)
def test_every_algorithm_of_sums_finds_the_same(case: Case) -> None:
    rows = federation(classes=case.classes, folds=case.folds).rows
    found, (plain, _, _) = run_secure(case, rows), run_one(case.program(0), rows)
    for name, value in tensors(plain).items():
        if value.is_floating_point():
            torch.testing.assert_close(tensors(found)[name], value, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(tensors(found)[name], value), name


@pytest.mark.parametrize("case", [c for c in CASES if c.name in INDIVIDUAL], ids=lambda case: case.name)
def test_algorithms_that_need_values_of_single_clients_are_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match="every client's own value"):
        run_secure(case, federation(classes=case.classes, folds=case.folds).rows)


@pytest.mark.parametrize("sharing", ["pooled", "components", "fedem"])
@pytest.mark.parametrize("family", [Gaussian(3), Regression(3)], ids=["rows", "regression"])
def test_em_from_drawn_components_finds_the_same(sharing: Any, family: Any) -> None:
    rows = federation((20,) * 8).rows
    how = {"family": family, "n_components": 2, "rounds": 8, "sharing": sharing, "start": MixtureStart(random=True)}
    programs = [lambda state, seed=seed: em(state, seed=seed, **how) for seed in range(3)]  # several in lockstep
    plain, found = InProcess(rows).run(programs), InProcess(rows, worker=secure(rows)).run(programs)
    for one, other in zip(found.states, plain.states, strict=True):
        for name in ("theta", "weights", "scale"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-6, atol=1e-6)


# -- folds ------------------------------------------------------------------------------------------------------------
def tell(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Something for every kind of sum; remembers how often it was asked."""
    n = data.n.double()[None]
    group = torch.nn.functional.one_hot(data.ids % 2, 2).double()[None]
    value = torch.stack([n, n * data.ids], -1) + each["own"][..., None]
    return {"value": value, "n": n, "group": group, "who": data.ids[None]}, {"asked": private["asked"] + 1}


FOLDS = {"sum": Sum(), "mean": Mean(), "weighted": WeightedMean("n"), "grouped": ByCluster("group")}


def everything(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """The same value under each of the folds."""
    reply, kept = tell(shared, each, private, data)
    return {**dict.fromkeys(FOLDS, reply["value"]), **reply}, kept


def ask(**fold: Any) -> Ask:
    own = torch.arange(10, dtype=torch.float64)
    return Ask(everything, {}, fold or FOLDS, each={"own": own}, to=torch.arange(10), fresh={"asked": torch.tensor(0)})


def test_every_fold_that_is_a_sum_is_added_securely() -> None:
    rows = federation().rows
    plain, found = InProcess(rows).ask(ask()), InProcess(rows, worker=secure(rows)).ask(ask())
    for name in ("sum", "mean", "weighted"):
        torch.testing.assert_close(found[name], plain[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["grouped"].sum, plain["grouped"].sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["grouped"].weight, plain["grouped"].weight, rtol=0, atol=0)
    assert torch.equal(found.ids, plain.ids)


def test_values_of_single_clients_are_refused_before_anybody_is_asked() -> None:
    rows = federation().rows
    engine = InProcess(rows, worker=secure(rows))
    with pytest.raises(ConfigError, match="'who' of 'everything' is every client's own value"):
        engine.ask(ask(who=Stack()))
    assert engine.private == {}


def test_a_single_client_is_refused() -> None:
    rows = federation((5,)).rows
    with pytest.raises(RunError, match="a sum takes 2"):
        InProcess(rows, worker=secure(rows)).run(
            [lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)]
        )


# -- nodes that drop out ----------------------------------------------------------------------------------------------
def test_clients_of_a_node_that_drops_out_are_missing_and_keep_what_they_had() -> None:
    rows, gone, everyone = federation().rows, {"node-3"}, torch.arange(10)
    worker = secure(rows, away=lambda name, step: step == "masked" and name in gone)
    found = worker.answer({0: ask()}, everyone)[0]
    lost = everyone[everyone * 8 // 10 == 3]
    there = everyone[everyone * 8 // 10 != 3]
    assert torch.equal(found.ids, there)
    plain = Worker(rows).answer({0: replace(ask(), each={"own": there.double()})}, there)[0]
    for name in FOLDS:
        for key, value in plain.parts[name].items():
            torch.testing.assert_close(found.parts[name][key], value, rtol=1e-12, atol=1e-12)
    assert worker.private[0]["asked"].tolist() == [int(i not in lost) for i in range(10)]
    gone.clear()
    assert torch.equal(worker.answer({0: ask()}, everyone)[0].ids, everyone)  # it is back
    assert worker.private[0]["asked"].tolist() == [2 - (i in lost) for i in range(10)]
    assert worker.nodes.cost.said()["dropped"] == {"node-3": 1}


def test_too_many_drop_out_and_the_run_stops() -> None:
    rows = federation().rows
    worker = secure(rows, away=lambda name, step: step == "masked" and name in ("node-1", "node-2", "node-3"))
    with pytest.raises(RunError, match="a secure sum takes 6"):
        InProcess(rows, worker=worker).run([lambda state: fedavg(state, model=LINE, rounds=1, step_size=0.1, seed=0)])


def test_ifca_goes_on_without_nodes_that_drop_out() -> None:
    rows, draw = federation().rows, np.random.default_rng(0)

    def away(name: str, step: str) -> bool:
        return step in ("masked", "unmasked") and name == gone[0]

    gone = ["node-0"]
    program = CASES[0].program(0)
    engine = InProcess(rows, worker=secure(rows, away=away))
    done = engine.run([program], watch=lambda _: gone.__setitem__(0, f"node-{draw.integers(8)}"))
    assert bool(done.states[0].theta.isfinite().all())


# -- what the server sees ---------------------------------------------------------------------------------------------
def test_the_server_sees_no_part_of_a_node_and_not_which_group_a_client_is_in() -> None:
    rows, seen = federation().rows, []
    worker = secure(rows, seen=lambda what, name, value: seen.append((what, name, value)))
    parts: list[dict[str, np.ndarray]] = []
    total = worker.nodes.total

    def recorded(question: bytes, own: Any) -> Any:
        parts.append({name: array for arrays in own.values() for name, array in arrays.items()} | dict(own))
        return total(question, own)

    worker.nodes.total = recorded  # type: ignore[method-assign]
    done = InProcess(rows, worker=worker).run(
        [
            lambda state: ifca(
                state, model=LINE, n_clusters=2, rounds=3, step_size=0.05, seed=0, start=warm(LINE), training=STEPS
            )
        ]
    )
    from coterie.secure.fixed_point import encode

    masked = [value for what, _, value in seen if what == "masked"]
    assert len(masked) == 8 * 3
    own = [encode(arrays, 8)[1] for message in parts for name, arrays in message.items() if name.startswith("node-")]
    known = np.concatenate(own)
    for words in masked:  # neither a whole part nor a single word of it, but for what chance brings: 2^-64
        assert not np.isin(words, known[known != 0]).any()
    labels = worker.private[0]["label"]
    assert set(labels.tolist()) == {0, 1}
    # The server is sent sizes and sums of groups; that nodes' masked parts say nothing of labels is that they are uniform.
    for label in (0, 1):
        mine = [words for what, name, words in seen if what == "masked" and labels[_first(name)] == label]
        bits = np.unpackbits(np.concatenate(mine).view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
    sizes = [r.info["sizes"] for r in done.rounds if "sizes" in r.info]
    assert all(sum(size) == 9 for size in sizes)  # of ten clients one has no rows


def _first(name: str) -> int:
    """The first client of a node."""
    return next(i for i in range(10) if f"node-{i * 8 // 10}" == name)


def test_who_is_left_out_is_told_to_the_node_and_not_to_the_server() -> None:
    fed = federation((8,) * 12)
    fed.ys[4][:] = torch.nan
    rows = fed.rows
    worker = secure(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ClientWarning)  # would name the client
        done = InProcess(rows, worker=worker).run(
            [lambda state: fedavg(state, model=LINE, rounds=2, step_size=0.1, seed=0)]
        )
    assert worker.told.keys() == {4}
    assert "not finite" in worker.told[4]
    assert done.left_out == {}
    assert any("1 client did not count" in text for r in done.rounds for text in r.info.get("events", ()))
    with pytest.warns(ClientWarning, match="site-004"):
        plain, _, _ = run_one(lambda state: fedavg(state, model=LINE, rounds=2, step_size=0.1, seed=0), rows)
    torch.testing.assert_close(done.states[0].theta, plain.theta, rtol=1e-6, atol=1e-6)


def test_absurd_answers_are_left_out_as_without_secure_sums() -> None:
    fed = federation((20,) * 12)
    fed.ys[7][:] *= 1e6
    rows = fed.rows
    program = CASES[16].program(0)
    assert CASES[16].name == "ifca-clip"
    worker = secure(rows)
    found = InProcess(rows, worker=worker).run([program]).states[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClientWarning)
        plain, _, _ = run_one(program, rows)
    assert 7 in worker.told
    torch.testing.assert_close(found.theta, plain.theta, rtol=1e-6, atol=1e-6)


def test_a_node_none_of_whose_clients_count_adds_zeros() -> None:
    fed = federation((8,) * 8)
    fed.ys[2][:] = torch.inf
    rows = fed.rows
    worker = secure(rows)  # a client on each node
    found = InProcess(rows, worker=worker).run(
        [lambda state: fedavg(state, model=LINE, rounds=2, step_size=0.1, seed=0)]
    )
    with pytest.warns(ClientWarning):
        plain, _, _ = run_one(lambda state: fedavg(state, model=LINE, rounds=2, step_size=0.1, seed=0), rows)
    torch.testing.assert_close(found.states[0].theta, plain.theta, rtol=1e-6, atol=1e-6)


def test_a_model_that_diverges_does_so_as_without_secure_sums() -> None:
    rows = federation((8,) * 8).rows
    program = lambda state: fedavg(state, model=LINE, rounds=40, step_size=1e9, seed=0)  # noqa: E731
    found = InProcess(rows, worker=secure(rows)).run([program]).states[0]
    plain, _, _ = run_one(program, rows)
    assert not bool(plain.theta.isfinite().all())
    assert not bool(found.theta.isfinite().all())


def test_what_it_costs_is_counted() -> None:
    rows = federation().rows
    worker = secure(rows, sums=4)
    InProcess(rows, worker=worker).run([lambda state: fedavg(state, model=LINE, rounds=6, step_size=0.1, seed=0)])
    cost = worker.nodes.cost.said()
    assert (cost["nodes"], cost["threshold"], cost["sums"], cost["exchanges"]) == (8, 6, 6, 2)
    assert cost["messages"] == 6 + 2 * 2
    assert cost["bytes_up"] > 0
    assert cost["bytes_down"] > 0


def test_a_plain_worker_is_not_changed() -> None:
    assert type(InProcess(federation().rows).worker) is Worker
