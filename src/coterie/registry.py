# SPDX-License-Identifier: Apache-2.0
"""All methods, and which options each takes.

A method's options are a class that inherits fields of `coterie.option_fields`. The command line, estimators' constructors,
help texts, what is refused, reports and the docs' tables read the entries. Nothing large is imported here, so that the
command line answers at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.errors import ConfigError
from coterie.option_fields import (
    Components,
    Covariance,
    Covering,
    Descents,
    DescentSteps,
    Groups,
    Heads,
    Hidden,
    Intercept,
    Layers,
    Meta,
    MixedEffects,
    Momentum,
    Networks,
    Option,
    Penalty,
    Predicting,
    Products,
    Pull,
    Rank,
    RenamedSteps,
    Ridge,
    Rounds,
    Sampling,
    Spread,
    Stages,
    Starts,
    Steps,
    options_in,
    parameters,
)

__all__ = ["AUTO", "METHODS", "Method", "method_of", "register", "takers"]


# -- options of methods -----------------------------------------------------------------------------------------------
@parameters
class FedAvgOptions(Predicting, Steps, Rounds, Networks):
    """Of FedAvg and FedProx."""


@parameters
class IFCAOptions(Predicting, Starts, Groups, Steps, Rounds, Networks):
    """Of IFCA."""


@parameters
class MomentDescentOptions(Covering, RenamedSteps, Descents, Groups, Steps, Rounds, Ridge):
    """Of moment descent."""


@parameters
class MixtureOptions(Components, Sampling, Intercept):
    """Of FedGrEM."""


@parameters
class PassesOptions(Predicting, Stages, Momentum, Rounds, Networks):
    """Of personal models that are trained in passes."""


@parameters
class SplitOptions(Layers, PassesOptions):
    """Of models of which some layers are personal."""


@parameters
class FedRepOptions(Heads, SplitOptions):
    """Of FedRep."""


@parameters
class MAMLOptions(Predicting, Meta, Stages, Rounds, Networks):
    """Of MAML."""


@parameters
class DittoOptions(Pull, PassesOptions):
    """Of Ditto."""


@parameters
class LocalOptions(Predicting, Penalty, Products):
    """Of a linear model for each client alone."""


@parameters
class ShrunkOptions(Predicting, Covariance, Products):
    """Of linear models that are drawn to a common one."""


@parameters
class RepresentationOptions(Predicting, Rank, Products):
    """Of linear models that differ in a few directions."""


@parameters
class MixedModelOptions(Predicting, MixedEffects):
    """Of the mixed model."""


@parameters
class AutoOptions(Predicting, Hidden):
    """Of what a comparison chooses."""


# -- all options of a group, in the order in which they are told -------------------------------------------------------
@parameters
class ModelFields(Networks):
    """What is trained. A torch module is given in Python only."""


@parameters
class TrainingFields(Steps, Rounds):
    """Rounds and local work."""


@parameters
class ClusterFields(Starts, Groups):
    """What methods with clusters need."""


@parameters
class MomentFields(DescentSteps, Descents):
    """What phase 1 of moment descent needs."""


@parameters
class MixtureFields(Components):
    """What FedGrEM needs."""


@parameters
class PersonalFields(Stages, Pull, Meta, Heads, Layers):
    """What personal models need, and simulated times of their clients."""


@parameters
class PriorFields(Rank, Spread, Penalty):
    """What linear models per client need."""


@parameters
class MixedFields(MixedEffects):
    """What the mixed model needs."""


@parameters
class PredictionFields(Predicting):
    """What is made of outputs: classes, and intervals of numbers."""


# -- methods ----------------------------------------------------------------------------------------------------------
_TRAINING = "coterie.report.sections:training"
_COEFFICIENTS = "coterie.report.coefficients:coefficients"
_CLUSTERS = (_TRAINING, "coterie.report.sections:clusters", _COEFFICIENTS)
_PERSONAL = ("coterie.report.personal:personal", _TRAINING)
_EFFECTS = (_COEFFICIENTS, *_PERSONAL)


@dataclass(frozen=True)
class Method:
    """One method: all that the command line, estimators, `auto`, Flower and the docs know of it.

    Attributes
    ----------
    name : str
        What it is called in the options.
    title : str
        What it is called elsewhere.
    about : str
        What it is for, in a line.
    structure : str
        What it says about clients, in the words of `compare`.
    family : str
        How it is trained, checked and stored: see `coterie.methods.families`.
    options : type
        Its own options.
    estimator : str
        What its estimator is called.
    paper : str
        Who has proposed it.
    program : str
        Of the family "personal", the algorithm, as "module:function".
    layers : int
        Likewise, how many of the last layers are personal when nobody says; below 0, all but so many; 0 where all of the
        model is.
    staged : str
        Likewise, what it is called when it is trained in stages.
    variant : callable, optional
        What it is called with certain options, given all.
    instead : mapping
        Hints for options that are not its own: what to give in their place.
    refusal : str
        Why options that are not its own are refused.
    sections : tuple of str
        What its report shows between the comparison and the clients: functions of `coterie.report` or of one's own, as
        "module:function", each from a run to a section, or to None.
    """

    name: str
    title: str
    about: str
    structure: str
    family: str
    options: type
    estimator: str = ""
    paper: str = ""
    program: str = ""
    layers: int = 0
    staged: str = ""
    variant: Callable[[Any], str] | None = None
    instead: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    sections: tuple[str, ...] = (_TRAINING,)

    @property
    def takes(self) -> dict[str, list[Option]]:
        """Its own options, by group."""
        found: dict[str, list[Option]] = {}
        for option in options_in(self.options).values():
            found.setdefault(option.group, []).append(option)
        return found

    @property
    def rounds(self) -> str | None:
        """The group that counts its rounds."""
        return next((option.group for option in options_in(self.options).values() if option.name == "rounds"), None)


_IN_PASSES = dict.fromkeys(
    ("training.local_steps", "training.epochs", "training.exact"),
    "set personal.body_epochs; training.batch_size sets the rows per step",
)
_PLAIN_STEPS = dict.fromkeys(
    ("training.momentum", "training.proximal"), "maml takes plain gradient steps: leave it out"
)
_OF_MIXTURES = {
    "clusters.n_clusters": "did you mean mixture.n_components?",
    "clusters.n_init": "did you mean mixture.restarts?",
}
_OF_CLUSTERS = {"mixture.n_components": "use --method mixture, or --clusters for groups of clients"}
_OWN_START = dict.fromkeys(
    ("clusters.init", "clusters.n_init", "clusters.candidates"),
    "moment-descent makes its own start; leave it out, or use --method ifca",
) | {"model.hidden": "moment-descent needs a linear model; leave it out, or use --method ifca"}
_LINEAR = dict.fromkeys(
    ("model.hidden", "model.intercept", "model.l2"), "it is for linear models with an intercept: leave it out"
)

METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Let a method be fitted by its name; for those of one's own, once."""
    if METHODS.setdefault(method.name, method) is not method:
        raise ConfigError(f"there is another method '{method.name}'", "give each its own name")


for _method in (
    Method(
        "ifca", "IFCA", "groups of clients, one model per group", "clusters", "clusters", IFCAOptions, "IFCA",
        "Ghosh et al., 2020", instead=_OF_CLUSTERS, sections=_CLUSTERS,
    ),
    Method(
        "moment-descent", "Moment descent", "groups of clients, one linear regression per group, found from any start",
        "clusters", "clusters", MomentDescentOptions, "MixedRegression", "Su et al., 2022",
        instead=_OF_CLUSTERS | _OWN_START, sections=("coterie.report.descent:descent", *_CLUSTERS),
    ),
    Method(
        "mixture", "Mixture (FedGrEM)", "each client's rows are a mixture, and some clients may be outliers", "mixture",
        "mixture", MixtureOptions, "FederatedMixture", "Tian et al., 2024", instead=_OF_MIXTURES,
        sections=("coterie.report.mixture:components", "coterie.report.outliers:outliers", _TRAINING),
    ),
    Method(
        "fedrep", "FedRep", "a shared representation, and a personal head for each client", "representation", "personal",
        FedRepOptions, "FedRep", "Collins et al., 2021", "coterie.algorithms.fedrep:fedrep", 1, "SRPFL",
        instead=_IN_PASSES, sections=_PERSONAL,
    ),
    Method(
        "lg-fedavg", "LG-FedAvg", "a personal representation for each client, and a shared head", "representation",
        "personal", SplitOptions, "LGFedAvg", "Liang et al., 2020", "coterie.algorithms.lg_fedavg:lg_fedavg", -2, "LG-SRPFL",
        instead=_IN_PASSES, sections=_PERSONAL,
    ),
    Method(
        "fedper", "FedPer", "a shared body and a personal head for each client, trained together", "representation",
        "personal", SplitOptions, "FedPer", "Arivazhagan et al., 2019", "coterie.algorithms.fedper:fedper", 1,
        instead=_IN_PASSES, sections=_PERSONAL,
    ),
    Method(
        "maml", "MAML (Per-FedAvg)", "a model that each client fine-tunes in a few steps", "representation", "personal",
        MAMLOptions, "MAML", "Fallah et al., 2020", "coterie.algorithms.maml:maml",
        variant=lambda options: "HF-MAML" if options.personal.hessian == "free" else "FO-MAML",
        instead=_IN_PASSES | _PLAIN_STEPS, sections=_PERSONAL,
    ),
    Method(
        "ditto", "Ditto", "a model for each client, pulled towards a common one", "shrunk", "personal", DittoOptions,
        "Ditto", "Li et al., 2021", "coterie.algorithms.ditto:ditto", instead=_IN_PASSES, sections=_PERSONAL,
    ),
    Method(
        "local", "One model per client", "a linear model for each client alone", "local", "effects", LocalOptions,
        "Local", instead=_LINEAR, sections=_PERSONAL,
    ),
    Method(
        "shrunk", "Random effects", "a linear model for each client, shrunk towards a common one (random effects)", "shrunk",
        "effects", ShrunkOptions, "RandomEffects", instead=_LINEAR, sections=_EFFECTS,
    ),
    Method(
        "mixed", "Mixed model", "the linear mixed model: estimates with standard errors, variance components and tests",
        "shrunk", "mixed", MixedModelOptions, "MixedModel", "Laird and Ware, 1982; Bates et al., 2015",
        instead=_LINEAR, sections=("coterie.report.mixed:mixed", *_PERSONAL),
    ),
    Method(
        "representation", "Low-rank models", "linear models that differ in a few common directions (low rank)",
        "representation", "effects", RepresentationOptions, "LowRank", instead=_LINEAR, sections=_EFFECTS,
    ),
    Method(
        "fedavg", "FedAvg", "one model for all (with training.proximal: FedProx)", "global", "clusters", FedAvgOptions,
        "FedAvg", "McMahan et al., 2017; Li et al., 2020", instead=_OF_CLUSTERS, sections=_CLUSTERS,
    ),
):  # fmt: skip
    register(_method)

AUTO = Method(
    "auto", "auto", "compare structures, then fit the chosen one", "", "", AutoOptions,
    refusal="with --method auto the comparison decides",
)  # fmt: skip


def method_of(name: str) -> Method:
    """The method of a name, which may be `auto`."""
    return AUTO if name == AUTO.name else METHODS[name]


def takers(group: str, name: str) -> list[str]:
    """The methods that an option belongs to."""
    return [
        method.name for method in METHODS.values() if name in [option.name for option in method.takes.get(group, ())]
    ]
