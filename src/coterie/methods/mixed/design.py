# SPDX-License-Identifier: Apache-2.0
"""Which columns have random effects, how they are scaled while the model is fitted, and how that is undone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.preparation import Scaling
from coterie.config import MixedOptions
from coterie.data.schema import Schema
from coterie.errors import ConfigError

__all__ = ["EVERY", "INTERCEPT", "MOST_EFFECTS", "Design", "design", "in_units", "slopes_of"]

INTERCEPT = "(intercept)"
EVERY = "all"  # stands for all features among the slopes
MOST_EFFECTS = 16  # with a full covariance, whose numbers and their second derivatives grow with the fourth power


@dataclass(frozen=True)
class Design:
    """Of the random effects.

    Attributes
    ----------
    names : tuple of str
        [R] what has random effects.
    basis : Tensor
        [R, D + 1] what makes their columns of scaled features and intercept.
    units : Tensor
        [R, R] what makes effects of these columns those of the data's own columns, in the target's units.
    order : tuple of int
        Features, in which those come last that are left out first where columns are combinations of each other.
    """

    names: tuple[str, ...]
    basis: Tensor
    units: Tensor
    order: tuple[int, ...]


def slopes_of(schema: Schema, chosen: MixedOptions) -> tuple[int, ...]:
    """Numbers of the features that have random slopes."""
    names = schema.feature_names
    if chosen.slopes == (EVERY,):
        return tuple(range(len(names)))
    for name in chosen.slopes:
        if name not in names:
            levels = next((c.feature_names for c in schema.columns if c.name == name), ())
            known = f"name its levels: {', '.join(levels[:5])}" if levels else f"there are {', '.join(names[:20])}"
            raise ConfigError(f"mixed.slopes has '{name}', which is no number in a row", known)
    return tuple(dict.fromkeys(names.index(name) for name in chosen.slopes))


def design(schema: Schema, scaling: Scaling, chosen: MixedOptions) -> Design:
    """Lay the random effects out.

    Independent effects, and slopes without an intercept, depend on where a column has its zero: their columns are not
    centred. Others are, which changes nothing but the steps to the minimum.
    """
    slopes, d = slopes_of(schema, chosen), schema.n_features
    mean, scale = scaling.mean.double(), scaling.scale.double()
    centred = chosen.random_intercept and chosen.covariance == "full"
    rows, undone = [], []
    if chosen.random_intercept:
        rows.append(_at(d, d + 1))
        undone.append(_at(0, 1 + len(slopes)))
    for k, at in enumerate(slopes, start=len(rows)):
        shift = torch.zeros(()) if centred else mean[at] / scale[at]
        rows.append(_at(at, d + 1) + shift * _at(d, d + 1))
        undone.append(_at(k, int(chosen.random_intercept) + len(slopes)) / scale[at])
        if centred:
            undone[0] = undone[0] - mean[at] / scale[at] * _at(k, 1 + len(slopes))
    names = ((INTERCEPT,) if chosen.random_intercept else ()) + tuple(schema.feature_names[at] for at in slopes)
    return Design(names, torch.stack(rows), torch.stack(undone) * scaling.y_scale.double(), _order(schema))


def in_units(scaling: Scaling) -> tuple[Tensor, Tensor]:
    """What makes coefficients of scaled features, and the intercept last, those of the data: a map and a shift.

    -> [D + 1, D + 1], [D + 1]
    """
    mean, scale = scaling.mean.double(), scaling.scale.double()
    made = torch.diag(torch.cat([1 / scale, torch.ones(1, dtype=torch.float64)]))
    made[-1, :-1] = -mean / scale
    shift = torch.zeros(len(made), dtype=torch.float64)
    shift[-1] = scaling.y_mean.double()
    return made * scaling.y_scale.double(), shift


def _at(place: int, size: int) -> Tensor:
    made = torch.zeros(size, dtype=torch.float64)
    made[place] = 1.0
    return made


def _order(schema: Schema) -> tuple[int, ...]:
    """First levels of categories come last: they are what other levels are compared with."""
    first, at = [], 0
    for column in schema.columns:
        first += [at] if column.kind == "categorical" else []
        at += len(column.feature_names)
    return tuple(k for k in range(at) if k not in first) + tuple(first)
