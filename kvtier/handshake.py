"""What happens on a Unix socket before frames flow: who the peer is, and one frame that may carry descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
from typing import Final, NamedTuple

from kvtier.types import Code, KvtierError
from kvtier.wire import HEADER, Header, Message, decode_request, parse_header

SO_PEERPIDFD: Final = 77
SO_PASSPIDFD: Final = 76
SCM_PIDFD: Final = 4
"""Linux >= 6.5; the names are not in Python 3.11's socket module."""

MAX_FDS: Final = 64
FIRST_BODY: Final = 64 << 10
"""Bytes that the body of a first frame may have."""

_UCRED = struct.Struct("3i")
_INT = struct.Struct("i")


class Peer(NamedTuple):
    """The process at the other end, by the kernel's word.

    pid is 0 for one of another pid namespace. pidfd is None where the kernel is older than 6.5 and the pid is 0.
    """

    uid: int
    gid: int
    pid: int
    pidfd: int | None


def peer_of(sock: socket.socket) -> Peer:
    """Credentials and pidfd of the peer; raises ProcessLookupError when it has already ended.

    The caller owns the pidfd.
    """
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        return Peer(uid, gid, pid, sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
    except OSError as exc:
        if exc.errno == errno.ENOPROTOOPT:
            # If the pid is another process's by now, that one is watched: what its predecessor held returns late.
            return Peer(uid, gid, pid, os.pidfd_open(pid) if pid else None)
        if exc.errno in {errno.ESRCH, errno.EINVAL, errno.ENODATA}:
            raise ProcessLookupError(errno.ESRCH, f"peer process {pid} has ended") from None
        raise


def name_senders(sock: socket.socket) -> None:
    """From now on a first frame says which process sent it; the peer is whoever called listen(): systemd, maybe."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with contextlib.suppress(OSError):  # an older kernel
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSPIDFD, 1)


def ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class FirstFrame:
    """One frame received by recvmsg with the descriptors that came along; never reads past its end.

    Owns the descriptors until they are taken; `close` closes those that were not.
    """

    sender = 0
    """Its pid, where the socket names senders and it is of this pid namespace."""
    _pidfd: int | None = None

    def __init__(self, max_body: int = FIRST_BODY, max_fds: int = MAX_FDS) -> None:
        self.fds: list[int] = []
        self.header: Header | None = None
        self._max_body = max_body
        self._max_fds = max_fds
        self._raw = bytearray()

    @property
    def body(self) -> bytes:
        """Body of the whole frame."""
        return bytes(self._raw[HEADER.size :])

    def read(self, sock: socket.socket) -> bool:
        """Receive some of what is missing; True when the frame is whole.

        Raises BlockingIOError when there is nothing yet, EOFError when the peer closed, KvtierError when the
        frame or its descriptors are refused.
        """
        missing = self._missing()
        if missing:
            self._receive(sock, missing)
        if self.header is None and len(self._raw) >= HEADER.size:
            self.header = parse_header(self._raw, self._max_body)
        return self.header is not None and not self._missing()

    def message(self) -> Message:
        """The request in the frame; raises bad_request."""
        if self.header is None:
            raise KvtierError(Code.BAD_REQUEST, "no frame was received")
        return decode_request(self.header.verb, self.body)

    def take_fds(self) -> list[int]:
        """The descriptors; the caller owns them now."""
        fds, self.fds = self.fds, []
        return fds

    def take_pidfd(self) -> int | None:
        """The sender's pidfd, the caller's now; None where the kernel gives none. Raises ProcessLookupError."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is None and self.sender:
            try:
                return os.pidfd_open(self.sender)
            except OSError as exc:
                if exc.errno != errno.ENOSYS:
                    raise
        return pidfd

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        for fd in self.take_fds():
            os.close(fd)
        self._keep_pidfd(None)

    def _keep_pidfd(self, pidfd: int | None) -> None:
        """Of a frame that comes in pieces each has one."""
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._pidfd = pidfd

    def _missing(self) -> int:
        """Bytes that are still to come of the header, then of the body."""
        whole = HEADER.size if self.header is None else HEADER.size + self.header.length
        return whole - len(self._raw)

    def _receive(self, sock: socket.socket, size: int) -> None:
        """One recvmsg, keeping every descriptor that the kernel handed over."""
        sizes = self._max_fds * _INT.size, _UCRED.size, _INT.size
        room = sum(map(socket.CMSG_SPACE, sizes))
        data, control, flags, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        for level, kind, raw in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds += [fd for (fd,) in _INT.iter_unpack(raw[: len(raw) - len(raw) % _INT.size])]
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                self.sender = _UCRED.unpack(raw)[0]
            elif level == socket.SOL_SOCKET and kind == SCM_PIDFD and (pidfd := _INT.unpack(raw)[0]) >= 0:
                self._keep_pidfd(pidfd)
        if flags & socket.MSG_CTRUNC or len(self.fds) > self._max_fds:
            raise KvtierError(Code.BAD_REQUEST, f"expected at most {self._max_fds} descriptors", "fds")
        if not data:
            raise EOFError("the peer closed the connection")
        self._raw += data


async def readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    """Wait until a raw descriptor can be read."""
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, wake)
    try:
        await future
    finally:
        loop.remove_reader(fd)


async def receive_first(sock: socket.socket, first: FirstFrame) -> None:
    """Fill `first` from a raw non-blocking socket; raises what FirstFrame.read raises but BlockingIOError."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            if first.read(sock):
                return
        except BlockingIOError:
            await readable(loop, sock.fileno())


async def send_first(sock: socket.socket, raw: bytes, fds: list[int]) -> None:
    """Send a frame with descriptors on a raw non-blocking socket."""
    sent = socket.send_fds(sock, [raw], fds, socket.MSG_NOSIGNAL) if fds else 0
    if sent < len(raw):
        await asyncio.get_running_loop().sock_sendall(sock, raw[sent:])


def try_send(sock: socket.socket, raw: bytes) -> None:
    """Send a last word as far as the socket's buffer takes it."""
    with contextlib.suppress(OSError):
        sock.send(raw, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
