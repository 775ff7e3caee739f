# SPDX-License-Identifier: Apache-2.0
"""FedRep and SRPFL as an estimator."""

from typing import ClassVar

from coterie.estimators.groups import Momentum, Networks, Rounds, Stages, parameters
from coterie.estimators.personal import Personalised

__all__ = ["FedRep"]


@parameters
class FedRep(Personalised, Stages, Rounds, Momentum, Networks):
    """A shared representation, and a personal head for each client (Collins et al., 2021; Tziotis et al., 2022).

    Parameters
    ----------
    model : nn.Module or Model, optional
        What is trained; by default a network with `hidden` layers.
    layers : tuple of str
        The head: layers by the beginnings of their names; the last layer by default.
    head_epochs, body_epochs : int
        Passes over a client's rows in a round: with its head, and then with the representation.
    batch_size : int, optional
        Rows of a step; 10 by default.
    rounds, step_size, decay, participation, ... :
        See `coterie.config`.
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
        [Q] the representation.
    scores_ : dict
        How the method does, and with baselines "global" and "local".
    spread_ : dict
        How the held-out metric is spread over clients: mean, median, worst and best tenth; not of a loaded run.
    history_ : list of Round
        What happened, by round; `time` is the clock's. Not of a loaded run.
    """

    method: ClassVar[str] = "fedrep"

    hidden: tuple[int, ...] = (64,)
    layers: tuple[str, ...] = ()
    head_epochs: int = 10
