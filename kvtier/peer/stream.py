"""Bytes of one connection on the loop: one call brings many frames, and nothing waits but where the kernel is full.

The loop goes on watching the socket between one wait and the next: to begin and to end that costs several system
calls, as much as all else about a small frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final

from kvtier.peer.tls import CHUNK, Channel

BUFFER: Final = 16 << 10
"""What is received before anybody knows what it is; more of a page is received where it belongs."""


class Stream:
    """One end. Raises OSError, EOFError. Used by one task at a time."""

    def __init__(self, sock: socket.socket, channel: Channel | None) -> None:
        """`sock` does not block; `channel`: TLS, whose handshake is the first thing to be done."""
        self.sock = sock
        self.channel = channel
        self._early = memoryview(bytearray(BUFFER))
        self._first = self._last = 0
        """Which bytes of it came and were not read yet."""
        self._unsent = b""
        self._loop = asyncio.get_running_loop()
        self._watched = False
        """Whether the loop looks for bytes that come,"""
        self._go: Callable[[], None] | None = None
        """and what it does then; where that is nothing it looks no more."""

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
            channel.arrived(await self._records())

    def post(self, raw: bytes) -> None:
        """Send it as far as the kernel takes it now; the rest goes with the next `send`."""
        self._unsent += raw if self.channel is None else self.channel.seal(raw)
        with contextlib.suppress(BlockingIOError):
            sent = self.sock.send(self._unsent)
            self._unsent = self._unsent[sent:]

    @property
    def sent(self) -> bool:
        """Whether the kernel has taken all that was to be sent."""
        return not self._unsent

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
                view = view[await self._some(view) :]
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

    def now(self, view: memoryview) -> int:
        """Receive some bytes that are there, not in TLS; raises BlockingIOError where none are."""
        got = self.drain(view) or self.sock.recv_into(view)
        if not got:
            raise EOFError("the peer closed the connection")
        return got

    async def _some(self, view: memoryview) -> int:
        """Receive some bytes."""
        return self.drain(view) or await self._receive(view)

    async def _receive(self, view: memoryview) -> int:
        """Receive some bytes that had not come yet."""
        if self.channel is not None:
            while not (got := self.channel.open(view)):
                self.channel.arrived(await self._records())
            return got
        while True:
            try:
                got = self.sock.recv_into(view)
            except BlockingIOError:
                await self.receiving(iter((None,)))
                continue
            if not got:
                raise EOFError("the peer closed the connection")
            return got

    async def something(self, within_s: float) -> None:
        """Wait until something comes that was not received yet, or the end; raises TimeoutError like `receiving`."""
        await self.receiving(self._nothing(), within_s)

    def _nothing(self) -> Iterator[None]:
        """A step for each time that there is nothing: the loop may still tell of what was received meanwhile."""
        while self.quiet:
            yield

    async def _records(self) -> bytes:
        """What comes next, in TLS."""
        while True:
            with contextlib.suppress(BlockingIOError):
                return self.sock.recv(CHUNK)
            await self.receiving(iter((None,)))

    # -- turns -----------------------------------------------------------------------------------------------------

    async def receiving(self, steps: Iterator[None], within_s: float = 0.0) -> None:
        """Take all steps, each but the first once something came: the task that waits is woken after the last.

        Raises TimeoutError after so many seconds (0: as long as it takes).
        """
        if next(steps, steps) is steps:
            return
        done = self._loop.create_future()
        self._go = _turn(steps, done)
        if not self._watched:
            self._loop.add_reader(self.sock, self._came)
            self._watched = True
        try:
            await self._over(done, within_s)
        finally:
            self._go = None
            del done  # its exception has this frame, and nobody collects cycles

    async def sending(self, steps: Iterator[None], within_s: float) -> None:
        """The same, each once the kernel takes more."""
        if next(steps, steps) is steps:
            return
        done = self._loop.create_future()
        self._loop.add_writer(self.sock, _turn(steps, done))
        try:
            await self._over(done, within_s)
        finally:
            self._loop.remove_writer(self.sock)
            del done

    async def _over(self, done: asyncio.Future[None], within_s: float) -> None:
        """Wait until the last step was taken."""
        timer = self._loop.call_later(within_s, _late, done) if within_s else None
        try:
            await done
        finally:
            if timer is not None:
                timer.cancel()
            del done, timer

    def _came(self) -> None:
        """Something came, or the end."""
        if self._go is None:  # nobody waits, or who did does not know yet
            self._look_away()
        else:
            self._go()

    def _look_away(self) -> None:
        if self._watched:
            self._loop.remove_reader(self.sock)
            self._watched = False

    @property
    def quiet(self) -> bool:
        """Whether nothing came, not even the end: nobody sends on a connection that nothing was asked on."""
        return self._first == self._last and silent(self.sock)

    def close(self) -> None:
        """Drop the connection."""
        self._look_away()
        self.sock.close()


def _turn(steps: Iterator[None], done: asyncio.Future[None]) -> Callable[[], None]:
    """Takes one step; the future ends with the last one."""

    def go() -> None:
        if done.done():
            return
        try:
            over = next(steps, steps) is steps
        except Exception as exc:  # noqa: BLE001 - it is the task's that waits
            done.set_exception(exc)
        else:
            if over:
                done.set_result(None)

    return go


def _late(done: asyncio.Future[None]) -> None:
    """The time is over."""
    if not done.done():
        done.set_exception(TimeoutError("a transfer took too long"))


def silent(sock: socket.socket) -> bool:
    """Whether nothing waits in a connected socket, not even its end."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
