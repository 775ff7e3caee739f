# SPDX-License-Identifier: Apache-2.0
"""All options of a fit: one tree, the same for Python, the command line, TOML files and run folders."""

import difflib
import math
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, PositiveInt, ValidationError, model_validator

from coterie.errors import ConfigError

__all__ = [
    "PERSONAL",
    "PRIOR",
    "ClusterOptions",
    "DataOptions",
    "FitOptions",
    "MixtureOptions",
    "ModelOptions",
    "MomentOptions",
    "PersonalOptions",
    "PriorOptions",
    "TrainingOptions",
    "first_given",
    "given_options",
    "options",
]

Method = Literal[
    "auto", "ifca", "moment-descent", "mixture", "fedavg", "fedrep", "lg-fedavg", "maml", "local", "shrunk",
    "representation",
]  # fmt: skip

PRIOR = {
    "local": "penalty",
    "shrunk": "spread",
    "representation": "rank",
}  # linear models of clients' own, and their option
PERSONAL = (
    "fedrep",
    "lg-fedavg",
    "maml",
    *PRIOR,
)  # methods whose clients keep a part of the model, or one of their own

_IFCA_CLUSTERS = 2  # when their number is not given: IFCA cannot estimate it


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataOptions(_Options):
    """What is read, and what is held out."""

    path: str | None = None
    client: str | None = None
    target: str | None = None
    features: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    missing: Literal["error", "mean", "drop"] = "error"
    task: Literal["auto", "regression", "classification"] = "auto"
    min_rows: int = Field(1, ge=1)
    test_size: float = Field(0.2, ge=0, lt=1)
    new_clients: float = Field(0.0, ge=0, lt=1)
    standardise: bool = True


class ModelOptions(_Options):
    """What is trained. `hidden` layers make a linear model a network; a torch module is given in Python only.

    A `degree` above 1 adds all products of features up to that degree.
    """

    hidden: tuple[PositiveInt, ...] = ()
    degree: int = Field(1, ge=1)
    intercept: bool = True
    l2: float = Field(0.0, ge=0)


class TrainingOptions(_Options):
    """Rounds and local work. `step_size` None: from the clients' curvature for linear models, 0.1 for networks.

    With `exact`, a client minimises its loss and the proximal term in closed form, in place of steps.
    """

    rounds: int = Field(100, ge=1)
    step_size: float | None = Field(None, gt=0)
    local_steps: int = Field(10, ge=1)
    epochs: int | None = Field(None, ge=1)
    batch_size: int | None = Field(None, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    proximal: float = Field(0.0, ge=0)
    exact: bool = False
    decay: float = Field(1.0, gt=0, le=1)
    participation: float = Field(1.0, gt=0, le=1)
    weighting: Literal["clients", "rows"] | None = None
    tol: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _epochs_need_batches(self) -> "TrainingOptions":
        if self.epochs is not None and self.batch_size is None:
            raise ValueError("epochs count passes in minibatches: give batch_size too")
        return self

    @model_validator(mode="after")
    def _exact_is_proximal(self) -> "TrainingOptions":
        if self.exact and not self.proximal:
            raise ValueError("an exact step needs a proximal term to stay near the model: give proximal above 0")
        if self.exact and (self.batch_size is not None or self.momentum):
            raise ValueError("an exact step is taken at once: leave out batch_size, epochs and momentum")
        return self


class ClusterOptions(_Options):
    """What the methods with clusters need. `n_clusters` None: moment descent estimates it, IFCA takes 2."""

    n_clusters: int | None = Field(None, ge=1)
    averaging: Literal["model", "gradient"] = "model"
    average_over: Literal["cluster", "everyone"] = "cluster"
    init: Literal["random", "balanced", "spread", "warm"] = "spread"
    n_init: int = Field(1, ge=1)
    candidates: int = Field(5, ge=1)
    soft: bool = False
    temperature: float | None = Field(None, gt=0)
    shared_layers: tuple[str, ...] = ()
    patience: int = Field(5, ge=0)
    resample: int = Field(0, ge=0, multiple_of=2)


class MomentOptions(_Options):
    """What Phase 1 of moment descent needs.

    `anchors` and `min_rows` None: 10 for each cluster. `max_clusters` None: as far as the search leads, 24 at most.
    """

    iterations: int = Field(5, ge=1)
    estimator: Literal["pairs", "halves", "two"] = "pairs"
    subspace: Literal["range", "orthogonal"] = "range"
    exchanges: int = Field(3, ge=2)
    oversampling: int = Field(8, ge=0)
    step: Literal["curvature", "plain"] = "curvature"
    step_size: float = Field(1.0, gt=0)
    anchors: int | None = Field(None, ge=1)
    min_rows: int | None = Field(None, ge=2)
    further: bool = True
    swaps: bool = True
    delta: float = Field(0.0, ge=0)
    eps: float = Field(0.05, ge=0)
    max_clusters: int | None = Field(None, ge=1)
    noise: float = Field(0.0, ge=0)
    resample: int = Field(0, ge=0)


def _or_endless(word: str) -> PlainValidator:
    """A number that is at least 0; what has no end has a name, as not every file can hold infinity."""

    def checked(value: Any) -> float | str:
        if value in (word, math.inf):
            return word
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return float(value)
        raise ValueError(f"give a number that is at least 0, or '{word}'")

    return PlainValidator(checked)


class MixtureOptions(_Options):
    """What FedGrEM needs. `n_components` and `c_lambda` None: chosen on held-out rows.

    `c_lambda` 0 leaves every client alone, "common" gives all the same components. `reject` is the outlier score above which
    a client has no part in the centre and is left alone; "nobody" is rejected in the paper.
    """

    n_components: int | None = Field(None, ge=1)
    max_components: int = Field(10, ge=1)
    choose_by: Literal["held-out", "bic"] = "held-out"
    covariance: Literal["full", "diagonal", "unit"] = "full"
    variance: Literal["estimated", "unit"] = "estimated"
    c_lambda: Annotated[float | Literal["common"], _or_endless("common")] | None = None
    penalty: Literal["squared", "norm"] = "squared"
    restarts: int = Field(20, ge=1)
    iterations: int = Field(30, ge=1)
    rounds: int = Field(1000, ge=1)
    tol: float = Field(1e-5, ge=0)
    c_eta: float = Field(0.95, gt=0, le=1)
    kappa: float = Field(0.1, ge=0, lt=1)
    together: float = Field(8.0, ge=0)
    robust: Annotated[float | Literal["off"], _or_endless("off")] = 2.0
    reject: Annotated[float | Literal["nobody"], _or_endless("nobody")] = 3.5
    share_weights: float = Field(4.0, ge=0)
    sparse: float = Field(0.0, ge=0, allow_inf_nan=False)
    neighbours: int = Field(0, ge=0)
    batch_size: int | None = Field(None, ge=1)


class PersonalOptions(_Options):
    """What personal models need, and what time it takes their clients.

    `layers` empty: the last layer is personal for FedRep, all but the last two for LG-FedAvg. `head_epochs` are passes with
    the personal part, `body_epochs` with what is shared (or with all of the model), in batches of 10 rows when
    `training.batch_size` is not given. `alpha` None: as long as the step size. `n0` None: a tenth of the clients. With a
    `clock`, seconds are for a round's work; `trace` is its file. `training.step_size` None is 0.01 for networks that learn
    numbers, and as elsewhere for others.
    """

    layers: tuple[str, ...] = ()
    head_epochs: int = Field(10, ge=1)
    body_epochs: int = Field(5, ge=1)
    alpha: float | None = Field(None, gt=0)
    hessian: Literal["free", "first-order"] = "free"
    delta: float = Field(1e-3, gt=0)
    tune_steps: int = Field(1, ge=1)
    stragglers: Literal["none", "srpfl"] = "none"
    n0: int | None = Field(None, ge=1)
    stages: Literal["fixed", "theory", "adaptive"] = "fixed"
    stage_rounds: int = Field(10, ge=1)
    contraction: float = Field(0.25, gt=0, lt=1)
    clock: Literal["exponential", "dynamic", "lognormal", "trace"] | None = None
    sigma: float = Field(1.0, ge=0)
    trace: str | None = None
    communication: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _traces_have_files(self) -> "PersonalOptions":
        if (self.clock == "trace") != (self.trace is not None):
            raise ValueError("clock=trace needs a trace file, and a trace file needs clock=trace: give both")
        return self


class PriorOptions(_Options):
    """What linear models of clients' own need; None: chosen by cross-validation within clients.

    `penalty` is the ridge of local models, `spread` what shrunk models may differ in, `rank` in how many directions low-rank
    models do.
    """

    penalty: float | None = Field(None, gt=0)
    spread: Literal["intercept", "same", "diagonal", "full"] | None = None
    rank: int | None = Field(None, ge=1)


class FitOptions(_Options):
    """Everything that decides what a fit gives."""

    method: Method = "ifca"
    seed: int = Field(0, ge=0)
    baselines: bool = True
    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    clusters: ClusterOptions = ClusterOptions()
    moments: MomentOptions = MomentOptions()
    mixture: MixtureOptions = MixtureOptions()
    personal: PersonalOptions = PersonalOptions()
    prior: PriorOptions = PriorOptions()

    @property
    def n_clusters(self) -> int | None:
        """K; None where it is to be estimated."""
        asked = self.clusters.n_clusters
        return _IFCA_CLUSTERS if asked is None and self.method == "ifca" else asked

    @property
    def task(self) -> Literal["auto", "regression", "classification"]:
        """What the target is read as: a mixture's is a number, unless it is said to be something else."""
        number = self.method == "mixture" and self.data.target is not None and self.data.task == "auto"
        return "regression" if number else self.data.task


def first_given(chosen: FitOptions, group: str, known: Collection[str] = ()) -> str | None:
    """Name the first option of a group that is not as it would be if nobody had said anything, but for those `known`."""
    inside = getattr(chosen, group)
    fields = type(inside).model_fields
    return next((name for name, value in inside if name not in known and value != fields[name].default), None)


def given_options(chosen: FitOptions) -> Iterator[tuple[str, str]]:
    """Group and name of every option of a method that is not as it would be if nobody had said anything."""
    for group in ("clusters", "moments", "mixture", "personal", "prior", "model", "training"):
        inside = getattr(chosen, group)
        fields = type(inside).model_fields
        yield from ((group, name) for name, value in inside if value != fields[name].default)


def options(tree: dict[str, Any] | None = None, *, file: Path | None = None, sets: Sequence[str] = ()) -> FitOptions:
    """Put options together: a TOML file, then given values, then `a.b=c` words; later ones win.

    Parameters
    ----------
    tree : dict, optional
        Nested values.
    file : Path, optional
        A TOML file with the same nesting.
    sets : sequence of str
        Words like "training.rounds=50"; the value is read as TOML, else as text.
    """
    merged: dict[str, Any] = {}
    if file is not None:
        _merge(merged, _read_toml(file))
    _merge(merged, tree or {})
    for word in sets:
        _merge(merged, _parse_word(word))
    try:
        return FitOptions.model_validate(merged)
    except ValidationError as error:
        raise _complaint(error) from None


def _complaint(error: ValidationError) -> ConfigError:
    """Say what is wrong with the first bad option."""
    first = error.errors()[0]
    where, given = ".".join(str(part) for part in first["loc"]), first["input"]
    if first["type"] == "extra_forbidden":
        return ConfigError(f"there is no option '{where}'", _similar(where))
    if first["type"] == "model_type":
        return ConfigError(f"{where} is {given!r} and should be a group of options", _similar(where))
    said = str(first["msg"]).removeprefix("Value error, ")
    said = said[0].lower() + said[1:]
    if isinstance(given, BaseModel | dict):  # an option may contradict another of its group
        return ConfigError(f"{where}: {said}", "`coterie fit --help` lists the options")
    return ConfigError(f"{where} is {given!r}: {said}", "`coterie fit --help` lists the options")


def _similar(name: str) -> str:
    """Hint at the options that were perhaps meant."""
    known = list(_option_names(FitOptions))
    inside = [one for one in known if one.startswith(f"{name}.")]
    same = [one for one in known if one.split(".")[-1] == name.rpartition(".")[2]]
    close = [] if inside else same or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(inside or known)}"


def _option_names(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{inner}" for inner in _option_names(field.annotation))
        else:
            yield name


def _merge(into: dict[str, Any], tree: dict[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            inside = into.get(name)
            into[name] = inside if isinstance(inside, dict) else {}
            _merge(into[name], value)
        else:
            into[name] = value


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}", "check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "check the path after --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", "a line looks like: rounds = 50") from None


def _parse_word(word: str) -> dict[str, Any]:
    name, found, text = word.partition("=")
    if not found or not name:
        raise ConfigError(f"'{word}' is not a setting", "write it like --set training.rounds=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    tree: Any = value
    for part in reversed(name.split(".")):
        tree = {part: tree}
    return dict(tree)
