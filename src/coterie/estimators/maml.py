# SPDX-License-Identifier: Apache-2.0
"""HF-MAML and FO-MAML as an estimator."""

from typing import ClassVar, Literal

from coterie.estimators.groups import Networks, Rounds, Stages, parameters
from coterie.estimators.personal import Personalised

__all__ = ["MAML"]


@parameters
class MAML(Personalised, Stages, Rounds, Networks):
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

    alpha: float | None = None
    hessian: Literal["free", "first-order"] = "free"
    delta: float = 1e-3
    tune_steps: int = 1
