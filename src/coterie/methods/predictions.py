# SPDX-License-Identifier: Apache-2.0
"""After a fit: what its predictions are worth, for clients of the training, for new ones, and for new ones without labels.

Of classes, probabilities are measured; of numbers, prediction intervals are made, and how much they cover is measured. It
takes a message, and with calibration rows one more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.intervals import calibrate_ask, cover_ask, pooled_quantiles
from coterie.algorithms.probabilities import influence_ask, probabilities_ask, probabilities_together_ask
from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.stand_ins import StandIns, needs_rows
from coterie.errors import ConfigError, DataError
from coterie.evaluate import measure_mixed_ask, measured_in, residual_products_ask, summed
from coterie.methods.base import Score
from coterie.methods.intervals import COVERAGE, LEVELS, How, Intervals, client_noise, normal_quantile
from coterie.methods.measuring import Entry, Outcome, metric, overall
from coterie.methods.personal.model import Personal
from coterie.methods.probabilities import Resampled, class_measures, client_measures
from coterie.methods.session import Answered, On, Prepared, Session
from coterie.protocol import Ask, Replies, slot

__all__ = ["Population", "Predicted", "check_predictions", "more_ask", "population_of", "predicted"]

_RUN = 1 << 8  # as which the population model is asked about; it leaves nothing with clients


@dataclass(frozen=True)
class Population:
    """What serves a client of which nothing is known: a mixture of models.

    Attributes
    ----------
    theta : Tensor
        [K, P]
    share : Tensor
        [K] of each, together 1.
    noise : float, optional
        Variance of a row, where the method knows it apart from how clients differ.
    covariance : Tensor, optional
        [P, P] how clients differ, where the method knows it.
    parameters : int
        That were fitted to training rows, which residuals are too small by.
    """

    theta: Tensor
    share: Tensor
    noise: float | None = None
    covariance: Tensor | None = None
    parameters: int = 0

    def ask(self, made: Prepared) -> Ask:
        """Ask clients how well it serves them."""
        return measure_mixed_ask(made.model, self.theta, self.share)

    def squares(self, products: Replies, over: Literal["client", "row"]) -> Tensor:
        """Mean squared error, from products of residuals of all models: over clients, or over rows.  []"""
        there = self.share > 0  # others may have diverged
        share, found = self.share[there].double(), products[over][there][:, there]
        mean: Tensor = share @ found @ share / products[f"{over}s"].clamp(min=1)
        return mean


@dataclass(frozen=True)
class Predicted:
    """What predictions are worth."""

    extra: dict[str, Any] = field(default_factory=dict)  # by name, for `Fitted.extra`
    per_client: dict[str, Tensor] = field(default_factory=dict)  # [M] each
    unlabelled: float | None = None  # the metric at new clients without labelled rows

    def of(self, scores: list[Score]) -> list[Score]:
        """Scores say so too; one model for all serves clients alike, with labels and without."""
        return [replace(scores[0], new_clients_unlabelled=self.unlabelled)] + [
            replace(one, new_clients_unlabelled=one.new_clients) if one.method == "global" else one
            for one in scores[1:]
        ]


def check_predictions(clients: Clients, options: FitOptions) -> None:
    """Refuse what predictions of this target cannot have."""
    asked, schema = options.predictions, clients.schema
    if schema.outcome and (asked.class_weights is not None or asked.threshold != 0.5):
        raise ConfigError(f"class weights and thresholds are for classes, not for {schema.outcome}", "leave them out")
    if schema.task != "classification" and (asked.class_weights is not None or asked.threshold != 0.5):
        what = "class_weights" if asked.class_weights is not None else "threshold"
        raise ConfigError(f"predictions.{what} is for classes, and the target has none", "leave it out")
    if asked.threshold != 0.5 and len(schema.classes) != 2:
        raise ConfigError(
            f"predictions.threshold is for two classes, and there are {len(schema.classes)}",
            "leave it out: the likeliest class is predicted",
        )
    if isinstance(asked.class_weights, dict) and set(asked.class_weights) != set(schema.classes):
        raise ConfigError(
            f"predictions.class_weights has {', '.join(asked.class_weights)}, and classes are {', '.join(schema.classes)}",
            "give a number for every class",
        )
    if asked.coverage is None:
        return
    if schema.task != "regression":
        raise ConfigError("predictions.coverage is for numbers, and the target is none", "classes have probabilities")
    if schema.outcome:
        raise ConfigError(f"predictions.coverage is for plain numbers, not for {schema.outcome}", "leave it out")
    if isinstance(clients.train, StandIns):
        raise needs_rows("conformal intervals")
    if int(clients.train.counts.max()) < 2:
        raise DataError("no client has two training rows, and calibration rows are held out of them", "leave it out")


def population_of(models: Personal, **more: Any) -> Population | None:
    """What serves clients of which nothing is known, of personal models: one model."""
    if models.population is None:
        return None
    return Population(models.population[None], torch.ones(1, dtype=torch.float64), **more)


def more_ask(session: Session, made: Prepared, judge: Ask) -> Ask | None:
    """What else is asked when models are judged: of classes, what probabilities are worth."""
    if made.model.loss != "cross_entropy":
        return None
    return probabilities_together_ask(judge) if session.options.secure else probabilities_ask(judge)


def predicted(
    session: Session, made: Prepared, entry: Entry, outcome: Outcome, population: Population | None, *,
    uncertain: bool = False,
) -> Predicted:  # fmt: skip
    """Measure what predictions are worth.

    Parameters
    ----------
    entry, outcome
        The method, and how it serves clients.
    population : Population, optional
        What serves clients without labelled rows.
    uncertain : bool
        Whether clients keep the covariance of their models.
    """
    if made.model.loss == "cross_entropy":
        return _of_classes(session, made, entry, outcome, population)
    if made.model.loss != "squared":
        return Predicted()
    return _of_numbers(session, made, entry, outcome, population, uncertain)


def _exchange(
    session: Session, made: Prepared, entry: Entry, private: Any, asks: Mapping[str, Mapping[int, Ask]]
) -> dict[str, Answered]:
    """Ask on training, calibration and held-out rows, and on those of new clients, after they have learnt."""
    rows: dict[str, Ragged | None] = {"train": made.rows, "calibration": made.calibration, "test": made.test}
    parts = {side: On(one, asks[side], private) for side, one in rows.items() if one is not None and asks.get(side)}
    if made.newcomers is not None and asks.get("new"):
        shown, judged = made.newcomers
        if entry.learn is not None:
            parts["shown"] = On(shown, {entry.run: replace(entry.learn, fold={})})
        parts["new"] = On(judged, asks["new"], after=len(parts) - 1 if entry.learn is not None else None)
    return dict(zip(parts, session.exchange(list(parts.values())), strict=True)) if parts else {}


# -- classes ----------------------------------------------------------------------------------------------------------
def _of_classes(
    session: Session, made: Prepared, entry: Entry, outcome: Outcome, population: Population | None
) -> Predicted:
    at, secure = slot(entry.run, 2), session.options.secure
    asks: dict[str, dict[int, Ask]] = {}
    if not secure:  # which is of single clients
        asks = {side: {at: influence_ask(entry.judge, told["counts"])} for side, told in outcome.more.items()}
    if population is not None and made.newcomers is not None:
        judge = population.ask(made)
        more = more_ask(session, made, judge)
        assert more is not None
        asks.setdefault("new", {}).update({_RUN: summed(judge) if secure else judge, slot(_RUN, 1): more})
    got = _exchange(session, made, entry, outcome.private, asks)
    how: dict[str, Any] = {"seed": made.seed, "threshold": made.model.threshold}
    found = {}
    for side, told in outcome.more.items():
        measured = getattr(outcome, side)
        influence = None if secure else got[side][at]["influence"].double()
        found[side] = class_measures(told, measured, influence, **how)
    unlabelled = None
    if "new" in got and _RUN in got["new"].replies:
        measured = measured_in(got["new"][_RUN])
        found["unlabelled"] = class_measures(got["new"][slot(_RUN, 1)], measured, None, **how)
        unlabelled = overall(made, measured)
    per_client = {}
    if "test" in outcome.more and not secure:
        assert outcome.test is not None
        per_client = client_measures(outcome.more["test"], outcome.test)
    return Predicted({"probabilities": found} if found else {}, per_client, unlabelled)


# -- numbers ----------------------------------------------------------------------------------------------------------
def _of_numbers(
    session: Session, made: Prepared, entry: Entry, outcome: Outcome, population: Population | None, uncertain: bool
) -> Predicted:
    coverage = session.options.predictions.coverage
    levels = tuple(sorted({*LEVELS, coverage})) if coverage is not None else ()
    own = slot(entry.run, 2)
    asks: dict[str, dict[int, Ask]] = {}
    if population is not None and not outcome.mixed:  # it rests on what clients have learnt just now
        asks = {side: {_RUN: residual_products_ask(made.model, population.theta)} for side in ("train", "new")}
    if levels:
        asks["calibration"] = {own: calibrate_ask(entry.judge, levels)}
        if population is not None:
            asks["calibration"][_RUN] = calibrate_ask(population.ask(made), levels)
    got = _exchange(session, made, entry, outcome.private, asks)
    mixed = outcome.mixed or {side: got[side][_RUN] for side in ("train", "new") if side in got}
    intervals = _intervals(made, outcome, population, mixed, got.get("calibration"), levels, own)
    unlabelled = None
    if population is not None and "new" in mixed:
        unlabelled = float(metric(made, population.squares(mixed["new"], "row")))
    extra: dict[str, Any] = {"intervals": intervals}
    per_client: dict[str, Tensor] = {}
    told = not session.options.secure and not isinstance(made.rows, StandIns)  # what clients' own intervals cover
    if told and (made.test is not None or made.newcomers is not None):
        extra["coverage"], per_client = _covered(
            session, made, entry, outcome, population, intervals, coverage or COVERAGE, uncertain
        )
    if made.calibration is not None:
        per_client["rows_calibration"] = made.calibration.counts
    return Predicted(extra, per_client, unlabelled)


def _intervals(
    made: Prepared, outcome: Outcome, population: Population | None, mixed: dict[str, Replies], told: Answered | None,
    levels: tuple[float, ...], own: int,
) -> Intervals:  # fmt: skip
    """What residuals say of how far targets lie from predictions."""
    rows, squares = outcome.train.rows.double(), outcome.train.metric.double()
    lost = 0 if population is None else population.parameters
    n = float(rows.sum())
    common = float((rows * squares).sum()) / max(n - lost, n / 2, 1.0)
    if population is not None and population.noise is not None:
        common = population.noise
    at_new = common
    if population is not None and population.noise is None:
        at_new = float(population.squares(mixed["train"], "client"))  # clients count alike: the next is as one of them
    everyone = len(squares) == len(made.rows.names)  # else all clients are one, and have the same noise
    noise = client_noise(squares, rows, common) if everyone else torch.full((len(made.rows.names),), common).double()
    found = Intervals(made.rows.names, noise, at_new)
    if told is None:
        return found
    pooled = {run: pooled_quantiles(told[run]["shares"], float(told[run]["there"]), levels) for run in told.replies}
    nobody = torch.full((len(levels),), torch.inf, dtype=torch.float64)
    return replace(
        found, levels=levels, own=told[own]["quantiles"].double(), pooled=pooled[own],
        population=pooled.get(_RUN, nobody),
    )  # fmt: skip


def _covered(
    session: Session, made: Prepared, entry: Entry, outcome: Outcome, population: Population | None, intervals: Intervals,
    coverage: float, uncertain: bool,
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # fmt: skip
    """How much intervals cover: of held-out rows, at new clients, and at those without labelled rows."""
    hows: list[How] = ["conformal", "model"] if intervals.levels else ["model"]
    z = torch.tensor([normal_quantile(coverage) if how == "model" else 0.0 for how in hows], dtype=torch.float64)

    def widths(rows: Ragged) -> Tensor:
        return torch.stack([intervals.widths(rows.names, coverage, how) for how in hows], 1)

    at = slot(entry.run, 2)
    asks: dict[str, dict[int, Ask]] = {}
    if made.test is not None:
        asks["test"] = {at: cover_ask(entry.judge, widths(made.test), z, own=uncertain)}
    if made.newcomers is not None:
        far = widths(made.newcomers[1])
        covariance = None if population is None else population.covariance
        asks["new"] = {at: cover_ask(entry.judge, far, z, covariance)}
        if population is not None:
            asks["new"][_RUN] = cover_ask(population.ask(made), far, z, covariance)
    got = _exchange(session, made, entry, outcome.private, asks)
    told = {"test": ("test", at), "new": ("new", at), "unlabelled": ("new", _RUN)}
    found: dict[str, Any] = {"level": coverage}
    if intervals.levels:
        own = int(intervals.calibrated(coverage).sum())
        found |= {"calibrated": own, "pooled": len(intervals.names) - own}
    for place, how in enumerate(hows):
        found[how] = {
            side: _summed(made, got[part][run], place)
            for side, (part, run) in told.items()
            if part in got and run in got[part].replies
        }
    if "test" not in got:
        return found, {}
    reply = got["test"][at]
    share = reply["covered"][:, 0] / reply["rows"].clamp(min=1)
    return found, {"coverage": torch.where(reply["rows"] > 0, share, torch.nan)}


def _summed(made: Prepared, got: Replies, place: int) -> dict[str, Any]:
    """The share of rows within intervals, with an interval over clients, and how long intervals are on average."""
    rows, covered = got["rows"].double(), got["covered"][:, place]
    within = Resampled(rows, made.seed)
    long = 2 * float(made.scaling.y_scale) * got["width"][:, place]
    return within.mean(covered / rows.clamp(min=1)) | {
        "length": within.mean(long)["value"], "rows": int(rows.sum()), "clients": int((rows > 0).sum()),
    }  # fmt: skip
