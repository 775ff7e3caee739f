# SPDX-License-Identifier: Apache-2.0
"""Where clustered models begin: what each kind of start promises."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from coterie import keys
from coterie.algorithms.starts import Start, another_model, attract, first_models, fit_alone, potential, serve
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.local import Training
from coterie.models import Model, linear_regression
from coterie.protocol import Ask, Stack
from helpers import COUNTS, LINE, NET, TRUTHS, Federation, Late, federation, one_block


def begin(
    start: Start, rows: Ragged, *, n_clusters: int = 2, model: Model = LINE, seed: int = 0, **engine: Any
) -> tuple[Tensor, list[str]]:
    """Run the start alone."""
    made = InProcess(rows, **engine)
    theta, events = made.run([lambda _: first_models(model, n_clusters, start, seed)]).states[0]
    return theta, events


def losses(theta: Tensor, data: Federation) -> np.ndarray:
    """[M, J] each client's mean squared error under each linear model; 0 without rows."""
    out = np.zeros((len(data.xs), len(theta)))
    for i, (x, y) in enumerate(zip(data.xs, data.ys, strict=True)):
        for j, t in enumerate(theta.numpy()):
            if len(x):
                out[i, j] = np.mean((x.numpy() @ t[:3] + t[3] - y.numpy()) ** 2)
    return out


def local_fits(data: Federation, l2: float = 1e-3) -> list[np.ndarray | None]:
    """Every client's ridge regression by scikit-learn."""
    fits = []
    for x, y in zip(data.xs, data.ys, strict=True):
        fit = Ridge(alpha=len(x) * l2).fit(x.numpy(), y.numpy()) if len(x) else None
        fits.append(None if fit is None else np.array([*fit.coef_, fit.intercept_]))
    return fits


# -- given and random -------------------------------------------------------------------------------------------------
def test_a_warm_start_is_what_was_given() -> None:
    given = torch.randn(2, LINE.n_parameters)
    theta, events = begin(Start("warm", theta=given), federation().rows)
    assert torch.equal(theta, given.double())
    assert events == []


@pytest.mark.parametrize("given", [None, torch.zeros(3, 4), torch.zeros(2, 5)])
def test_a_warm_start_of_the_wrong_shape_is_refused(given: Tensor | None) -> None:
    with pytest.raises(ConfigError, match=r"\(2, 4\)"):
        begin(Start("warm", theta=given), federation().rows)


def test_a_random_start_is_seeded() -> None:
    rows = federation().rows
    one, same, other = (begin(Start("random"), rows, seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


# -- balanced ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n_clusters", "share"), [(2, 0.35), (4, 0.10)])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_balanced_start_gives_every_cluster_the_minimum_share(n_clusters: int, share: float, seed: int) -> None:
    # All clients follow one model, so random models seldom share them evenly: it takes several questions of 8 draws.
    data = federation((6, 0) * 20, noise=0.3)
    theta, events = begin(Start("balanced"), data.rows, n_clusters=n_clusters, seed=seed)
    label = losses(theta, data).argmin(1)[[len(x) > 0 for x in data.xs]]  # who has no rows does not count
    assert events == []
    assert np.bincount(label, minlength=n_clusters).min() / len(label) >= share


def test_a_balanced_start_that_does_not_exist_is_told() -> None:
    alone = federation((5,))
    theta, events = begin(Start("balanced"), alone.rows)
    assert theta.shape == (2, 4)
    assert events == ["no balanced start among 200; the best leaves 0% of the clients to a cluster"]


def test_counting_whom_candidates_attract() -> None:
    data = federation()
    candidates = torch.randn(6, 4, dtype=torch.float64)  # three draws of two
    block = one_block(data.rows)
    reply, _ = attract({"model": LINE, "theta": candidates[None], "n_clusters": 2}, {}, {}, block)
    by_hand = losses(candidates, data)
    for c, i in enumerate(block.ids.tolist()):
        for draw in range(3):
            want = [0, 0]
            if COUNTS[i]:
                want[int(by_hand[i, 2 * draw : 2 * draw + 2].argmin())] = 1
            assert reply["count"][0, c, draw].tolist() == want


# -- spread -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(8))
def test_a_spread_start_takes_local_fits_from_both_clusters(seed: int) -> None:
    data = federation((12, 15, 20, 12, 9, 30, 12, 12))
    theta, _ = begin(Start("spread"), data.rows, seed=seed)
    assert {nearest(t, data) % 2 for t in theta} == {0, 1}  # clients alternate between two planted models


def nearest(theta: Tensor, data: Federation) -> int:
    """Whose local fit this is."""
    fits = [fit if fit is not None else np.full(4, np.inf) for fit in local_fits(data)]
    found = min(range(len(fits)), key=lambda i: np.abs(fits[i] - theta.numpy()).max())
    np.testing.assert_allclose(theta.numpy(), fits[found], rtol=1e-5, atol=1e-6)
    return found


def test_the_candidate_that_lowers_everybodys_loss_most_is_taken() -> None:
    data = federation()
    have = TRUTHS.new_tensor([[1.0, -2.0, 0.5, 0.3]])  # the first planted model is there already
    everyone = Start(candidates=100)
    made = InProcess(data.rows)
    found = made.run([lambda _: another_model(LINE, have, everyone, keys.key(0))]).states[0]
    fits, n = local_fits(data), np.array(COUNTS)
    now = losses(have, data)[:, 0]
    totals = {
        i: float((np.minimum(now, losses(torch.tensor(fit)[None], data)[:, 0]) * n).sum())
        for i, fit in enumerate(fits)
        if fit is not None
    }
    best = min(totals, key=lambda i: totals[i])
    np.testing.assert_allclose(found.numpy(), fits[best], rtol=1e-5, atol=1e-6)


def test_candidates_are_drawn_where_the_loss_is() -> None:
    data = federation((6,) * 20, noise=0.0)
    have = torch.cat([TRUTHS, torch.full((2, 1), 0.3, dtype=torch.float64)], 1)[:1]  # serves the even clients perfectly
    one = Start(candidates=1)
    for seed in range(10):
        made = InProcess(data.rows)
        found = made.run([lambda _, s=seed: another_model(LINE, have, one, keys.key(s))]).states[0]
        assert nearest(found, data) % 2 == 1


def test_clients_without_rows_are_never_candidates() -> None:
    data = federation((0, 0, 0, 8, 0, 0))
    for seed in range(5):
        theta, _ = begin(Start("spread"), data.rows, n_clusters=3, seed=seed)
        assert theta.isfinite().all()
        assert nearest(theta[0], data) == 3


def test_how_badly_clients_are_served() -> None:
    data = federation()
    block = one_block(data.rows)
    n = block.n.double()
    theta = torch.randn(2, 3, 4, dtype=torch.float64)  # two runs, three models
    reply, _ = serve({"model": LINE, "theta": theta}, {}, {}, block)
    for s in range(2):
        want = torch.from_numpy(losses(theta[s], data).min(1))[block.ids] * n
        torch.testing.assert_close(reply["loss"][s], want)
    nothing, _ = serve({"model": LINE, "theta": theta[:, :0]}, {}, {}, block)
    torch.testing.assert_close(nothing["loss"], n.expand(2, -1))  # without a model, by rows


def test_what_candidates_would_leave() -> None:
    data = federation()
    block = one_block(data.rows)
    theta, found = torch.randn(1, 2, 4, dtype=torch.float64), torch.randn(1, 3, 4, dtype=torch.float64)
    for have in (theta, theta[:, :0]):
        reply, _ = potential({"model": LINE, "theta": have, "found": found}, {}, {}, block)
        for j in range(3):
            models = torch.cat([have[0], found[0, j : j + 1]])
            want = torch.from_numpy(losses(models, data).min(1))[block.ids] * block.n
            torch.testing.assert_close(reply["loss"][0, :, j], want)


def test_networks_fit_alone_by_gradient_descent() -> None:
    data = federation((6, 4))
    block = one_block(data.rows)
    base = NET.initial(1, torch.Generator().manual_seed(0))
    how = Training(steps=5, momentum=0.5)
    shared = {"model": NET, "base": base, "training": how, "key": keys.key(0)[None]}
    shared["step_size"] = torch.tensor([0.05], dtype=torch.float64)
    reply, _ = fit_alone(shared, {}, {}, block)
    descent = NET.descent(base.expand(2, -1), momentum=0.5)
    for _ in range(5):
        descent.step(block.x, block.target, block.weights, 0.05)
    torch.testing.assert_close(reply["theta"][0], descent.result())


def test_a_spread_start_of_networks_separates_planted_clients() -> None:
    data = federation((20,) * 8)
    start = Start("spread", fit=Training(steps=150), step_size=0.05)
    theta, _ = begin(start, data.rows, model=NET, seed=1)
    got = InProcess(data.rows).ask(Ask(serve_each, {"model": NET, "theta": theta}, {"loss": Stack()}))
    label = got["loss"].argmin(1).tolist()
    assert label in ([0, 1] * 4, [1, 0] * 4)


def serve_each(shared: dict[str, Any], each: Any, private: Any, data: Any, /) -> tuple[dict[str, Tensor], Any]:
    from coterie.local import client_losses, outputs

    theta = shared["theta"]
    return {"loss": client_losses(shared["model"], outputs(shared["model"], theta, data), data).transpose(1, 2)}, {}


# -- when things go wrong ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["random", "balanced", "spread"])
def test_a_start_survives_that_nobody_answers(kind: Any) -> None:
    rows = federation().rows
    theta, events = begin(Start(kind), rows, participation=Late(silent=(0,)))
    assert theta.shape == (2, 4)
    assert theta.isfinite().all()
    assert not torch.equal(theta[0], theta[1])
    assert events == (["nobody answered: the start is random"] if kind == "balanced" else [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_a_further_model_is_found_beside_models_that_diverged(bad: float) -> None:
    data = federation()
    have = torch.full((2, 4), bad, dtype=torch.float64)
    made = InProcess(data.rows)
    found = made.run([lambda _: another_model(LINE, have, Start(), keys.key(0))]).states[0]
    assert nearest(found, data) in range(10)


def test_a_client_is_served_by_the_models_that_did_not_diverge() -> None:
    data = federation()
    sound = torch.zeros(1, 4, dtype=torch.float64)
    both = torch.cat([torch.full((1, 4), float("nan"), dtype=torch.float64), sound])
    block = next(data.rows.blocks())
    alone, beside = (serve({"model": LINE, "theta": theta[None]}, {}, {}, block)[0]["loss"] for theta in (sound, both))
    assert torch.equal(alone, beside)
    joined = potential({"model": LINE, "theta": sound[None], "found": both[None]}, {}, {}, block)[0]["loss"]
    assert torch.equal(joined[..., 0], joined[..., 1])  # one that diverged helps as much as one that is there already
    counted = attract({"model": LINE, "theta": both[None], "n_clusters": 2}, {}, {}, block)[0]["count"]
    assert counted.sum((0, 1, 2)).tolist() == [0, int((block.n > 0).sum())]


def test_more_clusters_than_clients_still_start() -> None:
    theta, _ = begin(Start("spread"), federation((5, 6)).rows, n_clusters=4)
    assert theta.shape == (4, 4)
    assert theta.isfinite().all()


def test_starts_are_seeded_and_seeds_differ() -> None:
    rows = federation().rows
    for kind in ("random", "balanced", "spread"):
        one, same, other = (begin(Start(kind, candidates=1), rows, seed=s)[0] for s in (0, 0, 1))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_one_cluster_needs_no_questions() -> None:
    made = InProcess(federation().rows)
    finished = made.run([lambda _: first_models(linear_regression(3), 1, Start("spread"), 0)])
    assert finished.states[0][0].shape == (1, 4)
    assert finished.rounds == []
