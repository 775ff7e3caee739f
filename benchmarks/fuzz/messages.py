# SPDX-License-Identifier: Apache-2.0
"""Messages as a stranger may send them: to the decoder, as introductions to a server, as requests to a node.

Three ways each: bytes and documents of any form; what a node or a server really says, with some of it replaced; and what is
large, deep or long on purpose.
"""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import strategies as st

import coterie.engines.flower.catalogue  # noqa: F401  registers all steps
from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.remote import Part
from coterie.data.schema import Schema
from coterie.engines.flower.client import NodeData, answered
from coterie.engines.flower.identity import is_proven
from coterie.engines.flower.incoming import check_batch, check_introduction, check_reply, check_room
from coterie.engines.flower.messages import FROM_NODES, Batch, Hello, Introduction, Question, Reply, State
from coterie.engines.flower.preflight import left_out, rows_of, schema_of
from coterie.engines.flower.wire import from_records, to_records
from coterie.evaluate import target_ask

__all__ = ["TARGETS"]

_DOCUMENT, _ARRAYS = "coterie-document", "coterie-arrays"


# -- what is really said ----------------------------------------------------------------------------------------------
@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def _node(name: str) -> NodeData:
    x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = Ragged.from_groups(x.flatten(0, 1), x.sum(-1).flatten(), [f"{name}-{i // 4}" for i in range(12)])  # type: ignore[arg-type]
    columns = [{"name": f"x{i}"} for i in range(3)]
    schema = Schema.model_validate({"client": "c", "target": "y", "columns": columns, "task": "regression"})
    return NodeData(name, lambda _: Clients(schema, rows), Path(_folder().name) / name)


@cache
def _asked() -> Batch:
    ask = target_ask(torch.tensor(0.5, dtype=torch.float64))
    question = Question("run", Part("train"), (), None, torch.arange(3), {0: ask}, State("a", 0, "a", 1, 0))
    return Batch((question,))


@cache
def _said(what: str) -> tuple[Any, bytes]:
    """What is really said: the document, and the bytes of its tensors."""
    request = {"hello": Hello("run", "00"), "batch": _asked()}
    records = {
        "introduction": lambda: answered(to_records(Hello("run", "00")), _node("north")),
        "reply": lambda: answered(to_records(_asked()), _node("north")),
        **{name: (lambda value=value: to_records(value)) for name, value in request.items()},
    }[what]()
    return json.loads(str(records[_DOCUMENT]["json"])), records[_DOCUMENT]["tensors"]


@cache
def _other() -> Introduction:
    made: Introduction = from_records(answered(to_records(Hello("run", "00")), _node("south")))
    return made


# -- what a stranger may make of it -----------------------------------------------------------------------------------
_WORDS = st.sampled_from(
    ["type", "fields", "tuple", "map", "float", "tensor", "dtype", "step", "named", "0", "1", "train", "test", "x", "y",
     "nan", "Introduction", "Reply", "Answers", "Refusal", "Hello", "Batch", "Question", "Ask", "Dense", "Part", "Folded",
     "Scaled"]
) | st.text(max_size=8)  # fmt: skip
_PLAIN = (
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**31, 2**45, 2**63, -(2**63) - 1, 10**300])
    | st.floats(allow_nan=False) | _WORDS
)  # fmt: skip
_JSON = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=3)
    | st.builds(lambda mark, value: {mark: value}, _WORDS, inner),
    max_leaves=12,
)  # fmt: skip


@st.composite
def _changed(draw: Any, what: str) -> Any:
    """What is really said, with one to three places replaced, removed or doubled."""
    document, _ = _said(what)
    for _ in range(draw(st.integers(1, 3))):
        document = _at_one_place(draw, document)
    return document


def _at_one_place(draw: Any, document: Any) -> Any:
    inside = isinstance(document, dict | list) and bool(document) and draw(st.integers(0, 9)) > 0
    if not inside:
        return draw(_JSON)
    places = list(document) if isinstance(document, dict) else list(range(len(document)))
    place = draw(st.sampled_from(places))
    made = dict(document) if isinstance(document, dict) else dict(enumerate(document))
    how = draw(st.sampled_from(["deeper", "deeper", "deeper", "deeper", "gone", "twice"]))
    if how == "gone":
        del made[place]
    elif how == "twice":
        made[draw(_WORDS) if isinstance(document, dict) else len(made)] = made[place]
    else:
        made[place] = _at_one_place(draw, made[place])
    return made if isinstance(document, dict) else list(made.values())


_LARGE = st.sampled_from(
    ["[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 50_000, '{"tuple":[' * 500 + "]}" * 500, "[" + "[]," * 20_000 + "[]]",
     '{"map":[[' * 300 + "]]}" * 300, "1" * 5_000, "1e999", "NaN", '"\\ud800"', '"\\u0000"', '{"float":"1e999"}', "",
     "\ufeff[]", "[" + '"",' * 30_000 + '""]', '{"type":"Refusal","fields":{"node":"n","why":"' + "w" * 30_000 + '"}}']
)  # fmt: skip


@st.composite
def _header(draw: Any) -> bytes:
    """A header of tensors that says anything, before a few bytes."""
    shape = st.lists(st.integers(0, 4) | st.sampled_from([2**31, 2**45, 2**62, -1]), max_size=4)
    about = st.fixed_dictionaries(
        {"dtype": st.sampled_from(["F64", "I64", "BOOL", "F32", "BF16", "F8_E4M3", "x"]), "shape": shape | _JSON,
         "data_offsets": st.lists(st.integers(0, 64) | st.sampled_from([2**45, 2**63, -8]), max_size=3) | _JSON}
    )  # fmt: skip
    said = draw(st.dictionaries(_WORDS, about | _JSON, max_size=3) | _JSON)
    text = json.dumps(said).encode()
    length = draw(st.sampled_from([len(text), len(text), len(text), 0, 2**45, 2**64 - 1, max(len(text) - 1, 0)]))
    return length.to_bytes(8, "little") + text + draw(st.binary(max_size=64))


@st.composite
def _tensors(draw: Any, what: str) -> bytes:
    """The bytes of tensors of what is really said, as they are or with some of them replaced."""
    data = bytearray(_said(what)[1])
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.sampled_from([len(data), len(data), len(data), len(data) - 1, 8, 3]))
    return bytes(data[:end])


def _records(document: Any, data: bytes) -> RecordDict:
    text = document if isinstance(document, str) else json.dumps(document)
    if len(data) % 2:
        return RecordDict({_DOCUMENT: ConfigRecord({"json": text, "tensors": data})})
    array = Array(dtype="uint8", shape=(len(data),), stype="safetensors", data=data)
    return RecordDict({_ARRAYS: ArrayRecord({"tensors": array}), _DOCUMENT: ConfigRecord({"json": text})})


def _messages(what: str) -> st.SearchStrategy[RecordDict]:
    document = _changed(what) | _changed(what) | _changed(what) | _JSON | _LARGE | st.text(max_size=50)
    return st.builds(_records, document, _tensors(what) | _tensors(what) | _header() | st.binary(max_size=80))


# -- who reads it -----------------------------------------------------------------------------------------------------
def _decode(records: RecordDict) -> None:
    """All that either side does first."""
    from_records(records)


def _meet(records: RecordDict) -> None:
    """What a server does with an introduction, beside another node's."""
    said = from_records(records, FROM_NODES)
    if isinstance(said, Introduction):
        check_introduction(said)
        is_proven(said, Hello("run", "00"), 0)
        nodes = [_other(), said]
        out = left_out(nodes)
        together = [node for place, node in enumerate(nodes) if place not in out]
        if together:
            rows_of(together, schema_of(together), None, "train")
    elif isinstance(said, Reply):
        check_reply(said)


def _request(records: RecordDict) -> None:
    """What a node does with a request before it looks at a row."""
    asked = from_records(records)
    if isinstance(asked, Batch):
        check_batch(asked)
        for question in asked.questions:
            check_room(question, 3)


TARGETS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], None]]] = {
    "messages": (_messages("reply") | _messages("batch") | _messages("introduction"), _decode),
    "introductions": (_messages("introduction"), _meet),
    "replies": (_messages("reply"), _meet),
    "requests": (_messages("batch") | _messages("hello"), _request),
}
