# SPDX-License-Identifier: Apache-2.0
"""Mixtures on the command line: the run folder, what is printed, predict, assign, resume, and what is refused."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import coterie as package
from command import coterie, refused
from coterie import FederatedMixture
from coterie.data.readers import read
from coterie.engines.in_process import Round
from coterie.errors import RunError
from coterie.runs import fit as fit_runs
from helpers import KilledError
from planted_mixtures import Mixed, clusters, lines

QUICK = [
    "--method", "mixture", "--client", "site", "--rounds", 60, "--set", "mixture.restarts=5", "--set", "mixture.tol=1e-4",
]  # fmt: skip
THREE = [*QUICK, "--components", 3]


def document(text: str) -> dict[str, Any]:
    """Read JSON as the standard has it: without NaN and Infinity."""
    found: dict[str, Any] = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    return found


def table(text: str) -> pa.Table:
    return pc.read_csv(
        io.BytesIO(text.encode()), convert_options=pc.ConvertOptions(column_types={"client": pa.string()})
    )


@pytest.fixture(scope="module")
def made() -> Mixed:
    return clusters(outlier=True)


@pytest.fixture(scope="module")
def data(made: Mixed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("data") / "rows.csv")


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lines().write(tmp_path_factory.mktemp("data") / "prices.csv")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "rows"
    said = coterie("fit", data, *THREE, "--out", folder)
    assert said.code == 0, said.err
    assert said.err == "warning: 1 of 8 clients is an outlier: 's07'\n"
    assert "mean log-likelihood of a row, seed 0" in said.out
    assert "FedGrEM, 3 components" in said.out
    assert "chosen on held-out rows" in said.out
    return folder


@pytest.fixture(scope="module")
def priced(prices: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "prices"
    said = coterie("fit", prices, *QUICK, "--target", "price", "--components", 2, "--out", folder)
    assert said.code == 0, said.err
    assert all(word in said.out for word in ("R²", "RMSE", "one mixture for all", "one mixture each"))
    return folder


# -- the folder -------------------------------------------------------------------------------------------------------
def test_the_run_says_what_it_found(run: Path) -> None:
    found = document((run / "run.json").read_text())
    assert (found["status"], found["method"], found["seed"]) == ("finished", "mixture", 0)
    about = found["data"]
    assert (about["metric"], about["metric_better"], about["task"]) == ("log_likelihood", "higher", "none")
    assert (about["n_clients"], about["n_rows"], about["n_features"], about["target_scale"]) == (8, 240, 2, None)
    results = found["results"]
    assert [score["method"] for score in results["methods"]] == ["mixture", "global", "local"]
    assert (results["family"], results["covariance"], results["n_components"]) == ("gaussian", "full", 3)
    choice = results["c_lambda_choice"]
    assert choice["values"][0] == 0.25
    assert choice["values"][-1] == "common"
    assert choice["values"][choice["chosen"]] == results["c_lambda"]
    assert max(choice["scores"]) - 0.05 < choice["scores"][choice["chosen"]]  # the smallest that is as good as the best
    assert results["components_choice"] is None
    assert [one["client"] for one in results["outliers"]] == ["s07"]
    assert results["outliers"][0]["score"] > results["outlier_threshold"] == 3.5
    assert results["components"]["parameters"] == ["length", "weight"]
    assert np.shape(results["components"]["centre"]) == (3, 2)
    assert sum(results["components"]["weights"]) == pytest.approx(1)
    assert results["components"]["deviation"] == pytest.approx([1.0, 100.0], rel=0.15)


def test_a_mixture_of_regressions_says_what_it_found(priced: Path) -> None:
    found = document((priced / "run.json").read_text())
    assert (found["data"]["task"], found["data"]["target"]) == ("regression", "price")
    results = found["results"]
    assert (results["family"], results["variance"]) == ("regression", "estimated")
    assert results["components"]["parameters"] == ["length", "weight", "intercept"]
    assert results["components"]["noise"] == pytest.approx(0.5, abs=0.06)
    assert results["methods"][0]["test_rmse"] > 0
    clients = pq.read_table(priced / "clients.parquet")
    assert "rmse" in clients.column_names


def test_clients_are_told_with_scores_and_proportions(run: Path) -> None:
    clients = pq.read_table(run / "clients.parquet")
    assert clients.column_names == [
        "client", "outlier_score", "outlier", "own", "weight_0", "weight_1", "weight_2", "rows_train",
        "train_log_likelihood", "rows_test", "metric", "metric_global", "metric_local",
    ]  # fmt: skip
    assert clients["outlier"].to_pylist() == [False] * 7 + [True]
    total = sum(clients[f"weight_{r}"].to_numpy() for r in range(3))
    np.testing.assert_allclose(total, 1.0)
    assert set(clients["rows_train"].to_pylist()) == {24}


def test_rounds_are_those_of_the_fit(priced: Path) -> None:
    rounds = pq.read_table(priced / "rounds.parquet")
    found = document((priced / "run.json").read_text())["results"]
    assert rounds["round"].to_pylist() == list(range(1, found["rounds"] + 1))
    assert rounds["change"].to_pylist()[-1] <= 1e-4
    # the loss is that of the training rows before the last step, in the same units as the table
    assert -rounds["loss"].to_pylist()[-1] == pytest.approx(found["methods"][0]["train"], abs=0.01)


def test_models_are_there_without_clients_of_their_own(run: Path) -> None:
    common = load_file(run / "models" / "models.safetensors")
    assert {"centre", "mean_weights", "scale"} < common.keys()
    assert not {"theta", "weights"} & common.keys()
    assert load_file(run / "models" / "clients.safetensors")["theta"].shape == (8, 3, 2)


def test_a_loaded_run_is_the_fitted_estimator(data: Path, run: Path) -> None:
    clients = read(data, client="site")
    loaded = package.load(run)
    assert isinstance(loaded, FederatedMixture)
    parameters = {**loaded.get_params(), "baselines": True}
    fitted = FederatedMixture(**parameters).fit(clients)
    for name in ("weights_", "means_", "centre_", "covariance_", "outlier_score_", "client_names_"):
        assert np.array_equal(getattr(loaded, name), getattr(fitted, name)), name
    assert (loaded.n_components_, loaded.c_lambda_, loaded.outliers_) == (3, fitted.c_lambda_, ["s07"])
    assert loaded.choice_ == fitted.choice_
    assert loaded.scores_ == fitted.scores_
    assert loaded.score(clients) == fitted.score(clients) == pytest.approx(loaded.scores_["mixture"].test)
    assert torch.equal(loaded.assign(clients).misfit, fitted.assign(clients).misfit)


def test_json_is_one_document(data: Path, tmp_path: Path) -> None:
    said = coterie("fit", data, *QUICK, "--set", "mixture.max_components=4", "--out", tmp_path / "r", "--json")
    found = document(said.out)
    assert (found["method"], found["metric"], found["n_components"]) == ("mixture", "log_likelihood", 3)
    assert found["outliers"][0]["client"] == "s07"
    assert found["settled"] is True
    counted = document((tmp_path / "r" / "run.json").read_text())["results"]["components_choice"]
    assert (counted["values"], counted["chosen"], counted["by"]) == ([1, 2, 3, 4], 2, "held-out")
    again = coterie("fit", data, *QUICK, "--set", "mixture.max_components=4", "--out", tmp_path / "again")
    assert "3 of at most 4 components: chosen on held-out rows" in again.out


def test_rounds_and_options_from_a_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('method = "mixture"\n[mixture]\nc_lambda = inf\ntol = 0\nn_components = 2\n')
    words = ["--client", "site", "--config", tmp_path / "run.toml", "--rounds", 3, "--out", tmp_path / "r"]
    said = coterie("fit", data, *words)
    assert "C_lambda inf (common components): as given" in said.out
    found = document((tmp_path / "r" / "run.json").read_text())
    assert (found["results"]["rounds"], found["results"]["c_lambda"]) == (3, "common")
    assert (found["config"]["mixture"]["rounds"], found["config"]["training"]["rounds"]) == (3, 100)
    assert package.load(tmp_path / "r").c_lambda_ == float("inf")


# -- predict and assign -----------------------------------------------------------------------------------------------
def test_predict_tells_the_component_of_every_row(made: Mixed, data: Path, run: Path) -> None:
    found = table(coterie("predict", run, data).out)
    assert found.column_names == ["client", "component", "probability"]
    assert found["client"].to_pylist() == made.groups.tolist()
    probability = package.load(run).predict_proba(made.x, groups=made.groups)
    assert found["component"].to_pylist() == probability.argmax(1).tolist()
    np.testing.assert_allclose(found["probability"].to_numpy(), probability.max(1), rtol=1e-9)


def test_predict_of_regressions_tells_components_where_there_are_targets(priced: Path, tmp_path: Path) -> None:
    made = lines(2, 6, seed=4)
    path = made.write(tmp_path / "some.csv")
    rows = path.read_text().splitlines()
    rows[3] = rows[3].rpartition(",")[0] + ","  # the third row has no price
    path.write_text("\n".join(rows) + "\n")
    found = table(coterie("predict", priced, path).out)
    assert found.column_names == ["client", "prediction", "component", "probability"]
    model = package.load(priced)
    np.testing.assert_allclose(found["prediction"].to_numpy(), model.predict(made.x, groups=made.groups))
    component = model.predict_proba(made.x, made.y, groups=made.groups).argmax(1).tolist()
    assert found["component"].to_pylist() == [None if i == 2 else r for i, r in enumerate(component)]
    assert found["probability"].null_count == 1
    path.write_text("\n".join(row.rpartition(",")[0] for row in rows) + "\n")  # no price at all
    without = table(coterie("predict", priced, path).out)
    assert without["component"].null_count == 12
    assert without["prediction"].equals(found["prediction"])


def test_assign_tells_proportions_and_whether_they_fit(run: Path, tmp_path: Path) -> None:
    new = clusters(3, 50, outlier=True, seed=8, prefix="new")
    said = coterie("assign", run, new.write(tmp_path / "new.csv"), "--out", tmp_path / "assigned.parquet")
    assert said.err == "warning: 1 of 3 clients does not fit: its rows are unlike those of the training\n"
    found = pq.read_table(tmp_path / "assigned.parquet")
    assert found.column_names == [
        "client", "weight_0", "weight_1", "weight_2", "log_likelihood", "misfit", "fits", "rows",
    ]  # fmt: skip
    assert found["fits"].to_pylist() == [True, True, False]
    assert found["rows"].to_pylist() == [50, 50, 50]


def test_assign_of_regressions_needs_targets(priced: Path, data: Path) -> None:
    sentence, hint = refused("assign", priced, data)
    assert sentence == f"{data} has no target 'price', and components are regressions of it"
    assert hint == "add the target column"


@pytest.mark.parametrize(
    ("name", "what"),
    [("models/clients.safetensors", "every client's own components"), ("models/models.safetensors", "the centre")],
)
def test_a_run_without_its_models_says_what_is_missing(run: Path, tmp_path: Path, name: str, what: str) -> None:
    folder = tmp_path / "part"
    shutil.copytree(run, folder)
    (folder / name).unlink()
    with pytest.raises(RunError) as raised:
        package.load(folder)
    assert raised.value.message == f"{folder} has no {name}, which holds {what}"
    assert raised.value.hint == "copy the whole folder of the run, or start it again with `coterie fit`"


# -- resume -----------------------------------------------------------------------------------------------------------
def test_an_interrupted_run_is_resumed_to_the_same_models(data: Path, run: Path, tmp_path: Path) -> None:
    real = fit_runs.train

    def stopping(clients: Any, session: Any, given: Any) -> Any:
        def watch(phase: str, done: Round, total: int) -> None:
            if phase == "fit" and done.round == 2:
                raise KilledError

        return real(clients, replace(session, watch=watch), given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_runs, "train", stopping)
        with pytest.raises(KilledError):
            coterie("fit", data, *THREE, "--out", tmp_path / "r", "--checkpoint-seconds", 0)
    assert (tmp_path / "r" / "checkpoints" / "choose-C_lambda-3.safetensors").exists()
    sentence, hint = refused("predict", tmp_path / "r", data)
    assert sentence == f"the run in {tmp_path / 'r'} has not finished"
    assert hint == f"continue it with `coterie resume {tmp_path / 'r'}`"
    assert coterie("resume", tmp_path / "r").code == 0
    for name in ("models/models.safetensors", "models/clients.safetensors", "clients.parquet"):
        assert (tmp_path / "r" / name).read_bytes() == (run / name).read_bytes(), name
    assert not (tmp_path / "r" / "checkpoints").exists()


# -- what is refused --------------------------------------------------------------------------------------------------
HELP = "`coterie fit --help` lists the options"
UNUSED = "is set, and mixture has no use for it"


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (["--clusters", 3], f"clusters.n_clusters {UNUSED}", "did you mean mixture.n_components?"),
        (["--hidden", "8"], f"model.hidden {UNUSED}", "it is for --method ifca or fedrep or lg-fedavg"),
        (["--components", 999], "999 components are more than the 192 training rows", "ask for fewer"),
        (["--components", 0], "mixture.n_components is 0: input should be greater than or equal to 1", HELP),
        (["--set", "mixture.reject=-2"], "mixture.reject is -2: give a number that is at least 0, or 'nobody'", HELP),
        (
            ["--target", "weight", "--task", "classification"],
            "a mixture needs a numeric target, and 'weight' has classes",
            "leave --target out to cluster rows; if the classes are numbers, add --task regression",
        ),
        (
            ["--method", "ifca", "--target", "weight"],
            "mixture.n_components is set, and ifca has no use for it",
            "use --method mixture, or --clusters for groups of clients",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    data: Path, tmp_path: Path, words: list[object], sentence: str, hint: str
) -> None:
    base = [*QUICK, "--components", 3, *words]
    assert refused("fit", data, *base, "--out", tmp_path / "r") == (sentence, hint)
    assert not (tmp_path / "r").exists()
