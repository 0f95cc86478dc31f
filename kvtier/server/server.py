"""The daemon's Unix sockets: engines join instances on one, operators ask on the other."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvtier import wire
from kvtier.handshake import FirstFrame, Peer, peer_of, receive_first, send_first, try_send
from kvtier.server.connection import Connection, Result, Shared, error_frame
from kvtier.server.limits import Limits
from kvtier.server.listener import Listener, PathLock
from kvtier.server.sessions import Owner, Session, Sessions
from kvtier.server.spans import Spans
from kvtier.types import Code, KvtierError, bad

ENGINE_MODE: Final = 0o660
ADMIN_MODE: Final = 0o600
SWEEP_S: Final = 1.0

_LETTING_GO: Final = frozenset({wire.Release, wire.Forget, wire.Abort, wire.Commit, wire.Flush, wire.Unmapped})
"""Served while the daemon drains."""

_log = logging.getLogger("kvtier.server")


class Server:
    """Serves a store on an engine socket and, where a path is given, an admin socket."""

    def __init__(
        self,
        store: Owner,
        path: Path,
        admin: Path | None = None,
        limits: Limits | None = None,
        lock: PathLock | None = None,
        passed: Mapping[str, socket.socket] | None = None,
    ) -> None:
        """`lock`: the path's, where the caller has claimed it already; released by `close`.

        `passed`: listening sockets by name ("engine", "admin") instead of own ones at the paths.
        """
        self._store = store
        self._path = path
        self._admin_path = admin
        self._limits = limits or Limits()
        self._shared = Shared(self._limits)
        self._greeting: set[asyncio.Task[bool]] = set()
        self._receiving: set[asyncio.Task[bool] | None] = set()
        """Those of them that wait for their peer: the rest end by themselves, and must not be cut off half-way."""
        self._listeners: list[Listener] = []
        self._closing = False
        self._lock = lock
        self._passed = passed or {}

    async def start(self) -> None:
        """Listen. Raises KvtierError when a path is taken or cannot be used."""
        self._loop = asyncio.get_running_loop()
        self._lock = self._lock or PathLock(self._path)
        self.sessions = Sessions(self._store, self._limits.drain_s)
        try:
            self._listeners.append(Listener(self._path, ENGINE_MODE, self._engine, self._passed.get("engine")))
            if self._admin_path is not None:
                passed = self._passed.get("admin")
                self._listeners.append(Listener(self._admin_path, ADMIN_MODE, self._operator, passed))
        except BaseException:
            self._stop_listening()
            self._lock.release()
            raise
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def limit_connections(self, most: int) -> None:
        """Another bound on open connections; those beyond it stay."""
        self._limits = msgspec.structs.replace(self._limits, connections=most)

    def keep_spans(self, share: float) -> Spans:
        """From now on keep a share of the requests; where they can be taken."""
        self._shared.spans = Spans(share)
        return self._shared.spans

    async def drain(self, timeout_s: float) -> None:
        """Accept nobody, refuse new work with `closing`, and wait for what is in flight, then cancel it."""
        self._closing = True
        self._stop_listening()
        if self._shared.tasks:
            _, late = await asyncio.wait(self._shared.tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def close(self) -> None:
        """Close every connection at once. Call `drain` first to let requests finish."""
        self._closing = True
        self._stop_listening()
        self._sweeper.cancel()
        for task in list(self._receiving):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)
        for connection in list(self._shared.connections):
            connection.abort()
        await self._shared.emptied.wait()
        await asyncio.gather(*self._shared.tasks, return_exceptions=True)
        self.sessions.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _stop_listening(self) -> None:
        """Close the listening sockets."""
        while self._listeners:
            self._listeners.pop().close()

    def _sweep(self) -> None:
        """Once a second: connections that do not move."""
        self._shared.sweep(time.monotonic())
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    # -- accepting ---------------------------------------------------------------------------------------------

    def _full(self, sock: socket.socket) -> bool:
        """Whether there is no room for another connection; it is told so."""
        if len(self._shared.connections) + self._shared.arriving < self._limits.connections:
            return False
        error = KvtierError(Code.BUSY, f"{self._limits.connections} connections are open")
        self._shared.stats.refuse(error.code.value)
        try_send(sock, error_frame(0, error))
        sock.close()
        return True

    def _engine(self, sock: socket.socket) -> None:
        """A process connected to the engine socket."""
        self._spawn(sock, self._greet(sock))

    def _operator(self, sock: socket.socket) -> None:
        """Somebody connected to the admin socket: its file mode is the permission."""
        connection = Connection(self._shared, self._serve_admin, lambda _clean: None)
        self._spawn(sock, self._adopt(sock, connection))

    def _spawn(self, sock: socket.socket, greeting: Coroutine[None, None, bool]) -> None:
        """Run what comes before frames flow; its result says whether they do."""
        if self._full(sock):
            greeting.close()
            return
        task = self._loop.create_task(greeting)
        self._shared.arriving += 1
        self._greeting.add(task)
        task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[bool]) -> None:
        """A greeting has ended."""
        self._greeting.discard(task)
        if task.cancelled() or task.exception() is not None or not task.result():
            self._shared.arriving -= 1

    async def _adopt(self, sock: socket.socket, connection: Connection) -> bool:
        """Let frames flow on a raw socket."""
        await self._loop.connect_accepted_socket(lambda: connection, sock)
        return True

    # -- the first frame ---------------------------------------------------------------------------------------

    async def _greet(self, sock: socket.socket) -> bool:
        """Serve the first frame of an engine's connection; a fault closes this connection alone."""
        first = FirstFrame()
        peer: Peer | None = None
        adopted = False
        try:
            peer = peer_of(sock)
            await self._receive(sock, first)
            adopted = await self._first(sock, first, peer)
        except KvtierError as exc:
            try_send(sock, error_frame(first.header.request if first.header else 0, exc))
        except (OSError, EOFError, TimeoutError) as exc:
            _log.debug("a connection ended before its first frame was served: %r", exc)
        except Exception:  # noqa: BLE001
            _log.exception("internal error in a first frame")
            try_send(sock, error_frame(0, KvtierError(Code.INTERNAL, "internal error")))
        finally:
            first.close()
            if not adopted:
                sock.close()
            if peer is not None and peer.pidfd is not None:
                os.close(peer.pidfd)
        return adopted

    async def _receive(self, sock: socket.socket, first: FirstFrame) -> None:
        """Wait for a first frame, for a bounded time."""
        task: asyncio.Task[bool] | None = asyncio.current_task()
        self._receiving.add(task)
        try:
            async with asyncio.timeout(self._limits.first_frame_s):
                await receive_first(sock, first)
        finally:
            self._receiving.discard(task)

    async def _first(self, sock: socket.socket, first: FirstFrame, peer: Peer) -> bool:
        """Serve a first frame; whether the connection goes on."""
        message = first.message()
        if self._closing:
            raise KvtierError(Code.CLOSING, "the daemon is shutting down")
        if isinstance(message, wire.Hello):
            await self._join(sock, first, message, peer)
            return True
        if isinstance(message, wire.Register):
            await self._register(sock, first, message, peer)
            return False
        if isinstance(message, wire.MapDevice):
            await self._map_device(sock, first, message, peer)
            return False
        if isinstance(message, wire.RegisterKv):
            await self._register_kv(sock, first, message, peer)
            return False
        raise bad("verb", "Hello, Register, RegisterKv or MapDevice in the first frame", type(message).__name__)

    async def _join(self, sock: socket.socket, first: FirstFrame, hello: wire.Hello, peer: Peer) -> None:
        """Attach a process, answer with its arenas, let frames flow."""
        assert first.header is not None
        _check_hello(hello)
        sessions = self.sessions
        session: Session

        def serve(message: wire.Message) -> Result:
            return self._serve_engine(session, message)

        def closed(clean: bool) -> None:
            sessions.left(session, clean)

        await sessions.end_earlier(peer, hello.unmapped)
        connection = Connection(self._shared, serve, closed)
        connection.instance = hello.instance
        session, welcome, fds = sessions.join(hello, peer, connection)
        lent = fds if session.arenas else []
        try:
            await send_first(sock, wire.frame(first.header.verb, first.header.request, welcome), fds)
        except BaseException:
            sessions.left(session, clean=True)  # nobody has the whole Welcome: nobody maps an arena or knows its number
            del session  # which knows the connection, as `serve` does: no cycle is to be left
            raise
        finally:
            for fd in lent:
                os.close(fd)
        try:
            await self._adopt(sock, connection)
        except BaseException:
            sessions.left(session, clean=False)
            del session
            raise

    async def _register(self, sock: socket.socket, first: FirstFrame, message: wire.Register, peer: Peer) -> None:
        """Hand a region to the store and answer; the connection has served its purpose."""
        assert first.header is not None
        _check_name("name", message.name)
        _check_name("instance", message.instance)
        if len(first.fds) != 1:
            raise bad("fds", "exactly one descriptor", len(first.fds))
        process = self.sessions.speaking(message.session, peer)
        reply = self._store.register(message, first.fds[0], peer, process)
        await self._loop.sock_sendall(sock, wire.frame(first.header.verb, first.header.request, reply))

    async def _map_device(self, sock: socket.socket, first: FirstFrame, message: wire.MapDevice, peer: Peer) -> None:
        """Say how to map the device's memory; the connection has served its purpose."""
        assert first.header is not None
        _check_name("instance", message.instance)
        reply, fd = await self._store.map_device(message, peer)
        await send_first(sock, wire.frame(first.header.verb, first.header.request, reply), [fd] if fd >= 0 else [])

    async def _register_kv(self, sock: socket.socket, first: FirstFrame, message: wire.RegisterKv, peer: Peer) -> None:
        """Hand an engine's KV to the store and answer; the connection has served its purpose."""
        assert first.header is not None
        _check_name("name", message.name)
        _check_name("instance", message.instance)
        process = self.sessions.speaking(message.session, peer)
        reply = await self._store.register_kv(message, first.fds, peer, process)
        await self._loop.sock_sendall(sock, wire.frame(first.header.verb, first.header.request, reply))

    # -- requests ----------------------------------------------------------------------------------------------

    def _serve_engine(self, session: Session, message: wire.Message) -> Result:
        """Answer a request of an attached process."""
        kind = type(message)
        if self._closing and kind not in _LETTING_GO:
            raise KvtierError(Code.CLOSING, "the daemon is shutting down")
        verb = self._store.verbs.get(kind)
        if kind is wire.UseDevice and session.peer.pidfd is None:
            raise KvtierError(Code.UNKNOWN, "its process cannot be watched: share the daemon's pid namespace", "token")
        if verb is not None:
            return verb(session.process, message)
        if isinstance(message, wire.Unmapped):
            self.sessions.unmapped(session, message.session, message.unheard)
            return wire.Ok()
        if kind in self._store.admin:
            raise KvtierError(Code.FORBIDDEN, f"{kind.__name__} is served on the admin socket only", "verb")
        raise bad("verb", "a request that may follow Hello", kind.__name__)

    def _serve_admin(self, message: wire.Message) -> Result:
        """Answer an operator."""
        verb = self._store.admin.get(type(message))
        if verb is None:
            raise KvtierError(Code.FORBIDDEN, f"{type(message).__name__} is not served on the admin socket", "verb")
        reply = verb(message)
        if isinstance(message, wire.Metrics) and isinstance(reply, wire.Info):
            reply.data["server"] = self._numbers()
        return reply

    def _numbers(self) -> dict[str, object]:
        """What the server adds to the store's metrics."""
        return {
            "connections": len(self._shared.connections),
            "requests_in_flight": len(self._shared.tasks),
            "sessions": len(self.sessions),
            **self._shared.stats.data(),
        }


def _check_name(field: str, name: str) -> None:
    """Raise bad_request unless a name can be stored and shown."""
    if not 1 <= len(name) <= wire.MAX_NAME or not name.isprintable():
        raise bad(field, f"1..{wire.MAX_NAME} printable characters", name)


def _check_hello(hello: wire.Hello) -> None:
    """Raise bad_request or version when a Hello cannot be served."""
    if hello.version != wire.VERSION:
        raise KvtierError(Code.VERSION, f"expected protocol version {wire.VERSION}, got {hello.version}", "version")
    _check_name("instance", hello.instance)
    if hello.scope:
        _check_name("scope", hello.scope)
