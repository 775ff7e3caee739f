# SPDX-License-Identifier: Apache-2.0
"""What a stranger, a server or a node might try, each ending in a refusal that is printed: ``python -m benchmarks.attacks``.

A module of this package has ``ATTACKS``: a name -> a function that attacks and returns the refusal. It raises
`AttackSucceededError` if nothing refused it.
"""

__all__ = ["AttackSucceededError"]


class AttackSucceededError(Exception):
    """Nobody refused; says what was got."""
