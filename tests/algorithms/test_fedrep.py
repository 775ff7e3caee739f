# SPDX-License-Identifier: Apache-2.0
"""FedRep against hand calculation, against a plain loop over clients, and on a planted representation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from coterie import keys
from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.fedrep import State, fedrep, first_model, partly_shared
from coterie.algorithms.lg_fedavg import lg_fedavg
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.local import Training, own_outputs, personal
from coterie.models import Dense, Model, Network, Tail, last_layers, layer_names, lenet, mlp, split, tail
from helpers import BATCHES, MODULE, NET, Federation, Only, batches_of, federation, one_block, ragged, run_one

TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
SCALAR = Dense((1, 1, 1), "squared", intercept=False)  # w relu(a x)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def two_clients() -> Federation:
    """A: one row (1, 2).  B: rows (1, 2) and (2, 2)."""
    return Federation([column(1), column(1, 2)], [column(2)[:, 0], column(2, 2)[:, 0]], ["a", "b"])


def by_hand(**options: Any) -> Any:
    """One step of 0.1 for the head, then one for the representation, from a = 1 and w = 0."""
    one = Training(steps=1)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    settings = {"model": SCALAR, "rounds": 1, "step_size": 0.1, "seed": 0, "head": one, "body": one, "start": start}
    return lambda state: fedrep(state, **settings | options)


# -- a round ----------------------------------------------------------------------------------------------------------
def test_one_round_matches_hand_calculation() -> None:
    # Heads at a = 1: A 2 (0 - 2) = -4, so w = 0.4; B mean(2 (-2), 2 (-2) 2) = -6, so w = 0.6.
    # Representation: A 2 (0.4 - 2) 0.4 = -1.28, so a = 1.128; B mean(2 (0.6 - 2) 0.6, 2 (1.2 - 2) 0.6 2) = -1.8: 1.18.
    rows = two_clients().rows
    state, finished, engine = run_one(by_hand(), rows)
    assert state.theta.tolist() == pytest.approx([(1.128 + 1.18) / 2])
    assert engine.worker.private[0]["personal"].flatten().tolist() == pytest.approx([0.4, 0.6])
    assert engine.worker.private[0]["visits"].tolist() == [1, 1]
    # Of the new heads on the old representation: A 1.6^2, B mean(1.4^2, 0.8^2).
    assert finished.rounds[-1].info == {"loss": pytest.approx((2.56 + 2 * 1.3) / 3)}
    state, _, _ = run_one(by_hand(weighting="rows"), rows)
    assert state.theta.tolist() == pytest.approx([(1.128 + 2 * 1.18) / 3])


def test_only_the_representation_travels() -> None:
    _, finished, _ = run_one(by_hand(), two_clients().rows)
    sent = finished.rounds[-1]
    assert sent.bytes_up == 2 * 8 * 4  # from each client: the update, its weight, loss and rows
    model = mlp(20, 30, n_outputs=5)
    data = federation()
    wide = ragged([torch.randn(len(x), 20) for x in data.xs], [torch.zeros(len(x), dtype=torch.int64) for x in data.xs])
    _, finished, _ = run_one(lambda s: fedrep(s, model=model, rounds=1, step_size=0.1, seed=0), wide)
    assert finished.rounds[-1].bytes_up == 10 * (4 * (20 * 30 + 30) + 3 * 8)


def twin(
    model: Network, data: Federation, turns: list[set[str]], how: Training, eta: float, rounds: list[list[int]]
) -> Any:
    """The pseudo-code: one client after the other, autograd, nothing kept but parameters.  -> shared, own by client"""
    start = dict(
        zip(model.layers, first_model(model, 4).split([v.stop - v.start for v in model.layers.values()]), strict=True)
    )
    shapes = {name: p.shape for name, p in model.module.named_parameters()}
    start = {name: value.view(shapes[name]) for name, value in start.items()}
    own = {c: {n: start[n].clone() for n in turns[0]} for c in range(len(data.xs))}
    common = {n: start[n].clone() for n in start if n not in turns[0]}
    client_keys = data.rows.keys
    for t, asked in enumerate(rounds):
        moved = []
        for c in [c for c in asked if len(data.xs[c])]:
            now = {**{n: v.clone() for n, v in common.items()}, **own[c]}
            for turn, names in enumerate(turns):
                velocity = {n: torch.zeros_like(now[n]) for n in names}
                key = keys.key(keys.key(4, t, "partly shared"), turn)
                for rows in batches_of(how, len(data.xs[c]), key, client_keys[c]):
                    wanted = {n: now[n].clone().requires_grad_() for n in names}
                    out = torch.func.functional_call(model.module, {**now, **wanted}, (data.xs[c][rows],))
                    mse_loss(out[:, 0], data.ys[c][rows]).backward()
                    for n in names:
                        velocity[n] = how.momentum * velocity[n] + wanted[n].grad
                        now[n] = now[n] - eta * velocity[n]
            own[c] = {n: now[n] for n in turns[0]}
            moved.append({n: now[n] for n in common})
        common = {n: torch.stack([m[n] for m in moved]).mean(0) for n in common}
    return torch.cat([common[n].flatten() for n in model.layers if n in common]), own


class Taking:
    """Other clients in every round."""

    def __init__(self, rounds: list[list[int]]) -> None:
        self.rounds = rounds

    def choose(self, round_: int, *about: Any) -> Any:
        return Only(tuple(self.rounds[max(round_ - 1, 0)])).choose(round_, *about)


SEVERAL = [[0, 2, 3, 5], [1, 2, 4, 9], [3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    "how", [Training(steps=3), BATCHES, Training(steps=4, batch_size=2)], ids=["all", "epochs", "steps"]
)
@pytest.mark.parametrize("head", [("2",), ("0",), ("2.bias",), ("0.weight", "2.weight")], ids=str)
def test_it_agrees_with_a_plain_loop_over_clients(how: Training, head: tuple[str, ...]) -> None:
    data = federation()
    turns = [{n for n in MODULE.layers if n.startswith(head)}, {n for n in MODULE.layers if not n.startswith(head)}]
    want, own = twin(MODULE, data, turns, how, 0.05, SEVERAL)
    state, _, engine = run_one(
        lambda s: fedrep(s, model=MODULE, personal=head, rounds=3, step_size=0.05, seed=4, head=how, body=how),
        data.rows, participation=Taking(SEVERAL),
    )  # fmt: skip
    torch.testing.assert_close(state.theta, want, **TIGHT)
    for c, kept in enumerate(engine.worker.private[0]["personal"]):
        flat = torch.cat([own[c][n].flatten() for n in MODULE.layers if n in own[c]])
        torch.testing.assert_close(kept, flat, **TIGHT)


@pytest.mark.parametrize("personal", [("0",), ("1",), ("2",), ("1", "2"), ("1.bias",)], ids=str)
def test_dense_layers_and_the_same_layers_as_a_module_agree(personal: tuple[str, ...]) -> None:
    dense = Dense((3, 4, 5, 1), "squared")
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    start = dense.initial(1, torch.Generator().manual_seed(2))[0]
    got = []
    for model, place in (
        (dense, {"0": "0", "1": "1", "2": "2"}),
        (Network(module, "squared"), {"0": "0", "1": "2", "2": "4"}),
    ):
        layers = tuple(place[name[0]] + name[1:] for name in personal)
        how: dict[str, Any] = {
            "rounds": 3,
            "step_size": 0.05,
            "seed": 1,
            "head": BATCHES,
            "body": BATCHES,
            "start": start,
        }
        state, finished, engine = run_one(
            lambda s, m=model, own=layers, how=how: fedrep(s, model=m, personal=own, **how), federation().rows
        )
        got.append(
            (state.theta, engine.worker.private[0]["personal"], [r.info.get("loss", 0.0) for r in finished.rounds])
        )
    torch.testing.assert_close(got[0][0], got[1][0], **TIGHT)
    torch.testing.assert_close(got[0][1], got[1][1], **TIGHT)
    assert got[0][2] == pytest.approx(got[1][2])


# -- what stays with a client -----------------------------------------------------------------------------------------
def test_heads_persist_and_only_those_of_participants_move() -> None:
    data = federation()
    seen: list[Tensor] = []

    def watch(_: Any) -> None:
        kept = engine.worker.private.get(0)
        seen.append(kept["personal"].clone() if kept else torch.zeros(0))

    engine = InProcess(data.rows, participation=Taking(SEVERAL))
    engine.run([lambda s: fedrep(s, model=NET, rounds=3, step_size=0.05, seed=4)], watch=watch)
    begin = split(NET, ("1",)).parts(first_model(NET, 4))[1].expand(10, -1)
    for before, after, asked in zip([begin, *seen[1:]], seen[1:], SEVERAL, strict=False):
        moved = (before != after).any(1).nonzero()[:, 0].tolist()
        assert moved == [c for c in asked if len(data.xs[c])]
    assert engine.worker.private[0]["visits"].tolist() == [1, 0, 2, 2, 2, 2, 1, 1, 1, 1]  # client 1 has no rows


def test_who_has_no_rows_keeps_its_head_and_has_no_weight() -> None:
    nothing = torch.zeros(0, 1, dtype=torch.float64)
    more = two_clients().plus("c", nothing, nothing[:, 0])
    state, _, engine = run_one(by_hand(), more.rows)
    assert state.theta.tolist() == pytest.approx([1.154])
    assert engine.worker.private[0]["personal"].flatten().tolist() == pytest.approx([0.4, 0.6, 0.0])
    assert engine.worker.private[0]["visits"].tolist() == [1, 1, 0]


# -- features ---------------------------------------------------------------------------------------------------------
def test_features_are_made_once_for_all_head_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = Tail.features

    def features(self: Tail, theta: Tensor, x: Tensor) -> Tensor:
        rows.append(len(x.flatten(0, 1)))
        return original(self, theta, x)

    monkeypatch.setattr(Tail, "features", features)
    run_one(lambda s: fedrep(s, model=MODULE, rounds=2, step_size=0.05, seed=4), federation([6] * 5).rows)
    assert rows == [30, 30]


class Wrapped(nn.Module):
    """The same layers, in a module that cannot be cut."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("kernel", ["vmap", "loop"])
def test_a_module_that_cannot_be_cut_gives_the_same(kernel: Any) -> None:
    whole = Network(Wrapped(MODULE.module), "squared", kernel=kernel)
    assert tail(whole, frozenset({"inner.2.weight", "inner.2.bias"})) is None
    outcomes = []
    for model, head in ((MODULE, "2"), (whole, "inner.2")):
        state, _, engine = run_one(
            lambda s, m=model, h=head: fedrep(
                s, model=m, personal=(h,), rounds=3, step_size=0.05, seed=4, head=BATCHES
            ),
            federation().rows,
        )
        outcomes.append((state.theta, engine.worker.private[0]["personal"]))
    torch.testing.assert_close(outcomes[0], outcomes[1], **TIGHT)


def test_work_counts_passes_by_the_layers_that_they_go_through() -> None:
    def work(algorithm: Any, model: Model) -> float:
        run = algorithm(None, model=model, rounds=1, step_size=0.1, seed=0)
        next(run)
        return float(next(run).work)

    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()  # 16 and 5 parameters
    noisy = Network(module, "squared", augment=lambda x, ks: x + keys.uniform(ks, x.shape[-1]))
    for model in (mlp(3, 4, n_outputs=1), Network(module, "squared")):
        assert work(fedrep, model) == pytest.approx(10 * 5 / 21 + 5)
        assert work(lg_fedavg, model) == 5
    assert work(fedrep, noisy) == 15  # rows differ in every step: nothing is made once


def test_augmented_rows_are_not_kept_as_features() -> None:
    def noisy(x: Tensor, ks: Tensor) -> Tensor:
        return x + keys.uniform(ks, x.shape[-1])

    model = Network(MODULE.module, "squared", augment=noisy)
    cut, block = split(model, ("2",)), one_block(federation().rows)
    shared, own = cut.parts(first_model(model, 0))
    assert personal.hold(model, cut, "personal", shared[None, None], own.expand(1, 10, -1), block).last is None
    state, _, _ = run_one(lambda s: fedrep(s, model=model, rounds=2, step_size=0.05, seed=4), federation().rows)
    plain, _, _ = run_one(lambda s: fedrep(s, model=MODULE, rounds=2, step_size=0.05, seed=4), federation().rows)
    assert not torch.allclose(state.theta, plain.theta)


@pytest.mark.parametrize("layers", [("9",), ("7", "9")], ids=str)
def test_convolutions_are_cut_below_any_layer(layers: tuple[str, ...]) -> None:
    model = lenet(1, 8, 3)
    cut = split(model, layers)
    theta = model.initial(4, torch.Generator().manual_seed(0))
    x = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(1))
    shared, own = cut.parts(theta)
    last = tail(model, cut.moving("personal"))
    assert last is not None
    each = last.model.own_outputs(own, last.features(shared, x))
    torch.testing.assert_close(each, model.own_outputs(theta, x))
    common = last.model.own_outputs(own, last.features(shared[:1], x))
    torch.testing.assert_close(common, model.own_outputs(cut.join(shared[:1], own), x), rtol=1e-4, atol=1e-6)


# -- parts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("personal_layers", [("0",), ("1",), ("2",), ("0", "2"), ("1.bias",)], ids=str)
def test_parts_put_together_are_the_whole(personal_layers: tuple[str, ...]) -> None:
    model = Dense((3, 4, 5, 2), "cross_entropy")
    theta = model.initial(6, torch.Generator().manual_seed(0)).view(2, 3, -1)
    cut = split(model, personal_layers)
    shared, own = cut.parts(theta)
    assert shared.shape[-1] + own.shape[-1] == model.n_parameters
    assert torch.equal(cut.join(shared, own), theta)
    assert torch.equal(cut.join(shared[:, :1], own)[1, 2], cut.join(shared[1, 0], own[1, 2]))
    assert set(cut.personal) | set(cut.shared) == set(model.layers)


@pytest.mark.parametrize(
    "how", [Training(steps=3), BATCHES, Training(steps=3, momentum=0.5, proximal=0.3)], ids=["a", "b", "c"]
)
@pytest.mark.parametrize("model", [NET, Dense((3, 4, 1), "squared", l2=0.1), MODULE], ids=["dense", "ridge", "module"])
@pytest.mark.parametrize("part", ["personal", "shared"])
def test_the_part_that_is_fixed_does_not_move_by_a_bit(part: Any, model: Model, how: Training) -> None:
    block = one_block(federation().rows)
    for layer in layer_names(model):
        cut = split(model, (layer,))
        common, own = cut.parts(model.initial(10, torch.Generator().manual_seed(0))[None])
        eta, key = torch.tensor([0.05], dtype=torch.float64), keys.key(0)[None]
        got = personal.train_part(model, cut, part, common, own, block, eta, how, key)
        fixed, moved = (0, 1) if part == "personal" else (1, 0)
        assert torch.equal(got[fixed], (common, own)[fixed])
        assert [bool(m) for m in (got[moved] != (common, own)[moved]).any(-1)[0]] == (block.n > 0).tolist()


def test_the_last_layers_are_personal_when_not_said() -> None:
    assert last_layers(NET, 1) == ("1",)
    assert last_layers(NET, 5) == ("1",)  # one is left to be shared
    assert layer_names(MODULE) == ("0", "2")
    a, b = (
        run_one(lambda s, h=h: fedrep(s, model=NET, personal=h, rounds=2, step_size=0.05, seed=4), federation().rows)[0]
        for h in (None, ("1",))
    )
    assert torch.equal(a.theta, b.theta)


@pytest.mark.parametrize(
    ("layers", "message"),
    [(("7",), "the model has no layer '7'"), ((), "none of the model's"), (("0", "1"), "all of the model's layers")],
)
def test_layers_that_leave_nothing_to_share_are_refused(layers: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(fedrep(None, model=NET, personal=layers, rounds=1, step_size=0.1, seed=0))


# -- planted truth ----------------------------------------------------------------------------------------------------
def planted(n_clients: int, n_rows: int) -> tuple[Federation, Federation, Tensor]:
    """y = w_i^T B^T x + noise: a plane in ten dimensions, a client's own w_i in it; 50 further rows of every client."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    plane = torch.linalg.qr(normal(10, 2)).Q
    xs = normal(n_clients, n_rows + 50, 10)
    ys = torch.einsum("cnd,dk,ck->cn", xs, plane, normal(n_clients, 2)) + 0.01 * normal(n_clients, n_rows + 50)
    names = [f"{i:03d}" for i in range(n_clients)]
    sides = (slice(n_rows), slice(n_rows, None))
    seen, unseen = (Federation([x[s] for x in xs], [y[s] for y in ys], names) for s in sides)
    return seen, unseen, plane


def test_recovers_a_planted_representation_that_no_client_could_find_alone() -> None:
    # Eight rows in ten dimensions: no client determines its own model, all together determine the plane.
    data, unseen, plane = planted(40, 8)
    module = nn.Sequential(nn.Linear(10, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    model = Network(module, "squared")
    how: dict[str, Any] = {"model": model, "rounds": 150, "step_size": 0.1, "seed": 0}
    state, _, engine = run_one(lambda s: fedrep(s, head=Training(steps=10), body=Training(steps=1), **how), data.rows)
    found = torch.linalg.qr(state.theta.view(2, 10).T).Q
    distance = torch.linalg.matrix_norm(plane - found @ (found.T @ plane), 2)  # sine of the largest principal angle
    assert distance < 0.05
    common, _, _ = run_one(lambda s: fedavg(s, training=Training(steps=5), **how), data.rows)
    theta = split(model, ("1",)).join(state.theta[None], engine.worker.private[0]["personal"])
    block = one_block(unseen.rows)
    own, one = (
        float((own_outputs(model, t, block)[0, ..., 0] - block.target).square().mean())
        for t in (theta[None], common.theta.expand(1, 40, -1))
    )
    assert own < 0.02 * one


def test_it_stops_when_the_representation_has_settled() -> None:
    state, finished, _ = run_one(by_hand(rounds=500, tol=1e-4), two_clients().rows)
    assert isinstance(state, State)
    assert state.settled
    assert state.round < 200
    assert len(finished.rounds) == state.round + 1


def test_both_parts_at_once_are_fedper() -> None:
    # One full-batch step of both from a = 1, w = 1: outputs x. A: both by 2 (1 - 2) = -2; B: by mean(-2, 0) = -1.
    one, start = Training(steps=1), torch.ones(2, dtype=torch.float64)
    state, finished, engine = run_one(
        lambda s: partly_shared(
            s, model=SCALAR, personal=("1",), rounds=1, step_size=0.1, seed=0, turns=(("both", one),), start=start
        ),
        two_clients().rows,
    )
    assert state.theta.tolist() == pytest.approx([1.15])
    assert engine.worker.private[0]["personal"].flatten().tolist() == pytest.approx([1.2, 1.1])
    assert finished.rounds[-1].info["loss"] == pytest.approx((1 + 2 * 0.5) / 3)  # of the models before
