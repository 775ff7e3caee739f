# SPDX-License-Identifier: Apache-2.0
"""A privacy budget on Flower: nodes bound what clients add and draw noise themselves, and count what that costs them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.config import options
from coterie.engines.flower.ledger import read_ledger
from coterie.engines.flower.messages import Reply
from coterie.engines.flower.policy_file import Budget, Policy, Sums
from coterie.engines.flower.question_log import entries
from coterie.engines.flower.wire import from_records
from coterie.errors import CoterieError, RunError
from coterie.evaluate import target_ask
from coterie.methods.fit import fit
from coterie.methods.session import Session
from coterie.privacy.gaussian import gaussian_epsilon
from coterie.protocol import Ask, Noise
from coterie.studies.data.planted import planted_structure
from flower_grid import MemoryGrid, connected

pytestmark = pytest.mark.usefixtures("counted_noise")
NODES = 4


def federation(folder: Path) -> tuple[Any, MemoryGrid]:
    rows = planted_structure("clusters", 2, n_clients=200, rows=20, n_features=4, noise=0.5, seed=0)
    return connected(rows, folder, nodes=NODES)


def chosen(method: str, *, secure: bool, epsilon: float = 8.0) -> Any:
    tree: dict[str, Any] = {"method": method, "secure": secure, "baselines": False, "privacy": {"epsilon": epsilon}}
    if method not in ("shrunk", "local"):
        tree["training"] = {"rounds": 3}
    if method == "ifca":
        tree["clusters"] = {"n_clusters": 2}
    if method == "fedrep":
        tree["model"] = {"hidden": [2]}
    return options(tree)


def decided(grid: MemoryGrid, policy: Policy) -> None:
    grid.nodes = {number: replace(node, policy=policy) for number, node in grid.nodes.items()}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("method", ["fedavg", "ifca", "fedrep", "ditto", "shrunk", "local"])
def test_fits_keep_the_budgets_of_nodes_that_want_noise_in_all_that_leaves(
    method: str, secure: bool, tmp_path: Path
) -> None:
    clients, grid = federation(tmp_path)
    decided(grid, Policy(budget=Budget(epsilon=8.0, epsilon_required=True)))
    found = fit(clients, chosen(method, secure=secure))
    spent = found.extra["privacy"]["spent"]
    assert 0 < spent <= 8.0
    for node in grid.nodes.values():
        own = read_ledger(node.folder)
        assert own.epsilon == pytest.approx(spent, rel=5e-3)  # its own arithmetic, not what the server says
        assert own.epsilon <= 8.0
        assert any(line.epsilon > 0 for line in entries(node.folder)[0])


@pytest.mark.parametrize("method", ["ifca", "fedrep", "local"])
def test_nothing_but_sums_with_noise_depends_on_clients(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(*_: Any) -> bool:
        raise AssertionError("whether clients have kept something else would be told")

    monkeypatch.setattr("coterie.engines.flower.client.same", compared)
    clients, grid = federation(tmp_path)
    decided(grid, Policy(sums=Sums(clients=45), budget=Budget(epsilon_required=True)))  # clusters of nodes are smaller
    fit(clients, chosen(method, secure=False))
    replies = [from_records(message.content) for message in grid.replied]
    told = [answer for reply in replies if isinstance(reply, Reply) for answer in reply.answers]
    assert told
    assert not any(answer.left_out or answer.lengths for answer in told)


def test_a_node_stops_where_its_budget_ends(tmp_path: Path) -> None:
    clients, grid = federation(tmp_path)
    decided(grid, Policy(budget=Budget(epsilon=3.0, epsilon_required=True)))
    with (
        pytest.warns(Warning, match="this node spends an epsilon of 3 on all runs together"),
        pytest.raises(CoterieError),
    ):
        fit(clients, chosen("fedavg", secure=False))
    assert all(read_ledger(node.folder).epsilon <= 3.0 for node in grid.nodes.values())


def test_a_node_counts_by_the_noise_and_not_by_what_it_is_told(tmp_path: Path) -> None:
    clients, grid = federation(tmp_path)
    ask = target_ask(torch.zeros((), dtype=torch.float64))
    fold = {"n": ask.fold["n"]}
    cheap = replace(ask, fold=fold, noise=Noise(2.0, {"n": 1.0}, {"n": 1.0}), epsilon=1e-9)
    session = Session()
    for _ in range(2):
        session.ask(clients.train, cheap)
    for node in grid.nodes.values():
        assert read_ledger(node.folder).epsilon == pytest.approx(gaussian_epsilon(2 / 2.0**2, 1e-5))


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_noise_is_added_at_the_nodes(secure: bool, tmp_path: Path) -> None:
    clients, grid = federation(tmp_path)
    ask = target_ask(torch.zeros((), dtype=torch.float64))
    noised = replace(ask, fold={"n": ask.fold["n"]}, noise=Noise(100.0, {"n": 1.0}, {"n": 1.0}))
    session = Session(options({"secure": secure}))
    found = torch.tensor([float(session.ask(clients.train, noised)["n"]) for _ in range(60)])
    deviation = (
        100 * (NODES / 3) ** 0.5 if secure else 100 * NODES**0.5
    )  # shares with one node to spare, or all at each
    assert 0.7 * deviation < float(found.std()) < 1.35 * deviation
    assert abs(float(found.mean()) - 200) < 4 * deviation / 60**0.5  # each client counts as one, whatever its rows
    if not secure:
        reply = from_records(grid.replied[-1].content).answers[0]
        (part,) = [one for parts in reply.parts.values() for one in parts.values()]
        assert abs(float(part["sum"]) - 50) > 1e-6  # a node's own sum has noise, too


@pytest.mark.parametrize(
    ("noise", "why"),
    [
        (Noise(2.0, {}, {}), "'n' of 'target_sums' has no bound"),
        (Noise(2.0, {"n": 1.0}, {"n": 3.0}), "less noise than they are said to cost"),
        (Noise(0.0, {"n": 1.0}, {"n": 1.0}), "no noise"),
        (Noise(float("nan"), {"n": 1.0}, {"n": 1.0}), "no noise"),
        ("none", "noise is none"),
        (Noise(2.0, 3, {"n": 1.0}), "noise is none"),  # type: ignore[arg-type]
        (Noise("2", {"n": 1.0}, {"n": 1.0}), "noise is none"),  # type: ignore[arg-type]
    ],
)
def test_noise_that_hides_nobody_is_refused_by_nodes(noise: Any, why: str, tmp_path: Path) -> None:
    clients, grid = federation(tmp_path)
    ask = target_ask(torch.zeros((), dtype=torch.float64))
    asked = Ask(ask.step, ask.shared, {"n": ask.fold["n"]}, noise=noise)
    with pytest.warns(Warning, match=why), pytest.raises(RunError):
        Session().ask(clients.train, asked)
    assert all(read_ledger(node.folder).epsilon == 0 for node in grid.nodes.values())


def test_lots_are_refused_where_the_server_draws_them(tmp_path: Path) -> None:
    clients, _ = federation(tmp_path)
    how = chosen("fedavg", secure=False)
    how = how.model_copy(update={"training": how.training.model_copy(update={"participation": 0.5})})
    with pytest.raises(CoterieError, match="hides nobody from a server that draws the lots"):
        fit(clients, how)
