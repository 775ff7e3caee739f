# SPDX-License-Identifier: Apache-2.0
"""What `run.json` and `compare.json` hold, as far as anybody reads it.

A run may still be under way, and be of an earlier version: whatever is not there is None. What is there has its type, and
counts of what is drawn or made have bounds. A folder may come from anybody.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from coterie.documents import FirstFault, Said
from coterie.limits import MOST_COLUMNS, MOST_FEATURES, MOST_NAME, MOST_PARTS

__all__ = ["ComparisonDocument", "FinishedDocument", "RunDocument"]


def _rectangular(rows: list[Any]) -> list[Any]:
    if len({len(row) for row in rows}) > 1:
        raise ValueError("rows have different lengths")
    return rows


def _inside(name: str) -> str:
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError("a file is not in the folder")
    return name


Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(max_length=MOST_NAME)]
Names = Annotated[list[Name], FirstFault()]
Label = Annotated[str, Field(max_length=MOST_NAME)]
Texts = Annotated[list[str], FirstFault()]
Numbers = Annotated[list[float | None], FirstFault()]
Table = Annotated[list[Numbers], FirstFault(), Field(max_length=MOST_PARTS), AfterValidator(_rectangular)]
Parts = Annotated[int, Field(ge=0, le=MOST_PARTS)]
Files = dict[Annotated[str, Field(max_length=200), AfterValidator(_inside)], str]  # name -> digest
Group = dict[str, Any]  # shown as it is: names, and values of any kind


# -- run.json -----------------------------------------------------------------------------------------------------------
class Data(Said):
    """What was read."""

    path: str | Texts | None = None
    client: Name | None = None
    target: Name | None = None
    task: str | None = None
    n_clients: Count | None = None
    n_rows: Count | None = None
    n_features: Annotated[int, Field(ge=0, le=MOST_FEATURES)] | None = None
    metric: Name | None = None
    metric_better: Literal["lower", "higher"] | None = None
    target_scale: float | None = None


class Score(Said):
    """How a method or a baseline does."""

    method: Name
    label: Label | None = None
    train: float | None = None
    test: float | None = None
    new_clients: float | None = None
    train_r2: float | None = None
    test_r2: float | None = None
    new_clients_r2: float | None = None
    new_clients_unlabelled: float | None = None
    train_rmse: float | None = None
    test_rmse: float | None = None
    new_clients_rmse: float | None = None


class Event(Said):
    """Something that happened on the way."""

    run: Count | None = None
    round: Count | None = None
    text: str | None = None


class Profiles(Said):
    """How models of clusters differ."""

    features: Names
    coefficients: Table


class Coefficients(Said):
    """Coefficients of linear models in the data's own units, a row for each feature."""

    kind: Literal["one", "clusters", "spread", "directions"]
    of: Label
    names: Names
    values: Table
    total: Count
    baselines: Names
    shares: Numbers | None = None

    @model_validator(mode="after")
    def _of_one_shape(self) -> Self:
        columns = {"one": 1, "spread": 2, "directions": 1 + len(self.shares or ())}.get(self.kind)
        if len(self.names) != len(self.values) or any(columns not in (None, len(row)) for row in self.values):
            raise ValueError("names, values and columns do not go together")
        return self


class Choice(Said):
    """Candidates, and how they scored."""

    values: Annotated[list[float | Literal["common"]], Field(min_length=1, max_length=MOST_PARTS)]
    scores: Numbers
    chosen: Count
    by: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if len(self.scores) != len(self.values) or self.chosen >= len(self.values):
            raise ValueError("values, scores and what was chosen do not go together")
        return self


class Outlier(Said):
    """A client that is far from the others."""

    client: Name | None = None
    score: float | None = None


class Components(Said):
    """The centre of a mixture."""

    parameters: Names | None = None
    centre: Table | None = None
    weights: Numbers | None = None
    deviation: Numbers | None = None
    noise: float | None = None


class Spread(Said):
    """How a metric is spread over clients."""

    mean: float | None = None
    median: float | None = None
    worst_decile: float | None = None
    best_decile: float | None = None


class Estimate(Said):
    """A quantity with its interval, and where it has them its name and standard error."""

    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    name: Name | None = None
    error: float | None = None


class Variance(Said):
    """How a coefficient varies between clients."""

    name: Name
    variance: float | None = None
    sd: float | None = None


class RatioTest(Said):
    """A likelihood ratio."""

    statistic: float | None = None
    freedom: Count | None = None
    p: float | None = None
    mixture: bool | None = None


class Heterogeneity(Said):
    """How clients' own estimates differ."""

    name: Name
    clients: Count | None = None
    left_out: Count | None = None
    q: float | None = None
    freedom: Count | None = None
    p: float | None = None
    i2: float | None = None
    tau2: float | None = None
    mean: float | None = None
    error: float | None = None


class Mixed(Said):
    """A mixed model."""

    rows: Count
    clients: Count
    reml: bool
    covariance: Name
    left_out: Names
    fixed: Annotated[list[Estimate], FirstFault(), Field(max_length=MOST_FEATURES)]
    random: Annotated[list[Variance], FirstFault(), Field(min_length=1, max_length=MOST_FEATURES)]
    correlations: Table
    residual_sd: float | None
    icc: float | None
    log_likelihood: float | None
    deviance: float | None
    parameters: Count
    aic: float | None
    bic: float | None
    test: RatioTest
    heterogeneity: Annotated[list[Heterogeneity], FirstFault(), Field(max_length=MOST_FEATURES)]
    new_client: Estimate
    new_row: Estimate | None
    boundary: bool

    @model_validator(mode="after")
    def _square(self) -> Self:
        if any(len(row) != len(self.random) for row in self.correlations) or len(self.correlations) != len(self.random):
            raise ValueError("correlations are not of the random effects")
        return self


class Figure(Said):
    """A figure with its 95 % interval over clients."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    within: float | None = None  # by how much it may be off, since it comes from counts in bins


class Calibrated(Said):
    """Rows with similar probabilities."""

    rows: Count
    predicted: float
    observed: float
    low: float | None = None
    high: float | None = None


class Calibration(Said):
    """How probabilities agree with shares of rows."""

    error: float | None = None
    groups: Annotated[list[Calibrated], FirstFault(), Field(max_length=100)]


class Probabilities(Said):
    """What probabilities are worth on some rows."""

    rows: Count | None = None
    clients: Count | None = None
    accuracy: Figure | None = None
    base_rate: Figure | None = None
    auroc: Figure | None = None
    average_precision: Figure | None = None
    log_loss: Figure | None = None
    brier: Figure | None = None
    calibration: Calibration | None = None
    decisions: dict[str, float | None] | None = None


class Covered(Figure):
    """What intervals cover of some rows."""

    length: float | None = None
    rows: Count | None = None
    clients: Count | None = None


class Coverage(Said):
    """What prediction intervals cover."""

    level: float
    calibrated: Count | None = None
    pooled: Count | None = None
    conformal: dict[str, Covered] | None = None
    model: dict[str, Covered] | None = None


class Why(Said):
    """What a comparison said before the fit."""

    headline: str
    evidence: Texts
    doubts: Texts
    report: Literal["comparison/report.html"]  # a link, so nothing else
    chosen: str | None = None


class Secured(Said):
    """What secure sums have cost, and who dropped out of how many."""

    nodes: Count
    threshold: Count
    sums: Count
    exchanges: Count
    messages: Count
    bytes_up: Count
    bytes_down: Count
    seconds: float
    dropped: dict[Name, Count]


class Question(Said):
    """What a kind of question cost."""

    purpose: Name
    times: Count
    multiplier: float
    sampling: float
    alone: float


class Privacy(Said):
    """The account of a privacy budget."""

    epsilon: float
    delta: float
    spent: float
    questions: Annotated[list[Question], FirstFault(), Field(max_length=MOST_PARTS)]


class Results(Said):
    """What a run found."""

    methods: Annotated[list[Score], FirstFault(), Field(max_length=MOST_PARTS)] | None = None
    n_clusters: Parts | None = None
    counted: str | None = None
    cluster_sizes: Annotated[list[Count], Field(max_length=MOST_PARTS)] | None = None
    chosen_run: Count | None = None
    uncertain_clients: Count | None = None
    warnings: Texts | None = None
    events: Annotated[list[Event], FirstFault()] | None = None
    profiles: Profiles | None = None
    coefficients: Coefficients | None = None
    anchors: Names | None = None
    adjusted_rand: float | None = None
    why: Why | None = None
    messages: Count | None = None
    bytes_up: Count | None = None
    bytes_down: Count | None = None
    secure: Secured | None = None
    privacy: Privacy | None = None
    n_components: Parts | None = None
    components_choice: Choice | None = None
    c_lambda: float | Literal["common"] | None = None
    c_lambda_choice: Choice | None = None
    rounds: Count | None = None
    settled: bool | None = None
    outlier_threshold: float | None = None
    outliers: Annotated[list[Outlier], FirstFault()] | None = None
    components: Components | None = None
    family: str | None = None
    spread: dict[str, Spread | None] | None = None
    layers: Names | None = None
    virtual_time: float | None = None
    never_visited: Count | None = None
    setting: Group | None = None
    mixed: Mixed | None = None
    probabilities: dict[str, Probabilities] | None = None
    coverage: Coverage | None = None


class RunDocument(Said):
    """`run.json`, of a run that may be under way."""

    status: Name | None = None
    coterie: Name | None = None
    method: Name | None = None
    seed: Count | None = None
    command: str | None = None
    started: Name | None = None
    fingerprint: Name | None = None
    files: Files | None = None
    seconds: float | None = None
    versions: Group | None = None
    config: Group | None = None
    data: Data | None = None
    results: Results | None = None


class FinishedResults(Results):
    """What a finished run found."""

    methods: Annotated[list[Score], FirstFault(), Field(max_length=MOST_PARTS)]
    warnings: Texts


class FinishedData(Data):
    """What a finished run read."""

    metric: Name
    target_scale: float | None


class FinishedDocument(RunDocument):
    """`run.json` of a run that has come to its end."""

    method: Name
    seed: Count
    seconds: float
    data: FinishedData
    results: FinishedResults


# -- compare.json -------------------------------------------------------------------------------------------------------
class Difference(Said):
    """A mean difference with its interval."""

    mean: float
    stderr: float
    low: float
    high: float


class Trial(Said):
    """A setting that was tried."""

    setting: dict[str, float | int | str | None]
    score: float | None
    stderr: float | None


class Fit(Said):
    """How to fit a structure."""

    method: Name | None
    options: Group = Field(default_factory=dict)


class Structure(Said):
    """How a structure does."""

    structure: Name
    label: Label
    chosen: bool
    as_good: bool = False
    rows: str | None = None
    mean: float | None = None
    stderr: float | None = None
    score: float | None = None
    new_metric: float | None = None
    new_stderr: float | None = None
    chosen_share: float | None = None
    df: float | None = None
    versus_global: Difference | None = None
    trials: Annotated[list[Trial], FirstFault(), Field(max_length=MOST_COLUMNS)] | None = None
    fit: Fit


class Grouping(Said):
    """The groups that were found."""

    sizes: Annotated[list[Count], Field(max_length=MOST_PARTS)] | None = None
    stability: float | None = None
    features: Names | None = None
    profile: Table | Annotated[list[Table], FirstFault(), Field(max_length=MOST_PARTS)] | None = None

    @model_validator(mode="after")
    def _all_alike(self) -> Self:
        if len({(len(one), len(one[0])) for one in self.profile or () if one and isinstance(one[0], list)}) > 1:
            raise ValueError("profiles have different shapes")
        return self


class Answer(Said):
    """The answer in words."""

    headline: str
    evidence: Texts
    doubts: Texts


class ComparisonDocument(Said):
    """`compare.json`."""

    chosen: Name
    rows: Annotated[list[Structure], FirstFault(), Field(min_length=1, max_length=MOST_PARTS)]
    answer: Answer
    files: Files | None = None
    coterie: Name | None = None
    command: str | None = None
    started: Name | None = None
    versions: Group | None = None
    data: Group | None = None
    fit: str | None = None
    settings: Group | None = None
    task: str | None = None
    target: Name | None = None
    metric: Name | None = None
    seed: Count | None = None
    seconds: float | None = None
    messages: Count | None = None
    protocol: Group | None = None
    n_clients: Count | None = None
    n_judged: Count | None = None
    grouping: Grouping | None = None
    coefficients: Coefficients | None = None
    outliers: Names | None = None
    too_small: Names | None = None
    absent: Names | None = None
