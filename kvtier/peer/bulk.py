"""Bytes of pages between a socket and slots, in a worker thread: blocking calls, the GIL released.

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

import numpy as np
import xxhash

from kvtier import codec
from kvtier.peer import frames
from kvtier.peer.base import Place
from kvtier.peer.pace import STEP, Bucket, Pace, pieces
from kvtier.peer.stream import Stream
from kvtier.peer.tls import CHUNK

_TIMEVAL = struct.Struct("@ll")
_PACKED = struct.Struct("<I")
"""Bytes of the frame that an item was packed into; 0: it comes as it is."""
PIECE = 512 << 10
VECTORS = 256
"""Buffers that one call takes."""
FAULTS = (OSError, EOFError, TimeoutError)
T = TypeVar("T")


class Line:
    """A connection in the hands of one worker thread, until a time (time.monotonic). A context manager.

    Everything raises OSError, EOFError, TimeoutError; the connection is of no use after that.
    """

    def __init__(
        self,
        stream: Stream,
        session: frames.Session,
        until: float,
        *,
        patience: float,
        sealed: bool,
        pace: Pace,
    ) -> None:
        """`patience`: seconds for which no byte may move."""
        self._stream = stream
        self._sock = stream.sock
        self._channel = stream.channel
        self._session = session
        self._sealed = sealed
        self._pace = pace
        self._until = until
        self._patience = patience
        self.wire = 0
        """Bytes of items as they travelled."""
        self.coding_s = 0.0
        """Seconds spent on packing or unpacking them."""

    def __enter__(self) -> Self:
        self._sock.setblocking(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: object) -> None:
        if exc is None:
            self._sock.setblocking(False)
        else:
            shut(self._sock)

    # -- pages ------------------------------------------------------------------------------------------------------

    def announce(self, head: bytes) -> None:
        """Send the frame that the items follow, and any that go with it."""
        self._send([memoryview(head if self._channel is None else self._channel.seal(head))])

    def pour(self, views: list[memoryview]) -> None:
        """Send bytes of pages in order, many a call; under a seal what follows the frame that was sent last."""
        self.wire += sum(map(len, views))
        if self._sealed:
            seal = self._session.seal_out()
            for view in views:
                seal.update(view)
            views.append(memoryview(seal.digest()))
        self._put(views)

    def pour_packed(self, places: Sequence[Place]) -> None:
        """Send items, each packed where it gets smaller; one is packed while the kernel sends the one before."""
        seal = self._session.seal_out() if self._sealed else None
        for place in places:
            begin = time.perf_counter()
            packed = codec.pack(place.views, sum(len(view) for view in place.views) - 1)
            self.coding_s += time.perf_counter() - begin
            if packed is None:
                views = [memoryview(_PACKED.pack(0)), *(memoryview(view) for view in place.views)]
            else:
                views = [memoryview(_PACKED.pack(len(packed))), memoryview(packed)]
            if seal is not None:
                for view in views:
                    seal.update(view)
            self.wire += sum(map(len, views))
            self._put(views)
        if seal is not None:
            self._put([memoryview(seal.digest())])

    def fill(self, places: Sequence[Place], sums: Sequence[int], *, packed: bool) -> list[int | None]:
        """Receive items into places; per item its checksum where it equals the one announced, else None.

        What came whole before the connection failed counts (under a seal nothing does): it never raises, but shuts
        the connection.
        """
        seal = self._session.seal_in() if self._sealed else None
        out: list[int | None] = [None] * len(places)
        try:
            for at, place in enumerate(places):
                found = self._packed(place, seal) if packed else self._item(place, seal)
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
        for piece in pieces([memoryview(view) for view in place.views], PIECE):
            self._get(piece)
            state.update(piece)
            if seal is not None:
                seal.update(piece)
            self.wire += len(piece)
        return state.intdigest()

    def _packed(self, place: Place, seal: hmac.HMAC | None) -> int | None:
        """Receive one item that may be packed; the checksum of its own bytes, None where it cannot be unpacked."""
        size = sum(len(view) for view in place.views)
        head = self._sealed_bytes(_PACKED.size, seal)
        (length,) = _PACKED.unpack(head)
        if not length:
            return self._item(place, seal)
        if length >= size:
            raise EOFError("a packed item is larger than the item")
        frame = np.frombuffer(self._sealed_bytes(length, seal), np.uint8)
        begin = time.perf_counter()
        try:
            codec.unpack(frame, place.views)
        except (codec.Unpackable, struct.error):
            return None
        finally:
            self.coding_s += time.perf_counter() - begin
        state = xxhash.xxh3_64()
        for view in place.views:
            state.update(view)
        return state.intdigest()

    def _sealed_bytes(self, size: int, seal: hmac.HMAC | None) -> bytearray:
        """The next bytes, which the seal covers."""
        data = bytearray(size)
        for piece in pieces([memoryview(data)], PIECE):
            self._get(piece)
        if seal is not None:
            seal.update(data)
        self.wire += size
        return data

    def _check(self, seal: hmac.HMAC) -> None:
        """Raise EOFError unless the seal that follows is right."""
        got = bytearray(frames.SEAL_BYTES)
        self._get(memoryview(got))
        if not hmac.compare_digest(seal.digest(), bytes(got)):
            raise EOFError("the seal of a transfer is wrong")

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _limit(self, option: int) -> None:
        """Let the kernel wait at most until the deadline, or for a byte; raises TimeoutError when it is over."""
        left = min(self._patience, self._until - time.monotonic())
        if left <= 0:
            raise TimeoutError("a transfer took too long")
        self._sock.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(int(left), min(999_999, int(left % 1 * 1e6) + 1))
        )

    def _slow(self, bucket: Bucket, nbytes: int) -> None:
        """Wait until so many bytes may move."""
        wait = bucket.take(nbytes)
        if wait > self._until - time.monotonic():
            raise TimeoutError("a transfer takes too long at the peer's rate")
        time.sleep(wait)

    def _get(self, data: memoryview) -> None:
        """Receive exactly so many bytes."""
        if self._pace.into is None:
            self._receive(data)
            return
        for piece in pieces([data], STEP):
            self._slow(self._pace.into, len(piece))
            self._receive(piece)

    def _receive(self, data: memoryview) -> None:
        at = self._stream.drain(data)
        while at < len(data):
            got = self._channel.open(data[at:]) if self._channel else 0
            if self._channel and not got:
                self._limit(socket.SO_RCVTIMEO)
                try:
                    self._channel.arrived(self._sock.recv(CHUNK))
                except BlockingIOError:
                    raise TimeoutError("a transfer took too long") from None
            elif not self._channel:
                got = self._plain(data[at:])
            at += got

    def _plain(self, data: memoryview) -> int:
        """Receive some bytes as they are."""
        self._limit(socket.SO_RCVTIMEO)
        try:
            got = self._sock.recv_into(data, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("a transfer took too long") from None
        if not got:
            raise EOFError("the peer closed the connection in a transfer")
        return got

    def _put(self, views: list[memoryview]) -> None:
        """Send all bytes."""
        if self._pace.out is None and self._channel is None:
            self._send(views)
            return
        for piece in pieces(views, STEP):
            if self._pace.out is not None:
                self._slow(self._pace.out, len(piece))
            self._send([piece if self._channel is None else memoryview(self._channel.seal(piece))])

    def _send(self, views: list[memoryview]) -> None:
        while views:
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self._sock.sendmsg(views[:VECTORS])
            except BlockingIOError:
                raise TimeoutError("a transfer took too long") from None
            views = after(views, sent)


def after(views: list[memoryview], sent: int) -> list[memoryview]:
    """The views without their first `sent` bytes."""
    first = 0
    while first < len(views) and sent >= len(views[first]):
        sent -= len(views[first])
        first += 1
    return [views[first][sent:], *views[first + 1 :]] if sent else views[first:]


def shut(sock: socket.socket) -> None:
    """Let nobody use the socket again; a thread that waits in it ends."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
