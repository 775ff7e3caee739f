# SPDX-License-Identifier: Apache-2.0
"""Planted linear representations: clients whose models lie in one subspace, and how far a subspace is from it.

Tziotis et al., "Straggler-Resilient Personalized Federated Learning", Section 4: y = w_i^T B^T x + z under Assumptions 4.2
(here, normal features) to 4.4, and Definition 4.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.errors import ConfigError

__all__ = ["PlantedRepresentation", "linear_representation", "principal_distance"]


@dataclass(frozen=True, eq=False)
class PlantedRepresentation:
    """Clients whose representation and heads are known.

    Attributes
    ----------
    rows : Ragged
        The clients' rows.
    basis : Tensor
        [D, K] the common representation, with orthonormal columns.
    heads : Tensor
        [M, K] every client's head, of length sqrt(K).
    """

    rows: Ragged
    basis: Tensor
    heads: Tensor


def linear_representation(
    *, n_clients: int, rows: int, n_features: int, rank: int, noise: float, seed: int
) -> PlantedRepresentation:
    """Draw clients of equal length: x ~ N(0, I), y = <B w_i, x> + N(0, noise^2), in float64.

    Parameters
    ----------
    n_clients, rows, n_features, rank : int
        M clients of `rows` rows each, D features, and the paper's k.
    noise : float
        Standard deviation of the noise, the paper's sigma.
    seed : int
        The same seed plants the same representation, whatever the number of clients and rows.

    Raises
    ------
    ConfigError
        If the sizes make no sense.
    """
    if min(n_clients, rows, rank) < 1 or rank > n_features or not 0 <= noise < math.inf:
        raise ConfigError(
            f"cannot plant {n_clients} clients with {rows} rows, {n_features} features, rank {rank} and noise {noise}",
            "sizes are at least 1, the rank is at most the number of features, the noise is not negative",
        )
    draws = keys.generator(seed, "planted representation")
    basis = torch.linalg.qr(torch.randn(n_features, rank, generator=draws, dtype=torch.float64)).Q
    draws = keys.generator(seed, "planted heads")
    heads = torch.randn(n_clients, rank, generator=draws, dtype=torch.float64)
    heads *= math.sqrt(rank) / heads.norm(dim=1, keepdim=True)
    draws = keys.generator(seed, "rows of a representation")
    x = torch.randn(n_clients, rows, n_features, generator=draws, dtype=torch.float64)
    y = (x @ (heads @ basis.T)[..., None]).squeeze(-1)  # [M, N]
    y += noise * torch.randn(y.shape, generator=draws, dtype=torch.float64)
    return PlantedRepresentation(Ragged.from_blocks(x, y), basis, heads)


def principal_distance(a: Tensor, b: Tensor) -> Tensor:
    """Sine of the largest principal angle between column spaces (Definition 4.1): 0 if they are the same, at most 1.

    Parameters
    ----------
    a, b : Tensor
        [..., D, K] with independent columns.

    Returns
    -------
    Tensor
        [...]
    """
    a, b = torch.linalg.qr(a).Q, torch.linalg.qr(b).Q
    outside = b - a @ (a.mT @ b)  # the part of b outside a's space: exact also for tiny angles
    sine: Tensor = torch.linalg.matrix_norm(outside, 2)
    return sine.clamp(max=1.0)
