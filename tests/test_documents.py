# SPDX-License-Identifier: Apache-2.0
"""Documents of strangers: whatever is beyond the bounds is refused in one sentence, before anything is made of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.documents import Said, checked, parsed, read_json
from coterie.errors import RunError
from coterie.limits import MOST_DEPTH, MOST_TEXT, MOST_VALUES


def refused(content: bytes | str) -> str:
    with pytest.raises(RunError) as said:
        parsed(content, "it", "try again")
    assert said.value.hint == "try again"
    assert "\n" not in said.value.message
    return said.value.message


def test_a_document_is_read_as_it_is() -> None:
    document = {"a": [1, -2.5, None, True], "b": {"c": "é"}}
    assert parsed(json.dumps(document), "it", "") == document


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff", b"NaN", b"[Infinity]", b"[1e999]", b"[-1e999]", str(2**64).encode(), b"1" * 5000,
        b"[" * 200_000, b'{"a":' * 200_000,
    ],
)  # fmt: skip
def test_what_is_no_json_or_has_numbers_out_of_range_is_refused(content: bytes) -> None:
    assert refused(content) == "it cannot be read: it is not JSON, is cut short, or has a number that is out of range"


def test_lists_within_each_other_have_a_limit() -> None:
    deep: Any = 1
    for _ in range(MOST_DEPTH):
        deep = [deep]
    assert parsed(json.dumps(deep), "it", "") == deep
    assert "within each other" in refused(json.dumps([deep]))


def test_texts_and_keys_have_a_limit() -> None:
    assert "a text of 100,001 characters" in refused(json.dumps(["x" * (MOST_TEXT + 1)]))
    assert "a text of 100,001 characters" in refused(json.dumps({"x" * (MOST_TEXT + 1): 1}))


def test_values_have_a_limit() -> None:
    assert "more than 4,000,000 values" in refused("[" + "0," * MOST_VALUES + "0]")
    assert parsed("[0,1,2]", "it", "", most=4) == [0, 1, 2]
    with pytest.raises(RunError, match="more than 4 values"):
        parsed('{"a":{"b":{}}}', "it", "", most=4)  # no commas, and keys count


def test_numbers_that_json_does_not_have_are_for_checkpoints() -> None:
    assert parsed("[Infinity]", "it", "", finite=False) == [float("inf")]


def test_a_file_is_not_read_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it.json").write_text("[" + "1," * 1000 + "1]")
    monkeypatch.setattr("coterie.documents.MOST_DOCUMENT_BYTES", 1000)
    with pytest.raises(RunError, match="is larger than"):
        read_json(tmp_path / "it.json", "")


class Thing(Said):
    """Something that a document says."""

    name: str
    size: float = 0.0


def test_a_wrong_type_is_named_with_its_place() -> None:
    assert checked(Thing, {"name": "a", "later": [1]}, "it", "") == Thing(name="a")
    with pytest.raises(RunError, match="it is not as it should be at size: input should be a valid number"):
        checked(Thing, {"name": "a", "size": "1"}, "it", "")
    with pytest.raises(RunError, match="at its beginning"):
        checked(Thing, [], "it", "")
