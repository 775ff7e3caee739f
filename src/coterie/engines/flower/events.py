# SPDX-License-Identifier: Apache-2.0
"""What a ServerApp tells the command that started it: lines of its log, which Flower streams from wherever it runs."""

import json
import sys
from typing import Any

__all__ = ["heard", "tell"]

_MARK = "coterie-event "


def tell(event: str, **fields: Any) -> None:
    """Write an event to the log, in one piece."""
    sys.stdout.write(f"{_MARK}{json.dumps({'event': event, **fields})}\n")
    sys.stdout.flush()


def heard(line: str) -> dict[str, Any] | None:
    """Read the event in a line of the log, if there is one."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
    except ValueError:  # somebody else's line, cut in two
        return None
    return found
