# SPDX-License-Identifier: Apache-2.0
"""The scikit-learn face: constructors store parameters, `fit` learns, results end in an underscore."""

from coterie.estimators.fedavg import FedAvg
from coterie.estimators.federated import Federated
from coterie.estimators.federated_mixture import FederatedMixture
from coterie.estimators.fedrep import FedRep
from coterie.estimators.ifca import IFCA
from coterie.estimators.lg_fedavg import LGFedAvg
from coterie.estimators.linear import Local, Representation, Shrunk
from coterie.estimators.loading import load
from coterie.estimators.maml import MAML
from coterie.estimators.mixed_regression import MixedRegression
from coterie.estimators.personal import Personalised

__all__ = [
    "IFCA",
    "MAML",
    "FedAvg",
    "FedRep",
    "Federated",
    "FederatedMixture",
    "LGFedAvg",
    "Local",
    "MixedRegression",
    "Personalised",
    "Representation",
    "Shrunk",
    "load",
]
