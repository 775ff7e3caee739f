# SPDX-License-Identifier: Apache-2.0
"""HF-MAML and FO-MAML as an estimator."""

from typing import ClassVar, Literal

from torch import nn

from coterie.estimators.personal import Personalised
from coterie.models import Model
from coterie.participation import Clock

__all__ = ["MAML"]


class MAML(Personalised):
    """One model for all, trained to be good after a step of each client's own (Per-FedAvg).

    Parameters
    ----------
    model, hidden, batch_size, rounds, ... :
        As for `FedRep`; without hidden layers the model is linear.
    step_size : float, optional
        beta, of the local steps.
    alpha : float, optional
        Of the inner step, and of the steps that a client takes before it uses the model; as long as beta by default.
    hessian, delta : {"free", "first-order"}, float
        Whether the Hessian is applied by finite differences of this width, or dropped.
    tune_steps : int
        Steps that a client takes, on all of its rows, before it uses the model.
    body_epochs : int
        Passes over a client's rows in a round.
    stragglers : {"none", "srpfl"}
        With "srpfl", rounds begin with the `n0` fastest clients (a tenth of them by default), and their number doubles in
        stages until all take part.
    stages, stage_rounds, contraction : {"fixed", "theory", "adaptive"}, int, float
        When a stage is over: after so many rounds, by Lemma B.1 with this contraction, or as the losses say.
    clock : {"exponential", "dynamic", "lognormal", "trace"} or Clock, optional
        What time a round's work takes each client: drawn once, drawn anew in every round, drawn once with a heavier tail
        (`sigma`), or read from a file (`trace`); or a `VirtualClock` of your own, with units of its own.
    communication : float
        Seconds that are added to every round.
    random_state : int
        Seed.

    Attributes
    ----------
    client_names_ : ndarray
        [M] clients that have a part of their own.
    personal_ : Personal
        Everybody's model: `theta` and `own`.
    theta_ : Tensor
        [P] the common model, from which clients go on.
    scores_ : dict
        How the method does, and with baselines "global" and "local".
    spread_ : dict
        How the held-out metric is spread over clients: mean, median, worst and best tenth; not of a loaded run.
    history_ : list of Round
        What happened, by round; `time` is the clock's. Not of a loaded run.
    """

    method: ClassVar[str] = "maml"

    def __init__(
        self,
        *,
        model: nn.Module | Model | None = None,
        hidden: tuple[int, ...] = (),
        degree: int = 1,
        intercept: bool = True,
        l2: float = 0.0,
        rounds: int = 100,
        step_size: float | None = None,
        batch_size: int | None = None,
        alpha: float | None = None,
        hessian: Literal["free", "first-order"] = "free",
        delta: float = 1e-3,
        tune_steps: int = 1,
        body_epochs: int = 5,
        decay: float = 1.0,
        participation: float = 1.0,
        weighting: Literal["clients", "rows"] = "clients",
        tol: float = 0.0,
        stragglers: Literal["none", "srpfl"] = "none",
        n0: int | None = None,
        stages: Literal["fixed", "theory", "adaptive"] = "fixed",
        stage_rounds: int = 10,
        contraction: float = 0.25,
        clock: str | Clock | None = None,
        sigma: float = 1.0,
        trace: str | None = None,
        communication: float = 0.0,
        standardise: bool = True,
        baselines: bool = False,
        random_state: int = 0,
    ) -> None:
        self.model = model
        self.hidden = hidden
        self.degree = degree
        self.intercept = intercept
        self.l2 = l2
        self.rounds = rounds
        self.step_size = step_size
        self.batch_size = batch_size
        self.alpha = alpha
        self.hessian = hessian
        self.delta = delta
        self.tune_steps = tune_steps
        self.body_epochs = body_epochs
        self.decay = decay
        self.participation = participation
        self.weighting = weighting
        self.tol = tol
        self.stragglers = stragglers
        self.n0 = n0
        self.stages = stages
        self.stage_rounds = stage_rounds
        self.contraction = contraction
        self.clock = clock
        self.sigma = sigma
        self.trace = trace
        self.communication = communication
        self.standardise = standardise
        self.baselines = baselines
        self.random_state = random_state
