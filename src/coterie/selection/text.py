# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison in words, with its evidence and its doubts; and the command that fits what was chosen."""

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.config import DataOptions
from coterie.report.numbers import count, fixed
from coterie.selection.result import Comparison, Difference, FitAdvice, Structure

__all__ = ["Answer", "answer", "fit_command", "interval", "metric_name", "one_for_all", "plus_minus"]

_NAMED = 5  # clients that are named in a sentence
_STABLE, _UNSTABLE = 0.8, 0.5  # adjusted Rand indices
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
    """Say what structure clients have, how sure that is, what it brings, and for whom it is worse."""
    chosen = found[found.chosen]
    evidence = [*_against_one_model(found, chosen), *_against_others(found, chosen), *_groups(found, chosen)]
    return Answer(_headline(found, chosen), evidence, [*_worse(found), *_odd_clients(found), *found.notes])


# -- what was chosen --------------------------------------------------------------------------------------------------
def _headline(found: Comparison, chosen: Structure) -> str:
    model = _noun(found)
    said = {
        "global": f"One {model} for all is enough: no other structure fits clients clearly better.",
        "local": f"Local {model}s are enough: clients gain nothing by learning from each other.",
        "shrunk": f"Every client needs its own {model}, shrunk towards a common one.",
        "representation": _in_common(chosen),
        "clusters": f"Clients fall into {_number(chosen.setting.get('n_clusters'), 'group')}, with one model per group.",
        "mixture": (
            f"Each client's rows mix {_number(chosen.setting.get('n_components'), 'component')}, in its own proportions."
        ),
    }
    return said[chosen.name]


def _in_common(chosen: Structure) -> str:
    """What a representation is: a subspace of models, or the body of a network."""
    if "rank" in chosen.setting:
        return f"Clients' models differ in {_number(chosen.setting['rank'], 'direction')} only; the rest is shared."
    return "Clients share features but map them to different outcomes: only the last layer of their models differs."


def _against_one_model(found: Comparison, chosen: Structure) -> list[str]:
    """What the choice brings over one model for all, in the score that chose and in the metric that people read."""
    if chosen.versus_global is None:
        return _nothing_better(found)
    out = [f"Compared with {one_for_all(found)}, {_difference(chosen.versus_global)}."]
    everybody, metric = found["global"], found.metric
    if chosen.test_metric is not None and everybody.test_metric is not None:
        ours, theirs = (plus_minus(metric, s.test_metric, s.test_stderr) for s in (chosen, everybody))
        out.append(
            f"On test rows (not used for selection), {metric_name(metric)} is {ours}, against {theirs} with "
            f"{one_for_all(found)} (means over clients){_better_for(found, chosen, everybody)}."
        )
        tested = chosen.test_versus_global
        if tested is not None and not tested.clear and chosen.versus_global.clear:
            out.append(f"The test rows alone do not show a clear gain: there {_difference(tested)}.")
    return [*out, *_for_new_clients(found, chosen, everybody)]


def _for_new_clients(found: Comparison, chosen: Structure, everybody: Structure) -> list[str]:
    """How clients fare that were not there; also when that speaks against the choice."""
    if chosen.new_metric is None or everybody.new_metric is None:
        return []
    ours, theirs = (plus_minus(found.metric, s.new_metric, s.new_stderr) for s in (chosen, everybody))
    few = found.settings.get("few_shot")
    after = f" after {_number(few, 'labelled row')} each" if few is not None else ""
    worse = (
        chosen.new_metric > everybody.new_metric if found.metric == "rmse" else chosen.new_metric < everybody.new_metric
    )
    serves = f": {one_for_all(found)} fits them better" if worse else ""
    return [f"For new clients it is {ours}{after}, against {theirs}{serves}."]


def one_for_all(found: Comparison) -> str:
    """What all structures are compared with."""
    return f"one {_noun(found)} for all"


def _noun(found: Comparison) -> str:
    return "mixture" if found.task == "none" else "model"


def _nothing_better(found: Comparison) -> list[str]:
    rivals = [one for one in found.structures if one.versus_global is not None]
    if not rivals:
        return []
    best = max(rivals, key=lambda one: one.score)
    assert best.versus_global is not None
    return [f"The best alternative is {best.label}: {_difference(best.versus_global)}."]


def _better_for(found: Comparison, ours: Structure, theirs: Structure) -> str:
    """Of how many clients the metric is better."""
    gain = ours.client_test_metric - theirs.client_test_metric
    gain = (-gain if found.metric == "rmse" else gain)[np.isfinite(gain)]
    return f"; it is better for {int((gain > 0).sum())} of {_number(len(gain), 'client')}" if len(gain) else ""


def _against_others(found: Comparison, chosen: Structure) -> list[str]:
    """Who else would do, and who would not."""
    out, best = [], found.best
    others = [one for one in found.structures if one.name not in (chosen.name, "global") and one.versus_chosen]
    if chosen.name != "global" and best is not chosen and best.versus_chosen is not None:
        out.append(
            f"{_capital(best.label)} scores best, but by so little that the simpler structure was chosen: "
            f"{_difference(best.versus_chosen)}."
        )
    out += [
        f"{_capital(one.label)}: a higher likelihood, but worse predictions than other structures, so not chosen."
        for one in others
        if one.barred and one.name == "mixture" and one.score > chosen.score
    ]
    level = [one.label for one in others if one.as_good and one is not best]
    if level:
        out.append(f"About as good as the best: {_listed(level)}.")
    worse = [f"{one.label} ({interval(one.versus_chosen)})" for one in others if _clearly_worse(one)]
    if worse:
        out.append(f"Clearly worse than {chosen.label}: {_listed(worse)}.")
    return out


def _clearly_worse(one: Structure) -> bool:
    return one.versus_chosen is not None and one.versus_chosen.high < 0


def _groups(found: Comparison, chosen: Structure) -> list[str]:
    """How large groups are, and whether they would come out again."""
    groups = found.grouping
    if chosen.name != "clusters" or groups is None:
        return []
    sizes = _listed([count(size) for size in groups.sizes])
    if groups.stability >= _STABLE:
        read = "are stable across folds"
    elif groups.stability >= _UNSTABLE:
        read = "are fairly stable across folds, but some clients change groups"
    else:
        read = "are unstable across folds: their models help, but do not interpret which client is in which group"
    return [f"The groups have {sizes} clients and {read} (adjusted Rand index {groups.stability:.2f})."]


# -- what to know -----------------------------------------------------------------------------------------------------
def _worse(found: Comparison) -> list[str]:
    if found.chosen == "global" or not found.worse_off:
        return []
    judged = int(found.judged.sum())
    are = "is" if len(found.worse_off) == 1 else "are"
    return [
        f"{len(found.worse_off)} of {_number(judged, 'client')} {are} worse off than with {one_for_all(found)}, "
        f"on their own held-out rows: {_some(found.worse_off)}."
    ]


def _odd_clients(found: Comparison) -> list[str]:
    out = []
    if found.outliers:
        out.append(
            f"No shared model fits {_number(len(found.outliers), 'client')}, not counted in the choice: "
            f"{_some(found.outliers)}. Check their data."
        )
    if found.absent:
        many = _number(len(found.absent), "client")
        out.append(f"{many} did not answer and took no part: {_some(found.absent)}.")
    if found.too_small:
        have = "has" if len(found.too_small) == 1 else "have"
        few = _number(len(found.too_small), "client")
        out.append(f"{few} {have} too few rows to be scored: {_some(found.too_small)}.")
    return out


# -- the command ------------------------------------------------------------------------------------------------------
def fit_command(data: DataOptions, advice: FitAdvice, *, seed: int, on_flower: bool = False) -> str | None:
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
    about = f"{nats}, 95 % confidence interval {interval(found)}, paired over {_number(found.clients, 'client')}"
    return f"{said} ({about}){'' if found.clear else ': the interval contains 0'}"


def interval(found: Difference | None) -> str:
    """The ends of a 95 % interval."""
    if found is None:
        return "-"
    digits = _decimals(found.stderr)
    return f"{fixed(found.low, digits)} to {fixed(found.high, digits)}"


def _number(value: object, noun: str) -> str:
    n = int(value) if isinstance(value, int | float | np.integer) else 0
    return f"{count(n)} {noun}{'s' * (n != 1)}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:_NAMED]) + more


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
