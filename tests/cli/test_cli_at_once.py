# SPDX-License-Identifier: Apache-2.0
"""The command line answers at once: what computes is imported by the commands that compute, and by nothing before."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import get_args

import pytest
import typer

import coterie
from coterie import cli
from coterie.studies import (
    bad_clients,
    choices,
    compare_planted,
    compare_real,
    fedgrem_adaptive,
    fedgrem_adversarial,
    fedgrem_simulation,
    ifca_synthetic,
    mixed_ablation,
    mixed_methods,
    mixed_regression,
    mixed_scaling,
    mixture_common,
    mixture_tasks,
    privacy_audit,
    privacy_utility,
    rotated_tasks,
    srpfl_images,
    srpfl_linear,
    srpfl_speedup,
)
from coterie.studies.data import contamination

needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")

LARGE = {"torch", "numpy", "scipy", "sklearn", "pyarrow", "safetensors", "pydantic", "jinja2", "flwr"}

# Calls the command line, and says after all else which packages were imported.
TELL = """
import json, sys
try:
    from coterie.cli.commands import main
    main()
finally:
    sys.stdout.flush()
    print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))
"""


def asked(*words: str, cwd: Path, **environment: str) -> tuple[int, str, str, set[str]]:
    """Call the command line in a process of its own.  -> exit code, stdout, stderr, packages that were imported"""
    around = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment}
    line = [sys.executable, "-c", TELL, *words]
    done = subprocess.run(line, cwd=cwd, env=around, capture_output=True, text=True, timeout=120, check=False)
    *said, packages = done.stdout.splitlines()
    return done.returncode, "\n".join(said), done.stderr, set(json.loads(packages))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--help", "Inspect data before fitting."),
        ("--version", coterie.__version__),
        ("fit --help", "--components"),
        ("compare --help", "--quick"),
        ("summarise --help", "--few-shot"),
        ("data check --help", "--min-rows"),
        ("study", "srpfl-images"),
        ("study --help", "fedgrem-pendigits"),
        ("study fedgrem-adversarial --help", "permuted"),
        ("flower --help", "status"),
        ("node --help", "pending"),
        ("node log --help", "--last"),
        pytest.param("flower run --help", ".coterie-flower", marks=needs_flower),
    ],
)
def test_help_is_given_without_importing_what_computes(tmp_path: Path, words: str, told: str) -> None:
    code, out, _, packages = asked(*words.split(), cwd=tmp_path)
    assert (code, packages & LARGE) == (0, set())
    assert told in out


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        ("--hlep", "there is no option --hlep", "did you mean --help"),
        ("fti", "no such command 'fti'", "`coterie --help` shows what there is"),
        ("fit x.csv --cluster 2", "there is no option --cluster", "did you mean --clusters"),
        ("fit --clusters 2", "missing argument 'DATA'", "`coterie fit --help` shows what there is"),
        ("study srpfl-linear --round 2", "there is no option --round", "did you mean --rounds"),
        pytest.param("flower up --node 3", "there is no option --node", "did you mean --nodes", marks=needs_flower),
    ],
)
def test_misspelt_words_are_refused_without_importing_what_computes(
    tmp_path: Path, words: str, sentence: str, hint: str
) -> None:
    code, out, err, packages = asked(*words.split(), cwd=tmp_path)
    assert (code, out, packages & LARGE) == (2, "", set())
    said, way_out = err.splitlines()
    assert said.startswith(f"error: {sentence}")
    assert way_out.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("begun", "completed"),
    [
        ("coterie f", ["fit", "flower"]),
        ("coterie fit --clu", ["--clusters"]),
        ("coterie study srpfl", ["srpfl-linear", "srpfl-speedup", "srpfl-images"]),
        ("coterie flower run --super", ["--superlink"]),
    ],
)
def test_words_are_completed_without_importing_what_computes(tmp_path: Path, begun: str, completed: list[str]) -> None:
    number = str(len(begun.split()) - 1)
    shell = {"_COTERIE_COMPLETE": "complete_bash", "COMP_WORDS": begun, "COMP_CWORD": number}
    code, out, _, packages = asked(cwd=tmp_path, **shell)
    assert (code, out.split(), packages & LARGE) == (0, completed, set())


# -- the package ------------------------------------------------------------------------------------------------------
def test_the_package_is_imported_without_what_computes() -> None:
    code = "import sys, coterie; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & LARGE == set()


def test_every_public_name_is_there_and_listed() -> None:
    assert len(set(coterie.__all__)) == len(coterie.__all__)
    for name in coterie.__all__:
        assert getattr(coterie, name) is not None
        assert name in dir(coterie)
    assert not hasattr(coterie, "nothing")


def test_every_public_name_is_imported_by_a_star() -> None:
    found: dict[str, object] = {}
    exec("from coterie import *", found)
    assert set(coterie.__all__) <= found.keys()


# -- what help says without asking those who know ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("told", "known"),
    [
        (choices.MIXED_METHODS, mixed_methods.METHODS),
        ((choices.MIXED_PAPER,), (mixed_methods.PAPER,)),
        (choices.FACTORS, mixed_scaling.FACTORS),
        (choices.VARIANTS, mixed_ablation.VARIANTS),
        (choices.MIXTURE_METHODS, mixture_common.METHODS),
        (choices.CONTAMINATIONS, get_args(contamination.Contamination)),
        (choices.LINEAR_METHODS, srpfl_linear.METHODS),
        (choices.IMAGE_METHODS, srpfl_images.METHODS),
        (choices.DATASETS, srpfl_images.DATASETS),
        (choices.SPEEDS, srpfl_images.SPEEDS),
        (choices.SPEEDS, srpfl_linear.SPEEDS),
        (choices.CASES, [case.name for case in compare_planted.CASES]),
        (choices.REAL_DATA, [task.name for task in compare_real.TASKS]),
    ],
)
def test_choices_that_help_tells_are_those_of_the_studies(told: tuple[str, ...], known: Collection[str]) -> None:
    assert told == tuple(known)


def test_commands_are_called_like_the_studies_they_run() -> None:
    studies = typer.main.get_command(cli.app).commands["study"].commands  # type: ignore[attr-defined]
    modules = (
        bad_clients, compare_planted, compare_real, fedgrem_adaptive, fedgrem_adversarial, fedgrem_simulation,
        ifca_synthetic, mixed_ablation, mixed_regression, mixed_scaling, privacy_audit,
        privacy_utility, srpfl_images, srpfl_linear, srpfl_speedup,
    )  # fmt: skip
    rotated = {task.name for task in (rotated_tasks.MNIST, rotated_tasks.DIGITS, rotated_tasks.CIFAR)}
    assert {*mixture_tasks.TASKS, *(module.NAME for module in modules), *rotated} == studies.keys()


def test_fits_begin_without_what_is_slow_to_load_and_seldom_needed() -> None:
    code = "import sys, coterie.runs.auto; print(*({'scipy.stats', 'scipy.optimize', 'sklearn.metrics'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
