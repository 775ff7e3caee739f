# SPDX-License-Identifier: Apache-2.0
"""Messages: all tensors as one of Flower's arrays, exactly as they are, and everything else as one JSON document.

Flower hands every array on by itself, from the server to the SuperLink, the SuperNode, the ClientApp and back; a message of
forty tensors would be hundreds of requests. So all are one array of bytes, in the format of safetensors.

The document holds plain values, registered dataclasses by their names, and references to tensors. It is never code.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from coterie.engines.flower import registry
from coterie.errors import ConfigError, RunError
from coterie.protocol import Tensors

__all__ = ["fingerprint", "from_records", "pack", "tensors_in", "to_records", "unpack"]

_ARRAYS, _DOCUMENT = "coterie-arrays", "coterie-document"
_FORMAT = "safetensors"
_DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
)}  # fmt: skip
_HINT = "both sides must run the same version of coterie"


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


def unpack(said: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Make a value of what `pack` made."""
    if isinstance(said, list):
        return [unpack(inner, tensors) for inner in said]
    if not isinstance(said, dict):
        return said
    try:
        return _unpack_marked(said, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"a message cannot be understood: {error!r}", _HINT) from None


def _unpack_marked(said: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "type" in said:
        kind = registry.value_type(said["type"])
        return kind(**{name: unpack(inner, tensors) for name, inner in said["fields"].items()})
    ((mark, inner),) = said.items()
    if mark == "tuple":
        return tuple(unpack(one, tensors) for one in inner)
    if mark == "map":
        return {unpack(name, tensors): unpack(one, tensors) for name, one in inner}
    made: dict[str, Callable[[str], Any]] = {
        "float": float, "tensor": lambda name: tensors[name], "dtype": lambda name: _DTYPES[name],
        "step": registry.step, "named": registry.named_object,
    }  # fmt: skip
    return made[mark](inner)


def fingerprint(value: Any) -> str:
    """A word that tells a value from others, on any machine."""
    tensors: Tensors = {}
    seen = hashlib.blake2b(json.dumps(pack(value, tensors), allow_nan=False).encode(), digest_size=12)
    for tensor in tensors.values():
        seen.update(repr((tensor.dtype, tensor.shape)).encode() + _numpy(tensor).tobytes())
    return seen.hexdigest()


# -- Flower's records -------------------------------------------------------------------------------------------------
def to_records(value: Any) -> RecordDict:
    """Put a value into records that Flower sends."""
    tensors: Tensors = {}
    document = json.dumps(pack(value, tensors), allow_nan=False)
    data = save({name: torch.from_numpy(_numpy(tensor).copy()) for name, tensor in tensors.items()})
    arrays = ArrayRecord({"tensors": Array(dtype="uint8", shape=(len(data),), stype=_FORMAT, data=data)})
    return RecordDict({_ARRAYS: arrays, _DOCUMENT: ConfigRecord({"json": document})})


def from_records(records: RecordDict) -> Any:
    """Take a value out of records."""
    tensors = tensors_in(records)
    try:
        said = json.loads(str(records[_DOCUMENT]["json"]))
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(f"a message cannot be read: {error}", _HINT) from None
    return unpack(said, tensors)


def tensors_in(records: RecordDict) -> Tensors:
    """The tensors that records hold, by the names that the document has for them."""
    try:
        array = records[_ARRAYS]["tensors"]
        if not isinstance(array, Array) or array.stype != _FORMAT:
            raise ValueError("records of another kind")
        found = load(array.data)
        if strange := {str(tensor.dtype) for tensor in found.values()} - {str(known) for known in _DTYPES.values()}:
            raise ValueError(f"tensors of {', '.join(sorted(strange))}")
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        raise RunError(f"a message cannot be read: {error}", _HINT) from None
    return found


def _numpy(tensor: Tensor) -> np.ndarray:
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise ConfigError(f"tensors of {tensor.dtype} cannot be sent", f"use one of {', '.join(_DTYPES)}")
    made: np.ndarray = tensor.detach().cpu().contiguous().numpy()
    return made
