# SPDX-License-Identifier: Apache-2.0
"""Choices that are made on held-out rows: among starts of IFCA, and among numbers of clusters."""

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.algorithms import ifca, moment_descent
from coterie.algorithms.starts import Start
from coterie.baselines import VALIDATION, measured_models, placed
from coterie.data.ragged import Ragged
from coterie.engines.in_process import Program, Round
from coterie.local import worst_if_nan
from coterie.phases import Phases, Prepared

__all__ = ["best_start", "number_of_clusters"]


def best_start(phases: Phases, made: Prepared, program: Callable[[int], Program]) -> tuple[Start, int, list[Round]]:
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
    options = phases.options
    part, held = made.rows.split(VALIDATION, seed=options.seed, purpose="validation")
    programs = [program(options.seed + 1 + i) for i in range(options.clusters.n_init)]
    done = phases.run("choose a start", part, programs, ifca.State, options.training.rounds)
    losses = [float(_held_out(made, part, held, state.theta).sum()) for state in done.states]
    winner = int(worst_if_nan(torch.tensor(losses)).argmin())
    return Start("warm", done.states[winner].theta), winner, list(done.rounds)


def number_of_clusters(
    phases: Phases, made: Prepared, program: Callable[[int | None, int], Program]
) -> tuple[int, str]:
    """Find out how many clusters there are, and say how.

    Anchors of moment descent tell when groups stand out; but a small group may hide among anchors that have not arrived,
    and clients that differ by degrees may still be served better by several models. So this number and all larger ones are
    tried in lockstep on part of the rows, and the smallest wins whose loss on the others is as good as the best: within one
    standard error over clients, or two where groups stand out.

    Parameters
    ----------
    program : callable
        (number of clusters or None, rounds of Phase 2) -> moment descent's program.
    """
    options = phases.options
    most = min(options.moments.max_clusters, made.rows.n_clients)
    anchors = phases.run(
        "count clusters", made.rows, [program(None, 0)], moment_descent.State, options.moments.iterations
    )
    found = len(anchors.states[0].theta)
    if found == 0 or found >= most:  # nobody answered, or there is nothing to choose
        return max(found, 1), "so many stand out among the anchors"
    part, held = made.rows.split(VALIDATION, seed=options.seed, purpose="validation")
    programs = [program(k, options.training.rounds) for k in range(found, most + 1)]
    total = options.moments.iterations + 1 + options.training.rounds
    done = phases.run("choose the number of clusters", part, programs, moment_descent.State, total)
    losses = torch.stack([_held_out(made, part, held, state.theta) for state in done.states])  # [K, M]
    chosen = found + _simplest(losses, 1.0 if found < 2 else 2.0)
    if found < 2:
        return chosen, "chosen on held-out rows, since no groups stand out among the anchors"
    if chosen == found:
        return chosen, "so many stand out among the anchors, and more are no better"
    return chosen, f"chosen on held-out rows; {found} stand out among the anchors"


def _held_out(made: Prepared, part: Ragged, held: Ragged, theta: Tensor) -> Tensor:
    """Total loss of every client on held-out rows, placed by its other rows.  [M]"""
    label = placed(made.model, theta, part).label
    measured = measured_models(made.model, theta, label, held)
    return measured.loss * measured.rows


def _simplest(losses: Tensor, errors: float) -> int:
    """The first candidate whose loss is within so many standard errors of the best, paired over clients.  losses [K, M]"""
    losses = worst_if_nan(losses.double())
    best = losses[losses.sum(1).argmin()]
    for k, loss in enumerate(losses):
        worse = loss - best
        if bool(worse.isfinite().all()) and float(worse.sum()) <= errors * float(worse.std()) * len(worse) ** 0.5:
            return k
    return 0
