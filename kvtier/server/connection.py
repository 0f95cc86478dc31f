"""One connection on the serving loop: frames in, replies out, and the bounds that keep it from hurting others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, cast

from kvtier import wire
from kvtier.frames import Frame, Frames
from kvtier.server.limits import Limits
from kvtier.server.spans import Spans
from kvtier.server.stats import Stats
from kvtier.types import Code, KvtierError

Result = wire.Message | Awaitable[wire.Message]
"""What a verb gives: its reply, or something to await for it."""

SLICE_S: Final = 2.5e-4
"""A connection's pipelined requests are served for this long before other connections have their turn."""

MAX_GRANTED: Final = 512
"""More than a client has in flight."""

_log = logging.getLogger("kvtier.server")


class Shared:
    """What all connections of a server have in common."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.stats = Stats()
        self.spans = Spans(0.0)
        self.connections: set[Connection] = set()
        self.arriving = 0
        """Accepted sockets on which no frames flow yet."""
        self.buffered = 0
        self.tasks: set[asyncio.Future[wire.Message]] = set()
        """Requests in flight, of all connections."""
        self.emptied = asyncio.Event()
        """Set while there is no connection."""
        self.emptied.set()

    def add(self, connection: Connection) -> None:
        """Count a connection, which has arrived."""
        self.arriving -= 1
        self.connections.add(connection)
        self.emptied.clear()

    def discard(self, connection: Connection) -> None:
        """Count a connection no more."""
        self.connections.discard(connection)
        if not self.connections:
            self.emptied.set()

    def sweep(self, now: float) -> None:
        """Close connections that have not moved for too long."""
        for connection in list(self.connections):
            connection.check_progress(now)


class Connection(asyncio.Protocol):
    """Serves one connection; a fault of its peer ends it alone.

    `serve` answers a request or raises KvtierError; `closed(clean)` is called once, when the connection is lost
    and no request of it is in flight any more; clean means after Bye.
    """

    def __init__(self, shared: Shared, serve: Callable[[wire.Message], Result], closed: Callable[[bool], None]) -> None:
        self._shared = shared
        self._serve = serve
        self._closed = closed
        self._frames = Frames(shared.limits.max_body)
        self.instance = ""
        """Who asks, for people; empty for operators."""
        self.granted: OrderedDict[int, int] = OrderedDict()
        """Request -> the lease or reservation that its reply gave, of the latest requests."""
        self._counted = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._early: list[wire.Message] = []
        self._tasks: dict[int, asyncio.Future[wire.Message]] = {}
        self._cancels = 0
        self._full = False
        self._turn: asyncio.Handle | None = None
        self._moved = time.monotonic()
        self._clean = False
        self._silent = True
        """Nothing came yet, and nothing went but the Welcome."""
        self._ending = False
        self._lost = False

    # -- transport ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Frames flow from here on."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._shared.limits.write_high)
        self._shared.add(self)
        for message in self._early:
            self.notify(message)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Serve the frames that are whole."""
        self._moved = time.monotonic()
        self._silent = False
        self._frames.feed(data)
        self._drain()

    def pause_writing(self) -> None:
        """The peer does not read its replies: stop reading its requests."""
        self._full = True
        self._moved = time.monotonic()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._full = False
        self._moved = time.monotonic()
        if self._turn is None:
            self._resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is in flight; `closed` follows when it has drained."""
        del exc
        self._lost = True
        self._clean |= self._silent  # whether or not it has read the Welcome: it was given nothing
        self._shared.discard(self)
        self._count(0)
        if self._turn is not None:
            self._turn.cancel()
        for task in list(self._tasks.values()):
            task.cancel()
        self._settle()

    # -- requests ----------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Read again what the transport holds, after serving what is buffered here."""
        self._turn = None
        if not self._full and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._drain()

    def _drain(self) -> None:
        """Serve whole frames until there are none, the peer stops reading, or the slice is used up."""
        until = time.monotonic() + SLICE_S
        while not (self._full or self._ending or self._lost):
            try:
                frame = self._frames.next()
            except KvtierError as exc:
                self._last_word(self._frames.request, exc)
                return
            if frame is None:
                break
            self._request(frame)
            if time.monotonic() > until and self._frames.buffered and not self._full:
                self._yield_turn()
                break
        self._count(self._frames.buffered)

    def _yield_turn(self) -> None:
        """Go on with the buffered requests after other connections."""
        if self._transport is not None and self._turn is None:
            self._transport.pause_reading()
            self._turn = self._loop.call_soon(self._resume)

    def _count(self, buffered: int) -> None:
        """Account the bytes buffered here; over the server's bound whoever has most of them is refused."""
        shared = self._shared
        shared.buffered += buffered - self._counted
        self._counted = buffered
        if buffered and shared.buffered > shared.limits.buffered:
            max(shared.connections, key=lambda each: each._counted)._give_way()  # noqa: SLF001 - of the same class

    def _give_way(self) -> None:
        """Refuse what is half received here, and let it go."""
        most, request = self._shared.limits.buffered, self._frames.request
        self._last_word(request, KvtierError(Code.BUSY, f"over {most} bytes of requests are half received"))
        self._frames = Frames(0)
        self._count(0)

    def _request(self, frame: Frame) -> None:
        """Serve one frame; whatever is wrong with it, the connection goes on."""
        start = time.perf_counter()
        message: wire.Message | None = None
        try:
            message = wire.decode_request(frame.verb, frame.body)
            result = self._dispatch(frame, message)
        except Exception as exc:  # noqa: BLE001 - the loop must not die of one request
            self._refuse(frame.request, exc)
            if message is not None:
                self._note(message, exc, time.perf_counter() - start)
            return
        if isinstance(result, wire.Message):
            self._reply(frame.verb, frame.request, result)
            took = time.perf_counter() - start
            self._shared.stats.took(frame.verb, took)
            self._note(message, result, took)
        elif result is not None:
            self._start(frame, message, result, start)

    def _note(self, asked: wire.Message, came: wire.Message | BaseException, seconds: float) -> None:
        """Let a share of the requests be exported."""
        if self._shared.spans.on:
            self._shared.spans.note(self.instance, asked, came, seconds)

    def _dispatch(self, frame: Frame, message: wire.Message) -> Result | None:
        """The reply, something to await for it, or None where it comes later."""
        if type(message) is wire.Cancel:
            return self._cancel(frame, message.request)
        if frame.request in self._tasks or not frame.request:
            raise KvtierError(Code.BAD_REQUEST, f"request id {frame.request} is 0 or in flight", "request")
        if type(message) is wire.Bye:
            self._bye(frame)
            return None
        if type(message) is wire.Ping:
            return wire.Ok()
        if len(self._tasks) >= self._shared.limits.tasks:
            raise KvtierError(Code.BUSY, f"{len(self._tasks)} requests are in flight on this connection")
        return self._serve(message)

    def _start(self, frame: Frame, message: wire.Message, result: Awaitable[wire.Message], start: float) -> None:
        """Reply when `result` is there."""
        task = asyncio.ensure_future(result)
        self._tasks[frame.request] = task
        self._shared.tasks.add(task)
        task.add_done_callback(partial(self._finish, frame.verb, frame.request, message, start))

    def _finish(
        self, verb: int, request: int, message: wire.Message, start: float, task: asyncio.Future[wire.Message]
    ) -> None:
        """Send the reply of a request that was in flight."""
        del self._tasks[request]
        took = time.perf_counter() - start
        self._shared.stats.took(verb, took)
        self._shared.tasks.discard(task)
        came: wire.Message | BaseException
        if task.cancelled():
            came = KvtierError(Code.CANCELLED, "cancelled; no byte of it moves any more")
        else:
            came = task.exception() or task.result()
        if isinstance(came, wire.Message):
            self._reply(verb, request, came)
        else:
            self._refuse(request, came)
        self._note(message, came, took)
        self._settle()

    def _cancel(self, frame: Frame, request: int) -> wire.Message | None:
        """Cancel a request; the Ok follows its own reply, which follows its last byte."""
        task = self._tasks.get(request)
        if task is None:
            return wire.Ok()
        if self._cancels >= self._shared.limits.tasks:
            raise KvtierError(Code.BUSY, f"{self._cancels} cancels are waiting on this connection")

        def drained(_: asyncio.Future[wire.Message]) -> None:
            self._cancels -= 1
            self._reply(frame.verb, frame.request, wire.Ok())

        self._cancels += 1
        task.add_done_callback(drained)
        task.cancel()
        return None

    def _bye(self, frame: Frame) -> None:
        """Drain what is in flight, answer, close."""
        self._ending = self._clean = True
        self._bye_frame = frame.verb, frame.request
        if self._transport is not None:
            self._transport.pause_reading()
        for task in self._tasks.values():
            task.cancel()
        self._settle()

    def _settle(self) -> None:
        """Once nothing is in flight: say so, if the peer left or said Bye."""
        if self._tasks:
            return
        if self._lost:
            closed, self._closed = self._closed, _nothing
            self._serve, self._transport = _nobody, None  # which know this connection: no cycle is to be left
            closed(self._clean)
        elif self._clean:
            closed, self._closed = self._closed, _nothing
            closed(True)
            self._reply(*self._bye_frame, wire.Ok())
            self._close()

    # -- replies -----------------------------------------------------------------------------------------------

    def notify(self, message: wire.Message) -> None:
        """Send an event; raises nothing."""
        if self._transport is None and not self._lost:
            self._early.append(message)
        else:
            self._send(wire.request_frame(message, 0))

    def _reply(self, verb: int, request: int, reply: wire.Message) -> None:
        """Send one reply."""
        try:
            raw = wire.frame(verb, request, reply)
        except Exception as exc:  # noqa: BLE001 - too large, or not encodable
            self._refuse(request, exc)
        else:
            self._send(raw)
        if isinstance(reply, wire.Acquired | wire.Reserved):
            self._grant(request, reply)
        if isinstance(reply, wire.Reserved | wire.Stored) and reply.refused:
            self._shared.stats.refuse(reply.refused)

    def _grant(self, request: int, reply: wire.Acquired | wire.Reserved) -> None:
        """Remember what a reply gives: the peer may say that it never came."""
        self.granted[request] = reply.lease if isinstance(reply, wire.Acquired) else reply.reservation
        if len(self.granted) > MAX_GRANTED:
            self.granted.popitem(last=False)

    def _refuse(self, request: int, exc: BaseException) -> None:
        """Answer with an error."""
        if not isinstance(exc, KvtierError):
            _log.error("internal error in a request", exc_info=exc)
            exc = KvtierError(Code.INTERNAL, "internal error; the daemon's log has its traceback")
        self._shared.stats.refuse(exc.code.value)
        self._send(error_frame(request, exc))

    def _last_word(self, request: int, exc: KvtierError) -> None:
        """Answer with an error and close: the stream cannot be followed any further."""
        self._shared.stats.refuse(exc.code.value)
        self._send(error_frame(request, exc))
        self._ending = True
        self._close()

    def _send(self, raw: bytes) -> None:
        """Hand bytes to the transport; a peer that lets too many pile up is dropped."""
        transport = self._transport
        if transport is None or self._lost or transport.is_closing():
            return
        self._silent = False
        transport.write(raw)
        if transport.get_write_buffer_size() > self._shared.limits.write_cap:
            _log.warning("closing a connection that does not read its replies")
            transport.abort()

    def _close(self) -> None:
        """Close after what is written was sent; the sweep drops a peer that does not take it."""
        self._moved = time.monotonic()
        if self._transport is not None:
            self._transport.close()

    # -- the server's side -------------------------------------------------------------------------------------

    def check_progress(self, now: float) -> None:
        """Drop the connection when half a frame or unsent replies have not moved for too long."""
        waiting = self._full or self._ending or (self._frames.buffered and not self._turn)
        if waiting and now - self._moved > self._shared.limits.stall_s:
            _log.warning("closing a connection that has not moved for %.0f s", now - self._moved)
            self.abort()

    def abort(self) -> None:
        """Drop the connection without sending what is left."""
        if self._transport is not None:
            self._transport.abort()


def error_frame(request: int, exc: KvtierError) -> bytes:
    """The frame of an error reply."""
    return wire.frame(wire.ERROR_VERB, request, wire.Error(exc.code.value, exc.message[:4096], exc.field[:256]))


def _nobody(message: wire.Message) -> Result:
    """In place of what served a connection that is lost."""
    raise KvtierError(Code.CLOSING, f"the connection of {type(message).__name__} is lost")


def _nothing(clean: bool) -> None:
    """In place of a callback that was called."""
