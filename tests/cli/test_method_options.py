# SPDX-License-Identifier: Apache-2.0
"""Whose option is whose: one table, one refusal, and a help text for every method."""

from types import SimpleNamespace

import pytest

import coterie as package
from command import coterie
from coterie.config import FitOptions, check_options, options
from coterie.errors import ConfigError
from coterie.methods.base import Fitted
from coterie.methods.families import FAMILIES
from coterie.option_fields import options_in
from coterie.registry import METHODS, takers

GROUPS = ("model", "training", "clusters", "moments", "mixture", "personal", "prior")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_of_a_family_and_has_an_estimator_with_its_options(name: str) -> None:
    method = METHODS[name]
    assert method.family in FAMILIES
    kind = getattr(package, method.estimator)
    assert kind.method == name
    assert {option[:2] for option in options_in(kind).values()} == {
        option[:2] for option in options_in(method.options).values()
    }


def test_every_option_is_somebodys() -> None:
    nobody = [
        f"{group}.{name}"
        for group in GROUPS
        for name in type(getattr(FitOptions(), group)).model_fields
        if not takers(group, name)
    ]
    assert nobody == []


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_options_that_exist(name: str) -> None:
    for group, own in METHODS[name].takes.items():
        fields = type(getattr(FitOptions(), group)).model_fields
        assert {option.name: option.default for option in own}.items() <= {
            key: field.default for key, field in fields.items()
        }.items()
        assert all(option.about for option in own)
    check_options(options({"method": name}))


@pytest.mark.parametrize(
    ("method", "word", "hint"),
    [
        ("fedavg", "clusters.n_clusters=3", "it is for --method ifca or moment-descent"),
        ("ifca", "moments.iterations=3", "it is for --method moment-descent"),
        ("ifca", "personal.clock=exponential", "it is for --method fedrep or lg-fedavg or fedper"),
        ("mixture", "training.rounds=3", "did you mean mixture.rounds?"),
        (
            "moment-descent",
            "clusters.n_init=3",
            "moment-descent makes its own start; leave it out, or use --method ifca",
        ),
        ("fedrep", "personal.alpha=0.1", "it is for --method maml"),
        ("local", "prior.rank=2", "it is for --method representation"),
        ("shrunk", "training.step_size=0.1", "it is for --method ifca or moment-descent or fedrep"),
    ],
)
def test_an_option_of_another_method_is_refused(method: str, word: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_options(options({"method": method}, sets=[word]))
    assert raised.value.message == f"{word.partition('=')[0]} is set, and {method} has no use for it"
    assert raised.value.hint == hint


def test_help_of_a_method_lists_its_options_with_their_defaults() -> None:
    said = coterie("fit", "--method", "fedrep", "--help")
    assert said.code == 0
    assert said.out.startswith(
        "coterie fit DATA --method fedrep: a shared representation, and a personal head for each client\n"
    )
    lines = [line.partition("#")[0].strip() for line in said.out.splitlines()]
    assert {"personal.head_epochs = 10", "training.step_size (not set)", "model.hidden = []"} <= set(lines)
    assert not [line for line in lines if line.startswith(("clusters.", "mixture.", "personal.alpha"))]
    assert "# passes with a client's head in a round" in said.out
    assert coterie("fit", "--method=mixture", "--help").out.count("mixture.") > 10


def test_help_of_a_method_that_is_not_there_is_refused() -> None:
    said = coterie("fit", "--method", "nope", "--help")
    assert said.code == 2
    assert "there is no method 'nope'" in said.err


def test_names_of_before_are_still_found_with_a_warning() -> None:
    models = SimpleNamespace(theta="the models")
    fitted = Fitted(options({}), None, models, [], extra={"counted": "3 clusters"})  # type: ignore[arg-type]
    for name, found in {"theta": "the models", "mixtures": models, "counted": "3 clusters"}.items():
        with pytest.warns(DeprecationWarning, match=f"Fitted.{name} is now"):
            assert getattr(fitted, name) == found
    with pytest.raises(AttributeError, match="has no attribute 'thetas'"):
        _ = fitted.thetas
