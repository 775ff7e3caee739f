# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms.linear_by_fold import Problem
from coterie.data.arrays import from_arrays
from coterie.data.clients import Clients
from coterie.engines.drive import Round
from coterie.errors import ConfigError, DataError
from coterie.methods.linear.choice import RIVAL, _place, _repeated, _Scores
from coterie.methods.linear.scores import Judged, Table
from coterie.methods.linear.structures import Found
from coterie.select import Paired
from coterie.selection import ORDER, Comparison, compare
from coterie.studies.data.planted import planted_structure


def clients_of(
    truth: Any, size: int = 1, *, n_clients: int = 16, rows: int = 30, classes: bool = False, **more: Any
) -> Clients:
    made = planted_structure(
        truth, size, n_clients=n_clients, rows=rows, n_features=3, noise=0.3, seed=more.pop("seed", 0),
        outliers=more.pop("outliers", 0.0),
    )  # fmt: skip
    assert isinstance(made.x, Tensor)
    assert isinstance(made.y, Tensor)
    x, y, owner = made.x.numpy() * 2.0 + 5.0, made.y.numpy() * 10.0 + 3.0, made.names[made.owners]  # units of their own
    y = np.where(y > 3.0, "high", "low") if classes else y
    return from_arrays(x, y, owner, task="classification" if classes else "regression", **more)


@pytest.fixture(scope="module")
def groups() -> Comparison:
    return compare(clients_of("clusters", 2, n_clients=30, new_clients=0.2), quick=True, seed=1)


def test_planted_groups_are_chosen(groups: Comparison) -> None:
    assert groups.chosen == "clusters"
    assert groups["clusters"].setting == {"n_clusters": 2}
    assert [one.name for one in groups.structures] == list(ORDER)
    assert groups["clusters"].as_good
    assert not groups["global"].as_good
    assert groups["clusters"].fit.options["clusters.n_clusters"] == 2


def test_what_is_said_of_a_structure_follows_from_what_is_said_of_its_clients(groups: Comparison) -> None:
    for one in groups.structures:
        assert one.score == pytest.approx(np.nanmean(one.client_score))
        assert one.test_metric == pytest.approx(np.nanmean(one.client_test_metric))
        assert one.stderr == pytest.approx(np.nanstd(one.client_score, ddof=1) / math.sqrt(len(groups.names)))
        trial = next(t for t in one.trials if one.name in ("global", "local") or t.setting == one.setting)
        assert max(t.score for t in one.trials) >= trial.score
    chosen, base = groups["clusters"], groups["global"]
    np.testing.assert_allclose(groups.gain, chosen.client_score - base.client_score)
    assert chosen.versus_global is not None
    assert chosen.versus_global.mean == pytest.approx(groups.gain.mean())
    assert set(groups.worse_off) == set(groups.names[groups.gain < 0])
    assert chosen.versus_chosen is None
    assert base.versus_global is None


def test_models_and_errors_are_in_the_datas_own_units(groups: Comparison) -> None:
    one = groups["clusters"]
    assert one.models is not None
    assert groups.grouping is not None
    made = planted_structure("clusters", 2, n_clients=30, rows=30, n_features=3, noise=0.3, seed=0)
    for name, label in zip(groups.names, groups.grouping.labels, strict=True):
        block = made.client(int(np.flatnonzero(made.names == name)[0]))
        x, y = block.x[0].numpy() * 2.0 + 5.0, block.target[0].numpy() * 10.0 + 3.0
        error = np.sqrt(np.mean((y - x @ one.models[label, :-1] - one.models[label, -1]) ** 2))
        assert error < 4.0  # noise of 3 was planted
    assert one.test_metric is not None
    assert 2.0 < one.test_metric < 4.5
    assert one.test_r2 is not None
    assert 0.5 < one.test_r2 < 1.0


def test_groups_are_described(groups: Comparison) -> None:
    found = groups.grouping
    assert found is not None
    assert found.sizes.sum() == len(groups.names)
    assert found.profile.shape == (2, 3)
    assert found.map.shape == (len(groups.names), 2)
    assert found.stability == 1.0
    assert (found.agreement == 1.0).all()
    assert (found.margin > 0).all()
    sides = found.map[:, 0] > found.map[:, 0].mean()  # the main direction tells two groups apart
    assert len(set(zip(sides, found.labels, strict=True))) == 2


def test_new_clients_are_measured_with_every_structure(groups: Comparison) -> None:
    for one in groups.structures:
        assert one.new_metric is not None
        assert one.new_score is not None
    assert groups["clusters"].new_metric < groups["global"].new_metric  # type: ignore[operator]


def test_the_document_is_plain(groups: Comparison) -> None:
    import json

    document = json.loads(json.dumps(groups.document()))
    assert document["chosen"] == "clusters"
    assert [row["structure"] for row in document["rows"]] == list(ORDER)
    assert {"structure", "setting", "metric", "mean", "stderr"} <= document["rows"][0].keys()


def test_the_same_seed_gives_the_same_comparison(groups: Comparison) -> None:
    again = compare(clients_of("clusters", 2, n_clients=30, new_clients=0.2), quick=True, seed=1)
    for one, other in zip(groups.structures, again.structures, strict=True):
        np.testing.assert_array_equal(one.client_score, other.client_score)
        assert one.new_metric == other.new_metric


def test_one_model_is_enough_for_one_group() -> None:
    assert compare(clients_of("global"), quick=True, structures=("clusters", "shrunk", "local")).chosen == "global"


def test_local_models_are_enough_for_independent_clients() -> None:
    found = compare(clients_of("local", rows=60), quick=True, structures=("clusters", "local", "shrunk"))
    assert found.chosen == "local"


def test_outliers_are_named_and_do_not_choose() -> None:
    found = compare(
        clients_of("clusters", 2, n_clients=24, outliers=0.1), quick=True, structures=("clusters", "local", "shrunk")
    )
    assert found.chosen == "clusters"
    assert found["clusters"].setting == {"n_clusters": 2}
    assert len(found.outliers) == 2
    assert found["global"].versus_chosen is not None
    assert found["global"].versus_chosen.clients == 22
    assert np.isfinite(found["global"].client_score).all()  # they are in the table


def test_small_clients_take_part_and_are_not_judged() -> None:
    big = clients_of("global", test_size=0.0)
    assert isinstance(big.train.x, Tensor)
    assert isinstance(big.train.y, Tensor)
    owner = big.train.names[big.train.owners]
    few = owner == "03"
    keep = ~few | (np.cumsum(few) <= 3)
    clients = from_arrays(
        big.train.x[keep].numpy(), big.train.y[keep].numpy(), owner[keep], task="regression", test_size=0.0
    )
    found = compare(clients, quick=True, structures=("local",))
    assert found.too_small == ("03",)
    assert np.isnan(found["global"].client_score[3])
    assert found["global"].test_metric is None
    assert found["global"].new_metric is None


def test_classes_are_compared_too() -> None:
    clients = clients_of("clusters", 2, rows=60, classes=True, new_clients=0.2)
    found = compare(clients, quick=True, structures=("clusters", "representation", "local"))
    assert found.metric == "accuracy"
    assert found.chosen == "clusters"
    assert found["clusters"].models is not None
    assert found["clusters"].models.shape == (2, 4)  # log odds of the second class
    assert found["clusters"].test_metric > found["global"].test_metric  # type: ignore[operator]
    assert [one.name for one in found.structures] == ["global", "clusters", "local", "representation"]


def test_without_a_target_mixtures_are_compared() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [6.0, 6.0]], dtype=torch.float64)
    x = torch.randn(6, 60, 2, generator=draw, dtype=torch.float64)
    share = torch.rand(6, 1, generator=draw, dtype=torch.float64)
    label = (torch.rand(6, 60, generator=draw, dtype=torch.float64) < share).long()
    rows = (x + centres[label]).flatten(0, 1).numpy()
    clients = from_arrays(rows, None, np.repeat([f"c{i}" for i in range(6)], 60), new_clients=0.2)
    found = compare(clients, quick=True, folds=2)
    assert found.metric == "log density"
    assert [one.name for one in found.structures] == ["global", "local", "mixture"]
    assert found["global"].setting == {"n_components": 2}
    assert found.grouping is None
    assert found["local"].new_metric is None
    assert found["mixture"].new_metric is not None


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"structures": ("trees",)}, ConfigError, "trees"),
        ({"folds": 1}, ConfigError, "folds"),
        ({"few_shot": 0}, ConfigError, "few_shot"),
        ({"folds": 100}, DataError, "training rows"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        compare(clients_of("global"), **options)


def test_one_client_alone_is_refused() -> None:
    with pytest.raises(DataError, match="one client"):
        compare(clients_of("global", n_clients=1))


def test_watchers_are_told() -> None:
    told: list[tuple[str, Round, int]] = []
    compare(clients_of("global", n_clients=6), quick=True, structures=("local",), watch=lambda *news: told.append(news))
    phases = [phase for phase, _, _ in told]
    assert sorted(set(phases), key=phases.index) == ["prepare", "structures"]  # all side by side
    for _, done, total in told:
        assert done.round <= total


# -- the choice -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Values:
    """Scores and metrics [J, M] of a structure's settings, which are here."""

    found: Found
    score: Tensor
    metric: Tensor


def values(name: str, settings: tuple[Any, ...], score: Tensor, metric: Tensor, **more: Any) -> Values:
    score, metric = score.reshape(len(settings), -1), metric.reshape(len(settings), -1)
    nothing = torch.zeros(1, 1, len(settings), dtype=torch.float64)
    kept = Judged(((name, len(settings)),), torch.zeros(len(settings)), nothing, nothing, nothing)
    return Values(Found(name, settings, kept, (), **more), score, metric)


def scores_of(*every: Values, again: int = 0) -> list[_Scores]:
    """Of all clients, and of clients drawn again."""
    found = {one.found.name: one.found for one in every}
    table = Table.of({name: one.judged for name, one in found.items()}, Problem(1, 0, 2, (0, 1, 2)))
    score, metric = torch.cat([one.score for one in every]), torch.cat([one.metric for one in every])
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randint(score.shape[1], (score.shape[1],), generator=draw) for _ in range(again)]
    return [
        _Scores(found, table, Paired.of(score[:, some]), Paired.of(metric[:, some]), regression=True)
        for some in (torch.arange(score.shape[1]), *drawn)
    ]


@pytest.mark.parametrize(
    ("worse", "spread", "predicts"),
    [(0.0, 0.1, True), (0.03, 0.1, True), (0.03, 0.001, False), (0.08, 1.0, False)],  # chance; clearly; by a lot
)
def test_a_mixture_must_predict_about_as_well_as_the_best_of_the_others(
    worse: float, spread: float, predicts: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(30, generator=draw, dtype=torch.float64)
    noise = spread * (noise - noise.mean())
    level = torch.zeros(30, dtype=torch.float64)
    (scores,) = scores_of(
        values("global", ({},), level - 2, level + 5),
        values("local", ({},), level - 1, level + 1),
        values("mixture", ({},), level, 1 + worse + noise),
    )
    assert scores.metric is not None
    assert scores._predicts(dict.fromkeys(scores.found, 0), scores.metric) is predicts
    assert (scores.choice(0.0).barred == ("mixture",)) is not predicts


def test_of_structures_with_as_many_parameters_own_levels_come_right_after_one_model() -> None:
    priors = [{"prior": kind} for kind in ("intercept", "same", "diagonal", "full")]
    shrunk = [_place("shrunk", prior) for prior in priors]
    one, groups, local, few = (_place(name, {}) for name in ("global", "clusters", "local", "representation"))
    assert one < shrunk[0] < groups < local < shrunk[1] < few < shrunk[2] == shrunk[3]


def level_found(df: dict[str, float]) -> list[Values]:
    """Structures that are all as good, and better than one model for all."""
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(30, generator=draw, dtype=torch.float64)
    settings: dict[str, Any] = {
        "clusters": {"n_clusters": 2},
        "shrunk": {"prior": "diagonal"},
        "local": {"penalty": 1.0},
    }
    others = [values(name, (settings[name],), base, base, df=(own,)) for name, own in df.items()]
    return [values("global", ({"penalty": 0.1},), base - 1, base, df=(4.0,)), *others]


@pytest.mark.parametrize(
    ("df", "chosen"),
    [
        ({"clusters": 38.0, "local": 100.0, "shrunk": 60.0}, "clusters"),
        ({"clusters": 38.0, "local": 100.0, "shrunk": 20.0}, "shrunk"),  # fewer effective parameters than two groups
        ({"local": 100.0, "shrunk": 90.0}, "local"),  # about as many: what is easier to say
        ({"local": 100.0, "shrunk": 60.0}, "shrunk"),
    ],
)
def test_simpler_means_fewer_effective_parameters(df: dict[str, float], chosen: str) -> None:
    (scores,) = scores_of(*level_found(df))
    assert scores.choice(0.005).winner == chosen


def test_own_intercepts_are_a_candidate_beside_other_models_of_clients_own() -> None:
    found = level_found({"clusters": 38.0})
    base = found[1].score[0]
    jitter = 0.1 * torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = torch.stack([base - 0.001, base + 0.05 + jitter - jitter.mean()])  # level by the tolerance, and the best
    shrunk = values("shrunk", ({"prior": "intercept"}, {"prior": "full"}), scores, scores, df=(34.0, 60.0))
    choice = scores_of(*found, shrunk)[0].choice(0.06)
    assert (choice.winner, choice.settings["shrunk"]) == ("shrunk", 0)


@pytest.mark.parametrize(
    ("gain", "more", "chosen"), [(0.3, -3.0, "global"), (6.0, 0.8, "shrunk"), (6.0, 4.0, "clusters")]
)
def test_what_is_simpler_is_taken_where_more_is_not_clear(gain: float, more: float, chosen: str) -> None:
    """Own intercepts bring `gain` standard errors beyond one model for all, and groups `more` beyond own intercepts."""
    draw = torch.Generator().manual_seed(3)
    base, *jitter = torch.randn(3, 30, generator=draw, dtype=torch.float64)
    one, two = (0.1 * (value - value.mean()) / value.std() for value in jitter)
    error = 0.1 / 30**0.5
    own = base + one + gain * error
    groups = own + two + more * error
    first, *again = scores_of(
        values("global", ({"penalty": 0.1},), base, base, df=(4.0,)),
        values("shrunk", ({"prior": "intercept"},), own, own, df=(20.0,)),
        values("clusters", ({"n_clusters": 2},), groups, groups, df=(38.0,)),
        again=200,
    )
    choice, shares = _repeated(first, again, 0.0)
    assert choice.winner == chosen
    assert shares["shrunk"] > RIVAL or chosen == "clusters"  # it is a rival wherever it is not left behind


def test_shares_add_up_and_follow_the_choice(groups: Comparison) -> None:
    shares = {one.name: one.chosen_share for one in groups.structures}
    assert sum(share for share in shares.values() if share is not None) == pytest.approx(1.0)
    assert shares["clusters"] == max(shares.values())  # type: ignore[type-var]
    again = compare(clients_of("global", n_clients=8), quick=True, structures=("local",), repetitions=0)
    assert all(one.chosen_share is None for one in again.structures)


def test_effective_parameters_are_counted(groups: Comparison) -> None:
    df = {one.name: one.df for one in groups.structures}
    n = len(groups.names)
    assert df["global"] == 4
    assert df["clusters"] == 2 * 4 + n  # a model for each group, and a label for each client
    assert df["local"] is not None
    assert n < df["local"] < 4 * n  # intercepts are free, and the rest is penalised
    assert groups.document()["rows"][0]["df"] == 4


def test_scores_are_means_over_deals() -> None:
    clients = clients_of("clusters", 2, n_clients=10)
    one, two = (compare(clients, quick=True, structures=("clusters", "local"), deals=n) for n in (1, 2))
    assert (one.settings["deals"], two.settings["deals"]) == (1, 2)
    assert one.traffic.messages <= two.traffic.messages <= one.traffic.messages + 12  # deals share their messages
    for name in ("global", "clusters", "local"):
        assert np.isfinite(two[name].client_score).all()
        assert not np.allclose(one[name].client_score, two[name].client_score)  # of other rows
        np.testing.assert_allclose(one[name].client_test_metric, two[name].client_test_metric)  # of the same fit
    assert two.grouping is not None
    assert set(np.round(two.grouping.agreement * 10) % 1) == {0.0}  # of ten folds


# -- rare classes and skewed targets ----------------------------------------------------------------------------------
def rare(seed: int, n_clients: int = 40, rows: int = 300) -> Clients:
    """Two in a hundred are positive; hospitals differ in their level with a standard deviation of 0.8."""
    draw = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_clients), rows)
    x = draw.normal(size=(len(owner), 3))
    odds = -4.4 + 0.8 * draw.normal(size=n_clients)[owner] + x @ [0.5, -0.3, 0.0]
    y = np.where(draw.random(len(owner)) < 1 / (1 + np.exp(-odds)), "yes", "no")
    return from_arrays(x, y, np.array([f"h{i:02d}" for i in range(n_clients)])[owner], task="classification", seed=seed)


def test_own_intercepts_are_found_where_positives_are_rare() -> None:
    clients = rare(1000)
    found = compare(clients, quick=True, seed=1000, structures=("clusters", "local", "shrunk"))
    assert 0.01 < float(np.mean(clients.train.y.numpy() == 1)) < 0.05  # type: ignore[union-attr]
    assert found.chosen == "shrunk"
    assert found["shrunk"].setting == {"prior": "intercept"}
    assert found.outliers == ()
    assert found.tolerance < 0.002  # there is less to gain than where classes are equally frequent


def test_a_skewed_target_is_told_with_what_to_do() -> None:
    draw = np.random.default_rng(0)
    owner, x = np.repeat(np.arange(8), 40), draw.normal(size=(320, 2))
    cost = np.exp(1.5 * draw.normal(size=320) + x[:, 0])
    names = np.array([f"c{i}" for i in owner])

    def notes(y: np.ndarray) -> str:
        return " ".join(compare(from_arrays(x, y, names), quick=True, structures=("local",)).notes)

    assert "take logarithms, or compare again with --outcome log-normal" in notes(cost)
    assert "skewed" in notes(cost - 1.0)
    assert "logarithms" not in notes(cost - 1.0)
    assert "skewed" not in notes(np.log(cost))
