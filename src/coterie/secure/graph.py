# SPDX-License-Identifier: Apache-2.0
"""Who masks with whom: everybody with everybody up to 32 nodes, and above that a random graph of logarithmic degree."""

import math
import secrets

__all__ = ["COMPLETE", "degree", "draw_graph", "threshold"]

COMPLETE = 32  # nodes up to which all are neighbours
_TIMES = 8  # log2 of the number of nodes is the degree above that


def degree(n: int) -> int:
    """Neighbours of a node among n."""
    if n <= COMPLETE:
        return n - 1
    return min(n - 1, _TIMES * math.ceil(math.log2(n)))


def threshold(holders: int) -> int:
    """Shares that a secret takes, of those that its holders have: more than two thirds.

    A server that tells some that a node has dropped, and others that it has not, would need as many of either for its own
    value. No two sets of more than two thirds are without a common honest node while fewer than a third are dishonest.
    """
    return 2 * holders // 3 + 1


def draw_graph(n: int) -> list[list[int]]:
    """Draw neighbours of each of n nodes: the nearest ones on a circle in random order (Bell et al., 2020, Section 3.1)."""
    half = degree(n) // 2
    if degree(n) == n - 1:
        return [[j for j in range(n) if j != i] for i in range(n)]
    circle = list(range(n))
    secrets.SystemRandom().shuffle(circle)
    out: list[list[int]] = [[] for _ in range(n)]
    for at, one in enumerate(circle):
        near = [circle[(at + step) % n] for step in range(-half, half + 1) if step]
        out[one] = sorted(near)
    return out
