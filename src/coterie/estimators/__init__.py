# SPDX-License-Identifier: Apache-2.0
"""The scikit-learn face: constructors store parameters, `fit` learns, results end in an underscore."""

from coterie.estimators import federated, federated_mixture, loading, mixed, personal
from coterie.estimators.base import ESTIMATORS, Estimator, estimator
from coterie.estimators.federated import *  # noqa: F403
from coterie.estimators.federated_mixture import *  # noqa: F403
from coterie.estimators.loading import *  # noqa: F403
from coterie.estimators.mixed import *  # noqa: F403
from coterie.estimators.personal import *  # noqa: F403

__all__ = ["ESTIMATORS", "Estimator", "estimator"]
__all__ += federated.__all__
__all__ += federated_mixture.__all__
__all__ += loading.__all__
__all__ += mixed.__all__
__all__ += personal.__all__
