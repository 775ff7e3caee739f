# SPDX-License-Identifier: Apache-2.0
"""Mixed regression from any start as an estimator."""

from dataclasses import field
from typing import ClassVar, Literal

from coterie.estimators.federated import Federated
from coterie.estimators.groups import Groups, Products, Rounds, Steps, parameters
from coterie.methods.cluster_models import Descended

__all__ = ["MixedRegression"]


@parameters
class MixedRegression(Federated, Groups, Rounds, Steps, Products):
    """Clients follow one of a few linear regressions: find these from any start (papers 000 and 002).

    Phase 1, moment descent, leads the models of a few clients, the anchors, to those of their groups. Phase 2 assigns all
    clients and refines the models by FedAvg (`local_steps`) or FedProx (`proximal`, `exact`).

    Parameters
    ----------
    n_clusters : int, optional
        Number of groups; None estimates it.
    degree : int
        Of the polynomial feature map; 1 is none.
    iterations, estimator, subspace, exchanges, oversampling, step, descent_step_size :
        Of Phase 1: see `coterie.algorithms.moment_descent.Descent`.
    max_clusters : int, optional
        The most groups that are tried where their number is estimated; 24 by default, and not more than a fifth of the
        clients, or 6.
    anchors, min_rows : int, optional
        How many anchors, and rows that they should have; 10 for each group by default.
    further : bool
        Whether more anchors are drawn among clients that are badly served, if there are many.
    swaps : bool
        Whether groups whose model serves clients worse than another anchor's would give way to it.
    delta, eps : float
        Least distance between two models, of standardised features and targets, if it is known; an anchor stops where it
        would move by less than `eps` delta.
    noise : float
        Standard deviation of what is added to the anchors' models before clients see them (Remark 2).
    descent_resample : int
        Parts of the clients, and of the anchors' rows, that iterations of Phase 1 take in turn; 0 takes all in each.
    start : Tensor, optional
        [P] where all anchors begin; zero by default.
    rounds, local_steps, step_size, average_over, ... :
        Of Phase 2, as for `IFCA`.
    random_state : int
        Seed.

    Attributes
    ----------
    labels_, margins_, certain_, theta_, history_, scores_ :
        As for `IFCA`.
    n_clusters_ : int
        Number of groups that were found.
    anchors_ : ndarray
        [A] names of the anchors.
    anchor_models_ : Tensor
        [A, P] where Phase 1 led them.
    spectrum_ : Tensor
        [L] singular values of the moments at the anchors, mean over anchors, in the last iteration. Of a loaded run
        without its state file, this and the two above are not there.
    """

    method: ClassVar[str] = "moment-descent"

    n_clusters: int | None = field(default=None, kw_only=False)
    intercept: bool = True
    l2: float = 0.0
    iterations: int = 5
    estimator: Literal["pairs", "halves", "two"] = "pairs"
    subspace: Literal["range", "orthogonal"] = "range"
    exchanges: int = 3
    oversampling: int = 8
    step: Literal["curvature", "plain"] = "curvature"
    descent_step_size: float = 1.0
    anchors: int | None = None
    min_rows: int | None = None
    further: bool = True
    swaps: bool = True
    delta: float = 0.0
    eps: float = 0.05
    max_clusters: int | None = None
    noise: float = 0.0
    descent_resample: int = 0
    weighting: Literal["clients", "rows"] = "rows"

    def _know_descent(self, found: Descended | None) -> None:
        self.n_clusters_ = len(self.theta_)
        if found is not None:
            self.anchors_, self.anchor_models_, self.spectrum_ = found.anchors, found.theta, found.spectrum
