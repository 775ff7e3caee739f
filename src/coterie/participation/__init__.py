# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a round: policies that an engine is given, whatever the algorithm."""

from coterie.participation.policies import Everyone, Participation, Sampled

__all__ = ["Everyone", "Participation", "Sampled"]
