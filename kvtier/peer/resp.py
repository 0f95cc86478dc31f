"""One connection to a Redis or Valkey in the hands of one worker thread: commands out, values straight into views.

Written on the socket itself, because pages are megabytes: a client library builds every value as a bytes object
before anybody sees it. The kernel waits, so that a megabyte is one call. Speaks RESP2, which every server does.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvtier.peer.names import Found
from kvtier.peer.pace import pieces
from kvtier.peer.shelf import Want
from kvtier.peer.stream import silent

BUFFER: Final = 16 << 10
MAX_LINE: Final = 4096
MAX_WORD: Final = 16
MAX_SMALL: Final = 1 << 20
"""The longest value that is not read into views."""
MAX_DEPTH: Final = 8
MAX_LIST: Final = 1 << 16
PIECE: Final = 512 << 10
"""So much is hashed while the next arrives, and is still in the processor's cache."""
VECTORS: Final = 256
"""Buffers that one call takes."""
_TIMEVAL: Final = struct.Struct("@ll")


class ReplyError(Exception):
    """The server said no, and the connection goes on."""


class Line:
    """A connection. Everything raises OSError, EOFError, TimeoutError; it is of no use after that."""

    def __init__(self, host: str, where: Found, until: float, tls: ssl.SSLContext | None) -> None:
        """Connect by `until` (time.monotonic()). `host` is the name that a certificate must have."""
        self.where = where
        self.until = until
        self.cut = False
        self.refusal: str | None = None
        """What the last write was refused with: the first word of it, for servers may repeat what they were given."""
        self._tls = tls is not None
        self._buffer = bytearray(BUFFER)
        self._have = (0, 0)
        """Which bytes of the buffer came and were not read yet."""
        self._sock = socket.socket(where.family, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(self._left())
            self._sock.connect(where.address)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                self._sock = tls.wrap_socket(self._sock, server_hostname=host)
            else:
                self._sock.setblocking(True)
        except BaseException:
            self._sock.close()
            raise

    # -- commands ----------------------------------------------------------------------------------------------------

    def call(self, *words: bytes) -> Any:
        """One command; its reply. Raises ReplyError."""
        self.send([command(*words)])
        return self.reply()

    def many(self, commands: Sequence[bytes]) -> Iterator[Any]:
        """Commands side by side; of each its reply, or the ReplyError that came instead."""
        self.send([b"".join(commands)])
        for _ in commands:
            try:
                yield self.reply()
            except ReplyError as exc:
                yield exc

    def read(self, wants: Sequence[Want]) -> list[bool | None]:
        """GET values into views: False where one is not there or has another length, None where it was refused."""
        self.send([b"".join(command(b"GET", want.name.encode()) for want in wants)])
        return [self._value(want) for want in wants]

    def _value(self, want: Want) -> bool | None:
        """Receive one value."""
        try:
            size = self._size(self._line())
        except ReplyError:
            return None
        if size != want.nbytes:
            self._skip(size)
            return False
        for piece in pieces(want.views, PIECE):
            self._fill(piece)
            if want.sum is not None:
                want.sum.update(piece)
        self._skip(0)
        return True

    def write(self, wants: Sequence[Want], expire: Sequence[bytes]) -> list[bool]:
        """SET values from views; whether each is stored."""
        out: list[Any] = []
        for want in wants:
            words = (b"SET", want.name.encode())
            out += [b"*%d\r\n" % (3 + len(expire)), *map(_bulk, words), b"$%d\r\n" % want.nbytes, *want.views, b"\r\n"]
            out += map(_bulk, expire)
        self.send(_merged(out))
        self.refusal = ""
        return [self._said_ok() for _ in wants]

    def _said_ok(self) -> bool:
        try:
            return bool(self.reply() == b"OK")
        except ReplyError as exc:
            self.refusal = str(exc).partition(" ")[0][:MAX_WORD]
            return False

    # -- replies -----------------------------------------------------------------------------------------------------

    def reply(self, depth: int = 0) -> Any:
        """Whatever comes next: bytes, int, None, a list of them. Raises ReplyError."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*":
            if depth >= MAX_DEPTH or int(rest) > MAX_LIST:
                raise EOFError("no reply of a Redis")
            return [self.reply(depth + 1) for _ in range(int(rest))]
        size = self._size(line)
        if size < 0:
            return None
        if size > MAX_SMALL:
            raise EOFError(f"a value of {size} bytes where a small one belongs")
        out = bytearray(size)
        self._fill(memoryview(out))
        self._skip(0)
        return bytes(out)

    def _size(self, line: bytes) -> int:
        """The length that a bulk string begins with; -1: there is none."""
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise EOFError("no reply of a Redis")
        return int(line[1:])

    def _line(self) -> bytes:
        """The next line, without its end."""
        while True:
            first, last = self._have
            end = self._buffer.find(b"\r\n", first, last)
            if end >= 0:
                self._have = end + 2, last
                return bytes(self._buffer[first:end])
            if last - first > MAX_LINE:
                raise EOFError("no reply of a Redis")
            self._buffer[: last - first] = self._buffer[first:last]
            self._have = 0, last - first
            got = self._receive(memoryview(self._buffer)[last - first :], 0)
            self._have = 0, last - first + got

    def _fill(self, view: memoryview) -> None:
        """Exactly the view's bytes: first those that came already."""
        first, last = self._have
        at = min(len(view), last - first)
        view[:at] = memoryview(self._buffer)[first : first + at]
        self._have = first + at, last
        while at < len(view):
            at += self._receive(view[at:], socket.MSG_WAITALL)

    def _skip(self, size: int) -> None:
        """Throw away a value of `size` bytes (below 0: there is none) and the end of its line."""
        left = size + 2 if size >= 0 else 0
        while left:
            waste = memoryview(bytearray(min(left, BUFFER)))
            self._fill(waste)
            left -= len(waste)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def _left(self) -> float:
        """Seconds until it is too late; raises TimeoutError."""
        left = self.until - time.monotonic()
        if left <= 0 or self.cut:
            raise TimeoutError("a shared store took too long")
        return left

    def _limit(self, option: int) -> None:
        """Let the next call wait no longer than that."""
        left = self._left()
        if self._tls:
            self._sock.settimeout(left)
        else:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(int(left * 1e6) + 1, 1_000_000)))

    def _receive(self, view: memoryview, flags: int) -> int:
        """Receive into a view; how many bytes came."""
        got = self._waited(socket.SO_RCVTIMEO, lambda: self._sock.recv_into(view, 0, 0 if self._tls else flags))
        if not got:
            raise EOFError("the shared store closed the connection")
        return got

    def _waited(self, option: int, work: Callable[[], int]) -> int:
        self._limit(option)
        try:
            return work()
        except BlockingIOError:
            raise TimeoutError("a shared store took too long") from None

    def send(self, views: Sequence[Any]) -> None:
        """Send all bytes."""
        left = [memoryview(view).cast("B") for view in views if len(view)]
        first = 0
        while first < len(left):
            part = left[first : first + VECTORS]
            sent = self._waited(socket.SO_SNDTIMEO, lambda part=part: self._push(part))  # type: ignore[misc]
            while first < len(left) and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            if sent:
                left[first] = left[first][sent:]

    def _push(self, views: list[memoryview]) -> int:
        """Send some of it; TLS has no vectors."""
        return self._sock.send(views[0]) if self._tls else self._sock.sendmsg(views)

    def quiet(self) -> bool:
        """Whether an idle connection is still open: nobody sends on one that nothing was asked on."""
        if self._have[0] != self._have[1]:
            return False
        if isinstance(self._sock, ssl.SSLSocket):  # no peek, but nothing at all comes to one that is idle
            waits = select.poll()
            waits.register(self._sock, select.POLLIN)
            return not self._sock.pending() and not waits.poll(0)
        return silent(self._sock)

    def shut(self) -> None:
        """From any thread: who waits in it fails now."""
        self.cut = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Drop it."""
        self._sock.close()


def command(*words: bytes) -> bytes:
    """A command as it travels."""
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def _merged(parts: list[Any]) -> list[Any]:
    """Small neighbours as one buffer."""
    out: list[Any] = []
    for part in parts:
        if isinstance(part, bytes) and out and isinstance(out[-1], bytearray):
            out[-1] += part
        else:
            out.append(bytearray(part) if isinstance(part, bytes) else part)
    return out
