# SPDX-License-Identifier: Apache-2.0
"""Choices that are made on held-out rows: among starts of IFCA, and among numbers of clusters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from coterie.algorithms import ifca, moment_descent
from coterie.algorithms.moment_descent import Descent
from coterie.algorithms.starts import Start
from coterie.engines.in_process import Program, Round
from coterie.evaluate import measure_placed_ask, measured_in, place_ask, summed
from coterie.local import worst_if_nan
from coterie.methods.session import On, Prepared, Session
from coterie.select import Paired, simplest

__all__ = ["best_start", "first_bound", "number_of_clusters"]

_MOST = 24  # clusters that are tried, where no maximum is given
_CLIENTS_PER_CLUSTER = 5  # and so many clients to each of them


def best_start(session: Session, made: Prepared, program: Callable[[int], Program]) -> tuple[Start, int, list[Round]]:
    """Advance several starts in lockstep on part of the rows; the winner serves the other part best.

    Parameters
    ----------
    program : callable
        seed -> IFCA's program.

    Returns
    -------
    start, winner, rounds
        Where to begin with all rows, the number of the start that won, and what happened.
    """
    options = session.options
    part, _ = made.validation
    programs = [program(options.seed + 1 + i) for i in range(options.clusters.n_init)]
    done = session.run("choose a start", part, programs, ifca.State, options.training.rounds)
    losses = _held_out(session, made, [state.theta for state in done.states]).sum(1)
    winner = int(worst_if_nan(losses).argmin())
    return Start("warm", done.states[winner].theta), winner, list(done.rounds)


def first_bound(given: int | None) -> int:
    """How many clusters are looked for at first, where at most so many are `given`."""
    return min(Descent.max_clusters, given or Descent.max_clusters)


def number_of_clusters(
    session: Session, made: Prepared, program: Callable[[int | None, int], Program]
) -> tuple[int, str]:
    """Find out how many clusters there are, and say how.

    Anchors of moment descent tell when groups stand out; but a small group may hide among anchors that have not arrived,
    and clients that differ by degrees may still be served better by several models. So numbers from one below what the
    anchors tell up to a bound are tried in lockstep on part of the rows, and the smallest wins whose loss on the others is
    as good as the best: within one standard error over clients, or two where groups stand out. While the winner is the
    smallest or the largest that was tried, smaller or larger ones are tried as well.

    Parameters
    ----------
    program : callable
        (number of clusters or None, rounds of Phase 2) -> moment descent's program.
    """
    options, n_clients = session.options, made.rows.n_clients
    given = options.moments.max_clusters
    cap = min(given or min(_MOST, max(Descent.max_clusters, n_clients // _CLIENTS_PER_CLUSTER)), n_clients)
    anchors = session.run(
        "count clusters", made.rows, [program(None, 0)], moment_descent.State, options.moments.iterations
    )
    found = min(len(anchors.states[0].theta), cap)
    if found == 0 or cap == 1:  # nobody answered, or there is nothing to choose
        return 1, "nobody answered" if found == 0 else "moments.max_clusters is 1"
    search = _Search(session, made, program, errors=1.0 if found < 2 else 2.0)
    search.attempt(max(1, found - 1), max(found, min(first_bound(given), cap)))
    while True:
        chosen, low, high = search.best(), min(search.losses), max(search.losses)
        if chosen == low > 1:
            search.attempt(max(1, low // 2), low - 1)
        elif chosen == high < cap:
            search.attempt(high + 1, min(2 * high, cap))
        else:
            return chosen, _how_chosen(chosen, found, cap)


def _how_chosen(chosen: int, found: int, cap: int) -> str:
    if chosen == cap:
        return "the largest number tried (moments.max_clusters), on held-out rows"
    if found < 2:
        return "chosen on held-out rows, since no groups stand out among the anchors"
    if chosen == found:
        return "this many stand out among the anchors, and others fit no better"
    return f"chosen on held-out rows; {found} groups stand out among the anchors"


@dataclass
class _Search:
    """Numbers of clusters that were tried, and every client's loss on held-out rows under each."""

    session: Session
    made: Prepared
    program: Callable[[int | None, int], Program]
    errors: float  # standard errors that a smaller number may be worse
    losses: dict[int, Tensor] = field(default_factory=dict)  # number of clusters -> [M]

    def attempt(self, low: int, high: int) -> None:
        """Fit all numbers from low to high in lockstep."""
        options = self.session.options
        part, _ = self.made.validation
        numbers = range(low, high + 1)
        programs = [self.program(k, options.training.rounds) for k in numbers]
        total = options.moments.iterations + 1 + options.training.rounds
        done = self.session.run(f"try {low} to {high} clusters", part, programs, moment_descent.State, total)
        losses = _held_out(self.session, self.made, [state.theta for state in done.states])
        self.losses |= dict(zip(numbers, losses, strict=True))

    def best(self) -> int:
        """The smallest number that is as good as the best."""
        numbers = sorted(self.losses)
        return numbers[
            simplest(
                Paired.of(-worst_if_nan(torch.stack([self.losses[k] for k in numbers]).double())), errors=self.errors
            )
        ]


def _held_out(session: Session, made: Prepared, fits: Sequence[Tensor]) -> Tensor:
    """Total loss of every client on held-out rows, placed by its other rows, under each fit's models.  [S, M]

    With secure sums, of all together.  [S, 1]
    """
    part, held = made.validation
    place = {run: replace(place_ask(made.model, theta), fold={}) for run, theta in enumerate(fits)}
    judge = {run: measure_placed_ask(made.model, theta) for run, theta in enumerate(fits)}
    if session.options.secure:
        judge = {run: summed(ask) for run, ask in judge.items()}
    _, got = session.exchange([On(part, place), On(held, judge, after=0)])
    found = [measured_in(got[run]) for run in judge]
    return torch.stack([one.loss * one.rows for one in found])
