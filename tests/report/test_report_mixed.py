# SPDX-License-Identifier: Apache-2.0
"""The report of a mixed model: tables of estimates and tests, and a forest plot with a row for each client."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pytest

from command import coterie
from coterie.report.forest import forest
from coterie.report.mixed import MOST_CLIENTS, mixed
from coterie.report.run_folder import Run, read_run


def run_of(folder: Path, clients: int, *words: str) -> Run:
    draw = np.random.default_rng(0)
    who = np.repeat([f"<{i:03d}>" for i in range(clients)], 6)
    x, own = draw.normal(size=len(who)), np.repeat(draw.normal(size=clients), 6)
    pc.write_csv(pa.table({"who": who, "x": x, "y": 3 + 2 * x + own + draw.normal(size=len(who))}), folder / "t.csv")
    said = coterie(
        "fit", folder / "t.csv", "--client", "who", "--target", "y", "--method", "mixed", "--no-baselines", *words,
        "--out", folder / "run",
    )  # fmt: skip
    assert said.code == 0, said.err
    return read_run(folder / "run")


def test_all_quantities_are_laid_out(tmp_path: Path) -> None:
    run = run_of(tmp_path, 20, "--slopes", "x")
    found = mixed(run)
    assert found is not None
    said = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["results"]["mixed"]
    for words in ("fixed effect", "between clients", "residual", "intraclass correlation", "likelihood ratio", "I²"):
        assert words in found.body
    for value in (said["aic"], said["bic"]):
        assert f"{value:.2f}" in found.body
    assert found.body.count("Each client&#39;s") + found.body.count("Each client's") >= 2  # a plot for each effect
    assert "&lt;003&gt;" in found.body  # names are escaped
    assert "<003>" not in found.body
    assert "Mixed model" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_of_many_clients_those_at_both_ends_are_drawn_and_the_others_counted(tmp_path: Path) -> None:
    run = run_of(tmp_path, MOST_CLIENTS + 15)
    found = mixed(run)
    assert found is not None
    effect = run.client_column("effect (intercept)")
    assert effect is not None
    order = np.argsort(-effect)
    names = run.clients["client"]
    drawn = [f"&lt;{names[i][1:-1]}&gt;" in found.body for i in order]
    half = MOST_CLIENTS // 2
    assert all(drawn[:half])
    assert all(drawn[-half:])
    assert not any(drawn[half:-half])
    assert "15 clients between" in found.body


def test_effects_that_stayed_with_their_clients_are_not_drawn(tmp_path: Path) -> None:
    run = run_of(tmp_path, 5)
    away = {name: column for name, column in run.clients.items() if not name.startswith(("effect", "deviation"))}
    found = mixed(Run(run.name, run.info, run.rounds, away))
    assert found is not None
    assert "have stayed with them" in found.body
    assert "<svg" not in found.body
    assert mixed(Run(run.name, {"results": {}}, {}, {})) is None


def test_intervals_that_do_not_reach_the_line_stand_out() -> None:
    drawn = forest(["a", "b"], [1.0, 3.0], [0.5, 2.5], [1.5, 3.5], centre=1.2)
    assert drawn.count('class="line plain"') == 1
    assert drawn.count('class="line k0"') == 1


@pytest.mark.parametrize("name", ["correlations", "fixed", "test"])
def test_a_document_that_was_changed_is_refused(tmp_path: Path, name: str) -> None:
    from pydantic import ValidationError

    from coterie.report.run_document import Mixed

    said = run_of(tmp_path, 5).results["mixed"]
    Mixed.model_validate(said)
    wrong = {"correlations": [[1.0, 0.0]], "fixed": "none", "test": 3}
    with pytest.raises(ValidationError):
        Mixed.model_validate(said | {name: wrong[name]})
