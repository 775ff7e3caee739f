# SPDX-License-Identifier: Apache-2.0
"""What secure sums have cost, and who dropped out of them: for the run's document."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cost"]


@dataclass
class Cost:
    """Counted over a run.

    Attributes
    ----------
    nodes, threshold : int
        The most nodes that were in a sum, and how many of a neighbourhood had to stay to its end.
    sums, exchanges : int
        Sums, and how often keys were exchanged for some of them.
    messages : int
        To each node, for both: two for an exchange of keys, and one for a sum beside the question itself.
    bytes_up, bytes_down : int
        Of all nodes, for keys, letters, masked parts and shares.
    seconds : float
        Of masking and unmasking; on Flower, until the sum is there.
    dropped : Counter
        Node -> sums that it dropped out of.
    """

    nodes: int = 0
    threshold: int = 0
    sums: int = 0
    exchanges: int = 0
    messages: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)

    def said(self) -> dict[str, Any]:
        """As plain values."""
        return {**vars(self), "dropped": dict(sorted(self.dropped.items()))}
