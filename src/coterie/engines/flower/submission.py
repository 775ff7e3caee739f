# SPDX-License-Identifier: Apache-2.0
"""Run an app on a SuperLink: write the app's description, hand it over, and listen to its log until it ends."""

import json
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coterie import errors
from coterie.engines.flower.events import heard
from coterie.engines.flower.superlink import Connection, environment, tool
from coterie.errors import RunError

__all__ = ["Event", "submit", "write_app"]

Event = dict[str, Any]

_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "coterie-run"
version = "1.0.0"
description = "A fit by coterie, which the SuperLink's machine and all nodes have installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "{server}"
clientapp = "{client}"

[tool.flwr.app.config]
"""


def write_app(
    folder: Path,
    config: Mapping[str, str | int | float | bool],
    *,
    server: str = "coterie.engines.flower.server_app:server",
    client: str = "coterie.engines.flower.client_app:client",
) -> Path:
    """Write an app that is nothing but a description: its code is an installed package."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in config.items()
    ]  # of these types JSON is TOML
    text = _APP.format(server=server, client=client) + "\n".join(lines) + "\n"
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def submit(app: Path, connection: Connection, listen: Callable[[Event], None]) -> Event:
    """Run an app, pass on what it tells, and return its result.

    Parameters
    ----------
    app : Path
        The app's folder.
    connection : Connection
        The SuperLink.
    listen : callable
        Given every event but the result.

    Raises
    ------
    CoterieError
        What the app raised, or that it ended without a result.
    """
    number = connection.start(app)
    try:
        result, last = _listen(number, connection, listen)
    except KeyboardInterrupt:
        connection.flwr("stop", number, connection.name)
        raise
    if result is not None:
        return result
    status = connection.document("list", connection.name, "--run-id", number)["runs"][0]["status"]
    said = f": {last}" if last else ""
    raise RunError(f"the run on the SuperLink ended without a result ({status}){said}", "see the SuperLink's log")


def _listen(number: str, connection: Connection, listen: Callable[[Event], None]) -> tuple[Event | None, str]:
    """Follow the log of a run.  -> its result, and its last words"""
    result: Event | None = None
    last: deque[str] = deque(maxlen=1)
    command = [tool("flwr"), "log", number, connection.name, "--stream"]
    connection.sign_in()
    pipe, nobody = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, env=environment(connection.home), stdout=pipe, stderr=nobody, text=True) as log:
        assert log.stdout is not None
        try:
            for line in log.stdout:
                event = heard(line)
                if event is None:
                    last.extend([line.strip()] if line.strip() else [])
                elif event["event"] == "error":
                    raise getattr(errors, event["kind"])(event["message"], event["hint"])
                elif event["event"] == "result":
                    result = event
                else:
                    listen(event)
        finally:
            log.terminate()
    return result, "".join(last)
