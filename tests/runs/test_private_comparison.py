# SPDX-License-Identifier: Apache-2.0
import pytest

from coterie.runs import private_comparison
from coterie.selection.private import Tried


@pytest.mark.parametrize(
    ("loss", "begins"), [(0.4, "Clients fall into 3 groups"), (1.2, "Nothing can be said"), (float("nan"), "Nothing")]
)
def test_what_predicts_no_better_than_the_mean_is_no_answer(loss: float, begins: str) -> None:
    assert private_comparison._headline(Tried("clusters", {"n_clusters": 3}, loss, 0.1)).startswith(begins)
