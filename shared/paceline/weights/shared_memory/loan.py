"""What lender and borrower of a snapshot's memory agree on.

They meet at an abstract socket, which leaves no file behind and is seen by the processes of one
network namespace only. Both have to run as the same user, and a borrower knows the job's token.
"""

from __future__ import annotations

import os
import socket
import struct
from enum import IntEnum

from blake3 import blake3

from paceline.errors import PermissionDeniedError

MAX_REQUEST_BYTES = 4096
KEEPALIVE_S = 0.1
_PEER = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


class Answer(IntEnum):
    """The byte that answers a request."""

    LENT = 1  # with the descriptors of the memory and of its lease
    WAIT = 2  # another one follows
    NOT_FOUND = 3
    GONE = 4
    DENIED = 5
    CANNOT = 6  # held, but not to be lent


def address(endpoint: str) -> str:
    """Where the process lends that serves HTTP at `endpoint`."""
    return f"\0paceline-weights-{blake3(endpoint.encode()).hexdigest()[:32]}"


def check_user(connection: socket.socket) -> None:
    """Raise `PermissionDeniedError` unless the process at the other end runs as this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(credentials)
    if uid != os.geteuid():
        raise PermissionDeniedError(f"weights: the process that shares memory runs as user {uid}")
