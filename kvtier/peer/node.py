"""One peer as this host sees it: its connections, whether it answers, which life of it, what it lacked a moment ago.

A peer that did not answer once is asked nothing more until it answers a ping again: so a peer that hangs costs one
deadline, not one a request. Pings go once a second, on a connection of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from typing import Any, Final

from kvtier.peer import frames
from kvtier.peer.base import Shared
from kvtier.peer.frames import Refusal
from kvtier.peer.lacks import Lacks
from kvtier.peer.names import Found, Resolver
from kvtier.peer.pace import pace
from kvtier.peer.pipe import Pipe
from kvtier.peer.speed import Link
from kvtier.peer.terms import TURNS, Terms
from kvtier.types import Code, KvtierError

PING_S: Final = 1.0
STALL_S: Final = 0.01
"""A loop that has time notices sooner that a deadline is over."""
FAULTS: Final = (OSError, EOFError, TimeoutError)

_log = logging.getLogger("kvtier.peer")


class Node:
    """A peer. Owned by the loop thread."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        terms: Terms,
        *,
        most: int,
        counts: Counter[str],
        grace_s: float = 60.0,
    ) -> None:
        self.name = name
        self.address = address
        self.up = False
        self.why = "not asked yet"
        self.incarnation = b""
        self.counts = counts
        self.lacked = True
        """Whether it lacked something of the path that it was offered last."""
        self.missed = False
        """Whether something that it was to get was given up while it did not answer."""
        self._grace_s = grace_s
        self._since = time.monotonic()
        """When it was up last, while it is not."""
        self.into, self.out = Link(), Link()
        self._terms = terms
        self._pace = pace(terms.rate)
        self._resolver = Resolver(address)
        self._idle: list[Pipe] = []
        self._room = asyncio.Semaphore(most)
        """How many requests may be under way."""
        self.lacks = Lacks()
        self._line: Pipe | None = None
        """The connection of pings,"""
        self._doubted = False
        """which is made anew where something failed on others: that it still answers says nothing of new ones."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether it has not answered for the grace time."""
        return not self.up and time.monotonic() - self._since > self._grace_s

    # -- whether it answers ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to ping."""
        self._watch = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self._ping()
            except (*FAULTS, KvtierError) as exc:
                self._hang_up()
                self.failed(exc)
            await asyncio.sleep(PING_S)

    async def _ping(self) -> None:
        until = asyncio.get_running_loop().time() + self._terms.deadline_s
        if self._doubted:
            self._hang_up()
            self._doubted = False
        if self._line is None:
            self._line = await self._connect(until)
        limit = asyncio.timeout_at(until)
        try:
            async with limit:
                await self._line.ask(frames.Ping(), frames.Done)
        except TimeoutError:
            if overlooked(limit, self._line):
                self._hang_up()
                return
            raise
        if not self.up:
            _log.info("peer %s answers", self.name)
        self.up, self.why = True, ""

    def failed(self, exc: BaseException) -> None:
        """It did not do what was asked: ask nothing more until it answers a ping."""
        if self.up:
            self._since = time.monotonic()
            self.counts["peer_down"] += 1
            _log.warning("peer %s is asked nothing until it answers again: %r", self.name, exc)
        self.up, self.why = False, f"{type(exc).__name__}: {exc}"
        self._doubted = True
        while self._idle:
            self._idle.pop().close()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    # -- connections -------------------------------------------------------------------------------------------------

    async def take(self, until: float, *, hasty: bool = False) -> tuple[Pipe, float]:
        """A connection for one request, to be given back, and by when that is to be answered (in loop time).

        That is `until`, or a deadline after its turn came: nobody is slow because others are served first. Raises what
        connecting raises, TimeoutError, and a Refusal where too many requests are under way for so long (`hasty`: at
        `until`).
        """
        if self._room.locked():
            now = asyncio.get_running_loop().time
            await self._turn(until if hasty else now() + TURNS * self._terms.deadline_s)
            until = until if hasty else now() + self._terms.deadline_s
        else:
            await self._room.acquire()
        try:
            while self._idle:
                pipe = self._idle.pop()
                if pipe.stream.quiet:
                    return pipe, until
                pipe.close()
            return await self._connect(until), until
        except BaseException:
            self._room.release()
            raise

    async def free(self, shared: Shared) -> Pipe | None:
        """A connection for one request that nothing has to be waited for on; None where there is none."""
        if self._room.locked() or not self._idle or shared.id not in self._idle[-1].used:
            return None
        pipe = self._idle.pop()
        if not pipe.stream.quiet:
            pipe.close()
            return None
        await self._room.acquire()
        return pipe

    async def _turn(self, until: float) -> None:
        """Wait until one request more may be under way; raises a Refusal, also where the peer fails meanwhile."""
        try:
            async with asyncio.timeout_at(until):
                await self._room.acquire()
        except TimeoutError:
            self.counts["peer_busy"] += 1
            raise Refusal(Code.BUSY, f"too many requests are under way to peer {self.name}") from None
        if not self.up:
            self._room.release()
            raise Refusal(Code.BUSY, f"peer {self.name} failed while others were served first")

    def give(self, pipe: Pipe, *, good: bool) -> None:
        """Give a connection back; one that is not `good` is closed."""
        self._room.release()
        if good and self.up:
            self._idle.append(pipe)
        else:
            pipe.close()

    async def _connect(self, until: float) -> Pipe:
        """A new connection, at the first of its addresses that answers; notices another life of the peer."""
        async with asyncio.timeout_at(until):
            left = await self._resolver.find()
        pipe = await self._first_of(left, until)
        if pipe.incarnation != self.incarnation:
            if self.incarnation:
                self.counts["peer_restarts"] += 1
                _log.warning("peer %s was started again: what is known of it is forgotten", self.name)
            self.incarnation = pipe.incarnation
            self.lacks.clear()
        return pipe

    async def _first_of(self, left: list[Found], until: float) -> Pipe:
        """The same, of addresses; raises what a daemon says at one, rather than that none is at the last."""
        loop = asyncio.get_running_loop()
        said: KvtierError | None = None
        try:
            while True:
                found = left.pop(0)
                try:
                    async with asyncio.timeout_at(until - (until - loop.time()) * len(left) / (len(left) + 1)):
                        return await self._connect_to(found)
                except (*FAULTS, KvtierError) as exc:
                    self._resolver.failed(found)
                    said = exc if said is None and isinstance(exc, KvtierError) else said
                    if not left:
                        raise said or exc from None
        finally:
            del said  # which has this frame: nobody collects cycles

    async def _connect_to(self, found: Found) -> Pipe:
        """A new connection to one address."""
        certs = self._terms.certs
        channel = None if certs is None else certs.channel(server=False)
        sock = socket.socket(found.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        pipe = Pipe(sock, channel=channel, pace=self._pace)
        try:
            await asyncio.get_running_loop().sock_connect(sock, found.address)
            await pipe.knock(self._terms, self.name)
        except BaseException:
            pipe.close()
            raise
        return pipe

    async def use(self, pipe: Pipe, shared: Shared) -> None:
        """Show on this connection that this host holds the cache's secret."""
        if shared.id in pipe.used or pipe.session is None:
            return
        secrets = self._terms.secrets
        proof = secrets.proof(shared.scope, pipe.session.id, shared.id)
        await pipe.ask(frames.Use(shared.id, shared.spec, secrets.key_id(shared.scope), proof), frames.Done)
        pipe.used.add(shared.id)

    def status(self) -> dict[str, Any]:
        """For people."""
        where = "{}:{}".format(*self.address)
        return {"name": self.name, "address": where, "up": self.up, "why": self.why, "idle": len(self._idle)}

    async def close(self) -> None:
        """Ping no more and drop the connections."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        self._hang_up()
        while self._idle:
            self._idle.pop().close()


def overlooked(limit: asyncio.Timeout, pipe: Pipe) -> bool:
    """Whether this host itself stood still until it was too late, and an answer is there by now."""
    over, now = limit.when(), asyncio.get_running_loop().time()
    return over is not None and now - over > STALL_S and not pipe.stream.quiet
