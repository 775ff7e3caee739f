# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or not there, that lead nowhere else, and that say when they were changed."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from coterie import files
from coterie.errors import RunError
from coterie.files import (
    check_files,
    check_seal,
    clear_temporaries,
    digest,
    is_temporary,
    make_folder,
    remove_files,
    replace_file,
    sealed,
    temporary,
)


def test_a_link_at_the_place_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "report.html").symlink_to(tmp_path / "elsewhere")
    replace_file(tmp_path / "report.html", b"page")
    assert (tmp_path / "elsewhere").read_text() == "precious"
    assert not (tmp_path / "report.html").is_symlink()
    assert (tmp_path / "report.html").read_bytes() == b"page"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_lies_at_the_temporary_name_is_not_written_to(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names cannot be foreseen; even if one were, nothing is opened that is there already."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / "elsewhere").write_text("precious")
    draft = temporary(tmp_path / "a")
    if kind == "link":
        draft.symlink_to(tmp_path / "elsewhere")
    else:
        draft.write_text("precious")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "a", b"new")
    assert draft.read_text() == "precious"
    assert not (tmp_path / "a").exists()


def test_temporary_names_are_drawn_anew_and_known_again(tmp_path: Path) -> None:
    names = {temporary(tmp_path / "run.json").name for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"\.run\.json\.[0-9a-f]{16}\.tmp", name) for name in names)
    assert all(is_temporary(Path(name), "run.json") for name in names)
    assert is_temporary(Path(".run.json.4711.tmp"))  # of earlier versions
    assert not is_temporary(temporary(Path("a.b")), "a")
    for mine in ("notes.tmp", ".notes.tmp", ".notes.mine.tmp", "run.json", ".coterie.lock"):
        assert not is_temporary(Path(mine))


def test_a_failure_leaves_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "a", b"new")
    assert list(tmp_path.iterdir()) == []


def test_only_temporaries_are_cleared(tmp_path: Path) -> None:
    for name in ("notes.tmp", ".notes.tmp", "run.json"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".run.json.123.tmp").write_text("{")
    draft = temporary(tmp_path / "comparison")
    draft.mkdir()
    (draft / "compare.json").write_text("{")
    clear_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.tmp", "notes.tmp", "run.json"]
    clear_temporaries(tmp_path / "absent")


def test_links_are_not_followed_where_things_are_removed_or_made(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / ".a.123.tmp").write_text("mine")
    (tmp_path / "run").mkdir()
    for name in ("models", ".models.123.tmp"):
        (tmp_path / "run" / name).symlink_to(mine)
    clear_temporaries(tmp_path / "run" / "models")
    clear_temporaries(tmp_path / "run")
    remove_files(tmp_path / "run" / "models", [".a.123.tmp"])
    assert [path.name for path in mine.iterdir()] == [".a.123.tmp"]
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "models").symlink_to(mine)
    with pytest.raises(RunError, match="is a link"):
        make_folder(tmp_path / "run" / "models")


def test_a_folder_with_other_files_stays_with_them(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("prepare.safetensors", "notes.txt"):
        (folder / name).write_text("x")
    (folder / "deeper").mkdir()
    remove_files(folder, ["prepare.safetensors", "absent", "deeper"])
    assert sorted(path.name for path in folder.iterdir()) == ["deeper", "notes.txt"]
    remove_files(folder / "deeper", [])
    remove_files(folder, ["notes.txt"])
    assert not folder.exists()


DOCUMENT: dict[str, Any] = {"seed": 3, "config": {"rounds": 60, "step": 0.1}, "names": ["ä", None, True], 1: (1, 2)}


def test_every_flipped_bit_of_a_sealed_document_is_seen_or_changes_nothing(tmp_path: Path) -> None:
    text = json.dumps(sealed(DOCUMENT), indent=2).encode()
    whole = json.loads(text)
    check_seal(tmp_path, whole)
    seen = 0
    for bit in range(8 * len(text)):
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = json.loads(changed)
            check_seal(tmp_path, found)
        except (ValueError, RunError):
            seen += 1
        else:
            assert found == whole
    assert seen > 7.5 * len(text)


def test_documents_of_earlier_versions_are_not_sealed(tmp_path: Path) -> None:
    check_seal(tmp_path, {"seed": 3})
    check_files(tmp_path, {"seed": 3})


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    said = {"files": {"a": digest(tmp_path / "a"), "gone": "0"}}
    check_files(tmp_path, said)
    (tmp_path / "a").write_bytes(b"abd")
    check_files(tmp_path, said, ["gone"])
    with pytest.raises(RunError, match=f"{tmp_path / 'a'} is not as the run has written it") as caught:
        check_files(tmp_path, said)
    assert caught.value.hint
