# SPDX-License-Identifier: Apache-2.0
"""IFCA as an estimator."""

from typing import ClassVar, Literal

from torch import Tensor, nn

from coterie.estimators.federated import Federated
from coterie.models import Model

__all__ = ["IFCA"]


class IFCA(Federated):
    """Clients fall into groups: find them, and train a model for each (paper 004).

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

    def __init__(
        self,
        n_clusters: int = 2,
        *,
        model: nn.Module | Model | None = None,
        hidden: tuple[int, ...] = (),
        degree: int = 1,
        intercept: bool = True,
        l2: float = 0.0,
        averaging: Literal["model", "gradient"] = "model",
        average_over: Literal["cluster", "everyone"] = "cluster",
        init: Literal["random", "balanced", "spread", "warm"] = "spread",
        start: Tensor | None = None,
        n_init: int = 1,
        candidates: int = 5,
        rounds: int = 100,
        step_size: float | None = None,
        local_steps: int = 10,
        epochs: int | None = None,
        batch_size: int | None = None,
        momentum: float = 0.0,
        proximal: float = 0.0,
        exact: bool = False,
        decay: float = 1.0,
        participation: float = 1.0,
        weighting: Literal["clients", "rows"] = "clients",
        shared_layers: tuple[str, ...] = (),
        soft: bool = False,
        temperature: float | None = None,
        patience: int = 5,
        resample: int = 0,
        tol: float = 0.0,
        standardise: bool = True,
        baselines: bool = False,
        random_state: int = 0,
    ) -> None:
        self.n_clusters = n_clusters
        self.model = model
        self.hidden = hidden
        self.degree = degree
        self.intercept = intercept
        self.l2 = l2
        self.averaging = averaging
        self.average_over = average_over
        self.init = init
        self.start = start
        self.n_init = n_init
        self.candidates = candidates
        self.rounds = rounds
        self.step_size = step_size
        self.local_steps = local_steps
        self.epochs = epochs
        self.batch_size = batch_size
        self.momentum = momentum
        self.proximal = proximal
        self.exact = exact
        self.decay = decay
        self.participation = participation
        self.weighting = weighting
        self.shared_layers = shared_layers
        self.soft = soft
        self.temperature = temperature
        self.patience = patience
        self.resample = resample
        self.tol = tol
        self.standardise = standardise
        self.baselines = baselines
        self.random_state = random_state
