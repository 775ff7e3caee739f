# SPDX-License-Identifier: Apache-2.0
"""All client functions and values of coterie's own methods, registered so that messages may name them.

To be imported on the server and on every node. What an algorithm's file defines for clients, by the protocol's four
arguments, is among them; those of one's own are registered beside them: see `coterie.engines.flower.registry`.
"""

from collections.abc import Iterator
from importlib import import_module
from inspect import isfunction, signature
from pkgutil import iter_modules
from types import ModuleType

from coterie import algorithms, evaluate
from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.newton_ifca import ByLabel
from coterie.algorithms.preparation import Scaling
from coterie.engines.flower.registry import register_step, register_value
from coterie.local import Training
from coterie.methods.personal import measure
from coterie.models import Dense, Network, Split
from coterie.models.mixtures import Gaussian, Regression
from coterie.protocol import Step

__all__ = ["STEPS", "VALUES"]

_ARGUMENTS = ["shared", "each", "private", "data"]  # of every client function


def _modules() -> Iterator[ModuleType]:
    yield from (evaluate, measure)
    yield from (import_module(f"{algorithms.__name__}.{found.name}") for found in iter_modules(algorithms.__path__))


def _steps_of(module: ModuleType) -> Iterator[Step]:
    for name, thing in vars(module).items():
        own = isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
        if own and list(signature(thing).parameters) == _ARGUMENTS:
            yield thing


STEPS = tuple(step for module in _modules() for step in _steps_of(module))
VALUES = (Dense, Gaussian, Network, Regression, Split, Training, Scaling, Problem, ByLabel)

for _step in STEPS:
    register_step(_step)
for _value in VALUES:
    register_value(_value)
