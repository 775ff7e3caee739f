# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's own checks of estimators, as far as they apply.

They know nothing of clients, so here all rows are one client's. What cannot pass is listed with its reason.
"""

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import _num_samples

import coterie


def _one_client(X):
    try:
        return np.zeros(_num_samples(X), dtype=int)
    except TypeError:  # no rows at all, or no array
        return np.zeros(0, dtype=int)


class _OneClient:
    def fit(self, X, y, sample_weight=None):
        return super().fit(X, y, _one_client(X), sample_weight=sample_weight)

    def predict(self, X):
        return super().predict(X, _one_client(X))

    def predict_proba(self, X):
        return super().predict_proba(X, _one_client(X))

    def score(self, X, y):
        return super().score(X, y, _one_client(X))


class Local(_OneClient, coterie.Local):
    pass


class RandomEffects(_OneClient, coterie.RandomEffects):
    pass


class FedAvg(_OneClient, coterie.FedAvg):
    def fit(self, X, y):
        return coterie.FedAvg.fit(self, X, y, _one_client(X))


_WORDS = "it is refused, in other words"
_EXPECTED = {
    "check_estimators_empty_data_messages": _WORDS,
    "check_fit2d_predict1d": _WORDS,
    "check_all_zero_sample_weights_error": _WORDS,
    "check_dtype_object": "objects that are no numbers are a DataError, which is a ValueError and no TypeError",
    "check_estimators_nan_inf": "missing features are filled with the federated mean of the training when predicting",
}


def _failing(model):
    return _EXPECTED


@parametrize_with_checks(
    [Local(penalty=1.0), RandomEffects(covariance="diagonal"), FedAvg(rounds=5)], expected_failed_checks=_failing
)
@pytest.mark.filterwarnings("ignore")  # of scikit-learn about itself, and of fits that cannot converge on its rows
def test_scikit_learns_checks(estimator, check):
    check(estimator)
