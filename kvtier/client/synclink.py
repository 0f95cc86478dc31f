"""A blocking connection to the daemon that several threads share; every wait has a deadline."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

from kvtier import wire
from kvtier.client.link import (
    IN_FLIGHT,
    Away,
    Borrow,
    Call,
    Daemon,
    Hand,
    Identity,
    Inbox,
    Join,
    Joined,
    Post,
    Recovery,
    Start,
    Step,
    Steps,
    Ticket,
    Wait,
    first_reply,
    hello_frame,
    unmapped_message,
    welcomed,
)
from kvtier.client.pipe import Pipe, ask, wait_dial
from kvtier.types import KvtierError

R = TypeVar("R", bound=wire.Message)
T = TypeVar("T")


class SyncLink:
    """Connects when asked to, connects again after a loss, runs steps. Thread-safe."""

    def __init__(self, path: Path, who: Identity, timeout_s: float) -> None:
        self.path = path
        self.who = who
        self.timeout_s = timeout_s
        self._pipe: Pipe | None = None
        self._pid = os.getpid()
        self.recovery = Recovery()
        self._fresh()

    def _fresh(self) -> None:
        """Locks and tickets of this process."""
        self._inbox = Inbox()
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._reading = False
        self._waiting = 0
        self._sending = threading.Lock()
        self._dialing = threading.Lock()

    @property
    def joined(self) -> Joined | None:
        """The connection as it is, without trying to make one."""
        pipe = self._pipe
        return pipe.joined if pipe is not None and pipe.joined.alive else None

    # -- steps -------------------------------------------------------------------------------------------------

    def run(self, steps: Steps[T], wait_s: float = 0.0) -> T:
        """Do the steps of a verb within the timeout and `wait_s`; raises Away and KvtierError."""
        deadline = time.monotonic() + self.timeout_s + wait_s
        try:
            step = next(steps)
            while True:
                try:
                    got = self._do(step, deadline)
                except (Away, KvtierError) as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(got)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _do(self, step: Step, deadline: float) -> Any:
        """One step."""
        if type(step) is Call:
            return self.wait(self.start(step.joined, step.message, step.reply, deadline), deadline)
        match step:
            case Join():
                return self.join(deadline)
            case Start(joined, message, reply):
                return self.start(joined, message, reply, deadline)
            case Wait(ticket, patient):
                return self.wait(ticket, deadline, patient=patient)
            case Post(joined, message):
                self.start(joined, message, wire.Ok, deadline)
                return None
            case Hand(message, fds, reply):
                return self._aside(message, list(fds), reply, deadline)[0]
            case Borrow(message, reply):
                return self._aside(message, [], reply, deadline)

    def _aside(self, message: wire.Message, fds: list[int], reply: type[R], deadline: float) -> tuple[R, list[int]]:
        """Send on a connection of its own, with descriptors; the reply, and those that came with it."""
        sock = wait_dial(self.path, deadline)
        with sock:
            first = ask(sock, wire.request_frame(message, 1), fds, deadline)
        try:
            return first_reply(first, reply), first.take_fds()
        finally:
            first.close()

    # -- connecting --------------------------------------------------------------------------------------------

    def join(self, deadline: float) -> Joined:
        """The connection, made where there is none and an attempt is due."""
        if self._pid != os.getpid():
            self._forked()
        joined = self.joined
        if joined is not None and not self.recovery.owes:
            return joined
        if not self._dialing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Away("another thread is connecting")
        try:
            joined = self.joined or self._connect(deadline)
            for old in self.recovery.unmapped():
                self._unmapped(joined, old, deadline)
            return joined
        finally:
            self._dialing.release()

    def _unmapped(self, joined: Joined, old: Joined, deadline: float) -> None:
        """Tell the daemon that the slots of a lost connection are not touched any more."""
        try:
            self.wait(self.start(joined, unmapped_message(old), wire.Ok, deadline), deadline)
        except KvtierError as exc:
            self.recovery.told(old, exc)
        else:
            self.recovery.told(old)

    def _connect(self, deadline: float) -> Joined:
        """One attempt; raises Away, and on the very first connection what the daemon refuses."""
        pipe, self._pipe = self._pipe, None
        self.recovery.begin(None if pipe is None else pipe.joined, time.monotonic())
        try:
            self._pipe = self._hello(self.recovery.until(deadline, time.monotonic()))
        except (Away, KvtierError) as exc:
            raise self.recovery.failed(exc, time.monotonic()) from exc
        self.recovery.succeeded()
        return self._pipe.joined

    def _hello(self, deadline: float) -> Pipe:
        """Say Hello and map the arenas."""
        sock = wait_dial(self.path, deadline)
        try:
            daemon = Daemon(sock)
            first = ask(sock, hello_frame(self.who, self.recovery.unmapped()), [], deadline)
            try:
                return Pipe(sock, welcomed(first, daemon))
            finally:
                first.close()
        except OSError as exc:
            sock.close()
            raise Away(f"the connection is lost: {exc}") from exc
        except BaseException:
            sock.close()
            raise

    def _forked(self) -> None:
        """In a child of fork the connection, its locks and its leases are the parent's."""
        self._pid = os.getpid()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.abandon()
        self.recovery.forget()
        self._fresh()

    def look(self) -> None:
        """Notice a daemon that has ended since something was last said to it."""
        joined = self.joined
        if joined is not None and joined.daemon.gone:
            self.lose(joined, "the daemon has ended")

    def lose(self, joined: Joined, reason: str) -> None:
        """Drop a connection; whoever waits on it gets Away."""
        pipe = self._pipe
        if pipe is None or pipe.joined is not joined or not joined.alive:
            return
        pipe.drop()
        self.recovery.lost(time.monotonic())
        with self._lock:
            self._inbox.fail(Away(reason))
            self._state.notify_all()

    # -- requests ----------------------------------------------------------------------------------------------

    def start(self, joined: Joined, message: wire.Message, reply: type[R], deadline: float) -> Ticket[R]:
        """Send a request on that connection, or raise Away; a frame is sent whole or the connection dropped."""
        pipe = self._pipe
        if pipe is None or pipe.joined is not joined or not joined.alive:
            raise Away("the connection is lost")
        if len(self._inbox.tickets) >= IN_FLIGHT:
            self._thin_out(deadline)
        with self._lock:
            ticket = self._inbox.ticket(joined, reply)
        try:
            raw = wire.request_frame(message, ticket.request)
            self._send(pipe, raw, deadline)
        except BaseException:
            self._inbox.tickets.pop(ticket.request, None)
            raise
        return ticket

    def _send(self, pipe: Pipe, raw: bytes, deadline: float) -> None:
        """Send a frame after those of other threads."""
        free = self._sending.acquire(blocking=False)
        if not free and not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Away("another thread is sending")
        try:
            pipe.send(raw, deadline, self._read_aside)
        except BaseException as exc:
            self.lose(pipe.joined, str(exc))  # part of a frame may be sent
            raise
        finally:
            self._sending.release()

    def _thin_out(self, deadline: float) -> None:
        """Wait for the oldest replies where many are in flight: neither side's buffers may fill with them."""
        while len(self._inbox.tickets) >= IN_FLIGHT:
            with self._lock:
                oldest = next(iter(self._inbox.tickets.values()), None)
            if oldest is not None and not self._await(oldest, deadline):
                raise Away("too many requests are in flight")

    def wait(self, ticket: Ticket[R], deadline: float, *, patient: bool = False) -> R | None:
        """The reply. When time is up: None if patient, else the connection is dropped and Away raised."""
        try:
            ended = self._await(ticket, deadline)
        except BaseException:  # an interrupt: nobody would give back what the reply grants
            self.lose(ticket.joined, "interrupted while waiting for the daemon")
            raise
        if not ended:
            if patient:
                return None
            self.lose(ticket.joined, "the daemon did not answer in time")
        return ticket.result()

    def _await(self, ticket: Ticket[Any], deadline: float) -> bool:
        """Whether the ticket ends in time. One waiting thread reads for all; the others sleep."""
        while True:
            with self._lock:
                while not ticket.done and self._reading:
                    if not self._sleep(deadline):
                        return ticket.done
                if ticket.done:
                    return True
                self._reading = True
            if not self._read_alone(deadline):
                return ticket.done

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

    def _read_aside(self) -> bool:
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
        if pipe is None:
            return True
        try:
            data = pipe.receive(deadline)
        except Away as exc:
            self.lose(pipe.joined, str(exc))
            return True
        if data is None:
            return False
        try:
            pipe.frames.feed(data)
            with self._lock:
                while (frame := pipe.frames.next()) is not None:
                    self._inbox.take(frame)
        except KvtierError as exc:
            self.lose(pipe.joined, f"the daemon ended the connection: {exc}")
        return True

    def events(self) -> list[wire.Message]:
        """Events that have come, in order; reads what is there unless another thread does."""
        if self.joined is not None:
            self._read_aside()
        with self._lock:
            events = list(self._inbox.events)
            self._inbox.events.clear()
        return events

    def leave(self) -> None:
        """Say Bye, so that what was held returns at once; never raises for an absent daemon."""
        self.recovery.closed = True
        pipe = self._pipe
        if pipe is None or not pipe.joined.alive:
            return
        deadline = time.monotonic() + self.timeout_s
        try:
            self.wait(self.start(pipe.joined, wire.Bye(), wire.Ok, deadline), deadline)
        except (Away, KvtierError):
            pass
        finally:
            self.lose(pipe.joined, "this client is closed")
            pipe.joined.arenas.unmap()
