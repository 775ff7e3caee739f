# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a round and what time it takes: policies and clocks that an engine is given, whatever the algorithm."""

from coterie.participation.clocks import (
    Clock,
    DynamicExponential,
    Exponential,
    LogNormal,
    Speeds,
    Trace,
    VirtualClock,
    WallClock,
)
from coterie.participation.participants import Participants, Participation, select_participants
from coterie.participation.policies import Deadline, Everyone, FastestFirst, FirstReplies, Lots, Sampled, Then

__all__ = [
    "Clock",
    "Deadline",
    "DynamicExponential",
    "Everyone",
    "Exponential",
    "FastestFirst",
    "FirstReplies",
    "LogNormal",
    "Lots",
    "Participants",
    "Participation",
    "Sampled",
    "Speeds",
    "Then",
    "Trace",
    "VirtualClock",
    "WallClock",
    "select_participants",
]
