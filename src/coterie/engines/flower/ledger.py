# SPDX-License-Identifier: Apache-2.0
"""A node's ledger: what runs have asked, each and all together, kept in one small file over restarts.

It is written before an answer is made, so what was answered is in it, whatever happens. Whoever changes it has
the node's folder alone (`coterie.engines.flower.node_lock`).
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coterie.engines.flower.policy_file import Budget
from coterie.errors import RunError
from coterie.files import replace_file
from coterie.privacy.gaussian import gaussian_epsilon

__all__ = ["FILE", "Asked", "Spent", "read_ledger", "write_ledger"]

FILE = "ledger.json"
_ROUNDING = 1e-9  # of a budget of epsilon: ten times 0.1 is 1


@dataclass(frozen=True)
class Asked:
    """What one run has asked: how many asks, on which sets of rows."""

    questions: int = 0
    rows: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spent:
    """What all runs have asked.

    Attributes
    ----------
    questions : int
        Asks.
    epsilon : float
        Sum of what they cost, whichever clients of the node they were to.
    loss : float
        Sum of one over the squared noise multiplier of all answers with noise: what follows from it is in `epsilon`.
    runs : dict
        Run -> what it has asked, as long as the node keeps something of it.
    """

    questions: int = 0
    epsilon: float = 0.0
    runs: dict[str, Asked] = field(default_factory=dict)
    loss: float = 0.0

    def after(self, questions: int, epsilon: float, budget: Budget, loss: float = 0.0) -> "Spent":
        """Add to it; what would go beyond the budget is refused.

        Answers without noise cost the `epsilon` that they are said to; those with noise cost what the noise says.
        """
        together = self.loss + loss
        epsilon += gaussian_epsilon(together, budget.delta) - gaussian_epsilon(self.loss, budget.delta)
        total = Spent(self.questions + questions, self.epsilon + epsilon, self.runs, together)
        if budget.questions is not None and total.questions > budget.questions:
            rest = max(0, budget.questions - self.questions)
            raise RunError(
                f"this node answers {budget.questions} questions of all runs together, and {rest} are left", _HINT
            )
        if budget.epsilon is not None and epsilon and total.epsilon > budget.epsilon * (1 + _ROUNDING):
            left = max(0.0, budget.epsilon - self.epsilon)
            raise RunError(
                f"this node spends an epsilon of {budget.epsilon:g} on all runs together; {left:g} is left, and this costs"
                f" {epsilon:g}",
                _HINT,
            )
        return total


_HINT = "this node's policy refuses it; its owner may allow more under [budget]"


def read_ledger(folder: Path) -> Spent:
    """What has been asked; one that cannot be read is refused: it may have said that nothing is left."""
    path = folder / FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        runs = {run: Asked(**one) for run, one in said["runs"].items()}
        found = Spent(said["questions"], said["epsilon"], runs, said.get("loss", 0.0))
        if not 0 <= found.loss < math.inf:
            raise ValueError
        if type(found.questions) is not int or found.questions < 0 or not 0 <= found.epsilon < math.inf:
            raise ValueError
        return found
    except FileNotFoundError:
        return Spent()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{path.name} of this node cannot be read", "its owner may remove it, to begin anew") from None


def write_ledger(folder: Path, spent: Spent) -> None:
    """Write it, whole or not at all."""
    replace_file(folder / FILE, json.dumps(asdict(spent)).encode())
