# SPDX-License-Identifier: Apache-2.0
"""What a node lets a server ask: what functions declare, what its policy says, and nothing that would single out rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from benchmarks.attacks.reading_rows import ATTACKS, WARDS, Refused, Victim, got, question, sums

from coterie.algorithms.ifca import assign_and_train
from coterie.algorithms.mixture_starts import REVEALED
from coterie.data.draws import First, Fold, Share
from coterie.data.remote import AtLeast, Divided, Folded, Newcomers, Part, Scaled, seen_by
from coterie.engines.flower import registry
from coterie.engines.flower.divisions import seen
from coterie.engines.flower.messages import Hello
from coterie.engines.flower.policy import check_asks
from coterie.engines.flower.policy_file import Individual, Policy, read_policy
from coterie.engines.private import reveal
from coterie.errors import ConfigError, RunError
from coterie.models import linear_regression
from coterie.protocol import Ask, ByCluster, Stack, Sum, WeightedMean, not_declared
from coterie.robust_folds import Trimmed, TrimmedByCluster


# -- what a function declares -----------------------------------------------------------------------------------------
def test_every_client_function_says_what_may_leave_a_client() -> None:
    own = [registry.step(name) for name in registry.steps() if name.startswith("coterie.")]
    assert [step.__name__ for step in own if not hasattr(step, "answers") and step is not reveal] == []


def test_another_fold_another_field_and_other_weights_are_not_declared() -> None:
    def why(**fold: Any) -> str | None:
        return not_declared(Ask(assign_and_train, {}, fold))

    assert why(update=ByCluster("share"), loss=WeightedMean("n"), moved=Sum()) is None
    assert why(update=Stack()) is not None
    assert why(loss=WeightedMean("share")) is not None
    assert why(label=Stack()) == "'label' of 'assign_and_train' does not leave a client"


def test_clients_own_updates_leave_only_where_the_policy_says_so() -> None:
    def check(fold: Any, policy: Policy) -> None:
        check_asks(question(Ask(assign_and_train, {}, {"update": fold}), range(WARDS)).questions[0], policy)

    for fold in (TrimmedByCluster("share"), Trimmed("share")):
        with pytest.raises(RunError, match="needs every client's own update"):
            check(fold, Policy())
    allowing = Policy(individual=Individual(updates=True))
    check(TrimmedByCluster("share"), allowing)
    with pytest.raises(RunError, match="leaves a client as"):  # what is a sum by cluster is no mean of all
        check(Trimmed("share"), allowing)


def test_a_private_field_that_may_be_told_is_kept_by_mixtures_alone() -> None:
    assert registry.revealed() == REVEALED
    telling = {name for name in registry.steps() if getattr(registry.step(name), "reveals", None)}
    assert telling == {
        "coterie.algorithms.em.em_step", "coterie.algorithms.fedgmm.joint_step", "coterie.algorithms.fedgrem.gradient_em",
        "coterie.algorithms.mixture_starts.fit_locally",
    }  # fmt: skip


# -- attacks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ATTACKS)
def test_a_server_that_wants_rows_is_refused(name: str) -> None:
    assert ATTACKS[name]()


def test_what_is_not_an_attack_is_answered(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    assert len(victim.asked(Hello("run")).names) == WARDS
    total = got(victim.asked(question(sums(), range(WARDS))))
    np.testing.assert_allclose(total.numpy(), victim.table[:, :2].sum(0))
    views = (Divided(Share(0.2), 1, "test", False),)
    got(victim.asked(question(sums(), range(WARDS), views=views)))


def test_three_greetings_leave_what_clients_keep_as_it_is(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    shared, fresh = {"model": linear_regression(2), "l2": 0.1}, {"theta": torch.zeros(3, dtype=torch.float64)}
    ask = Ask(
        registry.step("coterie.algorithms.fedavg.train_private"), shared, {"loss": WeightedMean("n")}, fresh=fresh
    )
    victim.asked(question(ask, range(WARDS), run="first"))
    (kept,) = (tmp_path / "state").rglob("*.safetensors")
    before = kept.read_bytes()
    for other in ("second", "third", "fourth"):
        victim.asked(Hello(other))
    assert kept.read_bytes() == before


# -- the file ---------------------------------------------------------------------------------------------------------
def test_without_a_file_one_client_is_enough_and_one_row_is_not() -> None:
    assert read_policy(None) == Policy()
    assert (Policy().sums.clients, Policy().sums.rows, Policy().individual.rows) == (1, 2, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[sums]\nrows = 0\n", "sums.rows is 0: input should be greater than or equal to 1"),
        ("[sum]\nrows = 3\n", "says 'sum', which no policy has"),
        ("[sums]\nrow = 3\n", "says 'sums.row', which no policy has"),
        ("[divisions]\nshare = 0.9\n", "divisions.share is 0.9"),
        ("sums rows", "is not valid TOML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_with_its_place(text: str | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        read_policy(file)


def test_a_node_with_a_bad_policy_answers_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sums\.rows"):
        Victim(tmp_path, policy="[sums]\nrows = -1\n").asked(Hello("run"))


def test_a_policy_is_read_anew_for_every_message(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[sums]\nrows = 41\n")
    with pytest.raises(Refused, match="over 40 rows"):
        victim.asked(question(sums(), range(WARDS)))
    (tmp_path / "policy.toml").write_text("[sums]\nrows = 40\n", encoding="utf-8")
    victim.asked(question(sums(), range(WARDS)))


def test_questions_of_a_run_are_counted_over_restarts(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[run]\nquestions = 2\n")
    for number in (1, 2):
        victim.asked(question(sums(), range(WARDS), number=number))
    with pytest.raises(Refused, match="2 questions of a run"):
        victim.asked(question(sums(), range(WARDS), number=3))
    victim.asked(question(sums(), range(WARDS), run="another"))


def test_individual_values_of_few_rows_stay(tmp_path: Path) -> None:
    victim = Victim(tmp_path, policy="[individual]\nrows = 11\n")
    own = Ask(registry.step("coterie.algorithms.copies.answer_to"), {}, {"lot": Stack()})
    with pytest.raises(Refused, match="own values would be of 10 rows"):
        victim.asked(question(own, range(WARDS)))


def test_a_cluster_of_too_few_clients_is_refused(tmp_path: Path) -> None:
    """Every client in a cluster of its own: the sums are over one client each."""
    model = linear_regression(2)
    theta = torch.zeros(2, 3, dtype=torch.float64)
    theta[1, 2] = 1.0  # some wards prefer one of the intercepts
    ask = Ask(
        registry.step("coterie.algorithms.starts.nearest_candidate"), {"model": model, "theta": theta},
        {"loss": ByCluster("share")},
    )  # fmt: skip
    few = Victim(tmp_path, policy="[sums]\nclients = 4\n")
    with pytest.raises(Refused, match="clients of a cluster, and 4 are needed"):
        few.asked(question(ask, range(WARDS)))
    few.asked(question(sums(), range(WARDS)))


@pytest.mark.parametrize(
    "view",
    [Divided(Share(0.01), 1, "x", False), Divided(Share(0.99), 1, "x", True), Divided(Fold(0, 25), 1, "folds", True),
     Divided(Share(float("nan")), 1, "x", False), Divided(First(-1), 1, "x", True), Divided(Fold(0, 0), 1, "f", True)],
)  # fmt: skip
def test_a_division_that_sets_few_rows_apart_is_refused(view: Divided, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="rows are divided by"):
        Victim(tmp_path).asked(question(sums(), range(WARDS), views=(view,)))


def test_more_folds_than_a_policy_allows_are_refused(tmp_path: Path) -> None:
    for number, said in ((25, "rows are divided by"), (1 << 40, "rows have at most 1,000 folds")):
        folds = Folded(number, 1, Part("train"), (), None, ())
        with pytest.raises(Refused, match=said):
            Victim(tmp_path).asked(question(sums(), range(WARDS), part=folds))


# -- counts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "views",
    [(), (Divided(Share(0.2), 1, "test", True),), (AtLeast(5), Divided(First(3), 2, "few", False)),
     (Newcomers(0.5, 3, False), Divided(Fold(1, 3), 0, "folds", True))],
)  # fmt: skip
@pytest.mark.parametrize("folds", [False, True])
def test_counts_are_those_of_the_rows_that_are_made(views: Any, folds: bool) -> None:
    from coterie.data.clients import Clients
    from flower_grid import plain_schema
    from helpers import federation

    rows = federation((5, 3, 7, 8, 4, 6, 9, 7)).rows
    clients = Clients(plain_schema(rows), rows)
    held = (Divided(Share(0.2), 1, "test", False), Divided(Share(0.2), 1, "test", True))
    part = Folded(5, 0, Part("train"), held[:1], Part("train"), held[1:]) if folds else Part("train")
    if folds:
        views = ()
    made, found = seen_by(clients, part, views), seen(clients, part, views)
    assert found.names.tolist() == made.names.tolist()
    assert found.counts.tolist() == made.layout.counts.tolist()
    assert found.fewest(torch.arange(0)) is None


def test_scaling_changes_no_counts_and_is_not_done_to_count(tmp_path: Path) -> None:
    from coterie.data.clients import Clients
    from flower_grid import plain_schema
    from helpers import federation

    rows = federation((5, 3)).rows
    found = seen(Clients(plain_schema(rows), rows), Part("train"), (Scaled(None),))  # type: ignore[arg-type]
    assert found.counts.tolist() == [5, 3]
