"""One server of a shared store that speaks RESP: its connections, its bound, whether it answers.

One that did not answer once is asked nothing until it answers a ping, once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from kvtier.peer.names import Found, Resolver
from kvtier.peer.resp import Line, ReplyError
from kvtier.waits import drained

T = TypeVar("T")
MAX_OPS: Final = 8
"""Requests under way to one server; its threads are its own, so that one that stalls holds up no other."""
UNASKED: Final = "not asked yet"
MOVING: Final = ("MOVED", "ASK", "CLUSTERDOWN")
"""What a server of a Cluster says of names that it does not have."""
FAULTS: Final = (OSError, EOFError, TimeoutError, ReplyError, ValueError)
"""ValueError: what came is no reply."""

_log = logging.getLogger("kvtier.peer")


class Login(NamedTuple):
    """How to be let in."""

    user: bytes = b""
    password: bytes = b""
    tls: ssl.SSLContext | None = None

    def __repr__(self) -> str:
        return "Login(...)"


class Server:
    """One server. Owned by the loop thread."""

    def __init__(self, address: tuple[str, int], login: Login, deadline_s: float, counts: Counter[str]) -> None:
        self.address = address
        self.up = False
        self.why = UNASKED
        self.life = 0
        self._refusal = self._told = ""
        """What it refused the last write with, and what of that was logged."""
        self._login = login
        self._pool = ThreadPoolExecutor(MAX_OPS + 1, "kvtier-redis")
        self._deadline_s = deadline_s
        self._counts = counts
        self._resolver = Resolver(address)
        self._found: list[Found] = []
        """Its addresses, the one that is connected to first."""
        self._idle: list[Line] = []
        self._room = asyncio.Semaphore(MAX_OPS)

    async def use(self, work: Callable[[Line], T], until: float) -> T | None:
        """Let a worker thread use a connection; None where the server failed, which it is then blamed for."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._room.acquire()
        except TimeoutError:
            self._counts["peer_busy"] += 1
            return None
        given_s = until - time.monotonic()
        try:
            return await self._threaded(work, until) if self.up else None  # it may have failed while this one waited
        except FAULTS as exc:
            if isinstance(exc, TimeoutError) and given_s < self._deadline_s / 2:
                self._counts["peer_late"] += 1  # others took the time
                return None
            self._counts["peer_failures"] += 1
            self.failed(exc)
            return None
        finally:
            self._room.release()

    async def _threaded(self, work: Callable[[Line], T], until: float) -> T:
        """The same in a thread, raising what went wrong. A cancelled caller cuts the connection and waits for it."""
        line: list[Line] = []
        within_s = until - time.monotonic()
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._work, work, within_s, line)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            for one in line:
                one.shut()  # so that the thread ends
            await drained(future)
            if not future.cancelled():
                future.exception()  # nobody waits for it, and asyncio would complain
            raise
        finally:
            del future  # an exception has this frame, which must not have it: nobody collects cycles

    def _work(self, work: Callable[[Line], T], within_s: float, line: list[Line]) -> T:
        """In a worker thread: on an idle connection or a new one, which is kept where nothing went wrong.

        The time runs from here: nobody is slow because this thread had its turn late.
        """
        one = self._line(time.monotonic() + within_s)
        line.append(one)
        try:
            result = work(one)
        except BaseException:
            one.close()
            raise
        if one.refusal is not None:
            self._refusal, one.refusal = one.refusal, None
        line.clear()  # from here on it is nobody's to cut
        self._idle.append(one)
        return result

    def _line(self, until: float) -> Line:
        """In a worker thread: a connection that has been let in."""
        with contextlib.suppress(IndexError):
            while True:
                one = self._idle.pop()
                one.until = until
                if one.where in self._found and one.quiet():
                    return one
                self.life += 1  # it hung up, or its name is another server's now: perhaps that one is empty
                one.close()
        if not self._found:
            raise OSError(f"{self.address[0]} is not known yet")
        one = Line(self.address[0], self._found[0], until, self._login.tls)
        try:
            if self._login.password:
                self._enter(one)
        except BaseException:
            one.close()
            raise
        return one

    def _enter(self, one: Line) -> None:
        """Show the password. What a server says to that is not passed on: some repeat what they do not understand."""
        user = [self._login.user] if self._login.user else []
        try:
            one.call(b"AUTH", *user, self._login.password)
        except ReplyError as exc:
            why = next((code for code in ("WRONGPASS", "NOPERM") if str(exc).startswith(code)), "ERR")
            raise ReplyError(f"AUTH was refused ({why})") from None

    async def ping(self) -> None:
        """Ask whether it answers, which also is how it gets another chance."""
        try:
            async with asyncio.timeout(self._deadline_s):  # here, because a look-up in a thread knows no deadline
                self._found = await self._resolver.find()
            await self._threaded(lambda line: line.call(b"PING"), time.monotonic() + self._deadline_s)
        except FAULTS as exc:
            if self._found:
                self._resolver.failed(self._found[0])
            self.failed(exc)
            return
        if not self.up:
            _log.info("the shared store at %s:%d answers", *self.address)
        self.up, self.why = True, ""
        if self._refusal not in {"", self._told, *MOVING}:
            _log.warning("the shared store at %s:%d refuses what it is given: %s", *self.address, self._refusal)
        self._told = self._refusal

    def failed(self, exc: BaseException) -> None:
        """It did not do what was asked: ask nothing more until it answers a ping."""
        if self.up or self.why == UNASKED:
            _log.warning("the shared store at %s:%d is asked nothing until it answers: %r", *self.address, exc)
        if self.up:
            self._counts["peer_down"] += 1
            self.life += 1
        self.up, self.why = False, f"{type(exc).__name__}: {exc}"
        self.hang_up()

    def hang_up(self) -> None:
        """Drop idle connections."""
        while self._idle:
            self._idle.pop().close()

    def end(self, *, wait: bool) -> None:
        """Ask it nothing any more."""
        self.up = False
        self._pool.shutdown(wait=wait)
        self.hang_up()

    def status(self) -> dict[str, Any]:
        """For people."""
        where = "{}:{}".format(*self.address)
        why = self.why or (f"refuses what it is given: {self._refusal}" if self._refusal not in {"", *MOVING} else "")
        return {"name": f"redis {where}", "address": where, "up": self.up, "why": why, "idle": len(self._idle)}
