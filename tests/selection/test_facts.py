# SPDX-License-Identifier: Apache-2.0
"""Headline, evidence and doubts do not contradict each other, whatever a comparison has found."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from comparisons import LABELS, comparison
from coterie.select import difference
from coterie.selection.facts import facts
from coterie.selection.result import ORDER, Comparison, Structure
from coterie.selection.text import answer


@st.composite
def comparisons(draw: Any) -> Comparison:
    """Any scores, any choice: clients that are too small, absent, outliers, without test rows, level to the last digit."""
    n, seed = draw(st.integers(6, 30)), draw(st.integers(0, 2**32 - 1))
    chosen = draw(st.sampled_from(ORDER))
    gains = {name: draw(st.sampled_from([-0.5, -0.03, -0.004, 0.0, 0.004, 0.03, 0.5])) for name in ORDER}
    spread = {name: draw(st.sampled_from([0.0, 0.001, 0.05, 0.5])) for name in ORDER}
    made = np.random.default_rng(seed)
    base = made.normal(-1.0, 0.3, n)
    kind = made.permutation(n)
    small, away, odd, untested = (draw(st.integers(0, 1)) for _ in range(4))
    judged = ~np.isin(kind, [0] * small + [1] * away)
    outlier = np.isin(kind, [2] * odd)
    tested = ~np.isin(kind, [3] * untested)
    score = {name: base + gains[name] + spread[name] * made.normal(size=n) for name in ORDER}
    score = {name: np.where(judged, value, np.nan) for name, value in score.items()}
    found = comparison(chosen, n_clients=n, stability=draw(st.sampled_from([0.2, 0.6, 0.95])))
    names = found.names
    shares = made.dirichlet(np.full(len(ORDER), draw(st.sampled_from([0.1, 1.0, 10.0]))))

    def versus(name: str, other: str, values: dict[str, np.ndarray]) -> Any:
        gap = [torch.from_numpy(np.where(outlier, np.nan, values[one])) for one in (name, other)]
        return None if name == other else difference(*gap)

    on_test = {name: np.where(tested, value, np.nan) for name, value in score.items()}
    error = {name: np.where(tested, np.round(2.0 - value, draw(st.sampled_from([1, 6]))), np.nan)
             for name, value in score.items()}  # fmt: skip
    intercepts = draw(st.booleans())

    def structure(one: Structure) -> Structure:
        name = one.name
        own = name == "shrunk" and intercepts
        return replace(
            one, setting={"prior": "intercept"} if own else one.setting, label="own intercepts" if own else LABELS[name],
            score=float(np.nanmean(np.where(outlier, np.nan, score[name]))), client_score=score[name],
            versus_global=versus(name, "global", score), versus_chosen=versus(name, chosen, score),
            client_test_metric=error[name], test_metric=float(np.nanmean(error[name])),
            client_test_score=on_test[name], test_versus_global=versus(name, "global", on_test),
            test_r2=float(made.uniform(-0.2, 1.0)), barred=name == "mixture" and chosen != name and bool(made.integers(2)),
            new_versus_global=None if name == "global" else difference(
                torch.from_numpy(made.normal(gains[name], 0.1, 8)), torch.zeros(8, dtype=torch.float64)
            ),
            chosen_share=float(shares[ORDER.index(name)]),
        )  # fmt: skip

    gain = score[chosen] - score["global"]
    return replace(
        found, structures=tuple(map(structure, found.structures)), judged=judged, gain=gain,
        too_small=tuple(names[np.isin(kind, [0] * small)]), absent=tuple(names[np.isin(kind, [1] * away)]),
        outliers=tuple(names[outlier & judged]), worse_off=tuple(names[gain < 0]), notes=(),
        tolerance=draw(st.sampled_from([0.0, 0.005, 0.05])), settings={"repetitions": 100, "deals": 2, "few_shot": 5},
    )  # fmt: skip


@given(comparisons())
def test_no_two_sentences_contradict_each_other(found: Comparison) -> None:
    known, said = facts(found), answer(found)
    chosen, everything = found[found.chosen], " ".join([said.headline, *said.evidence, *said.doubts])

    # a structure has one standing: nobody will do as well, or is not clearly different, and is clearly worse
    lists = {
        "level": r"Not clearly different from .*?: (.*?)\.(?: |$)", "slightly": r"by less than matters: (.*?)\.(?: |$)",
        "worse": r"Clearly worse than .*?: (.*)", "either": r"Between (.*?), (?:either|any) will do",
        "better": r"(\S.*?) is better, but by so little",
    }  # fmt: skip
    named = {
        kind: {
            one.name for text in (said.headline, *said.evidence) if (at := re.search(how, text))
            for one in found.structures if one.name != chosen.name and one.label in at[1].lower()
        }
        for kind, how in lists.items()
    }  # fmt: skip
    assert not named["worse"] & (named["level"] | named["either"] | named["slightly"] | named["better"])
    assert not named["level"] & (named["slightly"] | named["better"])
    for name in named["worse"]:
        gap = found[name].versus_chosen
        assert gap is not None
        assert gap.high < 0
    for name in named["either"] | named["level"]:
        gap = found[name].versus_chosen
        assert gap is None or not gap.high < 0
    for name in named["better"]:
        gap = found[name].versus_chosen
        assert gap is not None
        assert gap.low > 0

    # what is claimed of clients needs an interval without 0, and groups that would come out again
    clear = chosen.versus_global is not None and chosen.versus_global.low > 0
    claims = ("fall into", "Every client needs", "have their own intercepts", "differ in", "mix ", "are enough")
    if chosen.name != "global" and any(claim in said.headline for claim in claims):
        assert clear or "may" in said.headline
    if "Clients fall into" in said.headline:
        assert found.grouping is not None
        assert found.grouping.stability >= 0.5
    if "clearly better than one model" in said.headline:
        assert clear
    gains = [one for one in found.structures if one.versus_chosen is not None and one.versus_chosen.low > 0]
    if "gain nothing" in said.headline:
        assert not [one for one in gains if not one.barred]
    if "no other structure fits clients clearly better" in said.headline:
        assert not [one for one in gains if not one.barred]

    # own intercepts are called so
    if chosen.setting.get("prior") == "intercept":
        assert "own model" not in said.headline
        assert "model of its own" not in everything
        assert "own intercepts" in said.headline

    # counts add up, and are explained wherever they differ
    counts = known.counts
    assert counts.clients == counts.compared + counts.outliers + counts.too_small + counts.absent
    for text in said.evidence:
        for better, of, worse, equal in re.findall(
            r"better for (\d+) of (\d+) clients?, worse for (\d+)(?:, and equal for (\d+))?", text
        ):
            assert int(better) + int(worse) + int(equal or 0) == int(of)
            assert (int(of) == counts.compared) or "(all that have test rows)" in text
        for paired in re.findall(r"paired over (\d+) clients?", text):
            assert int(paired) == counts.compared or "those with test rows and no outliers" in text
    if counts.compared != counts.clients:
        assert f"Intervals are over {counts.compared} of {counts.clients} clients: " in everything
    for name, n in (
        ("too few rows", counts.too_small),
        ("did not answer", counts.absent),
        ("outlier", counts.outliers),
    ):
        assert (name in everything) == bool(n)
    worse = re.search(r"held-out rows, (\d+) of (\d+) scored", everything)
    if worse:
        assert known.held_out is not None
        assert (int(worse[1]), int(worse[2])) == (known.held_out.worse, counts.scored)

    # new clients
    if "serves them better" in everything:
        assert chosen.new_versus_global is not None
        assert chosen.new_versus_global.low > 0  # of errors
