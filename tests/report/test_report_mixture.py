# SPDX-License-Identifier: Apache-2.0
"""The report of a mixture run says how its settings were chosen, what the components are, and who is an outlier."""

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import escape

from command import coterie
from coterie.report import write_report
from coterie.report.client_plots import above_limit
from coterie.report.component_plots import boxes, candidates, least_shown
from coterie.report.numbers import NONE
from report_page import EVIL, edit, parse, section, words

N_CLIENTS = 12
FEATURES = ["age", EVIL, "height"]
FAR = {"site 03": 41.0, EVIL: 5.25}  # the outliers, and their scores


def run_info() -> dict[str, Any]:
    return {
        "coterie": "0.1.0",
        "method": "mixture",
        "status": "finished",
        "seed": 0,
        "seconds": 3.2,
        "config": {"method": "mixture", "mixture": {"n_components": None, "c_lambda": None, "reject": 3.5}},
        "data": {
            "n_clients": N_CLIENTS,
            "n_rows": 2400,
            "n_features": 3,
            "task": "none",
            "target": None,
            "metric": "log_likelihood",
            "metric_better": "higher",
        },
        "results": {
            "methods": [
                {"method": "mixture", "label": "mixture", "train": -7.91, "test": -8.02, "new_clients": None},
                {"method": "global", "label": "one mixture for all", "train": -8.4, "test": -8.51},
                {"method": "local", "label": "one mixture each", "train": -7.6, "test": -8.33},
            ],
            "family": "gaussian",
            "covariance": "diagonal",
            "n_components": 3,
            "c_lambda": 0.25,
            "c_lambda_choice": {
                "values": [0.0, 0.05, 0.25, 2.0, "common"],
                "scores": [-8.4, -8.2, -8.1, -8.3, -8.6],
                "chosen": 2,
            },
            "components_choice": {
                "values": [1, 2, 3, 4], "scores": [-9.5, -8.9, -8.1, -8.09], "chosen": 2, "by": "held-out"
            },
            "rounds": 40,
            "settled": True,
            "outlier_threshold": 3.5,
            "outliers": [{"client": name, "score": score} for name, score in FAR.items()],
            "components": {
                "parameters": FEATURES,
                "centre": [[40.5, 0.1, 180.0], [50.0, 0.2, 170.0], [63.0, 0.3, 160.0]],
                "weights": [0.5, 0.3, 0.2],
                "deviation": [4.5, 0.04, 7.0],
            },
            "warnings": [],
            "events": [],
        },
    }  # fmt: skip


def clients_table() -> dict[str, list[Any]]:
    names = [f"site {i:02d}" for i in range(N_CLIENTS)]
    names[7] = EVIL
    rng = np.random.default_rng(0)
    metric = rng.normal(-8, 0.2, N_CLIENTS)
    return {
        "client": names,
        "outlier_score": [FAR.get(name, i / 10 - 0.5) for i, name in enumerate(names)],
        "outlier": [name in FAR for name in names],
        "own": [0.125] * N_CLIENTS,
        **{f"weight_{r}": [w] * (N_CLIENTS - 1) + [1 / 3] for r, w in enumerate((0.5, 0.3, 0.2))},
        "rows_train": [160] * N_CLIENTS,
        "train_log_likelihood": (metric + 0.1).tolist(),
        "rows_test": [40] * N_CLIENTS,
        "metric": metric.tolist(),
        "metric_global": (metric - 0.5).tolist(),
        "metric_local": (metric - 0.3).tolist(),
    }


def write_clients(folder: Path, **changes: list[Any] | None) -> None:
    """Write the clients with other columns; None leaves one out."""
    columns = {name: column for name, column in (clients_table() | changes).items() if column is not None}
    pq.write_table(pa.table(columns), folder / "clients.parquet")


def edit_results(folder: Path, **changes: Any) -> None:
    edit(folder, results=run_info()["results"] | changes)


def report(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def figure(page: str, title: str) -> str:
    """One figure of a page, by its title."""
    return page.split(f"<h3>{title}</h3>")[1].split("</figure>", maxsplit=1)[0].replace("\u2212", "-")


def row(page: str, name: str) -> list[str]:
    """The cells of a table's row, by its name."""
    cells = page.split(f'<th scope="row"><bdi>{name}</bdi></th>')[1].split("</tr>", maxsplit=1)[0]
    texts = re.sub(r"</td>$|<td[^>]*>", "", cells).split("</td>")
    return [text.replace("\u2212", "-").replace("\u00a0", " ") for text in texts]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder as the library writes it."""
    made = tmp_path / "sites"
    (made / "models").mkdir(parents=True)
    (made / "models" / "models.safetensors").write_bytes(b"")
    (made / "run.json").write_text(json.dumps(run_info()), encoding="utf-8")
    write_clients(made)
    rounds = {
        "run": [0] * 40,
        "round": list(range(1, 41)),
        "loss": [8 + math.exp(-t / 5) for t in range(40)],
        "change": [0.5**t for t in range(40)],
        "participants": [N_CLIENTS] * 40,
        "bytes_up": [1000] * 40,
        "bytes_down": [500] * 40,
        "sizes": pa.nulls(40, pa.list_(pa.int64())),
        "movement": pa.nulls(40, pa.list_(pa.float64())),
    }
    pq.write_table(pa.table(rounds), made / "rounds.parquet")
    return made


# -- what `coterie fit` writes ----------------------------------------------------------------------------------------
def test_a_real_run_has_all_its_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    owner, kind = np.repeat(np.arange(8), 60), np.tile([0, 1], 240)
    rows = np.where(kind == 0, -3.0, 3.0)[:, None] * [1.0, -1.0] + rng.normal(size=(480, 2))
    rows[owner == 5] += 20.0
    columns = {"site": [f"site {i}" for i in owner], "low": rows[:, 0], "high": rows[:, 1]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    said = coterie(
        "fit", tmp_path / "rows.parquet", "--client", "site", "--method", "mixture", "--set", "mixture.max_components=3",
        "--set", "mixture.restarts=3", "--rounds", "50", "--out", tmp_path / "run",
    )  # fmt: skip
    assert said.code == 0, said.err
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    text = words(page)
    assert "2 components in the rows of 8 clients; on held-out rows log-likelihood" in text
    assert "2 components: of 1 to 3, " in text
    assert "1 of 8 clients is an outlier: a score above 3.5. It does not contribute to the centre." in text
    for title in (
        "Gain over one mixture for all, client by client", "Choice of c_lambda", "Choice of the number of components",
        "Weights across clients", "Outlier score of every client",
    ):  # fmt: skip
        assert f"<h3>{title}</h3>" in page
    assert row(section(page, "outliers"), "site 5")
    low, high = (np.array(row(page, name)[:2], dtype=float) for name in ("low", "high"))
    assert sorted(low) == pytest.approx([-3, 3], abs=0.3)
    assert sorted(high) == pytest.approx([-3, 3], abs=0.3)


# -- in words ---------------------------------------------------------------------------------------------------------
def test_headline_compares_with_one_mixture_for_all_and_one_each(folder: Path) -> None:
    expected = (
        "3 components in the rows of 12 clients; on held-out rows log-likelihood -8.02 against -8.51 with one mixture for"
        " all and -8.33 with one each."
    )
    assert expected in words(report(folder)).replace("\u2212", "-")


def test_headline_without_baselines_names_the_score_alone(folder: Path) -> None:
    edit_results(folder, methods=run_info()["results"]["methods"][:1])
    assert "on held-out rows log-likelihood -8.02." in words(report(folder)).replace("\u2212", "-")


@pytest.mark.parametrize(
    ("value", "fact", "said"),
    [
        (0, "each client fitted alone", "c_lambda is 0, chosen on held-out rows: every client is fitted alone."),
        ("common", "all clients have the same components", "c_lambda is infinite, chosen on held-out rows: all"),
        (0.25, "components are shrunk to a centre", "towards a common centre. On average a client keeps 12 % of its"),
    ],
)
def test_says_what_c_lambda_means(folder: Path, value: float | str, fact: str, said: str) -> None:
    edit_results(folder, c_lambda=value)
    text = words(report(folder))
    assert fact in text
    assert said in text


def test_settings_that_were_given_have_no_choice(folder: Path) -> None:
    edit_results(folder, c_lambda_choice=None, components_choice=None)
    page = report(folder)
    assert "c_lambda is 0.25: every client's components are shrunk" in words(page)
    assert "3 components, as asked for." in words(page)
    assert "Choice of" not in page


@pytest.mark.parametrize(
    ("by", "why"),
    [("held-out", "the fewest within two standard errors of the best on held-out rows"), ("bic", "the smallest BIC")],
)
def test_says_why_there_are_so_many_components(folder: Path, by: str, why: str) -> None:
    edit_results(folder, components_choice=run_info()["results"]["components_choice"] | {"by": by})
    text = words(report(folder))
    assert "3 components: of 1 to 4, " in text
    assert why in text


def test_one_component_has_neither_weights_nor_colours(folder: Path) -> None:
    found = {"parameters": ["age"], "centre": [[40.5]], "weights": [1.0], "deviation": [4.5]}
    edit_results(folder, components=found, n_components=1)
    write_clients(folder, weight_0=[1.0] * N_CLIENTS, weight_1=None, weight_2=None)
    own = section(report(folder), "components")
    assert row(own, "age") == ["40.5", "4.50"]
    assert "eight" not in own
    assert "Blue" not in own


def test_says_when_almost_nothing_is_a_clients_own(folder: Path) -> None:
    write_clients(folder, own=[0.001] * N_CLIENTS)
    assert "On average a client keeps less than 1 % of its difference" in words(report(folder))


def test_says_when_estimates_were_still_moving(folder: Path) -> None:
    said = "not converged: estimates still moved"
    assert said not in words(report(folder))
    edit_results(folder, settled=False)
    assert said in words(report(folder))


# -- choices and components -------------------------------------------------------------------------------------------
def test_candidates_stand_between_alone_and_common(folder: Path) -> None:
    own = section(report(folder), "components")
    chart = figure(own, "Choice of c_lambda")
    labels = [text for _, text in re.findall(r'<text class="mid" x="([\d.]+)"[^>]*>([^<]*)', chart)]
    assert labels == ["0", "0.05", "0.25", "2", "∞", "c_lambda", "alone", "common"]
    marks = re.findall(r'<circle class="mark (\w+)" [^>]*><title>([^<]*)', chart)
    assert marks == [
        ("plain", "0: -8.40"), ("plain", "0.05: -8.20"), ("k0", "0.25: -8.10"), ("plain", "2: -8.30"), ("plain", "∞: -8.60"),
    ]  # fmt: skip


def test_candidates_far_below_the_others_are_off_the_scale(folder: Path) -> None:
    choice = {"values": [0.0, 0.5, 1.0, "common"], "scores": [-8.03, -8.0, -8.01, -60.0], "chosen": 1}
    edit_results(folder, c_lambda_choice=choice)
    chart = figure(section(report(folder), "components"), "Choice of c_lambda")
    assert "Triangles: off the scale." in chart
    assert re.findall(r'<path class="mark plain" [^>]*><title>([^<]*)', chart) == ["∞: -60.00"]
    assert chart.count('<circle class="mark') == 3 + 1  # and one in the legend
    assert "-8.02" in chart  # a tick between the others


def test_the_chosen_candidate_is_never_off_the_scale() -> None:
    assert least_shown([-8.0, -8.01, -8.02, -60.0], 1) == pytest.approx(-8.06)  # four times as far as the median
    assert least_shown([-8.0, -8.01, -8.02, -60.0], 3) == -60.0
    assert least_shown([-8.0, -8.0, -9.0], 0) == -math.inf


def test_centres_are_shown_with_weights_and_spread(folder: Path) -> None:
    own = section(report(folder), "components")
    assert row(own, "mean weight") == ["50.0 %", "30.0 %", "20.0 %", ""]
    assert row(own, "age") == ["40.5", "50.0", "63.0", "4.50"]
    assert row(own, "height") == ["180", "170", "160", "7.00"]


def test_colours_are_fair_between_parameters_of_different_units(folder: Path) -> None:
    own = section(report(folder), "components")
    cells = re.findall(r'<td class="(good|bad)" style="--a:([\d.]+)">([\d.]+)</td>', own)
    strength = {text: (sign, float(a)) for sign, a, text in cells}
    # in units of the spread: age is up to 11.83 / 4.5 = 2.63 from its mean, and height 10 / 7 = 1.43
    assert strength["63.0"] == ("good", 0.55)
    assert strength["160"] == ("bad", 0.30)  # 0.55 * 1.43 / 2.63
    assert strength["180"] == ("good", 0.30)


def test_regressions_show_coefficients_and_noise(folder: Path) -> None:
    found = {
        "parameters": ["age", "intercept"],
        "centre": [[0.5, 10.0], [-0.5, 20.0]],
        "weights": [0.6, 0.4],
        "noise": 2.5,
    }
    edit_results(folder, family="regression", components=found, n_components=2)
    own = section(report(folder), "components")
    assert "Coefficients at the centre" in own
    assert "Standard deviation of the noise: 2.50." in own
    assert row(own, "age") == ["0.500", "-0.500"]
    assert row(own, "intercept") == ["10", "20"]


def test_of_many_parameters_those_that_differ_most_are_shown_in_their_order(folder: Path) -> None:
    centre = np.zeros((2, 30))
    centre[1, 5:25] = 1.0
    edit_results(folder, components={"parameters": [f"p{i:02d}" for i in range(30)], "centre": centre.tolist()})
    own = words(section(report(folder), "components"))
    assert "the 20 of 30 that differ most" in own
    assert re.findall(r"p(\d\d)", own) == [f"{i:02d}" for i in range(5, 25)]


def test_every_component_has_a_box_of_its_weights(folder: Path) -> None:
    own = section(report(folder), "components")
    chart = figure(own, "Weights across clients")
    assert re.findall(r'<rect class="area (k\d)"', chart) == ["k0", "k1", "k2"]
    assert "1: 30 %, middle half 30 % to 30 %, all 30 % to 33.3 %" in chart.replace("\u00a0", " ")


# -- outliers ---------------------------------------------------------------------------------------------------------
def test_outliers_are_named_with_the_farthest_first(folder: Path) -> None:
    own = section(report(folder), "outliers")
    text = words(own)
    assert "2 of 12 clients are outliers: a score above 3.5. They do not contribute to the centre." in text
    assert re.findall(r"<bdi>(.*?)</bdi>", own) == ["site 03", str(escape(EVIL))]
    assert row(own, "site 03")[:2] == ["41.0", "160"]
    marks = re.findall(r'<(circle|path) class="mark (bad|plain) solid"', own)
    assert marks.count(("circle", "plain")) == 10
    assert marks.count(("circle", "bad")) == 1
    assert marks.count(("path", "bad")) == 1  # far off the scale
    assert "Triangles: off the scale." in text


def test_outliers_that_are_not_rejected_have_their_part(folder: Path) -> None:
    edit(folder, config={"mixture": {"reject": "nobody"}})
    text = words(report(folder))
    assert "2 of 12 clients are outliers" in text
    assert "contribute to the centre" not in text


def test_says_so_when_nobody_is_an_outlier(folder: Path) -> None:
    write_clients(folder, outlier_score=[0.5] * N_CLIENTS)
    edit_results(folder, outliers=[])
    own = section(report(folder), "outliers")
    assert "None of 12 clients is an outlier: no score is above 3.5." in words(own)
    assert "<table" not in own


def test_endless_scores_and_clients_that_were_never_heard(folder: Path) -> None:
    write_clients(folder, outlier_score=[None, math.inf] + [0.5] * (N_CLIENTS - 2))
    own = section(report(folder), "outliers")
    assert "1 of 11 clients is an outlier" in words(own)
    assert "∞" in own
    assert "nan" not in own


# -- clients and the rest ---------------------------------------------------------------------------------------------
def test_clients_are_listed_with_the_farthest_first(folder: Path) -> None:
    own = section(report(folder), "clients")
    text = words(own)
    assert "Largest outlier score first." in text
    assert text.index("site 03") < text.index(EVIL) < text.index("site 11")
    assert "weight 2" in text
    assert "33.3 %" in text
    assert "log-likelihood, one mixture each" in text


def test_many_weights_stay_in_their_file(folder: Path) -> None:
    write_clients(folder, **{f"weight_{r}": [0.1] * N_CLIENTS for r in range(10)})
    own = words(section(report(folder), "clients"))
    assert "weight 2" not in own
    assert "Their weights are in clients.parquet." in own


def test_training_shows_loss_and_move(folder: Path) -> None:
    own = section(report(folder), "training")
    assert "Loss by round" in own
    assert "Largest move by round" in own


def test_there_are_no_clusters(folder: Path) -> None:
    page = report(folder)
    assert '<section id="clusters">' not in page
    assert 'href="#components"' in page
    assert 'href="#outliers"' in page


def test_gains_are_over_one_mixture_for_all(folder: Path) -> None:
    text = words(section(report(folder), "comparison"))
    assert "Gain over one mixture for all, client by client" in text
    assert "Better for 12 of 12 clients on held-out rows; better than with one mixture each for 12 of 12." in text


def test_methods_are_compared_without_the_outliers_too(folder: Path) -> None:
    table = clients_table()
    rows = [0 if name == "site 00" else 10 + i for i, name in enumerate(table["client"])]
    metric = [-100.0 if far else -8.0 - i for i, far in enumerate(table["outlier"])]
    write_clients(folder, rows_test=rows, metric=metric, metric_local=None)
    own = section(report(folder), "comparison")
    counts = [r if not far else 0 for r, far in zip(rows, table["outlier"], strict=True)]
    assert "held-out rows, no outliers" in own
    cells = re.findall(r'<tr[^>]*><th scope="row">([^<]*)</th>.*?>([^<]*)</td></tr>', own)
    assert [name for name, _ in cells] == ["mixture", "one mixture for all", "one mixture each"]
    mean = np.average(metric, weights=counts)
    assert cells[0][1].replace("\u2212", "-") == f"{mean:.1f}"
    assert cells[2][1] == NONE


def test_without_outliers_there_is_one_column_of_held_out_rows(folder: Path) -> None:
    write_clients(folder, outlier=[False] * N_CLIENTS)
    assert "no outliers" not in section(report(folder), "comparison")


def test_names_are_escaped(folder: Path) -> None:
    page = report(folder)
    assert EVIL not in page
    assert [tag for tag, _ in parse(page).tags].count("script") == 1


@pytest.mark.parametrize("missing", sorted(run_info()["results"]))
def test_any_result_may_be_missing(folder: Path, missing: str) -> None:
    edit_results(folder, **{missing: None})
    parse(report(folder))


@pytest.mark.parametrize("missing", sorted(run_info()["results"]["components"]))
def test_any_part_of_the_components_may_be_missing(folder: Path, missing: str) -> None:
    edit_results(folder, components=run_info()["results"]["components"] | {missing: None})
    parse(report(folder))


def test_any_column_of_the_clients_may_be_missing_or_null(folder: Path) -> None:
    full = pa.table(clients_table())
    for column in full.column_names:
        where = full.column_names.index(column)
        null = pa.nulls(len(full), full.schema.field(column).type)
        for table in (full.drop_columns([column]), full.set_column(where, column, null)):
            pq.write_table(table, folder / "clients.parquet")
            parse(report(folder))


def test_a_run_without_clients_or_results_has_neither_section(folder: Path) -> None:
    (folder / "clients.parquet").unlink()
    edit(folder, results=None)
    page = report(folder)
    assert 'id="components"' not in page
    assert 'id="outliers"' not in page


def test_plots_are_well_formed() -> None:
    plots = [
        candidates([EVIL, "b"], [1.0, math.nan], 0, below=[EVIL], title=EVIL),
        boxes([[0.1, 0.2, math.nan], [], [0.5]], title=EVIL),
        above_limit([0.1, math.nan, math.inf, -math.inf, 9.0], 3.5, titles=[EVIL] * 5, title=EVIL),
    ]
    for plot in plots:
        root = ET.fromstring(plot)
        assert root.find(".//script") is None
        assert "nan" not in plot
        assert "inf" not in plot
    assert candidates([], [], None).startswith("<svg")
    assert boxes([]).startswith("<svg")
    assert above_limit([], 3.5).startswith("<svg")


def test_many_groups_share_their_labels() -> None:
    drawn = boxes([[0.1, 0.2]] * 40)
    assert drawn.count('class="mid"') == 14  # every third of 40
    assert drawn.count('class="area k0') == 5
