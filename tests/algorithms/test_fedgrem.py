# SPDX-License-Identifier: Apache-2.0
"""FedGrEM: rounds are as calculated by hand, planted mixtures are recovered, and nothing breaks it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.fedgrem import (
    State,
    _batch,
    _likelier,
    central_update,
    estimates,
    fedgrem,
    gradient_em,
    scores,
    shrunk,
)
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.models.mixtures import Custom, Family, Gaussian, Regression
from coterie.participation import Participants, Sampled
from coterie.studies.data.mixtures import PlantedMixture, matched, planted_mixture
from helpers import Only, one_block, ragged, run_one, spying, state_tensors

FEW = MixtureStart(restarts=3, iterations=8)
PAPER: dict[str, Any] = {"penalty": "norm", "together": 0.0, "share_weights": 0.0}


def program(family: Family, n_components: int = 2, **options: Any) -> Callable[[Any], Any]:
    options = {"rounds": 5, "seed": 0, "start": FEW, **options}
    return partial(fedgrem, family=family, n_components=n_components, **options)


def blobs(counts: list[int], *, seed: int = 0, spread: float = 1.0) -> list[Tensor]:
    """Clients with rows about (4, 0) and (-4, 0), in turn."""
    draw = torch.Generator().manual_seed(seed)
    sign = [1 - 2 * (torch.arange(n) % 2) for n in counts]
    noise = [spread * torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in counts]
    return [e + 4 * torch.stack([s, 0 * s], 1) for s, e in zip(sign, noise, strict=True)]


def regressions(counts: list[int], *, noise: float = 0.0) -> tuple[list[Tensor], list[Tensor]]:
    """Clients whose targets are the first feature and its negative, in turn."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in counts]
    ys = [x[:, 0] * (1 - 2 * (torch.arange(len(x)) % 2)) for x in xs]
    return xs, [y + noise * torch.randn(len(y), generator=draw, dtype=torch.float64) for y in ys]


def sorted_by_first(theta: Tensor) -> Tensor:
    return theta[theta[:, 0].argsort()]


# -- rounds -----------------------------------------------------------------------------------------------------------
def begun(family: Family, rows: Ragged, **options: Any) -> tuple[dict[str, Tensor], list[State], InProcess]:
    """What clients keep after the start, all states from the start on, and the engine after the last round."""
    engine, states = InProcess(rows), []
    engine.run([program(family, **{**options, "rounds": 0})])
    kept = {name: value.clone() for name, value in engine.worker.private[0].items()}
    engine.run([spying(program(family, **options), states)])
    return kept, states, engine


def by_hand(
    x: Tensor, y: Tensor | None, theta: Tensor, weights: Tensor, first: Tensor, along: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A client's local update with unit covariance or noise: with a target, of regressions.

    theta [R, D] -> tilde, weights, and where the objective bends most, by a step of power iteration from `along`
    """
    left = torch.stack([x - t if y is None else (y - x @ t)[:, None] for t in theta], 1)  # [N, R, D | 1]
    joint = weights * torch.exp(-left.square().sum(-1) / 2)
    gamma, tilde, most = joint / joint.sum(1, keepdim=True), theta.clone(), torch.zeros_like(theta)
    for r in range(len(theta)):
        gradient = (gamma[:, r, None] * left[:, r] * (1 if y is None else x)).mean(0)
        hessian = torch.eye(2).double() * gamma[:, r].mean() if y is None else x.T @ (gamma[:, r, None] * x) / len(x)
        v = torch.ones(2).double() if along is None else along[r]
        image, bent = hessian @ v / v.norm(), hessian @ gradient / gradient.norm()
        most[r] = image / image.norm()
        tilde[r] = theta[r] + min(0.95 / first[r], 0.95 / image.norm(), 0.95 / bent.norm()) * gradient
    return tilde, gamma.mean(0), most


@pytest.mark.parametrize("kind", ["gmm", "mor"])
def test_two_rounds_match_hand_calculation(kind: str) -> None:
    counts = [6, 9, 14]
    xs, ys = (blobs(counts, spread=2.0), [None] * 3) if kind == "gmm" else regressions(counts, noise=0.5)
    family: Family = Gaussian(2) if kind == "gmm" else Regression(2)
    options = {**PAPER, "c_lambda": 0.7, "kappa": 0.3}
    rows = ragged(xs, None if kind == "gmm" else ys)
    kept, (start, one, two), engine = begun(family, rows, rounds=2, **options)

    def local(theta: Tensor, weights: Tensor, along: Any) -> list[Tensor]:
        """Of all clients, from their first weights."""
        first = kept["first_weights"]
        each = [by_hand(xs[k], ys[k], theta[k], weights[k], first[k], along[k]) for k in range(3)]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]

    n = torch.tensor(counts)
    # Round 1 begins at the local estimates, which nothing has shrunk yet; lambda_1 = kappa lambda_0 + C sqrt(P + log M).
    torch.testing.assert_close(start.tilde, kept["tilde"])
    step = 0.7 * math.sqrt(2 + math.log(3))
    assert (one.lam, one.pull) == pytest.approx((0.3 + step, 0.3 + step))
    assert two.lam == pytest.approx(0.3 * (0.3 + step) + step)
    tilde, weights, along = local(kept["tilde"], kept["weights"], [None] * 3)
    torch.testing.assert_close(one.tilde, tilde)
    torch.testing.assert_close(one.centre, central_update(tilde, n, one.lam, start.centre))
    # Round 2 begins at what the central update of round 1 made of them, with that round's lambda.
    theta = shrunk(tilde, one.centre, (one.lam / n.sqrt())[:, None].expand(-1, 2))
    tilde, weights, _ = local(theta, weights, along)
    torch.testing.assert_close(two.tilde, tilde)
    torch.testing.assert_close(engine.worker.private[0]["weights"], weights)
    torch.testing.assert_close(two.centre, central_update(tilde, n, two.lam, one.centre))
    torch.testing.assert_close(two.away, ((tilde - one.centre).norm(dim=-1) * weights).sum(1))
    found = estimates(two, family, engine.worker.private[0], n, "norm")
    torch.testing.assert_close(found, shrunk(tilde, two.centre, (two.lam / n.sqrt())[:, None].expand(-1, 2)))


@pytest.mark.parametrize("family", [Gaussian(8), Gaussian(8, "diagonal")], ids=["unit", "diagonal"])
def test_a_sparse_centre_has_zeros_where_the_planted_ones_have(family: Family) -> None:
    """Means of 120 rows miss by 0.09; of 240 rows' weight, a penalty of 96 sets up to 0.4 to 0, and 3 is far above."""
    draw = torch.Generator().manual_seed(0)
    planted = torch.tensor([[3.0, 0, 0, -3, 0, 0, 0, 0], [-3.0, 0, 0, 0, 0, 0, 3, 0]]).double()
    xs = [planted.repeat(20, 1) + torch.randn(40, 8, generator=draw, dtype=torch.float64) for _ in range(6)]
    plain, few = (run_one(program(family, rounds=20, c_lambda=5.0, sparse=tau), ragged(xs, None))[0].centre
                  for tau in (0.0, 96.0))  # fmt: skip
    order = few[:, 0].argsort(descending=True)
    assert torch.equal(few[order] != 0, planted != 0)
    assert (plain != 0).all()
    assert (few[order].sign() == planted.sign()).all()


def test_a_round_with_an_estimated_covariance_matches_hand_calculation() -> None:
    xs, family = [x @ torch.tensor([[2.0, 0.5], [0.0, 0.3]]).double() for x in blobs([20, 30, 25])], Gaussian(2, "full")
    kept, (start, one), _ = begun(family, ragged(xs, None), rounds=1, **PAPER, c_lambda=0.3)
    scatter, n = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([20, 30, 25])
    for k, x in enumerate(xs):
        theta, weights = kept["tilde"][k], kept["weights"][k]
        law = [torch.distributions.MultivariateNormal(t, precision_matrix=start.scale @ start.scale.T) for t in theta]
        joint = torch.stack([w * each.log_prob(x).exp() for w, each in zip(weights, law, strict=True)], 1)
        gamma = joint / joint.sum(1, keepdim=True)
        for r in range(2):
            d = x - theta[r]
            scatter += (gamma[:, r, None] * d).T @ d
            bend = torch.maximum(kept["first_weights"][k, r], gamma[:, r].mean())
            moved = theta[r] + 0.95 / bend * (gamma[:, r, None] * d).mean(0)  # the gradient times the covariance
            torch.testing.assert_close(one.tilde[k, r], moved)
    torch.testing.assert_close(torch.linalg.inv(one.scale @ one.scale.T), scatter / 75, rtol=1e-5, atol=1e-5)
    # The central update is that of whitened parameters.
    whitened = central_update(one.tilde @ start.scale, n, one.lam, start.centre @ start.scale)
    torch.testing.assert_close(one.centre @ start.scale, whitened)


def test_lambda_follows_algorithm_1_and_clients_begin_together() -> None:
    rows, root = ragged(blobs([20, 0, 30, 25]), None), math.sqrt(2 + math.log(3))  # who has no rows is nobody
    _, states, _ = begun(Gaussian(2), rows, rounds=6, **{**PAPER, "together": 3.0}, c_lambda=1.5, kappa=0.4)
    assert [s.lam for s in states] == pytest.approx([0.4**t + 1.5 * root * (1 - 0.4**t) / (1 - 0.4) for t in range(7)])
    extra = [s.pull - s.lam for s in states[1:]]
    assert extra == pytest.approx([3.0 * root * 0.8**t for t in range(6)])
    _, states, _ = begun(
        Gaussian(2), rows, rounds=4, c_lambda=1.5, together=3.0
    )  # C of the squared penalty is no lambda
    assert [s.lam for s in states[1:]] == [1.5] * 4
    assert [s.pull for s in states[1:]] == pytest.approx([1.5 + 3.0 * 0.8**t for t in range(4)])
    _, states, _ = begun(Gaussian(2), rows, rounds=3, c_lambda=0.0)
    assert [(s.lam, s.pull) for s in states[1:]] == [(0.0, 0.0)] * 3


def test_c_lambda_zero_leaves_every_client_alone() -> None:
    xs = blobs([20, 30, 25])
    state, _, engine = run_one(program(Gaussian(2), c_lambda=0.0, rounds=20), ragged(xs, None))
    assert (state.lam, state.pull) == (0.0, 0.0)
    alone = []
    for k, x in enumerate(xs):
        rows = ragged([x], None, [f"c{k:04d}"])
        alone.append(run_one(program(Gaussian(2), c_lambda=0.0, rounds=20), rows)[2].worker.private[0]["tilde"][0])
    found = engine.worker.private[0]["tilde"]
    for k in range(3):
        order = found[k][:, 0].argsort()
        torch.testing.assert_close(found[k][order], alone[k][alone[k][:, 0].argsort()])


def test_c_lambda_infinity_makes_components_common() -> None:
    rows = ragged(blobs([20, 30, 25]), None)
    family = Gaussian(2)
    state, _, engine = run_one(program(family, c_lambda=math.inf, rounds=10), rows)
    found = estimates(state, family, engine.worker.private[0], torch.tensor([20, 30, 25]))
    assert torch.equal(found, state.centre.expand(3, -1, -1))
    n = torch.tensor([20.0, 30.0, 25.0], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(state.centre, (n * state.tilde).sum(0) / 75)


def test_the_centre_is_robust_however_strongly_clients_are_drawn_to_it() -> None:
    xs, n = blobs([40] * 7), torch.full((7,), 40)
    xs[6] = xs[6] + 3  # off, and nobody is rejected here
    most = 2.0 * math.sqrt(2 + math.log(7)) / (1 - 0.1)  # what C = 2 comes to
    _, states, engine = begun(Gaussian(2), ragged(xs, None), rounds=3, c_lambda=math.inf)
    for before, after in pairwise(states):
        assert after.pull == math.inf
        torch.testing.assert_close(after.centre, central_update(after.tilde, n, most, before.centre))
    assert not torch.allclose(states[-1].centre, states[-1].tilde.mean(0), atol=0.02)
    found = estimates(states[-1], Gaussian(2), engine.worker.private[0], n)
    assert torch.equal(found, states[-1].centre.expand(7, -1, -1))  # common all the same
    _, states, _ = begun(Gaussian(2), ragged(xs, None), rounds=1, c_lambda=math.inf, robust=math.inf)
    torch.testing.assert_close(states[-1].centre, states[-1].tilde.mean(0))  # the paper's
    _, states, _ = begun(Gaussian(2), ragged(xs, None), rounds=2, **PAPER, c_lambda=0.5)
    torch.testing.assert_close(
        states[2].centre, central_update(states[2].tilde, n, states[2].lam, states[1].centre)
    )  # a smaller C is the centre's too
    _, states, _ = begun(Gaussian(2), ragged(xs, None), rounds=2, c_lambda=0.5)  # of the squared penalty it is not
    torch.testing.assert_close(states[2].centre, central_update(states[2].tilde, n, most, states[1].centre))


def test_the_squared_penalty_draws_a_component_by_its_rows() -> None:
    # Groups are far apart: a component's estimate is its rows' mean, drawn by C^2 / (rows + C^2) of the way to the centre.
    xs = [x + shift for x, shift in zip(blobs([12, 40, 100], spread=0.1), (0.5, 0.0, -0.5), strict=True)]
    options = {"rounds": 80, "together": 0.0, "share_weights": 0.0}
    for c_lambda in (1.0, 4.0):
        state, _, engine = run_one(program(Gaussian(2), c_lambda=c_lambda, **options), ragged(xs, None))
        found = estimates(state, Gaussian(2), engine.worker.private[0], state.n)
        for k, x in enumerate(xs):
            for centre in state.centre:
                own = x[(x[:, 0] > 0) == (centre[0] > 0)]
                want = centre + (own.mean(0) - centre) * len(own) / (len(own) + c_lambda**2)
                torch.testing.assert_close(found[k][(found[k] - want).norm(dim=1).argmin()], want, atol=1e-6, rtol=0)


def test_the_squared_penalty_is_in_units_of_the_scale() -> None:
    # y = slope x + noise: a slope's precision is sum x^2 over the noise's variance, and the penalty's is C^2 over the same.
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 1, generator=draw, dtype=torch.float64) for n in (20, 50, 60)]
    ys = [x[:, 0] * (1.0 + 0.2 * k) + 0.1 * torch.randn(len(x), generator=draw).double() for k, x in enumerate(xs)]
    family = Regression(1, variance="estimated")
    options = {"rounds": 200, "together": 0.0, "c_lambda": 6.0}
    state, _, engine = run_one(program(family, 1, **options), ragged(xs, ys))
    found = estimates(state, family, engine.worker.private[0], state.n)[:, 0, 0]
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        squares = float((x[:, 0] ** 2).sum())
        left = squares / (squares + 36.0)  # both precisions are over the variance
        want = state.centre[0, 0] + left * (float((x[:, 0] * y).sum()) / squares - state.centre[0, 0])
        assert float(found[k]) == pytest.approx(float(want), abs=1e-6)


def test_a_client_goes_back_to_its_own_first_fit_where_that_is_likelier() -> None:
    # Held together, the last client gives both of its groups, near to each other, to one component of the others.
    xs = [
        *blobs([60] * 5, spread=0.3),
        blobs([60], seed=7, spread=0.3)[0] * torch.tensor([0.3, 1.0]) + torch.tensor([4.0, 0.0]),
    ]
    options = {"rounds": 80, "c_lambda": 0.3, "reject": math.inf, "start": MixtureStart(10, 20)}
    state, _, engine = run_one(program(Gaussian(2), **options), ragged(xs, None))
    weights = engine.worker.private[0]["weights"][5]
    found = estimates(state, Gaussian(2), engine.worker.private[0], state.n)[5]
    assert float(weights.min()) > 0.3
    want = torch.tensor([[2.8, 0.0], [5.2, 0.0]]).double()
    torch.testing.assert_close(
        sorted_by_first(found), want, atol=0.3, rtol=0
    )  # 30 rows of deviation 0.3, and the penalty


def test_a_client_stays_only_where_what_it_was_led_to_is_clearly_likelier() -> None:
    # Four rows at 0, where clients were led to. From a first fit at b they are less likely by 4 b^2 / 2: by 2.7 and 3.3.
    one = torch.ones(1, 2, 1, dtype=torch.float64)
    first = torch.tensor([1.35, 1.65], dtype=torch.float64).sqrt().view(1, 2, 1, 1)
    begun, alone = torch.tensor([[True, True]]), torch.tensor([[False, False]])
    private = {"first": first, "first_weights": one, "begun": begun, "alone": alone}
    shared = {
        "family": Gaussian(1), "scale": torch.ones(1).double(), "centre": torch.zeros(1, 1, 1).double(),
        "pull": torch.zeros(1).double(), "penalty": "squared", "c_eta": torch.tensor([0.95]).double(),
        "share_weights": torch.zeros(1).double(), "mean_weights": torch.ones(1, 1).double(), "back": torch.tensor([True]),
    }  # fmt: skip
    data = one_block(ragged([torch.zeros(4, 1).double()] * 2, None))
    theta, _ = _likelier(shared, private, torch.zeros_like(first), one, data, data.n)
    assert theta.flatten().tolist() == pytest.approx([math.sqrt(1.35), 0.0])


def test_shared_weights_have_further_rows_dealt_by_the_common_proportions() -> None:
    xs = [
        torch.cat([x[::2][:a], x[1::2][:b]])
        for x, a, b in zip(blobs([80] * 3), (40, 20, 10), (10, 20, 40), strict=True)
    ]
    rows, n = ragged(xs, None), torch.tensor([50.0, 40.0, 50.0], dtype=torch.float64)
    kept, (start, one), engine = begun(Gaussian(2), rows, rounds=1, share_weights=5.0)
    torch.testing.assert_close(start.mean_weights, (n[:, None] * kept["weights"]).sum(0) / 140)
    by_rows = [
        by_hand(x, None, kept["tilde"][k], kept["weights"][k], kept["first_weights"][k])[1] for k, x in enumerate(xs)
    ]
    mean = torch.stack(by_rows)
    want = (n[:, None] * mean + 10 * start.mean_weights) / (n[:, None] + 10)  # 5 rows for each of two components
    torch.testing.assert_close(engine.worker.private[0]["weights"], want)
    # Who is farther from the common proportions than 1 / sqrt(n) counts as if it were not.
    counts = (1 / n.sqrt() / (mean - start.mean_weights).norm(dim=1)).clamp(max=1.0)
    assert counts.min() < 0.5 < counts.max()
    torch.testing.assert_close(one.mean_weights, (counts[:, None] * mean).sum(0) / counts.sum())


def test_many_further_rows_make_proportions_common_and_few_clients_do_not_move_them() -> None:
    xs = blobs([200] * 8, spread=2.0)
    own = run_one(program(Gaussian(2), rounds=30, share_weights=0.0), ragged(xs, None))[2].worker.private[0]["weights"]
    common = run_one(program(Gaussian(2), rounds=30, share_weights=1e6), ragged(xs, None))
    assert float(own.std(0).max()) > 1e-3
    assert float(common[2].worker.private[0]["weights"].std(0).max()) < 1e-5
    xs[6], xs[7] = (x[x[:, 0] > 0].repeat(2, 1) for x in xs[6:])  # one group only
    state = run_one(program(Gaussian(2), rounds=30, share_weights=1e6), ragged(xs, None))[0]
    torch.testing.assert_close(state.mean_weights, torch.full((2,), 0.5).double(), atol=0.03, rtol=0)  # a mean: 0.625


def test_minibatches_end_near_the_full_batch() -> None:
    rows = ragged(blobs([200, 220, 180]), None)
    full, _, _ = run_one(program(Gaussian(2), rounds=30), rows)
    some, _, _ = run_one(program(Gaussian(2), rounds=30, batch_size=100), rows)
    assert not torch.equal(full.centre, some.centre)
    torch.testing.assert_close(some.centre, full.centre, atol=0.3, rtol=0)  # 100 of 200 rows: deviation about 0.1
    assert some.n.tolist() == [200, 220, 180]  # the penalty goes by all rows
    large, _, _ = run_one(program(Gaussian(2), rounds=30, batch_size=220), rows)
    torch.testing.assert_close(large.centre, full.centre)


@pytest.mark.parametrize("penalty", ["squared", "norm"])
def test_small_batches_come_near_the_full_batch(penalty: Any) -> None:
    planted = planted_mixture("gmm", n_clients=4, n_outliers=0, rows=400, h=0.25, seed=2)
    options = {"rounds": 100, "penalty": penalty, "c_lambda": 2.0}
    full = error(planted, Gaussian(10), **options)[0]
    some, state = error(planted, Gaussian(10), **options, batch_size=20)
    assert some < 1.25 * full  # constant steps end four times as far, as single batches of four rows in a component are
    assert state.round == 100


def test_minibatches_are_drawn_anew_for_every_round_client_and_seed() -> None:
    data, key = one_block(ragged(blobs([50, 50, 4]), None)), keys.key(0, 1, "fedgrem")
    one, two = _batch(data, 10, key), _batch(data, 10, keys.key(0, 2, "fedgrem"))
    for c, n in enumerate(data.n.tolist()):
        drawn, every = ({tuple(row) for row in some.x[c][some.real[c]].tolist()} for some in (one, data))
        assert drawn <= every
        assert len(drawn) == int(one.n[c]) == min(n, 10)  # without replacement
    assert torch.equal(_batch(data, 10, key).x, one.x)
    assert not torch.equal(one.x[-1], two.x[-1])
    assert _batch(data, 50, key) is data


def test_tol_stops_when_nothing_moves() -> None:
    rows = ragged(blobs([40, 50, 60]), None)
    state, done, _ = run_one(program(Gaussian(2), rounds=500, tol=1e-6), rows)
    assert state.settled
    assert state.round < 100
    assert done.rounds[-1].info["change"] <= 1e-6


@dataclass(frozen=True)
class Turns:
    """Clients that take part, round after round; the last ones from then on."""

    rounds: tuple[tuple[int, ...], ...]

    def choose(self, round_: int, clients: Tensor, seed: int, *how: Any) -> Participants:
        return Only(self.rounds[min(round_, len(self.rounds) - 1)]).choose(round_, clients, seed)


def test_a_client_that_missed_the_start_begins_at_the_centre() -> None:
    xs, states = blobs([40, 50, 60]), []
    engine = InProcess(ragged(xs, None), participation=Turns(((0, 1), (0, 1), (0, 1, 2))))
    engine.run([spying(program(Gaussian(2), rounds=2, share_weights=0.0), states)])
    start, one, two = states
    assert [s.n.tolist() for s in states] == [[40, 50], [40, 50], [40, 50, 60]]
    half = torch.full((2,), 0.5, dtype=torch.float64)
    tilde, weights, _ = by_hand(xs[2], None, one.centre, half, half)
    torch.testing.assert_close(two.tilde[2], tilde)
    torch.testing.assert_close(engine.worker.private[0]["first_weights"][2], weights)
    assert start.centre.shape == (2, 2)


def test_who_is_absent_counts_with_what_it_sent_last() -> None:
    rows, n = ragged(blobs([40, 50, 60]), None), torch.tensor([40, 50, 60])
    engine, states = InProcess(rows, participation=Turns(((0, 1, 2), (0, 1, 2), (0, 2)))), []
    engine.run([spying(program(Gaussian(2), rounds=3), states)])
    _, one, two, three = states
    assert torch.equal(three.tilde[1], one.tilde[1])
    assert torch.equal(three.away[1], one.away[1])
    assert not torch.equal(two.tilde[0], one.tilde[0])
    most = 2.0 * math.sqrt(2 + math.log(3)) / (1 - 0.1)
    torch.testing.assert_close(three.centre, central_update(three.tilde, n, most, two.centre))


def test_sampled_clients_reach_what_everyone_reaches() -> None:
    rows = ragged(blobs([40] * 12), None)
    everyone, _, _ = run_one(program(Gaussian(2), rounds=60), rows)
    some, _, _ = run_one(program(Gaussian(2), rounds=60), rows, participation=Sampled(0.4))
    assert int((some.n > 0).sum()) == 12
    torch.testing.assert_close(sorted_by_first(some.centre), sorted_by_first(everyone.centre), atol=0.05, rtol=0)


# -- awkward clients --------------------------------------------------------------------------------------------------
FAMILIES = [
    Gaussian(2), Gaussian(2, "diagonal"), Gaussian(2, "full"), Regression(2), Regression(2, intercept=True),
    Regression(2, variance="estimated"),
    Custom(lambda x, y, theta: -0.5 * (x - theta).square().sum(), 2, lambda x, u: x + 0.1 * u, steps=4),
]  # fmt: skip


@pytest.mark.parametrize("far", [1e6, 1e200])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{type(f).__name__}-{getattr(f, 'covariance', '')}")
def test_awkward_clients_give_no_nan(family: Family, far: float) -> None:
    xs, ys = regressions([30, 0, 1, 40, 25, 20, 2, 30])
    xs[4] = xs[4].clone()
    xs[4][:3] = far  # some rows far away
    xs[5] = torch.full_like(xs[5], far)  # all rows far away
    xs[7] = torch.zeros_like(xs[7])  # constant rows
    ys[3][:2], ys[6] = far, torch.full_like(ys[6], -far)
    for c_lambda in (0.0, 2.0, math.inf):
        chosen = program(family, 3, c_lambda=c_lambda, rounds=6)
        state, done, engine = run_one(chosen, ragged(xs, ys))
        for value in [*state_tensors(state).values(), *engine.worker.private[0].values()]:
            assert not value.isnan().any()
        assert not any(math.isnan(r.info.get("loss", 0.0)) for r in done.rounds)
        found = estimates(state, family, engine.worker.private[0], torch.tensor([len(x) for x in xs]))
        assert not found.isnan().any()


def test_nobody_has_rows() -> None:
    empty = [torch.zeros(0, 2, dtype=torch.float64)] * 3
    state, done, _ = run_one(program(Gaussian(2)), ragged(empty, None))
    assert state.round == 5
    assert all(r.info["events"] == ["nobody answered"] for r in done.rounds)


def test_an_empty_component_stays_where_it_is() -> None:
    xs = [torch.zeros(12, 2, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)]
    kept, states, engine = begun(Gaussian(2), ragged(xs, None), n_components=3, rounds=10)
    assert torch.equal(states[-1].tilde, kept["tilde"])
    torch.testing.assert_close(engine.worker.private[0]["weights"].sum(1), torch.ones(2, dtype=torch.float64))


def test_a_single_row_is_drawn_to_the_others_and_draws_them_hardly() -> None:
    xs = [*blobs([60, 60, 60]), torch.tensor([[5.0, 3.0]], dtype=torch.float64)]
    with_it, _, engine = run_one(program(Gaussian(2), rounds=40), ragged(xs, None))
    without, _, _ = run_one(program(Gaussian(2), rounds=40), ragged(xs[:3], None))
    torch.testing.assert_close(sorted_by_first(with_it.centre), sorted_by_first(without.centre), atol=0.1, rtol=0)
    found = estimates(with_it, Gaussian(2), engine.worker.private[0], with_it.n)
    left = 1 / (1 + 0.95 * 2.0**2)  # of the way from the centre to the row: C = 2, and the only row's step is 0.95
    near = with_it.centre[with_it.centre[:, 0].argmax()]
    want = near + left * (xs[3][0] - near) / (1 - left * 0.05)
    torch.testing.assert_close(found[3][found[3][:, 0].argmax()], want, atol=0.05, rtol=0)


# -- what it is for ---------------------------------------------------------------------------------------------------
def error(planted: PlantedMixture, family: Family, **options: Any) -> tuple[float, State]:
    """Largest error of a good client's components, with outliers rejected."""
    options = {"rounds": 60, "start": MixtureStart(restarts=10), "reject": 3.5, **options}
    state, _, engine = run_one(program(family, 5, **options), planted.rows)
    found = estimates(state, family, engine.worker.private[0], planted.rows.counts)
    return matched(found, engine.worker.private[0]["weights"], planted)[0], state


@pytest.mark.parametrize("kind", ["gmm", "mor"])
def test_recovers_a_planted_mixture_as_well_as_all_rows_allow(kind: Any) -> None:
    # 10 parameters of a component with about 500 of 2,400 rows: length of the error about sqrt(10 / 500) = 0.14 each.
    planted = planted_mixture(kind, n_clients=8, n_outliers=0, rows=300, seed=4)
    family: Family = Gaussian(10) if kind == "gmm" else Regression(10)
    together, state = error(planted, family, c_lambda=math.inf)
    assert together < 0.35  # the largest of five
    assert float(torch.cdist(planted.theta[0], state.centre).min(1).values.max()) == pytest.approx(together)
    assert error(planted, family, c_lambda=16.0)[0] < 0.4
    assert together < 0.5 * error(planted, family, c_lambda=0.0)[0]


def test_recovers_a_planted_mixture_of_a_family_of_ones_own() -> None:
    # Exponential waiting times with rates 0.2 and 5, parameter log rate: log p = theta - exp(theta) x.
    draw = torch.Generator().manual_seed(0)
    rates = torch.tensor([0.2, 5.0], dtype=torch.float64)
    xs = []
    for _ in range(6):
        u = torch.rand(80, 1, generator=draw, dtype=torch.float64)
        xs.append(-u.log() / rates[torch.arange(80) % 2][:, None])
    family = Custom(
        lambda x, y, theta: theta[0] - theta[0].exp() * x[0], 1, lambda x, u: 4 * u - 2 + 0 * x[:1], steps=5
    )
    state, _, _ = run_one(program(family, rounds=40, c_lambda=math.inf, c_eta=0.5), ragged(xs, None))
    found = state.centre[:, 0].sort().values
    torch.testing.assert_close(found, rates.log(), atol=0.25, rtol=0)  # 240 rows of each, mixed: deviation about 0.1


@pytest.mark.parametrize("kind", ["gmm", "mor"])
def test_planted_outliers_have_the_highest_scores_and_do_not_hurt(kind: Any) -> None:
    family = Gaussian(10) if kind == "gmm" else Regression(10)
    planted = planted_mixture(kind, n_clients=12, n_outliers=2, h=0.25, seed=1)
    with_them, state = error(planted, family, c_lambda=4.0)
    assert (scores(state) > 3.5).tolist() == [False] * 10 + [True] * 2
    assert with_them < 1.2 * error(good_part(planted), family, c_lambda=4.0)[0]
    assert with_them < 0.5 * error(planted, family, c_lambda=0.0)[0]


def good_part(planted: PlantedMixture) -> PlantedMixture:
    good = planted.good
    return PlantedMixture(
        planted.rows.only(np.flatnonzero(good)), planted.theta[good], planted.weights[good], good[good]
    )


ADVERSARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "far": lambda x: x + 1e3,
    "copied": lambda x: x[:1].expand_as(x).clone(),
    "constant": torch.zeros_like,
    "flipped": lambda x: -3 * x,
    "huge": lambda x: 1e150 * x,
    "mixed up": lambda x: torch.stack([x[torch.randperm(len(x)), d] for d in range(x.shape[1])], 1) + 4,
}


@pytest.mark.parametrize("how", ADVERSARIES)
def test_thirty_percent_adversaries_do_not_hurt(how: str) -> None:
    planted, bad = planted_mixture("gmm", n_clients=20, n_outliers=0, h=0.25, rows=120, seed=3), range(14, 20)
    torch.manual_seed(0)
    x = torch.stack([planted.rows.client(k).x[0] for k in range(20)])
    x[14:] = torch.stack([ADVERSARIES[how](x[k]) for k in bad])
    good = torch.arange(20) < 14
    attacked = PlantedMixture(Ragged.from_blocks(x, None), planted.theta, planted.weights, good)
    with_them, state = error(attacked, Gaussian(10), c_lambda=4.0)
    assert with_them <= 1.2 * error(good_part(attacked), Gaussian(10), c_lambda=4.0)[0]
    assert (scores(state)[:14] < 3.5).all()
    if how != "copied":  # a row may well be near a centre
        assert (scores(state)[14:] > 3.5).all()


def test_who_is_rejected_is_left_alone_once_penalties_are_steady() -> None:
    xs = blobs([40] * 6)
    xs[5] = 5 * xs[5]
    state, _, engine = run_one(program(Gaussian(2), rounds=60, reject=3.5), ragged(xs, None))
    private = engine.worker.private[0]
    assert private["alone"].tolist() == [False] * 5 + [True]
    found = estimates(state, Gaussian(2), private, state.n)
    torch.testing.assert_close(found[5], state.tilde[5])
    own, _, other = run_one(program(Gaussian(2), rounds=60, c_lambda=0.0), ragged(xs[5:], None))
    alone = estimates(own, Gaussian(2), other.worker.private[0], own.n)[0]
    torch.testing.assert_close(sorted_by_first(found[5]), sorted_by_first(alone), atol=1e-3, rtol=0)
    early, _, engine = run_one(program(Gaussian(2), rounds=3, reject=3.5), ragged(xs, None))
    assert not engine.worker.private[0]["alone"].any()
    assert float(scores(early)[5]) > 3.5


def test_who_was_left_alone_returns_at_half_the_limit() -> None:
    data = one_block(ragged([x[:20] for x in blobs([40] * 6, spread=0.1)], None))
    equal, far = torch.full((1, 6, 2), 0.5, dtype=torch.float64), torch.tensor([[4.0, 0.0], [-4.0, 0.0]]).double()
    private = {
        "tilde": far.expand(1, 6, 2, 2), "weights": equal, "first_weights": equal, "along": torch.zeros(1, 6, 2, 2).double(),
        "stride": equal, "first": far.expand(1, 6, 2, 2), "rate": torch.ones(1, 6).double(),
        "begun": torch.ones(1, 6, dtype=torch.bool), "alone": (torch.arange(6) % 2 == 1)[None],
    }  # fmt: skip
    shared = {
        "family": Gaussian(2), "scale": torch.eye(2).double()[None], "centre": torch.zeros(1, 2, 2).double(),
        "mean_weights": equal[:, 0], "pull": torch.zeros(1).double(), "penalty": "squared",
        "share_weights": torch.zeros(1).double(),
        "c_eta": torch.full((1,), 0.95).double(), "reject": torch.full((1,), 3.5).double(), "batch_size": None,
        "capped": True, "rate": torch.ones(1).double(), "back": torch.zeros(1, dtype=torch.bool),
    }  # fmt: skip
    # Components are 4 from the centre: scores 4 / spread. Odd clients have been left alone, even ones have not.
    for score, alone in ((1.7, [False, False]), (1.8, [False, True]), (3.4, [False, True]), (3.6, [True, True])):
        _, kept = gradient_em(shared | {"usual": torch.tensor([[0.0, 4.0 / score]]).double()}, {}, private, data)
        assert kept["alone"].tolist() == [3 * alone], score


def test_the_common_covariance_is_not_the_outliers() -> None:
    draw = torch.Generator().manual_seed(0)
    xs = [x * torch.tensor([0.5, 2.0]) + torch.tensor([0.0, 3.0]) for x in blobs([80] * 12)]
    xs[10], xs[11] = (100 * torch.randn(80, 2, generator=draw, dtype=torch.float64) for _ in range(2))
    state, _, _ = run_one(program(Gaussian(2, "full"), rounds=20), ragged(xs, None))
    covariance = torch.linalg.inv(state.scale @ state.scale.T)
    torch.testing.assert_close(covariance, torch.diag(torch.tensor([0.25, 4.0]).double()), atol=0.5, rtol=0.15)
