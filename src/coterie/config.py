# SPDX-License-Identifier: Apache-2.0
"""All options of a fit: one tree, the same for Python, the command line, TOML files and run folders."""

import difflib
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coterie import registry
from coterie.errors import ConfigError
from coterie.limits import LARGEST_NUMBER, MOST_COLUMNS, MOST_CONFIG_BYTES, MOST_COUNT, MOST_DEPTH, MOST_NAME, MOST_TEXT
from coterie.outcome_names import OutcomeName
from coterie.registry import AUTO, METHODS, Method, method_of, takers

__all__ = [
    "PRIOR",
    "ClusterOptions",
    "DataOptions",
    "FitOptions",
    "MixedOptions",
    "MixtureOptions",
    "ModelOptions",
    "MomentOptions",
    "PersonalOptions",
    "PredictionOptions",
    "PriorOptions",
    "PrivacyOptions",
    "TrainingOptions",
    "check_options",
    "first_given",
    "options",
]

PRIOR = {
    "local": "penalty",
    "shrunk": "spread",
    "representation": "rank",
}  # linear models of clients' own, and their option

_IFCA_CLUSTERS = 2  # when their number is not given: IFCA cannot estimate it
_NAMED = 3  # methods at most, in a hint
_SHOWN = 60  # characters of a wrong value, in a message


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_Path = Annotated[str, Field(max_length=MOST_TEXT)]
_Name = Annotated[str, Field(max_length=MOST_NAME)]
_Names = Annotated[tuple[_Name, ...], Field(max_length=MOST_COLUMNS)]


class DataOptions(_Options):
    """What is read, and what is held out."""

    path: _Path | tuple[_Path, ...] | None = None  # several of site summaries
    client: _Name | None = None
    target: _Name | None = None
    features: _Names | None = None
    exclude: _Names = ()
    categorical: _Names = ()
    missing: Literal["error", "mean", "drop"] = "error"
    task: Literal["auto", "regression", "classification"] = "auto"
    outcome: OutcomeName | None = None
    event: _Name | None = None
    min_rows: int = Field(1, ge=1, le=MOST_COUNT)
    test_size: float = Field(0.2, ge=0, lt=1)
    new_clients: float = Field(0.0, ge=0, lt=1)
    split: Annotated[_Name, Field(pattern=r"^(random|time|time:.+)$")] = "random"
    sep: Annotated[str, Field(max_length=3)] = ""  # of CSV files, as the next three
    decimal: Literal[".", ","] = "."
    thousands: Literal["", ",", ".", "'", " ", "_"] = ""
    encoding: _Name = "utf-8"
    standardise: bool = True

    @property
    def written(self) -> dict[str, Any]:
        """How CSV files are written, as `coterie.read` takes it."""
        return {"sep": self.sep, "decimal": self.decimal, "thousands": self.thousands, "encoding": self.encoding}


class ModelOptions(_Options, registry.ModelFields):
    """What is trained. A torch module is given in Python only."""


class TrainingOptions(_Options, registry.TrainingFields):
    """Rounds and local work."""

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


class ClusterOptions(_Options, registry.ClusterFields):
    """What methods with clusters need."""


class MomentOptions(_Options, registry.MomentFields):
    """What phase 1 of moment descent needs."""


class MixtureOptions(_Options, registry.MixtureFields):
    """What FedGrEM needs."""


class PersonalOptions(_Options, registry.PersonalFields):
    """What personal models need, and what time it takes their clients."""

    @model_validator(mode="after")
    def _traces_have_files(self) -> "PersonalOptions":
        if (self.clock == "trace") != (self.trace is not None):
            raise ValueError("clock=trace needs a trace file, and a trace file needs clock=trace: give both")
        return self


class PriorOptions(_Options, registry.PriorFields):
    """What linear models of clients' own need."""


class MixedOptions(_Options, registry.MixedFields):
    """What the mixed model needs."""

    @field_validator("slopes", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return tuple(word.strip() for word in given.split(",") if word.strip()) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _something_is_random(self) -> "MixedOptions":
        if not self.random_intercept and not self.slopes:
            raise ValueError("without a random intercept there must be random slopes: name columns")
        return self


class PredictionOptions(_Options, registry.PredictionFields):
    """What is made of a model's outputs: classes, and intervals of numbers."""


class PrivacyOptions(_Options):
    """What a fit may cost each client of its privacy (differential privacy); without epsilon there is no noise."""

    epsilon: float | None = Field(None, gt=0, le=100)
    delta: float | None = Field(None, gt=0, le=0.1)
    clip: float | None = Field(None, gt=0, le=LARGEST_NUMBER)
    anyway: bool = False


def _known(method: str) -> str:
    if method != AUTO.name and method not in METHODS:
        *names, last = (f"'{name}'" for name in (AUTO.name, *METHODS))
        raise ValueError(f"input should be {', '.join(names)} or {last}")
    return method


class FitOptions(_Options):
    """Everything that decides what a fit gives."""

    method: Annotated[str, AfterValidator(_known)] = "ifca"
    seed: int = Field(0, ge=0, le=MOST_COUNT)
    baselines: bool = True
    secure: bool = False
    data: DataOptions = DataOptions()
    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    clusters: ClusterOptions = ClusterOptions()
    moments: MomentOptions = MomentOptions()
    mixture: MixtureOptions = MixtureOptions()
    personal: PersonalOptions = PersonalOptions()
    prior: PriorOptions = PriorOptions()
    mixed: MixedOptions = MixedOptions()
    predictions: PredictionOptions = PredictionOptions()
    privacy: PrivacyOptions = PrivacyOptions()

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


def check_options(chosen: FitOptions) -> None:
    """Refuse an option that is another method's."""
    method = method_of(chosen.method)
    own = {(option.group, option.name) for options in method.takes.values() for option in options}
    for group, name in _given(chosen):
        if (group, name) not in own:
            reason = method.refusal or f"{method.name} has no use for it"
            raise ConfigError(f"{group}.{name} is set, and {reason}", _way_out(method, group, name))


def _given(chosen: FitOptions) -> Iterator[tuple[str, str]]:
    """Group and name of every option of a method that is not as it would be if nobody had said anything."""
    for group in ("clusters", "moments", "mixture", "personal", "prior", "mixed", "model", "training", "predictions"):
        inside = getattr(chosen, group)
        fields = type(inside).model_fields
        yield from ((group, name) for name, value in inside if value != fields[name].default)


def _way_out(method: Method, group: str, name: str) -> str:
    """What to do in place of giving an option that a method does not take."""
    if method is AUTO:
        return "leave it out, or name a method"
    same = next((g for g, options in method.takes.items() if name in [option.name for option in options]), None)
    others = takers(group, name)[:_NAMED]
    said = f"did you mean {same}.{name}?" if same else f"it is for --method {' or '.join(others)}" if others else ""
    return method.instead.get(f"{group}.{name}") or said or "leave it out"


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
    try:
        if file is not None:
            _merge(merged, _read_toml(file))
        _merge(merged, tree or {})
        for word in sets:
            _merge(merged, _parse_word(word))
    except RecursionError:
        raise ConfigError("options are nested too deeply", "write them like training.rounds = 50") from None
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
        return ConfigError(f"{where} is {_shown(given)} and should be a group of options", _similar(where))
    said = str(first["msg"]).removeprefix("Value error, ")
    said = said[0].lower() + said[1:]
    shown = given if isinstance(given, BaseModel | dict) else _shown(given)
    if shown is given:  # an option may contradict another of its group
        return ConfigError(f"{where}: {said}", "`coterie fit --help` lists the options")
    return ConfigError(f"{where} is {shown}: {said}", "`coterie fit --help` lists the options")


def _shown(given: Any) -> str:
    """A value as a message has it, which is one sentence."""
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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
        with file.open("rb") as opened:
            content = opened.read(MOST_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}", "check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "check the path after --config") from None
    if len(content) > MOST_CONFIG_BYTES:
        raise ConfigError(f"{file} is larger than {MOST_CONFIG_BYTES >> 20} MB", "check the path after --config")
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{file} has too many lists within each other", "a line looks like: rounds = 50") from None
    except ValueError as error:  # TOML that is none, text that is not UTF-8, numbers of thousands of digits
        raise ConfigError(
            f"{file} is not valid TOML: {str(error)[:_SHOWN]}", "a line looks like: rounds = 50"
        ) from None


def _parse_word(word: str) -> dict[str, Any]:
    name, found, text = word.partition("=")
    if not found or not name or name.count(".") > MOST_DEPTH:
        raise ConfigError(f"{_shown(word)} is not a setting", "write it like --set training.rounds=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    tree: Any = value
    for part in reversed(name.split(".")):
        tree = {part: tree}
    return dict(tree)
