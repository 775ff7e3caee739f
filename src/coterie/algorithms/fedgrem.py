# SPDX-License-Identifier: Apache-2.0
"""FedGrEM: gradient EM on every client, and a robust centre of what they find.

Tian, Weng, Feng, "Towards the Theory of Unsupervised Federated Learning: Non-asymptotic Analysis of Federated EM
Algorithms", ICML 2024, Algorithm 1.

A client's estimate after the central update follows from the centre and from what it sent: theta = centre + D, where D is
the soft-thresholded difference. So the server sends the centre and lambda only, and clients keep what they sent.

Departures, all of which `penalty`, `together`, `robust`, `reject`, `share_weights`, `inner` and `capped` can undo:

- The penalty on a client's distance from the centre is squared, as under a normal law of the clients' parameters. So a
  component with few rows is drawn far and one with many hardly; under the paper's norm all are drawn equally far, too little
  for the few rows at the C that is best for most. Its proximal step takes the place of the soft threshold. The centre stays
  the paper's, with C = 2, so that it is robust where parameters are common.
- The central update is solved until it converges (the authors' loop stops after one step); sample sizes may differ.
- A step is never longer than C_eta of the best one where the objective bends most, by power iteration (the paper's
  C_eta / w0 diverges when a component grows).
- A scale that components share (a covariance, a noise variance) may be estimated, from sums over the clients that are no
  outliers, and lengths are then in its units.
- C_lambda may be 0 (every client alone) or infinite (common parameters).
- Clients begin together and part as far as C lets them, since the optima that few rows lead to are often bad (the paper
  begins with lambda_0 = 1, and kappa = 0.1 forgets it at once). Once parted, who finds its own first fit about as likely
  goes back.
- Proportions have a few rows more, dealt by the common proportions: else a component that a client hardly has, or two that
  are close, fade away or run off after single rows.
- Clients that were heard once take part in the central update with what they sent last; outliers may be left out of it, and
  alone.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.central import central_update, central_weights, drawn, shrunk
from coterie.algorithms.mixture_starts import NEAR, REVEALED, MixtureStart, Started, aligned_start, fresh_mixture
from coterie.algorithms.neighbours import fresh_centre, own_centre, tell_centres
from coterie.algorithms.outliers import chance, outlier_scores, scored, usual
from coterie.models.families import Family, expect, gradient_step, shares, typical_length
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors, WeightedMean, answers, reveals

__all__ = ["Penalty", "State", "central_update", "estimates", "fedgrem", "gradient_em", "scores", "shrunk"]

Run = Generator[Ask | Save, Replies | None, Any]
Penalty = Literal["squared", "norm"]

_PARTING = 0.8  # what a round leaves of the penalty that clients begin with
_RETURN = 0.5  # share of the limit of outlier scores below which one that was left alone is drawn to the centre again
_SHORTER = -2 / 3  # power of the round by which steps with batches become shorter
_STEADY = 0.01  # relative change of the penalty in a round below which estimates may count as settled
_CLEARLY = 2.0  # log-likelihood by which what a client was led to must be better than its own first fit, for it to stay
_FREE = 1.0  # and so much more where nothing draws it to the centre
_TINY = 1e-12  # weight of a component that counts as none
_HUGE = 1e100  # squares of what is sent, summed up, still fit


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    centre: Tensor  # [R, P] of everybody; with neighbours clients are drawn to their own
    tilde: Tensor  # [M, R, P] what each client sent last; M is 0 before the start
    n: Tensor  # [M] rows; 0 for who was never heard
    away: Tensor  # [M] mean distance from the centre, as each client said last
    scale: Tensor  # [...] of the family
    mean_weights: Tensor  # [R] centre of the mixture proportions, for when they are drawn together
    lam: float = 1.0  # lambda_t
    pull: float = 0.0  # lambda, or C of the squared penalty, of the last central update: none before the first
    round: int = 0
    parted: bool = False  # whether the penalty is steady by now, and clients could go back to their own first fits
    settled: bool = False


def fedgrem(
    state: State | None,
    *,
    family: Family,
    n_components: int,
    rounds: int,
    seed: int,
    c_lambda: float = 2.0,
    penalty: Penalty = "squared",
    c_eta: float = 0.95,
    kappa: float = 0.1,
    together: float = 8.0,
    robust: float = 2.0,
    start: MixtureStart = MixtureStart(),  # noqa: B008  (frozen)
    share_weights: float = 4.0,
    reject: float = math.inf,
    batch_size: int | None = None,
    tol: float = 0.0,
    inner: int | None = None,
    capped: bool = True,
    sparse: float = 0.0,
    neighbours: int = 0,
) -> Run:
    """Fit a mixture to every client, each helped by the others as far as they are alike.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    family : Family
        Of the components.
    n_components, rounds : int
        R and T.
    c_lambda : float
        C of the penalty: 0 leaves every client alone, infinity makes parameters common.
    penalty : {"squared", "norm"}
        C^2 / 2 times the squared distance from the centre, in units of the scale: 1 / C is how much clients' parameters
        deviate. Or the paper's, lambda_t sqrt(n) times the distance.
    c_eta : float
        Step size times a component's first weight.
    kappa : float
        Of the norm's lambda_t = kappa lambda_(t-1) + C sqrt(P + log M), lambda_0 = 1; with C = 0 all lambdas are 0.
    together : float
        Clients begin together: C of a further penalty, which shrinks by a fifth in every round; 0 is the paper's.
    robust : float
        Largest C that the centre is computed with. A larger one averages, and bad clients that go unnoticed would count in
        full; infinity is the paper's.
    start : MixtureStart
        Local EM and alignment.
    share_weights : float
        Rows for each component that every client's proportions have besides its own, dealt by the common proportions: many
        make proportions common, few keep a component from fading away at a client; 0 is the paper's.
    reject : float
        Outlier score above which a client has no part in the central update, and is left alone if it is still there when
        penalties are steady; the paper has no such limit.
    batch_size : int, optional
        Rows of a round, drawn anew; all by default. With batches steps become shorter, as (t + 1)^(-2/3), and proportions
        are averaged at the same rate, so that single batches do not matter; all rounds are made, and nobody goes back.
    tol : float
        Stop when nobody's estimate moves by more than this, relative to the centres' lengths; 0 never stops early.
    inner : int, optional
        Steps of the central update, each from the mean; until it converges by default. The authors' code makes one.
    capped : bool
        Whether a step is never longer than C_eta of the best one; the authors' is C_eta / w0 whatever comes of it.
    sparse : float
        l1 penalty on the centre (appendix D), against n_k / 2 times squared distances: coordinates that are small at most
        clients become 0 in it. In units of the scale, which must not mix coordinates: no full covariance.
    neighbours : int
        Of each client on either side in a ring by number, whose estimates and its own make the centre that it is drawn to
        (appendix D, decentralised; simulated: see `neighbours.py`). 0 is Algorithm 1's: one centre, of everybody. The scale,
        the mean proportions and the usual distance are of everybody all the same.
    """
    fresh = fresh_mixture(n_components, family) | (fresh_centre(n_components, family) if neighbours else {})
    if state is None:
        state = yield from _begin(family, n_components, start, seed)
    while state.round < rounds and not state.settled:
        if not len(state.n):  # nobody was there at the start: try again
            state = yield from _begin(family, n_components, start, seed, state.round + 1)
            continue
        lam, pull = _next_lambda(state, family, c_lambda, penalty, kappa, together)
        steady = math.isclose(state.pull, pull, rel_tol=_STEADY)  # else what changes may well move estimates again
        batches = batch_size is not None and batch_size < int(state.n.max())
        back = steady and together > 0 and not state.parted and not batches
        rate = (state.round + 1) ** _SHORTER if batches else 1.0
        got = yield Ask(
            gradient_em,
            {
                "family": family, "centre": state.centre, "scale": state.scale, "mean_weights": state.mean_weights,
                "pull": _number(state.pull), "penalty": penalty, "c_eta": _number(c_eta),
                "share_weights": _number(share_weights),
                "usual": state.away.new_tensor(usual(state.away[state.n > 0])),
                "key": keys.key(seed, state.round, "fedgrem"), "batch_size": batch_size, "capped": capped,
                "reject": _number(reject if steady else math.inf), "back": torch.tensor(back),
                "rate": _number(rate),
            },
            {
                "estimate": Stack(), "n": Stack(), "away": Stack(), "scatter": Sum(), "within": Sum(), "shares": Sum(),
                "counted": Sum(),
                "loss": WeightedMean("n"),
            },
            fresh=fresh,
            scratch=6 * n_components,
        )  # fmt: skip
        state = replace(state, round=state.round + 1, parted=steady or state.parted)
        if got is None or got.n == 0 or not bool((got["n"] > 0).any()):
            yield Save(state, {"events": ["nobody answered"]})
            continue
        before = state
        state = _remembered(state, got.ids, got["estimate"], got["n"], got["away"])
        part = (state.n > 0) & (scores(state) <= reject)
        most = robust * _root(state, family) / (1 - kappa)
        reach = min(pull, most) if penalty == "norm" else most * bool(pull)
        if neighbours and reach:
            at, how = family.coordinates(state.tilde, state.scale), {"steps": inner, "sparse": sparse}
            yield from tell_centres(got.ids, state.tilde, at, state.n, part, reach, family, neighbours, **how)
        state = replace(_updated(state, got, family, part, reach, inner, rate, sparse), lam=lam, pull=pull)
        change = _change(before, state, family, part)
        state = replace(state, settled=bool(tol) and steady and not back and not batches and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), "change": change})
    return state


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _begin(family: Family, n_components: int, start: MixtureStart, seed: int, round_: int = 0) -> Run:
    """Start, and save.  -> State"""
    found: Started | None = yield from aligned_start(family, n_components, start, seed)
    equal = torch.full((n_components,), 1.0 / n_components, dtype=torch.float64)
    zero = torch.zeros(n_components, family.n_parameters, dtype=torch.float64)
    nobody = torch.zeros(0, dtype=torch.int64)
    state = State(zero, zero[None][:0], nobody, nobody.double(), family.unit_scale(), equal, round=round_)
    if found is not None:
        centre = found.theta[found.n > 0].median(0).values  # outliers do not matter yet
        away = family.coordinates(found.theta - centre, found.scale).norm(dim=-1).mean(1)
        state = _remembered(state, found.ids, found.theta, found.n, away)
        state = replace(state, centre=centre, scale=found.scale, mean_weights=found.weights)
    yield Save(state, {"events": [] if found is not None else ["nobody answered"]})
    return state


def _root(state: State, family: Family) -> float:
    """sqrt(P + log M)"""
    return math.sqrt(family.n_parameters + math.log(max(int((state.n > 0).sum()), 1)))


def _next_lambda(
    state: State, family: Family, c_lambda: float, penalty: Penalty, kappa: float, together: float
) -> tuple[float, float]:
    """lambda_t = kappa lambda_(t-1) + C sqrt(P + log M), or C itself; and with what draws clients together at first."""
    if c_lambda == 0:
        return 0.0, 0.0
    root = _root(state, family) if penalty == "norm" else 1.0
    lam = c_lambda * root + (kappa * state.lam if penalty == "norm" else 0.0)
    return lam, lam + together * _PARTING**state.round * root


def _remembered(state: State, ids: Tensor, tilde: Tensor, n: Tensor, away: Tensor) -> State:
    """Keep what clients sent. Who has not been heard of has no rows, and neither has who sent what is no number."""
    if not bool((tilde.abs() <= _HUGE).all()):
        known = ~tilde.flatten(1).isnan().any(1)
        tilde, n = torch.where(known[:, None, None], tilde.clamp(-_HUGE, _HUGE), 0.0), torch.where(known, n, 0)
    size = max(len(state.n), int(ids[-1]) + 1)
    if len(ids) < size:
        old = (state.tilde, state.n, state.away)
        tilde, n, away = (_placed(o, v, ids, size) for o, v in zip(old, (tilde, n, away), strict=True))
    return replace(state, tilde=tilde, n=n, away=away)


def _placed(old: Tensor, new: Tensor, ids: Tensor, size: int) -> Tensor:
    """Old values by client, with the new ones in their places.  [M, ...], [C, ...] -> [size, ...]"""
    both = old.new_zeros(size, *old.shape[1:])
    both[: len(old)], both[ids] = old, new
    return both


def _updated(
    state: State, got: Replies, family: Family, part: Tensor, lam: float, inner: int | None, rate: float, sparse: float
) -> State:
    """The central update of those who have a part in it [M], and, at some rate, the common scale and proportions."""
    tilde = state.tilde[part]
    if lam:
        at, begin = (family.coordinates(theta, state.scale) for theta in (tilde, state.centre))
        centre = (central_weights(at, state.n[part], lam, begin, inner, sparse) * tilde).sum(0)
    else:  # nobody is drawn to it, and any will do
        centre = tilde.median(0).values
    within = got["within"]
    scale = family.scale_of(got["scatter"], within) if float(within) > 0 else state.scale
    counted = float(got["counted"])
    mean_weights = got["shares"] / counted if counted > 0 else state.mean_weights
    scale, mean_weights = state.scale.lerp(scale, rate), state.mean_weights.lerp(mean_weights, rate)
    return replace(state, centre=centre, scale=scale, mean_weights=mean_weights)


def scores(state: State) -> Tensor:
    """Outlier score of every client: robust z of its mean distance from its centre.  [M]; -inf for who was never heard"""
    there = state.n > 0
    out = torch.full(there.shape, -math.inf, dtype=torch.float64)
    out[there] = outlier_scores(state.away[there], chance(state.n[there], *state.centre.shape))
    return out


def estimates(state: State, family: Family, private: Tensors, n: Tensor, penalty: Penalty = "squared") -> Tensor:
    """Every client's parameters after the last central update, from its private state.  n [M] -> [M, R, P]"""
    return _estimate(family, private, own_centre(private, state.centre), state.scale, _number(state.pull), n, penalty)


def _estimate(
    family: Family, private: Tensors, centre: Tensor, scale: Tensor, pull: Tensor, n: Tensor, penalty: Penalty
) -> Tensor:
    """What the central update leaves of what a client sent; who missed the start is at the centre.

    private of [..., C, R, P], centre [..., 1 | C, R, P], pull [..., 1, 1], n [C] -> [..., C, R, P]
    """
    rows, free = n.clamp(min=1).to(torch.float64)[:, None], private["alone"][..., None]
    if penalty == "squared":
        theta = drawn(private["tilde"], centre, torch.where(free, 0.0, pull), private["stride"] / rows)
    else:
        at = family.coordinates(private["tilde"] - centre, scale) if family.has_scale else None
        reach = torch.where(free, 0.0, private["rate"][..., None] * pull / rows.sqrt()).expand(private["weights"].shape)
        theta = shrunk(private["tilde"], centre, reach, at)
    return torch.where(private["begun"][..., None, None], theta, centre)


def _change(before: State, after: State, family: Family, part: Tensor) -> float:
    """Largest move of an estimate that has a part in the centre, relative to the centres' typical length."""
    both = (before.n > 0) & part[: len(before.n)]
    moved = family.coordinates(after.tilde[: len(before.n)] - before.tilde, after.scale).norm(dim=-1)[both]
    if not moved.numel():
        return 1e150
    return float(moved.max().clamp(max=1e150)) / typical_length(after.centre, after.scale, family)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    estimate=Stack(),
    n=Stack(),
    away=Stack(),
    scatter=Sum(),
    within=Sum(),
    shares=Sum(),
    counted=Sum(),
    loss=WeightedMean("n"),
)
@reveals(*REVEALED)
def gradient_em(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Local update: E-step, proportions, and a gradient step from the estimate of the last central update."""
    if shared["batch_size"] is not None:
        return _on_batches(shared, private, data)
    return _local_update(shared, private, data, data.n)


def _local_update(shared: dict[str, Any], private: Tensors, data: Block, n: Tensor) -> tuple[Tensors, Tensors]:
    """The local update with the rows of `data`, at clients that have n rows."""
    family, scale = shared["family"], shared["scale"][:, None]  # [S, 1, ...]
    centre = own_centre(private, shared["centre"][:, None])  # [S, 1 | C, R, P]
    present = data.n > 0
    theta = _estimate(family, private, centre, scale, shared["pull"][:, None, None], n, shared["penalty"])
    weights = private["weights"]
    if bool(shared["back"].any()):
        theta, weights = _likelier(shared, private, theta, weights, data, n)
    gamma, likelihood = expect(family.log_density(theta, scale, data), weights, data)
    mean = torch.where(present[:, None], shares(gamma, data), weights)  # Alg. 1: w_r = mean of gamma_ir
    new, counts = _shared_weights(shared, mean, n, data.n)
    rate = shared["rate"][:, None]
    new = weights.lerp(new, rate[..., None])
    tilde, along, step = gradient_step(
        family, theta, gamma, data, private, shared["c_eta"] * shared["rate"], capped=shared["capped"]
    )
    # a component without rows says nothing, so that distances count by their shares
    away = (family.coordinates(tilde - centre, scale).norm(dim=-1).clamp(max=1e150) * new).sum(-1)  # [S, C]
    middle, spread = shared["usual"][:, :1], shared["usual"][:, 1:]
    score = scored(away, middle, torch.maximum(spread, chance(n, *centre.shape[2:])))
    near = (score <= NEAR) & private["begun"] & present
    scatter = family.scatter(theta, gamma, data)
    reply = {
        "estimate": tilde,
        "n": n[None],
        "away": away,
        "scatter": torch.where(near.view(*near.shape, *(1,) * (scatter.dim() - 2)), scatter, 0.0),
        "within": (near * data.n).to(torch.float64),
        "shares": mean * counts[..., None] * present[:, None],
        "counted": counts * present,
        "loss": -likelihood,
    }
    first = torch.where(private["begun"][..., None], private["first_weights"], new)
    far = shared["reject"][:, None] * torch.where(private["alone"], _RETURN, 1.0)
    begun, alone = private["begun"] | present, score > far
    kept = {"tilde": tilde, "weights": new, "first_weights": first, "along": along, "stride": step}
    return reply, {**kept, "rate": rate.expand(begun.shape), "begun": begun, "alone": alone}


def _shared_weights(shared: dict[str, Any], mean: Tensor, n: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Proportions with the further rows, and how much a client counts for the common ones: less if it is far from them.

    Round by round the weighted mean becomes Huber's centre, whose reach is what chance does to proportions at most.
    mean [S, C, R] of the rows that were seen [C], of n [C] -> [S, C, R], [S, C]
    """
    rows, common = n.clamp(min=1).to(torch.float64), shared["mean_weights"][:, None]
    more = shared["share_weights"][:, None, None] * mean.shape[-1]
    new = (mean * rows[:, None] + common * more) / (rows[:, None] + more)
    reach = 1.0 / seen.clamp(min=1).to(torch.float64).sqrt()
    return new, reach / torch.maximum((mean - common).norm(dim=-1), reach)


def _likelier(
    shared: dict[str, Any], private: Tensors, theta: Tensor, weights: Tensor, data: Block, n: Tensor
) -> tuple[Tensor, Tensor]:
    """Go back to the client's own first fit, drawn to the centre like any, unless the penalised likelihood is clearly less.

    So a client is no worse off than alone where rows hardly tell; the less draws it to the centre, the more clearly they
    must. Who was held together with clients that are not alike may have ended in an optimum that is theirs, or with a
    component that nothing belongs to: proportions count by the rows that `share_weights` adds, and by one in each component
    at least.
    """
    family, scale, centre = shared["family"], shared["scale"][:, None], own_centre(private, shared["centre"][:, None])
    first, step = private["first_weights"], shared["c_eta"][:, None, None] / private["first_weights"].clamp(min=1e-9)
    own = {**private, "tilde": private["first"], "stride": step}
    pull, rows = shared["pull"][:, None], n.clamp(min=1).to(torch.float64)
    there = _estimate(family, own, centre, scale, pull[..., None], n, shared["penalty"])
    more = (shared["share_weights"][:, None, None] * first.shape[-1] * shared["mean_weights"][:, None]).clamp(min=1.0)
    merit = []
    for at, share in ((theta, weights), (there, first)):
        away = family.coordinates(at - centre, scale).norm(dim=-1)  # [S, C, R]
        if shared["penalty"] == "squared":
            fine = 0.5 * (pull * away.square().sum(-1).sqrt()).square()
        else:
            fine = pull * rows.sqrt() * (share * away).sum(-1)
        likelihood = rows * expect(family.log_density(at, scale, data), share, data)[1]
        merit.append(likelihood + (more * share.clamp(min=_TINY).log()).sum(-1) - fine.nan_to_num(nan=0.0))
    clearly = _CLEARLY + _FREE / (1 + pull.square())
    back = shared["back"][:, None] & private["begun"] & (merit[1] > merit[0] - clearly)
    return torch.where(back[..., None, None], there, theta), torch.where(back[..., None], first, weights)


def _on_batches(shared: dict[str, Any], private: Tensors, data: Block) -> tuple[Tensors, Tensors]:
    """The local update with some rows of every client, drawn anew for every run."""
    size, answers = shared["batch_size"], []
    for s in range(len(shared["key"])):
        own = {name: value[s : s + 1] if isinstance(value, Tensor) else value for name, value in shared.items()}
        some = _batch(data, size, shared["key"][s])
        answers.append(_local_update(own, {name: value[s : s + 1] for name, value in private.items()}, some, data.n))
    reply, kept = ({name: torch.cat([a[i][name] for a in answers]) for name in answers[0][i]} for i in (0, 1))
    return reply, kept


def _batch(data: Block, size: int, key: Tensor) -> Block:
    """Draw rows of every client without replacement."""
    if data.x.shape[1] <= size:
        return data
    rows = keys.permuted(keys.key(key, data.keys), data.real)[:, :size]  # [C, B]
    own = torch.arange(len(rows))[:, None]
    y = None if data.y is None else data.y[own, rows]
    return Block(data.ids, data.keys, data.x[own, rows], y, data.n.clamp(max=size), data.real[own, rows])
