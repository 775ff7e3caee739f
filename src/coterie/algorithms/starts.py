# SPDX-License-Identifier: Apache-2.0
"""Where clustered models begin: random, balanced, spread, or warm.

From one random start, collapse (all clients in one cluster) is the common outcome, so the start decides everything.
`balanced` redraws until every cluster attracts clients; `spread` seeds each next model from a client that the models so
far serve badly, as k-means++ does with points.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.errors import ConfigError
from coterie.local import Training, client_losses, outputs, train, worst_if_nan
from coterie.local.least_squares import ridge
from coterie.models import Dense, Model
from coterie.protocol import Ask, Block, Replies, Save, Stack, Sum, Tensors, from_sums

__all__ = ["Start", "another_model", "attract", "first_models", "fit_alone", "potential", "serve"]

Run = Generator[Ask | Save, Replies | None, Any]

_BALANCED_DRAWS = 8  # candidate starts in one question
_BALANCED_QUESTIONS = 25


@dataclass(frozen=True)
class Start:
    """How models begin.

    Parameters
    ----------
    kind : {"random", "balanced", "spread", "warm"}
        See the module's words.
    theta : Tensor, optional
        [K, P] the given models, for "warm".
    candidates : int
        Clients that are tried for each next model of "spread"; the one that lowers the total loss most is taken.
    fit : Training
        How a client fits a model alone, where there is no closed form.
    step_size : float
        Of that fit.
    """

    kind: Literal["random", "balanced", "spread", "warm"] = "spread"
    theta: Tensor | None = None
    candidates: int = 5
    fit: Training = Training(steps=50)  # noqa: RUF009  (frozen)
    step_size: float = 0.1


def first_models(model: Model, n_clusters: int, start: Start, seed: int) -> Run:
    """Make the first K models and say what happened.  -> theta [K, P], events"""
    draw = keys.generator(seed, "start")
    if start.kind == "warm":
        if start.theta is None or start.theta.shape != (n_clusters, model.n_parameters):
            raise ConfigError(
                f"a warm start needs models of shape ({n_clusters}, {model.n_parameters})", "give them as start models"
            )
        return start.theta.to(model.dtype), []
    if start.kind == "random" or n_clusters == 1:
        return model.initial(n_clusters, draw), []
    if start.kind == "balanced":
        return (yield from _balanced(model, n_clusters, draw))
    theta = model.initial(1, draw)[:0]
    for j in range(n_clusters):
        found, _ = yield from another_model(model, theta, start, keys.key(seed, j, "spread"))
        theta = torch.cat([theta, found[None]])
    return theta, []


def _balanced(model: Model, n_clusters: int, draw: torch.Generator) -> Run:
    """Redraw until each cluster attracts a minimum share: 35 % for two clusters, 10 % for four."""
    wanted = 0.35 if n_clusters == 2 else 0.4 / n_clusters
    best, best_share = model.initial(n_clusters, draw), -1.0
    for _ in range(_BALANCED_QUESTIONS):
        theta = model.initial(_BALANCED_DRAWS * n_clusters, draw).view(_BALANCED_DRAWS, n_clusters, -1)
        got = yield Ask(
            attract,
            {"model": model, "theta": theta.flatten(0, 1), "n_clusters": n_clusters},
            fold={"count": Sum()},
            scratch=_BALANCED_DRAWS * n_clusters * model.n_outputs,
        )
        if got is None or got.n == 0:
            continue
        share = (got["count"] / got["count"].sum(1, keepdim=True).clamp(min=1)).min(1).values  # [draws]
        winner = int(share.argmax())
        if float(share[winner]) > best_share:
            best, best_share = theta[winner], float(share[winner])
        if best_share >= wanted:
            return best, []
    drawn = _BALANCED_QUESTIONS * _BALANCED_DRAWS
    if best_share < 0:
        return best, ["nobody answered: the start is random"]
    return best, [f"no balanced start among {drawn}; the best leaves {best_share:.0%} of the clients to a cluster"]


def another_model(model: Model, theta: Tensor, start: Start, key: Tensor) -> Run:
    """Fit a model at a client that `theta` [J, P] serves badly.  -> [P], client number

    Several clients are drawn with probability proportional to their total loss; the one whose own model would lower
    everybody's loss most is taken.
    """
    draw = keys.generator(int(key), "candidates")
    base = model.initial(1, keys.generator(int(key), "base"))[0]
    got = yield Ask(
        serve, {"model": model, "theta": theta, "base": base}, {"loss": Stack()}, scratch=_scratch(model, theta)
    )
    if got is None or got.n == 0:
        return base, -1
    badly = got["loss"].nan_to_num(nan=0.0, posinf=0.0).clamp(min=0)  # models that diverged say nothing
    weights = badly if bool((badly > 0).any()) else torch.ones_like(badly)
    picks = torch.multinomial(weights, min(start.candidates, int((weights > 0).sum())), generator=draw)
    to = got.ids[picks].sort().values
    shared = {"model": model, "base": base, "training": start.fit, "key": key}
    shared["step_size"] = torch.tensor(start.step_size, dtype=torch.float64)
    fits = yield Ask(fit_alone, shared, {"theta": Stack()}, to=to, work=start.fit.work())
    if fits is None or fits.n == 0:
        return base, -1
    found = fits["theta"]  # [L, P]
    total = yield Ask(
        potential,
        {"model": model, "theta": theta, "found": found},
        {"loss": Sum()},
        scratch=_scratch(model, theta, found),
    )
    best = int(worst_if_nan(total["loss"]).argmin()) if total is not None and total.n else 0
    return found[best], int(fits.ids[best])


def _scratch(model: Model, *thetas: Tensor) -> int:
    return sum(len(theta) for theta in thetas) * model.n_outputs


# -- on the client ----------------------------------------------------------------------------------------------------
@from_sums
def attract(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Count whom each model of several candidate starts attracts.  theta [S, draws K, P] -> [S, C, draws, K]"""
    model, theta, k = shared["model"], shared["theta"], shared["n_clusters"]
    loss = client_losses(model, outputs(model, theta, data), data)  # [S, draws K, C]
    label = loss.view(len(loss), -1, k, loss.shape[-1]).argmin(2)  # [S, draws, C]
    return {"count": one_hot(label, k).transpose(1, 2) * (data.n > 0)[:, None, None]}, {}


@from_sums
def serve(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Say how badly the models so far serve a client: the total loss of the best; with no model yet, the row count."""
    model, theta = shared["model"], shared["theta"]  # [S, J, P]
    n = data.n.to(torch.float64)
    if theta.shape[1] == 0:
        return {"loss": n.expand(len(theta), -1)}, {}
    loss = client_losses(model, outputs(model, theta, data), data).min(1).values  # [S, C]
    return {"loss": loss * n}, {}


@from_sums
def fit_alone(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Fit a model to a client's own rows: in closed form for linear regression, by gradient descent otherwise."""
    model, base = shared["model"], shared["base"]  # [S, P]
    if isinstance(model, Dense) and model.is_linear and model.loss == "squared":
        return {"theta": ridge(model, data, l2=max(model.l2 / 2, 1e-3)).expand(len(base), -1, -1)}, {}
    theta = base[:, None].expand(-1, len(data.n), -1)
    return {"theta": train(model, theta, data, shared["step_size"], shared["training"], shared["key"])}, {}


@from_sums
def potential(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Total loss that a client would have if each candidate joined the models so far.  -> [S, C, L]"""
    model, theta, found = shared["model"], shared["theta"], shared["found"]  # [S, J, P], [S, L, P]
    loss = client_losses(model, outputs(model, torch.cat([theta, found], 1), data), data)  # [S, J + L, C]
    j = theta.shape[1]
    joined = loss[:, j:] if j == 0 else torch.minimum(loss[:, j:], loss[:, :j].min(1, keepdim=True).values)
    total = torch.where(data.n > 0, joined * data.n, 0.0)  # [S, L, C]; 0 times infinity is not 0
    return {"loss": total.transpose(1, 2).to(torch.float64)}, {}
