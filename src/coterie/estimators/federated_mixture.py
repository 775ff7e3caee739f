# SPDX-License-Identifier: Apache-2.0
"""FedGrEM as an estimator: a mixture for every client, each helped by the others."""

from dataclasses import field, replace
from typing import Any

import numpy as np
import torch

from coterie.data.ragged import Ragged
from coterie.errors import DataError
from coterie.estimators.base import Estimator, estimator
from coterie.estimators.rows import check_shape, in_given_order
from coterie.methods.base import Fitted
from coterie.methods.mixture.model import Adopted, Mixtures
from coterie.models.mixtures import Regression
from coterie.registry import MixtureOptions

__all__ = ["FederatedMixture"]


@estimator
class FederatedMixture(Estimator, MixtureOptions):
    """A mixture for every client; mixtures are similar across clients, except for outliers (Tian et al., 2024).

    Without targets, components are normal and rows are clustered. With targets, components are linear regressions.

    Attributes
    ----------
    client_names_ : ndarray
        [M] in the order of the following attributes.
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
        Candidates for the two, and their scores on held-out rows; None if the value was given.
    scores_ : dict
        Mean log-likelihoods by method: "mixture", and with baselines "global" and "local".
    history_ : list of Round
        What happened, by round; not of a loaded run.
    """

    method = "mixture"
    task = "regression"
    doubts = ("not converged", "are empty")

    n_components: int | None = field(default=None, kw_only=False)

    def predict(self, clients: Any, groups: Any = None) -> np.ndarray:
        """Predict every row, in the order of the rows given: its likeliest component, or, of regressions, its target.

        A target's prediction is its expectation given the features, by the client's own proportions; which component a row
        is from shows in its target: see `predict_proba`. A client that was not there in training is served by the centre,
        with mean proportions. Of a `Clients`, the test rows (or else the training rows) are predicted, in the order of
        `clients.test.frame()`.
        """
        rows = self._scaled(clients, None, groups, targets=False)
        if isinstance(self.mixtures_.fit.family, Regression):
            made = self.mixtures_.expected(rows).numpy()
        else:
            made = self.mixtures_.probabilities(rows).argmax(1).numpy()
        return in_given_order(made, rows, clients)

    def predict_proba(self, clients: Any, y: Any = None, groups: Any = None) -> np.ndarray:
        """Probability of every component for every row; of regressions, given the target too.  [N, R]"""
        rows = self._scaled(clients, y, groups)
        return in_given_order(self.mixtures_.probabilities(rows).numpy(), rows, clients)

    def score(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Mean log-likelihood of a row; of regressions, of its target given the features."""
        rows = self._scaled(clients, y, groups)
        n = torch.from_numpy(rows.layout.counts)
        return float((self.mixtures_.log_likelihood(rows) * n).sum() / max(rows.layout.n_rows, 1))

    def bic(self, clients: Any, y: Any = None, groups: Any = None) -> float:
        """Bayesian information criterion over clients that are no outliers; the smaller the better."""
        rows = self._scaled(clients, y, groups)
        return self.mixtures_.bic(rows)

    def assign(self, clients: Any, y: Any = None, groups: Any = None) -> Adopted:
        """Estimate clients' proportions of the centre's components, and say how well these fit; for clients old or new."""
        rows = self._scaled(clients, y, groups)
        return self.mixtures_.adopt(rows)

    # -- inside -------------------------------------------------------------------------------------------------------
    def _know(self, found: Fitted) -> None:
        self.mixtures_: Mixtures = found.models
        mixtures, fit = self.mixtures_, found.models.fit
        self.weights_ = fit.weights.numpy()
        self.means_, self.centre_ = (mixtures.raw(theta).numpy() for theta in (fit.theta, fit.centre))
        self.covariance_, self.outlier_score_ = mixtures.covariance.numpy(), fit.outlier_score.numpy()
        far = np.argsort(-self.outlier_score_, kind="stable")[: int(fit.outliers.sum())]
        self.outliers_ = [str(name) for name in mixtures.names[far]]
        self.n_components_, self.c_lambda_ = len(fit.centre), fit.c_lambda
        self.choice_, self.components_choice_ = fit.choice, found.extra["counted"]

    def prepared(self, rows: Ragged) -> Ragged:
        """Scale rows as in training."""
        check_shape(rows, self.scaling_)
        return self.mixtures_.prepared(rows)

    def _scaled(self, clients: Any, y: Any, groups: Any, *, targets: bool = True) -> Ragged:
        """Scaled rows, with targets where components are regressions and they are wanted."""
        rows = self._rows(clients, y, groups)
        regressions = isinstance(self.mixtures_.fit.family, Regression)
        if regressions and targets and rows.y is None:
            raise DataError("there are no targets, and components are regressions of the target", "pass y")
        return self.prepared(rows if regressions else replace(rows, y=None))
