# SPDX-License-Identifier: Apache-2.0
"""The two baselines: one model for all (FedAvg, FedProx; closed form for ridge regression), and one model each.

McMahan et al., AISTATS 2017, Algorithm 1; Li et al., MLSys 2020 (FedProx: `Training.proximal`).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.averaging import State, averaged
from coterie.algorithms.robust import Robust
from coterie.local import Training, client_losses, outputs, own_outputs, train, training_moves, worst_if_nan
from coterie.local.least_squares import gram, ridge, solve_ridge
from coterie.models import Dense, Model
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean, answers, from_sums

__all__ = ["LocalState", "RidgeState", "State", "fedavg", "local_models", "local_ridge", "pooled_ridge"]


def fedavg(
    state: State | None,
    *,
    model: Model,
    rounds: int,
    step_size: float,
    seed: int,
    training: Training = Training(),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "rows",
    tol: float = 0.0,
    robust: Robust = "none",
) -> Generator[Ask | Save, Replies | None, State]:
    """Train one model for all clients; with `training.proximal` this is FedProx."""
    if state is None:
        state = State(model.initial(1, keys.generator(seed, "start"))[0])
        yield Save(state)

    def question(now: State) -> Ask:
        return Ask(
            train_shared,
            {
                "model": model,
                "theta": now.theta,
                "step_size": torch.tensor(step_size * decay**now.round, dtype=torch.float64),
                "key": keys.key(seed, now.round, "fedavg"),
                "training": training,
                "by_rows": weighting == "rows",
            },
            fold={"update": WeightedMean("weight"), "loss": WeightedMean("n"), "n": Sum()},
            work=training.work(),
            scratch=model.n_outputs,
        )

    return (yield from averaged(state, question, rounds=rounds, tol=tol, robust=robust))


def pooled_ridge(state: State | None, *, model: Dense, l2: float) -> Generator[Ask | Save, Replies | None, State]:
    """Fit ridge regression to everybody's rows, exactly, from one sum of products."""
    if state is None or state.round == 0:
        got = yield Ask(products, {"model": model}, {"gram": Sum(), "n": Sum()})
        if got is None or got.n == 0:
            state = State(torch.zeros(model.n_parameters, dtype=model.dtype))
            yield Save(state, {"events": ["nobody answered"]})
            return state
        state = State(solve_ridge(model, got["gram"], float(got["n"]), l2), round=1)
        yield Save(state)
    return state


@dataclass(frozen=True)
class LocalState:
    """Local models live with the clients; the server only counts rounds."""

    round: int = 0


def local_models(
    state: LocalState | None,
    *,
    model: Model,
    rounds: int,
    step_size: float,
    seed: int,
    training: Training = Training(),  # noqa: B008  (frozen)
    decay: float = 1.0,
    l2: float = 1e-3,
    together: int = 1,
) -> Generator[Ask | Save, Replies | None, LocalState]:
    """Train one model per client, from a common start, never averaged; it stays in the client's private state.

    Linear regression is fitted in closed form in one round. `together` is how many rounds a question asks for: it changes
    nothing but the number of messages.
    """
    state = state or LocalState()
    closed = isinstance(model, Dense) and model.is_linear and model.loss == "squared"
    last = 1 if closed else rounds
    while state.round < last:
        asked = range(state.round, min(state.round + together, last))
        got = yield Ask(
            train_private,
            {
                "model": model,
                "step_size": torch.tensor([step_size * decay**number for number in asked], dtype=torch.float64),
                "key": torch.stack([keys.key(seed, number, "local") for number in asked]),
                "training": training,
                "l2": l2 if closed else None,
            },
            fold={"loss": WeightedMean("n")},
            fresh={"theta": model.initial(1, keys.generator(seed, "start"))[0]},
            work=len(asked) * training.work(),
            scratch=model.n_outputs,
        )
        state = replace(state, round=asked.stop)
        if got is None or got.n == 0:
            yield Save(state, {"events": ["nobody answered"]})
        else:
            yield Save(state, {"loss": float(got["loss"])})
    return state


@dataclass(frozen=True)
class RidgeState:
    """The penalty that was chosen; the models live with the clients."""

    l2: float
    fitted: bool = False


def local_ridge(
    state: RidgeState | None, *, model: Dense, penalties: Sequence[float], share: float, seed: int
) -> Generator[Ask | Save, Replies | None, RidgeState]:
    """Fit ridge regression to every client's rows alone, with the penalty that is best for all of them together.

    Parameters
    ----------
    penalties : sequence of float
        To choose from, on rows that every client holds out.
    share : float
        Of its rows that a client holds out for that, by the seed, as `Ragged.split` does for the purpose "validation".
    """
    if state is None:
        shared = {"model": model, "penalties": tuple(penalties), "share": share, "seed": torch.tensor(seed)}
        got = yield Ask(try_penalties, shared, {"loss": Sum()}, scratch=len(penalties))
        best = 0 if got is None or got.n == 0 else int(worst_if_nan(got["loss"]).argmin())
        state = RidgeState(penalties[best])
        yield Save(state)
    if not state.fitted:
        alone = local_models(None, model=model, rounds=1, step_size=0.0, seed=seed, l2=state.l2)
        yield next(alone)
        state = replace(state, fitted=True)
        yield Save(state)
    return state


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(update=WeightedMean("weight"), loss=WeightedMean("n"), n=Sum())
@from_sums
def train_shared(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[dict[str, Any], Tensors]:
    """Train from the model that everybody got, and send how far it moved."""
    model, theta = shared["model"], shared["theta"]  # [S, P]
    scores = outputs(model, theta[:, None], data)[:, 0]  # [S, C, N, O]
    loss = client_losses(model, scores, data)  # [S, C]
    start = theta[:, None].expand(-1, len(data.n), -1)
    update = training_moves(model, start, scores, data, shared["step_size"], shared["training"], shared["key"])
    n = data.n.to(torch.float64).expand(len(theta), -1)
    weight = n if shared["by_rows"] else (n > 0).to(torch.float64)
    return {"update": update, "loss": loss.to(torch.float64), "n": n, "weight": weight}, {}


@answers(loss=WeightedMean("n"))
@from_sums
def train_private(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Go on training the client's own model, for one round or several."""
    model, theta = shared["model"], private["theta"]  # [S, C, P]
    if shared["l2"] is not None:
        theta = ridge(model, data, max(shared["l2"], model.l2 / 2)).expand(theta.shape)
    else:
        for step_size, key in zip(shared["step_size"].T, shared["key"].T, strict=True):  # [S] each
            theta = train(model, theta, data, step_size, shared["training"], key)
    loss = client_losses(model, own_outputs(model, theta, data), data)  # [S, C]
    n = data.n.to(torch.float64).expand(len(theta), -1)
    return {"loss": loss.to(torch.float64), "n": n}, {"theta": theta}


@answers(loss=Sum())
@from_sums  # rows that stand in for others lie where the draw for "validation" finds them
def try_penalties(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Total loss on rows that a client holds out, of its ridge regression on the others with each penalty.  [S, C, L]"""
    model = shared["model"]
    rest, held = _held_out(data, keys.key(shared["seed"][0], "validation", data.keys), shared["share"])
    found = torch.stack([ridge(model, rest, max(l2, model.l2 / 2)) for l2 in shared["penalties"]])  # [L, C, P]
    loss = client_losses(model, own_outputs(model, found, held), held) * held.n  # [L, C]
    return {"loss": torch.where(held.n > 0, loss, 0.0).T[None].to(torch.float64)}, {}


def _held_out(data: Block, key: Tensor, share: float) -> tuple[Block, Block]:
    """Hold out a share of every client's rows; a client keeps at least one.  key [C] -> (rest, held out)"""
    rank = keys.permuted(key, data.real).argsort(-1)  # [C, N] each row's place in a random order
    taken = torch.minimum((data.n * share).round().to(data.n.dtype), (data.n - 1).clamp(min=0))
    mask = rank < taken[:, None]
    return (
        Block(data.ids, data.keys, data.x, data.y, data.n - taken, data.real & ~mask),
        Block(data.ids, data.keys, data.x, data.y, taken, mask),
    )


@answers(gram=Sum(), n=Sum())
@from_sums
def products(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sums of products for exact ridge regression."""
    return {"gram": gram(shared["model"], data)[None], "n": data.n[None]}, {}
