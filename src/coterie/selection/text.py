# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison in words, with its evidence and its doubts; and the command that fits what was chosen."""

import shlex
from typing import Any, NamedTuple

import numpy as np

from coterie.config import DataOptions
from coterie.report.numbers import count, fixed
from coterie.selection.facts import Facts, Sign, Standing, Tally, facts
from coterie.selection.headline import headline
from coterie.selection.result import Comparison, Difference, FitAdvice, Structure
from coterie.selection.words import capital, listed, number, one_for_all, some

__all__ = ["Answer", "answer", "fit_command", "interval", "metric_name", "one_for_all", "plus_minus"]

_STABLE = 0.8  # adjusted Rand index
_STANDINGS: tuple[tuple[Standing, ...], ...] = (
    ("better", "slightly better"), ("level",), ("slightly worse",), ("worse",), ("barred",),
)  # fmt: skip
_SELDOM = 0.05  # share of the repetitions below which a choice is not told of
_FLAGS = {
    "clusters.n_clusters": "--clusters",
    "clusters.n_init": "--starts",
    "mixture.n_components": "--components",
    "model.hidden": "--hidden",
    "prior.rank": "--rank",
    "training.rounds": "--rounds",
}
_METRICS = {"rmse": "root mean squared error"}  # others are called what they are


class Answer(NamedTuple):
    """What to make of a comparison: one sentence, the evidence for it, and what to know before relying on it."""

    headline: str
    evidence: list[str]
    doubts: list[str]


def answer(found: Comparison) -> Answer:
    """Say what structure clients have, how sure that is, what it brings, and for whom it is worse: words for `facts`."""
    known = facts(found)
    evidence = [
        *_which(known), *_against_one_model(found, known), *_against_others(known), *_repetitions(found, known),
        *_groups(found, known), *_counts(known),
    ]  # fmt: skip
    return Answer(headline(found, known), evidence, [*_worse(found, known), *_odd_clients(found), *found.notes])


def _which(known: Facts) -> list[str]:
    """Which of the models of clients' own was chosen, where others are as good."""
    if not known.kin:
        return []
    others = listed([other.structure.label for other in known.kin])
    return [f"{capital(known.chosen.label)} is chosen; {others} would do as well."]


# -- what was chosen --------------------------------------------------------------------------------------------------
def _against_one_model(found: Comparison, known: Facts) -> list[str]:
    """What the choice brings over one model for all, in the score that chose and in the metric that people read."""
    chosen, everybody, metric = known.chosen, found["global"], found.metric
    if chosen.versus_global is None:
        return _nothing_better(known)
    out = [f"Compared with {one_for_all(found)}, {_difference(chosen.versus_global)}."]
    if known.on_test is not None:
        ours, theirs = (plus_minus(metric, s.test_metric, s.test_stderr) for s in (chosen, everybody))
        out.append(
            f"On test rows (not used for selection), {metric_name(metric)} is {ours}, against {theirs} with "
            f"{one_for_all(found)} (means over clients); it is {_tallied(known.on_test)}{_tested(known)}."
        )
        tested = chosen.test_versus_global
        if tested is not None and not tested.clear and chosen.versus_global.clear:
            who = "" if tested.clients == known.counts.compared else ", those with test rows and no outliers"
            out.append(f"The test rows alone do not show a clear gain: there {_difference(tested)}{who}.")
    return [*out, *_for_new_clients(found, known)]


def _tallied(tally: Tally) -> str:
    """For how many clients it is better, worse and equal."""
    equal = f", and equal for {tally.equal}" if tally.equal else ""
    return f"better for {tally.better} of {number(tally.clients, 'client')}, worse for {tally.worse}{equal}"


def _tested(known: Facts) -> str:
    """Why the number of clients is another than that of the intervals."""
    there = known.on_test.clients if known.on_test is not None else 0
    return "" if there == known.counts.compared else " (all that have test rows)"


def _for_new_clients(found: Comparison, known: Facts) -> list[str]:
    """How clients fare that were not there; also when that speaks against the choice."""
    chosen, everybody = known.chosen, found["global"]
    if known.new_clients is None:
        return []
    ours, theirs = (plus_minus(found.metric, s.new_metric, s.new_stderr) for s in (chosen, everybody))
    few = found.settings.get("few_shot")
    after = f" after {number(few, 'labelled row')} each" if few is not None else ""
    serves: dict[Sign, str] = {
        "better": "",
        "level": "; the difference is not clear",
        "worse": f": {one_for_all(found)} serves them better",
    }
    return [f"For new clients it is {ours}{after}, against {theirs}{serves[known.new_clients]}."]


def _nothing_better(known: Facts) -> list[str]:
    rivals = known.standing("better", "slightly better", "level", "slightly worse", "worse")
    if not rivals or rivals[0].versus_global is None:
        return []
    return [f"The best alternative is {rivals[0].label}: {_difference(rivals[0].versus_global)}."]


def _against_others(known: Facts) -> list[str]:
    """Who else would do, and who would not: each structure has one standing, and is told of once."""
    out, chosen, told = [], known.chosen, [other.structure for other in known.kin]
    better, level, slightly, worse, barred = (
        [one for one in known.standing(*standings) if one.name != "global" and one not in told]
        for standings in _STANDINGS
    )
    if chosen.name != "global":
        out += [
            f"{capital(one.label)} is clearly better{_by_little(one, known)}: {_difference(one.versus_chosen)}."
            for one in better
            if one.versus_chosen is not None
        ]
    out += [
        f"{capital(one.label)}: a higher likelihood, but worse predictions than other structures, so not chosen."
        for one in barred
        if one.score > chosen.score
    ]
    if level:
        out.append(f"Not clearly different from {chosen.label}: {listed([one.label for one in level])}.")
    if slightly:
        out.append(f"Worse than {chosen.label}, by less than matters: {listed([one.label for one in slightly])}.")
    if worse:
        said = [f"{one.label} ({interval(one.versus_chosen)})" for one in worse]
        out.append(f"Clearly worse than {chosen.label}: {listed(said)}.")
    return out


def _by_little(one: Structure, known: Facts) -> str:
    return ", but by too little to matter" if one in known.standing("slightly better") else ""


def _repetitions(found: Comparison, known: Facts) -> list[str]:
    """How often each structure is chosen when clients are drawn again."""
    every = [known.chosen, *(other.structure for other in known.others)]
    often = sorted(
        (one for one in every if (one.chosen_share or 0) >= _SELDOM), key=lambda one: -(one.chosen_share or 0)
    )
    times, deals = found.settings.get("repetitions"), found.settings.get("deals", 1)
    if not often or not times:
        return []
    said = [f"{one.label} in {100 * (one.chosen_share or 0):.0f} %" for one in often]
    dealt = f", and one of {deals} deals of their rows to folds," if deals > 1 else ""
    return [f"How sure: with clients drawn again{dealt} {times} times, the choice is {listed(said)}."]


def _groups(found: Comparison, known: Facts) -> list[str]:
    """How large groups are, and whether they would come out again."""
    groups = found.grouping
    if known.groups is None or groups is None:
        return []
    sizes = listed([count(size) for size in groups.sizes])
    if known.groups == "unstable":
        read = "are unstable across folds: their models help, but do not interpret which client is in which group"
    elif groups.stability >= _STABLE:
        read = "are stable across folds"
    else:
        read = "are fairly stable across folds, but some clients change groups"
    return [f"The groups have {sizes} clients and {read} (adjusted Rand index {groups.stability:.2f})."]


def _counts(known: Facts) -> list[str]:
    """Why intervals are not paired over all clients."""
    counts = known.counts
    if counts.compared == counts.clients:
        return []
    why = [
        f"{number(n, 'client')} {one if n == 1 else many}"
        for n, one, many in (
            (counts.too_small, "has too few rows", "have too few rows"),
            (counts.absent, "did not answer", "did not answer"),
            (counts.outliers, "is an outlier", "are outliers"),
        )
        if n
    ]
    return [f"Intervals are over {counts.compared} of {number(counts.clients, 'client')}: {listed(why)}."]


# -- what to know -----------------------------------------------------------------------------------------------------
def _worse(found: Comparison, known: Facts) -> list[str]:
    out, tally = [], known.held_out
    if tally is not None and tally.worse:
        outliers = f", {number(known.counts.outliers, 'outlier')} among them," if known.counts.outliers else ""
        out.append(
            f"On their own held-out rows, {tally.worse} of {number(tally.clients, 'scored client')}{outliers} "
            f"{'is' if tally.worse == 1 else 'are'} worse off than with {one_for_all(found)}{_named(found.worse_off)}."
        )
    if known.predicts_worse:
        ours, theirs = (fixed(float(one.test_r2 or 0), 3) for one in (known.chosen, found["global"]))
        out.append(
            f"Over all test rows together R² is {ours}, against {theirs} with {one_for_all(found)}: a few rows or clients "
            "are predicted worse."
        )
    return out


def _odd_clients(found: Comparison) -> list[str]:
    out = []
    if found.n_outliers:
        who = _named(found.outliers) or "; whose they are, their nodes can tell"
        out.append(
            f"No shared model fits {number(found.n_outliers, 'client')}, not counted in the choice{who}. Check their data."
        )
    if found.n_absent:
        many = number(found.n_absent, "client")
        out.append(f"{many} did not answer and took no part{_named(found.absent)}.")
    if found.too_small:
        have = "has" if len(found.too_small) == 1 else "have"
        few = number(len(found.too_small), "client")
        out.append(f"{few} {have} too few rows to be scored: {some(found.too_small)}.")
    return out


def _named(names: tuple[str, ...]) -> str:
    """Which clients, where that is known."""
    return f": {some(names)}" if names else ""


# -- the command ------------------------------------------------------------------------------------------------------
def fit_command(
    data: DataOptions, advice: FitAdvice, *, seed: int, on_flower: bool = False, secure: bool = False
) -> str | None:
    """Write the command that fits a structure to the same data, quoted for a shell; None when there is none."""
    if advice.method is None or (data.path is None and not on_flower):
        return None
    paths = (data.path,) if isinstance(data.path, str) else data.path or ()
    words = ["coterie", "flower", "run"] if on_flower else ["coterie", "fit", *paths]
    for name, value in (("--client", data.client), ("--target", data.target)):
        words += [] if value is None else [name, value]
    words += _data_words(data)
    words += ["--method", advice.method]
    for name, value in advice.options.items():
        words += [_FLAGS[name], _listed_numbers(value)] if name in _FLAGS else ["--set", f"{name}={_toml(value)}"]
    words += ["--secure"] if secure else []
    words += ["--seed", str(seed)] if seed else []
    return shlex.join(words)


def _data_words(data: DataOptions) -> list[str]:
    """The options of reading that are not what they would be anyway."""
    usual, words = DataOptions(), list[str]()
    held = ("test_size", "new_clients", "split")  # the same rows are held out
    for name in ("missing", "task", "outcome", "event", "min_rows", *held, "sep", "decimal", "thousands", "encoding"):
        if getattr(data, name) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(data, name))]
    for flag, columns in (("--exclude", data.exclude), ("--categorical", data.categorical)):
        for column in columns:
            words += [flag, column]
    return words


def _listed_numbers(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- numbers and names ------------------------------------------------------------------------------------------------
def metric_name(metric: str) -> str:
    """The metric in words."""
    return _METRICS.get(metric, metric)


def plus_minus(metric: str, mean: float | None, stderr: float | None) -> str:
    """A mean with its standard error, both to the error's second digit."""
    if mean is None or not np.isfinite(mean):
        return "-"
    scale, unit, least = (100.0, " %", 1) if metric == "accuracy" else (1.0, "", 3)
    if stderr is None or not np.isfinite(stderr):
        return f"{fixed(scale * mean, least)}{unit}"
    digits = _decimals(scale * stderr)
    return f"{fixed(scale * mean, digits)} ± {fixed(scale * stderr, digits)}{unit}"


def _decimals(error: float) -> int:
    """How many decimals show two digits of an error."""
    return int(np.clip(1 - np.floor(np.log10(error)), 0, 6)) if error > 0 else 3


def _difference(found: Difference) -> str:
    """A paired difference, with whether it is clear."""
    decimals = _decimals(found.stderr)
    said = f"a held-out row is {fixed(float(np.exp(found.mean)), decimals)} times as likely"
    nats = f"{fixed(found.mean, decimals)} nats"
    about = f"{nats}, 95 % confidence interval {interval(found)}, paired over {number(found.clients, 'client')}"
    return f"{said} ({about}){'' if found.clear else ': the interval contains 0'}"


def interval(found: Difference | None) -> str:
    """The ends of a 95 % interval."""
    if found is None:
        return "-"
    digits = _decimals(found.stderr)
    return f"{fixed(found.low, digits)} to {fixed(found.high, digits)}"
