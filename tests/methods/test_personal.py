# SPDX-License-Identifier: Apache-2.0
"""Personal models are measured with each client's own part, and measuring changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie import keys
from coterie.algorithms.fedrep import fedrep
from coterie.algorithms.lg_fedavg import lg_fedavg
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError, DataError
from coterie.evaluate import Measured
from coterie.local import Training, train
from coterie.methods.personal.measure import (
    Distribution,
    Fit,
    PersonalMeasured,
    distribution,
    measure_fine_tuned,
    measure_personal,
    personal_start,
)
from coterie.models import Dense, Model, Network, split
from helpers import Only, Program, overhear, ragged, spying

NET = Dense((3, 4, 3), "cross_entropy")  # float64, so that tolerances can be tight
DEEP = Dense((3, 4, 4, 3), "cross_entropy")
HEAD = ("1",)
BODY = ("0",)
HOW = Training(epochs=5, batch_size=4)


def twin(dense: Dense) -> Network:
    """The same network as a torch module, whose layers are named otherwise: 0 and 2."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    return Network(module, dense.loss)


def clients(counts: tuple[int, ...] = (6, 0, 9, 4, 9), *, seed: int = 0) -> Ragged:
    """Classes are which of three features is largest; client i calls class k by the name k + i mod 3."""
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(n, 3, generator=draw, dtype=torch.float64) for n in counts]
    return ragged(xs, [(x.argmax(1) + i) % 3 for i, x in enumerate(xs)])


def parameters(model: Model, n: int, seed: int = 1) -> Tensor:
    return model.initial(n, torch.Generator().manual_seed(seed))


def given(model: Model = NET, personal: tuple[str, ...] = HEAD) -> dict[str, Any]:
    """Five clients, of which the first, third and fourth have a personal part."""
    parts = split(model, personal)
    theta, start = parts.parts(parameters(model, 1)[0])
    own = parts.parts(parameters(model, 5, seed=2))[1].clone()
    visits = torch.tensor([2, 0, 1, 5, 0])
    own[visits == 0] = start
    return {
        "model": model,
        "theta": theta.clone(),
        "private": {"personal": own, "visits": visits},
        "personal": personal,
        "rows": clients((3, 4, 0, 5, 2), seed=1),
        "train_rows": clients(),
        "fit": Fit(start.clone(), 0.3, HOW),
    }


def measure(**settings: Any) -> PersonalMeasured:
    return measure_personal(settings.pop("model"), settings.pop("theta"), settings.pop("private"), **settings)


# -- what is measured -------------------------------------------------------------------------------------------------
def test_measuring_matches_hand_calculation() -> None:
    """One hidden unit, no biases: y is predicted by w relu(v x), with v = 1 shared and w personal."""
    model = Dense((1, 1, 1), "squared", intercept=False)
    column = [torch.tensor([[value]], dtype=torch.float64) for value in (1.0, 1.0, 2.0, 2.0)]
    y = [torch.tensor([value], dtype=torch.float64) for value in (9.0, 3.0, 5.0, 0.0)]
    private = {
        "personal": torch.tensor([[2.0], [7.0]], dtype=torch.float64),
        "visits": torch.tensor([1, 0]),
    }
    found = measure_personal(
        model, torch.ones(1, dtype=torch.float64), private | {"personal": private["personal"].clone()},
        personal=HEAD, rows=ragged(column[2:], y[2:]), train_rows=ragged(column[:2], y[:2]),
        fit=Fit(torch.ones(1, dtype=torch.float64), 0.1, Training(steps=1)),
    )  # fmt: skip
    # The first has w = 2: (2 * 2 - 5)^2 = 1. The second was never visited; it goes on from what it holds, w = 7, by
    # 0.1 * 2 (7 - 3) = 0.8 to 6.2: (6.2 * 2 - 0)^2 = 153.76.
    assert found.loss.tolist() == pytest.approx([1.0, 153.76], abs=1e-12)
    assert found.metric.tolist() == found.loss.tolist()
    assert found.fitted.tolist() == [False, True]
    new = measure_personal(
        model, torch.ones(1, dtype=torch.float64), None,
        personal=HEAD, rows=ragged(column[2:], y[2:]), train_rows=ragged(column[:2], y[:2]),
        fit=Fit(torch.ones(1, dtype=torch.float64), 0.1, Training(steps=1)),
    )  # fmt: skip
    # Nobody has a personal part: from w = 1 to 1 + 0.2 * 8 = 2.6 and 1 + 0.2 * 2 = 1.4.
    assert new.loss.tolist() == pytest.approx([0.2**2, 2.8**2], abs=1e-12)
    assert new.fitted.tolist() == [True, True]


def test_every_client_is_judged_with_its_own_part_and_not_with_an_average() -> None:
    """Two clients with opposite heads name opposite classes and are right; with the mean of their heads nobody would be."""
    model = Dense((1, 2, 2), "cross_entropy", intercept=False)
    theta = torch.tensor([1.0, -1.0], dtype=torch.float64)  # hidden: the positive and the negative part of x
    own = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[1.0], [-1.0], [2.0]], dtype=torch.float64)
    rows = ragged([x, x], [torch.tensor([0, 1, 0]), torch.tensor([1, 0, 1])])
    found = measure_personal(
        model, theta, {"personal": own, "visits": torch.tensor([1, 1])}, personal=HEAD, rows=rows,
        train_rows=rows, fit=Fit(own[0], 0.1, HOW),
    )  # fmt: skip
    assert found.metric.tolist() == [1.0, 1.0]
    assert not bool(found.fitted.any())


@pytest.mark.parametrize(("model", "personal"), [(NET, HEAD), (NET, BODY), (DEEP, ("1",))])
def test_who_was_never_visited_fits_the_personal_part_only(model: Model, personal: tuple[str, ...]) -> None:
    settings = given(model, personal)
    parts = split(model, personal)
    found = measure(**settings)
    assert found.fitted.tolist() == [False, True, False, False, True]
    held = settings["private"]["personal"]
    for i, rows in enumerate((3, 4, 0, 5, 2)):
        own = held[i]
        if bool(found.fitted[i]):
            whole = parts.join(settings["theta"], own)
            moved = train(
                model, whole[None, None], settings["train_rows"].client(i), torch.tensor([0.3], dtype=torch.float64), HOW,
                keys.key(0, "fit personal")[None], parts.moving("personal"),
            )[0, 0]  # fmt: skip
            assert torch.equal(parts.parts(moved)[0], settings["theta"])
            own = parts.parts(moved)[1]
        data = settings["rows"].client(i)
        scores = model.own_outputs(parts.join(settings["theta"], own)[None], data.x)[0]
        assert int(found.rows[i]) == rows
        if rows:
            loss = torch.nn.functional.cross_entropy(scores, data.target[0])
            torch.testing.assert_close(found.loss[i], loss, atol=1e-12, rtol=1e-12)
            assert float(found.metric[i]) == pytest.approx(float((scores.argmax(1) == data.target[0]).double().mean()))


def test_who_was_visited_does_not_fit_again() -> None:
    settings = given()
    slow, fast = (measure(**settings | {"fit": replace(settings["fit"], step_size=s)}) for s in (0.1, 1.0))
    visited = settings["private"]["visits"] > 0
    assert torch.equal(slow.loss[visited], fast.loss[visited])
    assert not torch.equal(slow.loss[~visited], fast.loss[~visited])


def test_a_new_client_gets_what_an_unvisited_one_with_its_name_and_rows_gets() -> None:
    settings = given()
    nobody = settings | {"private": settings["private"] | {"visits": torch.zeros(5, dtype=torch.int64)}}
    nobody["private"]["personal"] = settings["fit"].start.repeat(5, 1)
    for none in (None, {}):
        assert torch.equal(measure(**settings | {"private": none}).loss, measure(**nobody).loss)


@pytest.mark.parametrize(("personal", "there"), [(HEAD, ("2",)), (BODY, ("0",))])
def test_a_torch_module_is_measured_like_its_dense_twin(personal: tuple[str, ...], there: tuple[str, ...]) -> None:
    settings = given(personal=personal)
    dense = measure(**settings)
    module = measure(**settings | {"model": twin(NET), "personal": there})
    torch.testing.assert_close(dense.loss, module.loss, atol=1e-12, rtol=1e-12)
    assert torch.equal(dense.metric, module.metric)


def test_augmentation_is_for_training_and_not_for_measuring() -> None:
    settings = given(twin(NET), ("2",))
    settings["private"]["visits"] += 1  # nobody fits
    augmented = replace(settings["model"], augment=lambda x, each: x + keys.uniform(each, 3))
    assert torch.equal(measure(**settings).loss, measure(**settings | {"model": augmented}).loss)


@pytest.mark.parametrize(
    ("model", "personal"), [(NET, HEAD), (NET, BODY), (DEEP, ("1",)), (twin(NET), ("2",)), (twin(NET), ("0",))]
)
@pytest.mark.parametrize("side", ["rows", "train_rows"])
def test_nobody_needs_rows(model: Model, personal: tuple[str, ...], side: str) -> None:
    settings = given(model, personal) | {side: clients((0,) * 5)}
    found = measure(**settings)
    assert found.rows.tolist() == settings["rows"].counts.tolist()
    assert found.fitted.tolist() == [False, True, False, False, True]
    start = settings["private"] | {"visits": torch.ones(5, dtype=torch.int64)}
    if side == "train_rows":  # there is nothing to fit to: they are judged with what they start from
        assert torch.equal(found.loss, measure(**settings | {"private": start}).loss)


def test_fitted_heads_serve_new_clients() -> None:
    """With a representation that tells the features apart, fifty rows are enough to learn what a client calls them."""
    model = Dense((3, 6, 3), "cross_entropy", intercept=False)
    theta = torch.cat([torch.eye(3), -torch.eye(3)]).double().flatten()  # positive and negative parts
    start = torch.zeros(18, dtype=torch.float64)
    found = measure_personal(
        model, theta, None, personal=HEAD, rows=clients((200,) * 6, seed=1), train_rows=clients((50,) * 6),
        fit=Fit(start, 0.5, Training(epochs=20, batch_size=10)),
    )  # fmt: skip
    assert distribution(model, found).worst_decile > 0.8  # a third by chance


# -- measuring changes nothing ----------------------------------------------------------------------------------------
def tensors(settings: dict[str, Any]) -> list[Tensor]:
    """All that a measurement is given, and the state of torch's own randomness."""
    model = settings["model"]
    own = list(model.module.parameters()) if isinstance(model, Network) else []
    rows = [value for side in ("rows", "train_rows") for value in (settings[side].x, settings[side].y)]
    private = settings["private"] or {}
    return [settings["theta"], settings["fit"].start, *private.values(), *rows, *own, torch.get_rng_state()]


@pytest.mark.parametrize("visited", ["some", "all", "none"])
@pytest.mark.parametrize(("model", "personal"), [(NET, HEAD), (NET, BODY), (twin(NET), ("2",)), (twin(NET), ("0",))])
def test_measuring_leaves_every_tensor_as_it_is(model: Model, personal: tuple[str, ...], visited: str) -> None:
    settings = given(model, personal)
    if visited == "none":
        settings["private"] = None
    elif visited == "all":
        settings["private"]["visits"] += 1
    before = [value.detach().clone() for value in tensors(settings)]
    first = measure(**settings)
    for value, was in zip(tensors(settings), before, strict=True):
        assert torch.equal(value, was)
    second = measure(**settings)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.fitted, second.fitted)  # who was not visited still is not


PROGRAMS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "fedrep": (lambda state: fedrep(state, model=NET, seed=0, rounds=4, step_size=0.3, head=HOW, body=HOW), HEAD),
    "lg-fedavg": (
        lambda state: lg_fedavg(state, model=NET, seed=0, rounds=4, step_size=0.3, training=HOW, personal=BODY), BODY,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "personal"), PROGRAMS.values(), ids=PROGRAMS)
def test_training_goes_on_as_if_nobody_had_measured(program: Program, personal: tuple[str, ...]) -> None:
    """Clients are measured after every round of a run in which two of them are never visited."""
    settings = given(personal=personal)
    seen: list[PersonalMeasured] = []

    def trained(measured: bool) -> tuple[Tensor, dict[str, Tensor]]:
        engine, states = InProcess(settings["train_rows"], participation=Only((0, 2, 3))), []

        def watch(done: Any) -> None:
            if measured:
                private = engine.worker.private.get(0)  # nothing before the first round
                seen.append(measure(**settings | {"theta": states[-1].theta, "private": private}))

        engine.run([spying(program, states)], watch=watch)
        return states[-1].theta, engine.worker.private[0]

    theta, private = trained(False)
    measured_theta, measured_private = trained(True)
    assert torch.equal(theta, measured_theta)
    assert private.keys() == measured_private.keys()
    for name, value in private.items():
        assert torch.equal(value, measured_private[name])
    assert seen[0].fitted.tolist() == [True] * 5
    assert [found.fitted.tolist() for found in seen[1:]] == [[False, True, False, False, True]] * 4
    assert not torch.equal(seen[1].loss, seen[-1].loss)
    assert torch.equal(private["personal"][[1, 4]], personal_start(NET, personal, seed=0).expand(2, -1))


def test_fine_tuning_is_measured_on_copies_of_the_common_model() -> None:
    settings = given()
    theta, how = parameters(NET, 1)[0], {"step_size": 0.3, "training": HOW}
    rows = {side: settings[side] for side in ("rows", "train_rows")}
    before = [value.clone() for value in (theta, *tensors(settings))]
    found = measure_fine_tuned(NET, theta, **rows, **how)
    for value, was in zip((theta, *tensors(settings)), before, strict=True):
        assert torch.equal(value, was)
    data = settings["train_rows"].client(3)
    key = keys.key(0, "fine-tuning")[None]
    tuned = train(NET, theta[None, None], data, torch.tensor([0.3], dtype=torch.float64), HOW, key)[0]
    test = settings["rows"].client(3)
    loss = torch.nn.functional.cross_entropy(NET.own_outputs(tuned, test.x)[0], test.target[0])
    torch.testing.assert_close(found.loss[3], loss, atol=1e-12, rtol=1e-12)
    assert found.rows.tolist() == [3, 4, 0, 5, 2]
    with pytest.raises(DataError, match="belong to different clients"):
        measure_fine_tuned(NET, theta, rows=clients((1, 2)), train_rows=settings["train_rows"], **how)


def test_personal_parts_stay_with_clients_while_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = given()
    heard = overhear(monkeypatch)
    measure(**settings)
    assert [set(answer.parts) for _, answer in heard] == [set(), {"loss", "metric", "rows"}]
    size = settings["private"]["personal"].shape[1]
    for _, answer in heard:
        for part in answer.parts.values():
            assert all(value.numel() < size for value in part.values())


# -- over clients -----------------------------------------------------------------------------------------------------
def test_distribution_matches_hand_calculation() -> None:
    values = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2, 0.7, 0.6, 0.4, 0.8, 1.0, 0.0, 123.0])
    rows = torch.tensor([1, 20, 3, 1, 1, 1, 1, 1, 1, 1, 1, 0])  # the last client has none
    found = Distribution.of(values, rows)
    # Eleven clients: a tenth of them is rounded up to two.
    assert found.mean == pytest.approx(0.5)
    assert found.median == pytest.approx(0.5)
    assert found.worst_decile == pytest.approx((0.0 + 0.1) / 2)
    assert found.best_decile == pytest.approx((1.0 + 0.9) / 2)
    assert found.values[:11].tolist() == pytest.approx(values[:11].tolist())
    assert bool(found.values[11].isnan())
    errors = Distribution.of(values, rows, larger_is_better=False)
    assert errors.worst_decile == pytest.approx(0.95)
    assert errors.best_decile == pytest.approx(0.05)


def test_one_client_is_its_own_decile() -> None:
    found = Distribution.of(torch.tensor([0.25]), torch.tensor([4]))
    assert (found.mean, found.median, found.worst_decile, found.best_decile) == (0.25, 0.25, 0.25, 0.25)


def test_a_model_that_diverged_is_the_worst() -> None:
    found = Distribution.of(torch.tensor([1.0, torch.nan, 2.0]), torch.ones(3), larger_is_better=False)
    assert found.worst_decile == torch.inf
    assert found.best_decile == 1.0
    assert found.median == 2.0
    assert Distribution.of(torch.tensor([1.0, torch.inf]), torch.ones(2), larger_is_better=False).mean == torch.inf


def test_accuracy_is_better_when_larger_and_error_when_smaller() -> None:
    measured = Measured(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.9]), torch.tensor([5, 5]))
    assert distribution(NET, measured).worst_decile == pytest.approx(0.1)
    assert distribution(Dense((3, 4, 1), "squared"), measured).worst_decile == pytest.approx(0.9)


# -- misuse -----------------------------------------------------------------------------------------------------------
def test_misuse_is_refused() -> None:
    settings = given()
    with pytest.raises(DataError, match="belong to different clients"):
        measure(**settings | {"rows": clients((1, 2, 3))})
    with pytest.raises(DataError, match="private state is of 4 clients"):
        measure(**settings | {"private": {name: value[:4] for name, value in settings["private"].items()}})
    with pytest.raises(ConfigError, match="exact=False"):
        measure(**settings | {"fit": replace(settings["fit"], training=Training(exact=True))})
    with pytest.raises(ConfigError, match="no layer 'head'"):
        measure(**settings | {"personal": ("head",)})
    with pytest.raises(DataError, match="no client has test rows"):
        Distribution.of(torch.zeros(2), torch.zeros(2))
