"""One connected socket that several threads may use at once, every call with a deadline."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kvtier import wire
from kvtier.client.link import RETRY_S, Away, Joined, dial
from kvtier.frames import Frames
from kvtier.handshake import FirstFrame

CHUNK: Final = 256 << 10
T = TypeVar("T")


def _poll(sock: socket.socket, events: int, deadline: float) -> None:
    """Wait for a socket; raises Away when time is up."""
    poll = select.poll()
    poll.register(sock, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise Away("the daemon did not answer in time")


def send_all(sock: socket.socket, raw: bytes, deadline: float, fds: list[int] | None = None) -> None:
    """Send a whole frame on a non-blocking socket."""
    view = memoryview(raw)
    while view:
        try:
            sent = socket.send_fds(sock, [view], fds, socket.MSG_NOSIGNAL) if fds else sock.send(view)
        except BlockingIOError:
            _poll(sock, select.POLLOUT, deadline)
        except OSError as exc:
            raise Away(f"the connection is lost: {exc}") from exc
        else:
            view, fds = view[sent:], None


def wait_dial(path: Path, deadline: float) -> socket.socket:
    """Connect; raises Away."""
    while (sock := dial(path)) is None:
        if time.monotonic() + RETRY_S > deadline:
            raise Away(f"the daemon at {path} does not accept connections")
        time.sleep(RETRY_S)
    return sock


def ask(sock: socket.socket, raw: bytes, fds: list[int], deadline: float) -> FirstFrame:
    """Send a first frame and receive its answer; the caller closes its descriptors."""
    send_all(sock, raw, deadline, fds)
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
        self._sock = sock
        self._lock = threading.Lock()
        self._users = 0

    def use(self, call: Callable[[socket.socket], T]) -> T:
        """Run a call on the socket; raises Away once it was dropped."""
        with self._lock:
            if not self.joined.alive:
                raise Away("the connection is lost")
            self._users += 1
        try:
            return call(self._sock)
        finally:
            with self._lock:
                self._users -= 1
                self._close_idle()

    def drop(self) -> None:
        """No more calls; those under way return soon."""
        with self._lock:
            if self.joined.alive:
                self.joined.alive = False
                if self._users:
                    self._sock.shutdown(socket.SHUT_RDWR)
                self._close_idle()

    def _close_idle(self) -> None:
        """Close a dropped socket that nobody uses: a number in use must not name another file."""
        if not self.joined.alive and not self._users:
            self._sock.close()


def receive(sock: socket.socket, deadline: float) -> bytes | None:
    """What has come; None when time is up before anything did."""
    try:
        _poll(sock, select.POLLIN, deadline)
    except Away:
        return None
    try:
        data = sock.recv(CHUNK)
    except BlockingIOError:
        return b""
    except OSError as exc:
        raise Away(f"the connection is lost: {exc}") from exc
    if not data:
        raise Away("the daemon closed the connection")
    return data
