# SPDX-License-Identifier: Apache-2.0
"""What a comparison begins with: what is asked for, scaled rows, and what is fitted to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from coterie.algorithms.preparation import Scaling, learn_scaling
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError, DataError
from coterie.selection.folds import with_folds
from coterie.selection.problem import Problem
from coterie.selection.result import ORDER

__all__ = ["Task", "checked"]


@dataclass(frozen=True)
class Task:
    """Rows with their folds, and what is fitted to them."""

    problem: Problem
    scaling: Scaling
    train: Ragged  # scaled, as the others
    test: Ragged | None
    newcomers: Ragged | None
    few_shot: int
    seed: int

    @classmethod
    def of(cls, clients: Clients, folds: int, few_shot: int, seed: int) -> "Task":
        """Scale rows, by federated sums, and deal them to folds."""
        schema, train = clients.schema, clients.train
        program = partial(
            learn_scaling, shape=train.shape, divide=True, real_target=schema.task == "regression", degree=1
        )
        scaling: Scaling = InProcess(train).run([program]).states[0]

        def scaled(rows: Ragged | None) -> Ragged | None:
            return None if rows is None else rows.changed(scaling.features, scaling.target).to(torch.float64)

        ready = scaled(train)
        assert ready is not None
        n_classes = {"regression": 0, "classification": len(schema.classes), "none": 1}[schema.task]
        problem = Problem(train.shape[0], n_classes, folds, tuple(range(folds + 1)))
        return cls(problem, scaling, ready, scaled(clients.test), scaled(clients.newcomers), few_shot, seed)

    @cached_property
    def rows(self) -> Ragged:
        """Training and test rows together, with their folds."""
        return with_folds(self.train, self.test, self.problem.n_folds, self.seed)

    @property
    def judged(self) -> Tensor:
        """[M] who has rows enough."""
        return self.train.counts >= self.problem.n_folds

    @property
    def n_clients(self) -> int:
        """M."""
        return self.train.n_clients


def checked(
    clients: Clients, structures: Sequence[str] | None, hidden: Sequence[int], folds: int, few_shot: int
) -> tuple[str, ...]:
    """Refuse what cannot work; which structures are compared."""
    wanted = ORDER if structures is None else tuple(structures)
    for name in wanted:
        if name not in ORDER:
            raise ConfigError(f"there is no structure '{name}'", f"choose among {', '.join(ORDER)}")
    if folds < 2:
        raise ConfigError(f"folds is {folds}", "cross-validation needs at least 2 folds")
    if few_shot < 1:
        raise ConfigError(f"few_shot is {few_shot}", "a new client needs at least 1 labelled row")
    if hidden and clients.schema.task == "none":
        raise DataError("networks need a target to learn", "name its column with --target, or leave hidden layers out")
    if len(clients.train.shape) != 1:
        raise DataError(f"rows of shape {clients.train.shape} cannot be compared", "flatten the rows")
    if clients.n_clients < 2:
        raise DataError("there is only one client, so there is nothing to compare", "check the client column")
    enough = int((clients.train.counts >= folds).sum())
    if enough < 2:
        raise DataError(
            f"{enough} of {clients.n_clients} clients have {folds} training rows, and cross-validation needs 2 such clients",
            "lower folds, or hold out fewer rows",
        )
    left_out = ("mixture",) if hidden else ()
    return tuple(name for name in ORDER if (name in wanted or name == "global") and name not in left_out)
