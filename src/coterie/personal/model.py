# SPDX-License-Identifier: Apache-2.0
"""Personal models in use: what all share, what is each client's own, and how a client that is new gets its part."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.fine_tuning import fine_tuning
from coterie.data.ragged import Ragged
from coterie.engines.chosen import engine_on
from coterie.engines.private import Kept
from coterie.errors import RunError
from coterie.evaluate import Measured, measure_own_ask
from coterie.local import own_outputs
from coterie.models import Model, split
from coterie.personal.measure import Fit, fit_personal_ask, judge_personal_ask

__all__ = ["Adopted", "Fitting", "Personal", "trained"]


@dataclass(frozen=True)
class Adopted:
    """The personal parts of M clients, fitted to given rows.

    Attributes
    ----------
    names : ndarray
        [M]
    own : Tensor
        [M, ...] their personal parts.
    measured : Measured
        Loss and accuracy (of numbers: mean squared error, in scaled units) on these same rows, and how many there are.
    known : Tensor
        [M] whether a client already has a part of its own, which this does not change.
    """

    names: np.ndarray
    own: Tensor
    measured: Measured
    known: Tensor


class Fitting(Protocol):
    """A way of its own to get a model from rows."""

    @property
    def start(self) -> Tensor:
        """[P] the model of a client that has shown nothing."""

    def fitted(self, rows: Ragged) -> Tensor:
        """Models of clients from their labelled rows.  [C, P]"""


@dataclass(frozen=True)
class Personal:
    """Everybody's personal model, for rows that are scaled.

    Attributes
    ----------
    model : Model
        Both parts together.
    layers : tuple of str
        The personal layers, by the beginnings of their names; none: clients go on from a common model with all of it.
    theta : Tensor
        [Q] what all share; without personal layers [P], where every client begins.
    names : ndarray
        [M] clients, ascending.
    own : Tensor or Kept
        [M, P - Q] every client's personal part; without personal layers [M, P], its own model. Where clients are on other
        machines it stays there, and this is a handle to it.
    fit : Fit or Fitting
        How a client that has none gets one.
    """

    model: Model
    layers: tuple[str, ...]
    theta: Tensor
    names: np.ndarray
    own: Tensor | Kept
    fit: "Fit | Fitting"

    @property
    def parts(self) -> Tensor:
        """[M, ...] the personal parts, where they are here."""
        if isinstance(self.own, Kept):
            raise RunError("personal parts have stayed with their clients", "predict where the clients are")
        return self.own

    def of(self, names: np.ndarray) -> tuple[Tensor, Tensor]:
        """Look up the parts of clients [C, ...], and who has one [C]; the others have what they would begin with."""
        place = {name: i for i, name in enumerate(self.names.tolist())}
        at = torch.tensor([place.get(str(name), -1) for name in names], dtype=torch.int64)
        known = at >= 0
        if not len(self.names):
            return self.fit.start.expand(len(at), -1), known
        return torch.where(known[:, None], self.parts[at], self.fit.start), known

    def adopt(self, rows: Ragged) -> Adopted:
        """Fit the personal parts of clients, old or new, to their labelled rows; what all share stays as it is."""
        own = self.fitted(rows)
        return Adopted(rows.names, own, self.measured(rows, own), self.of(rows.names)[1])

    def joined(self, new: Adopted) -> "Personal":
        """Take clients in with the parts that they have fitted; those that had one keep the new one."""
        kept = ~np.isin(self.names, new.names)
        names = np.concatenate([self.names[kept], new.names])
        order = np.argsort(names, kind="stable")
        own = torch.cat([self.parts[torch.from_numpy(kept)], new.own])
        return replace(self, names=names[order], own=own[torch.from_numpy(order)])

    def fitted(self, rows: Ragged) -> Tensor:
        """Personal parts from rows alone.  [C, ...]"""
        own = self.adapted(rows)
        assert isinstance(own, Tensor)  # the rows are here
        return own

    def adapted(self, rows: Ragged, kept: Kept | None = None) -> Tensor | Kept:
        """Personal parts from rows that may be elsewhere; who has one already, `kept` there, keeps it.  [C, ...]"""
        fit = self.fit
        if not isinstance(fit, Fit):
            return fit.fitted(rows)
        engine = engine_on(rows)
        if self.layers:
            engine.private = engine.private if kept is None else kept
            engine.ask(fit_personal_ask(self.model, self.theta, split(self.model, self.layers), fit))
            return _own(engine.private, "personal")
        tune = partial(
            fine_tuning, model=self.model, theta=self.theta, step_size=fit.step_size, seed=fit.seed,
            training=fit.training,
        )  # fmt: skip
        engine.run([tune])
        return _own(engine.private, "theta")

    def measured(self, rows: Ragged, own: Tensor | Kept) -> Measured:
        """Judge clients on rows, each with its personal part.  own [C, ...]"""
        engine, name = engine_on(rows), "personal" if self.layers else "theta"
        engine.private = (
            own if isinstance(own, Kept) else {0: {name: own.clone()}}
        )  # measuring writes back what it read
        ask = measure_own_ask(self.model)
        if self.layers:
            ask = judge_personal_ask(self.model, self.theta, split(self.model, self.layers))
        return Measured(**engine.ask(ask).values)

    def outputs(self, rows: Ragged, own: Tensor) -> Tensor:
        """What every row's client makes of it, in the order of storage.  own [C, ...] -> [N, O]"""
        made = [torch.zeros(0, self.model.n_outputs, dtype=self.model.dtype)]
        cut = split(self.model, self.layers) if self.layers else None
        for block in rows.blocks():
            part = own[block.ids]
            whole = part if cut is None else cut.join(self.theta, part)
            made.append(own_outputs(self.model, whole[None], block)[0][block.real])
        return torch.cat(made)


def _own(private: Kept | Mapping[int, Mapping[str, Tensor]], name: str) -> Tensor | Kept:
    return private if isinstance(private, Kept) else private[0][name]


def trained(
    model: Model, layers: tuple[str, ...], theta: Tensor, private: Mapping[str, Tensor] | Kept, rows: Ragged, fit: Fit
) -> Personal:
    """Put together what training left with the server (theta) and with the clients (private).

    A client that was never visited, and every client that begins at a common model, fits its part to its training rows,
    beside the private state, which stays as it is.
    """
    if not layers:
        fit = replace(fit, start=theta)
    found = Personal(model, layers, theta, rows.names, fit.start.expand(rows.n_clients, -1), fit)
    if not layers:
        return replace(found, own=found.adapted(rows))
    if isinstance(private, Kept):
        return replace(found, own=found.adapted(rows, private))
    own = private["personal"] if private else found.parts
    new = private["visits"] == 0 if private else torch.ones(rows.n_clients, dtype=torch.bool)
    if bool(new.any()):
        own = own.clone()
        own[new] = found.fitted(rows.only(np.flatnonzero(new.numpy())))
    return replace(found, own=own)
