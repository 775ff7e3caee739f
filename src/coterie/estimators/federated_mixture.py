# SPDX-License-Identifier: Apache-2.0
"""FedGrEM as an estimator: a mixture for every client, each helped by the others."""

import warnings
from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from coterie.config import FitOptions
from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.estimators.groups import Everyone, parameters
from coterie.estimators.parameters import options_of
from coterie.estimators.rows import as_clients, as_rows, check_shape, in_given_order
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.methods.mixture.model import Adopted, Mixtures
from coterie.methods.session import Watch
from coterie.models.mixtures import Regression

__all__ = ["FederatedMixture"]


@parameters
class FederatedMixture(BaseEstimator, Everyone):  # type: ignore[misc]
    """A mixture for every client; mixtures are similar across clients, except for outliers (Tian et al., 2024).

    Without targets, components are normal and rows are clustered. With targets, components are linear regressions.

    Parameters
    ----------
    n_components : int, optional
        Number of components; None chooses it, at most `max_components`.
    max_components, choose_by : int, {"held-out", "bic"}
        Of that choice.
    covariance : {"full", "diagonal", "unit"}
        Of normal components, common to all; "unit" is variance one in the columns' own units, which are then not scaled.
    variance : {"estimated", "unit"}
        Of regressions' noise, likewise.
    intercept : bool
        Whether regressions have one; if not, they go through the origin.
    c_lambda : float or "common", optional
        How strongly clients' components are drawn together: 0 leaves every client alone, "common" gives all the same
        ones; None chooses it on held-out rows.
    penalty : {"squared", "norm"}
        On a client's distance from the centre: its square, where 1 / `c_lambda` is how much clients' components deviate in
        units of a component's own deviation; or the paper's, the distance itself.
    restarts, iterations : int
        Starts of every client's own first fit, and steps of each.
    rounds, tol : int, float
        At most so many rounds; the relative move that ends them.
    c_eta, kappa, together : float
        Of the step size, and of the penalty's schedule: see `coterie.algorithms.fedgrem`.
    robust : float or "off"
        The centre is computed with this `c_lambda` at most, so that no client draws it far; "off" as in the paper.
    reject : float or "nobody"
        Outlier score above which a client has no part in the centre and is left alone.
    share_weights : float
        Rows for each component that every client's proportions have besides its own, dealt by the common proportions; 0
        leaves proportions to every client.
    sparse : float
        l1 penalty on the centre, in which coordinates that are small at most clients become 0; not with a full covariance.
    neighbours : int
        Simulates a federation without a centre: each client's components are drawn to a centre of its own, that of its
        neighbours and itself, so many on either side in a ring by name; 0 has one centre, of everybody.
    batch_size : int, optional
        Rows of each client in a round, whose steps become shorter from round to round; all by default.
    participation : float
        Share of the clients in a round.
    standardise : bool
        Whether columns are centred and scaled, from federated sums; results are in the columns' own units all the same.
    baselines : bool
        Whether one mixture for all and one mixture each are fitted too, for `scores_`.
    random_state : int
        Seed.

    Attributes
    ----------
    client_names_ : ndarray
        [M] in the order of all that follows.
    weights_ : ndarray
        [M, R] proportions of every client's components.
    means_, centre_ : ndarray
        [M, R, P] every client's components, [R, P] their centre: means, or coefficients with the intercept last.
    covariance_ : ndarray
        [D, D] within a component; of regressions [1, 1], the variance of the noise.
    outlier_score_ : ndarray
        [M] how far a client is from the centre, compared with the others; above 3.5 it is called an outlier.
    outliers_ : list of str
        Names of the outliers, the farthest first.
    n_components_, c_lambda_ : int, float
        As given or chosen.
    choice_, components_choice_ : Choice or None
        Candidates for the two, and what held-out rows said of each; None for what was given.
    scores_ : dict
        Mean log-likelihoods by method: "mixture", and with baselines "global" and "local".
    history_ : list of Round
        What happened, by round; not of a loaded run.
    """

    method: ClassVar[str] = "mixture"

    n_components: int | None = field(default=None, kw_only=False)
    max_components: int = 10
    choose_by: Literal["held-out", "bic"] = "held-out"
    covariance: Literal["full", "diagonal", "unit"] = "full"
    variance: Literal["estimated", "unit"] = "estimated"
    intercept: bool = True
    c_lambda: float | Literal["common"] | None = None
    penalty: Literal["squared", "norm"] = "squared"
    restarts: int = 20
    iterations: int = 30
    rounds: int = 1000
    tol: float = 1e-5
    c_eta: float = 0.95
    kappa: float = 0.1
    together: float = 8.0
    robust: float | Literal["off"] = 2.0
    reject: float | Literal["nobody"] = 3.5
    share_weights: float = 4.0
    sparse: float = 0.0
    neighbours: int = 0
    batch_size: int | None = None
    participation: float = 1.0

    def fit(self, clients: Any, y: Any = None, groups: Any = None, *, watch: Watch | None = None) -> Self:
        """Fit to clients.

        Parameters
        ----------
        clients : Clients or array
            From `coterie.read`, or features [N, D] together with groups [N] (the client of each row) and, for a mixture
            of regressions, targets y [N].
        watch : callable, optional
            Told of every round.
        """
        fitted = fit(as_clients(clients, y, groups, task="regression"), self._options(), watch=watch)
        self.fitted_, self.history_ = fitted, fitted.rounds
        self._know(fitted)
        for said in fitted.warnings:
            if "not converged" in said or "are empty" in said:
                warnings.warn(said, ConvergenceWarning, stacklevel=2)
        return self

    def predict(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Predict every row, in the order of the rows given: its likeliest component, or, of regressions, its target.

        A target's prediction is its expectation given the features, by the client's own proportions; which component a row
        is from shows in its target: see `predict_proba`. A client that was not there in training is served by the centre,
        with mean proportions. Of a `Clients`, the test rows (or else the training rows) are predicted, client after client
        in the order of their names.
        """
        rows = self._rows(clients, None, groups)
        if isinstance(self.mixtures_.fit.family, Regression):
            made = self.mixtures_.expected(rows).numpy()
        else:
            made = self.mixtures_.probabilities(rows).argmax(1).numpy()
        return in_given_order(made, rows, clients, groups)

    def predict_proba(self, clients: Any, y: Any = None, groups: Any = None) -> np.ndarray:
        """Probability of every component for every row; of regressions, given the target too.  [N, R]"""
        rows = self._labelled(clients, y, groups)
        return in_given_order(self.mixtures_.probabilities(rows).numpy(), rows, clients, groups)

    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Mean log-likelihood of a row; of regressions, of its target given the features."""
        rows = self._labelled(clients, y, groups)
        n = torch.from_numpy(rows.layout.counts)
        return float((self.mixtures_.log_likelihood(rows) * n).sum() / max(rows.layout.n_rows, 1))

    def bic(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Bayesian information criterion over clients that are no outliers; the smaller the better."""
        rows = self._labelled(clients, y, groups)
        return self.mixtures_.bic(rows)

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Adopted:
        """Estimate clients' proportions of the centre's components, and say how well these fit; for clients old or new."""
        rows = self._labelled(clients, y, groups)
        return self.mixtures_.adopt(rows)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _options(self) -> FitOptions:
        return options_of(self, self.method)

    def _restore(self, run: Fitted) -> None:
        """Become what a finished run has fitted."""
        self._know(run)

    def _know(self, found: Fitted) -> None:
        mixtures: Mixtures = found.models
        fit = mixtures.fit
        self.mixtures_, self.schema_ = mixtures, found.schema
        self.client_names_, self.weights_ = mixtures.names, fit.weights.numpy()
        self.means_, self.centre_ = (mixtures.raw(theta).numpy() for theta in (fit.theta, fit.centre))
        self.covariance_, self.outlier_score_ = mixtures.covariance.numpy(), fit.outlier_score.numpy()
        far = np.argsort(-self.outlier_score_, kind="stable")[: int(fit.outliers.sum())]
        self.outliers_ = [str(name) for name in mixtures.names[far]]
        self.n_components_, self.c_lambda_ = len(fit.centre), fit.c_lambda
        self.choice_, self.components_choice_ = fit.choice, found.extra["counted"]
        self.scores_ = {score.method: score for score in found.scores}

    def _rows(self, clients: Any, y: Any, groups: Any) -> Ragged:
        """Scaled rows."""
        if not hasattr(self, "mixtures_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted: call fit first")
        known = isinstance(self.mixtures_.fit.family, Regression)
        rows = as_rows(clients, y if known else None, groups, self.schema_, alone=False)
        check_shape(rows, self.mixtures_.scaling)
        return self.mixtures_.prepared(rows)

    def _labelled(self, clients: Any, y: Any, groups: Any) -> Ragged:
        """Scaled rows, with targets where components are regressions."""
        rows = self._rows(clients, y, groups)
        if isinstance(self.mixtures_.fit.family, Regression) and rows.y is None:
            raise DataError("there are no targets, and components are regressions of the target", "pass y")
        return rows
