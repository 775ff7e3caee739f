# SPDX-License-Identifier: Apache-2.0
"""For people who use Flower: a strategy and `compare` for their ServerApp, and `register` for their ClientApp."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.engines.flower.registration import register
    from coterie.engines.flower.strategies import CoterieStrategy, compare

__all__ = ["CoterieStrategy", "compare", "register"]

_WHERE = {"CoterieStrategy": "strategies", "compare": "strategies", "register": "registration"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: starting and stopping processes needs neither Flower nor torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"coterie.engines.flower.{_WHERE[name]}"), name)
