# SPDX-License-Identifier: Apache-2.0
"""One-shot clustering: local fits, k-means at the server, then FedAvg within each cluster, its members fixed.

Ghosh, Hong, Yin, Ramchandran, "Robust Federated Learning in a Heterogeneous Environment", 2019; as a baseline in Su, Xu,
Yang, NeurIPS 2022, appendix C.

Departures: clients without rows have no fit and no weight; a client that was late when the fits were asked for joins, when
it comes, the cluster whose model serves its rows best; a cluster whose members are all late keeps its model.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.algorithms.starts import fit_alone
from coterie.local import Training, chosen, client_losses, outputs, training_moves
from coterie.models import Model
from coterie.protocol import Ask, Block, ByCluster, Replies, Save, Stack, Sum, Tensors, WeightedMean, answers

__all__ = ["State", "fit_once", "join", "one_shot", "train_member"]

Run = Generator[Ask | Save, Replies | None, Any]


@dataclass(frozen=True)
class State:
    """What the next round needs; who belongs to which cluster is known to the clients."""

    theta: Tensor  # [K, P]
    round: int = 0
    settled: bool = False  # whether it stopped before the last round: `tol`


def one_shot(
    state: State | None,
    *,
    model: Model,
    n_clusters: int,
    rounds: int,
    step_size: float,
    seed: int,
    training: Training = Training(),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "rows",
    fit: Training = Training(steps=50),  # noqa: B008  (frozen)
    n_init: int = 10,
    tol: float = 0.0,
) -> Generator[Ask | Save, Replies | None, State]:
    """Cluster clients once by their local fits, and train a model for each cluster.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    model : Model
        What is trained.
    n_clusters, rounds : int
        K and T.
    step_size : float
        Of local training, multiplied by `decay` every round.
    training : Training
        What a client does in a round.
    weighting : {"clients", "rows"}
        Whether clients count alike in a cluster's mean, or by their rows. In k-means they count alike.
    fit : Training
        How a client fits a model alone, where there is no closed form. Linear regression has one: with fewer rows than
        features it is the shortest solution.
    n_init : int
        Starts of k-means.
    tol : float
        Stop when no model changes by more than this, relative to its length; 0 never stops early.
    """
    if state is None:
        theta, events = yield from _clustered(model, n_clusters, step_size, seed, fit, n_init)
        state = State(theta)
        yield Save(state, {"events": events})
    while state.round < rounds and not state.settled:
        got = yield Ask(
            train_member,
            {
                "model": model,
                "theta": state.theta,
                "step_size": torch.tensor(step_size * decay**state.round, dtype=torch.float64),
                "key": keys.key(seed, state.round, "one-shot"),
                "training": training,
                "by_rows": weighting == "rows",
            },
            fold={"update": ByCluster("share"), "count": Sum(), "loss": WeightedMean("n")},
            fresh={"label": torch.tensor(-1)},
            work=training.work(),
            scratch=n_clusters * model.n_outputs,
        )
        if got is None or got.n == 0 or not got["count"].any():  # everybody was late or has no rows: the round is lost
            state = replace(state, round=state.round + 1)
            yield Save(state, {"events": ["nobody answered"]})
            continue
        update = got["update"].mean_or(torch.zeros_like(state.theta))
        change = float((update.norm(dim=1) / state.theta.norm(dim=1).clamp(min=1e-12)).max())
        state = State(state.theta + update, state.round + 1, settled=bool(tol) and change <= tol)
        yield Save(state, {"loss": float(got["loss"]), "sizes": [int(n) for n in got["count"]]})
    return state


def _clustered(model: Model, n_clusters: int, step_size: float, seed: int, fit: Training, n_init: int) -> Run:
    """Ask for local fits, cluster them, and tell every client its cluster.  -> centres [K, P], events"""
    base = model.initial(n_clusters, keys.generator(seed, "start"))
    got = yield Ask(
        fit_once,
        {
            "model": model,
            "base": base[0],
            "step_size": torch.tensor(step_size, dtype=torch.float64),
            "key": keys.key(seed, "one-shot fits"),
            "training": fit,
        },
        fold={"theta": Stack(), "n": Stack()},
        work=fit.work(),
    )
    if got is None or got.n == 0:
        return base, ["nobody answered: the clusters' models are random"]
    usable = (got["n"] > 0) & got["theta"].isfinite().all(1)
    fits, ids = got["theta"][usable], got.ids[usable]
    if len(fits.unique(dim=0)) < n_clusters:  # one cluster for each of them, and random models for the others
        fits, label = fits.unique(dim=0, return_inverse=True)
        theta, events = torch.cat([fits, base[len(fits) :]]), [f"there are only {len(fits)} different local fits"]
    else:
        label = _k_means(fits, n_clusters, seed, n_init)
        theta, events = torch.stack([fits[label == k].mean(0) for k in range(n_clusters)]), []
    if len(ids):
        yield Ask(join, {}, fold={}, each={"label": label}, to=ids, fresh={"label": torch.tensor(-1)}, work=0.0)
    return theta, events


def _k_means(fits: Tensor, n_clusters: int, seed: int, n_init: int) -> Tensor:
    """Label every fit.  [C, P] -> [C]"""
    from sklearn.cluster import KMeans

    draw = int(keys.key(seed, "k-means")) % (1 << 32)
    found = KMeans(n_clusters, n_init=n_init, random_state=draw).fit(fits.double().numpy())
    return torch.from_numpy(found.labels_).long()


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(theta=Stack(), n=Stack())
def fit_once(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Fit a model to a client's own rows, and say whether there were any."""
    reply, _ = fit_alone(shared, each, private, data)
    return {**reply, "n": data.n[None]}, {}


@answers()
def join(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Take note of the cluster that the server has found."""
    return {}, {"label": each["label"]}


@answers(update=ByCluster("share"), count=Sum(), loss=WeightedMean("n"))
def train_member(
    shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
) -> tuple[dict[str, Any], Tensors]:
    """Train from the model of the client's cluster, and send how far it moved."""
    model, theta = shared["model"], shared["theta"]  # theta [S, K, P]
    scores = outputs(model, theta, data)  # [S, K, C, N, O]
    loss = client_losses(model, scores, data)  # [S, K, C]
    label = torch.where(private["label"] < 0, loss.argmin(1), private["label"])  # who was late takes the best model
    start = theta[torch.arange(len(theta))[:, None], label]  # [S, C, P]
    own = chosen(scores, label)
    update = training_moves(model, start, own, data, shared["step_size"], shared["training"], shared["key"])
    present = one_hot(label, theta.shape[1]) * (data.n > 0)[:, None]  # [S, C, K]
    weight = data.n if shared["by_rows"] else torch.ones_like(data.n)
    reply = {
        "update": update,
        "share": (present * weight[:, None]).to(theta.dtype),
        "count": present,
        "loss": chosen(loss, label).to(torch.float64),
        "n": data.n.to(torch.float64).expand(len(theta), -1),
    }
    return reply, {"label": label}
