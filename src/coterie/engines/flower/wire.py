# SPDX-License-Identifier: Apache-2.0
"""Messages: all tensors together, exactly as they are, and everything else as one JSON document.

Flower hands every array on by itself, from the server to the SuperLink, the SuperNode, the ClientApp and back; a message of
forty tensors would be hundreds of requests. So all are bytes in the format of safetensors: beside the document if they are
few, else as one array.

The document holds plain values, registered dataclasses by their names, and references to tensors. It is never code. What
comes in is read within bounds, and nothing but a `CoterieError` comes of what cannot be read.
"""

import base64
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import save
from torch import Tensor

from coterie.engines.flower import registry
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.protocol import Tensors

__all__ = [
    "MOST_CHARACTERS", "MOST_DEPTH", "MOST_NUMBERS", "MOST_TENSORS", "fingerprint", "from_records", "from_text", "pack",
    "tensors_in", "to_records", "to_text", "unpack",
]  # fmt: skip

_ARRAYS, _DOCUMENT = "coterie-arrays", "coterie-document"
_FORMAT = "safetensors"
_FEW = 1 << 20  # bytes of tensors that stand beside the document; more are an array, which Flower sends in pieces
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
)}  # fmt: skip
_KINDS = {
    "BOOL": torch.bool, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_HINT = "both sides must run the same version of coterie"
_SHOWN = 200  # characters of what went wrong

# What a message may hold. Whoever sends it may be a stranger, and what is made of it must fit into memory: a document of
# this length becomes at most half a gigabyte, numbers stay what they are.
MOST_CHARACTERS = 1 << 24  # of the document: 100,000 clients' names, or 100,000 columns
MOST_VALUES = 1 << 20  # in it: as many as there may be clients, columns and levels, and more
MOST_DEPTH = 64  # of it; a batch of questions has about twenty
MOST_HEADER = 1 << 23  # bytes that say where tensors lie
MOST_TENSORS = 1 << 16  # a comparison has some thousand in a message
MOST_AXES = 12  # of a tensor
MOST_NUMBERS = 1 << 32  # that a tensor claims to hold, had each of its axes at least one place


def pack(value: Any, tensors: Tensors) -> Any:
    """Make JSON of a value; its tensors go to `tensors`, each once."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [pack(inner, tensors) for inner in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(inner, tensors) for inner in value]}
    if isinstance(value, Mapping):
        return {"map": [[pack(name, tensors), pack(inner, tensors)] for name, inner in value.items()]}
    return _pack_object(value, tensors)


def _pack_object(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, Tensor):
        place = next((name for name, known in tensors.items() if known is value), f"{len(tensors)}")
        tensors[place] = value
        return {"tensor": place}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    name = registry.named(value)
    if name is not None:
        return {"named": name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: pack(getattr(value, f.name), tensors) for f in dataclasses.fields(value) if f.init}
        return {"type": registry.value_name(type(value)), "fields": fields}
    if isinstance(value, FunctionType):
        return {"step": registry.step_name(value)}
    raise ConfigError(f"a {type(value).__name__} cannot be sent", "register a dataclass, or an object by name")


def unpack(said: Any, tensors: Mapping[str, Tensor], only: Sequence[type] = ()) -> Any:
    """Make a value of what `pack` made.

    Parameters
    ----------
    only : sequence of types
        The dataclasses that may be made; then no client function, named object or precision may be named either. By default
        whatever is registered.

    Raises
    ------
    CoterieError
        And nothing else, whatever was said.
    """
    try:
        return _Unpacking(tensors, frozenset(only)).value(said, 0)
    except CoterieError:
        raise
    except Exception as error:  # dataclasses are made of what a stranger has said, and may raise anything
        raise RunError(f"a message cannot be understood: {_short(error)}", _HINT) from None


class _Unpacking:
    """One value that is being made, within bounds."""

    def __init__(self, tensors: Mapping[str, Tensor], only: frozenset[type]) -> None:
        self.tensors, self.only, self.left = tensors, only, MOST_VALUES

    def value(self, said: Any, depth: int) -> Any:
        self.left -= 1
        if depth > MOST_DEPTH or self.left < 0:
            raise RunError(f"a message has more than {MOST_DEPTH} levels or {MOST_VALUES:,} values", _HINT)
        if isinstance(said, list):
            return [self.value(inner, depth + 1) for inner in said]
        if isinstance(said, dict):
            return self._marked(said, depth + 1)
        if isinstance(said, str):
            said.encode()  # half of a surrogate pair cannot be written anywhere
        elif isinstance(said, int) and not -(1 << 63) <= said < 1 << 64:
            raise ValueError("a number beyond 64 bits")
        return said

    def _marked(self, said: dict[str, Any], depth: int) -> Any:
        if "type" in said:
            kind = registry.value_type(said["type"])
            if self.only and kind not in self.only:
                raise ValueError(f"a {kind.__name__} is not expected")
            return kind(**{name: self.value(inner, depth) for name, inner in said["fields"].items()})
        ((mark, inner),) = said.items()
        if mark == "tuple":
            return tuple(self.value(one, depth) for one in inner)
        if mark == "map":
            return {self.value(name, depth): self.value(one, depth) for name, one in inner}
        made: dict[str, Callable[[str], Any]] = {"float": float, "tensor": lambda name: self.tensors[name]}
        if not self.only:
            made |= {"dtype": lambda name: _DTYPES[name], "step": registry.step, "named": registry.named_object}
        return made[mark](inner)


def fingerprint(value: Any, size: int = 12) -> str:
    """A word that tells a value from others, on any machine; of 32 bytes, also from what somebody makes up to be like it."""
    tensors: Tensors = {}
    seen = hashlib.blake2b(json.dumps(pack(value, tensors), allow_nan=False).encode(), digest_size=size)
    for tensor in tensors.values():
        seen.update(repr((tensor.dtype, tensor.shape)).encode() + _numpy(tensor).tobytes())
    return seen.hexdigest()


def to_text(value: Any) -> str:
    """Put a value into a text, for a file."""
    tensors: Tensors = {}
    document = pack(value, tensors)
    return json.dumps({"document": document, "tensors": base64.b64encode(_saved(tensors)).decode()}, allow_nan=False)


def from_text(text: str) -> Any:
    """Take a value out of a text."""
    try:
        said = json.loads(text)
        document, tensors = said["document"], _loaded(base64.b64decode(said["tensors"]))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"a file cannot be read: {_short(error)}", _HINT) from None
    return unpack(document, tensors)


# -- Flower's records -------------------------------------------------------------------------------------------------
def to_records(value: Any) -> RecordDict:
    """Put a value into records that Flower sends."""
    tensors: Tensors = {}
    document = json.dumps(pack(value, tensors), allow_nan=False)
    data = _saved(tensors)
    if len(data) <= _FEW:
        return RecordDict({_DOCUMENT: ConfigRecord({"json": document, "tensors": data})})
    arrays = ArrayRecord({"tensors": Array(dtype="uint8", shape=(len(data),), stype=_FORMAT, data=data)})
    return RecordDict({_ARRAYS: arrays, _DOCUMENT: ConfigRecord({"json": document})})


def from_records(records: RecordDict, only: Sequence[type] = ()) -> Any:
    """Take a value out of records: see `unpack`."""
    tensors = tensors_in(records)
    try:
        text = records[_DOCUMENT]["json"]
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            raise ValueError(f"it is no text of at most {MOST_CHARACTERS:,} characters")
        if text.count("[") + text.count("{") > MOST_VALUES:  # each takes many times its two characters
            raise ValueError(f"it has more than {MOST_VALUES:,} lists and maps")
        said = json.loads(text, parse_constant=_refuse_constant)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"a message cannot be read: {_short(error)}", _HINT) from None
    return unpack(said, tensors, only)


def tensors_in(records: RecordDict) -> Tensors:
    """The tensors that records hold, by the names that the document has for them.

    What the header says is held against the bounds and against the bytes that are there, before anything is made of it.
    """
    try:
        if "tensors" in records[_DOCUMENT]:
            data: Any = records[_DOCUMENT]["tensors"]
        else:
            array = records[_ARRAYS]["tensors"]
            data = array.data if isinstance(array, Array) and array.stype == _FORMAT else None
        if not isinstance(data, bytes):
            raise ValueError("records of another kind")
        return _loaded(data)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"a message cannot be read: {_short(error)}", _HINT) from None


def _loaded(data: bytes) -> Tensors:
    """Read the format of safetensors: the header's length, the header, all numbers."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MOST_HEADER, len(data) - 8):
        raise ValueError(f"a header of {length:,} bytes in a message of {len(data):,}; at most {MOST_HEADER:,}")
    header = json.loads(data[8 : 8 + length].decode())
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise ValueError(f"{len(header):,} tensors; at most {MOST_TENSORS:,}")
    numbers, found, left = memoryview(data)[8 + length :], dict[str, Tensor](), len(data) - 8 - length
    for name, about in header.items():
        kind, shape, (begin, end) = _KINDS[about["dtype"]], about["shape"], about["data_offsets"]
        if len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"a tensor of shape {str(shape)[:_SHOWN]} at {begin!r} to {end!r}")
        if math.prod(max(n, 1) for n in shape) > MOST_NUMBERS:
            raise ValueError(f"a tensor of shape {shape}; at most {MOST_NUMBERS:,} numbers")
        left -= end - begin  # no byte is given twice: a short message does not become long
        if not begin <= end <= len(numbers) or end - begin != math.prod(shape) * kind.itemsize or left < 0:
            raise ValueError(f"a tensor of shape {shape} in the bytes {begin} to {end} of {len(numbers)}")
        found[name] = _tensor(numbers[begin:end], kind).reshape(shape)
    return found


def _tensor(numbers: memoryview, kind: torch.dtype) -> Tensor:
    if not numbers:
        return torch.empty(0, dtype=kind)
    if kind == torch.bool:  # a byte that is neither 0 nor 1 would count as more than one
        return torch.frombuffer(bytearray(numbers), dtype=torch.uint8).ne(0)
    return torch.frombuffer(bytearray(numbers), dtype=kind)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _short(error: Exception) -> str:
    """What went wrong, in a length that can be shown: a part of it may be a stranger's."""
    said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | RecursionError) else str(error)
    return "".join(c if c.isprintable() else " " for c in said[:_SHOWN])


def _saved(tensors: Tensors) -> bytes:
    return save({name: torch.from_numpy(_numpy(tensor).copy()) for name, tensor in tensors.items()})


def _numpy(tensor: Tensor) -> np.ndarray:
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise ConfigError(f"tensors of {tensor.dtype} cannot be sent", f"use one of {', '.join(_DTYPES)}")
    made: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    return made
