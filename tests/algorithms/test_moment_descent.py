# SPDX-License-Identifier: Apache-2.0
"""Moment descent against matrices written out, steps by hand, and what travels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor

from coterie.algorithms import moment_descent as md
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.copies import perturbed
from coterie.algorithms.moment_descent import Descent, State, moment_descent
from coterie.algorithms.moments import _leading, descend, multiply_moments
from coterie.local.row_space import features
from coterie.models import Dense, linear_regression
from coterie.protocol import Block
from helpers import Federation, one_block, overhear, ragged, run_one, spying

ESTIMATORS = ["pairs", "halves", "two"]
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
Float = np.ndarray


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- Y times Q, against the matrix ------------------------------------------------------------------------------------
COUNTS = (0, 1, 2, 3, 8, 9)
D, POINTS, COLUMNS = 4, 2, 3


def clients(counts: Sequence[int] = COUNTS, seed: int = 0) -> Block:
    xs = [normal(n, D, seed=100 * seed + i) for i, n in enumerate(counts)]
    ys = [x.sum(1) + 1 + normal(len(x), seed=100 * seed + 50 + i) for i, x in enumerate(xs)]
    return one_block(ragged(xs, ys))


def moment(estimator: str, left: Float, right: Float) -> tuple[Float, float]:
    """A client's estimate of E[e] E[e]^T, D x D, pair of rows by pair of rows, and its weight.  left, right [n, P]"""
    n = len(left)
    total = np.zeros((left.shape[1],) * 2)
    if n < 2:
        return total, 0.0
    for j in range(n):
        for l in range(n):  # noqa: E741
            if estimator == "pairs" and j != l:
                total += np.outer(left[j], right[l]) / (n * (n - 1))
            if estimator == "halves" and j < n // 2 <= l:
                total += np.outer(left[j], right[l]) / ((n // 2) * (n - n // 2))
            if estimator == "two" and (j, l) == (0, 1):
                total += np.outer(left[j], right[l])
    return total, 1.0 if estimator == "two" else float(n)


def directions(model: Dense, block: Block, c: int, theta: Tensor) -> Float:
    """e_j = (y_j - <x_j, theta>) x_j of one client's rows.  [n, P]"""
    x, y = features(model, block)[c, : block.n[c]], block.target[c, : block.n[c]]
    made: Float = ((y - x @ theta)[:, None] * x).numpy()
    return made


def products(
    model: Dense, block: Block, estimator: str, q: Tensor, transposed: bool, **models: Tensor
) -> tuple[Tensor, Tensor]:
    """What every client sends: its products [S, C, P, A, L] and its weight [C]."""
    shared = {"model": model, "q": q, "estimator": estimator, "transposed": transposed}
    each = {"copies": models["copies"]} if "copies" in models else {}
    reply, private = multiply_moments(
        shared | {name: value for name, value in models.items() if name == "theta"}, each, {}, block
    )
    assert private == {}
    return reply["product"].formed().unflatten(3, (q.shape[1], q.shape[3])), reply["weight"][0]


@each_estimator
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("perturbed", [False, True])
def test_products_are_those_of_the_matrix(estimator: str, intercept: bool, transposed: bool, perturbed: bool) -> None:
    model, block = linear_regression(D, intercept=intercept), clients()
    p = model.n_parameters
    theta, q = normal(2, POINTS, p, seed=1), normal(2, POINTS, p, COLUMNS, seed=2)  # two runs
    copies = normal(2, len(COUNTS), 2, POINTS, p, seed=3)  # one of them left, the other right
    got, weight = products(
        model, block, estimator, q, transposed, **{"copies": copies} if perturbed else {"theta": theta}
    )
    for c, n in enumerate(block.n.tolist()):
        for s in range(2):
            for a in range(POINTS):
                left, right = copies[s, c, :, a] if perturbed else (theta[s, a], theta[s, a])
                y, w = moment(estimator, directions(model, block, c, left), directions(model, block, c, right))
                assert float(weight[c]) == w
                want = w * (y.T if transposed else y) @ q[s, a].numpy()
                np.testing.assert_allclose(got[s, c, :, a], want, rtol=1e-12, atol=1e-12)
        assert n > 1 or not got[:, c].any()  # no row and one row say nothing


@each_estimator
def test_padding_is_irrelevant(estimator: str) -> None:
    model, block = linear_regression(D), clients()
    theta, q = normal(1, POINTS, D + 1, seed=1), normal(1, POINTS, D + 1, COLUMNS, seed=2)
    together, weight = products(model, block, estimator, q, False, theta=theta)
    for c, n in enumerate(block.n.tolist()):
        part = block.clients(slice(c, c + 1))
        own = Block(part.ids, part.keys, part.x[:, :n], part.target[:, :n], part.n, None)
        alone, own_weight = products(model, own, estimator, q, False, theta=theta)
        torch.testing.assert_close(together[:, c], alone[:, 0], rtol=1e-12, atol=1e-12)
        assert weight[c] == own_weight[0]


def whole_matrix(model: Dense, data: Federation, estimator: str, theta: Tensor) -> Float:
    """The weighted mean of all clients' estimates.  [P, P]"""
    block = one_block(data.rows)
    each = [moment(estimator, *[directions(model, block, c, theta)] * 2) for c in range(len(block.n))]
    made: Float = sum(w * y for y, w in each) / sum(w for _, w in each)
    return made


def some_clients(n_clients: int = 12, width: int = D, seed: int = 5) -> Federation:
    xs = [normal(3 + i % 5, width, seed=seed + i) for i in range(n_clients)]
    truths = normal(2, width, seed=seed)
    ys = [x @ truths[i % 2] + 0.1 * normal(len(x), seed=seed + 99 + i) for i, x in enumerate(xs)]
    return Federation(xs, ys, [f"site-{i:03d}" for i in range(n_clients)])


@each_estimator
@pytest.mark.parametrize(
    "how", [Descent(subspace="orthogonal", exchanges=40), Descent(exchanges=8)], ids=["40", "range"]
)
def test_subspaces_of_the_federation_are_those_of_the_matrix(estimator: str, how: Descent) -> None:
    data, model = some_clients(width=12), linear_regression(12, intercept=False)
    points = normal(3, 12, seed=7)
    how = Descent(estimator=estimator, subspace=how.subspace, exchanges=how.exchanges, oversampling=10)  # type: ignore[arg-type]
    begun = replace(md._nothing(model, 2), local=points, basis=torch.zeros(3, 12, 2, dtype=torch.float64))
    found = run_one(lambda _: md._subspaces(begun, model, how, 0), data.rows)[0]
    for a in range(3):
        u, s, _ = np.linalg.svd(whole_matrix(model, data, estimator, points[a]))
        assert s[2] < 0.9 * s[1]  # a gap
        # Orthogonal iteration shrinks the rest by it 80 times; with as many columns as features all is exact.
        assert subspace_angles(found.basis[a].numpy(), u[:, :2]).max() < max(50 * (s[2] / s[1]) ** 80, 1e-7)
        np.testing.assert_allclose(found.values[a, :2], s[:2], rtol=1e-6)


def test_everybody_twice_has_the_same_matrix() -> None:
    data, model = some_clients(), linear_regression(D)
    twice = Federation(data.xs * 2, data.ys * 2, [*data.names, *(f"{name} again" for name in data.names)])
    q, points = normal(3, D + 1, 2, seed=1), normal(3, D + 1, seed=2)
    shared = {"model": model, "q": q, "estimator": "pairs", "transposed": False}
    for noise in (0.0, 1e-9):
        one, two = (
            run_one(lambda _: md._multiply(shared, points, copies, None), federation.rows)[0]  # noqa: B023
            for federation in (data, twice)
            for copies in [perturbed(points, federation.rows.keys, noise, "s", 0) if noise else None]
        )
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


# -- unbiased ---------------------------------------------------------------------------------------------------------
@each_estimator
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_estimates_are_unbiased(estimator: str, noise: float) -> None:
    # x ~ N(0, I), y = <x, t> + z: E[e] = t - theta at theta, also at theta plus noise of mean zero, once on each side.
    n_clients, n = 40_000, 3
    x = normal(n_clients, n, 2, seed=1)
    t, theta = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    y = x @ t + 0.3 * normal(n_clients, n, seed=2)
    ids = torch.arange(n_clients)
    block = Block(ids, ids, x, y, torch.full((n_clients,), n), None)
    copies = theta + noise * normal(1, n_clients, 2, 1, 2, seed=3)
    models = {"copies": copies} if noise else {"theta": theta[None, None]}
    model, eye = linear_regression(2, intercept=False), torch.eye(2, dtype=torch.float64)[None, None]
    got, weight = products(model, block, estimator, eye, False, **models)
    each = got[0, :, :, 0] / weight[:, None, None]  # [C, 2, 2]
    want = torch.outer(t - theta, t - theta)
    error = each.std(0) / n_clients**0.5
    assert ((each.mean(0) - want).abs() < 4 * error).all()  # four standard errors, in each of four entries
    # With every row paired with itself as well, it would be seen.
    e = (y - x @ theta)[..., None] * x
    biased = torch.einsum("cni,cmj->cij", e, e) / n**2
    assert ((biased.mean(0) - want).abs().diagonal() > 10 * biased.std(0).diagonal() / n_clients**0.5).all()


# -- a step by hand ---------------------------------------------------------------------------------------------------
PLANE = linear_regression(2, intercept=False)


def stepped(
    rows: list[tuple[float, float, float]], estimator: str = "pairs", *, step_size: float = 1.0, curvature: bool = False,
    least: float = 0.0, theta: tuple[float, float] = (0.0, 0.0), basis: Any = ((1.0, 0.0), (0.0, 1.0)),
) -> tuple[list[float], float]:  # fmt: skip
    """Where an anchor with rows (x1, x2, y) goes, and how far; beside it stands one with more rows, so that it is padded."""
    table, more = torch.tensor(rows, dtype=torch.float64).view(-1, 3), normal(7, 3)
    block = one_block(ragged([table[:, :2], more[:, :2]], [table[:, 2], more[:, 2]]))
    place = block.ids.tolist().index(0)
    shared = {
        "model": PLANE, "estimator": estimator, "curvature": curvature,
        "step_size": torch.tensor([step_size], dtype=torch.float64), "least": torch.tensor([least], dtype=torch.float64),
        "resample": 0,
    }  # fmt: skip
    own = {
        "theta": torch.tensor(theta).double().expand(1, 2, 2),
        "basis": torch.tensor(basis).double().expand(1, 2, 2, -1),
    }
    reply, private = descend(shared, own, {}, block)
    assert private == {}
    return reply["theta"][0, place].tolist(), float(reply["moved"][0, place])


def test_a_plain_step_matches_hand_calculation() -> None:
    # e = (2, 0), (4, 0); s = (6, 0). Pairs: (36 - 4 - 16) / 2 = 8 in the corner, so sigma = sqrt(8), along (1, 0).
    theta, moved = stepped([(2, 0, 1), (2, 0, 2)], step_size=0.5)
    assert theta == pytest.approx([0.5 * 8**0.5, 0.0])
    assert moved == pytest.approx(0.5 * 8**0.5)


def test_a_step_by_curvature_matches_hand_calculation() -> None:
    theta, moved = stepped([(2, 0, 1), (2, 0, 2)], curvature=True)
    assert theta == pytest.approx([8**0.5 / 4, 0.0])  # the mean squared feature along (1, 0) is 4
    assert moved == pytest.approx(8**0.5 / 4)
    # Without noise, on one direction, it is Newton's step: from (1, 0) to (3, 0) at once.
    theta, _ = stepped([(2, 0, 6), (2, 0, 6), (2, 0, 6)], curvature=True, theta=(1.0, 0.0))
    assert theta == pytest.approx([3.0, 0.0])


def test_the_sign_is_that_of_the_mean() -> None:
    assert stepped([(2, 0, -1), (2, 0, -2)])[0] == pytest.approx([-(8**0.5), 0.0])
    for flip in (1.0, -1.0):  # however the basis is signed
        theta, _ = stepped([(2, 0, -1), (2, 0, -2)], basis=((flip,), (0.0,)))
        assert theta == pytest.approx([-(8**0.5), 0.0])


@pytest.mark.parametrize(
    ("estimator", "square"),
    [
        ("pairs", (100 - 30) / 12),  # e = 2, 4, 1, 3: (10^2 - 4 - 16 - 1 - 9) / (4 * 3)
        ("halves", 3.0 * 2.0),  # means of the first and the last two
        ("two", (2 * 4 + 1 * 3) / 2),  # rows 1 and 2, 3 and 4
    ],
)
def test_every_estimators_length_matches_hand_calculation(estimator: str, square: float) -> None:
    theta, _ = stepped([(1, 0, 2), (1, 0, 4), (1, 0, 1), (1, 0, 3)], estimator)
    assert theta == pytest.approx([square**0.5, 0.0])


def test_an_odd_last_row_is_used_by_halves_and_not_by_two() -> None:
    rows: list[tuple[float, float, float]] = [(1, 0, 2), (1, 0, 4), (1, 0, 10)]
    assert stepped(rows, "halves")[1] == pytest.approx((2 * 7) ** 0.5)
    assert stepped(rows, "two")[1] == pytest.approx((2 * 4) ** 0.5)


def test_a_step_stays_in_the_subspace() -> None:
    # Along (1, 1) / sqrt(2) the features are sqrt(2) and the residuals 1 and 3: e = sqrt(2), 3 sqrt(2), their product 6.
    theta, _ = stepped([(1, 1, 1), (1, 1, 3)], basis=((0.5**0.5,), (0.5**0.5,)))
    assert theta == pytest.approx([3**0.5, 3**0.5])  # sqrt(6) / sqrt(2) each
    theta, moved = stepped([(1, 0, 1), (1, 0, 3)], basis=((0.0,), (1.0,)))  # all of e is outside
    assert (theta, moved) == ([0.0, 0.0], 0.0)


def test_a_short_direction_stops_the_anchor() -> None:
    rows: list[tuple[float, float, float]] = [(2, 0, 1), (2, 0, 2)]  # sigma = 2.83
    assert stepped(rows, least=2.8)[1] == pytest.approx(8**0.5)
    assert stepped(rows, least=2.9, theta=(0.0, 0.0)) == ([0.0, 0.0], 0.0)


@each_estimator
@pytest.mark.parametrize("curvature", [True, False])
def test_rows_that_contradict_each_other_stop_the_anchor(estimator: str, curvature: bool) -> None:
    assert stepped([(1, 0, 2), (1, 0, -2)], estimator, curvature=curvature) == ([0.0, 0.0], 0.0)  # e1 e2 = -4


@each_estimator
@pytest.mark.parametrize("rows", [[], [(2, 0, 1)]], ids=["no row", "one row"])
@pytest.mark.parametrize("curvature", [True, False])
def test_a_client_without_a_pair_stays(estimator: str, rows: Any, curvature: bool) -> None:
    assert stepped(rows, estimator, theta=(0.5, -1.0), curvature=curvature) == ([0.5, -1.0], 0.0)


@each_estimator
def test_steps_of_many_anchors_are_those_of_a_loop(estimator: str) -> None:
    model, counts = linear_regression(D), (5, 9, 12, 30)
    block = clients(counts, seed=4)
    theta, basis = normal(2, 4, D + 1, seed=1), torch.linalg.qr(normal(2, 4, D + 1, 3, seed=2)).Q
    steps = torch.tensor([1.0, 0.3], dtype=torch.float64)
    shared = {"model": model, "estimator": estimator, "curvature": True, "step_size": steps, "least": 0 * steps}
    shared["resample"] = 0
    reply, _ = descend(shared, {"theta": theta, "basis": basis}, {}, block)
    for s in range(2):
        for c, n in enumerate(block.n.tolist()):
            e = directions(model, block, c, theta[s, c]) @ basis[s, c].numpy()  # [n, 3]
            a, _ = moment(estimator, e, e)
            if estimator == "two":  # an anchor pairs all of its rows
                a = sum(np.outer(e[j], e[j + 1]) for j in range(0, n - 1, 2)) / (n // 2)
            values, vectors = np.linalg.eigh((a + a.T) / 2)
            b = vectors[:, -1] * (1 if vectors[:, -1] @ e.mean(0) >= 0 else -1)
            r = basis[s, c].numpy() @ b
            along = np.mean((features(model, block)[c, :n].numpy() @ r) ** 2)
            moved = float(steps[s]) * max(values[-1], 0) ** 0.5 / along
            np.testing.assert_allclose(reply["theta"][s, c], theta[s, c].numpy() + moved * r, rtol=1e-8, atol=1e-8)
            assert float(reply["moved"][s, c]) == pytest.approx(moved, rel=1e-8)


# -- power iteration --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "values",
    [
        (3.0, 1.0, 0.5),
        (1.0, 0.0, 0.0),
        (1.0, -0.5, -3.0),  # noise may make a negative eigenvalue the largest by far
        (0.1, 0.0, -5.0),
        (1e-100, -1e-100, 0.0),
        (1e100, 1e99, -1e100),
    ],
    ids=str,
)
def test_the_leading_direction_is_that_of_the_largest_eigenvalue(values: tuple[float, ...]) -> None:
    rotation = torch.linalg.qr(normal(3, 3, seed=3)).Q
    a = rotation * torch.tensor(values, dtype=torch.float64) @ rotation.T
    b, s = _leading(a)
    _, vectors = np.linalg.eigh(a.numpy())
    # The closest call is 1 + 0.1 / 5 against 1, 4096 times: e^-80.
    assert abs(b.numpy() @ vectors[:, -1]) == pytest.approx(1.0, abs=1e-12)
    assert float(s) == pytest.approx(values[0] ** 0.5, rel=1e-6)


def test_leading_directions_of_many_matrices_at_once() -> None:
    a = normal(2, 5, 4, 4, seed=6)
    a = a + a.transpose(2, 3)
    b, s = _leading(a)
    values, vectors = np.linalg.eigh(a.numpy())
    assert (values[..., -1] > 0).all()
    # Eigenvalues of a random matrix may lie close: what counts is that no direction has a larger quotient.
    np.testing.assert_allclose(s.square(), values[..., -1], rtol=1e-9)
    np.testing.assert_allclose(abs((b.numpy() * vectors[..., -1]).sum(-1)), 1, rtol=1e-6)


@pytest.mark.parametrize("values", [(0.0, 0.0), (-1.0, -2.0)], ids=["nothing", "negative"])
def test_without_a_positive_eigenvalue_there_is_nowhere_to_go(values: tuple[float, ...]) -> None:
    b, s = _leading(torch.diag(torch.tensor(values, dtype=torch.float64)))
    assert float(s) == 0.0
    assert float(b.norm()) == pytest.approx(1.0)


# -- messages ---------------------------------------------------------------------------------------------------------
def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value.values() for t in tensors_of(v)] if isinstance(value, dict) else []


@pytest.mark.parametrize(
    "options", [{}, {"subspace": "orthogonal"}, {"noise": 0.05}], ids=["range", "orthogonal", "noise"]
)
def test_no_message_holds_more_than_a_thin_matrix_for_an_anchor(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    width, n_anchors, n_clients = 50, 7, 12
    data, model = some_clients(n_clients, width), linear_regression(width, intercept=False)
    seen = overhear(monkeypatch)
    how = Descent(iterations=2, anchors=Anchors(number=n_anchors, min_rows=5, further=False), oversampling=4, **options)
    _, finished, _ = run_one(
        lambda state: moment_descent(state, model=model, n_clusters=3, seed=0, descent=how), data.rows
    )
    thin = 3 * width * (3 + 4)  # the rank and what the range finder takes beyond it, and thrice that in one exchange
    names = set()
    for ask, answer in seen:
        names.add(ask.step.__name__)
        for tensor in tensors_of(dict(ask.shared)):
            assert tensor.numel() <= n_anchors * thin < n_anchors * width * width
        for tensor in tensors_of(dict(ask.each)):  # [A, ...], or two copies for every client
            assert tensor[0].numel() <= max(thin, 2 * n_anchors * width)
        for tensor in tensors_of(answer.parts):
            assert tensor.numel() <= n_anchors * thin
            assert tensor.numel() != width * width
        # What clients would send if nothing were folded: a thin matrix for each anchor, and the weight.
        assert answer.bytes_up <= n_clients * (n_anchors * thin + 1) * 8
    assert {"introduce", "multiply_moments", "descend", "nearest_anchor"} <= names
    # At the common start all anchors have one subspace: two exchanges with 25 columns, and then one with 21 for each of 7.
    first, second = (r.bytes_up for r in finished.rounds[1 if how.noise else 0 :][:2])
    assert first < second / 2


def test_anchors_are_sent_and_send_their_own_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = overhear(monkeypatch)
    how = Descent(iterations=1, anchors=Anchors(number=4, min_rows=3, further=False))
    run_one(
        lambda state: moment_descent(state, model=linear_regression(D), n_clusters=2, seed=0, descent=how),
        some_clients().rows,
    )
    (ask, answer) = next((a, b) for a, b in seen if a.step is descend)
    assert ask.to is not None
    assert ask.to.tolist() == sorted(ask.to.tolist())
    assert answer.ids.tolist() == ask.to.tolist()
    assert answer.parts["theta"]["stack"].shape == (1, 4, D + 1)


def test_exchanges_begin_with_the_last_subspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, states = overhear(monkeypatch), list[State]()
    how = Descent(iterations=2, anchors=Anchors(number=3, min_rows=3, further=False), oversampling=2)
    run_one(
        spying(
            lambda state: moment_descent(state, model=linear_regression(12), n_clusters=2, seed=0, descent=how), states
        ),
        some_clients(width=12).rows,
    )
    sent = [ask.shared["q"] for ask, _ in seen if ask.step is multiply_moments]
    assert [len(q) for q in sent] == [1, 1, 3]  # one subspace while all anchors are at the start, found twice as well
    before, second = states[0].basis, sent[2]  # [A, P, 2]
    torch.testing.assert_close(second @ (second.transpose(1, 2) @ before), before)
    assert not torch.isclose(
        second[..., :2] @ (second[..., :2].transpose(1, 2) @ sent[0][..., :2]), sent[0][..., :2]
    ).all()


def test_perturbed_copies_are_each_clients_own_and_the_models_themselves_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = overhear(monkeypatch)
    anchors = Anchors(number=3, min_rows=3, further=False)
    how = Descent(iterations=3, anchors=anchors, noise=0.5, exchanges=2, at_once=False, oversampling=1)
    states: list[State] = []
    run_one(
        spying(
            lambda state: moment_descent(state, model=linear_regression(D), n_clusters=2, seed=0, descent=how), states
        ),
        some_clients(200).rows,
    )
    copies = [ask.each["copies"] for ask, _ in seen if ask.step is multiply_moments]
    assert not any("theta" in ask.shared for ask, _ in seen if ask.step is multiply_moments)
    assert [tuple(c.shape) for c in copies] == [(200, 2, 1, D + 1)] * 2 + [(200, 2, 3, D + 1)] * 4
    assert torch.equal(copies[2], copies[3])  # the same in an iteration: averaging would undo the noise
    noise = copies[2] - states[1].local
    assert not torch.isclose(noise, copies[4] - states[2].local).any()  # and another one in the next
    assert len(noise.unique()) == noise.numel()
    # 3,000 draws on each side: standard errors of mean and deviation are about 0.01.
    assert noise.mean().abs() < 0.04
    assert noise.std() == pytest.approx(0.5, abs=0.04)
    assert (noise[:, 0] * noise[:, 1]).mean().abs() < 4 * 0.25 / 3000**0.5
