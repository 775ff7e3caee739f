# SPDX-License-Identifier: Apache-2.0
"""What messages may name: client functions that may run, dataclasses that may be made, and objects that both sides have.

Nothing is imported by a name that came in a message, and nothing is unpickled.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from coterie.errors import ConfigError
from coterie.protocol import Step

__all__ = [
    "named", "named_names", "named_object", "register_named", "register_step", "register_value", "revealed", "step",
    "step_name", "steps", "value_name", "value_type",
]  # fmt: skip

_HINT = "register it on the server and on every node; coterie's own come with `import coterie.engines.flower.catalogue`"

_steps: dict[str, Step] = {}
_values: dict[str, type] = {}
_named: dict[str, Any] = {}

S = TypeVar("S", bound=Callable[..., Any])
T = TypeVar("T", bound=type)


def register_step(function: S) -> S:
    """Let a client function be run by its name, "module.function"; a decorator for functions of one's own."""
    name = _full_name(function)
    if _steps.setdefault(name, function) is not function:
        raise ConfigError(f"there is another client function '{name}'", "give each a name of its own")
    return function


def register_value(kind: T) -> T:
    """Let a frozen dataclass be sent; a decorator for those of one's own."""
    if not dataclasses.is_dataclass(kind):
        raise ConfigError(f"{kind.__name__} is not a dataclass", "only dataclasses can be sent")
    if _values.setdefault(kind.__name__, kind) is not kind:
        raise ConfigError(f"there is another dataclass '{kind.__name__}'", "give each a name of its own")
    return kind


def register_named(name: str, thing: Any) -> None:
    """Let an object be sent as its name: a module or a family with code of its own, registered on both sides."""
    _named[name] = thing


def step_name(function: Any) -> str:
    """The name of a client function that may run."""
    name = _full_name(function)
    if _steps.get(name) is not function:
        raise ConfigError(f"the client function '{name}' is not registered", _HINT)
    return name


def step(name: str) -> Step:
    """The client function of a name."""
    found: Step = _looked_up(_steps, name, "client function")
    return found


def steps() -> Iterable[str]:
    """Names of all client functions that may run."""
    return sorted(_steps)


def revealed() -> frozenset[str]:
    """Private fields that client functions let the server ask for after a fit."""
    return frozenset().union(*(getattr(known, "reveals", ()) for known in _steps.values()))


def value_name(kind: type) -> str:
    """The name of a dataclass that may be sent."""
    if _values.get(kind.__name__) is not kind:
        raise ConfigError(f"a {kind.__name__} cannot be sent: it is not registered", _HINT)
    return kind.__name__


def value_type(name: str) -> type:
    """The dataclass of a name."""
    found: type = _looked_up(_values, name, "dataclass")
    return found


def named(thing: Any) -> str | None:
    """The name under which an object is registered, if it is."""
    return next((name for name, known in _named.items() if known is thing), None)


def named_names() -> Iterable[str]:
    """Names of all objects that both sides have."""
    return tuple(_named)


def named_object(name: str) -> Any:
    """The object of a name."""
    return _looked_up(_named, name, "object")


def _full_name(function: Any) -> str:
    return f"{function.__module__}.{function.__name__}"


def _looked_up(among: dict[str, Any], name: str, what: str) -> Any:
    if name not in among:
        raise ConfigError(f"no {what} '{name}' is registered", _HINT)
    return among[name]
