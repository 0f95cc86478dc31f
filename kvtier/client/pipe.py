"""One connected socket that several threads may use at once, every call with a deadline."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier import wire
from kvtier.client.link import RETRY_S, Away, Joined, dial
from kvtier.frames import Frames
from kvtier.handshake import FirstFrame

CHUNK: Final = 64 << 10
RECEIVE_S: Final = 0.05
"""A receive that may take longer waits in the call itself, so long at a time, and needs no poll before it."""
SEND_S: Final = 0.002
"""A send waits so long for the daemon to take more before it looks whether the daemon waits for this side."""


def _poll(sock: socket.socket, events: int, deadline: float) -> int:
    """Wait for a socket: what came of `events`; raises Away when time is up."""
    poll = select.poll()
    poll.register(sock, events)
    ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    if not ready:
        raise Away("the daemon did not answer in time")
    return ready[0][1]


def _send_first(sock: socket.socket, raw: bytes, fds: list[int], deadline: float) -> None:
    """Send a whole frame, with descriptors, on a non-blocking socket; raises Away."""
    view = memoryview(raw)
    while view:
        try:
            sent = socket.send_fds(sock, [view], fds, socket.MSG_NOSIGNAL) if fds else sock.send(view)
        except BlockingIOError:
            _poll(sock, select.POLLOUT, deadline)
        except OSError as exc:
            raise Away(f"the connection is lost: {exc}") from exc
        else:
            view, fds = view[sent:], []


def wait_dial(path: Path, deadline: float) -> socket.socket:
    """Connect; raises Away."""
    while (sock := dial(path)) is None:
        if time.monotonic() + RETRY_S > deadline:
            raise Away(f"the daemon at {path} does not accept connections")
        time.sleep(RETRY_S)
    return sock


def ask(sock: socket.socket, raw: bytes, fds: list[int], deadline: float) -> FirstFrame:
    """Send a first frame and receive its answer; the caller closes its descriptors."""
    _send_first(sock, raw, fds, deadline)
    first = FirstFrame(wire.MAX_BODY)
    try:
        while True:
            try:
                if first.read(sock):
                    return first
            except BlockingIOError:
                _poll(sock, select.POLLIN, deadline)
    except (OSError, EOFError) as exc:
        first.close()
        raise Away(f"the connection is lost: {exc}") from exc
    except BaseException:
        first.close()
        raise


class Pipe:
    """One connected socket, closed only when no thread is in a call on it."""

    def __init__(self, sock: socket.socket, joined: Joined) -> None:
        self.joined = joined
        self.frames = Frames()
        """For the one thread that receives."""
        self._sock = sock
        # The kernel's own wait feeds a large frame to a daemon that reads it meanwhile; poll would wake this side only
        # when most of the socket's buffer is empty again.
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, int(SEND_S * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(RECEIVE_S * 1e6)))
        self._buffer = memoryview(bytearray(CHUNK))  # a fresh one each time would cost more than the call
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._lock = threading.Lock()
        self._users = 0
        self._dropped = False

    def send(self, raw: bytes, deadline: float, read: Callable[[], bool]) -> None:
        """Send a whole frame, one thread at a time; raises Away.

        While the daemon takes nothing more, `read` takes what it sends (False: another thread does), so that
        neither side waits for the other.
        """
        self._enter()
        try:
            view = memoryview(raw)
            while view:
                try:
                    view = view[self._sock.send(view) :]
                except BlockingIOError:
                    if _poll(self._sock, select.POLLIN | select.POLLOUT, deadline) & select.POLLIN and not read():
                        _poll(self._sock, select.POLLOUT, deadline)
        except OSError as exc:
            raise Away(f"the connection is lost: {exc}") from exc
        finally:
            self._leave()

    def receive(self, deadline: float) -> bytes | None:
        """What has come, for one thread at a time; None when time is up before anything did. Raises Away."""
        self._enter()
        try:
            size = self._received(deadline)
        except OSError as exc:
            raise Away(f"the connection is lost: {exc}") from exc
        finally:
            self._leave()
        if size is None:
            return None
        if not size:
            raise Away("the daemon closed the connection")
        return bytes(self._buffer[:size])

    def _received(self, deadline: float) -> int | None:
        """Bytes that came into the buffer; None when time is up. Polls only where little time is left."""
        while True:
            left, flags = deadline - time.monotonic(), 0
            if left <= RECEIVE_S:
                if not self._incoming.poll(max(0.0, left) * 1000):
                    return None
                flags = socket.MSG_DONTWAIT
            try:
                return self._sock.recv_into(self._buffer, 0, flags)
            except BlockingIOError:
                continue

    def drop(self) -> None:
        """No more calls; those under way return soon. Again after an interrupt: it ends what that left."""
        with self._lock:
            self.joined.alive = False
            if not self._dropped:
                if self._users:
                    self._sock.shutdown(socket.SHUT_RDWR)
                else:
                    self._sock.close()
                self._dropped = True

    def abandon(self) -> None:
        """Close without the lock, which a thread that is not in this process may hold."""
        self._sock.close()

    def __del__(self) -> None:
        """Nobody is in a call any more, also where an interrupt left one counted, or this half made."""
        if hasattr(self, "_sock"):
            self._sock.close()

    def _enter(self) -> None:
        """A call on the socket begins; raises Away once it was dropped."""
        with self._lock:
            if self._dropped:
                raise Away("the connection is lost")
            self._users += 1

    def _leave(self) -> None:
        """A call ends; the last one closes a dropped socket, whose number must not name another file before."""
        with self._lock:
            self._users -= 1
            if self._dropped and not self._users:
                self._sock.close()
