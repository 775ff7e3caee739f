# SPDX-License-Identifier: Apache-2.0
"""From a run folder to a fitted estimator."""

from pathlib import Path

from torch import nn

from coterie.estimators.base import Estimator, estimator_of
from coterie.models import Model
from coterie.runs.folder import load_run

__all__ = ["load"]


def load(folder: str | Path, *, model: nn.Module | Model | None = None, state: str | Path | None = None) -> Estimator:
    """Load a finished run as a fitted estimator.

    Parameters
    ----------
    folder : str or Path
        What `coterie fit --out` wrote.
    model : nn.Module, optional
        The network that was trained, when it was your own.
    state : str or Path, optional
        On a node of a federation, its state folder: personal parts of its clients that stayed there.
    """
    run = load_run(Path(folder), module=model, state=None if state is None else Path(state))
    made = estimator_of(run.options, model)
    made._restore(run)
    return made
