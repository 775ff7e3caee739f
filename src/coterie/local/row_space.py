# SPDX-License-Identifier: Apache-2.0
"""Local training of linear regression in the space of a client's rows.

Full-batch steps move a model by x^T v, a combination of the client's rows. With the rows' products x x^T, the residuals and
v follow without touching x again, so that any number of steps costs two passes over the rows, for all runs together; and the
client's model is never formed. Products, and the factors of exact steps, are kept with the block.
"""

import torch
from torch import Tensor

from coterie.local.sgd import Training, train
from coterie.models import Dense, Model
from coterie.protocol import Block, RowProduct

__all__ = ["features", "training_moves"]

_ROWS_PER_STEP = 5  # up to so many rows, their products cost less than the passes of a run's step


def features(model: Dense, data: Block) -> Tensor:
    """Rows with a one for the intercept, where there is one; padding is zero.  [C, N, P]"""
    return torch.cat([data.x, data.real[..., None].to(data.x.dtype)], -1) if model.intercept else data.x


def training_moves(
    model: Model, theta: Tensor, scores: Tensor, data: Block, step_size: Tensor, how: Training, key: Tensor
) -> Tensor | RowProduct:
    """Train every client's model on its own rows, and say how far it moved.

    Parameters
    ----------
    theta : Tensor
        [S, C, P] where each run's clients start; may be an expanded view.
    scores : Tensor
        [S, C, N, O] outputs of those models.
    data, step_size, how, key
        As for `train`.

    Returns
    -------
    Tensor or RowProduct
        [S, C, P]
    """
    if isinstance(model, Dense) and _suits(model, how, data, len(theta)):
        x = features(model, data)
        residual = (data.target - scores.squeeze(-1)) * data.real  # [S, C, N]
        gram = data.once(("row products", model.intercept), lambda: torch.bmm(x, x.transpose(1, 2)))
        if how.exact:
            return RowProduct(x, _exact_combination(gram, residual, data, how.proximal, model.intercept))
        return RowProduct(x, _combination(gram, residual, data, step_size, how))
    return train(model, theta, data, step_size, how, key).sub_(theta)


def _suits(model: Dense, how: Training, data: Block, runs: int) -> bool:
    if not model.is_linear or model.loss != "squared" or model.l2 or how.batch_size is not None or how.momentum:
        return False
    if how.exact and not how.proximal > 0:  # `train` refuses it
        return False
    steps = (how.steps if how.epochs is None else how.epochs) * runs
    return data.x.shape[1] <= (model.n_parameters if how.exact else min(_ROWS_PER_STEP * steps, model.n_parameters))


def _exact_combination(gram: Tensor, residual: Tensor, data: Block, mu: float, intercept: bool) -> Tensor:
    """The v of x^T v that solves (mu + 2 X^T W X) x^T v = 2 X^T W r.  gram [C, N, N], residual [S, C, N] -> [S, C, N]"""
    root = (2 * data.weights).sqrt()

    def factor() -> Tensor:
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
        made: Tensor = torch.linalg.cholesky(root[:, :, None] * gram * root[:, None, :] + mu * eye)
        return made

    kept = data.once(("proximal factor", mu, intercept), factor)
    solved = torch.cholesky_solve((root * residual).permute(1, 2, 0), kept)  # [C, N, S]
    return solved.permute(2, 0, 1) * root


def _combination(gram: Tensor, residual: Tensor, data: Block, step_size: Tensor, how: Training) -> Tensor:
    """The v of x^T v after some steps.  gram [C, N, N], residual [S, C, N] -> [S, C, N]"""
    weights = 2 * data.weights  # of the derivative of squared errors
    step = step_size.to(gram.dtype)[:, None, None]
    v = torch.zeros_like(residual)
    now = residual
    for t in range(how.steps if how.epochs is None else how.epochs):
        if t:
            now = residual - torch.bmm(v.transpose(0, 1), gram).transpose(0, 1)  # gram is symmetric
        v = v + step * (weights * now - how.proximal * v)
    return v
