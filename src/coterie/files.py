# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or not there, and that say when they were changed: how everything in a folder of ours is written.

A folder may have been put together by a stranger. So nothing is written through a link in it, and no name that somebody
could foresee is used on the way.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coterie.errors import RunError

__all__ = [
    "check_files", "check_seal", "clear_temporaries", "digest", "is_temporary", "make_folder", "owner_only", "remove_files",
    "replace_file", "sealed", "temporary",
]  # fmt: skip

SEAL = "sha256"  # the field of a document that seals the others
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.(.+)\.(?:[0-9a-f]{16}|[0-9]{1,7})\.tmp")  # earlier versions had the process id there
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


# -- writing ----------------------------------------------------------------------------------------------------------
def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one and nothing between.

    A link at `path` is replaced, not followed.
    """
    draft = temporary(path)
    opened = os.open(draft, _NEW, 0o666)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def owner_only() -> Iterator[None]:
    """What is written here nobody else may read: files are made with 0600 and folders with 0700."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def temporary(path: Path) -> Path:
    """A name beside a path, which nobody can foresee and nobody else uses, until what is written there is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def make_folder(path: Path) -> None:
    """Make a folder in one of ours, unless it is there; a link, which would lead elsewhere, is refused."""
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise RunError(f"{path} is a link, and files would be written elsewhere", "put a folder in its place")


# -- removing ---------------------------------------------------------------------------------------------------------
def is_temporary(path: Path, name: str | None = None) -> bool:
    """Whether this is what a process of ours leaves when it is killed while it writes: a file of this name, or any."""
    found = _TEMPORARY.fullmatch(path.name)
    return found is not None and name in (None, found[1])


def clear_temporaries(folder: Path) -> None:
    """Remove what killed processes have left in a folder; nobody else may write there now."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if is_temporary(path):
            remove_files(path, [inner.name for inner in path.iterdir()] if _is_folder(path) else [])


def remove_files(path: Path, names: Iterable[str]) -> None:
    """Remove these files of a folder, and the folder if nothing else is in it; or a single file, or link."""
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    for name in names:
        with suppress(IsADirectoryError, PermissionError):  # a folder, which is not ours
            (path / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's files are in it
        path.rmdir()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


# -- checking ---------------------------------------------------------------------------------------------------------
def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(folder: Path, document: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Refuse files that are not those a run or a comparison has written; a file that is not there is no fault.

    Parameters
    ----------
    folder : Path
        Where they are.
    document : mapping
        `run.json` or `compare.json`: its `files` has their digests. Those of earlier versions have none.
    names : iterable of str, optional
        Which; all by default.
    """
    known = document.get("files")
    if not isinstance(known, dict):
        return
    for name in known if names is None else [name for name in names if name in known]:
        path = folder / name
        if path.is_file() and digest(path) != known[name]:
            raise RunError(
                f"{path} is not as the run has written it: it is damaged, or was changed",
                "take the folder from a copy, or fit again with another --out",
            )


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document for JSON with a digest of itself."""
    return {**document, SEAL: _digest_of(json.loads(json.dumps(document)))}


def check_seal(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a document that has changed since it was sealed; those of earlier versions are not sealed.

    A digest under another name is a seal, too: the change is in its name.
    """
    renamed = any(isinstance(value, str) and _DIGEST.fullmatch(value) for key, value in document.items() if key != SEAL)
    if renamed or (SEAL in document and document[SEAL] != _digest_of(document)):
        raise RunError(
            f"{path} was damaged or changed after it was written",
            f'if you have changed it yourself, remove "{SEAL}" from it; else take it from a copy, or fit again',
        )


def _digest_of(document: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in document.items() if key != SEAL}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
