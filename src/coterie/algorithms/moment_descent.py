# SPDX-License-Identifier: Apache-2.0
"""Mixed regression from any start: federated moment descent on a few anchors, then clustering by FedAvg or FedProx.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, Phases 1 and 2.

Departures: rows are used again in every iteration and anchors help to find subspaces, as in the paper's experiments, unless
`resample` says otherwise; all pairs of a client's rows are used, not two of them (`moments.py`); an anchor steps by its own
curvature along the direction, where the paper takes constants that nobody knows; anchors that serve clients badly give way
to others, and where many clients stay badly served, further anchors are drawn among them (`anchors.py`). Phase 2 is IFCA's
round, with Lemma 1's average over everyone as an option.
"""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms import ifca
from coterie.algorithms.anchors import Anchors, Grouping, badly_served, first_anchors, group_anchors
from coterie.algorithms.copies import There, fresh, perturbed, who_is_there
from coterie.algorithms.moments import Estimator, descend, multiply_moments
from coterie.algorithms.robust import COUNT, SPREAD
from coterie.algorithms.starts import Start
from coterie.algorithms.subspace import Subspaces, leading_range, orthogonal_iteration, range_finder
from coterie.local import Training
from coterie.models import Dense
from coterie.protocol import Ask, Lockstep, Replies, Save, Stack, Sum, together

__all__ = ["Descent", "State", "mixed_regression", "moment_descent"]

Run = Generator[Ask | Save, Replies | None, Any]


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
        Of an iteration's subspaces; Algorithm 3 takes twice as many. The range finder needs one only where there are no
        more parameters than columns.
    at_once : bool
        Whether the range finder makes one exchange with the columns of all of them, among them the last iteration's
        subspace: then each iteration is a power step of the next. In the first iteration, where all anchors are at one
        point, it makes two, with as many columns as for all of them later; half as many as there are parameters at most.
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
        Remark 2: standard deviation of normal noise. Every client that takes part is sent two copies of each anchor's model
        in an iteration, and one when anchors are grouped, perturbed independently; the server prepares C x A x 2 of them.
        Nobody is sent another client's model as it is.
    resample : int
        Line 7: in every iteration, subspaces come from another one of so many parts of the clients, without the anchors, and
        anchors step by another part of their own rows; T in the paper. When all were used, parts are drawn again. 0: all
        clients and rows in every iteration, as in the paper's experiments.
    """

    iterations: int = 5
    estimator: Estimator = "pairs"
    subspace: Literal["range", "orthogonal"] = "range"
    exchanges: int = 3
    at_once: bool = True
    oversampling: int = 8
    step: Literal["curvature", "plain"] = "curvature"
    step_size: float = 1.0
    anchors: Anchors = Anchors()  # noqa: RUF009  (frozen)
    delta: float = 0.0
    eps: float = 0.05
    max_clusters: int = 6
    noise: float = 0.0
    resample: int = 0


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
    secret: str = field(default="", repr=False)  # what Remark 2's noise is drawn from; none without, and after Phase 1


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
    secret: str | None = None,
    training: Training = Training(steps=5),  # noqa: B008  (frozen)
    **clustering: Any,
) -> Lockstep:
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
        Of Phase 2, as for `ifca`; FedProx in closed form is `Training(exact=True, proximal=2 / eta)` with the
        paper's eta, whose loss is half of the mean squared error.
    descent : Descent
        Phase 1.
    start : Tensor, optional
        [P] theta_0, where all anchors begin; zero by default.
    secret : str, optional
        What the noise of Remark 2 is drawn from, for simulations that must be repeatable. By default a new one is drawn:
        the seed, which clients know, does not tell the noise, so that with noise two runs of one seed differ.
    """
    if state is None or not len(state.theta):
        state = yield from moment_descent(
            state, model=model, n_clusters=n_clusters, seed=seed, descent=descent, start=start, secret=secret
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
    secret: str | None = None,
) -> Lockstep:
    """Run Phase 1: lead a few anchors from one model to their clusters' models, and make K models of theirs."""
    rank = min(n_clusters or descent.max_clusters, model.n_parameters)
    how = descent.anchors
    origin = torch.zeros(model.n_parameters, dtype=model.dtype) if start is None else start.to(model.dtype)
    found: Subspaces | None = None
    if state is None:
        begun, anyone = _nothing(model, rank), torch.zeros(1, dtype=torch.int64)
        first: dict[str, Lockstep] = {"anchors": first_anchors(how, n_clusters or descent.max_clusters, seed)}
        if not descent.noise and not descent.resample:  # whoever the anchors are, all begin at one point
            first["subspaces"] = _subspaces(_with_anchors(begun, anyone, origin), model, descent, seed)
        told = yield from together(first, tell=False)
        found = told.get("subspaces")
        state = _with_anchors(begun, told["anchors"], origin)
        if descent.noise:  # kept with the state, so that a run that is continued sends the same copies
            state = replace(state, secret=secret or keys.new_secret())
        if found is None or not len(state.anchors):
            yield Save(state, {"events": [] if len(state.anchors) else ["nobody answered"]})
    if not len(state.anchors):
        return state
    grouping = Grouping(descent.delta, how.swaps, descent.max_clusters, descent.noise, state.secret)
    while True:
        last = descent.iterations if state.arrived == 0 else 2 * descent.iterations
        while state.descents < last:
            state, info = yield from _iteration(state, model, descent, seed, found)
            found = None
            yield Save(state, info)
        theta, events = yield from group_anchors(model, state.local, n_clusters, grouping)
        if state.arrived or not how.further:
            break
        more = yield from badly_served(model, theta, state.anchors, how, n_clusters or descent.max_clusters, seed)
        if not len(more):
            break
        state = _with_anchors(replace(state, arrived=len(state.anchors)), more, origin)
        yield Save(state, {"events": [f"many clients have a high loss: {len(more)} more anchors among them"]})
    nobody = torch.zeros(len(theta), dtype=torch.int64)
    state = replace(state, theta=theta, empty=nobody, unseen=nobody, arrived=len(state.anchors), secret="")
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


def _iteration(state: State, model: Dense, how: Descent, seed: int, found: Subspaces | None = None) -> Run:
    """Steps 7 to 15 for the anchors on their way: subspaces from everybody, then a step by each anchor.  -> state, info

    `found` is the subspace of all anchors, where it is known already.
    """
    moving = slice(state.arrived, None)
    local, anchors = state.local[moving], state.anchors[moving]
    found = found or (yield from _subspaces(state, model, how, seed))
    t = state.descents
    state = replace(state, descents=t + 1)
    if found is None:
        return state, {"events": ["nobody answered"]}
    found = Subspaces(found.basis.expand(len(local), -1, -1), found.values.expand(len(local), -1))
    order = anchors.argsort()  # asks name clients in ascending order
    cycle, part = divmod(t, max(how.resample, 1))
    got = yield Ask(
        descend,
        {"model": model, "estimator": how.estimator, "curvature": how.step == "curvature",
         "step_size": torch.tensor(how.step_size, dtype=model.dtype),
         "least": torch.tensor(how.eps * how.delta, dtype=model.dtype),
         "resample": how.resample, "part": torch.tensor(part), "shuffle": keys.key(seed, cycle, "resample")},
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


def _subspaces(state: State, model: Dense, how: Descent, seed: int) -> Run:
    """Step 9: the subspaces of all anchors on their way, in the same exchanges.  -> Subspaces, or None if nobody answered

    Of anchors that are all at one point, it is one.
    """
    t, local, before = state.descents, state.local[state.arrived :], state.basis[state.arrived :]
    alike = bool((local == local[0]).all())  # at theta_0 all anchors have one subspace
    points, rank = local[:1] if alike else local, before.shape[-1]
    draw = keys.generator(seed, t, "subspace")
    columns = _columns(how, rank, model.n_parameters, alike)
    start = torch.randn(len(points), model.n_parameters, columns, generator=draw, dtype=model.dtype)
    if bool(before.any()):
        start[..., :rank] = before[: len(points)]  # anchors have moved a little only
    there: There | None = None
    if how.noise or how.resample:
        there = yield from who_is_there()
        there = fresh(there, state.anchors, seed, t, how.resample) if there and how.resample else there
        if there is None:
            return None
    copies = perturbed(points, there.lots, how.noise, state.secret, t, "copies") if there and how.noise else None

    def multiply(q: Tensor, transposed: bool) -> Generator[Ask | Save, Replies | None, Tensor | None]:
        shared = {"model": model, "q": q, "estimator": how.estimator, "transposed": transposed}
        return _multiply(shared, points, copies, None if there is None else there.ids)

    find, exchanges = (orthogonal_iteration if how.subspace == "orthogonal" else range_finder), how.exchanges
    if find is range_finder and columns == model.n_parameters:
        exchanges = 1  # the start spans everything: more would find the same
    elif find is range_finder and how.at_once:
        find, exchanges = leading_range, 1 if bool(before.any()) else 2
    return (yield from find(multiply, start, rank, exchanges))


def _columns(how: Descent, rank: int, size: int, alike: bool) -> int:
    """How many columns are multiplied at a point: more in a single exchange, as long as they are thin."""
    if how.subspace == "orthogonal":
        return rank
    columns = rank + how.oversampling
    if how.at_once:
        points = how.anchors.wanted(rank) if alike else 1
        columns = max(columns, min(size // 2, how.exchanges * columns * points))
    return min(columns, size)


def _multiply(
    shared: dict[str, Any], points: Tensor, copies: Tensor | None, to: Tensor | None
) -> Generator[Ask | Save, Replies | None, Tensor | None]:
    """Ask for clients' share of Y Q, or Y^T Q, at each of the points; with copies, at theirs.  q [A, P, L] -> [A, P, L]"""
    q = shared["q"]
    got = yield Ask(
        multiply_moments,
        shared | ({"theta": points} if copies is None else {}),
        {"product": Sum(), "weight": Sum()},
        each={} if copies is None else {"copies": copies},
        to=to,
        scratch=len(q) * (3 * q.shape[-1] + 2),
        limits={"product": SPREAD, "weight": COUNT},
    )
    if got is None or got.n == 0:
        return None
    product = got["product"].view(q.shape[1], *q.shape[::2]).transpose(0, 1)  # [P, A L] -> [A, P, L]
    out: Tensor = product / got["weight"].clamp(min=1.0).to(product.dtype)
    return out
