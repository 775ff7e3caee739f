# SPDX-License-Identifier: Apache-2.0
"""The only fit there is: check, train and measure, whatever the method, wherever the clients are."""

import time
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from coterie.config import FitOptions, check_options
from coterie.data.clients import Clients
from coterie.errors import ConfigError
from coterie.methods.base import Fitted, Given
from coterie.methods.families import family_of
from coterie.methods.from_sums import check_sums
from coterie.methods.outcomes import check_outcome
from coterie.methods.predictions import check_predictions
from coterie.methods.private.check import check_private
from coterie.methods.private.run import shares, train_private, with_account
from coterie.methods.secure import check_secure
from coterie.methods.session import Session, Watch
from coterie.models import Model
from coterie.participation import Clock

__all__ = ["check", "fit", "train"]


def fit(
    clients: Clients,
    options: FitOptions,
    *,
    module: nn.Module | Model | None = None,
    start: Tensor | None = None,
    clock: Clock | None = None,
    folder: Path | None = None,
    every: float = 2.0,
    watch: Watch | None = None,
) -> Fitted:
    """Fit what the options say.

    Parameters
    ----------
    clients : Clients
        Training rows, and held-out ones where there are.
    options : FitOptions
        What to fit, and how.
    module, start, clock
        What only Python can give: see `Given`.
    folder : Path, optional
        Where checkpoints are kept and found.
    every : float
        Seconds between checkpoints.
    watch : callable, optional
        Told of every round.
    """
    given = Given(module, start, clock)
    check(clients, options, given)
    return train(clients, Session(options, folder, every, watch), given)


def check(clients: Clients, options: FitOptions, given: Given = Given()) -> None:  # noqa: B008  (frozen)
    """Refuse what cannot work, before anything is written."""
    if options.method == "auto":
        raise ConfigError(
            "method auto compares structures first, and is no method itself",
            "call coterie.compare, and fit_chosen with what it finds",
        )
    check_options(options)
    check_outcome(clients, options, given)
    check_sums(clients, options, given)
    check_predictions(clients, options)
    if options.privacy.epsilon is None:
        check_secure(clients, options)
    check_private(clients, options)
    family_of(options.method).check(clients, options, given)
    if options.privacy.epsilon is not None:
        shares(clients, options, given)


def train(clients: Clients, session: Session, given: Given = Given()) -> Fitted:  # noqa: B008  (frozen)
    """Fit what the session's options say, which were checked."""
    began = time.perf_counter()
    if session.options.privacy.epsilon is not None:
        fitted = train_private(session := with_account(session, clients), clients, given)
    else:
        fitted = family_of(session.options.method).train(session, clients, given)
    warnings = [*fitted.warnings, *session.remarks()]
    if session.options.secure:
        fitted = replace(fitted, extra={**fitted.extra, "secure": session.secured()})
    return replace(fitted, warnings=warnings, seconds=time.perf_counter() - began, traffic=session.traffic)
