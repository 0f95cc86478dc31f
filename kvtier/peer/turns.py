"""Small transfers, moved by the loop itself, a part each time that the socket is ready: no thread is woken."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from kvtier.peer import bulk
from kvtier.peer.base import Place
from kvtier.peer.stream import Stream

SMALL: Final = 2 << 20
"""So much takes a fraction of a millisecond; waking a thread and the loop again takes as long."""
PIECE: Final = 256 << 10
"""The checksum is taken of so much while it is in the processor's cache."""


def begin(sock: socket.socket, views: list[memoryview]) -> list[memoryview]:
    """Send what the socket takes at once, a frame and SMALL at most; the views that are left. Raises OSError."""
    some, room = list[memoryview](), len(views[0]) + SMALL
    for view in views[: bulk.VECTORS]:
        if not room:
            break
        some.append(view[:room])
        room -= len(some[-1])
    try:
        return bulk.after(views, sock.sendmsg(some, [], socket.MSG_DONTWAIT))
    except BlockingIOError:
        return views


def pouring(sock: socket.socket, views: list[memoryview]) -> Iterator[None]:
    """Send the views, as far as the kernel takes them in each step. Raises OSError."""
    while views:
        try:
            views = bulk.after(views, sock.sendmsg(views[: bulk.VECTORS], [], socket.MSG_DONTWAIT))
        except BlockingIOError:
            yield


def filling(stream: Stream, places: Sequence[Place], sums: Sequence[int], out: list[int | None]) -> Iterator[None]:
    """Receive items into places; `out` has the checksum of each that is the one announced. Raises OSError, EOFError."""
    for at, place in enumerate(places):
        state = xxhash.xxh3_64()
        for view in place.views:
            data = memoryview(view)
            while data:
                try:
                    got = stream.now(data[:PIECE])
                except BlockingIOError:
                    yield
                    continue
                state.update(data[:got])
                data = data[got:]
        if (found := state.intdigest()) == sums[at]:
            out[at] = found
