# SPDX-License-Identifier: Apache-2.0
"""IFCA: alternate cluster assignment and per-cluster averaging.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1.

Departures: an empty cluster keeps its model (the paper leaves it undefined) and, when it stays empty, is reseeded from a
badly served client; so is, at once, a model that diverged, which nobody chooses; clients without rows take part without
weight; optional soft labels weigh each model by its posterior.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.robust import Robust, robustly
from coterie.algorithms.starts import Start, another_model, first_models
from coterie.local import Training, chosen, client_losses, outputs, train, training_moves, worst_if_nan
from coterie.local.parts import part_of
from coterie.models import Dense, Model, named_layers
from coterie.protocol import (
    Ask,
    Block,
    ByCluster,
    ClusterSums,
    Replies,
    RowProduct,
    Save,
    Sum,
    Tensors,
    WeightedMean,
    answers,
    from_sums,
)

__all__ = ["State", "assign_and_train", "ifca", "shared_parameters"]

_ENOUGH = 8  # answers per cluster: a cluster of average size is missed by 8 K clients once in 3,000 times

Run = Generator[Ask | Save, Replies | None, "State"]


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    theta: Tensor  # [K, P]
    empty: Tensor  # [K] rounds since anybody chose the cluster
    unseen: Tensor  # [K] clients that answered in those rounds
    temperature: Tensor  # [] of soft labels: twice the noise variance for squared loss, 1 for cross-entropy
    round: int = 0
    settled: bool = False  # whether it stopped before the last round: see `tol`


def ifca(
    state: State | None,
    *,
    model: Model,
    n_clusters: int,
    rounds: int,
    step_size: float,
    seed: int,
    averaging: Literal["model", "gradient"] = "model",
    training: Training = Training(),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    average_over: Literal["cluster", "everyone"] = "cluster",
    shared_layers: tuple[str, ...] = (),
    soft: bool = False,
    temperature: float | None = None,
    start: Start = Start(),  # noqa: B008  (frozen)
    patience: int = 5,
    resample: int = 0,
    tol: float = 0.0,
    robust: Robust = "none",
) -> Run:
    """Cluster clients and train a model for each cluster.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    model : Model
        What is trained.
    n_clusters, rounds : int
        K and T.
    step_size : float
        gamma. It is multiplied by `decay` every round.
    averaging : {"model", "gradient"}
        Option II (clients train locally, as `training` says) or option I (clients send one gradient).
    weighting : {"clients", "rows"}
        Whether clients count alike in a cluster's mean (paper) or by their rows.
    average_over : {"cluster", "everyone"}
        Whether a model is averaged over its cluster (paper), or over everyone, where the others return it as it was: then
        it moves by its cluster's share (Su, Xu, Yang, NeurIPS 2022, Lemma 1). Gradients are always averaged over everyone.
    shared_layers : tuple of str
        Layers (by the beginning of their names) that are averaged over everyone; the rest is per cluster.
    soft : bool
        Clients update every model, weighted by its posterior probability, in place of the best one only.
    temperature : float, optional
        Of the posterior; estimated when not given.
    start : Start
        Where the models begin.
    patience : int
        Rounds that a cluster may stay empty before it is reseeded; 0 never reseeds. In those rounds at least 8 K clients
        must have answered, so that a small sample that happens to miss a cluster does not count. A model that diverged is
        reseeded in the same round, unless this is 0; it is named in any case.
    resample : int
        Fresh rows in every round (Section 5): each client's rows are cut into so many parts, 2 T in the paper, of which a
        round takes one to choose the model and one to train it; when all were used, rows are shuffled and cut again. An even
        number, or 0: all rows in every round, as in the paper's experiments. Starts take all rows.
    tol : float
        Stop when no client moves and no model changes by more than this, relative to its length; 0 never stops early.
    robust : {"none", "clip", "trimmed", "median", "near"}
        How updates are averaged where some clients are bad: see `robust.py`.
    """
    if state is None:
        theta, events = yield from first_models(model, n_clusters, start, seed)
        first = 1.0 if temperature is None else temperature
        nothing = torch.zeros(n_clusters, dtype=torch.int64)
        state = State(theta, nothing, nothing, torch.tensor(first, dtype=model.dtype))
        yield Save(state, {"events": events})
    common = shared_parameters(model, shared_layers)
    while state.round < rounds and not state.settled:
        gamma = step_size * decay**state.round
        ask = Ask(
            assign_and_train,
            {
                "model": model,
                "theta": state.theta,
                "step_size": torch.tensor(gamma, dtype=torch.float64),
                "key": keys.key(seed, state.round, "ifca"),
                "temperature": state.temperature,
                "averaging": averaging,
                "training": training,
                "by_rows": weighting == "rows",
                "soft": soft,
                **_fresh_rows(resample, state.round, seed),
            },
            fold={
                "update": ByCluster("share", per_cluster=soft),
                "count": Sum(),
                "moved": Sum(),
                "loss": WeightedMean("n"),
            },
            fresh={"label": torch.tensor(-1)},
            work=training.work() if averaging == "model" else 1.0,
            scratch=n_clusters * model.n_outputs,
        )
        got = yield robustly(ask, robust, state.theta, gamma if averaging == "gradient" else 1.0)
        assert got is not None
        if got.n == 0 or not got["count"].any():  # everybody was late or has no rows: the round is lost
            state = replace(state, round=state.round + 1)
            yield Save(state, {"events": ["nobody answered"]})
            continue
        over_all = averaging == "gradient" or average_over == "everyone"
        length = -gamma if averaging == "gradient" else 1.0
        theta = _server_step(state.theta, got["update"], length, over_all, common)
        empty = torch.where(got["count"] > 0, 0, state.empty + 1)
        unseen = torch.where(got["count"] > 0, 0, state.unseen + got["count"].sum())
        noise = state.temperature
        if temperature is None and model.loss == "squared" and bool(got["loss"].isfinite()):
            noise = (2 * got["loss"]).clamp(min=1e-12).to(model.dtype)
        change = _relative_change(theta, state.theta) if tol else 0.0
        lost = ~theta.isfinite().all(1)
        newly = lost & state.theta.isfinite().all(1)
        state = replace(state, theta=theta, empty=empty, unseen=unseen, temperature=noise, round=state.round + 1)
        events = []
        if patience and state.round < rounds:
            for k in _to_reseed(state, lost, patience):
                state, event = yield from _reseed(state, k, model, start, seed)
                events.append(event)
        else:
            events = [f"the model of cluster {k} diverged" for k in newly.nonzero()[:, 0].tolist()]
        moved = int(got["moved"])
        state = replace(state, settled=bool(tol) and moved == 0 and change <= tol and not (patience and empty.any()))
        sizes = [int(n) for n in got["count"].round()]
        yield Save(state, {"loss": float(got["loss"]), "sizes": sizes, "moved": moved, "events": events})
    return state


def _fresh_rows(resample: int, round_: int, seed: int) -> dict[str, Any]:
    """Tell clients which parts of their rows a round takes; nothing where it takes all."""
    if not resample:
        return {}
    cycle, pair = divmod(round_, resample // 2)
    return {"resample": resample, "part": torch.tensor(2 * pair), "shuffle": keys.key(seed, cycle, "resample")}


def _server_step(theta: Tensor, got: ClusterSums, length: float, over_all: bool, common: Tensor) -> Tensor:
    """Alg. 1, line 14 (gradients: -gamma times their sum, divided by all participants) or line 15 (models).

    Clients send how far their model moved, so that a cluster's mean model is its old one plus their mean.
    """
    everyone = got.weight.sum().to(theta.dtype)
    moved = got.sum / everyone if over_all else got.mean_or(torch.zeros_like(theta))
    there = torch.where((got.weight > 0)[:, None], theta, 0.0)  # 0 times infinity is not 0
    held = (got.weight / got.weight.sum()).to(theta.dtype) @ there  # [P] mean of the models that participants hold
    return torch.where(common, held + length * got.sum.sum(0) / everyone, theta + length * moved)


def _to_reseed(state: State, lost: Tensor, patience: int) -> list[int]:
    """All clusters whose model diverged; if none did, the one that was empty longest, when that is too long."""
    if bool(lost.any()):
        return lost.nonzero()[:, 0].tolist()
    deserted = (state.empty >= patience) & (state.unseen >= _ENOUGH * len(lost))
    return [int(state.empty.argmax())] if bool(deserted.any()) else []


def _reseed(state: State, k: int, model: Model, start: Start, seed: int) -> Generator[Ask | Save, Replies | None, Any]:
    """Give a cluster that nobody is in the model of a badly served client.  -> state, what happened"""
    other = torch.arange(len(state.theta)) != k
    sound = state.theta.isfinite().all(1)
    key = keys.key(seed, state.round, k, "reseed")
    theta = state.theta.clone()
    theta[k] = yield from another_model(model, state.theta[other & sound], start, key)
    why = f"was empty for {int(state.empty[k])} rounds" if bool(sound[k]) else "had a model that diverged"
    event = f"cluster {k} {why}; reseeded from a client with a high loss"
    return replace(state, theta=theta, empty=state.empty * other, unseen=state.unseen * other), event


def shared_parameters(model: Model, shared_layers: tuple[str, ...]) -> Tensor:
    """[P] which parameters everybody shares, given the beginnings of layers' names."""
    common = torch.zeros(model.n_parameters, dtype=torch.bool)
    for name in named_layers(model, shared_layers, "shared_layers"):
        common[model.layers[name]] = True
    return common


def _relative_change(new: Tensor, old: Tensor) -> float:
    change = (new - old).norm(dim=1) / old.norm(dim=1).clamp(min=1e-12)
    return float(torch.where(old.isfinite().all(1), change, 0.0).max())  # what had diverged before does not move


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(
    update=(ByCluster("share"), ByCluster("share", per_cluster=True)), count=Sum(), moved=Sum(), loss=WeightedMean("n")
)
@from_sums
def assign_and_train(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[dict[str, Any], Tensors]:
    """Alg. 1, lines 6 to 11: choose the best model, then a gradient or local training from it."""
    if "resample" not in shared:
        return _choose_and_train(shared, private, data, data)
    replies, kept = [], []
    for s in range(len(shared["theta"])):  # each run takes parts of its own
        run = {name: value[s : s + 1] if isinstance(value, Tensor) else value for name, value in shared.items()}
        first, key = int(run["part"]), run["shuffle"][0]
        judged, trained = (part_of(data, key, first + i, shared["resample"]) for i in range(2))
        reply, label = _choose_and_train(run, {"label": private["label"][s : s + 1]}, judged, trained)
        if isinstance(reply["update"], RowProduct):
            reply["update"] = reply["update"].formed()
        replies.append(reply)
        kept.append(label)
    return _together(replies), _together(kept)


def _together(runs: list[Tensors]) -> Tensors:
    return {name: torch.cat([run[name] for run in runs]) for name in runs[0]}


def _choose_and_train(
    shared: dict[str, Any], private: Tensors, judged: Block, trained: Block
) -> tuple[dict[str, Any], Tensors]:
    """Choose the model by some rows, and train it on others, or on the same."""
    model, theta = shared["model"], shared["theta"]  # theta [S, K, P]
    scores = outputs(model, theta, judged)  # [S, K, C, N, O]
    loss = client_losses(model, scores, judged)  # [S, K, C]
    best, label = loss.min(1)  # line 6; ties: the lowest index
    there = (judged.n > 0) & (trained.n > 0)
    label = torch.where(there | (private["label"] < 0), label, private["label"])
    scores = scores if trained is judged else outputs(model, theta, trained)
    if shared["soft"]:
        share = _posterior(loss, judged.n, shared["temperature"])  # [S, C, K]
        update: Tensor | RowProduct = _soft_updates(shared, scores, trained)  # [S, C, K, P]
    else:
        share = one_hot(label, theta.shape[1]).to(theta.dtype)  # line 7

        def own() -> Tensor:
            return theta[torch.arange(len(theta))[:, None], label]  # type: ignore[no-any-return]

        update = _update(shared, own, chosen(scores, label), trained, shared["step_size"], shared["key"])
    share = share * there.to(theta.dtype)[:, None]
    reply = {
        "update": update,
        "share": share * trained.n[:, None].to(theta.dtype) if shared["by_rows"] else share,
        "count": one_hot(label, theta.shape[1]) * there[:, None],
        "moved": (label != private["label"]) & there,
        "loss": torch.where(there, best, 0.0).to(torch.float64),
        "n": (judged.n * there).to(torch.float64).expand(len(theta), -1),
    }
    return reply, {"label": label}


def _update(
    shared: dict[str, Any], own: Callable[[], Tensor], scores: Tensor, data: Block, step_size: Tensor, key: Tensor
) -> Tensor | RowProduct:
    """Line 9 (a gradient) or line 11 (how far LocalUpdate moves), from each client's own model.  -> [S, C, P]

    The model is handed over as a function because a linear model's gradient follows from its outputs: no copy is made.
    """
    model, how = shared["model"], shared["training"]
    if shared["averaging"] == "model":
        return training_moves(model, own(), scores, data, step_size, how, key)
    if how.batch_size is None and isinstance(model, Dense) and model.is_linear:
        return model.linear_gradient(scores, data.x, data.target, data.weights, own() if model.l2 else None)
    if how.batch_size is None:
        return model.gradient(own(), data.x, data.target, data.weights)  # type: ignore[no-any-return]
    start, ones = own(), torch.ones_like(step_size)  # one step of size 1 on one minibatch, seen as a gradient
    return start - train(model, start, data, ones, replace(how, steps=1, epochs=None, momentum=0.0), key)


def _soft_updates(shared: dict[str, Any], scores: Tensor, data: Block) -> Tensor:
    """What every client makes of every model.  [S, C, K, P]"""
    theta = shared["theta"]
    runs, clusters, size = theta.shape
    steps, key = (shared[name].repeat_interleave(clusters) for name in ("step_size", "key"))

    def every() -> Tensor:
        return theta.flatten(0, 1)[:, None].expand(-1, len(data.n), -1)  # type: ignore[no-any-return]  # [S K, C, P]

    made = _update(shared, every, scores.flatten(0, 1), data, steps, key)
    made = made.formed() if isinstance(made, RowProduct) else made
    return made.view(runs, clusters, -1, size).transpose(1, 2)


def _posterior(loss: Tensor, n: Tensor, temperature: Tensor) -> Tensor:
    """Probability of each cluster given a client's rows, all clusters alike beforehand.  loss [S, K, C] -> [S, C, K]"""
    total = worst_if_nan(loss * n).transpose(1, 2)  # 0 times infinity is not 0
    made = torch.softmax(-total / temperature[:, None, None], -1)
    return made.nan_to_num(nan=1 / loss.shape[1])  # where all of them diverged
