"""Requests and replies of several threads on one connection.

Whatever an interrupt may leave half done, such as a frame, a turn to send or to read, or a reply that nobody waits for,
is of one connection, and is gone with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from kvtier import wire
from kvtier.client.link import IN_FLIGHT, Away, Inbox, Ticket
from kvtier.client.pipe import Pipe
from kvtier.types import KvtierError

R = TypeVar("R", bound=wire.Message)


class Talk:
    """What is said on one connection. Thread-safe."""

    def __init__(self, pipe: Pipe, events: deque[wire.Message], ended: Callable[[], None]) -> None:
        """`events` takes those that come; `ended` is told once of the end."""
        self.joined = pipe.joined
        self._pipe = pipe
        self._inbox = Inbox(events)
        self._ended = ended
        self._over = False
        self._fresh()

    def _fresh(self) -> None:
        """Locks of this process."""
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._reading = False
        self._waiting = 0
        self._sending = threading.Lock()

    def forked(self) -> None:
        """See link.Heir."""
        self._pipe.abandon()
        self._fresh()
        self._inbox.fail(Away("the connection is of the process that forked this one"))

    def lose(self, reason: str) -> None:
        """Drop the connection; whoever waits on it gets Away. Again after an interrupt: it ends what that left."""
        self._pipe.drop()
        with self._lock:
            told, self._over = self._over, True
            self._inbox.fail(Away(reason))
            self._state.notify_all()
        if not told:
            self._ended()

    # -- requests ----------------------------------------------------------------------------------------------

    def call(self, message: wire.Message, reply: type[R], deadline: float) -> R | None:
        """Send and wait; raises Away, and the refusal."""
        return self.wait(self.start(message, reply, deadline), deadline)

    def start(
        self,
        message: wire.Message,
        reply: type[R],
        deadline: float,
        begun: Callable[[Ticket[Any]], None] | None = None,
        *,
        at_once: bool = False,
    ) -> Ticket[R]:
        """Send a request, or raise Away; a frame is sent whole or the connection dropped.

        `at_once`: however many are in flight; a post, which is said again elsewhere where no reply comes here.
        """
        ticket = self._ticket(reply, deadline, message if at_once else None)
        try:
            raw = wire.framed(message, ticket.request)
            if begun is not None:
                begun(ticket)
            self._send(raw, deadline)
        except BaseException:
            self._inbox.tickets.pop(ticket.request, None)
            raise
        return ticket

    def _send(self, raw: bytes, deadline: float) -> None:
        """Send a frame after those of other threads."""
        try:
            self._take_turn(deadline)
            try:
                self._pipe.send(raw, deadline, self.read_aside)
            finally:
                self._sending.release()
        except BaseException as exc:
            self.lose(str(exc))  # part of a frame may be sent, or an interrupt have left the lock
            raise

    def _take_turn(self, deadline: float) -> None:
        """Be the one that sends; raises Away."""
        free = self._sending.acquire(blocking=False)
        if not free and not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Away("another thread is sending")

    def _ticket(self, reply: type[R], deadline: float, posted: wire.Message | None) -> Ticket[R]:
        """A ticket, once some reply has come where many are in flight: neither side's buffers may fill with them."""
        ticket = None
        while ticket is None:
            with self._lock:
                if posted is not None or self._few():
                    ticket = self._inbox.ticket(self.joined, reply, self, posted)
            if ticket is None and not self._until(self._few, deadline):
                raise Away("too many requests are in flight")
        return ticket

    def _few(self) -> bool:
        """Whether one more may be in flight."""
        return len(self._inbox.tickets) < IN_FLIGHT

    def wait(self, ticket: Ticket[R], deadline: float, *, patient: bool = False) -> R | None:
        """The reply. When time is up: None if patient, else the connection is dropped and Away raised."""
        if not self._until(lambda: ticket.done, deadline):
            if patient:
                return None
            self.lose("the daemon did not answer in time")
        return ticket.result()

    def _until(self, so: Callable[[], bool], deadline: float) -> bool:
        """Whether replies make it so in time. One waiting thread reads for all; the others sleep."""
        while not so():
            with self._lock:
                while not so() and self._reading:
                    if not self._sleep(deadline):
                        return so()
                if so():
                    break
                self._reading = True
            if not self._read_alone(deadline):
                return so()
        return True

    def _sleep(self, deadline: float) -> bool:
        """Wait for the thread that reads; False when time is up."""
        self._waiting += 1
        try:
            return self._state.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._waiting -= 1

    def _read_alone(self, deadline: float) -> bool:
        """Read once, having set `_reading`; False when time is up before something came."""
        try:
            return self._read(deadline)
        finally:
            with self._lock:
                self._reading = False
                if self._waiting:
                    self._state.notify_all()

    def read_aside(self) -> bool:
        """Read what is there; False where another thread reads."""
        with self._lock:
            if self._reading:
                return False
            self._reading = True
        self._read_alone(time.monotonic())
        return True

    def _read(self, deadline: float) -> bool:
        """Read once; False when time is up before something came."""
        pipe = self._pipe
        try:
            data = pipe.receive(deadline)
        except Away as exc:
            self.lose(str(exc))
            return True
        if data is None:
            return False
        try:
            pipe.frames.feed(data)
            with self._lock:
                while (frame := pipe.frames.next()) is not None:
                    self._inbox.take(frame)
        except KvtierError as exc:
            self.lose(f"the daemon ended the connection: {exc}")
        return True

    def leave(self, deadline: float) -> None:
        """Say Bye where no slot is looked at any more, and end the connection.

        A thread that copies, or a view in somebody's hands, may still touch one: without Bye the daemon gives it to
        nobody while this process lives.
        """
        self.joined.alive = False
        try:
            if self.joined.arenas.unmap():
                self.call(wire.Bye(), wire.Ok, deadline)
        except (Away, KvtierError):
            pass
        finally:
            self.lose("this client is closed")
            self.joined.arenas.unmap()
