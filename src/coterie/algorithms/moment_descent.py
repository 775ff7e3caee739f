# SPDX-License-Identifier: Apache-2.0
"""Mixed regression from any start: federated moment descent on a few anchors, then clustering by FedAvg or FedProx.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, Phases 1 and 2.

Departures: rows are used again in every iteration and anchors help to find subspaces, as in the paper's experiments; all
pairs of a client's rows are used, not two of them; an anchor steps by its own curvature along the direction, where the paper
takes constants that nobody knows; anchors that serve clients badly give way to others, and where many clients stay badly
served, further anchors are drawn among them (`anchors.py`). Phase 2 is IFCA's round, with Lemma 1's average over everyone as
an option.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms import ifca
from coterie.algorithms.anchors import Anchors, badly_served, first_anchors, group_anchors
from coterie.algorithms.starts import Start
from coterie.algorithms.subspace import Subspaces, orthogonal_iteration, range_finder
from coterie.local import Training
from coterie.local.row_space import features
from coterie.models import Dense
from coterie.protocol import Ask, Block, Replies, RowProduct, Save, Stack, Sum, Tensors

__all__ = ["Descent", "State", "descend", "mixed_regression", "moment_descent", "multiply_moments"]

Run = Generator[Ask | Save, Replies | None, Any]
Estimator = Literal["pairs", "halves", "two"]


@dataclass(frozen=True)
class Descent:
    """How Phase 1 goes.

    Parameters
    ----------
    iterations : int
        T.
    estimator : {"pairs", "halves", "two"}
        Of E[e] E[e]^T from one client: all pairs of its rows, its halves, or its first two rows (the paper).
    subspace : {"range", "orthogonal"}
        Range finder, or Algorithm 3.
    exchanges : int
        Of an iteration's subspaces; Algorithm 3 takes twice as many.
    oversampling : int
        Columns beyond the rank, for the range finder.
    step : {"curvature", "plain"}
        An anchor moves by s / (mean squared feature along the direction), or by `step_size` s.
    step_size : float
        Factor on either.
    anchors : Anchors
        Who they are.
    delta : float
        Least distance between two models, if known; 0 if not. Anchors stop at `eps` delta.
    eps : float
        See there.
    max_clusters : int
        Rank of the subspaces when the number of clusters is not given.
    noise : float
        Remark 2: every client is sent two copies of each anchor's model, independently perturbed by normal noise with this
        standard deviation. The server then prepares C x A x 2 models, and everybody is asked, whatever the policy.
    """

    iterations: int = 5
    estimator: Estimator = "pairs"
    subspace: Literal["range", "orthogonal"] = "range"
    exchanges: int = 3
    oversampling: int = 8
    step: Literal["curvature", "plain"] = "curvature"
    step_size: float = 1.0
    anchors: Anchors = Anchors()  # noqa: RUF009  (frozen)
    delta: float = 0.0
    eps: float = 0.05
    max_clusters: int = 6
    noise: float = 0.0


@dataclass(frozen=True)
class State:
    """What the next iteration of Phase 1, or the next round of Phase 2, needs."""

    anchors: Tensor  # [A] client numbers
    local: Tensor  # [A, P] the anchors' models
    basis: Tensor  # [A, P, R] their last subspaces; zero before the first
    theta: Tensor  # [K, P] the clusters' models; none until Phase 1 has ended
    empty: Tensor  # [K] of Phase 2, as in IFCA
    unseen: Tensor  # [K]
    temperature: Tensor  # []
    arrived: int = 0  # anchors before this one have ended their descent
    descents: int = 0  # iterations of Phase 1, all anchors' together
    round: int = 0  # of Phase 2
    settled: bool = False


def mixed_regression(
    state: State | None,
    *,
    model: Dense,
    n_clusters: int | None,
    rounds: int,
    step_size: float,
    seed: int,
    descent: Descent = Descent(),  # noqa: B008  (frozen)
    start: Tensor | None = None,
    training: Training = Training(steps=5),  # noqa: B008  (frozen)
    **clustering: Any,
) -> Run:
    """Run both phases.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    model : Dense
        A linear model with squared loss.
    n_clusters : int or None
        K; None estimates it.
    rounds, step_size, training, clustering
        Of Phase 2, as for `ifca`; FedProx in closed form is `Training(exact=True, proximal=1 / eta)`.
    descent : Descent
        Phase 1.
    start : Tensor, optional
        [P] theta_0, where all anchors begin; zero by default.
    """
    if state is None or not len(state.theta):
        state = yield from moment_descent(
            state, model=model, n_clusters=n_clusters, seed=seed, descent=descent, start=start
        )
    if not len(state.theta):  # nobody answered
        return state
    options: dict[str, Any] = {"weighting": "rows", **clustering}
    second = ifca.ifca(
        ifca.State(state.theta, state.empty, state.unseen, state.temperature, state.round, state.settled),
        model=model, n_clusters=len(state.theta), rounds=rounds, step_size=step_size, seed=seed, training=training,
        start=Start("warm", state.theta), **options,
    )  # fmt: skip
    return (yield from _kept_with(state, second))


def _kept_with(state: State, second: ifca.Run) -> Run:
    """Pass on Phase 2's questions, and keep its states together with Phase 1's."""
    replies: Replies | None = None
    while True:
        try:
            wanted = second.send(replies)
        except StopIteration:
            return state
        if isinstance(wanted, Save):
            inner: ifca.State = wanted.state
            state = replace(state, **vars(inner))
            wanted = replace(wanted, state=state)
        replies = yield wanted


def moment_descent(
    state: State | None,
    *,
    model: Dense,
    n_clusters: int | None,
    seed: int,
    descent: Descent = Descent(),  # noqa: B008  (frozen)
    start: Tensor | None = None,
) -> Run:
    """Run Phase 1: lead a few anchors from one model to their clusters' models, and make K models of theirs."""
    rank = min(n_clusters or descent.max_clusters, model.n_parameters)
    how = descent.anchors
    origin = torch.zeros(model.n_parameters, dtype=model.dtype) if start is None else start.to(model.dtype)
    if state is None:
        anchors = yield from first_anchors(how, n_clusters or descent.max_clusters, seed)
        state = _with_anchors(_nothing(model, rank), anchors, origin)
        yield Save(state, {"events": [] if len(anchors) else ["nobody answered"]})
    if not len(state.anchors):
        return state
    while True:
        last = descent.iterations if state.arrived == 0 else 2 * descent.iterations
        while state.descents < last:
            state, info = yield from _iteration(state, model, descent, seed)
            yield Save(state, info)
        theta, events = yield from group_anchors(model, state.local, n_clusters, descent.delta, how.swaps)
        if state.arrived or not how.further:
            break
        more = yield from badly_served(model, theta, state.anchors, how, n_clusters or descent.max_clusters, seed)
        if not len(more):
            break
        state = _with_anchors(replace(state, arrived=len(state.anchors)), more, origin)
        yield Save(state, {"events": [f"many clients are badly served: {len(more)} more anchors among them"]})
    nobody = torch.zeros(len(theta), dtype=torch.int64)
    state = replace(state, theta=theta, empty=nobody, unseen=nobody, arrived=len(state.anchors))
    yield Save(state, {"events": events})
    return state


def _nothing(model: Dense, rank: int) -> State:
    nobody = torch.zeros(0, dtype=torch.int64)
    none = torch.zeros(0, model.n_parameters, dtype=model.dtype)
    one = torch.ones((), dtype=model.dtype)
    return State(nobody, none, none[..., None].expand(-1, -1, rank).clone(), none, nobody, nobody, one)


def _with_anchors(state: State, anchors: Tensor, origin: Tensor) -> State:
    """Add anchors, all at theta_0."""
    local = torch.cat([state.local, origin.expand(len(anchors), -1)])
    basis = torch.cat([state.basis, state.basis.new_zeros(len(anchors), *state.basis.shape[1:])])
    return replace(state, anchors=torch.cat([state.anchors, anchors]), local=local, basis=basis)


def _iteration(state: State, model: Dense, how: Descent, seed: int) -> Run:
    """Steps 8 to 15 for the anchors on their way: subspaces from everybody, then a step by each anchor.  -> state, info"""
    moving = slice(state.arrived, None)
    local, anchors = state.local[moving], state.anchors[moving]
    found = yield from _subspaces(local, state.basis[moving], model, how, seed, state.descents)
    state = replace(state, descents=state.descents + 1)
    if found is None:
        return state, {"events": ["nobody answered"]}
    order = anchors.argsort()  # asks name clients in ascending order
    got = yield Ask(
        descend,
        {"model": model, "estimator": how.estimator, "curvature": how.step == "curvature",
         "step_size": torch.tensor(how.step_size, dtype=model.dtype),
         "least": torch.tensor(how.eps * how.delta, dtype=model.dtype)},
        {"theta": Stack(), "moved": Stack()},
        each={"theta": local[order], "basis": found.basis[order]},
        to=anchors[order],
        scratch=found.basis.shape[-1] + 1,
    )  # fmt: skip
    new, moved = local.clone(), torch.zeros(len(local), dtype=model.dtype)
    if got is not None and got.n:
        at = order[torch.isin(anchors[order], got.ids)]
        new[at], moved[at] = got["theta"], got["moved"]
    state = replace(
        state,
        local=torch.cat([state.local[: state.arrived], new]),
        basis=torch.cat([state.basis[: state.arrived], found.basis]),
    )
    spectrum = found.values.mean(0)
    return state, {"movement": [float(m) for m in moved], "spectrum": [float(v) for v in spectrum], "events": []}


def _subspaces(local: Tensor, before: Tensor, model: Dense, how: Descent, seed: int, t: int) -> Run:
    """Step 9: the subspaces of all anchors, in the same exchanges.  -> Subspaces, or None if nobody answered"""
    together = bool((local == local[0]).all())  # at theta_0 all anchors have one subspace
    points, rank = local[:1] if together else local, before.shape[-1]
    draw = keys.generator(seed, t, "subspace")
    extra = 0 if how.subspace == "orthogonal" else min(how.oversampling, model.n_parameters - rank)
    start = torch.randn(len(points), model.n_parameters, rank + extra, generator=draw, dtype=model.dtype)
    if bool(before.any()):
        start[..., :rank] = before[: len(points)]  # anchors have moved a little only

    def multiply(q: Tensor, transposed: bool) -> Generator[Ask | Save, Replies | None, Tensor | None]:
        return _multiply(q, transposed, points, model, how, keys.key(seed, t, "copies"))

    if how.subspace == "orthogonal":
        found: Subspaces | None = yield from orthogonal_iteration(multiply, start, rank, how.exchanges)
    else:
        found = yield from range_finder(multiply, start, rank, how.exchanges)
    if found is None or not together:
        return found
    return Subspaces(found.basis.expand(len(local), -1, -1), found.values.expand(len(local), -1))


def _multiply(
    q: Tensor, transposed: bool, points: Tensor, model: Dense, how: Descent, key: Tensor
) -> Generator[Ask | Save, Replies | None, Tensor | None]:
    """Ask everybody for their share of Y Q, or Y^T Q, at each of the points.  q [A, P, L] -> [A, P, L]"""
    shared = {"model": model, "q": q, "estimator": how.estimator, "transposed": transposed}
    fold = {"product": Sum(), "weight": Sum()}
    scratch = len(q) * (3 * q.shape[-1] + 2)
    if not how.noise:
        got = yield Ask(multiply_moments, {**shared, "theta": points}, fold, scratch=scratch)
    else:
        there = yield Ask(answer_to, {}, {"lot": Stack()})
        if there is None or there.n == 0:
            return None
        copies = _perturbed(points, there["lot"], how.noise, key)
        got = yield Ask(multiply_moments, shared, fold, each={"copies": copies}, to=there.ids, scratch=scratch)
    if got is None or got.n == 0:
        return None
    product = got["product"].view(q.shape[1], *q.shape[::2]).transpose(0, 1)  # [P, A L] -> [A, P, L]
    out: Tensor = product / got["weight"].clamp(min=1.0).to(product.dtype)
    return out


def _perturbed(points: Tensor, lots: Tensor, noise: float, key: Tensor) -> Tensor:
    """Two copies of every point for every client, with noise of their own.  [C, 2, A, P]

    The noise is the same in every exchange of an iteration, since averaging would undo it, and depends on the client's lot
    and on a key that clients do not know.
    """
    size = 2 * points.numel()
    u = keys.uniform(keys.key(key, lots), 2 * size).view(len(lots), 2, size)
    normal = (-2 * (1 - u[:, 0]).log()).sqrt() * (2 * math.pi * u[:, 1]).cos()  # Box and Muller
    return points + noise * normal.view(len(lots), 2, *points.shape).to(points.dtype)


# -- on the client ----------------------------------------------------------------------------------------------------
def answer_to(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say that the client is there, and its lot."""
    return {"lot": keys.key("lot", data.keys)[None]}, {}


def multiply_moments(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Any, Tensors]:
    """A client's share of Y Q: its estimate of E[e] E[e]^T at every point, times Q, weighted by its rows.

    With e_j = r_j x_j for residuals r, the product is x^T g where g_j = r_j sum_l w_jl r_l (x_l^T Q): nothing larger than
    N x K is formed for a point.
    """
    q = shared["q"]  # [S, A, P, L]
    x = features(shared["model"], data)  # [C, N, P]
    runs, points, size, columns = q.shape
    z = (x.flatten(0, 1) @ q.permute(2, 0, 1, 3).reshape(size, -1)).view(*x.shape[:2], runs, points, columns)
    if "copies" in each:
        left, right = (_residuals(x, data, each["copies"][:, :, i]) for i in (0, 1))
    else:
        left = right = _residuals(x, data, shared["theta"])  # [C, N, S, A]
    if shared["transposed"]:
        left, right = right, left
    z.mul_(right[..., None])  # r_l x_l^T Q
    g, weight = _paired(z, shared["estimator"], shared["transposed"], data)
    g.mul_(left[..., None])
    reply = {
        "product": RowProduct(x, g.permute(2, 0, 1, 3, 4).flatten(3)),  # [S, C, N, A L]
        "weight": weight.to(torch.float64)[None],
    }
    return reply, {}


def _residuals(x: Tensor, data: Block, theta: Tensor) -> Tensor:
    """y - <x, theta> under common models [S, A, P], or every client's own [S, C, A, P]; zero on padding.  [C, N, S, A]"""
    if theta.dim() == 3:
        fitted = (x.flatten(0, 1) @ theta.flatten(0, 1).T).view(*x.shape[:2], *theta.shape[:2])
    else:
        fitted = torch.einsum("cnp,scap->cnsa", x, theta)
    return (data.target[..., None, None] - fitted).mul_(data.real[..., None, None])


def _paired(z: Tensor, estimator: Estimator, transposed: bool, data: Block) -> tuple[Tensor, Tensor]:
    """What every row is multiplied with: n sum_l w_jl z_l, and the client's weight n.  z [C, N, ...] -> [C, N, ...], [C]"""
    n = data.n.to(z.dtype)
    enough = (data.n > 1).to(z.dtype)
    lead = (-1, 1) + (1,) * (z.dim() - 2)
    if estimator == "pairs":  # w_jl = 1 / n(n-1) off the diagonal
        return (z.sum(1, keepdim=True) - z).mul_((enough / (n - 1).clamp(min=1)).view(lead)), n * enough
    first, second = _parts(estimator, data)
    if transposed:
        first, second = second, first
    other = torch.einsum("cn,cn...->c...", second.to(z.dtype), z)[:, None]
    pairs = (first.sum(1) * second.sum(1)).clamp(min=1).to(z.dtype)
    weight = enough if estimator == "two" else n * enough
    rows = (first.to(z.dtype) * (weight / pairs)[:, None]).view(*first.shape, *lead[2:])
    return rows * other, weight


def _parts(estimator: Estimator, data: Block) -> tuple[Tensor, Tensor]:
    """The rows that are paired with each other: first and second half, or first and second row.  [C, N] each"""
    row = torch.arange(data.x.shape[1])
    size = torch.ones_like(data.n) if estimator == "two" else data.n // 2
    first = row < size[:, None]
    second = (row >= size[:, None]) & (row < (2 if estimator == "two" else data.n[:, None]))
    return first & data.real, second & data.real


def descend(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Steps 11 to 15 on an anchor: the leading direction of its own e in the subspace, and a step along it."""
    x = features(shared["model"], data)
    theta, basis = each["theta"], each["basis"]  # [S, C, P], [S, C, P, K]
    r = (data.target - torch.einsum("cnp,scp->scn", x, theta)) * data.real
    e = r[..., None] * torch.einsum("cnp,scpk->scnk", x, basis)  # [S, C, N, K]
    b, s = _leading(_second_moment(e, shared["estimator"], data))
    towards = torch.einsum("scnk,sck->sc", e, b)
    b = torch.where((towards < 0)[..., None], -b, b)  # the sign of <b, mean e>
    direction = torch.einsum("scpk,sck->scp", basis, b)
    length = s * shared["step_size"][:, None]
    if shared["curvature"]:
        along = torch.einsum("cnp,scp->scn", x, direction).square_()
        length = length / torch.einsum("scn,cn->sc", along, data.weights).clamp(min=1e-12)
    moved = torch.where((s > shared["least"][:, None]) & (data.n > 1), length, 0.0)
    return {"theta": theta + moved[..., None] * direction, "moved": moved}, {}


def _second_moment(e: Tensor, estimator: Estimator, data: Block) -> Tensor:
    """The estimate of E[e] E[e]^T in K dimensions, made symmetric.  e [S, C, N, K] -> [S, C, K, K]"""
    n = data.n.to(e.dtype)[:, None, None]
    if estimator == "pairs":
        total = e.sum(2)
        return (total[..., None] * total[..., None, :] - e.transpose(2, 3) @ e) / (n * (n - 1)).clamp(min=1)
    if estimator == "two":  # eq. (2): rows 1 and 2, 3 and 4, ...
        half = e.shape[2] // 2
        real = data.real[:, 1 : 2 * half : 2, None].to(e.dtype)
        a = (e[:, :, 0 : 2 * half : 2] * real).transpose(2, 3) @ e[:, :, 1 : 2 * half : 2]
        a = a / (data.n // 2).clamp(min=1).to(e.dtype)[:, None, None]
    else:
        one, two = (
            torch.einsum("scnk,cn->sck", e, part.to(e.dtype) / part.sum(1, keepdim=True).clamp(min=1))
            for part in _parts(estimator, data)
        )
        a = one[..., None] * two[..., None, :]
    return (a + a.transpose(2, 3)) / 2


_SQUARINGS = 12  # M, M^2, M^4, ...: as many as 4,096 steps of power iteration


def _leading(a: Tensor) -> tuple[Tensor, Tensor]:
    """Power iteration for the largest eigenvalue of a symmetric estimate of m m^T.  [..., K, K] -> [..., K], s [...]

    The estimate may have negative eigenvalues, which are noise: it is shifted so that the largest one also has the largest
    absolute value.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    size = torch.linalg.matrix_norm(a)[..., None, None].clamp(min=1e-300)
    power = a / size + eye  # eigenvalues within [0, 2]
    for _ in range(_SQUARINGS):
        power = power @ power
        power = power / torch.linalg.matrix_norm(power)[..., None, None].clamp(min=1e-300)
    column = power.norm(dim=-2).argmax(-1)
    b = torch.take_along_dim(power, column[..., None, None], -1).squeeze(-1)
    b = b / b.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    value = torch.einsum("...k,...kl,...l->...", b, a, b)
    return b, value.clamp(min=0).sqrt()
