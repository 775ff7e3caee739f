# SPDX-License-Identifier: Apache-2.0
"""IFCA as an estimator."""

from dataclasses import field
from typing import ClassVar, Literal

from coterie.estimators.federated import Federated
from coterie.estimators.groups import Groups, Networks, Rounds, Steps, parameters

__all__ = ["IFCA"]


@parameters
class IFCA(Federated, Groups, Rounds, Steps, Networks):
    """Find groups of clients, and train a model for each (Ghosh et al., 2020).

    Parameters
    ----------
    n_clusters : int
        Number of groups.
    model : nn.Module or Model, optional
        What is trained; linear (or softmax) regression by default, with `hidden` layers a network.
    degree : int
        Of the polynomial feature map; 1 is none.
    init : {"spread", "random", "balanced", "warm"}
        Where models begin; "warm" begins at `start`.
    n_init : int
        Starts that are advanced in lockstep; the best on held-out rows wins and is fitted on all rows.
    rounds, local_steps, step_size, ... :
        See `coterie.config`; `step_size=None` chooses a safe one for linear models.
    random_state : int
        Seed.

    Attributes
    ----------
    labels_ : ndarray
        [M] cluster of each client, in the order of `client_names_`.
    margins_, certain_ : ndarray
        [M] loss margin to the runner-up, and whether it is beyond noise.
    theta_ : Tensor
        [K, P] the models.
    history_ : list of Round
        What happened.
    scores_ : dict
        How the method and its baselines do.
    classes_ : ndarray
        What predictions of a class are made of: the values of `y`, or the names in a file.
    """

    method: ClassVar[str] = "ifca"

    n_clusters: int = field(default=2, kw_only=False)
    init: Literal["random", "balanced", "spread", "warm"] = "spread"
    n_init: int = 1
    candidates: int = 5
