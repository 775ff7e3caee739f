# SPDX-License-Identifier: Apache-2.0
"""Options: where they come from, which wins, and what is said about bad ones."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

from coterie import registry
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.moment_descent import Descent
from coterie.config import FitOptions, options
from coterie.errors import ConfigError

METHODS = ", ".join(f"'{name}'" for name in ("auto", *registry.METHODS)).replace(", 'fedavg'", " or 'fedavg'")


def refused(tree: dict[str, Any] | None = None, **more: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        options(tree, **more)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


# -- where options come from ------------------------------------------------------------------------------------------
def test_nothing_said_gives_the_documented_defaults() -> None:
    made = options()
    assert (made.method, made.seed, made.baselines) == ("ifca", 0, True)
    assert (made.training.rounds, made.training.step_size, made.training.local_steps) == (100, None, 10)
    assert (made.data.missing, made.data.test_size, made.data.standardise) == ("error", 0.2, True)
    assert (made.n_clusters, made.clusters.init, made.clusters.n_init) == (2, "spread", 1)
    assert (made.model.degree, made.training.exact, made.clusters.average_over) == (1, False, "cluster")


def test_the_number_of_clusters_is_two_for_ifca_and_open_for_moment_descent() -> None:
    assert options().clusters.n_clusters is None
    assert options({"method": "moment-descent"}).n_clusters is None
    for method in ("ifca", "moment-descent"):
        assert options({"method": method, "clusters": {"n_clusters": 3}}).n_clusters == 3


def test_moments_are_the_parameters_of_the_descent_and_its_anchors() -> None:
    made = options().moments.model_dump()
    own = {name: made.pop(name) for name in ("min_rows", "further", "swaps")} | {"number": made["anchors"]}
    assert Anchors(**own) == Anchors()
    assert made.pop("max_clusters") is None  # as far as the search leads, from the descent's own
    assert Descent(**made | {"anchors": Anchors()}) == Descent()


def test_words_win_over_given_values_and_those_over_the_file(tmp_path: Path) -> None:
    text = 'method = "fedavg"\nseed = 1\n[training]\nrounds = 1\nlocal_steps = 1\nmomentum = 0.1\n'
    tree = {"seed": 2, "training": {"rounds": 2, "local_steps": 2}}
    made = options(tree, file=toml(tmp_path, text), sets=["training.rounds=3"])
    assert made.method == "fedavg"
    assert made.training.momentum == 0.1
    assert made.seed == 2
    assert made.training.local_steps == 2
    assert made.training.rounds == 3


def test_the_last_of_two_words_wins() -> None:
    assert options(sets=["seed=1", "seed=2"]).seed == 2


def test_values_of_words_are_toml_and_else_text() -> None:
    made = options(
        sets=[
            "data.client=school", 'data.target="a b=c"', "data.exclude=['x', 'y']", "model.hidden=[64, 32]",
            "model.intercept=false", "training.step_size=1e-2", "training.rounds=50",
        ]
    )  # fmt: skip
    assert (made.data.client, made.data.target, made.data.exclude) == ("school", "a b=c", ("x", "y"))
    assert (made.model.hidden, made.model.intercept) == ((64, 32), False)
    assert (made.training.step_size, made.training.rounds) == (0.01, 50)


def test_numpy_numbers_are_numbers() -> None:
    assert options({"clusters": {"n_clusters": np.int64(3)}, "model": {"l2": np.float32(0.5)}}).clusters.n_clusters == 3


def test_options_survive_json_and_cannot_be_changed() -> None:
    made = options({"model": {"hidden": (8, 4)}, "data": {"exclude": ("a",)}, "clusters": {"shared_layers": ("0",)}})
    assert FitOptions.model_validate(json.loads(json.dumps(made.model_dump(mode="json")))) == made
    with pytest.raises(ValidationError):
        made.seed = 3  # type: ignore[misc]


# -- bad options ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "method=foo",
            f"method is 'foo': input should be {METHODS}",
        ),
        ("seed=-1", "seed is -1: input should be greater than or equal to 0"),
        ("clusters.n_clusters=0", "clusters.n_clusters is 0: input should be greater than or equal to 1"),
        ("clusters.init=best", "clusters.init is 'best': input should be 'random', 'balanced', 'spread' or 'warm'"),
        ("training.step_size=0", "training.step_size is 0: input should be greater than 0"),
        ("training.step_size=inf", "training.step_size is inf: input should be a finite number"),
        ("training.tol=nan", "training.tol is nan: input should be a finite number"),
        ("training.participation=1.5", "training.participation is 1.5: input should be less than or equal to 1"),
        ("data.missing=ignore", "data.missing is 'ignore': input should be 'error', 'mean' or 'drop'"),
        ("data.test_size=1", "data.test_size is 1: input should be less than 1"),
        ("model.hidden=[8, 0]", "model.hidden.1 is 0: input should be greater than 0"),
        ("model.degree=0", "model.degree is 0: input should be greater than or equal to 1"),
        ("clusters.average_over=all", "clusters.average_over is 'all': input should be 'cluster' or 'everyone'"),
        ("clusters.resample=3", "clusters.resample is 3: input should be a multiple of 2"),
        ("moments.estimator=three", "moments.estimator is 'three': input should be 'pairs', 'halves' or 'two'"),
        ("moments.iterations=0", "moments.iterations is 0: input should be greater than or equal to 1"),
        ("moments.noise=-1", "moments.noise is -1: input should be greater than or equal to 0"),
        ("data.min_rows=0", "data.min_rows is 0: input should be greater than or equal to 1"),
    ],
)
def test_a_bad_value_is_named_with_its_option(word: str, said: str) -> None:
    assert refused(sets=[word]).message == said


@pytest.mark.parametrize(
    ("word", "name", "hint"),
    [
        ("training.round=5", "training.round", "did you mean training.rounds?"),
        ("rounds=5", "rounds", "did you mean training.rounds?"),
        ("model.momentum=0.5", "model.momentum", "did you mean training.momentum?"),
        ("clusters.clusters=5", "clusters.clusters", "did you mean clusters.n_clusters?"),
    ],
)
def test_an_unknown_option_is_named_with_a_near_one(word: str, name: str, hint: str) -> None:
    error = refused(sets=[word])
    assert error.message == f"there is no option '{name}'"
    assert error.hint == hint


def test_an_option_like_no_other_brings_the_list() -> None:
    assert "method, seed, baselines, secure, data.path" in refused(sets=["zzz=1"]).hint


def test_a_value_in_place_of_a_group_and_a_group_in_place_of_a_value() -> None:
    error = refused(sets=["training=5"])
    assert error.message == "training is 5 and should be a group of options"
    assert "training.rounds" in error.hint
    assert refused({"seed": 1}, sets=["seed.x=5"]).message.startswith("seed: input should be a valid integer")
    assert refused(sets=["seed=1", "seed.x=5"]).message.startswith("seed: ")


def test_epochs_without_batches_are_refused() -> None:
    assert refused(sets=["training.epochs=2"]).message == (
        "training: epochs count passes in minibatches: give batch_size too"
    )
    assert options(sets=["training.epochs=2", "training.batch_size=8"]).training.epochs == 2


def test_an_exact_step_needs_a_proximal_term_and_no_batches() -> None:
    assert refused(sets=["training.exact=true"]).message == (
        "training: an exact step needs a proximal term to stay near the model: give proximal above 0"
    )
    exact = ["training.exact=true", "training.proximal=0.5"]
    for word in ("training.batch_size=4", "training.momentum=0.5"):
        assert "an exact step is taken at once" in refused(sets=[*exact, word]).message
    assert options(sets=exact).training.exact


@pytest.mark.parametrize("word", ["training.rounds", "=5", ""])
def test_a_word_that_is_no_setting(word: str) -> None:
    error = refused(sets=[word])
    assert error.message == f"'{word}' is not a setting"
    assert error.hint == "write it like --set training.rounds=50"


def test_files_that_are_no_toml(tmp_path: Path) -> None:
    assert "there is no configuration file" in refused(file=tmp_path / "none.toml").message
    assert "is not valid TOML" in refused(file=toml(tmp_path, "rounds 50")).message
    (tmp_path / "latin.toml").write_bytes(b'method = "\xe9"')
    assert "is not valid TOML" in refused(file=tmp_path / "latin.toml").message
    assert "cannot be read: Is a directory" in refused(file=tmp_path).message


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000,
        "seed = " + "9" * 5000,
        "a" + ".a" * 3000 + " = 1",
        "[" + "a." * 3000 + "a]",
        "x=1\n" * 300_000,
    ],
)
def test_files_of_strangers_are_bounded(tmp_path: Path, text: str) -> None:
    assert len(refused(file=toml(tmp_path, text)).message) < 600


def test_words_of_strangers_are_bounded() -> None:
    for word in ("seed=" + "9" * 5000, "seed=" + "[" * 5000, "a." * 5000 + "a=1", "x" * 5000 + "=1"):
        assert len(refused(sets=[word]).message) < 6000


def counts(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Every option that is a whole number, or may be one, but for seeds."""
    for group, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            whole = re.compile(r"\bint\b")
            inside = field.annotation.model_fields.items()
            yield from ((group, name) for name, inner in inside if whole.search(str(inner.annotation)))


@pytest.mark.parametrize(("group", "name"), list(counts(FitOptions)))
def test_every_count_has_a_bound(group: str, name: str) -> None:
    if (group, name) == ("data", "min_rows"):  # takes neither time nor room
        return
    value: Any = [10**9] if (group, name) == ("model", "hidden") else 10**9
    assert "should be less than or equal to" in refused({group: {name: value}}).message


def test_seeds_and_layers_have_a_bound() -> None:
    assert "less than or equal" in refused({"seed": 2**64}).message
    assert "at most 100 items" in refused({"model": {"hidden": [1] * 101}}).message


def test_a_file_with_an_unknown_group(tmp_path: Path) -> None:
    assert refused(file=toml(tmp_path, "[trainings]\nrounds = 5\n")).message == "there is no option 'trainings'"
