# SPDX-License-Identifier: Apache-2.0
"""A server tries to read rows of a node with nothing but registered client functions, chosen with care.

The node has 40 rows of 4 wards, with a column that numbers the rows. In the end of every attack its answer is compared with
the rows, so that a success is seen.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

import coterie.engines.flower.catalogue  # noqa: F401  registers all steps
from benchmarks.attacks import AttackSucceededError
from coterie.algorithms.fedavg import train_private, train_shared
from coterie.algorithms.preparation import column_sums
from coterie.data.draws import First, Share
from coterie.data.draws import Fold as FoldRule
from coterie.data.remote import Divided, Folded, Part, View
from coterie.data.schema import Schema
from coterie.engines.flower.client import answered
from coterie.engines.flower.messages import Batch, Hello, Introduction, Question, Refusal, Reply, State
from coterie.engines.flower.node_data import node_data
from coterie.engines.flower.wire import from_records, to_records
from coterie.engines.private import reveal
from coterie.local import Training
from coterie.models import linear_regression
from coterie.protocol import Ask, Stack, Sum, WeightedMean

__all__ = ["ATTACKS"]

ROWS, WARDS = 40, 4
ALL, SUM = Part("train"), Sum()


class Victim:
    """A node with a table of its own, as a server reaches it."""

    def __init__(self, folder: Path, options: Mapping[str, Any] = {}, policy: str = "") -> None:
        draw = np.random.default_rng(0)
        self.table = draw.normal(size=(ROWS, 3)).round(6)  # a, b, y
        lines = ["row,ward,a,b,y"]
        lines += [f"r{i:02d},w{i % WARDS},{a},{b},{y}" for i, (a, b, y) in enumerate(self.table)]
        (folder / "rows.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        config: dict[str, Any] = {"name": "ward-7", "data": str(folder / "rows.csv"), "state": str(folder / "state")}
        config |= {"client": "ward", "target": "y"}
        if policy:
            (folder / "policy.toml").write_text(policy, encoding="utf-8")
            config["policy"] = str(folder / "policy.toml")
        said = {"data": {"exclude": ["row"], **options.get("data", {})}}
        told: Any = {"options": json.dumps({**options, **said})}
        self.context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config=told)

    def asked(self, request: Any) -> Any:
        """What the node says to a request."""
        reply = from_records(answered(to_records(request), node_data(self.context)))
        if isinstance(reply, Refusal):
            raise Refused(reply.why)
        return reply

    def rows_in(self, numbers: torch.Tensor) -> int:
        """How many of the node's rows can be read off numbers [..., D], whatever else is among them."""
        found = numbers.reshape(-1, numbers.shape[-1]).double().numpy()
        own = self.table[:, : found.shape[1]]
        return int(sum(np.isclose(found, row, atol=1e-6).all(1).any() for row in own))


class Refused(Exception):  # noqa: N818  it is what is hoped for
    """The node's refusal."""


def question(asks: Ask, ids: Any, *, part: Any = ALL, views: tuple[View, ...] = (), schema: str | None = None,
             run: str = "run", number: int = 1) -> Batch:  # fmt: skip
    """A message with one question."""
    state = State("fit", 0, "fit", number, 0)
    return Batch((Question(run, part, views, schema, torch.as_tensor(ids), {0: asks}, state),))


def sums(fold: Any = SUM, d: int = 2) -> Ask:
    """The question for sums of all columns."""
    zero = torch.zeros((), dtype=torch.float64)
    return Ask(column_sums, {"mean": torch.zeros(d, dtype=torch.float64), "y_mean": zero, "real": True}, {"sum": fold})


def got(reply: Any, field: str = "sum") -> torch.Tensor:
    """The numbers of a reply."""
    assert isinstance(reply, Reply)
    return next(iter(reply.answers[0].parts[0][field].values()))[0]


def attack(run: Callable[[Victim], str], **how: Any) -> Callable[[], str]:
    """Run it on a fresh victim: the refusal, or what was got."""

    def tried() -> str:
        with tempfile.TemporaryDirectory() as place:
            try:
                found = run(Victim(Path(place), **how))
            except Refused as refusal:
                return str(refusal)
        raise AttackSucceededError(found)

    return tried


# -- attacks ----------------------------------------------------------------------------------------------------------
def audit(victim: Victim) -> str:
    """All at once: every row a client, each client's sums by themselves."""
    met = victim.asked(Hello("run"))
    assert isinstance(met, Introduction)
    numbers = got(victim.asked(question(sums(Stack()), torch.arange(len(met.names)))))
    return f"{victim.rows_in(numbers)} of {ROWS} rows in one question"


def another_fold(victim: Victim) -> str:
    """Sums of columns client by client."""
    return f"sums of {len(got(victim.asked(question(sums(Stack()), range(WARDS)))))} wards, one by one"


def another_field(victim: Victim) -> str:
    """Let clients train models that stay with them, and ask for a field that only weighs their loss."""
    ask = replace(private_training(), fold={"n": Stack()})
    return f"row counts {got(victim.asked(question(ask, range(WARDS))), 'n').tolist()}"


def private_training() -> Ask:
    """The question of local models: each stays with its client."""
    shared, fresh = {"model": linear_regression(2), "l2": 0.1}, {"theta": torch.zeros(3, dtype=torch.float64)}
    return Ask(train_private, shared, {"loss": WeightedMean("n")}, fresh=fresh)


def rows_as_clients(victim: Victim) -> str:
    """Name the column of row numbers as the client column."""
    return f"{len(victim.asked(Hello('run')).names)} clients with a row each"


def another_schema(victim: Victim) -> str:
    """Let the node be introduced properly, then read its table by another schema."""
    own = Schema.model_validate_json(victim.asked(Hello("run")).schema)
    other = own.model_copy(update={"client": "row"}).model_dump_json()
    numbers = torch.stack([got(victim.asked(question(sums(), [i], schema=other, number=i + 1))) for i in range(ROWS)])
    return f"{victim.rows_in(numbers)} of {ROWS} rows"


def one_row_left(victim: Victim) -> str:
    """Hold out nearly all rows of a ward, so that a sum is over one row."""
    views = (Divided(Share(0.9), 1, "x", False),)
    numbers = torch.stack([got(victim.asked(question(sums(), [i], views=views))) for i in range(WARDS)])
    return f"{victim.rows_in(numbers)} rows in {WARDS} questions"


def one_row_less(victim: Victim) -> str:
    """Sum over all rows, and over all but one: the difference is a row."""
    views = (Divided(First(1), 1, "x", False),)
    whole, less = got(victim.asked(question(sums(), [0]))), got(victim.asked(question(sums(), [0], views=views)))
    return f"{victim.rows_in(whole - less)} row in two questions"


def a_fold_for_every_row(victim: Victim) -> str:
    """Number rows by as many folds as there are rows."""
    views = (Divided(FoldRule(0, 10), 1, "folds", False),)
    whole, less = got(victim.asked(question(sums(), [0]))), got(victim.asked(question(sums(), [0], views=views)))
    folds = Folded(10, 1, Part("train"), (), None, ())
    victim.asked(question(sums(), [0], part=folds))
    return f"{victim.rows_in(whole - less)} row in two questions, and folds of one row each"


def random_halves(victim: Victim) -> str:
    """Sum over random halves of all rows, as often as there are rows: a linear system for the rows."""
    from coterie.data.readers import read

    path = str(victim.context.node_config["data"])
    rows = read(path, client="ward", target="y", exclude=["row"], test_size=0.0).train
    seen, sides = [], []  # the server knows names and counts, and so which rows are drawn
    for seed in range(ROWS + 10):
        half = Divided(Share(0.5), seed, "x", True)
        sides.append(np.isin(np.arange(ROWS), _drawn(rows, half)))
        seen.append(got(victim.asked(question(sums(), range(WARDS), views=(half,), number=seed + 1))).numpy())
    for ward in range(WARDS):  # every half has five rows of each ward, so halves alone leave something open
        sides.append(rows.owners == ward)
        seen.append(got(victim.asked(question(sums(), [ward]))).numpy())
    solved = np.linalg.lstsq(np.array(sides, dtype=float), np.array(seen), rcond=None)[0]
    return f"{victim.rows_in(torch.from_numpy(solved))} of {ROWS} rows in {len(seen)} questions"


def _drawn(rows: Any, view: Divided) -> np.ndarray:
    """Which rows a division takes, by their places in storage."""
    ranks = rows._ranks(view.seed, view.purpose)
    return np.flatnonzero(view.rule.takes(ranks, rows.layout.counts[rows.owners]))


def batches_of_a_row(victim: Victim) -> str:
    """Let a ward take one step with one row: from zero a linear model moves by the row, times its target."""
    model = linear_regression(2)
    shared = {
        "model": model, "theta": torch.zeros(3, dtype=torch.float64), "step_size": torch.tensor(1.0, dtype=torch.float64),
        "key": torch.tensor(3), "training": Training(steps=1, batch_size=1), "by_rows": False,
    }  # fmt: skip
    ask = Ask(train_shared, shared, {"update": WeightedMean("weight")})
    moved = got(
        victim.asked(
            question(ask, [0]),
        ),
        "update",
    ).double()
    return f"{victim.rows_in(moved[:2] / moved[2])} row in one question"


def values_as_levels(victim: Victim) -> str:
    """Let a column of numbers be categories: nodes tell their levels."""
    columns = json.loads(victim.asked(Hello("run")).schema)["columns"]
    return f"{max(len(column.get('levels') or ()) for column in columns)} values of a column"


def values_as_classes(victim: Victim) -> str:
    """Let a target of real numbers be classes: nodes tell their classes."""
    return f"{len(json.loads(victim.asked(Hello('run')).schema)['classes'])} values of the target"


def private_models(victim: Victim) -> str:
    """Let clients fit models that stay with them, and then ask for these."""
    train = private_training()
    victim.asked(question(train, range(WARDS)))
    told = Ask(reveal, {}, {"theta": Stack()}, fresh=train.fresh)
    kept = State("fit", 1, "fit", 2, 0)
    asked = Question("run", Part("train"), (), None, torch.arange(WARDS), {0: told}, kept)
    return f"the models of {len(got(victim.asked(Batch((asked,))), 'theta'))} wards"


def one_client_four_times(victim: Victim) -> str:
    """Where a sum needs four clients, name one four times."""
    return f"four times the sum of one ward: {got(victim.asked(question(sums(), [0, 0, 0, 0])))[0]:.3f}"


def too_few_clients(victim: Victim) -> str:
    """Ask one client of a node whose sums need two."""
    return f"the sum of one ward: {got(victim.asked(question(sums(), [1])))[0]:.3f}"


FEW = "[sums]\nclients = 2\n"
AUDIT = {"data": {"client": "row", "target": "y", "exclude": ["ward"]}}

ATTACKS: dict[str, Callable[[], str]] = {
    "audit": attack(audit, options=AUDIT),
    "rows-as-clients": attack(rows_as_clients, options=AUDIT),
    "another-target": attack(rows_as_clients, options={"data": {"target": "a"}}),
    "another-schema": attack(another_schema),
    "another-fold": attack(another_fold),
    "another-field": attack(another_field),
    "one-row-left": attack(one_row_left),
    "one-row-less": attack(one_row_less),
    "a-fold-for-every-row": attack(a_fold_for_every_row),
    "random-halves": attack(random_halves),
    "batches-of-a-row": attack(batches_of_a_row),
    "values-as-levels": attack(values_as_levels, options={"data": {"categorical": ["a"]}}),
    "values-as-classes": attack(values_as_classes, options={"data": {"task": "classification"}}),
    "private-models": attack(private_models),
    "one-client-four-times": attack(one_client_four_times, policy="[sums]\nclients = 4\n"),
    "too-few-clients": attack(too_few_clients, policy=FEW),
}
