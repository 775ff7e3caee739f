# SPDX-License-Identifier: Apache-2.0
"""Which structure do clients have, within a privacy budget? Few candidates, few questions, and noise in the error.

Linear regression only: one model for all, groups, one model each, and models that are shrunk to a common one. The mean of
clients' own models stands for one model for all. The simplest candidate is chosen that is as good as the best within the
error of their paired difference, of which noise is a part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.private_candidates import Candidates, Judged, judged_in, judging_ask, learning_ask, simplest
from coterie.algorithms.private_k_means import GROUP_QUESTIONS, Groups, groups_of_sizes
from coterie.algorithms.private_moments import Spread, private_spread
from coterie.config import options
from coterie.data.clients import Clients
from coterie.data.draws import VALIDATION
from coterie.errors import ConfigError, DataError
from coterie.methods.private.check import check_budget
from coterie.methods.private.plan import Budget, louder_on
from coterie.methods.private.run import scaled_privately, with_account
from coterie.methods.session import On, Session, has_closed_form, model_for
from coterie.models import Dense

__all__ = ["PrivateChoice", "Tried", "compare_private"]

_SHARES = {"scaling": 0.1, "spread": 0.15, "groups": 0.45, "scores": 0.3}
_QUESTIONS = {"scaling": 2, "spread": 1, "groups": GROUP_QUESTIONS, "scores": 1}
_SIZES = (2, 3, 4, 5)
_TOLERANCE = 0.03  # of the best candidate's loss: a simpler one that loses no more is as good
_GAIN = 0.08  # of what groups gain over one model for all: fewer that lose no more are as good
_SURE = 1.5  # standard errors
_CENTRES = 25.0  # noise multipliers that a client's part in the centres of two groups is divided by, about
_FREE = 4.0  # variance of intercepts that are each client's own; slopes explain the target's variance together


@dataclass(frozen=True)
class Tried:
    """A candidate: its structure, what it is set to, and its mean squared error in units of the target's variance."""

    structure: str
    setting: dict[str, int]
    loss: float
    error: float  # of its difference from the best


@dataclass(frozen=True)
class PrivateChoice:
    """What a comparison within a budget found.

    Attributes
    ----------
    chosen : Tried
        The simplest that is as good as the best.
    best : Tried
        With the lowest loss.
    tried : list of Tried
        All candidates, the simplest first.
    privacy : dict
        The account.
    n_clients : int
        That were judged.
    """

    chosen: Tried
    best: Tried
    tried: list[Tried]
    privacy: dict[str, Any] = field(default_factory=dict)
    n_clients: int = 0


def compare_private(
    clients: Clients, *, epsilon: float, delta: float | None = None, seed: int = 0, secure: bool = False,
    anyway: bool = False,
) -> PrivateChoice:  # fmt: skip
    """Choose a structure with a budget.

    Parameters
    ----------
    clients : Clients
        Whose training rows are compared; a fifth of them judges.
    epsilon, delta : float
        The budget.
    secure : bool
        Whether the server learns sums over nodes only; nodes then share the noise.
    anyway : bool
        Whether the budget is spent also where not even two groups could be told apart.
    """
    privacy = {"epsilon": epsilon, "delta": delta, "anyway": anyway}
    chosen = options({"method": "shrunk", "seed": seed, "secure": secure, "privacy": privacy})
    check_budget(clients, chosen)
    model = model_for(clients, chosen, None)
    if not has_closed_form(model):
        raise ConfigError(
            "a comparison with a privacy budget is of linear regressions", "leave epsilon out, or name a method to fit"
        )
    assert isinstance(model, Dense)
    spare = clients.train.counts - (clients.train.counts * VALIDATION).round().to(torch.int64)
    if int((spare > model.n_parameters).sum()) < 2:
        raise DataError(
            f"no two clients have more rows than the {model.n_parameters} parameters",
            "leave columns out with --exclude",
        )
    budget = Budget.of(clients, chosen, _SHARES, _QUESTIONS)
    louder = louder_on(clients, chosen)
    signal = clients.n_clients / (_CENTRES * louder * budget["groups"])
    if signal < 1 and not anyway:
        raise ConfigError(
            f"with an epsilon of {epsilon:g} and {clients.n_clients} clients the noise in the models of two groups would be "
            f"{1 / signal:.1f} times as large as what tells them apart",
            f"it takes {math.ceil(clients.n_clients / signal):,} clients, or a larger epsilon",
        )
    session = with_account(Session(chosen), clients)
    scaling = scaled_privately(session, clients, budget["scaling"], louder)
    rows = clients.train.scaled(scaling).to(model.dtype)
    rest, held = rows.split(VALIDATION, seed=seed, purpose="validation")
    enough = int((rest.counts > model.n_parameters).sum())
    spread: Spread = session.run(
        "spread", rest, [partial(private_spread, model=model, multiplier=budget["spread"], n_clients=enough, louder=louder)],
        Spread, 1,
    ).states[0]  # fmt: skip
    sizes = [k for k in _SIZES if 4 * k <= clients.n_clients]
    how: dict[str, Any] = {"sizes": sizes, "multiplier": budget["groups"], "n_clients": clients.n_clients, "seed": seed}
    grouped = partial(groups_of_sizes, model=model, **how)
    groups: Groups = session.run("groups", rest, [grouped], Groups, 1).states[0]
    made, told = _candidates(spread, groups, sizes, model.n_parameters)
    judge = judging_ask(model, made.n, budget["scores"])
    parts = [On(rest, {0: learning_ask(model, made)}), On(held, {0: judge}, after=0)]
    there = int((held.counts > 0).sum())
    found = judged_in(session.exchange(parts)[1][0], judge, there, louder)
    assert session.account is not None
    return _choice(found, told, session.account.told(), there)


def _candidates(
    spread: Spread, groups: Groups, sizes: Sequence[int], p: int
) -> tuple[Candidates, list[tuple[str, dict[str, int]]]]:
    """All candidates, in the order of their simplicity."""
    told: list[tuple[str, dict[str, int]]] = [("global", {}), *(("clusters", {"n_clusters": k}) for k in sizes)]
    wide = torch.full((p,), 1 / max(p - 1, 1), dtype=torch.float64)
    wide[-1] = _FREE
    nothing = torch.zeros(p, dtype=torch.float64)
    priors: list[tuple[Tensor, Tensor]] = [(nothing, torch.diag(wide.sqrt()))]
    told.append(("local", {}))
    priors.append((spread.mean, torch.diag(spread.variance.sqrt())))
    told.append(("shrunk", {}))
    centres = torch.cat([spread.mean[None], groups.theta])
    mean, root = (torch.stack(some) for some in zip(*priors, strict=True))
    return Candidates(centres, (1, *sizes), mean, root, spread.noise), told


def _choice(
    found: Judged, told: Sequence[tuple[str, dict[str, int]]], privacy: dict[str, Any], n: int
) -> PrivateChoice:
    best = int(found.mean.argmin())
    tried = [
        Tried(structure, setting, max(found.first + float(found.mean[j]), 0.0), found.error(j, best))
        for j, (structure, setting) in enumerate(told)
    ]
    groups = [j for j, (structure, _) in enumerate(told) if structure == "clusters"]
    kept = simplest(found, groups, _TOLERANCE, _SURE, _GAIN)  # their number first, and then the structure
    order = [j for j in range(len(told)) if j == kept or j not in groups]
    one = simplest(found, order, _TOLERANCE, _SURE)
    return PrivateChoice(tried[one], tried[best], tried, privacy, n)
