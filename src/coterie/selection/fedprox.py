# SPDX-License-Identifier: Apache-2.0
"""One model for all as FedProx finds it: where clients, each held near the common model, would on average leave it as it is.

A client minimises the mean loss of its rows and s/2 |w - m|^2, and the server averages by rows (Li et al., MLSys 2020). With
a large s that is the model of all rows together; with a small one, the mean of local models. The fixed point is found by
Newton's method, from sums over clients: exactly and at once for regression.
"""

from typing import Any

import torch

from coterie.protocol import Ask, Block, Save, Sum, Tensors
from coterie.selection.clusters import Clusters
from coterie.selection.problem import Problem, Run, curves

__all__ = ["fit_fedprox", "lean"]

_STEPS = 4  # for classification


def fit_fedprox(base: Clusters, problem: Problem, strengths: tuple[float, ...]) -> Run:
    """Fit with each strength, from the model for all.  -> Clusters with J settings and K = 1"""
    many = len(strengths)
    theta = base.theta[:, :1].expand(-1, many, -1, -1)  # [F, J, 1, P]
    strength = torch.tensor(strengths, dtype=torch.float64)
    for _ in range(1 if problem.is_regression else _STEPS):
        got = yield Ask(
            lean, {"problem": problem, "theta": theta, "strength": strength}, {"pull": Sum(), "slope": Sum()},
            fresh=problem.fresh, scratch=problem.scratch * many,
        )  # fmt: skip
        if got is None or got.n == 0:
            continue
        little = 1e-9 * torch.eye(problem.n_parameters, dtype=torch.float64)
        theta = theta + torch.linalg.solve(got["slope"] + little, got["pull"])[:, :, None]
        yield Save(theta)
    return Clusters(theta, base.noise[:, :1].expand(-1, many), base.objective[:, :1].expand(-1, many), base.bend)


# -- on the client ----------------------------------------------------------------------------------------------------
def lean(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """How far the client's rows would draw its model from the common one, and how that changes with the common one.

    With mean gradient g and second derivatives H: n (H + s)^-1 (-g) and n (H + s)^-1 H.
    -> [1, C, F, J, P], [1, C, F, J, P, P]
    """
    at = curves(shared["problem"], private, data)
    _, gradient, hessian = at.quadratic(shared["theta"][0])  # [F, J, C, P], [F, J | 1, C, P, P]
    n = at.n[..., None].clamp(min=1)  # [F, 1, C, 1]
    bend = (hessian / n[..., None]).expand(*gradient.shape, -1)
    strength = shared["strength"][0].view(1, -1, 1, 1, 1)
    held = bend + strength * torch.eye(bend.shape[-1], dtype=bend.dtype)
    solved = torch.linalg.solve(held, torch.cat([-(gradient / n)[..., None], bend], -1)) * at.n[..., None, None]
    reply = {"pull": solved[..., 0], "slope": solved[..., 1:]}
    return {name: value.movedim(2, 0)[None] for name, value in reply.items()}, dict(private)
