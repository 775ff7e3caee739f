# SPDX-License-Identifier: Apache-2.0
"""The code behind the methods of `coterie.registry`: few families, of which each trains several methods."""

from coterie.methods.base import Family
from coterie.methods.cluster_models import ClusterModels
from coterie.methods.clusters import check_clusters, train_clusters
from coterie.methods.effects import EffectModels, check_effects, train_effects
from coterie.methods.mixed.model import MixedModels
from coterie.methods.mixed.run import check_mixed, train_mixed
from coterie.methods.mixture.model import Mixtures
from coterie.methods.mixture.run import check_mixture, train_mixture
from coterie.methods.mixture.scores import MixtureScore
from coterie.methods.personal.model import Personal
from coterie.methods.personal.run import check_personal, train_personal
from coterie.registry import METHODS

__all__ = ["FAMILIES", "family_of"]

FAMILIES = {
    "clusters": Family(ClusterModels, check_clusters, train_clusters),
    "mixture": Family(Mixtures, check_mixture, train_mixture, MixtureScore),
    "personal": Family(Personal, check_personal, train_personal),
    "effects": Family(EffectModels, check_effects, train_effects),
    "mixed": Family(MixedModels, check_mixed, train_mixed),
}


def family_of(method: str) -> Family:
    """How a method is trained."""
    return FAMILIES[METHODS[method].family]
