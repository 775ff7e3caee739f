# SPDX-License-Identifier: Apache-2.0
"""SRPFL's stages: when they end, who is waited for, and that any algorithm runs inside."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.algorithms import fedavg as fed
from coterie.algorithms import fedgrem as grem
from coterie.algorithms import ifca as clustered
from coterie.algorithms.linear_representation import linear_representation
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.algorithms.srpfl import Adaptive, Fixed, Stage, State, Theory, exponential_order, srpfl
from coterie.engines.in_process import Finished, InProcess
from coterie.errors import ConfigError, RunError
from coterie.evaluate import match_models
from coterie.models import linear_regression
from coterie.models.mixtures import Gaussian
from coterie.participation import DynamicExponential, Exponential, FastestFirst, Sampled, Then, VirtualClock
from coterie.protocol import Algorithm, Ask, Block, Replies, Save, Sum, Tensors
from coterie.studies.data.representations import linear_representation as plant
from coterie.studies.data.representations import principal_distance
from coterie.studies.data.synthetic import mixed_regression
from helpers import (
    LINE,
    STEPS,
    KilledError,
    Late,
    Only,
    assert_same_state,
    federation,
    interrupt_after,
    run_one,
)

CLOCK = VirtualClock(communication=0.1)


def flanp(rounds: int = 12, *, step_size: float = 0.05) -> Callable[[Any], Algorithm]:
    return lambda state: fed.fedavg(
        state, model=LINE, rounds=rounds, step_size=step_size, seed=0, training=STEPS, weighting="clients"
    )


def enough_of(done: Finished) -> list[int]:
    return [r.info["enough"] for r in done.rounds if r.participants]


# -- stages -----------------------------------------------------------------------------------------------------------
def test_clients_double_after_each_stage_until_all_take_part() -> None:
    program = partial(srpfl, flanp(), n0=2, n_clients=10, stages=Fixed(3))
    state, done, _ = run_one(program, federation().rows, clock=CLOCK)
    assert done.rounds[0].participants == 0  # the start asks nobody, and is no round
    assert [r.participants for r in done.rounds[1:]] == [2] * 3 + [4] * 3 + [8] * 3 + [10] * 3
    assert enough_of(done) == [r.participants for r in done.rounds[1:]]
    assert [r.info["stage"] for r in done.rounds] == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 3
    assert (state.round, state.inner.round) == (12, 12)


def test_each_stage_waits_for_its_slowest_only() -> None:
    rows = federation().rows
    order = Exponential().times(0, rows.keys, 0).sort().values
    program = partial(srpfl, flanp(), n0=2, n_clients=10, stages=Fixed(3))
    _, done, _ = run_one(program, rows, clock=CLOCK)
    cost = [b.time - a.time for a, b in zip(done.rounds[:-1], done.rounds[1:], strict=True)]
    # Three local steps of the second, fourth, eighth and tenth fastest, and communication.
    assert cost == pytest.approx([3 * float(order[n - 1]) + 0.1 for n in (2, 4, 8, 10) for _ in range(3)])


def test_the_last_stage_is_the_algorithm_with_everyone() -> None:
    rows = federation().rows
    alone, _, _ = run_one(flanp(), rows)
    wrapped, done, _ = run_one(partial(srpfl, flanp(), n0=10, n_clients=10), rows, clock=CLOCK)
    assert_same_state(wrapped.inner, alone)
    assert (wrapped.stage, len(wrapped.losses)) == (0, 0)
    assert all(r.participants == 10 for r in done.rounds[1:])


def test_rounds_can_be_limited_from_outside() -> None:
    state, done, _ = run_one(partial(srpfl, flanp(), n0=2, n_clients=10, rounds=5), federation().rows)
    assert (state.round, state.inner.round, len(done.rounds)) == (5, 5, 6)


def test_one_stage_by_hand_is_the_mean_of_the_fastest() -> None:
    rows = federation(counts=(4, 4, 4, 4)).rows
    times = Exponential().times(0, rows.keys, 0)
    start, _, _ = run_one(flanp(0), rows)
    fast = times.argsort()[:2].sort().values
    sent = [engine.run([flanp(1)]) for engine in (InProcess(rows, participation=Only((int(i),))) for i in fast)]
    want = torch.stack([done.states[0].theta for done in sent]).mean(0)
    got, _, _ = run_one(partial(srpfl, flanp(1), n0=2, n_clients=4), rows, clock=VirtualClock())
    torch.testing.assert_close(got.inner.theta, want, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(got.inner.theta, start.theta)


def test_a_start_by_the_method_of_moments_hears_everybody() -> None:
    planted = plant(n_clients=30, rows=60, n_features=12, rank=2, noise=0.1, seed=0)

    def inner(state: Any) -> Algorithm:
        return linear_representation(state, n_features=12, rank=2, rounds=2, step_size=0.1, seed=0)

    _, alone, _ = run_one(inner, planted.rows, clock=CLOCK)
    _, staged, _ = run_one(partial(srpfl, inner, n0=3, n_clients=30, stages=Fixed(3)), planted.rows, clock=CLOCK)
    begun, then = staged.rounds[0], staged.rounds[1:]
    # Algorithm 2, lines 2 and 3: six exchanges with all 30 clients, each waited for; then rounds with the three fastest.
    assert begun.participants == alone.rounds[0].participants == 30
    assert begun.time == alone.rounds[0].time > 6 * 0.1
    assert [r.participants for r in then] == [3, 3]


def test_a_start_of_everybody_is_near_the_planted_subspace() -> None:
    planted = plant(n_clients=60, rows=60, n_features=20, rank=2, noise=0.1, seed=0)

    def inner(state: Any) -> Algorithm:
        return linear_representation(state, n_features=20, rank=2, rounds=0, step_size=0.1, seed=0)

    everybody = run_one(inner, planted.rows, clock=CLOCK)[0]
    staged = run_one(partial(srpfl, inner, n0=3, n_clients=60), planted.rows, clock=CLOCK)[0]
    torch.testing.assert_close(staged.inner.theta, everybody.theta, rtol=0, atol=0)
    assert float(principal_distance(staged.inner.theta, planted.basis)) < 0.6


def test_a_sample_of_all_then_its_fastest() -> None:
    rows = federation().rows
    program = partial(srpfl, flanp(6), n0=1, n_clients=4, stages=Fixed(2))
    for policy in (Sampled(number=4), Then(Sampled(number=4), FastestFirst())):
        _, done, _ = run_one(program, rows, clock=VirtualClock(DynamicExponential()), participation=policy)
        assert [r.participants for r in done.rounds[1:]] == [1, 1, 2, 2, 4, 4]


def test_runs_at_different_stages_go_side_by_side() -> None:
    rows = federation().rows
    programs: list[Any] = [flanp(), *(partial(srpfl, flanp(), n0=n, n_clients=10, stages=Fixed(2)) for n in (1, 3))]
    together = InProcess(rows, clock=CLOCK).run(programs)
    for run, program in enumerate(programs):
        state, alone, _ = run_one(program, rows, clock=CLOCK)
        mine = [r for r in together.rounds if r.run == run]
        assert [(r.participants, r.time) for r in mine] == [(r.participants, r.time) for r in alone.rounds]
        torch.testing.assert_close(_theta(together.states[run]), _theta(state), rtol=1e-12, atol=1e-12)


def _theta(state: Any) -> torch.Tensor:
    return state.theta if isinstance(state, fed.State) else state.inner.theta


# -- around any algorithm ---------------------------------------------------------------------------------------------
def test_ifca_in_stages_finds_planted_clusters_sooner() -> None:
    planted = mixed_regression(n_clients=80, rows=30, n_features=5, n_clusters=2, noise=0.1, separation=4.0, seed=0)
    model = linear_regression(5, intercept=False)

    def ifca(state: Any) -> Algorithm:
        return clustered.ifca(state, model=model, n_clusters=2, rounds=30, step_size=0.1, seed=0)

    whole, everyone, _ = run_one(ifca, planted.rows, clock=CLOCK)
    state, staged, engine = run_one(
        partial(srpfl, ifca, n0=10, n_clients=80, stages=Fixed(5)), planted.rows, clock=CLOCK
    )
    assert match_models(state.inner.theta, planted.theta)[0] < 0.02  # the oracle: 0.1 sqrt(5 / 1,200) = 0.0065
    assert match_models(whole.theta, planted.theta)[0] < 0.02
    assert staged.rounds[-1].time < 0.8 * everyone.rounds[-1].time
    assert engine.worker.private[0]["label"].min() >= 0  # in the end everybody has a cluster


def test_fedgrem_in_stages_hears_everybody_in_the_end() -> None:
    rows = federation(counts=(30,) * 12).rows

    def fedgrem(state: Any) -> Algorithm:
        return grem.fedgrem(
            state, family=Gaussian(3), n_components=2, rounds=8, seed=0, start=MixtureStart(restarts=2, iterations=5)
        )

    state, done, _ = run_one(partial(srpfl, fedgrem, n0=3, n_clients=12, stages=Fixed(2)), rows, clock=CLOCK)
    assert [r.participants for r in done.rounds] == [3] * 3 + [6] * 2 + [12] * 4  # its start asks, and is no round
    assert (state.inner.n == 30).all()
    assert state.inner.centre.isfinite().all()
    whole, everyone, _ = run_one(fedgrem, rows, clock=CLOCK)
    assert done.rounds[-1].time < everyone.rounds[-1].time
    torch.testing.assert_close(state.inner.centre.sum(0), whole.centre.sum(0), atol=1.0, rtol=0)


def test_flanp_reaches_fedavgs_loss_in_less_time() -> None:
    data = federation(counts=(40,) * 64)
    rows = replace(data, ys=[x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) for x in data.xs]).rows
    _, everyone, _ = run_one(flanp(60), rows, clock=CLOCK)
    _, staged, _ = run_one(partial(srpfl, flanp(60), n0=4, n_clients=64, stages=Fixed(8)), rows, clock=CLOCK)
    target = 1e-2
    first = [next(r.time for r in done.rounds if r.info.get("loss", 1.0) < target) for done in (staged, everyone)]
    assert first[0] < 0.5 * first[1]


# -- resume -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stages", [Fixed(2), Theory(0.7), Adaptive(most=5)], ids=lambda s: type(s).__name__)
def test_resume_is_bit_equal_in_every_stage(stages: Any, tmp_path: Path) -> None:
    rows, clock = federation().rows, VirtualClock(DynamicExponential(), 0.1)
    program = partial(srpfl, flanp(15), n0=2, n_clients=10, stages=stages)
    state, whole, _ = run_one(program, rows, clock=clock, seed=1)
    assert state.stage == 3
    for stop in range(1, len(whole.rounds)):
        path = tmp_path / str(stop)
        with pytest.raises(KilledError):
            InProcess(rows, clock=clock, seed=1).run(
                [program], checkpoint=path, state_type=State[fed.State], watch=interrupt_after(stop)
            )
        done = InProcess(rows, clock=clock, seed=1).run([program], checkpoint=path, state_type=State[fed.State])
        assert_same_state(done.states[0].inner, state.inner)
        assert_same_state(replace(done.states[0], inner=None), replace(state, inner=None))
        assert [(r.time, r.participants, r.info) for r in done.rounds] == [
            (r.time, r.participants, r.info) for r in whole.rounds
        ]


def test_a_checkpoint_of_another_inner_state_is_refused(tmp_path: Path) -> None:
    program = partial(srpfl, flanp(2), n0=2, n_clients=10)
    InProcess(federation().rows).run([program], checkpoint=tmp_path / "a")
    for kind in (State[clustered.State], State, fed.State):
        with pytest.raises(RunError, match="another kind of state"):
            InProcess(federation().rows).run([program], checkpoint=tmp_path / "a", state_type=kind)  # type: ignore[arg-type]


# -- Lemma B.1 --------------------------------------------------------------------------------------------------------
def stage(n: int, after: int, last: int, **state: Any) -> Stage:
    losses = torch.tensor(state.pop("losses", []), dtype=torch.float64)
    return Stage(n, n / 2, after, last, State(None, losses, **state))


def expected(n: float, last: int) -> float:
    """E[T_(n)] of exponential times."""
    return sum(1 / (last - i) for i in range(int(n)))


def test_expected_order_statistics_are_sums_of_reciprocals() -> None:
    assert exponential_order(3) == pytest.approx((1 / 3, 1 / 3 + 1 / 2, 1 / 3 + 1 / 2 + 1))


@pytest.mark.parametrize("a", [0.05, 0.25])
def test_theory_is_the_lemma_where_clients_double(a: float) -> None:
    for n in (2, 8, 32, 128):
        ratio = (expected(2 * n, 256) - expected(n, 256)) / (expected(n, 256) - expected(n / 2, 256))
        bound = 2 * math.log(math.sqrt(2) * ratio) / math.log(1 / (1 - a))  # eq. (195)
        assert Theory(a).rounds(stage(n, 2 * n, 256)) == math.ceil(bound)


@pytest.mark.parametrize(("n", "after"), [(8, 16), (32, 64), (64, 100)])
@pytest.mark.parametrize("communication", [0.0, 3.0])
def test_theory_leads_from_one_doubling_point_to_the_next(n: int, after: int, communication: float) -> None:
    a, last = 0.1, 100
    q, times = math.sqrt(1 - a), {k: expected(k, last) + communication for k in (n // 2, n, after)}

    def noise(k: int) -> float:
        return a / math.sqrt(k * (1 - a))

    def point(k: int, more: int) -> float:
        """The distance at which k and more clients make equal progress in a second: eqs. (192) = (193)."""
        return (noise(k) * times[more] - noise(more) * times[k]) / ((1 - q) * (times[more] - times[k]))

    far, target = point(n // 2, n), point(n, after)
    rounds = 0
    while far > target:
        far, rounds = far * q + noise(n), rounds + 1
    assert Theory(a).rounds(stage(n, after, last)) == rounds


def test_theory_takes_given_times() -> None:
    lemma = Theory(0.2, times=(1.0, 2.0, 3.0, 6.0))
    # 2 to 4 clients: sqrt(2) (6 - 2) / (2 - 1) = 5.66; 2 log(5.66) / log(1.25) = 15.5.
    assert lemma.rounds(stage(2, 4, 4)) == 16
    assert Theory(times=(1.0,) * 4).rounds(stage(2, 4, 4)) == 0  # more clients cost nothing: take them
    assert Theory(times=(1.0, 1.0, 3.0, 3.0)).rounds(stage(2, 4, 4)) == 1
    with pytest.raises(ConfigError, match="4 times are given for 8 clients"):
        lemma.rounds(stage(2, 4, 8))


def test_a_stage_may_have_no_rounds() -> None:
    same = Theory(times=(1.0,) * 10)
    _, done, _ = run_one(partial(srpfl, flanp(3), n0=2, n_clients=10, stages=same), federation().rows)
    assert [r.participants for r in done.rounds[1:]] == [10] * 3


# -- adaptive ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Far:
    """A distance that contracts as Theorem 4.5 says."""

    distance: float = 10.0
    round: int = 0


def count_clients(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    return {"n": torch.ones_like(data.n)[None]}, {}


def contraction(state: Far | None, *, a: float, rounds: int) -> Generator[Ask | Save, Replies | None, Far]:
    state = state or Far()
    while state.round < rounds:
        got = yield Ask(count_clients, {}, {"n": Sum()})
        assert got is not None
        far = state.distance * math.sqrt(1 - a) + a / math.sqrt(int(got["n"]) * (1 - a))
        state = replace(state, distance=far, round=state.round + 1)
        yield Save(state, {"loss": far})
    return state


def test_adaptive_doubles_where_the_theory_with_known_constants_does() -> None:
    # Speeds of a trace grow by the same factor whenever clients double, so that what a round of the next stage takes is
    # foretold right, and losses follow the theorem: what is fitted is what the lemma takes as known.
    n_clients, a = 64, 0.2
    times = [1.5 ** math.log2(i + 1) for i in range(n_clients)]
    rows = federation(counts=(1,) * n_clients).rows
    clock = VirtualClock(_Given(tuple(times)))
    program = partial(contraction, a=a, rounds=80)
    _, done, _ = run_one(partial(srpfl, program, n0=1, n_clients=n_clients, stages=Adaptive()), rows, clock=clock)
    q = math.sqrt(1 - a)
    far, n = 10.0, 1
    spent = 0
    for r in done.rounds:
        assert r.participants == n
        far, spent = far * q + a / math.sqrt(n * (1 - a)), spent + 1
        if n == n_clients or spent < 4:
            continue
        growth = 2.0 if n == 1 else 1.5
        now = far * (1 - q) - a / math.sqrt(n * (1 - a))
        twice = far * (1 - q) - a / math.sqrt(2 * n * (1 - a))
        if twice > now * growth:
            n, spent = 2 * n, 0
    assert done.rounds[-1].participants == n_clients


@dataclass(frozen=True)
class _Given:
    seconds: tuple[float, ...]

    def times(self, round_: int, clients: torch.Tensor, seed: int) -> torch.Tensor:
        return torch.tensor(self.seconds, dtype=torch.float64)


def test_adaptive_goes_on_when_the_loss_stalls_or_rises_and_stays_while_it_falls_fast() -> None:
    rule = Adaptive(least=4, most=20)
    stalled = stage(4, 8, 64, losses=[1.0, 0.5, 0.5, 0.5, 0.5], spent=5, seconds=5.0)
    rising = stage(4, 8, 64, losses=[1.0, 1.1, 1.3, 1.6], spent=4, seconds=4.0)
    falling = stage(4, 8, 64, losses=[1.0, 0.5, 0.25, 0.125], spent=4, seconds=4.0)
    early = stage(4, 8, 64, losses=[1.0, 1.0], spent=2, seconds=2.0)
    assert rule.over(stalled)
    assert rule.over(rising)
    assert not rule.over(falling)
    assert not rule.over(early)
    assert rule.over(replace(falling, state=replace(falling.state, spent=20)))


def test_adaptive_without_losses_goes_on_after_the_most_rounds() -> None:
    rule = Adaptive(most=6)
    assert not rule.over(stage(4, 8, 64, spent=5))
    assert rule.over(stage(4, 8, 64, spent=6))


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Theory(0.0),
        lambda: Theory(1.0),
        lambda: Theory(times=(2.0, 1.0)),
        lambda: Adaptive(least=3),
        lambda: Adaptive(least=9, most=8),
        lambda: next(srpfl(flanp(), n0=0, n_clients=3)),
        lambda: next(srpfl(flanp(), n0=4, n_clients=3)),
    ],
)
def test_what_are_no_stages_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_silent_round_counts_and_changes_nothing() -> None:
    program = partial(srpfl, flanp(6), n0=2, n_clients=10, stages=Fixed(2))
    state, done, _ = run_one(program, federation().rows, participation=Late(silent=(2,)))
    assert [r.participants for r in done.rounds] == [0, 2, 0, 4, 4, 7, 6]  # a third is late
    assert state.inner.round == 6
