"""Which processes are attached, and when each has let go: by Bye, by unmapping, or by ending."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from kvtier import wire
from kvtier.handshake import Peer
from kvtier.server.connection import Connection, Result
from kvtier.server.mapped import lend, mapped
from kvtier.types import Code, KvtierError, bad

MAX_EARLIER: Final = 64
EARLIER_S: Final = 0.02
"""A client that connects again waits for little longer than this."""

Process = Any
"""The store's own object for one attached process; the server only hands it back."""

_log = logging.getLogger("kvtier.server")


class Owner(Protocol):
    """What a server needs of the store. All of it is called on the loop's thread."""

    verbs: Mapping[type[wire.Message], Callable[[Process, Any], Result]]
    admin: Mapping[type[wire.Message], Callable[[Any], Result]]

    def join(
        self, hello: wire.Hello, peer: Peer, notify: Callable[[wire.Message], None]
    ) -> tuple[Process, wire.Welcome, list[int]]:
        """Attach a process; the descriptors stay the store's. Raises KvtierError."""

    def leave(self, process: Process, clean: bool) -> None:
        """The process's connection is closed and no request of it is in flight; clean: it touches no slot."""

    def gone(self, process: Process, by: Process | None = None) -> None:
        """After an unclean leave: it can touch no slot any more; `by`: the same client's later session said so."""

    def ended(self, process: Process) -> None:
        """The process has ended; its connection may still have requests in flight."""

    def unheard(self, process: Process, numbers: list[int]) -> None:
        """Of a process that lost its connection: these leases and reservations were given and never heard of."""

    def register(self, msg: wire.Register, fd: int, peer: Peer, process: Process | None) -> wire.Registered:
        """Take a region, keeping a duplicate of the descriptor. Raises KvtierError."""

    async def register_kv(
        self, msg: wire.RegisterKv, fds: Sequence[int], peer: Peer, process: Process | None
    ) -> wire.Registered:
        """Map an engine's KV, keeping no descriptor. Raises KvtierError."""

    async def map_device(self, msg: wire.MapDevice, peer: Peer) -> tuple[wire.DeviceMapped, int]:
        """How to map the device's memory; the descriptor (-1: none) stays the store's. Raises KvtierError."""


class Session:
    """One connection of one process, from Hello until the process can touch nothing of it any more."""

    def __init__(self, number: int, peer: Peer, process: Process, connection: Connection) -> None:
        self.number = number
        self.peer = peer
        self.process = process
        self.connection: Connection | None = connection
        """None once the connection is lost and drained."""
        self.granted = connection.granted
        self.drained = asyncio.Event()
        """Set with that."""
        self.dead = False
        """The pidfd said that the process has ended."""
        self.arenas: list[int] = []
        """Of a process that no pidfd watches: the store's descriptors of what it maps."""
        self.mark = 0
        """The lock by which its mappings are known there."""
        self.unmapped = False
        """Whether they were gone when last looked for."""


class Sessions:
    """All sessions; owns their pidfds."""

    def __init__(self, owner: Owner, drain_s: float) -> None:
        self._owner = owner
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, Session] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._marks = itertools.count(1)

    def __len__(self) -> int:
        return len(self._sessions)

    def join(self, hello: wire.Hello, peer: Peer, connection: Connection) -> tuple[Session, wire.Welcome, list[int]]:
        """Attach a process to the store and watch it by a duplicate of its pidfd, or else by its mappings.

        The descriptors are to be passed along; of a session with `arenas` they are the caller's to close.
        """
        pidfd = None if peer.pidfd is None else os.dup(peer.pidfd)
        peer = peer._replace(pidfd=pidfd)
        try:
            process, welcome, fds = self._owner.join(hello, peer, connection.notify)
        except BaseException:
            if pidfd is not None:
                os.close(pidfd)
            raise
        session = Session(1 + secrets.randbits(62), peer, process, connection)  # who knows it is its client
        if pidfd is None:
            session.arenas, session.mark = fds, next(self._marks)
            try:
                fds = lend(fds, session.mark)
            except BaseException:
                self._tell("leave", self._owner.leave, process, True)
                raise
        welcome.session = session.number
        self._sessions[session.number] = session
        if pidfd is not None:
            self._loop.add_reader(pidfd, self._died, session)
        return session, welcome, fds

    def left(self, session: Session, clean: bool) -> None:
        """The connection of a session is lost and drained."""
        session.connection = None
        session.drained.set()
        self._tell("leave", self._owner.leave, session.process, clean)
        if clean or session.dead:
            self._end(session, tell=not clean)
        elif session.peer.pidfd is None:
            self._look_later(session)

    def _look_later(self, session: Session) -> None:
        """Look in a while whether a process that cannot be watched has let go of the arenas."""
        self._timers[session.number] = self._loop.call_later(self._drain_s, self._look, session)

    def _look(self, session: Session) -> None:
        """End it where nothing is mapped, twice: a process that ends unmaps before its devices are closed."""
        before, session.unmapped = session.unmapped, not mapped(session.arenas, session.mark)
        if before and session.unmapped:
            self._end(session)
        else:
            self._look_later(session)

    async def end_earlier(self, peer: Peer, numbers: tuple[int, ...]) -> None:
        """End sessions that their own process says are over; those that still drain are left for Unmapped."""
        for number in numbers[:MAX_EARLIER]:
            session = self._sessions.get(number)
            if session is None or not _may_be_one(session.peer, peer):
                continue
            if session.connection is not None:
                session.connection.abort()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EARLIER_S):
                        await session.drained.wait()
            if session.connection is None:
                self._end(session)

    def unmapped(self, by: Session, number: int, unheard: bytes = b"") -> None:
        """A process says that it has unmapped an earlier session of its own; raises KvtierError otherwise."""
        if len(unheard) % 8:
            raise bad("unheard", "u64 request ids", len(unheard))
        session = self._sessions.get(number)
        if session is None:
            return
        if not _may_be_one(session.peer, by.peer) or session is by:
            raise KvtierError(Code.FORBIDDEN, "expected an earlier session of this process", "session")
        if session.connection is not None:
            raise KvtierError(Code.BUSY, "the connection of that session is not closed and drained yet", "session")
        requests = (int.from_bytes(unheard[at : at + 8], "little") for at in range(0, len(unheard), 8))
        given = [session.granted[request] for request in requests if request in session.granted]
        if given:
            self._tell("unheard", self._owner.unheard, session.process, given)
        self._end(session, by=by.process)

    def speaking(self, number: int, peer: Peer) -> Process | None:
        """Whose connection a client says it is, None where it says none; raises unknown, forbidden."""
        if not number:
            return None
        session = self._sessions.get(number)
        if session is None:
            raise KvtierError(Code.UNKNOWN, "that session is over", "session")
        if not _may_be_one(session.peer, peer):
            raise KvtierError(Code.FORBIDDEN, "expected a session of this process", "session")
        return session.process

    def close(self) -> None:
        """Stop watching; nothing is said to the store."""
        for session in list(self._sessions.values()):
            self._unwatch(session)

    def _died(self, session: Session) -> None:
        """The pidfd fired. The connection may outlive the process where a child inherited it."""
        session.dead = True
        self._tell("ended", self._owner.ended, session.process)
        if session.peer.pidfd is not None:
            self._loop.remove_reader(session.peer.pidfd)
        if session.connection is not None:
            session.connection.abort()
        else:
            self._end(session)

    def _end(self, session: Session, tell: bool = True, by: Process | None = None) -> None:
        """Nothing of this session can be touched by its process any more."""
        if session.number not in self._sessions:
            return
        self._unwatch(session)
        if tell:
            self._tell("gone", self._owner.gone, session.process, by)

    def _unwatch(self, session: Session) -> None:
        """Forget a session and close its pidfd."""
        del self._sessions[session.number]
        timer = self._timers.pop(session.number, None)
        if timer is not None:
            timer.cancel()
        if session.peer.pidfd is not None:
            self._loop.remove_reader(session.peer.pidfd)
            os.close(session.peer.pidfd)

    def _tell(self, what: str, call: Callable[..., None], *args: Any) -> None:
        """Tell the store; its fault must not keep a session from ending."""
        try:
            call(*args)
        except Exception:  # noqa: BLE001
            _log.exception("store.%s failed", what)


def _may_be_one(one: Peer, other: Peer) -> bool:
    """Whether two connections can be of one process. That they are of one client, a session's number shows."""
    return one[:3] == other[:3]
