# SPDX-License-Identifier: Apache-2.0
"""Headline, evidence and doubts do not contradict each other, whatever a comparison has found."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from comparisons import LABELS, comparison, sides
from coterie.select import Paired, difference
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
        both = np.stack([np.where(outlier, np.nan, values[one]) for one in (name, other)])
        return None if name == other else difference(Paired.of(torch.from_numpy(both)), 0, 1)

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
                Paired.of(torch.from_numpy(np.stack([made.normal(gains[name], 0.1, 8), np.zeros(8)]))), 0, 1
            ),
            chosen_share=float(shares[ORDER.index(name)]),
        )  # fmt: skip

    gain = score[chosen] - score["global"]
    return replace(
        found, n_judged=int(judged.sum()), n_outliers=int((outlier & judged).sum()), n_absent=away,
        held_out=sides(gain), on_test=sides(error["global"] - error[chosen]),
        structures=tuple(map(structure, found.structures)), judged=judged, gain=gain,
        too_small=tuple(names[np.isin(kind, [0] * small)]), absent=tuple(names[np.isin(kind, [1] * away)]),
        outliers=tuple(names[outlier & judged]), worse_off=tuple(names[gain < 0]), notes=(),
        tolerance=draw(st.sampled_from([0.0, 0.005, 0.05])), settings={"repetitions": 100, "deals": 2, "few_shot": 5},
    )  # fmt: skip


def everything(found: Comparison) -> str:
    said = answer(found)
    return " ".join([said.headline, *said.evidence, *said.doubts])


LISTS = {
    "level": r"Not clearly different from .*?: (.*?)\.(?: |$)", "slightly": r"by less than matters: (.*?)\.(?: |$)",
    "worse": r"Clearly worse than .*?: (.*)", "kin": r"is chosen; (.*) would do as well",
    "better": r"(\S.*?) is clearly better",
}  # fmt: skip


def named(found: Comparison) -> dict[str, set[str]]:
    """Which structures are called what, in the words."""
    said = answer(found)
    return {
        what: {
            one.name for text in (said.headline, *said.evidence) if (at := re.search(how, text))
            for one in found.structures
            if one.name != found.chosen and one.label in at[1].lower()
        }
        for what, how in LISTS.items()
    }  # fmt: skip


@given(comparisons())
def test_a_structure_has_one_standing_in_all_that_is_said(found: Comparison) -> None:
    called = named(found)
    assert not called["worse"] & (called["level"] | called["kin"] | called["slightly"] | called["better"])
    assert not called["level"] & (called["slightly"] | called["better"] | called["kin"])
    for one in found.structures:
        gap = one.versus_chosen
        if one.name in called["worse"]:
            assert gap is not None
            assert gap.high < 0
        if one.name in called["kin"] | called["level"] and gap is not None:
            assert not gap.high < 0
        if one.name in called["better"]:
            assert gap is not None
            assert gap.low > 0
    if found.chosen != "global":  # everybody is told of: beside one model for all, which the first sentence is about
        told = called["level"] | called["kin"] | called["slightly"] | called["worse"] | called["better"]
        assert told >= {one.name for one in found.structures if not one.barred} - {"global", found.chosen}


@given(comparisons())
def test_what_is_claimed_of_clients_is_clear(found: Comparison) -> None:
    chosen, headline = found[found.chosen], answer(found).headline
    clear = chosen.versus_global is not None and chosen.versus_global.low > 0
    kin = [other.over_global == "better" for other in facts(found).kin]  # they say the same of clients
    claims = (
        "fall into",
        "Every client",
        "own intercepts.",
        "models differ in",
        "rows mix",
        "are enough",
        "serve clients",
    )
    if chosen.name != "global" and any(claim in headline for claim in claims):
        assert clear or any(kin) or " may " in headline
    if "Clients fall into" in headline:
        assert found.grouping is not None
        assert found.grouping.stability >= 0.5
    if "clearly better than one model" in headline:
        assert clear
    if "whether clients differ is not clear" in headline:
        assert not clear
    gains = [
        one.name for one in found.structures
        if one.versus_chosen is not None and one.versus_chosen.low > 0 and not one.barred
        and one.versus_chosen.mean > found.tolerance
    ]  # fmt: skip
    assert "gain nothing" not in headline
    if "little, or nothing that is clear" in headline:
        assert not gains
    if "serves them better" in everything(found):  # of new clients
        assert chosen.new_versus_global is not None
        assert chosen.new_versus_global.low > 0  # of errors


@given(comparisons())
def test_own_intercepts_are_called_so_and_nothing_else(found: Comparison) -> None:
    if found[found.chosen].setting.get("prior") == "intercept":
        headline = answer(found).headline
        assert "own intercepts" in headline
        assert "own model" not in headline
        assert "model of its own" not in everything(found)


@given(comparisons())
def test_clients_are_counted_once_and_numbers_that_differ_are_explained(found: Comparison) -> None:
    known, text_of_all = facts(found), everything(found)
    counts = known.counts
    assert counts.clients == counts.compared + counts.outliers + counts.too_small + counts.absent
    for text in answer(found).evidence:
        for better, of, worse, equal in re.findall(
            r"better for (\d+) of (\d+) clients?, worse for (\d+)(?:, and equal for (\d+))?", text
        ):
            assert int(better) + int(worse) + int(equal or 0) == int(of)
            assert int(of) == counts.compared or "(all that have test rows)" in text
        for paired in re.findall(r"paired over (\d+) clients?", text):
            assert int(paired) == counts.compared or "those with test rows and no outliers" in text
    if counts.compared != counts.clients:
        assert f"Intervals are over {counts.compared} of {counts.clients} clients: " in text_of_all
    for name, n in (
        ("too few rows", counts.too_small),
        ("did not answer", counts.absent),
        ("outlier", counts.outliers),
    ):
        assert (name in text_of_all) == bool(n)
    worse_off = re.search(r"held-out rows, (\d+) of (\d+) scored", text_of_all)
    if worse_off:
        assert known.held_out is not None
        assert (int(worse_off[1]), int(worse_off[2])) == (known.held_out.worse, counts.scored)
