# SPDX-License-Identifier: Apache-2.0
"""What clients are sent of anchors' models: perturbed copies of all, to those who take part; and fresh clients and rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.anchors import Anchors, Grouping, group_anchors, nearest_anchor
from coterie.algorithms.copies import There, fresh, perturbed
from coterie.algorithms.moment_descent import Descent, State, mixed_regression, moment_descent
from coterie.algorithms.moments import descend
from coterie.engines.checkpoint import load_tensors
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.local.parts import part_of
from coterie.models import linear_regression
from coterie.participation import Sampled
from coterie.protocol import Ask, Block
from helpers import (
    Federation,
    KilledError,
    assert_same_state,
    interrupt_after,
    one_block,
    overhear,
    run_one,
    spying,
)  # fmt: skip

WIDTH, K = 5, 3
MODEL = linear_regression(WIDTH, intercept=False)
TRUTHS = 3 * torch.eye(K, WIDTH, dtype=torch.float64)


def planted(n_clients: int = 60, rows: tuple[int, ...] = (22, 22, 18)) -> Federation:
    """Clients of three models in turn; those of the last have fewer rows."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(rows[i % K], WIDTH, generator=draw, dtype=torch.float64) for i in range(n_clients)]
    ys = [x @ TRUTHS[i % K] + 0.1 * torch.randn(len(x), generator=draw, dtype=torch.float64) for i, x in enumerate(xs)]
    return Federation(xs, ys, [f"site-{i:03d}" for i in range(n_clients)])


def descended(
    patch: pytest.MonkeyPatch, *, share: float = 1.0, number: int = 4, rounds: int = 2, **options: Any
) -> tuple[list[tuple[Ask, Any]], list[State]]:
    """Run both phases from few anchors, none of them of the third model: all asks, and all states."""
    how = Descent(iterations=3, anchors=Anchors(number=number, min_rows=22), **options)
    more = {"secret": "s"}  # else every run has noise of its own
    seen, states = overhear(patch), list[State]()

    def program(state: State | None) -> Any:
        return mixed_regression(
            state,
            model=MODEL,
            n_clusters=K,
            rounds=rounds,
            step_size=0.1,
            seed=1,
            descent=how,
            training=Training(1),
            **more,
        )

    run_one(spying(program, states), planted().rows, participation=Sampled(share), seed=3)
    return seen, states


def leaks(seen: list[tuple[Ask, Any]], states: list[State]) -> set[str]:
    """Steps whose question holds an anchor's model as it is, but for an anchor's own."""
    owner: dict[tuple[float, ...], int] = {}
    for state in states:
        for anchor, model in zip(state.anchors.tolist(), state.local.tolist(), strict=True):
            if any(model):  # not where all of them begin
                owner[tuple(model)] = anchor
    found = set()
    for ask, answer in seen:
        for value in ask.shared.values():
            models = value if isinstance(value, Tensor) and value.shape[-1:] == (WIDTH,) else TRUTHS[:0]
            if any(tuple(row) in owner for row in models.reshape(-1, WIDTH).tolist()):
                found.add(ask.step.__name__)
        for value in ask.each.values():
            for client, sent in zip(answer.ids.tolist(), value, strict=True):
                if sent.shape[-1] == WIDTH and any(
                    owner.get(tuple(row), client) != client for row in sent.reshape(-1, WIDTH).tolist()
                ):
                    found.add(ask.step.__name__)
    return found


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_with_noise_no_ask_carries_another_anchors_model(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    seen, states = descended(monkeypatch, noise=0.01, share=share)
    asked = {ask.step.__name__ for ask, _ in seen}
    assert asked == {
        "introduce", "answer_to", "multiply_moments", "descend", "nearest_anchor", "serve", "assign_and_train",
    }  # fmt: skip
    assert len(states[-1].anchors) > 4  # further anchors were drawn
    assert leaks(seen, states) == set()


def test_without_noise_that_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, states = descended(monkeypatch)
    # Exchanges and exchanges of representatives carry all models; a group of one anchor has its model for a centre.
    assert leaks(seen, states) >= {"multiply_moments", "nearest_anchor", "serve"}


def test_with_one_group_of_one_anchor_its_model_is_not_sent_either(monkeypatch: pytest.MonkeyPatch) -> None:
    how = Descent(iterations=2, anchors=Anchors(number=1, further=False), noise=0.01)
    seen, states = overhear(monkeypatch), list[State]()

    def program(state: State | None) -> Any:
        return mixed_regression(state, model=MODEL, n_clusters=1, rounds=1, step_size=0.1, seed=1, descent=how)

    run_one(spying(program, states), planted().rows)
    assert "assign_and_train" in {ask.step.__name__ for ask, _ in seen}
    assert leaks(seen, states) == set()


def test_with_noise_those_are_asked_whom_the_policy_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, _ = descended(monkeypatch, noise=0.01, share=0.5)
    there = None
    for ask, answer in seen:
        if ask.step.__name__ == "answer_to":
            there = answer.ids.tolist()
            assert len(there) == 30
        if "copies" in ask.each:
            assert ask.to is not None
            assert ask.to.tolist() == there


def test_only_the_centre_of_a_single_anchor_is_perturbed() -> None:
    local = torch.cat([TRUTHS[[0, 0, 1]], TRUTHS[[1, 2]]])
    local = local + torch.arange(5, dtype=torch.float64)[:, None] * 1e-3
    theta, _ = run_one(lambda _: group_anchors(MODEL, local, K, Grouping(noise=0.05, secret="s")), planted().rows)[0]
    order = theta.argmax(1).argsort()
    pairs = torch.stack([local[:2].mean(0), local[2:4].mean(0)])
    torch.testing.assert_close(theta[order][:2], pairs)
    off = theta[order][2] - local[4]
    assert off.abs().min() > 0
    assert off.norm() < 5 * 0.05 * WIDTH**0.5


def test_exchanges_of_representatives_go_by_every_clients_own_copies() -> None:
    block = one_block(planted(4).rows)
    draw = torch.Generator().manual_seed(1)
    copies = torch.randn(1, 4, 1, 5, WIDTH, generator=draw, dtype=torch.float64)
    reply, _ = nearest_anchor({"model": MODEL}, {"copies": copies}, {}, block)
    for c in range(4):
        x, y = block.x[c, : block.n[c]], block.target[c, : block.n[c]]
        total = [float(((y - x @ theta) ** 2).sum()) for theta in copies[0, c, 0]]
        assert reply["loss"][0, c].tolist() == pytest.approx(total)


def test_a_bad_representative_gives_way_under_noise_too() -> None:
    stray = torch.full((1, WIDTH), -9.0, dtype=torch.float64)
    arrived = TRUTHS.repeat(4, 1)
    arrived += 0.1 * torch.randn(arrived.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    local = torch.cat([arrived, stray])
    theta, events = run_one(lambda _: group_anchors(MODEL, local, K, Grouping(noise=0.3, secret="s")), planted().rows)[
        0
    ]
    assert events[0].endswith("replaced by anchors that serve clients better")
    means = torch.stack([arrived[k::K].mean(0) for k in range(K)])
    assert torch.cdist(means, theta).min(1).values.max() < 1e-9


# -- fresh clients and rows -------------------------------------------------------------------------------------------
def test_parts_of_clients_are_disjoint_until_all_were_taken_and_anchors_are_in_none() -> None:
    there = There(torch.arange(100), keys.key("lot", torch.arange(100)))
    anchors = torch.tensor([3, 50])
    parts = [fresh(there, anchors, seed=0, t=t, parts=4) for t in range(8)]
    sets = [set(part.ids.tolist()) for part in parts if part is not None]
    for cycle in (sets[:4], sets[4:]):
        assert sorted(i for part in cycle for i in part) == [i for i in range(100) if i not in (3, 50)]
    assert sets[0] != sets[4]
    some = There(there.ids[::2], there.lots[::2])  # whoever is there: a client stays in its part
    part = fresh(some, anchors, seed=0, t=1, parts=4)
    assert part is not None
    assert set(part.ids.tolist()) == {i for i in sets[1] if i % 2 == 0}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_every_iteration_asks_fresh_clients(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    seen, states = descended(monkeypatch, resample=3, noise=noise, number=6)
    anchors = set(states[0].anchors.tolist())
    asked: list[set[int]] = []
    for ask, answer in seen:
        if ask.step.__name__ == "multiply_moments" and set(answer.ids.tolist()) not in asked:
            asked.append(set(answer.ids.tolist()))
    assert len(asked) >= 3
    first = asked[:3]
    assert not first[0] & first[1] | first[0] & first[2] | first[1] & first[2]
    assert first[0] | first[1] | first[2] == set(range(60)) - anchors


def test_an_anchor_steps_by_a_fresh_part_of_its_rows() -> None:
    block = one_block(planted(2, (12, 12, 12)).rows)
    draw = torch.Generator().manual_seed(2)
    theta = torch.randn(2, 2, WIDTH, generator=draw, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(2, 2, WIDTH, 2, generator=draw, dtype=torch.float64)).Q
    keys_, parts = torch.stack([keys.key(0, "resample"), keys.key(1, "resample")]), torch.tensor([0, 2])
    one = torch.ones(2, dtype=torch.float64)
    shared = {"model": MODEL, "estimator": "pairs", "curvature": True, "step_size": one, "least": 0 * one}
    own = {"theta": theta, "basis": basis}
    got, _ = descend({**shared, "resample": 3, "part": parts, "shuffle": keys_}, own, {}, block)
    for s in range(2):  # two runs at once, each with its own part: four of twelve rows
        rows: Block = part_of(block, keys_[s], int(parts[s]), 3)
        assert rows.n.tolist() == [4, 4]
        want, _ = descend({**shared, "resample": 0}, own, {}, rows)
        torch.testing.assert_close(got["theta"][s], want["theta"][s])


def test_anchors_arrive_with_fresh_clients_and_rows() -> None:
    how = Descent(iterations=4, anchors=Anchors(number=9, min_rows=40), resample=4)
    data = planted(240, (40, 40, 40))
    state, *_ = run_one(
        lambda state: mixed_regression(
            state, model=MODEL, n_clusters=K, rounds=20, step_size=0.3, seed=0, descent=how, training=Training(1)
        ),
        data.rows,
    )
    # A cluster has 3,200 rows: its model is known to about 0.1 sqrt(5 / 3200) = 0.004.
    assert torch.cdist(TRUTHS, state.theta).min(1).values.max() < 0.02


def test_copies_of_the_same_secret_are_the_same_and_of_every_client_its_own() -> None:
    points, lots = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([5, 6])
    one, again = (perturbed(points, lots, 1.0, "s", 0) for _ in range(2))
    assert torch.equal(one, again)
    assert torch.equal(perturbed(points, lots.flip(0), 1.0, "s", 0), one.flip(0))
    assert len(one.unique()) == one.numel() == 24


# -- the secret -------------------------------------------------------------------------------------------------------
def noisy(seed: int = 1, **options: Any) -> Any:
    """Phase 1 with a little noise."""
    how = Descent(iterations=3, anchors=Anchors(number=4, min_rows=22, further=False), noise=0.05)

    def program(state: State | None) -> Any:
        return moment_descent(state, model=MODEL, n_clusters=K, seed=seed, descent=how, **options)

    return program


def copies_of_a_run(patch: pytest.MonkeyPatch, program: Any) -> tuple[list[Tensor], list[State]]:
    """What clients are sent in every exchange [C, 2, A, P], and the states between."""
    with patch.context() as context:
        seen, states = overhear(context), list[State]()
        run_one(spying(program, states), planted().rows)
    return [a.each["copies"] for a, _ in seen if a.step.__name__ == "multiply_moments"], states


def test_what_follows_from_the_seed_does_not_take_the_noise_away(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, states = copies_of_a_run(monkeypatch, noisy(seed=1))
    lots = keys.key("lot", planted().rows.keys)
    sent, true = copies[-1], states[2].local  # of the last iteration, which begins there
    assert sent.shape == (60, 2, *true.shape)
    off = (sent - true).std()
    assert off == pytest.approx(0.05, rel=0.2)
    size = 2 * true.numel()
    u = keys.uniform(keys.key(keys.key(1, 2, "copies"), lots), 2 * size).view(60, 2, size)  # as it was drawn once
    from_seed = ((-2 * (1 - u[:, 0]).log()).sqrt() * (2 * torch.pi * u[:, 1]).cos()).view(sent.shape)
    guesses = [
        from_seed,
        *(perturbed(torch.zeros_like(true), lots, 1.0, word, 2, "copies") for word in ("1", "0", "s")),
    ]
    for guess in guesses:  # what is left is as large as before, and larger
        assert (sent - 0.05 * guess - true).std() > 1.2 * off


def test_runs_of_one_seed_have_noise_of_their_own_unless_they_share_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (copies_of_a_run(monkeypatch, noisy())[0][0] for _ in range(2))
    assert not torch.isclose(one, other).any()
    same = [copies_of_a_run(monkeypatch, noisy(secret="given")) for _ in range(2)]
    assert torch.equal(same[0][0][-1], same[1][0][-1])
    assert torch.equal(same[0][1][-1].theta, same[1][1][-1].theta)


def test_a_run_that_is_continued_goes_on_with_its_secret(tmp_path: Path) -> None:
    rows, kept = planted().rows, tmp_path / "state.safetensors"
    with pytest.raises(KilledError):
        InProcess(rows).run([noisy()], checkpoint=kept, state_type=State, watch=interrupt_after(3))
    _, document = load_tensors(kept)
    secret = document["states"][0]["secret"]
    assert len(bytes.fromhex(secret)) == 32
    (resumed,) = InProcess(rows).run([noisy()], checkpoint=kept, state_type=State).states
    (whole,) = InProcess(rows).run([noisy(secret=secret)]).states
    assert_same_state(resumed, whole)
    assert resumed.secret == ""  # once anchors have arrived it is not needed any more
    assert secret not in kept.read_bytes().decode("latin-1")


def test_no_message_holds_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = overhear(monkeypatch)
    run_one(noisy(secret="do not tell"), planted().rows)
    assert len(seen) > 4
    assert not any("do not tell" in repr((ask.shared, ask.each, ask.fresh)) for ask, _ in seen)
    with pytest.raises(ValueError, match="a secret is needed"):
        perturbed(torch.zeros(1, 2), torch.tensor([1]), 0.1, "", 0)
