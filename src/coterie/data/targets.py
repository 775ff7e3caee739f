# SPDX-License-Identifier: Apache-2.0
"""Whether targets are what their outcome says: counts, or positive numbers; and of whom they are not."""

from coterie.data.ragged import Ragged
from coterie.data.schema import Schema
from coterie.errors import DataError
from coterie.outcome_names import COUNTS, POSITIVE, TIMES, task_of

__all__ = ["check_target"]


def check_target(rows: Ragged, schema: Schema) -> None:
    """Refuse targets that the schema's outcome cannot have; rows on other machines are checked where they are."""
    outcome = schema.outcome
    if outcome is None or rows.y is None or type(rows) is not Ragged:
        return
    if schema.task != task_of(outcome):
        raise DataError(
            f"target '{schema.target}' has {'classes' if schema.task == 'classification' else 'numbers'}, and outcome "
            f"{outcome} needs {'numbers' if task_of(outcome) == 'regression' else 'classes'}",
            f"read it with outcome='{outcome}', or --task {task_of(outcome)}",
        )
    if outcome in TIMES and schema.event is None:
        raise DataError(
            f"outcome {outcome} needs to know whether the event happened",
            "name its column with --event COLUMN, or pass y with two columns: times and events",
        )
    if outcome in COUNTS:
        needs, other = "counts: whole numbers, none below 0", "gamma and log-normal are for positive numbers"
    elif outcome in POSITIVE:
        needs, other = "numbers above 0", "poisson and negative-binomial are for counts, also of 0"
    else:
        return
    for block in rows.blocks():
        y = block.target
        wrong = ((y < 0) | (y != y.floor()) if outcome in COUNTS else y <= 0) & block.real  # [C, N]
        if bool(wrong.any()):
            client, row = (int(place) for place in wrong.nonzero()[0])
            name = rows.names[int(block.ids[client])]
            raise DataError(
                f"target '{schema.target}' is {float(y[client, row]):g} in a row of client '{name}', and outcome {outcome} "
                f"needs {needs}",
                f"choose another outcome: {other}",
            )
