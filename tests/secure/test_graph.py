# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from coterie.secure.graph import degree, draw_graph, threshold


@pytest.mark.parametrize("n", [2, 3, 8, 32])
def test_few_nodes_are_all_neighbours(n: int) -> None:
    assert draw_graph(n) == [[j for j in range(n) if j != i] for i in range(n)]


@pytest.mark.parametrize("n", [33, 64, 100, 256, 1000])
def test_many_nodes_have_logarithmic_degree_and_neighbours_know_each_other(n: int) -> None:
    found = draw_graph(n)
    assert all(len(set(near)) == len(near) == degree(n) and i not in near for i, near in enumerate(found))
    assert all(i in found[j] for i, near in enumerate(found) for j in near)
    assert degree(n) <= 8 * math.ceil(math.log2(n))


def test_graphs_are_drawn_anew() -> None:
    assert draw_graph(100) != draw_graph(100)


def test_the_threshold_is_more_than_two_thirds() -> None:
    assert [threshold(n) for n in (2, 3, 4, 6, 8, 32)] == [2, 3, 3, 5, 6, 22]
    assert all(3 * threshold(n) > 2 * n and threshold(n) <= n for n in range(2, 300))
