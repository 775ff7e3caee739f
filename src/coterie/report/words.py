# SPDX-License-Identifier: Apache-2.0
"""Words that need an explanation where they stand, said the same everywhere."""

__all__ = ["NATS", "SETTING"]

NATS = "the log-likelihood of a held-out row; 0.01 more makes it 1 % likelier"
SETTING = (
    "of all that were tried for a structure, the best: how many clusters, which penalty, which variances, which rank"
)
