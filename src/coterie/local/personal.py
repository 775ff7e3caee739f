# SPDX-License-Identifier: Apache-2.0
"""Training one part of every client's model while the other part stays: a personal part, or what all share.

Where the part that stays lies below the part that moves, what it makes of a client's rows does not change from step to
step: these features are made once, and the part that moves is trained on them as a model of its own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.local.assess import client_losses, own_outputs
from coterie.local.sgd import Training, train
from coterie.models import Model, Network, Part, Split, Tail, tail
from coterie.protocol import Block

__all__ = ["HalfFixed", "hold", "share_of_work", "train_part"]


def train_part(
    model: Model,
    split: Split,
    part: Part,
    shared: Tensor,
    personal: Tensor,
    data: Block,
    step_size: Tensor,
    how: Training,
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    """Train one part of every client's model on its own rows; the other part stays.

    Parameters
    ----------
    split : Split
        Which parameters are shared and which are personal.
    part : {"personal", "shared", "both"}
        What moves.
    shared : Tensor
        [S, 1 or C, Q] the shared part, one for all clients or one each.
    personal : Tensor
        [S, C, P - Q] every client's own part.
    data, step_size, how, key
        As for `train`.

    Returns
    -------
    shared, personal : Tensor
        [S, 1 or C, Q], [S, C, P - Q]
    """
    return hold(model, split, part, shared, personal, data).train(shared, personal, step_size, how, key)


@dataclass(frozen=True)
class HalfFixed:
    """Clients' rows as the part of their models that moves sees them.

    Attributes
    ----------
    model, split, part
        As for `train_part`.
    last : Tail or None
        The part that moves as a model of its own, where the other part lies below it.
    rows : list of Block
        [S] for every run: features for `last`, or the rows as they are.
    """

    model: Model
    split: Split
    part: Part
    last: Tail | None
    rows: list[Block]

    def train(
        self, shared: Tensor, personal: Tensor, step_size: Tensor, how: Training, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Train the part that moves.  [S, 1 or C, Q], [S, C, P - Q] -> the same"""
        if self.last is None:
            moving = self.split.moving(self.part) if self.part != "both" else None
            theta = self.split.join(shared, personal)
            moved = self.split.parts(train(self.model, theta, self.rows[0], step_size, how, key, moving))
        else:
            start = personal if self.part == "personal" else shared.expand(-1, personal.shape[1], -1)
            runs = [slice(s, s + 1) for s in range(len(start))]
            trained = torch.cat(
                [
                    train(self.last.model, start[s], rows, step_size[s], how, key[s])
                    for s, rows in zip(runs, self.rows, strict=True)
                ]
            )
            moved = (trained, trained)
        return (shared if self.part == "personal" else moved[0]), (personal if self.part == "shared" else moved[1])

    def losses(self, shared: Tensor, personal: Tensor) -> Tensor:
        """Mean loss of every client's model.  [S, 1 or C, Q], [S, C, P - Q] -> [S, C]"""
        if self.last is None:
            scores = own_outputs(self.model, self.split.join(shared, personal), self.rows[0])
            return client_losses(self.model, scores, self.rows[0])
        moving = personal if self.part == "personal" else shared.expand(-1, personal.shape[1], -1)
        scored = [self.last.model.own_outputs(v, rows.x) for v, rows in zip(moving, self.rows, strict=True)]
        return client_losses(self.model, torch.stack(scored), self.rows[0])


def moving_tail(model: Model, split: Split, part: Part) -> Tail | None:
    """The layers that move, if those below are fixed; augmented rows differ in every step, so nothing is made once."""
    augmented = isinstance(model, Network) and model.augment is not None
    return None if augmented or part == "both" else tail(model, split.moving(part))


def share_of_work(model: Model, split: Split, part: Part) -> float:
    """What a step with this part costs, of one through all layers: on features that are made once, a head is cheap."""
    last = moving_tail(model, split, part)
    return 1.0 if last is None else last.model.n_parameters / model.n_parameters


def hold(model: Model, split: Split, part: Part, shared: Tensor, personal: Tensor, data: Block) -> HalfFixed:
    """Fix one part of every client's model, and make of the rows what the other part will see.

    Parameters as for `train_part`.
    """
    last = moving_tail(model, split, part)
    if last is None:
        return HalfFixed(model, split, part, None, [data] * len(personal))
    below = shared if part == "personal" else personal
    rows = [replace(data, x=last.features(theta, data.x), kept={}) for theta in below]
    return HalfFixed(model, split, part, last, rows)
