# SPDX-License-Identifier: Apache-2.0
"""Fit what a comparison has chosen."""

from typing import Any

from coterie.config import options
from coterie.data.clients import Clients
from coterie.errors import ConfigError
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.selection.result import Comparison

__all__ = ["fit_chosen"]


def fit_chosen(clients: Clients, found: Comparison, structure: str | None = None, **more: Any) -> Fitted:
    """Fit what was chosen, or another structure, to all training rows: what the printed command and `auto` fit.

    Parameters
    ----------
    clients : Clients
        That were compared.
    found : Comparison
        What came of it.
    structure : str, optional
        Which to fit; the chosen one by default.
    more
        Further options of `fit`.
    """
    advice = found[structure or found.chosen].fit
    if advice.method is None:
        raise ConfigError(f"no method fits {found[structure or found.chosen].label}", "name another structure")
    return fit(clients, advice.into(options({"seed": found.seed})), **more)
