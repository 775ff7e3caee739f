# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is so: code blocks and commands run, shown output comes out, links lead somewhere.

Blocks of one page run in order, in one namespace and one empty folder that holds `stays.csv`. A comment before a block
changes that: ``<!-- not run: reason -->``, or ``<!-- file: NAME -->`` for a block that is written to a file. A page that
says ``<!-- needs data: FILE as NAME -->`` is skipped where the real data are not there.
"""

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import BaseModel
from tools import limits, reference

from coterie.algorithms import (
    em,
    fedavg,
    fedgmm,
    fedgrem,
    ifca,
    mixed_clients,
    mixed_logistic,
    mixed_model,
    one_shot,
    preparation,
)
from coterie.algorithms.inference import adopt_ask, spread_ask
from coterie.algorithms.starts import Start
from coterie.config import FitOptions
from coterie.engines.in_process import InProcess
from coterie.estimators import ESTIMATORS
from coterie.models import linear_regression, mlp
from coterie.models.mixtures import Family, Gaussian, Regression
from coterie.protocol import Ask, Save, Sum
from coterie.registry import METHODS
from helpers import ragged
from named_code import stale

with warnings.catch_warnings():  # typer uses what click will remove
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

    from coterie import cli
    from coterie.runs import screen

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NEEDED = re.compile(r"^<!-- needs data: (\S+) as (\S+) -->$", re.MULTILINE)
_BOX = re.compile(r"[─-╿]")


@dataclass(frozen=True)
class Fenced:
    """A fenced block, with the line before it."""

    language: str
    text: str
    before: str
    line: int


def fenced(page: Path) -> Iterator[Fenced]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        above = text[: found.start()].rstrip().rpartition("\n")[2]
        yield Fenced(found[1], found[2], above, text.count("\n", 0, found.start()) + 1)


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def methods() -> Iterator[None]:
    """Let a page register methods, and forget them after it."""
    registries: tuple[dict[str, Any], ...] = (METHODS, ESTIMATORS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


@pytest.fixture(scope="session")
def stays(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table that the pages use: what the first block of the README writes."""
    folder = tmp_path_factory.mktemp("readme")
    first = next(block for block in fenced(ROOT / "README.md") if block.language == "python")
    with contextlib.chdir(folder):
        exec(first.text, {})
    return (folder / "stays.csv").read_bytes()


# -- pages ------------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("methods")
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_of_a_page_runs(
    page: Path,
    stays: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # for files that a page writes
    for file, name in _NEEDED.findall(page.read_text(encoding="utf-8")):
        (tmp_path / name).symlink_to(request.getfixturevalue("shared_data") / file)
    monkeypatch.setattr(screen.out, "width", 80)  # tables are shown so wide
    (tmp_path / "stays.csv").write_bytes(stays)
    space: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in fenced(page):
        if block.before.startswith("<!-- not run: "):
            continue
        if block.before.startswith("<!-- file: "):
            Path(block.before.removeprefix("<!-- file: ").removesuffix(" -->")).write_text(block.text)
        elif block.language == "python":
            capsys.readouterr()
            exec(compile(block.text, f"{named(page)}:{block.line}", "exec"), space)
            printed = capsys.readouterr().out
        elif block.language in ("console", "sh"):
            run_commands(block, monkeypatch, capsys)
        elif block.language == "text" and block.before == "This prints":
            assert_shown(block.text.splitlines(), printed)
    if page.name == "quickstart.md":
        assert (tmp_path / "stays.csv").read_bytes() == stays  # the same table as the README's


def run_commands(block: Fenced, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for command, shown in commands(block):
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), command
        else:
            assert words[0] == "coterie", command
            monkeypatch.setattr(sys, "argv", words)
            capsys.readouterr()
            with pytest.raises(SystemExit) as left:
                cli.main()
            said = capsys.readouterr()
            wrong = any(line.startswith("error: ") for line in shown)
            assert (left.value.code or 0) == (2 if wrong else 0), f"{command}\n{said.out}{said.err}"
            if shown:
                assert_shown(shown, said.out + said.err)


def commands(block: Fenced) -> Iterator[tuple[str, list[str]]]:
    """Commands with the output that is shown below them; in `sh` blocks every line is a command."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "sh":
        yield from ((line, []) for line in lines if line.strip())
        return
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    for i, j in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[i][2:], lines[i + 1 : j]


def assert_shown(shown: list[str], real: str) -> None:
    """Compare word by word; numbers may differ by 2 %, and `...` stands for any lines."""
    wanted, lines = words_by_line(shown), words_by_line(real.splitlines())
    if ["..."] not in wanted:
        assert len(wanted) == len(lines), real
    at = 0
    for words in wanted:
        if words != ["..."]:
            found = next((i for i in range(at, len(lines)) if alike(words, lines[i])), None)
            assert found is not None, f"{' '.join(words)}\nis not in\n{real}"
            at = found + 1


def words_by_line(lines: list[str]) -> list[list[str]]:
    split = [_BOX.sub(" ", line).split() for line in lines]
    return [words for words in split if words]


def alike(left: list[str], right: list[str]) -> bool:
    return len(left) == len(right) and all(map(alike_words, left, right))


def alike_words(left: str, right: str) -> bool:
    try:
        a, b = (float(word.rstrip("%,;")) for word in (left, right))
    except ValueError:
        return left == right
    return a == pytest.approx(b, rel=0.02)


# -- links ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
            assert anchor in map(slug, headings), link


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_page_is_in_the_index() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(prose(DOCS / "index.md"))}
    assert {page for page in PAGES if page.parent != ROOT} - linked == {DOCS / "index.md"}


def test_tests_that_the_threat_model_names_are_there() -> None:
    named_tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", prose(DOCS / "threat-model.md"))
    assert len(named_tests) > 20
    for file, name in named_tests:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


# -- examples ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_example_runs_and_prints(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) > 2
    assert not list(tmp_path.iterdir())


def test_schools_example_reads_a_file(
    stays: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stays.csv").write_bytes(stays)
    words = [str(tmp_path / "stays.csv"), "--client", "hospital", "--target", "days", "--clusters", "3"]
    monkeypatch.setattr(sys, "argv", ["ifca_schools.py", *words])
    runpy.run_path(str(ROOT / "examples" / "ifca_schools.py"), run_name="__main__")
    assert "clients per cluster: [20, 20, 20]" in capsys.readouterr().out


def test_engine_page_shows_the_example() -> None:
    first = next(block for block in fenced(DOCS / "engine.md") if block.language == "python")
    assert first.text in (ROOT / "examples" / "own_algorithm.py").read_text()


# -- reference pages --------------------------------------------------------------------------------------------------
def test_every_command_and_option_is_documented() -> None:
    page = (DOCS / "cli.md").read_text()
    command = typer.main.get_command(cli.app)
    for name, sub in command.commands.items():  # type: ignore[attr-defined]
        assert f"## `coterie {name}" in page, name
        if name == "fit":
            for option in sub.params:
                assert option.param_type_name == "argument" or f"`{option.opts[0]}`" in page, option.opts
    both = page + (DOCS / "api.md").read_text()
    for option in option_names(FitOptions):
        assert f"`{option}`" in both, option


def test_the_page_of_methods_options_and_names_is_current() -> None:
    assert (DOCS / "api.md").read_text(encoding="utf-8") == reference.page()  # or run `make docs`


def test_the_limits_are_those_of_the_code() -> None:
    assert (DOCS / "limits.md").read_text(encoding="utf-8") == limits.page()  # or run `make docs`
    assert all(f"`{name}`" in limits.page() for name in limits.limits.__all__)


def option_names(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from option_names(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_column_of_a_run_folder_is_documented(
    stays: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stays.csv").write_bytes(stays)
    words = "coterie fit stays.csv --client hospital --target days --rounds 2 --out run"
    monkeypatch.setattr(sys, "argv", words.split())
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit):
        cli.main()
    page = (DOCS / "run-folder.md").read_text()
    for table in ("rounds", "clients"):
        section = page.split(f"## `{table}.parquet`")[1].split("\n## ")[0]
        said = {
            name for row in re.findall(r"^\| (`.+?) \|", section, re.MULTILINE) for name in re.findall("`(.+?)`", row)
        }
        elsewhere = {  # of fits of classes, or with calibration rows
            "metric_low", "metric_high", "base_rate", "auroc", "average_precision", "log_loss", "brier", "rows_calibration",
        }  # fmt: skip
        assert said - elsewhere == set(pq.read_schema(Path("run") / f"{table}.parquet").names)
    for path in Path("run").rglob("*"):
        if path.is_file():
            assert re.sub(r"-\d+", "-K", str(path.relative_to("run"))) in page, path


@pytest.mark.parametrize("name", ["papers.md", "privacy.md"])
def test_files_and_functions_that_a_page_names_are_there(name: str) -> None:
    assert stale(prose(DOCS / name)) == []


def test_what_is_no_longer_there_is_found() -> None:
    assert stale("`_Drive._answer` in `engines/drive.py`; `place` in `evaluate.py`; `Training.steps`; `loss`") == []
    assert stale("`_Drive._answer` in `engines/in_process.py`") == ["_Drive._answer is not in engines/in_process.py"]
    assert stale("`engines/gone.py`") == ["there is no file engines/gone.py"]
    assert stale("`no_such_function`; `ifca.gone`") == ["there is no no_such_function", "there is no ifca.gone"]
    assert stale("`while gone` in `ifca`") == ["while gone is not in ifca"]


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("model", [linear_regression(3), mlp(3, 4, n_outputs=1, loss="squared")], ids=["linear", "mlp"])
def test_privacy_page_has_the_sizes_of_ifca(model: Any, soft: bool) -> None:
    k, p, b = 2, model.n_parameters, model.dtype.itemsize
    start = Start("warm", torch.zeros(k, p, dtype=model.dtype))
    program = partial(
        ifca.ifca, model=model, n_clusters=k, rounds=1, step_size=0.1, seed=0, soft=soft, start=start, patience=0
    )
    assert bytes_up(program, model.dtype) == b * p * (k if soft else 1) + b * k + 8 * k + 1 + 16


def test_privacy_page_has_the_sizes_of_the_others() -> None:
    model = linear_regression(3)
    how = {"model": model, "rounds": 1, "step_size": 0.1, "seed": 0}
    p, d = model.n_parameters, 3
    assert bytes_up(partial(fedavg.fedavg, **how)) == 8 * p + 8 + 16
    assert bytes_up(partial(fedavg.local_models, **how)) == 16
    assert bytes_up(partial(fedavg.pooled_ridge, model=model, l2=0.0)) == 8 * (p + 1) ** 2 + 8
    scaling = partial(preparation.learn_scaling, shape=(d,), divide=True, real_target=True)
    assert bytes_up(scaling) == 24 * d + 24
    assert bytes_up(partial(preparation.safe_step_size, model=model)) == 8 * 9
    ridge = partial(fedavg.local_ridge, model=model, penalties=(0.1, 1.0), share=0.2, seed=0)
    assert bytes_up(ridge) == 8 * 2 + 16


def test_privacy_page_has_the_sizes_of_the_mixed_model() -> None:
    d, r, k = 3, 2, 3
    basis = torch.eye(d + 1, dtype=torch.float64)[[3, 0]]
    how: dict[str, Any] = {"basis": basis, "order": (0, 1, 2)}
    of_numbers = partial(mixed_model.mixed_model, **how, units=torch.eye(r, dtype=torch.float64), rounds=1)
    assert bytes_up(of_numbers) == 5 * 8 * ((k + 1) * (d + 2) ** 2 + r**2 + 2 * k**2 + 3)
    beta, noise = torch.zeros(d + 1, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    shared = {"basis": basis, "units": torch.eye(r, dtype=torch.float64), "beta": beta, "noise": noise}
    spread = Ask(mixed_clients.client_spread, shared, {name: Sum() for name in mixed_clients.client_spread.answers})
    assert bytes_up(partial(asking, spread)) == 40 * r
    odds = Ask(mixed_clients.logit_spread, shared, {name: Sum() for name in mixed_clients.logit_spread.answers})
    assert bytes_up(partial(asking, odds)) == 40 * r
    shared = {"beta": beta, "root": torch.eye(r, dtype=torch.float64), "basis": basis}
    odds = Ask(mixed_logistic.laplace_sums, shared, {name: Sum() for name in mixed_logistic.laplace_sums.answers})
    assert bytes_up(partial(asking, odds)) == 8 * ((d + 1) ** 2 + d + r**2 + 4)


def test_privacy_page_has_the_sizes_of_the_starts() -> None:
    model = linear_regression(3)
    k, p = 3, model.n_parameters
    how = {"model": model, "n_clusters": k, "rounds": 0, "step_size": 0.1, "seed": 0}
    assert bytes_up(partial(ifca.ifca, start=Start("random"), **how)) == 0
    spread = bytes_up(partial(ifca.ifca, start=Start("spread", candidates=5), **how), per_client=False)
    # 8 clients, two draws: own model, score and key; then, of at most 16 candidates, total losses and which is best
    pool = (spread - 2 * 8 * (8 * p + 16)) / (8 * 16)
    assert pool in range(8, 17)
    balanced = bytes_up(partial(ifca.ifca, start=Start("balanced"), **how))
    assert balanced % (64 * k) == 0
    assert balanced <= 25 * 64 * k


@pytest.mark.parametrize(
    ("family", "parameters", "of_scale", "of_m_step"),
    [(Gaussian(3), 3, 1, 4), (Gaussian(3, "full"), 3, 9, 4), (Regression(3, variance="estimated"), 3, 1, 12)],
    ids=["unit", "full", "regression"],
)
def test_privacy_page_has_the_sizes_of_mixtures(family: Family, parameters: int, of_scale: int, of_m_step: int) -> None:
    r, p, v, q, d = 2, parameters, of_scale, of_m_step, 3
    how: dict[str, Any] = {"family": family, "n_components": r, "seed": 0}
    once = 8 * r * p + 8 + 8 * v + 8 + 8 * r
    start = (1 + family.has_scale) * once
    assert bytes_up(partial(fedgrem.fedgrem, rounds=0, **how)) == start
    assert bytes_up(partial(fedgrem.fedgrem, rounds=1, **how)) - start == 8 * r * p + 16 + 8 * v + 8 + 8 * r + 8 + 8
    alone = 24 + 8 * r
    rounds = {"local": alone, "pooled": 8 * r * q + 8 * v + alone, "components": 8 * r * q + 8 * v + alone}
    rounds |= {"fedem": 8 * r * p + 8 * v + alone, "tgmm": 8 * v + alone, "mutual": 8 * r * p + 8 + 8 * v + alone}
    for sharing, size in rounds.items():
        begun = once if sharing == "local" else start  # in its own metric
        assert bytes_up(partial(em.em, rounds=1, sharing=sharing, **how)) - begun == size
    if isinstance(family, Regression):
        described = 8 * (d + 1) + 8 * d * d
        joint = 8 * r * p + 8 * v + 24 * (d + 1) + 8 * d * d + 16
        assert bytes_up(partial(fedgmm.fedgmm, rounds=1, **how)) - start == described + joint
    theta, weights, scale = torch.zeros(8, r, p).double(), torch.full((8, r), 1 / r).double(), family.unit_scale()
    spread = spread_ask(family, theta[0], theta, weights, scale[None], torch.ones(8, dtype=torch.bool))
    assert bytes_up(partial(asking, spread)) == 8 * v + 8
    assert bytes_up(partial(asking, adopt_ask(family, theta[0], weights[0], scale))) == 8 * r + 24


def test_privacy_page_has_the_sizes_of_one_shot_clustering() -> None:
    model, k = linear_regression(3), 2
    p = model.n_parameters
    program = partial(one_shot.one_shot, model=model, n_clusters=k, rounds=1, step_size=0.1, seed=0)
    assert bytes_up(program) == 8 * p + 8 + 8 * p + 8 * k + 8 * k + 16


def asking(ask: Ask, state: None) -> Any:
    """Ask once."""
    yield ask
    yield Save(None, {})


def bytes_up(program: Any, dtype: torch.dtype = torch.float64, *, per_client: bool = True) -> int:
    """What 8 clients send up until the program ends, by client."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 3, generator=draw, dtype=dtype) for n in (4, 5, 6, 7, 7, 8, 9, 9)]
    ys = [torch.randn(len(x), generator=draw, dtype=dtype) for x in xs]
    total = sum(done.bytes_up for done in InProcess(ragged(xs, ys)).run([program]).rounds)
    return total // 8 if per_client else total
