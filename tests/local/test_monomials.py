# SPDX-License-Identifier: Apache-2.0
"""The polynomial feature map, against scikit-learn's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import PolynomialFeatures

from coterie.local.monomials import monomial_names, monomials, n_monomials


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_products_names_and_their_number_are_those_of_scikit_learn(d: int, degree: int, rows: int) -> None:
    x = torch.randn(2, rows, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    names = [f"x{i}" for i in range(d)]
    theirs = PolynomialFeatures(degree, include_bias=False).fit(np.zeros((1, d)))
    made = monomials(x, degree)
    assert made.shape == (2, rows, n_monomials(d, degree))
    for block, flat in zip(made, x, strict=True):
        want = theirs.transform(flat) if rows else np.zeros((0, made.shape[-1]))
        np.testing.assert_allclose(block, want, rtol=1e-12)
    assert [name.replace("*", " ") for name in monomial_names(names, degree)] == list(
        theirs.get_feature_names_out(names)
    )


def test_by_hand() -> None:
    made = monomials(torch.tensor([2.0, 3.0, 5.0]), 2)
    assert made.tolist() == [2, 3, 5, 4, 6, 10, 9, 15, 25]
    assert monomial_names(("a", "b", "c"), 2) == ("a", "b", "c", "a^2", "a*b", "a*c", "b^2", "b*c", "c^2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degree_one_is_the_features(dtype: torch.dtype) -> None:
    x = torch.ones(4, 3, dtype=dtype)
    assert torch.equal(monomials(x, 1), x)
    assert monomials(x, 3).dtype == dtype
