# SPDX-License-Identifier: Apache-2.0
"""All methods, and what belongs to whom: a new one is an algorithm file, an entry here, a test and a line in the docs."""

from coterie.config import (
    ClusterOptions,
    FitOptions,
    MixtureOptions,
    ModelOptions,
    MomentOptions,
    PersonalOptions,
    TrainingOptions,
    given_options,
)
from coterie.errors import ConfigError
from coterie.methods.base import Method
from coterie.methods.cluster_models import ClusterModels
from coterie.methods.clusters import check_clusters, train_clusters
from coterie.methods.effects import EffectModels, check_effects, train_effects
from coterie.methods.mixture.model import Mixtures
from coterie.methods.mixture.run import check_mixture, train_mixture
from coterie.methods.mixture.scores import MixtureScore
from coterie.methods.personal.model import Personal
from coterie.methods.personal.run import check_personal, train_personal

__all__ = ["METHODS", "check_options", "takers"]

_MODEL, _TRAINING, _CLUSTERS, _MOMENTS, _MIXTURE, _PERSONAL = (
    frozenset(kind.model_fields)
    for kind in (ModelOptions, TrainingOptions, ClusterOptions, MomentOptions, MixtureOptions, PersonalOptions)
)
_PASSES = _TRAINING - {"local_steps", "epochs", "exact"}  # of methods that count their work in passes
_LAYERS, _HEADS, _META = {"layers"}, {"head_epochs"}, {"alpha", "hessian", "delta", "tune_steps"}
_COMMON = _PERSONAL - _LAYERS - _HEADS - _META  # passes, stages and clocks
_NAMED = 3  # methods at most, in a hint
_LINEAR = {"degree", "hidden", "intercept"}  # hidden layers and a missing intercept are refused with a reason

_IN_PASSES = dict.fromkeys(
    ("training.local_steps", "training.epochs", "training.exact"),
    "set personal.body_epochs; training.batch_size sets the rows per step",
)
_OF_MIXTURES = {
    "clusters.n_clusters": "did you mean mixture.n_components?", "clusters.n_init": "did you mean mixture.restarts?",
}  # fmt: skip
_OF_CLUSTERS = {
    "mixture.n_components": "use --method mixture, or --clusters for groups of clients",
}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "ifca", "groups of clients, one model per group", "clusters",
            {"model": _MODEL, "training": _TRAINING, "clusters": _CLUSTERS},
            ClusterModels, check_clusters, train_clusters, _OF_CLUSTERS,
        ),
        Method(
            "moment-descent", "groups of clients, one linear regression per group, found from any start", "clusters",
            {
                "model": _MODEL, "training": _TRAINING, "moments": _MOMENTS,
                "clusters": _CLUSTERS - {"init", "n_init", "candidates"},
            },
            ClusterModels, check_clusters, train_clusters,
            _OF_CLUSTERS
            | dict.fromkeys(
                ("clusters.init", "clusters.n_init", "clusters.candidates"),
                "moment-descent makes its own start; leave it out, or use --method ifca",
            ),
        ),
        Method(
            "mixture", "each client's rows are a mixture, and some clients may be outliers (FedGrEM)", "mixture",
            {"model": {"intercept"}, "training": {"participation"}, "mixture": _MIXTURE},
            Mixtures, check_mixture, train_mixture, _OF_MIXTURES, "mixture", MixtureScore,
        ),
        Method(
            "fedrep", "a shared representation, and a personal head for each client", "representation",
            {"model": _MODEL, "training": _PASSES, "personal": _COMMON | _LAYERS | _HEADS},
            Personal, check_personal, train_personal, _IN_PASSES,
        ),
        Method(
            "lg-fedavg", "a personal representation for each client, and a shared head", "representation",
            {"model": _MODEL, "training": _PASSES, "personal": _COMMON | _LAYERS},
            Personal, check_personal, train_personal, _IN_PASSES,
        ),
        Method(
            "maml", "a model that each client fine-tunes in a few steps", "representation",
            {"model": _MODEL, "training": _PASSES, "personal": _COMMON | _META},
            Personal, check_personal, train_personal, _IN_PASSES,
        ),
        Method(
            "local", "a linear model for each client alone", "local", {"model": _LINEAR, "prior": {"penalty"}},
            EffectModels, check_effects, train_effects,
        ),
        Method(
            "shrunk", "a linear model for each client, shrunk towards a common one (random effects)", "shrunk",
            {"model": _LINEAR, "prior": {"spread"}}, EffectModels, check_effects, train_effects,
        ),
        Method(
            "representation", "linear models that differ in a few common directions (low rank)", "representation",
            {"model": _LINEAR, "prior": {"rank"}}, EffectModels, check_effects, train_effects,
        ),
        Method(
            "fedavg", "one model for all (with training.proximal: FedProx)", "global",
            {"model": _MODEL, "training": _TRAINING}, ClusterModels, check_clusters, train_clusters, _OF_CLUSTERS,
        ),
    )
}  # fmt: skip


def takers(group: str, name: str) -> list[str]:
    """The methods that an option belongs to."""
    return [method.name for method in METHODS.values() if name in method.takes.get(group, ())]


def check_options(chosen: FitOptions) -> None:
    """Refuse an option that is another method's."""
    method = METHODS[chosen.method]
    for group, name in given_options(chosen):
        own = method.takes.get(group, ())
        if name in own:
            continue
        same = next((f"{g}.{name}" for g, names in method.takes.items() if name in names), None)
        others = takers(group, name)
        hint = method.instead.get(f"{group}.{name}") or (
            f"did you mean {same}?"
            if same
            else f"it is for --method {' or '.join(others[:_NAMED])}"
            if others
            else "leave it out"
        )
        raise ConfigError(f"{group}.{name} is set, and {chosen.method} has no use for it", hint)
