# SPDX-License-Identifier: Apache-2.0
"""What a comparison begins with: what is asked for, scaled rows, and what is fitted to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.algorithms.preparation import Scaling
from coterie.data.clients import Clients
from coterie.data.draws import NEXT_DEAL, First
from coterie.data.ragged import Ragged
from coterie.data.stand_ins import StandIns, needs_rows
from coterie.errors import ConfigError, DataError
from coterie.methods.linear.structures import ORDER
from coterie.methods.session import Session, learnt_scaling, shown_and_judged
from coterie.outcome_names import ABOUT

__all__ = ["Task", "checked"]


@dataclass(frozen=True)
class Task:
    """Rows with their folds, and what is fitted to them."""

    session: Session
    problem: Problem
    scaling: Scaling
    train: Ragged  # scaled, as the others
    test: Ragged | None
    newcomers: tuple[Ragged, Ragged] | None  # rows that new clients show, and those that judge
    seed: int

    @classmethod
    def of(cls, session: Session, clients: Clients, folds: int, few_shot: int) -> "Task":
        """Scale rows, by federated sums, and deal them to folds."""
        scaling = learnt_scaling(session, clients, divide=True)
        train, test, new = (
            None if rows is None else rows.scaled(scaling).to(torch.float64)
            for rows in (clients.train, clients.test, clients.newcomers)
        )
        assert train is not None
        n_classes = {"regression": 0, "classification": len(clients.schema.classes), "none": 1}[clients.schema.task]
        held = tuple(range(folds + 1))
        problem = Problem(train.shape[0], n_classes, folds, held, outcome=clients.schema.outcome or "")
        seed = session.options.seed
        shown = shown_and_judged(new, First(few_shot), seed=seed, purpose="few shots")
        return cls(session, problem, scaling, train, test, shown, seed)

    @cached_property
    def rows(self) -> Ragged:
        """Training and test rows together, with their folds."""
        return self.train.with_folds(self.problem.n_folds, seed=self.seed, test=self.test)

    def dealt(self, again: int) -> "Task":
        """The same training rows with another deal of the folds, without a fit to all of them."""
        problem = replace(self.problem, held=tuple(range(self.problem.n_folds)), deal=again)
        return replace(self, problem=problem, test=None, newcomers=None, seed=self.seed + again * NEXT_DEAL)

    @property
    def zero(self) -> float:
        """What a target of 0 became when it was scaled."""
        return float(self.scaling.target(torch.zeros((), dtype=torch.float64)))

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
    summaries, outcome = isinstance(clients.train, StandIns), clients.schema.outcome
    if outcome and structures is not None and "mixture" in structures:
        raise ConfigError(f"mixtures of rows are not for {ABOUT[outcome]}", "leave the structure 'mixture' out")
    if outcome and hidden:
        raise ConfigError(f"networks are not for {ABOUT[outcome]} (outcome {outcome})", "leave hidden layers out")
    if summaries and hidden:
        raise needs_rows("a network")
    if summaries and structures is not None and "mixture" in structures:
        raise needs_rows("the structure 'mixture'")
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
    left_out = ("mixture",) if hidden or summaries or outcome else ()
    return tuple(name for name in ORDER if (name in wanted or name == "global") and name not in left_out)
