# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperNode, quicker between two messages: `python -m coterie.engines.flower.supernode`, then its own arguments.

Flower starts `flwr-clientapp` for every message, which imports for a second before it does anything; and a SuperNode that
has found no message waits three seconds before it looks again. Here the command is found in a folder of ours: it hands its
arguments to a process that was forked off before the SuperNode began, has imported all of it, and forks itself for every
message. And as long as messages come, the SuperNode looks for the next one soon. Where that process is not there, Flower's
own command is run: slower, to the same end.
"""

import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode, flwr_clientapp
from flwr.supernode.runtime import run_clientapp

import coterie.engines.flower.client_app
import coterie.engines.flower.handover  # noqa: F401  the apps need both
from coterie.engines.flower import frames
from coterie.engines.flower.waits import Soon, retry_soon

__all__ = ["main", "starting_apps"]

_COMMAND = "flwr-clientapp"
_STALL = 5.0  # seconds that a request may take to be written

_SCRIPT = """#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:]
try:
    with socket.socket(socket.AF_UNIX) as starter:
        starter.settimeout({patience})
        starter.connect({address!r})
        said = json.dumps(words).encode()
        starter.sendall(len(said).to_bytes(8, "big") + said)
        started = starter.recv(1) == b"1"
except OSError:
    started = False
if not started:
    os.execv({real!r}, [{real!r}, *words])
"""


def main() -> None:
    """Run the SuperNode."""
    retry_soon(start_client_internal, run_clientapp)
    if sys.platform == "linux":  # elsewhere processes are not safe to fork, or cannot be
        starting_apps()
    if hasattr(start_client_internal, "time"):
        start_client_internal.time = Soon()
    flower_supernode()


def starting_apps() -> None:
    """Fork the process that starts apps, and put its command before Flower's. It ends with this process."""
    real = shutil.which(_COMMAND, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if real is None:
        return
    folder = Path(tempfile.mkdtemp(prefix="coterie-apps-"))  # nobody else may enter it
    address, script = str(folder / "socket"), folder / _COMMAND
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen(16)
    script.write_text(_SCRIPT.format(python=sys.executable, address=address, real=real, patience=_STALL))
    script.chmod(0o700)
    supernode = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            _Starter(listener, supernode).serve()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)
    os.close(supernode)
    listener.close()
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])


class _Starter:
    """The process that starts apps: it has no threads, so that it can be forked."""

    def __init__(self, listener: socket.socket, supernode: int) -> None:
        self.listener, self.supernode = listener, supernode
        self.children: set[int] = set()

    def serve(self) -> None:
        """Start an app for every request, until the SuperNode has ended."""
        for sign in (signal.SIGINT, signal.SIGTERM):  # they end the SuperNode, which ends this, its folder cleared
            signal.signal(sign, signal.SIG_IGN)
        while True:
            ends = [self.listener.fileno(), self.supernode]
            ready, _, _ = select.select(ends, [], [], 1.0 if self.children else None)
            self.children = {child for child in self.children if os.waitpid(child, os.WNOHANG) == (0, 0)}
            if self.supernode in ready:
                return
            if self.listener.fileno() in ready:
                connection, _ = self.listener.accept()
                with connection:
                    connection.settimeout(_STALL)
                    try:
                        self._start(connection)
                    except (OSError, ValueError) as error:  # gone, silent, or a stranger
                        print(f"coterie: an app was not started: {error}", file=sys.stderr, flush=True)

    def _start(self, connection: socket.socket) -> None:
        if not frames.own(connection):
            raise frames.FrameError("another user asks for it")
        words = json.loads(frames.receive(connection, frames.SMALL))
        child = os.fork()
        if child:
            self.children.add(child)
            connection.sendall(b"1")
            return
        code = 1
        try:
            for taken in (connection, self.listener):
                taken.close()
            os.close(self.supernode)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.argv = [_COMMAND, *words]
            flwr_clientapp()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
