# SPDX-License-Identifier: Apache-2.0
"""Rounds with noise: the algorithm's own where bounds are far and noise is none, and bounded where they are near."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.algorithms import fedavg, fedrep, ifca
from coterie.algorithms.private_k_means import groups_of_sizes, private_start
from coterie.algorithms.private_moments import private_spread
from coterie.algorithms.private_rounds import Rounds, State, privately
from coterie.algorithms.private_scaling import private_scaling
from coterie.algorithms.starts import Start
from coterie.data.ragged import Ragged
from coterie.engines.drive import Round
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import Dense
from coterie.privacy.noise import Noises
from coterie.protocol import Noise
from coterie.studies.data.planted import planted_structure

pytestmark = pytest.mark.usefixtures("counted_noise")
LINE, NET = Dense((4, 1), "squared"), Dense((4, 3, 1), "squared")
ROUNDS = 4
PROGRAMS: dict[str, Any] = {
    "fedavg": partial(
        fedavg.fedavg,
        model=LINE,
        rounds=ROUNDS,
        step_size=0.05,
        seed=0,
        weighting="clients",
        training=Training(steps=3),
    ),
    "ifca": partial(
        ifca.ifca, model=LINE, n_clusters=2, rounds=ROUNDS, step_size=0.05, seed=0, start=Start("random"), patience=0
    ),
    "fedrep": partial(fedrep.fedrep, model=NET, rounds=ROUNDS, step_size=0.05, seed=0),
}


class Silent(Noises):
    def added(self, total: Tensor, deviation: float, about: bytes) -> Tensor:
        return total


def rows(n_clients: int = 40) -> Ragged:
    return planted_structure("clusters", 2, n_clients=n_clients, rows=12, n_features=4, noise=0.3, seed=2)


def ran(program: Any, *, silent: bool = True, own: Ragged | None = None, block_bytes: int = 1 << 24, **how: Any) -> Any:
    engine = InProcess(own or rows(), block_bytes=block_bytes)
    if silent:
        engine.worker.noises = Silent()
    return engine.run([program], **how)


@pytest.mark.parametrize("name", PROGRAMS)
def test_with_far_bounds_and_no_noise_rounds_are_the_algorithms_own(name: str) -> None:
    plain = ran(PROGRAMS[name]).states[0]
    hidden = partial(privately, program=PROGRAMS[name], rounds=Rounds(1.0, 1e9, False, 40))
    found = ran(hidden).states[0]
    assert isinstance(found, State)
    torch.testing.assert_close(found.inner.theta, plain.theta, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_round_moves_a_model_beyond_the_clip(name: str) -> None:
    clip, seen = 1e-3, list[Tensor]()
    program = partial(privately, program=PROGRAMS[name], rounds=Rounds(1.0, clip, False, 40))

    def watched(state: Any) -> Any:
        inner, replies = program(state), None
        while True:
            try:
                wanted = inner.send(replies)
            except StopIteration as end:
                return end.value
            if hasattr(wanted, "state"):
                seen.append(wanted.state.inner.theta.clone())
            replies = yield wanted

    ran(watched)
    moved = torch.stack([(b - a).norm(dim=-1).max() for a, b in pairwise(seen)])
    assert len(moved) == ROUNDS
    assert float(moved.max()) <= clip * 4 * (1 + 1e-6)  # of a cluster that counts as a quarter of an average one
    assert float(moved.max()) > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_rounds_do_not_depend_on_blocks(name: str) -> None:
    program = partial(privately, program=PROGRAMS[name], rounds=Rounds(1.0, 0.05, True, 40))
    whole, cut = (ran(program, block_bytes=size).states[0] for size in (1 << 24, 1 << 12))
    torch.testing.assert_close(whole.inner.theta, cut.inner.theta, rtol=1e-5, atol=1e-6)
    assert whole.clip == pytest.approx(cut.clip)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_resumed_run_is_the_same_with_the_same_secret(name: str, tmp_path: Path) -> None:
    program: Any = partial(privately, program=PROGRAMS[name], rounds=Rounds(3.0, 0.5, True, 40))

    def engine() -> InProcess:
        made = InProcess(rows())
        made.worker.noises = Noises(b"s" * 32)
        return made

    def stop(done: Round) -> None:
        if done.round == 2:
            raise StoppedError

    state = {"fedavg": fedavg.State, "ifca": ifca.State, "fedrep": fedrep.State}[name]
    whole = engine().run([program]).states[0]
    with pytest.raises(StoppedError):
        engine().run([program], checkpoint=tmp_path / "kept", state_type=State[state], watch=stop)
    found = engine().run([program], checkpoint=tmp_path / "kept", state_type=State[state]).states[0]
    assert torch.equal(found.inner.theta, whole.inner.theta)
    assert found.clip == whole.clip


def test_the_clip_follows_the_median_and_stays_within_twice_the_first() -> None:
    near = partial(privately, program=PROGRAMS["fedavg"], rounds=Rounds(1.0, 1e6, True, 40))
    assert ran(near).states[0].clip < 0.4 * 1e6  # all updates are shorter
    far = partial(privately, program=PROGRAMS["fedavg"], rounds=Rounds(1.0, 1e-6, True, 40))
    assert ran(far).states[0].clip == 2e-6


# -- questions beside rounds ------------------------------------------------------------------------------------------
def test_scales_without_noise_are_those_of_the_columns() -> None:
    own = rows(400)
    assert isinstance(own.x, Tensor)
    factor = torch.tensor([1e-5, 1.0, 7.0, 1e6], dtype=torch.float64)
    assert isinstance(own.y, Tensor)
    scaled = Ragged.from_blocks((own.x * factor + factor).view(400, 12, 4), own.y.view(400, 12))
    program = partial(private_scaling, shape=(4,), real_target=True, multiplier=1.0, n_clients=400)
    found = ran(program, own=scaled).states[0]
    torch.testing.assert_close(found.mean / factor, torch.ones(4, dtype=torch.float64), rtol=0.1, atol=0)
    torch.testing.assert_close(found.scale / factor, torch.ones(4, dtype=torch.float64), rtol=0.1, atol=0)


def test_planted_centres_are_found_without_noise() -> None:
    own = planted_structure("clusters", 3, n_clients=300, rows=40, n_features=4, noise=0.1, seed=4)
    how: dict[str, Any] = {"model": LINE, "multiplier": 1e-3, "n_clients": 300, "seed": 0}
    start = ran(partial(private_start, n_clusters=3, step_size=0.1, **how), own=own).states[0]
    groups = ran(partial(groups_of_sizes, sizes=(2, 3), **how), own=own).states[0]
    assert start.theta.shape == (3, 5)
    assert groups.theta.shape == (5, 5)
    for found in (start.theta, groups.theta[2:]):
        apart = torch.cdist(found, start.theta)
        assert float(apart.min(1).values.max()) < 0.1  # both find the same three
        assert float((torch.cdist(found, found) + 9 * torch.eye(3)).min()) > 0.3


def test_how_clients_vary_is_found_without_noise() -> None:
    own = planted_structure("shrunk", n_clients=3000, rows=60, n_features=4, noise=0.5, seed=1)
    found = ran(partial(private_spread, model=LINE, multiplier=1e-6, n_clients=3000), own=own).states[0]
    assert found.noise == pytest.approx(0.25, rel=0.03)
    assert float(found.variance.mean()) == pytest.approx(0.5 / 5, rel=0.25)  # long models are shortened


def test_every_question_has_bounds_for_all_that_it_reads() -> None:
    noise = Noise(1.0, {"update": 1.0}, {"update": 0.25})
    assert noise.deviation("update") == 2.0
