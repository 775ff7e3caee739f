# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison says what was found and no more; its command says what was asked."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

from comparisons import comparison, difference
from coterie.config import DataOptions
from coterie.selection.result import ORDER, Comparison, FitAdvice
from coterie.selection.text import answer, fit_command, plus_minus


def changed(found: Comparison, name: str, **changes: object) -> Comparison:
    """Change one structure."""
    structures = tuple(replace(one, **changes) if one.name == name else one for one in found.structures)
    return replace(found, structures=structures)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("global", "One model for all is enough"),
        ("clusters", "3 groups"),
        ("representation", "differ in a few directions"),
        ("mixture", "2 components"),
        ("local", "Local models are enough"),
        ("shrunk", "shrunk towards a common one"),
    ],
)
def test_every_structure_is_an_answer(chosen: str, words: str) -> None:
    assert words in answer(comparison(chosen)).headline


def test_difference_is_told_with_interval_and_pairs() -> None:
    said = answer(comparison()).evidence[0]
    assert "1.350 times as likely" in said  # exp(0.3)
    assert "95 % confidence interval 0.260 to 0.340, paired over 57 clients" in said
    assert "contains 0" not in said


def test_what_is_not_certain_is_not_claimed() -> None:
    unsure = changed(comparison(), "clusters", versus_global=difference(0.01, 0.02))
    assert "the interval contains 0" in answer(unsure).evidence[0]


def test_test_rows_that_do_not_show_it_are_told() -> None:
    found = changed(comparison(), "clusters", test_versus_global=difference(0.01, 0.05))
    assert any("The test rows alone do not show a clear gain" in text for text in answer(found).evidence)
    assert not any("do not show a clear gain" in text for text in answer(comparison()).evidence)


def test_better_scores_that_were_not_taken_are_told() -> None:
    evidence = " ".join(answer(comparison()).evidence)
    assert "Not clearly different from 3 clusters: shrunk towards the global model." in evidence
    assert "rank 2 (\u22120.140 to \u22120.060)" in evidence.partition("Clearly worse than 3 clusters: ")[2]
    clear = replace(changed(comparison(), "shrunk", versus_chosen=difference(0.03, 0.01)), tolerance=0.05)
    assert "Shrunk towards the global model is clearly better, but by too little to matter" in " ".join(
        answer(clear).evidence
    )
    behind = replace(changed(comparison(), "shrunk", versus_chosen=difference(-0.03, 0.01)), tolerance=0.05)
    said = " ".join(answer(behind).evidence)
    assert "Worse than 3 clusters, by less than matters: shrunk towards the global model." in said
    assert "shrunk" not in said.partition("Clearly worse than 3 clusters: ")[2]


def test_clients_with_a_better_metric_are_counted() -> None:
    found = comparison()
    ours, theirs = found["clusters"].client_test_metric, found["global"].client_test_metric
    better, worse = int((ours < theirs).sum()), int((ours > theirs).sum())
    assert (
        f"better for {better} of 60 clients, worse for {worse} (all that have test rows)" in answer(found).evidence[1]
    )
    shares = comparison(metric="accuracy")
    ours, theirs = shares["clusters"].client_test_metric, shares["global"].client_test_metric
    assert f"better for {int((ours > theirs).sum())} of 60 clients" in answer(shares).evidence[1]
    same = replace(shares, on_test=(51, 0, 9))
    assert "better for 51 of 60 clients, worse for 0, and equal for 9" in answer(same).evidence[1]


def test_doubts_name_clients() -> None:
    found = comparison()
    doubts = answer(found).doubts
    assert f"{len(found.worse_off)} of 58 scored clients, 1 outlier among them, are worse off" in doubts[0]
    assert f"and {len(found.worse_off) - 5} more" in doubts[0]
    assert "No shared model fits 1 client, not counted in the choice" in doubts[1]
    assert "'site-07'" in doubts[1]
    assert doubts[2] == "2 clients have too few rows to be scored: 'site-00', 'site-01'."
    assert doubts[3] == found.notes[0]


def test_new_clients_that_speak_against_the_choice_are_told() -> None:
    found = changed(comparison(), "clusters", new_metric=2.0, new_versus_global=difference(0.3, 0.1))  # of errors
    assert any(text.endswith("one model for all serves them better.") for text in answer(found).evidence)
    unsure = changed(found, "clusters", new_versus_global=difference(0.3, 0.2))
    assert any(text.endswith("the difference is not clear.") for text in answer(unsure).evidence)
    fine = changed(found, "clusters", new_versus_global=difference(-0.3, 0.1))
    assert not any("serves them better" in text or "not clear" in text for text in answer(fine).evidence)


def test_without_a_target_mixtures_are_spoken_of() -> None:
    said = answer(replace(comparison("local"), task="none", metric="log density"))
    assert said.headline.startswith("Local mixtures are enough")
    assert "one model for all" not in " ".join(said.evidence)


def test_nobody_is_worse_off_with_what_everybody_has() -> None:
    assert not any("worse off" in text for text in answer(comparison("global")).doubts)


@pytest.mark.parametrize(("stability", "words"), [(0.9, "are stable"), (0.6, "fairly stable"), (0.2, "unstable")])
def test_unstable_groups_are_called_so(stability: float, words: str) -> None:
    found = comparison(stability=stability)
    assert any(
        text.startswith("The groups have 20, 20 and 20 clients") and words in text for text in answer(found).evidence
    )
    assert ("uncertain" in answer(found).headline) == (stability < 0.5)


def test_without_test_rows_and_new_clients_nothing_is_said_of_them() -> None:
    found = comparison()
    for name in ORDER:
        found = changed(found, name, test_metric=None, test_versus_global=None, new_metric=None)
    said = " ".join(answer(found).evidence)
    assert "test rows" not in said
    assert "new clients" not in said


def test_command_is_quoted_and_says_what_was_asked() -> None:
    data = DataOptions(
        path="my data.csv", client="the site", target="$y", missing="mean", task="regression", min_rows=3,
        exclude=("a b", "c"), categorical=("code",),
    )  # fmt: skip
    how = {"model.hidden": [8, 4], "clusters.n_clusters": 3, "clusters.n_init": 5, "clusters.soft": True}
    command = fit_command(data, FitAdvice("ifca", how), seed=4)
    assert command is not None
    assert shlex.split(command) == [
        "coterie", "fit", "my data.csv", "--client", "the site", "--target", "$y", "--missing", "mean",
        "--task", "regression", "--min-rows", "3", "--exclude", "a b", "--exclude", "c", "--categorical", "code",
        "--method", "ifca", "--hidden", "8,4", "--clusters", "3", "--starts", "5", "--set", "clusters.soft=true",
        "--seed", "4",
    ]  # fmt: skip


def test_a_structure_without_a_method_has_no_command() -> None:
    assert fit_command(DataOptions(path="x.csv"), FitAdvice(None), seed=0) is None


def test_means_have_the_digits_of_their_error() -> None:
    assert plus_minus("rmse", 10.2345, 0.1234) == "10.23 ± 0.12"
    assert plus_minus("rmse", 1234.5, 23.0) == "1234 ± 23"
    assert plus_minus("accuracy", 0.8312, 0.0123) == "83.1 ± 1.2 %"
    assert plus_minus("rmse", None, None) == "-"
    assert plus_minus("rmse", 1.5, np.nan) == "1.500"


def test_a_mixture_that_predicts_worse_is_told_apart_from_one_that_is_hardly_better() -> None:
    found = changed(comparison(), "mixture", score=-1.0, barred=True, versus_chosen=difference(0.2))
    said = " ".join(answer(found).evidence)
    assert "2 components: a higher likelihood, but worse predictions than other structures, so not chosen." in said
    assert "2 components is clearly better" not in said
    free = changed(found, "mixture", barred=False)
    assert "2 components is clearly better: " in " ".join(answer(free).evidence)


def test_own_intercepts_are_called_so() -> None:
    found = changed(comparison("shrunk"), "shrunk", setting={"prior": "intercept"}, label="own intercepts")
    assert answer(found).headline == "Clients share one model, but have their own intercepts."
    unsure = changed(found, "shrunk", versus_global=difference(0.01, 0.02))
    assert answer(unsure).headline == "Clients share one model, but may have their own intercepts."


@pytest.mark.parametrize("chosen", ["local", "global"])
def test_others_bring_little_or_nothing_only_if_no_gain_is_both_clear_and_large(chosen: str) -> None:
    found = comparison(chosen)
    assert answer(found).headline.endswith("more only with shrunk towards the global model.")
    found = changed(found, "shrunk", as_good=False)
    assert "little, or nothing that is clear" in answer(replace(found, tolerance=1.0)).headline
    for name in ORDER:
        found = found if name == chosen else changed(found, name, versus_chosen=difference(0.01, 0.02))
    assert "little, or nothing that is clear" in answer(found).headline


def test_which_models_of_their_own_serve_clients_best_is_left_to_the_evidence() -> None:
    found = changed(comparison("local"), "shrunk", versus_chosen=difference(0.01, 0.02))
    said = answer(found)
    assert said.headline == "Every client needs its own model."
    assert said.evidence[0] == "One model each is chosen; shrunk towards the global model would do as well."
    assert not any("shrunk towards the global model" in text for text in said.evidence[1:])
    unclear = changed(
        changed(found, "local", versus_global=difference(0.01, 0.02)), "shrunk", versus_global=difference(0.0)
    )
    assert answer(unclear).headline == "Every client may need its own model."
    larger = changed(changed(found, "shrunk", df=500.0), "local", df=150.0)
    assert answer(larger).headline.startswith("Local models are enough")  # more parameters say nothing against fewer


def test_larger_models_say_nothing_against_own_intercepts() -> None:
    found = changed(comparison("shrunk"), "shrunk", setting={"prior": "intercept"}, label="own intercepts")
    found = changed(found, "representation", versus_chosen=difference(0.01, 0.02), chosen_share=0.4)
    assert answer(found).headline == "Clients share one model, but have their own intercepts."


def test_structures_that_would_do_as_well_are_in_the_headline() -> None:
    found = replace(comparison(), settings={"repetitions": 100, "deals": 2})
    for name, share in (("clusters", 0.6), ("shrunk", 0.36), ("local", 0.04)):
        found = changed(found, name, chosen_share=share)
    said = answer(found)
    assert said.headline == (
        "Between groups and a model for every client, either will do: both are clearly better than one model for all."
    )
    assert (
        "How sure: with clients drawn again, and one of 2 deals of their rows to folds, 100 times, the choice is "
        "3 clusters in 60 % and shrunk towards the global model in 36 %."
    ) in said.evidence
    one = changed(changed(found, "global", chosen_share=0.3), "global", versus_chosen=difference(-0.01, 0.02))
    assert answer(one).headline == "One model for all will do: whether clients differ is not clear."
    clear = changed(found, "shrunk", versus_chosen=difference(-0.3))
    assert answer(clear).headline.startswith("Clients fall into 3 groups")  # what is clearly worse will not do


def test_a_lower_r_squared_than_that_of_one_model_is_told() -> None:
    found = changed(comparison("local"), "local", test_r2=-0.05)
    assert any("R² is \u22120.050, against 0.700 with one model for all" in text for text in answer(found).doubts)
    assert not any("R²" in text for text in answer(comparison("local")).doubts)
