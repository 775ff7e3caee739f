# SPDX-License-Identifier: Apache-2.0
"""Rows in and out of data frames, one order everywhere, and weights of rows."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import coterie
from coterie.errors import ConfigError, DataError

_DRAW = np.random.default_rng(0)
_N = 400
_LEVEL = dict(zip("abcdefgh", _DRAW.normal(0, 3, 8), strict=True))
FRAME = pd.DataFrame(
    {
        "age": _DRAW.normal(50, 10, _N),
        "dose": _DRAW.normal(size=_N),
        "ward": _DRAW.choice(["icu", "er"], _N),
        "hospital": _DRAW.choice(list("abcdefgh"), _N, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]),
    }
)
FRAME["days"] = (
    0.1 * FRAME.age + 2 * FRAME.dose + 1.5 * (FRAME.ward == "icu") + FRAME.hospital.map(_LEVEL) + _DRAW.normal(size=_N)
)
FEATURES = ["age", "dose", "ward"]


def _fitted():
    return coterie.Local(penalty=1.0).fit(FRAME[FEATURES], FRAME.days, FRAME.hospital)


def test_predictions_of_clients_stand_in_the_order_of_their_rows():
    clients = coterie.read(FRAME, client="hospital", target="days", test_size=0.25)
    model = coterie.Local(penalty=1.0).fit(clients)
    made = model.predict(clients.test)
    naive = np.sqrt(np.mean((made - clients.test.y.numpy()) ** 2))
    by_hand = np.concatenate(
        [
            model.predict(FRAME.loc[rows.row], rows.hospital) - rows.days
            for _, rows in clients.test.frame().groupby("hospital")
        ]
    )
    assert naive == pytest.approx(np.sqrt(np.mean(by_hand**2)), rel=1e-12)
    assert naive < 1.3  # rows of other clients are 3 apart


def test_a_frame_of_rows_tells_where_they_come_from():
    clients = coterie.read(FRAME, client="hospital", target="days", test_size=0.25)
    made = clients.test.frame(clients.test.y.numpy() + 1)
    given = FRAME.loc[made.row]
    for column in ("hospital", *FEATURES, "days"):
        assert (made[column].to_numpy() == given[column].to_numpy()).all()
    assert np.allclose(made.prediction, made.days + 1)
    assert sorted([*made.row, *clients.train.frame().row]) == list(range(_N))
    with pytest.raises(DataError, match=r"3 predictions and \d+ rows"):
        clients.test.frame([1, 2, 3])


def test_rows_from_arrays_tell_where_they_come_from_too():
    x = FRAME[["age", "dose"]].to_numpy().copy()
    x[5, 0] = np.nan
    clients = coterie.from_arrays(x, FRAME.days.to_numpy(), FRAME.hospital.to_numpy(), missing="drop")
    made = clients.train.frame()
    assert (made.x0.to_numpy() == x[made.row, 0]).all()
    assert 5 not in set(made.row)


def test_classes_and_predictions_are_spelled_alike():
    frame = FRAME.assign(grade=np.where(FRAME.days > FRAME.days.median(), 2, 1))
    clients = coterie.read(frame, client="hospital", target="grade", exclude=["days"])
    made = clients.test.frame(coterie.Local(penalty=1.0).fit(clients).predict(clients.test))
    assert set(made.grade) == {"1", "2"}
    assert (made.grade == made.prediction).mean() > 0.8


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame, pa.Table.from_pandas], ids=["pandas", "polars", "arrow"])
def test_columns_are_found_by_their_names(kind):
    model = _fitted()
    usual = model.predict(FRAME[FEATURES], groups=FRAME.hospital)
    swapped = kind(FRAME[["ward", "dose", "age"]])
    assert np.array_equal(model.predict(swapped, groups=FRAME.hospital), usual)
    assert np.array_equal(model.predict(kind(FRAME)), usual)  # clients are named by the column of the training
    assert np.sqrt(np.mean((usual - FRAME.days) ** 2)) < 1.2
    with pytest.raises(DataError, match="no column 'ward', which the model was fitted with"):
        model.predict(kind(FRAME[["age", "dose"]]), groups=FRAME.hospital)


def test_columns_may_be_named_in_place_of_arrays():
    model = coterie.Local(penalty=1.0).fit(pl.from_pandas(FRAME), "days", "hospital")
    assert np.allclose(model.predict(FRAME), _fitted().predict(FRAME), atol=1e-9)
    assert model.score(FRAME, "days", "hospital") == pytest.approx(
        _fitted().score(FRAME[FEATURES], FRAME.days, FRAME.hospital)
    )
    with pytest.raises(DataError, match="no column 'day'"):
        coterie.Local(penalty=1.0).fit(FRAME, "day", "hospital")


def test_names_and_numbers_of_features_are_known_after_fitting():
    model = _fitted()
    assert list(model.feature_names_in_) == FEATURES
    assert model.n_features_in_ == 3
    x = FRAME[["age", "dose"]]
    bare = coterie.Local(penalty=1.0).fit(x.to_numpy(), FRAME.days, FRAME.hospital)
    assert bare.n_features_in_ == 2
    assert not hasattr(bare, "feature_names_in_")
    assert np.allclose(bare.predict(x, FRAME.hospital), bare.predict(x.to_numpy(), FRAME.hospital))


def test_a_series_of_text_keeps_its_classes():
    sick = np.where(FRAME.days > FRAME.days.median(), "yes", "no")
    model = coterie.Local(penalty=1.0).fit(FRAME[FEATURES], pd.Series(sick), FRAME.hospital)
    assert list(model.classes_) == ["no", "yes"]
    assert (model.predict(FRAME[FEATURES], FRAME.hospital) == sick).mean() > 0.8


# -- weights ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize(
    "model",
    [coterie.Local(penalty=1.0), coterie.RandomEffects(covariance="diagonal"), coterie.LowRank(rank=1)],
    ids=lambda model: model.method,
)
def test_a_weight_of_two_is_the_row_twice(model, classes):
    x, groups = FRAME[["age", "dose"]].to_numpy(), FRAME.hospital.to_numpy()
    y = (FRAME.days > FRAME.days.median()).to_numpy().astype(int) if classes else FRAME.days.to_numpy()
    weight = np.random.default_rng(1).integers(0, 3, _N)
    twice = np.repeat(np.arange(_N), weight)
    weighed = model.fit(x, y, groups, sample_weight=weight).personal_.own
    repeated = model.fit(x[twice], y[twice], groups[twice]).personal_.own
    assert np.allclose(weighed, repeated, atol=1e-7)
    assert not np.allclose(model.fit(x, y, groups).personal_.own, repeated, atol=1e-2)


def test_methods_that_cannot_weigh_rows_say_so():
    x, groups = FRAME[["age", "dose"]].to_numpy(), FRAME.hospital.to_numpy()
    with pytest.raises(ConfigError, match="IFCA cannot weigh rows"):
        coterie.IFCA().fit(x, FRAME.days, groups, sample_weight=np.ones(_N))
    with pytest.raises(DataError, match="sample_weight has 3 values and there are 400 rows"):
        coterie.Local(penalty=1.0).fit(x, FRAME.days, groups, sample_weight=[1, 1, 1])
    with pytest.raises(DataError, match="not negative"):
        coterie.Local(penalty=1.0).fit(x, FRAME.days, groups, sample_weight=-np.ones(_N))
