# SPDX-License-Identifier: Apache-2.0
"""Linear representations: a common subspace for everybody's features, and a head each, in closed form.

Tziotis, Shen, Pedarsani, Hassani, Mokhtari, "Straggler-Resilient Personalized Federated Learning", Algorithm 2, whose rounds
are those of FedRep (Collins et al., ICML 2021). Client i has y = w_i^T B^T x + noise. The stages of Algorithm 2, who takes
part when, are not here: `srpfl.py` puts them around any algorithm.

Departures: no client sends its D x D matrix P_i, only its product with a thin matrix; P is shifted by a multiple of the
identity, which leaves the subspace as it is and makes it stand out. Batches are fresh as long as a client has rows that it
did not use; then they begin again, in another order. QR leaves R's diagonal positive, so that heads stay where they were.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.robust import Robust, robustly
from coterie.algorithms.subspace import Subspaces, range_finder
from coterie.protocol import (
    EVERYBODY,
    Ask,
    Block,
    Replies,
    Save,
    Sum,
    Tensors,
    WeightedMean,
    answers,
    one_run_at_a_time,
)

__all__ = [
    "State",
    "improve_representation",
    "linear_representation",
    "moment_start",
    "multiply_squares",
    "random_start",
]

Weighting = Literal["clients", "rows"]


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    theta: Tensor  # [D, K] the paper's B, with orthonormal columns
    round: int = 0


def linear_representation(
    state: State | None,
    *,
    n_features: int,
    rank: int,
    rounds: int,
    step_size: float,
    seed: int,
    start: Literal["moments", "random"] | Tensor = "moments",
    batch_size: int | None = None,
    weighting: Weighting = "clients",
    robust: Robust = "none",
) -> Generator[Ask | Save, Replies | None, State]:
    """Find the subspace that everybody's models lie in; heads stay with the clients, as `head` in their private state.

    Rows are float64, as for all linear models.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    n_features, rank : int
        D, and the paper's k.
    rounds : int
        All rounds together; the start is not counted.
    step_size : float
        The paper's eta, for a loss of half the mean squared residual.
    seed : int
        Of the start and of batches.
    start : {"moments", "random"} or Tensor
        Method of moments, a random subspace, or a given one [D, K].
    batch_size : int, optional
        m, rows of a round; all rows by default.
    weighting : {"clients", "rows"}
        Whether clients count alike (the paper), or by their rows.
    robust : {"none", "clip", "trimmed", "median", "near"}
        How updates are averaged where some clients are bad: see `robust.py`.
    """
    if state is None:
        state, events = yield from _begin(start, n_features, rank, seed, batch_size, weighting)
        yield Save(state, {"events": events})
    while state.round < rounds:
        ask = Ask(
            improve_representation,
            {
                "theta": state.theta,
                "step_size": torch.tensor(step_size, dtype=state.theta.dtype),
                "key": keys.key(seed, "batches"),
                "round": state.round + 1,  # the first batch was for the start
                "batch_size": batch_size,
                "by_rows": weighting == "rows",
            },
            fold={"update": WeightedMean("weight"), "loss": WeightedMean("weight"), "weight": Sum()},
            fresh={"head": torch.zeros(rank, dtype=state.theta.dtype)},
            scratch=n_features + rank,  # a batch is a copy
        )
        got = yield robustly(ask, robust, state.theta.flatten())
        state = replace(state, round=state.round + 1)
        if got is None or got.n == 0 or not got["weight"]:  # everybody was late or has no rows: the round is lost
            yield Save(state, {"events": ["nobody answered"]})
            continue
        state = replace(state, theta=_orthonormal(state.theta + got["update"]))  # Alg. 2, lines 13 and 14
        yield Save(state, {"loss": float(got["loss"])})
    return state


def _begin(
    start: Literal["moments", "random"] | Tensor,
    n_features: int,
    rank: int,
    seed: int,
    batch_size: int | None,
    weighting: Weighting,
) -> Generator[Ask | Save, Replies | None, tuple[State, list[str]]]:
    """Make the first state, and say what went wrong."""
    if isinstance(start, Tensor):
        return State(_orthonormal(start)), []
    if start == "moments":
        found = yield from moment_start(
            n_features=n_features, rank=rank, seed=seed, batch_size=batch_size, weighting=weighting
        )
        if found is not None:
            return State(found), []
    events = [] if start == "random" else ["nobody answered: a random start in place of the method of moments"]
    return State(random_start(n_features, rank, seed=seed)), events


def random_start(n_features: int, rank: int, *, seed: int) -> Tensor:
    """Draw a subspace, each as likely as any other.  [D, K]"""
    draws = keys.generator(seed, "random representation")
    return _orthonormal(torch.randn(n_features, rank, generator=draws, dtype=torch.float64))


def moment_start(
    *,
    n_features: int,
    rank: int,
    seed: int,
    batch_size: int | None = None,
    weighting: Weighting = "clients",
    exchanges: int = 6,
    oversampling: int = 8,
) -> Generator[Ask | Save, Replies | None, Tensor | None]:
    """Lines 2 and 3: the leading subspace of the mean of P_i = (1/m) sum y^2 x x^T.  -> [D, K], or None if nobody answered

    For normal features with unit covariance, P is near E[y^2] I + 2 B W^T W B^T / n. Without its first part, only the
    subspace that is looked for is left, and few exchanges find it.

    Parameters
    ----------
    n_features, rank, seed, batch_size, weighting
        As for `linear_representation`.
    exchanges : int
        How often everybody multiplies.
    oversampling : int
        Columns beyond the rank.
    """
    draws, key = keys.generator(seed, "moments"), keys.key(seed, "batches")
    first = torch.randn(1, n_features, min(rank + oversampling, n_features), generator=draws, dtype=torch.float64)

    def multiply(q: Tensor, transposed: bool) -> Generator[Ask | Save, Replies | None, Tensor | None]:
        got = yield Ask(
            multiply_squares,
            {"q": q[0], "key": key, "batch_size": batch_size, "by_rows": weighting == "rows"},
            fold={"product": WeightedMean("weight"), "square": WeightedMean("weight"), "weight": Sum()},
            scratch=n_features + q.shape[-1],  # a batch is a copy
            enough=EVERYBODY,
        )
        if got is None or got.n == 0 or not got["weight"]:
            return None
        out: Tensor = got["product"] - got["square"] * q[0]
        return out[None]

    found: Subspaces | None = yield from range_finder(multiply, first, rank, exchanges)
    return None if found is None else _orthonormal(found.basis[0])


def _orthonormal(b: Tensor) -> Tensor:
    """QR, with the signs that make it unique.  [D, K]"""
    q, r = torch.linalg.qr(b)
    out: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(b.dtype)
    return out


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(product=WeightedMean("weight"), square=WeightedMean("weight"), weight=Sum())
@one_run_at_a_time
def multiply_squares(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """A client's P_i Q, and its mean of y^2."""
    x, y, w = _batch(data, shared["batch_size"], shared["key"], 0)
    square = w * y.square()  # [C, m]
    product = x.transpose(1, 2) @ (square[..., None] * (x @ shared["q"]))  # [C, D, L]
    return {"product": product, "square": square.sum(1), "weight": _counts(data, shared["by_rows"])}, {}


@answers(update=WeightedMean("weight"), loss=WeightedMean("weight"), weight=Sum())
@one_run_at_a_time
def improve_representation(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[Tensors, Tensors]:
    """Lines 9 to 11: the best head for the representation, and one gradient step on the representation."""
    x, y, w = _batch(data, shared["batch_size"], shared["key"], shared["round"])  # [C, m, D], [C, m], [C, m]
    z = x @ shared["theta"]  # [C, m, K]
    head = _least_squares(z, y)  # [C, K], line 10
    residual = y - (z @ head[..., None])[..., 0]
    minus_gradient = x.transpose(1, 2) @ ((w * residual)[..., None] * head[:, None])  # [C, D, K]
    reply = {
        "update": shared["step_size"] * minus_gradient,
        "loss": (w * residual.square()).sum(1) / 2,
        "weight": _counts(data, shared["by_rows"]),
    }
    return reply, {"head": head}


def _counts(data: Block, by_rows: bool) -> Tensor:
    """What each client counts; one without rows, nothing.  [C]"""
    return (data.n if by_rows else data.n > 0).to(torch.float64)


def _batch(data: Block, size: int | None, key: Tensor, round_: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a round, zero where there are none, and their weights: 1/m where they are real.  [C, m, D], [C, m], [C, m]

    Every client shuffles its rows and deals them in batches; a remainder that fills none waits for the next shuffling.
    """
    if size is None or size >= data.x.shape[1]:
        return data.x, data.target, data.weights
    batches = (data.n // size).clamp(min=1)  # [C] of one shuffling
    order = keys.permuted(keys.key(key, round_ // batches, data.keys), data.real)  # [C, N]
    place = (round_ % batches * size)[:, None] + torch.arange(size)  # [C, m]
    here = order.gather(1, place.clamp(max=order.shape[1] - 1))
    real = (place < data.n[:, None]).to(data.x.dtype)
    x = data.x.gather(1, here[..., None].expand(-1, -1, data.x.shape[2])) * real[..., None]
    return x, data.target.gather(1, here) * real, real / real.sum(1, keepdim=True).clamp(min=1)


def _least_squares(z: Tensor, y: Tensor) -> Tensor:
    """The shortest of the vectors that fit best, for every client.  z [C, m, K], y [C, m] -> [C, K]"""
    if not z.shape[1]:
        return z.new_zeros(len(z), z.shape[2])
    solution: Tensor = torch.linalg.lstsq(z, y[..., None], driver="gelsd").solution
    return solution[..., 0]
