# SPDX-License-Identifier: Apache-2.0
"""What a folder holds, to the last bit, but for when and how fast it was made."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open

__all__ = ["content", "same"]

_PASSING = {"seconds", "started", "versions", "id", "files", "sha256"}


def content(folder: Path) -> dict[str, str]:
    """Every file, hidden ones too, as a text: tensors by their bytes, tables and documents without times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = _text(path)
        elif not any(path.iterdir()):
            found[f"{path.relative_to(folder).as_posix()}/"] = "an empty folder"
    return found


def same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same."""
    return content(a) == content(b)


def _text(path: Path) -> str:
    try:
        return _lasting_text(path)
    except (OSError, ValueError, SafetensorError):  # damaged, and nobody has said so
        return path.read_bytes().hex()


def _lasting_text(path: Path) -> str:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
        return repr({name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()})
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return repr({name: table[name].to_pylist() for name in table.column_names if name not in _PASSING})
    if path.suffix == ".json":
        return json.dumps(_lasting(json.loads(path.read_text(encoding="utf-8"))))
    return "a page" if path.name == "report.html" else path.read_bytes().hex()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(inner) for key, inner in value.items() if key not in _PASSING}
    return [_lasting(inner) for inner in value] if isinstance(value, list) else value
