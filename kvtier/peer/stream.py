"""Bytes of one connection on the loop: one call brings many frames, and sending waits only where the kernel is full."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from kvtier.peer.tls import CHUNK, Channel

BUFFER: Final = 16 << 10
"""What is received before anybody knows what it is; more of a page is received where it belongs."""


class Stream:
    """One end. Raises OSError, EOFError."""

    def __init__(self, sock: socket.socket, channel: Channel | None) -> None:
        """`sock` does not block; `channel`: TLS, whose handshake is the first thing to be done."""
        self.sock = sock
        self.channel = channel
        self._early = memoryview(bytearray(BUFFER))
        self._first = self._last = 0
        """Which bytes of it came and were not read yet."""
        self._unsent = b""
        self._loop = asyncio.get_running_loop()

    async def shake(self) -> None:
        """The TLS handshake, where there is one."""
        channel = self.channel
        while channel is not None:
            try:
                over = channel.shake()
            finally:  # a refusal is told to the other side
                if raw := channel.pending():
                    await self._loop.sock_sendall(self.sock, raw)
            if over:
                return
            channel.arrived(await self._loop.sock_recv(self.sock, CHUNK))

    def post(self, raw: bytes) -> None:
        """Send it as far as the kernel takes it now; the rest goes with the next `send`."""
        self._unsent += raw if self.channel is None else self.channel.seal(raw)
        with contextlib.suppress(BlockingIOError):
            sent = self.sock.send(self._unsent)
            self._unsent = self._unsent[sent:]

    async def send(self, raw: bytes) -> None:
        """Send all of it."""
        if raw:
            self.post(raw)
        if self._unsent:
            raw, self._unsent = self._unsent, b""
            await self._loop.sock_sendall(self.sock, raw)

    async def exactly(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > BUFFER:
            out = bytearray(size)
            view = memoryview(out)
            while view:
                view = view[await self.some(view) :]
            return bytes(out)
        while self._last - self._first < size:
            if self._first:
                self._early[: self._last - self._first] = self._early[self._first : self._last]
                self._first, self._last = 0, self._last - self._first
            self._last += await self._receive(self._early[self._last :])
        self._first += size
        return bytes(self._early[self._first - size : self._first])

    def drain(self, view: memoryview) -> int:
        """Move bytes that came already; how many."""
        got = min(len(view), self._last - self._first)
        if got:
            view[:got] = self._early[self._first : self._first + got]
            self._first += got
        return got

    async def some(self, view: memoryview) -> int:
        """Receive some bytes."""
        return self.drain(view) or await self._receive(view)

    async def _receive(self, view: memoryview) -> int:
        """Receive some bytes that had not come yet."""
        if self.channel is not None:
            while not (got := self.channel.open(view)):
                self.channel.arrived(await self._loop.sock_recv(self.sock, CHUNK))
            return got
        try:
            got = self.sock.recv_into(view)
        except BlockingIOError:
            got = await self._loop.sock_recv_into(self.sock, view)
        if not got:
            raise EOFError("the peer closed the connection")
        return got

    @property
    def quiet(self) -> bool:
        """Whether nothing came, not even the end: nobody sends on a connection that nothing was asked on."""
        return self._first == self._last and silent(self.sock)


def silent(sock: socket.socket) -> bool:
    """Whether nothing waits in a connected socket, not even its end."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
