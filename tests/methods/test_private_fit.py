# SPDX-License-Identifier: Apache-2.0
"""Fits with a privacy budget: what is found, what it cost, and what is refused before anything is spent."""

from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.config import FitOptions, options
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.engines.drive import Round
from coterie.engines.worker import Worker
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.evaluate import match_labels, target_ask
from coterie.methods.base import Given
from coterie.methods.baselines import placed
from coterie.methods.fit import check, fit, train
from coterie.methods.private.check import METHODS
from coterie.methods.private.plan import delta_of
from coterie.methods.private.run import with_account
from coterie.methods.session import Session
from coterie.protocol import Ask
from coterie.registry import METHODS as EVERY
from coterie.studies.data.planted import Truth, planted_structure
from planted import planted

pytestmark = pytest.mark.usefixtures("counted_noise")
NETS = ("fedrep", "fedper", "lg-fedavg")


def clients_of(
    truth: Truth, size: int = 1, *, n_clients: int = 500, rows: int = 40, seed: int = 1, new: float = 0
) -> Clients:
    made = planted_structure(truth, size, n_clients=n_clients, rows=rows, n_features=10, noise=0.5, seed=seed)
    x, y = made.x, made.y
    assert isinstance(x, torch.Tensor)
    assert isinstance(y, torch.Tensor)
    names = made.names[made.owners]
    return from_arrays(x.numpy(), y.numpy(), names, task="regression", test_size=0.2, new_clients=new, seed=seed)


def chosen(method: str, epsilon: float | None = 8.0, **groups: Any) -> FitOptions:
    tree: dict[str, Any] = {"method": method, "privacy": {"epsilon": epsilon}, "baselines": False, **groups}
    if method not in ("shrunk", "local"):
        tree.setdefault("training", {"rounds": 5})
    if method in NETS:
        tree.setdefault("model", {"hidden": [3]})
    if method == "ifca":
        tree.setdefault("clusters", {"n_clusters": 2})
    return options(tree)


@pytest.fixture(scope="module")
def groups() -> Clients:
    return clients_of("clusters", 3)


@pytest.mark.parametrize("new", [0.0, 0.1], ids=["", "new clients"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_its_budget(method: str, secure: bool, new: float) -> None:
    clients = clients_of("clusters", 2, n_clients=200, rows=25, new=new)
    found = fit(clients, chosen(method, secure=secure))
    spent = found.extra["privacy"]
    assert 0 < spent["spent"] <= 8.0
    assert method == "local" or spent["spent"] > 7.9  # nothing is left over
    (score,) = found.scores
    assert score.train is None
    assert score.test is not None
    assert (score.new_clients is not None) == bool(new)
    assert set(found.per_client) == {"rows_train", "rows_test"}


def test_planted_groups_are_found_with_an_epsilon_of_8(groups: Clients) -> None:
    found = fit(groups, chosen("ifca", clusters={"n_clusters": 3}, training={"rounds": 10}))
    models = found.models
    labels = placed(models.model, models.theta, groups.train.scaled(models.scaling)).label
    assert match_labels(labels, torch.arange(len(labels)) % 3) > 0.95
    assert found.scores[0].test is not None
    assert found.scores[0].test < 0.6  # the noise is 0.5, and one model for all has about 1
    assert all(abs(size - 167) < 40 for size in found.models.sizes)
    assert found.models.placed is None


def test_a_fit_is_not_repeatable_and_follows_from_no_seed(groups: Clients) -> None:
    one, two = (fit(groups, chosen("fedavg")).models.theta for _ in range(2))
    assert not torch.equal(one, two)


def test_lots_hide_who_takes_part(groups: Clients) -> None:
    all_, some = (
        fit(groups, chosen("fedavg", training={"rounds": 20, "participation": share})) for share in (1.0, 0.3)
    )
    for found, share in ((all_, 1.0), (some, 0.3)):
        (question,) = [one for one in found.extra["privacy"]["questions"] if one["purpose"] == "training"]
        assert question["sampling"] == share
        assert question["times"] == 20
        assert found.extra["privacy"]["spent"] <= 8.0
    numbers = {done.participants for done in some.rounds if done.participants}
    assert len(numbers) > 1  # not a fixed number of them
    assert all(90 < n < 210 for n in numbers)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("method", ["fedavg", "ifca", "ditto"])
def test_a_run_that_goes_on_spends_nothing_twice(groups: Clients, method: str, tmp_path: Path) -> None:
    stopped = 0

    def watch(phase: str, done: Round, total: int) -> None:
        nonlocal stopped
        stopped += phase == "fit"
        if stopped == 4:
            raise KilledError

    with pytest.raises(KilledError):
        fit(groups, chosen(method), folder=tmp_path, watch=watch)
    found = fit(groups, chosen(method), folder=tmp_path)
    spent = {one["purpose"]: one["times"] for one in found.extra["privacy"]["questions"]}
    assert spent["training"] == 5
    assert found.extra["privacy"]["spent"] <= 8.0
    again = fit(groups, chosen(method), folder=tmp_path)  # only read, and asked for scores that it had
    assert again.extra["privacy"] == found.extra["privacy"]
    assert again.scores == found.scores


def test_nothing_is_asked_without_noise(groups: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []
    answer = Worker.answer

    def overheard(self: Worker, asks: Any, *rest: Any) -> Any:
        asked.extend(asks.values())
        return answer(self, asks, *rest)

    monkeypatch.setattr(Worker, "answer", overheard)
    fit(groups, chosen("ifca"))
    told = [ask for ask in asked if ask.fold]
    assert told
    assert all(ask.noise is not None and ask.epsilon is not None for ask in told)


def test_a_question_that_nobody_planned_is_refused(groups: Clients) -> None:
    session = Session(chosen("fedavg"))
    found = train(groups, session)
    assert found.extra["privacy"]["spent"] <= 8
    private = with_account(session, groups)
    with pytest.raises(RunError, match="would be answered without noise"):
        private.ask(groups.train, target_ask(torch.zeros((), dtype=torch.float64)))
    with pytest.raises(RunError, match="what clients keep would be told"):
        private.revealed([(groups.train, [0])], ["theta"])


def test_columns_in_any_units_are_scaled() -> None:
    made = planted_structure("global", n_clients=400, rows=30, n_features=4, noise=0.5, seed=3)
    assert isinstance(made.x, torch.Tensor)
    assert isinstance(made.y, torch.Tensor)
    factor = torch.tensor([1e-4, 1.0, 3e5, 20.0], dtype=torch.float64)
    x = made.x * factor + torch.tensor([0.0, 2.0, 1e5, 0.0])
    clients = from_arrays(x.numpy(), 1000 * made.y.numpy() + 50, made.names[made.owners], task="regression", seed=0)
    found = fit(clients, chosen("fedavg"))
    torch.testing.assert_close(
        found.models.scaling.scale / factor, torch.ones(4, dtype=torch.float64), rtol=0.3, atol=0
    )
    assert float(found.models.scaling.mean[2]) == pytest.approx(1e5, rel=0.5)


# -- what is refused --------------------------------------------------------------------------------------------------
def refusal(how: FitOptions, clients: Clients | None = None) -> CoterieError:
    with pytest.raises(CoterieError) as error:
        check(clients or planted(60, 24).clients(test_size=0.25, seed=0), how, Given())
    return error.value


@pytest.mark.parametrize("method", [name for name in EVERY if name not in METHODS])
def test_methods_without_a_private_form_are_refused(method: str) -> None:
    said = refusal(options({"method": method, "privacy": {"epsilon": 8.0}}))
    assert f"{method} asks clients what noise cannot hide" in said.message


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (chosen("fedavg", training={"robust": "median"}), "training.robust=median"),
        (chosen("fedavg", predictions={"coverage": 0.9}), "asked without noise"),
        (chosen("fedavg", model={"degree": 2}), "products of features"),
        (chosen("fedavg", training={"participation": 0.1}), "6 clients on average"),
        (chosen("fedavg", training={"participation": 0.6}, secure=True), "hides nobody from a server"),
        (chosen("ifca", clusters={"n_clusters": 2, "n_init": 3}), "starts are compared"),
        (chosen("ifca", clusters={"n_clusters": 2, "init": "balanced"}), "starts are compared"),
        (chosen("ifca", clusters={"n_clusters": 2, "soft": True}), "soft labels"),
        (chosen("shrunk", prior={"spread": "full"}), "prior.spread=full"),
        (chosen("ditto", personal={"clock": "exponential"}), "times of clients"),
        (options({"privacy": {"delta": 1e-6}}), "there is no budget"),
    ],
)
def test_what_no_noise_hides_is_refused(how: FitOptions, why: str) -> None:
    assert why in refusal(how).message


def test_a_budget_of_which_nothing_comes_is_refused_before_it_is_spent() -> None:
    said = refusal(chosen("fedavg", 0.1), clients_of("global", n_clients=50))
    assert "times as long as all that clients can say" in said.message
    assert "it takes" in str(said.hint)
    assert "clients, an epsilon of" in str(said.hint)
    check(clients_of("global", n_clients=50), chosen("fedavg", privacy={"epsilon": 0.1, "anyway": True}), Given())


def test_what_the_refusal_says_would_be_enough_is_enough() -> None:
    clients = clients_of("global", n_clients=20)
    said = str(refusal(chosen("fedavg", 0.2), clients).hint)
    enough = float(said.partition("an epsilon of ")[2].partition(",")[0])
    check(clients, chosen("fedavg", enough + 0.1), Given())
    assert isinstance(refusal(chosen("fedavg", enough - 0.2), clients), ConfigError)


@pytest.mark.parametrize(("n_clients", "delta"), [(50, 1e-5), (500, 1e-5), (20_000, 5e-6)])
def test_delta_is_small_beside_one_over_the_clients(n_clients: int, delta: float) -> None:
    clients = clients_of("global", n_clients=50)

    class Many:
        n_clients: int

    many = Many()
    many.n_clients = n_clients
    assert delta_of(many, chosen("fedavg")) == pytest.approx(delta)  # type: ignore[arg-type]
    assert delta_of(clients, chosen("fedavg", privacy={"epsilon": 1.0, "delta": 1e-3})) == 1e-3


def test_estimators_take_a_budget(groups: Clients) -> None:
    model = coterie.FedAvg(epsilon=8, delta=1e-6, rounds=5).fit(groups)
    assert model.fitted_.extra["privacy"]["delta"] == 1e-6
    assert model.get_params()["epsilon"] == 8
