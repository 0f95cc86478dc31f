"""Frames and bytes of pages between a socket and slots, in a worker thread: blocking calls, the GIL released.

The kernel waits (SO_RCVTIMEO, SO_SNDTIMEO), so that a megabyte is one call and the thread touches the interpreter once
for it; the checksum is taken of each piece while it is in the processor's cache and the next one arrives. A thread
that returned touches the slots no more.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Sequence
from typing import Self, TypeVar

import xxhash

from kvtier.peer import frames
from kvtier.peer.base import Place

_TIMEVAL = struct.Struct("@ll")
PIECE = 1 << 20
SMALL = 2 << 20
"""So much is moved on the loop, in a fraction of a millisecond: waking a thread and the loop again takes as long."""
VECTORS = 256
"""Buffers that one call takes."""
FAULTS = (OSError, EOFError, TimeoutError)
T = TypeVar("T")


class Line:
    """A connection in the hands of one worker thread, until a time (time.monotonic). A context manager.

    Everything raises OSError, EOFError, TimeoutError; the connection is of no use after that.
    """

    def __init__(self, sock: socket.socket, session: frames.Session, sealed: bool, within_s: float) -> None:
        self._sock = sock
        self._session = session
        self._sealed = sealed
        self._until = time.monotonic() + within_s

    def __enter__(self) -> Self:
        self._sock.setblocking(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: object) -> None:
        if exc is None or isinstance(exc, frames.Refusal):
            self._sock.setblocking(False)
        else:
            shut(self._sock)

    # -- pages ------------------------------------------------------------------------------------------------------

    def pour(self, views: list[memoryview]) -> None:
        """Send bytes of pages in order, many a call; under a seal what follows the frame that was sent last."""
        if self._sealed:
            seal = self._session.seal_out()
            for view in views:
                seal.update(view)
            views.append(memoryview(seal.digest()))
        self._put(views)

    def fill(self, places: Sequence[Place], sums: Sequence[int]) -> list[int | None]:
        """Receive items into places; per item its checksum where it equals the one announced, else None.

        What came whole before the connection failed counts (under a seal nothing does): it never raises, but shuts
        the connection.
        """
        seal = self._session.seal_in() if self._sealed else None
        out: list[int | None] = [None] * len(places)
        try:
            for at, place in enumerate(places):
                found = self._item(place, seal)
                out[at] = found if found == sums[at] else None
            if seal is not None:
                self._check(seal)
        except FAULTS:
            shut(self._sock)
            return out if seal is None else [None] * len(places)
        return out

    def _item(self, place: Place, seal: hmac.HMAC | None) -> int:
        """Receive one item; its checksum."""
        state = xxhash.xxh3_64()
        for view in place.views:
            data = memoryview(view)
            for at in range(0, len(data), PIECE):
                piece = data[at : at + PIECE]
                self._get(piece)
                state.update(piece)
                if seal is not None:
                    seal.update(piece)
        return state.intdigest()

    def _check(self, seal: hmac.HMAC) -> None:
        """Raise EOFError unless the seal that follows is right."""
        got = bytearray(frames.SEAL_BYTES)
        self._get(memoryview(got))
        if not hmac.compare_digest(seal.digest(), bytes(got)):
            raise EOFError("the seal of a transfer is wrong")

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _limit(self, option: int) -> None:
        """Let the kernel wait at most until the deadline; raises TimeoutError when it is over."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("a transfer took too long")
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), int(left % 1 * 1e6) + 1))

    def _get(self, data: memoryview) -> None:
        """Receive exactly so many bytes."""
        at = 0
        while at < len(data):
            self._limit(socket.SO_RCVTIMEO)
            try:
                got = self._sock.recv_into(data[at:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError("a transfer took too long") from None
            if not got:
                raise EOFError("the peer closed the connection in a transfer")
            at += got

    def _put(self, views: list[memoryview]) -> None:
        """Send all bytes."""
        first = 0
        while first < len(views):
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self._sock.sendmsg(views[first : first + VECTORS])
            except BlockingIOError:
                raise TimeoutError("a transfer took too long") from None
            first = _after(views, first, sent)


def begin(sock: socket.socket, views: list[memoryview]) -> list[memoryview]:
    """Send what the socket takes at once, a frame and SMALL at most; the views that are left. Raises OSError."""
    some, room = list[memoryview](), len(views[0]) + SMALL
    for view in views[:VECTORS]:
        if not room:
            break
        some.append(view[:room])
        room -= len(some[-1])
    try:
        sent = sock.sendmsg(some, [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return views
    return views[_after(views, 0, sent) :]


def _after(views: list[memoryview], first: int, sent: int) -> int:
    """The first view that was not sent whole, cut to what is left of it."""
    while first < len(views) and sent >= len(views[first]):
        sent -= len(views[first])
        first += 1
    if sent:
        views[first] = views[first][sent:]
    return first


def shut(sock: socket.socket) -> None:
    """Let nobody use the socket again; a thread that waits in it ends."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
