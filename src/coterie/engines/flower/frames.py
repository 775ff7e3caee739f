# SPDX-License-Identifier: Apache-2.0
"""Bytes between two processes of one user: frames on a Unix socket, each of which says how long it is, up to a bound."""

import os
import socket
import struct

__all__ = [
    "ANOTHER", "ANSWER", "FAILED", "GREETING", "LARGEST", "READY", "SMALL", "FrameError", "own", "receive", "send",
]  # fmt: skip

GREETING = b"coterie node "  # then what tells the process that is meant from others
READY, ANOTHER = b"ready", b"another"  # is what a greeting is answered with
ANSWER, FAILED = b"answer", b"failed"  # comes before what a request is answered with

SMALL = 1 << 20  # bytes of greetings, configurations and such words
LARGEST = (1 << 31) - 1  # bytes of a message: Flower's encoding holds no more

_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 20


class FrameError(ValueError):
    """What came is not what was agreed on."""


def send(to: socket.socket, *frames: bytes) -> None:
    """Send frames, one after the other."""
    for frame in frames:
        to.sendall(_LENGTH.pack(len(frame)))
        to.sendall(frame)


def receive(source: socket.socket, most: int) -> bytes:
    """Receive one frame; memory is taken as bytes come, whatever length is claimed."""
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    if length > most:
        raise FrameError(f"a frame of {length} bytes where at most {most} are expected")
    return _exactly(source, length)


def own(connection: socket.socket) -> bool:
    """Whether the other side is a process of the same user; where the system does not say, the folder's permissions do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    numbers = struct.Struct("3i")  # process, user, group
    _, user, _ = numbers.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, numbers.size))
    return bool(user == os.geteuid())


def _exactly(source: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        piece = source.recv(min(length - len(found), _PIECE))
        if not piece:
            raise ConnectionResetError("the other side has gone")
        found += piece
    return bytes(found)
