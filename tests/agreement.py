# SPDX-License-Identifier: Apache-2.0
"""The programs that must give the same on every engine, and the clients that they run on."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from coterie.algorithms.fedgrem import fedgrem
from coterie.algorithms.fedrep import fedrep
from coterie.algorithms.ifca import ifca
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.algorithms.moment_descent import Descent, mixed_regression
from coterie.algorithms.srpfl import Fixed, srpfl
from coterie.local import Training
from coterie.models import Dense, linear_regression
from coterie.models.mixtures import Regression
from coterie.participation import VirtualClock
from coterie.protocol import Algorithm
from coterie.registry import METHODS
from helpers import federation, registered_case

COUNTS = (14, 22, 17, 12, 17, 20, 19, 17, 14, 12)  # rows by client: enough for anchors
ROWS = federation(COUNTS).rows
LINE = linear_regression(3)
NET = Dense((3, 6, 1), "squared", dtype=torch.float64)

_fedrep = partial(
    fedrep, model=NET, rounds=4, step_size=0.05, seed=1, personal=("1",),
    head=Training(epochs=2, batch_size=5), body=Training(epochs=1, batch_size=5),
)  # fmt: skip

PROGRAMS: dict[str, Callable[[Any], Algorithm]] = {
    "ifca": partial(ifca, model=LINE, n_clusters=2, rounds=4, step_size=0.05, seed=1),
    "ifca-float32": partial(
        ifca, model=replace(NET, dtype=torch.float32), n_clusters=2, rounds=3, step_size=0.05, seed=1
    ),
    "moment-descent": partial(
        mixed_regression, model=LINE, n_clusters=2, rounds=2, step_size=0.05, seed=1, descent=Descent(iterations=2)
    ),
    "fedrep": _fedrep,
    "srpfl": partial(srpfl, _fedrep, n0=2, n_clients=10, stages=Fixed(2)),
    "fedgrem": partial(
        fedgrem, family=Regression(3), n_components=2, rounds=5, seed=1, c_lambda=1.0, start=MixtureStart(4, 10)
    ),
}
PROGRAMS |= {
    one.name: registered_case(one).program(1)
    for one in METHODS.values()
    if one.family == "personal" and one.name not in PROGRAMS
}
ENGINES: dict[str, Any] = {"srpfl": {"clock": VirtualClock(), "seed": 2}}
