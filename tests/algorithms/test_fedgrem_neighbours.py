# SPDX-License-Identifier: Apache-2.0
"""FedGrEM without one centre for all: every client has that of its neighbours in a ring."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import FederatedMixture
from coterie.algorithms.central import central_weights
from coterie.algorithms.em import em, own_parameters
from coterie.algorithms.fedgrem import State, central_update, estimates, fedgrem
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.algorithms.neighbours import own_centres, ring
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.methods.mixture.fit import fit_mixture
from coterie.models.mixtures import Gaussian
from coterie.participation import Sampled
from helpers import KilledError, Only, assert_same_state, interrupt_after, overhear, ragged, run_one, spying

FEW = MixtureStart(restarts=3, iterations=8)
PLANTED = torch.tensor([[-2.0, 0.0], [2.0, 0.0]], dtype=torch.float64)


def program(**options: Any) -> Callable[[Any], Any]:
    return partial(
        fedgrem, **{"family": Gaussian(2), "n_components": 2, "rounds": 5, "seed": 0, "start": FEW} | options
    )


def blobs(counts: list[int], *, seed: int = 0) -> list[Tensor]:
    """Clients with rows about the two planted means, in turn."""
    draw = torch.Generator().manual_seed(seed)
    return [PLANTED[torch.arange(n) % 2] + torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in counts]


def error(theta: Tensor) -> float:
    """Mean distance of the components from the planted ones, numbered by their first coordinates.  [M, R, P]"""
    order = theta[..., :1].argsort(1)
    return float((torch.take_along_dim(theta, order, 1) - PLANTED).norm(dim=-1).mean())


# -- centres ----------------------------------------------------------------------------------------------------------
def test_a_ring_closes_and_has_nobody_twice() -> None:
    assert ring(5, 1).tolist() == [[0, 1, 4], [0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 3, 4]]
    assert ring(6, 2)[0].tolist() == [0, 1, 2, 4, 5]
    for k in (2, 3, 10**12):  # 2 k + 1 >= 5: everybody
        assert ring(5, k).tolist() == [[0, 1, 2, 3, 4]] * 5
    assert ring(1, 3).tolist() == [[0]]


def centres_of(
    values: list[float], lam: float, *, part: list[bool] | None = None, n: list[int] | None = None, **how: Any
) -> tuple[list[float], list[bool]]:
    """Of a ring in which everybody hears the next on either side; the second component is the first one's mirror image."""
    tilde = torch.tensor(values, dtype=torch.float64)[:, None, None] * torch.tensor([[1.0], [-1.0]])
    took = torch.ones(len(values), dtype=torch.bool) if part is None else torch.tensor(part)
    rows = torch.tensor([1] * len(values) if n is None else n)
    found, known = own_centres(tilde, tilde, rows, took, ring(len(values), 1), lam, **how)
    torch.testing.assert_close(found[:, 1], -found[:, 0], rtol=0, atol=1e-8)  # steps end below 1e-10
    return found[:, 0, 0].tolist(), known.tolist()


def test_centres_of_a_ring_are_those_of_the_hand_calculation() -> None:
    # Within lam = 1 a client counts by its distance, beyond by 1. Of 1, 2 and 10: (1 - c) + (2 - c) + 1 = 0, c = 2.
    values = [0.0, 1.0, 2.0, 10.0, 1.0]
    found, known = centres_of(values, 1.0)
    assert found == pytest.approx([2 / 3, 1.0, 2.0, 2.0, 1.0], abs=1e-8)
    assert all(known)
    # Means, weighted by rows: of client 0, (3 * 0 + 1 * 1 + 2 * 1) / 6.
    found, _ = centres_of(values, math.inf, n=[3, 1, 1, 4, 2])
    assert found == pytest.approx([0.5, 0.6, 43 / 6, 44 / 7, 42 / 9], abs=1e-12)
    # One step of the paper's: 1, 2 and 10 are all farther than 1 from their mean 13 / 3, which each moves by a third of 1.
    found, _ = centres_of(values, 1.0, steps=1)
    assert found[2] == pytest.approx(13 / 3 - 1 / 3 - 1 / 3 + 1 / 3, abs=1e-12)


def test_who_has_no_part_counts_for_nobody_and_who_hears_nobody_has_no_centre() -> None:
    values = [0.0, 1.0, 2.0, 10.0, 1.0]
    found, known = centres_of(values, 1.0, part=[True, True, True, False, True])
    assert found == pytest.approx([2 / 3, 1.0, 1.5, 1.5, 0.5], abs=1e-8)  # client 3 has its neighbours' centre
    assert all(known)
    found, known = centres_of(values, 1.0, part=[True, False, False, False, False])
    assert known == [True, True, False, False, True]
    assert found == [0.0] * 5


@pytest.mark.parametrize("how", [{}, {"steps": 2}, {"sparse": 3.0}, {"steps": 2, "sparse": 3.0}], ids=str)
def test_every_centre_is_the_central_update_of_the_neighbourhood(how: dict[str, Any]) -> None:
    steps, sparse = how.get("steps"), how.get("sparse", 0.0)
    draw = torch.Generator().manual_seed(0)
    tilde = 3 * torch.randn(8, 2, 3, generator=draw, dtype=torch.float64)
    n, part = torch.arange(5, 13), torch.arange(8) != 4
    near = ring(8, 2)
    found, _ = own_centres(tilde, tilde, n, part, near, 2.0, **how)
    for i in range(8):
        own = near[i][part[near[i]]]
        weight = central_weights(tilde[own], n[own], 2.0, tilde[own].median(0).values, steps, sparse)
        # Steps end below 1e-10 each, and the last of a slow geometric series are about a hundred more.
        torch.testing.assert_close(found[i], (weight * tilde[own]).sum(0), rtol=0, atol=1e-8)
    # All are neighbours: everyone has the centre of all, by the same steps from the same start.
    found, _ = own_centres(tilde, tilde, n, part, ring(8, 4), 2.0, **how)
    weight = central_weights(tilde[part], n[part], 2.0, tilde[part].median(0).values, steps, sparse)
    torch.testing.assert_close(found, (weight * tilde[part]).sum(0).expand(8, -1, -1), rtol=0, atol=1e-10)


def test_a_client_that_is_infinitely_far_does_not_blur_the_others_centres() -> None:
    draw = torch.Generator().manual_seed(1)
    tilde = torch.randn(9, 1, 2, generator=draw, dtype=torch.float64)
    n, part = torch.full((9,), 10), torch.ones(9, dtype=torch.bool)
    clean, _ = own_centres(tilde, tilde, n, part, ring(9, 1), 0.5)
    tilde[4:6] = 1e100
    found, _ = own_centres(tilde, tilde, n, part, ring(9, 1), 0.5)
    far = [0, 1, 2, 7, 8]
    torch.testing.assert_close(found[far], clean[far], rtol=0, atol=1e-8)


# -- rounds -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("m", "k"), [(8, 4), (9, 4), (9, 100)])
def test_if_all_are_neighbours_it_is_the_central_update(m: int, k: int) -> None:
    """The centre is computed with lam = 0.05 sqrt(2 + log M) / 0.9 = 0.1: of 20 rows within 0.02, and most are beyond.

    Steps towards a centre end below 1e-10, from another start at another place: rounds agree to about a hundred of them.
    """
    rows, family = ragged(blobs([20 + 3 * i for i in range(m)]), None), Gaussian(2, "full")
    n = torch.from_numpy(rows.layout.counts)
    options = {"family": family, "robust": 0.05, "rounds": 15, "c_lambda": 3.0}
    (one, _, here), (all_, _, there) = (run_one(program(**options, neighbours=j), rows) for j in (0, k))
    kept = there.worker.private[0]
    assert kept["told"].all()
    torch.testing.assert_close(kept["centre"], one.centre.expand(m, -1, -1), rtol=0, atol=1e-8)
    assert_same_state(one, all_, atol=1e-8)
    theta = [estimates(s, family, engine.worker.private[0], n) for s, engine in ((one, here), (all_, there))]
    torch.testing.assert_close(theta[1], theta[0], rtol=0, atol=1e-8)


def test_two_rounds_match_hand_calculation() -> None:
    """With common components, a client's next round begins at its own centre: the robust one of three clients."""
    rows, states = ragged(blobs([12, 20, 9, 15, 30]), None), list[State]()
    engine = InProcess(rows)
    options = {"c_lambda": math.inf, "share_weights": 0.0, "together": 0.0, "c_eta": 1.0, "neighbours": 1}
    engine.run([spying(program(**options, rounds=1), states)])
    one, kept = states[-1], {k: v.clone() for k, v in engine.worker.private[0].items()}
    lam = 2.0 * math.sqrt(2 + math.log(5)) / 0.9  # robust = 2, kappa = 0.1
    for i, own in enumerate([[4, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0]]):
        want = central_update(one.tilde[own], one.n[own], lam, one.tilde[own].median(0).values)
        torch.testing.assert_close(kept["centre"][i], want, rtol=0, atol=1e-8)
    torch.testing.assert_close(estimates(one, Gaussian(2), kept, one.n), kept["centre"])
    two = run_one(program(**options, rounds=2), rows)[0]
    for i in range(5):
        x, theta, weights = blobs([12, 20, 9, 15, 30])[i], kept["centre"][i], kept["weights"][i]
        joint = weights * torch.exp(-(x[:, None] - theta).square().sum(-1) / 2)
        gamma = joint / joint.sum(1, keepdim=True)  # [N, R]
        # A step of C_eta = 1 over the larger of the first weight and the present one.
        step = 1 / torch.maximum(kept["first_weights"][i], gamma.mean(0))
        moved = theta + step[:, None] * (gamma[..., None] * (x[:, None] - theta)).mean(0)
        torch.testing.assert_close(two.tilde[i], moved, rtol=0, atol=1e-8)
        away = ((moved - theta).norm(dim=-1) * gamma.mean(0)).sum()
        torch.testing.assert_close(two.away[i], away, rtol=0, atol=1e-8)


def test_a_ring_recovers_common_components_better_than_local_em() -> None:
    """Means of 10 rows miss by 0.4; of 5 clients' 50, which overlap, by about half of that."""
    rows = ragged(blobs([20] * 16, seed=7), None)
    n, options = torch.from_numpy(rows.layout.counts), {"rounds": 40, "c_lambda": 5.0}
    state, _, engine = run_one(
        partial(em, family=Gaussian(2), n_components=2, rounds=40, seed=0, start=FEW, sharing="local"), rows
    )
    alone = error(own_parameters(state, engine.worker.private[0], "local")[0])
    errors = []
    for k in (1, 2, 0):
        state, _, engine = run_one(program(**options, neighbours=k), rows)
        errors.append(error(estimates(state, Gaussian(2), engine.worker.private[0], n)))
    assert errors[0] < 0.8 * alone
    assert alone > errors[0] > errors[1] > errors[2]  # the more neighbours, the better


def test_a_bad_client_reaches_only_its_neighbours_in_a_round() -> None:
    """Nothing else is common here: unit covariance, proportions of one's own, and nobody is rejected."""
    good = blobs([20] * 11)
    bad = [*good[:5], good[5] + torch.tensor([40.0, 60.0]), *good[6:]]
    distance = torch.tensor([min(abs(i - 5), 11 - abs(i - 5)) for i in range(11)])
    for rounds in (1, 2):
        clean, spoiled = (
            run_one(program(rounds=rounds, share_weights=0.0, neighbours=2), ragged(xs, None))[2].worker.private[0]
            for xs in (good, bad)
        )
        apart = (clean["centre"] - spoiled["centre"]).flatten(1).norm(dim=1)
        assert (apart[distance > 2 * rounds] < 1e-8).all()  # what converges stops within 1e-10
        assert (apart[distance <= 2] > 1e-3).all()


def test_a_bad_client_harms_those_who_are_far_hardly() -> None:
    good = blobs([20] * 21)
    bad = [*good[:5], good[5] + torch.tensor([40.0, 60.0]), *good[6:]]
    n, theta = torch.full((21,), 20), []
    for xs in (good, bad):
        state, _, engine = run_one(program(rounds=60, share_weights=0.0, neighbours=1, c_lambda=3.0), ragged(xs, None))
        theta.append(estimates(state, Gaussian(2), engine.worker.private[0], n))
    apart = (theta[1] - theta[0]).norm(dim=-1).amax(1)  # [M]
    assert apart[5] > 10  # the bad one itself
    assert apart[[4, 6]].min() > 10 * apart[12:20].max()  # seven clients away and more
    assert apart[12:20].max() < 0.02


def test_who_goes_back_to_its_first_fit_is_drawn_to_its_own_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    """All go back in round 2, when the penalty is steady; a bad client five places away has no part in what they find."""
    good = blobs([20] * 11)
    bad = [*good[:5], good[5] + torch.tensor([40.0, 60.0]), *good[6:]]
    options = {"rounds": 2, "share_weights": 0.0, "together": 1e-3, "neighbours": 2}
    monkeypatch.setattr("coterie.algorithms.fedgrem._CLEARLY", -math.inf)
    clean, spoiled = (run_one(program(**options), ragged(xs, None))[0] for xs in (good, bad))
    assert (clean.centre - spoiled.centre).abs().max() > 1e-3  # that of everybody, which is not theirs
    torch.testing.assert_close(spoiled.tilde[[0, 1, 2, 8, 9, 10]], clean.tilde[[0, 1, 2, 8, 9, 10]], rtol=0, atol=1e-8)


# -- who is there -----------------------------------------------------------------------------------------------------
def test_centres_go_to_those_who_answered_and_others_keep_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, messages = ragged(blobs([20] * 10), None), overhear(monkeypatch)
    engine, kept = InProcess(rows, participation=Sampled(0.5), seed=2), list[Tensor]()
    engine.run([program(rounds=6, neighbours=2)], watch=lambda _: kept.append(_centres(engine)))
    asked = [answer.ids for ask, answer in messages if ask.step.__name__ == "gradient_em"]
    told = [ask.to for ask, _ in messages if ask.step.__name__ == "take_centre"]
    assert len(asked) == len(told) == 6
    for round_, (ids, to) in enumerate(zip(asked, told, strict=True), 1):
        assert len(ids) == 5
        assert torch.equal(ids, to)
        if round_ > 1:
            moved = (kept[round_] != kept[round_ - 1]).flatten(1).any(1).nonzero()[:, 0]
            assert torch.equal(moved, ids)


def _centres(engine: InProcess) -> Tensor:
    found = engine.worker.private[0].get("centre")
    return torch.zeros(10, 2, 2) if found is None else found.clone()


def test_the_ring_is_of_those_who_have_been_heard() -> None:
    """Clients 1 and 3 never answer, so that 0, 2, 4 and 5 are next to each other."""
    rows = ragged(blobs([20] * 6), None)
    state, _, engine = run_one(program(neighbours=1, c_lambda=math.inf), rows, participation=Only([0, 2, 4, 5]))
    kept = engine.worker.private[0]
    assert kept["told"].tolist() == [True, False, True, False, True, True]
    lam = 2.0 * math.sqrt(2 + math.log(4)) / 0.9
    for i, own in ((0, [5, 0, 2]), (2, [0, 2, 4]), (4, [2, 4, 5]), (5, [4, 5, 0])):
        want = central_update(state.tilde[own], state.n[own], lam, state.tilde[own].median(0).values)
        torch.testing.assert_close(kept["centre"][i], want, rtol=0, atol=1e-8)
    theta = estimates(state, Gaussian(2), kept, torch.full((6,), 20))
    torch.testing.assert_close(theta[[1, 3]], state.centre.expand(2, -1, -1))  # who was never there: everybody's


def test_half_of_the_clients_in_a_round_recover_as_well_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    rows, how = ragged(blobs([20] * 16, seed=7), None), {"participation": Sampled(0.5), "seed": 1}
    state, _, engine = run_one(program(rounds=80, c_lambda=5.0, neighbours=2), rows, **how)
    theta = estimates(state, Gaussian(2), engine.worker.private[0], state.n)
    assert error(theta) < 0.3
    with pytest.raises(KilledError):
        InProcess(rows, **how).run(
            [program(rounds=80, c_lambda=5.0, neighbours=2)], checkpoint=tmp_path / "c", watch=interrupt_after(7)
        )
    again = InProcess(rows, **how)
    done = again.run([program(rounds=80, c_lambda=5.0, neighbours=2)], checkpoint=tmp_path / "c", state_type=State)
    assert_same_state(done.states[0], state)
    assert torch.equal(again.worker.private[0]["centre"], engine.worker.private[0]["centre"])


def test_rings_of_different_sizes_advance_in_lockstep() -> None:
    rows = ragged(blobs([20, 25, 30, 20, 25, 30, 20]), None)
    engine = InProcess(rows)
    together = engine.run([program(neighbours=k) for k in (0, 1, 2)])
    assert not torch.equal(engine.worker.private[1]["centre"], engine.worker.private[2]["centre"])
    assert "centre" not in engine.worker.private[0]
    for run, k in enumerate((0, 1, 2)):
        state, _, alone = run_one(program(neighbours=k), rows)
        assert_same_state(together.states[run], state, atol=1e-10)
        for name, value in alone.worker.private[0].items():
            torch.testing.assert_close(engine.worker.private[run][name], value, rtol=0, atol=1e-10)


# -- for users --------------------------------------------------------------------------------------------------------
def test_a_fit_has_each_clients_own_centre() -> None:
    rows: Ragged = ragged(blobs([20] * 8), None)
    fit = fit_mixture(rows, Gaussian(2), 2, c_lambda=math.inf, rounds=10, tol=0.0, start=FEW, neighbours=1)
    assert (fit.freedom == 0).all()  # at their centres, which are not the same
    assert (fit.theta - fit.centre).abs().amax((1, 2)).min() > 1e-3


def test_the_estimator_knows_neighbours_and_refuses_what_makes_no_sense() -> None:
    x, groups = torch.cat(blobs([12] * 6)).numpy(), [i // 12 for i in range(72)]
    options: dict[str, Any] = {"rounds": 4, "tol": 0.0, "restarts": 2, "iterations": 4, "covariance": "unit"}
    fits = [FederatedMixture(2, c_lambda=2.0, neighbours=k, **options).fit(x, groups=groups).means_ for k in (0, 1, 3)]
    assert abs(fits[1] - fits[0]).max() > 1e-3
    assert fits[2] == pytest.approx(fits[0], abs=1e-8)  # everybody is a neighbour
    with pytest.raises(ConfigError, match="neighbours"):
        FederatedMixture(2, neighbours=-1).fit(x, groups=groups)
    with pytest.raises(ConfigError, match=r"mixture\.neighbours is set, and with mixture\.c_lambda=0"):
        FederatedMixture(2, c_lambda=0.0, neighbours=1).fit(x, groups=groups)
