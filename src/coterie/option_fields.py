# SPDX-License-Identifier: Apache-2.0
"""Every option, once: fields of small classes, each of one group of the configuration.

What methods take (`coterie.registry`), the tree of options (`coterie.config`) and estimators' constructors inherit from
these. Nothing large is imported here, so that the command line answers at once.
"""

from dataclasses import dataclass, field, fields
from inspect import get_annotations
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, dataclass_transform

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MultipleOf

from coterie.limits import LARGEST_NUMBER, MOST_COLUMNS, MOST_LAYERS, MOST_NAME, MOST_PARTS, MOST_STEPS, MOST_UNITS

__all__ = [
    "Components", "Covariance", "Covering", "DescentSteps", "Descents", "Groups", "Heads", "Hidden",
    "Intercept", "Layers", "Meta", "MixedEffects", "Momentum", "Networks", "Option",
    "Penalty", "Predicting", "Products", "Pull", "Rank", "RenamedSteps", "Ridge", "Rounds",
    "Sampling", "Spread", "Stages", "Starts", "Steps", "abouts", "options_in", "parameters",
]  # fmt: skip

_Class = TypeVar("_Class")


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
def parameters(kind: type[_Class]) -> type[_Class]:
    """Let a class have parameters; estimators, which inherit them, have the constructor (that takes its time to make)."""
    return dataclass(init=False, kw_only=True, eq=False, repr=False, match_args=False)(kind)


@dataclass(frozen=True)
class OrWord:
    """A number that is at least 0, or a word for what has no end: not every file can hold infinity."""

    word: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Tell pydantic how to check it."""
        from pydantic import PlainValidator

        return PlainValidator(self._checked).__get_pydantic_core_schema__(source, handler)

    def _checked(self, value: Any) -> float | str:
        if value in (self.word, float("inf")):
            return self.word
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_NUMBER:
            return float(value)
        raise ValueError(f"give a number that is at least 0, or '{self.word}'")


Count = Annotated[int, Ge(1), Le(MOST_STEPS)]  # of what takes time
Several = Annotated[int, Ge(1), Le(MOST_PARTS)]  # of what takes room
Positive = Annotated[float, Gt(0), Le(LARGEST_NUMBER)]
AtLeast0 = Annotated[float, Ge(0), Le(LARGEST_NUMBER)]
Share = Annotated[float, Gt(0), Le(1)]


@parameters
class Products:
    """Of linear models."""

    group: ClassVar[str] = "model"

    degree: Annotated[int, Ge(1), Le(1000), "add products of features up to this degree"] = 1


@parameters
class Intercept:
    """Of layers."""

    group: ClassVar[str] = "model"

    intercept: Annotated[bool, "whether layers have a bias"] = True


@parameters
class Ridge(Products, Intercept):
    """Of models that are trained in steps."""

    group: ClassVar[str] = "model"

    l2: Annotated[AtLeast0, "ridge penalty"] = 0.0


@parameters
class Hidden:
    """Of networks."""

    group: ClassVar[str] = "model"

    hidden: Annotated[
        tuple[Annotated[int, Gt(0), Le(MOST_UNITS)], ...],
        MaxLen(MOST_LAYERS),
        "hidden layers of a network, like `64,32`; linear by default",
    ] = ()


@parameters
class Networks(Ridge, Hidden):
    """Of models that may be networks."""


@parameters
class Sampling:
    """Of who takes part."""

    group: ClassVar[str] = "training"

    participation: Annotated[Share, "share of the clients in a round"] = 1.0


@parameters
class Rounds(Sampling):
    """Of training in rounds."""

    group: ClassVar[str] = "training"

    rounds: Annotated[Count, "number of rounds"] = 100
    step_size: Annotated[
        Positive | None, "size of local steps; by default from the curvature for linear models, 0.1 for networks"
    ] = None
    batch_size: Annotated[Count | None, "rows per step; all by default, 10 for methods that count work in passes"] = (
        None
    )
    decay: Annotated[Share, "factor on the step size, per round"] = 1.0
    weighting: Annotated[
        Literal["clients", "rows"] | None,
        "weights of clients in a mean: equal, or by their rows (default of moment descent and FedAvg)",
    ] = None
    tol: Annotated[AtLeast0, "stop early below this relative change"] = 0.0
    robust: Annotated[
        Literal["clip", "trimmed", "median", "near", "none"],
        "how updates are averaged where some clients are bad: long ones limited, trimmed means, medians, means of updates "
        "near to most others', plain means",
    ] = "clip"


@parameters
class Momentum:
    """Of local steps."""

    group: ClassVar[str] = "training"

    momentum: Annotated[float, Ge(0), Lt(1), "heavy-ball momentum, reset in every round"] = 0.0
    proximal: Annotated[AtLeast0, "mu of FedProx"] = 0.0


@parameters
class Steps(Momentum):
    """Of local work that is counted in steps."""

    group: ClassVar[str] = "training"

    local_steps: Annotated[Count, "gradient steps in a round"] = 10
    epochs: Annotated[Count | None, "passes instead of steps; needs `batch_size`"] = None
    exact: Annotated[bool, "FedProx in closed form, for linear regression; needs `proximal`"] = False


@parameters
class Groups:
    """Of clusters of clients."""

    group: ClassVar[str] = "clusters"

    n_clusters: Annotated[
        Several | None, "number of clusters; by default moment descent estimates it and IFCA uses 2"
    ] = None
    averaging: Annotated[Literal["model", "gradient"], "what clients send: trained models or gradients"] = "model"
    average_over: Annotated[
        Literal["cluster", "everyone"], "clients that a model is averaged over (everyone: Lemma 1 of moment descent)"
    ] = "cluster"
    shared_layers: Annotated[tuple[str, ...], "layers common to all clusters, by the prefixes of their names"] = ()
    soft: Annotated[bool, "soft labels: clients train all models, weighted by posterior probability"] = False
    temperature: Annotated[Positive | None, "temperature of soft labels; estimated by default"] = None
    patience: Annotated[int, Ge(0), Le(MOST_STEPS), "rounds before an empty cluster is reseeded; 0 never"] = 5
    resample: Annotated[
        int,
        Ge(0),
        Le(MOST_PARTS),
        MultipleOf(2),
        "parts that clients' rows are split into, two for each round; 0 uses all rows",
    ] = 0


@parameters
class Starts:
    """Of where clusters begin."""

    group: ClassVar[str] = "clusters"

    init: Annotated[
        Literal["random", "balanced", "spread", "warm"],
        "how models are initialised (`warm`: from given models, in Python)",
    ] = "spread"
    n_init: Annotated[Several, "starts to compare on held-out rows"] = 1
    candidates: Annotated[Several, "clients tried for each model of `spread`"] = 5


@parameters
class Descents:
    """Of phase 1 of moment descent."""

    group: ClassVar[str] = "moments"

    iterations: Annotated[Count, "iterations"] = 5
    estimator: Annotated[Literal["pairs", "halves", "two"], "estimator of the moments"] = "pairs"
    subspace: Annotated[Literal["range", "orthogonal"], "how the subspace of a step is found"] = "range"
    exchanges: Annotated[
        int,
        Ge(2),
        Le(MOST_PARTS),
        "exchanges per iteration for the subspaces; `range` puts the columns of all in one message",
    ] = 3
    oversampling: Annotated[int, Ge(0), Le(MOST_PARTS), "columns beyond the number of clusters"] = 8
    step: Annotated[Literal["curvature", "plain"], "how an anchor's step size is set"] = "curvature"
    anchors: Annotated[Several | None, "number of anchors; 10 for each cluster by default"] = None
    min_rows: Annotated[
        Annotated[int, Ge(2), Le(MOST_STEPS)] | None, "rows that an anchor should have; 10 for each cluster by default"
    ] = None
    further: Annotated[bool, "add anchors if many clients have a high loss"] = True
    swaps: Annotated[bool, "replace a group's model by another anchor's if that fits clients better"] = True
    delta: Annotated[AtLeast0, "smallest distance between two models, if known"] = 0.0
    eps: Annotated[AtLeast0, "anchors stop when a step is smaller than this fraction of `delta`"] = 0.05
    max_clusters: Annotated[
        Several | None, "largest number of clusters tried; by default 24, but at most a fifth of the clients, or 6"
    ] = None
    noise: Annotated[AtLeast0, "standard deviation of noise on the anchors' models that clients see"] = 0.0


_DescentStep = Annotated[Positive, "factor on the anchors' steps"]
_DescentParts = Annotated[
    int,
    Ge(0),
    Le(MOST_PARTS),
    "parts of the clients, and of the anchors' rows, that iterations take in turn; 0 takes all",
]


@parameters
class DescentSteps:
    """Of phase 1 of moment descent, as configuration files call it."""

    group: ClassVar[str] = "moments"

    step_size: _DescentStep = 1.0
    resample: _DescentParts = 0


@parameters
class RenamedSteps:
    """The same for Python, where `step_size` is that of training and `resample` that of clusters."""

    group: ClassVar[str] = "moments"
    called: ClassVar[dict[str, str]] = {"descent_step_size": "step_size", "descent_resample": "resample"}

    descent_step_size: _DescentStep = 1.0
    descent_resample: _DescentParts = 0


@parameters
class Components:
    """Of mixtures, which count their own rounds."""

    group: ClassVar[str] = "mixture"

    n_components: Annotated[Several | None, "number of components; chosen by default"] = None
    max_components: Annotated[Several, "largest number of components tried"] = 10
    choose_by: Annotated[Literal["held-out", "bic"], "criterion for the number of components"] = "held-out"
    covariance: Annotated[Literal["full", "diagonal", "unit"], "covariance common to all normal components"] = "full"
    variance: Annotated[Literal["estimated", "unit"], "noise variance of regressions"] = "estimated"
    c_lambda: Annotated[
        Annotated[float | Literal["common"], OrWord("common")] | None,
        "how strongly clients are shrunk to the centre: 0 fits each alone, `common` gives all the same components",
    ] = None
    penalty: Annotated[Literal["squared", "norm"], "of the distance from the centre; the paper's: `norm`"] = "squared"
    restarts: Annotated[Several, "starts of every client's first fit"] = 20
    iterations: Annotated[Count, "steps of each start"] = 30
    rounds: Annotated[Count, "maximum number of rounds"] = 1000
    tol: Annotated[AtLeast0, "stop when estimates move less than this, relatively"] = 1e-5
    c_eta: Annotated[Share, "factor of the step size"] = 0.95
    kappa: Annotated[float, Ge(0), Lt(1), "decay in the penalty's schedule"] = 0.1
    together: Annotated[AtLeast0, "extra penalty that keeps clients close in the first rounds"] = 8.0
    robust: Annotated[
        float | Literal["off"],
        OrWord("off"),
        "upper limit on `c_lambda` when the centre is computed; the paper's: `off`",
    ] = 2.0
    reject: Annotated[
        float | Literal["nobody"], OrWord("nobody"), "outlier score above which a client is not shrunk; or `nobody`"
    ] = 3.5
    share_weights: Annotated[
        AtLeast0, "pseudo-rows per component that shrink proportions to the common ones; the paper's: 0"
    ] = 4.0
    sparse: Annotated[
        AtLeast0, "l1 penalty on the centre, which sets small coordinates to 0; not with a `full` covariance"
    ] = 0.0
    neighbours: Annotated[
        int, Ge(0), Le(MOST_STEPS), "neighbours on either side of a ring that make a client's centre; 0: all clients"
    ] = 0
    batch_size: Annotated[Count | None, "rows per client and round, all by default; step sizes then decrease"] = None


@parameters
class Layers:
    """Of models in two parts."""

    group: ClassVar[str] = "personal"

    layers: Annotated[tuple[str, ...], "personal layers, by the prefixes of their names; the method has a default"] = ()


@parameters
class Heads:
    """Of heads that are trained first."""

    group: ClassVar[str] = "personal"

    head_epochs: Annotated[Count, "passes with a client's head in a round"] = 10


@parameters
class Meta:
    """Of models that clients adapt."""

    group: ClassVar[str] = "personal"

    alpha: Annotated[Positive | None, "size of the inner step; by default the step size"] = None
    hessian: Annotated[Literal["free", "first-order"], "Hessian by finite differences, or dropped"] = "free"
    delta: Annotated[Positive, "width of the finite differences"] = 1e-3
    tune_steps: Annotated[Count, "a client's fine-tuning steps before it uses the model"] = 1


@parameters
class Pull:
    """Of own models that are pulled to a common one."""

    group: ClassVar[str] = "personal"

    lam: Annotated[AtLeast0, "how strongly own models are pulled towards the common one; 0: not at all"] = 1.0


@parameters
class Stages:
    """Of local work that is counted in passes, by clients of which some are slow."""

    group: ClassVar[str] = "personal"

    body_epochs: Annotated[Count, "passes with the shared layers, or with the whole model"] = 5
    stragglers: Annotated[
        Literal["none", "srpfl"], "`srpfl`: begin with the fastest clients, and double their number in stages"
    ] = "none"
    n0: Annotated[Count | None, "clients in the first stage; a tenth by default"] = None
    stages: Annotated[Literal["fixed", "theory", "adaptive"], "what ends a stage"] = "fixed"
    stage_rounds: Annotated[Count, "rounds of a fixed stage"] = 10
    contraction: Annotated[float, Gt(0), Lt(1), "contraction assumed by `theory` stages"] = 0.25
    clock: Annotated[
        Literal["exponential", "dynamic", "lognormal", "trace"] | None,
        "simulated times of clients per round",
    ] = None
    sigma: Annotated[AtLeast0, "sigma of the lognormal clock"] = 1.0
    trace: Annotated[str | None, "file of clients' times per round, for `clock` = `trace`"] = None
    communication: Annotated[AtLeast0, "simulated seconds added to every round"] = 0.0


@parameters
class Penalty:
    """Of models of clients alone."""

    group: ClassVar[str] = "prior"

    penalty: Annotated[Positive | None, "ridge penalty; by default chosen by cross-validation within clients"] = None


_Covariance = Annotated[
    Literal["intercept", "same", "diagonal", "full"] | None,
    "covariance of the random effects; by default chosen by cross-validation within clients",
]


@parameters
class Spread:
    """Of models that are drawn to a common one."""

    group: ClassVar[str] = "prior"

    spread: _Covariance = None


@parameters
class Covariance:
    """The same for Python."""

    group: ClassVar[str] = "prior"
    called: ClassVar[dict[str, str]] = {"covariance": "spread"}

    covariance: _Covariance = None


@parameters
class Rank:
    """Of models that differ in a few directions."""

    group: ClassVar[str] = "prior"

    rank: Annotated[
        Several | None, "directions in which models differ; by default chosen by cross-validation within clients"
    ] = None


@parameters
class MixedEffects:
    """Of mixed models."""

    group: ClassVar[str] = "mixed"

    slopes: Annotated[
        tuple[Annotated[str, MaxLen(MOST_NAME)], ...],
        MaxLen(MOST_COLUMNS),
        "columns whose coefficients differ between clients (random slopes), like `days,age`; `all` for every column",
    ] = ()
    reml: Annotated[bool, "restricted maximum likelihood (REML) in place of maximum likelihood; for numbers"] = True
    covariance: Annotated[
        Literal["full", "diagonal"], "covariance of the random effects: correlated, or independent (`diagonal`)"
    ] = "full"
    random_intercept: Annotated[bool, "whether intercepts differ between clients"] = True


@parameters
class Covering:
    """Of predictions of numbers."""

    group: ClassVar[str] = "predictions"

    coverage: Annotated[
        Annotated[float, Gt(0), Lt(1)] | None,
        "hold calibration rows out of training rows, for conformal prediction intervals that cover this share of rows",
    ] = None


@parameters
class Predicting(Covering):
    """Of predictions of numbers, and of classes."""

    group: ClassVar[str] = "predictions"

    class_weights: Annotated[
        Literal["balanced"] | dict[str, Positive] | None,
        "what a row of each class counts in training: `balanced` (all classes alike) or numbers by class",
    ] = None
    threshold: Annotated[
        float, Gt(0), Lt(1), "of two classes, the probability of the second from which on it is predicted"
    ] = 0.5


# -- reading them -----------------------------------------------------------------------------------------------------
class Option(NamedTuple):
    """Where a parameter stands among the options, what it is, and its default."""

    group: str
    name: str
    about: str
    default: Any


def options_in(kind: type) -> dict[str, Option]:
    """All options among the fields of a class, by the names that they have there."""
    found = {}
    for each in fields(kind):
        home = next(base for base in reversed(kind.__mro__) if each.name in get_annotations(base))  # who had it first
        group = vars(home).get("group")
        if group is not None:
            *_, about = get_annotations(home)[each.name].__metadata__
            found[each.name] = Option(
                group, vars(home).get("called", {}).get(each.name, each.name), about, each.default
            )
    return found


def abouts(kind: type) -> dict[str, str]:
    """What every field of a class is, where it is said, by name."""
    found = {}
    for each in fields(kind):
        said = [getattr(get_annotations(base).get(each.name), "__metadata__", ("",)) for base in kind.__mro__]
        about = next((words[-1] for words in said if isinstance(words[-1], str) and words[-1]), "")
        if each.init and about:
            found[each.name] = about
    return found
