"""Bytes of pages between a socket and slots, in a worker thread: blocking calls, the GIL released, one deadline.

The kernel waits (SO_RCVTIMEO, SO_SNDTIMEO), so that a page is one call and the thread touches the interpreter once a
page. A thread that returned touches the slots no more.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from kvtier.mover import digest
from kvtier.peer.base import Place
from kvtier.peer.frames import SEAL_BYTES

_TIMEVAL = struct.Struct("@ll")
PIECE = 4 << 20
"""The kernel is asked for so much at a time, so that the deadline is looked at in between."""


def _limit(sock: socket.socket, option: int, until: float) -> None:
    """Let the kernel wait at most until then (time.monotonic); raises TimeoutError when it is over."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("a transfer took too long")
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6) + 1))


def _fill(sock: socket.socket, view: Any, until: float) -> None:
    """Receive exactly the view's bytes."""
    data = memoryview(view).cast("B")
    at = 0
    while at < len(data):
        _limit(sock, socket.SO_RCVTIMEO, until)
        try:
            got = sock.recv_into(data[at : at + PIECE], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("a transfer took too long") from None
        if not got:
            raise EOFError("the peer closed the connection in a transfer")
        at += got


def _drain(sock: socket.socket, view: Any, until: float) -> None:
    """Send exactly the view's bytes."""
    data = memoryview(view).cast("B")
    at = 0
    while at < len(data):
        _limit(sock, socket.SO_SNDTIMEO, until)
        try:
            at += sock.send(data[at : at + PIECE])
        except BlockingIOError:
            raise TimeoutError("a transfer took too long") from None


def receive(
    sock: socket.socket, places: Sequence[Place], sums: Sequence[int], until: float, seal: hmac.HMAC | None
) -> list[int | None]:
    """Fill the places; per item its checksum where it equals the one announced, else None.

    What came whole before the connection failed counts, except under a seal: then all or nothing. The second result
    of a failure is that the socket is of no use any more: it is shut down.
    """
    out: list[int | None] = [None] * len(places)
    sock.setblocking(True)
    try:
        for at, place in enumerate(places):
            for view in place.views:
                _fill(sock, view, until)
                if seal is not None:
                    seal.update(view)
            found = digest(place.views)
            out[at] = found if found == sums[at] else None
        if seal is not None:
            _check_seal(sock, seal, until)
    except (OSError, EOFError, TimeoutError):
        shut(sock)
        return out if seal is None else [None] * len(places)
    sock.setblocking(False)
    return out


def _check_seal(sock: socket.socket, seal: hmac.HMAC, until: float) -> None:
    """Raise EOFError unless the seal that follows is right."""
    got = bytearray(SEAL_BYTES)
    _fill(sock, got, until)
    if not hmac.compare_digest(seal.digest(), bytes(got)):
        raise EOFError("the seal of a transfer is wrong")


def send(sock: socket.socket, places: Sequence[Place], until: float, seal: hmac.HMAC | None) -> None:
    """Send the items' bytes in order. Raises OSError, TimeoutError; the socket is of no use after that."""
    sock.setblocking(True)
    for place in places:
        for view in place.views:
            _drain(sock, view, until)
            if seal is not None:
                seal.update(view)
    if seal is not None:
        _drain(sock, seal.digest(), until)
    sock.setblocking(False)


def shut(sock: socket.socket) -> None:
    """Let nobody use the socket again."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
