# SPDX-License-Identifier: Apache-2.0
"""Having a folder alone, and removing from it what is ours: leftovers of killed processes, and runs that came to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coterie.errors import ConfigError, RunError
from coterie.files import clear_temporaries, is_temporary, remove_files
from coterie.lock import LOCK, held
from coterie.report.run_folder import read_document

__all__ = ["RUN_NAME", "holding", "remove_own", "remove_run", "tidy"]

RUN_NAME = "flower-run"  # under which nodes of a federation know a run, and who they are; there before the run begins
_FILES = ("run.json", "rounds.parquet", "clients.parquet", "state.safetensors", "report.html", "account.json", RUN_NAME)
_COMPARISON = ("compare.json", "clients.parquet", "report.html")  # of --method auto
_WORDS = ("kernel", "about.json", "noise.key", RUN_NAME)  # what checkpoints/ holds beside checkpoints


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Have the folder of a run or a comparison alone; what killed processes have left in it is removed.

    Raises
    ------
    RunError
        Another process has it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and a run is a folder", "name a new folder with --out")
    with held(folder / LOCK, folder) as first:
        if first:
            tidy(folder)
        yield


def remove_run(folder: Path) -> None:
    """Remove what a run has written, and nothing else; the folder is left to whoever has made it."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    remove_own(folder / "models")
    _remove_checkpoints(folder)
    remove_files(folder / "comparison", _COMPARISON)


def tidy(folder: Path) -> None:
    """Remove what killed processes have left in a folder of ours; one of somebody else is left as it is."""
    found = [path for path in folder.iterdir() if path.name != LOCK]
    if not {"run.json", "compare.json"} & {path.name for path in found} and not all(map(is_temporary, found)):
        return
    for inside in ("", "models", "checkpoints", "checkpoints/answers", "comparison"):
        clear_temporaries(folder / inside)
    with suppress(RunError):  # it is said where the run is read
        if read_document(folder).get("status") == "finished":
            _remove_checkpoints(folder)


def _remove_checkpoints(folder: Path) -> None:
    remove_own(folder / "checkpoints" / "answers")
    remove_own(folder / "checkpoints")


def remove_own(folder: Path) -> None:
    """Remove checkpoints, models and answers from a folder of them, and the folder if nothing else is in it."""
    if folder.is_dir() and not folder.is_symlink():
        names = [path.name for path in folder.iterdir()]
        remove_files(folder, [name for name in names if name.endswith(".safetensors") or name in _WORDS])
