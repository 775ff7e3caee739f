# SPDX-License-Identifier: Apache-2.0
"""What hides an answer before it leaves a node, as far as anything does: a policy asks here, and nowhere else."""

from coterie.engines.flower.messages import Secure
from coterie.protocol import Ask, Fold

__all__ = ["epsilon_of", "has_noise", "is_masked", "loss_of"]


def is_masked(how: Fold, secure: Secure | None) -> bool:
    """Whether what this fold lets leave is masked, so that the server sees the sum over nodes alone.

    Parameters
    ----------
    how : Fold
        Of a field.
    secure : Secure or None
        What the message says of a secure sum: all that it asks for leaves in one.
    """
    return secure is not None and not how.individual


def epsilon_of(ask: Ask) -> float:
    """What the answer costs, as the question says; 0 where it says nothing."""
    return float(ask.epsilon or 0.0)


def loss_of(ask: Ask) -> float:
    """What the answer costs by the noise that this node adds: one over the squared multiplier."""
    return 0.0 if ask.noise is None else ask.noise.multiplier**-2


def has_noise(ask: Ask) -> bool:
    """Whether the node adds noise to its answer, and bounds what each client adds: then it costs what that noise says."""
    return ask.noise is not None
