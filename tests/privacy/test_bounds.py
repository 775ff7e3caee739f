# SPDX-License-Identifier: Apache-2.0
"""Bounds on what one client can add, and noise: both hold whatever the client says."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.engines.secure import SecureWorker
from coterie.engines.worker import Worker
from coterie.errors import RunError
from coterie.privacy.bounds import bounded, check_noise
from coterie.privacy.noise import Noises
from coterie.protocol import WITHIN, Ask, Block, ByCluster, Mean, Noise, Stack, Sum, Tensors, answers

FIELDS = {"update": 1.0, "share": 1.0}
HALVES = {"update": 0.5, "share": 0.5}


@answers(update=(Sum(), ByCluster("share")), share=Sum(), mean=Mean())
def say(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Tell the first row, and in which half it is."""
    first = data.x[:, 0]
    share = torch.nn.functional.one_hot((first[:, 0] > 0).to(torch.int64), 2).to(torch.float64)
    return {"update": first[None], "share": share[None], "mean": first[None]}, {}


class Silent(Noises):
    """Without noise, to see the bounds."""

    def added(self, total: Tensor, deviation: float, about: bytes) -> Tensor:
        return total


class Seeded(Noises):
    """From a seed, so that a test is the same every time."""

    def __init__(self, seed: int) -> None:
        super().__init__(None)
        self.draw = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...], about: bytes) -> Tensor:
        return torch.from_numpy(np.asarray(self.draw.standard_normal(shape)))


def rows_of(values: Tensor) -> Ragged:
    return Ragged.from_blocks(values[:, None], torch.zeros(len(values), 1, dtype=torch.float64))


def ask_for(noise: Noise | None, *, by_cluster: bool = True, told: bool = False) -> Ask:
    fold: dict[str, Any] = {"update": ByCluster("share") if by_cluster else Sum()}
    if told:
        fold[WITHIN] = Sum()
    return Ask(say, {}, fold, noise=noise)


def answer(values: Tensor, ask: Ask, noises: Noises) -> dict[str, Tensors]:
    worker = Worker(rows_of(values))
    worker.noises = noises
    return worker.screened({0: ask}, torch.arange(len(values)))[0].parts


@pytest.mark.parametrize("huge", [1e3, 1e30, 1e200, math.inf, math.nan])
def test_a_client_with_huge_values_moves_a_sum_by_its_bound_at_most(huge: float) -> None:
    others = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.cat([others, torch.full((1, 3), huge, dtype=torch.float64)])
    ask = ask_for(Noise(1.0, {**FIELDS, "update": 0.7}, HALVES))
    with_, without = (answer(v, ask, Silent())["update"] for v in (values, others))
    assert bool(with_["sum"].isfinite().all())
    assert float((with_["sum"] - without["sum"]).norm()) <= 0.7 + 1e-12
    assert float((with_["weight"] - without["weight"]).norm()) <= 1 + 1e-12


@given(st.floats(1e-3, 1e3), st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3))
def test_what_is_short_enough_is_left_as_it_is(bound: float, value: list[float]) -> None:
    client = torch.tensor([value], dtype=torch.float64)[None]
    ask = Ask(say, {}, {"update": Sum()}, noise=Noise(1.0, {"update": bound}, {"update": 1.0}))
    found = bounded(ask, {"update": client})["update"]
    assert float(found.norm()) <= bound
    if float(client.norm()) <= bound:
        assert torch.equal(found, client)


def test_shares_are_shortened_too() -> None:
    reply = {"update": torch.ones(1, 1, 2), "share": torch.tensor([[[3.0, 4.0]]])}
    found = bounded(ask_for(Noise(1.0, {**FIELDS, "update": 10.0}, HALVES)), reply)
    torch.testing.assert_close(found["share"], torch.tensor([[[0.6, 0.8]]]))
    negative = bounded(ask_for(Noise(1.0, FIELDS, HALVES)), {**reply, "share": torch.tensor([[[-1.0, 0.5]]])})
    assert float(negative["share"].min()) == 0


def test_how_many_were_shortened_is_told_with_noise() -> None:
    values = torch.tensor([[0.5, 0.0], [3.0, 0.0], [0.1, 0.0]], dtype=torch.float64)
    noise = Noise(1.0, {**FIELDS, WITHIN: 1.0}, {"update": 0.4, "share": 0.3, WITHIN: 0.3})
    assert float(answer(values, ask_for(noise, told=True), Silent())[WITHIN]["sum"]) == 1  # two less one


# -- noise ------------------------------------------------------------------------------------------------------------
def test_noise_has_the_deviation_that_is_asked_for() -> None:
    noise = Noise(3.0, {**FIELDS, "update": 2.0}, {"update": 0.8, "share": 0.2})
    values = torch.zeros(4, 500, dtype=torch.float64)
    found = answer(values, ask_for(noise), Seeded(1))["update"]
    assert float(found["sum"].std()) == pytest.approx(3 * 2 / math.sqrt(0.8), rel=0.1)  # of 1,000 numbers
    weights = torch.cat([answer(values, ask_for(noise), Seeded(seed))["update"]["weight"][0] for seed in range(300)])
    centred = weights.view(-1, 2) - torch.tensor([4.0, 0.0])
    assert float(centred.std()) == pytest.approx(3 / math.sqrt(0.2), rel=0.15)  # of 600


def test_nodes_add_their_shares_of_the_noise() -> None:
    noise, values = Noise(3.0, {"update": 2.0}, {"update": 1.0}), torch.zeros(8, 400, dtype=torch.float64)
    worker = SecureWorker(rows_of(values))
    worker.noises = Seeded(2)
    ask = ask_for(noise, by_cluster=False)
    total = InProcess(worker.rows, worker=worker).ask(ask)["update"]
    assert worker.noise_share == pytest.approx(1 / 6)  # of 8 nodes, more than two thirds must stay
    assert float(total.std()) == pytest.approx(6 * math.sqrt(8 / 6), rel=0.15)


def test_noise_follows_from_no_seed_and_repeats_with_a_secret_only() -> None:
    values, ask = torch.zeros(3, 5, dtype=torch.float64), ask_for(Noise(1.0, FIELDS, HALVES))
    fresh = [answer(values, ask, Noises())["update"]["sum"] for _ in range(2)]
    assert not torch.equal(*fresh)
    kept = [answer(values, ask, Noises(b"k" * 32))["update"]["sum"] for _ in range(2)]
    assert torch.equal(*kept)
    other = answer(values + 0.1, ask, Noises(b"k" * 32))["update"]["sum"]  # other rows: no difference tells them
    assert not torch.allclose(other - 0.3, kept[0], atol=1e-3)
    asked = replace(ask, noise=Noise(1.1, FIELDS, HALVES))
    assert not torch.equal(answer(values, asked, Noises(b"k" * 32))["update"]["sum"], kept[0])


def test_normal_numbers_are_normal() -> None:
    drawn = Noises(b"n" * 32).normal((20_000,), b"about")
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03)
    assert float(drawn.std()) == pytest.approx(1, abs=0.03)
    assert float((drawn.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.01)
    assert float((drawn**4).mean()) == pytest.approx(3, abs=0.3)


def test_sums_with_noise_are_on_a_grid_finer_than_the_noise() -> None:
    found = Noises().added(torch.tensor([1 / 3, math.pi], dtype=torch.float64), 1.0, b"")
    assert torch.equal(found, (found * 2.0**20).round() / 2.0**20)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (ask_for(None), "without noise"),
        (Ask(say, {}, {"update": Stack()}, noise=Noise(1.0, FIELDS, HALVES)), "no sum over clients"),
        (Ask(say, {}, {"update": Mean()}, noise=Noise(1.0, FIELDS, HALVES)), "no sum over clients"),
        (ask_for(Noise(1.0, {"update": 1.0}, HALVES)), "'share' of 'say' has no bound"),
        (ask_for(Noise(1.0, {**FIELDS, "update": math.inf}, HALVES)), "has no bound"),
        (ask_for(Noise(1.0, FIELDS, {"update": 0.9, "share": 0.9})), "less noise than they are said to cost"),
        (ask_for(Noise(0.0, FIELDS, HALVES)), "with no noise"),
        (ask_for(Noise(1.0, FIELDS, HALVES, sampling=0.0)), "with no noise"),
        (ask_for(Noise(1.0, FIELDS, HALVES), told=True), "'within' of 'say' has no bound"),
    ],
)
def test_what_has_no_bound_or_no_noise_is_refused(ask: Ask, why: str) -> None:
    with pytest.raises(RunError, match=why):
        check_noise(ask)
