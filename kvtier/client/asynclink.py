"""A connection to the daemon on an asyncio loop; every wait has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from kvtier import wire
from kvtier.client.beside import beside
from kvtier.client.link import (
    EVENTS,
    IN_FLIGHT,
    RETRY_S,
    Aside,
    Away,
    Call,
    Do,
    Identity,
    Inbox,
    Join,
    Joined,
    Owe,
    Post,
    Start,
    Step,
    Steps,
    Ticket,
    Wait,
    dial,
    first_reply,
    heirs,
    hello_frame,
    undo,
    unmapped_message,
    welcomed,
)
from kvtier.client.recovery import Recovery
from kvtier.frames import Frames
from kvtier.handshake import FirstFrame, name_senders, receive_first, send_first
from kvtier.types import KvtierError

R = TypeVar("R", bound=wire.Message)
T = TypeVar("T")


class _Stream(asyncio.Protocol):
    """Frames of one connection, handed to the link's tickets."""

    def __init__(self, link: AsyncLink, joined: Joined) -> None:
        self.joined = joined
        self.lost = False
        self.writable = asyncio.Event()
        self.writable.set()
        self._link = link
        self._frames = Frames()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Finish tickets."""
        try:
            self._frames.feed(data)
            while (frame := self._frames.next()) is not None:
                self._link.take(self._link.inbox.take(frame))
        except KvtierError as exc:
            self._link.lose(self.joined, f"the daemon ended the connection: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The daemon closed, or this side did."""
        self.writable.set()
        self._link.lose(self.joined, f"the connection is lost: {exc or 'the daemon closed it'}")

    def pause_writing(self) -> None:
        """The daemon does not read."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """It reads again."""
        self.writable.set()


class AsyncLink:
    """Connects when asked to, connects again after a loss, runs steps. For one loop."""

    def __init__(self, path: Path, who: Identity, timeout_s: float) -> None:
        self.path = path
        self.who = who
        self.timeout_s = timeout_s
        self.recovery = Recovery()
        self._fresh()
        heirs.add(self)

    def _fresh(self) -> None:
        """What is of this process."""
        self.inbox = Inbox(deque(maxlen=EVENTS))
        self._stream: _Stream | None = None
        self._dialing = asyncio.Lock()
        self._room = asyncio.Event()
        """Set as a ticket ends."""

    def forked(self) -> None:
        """See link.Heir. The loop and its descriptors are the parent's: nothing of them is touched."""
        self.recovery.forget()
        self._fresh()

    @property
    def joined(self) -> Joined | None:
        """The connection as it is, without trying to make one."""
        stream = self._stream
        return stream.joined if stream is not None and stream.joined.alive else None

    # -- steps -------------------------------------------------------------------------------------------------

    async def run(self, steps: Steps[T], wait_s: float = 0.0) -> T:
        """Do the steps of a verb within the timeout and `wait_s`; raises Away and KvtierError.

        The steps hear of a cancellation too, and may give back what they hold before it goes on.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout_s + wait_s
        try:
            step = next(steps)
            while True:
                try:
                    got = await self._do(step, deadline)
                except (Away, KvtierError, asyncio.CancelledError) as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(got)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _do(self, step: Step, deadline: float) -> Any:
        """One step."""
        match step:
            case Call(joined, message, reply):
                return await self.wait(await self.start(joined, message, reply, deadline), deadline)
            case Join():
                return await self.join(deadline)
            case Start(joined, message, reply, begun):
                return await self.start(joined, message, reply, deadline, begun)
            case Wait(ticket, patient):
                return await self.wait(ticket, deadline, patient=patient)
            case Post(joined, message):
                await self.start(joined, message, wire.Ok, deadline, at_once=True)
                return None
            case Owe():
                return self.recovery.owe(step)
            case Aside():
                return await self._alone(deadline, partial(self._aside, step, deadline))
            case Do(work, nbytes):
                return await beside(work, nbytes)

    async def _aside(self, step: Aside, deadline: float) -> None:
        """Say it on a connection of its own, unless that was done meanwhile; raises Away, and the refusal."""
        if not step.joined.alive:
            raise Away("the connection is lost")
        if step.known():
            return
        first = FirstFrame(wire.MAX_BODY)
        try:
            async with self._bounded(deadline):
                with await self._dial() as sock:
                    await send_first(sock, wire.framed(step.message, 1), [*step.fds])
                    await receive_first(sock, first)
            step.learn(first_reply(first, step.reply), first.take_fds)
        finally:
            first.close()

    # -- connecting --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _bounded(self, deadline: float) -> AsyncIterator[None]:
        """Faults of a socket, and the end of the time, as Away."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise Away("the daemon did not answer in time") from None
        except (OSError, EOFError) as exc:
            raise Away(f"the connection is lost: {exc}") from exc

    async def _dial(self) -> socket.socket:
        """Connect; raises Away."""
        while (sock := dial(self.path)) is None:  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(RETRY_S)
        return sock

    async def join(self, deadline: float) -> Joined:
        """The connection, made where there is none and an attempt is due."""
        joined = self.joined
        if joined is not None and not self.recovery.owes:
            return joined
        return await self._alone(deadline, partial(self._joining, deadline))

    async def _joining(self, deadline: float) -> Joined:
        """Connect, and say what the daemon is still to hear."""
        joined = self.joined or await self._connect(deadline)
        for old in self.recovery.unmapped():
            await self._unmapped(joined, old, deadline)
        while (message := self.recovery.owed(joined)) is not None:
            await self.start(joined, message, wire.Ok, deadline, at_once=True)
            self.recovery.said()
        return joined

    async def _alone(self, deadline: float, work: Callable[[], Awaitable[T]]) -> T:
        """Do what is of one task at a time; raises Away."""
        async with self._bounded(deadline):  # another task's deadline may be later
            await self._dialing.acquire()
        try:
            return await work()
        finally:
            self._dialing.release()

    async def _unmapped(self, joined: Joined, old: Joined, deadline: float) -> None:
        """Tell the daemon that the slots of a lost connection are not touched any more."""
        try:
            message = unmapped_message(old)
            await self.wait(await self.start(joined, message, wire.Ok, deadline), deadline)
        except KvtierError as exc:
            self.recovery.told(old, joined, exc)
        else:
            self.recovery.told(old, joined)

    async def _connect(self, deadline: float) -> Joined:
        """One attempt; raises Away, and on the very first connection what the daemon refuses."""
        now = asyncio.get_running_loop().time
        stream, self._stream = self._stream, None
        self.recovery.begin(None if stream is None else stream.joined, now())
        try:
            self._stream = await self._hello(self.recovery.until(deadline, now()))
        except (Away, KvtierError) as exc:
            raise self.recovery.failed(exc, now()) from exc
        self.recovery.succeeded()
        joined = self._stream.joined
        if self.recovery.closed:  # meanwhile, when there was nothing to disconnect
            await self.leave()
            raise Away("this client is closed")
        return joined

    async def _hello(self, deadline: float) -> _Stream:
        """Say Hello and map the arenas."""
        first = FirstFrame(wire.MAX_BODY)
        async with self._bounded(deadline):
            sock = await self._dial()
            try:
                name_senders(sock)
                await send_first(sock, hello_frame(self.who, self.recovery.unmapped()), [])
                await receive_first(sock, first)
                stream = _Stream(self, welcomed(self.who, first))
                await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=sock)
            except BaseException:
                sock.close()
                raise
            finally:
                first.close()
        return stream

    def look(self) -> None:
        """Notice a daemon that has ended since something was last said to it."""
        joined = self.joined
        if joined is not None and joined.daemon.gone:
            self.lose(joined, "the daemon has ended")

    def lose(self, joined: Joined, reason: str) -> None:
        """Drop a connection; whoever waits on it gets Away."""
        stream = self._stream
        joined.alive = False
        if stream is None or stream.joined is not joined or stream.lost:
            return
        stream.lost = True
        stream.transport.abort()
        self.recovery.lost(asyncio.get_running_loop().time())
        for ticket in self.inbox.fail(Away(reason)):
            self.take(ticket)

    # -- requests ----------------------------------------------------------------------------------------------

    def take(self, ticket: Ticket[Any] | None) -> None:
        """A ticket is done: wake who waits for it, and who waits until fewer are in flight."""
        self._room.set()
        if ticket is not None and not ticket.waker.done():
            ticket.waker.set_result(None)

    async def start(
        self,
        joined: Joined,
        message: wire.Message,
        reply: type[R],
        deadline: float,
        begun: Callable[[Ticket[Any]], None] | None = None,
        *,
        at_once: bool = False,
    ) -> Ticket[R]:
        """Send a request on that connection, or raise Away; `at_once`: however many are in flight."""
        while not at_once and len(self.inbox.tickets) >= IN_FLIGHT:
            self._room.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._room.wait()
            except TimeoutError:
                raise Away("too many requests are in flight") from None
        stream = self._stream
        if stream is None or stream.joined is not joined or stream.lost:
            raise Away("the connection is lost")
        posted = message if at_once else None
        ticket = self.inbox.ticket(joined, reply, asyncio.get_running_loop().create_future(), posted)
        try:
            raw = wire.framed(message, ticket.request)
        except KvtierError:  # nothing was sent: no reply will end it
            del self.inbox.tickets[ticket.request]
            raise
        if begun is not None:
            begun(ticket)
        stream.transport.write(raw)
        if not stream.writable.is_set():
            try:
                async with asyncio.timeout_at(deadline):
                    await stream.writable.wait()
            except TimeoutError:
                self.lose(joined, "the daemon does not read")
            except asyncio.CancelledError:
                self._forsake(ticket)
                raise
        return ticket

    async def _ends(self, ticket: Ticket[Any], deadline: float) -> bool:
        """Whether the ticket ends in time."""
        if not ticket.done:
            await asyncio.wait({ticket.waker}, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        return ticket.done

    async def wait(self, ticket: Ticket[R], deadline: float, *, patient: bool = False) -> R | None:
        """The reply. When time is up: None if patient, else the connection is dropped and Away raised.

        Where the waiting task is cancelled, what the reply gives is given back when it comes.
        """
        try:
            done = await self._ends(ticket, deadline)
        except asyncio.CancelledError:
            if not patient:
                self._forsake(ticket)
            raise
        if not done:
            if patient:
                return None
            self.lose(ticket.joined, "the daemon did not answer in time")
        return ticket.result()

    def _forsake(self, ticket: Ticket[Any]) -> None:
        """Nobody waits for the reply any more: what it gives is given back when it comes."""
        ticket.waker.add_done_callback(lambda _: self._undo(ticket))

    def _undo(self, ticket: Ticket[Any]) -> None:
        """Give back what nobody waits for any more."""
        message = undo(ticket.reply)
        if message is not None and not ticket.joined.alive:
            self.recovery.owe(Owe(ticket.joined.welcome.run, message))
        elif message is not None and self._stream is not None:
            other = self.inbox.ticket(ticket.joined, wire.Ok, asyncio.get_running_loop().create_future(), message)
            self._stream.transport.write(wire.request_frame(message, other.request))

    def events(self) -> list[wire.Message]:
        """Events that have come, in order."""
        events = list(self.inbox.events)
        self.inbox.events.clear()
        return events

    async def leave(self) -> None:
        """Disconnect, so that what was held returns at once; never raises for an absent daemon. See Talk.leave."""
        deadline, stream = asyncio.get_running_loop().time() + self.timeout_s, self._stream
        try:
            if self.recovery.hurry(None if stream is None else stream.joined):
                await self.join(deadline)
        except (Away, KvtierError):
            pass
        finally:
            self.recovery.closed = True
        joined = self.joined
        if joined is None:
            return
        joined.alive = False
        try:
            if joined.arenas.unmap():
                await self.wait(await self.start(joined, wire.Bye(), wire.Ok, deadline), deadline)
        except (Away, KvtierError):
            pass
        finally:
            self.lose(joined, "this client is closed")
            joined.arenas.unmap()
        await asyncio.sleep(0)  # let the transport close its socket
