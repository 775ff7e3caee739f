# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from coterie.algorithms.linear_by_fold import NOISE_ROWS, Problem
from coterie.algorithms.newton_fedprox import newton_fedprox
from coterie.algorithms.newton_ifca import ByLabel, Clusters, judge_clusters_ask, newton_ifca, nobody_yet
from coterie.algorithms.noise_model import judge_noise_ask, noise_model
from coterie.algorithms.random_effects import OWN, Prior, judge_effects_ask, low_rank, random_effects, ridge_prior
from coterie.algorithms.row_mixture import Mixed, by_size, judge_mixed_ask, row_mixture
from coterie.algorithms.score_sums import COLUMNS
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.evaluate import match_labels
from coterie.methods.linear.structures import Effort, common_model, mixture, priors_for, representation, shrunk
from coterie.protocol import Ask
from coterie.studies.data.planted import planted_structure

V = 2
F = V + 1


def answered(rows: Ragged, problem: Problem, program: Callable[[], Any]) -> tuple[Any, InProcess]:
    """Run a generator; what it returned, and the engine."""
    engine = InProcess(rows)
    return engine.run([lambda state: program()]).states[0], engine


def fit_global(problem: Problem, penalties: tuple[float, ...], rounds: int) -> Any:
    start = nobody_yet(problem, len(penalties))
    return newton_ifca(None, start=start, problem=problem, n_clusters=1, penalties=penalties, rounds=rounds)


def grown(fit: Clusters, problem: Problem, penalty: float, **how: Any) -> Any:
    """One cluster more."""
    return newton_ifca(
        None, start=fit, problem=problem, n_clusters=fit.theta.shape[2] + 1, penalties=(penalty,), seed=0, **how
    )


def kept(engine: InProcess, column: str, tag: str = "x") -> Tensor:
    """What clients keep of how they are served.  [M, F, J]"""
    return engine.worker.private[0][f"{tag} scores"][..., COLUMNS.index(column)]


def asking(ask: Ask) -> Callable[[], Any]:
    def program() -> Any:
        return (yield ask)

    return program


def planted(truth: Any, size: int = 1, *, seed: int = 0, n_clients: int = 12, rows: int = 20, **more: Any) -> Ragged:
    made = planted_structure(truth, size, n_clients=n_clients, rows=rows, n_features=3, noise=0.3, seed=seed, **more)
    return made.with_folds(V, seed=0)


def problem_of(n_classes: int = 0, held: tuple[int, ...] = tuple(range(F))) -> Problem:
    return Problem(3, n_classes, V, held)


def training_rows(rows: Ragged, client: int, held: int) -> tuple[np.ndarray, np.ndarray]:
    """Features with an intercept, and targets, of the rows that are not held out."""
    block = rows.client(client)
    x, y = block.x[0].numpy(), block.target[0].numpy()
    keep = (block.folds[0].numpy() != held) & (block.folds[0].numpy() != V)
    return np.column_stack([x[keep], np.ones(keep.sum())]), y[keep]


def in_classes(rows: Ragged) -> Ragged:
    assert isinstance(rows.y, Tensor)
    return replace(rows, y=(rows.y > 0).long())


# -- one model for all ------------------------------------------------------------------------------------------------
def test_one_model_for_all_is_weighted_least_squares() -> None:
    rows, problem = planted("shrunk"), problem_of()
    fit, _ = answered(rows, problem, lambda: fit_global(problem, (0.01,), 100))
    for f in range(F):
        data = [training_rows(rows, i, f) for i in range(12)]
        theta, common = np.zeros(4), 1.0
        for _ in range(100):  # a client's weight is one over its noise, which is drawn to the common one
            squares = [((y - x @ theta) ** 2).sum() for x, y in data]
            noise = [(NOISE_ROWS * common + s) / (NOISE_ROWS + len(y)) for s, (_, y) in zip(squares, data, strict=True)]
            common = 1 / np.mean([1 / v for v in noise])
            a = sum(x.T @ x / v for v, (x, _) in zip(noise, data, strict=True))
            b = sum(x.T @ y / v for v, (x, y) in zip(noise, data, strict=True))
            mass = sum(len(y) / v for v, (_, y) in zip(noise, data, strict=True))
            theta = np.linalg.solve(a + 0.01 * mass * np.diag([1, 1, 1, 0]), b)
        np.testing.assert_allclose(fit.theta[f, 0, 0].numpy(), theta, atol=1e-3)  # rounds end when moves are small


def test_one_classifier_for_all_is_logistic_regression() -> None:
    rows, problem = in_classes(planted("shrunk")), problem_of(2)
    fit, _ = answered(rows, problem, lambda: fit_global(problem, (0.01,), 50))
    data = [training_rows(rows, i, 0) for i in range(12)]
    x, y = np.concatenate([d[0] for d in data]), np.concatenate([d[1] for d in data])
    other = LogisticRegression(C=1 / (0.01 * len(y)), tol=1e-10, max_iter=1000).fit(x[:, :-1], y)
    np.testing.assert_allclose(fit.theta[0, 0, 0].numpy(), np.append(other.coef_[0], other.intercept_[0]), atol=1e-4)


# -- clusters ---------------------------------------------------------------------------------------------------------
def test_sums_by_label_are_those_of_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    value = torch.randn(1, 5, 2, 3, 4, generator=draw, dtype=torch.float64)  # [1, C, F, J, P]
    share = torch.rand(1, 5, 2, 3, 2, generator=draw, dtype=torch.float64)
    summed = ByLabel("share").part(value, {"share": share})["sum"]
    common = ByLabel("share").part(value[:, :, :, :1], {"share": share})["sum"]
    for f in range(2):
        for j in range(3):
            for k in range(2):
                by_hand = sum(float(share[0, c, f, j, k]) * value[0, c, f, j] for c in range(5))
                torch.testing.assert_close(summed[0, f, j, k], by_hand)
                by_hand = sum(float(share[0, c, f, j, k]) * value[0, c, f, 0] for c in range(5))
                torch.testing.assert_close(common[0, f, j, k], by_hand)


def test_growing_finds_planted_groups_in_every_fold() -> None:
    rows, problem = planted("clusters", 3), problem_of()

    def program() -> Any:
        found = yield from common_model(problem, Effort(rounds=5))
        yield from shrunk(problem, Effort(rounds=5), found.fits[0])
        fit = found.fits[0]
        for _ in range(2):
            fit = yield from grown(fit, problem, 1e-3, starts=3, rounds=10)
        return (yield judge_clusters_ask(fit, problem, "x"))

    got, engine = answered(rows, problem, program)
    for f in range(F):
        assert match_labels(kept(engine, "label")[:, f, 0], torch.arange(12) % 3) == 1.0
    assert sorted(got["sizes"][0].tolist()) == [4, 4, 4]


def test_clusters_of_classifiers_separate_groups() -> None:
    rows, problem = in_classes(planted("clusters", 2, rows=40)), problem_of(2)

    def program() -> Any:
        found = yield from common_model(problem, Effort(rounds=5))
        yield from shrunk(problem, Effort(rounds=5), found.fits[0])
        fit = yield from grown(found.fits[0], problem, 1e-2, starts=3, rounds=10)
        return (yield judge_clusters_ask(fit, problem, "x"))

    _, engine = answered(rows, problem, program)
    assert match_labels(kept(engine, "label")[:, -1, 0], torch.arange(12) % 2) == 1.0


def test_growing_from_drawn_models_finds_planted_groups_in_every_fold() -> None:
    rows, problem = planted("clusters", 3, n_clients=18), problem_of()

    def program() -> Any:
        found = yield from common_model(problem, Effort(rounds=5))
        own = yield from shrunk(problem, Effort(rounds=5), found.fits[0])
        fit = found.fits[0]
        for _ in range(2):
            fit = yield from grown(fit, problem, 1e-3, starts=3, rounds=10, drawn=own.fits[-1])
        return (yield judge_clusters_ask(fit, problem, "x"))

    _, engine = answered(rows, problem, program)
    for f in range(F):
        assert match_labels(kept(engine, "label")[:, f, 0], torch.arange(18) % 3) == 1.0


def test_clients_are_judged_with_the_model_that_serves_their_training_rows_best() -> None:
    rows, problem = planted("clusters", 2), problem_of()
    theta = torch.randn(F, 1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones(F, 1, dtype=torch.float64)
    got, engine = answered(rows, problem, asking(judge_clusters_ask(Clusters(theta, one, one, theta), problem, "x")))
    torch.testing.assert_close(got["loss"], kept(engine, "loss").sum(0))
    torch.testing.assert_close(got["rows"], kept(engine, "rows").sum(0))
    for client in range(12):
        x, y = training_rows(rows, client, 1)
        losses = [((y - x @ theta[1, 0, k].numpy()) ** 2).sum() for k in range(3)]
        assert int(kept(engine, "label")[client, 1, 0]) == int(np.argmin(losses))
        block = rows.client(client)
        held = block.folds[0] == 1
        design = torch.cat([block.x[0][held], torch.ones(int(held.sum()), 1, dtype=torch.float64)], 1)
        residual = block.target[0][held] - design @ theta[1, 0, int(np.argmin(losses))]
        torch.testing.assert_close(kept(engine, "metric")[client, 1, 0], residual.square().sum())


def test_an_empty_cluster_keeps_its_model() -> None:
    rows, problem = planted("global"), problem_of()
    start = torch.zeros(F, 1, 2, 4, dtype=torch.float64)
    start[:, :, 1] = 100.0
    fit, _ = answered(
        rows,
        problem,
        lambda: newton_ifca(
            None,
            start=replace(nobody_yet(problem, 1), theta=start),
            problem=problem,
            n_clusters=2,
            penalties=(1e-3,),
            rounds=5,
        ),
    )
    torch.testing.assert_close(fit.theta[:, 0, 1], start[:, 0, 1])
    assert bool((fit.theta[:, 0, 0] != 0).all())


# -- models around a common one ---------------------------------------------------------------------------------------
def a_prior(n_columns: int = 4) -> Prior:
    draw = torch.Generator().manual_seed(3)
    root = torch.randn(F, 1, 4, n_columns, generator=draw, dtype=torch.float64)
    return Prior(torch.randn(F, 1, 4, generator=draw, dtype=torch.float64), root, torch.full((F, 1), 0.5).double())


def test_a_clients_model_is_ridge_regression_towards_the_mean() -> None:
    rows, problem, prior = planted("local"), problem_of(), a_prior(2)
    got, engine = answered(rows, problem, asking(judge_effects_ask(prior, problem, "x", keep=0)))
    told, _ = answered(rows, problem, asking(judge_effects_ask(prior, problem, "x", effects=True)))
    mean, root, df = prior.mean[1, 0].numpy(), prior.root[1, 0].numpy(), 0.0
    for client in range(12):
        x, y = training_rows(rows, client, 1)
        noise = 0.5
        for _ in range(3):
            hat = x @ root @ np.linalg.inv(root.T @ x.T @ x @ root + noise * np.eye(2)) @ root.T @ x.T
            precision = root.T @ x.T @ x @ root / noise + np.eye(2)
            v = np.linalg.solve(precision, root.T @ x.T @ (y - x @ mean) / noise)
            unsure = np.trace(root.T @ x.T @ x @ root @ np.linalg.inv(precision))
            squares = ((y - x @ (mean + root @ v)) ** 2).sum() + unsure
            noise = (NOISE_ROWS * 0.5 + squares) / (NOISE_ROWS + len(y))
        np.testing.assert_allclose(told["effects"][client, 1, 0].numpy(), v)
        np.testing.assert_allclose(engine.worker.private[0][OWN][client, 1].numpy(), mean + root @ v)
        df += np.trace(hat)
    np.testing.assert_allclose(got["df"][1, 0], df)  # effective parameters: a sum over clients


def test_a_clients_classifier_is_penalised_logistic_regression() -> None:
    rows, problem = in_classes(planted("local", rows=40)), problem_of(2)
    root = 2.0 * torch.eye(4, dtype=torch.float64).expand(F, 1, 4, 4)
    prior = Prior(torch.zeros(F, 1, 4, dtype=torch.float64), root, torch.ones(F, 1, dtype=torch.float64))
    _, engine = answered(rows, problem, asking(judge_effects_ask(prior, problem, "x", keep=0)))
    for client in range(3):
        x, y = training_rows(rows, client, 0)
        other = LogisticRegression(C=4.0, fit_intercept=False, tol=1e-10, max_iter=1000).fit(x, y)
        np.testing.assert_allclose(engine.worker.private[0][OWN][client, 0].numpy(), other.coef_[0], atol=1e-4)


def test_local_models_do_not_hear_of_other_clients() -> None:
    rows, problem = planted("local"), problem_of()
    prior = ridge_prior(problem, (3.0,), F, torch.full((F,), 0.2, dtype=torch.float64))
    _, all_of_them = answered(rows, problem, asking(judge_effects_ask(prior, problem, "x", keep=0)))
    _, some = answered(rows.only(np.arange(4)), problem, asking(judge_effects_ask(prior, problem, "x", keep=0)))
    torch.testing.assert_close(all_of_them.worker.private[0][OWN][:4], some.worker.private[0][OWN])


def test_em_finds_how_much_clients_differ() -> None:
    made = planted_structure("global", n_clients=400, rows=10, n_features=3, noise=0.3, seed=0)
    draw = torch.Generator().manual_seed(0)
    shift = torch.randn(400, 1, generator=draw, dtype=torch.float64)
    assert isinstance(made.y, Tensor)
    moved = Ragged(made.layout, made.x, (made.y.view(400, 10) + 0.5 * shift).flatten())
    rows, problem = moved.with_folds(V, seed=0), problem_of()
    start = Prior(
        torch.zeros(F, 2, 4, dtype=torch.float64), 0.3 * torch.eye(4, dtype=torch.float64).expand(F, 2, 4, 4),
        torch.ones(F, 2, dtype=torch.float64),
    )  # fmt: skip
    found, _ = answered(
        rows,
        problem,
        lambda: random_effects(None, start=start, problem=problem, kinds=("intercept", "full"), rounds=20, tag="x"),
    )
    for j in (0, 1):
        spread = (found.root[-1, j] @ found.root[-1, j].T).numpy()
        # a variance of 0.25 from 400 clients has a standard error of 0.018; a common noise that clients' own ones are
        # drawn to is a tenth too small if these are in truth all alike
        np.testing.assert_allclose(spread[3, 3], 0.25, atol=0.06)
        np.testing.assert_allclose(float(found.noise[-1, j]), 0.09, atol=0.015)
        assert abs(spread[:3, :3]).max() < 0.01


def test_a_low_rank_keeps_the_directions_that_predictions_show() -> None:
    root = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)).expand(1, 1, 3, 3)
    prior = Prior(torch.zeros(1, 1, 3, dtype=torch.float64), root, torch.ones(1, 1, dtype=torch.float64))
    kept = low_rank(prior, torch.eye(3, dtype=torch.float64)[None], (1, 2))
    spreads = kept.root[0] @ kept.root[0].transpose(-2, -1)
    torch.testing.assert_close(spreads[0].diagonal(), torch.tensor([9.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(spreads[1].diagonal(), torch.tensor([9.0, 4.0, 0.0], dtype=torch.float64))
    seen = torch.diag(torch.tensor([0.01, 1.0, 100.0], dtype=torch.float64))[None]  # the third feature is wide
    spread = low_rank(prior, seen, (1,)).root[0, 0]
    torch.testing.assert_close((spread @ spread.T).diagonal(), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))


def test_one_setting_alone_is_fitted_as_in_the_comparison() -> None:
    rows = planted("shrunk")
    problem, alone = problem_of(), problem_of(held=(V,))
    effort = Effort(rounds=10)

    def program() -> Any:
        found = yield from common_model(problem, effort)
        base = found.fits[2]
        own = yield from shrunk(problem, effort, base)
        return own, (yield from representation(problem, effort, base, own.fits[-1], 2))

    (own, low), _ = answered(rows, problem, program)
    for structure, setting, fit in (
        ("shrunk", {"prior": "diagonal"}, own.fits[2]),
        ("shrunk", {"prior": "full"}, own.fits[3]),
        ("representation", {"rank": 2}, low.fits[1]),
    ):
        state = InProcess(rows).run([lambda _, s=structure, t=setting: priors_for(s, (t,), alone, effort)]).states[0]
        torch.testing.assert_close(state.mean[0], fit.mean[-1], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            state.root[0] @ state.root[0].transpose(-2, -1), fit.root[-1] @ fit.root[-1].transpose(-2, -1),
            atol=1e-6, rtol=1e-6,
        )  # fmt: skip


# -- mixtures within clients ------------------------------------------------------------------------------------------
def one_model(rows: Ragged, problem: Problem) -> Clusters:
    fit: Clusters = answered(rows, problem, lambda: fit_global(problem, (1e-3,), 10))[0]
    return fit


def mixtures(rows: Ragged, sizes: tuple[int, ...], rounds: int) -> Mixed:
    problem = problem_of()
    base = one_model(rows, problem)
    how = {
        "base": base.theta[:, 0, 0],
        "spread": base.noise[:, 0],
        "problem": problem,
        "sizes": sizes,
        "rounds": rounds,
    }

    def program() -> Any:
        return (yield from row_mixture(None, starts=4, seed=0, **how))

    fit: Mixed = answered(rows, problem, program)[0]
    return fit


def test_mixtures_of_several_sizes_do_not_disturb_each_other() -> None:
    rows = planted("mixture", 2, n_clients=30, rows=40, seed=1)
    for size, part in zip((2, 3), by_size(mixtures(rows, (2, 3), 6), (2, 3)), strict=True):
        alone = mixtures(rows, (size,), 6)
        for name in ("theta", "weights", "noise", "likelihood"):
            torch.testing.assert_close(getattr(part, name), getattr(alone, name), rtol=1e-9, atol=1e-9)


def test_mixtures_within_clients_are_found() -> None:
    fit = mixtures(planted("mixture", 2, n_clients=30, rows=40, seed=1), (2,), 30)
    draw = planted_structure("mixture", 2, n_clients=30, rows=40, n_features=3, noise=0.0, seed=1)
    assert isinstance(draw.x, Tensor)
    assert isinstance(draw.y, Tensor)
    outputs = draw.x @ fit.theta[-1, 0, :, :3].T + fit.theta[-1, 0, :, 3]
    error = (outputs - draw.y[:, None]).abs().min(1).values  # every row is near one of the components
    assert float(error.mean()) < 0.1
    assert float(fit.noise[-1, 0].max()) < 0.2  # 0.09 was planted


def test_mixtures_are_judged_with_proportions_and_noise_of_the_training_rows() -> None:
    rows, problem = planted("mixture", 2, n_clients=3), problem_of()
    draw = torch.Generator().manual_seed(0)
    theta = torch.randn(F, 1, 2, 4, generator=draw, dtype=torch.float64)
    half, one = torch.full((F, 1, 2), 0.5).double(), torch.ones(F, 1, 2, dtype=torch.float64)
    engine = InProcess(rows)
    engine.ask(judge_mixed_ask(Mixed(theta, half, one, one[..., 0]), problem, "x"))

    def density(x: np.ndarray, y: np.ndarray, noise: float) -> np.ndarray:
        squares = (y[:, None] - x @ theta[0, 0].numpy().T) ** 2
        return np.exp(-0.5 * squares / noise) / np.sqrt(2 * np.pi * noise)

    for client in range(3):
        x, y = training_rows(rows, client, 0)
        weights, noise = np.array([0.5, 0.5]), 1.0
        for _ in range(20):
            gamma = weights * density(x, y, noise)
            gamma /= gamma.sum(1, keepdims=True)
            weights = (gamma.sum(0) + 2.0 * 0.5) / (len(y) + 2.0)  # common proportions count as 2 rows
            squares = (gamma * (y[:, None] - x @ theta[0, 0].numpy().T) ** 2).sum()
            noise = (NOISE_ROWS * 1.0 + squares) / (NOISE_ROWS + len(y))
        block = rows.client(client)
        held = (block.folds[0] == 0).numpy()
        x = np.column_stack([block.x[0].numpy()[held], np.ones(held.sum())])
        y = block.target[0].numpy()[held]
        np.testing.assert_allclose(
            float(kept(engine, "loss")[client, 0, 0]), -np.log(density(x, y, noise) @ weights).sum()
        )
        error = ((x @ theta[0, 0].numpy().T @ weights - y) ** 2).sum()
        np.testing.assert_allclose(float(kept(engine, "metric")[client, 0, 0]), error)


def test_noise_that_is_wider_at_some_rows_is_no_mixture() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 40, 3, generator=draw, dtype=torch.float64)
    noise = torch.randn(30, 40, generator=draw, dtype=torch.float64) * (0.7 * x[..., 0]).exp() * 0.3
    rows = Ragged.from_blocks(x, x.sum(-1) + noise).with_folds(V, seed=0)
    problem = problem_of()
    base = one_model(rows, problem)

    def program() -> Any:
        shape = yield from noise_model(
            None, base=base.theta[:, 0, 0], spread=base.noise[:, 0], problem=problem, sizes=(2,), rounds=20
        )
        return shape, (yield judge_noise_ask(shape, problem))

    (shape, got), _ = answered(rows, problem, program)
    assert abs(float(shape.width[-1, 0]) - 1.4) < 0.25  # the logarithm of the variance grows by 2 * 0.7
    assert float(got["loss"][0]) / 600 < float(got["plain"][0]) / 600 - 0.1


# -- nobody trains on what judges -------------------------------------------------------------------------------------
def everything(rows: Ragged, problem: Problem) -> list[Tensor]:
    """What all structures are in every fit: the first axis of each tensor."""
    effort = Effort(rounds=4, mixture_rounds=4, steps=4, starts=2, max_components=2)

    def program() -> Any:
        common = yield from common_model(problem, effort)
        base = common.fits[2]
        own = yield from shrunk(problem, effort, base)
        low = yield from representation(problem, effort, base, own.fits[-1], 2)
        two = yield from grown(base, problem, 1e-3, starts=2, rounds=4)
        fits = [base.theta, low.fits[1].root, low.fits[1].mean, two.theta, own.fits[-1].root]
        if problem.is_regression:
            fits += [base.noise, two.noise]
            within = yield from mixture(problem, effort, base, 0)
            fits += [within.fits[0].mixed.theta, within.fits[0].noise.width, within.fits[0].noise.centre]
        return fits

    out: list[Tensor] = answered(rows, problem, program)[0]
    return out


def test_folds_do_not_train_on_what_they_judge() -> None:
    for n_classes in (0, 2):
        rows, problem = planted("clusters", 2, rows=16), problem_of(n_classes)
        if n_classes:
            rows = in_classes(rows)
        assert isinstance(rows.y, Tensor)
        assert isinstance(rows.x, Tensor)
        assert rows.fold is not None
        spoilt = replace(rows, y=torch.where(rows.fold == 1, 1 if n_classes else 9.0, rows.y))
        for left, right in zip(everything(rows, problem), everything(spoilt, problem), strict=True):
            torch.testing.assert_close(left[1], right[1])
            assert not torch.allclose(left[0], right[0])
            assert not torch.allclose(left[-1], right[-1])


# -- FedProx ----------------------------------------------------------------------------------------------------------
def test_fedprox_is_where_rounds_of_proximal_steps_and_means_end() -> None:
    rows, problem, strength = planted("shrunk"), problem_of(), 0.7

    def program() -> Any:
        base = yield from fit_global(problem, (1e-4,), 20)
        return (yield from newton_fedprox(None, start=base.theta, problem=problem, strengths=(3.0, strength)))

    fit, _ = answered(rows, problem, program)
    for held in range(F):
        each = [training_rows(rows, client, held) for client in range(rows.n_clients)]
        theta = np.zeros(4)
        for _ in range(300):
            moved = [
                theta + np.linalg.solve(x.T @ x / len(y) + strength * np.eye(4), x.T @ (y - x @ theta) / len(y))
                for x, y in each
            ]
            theta = np.average(moved, axis=0, weights=[len(y) for _, y in each])
        np.testing.assert_allclose(fit.theta[held, 1, 0], theta, atol=1e-8)


def test_fedprox_of_classes_is_left_as_it_is_by_a_round() -> None:
    rows, problem, strength = in_classes(planted("shrunk")), problem_of(2), 0.5

    def program() -> Any:
        base = yield from fit_global(problem, (1e-2,), 20)
        return (yield from newton_fedprox(None, start=base.theta, problem=problem, strengths=(strength,)))

    fit, _ = answered(rows, problem, program)
    theta = fit.theta[F - 1, 0, 0].numpy()
    moves, weights = [], []
    for client in range(rows.n_clients):
        x, y = training_rows(rows, client, F - 1)

        def loss(w: np.ndarray, x: np.ndarray = x, y: np.ndarray = y) -> float:
            odds = x @ w
            near = 0.5 * strength * float(np.square(w - theta).sum())
            return float(np.mean(np.logaddexp(0, odds) - y * odds)) + near

        moves.append(minimize(loss, theta, method="BFGS", options={"gtol": 1e-9}).x - theta)
        weights.append(len(y))
    spread = np.abs(moves).max()
    assert np.abs(np.average(moves, axis=0, weights=weights)).max() < 0.05 * spread  # they take one Newton step
