# SPDX-License-Identifier: Apache-2.0
"""The account: reserved before anything is asked, never beyond the budget, and the same after a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import RunError
from coterie.privacy.account import Account, forget_secret, run_secret
from coterie.protocol import Ask, Block, Noise, Sum, Tensors, answers


@answers(value=Sum())
def tell(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Tell."""
    return {"value": data.x[:, 0][None]}, {}


def ask_for(multiplier: float, number: int = 0, sampling: float = 1.0, purpose: str = "rounds") -> Ask:
    noise = Noise(multiplier, {"value": 1.0}, {"value": 1.0}, sampling, purpose)
    return Ask(tell, {"number": torch.tensor(number)}, {"value": Sum()}, noise=noise)


def test_questions_say_what_they_cost_and_that_adds_up() -> None:
    account, costs = Account(5.0, 1e-5), list[float]()
    for number in range(6):
        (ask,) = account.admit({0: ask_for(4.0, number)}).values()
        assert ask.epsilon is not None
        costs.append(ask.epsilon)
    assert sum(costs) == pytest.approx(account.spent)
    assert 0 < account.spent <= 5.0


def test_what_would_go_beyond_is_refused_and_costs_nothing() -> None:
    account = Account(2.0, 1e-5)
    account.admit({0: ask_for(3.0)})
    before = account.spent
    with pytest.raises(RunError, match=r"the question for rounds would spend an epsilon of .*, and the budget is 2"):
        account.admit({0: ask_for(50.0, 1), 1: ask_for(1.0, 2)})  # all of a message, or none of it
    assert account.spent == before


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.5, 10),
    st.lists(st.tuples(st.floats(0.5, 50), st.sampled_from([1.0, 0.5]), st.integers(1, 3)), max_size=10),
)
def test_the_budget_is_never_exceeded(budget: float, messages: list[tuple[float, float, int]]) -> None:
    account, spent = Account(budget, 1e-5), 0.0
    for number, (multiplier, sampling, n) in enumerate(messages):
        asks = {at: ask_for(round(multiplier, 1), 10 * number + at, sampling) for at in range(n)}
        try:
            account.admit(asks)
        except RunError:
            assert account.spent == spent
        assert spent <= account.spent <= budget
        spent = account.spent


def test_what_is_asked_of_nobody_costs_nothing() -> None:
    account = Account(1.0, 1e-5)
    silent = Ask(tell, {}, {})
    assert account.admit({0: silent})[0] is silent
    assert account.spent == 0


def test_an_account_is_kept_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    first = Account(4.0, 1e-5, path)
    first.admit({0: ask_for(4.0, 0), 1: ask_for(9.0, 1, purpose="scores")})
    again = Account(4.0, 1e-5, path)
    assert again.spent == first.spent > 0
    assert again.told() == first.told()
    assert [one["purpose"] for one in again.told()["questions"]] == ["rounds", "scores"]
    with pytest.raises(RunError, match="another budget"):
        Account(8.0, 1e-5, path)


def test_it_is_written_before_a_question_leaves(tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    Account(4.0, 1e-5, path).admit({0: ask_for(4.0)})  # and then the machine stops
    assert json.loads(path.read_text())["spent"][0]["times"] == 1


def test_the_same_question_costs_once_where_its_noise_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "account.json"
    Account(4.0, 1e-5, path, replays=True).admit({0: ask_for(4.0)}, b"rows")
    again = Account(4.0, 1e-5, path, replays=True)
    before = again.spent
    again.admit({0: ask_for(4.0)}, b"rows")
    assert again.spent == before
    again.admit({0: ask_for(4.0)}, b"other rows")
    assert again.spent > before
    anew = Account(4.0, 1e-5)
    anew.admit({0: ask_for(4.0)})
    once = anew.spent
    anew.admit({0: ask_for(4.0)})
    assert anew.spent > once  # where noise is drawn anew


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"epsilon": 4, "delta": 1e-5, "spent": [{"purpose": "x"}], "asked": []}']
)
def test_a_damaged_account_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "account.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"account.json"):
        Account(4.0, 1e-5, path)


def test_a_runs_secret_is_the_owners_and_goes_with_the_run(tmp_path: Path) -> None:
    secret = run_secret(tmp_path)
    assert run_secret(tmp_path) == secret
    path = tmp_path / "checkpoints" / "noise.key"
    assert path.stat().st_mode & 0o077 == 0
    forget_secret(tmp_path)
    assert not path.exists()
    assert run_secret(None) != run_secret(None)
