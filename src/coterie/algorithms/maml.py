# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg: one model for all, trained to be good after a gradient step on a client's own rows.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, Algorithm 1, with the Hessian-free (HF-MAML) or first-order (FO-MAML) step of their Section 5.
Departure: a client whose steps diverge has no say in the round, which says how many they are.
"""

from collections.abc import Generator
from typing import Any, Literal

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms.averaging import State, averaged
from coterie.algorithms.robust import Robust
from coterie.errors import ConfigError
from coterie.local import Training, client_losses, outputs
from coterie.local.sgd import batches, begin, in_chunks, numbers_held
from coterie.models import Model
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean, answers

__all__ = ["State", "maml", "meta_train", "new_client"]

_GRADIENTS = {"free": 4, "first-order": 2}  # of a step: at theta, after the inner step, and two for the Hessian


def maml(
    state: State | None,
    *,
    model: Model,
    rounds: int,
    alpha: float,
    beta: float,
    seed: int,
    hessian: Literal["free", "first-order"] = "free",
    delta: float = 1e-3,
    training: Training = Training(epochs=5, batch_size=10),  # noqa: B008  (frozen)
    decay: float = 1.0,
    weighting: Literal["clients", "rows"] = "clients",
    tol: float = 0.0,
    robust: Robust = "none",
) -> Generator[Ask | Save, Replies | None, State]:
    """Train a start from which every client gets far in one step.

    Parameters
    ----------
    state : State or None
        Where to go on; None starts.
    model : Model
        What is trained.
    rounds : int
        K.
    alpha : float
        Size of the inner step, on a client's own rows: the one it takes before it uses the model (see `fine_tuning.py`).
    beta : float
        Size of the local steps. It is multiplied by `decay` every round.
    hessian : {"free", "first-order"}
        Whether the Hessian of a step is applied by finite differences of gradients, or dropped.
    delta : float
        Of the finite difference.
    training : Training
        Number of local steps and rows of their batches; each step draws three batches.
    weighting : {"clients", "rows"}
        Whether clients count alike in the mean (paper) or by their rows.
    tol : float
        Stop when the model changes by no more than this, relative to its length; 0 never stops early.
    robust : {"none", "clip", "trimmed", "median", "near"}
        How updates are averaged where some clients are bad: see `robust.py`.
    """
    if training.momentum or training.proximal or training.exact:
        raise ConfigError(
            "maml takes plain gradient steps", "leave momentum, proximal and exact of training as they are"
        )
    if hessian == "free" and not delta > 0:
        raise ConfigError(
            f"delta is {delta:g}, and a finite difference needs a step", "give delta above 0, such as 1e-3"
        )
    if state is None:
        state = State(model.initial(1, keys.generator(seed, "start"))[0])
        yield Save(state)

    def question(now: State) -> Ask:
        return Ask(
            meta_train,
            {
                "model": model,
                "theta": now.theta,
                "alpha": torch.tensor(alpha, dtype=torch.float64),
                "beta": torch.tensor(beta * decay**now.round, dtype=torch.float64),
                "delta": torch.tensor(delta if hessian == "free" else 0.0, dtype=torch.float64),
                "key": keys.key(seed, now.round, "maml"),
                "hessian": hessian,
                "training": training,
                "by_rows": weighting == "rows",
            },
            fold={"update": WeightedMean("weight"), "loss": WeightedMean("n"), "n": Sum(), "left_out": Sum()},
            work=_GRADIENTS[hessian] * training.work(),
            scratch=model.n_outputs,
        )

    return (yield from averaged(state, question, rounds=rounds, tol=tol, robust=robust))


def new_client(alpha: float, tune_steps: int) -> tuple[float, Training]:
    """How a client gets a model of its own: step size and training, from the common one."""
    return alpha, Training(steps=tune_steps)


# -- on the client ----------------------------------------------------------------------------------------------------
@answers(update=WeightedMean("weight"), loss=WeightedMean("n"), n=Sum(), left_out=Sum())
def meta_train(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Take local meta-steps from the model that everybody got, and send how far it moved."""
    model, theta = shared["model"], shared["theta"]  # [S, P]
    loss = client_losses(model, outputs(model, theta[:, None], data)[:, 0], data)  # [S, C]
    start = theta[:, None].expand(-1, len(data.n), -1)
    sizes = [[float(v) for v in shared[name]] for name in ("alpha", "beta", "delta")]

    def work(part: Tensor, rows: Block, s: int) -> Tensor:
        alpha, beta, delta = (values[s] for values in sizes)
        return _meta_steps(model, part, rows, shared["training"], shared["key"][s], alpha, beta, delta)

    update = in_chunks(start, data, work, numbers_held(model, shared["training"], data)).sub_(start)
    n = data.n.to(torch.float64).expand(len(theta), -1)
    sound = update.isfinite().all(-1)  # [S, C]
    weight = sound * (n if shared["by_rows"] else (n > 0).to(torch.float64))
    update = torch.where(sound[..., None], update, 0.0)  # 0 times infinity is no number
    left_out = (~sound & (n > 0)).to(torch.float64)
    return {"update": update, "loss": loss.to(torch.float64), "n": n, "weight": weight, "left_out": left_out}, {}


def _meta_steps(
    model: Model, theta: Tensor, data: Block, how: Training, key: Tensor, alpha: float, beta: float, delta: float
) -> Tensor:
    """Algorithm 1, lines 5 to 8, of one run.  theta [C, P] -> [C, P], a tensor of its own"""
    draws = (batches(model, data, how, keys.key(key, name)) for name in ("inner", "outer", "hessian"))
    here = begin(model, theta, data, how)
    for (*inner, active), (*outer, _), (*hessian, _) in zip(*draws, strict=True):
        meta = here.shifted(here.slopes(*inner), alpha).slopes(*outer)  # grad f(theta - alpha grad f(theta))
        if delta:
            ahead, behind = (here.shifted(meta, side * delta).slopes(*hessian) for side in (-1, 1))
            for g, up, down in zip(meta, ahead, behind, strict=True):
                g.sub_(up.sub_(down), alpha=alpha / (2 * delta))  # (I - alpha H) grad
        if active is not None:
            meta = [g * active.view(-1, *(1,) * (g.dim() - 1)) for g in meta]
        here = here.shifted(meta, beta)
    return here.result()
