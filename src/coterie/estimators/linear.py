# SPDX-License-Identifier: Apache-2.0
"""Linear models of clients' own as estimators: alone, drawn towards what all have in common, or in a few directions."""

from typing import ClassVar, Literal

from coterie.estimators.groups import Products, parameters
from coterie.estimators.personal import Personalised

__all__ = ["Local", "Representation", "Shrunk"]


@parameters
class Local(Personalised, Products):
    """A linear model for every client alone, by ridge regression.

    Parameters
    ----------
    penalty : float, optional
        On the squares of weights, where features have deviation 1; chosen by cross-validation within clients by default.
    degree, standardise : int, bool
        Products of features up to this degree; whether features are scaled.
    baselines : bool
        Whether one model for all is fitted too.
    random_state : int
        Seed of the folds.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `FedRep`; ``personal_.own`` [M, P] are the models, for scaled rows.
    """

    method: ClassVar[str] = "local"
    model = None
    clock = None

    penalty: float | None = None


@parameters
class Shrunk(Personalised, Products):
    """A linear model for every client, drawn towards a common one as far as clients are alike.

    Parameters
    ----------
    spread : {"intercept", "same", "diagonal", "full"}, optional
        What clients may differ in: intercepts only, all weights by the same variance, every weight by its own, or any
        direction; chosen by cross-validation within clients by default.
    degree, standardise, baselines, random_state
        As for `Local`.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `Local`; ``theta_`` [P] is the common model.
    """

    method: ClassVar[str] = "shrunk"
    model = None
    clock = None

    spread: Literal["intercept", "same", "diagonal", "full"] | None = None


@parameters
class Representation(Personalised, Products):
    """A linear model for every client that differs from a common one in a few directions, the same for all.

    Parameters
    ----------
    rank : int, optional
        In how many; chosen by cross-validation within clients by default.
    degree, standardise, baselines, random_state
        As for `Local`.

    Attributes
    ----------
    client_names_, personal_, scores_, spread_
        As of `Local`; ``theta_`` [P] is the common model.
    """

    method: ClassVar[str] = "representation"
    model = None
    clock = None

    rank: int | None = None
