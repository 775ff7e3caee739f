# SPDX-License-Identifier: Apache-2.0
"""Comparisons made by hand, to be put into words, tables and pages: only the shape is real."""

from dataclasses import replace
from typing import Any

import numpy as np

from coterie.selection.result import ORDER, Comparison, Difference, FitAdvice, Grouping, Structure, Trial

LABELS = {
    "global": "one model for all", "clusters": "3 clusters", "representation": "rank 2", "mixture": "2 components",
    "local": "one model each", "shrunk": "shrunk towards the global model",
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "global": {}, "clusters": {"n_clusters": 3}, "representation": {"rank": 2}, "mixture": {"n_components": 2},
    "local": {"penalty": 0.1}, "shrunk": {"prior": "diagonal"},
}  # fmt: skip
SCORES = {"global": -1.5, "clusters": -1.2, "representation": -1.3, "mixture": -1.45, "local": -1.4, "shrunk": -1.19}
DF = {"global": 4.0, "clusters": 70.0, "representation": 90.0, "mixture": 64.0, "local": 240.0, "shrunk": 150.0}
ADVICE = {
    "global": FitAdvice("fedavg"),
    "clusters": FitAdvice("ifca", {"clusters.n_clusters": 3, "clusters.n_init": 5}),
}
ADVICE["mixture"] = FitAdvice("mixture", {"mixture.n_components": 2})


def difference(mean: float, stderr: float = 0.02, clients: int = 57) -> Difference:
    return Difference(mean, stderr, mean - 2 * stderr, mean + 2 * stderr, clients)


def structure(name: str, chosen: str, metric: str, n_clients: int) -> Structure:
    draw = np.random.default_rng(len(name))
    own = SCORES[name] + 0.2 * draw.normal(size=n_clients)
    better = 0.8 + 0.1 * SCORES[name] if metric == "accuracy" else -SCORES[name]
    by_client = better + 0.05 * draw.normal(size=n_clients)
    counted = {"clusters": range(1, 9), "representation": range(1, 5), "mixture": range(2, 5)}.get(name, ())
    word = next(iter(SETTINGS[name]), "")
    trials = tuple(Trial({word: k}, f"{k}", SCORES[name] - 0.05 * (k - 3) ** 2, 0.02) for k in counted)
    return Structure(
        name, SETTINGS[name], LABELS[name], SCORES[name], 0.03, better, 0.01, better, 0.012, SCORES[name], better,
        None if metric == "accuracy" else 0.7, better * 1.02, 0.03, SCORES[name],
        None if name == "global" else difference(SCORES[name] - SCORES["global"]),
        None if name == chosen else difference(SCORES[name] - SCORES[chosen]),
        None if name == "global" else difference(SCORES[name] - SCORES["global"], 0.05),
        name in ("clusters", "shrunk"), trials, own, by_client, own, None, ADVICE.get(name, FitAdvice(None)),
        df=DF[name],
    )  # fmt: skip


def grouping(n_clients: int, features: tuple[str, ...], stability: float) -> Grouping:
    draw = np.random.default_rng(1)
    labels = np.arange(n_clients) % 3
    centre = np.array([[0.0, 0.0], [3.0, 1.0], [1.0, 3.0]])
    return Grouping(
        labels, np.bincount(labels), draw.normal(size=(3, len(features))), features, stability,
        draw.choice([0.6, 0.8, 1.0], n_clients), draw.gamma(1.0, size=n_clients),
        centre[labels] + 0.5 * draw.normal(size=(n_clients, 2)),
    )  # fmt: skip


def comparison(
    chosen: str = "clusters", *, metric: str = "rmse", n_clients: int = 60, stability: float = 0.93, **changes: Any
) -> Comparison:
    """A comparison in which three groups of clients were found, or what `changes` say."""
    names = np.array([f"site-{i:02d}" for i in range(n_clients)])
    structures = tuple(structure(name, chosen, metric, n_clients) for name in ORDER)
    by_name = {one.name: one for one in structures}
    gain = by_name[chosen].client_score - by_name["global"].client_score
    judged = np.arange(n_clients) >= 2
    gain[~judged] = np.nan
    seen = by_name["global"].client_test_metric - by_name[chosen].client_test_metric
    made = Comparison(
        "classification" if metric == "accuracy" else "regression", "days", metric, chosen, structures, names,
        np.full(n_clients, 40), judged, tuple(names[:2].tolist()), ("site-07",), np.zeros(n_clients),
        tuple(names[gain < 0].tolist()), gain, grouping(n_clients, ("age", "severity", "ward=icu"), stability),
        12.5, 0, {"folds": 5, "few_shot": 5}, ("Mixtures used at most 2,000 rows of a client.",),
        n_judged=int(judged.sum()), n_outliers=1, held_out=sides(gain),
        on_test=sides(-seen if metric == "accuracy" else seen),
    )  # fmt: skip
    return replace(made, **changes)


def sides(gain: np.ndarray) -> tuple[int, int, int]:
    """How many are better off, worse off, and neither."""
    there = gain[np.isfinite(gain)]
    better, worse = int((there > 1e-9).sum()), int((there < -1e-9).sum())
    return better, worse, len(there) - better - worse
