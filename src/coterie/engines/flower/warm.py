# SPDX-License-Identifier: Apache-2.0
"""The process that a node keeps: it has torch, the rows and the blocks made of them ready when the next message comes.

It answers one message at a time, as a process of its own would: private state is read from files and written to files. It
ends with the SuperNode, after a time without messages, or when another one is meant: for other files, with other settings or
of another version (see `coterie.engines.flower.warm_node`).
"""

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

from flwr.app import Context, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordsOnWire

from coterie.engines.flower import frames

__all__ = ["answer_here", "main", "serve"]

_STALL = 30.0  # seconds that the other side may be silent in the middle of a request
_LOOK = 0.2  # seconds between two looks at the SuperNode, where the system does not tell when it ends

Answer = Callable[[bytes, bytes], bytes]


def main() -> None:
    """Serve: the socket, the lock, the process to end with, seconds to wait, what tells this process from others."""
    listener, _, parent, idle, identity = sys.argv[1:]  # the lock is held by being open
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    with socket.socket(fileno=int(listener)) as opened:
        serve(opened, identity, float(idle), _answer_bytes)


def serve(listener: socket.socket, identity: str, idle: float, answer: Answer) -> None:
    """Answer requests one after the other, until none has come for so long, or another process is meant.

    Parameters
    ----------
    listener : socket
        Where they come.
    identity : str
        What tells this process from others of the node.
    idle : float
        Seconds.
    answer : callable
        Given the context and the message as bytes, gives the reply's bytes.
    """
    listener.settimeout(idle)
    meant = True
    while meant:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(_STALL)
            try:
                meant = _serve(connection, identity, answer)
            except (OSError, frames.FrameError) as error:  # gone, silent, or a stranger
                print(f"coterie: a connection was dropped: {error}", file=sys.stderr, flush=True)


def answer_here(records: RecordDict, context: Context) -> RecordDict:
    """Answer what a message holds in this process."""
    import coterie.engines.flower.catalogue  # noqa: F401  registers all steps
    from coterie.engines.flower.client import answered
    from coterie.engines.flower.node_data import node_data

    return answered(records, node_data(context), context.node_id)


def _serve(connection: socket.socket, identity: str, answer: Answer) -> bool:
    """Answer one request.  -> whether this is the process that was meant"""
    if not frames.own(connection):
        raise frames.FrameError("another user's")
    greeting = frames.receive(connection, frames.SMALL)
    if not greeting.startswith(frames.GREETING):
        raise frames.FrameError("no greeting")
    if greeting != frames.GREETING + identity.encode():
        frames.send(connection, frames.ANOTHER)
        return False
    frames.send(connection, frames.READY)
    context, message = frames.receive(connection, frames.SMALL), frames.receive(connection, frames.LARGEST)
    try:
        reply = (frames.ANSWER, answer(context, message))
    except Exception as error:  # whatever it is, Flower is told of it, as by a process of its own
        traceback.print_exc()
        reply = (frames.FAILED, f"{type(error).__name__}: {error}".encode())
    frames.send(connection, *reply)
    return True


def _answer_bytes(context: bytes, message: bytes) -> bytes:
    told = Context(**json.loads(context), state=RecordDict())
    reply = answer_here(recorddict_from_proto(RecordsOnWire.FromString(message)), told)
    return bytes(recorddict_to_proto(reply).SerializeToString())


def _end_with(parent: int) -> None:
    """End this process when that one has ended."""
    with suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):
            watched = select.poll()
            watched.register(os.pidfd_open(parent), select.POLLIN)
            watched.poll()
        else:
            while True:
                os.kill(parent, 0)
                time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
