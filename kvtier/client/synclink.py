"""A blocking link to the daemon that several threads share: it connects, and does the steps of verbs in time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvtier import wire
from kvtier.client.link import (
    EVENTS,
    Aside,
    Away,
    Call,
    Do,
    Identity,
    Join,
    Joined,
    Owe,
    Post,
    Start,
    Step,
    Steps,
    Wait,
    first_reply,
    heirs,
    hello_frame,
    unmapped_message,
    welcomed,
)
from kvtier.client.pipe import Pipe, ask, wait_dial
from kvtier.client.recovery import Recovery
from kvtier.client.talk import Talk
from kvtier.handshake import name_senders
from kvtier.types import KvtierError

R = TypeVar("R", bound=wire.Message)
T = TypeVar("T")


class SyncLink:
    """Connects when asked to, connects again after a loss, runs steps. Thread-safe."""

    def __init__(self, path: Path, who: Identity, timeout_s: float) -> None:
        self.path = path
        self.who = who
        self.timeout_s = timeout_s
        self._talk: Talk | None = None
        self.recovery = Recovery()
        self._fresh()
        heirs.add(self)

    def _fresh(self) -> None:
        """What is of this process."""
        self._events: deque[wire.Message] = deque(maxlen=EVENTS)
        self._dialing = threading.RLock()  # one that knows its owner: see `join`
        self._dialer = 0

    def forked(self) -> None:
        """See link.Heir."""
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.forked()
        self.recovery.forget()
        self._fresh()

    @property
    def joined(self) -> Joined | None:
        """The connection as it is, without trying to make one."""
        talk = self._talk
        return talk.joined if talk is not None and talk.joined.alive else None

    # -- steps -------------------------------------------------------------------------------------------------

    def run(self, steps: Steps[T], wait_s: float = 0.0) -> T:
        """Do the steps of a verb within the timeout and `wait_s`; raises Away and KvtierError.

        An interrupt costs the connection, except amid a copy: nobody would give back what a reply grants, and a lock
        may be left held.
        """
        deadline = time.monotonic() + self.timeout_s + wait_s
        try:
            step = next(steps)
            while True:
                try:
                    got = self._do(step, deadline)
                except (Away, KvtierError) as exc:
                    step = steps.throw(exc)
                except BaseException as exc:
                    if type(step) is not Do:
                        self._cut()
                        raise
                    step = steps.throw(exc)
                else:
                    step = steps.send(got)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _do(self, step: Step, deadline: float) -> Any:
        """One step."""
        if type(step) is Call:
            return self._on(step.joined).call(step.message, step.reply, deadline)
        match step:
            case Join():
                return self.join(deadline)
            case Start(joined, message, reply, begun):
                return self._on(joined).start(message, reply, deadline, begun)
            case Wait(ticket, patient):
                return ticket.waker.wait(ticket, deadline, patient=patient)
            case Post(joined, message):
                self._on(joined).start(message, wire.Ok, deadline, at_once=True)
                return None
            case Owe():
                return self.recovery.owe(step)
            case Aside():
                return self._alone(deadline, partial(self._aside, step, deadline))
            case Do(work, _):
                return work()

    def _on(self, joined: Joined) -> Talk:
        """What is said on that connection; raises Away where it is lost."""
        talk = self._talk
        if talk is None or talk.joined is not joined or not joined.alive:
            raise Away("the connection is lost")
        return talk

    def _cut(self) -> None:
        """Drop the connection, with all that an interrupt may have left half done on it."""
        if self._talk is not None:
            self._talk.lose("a call was interrupted")

    def _aside(self, step: Aside, deadline: float) -> None:
        """Say it on a connection of its own, unless that was done meanwhile; raises Away, and the refusal."""
        self._on(step.joined)
        if step.known():
            return
        with wait_dial(self.path, deadline) as sock:
            first = ask(sock, wire.framed(step.message, 1), [*step.fds], deadline)
        try:
            step.learn(first_reply(first, step.reply), first.take_fds)
        finally:
            first.close()

    # -- connecting --------------------------------------------------------------------------------------------

    def join(self, deadline: float) -> Joined:
        """The connection, made where there is none and an attempt is due."""
        joined = self.joined
        if joined is not None and not self.recovery.owes:
            return joined
        return self._alone(deadline, partial(self._joining, deadline))

    def _joining(self, deadline: float) -> Joined:
        """Connect, and say what the daemon is still to hear."""
        joined = self.joined or self._connect(deadline)
        for old in self.recovery.unmapped():
            self._unmapped(joined, old, deadline)
        while (message := self.recovery.owed(joined)) is not None:
            self._on(joined).start(message, wire.Ok, deadline, at_once=True)
            self.recovery.said()
        return joined

    def _alone(self, deadline: float, work: Callable[[], T]) -> T:
        """Do what is of one thread at a time; raises Away."""
        me = threading.get_ident()
        if self._dialer == me:
            raise Away("this very thread is connecting: a signal or a destructor came amid it")
        try:
            if not self._dialing.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise Away("another thread is connecting")
            self._dialer = me
            return work()
        finally:
            # However an interrupt divides the above, this lets go of the lock if this thread has it, and only then.
            if self._dialer == me:
                self._dialer = 0
            try:  # noqa: SIM105 - a call to suppress() is where another interrupt would come
                self._dialing.release()
            except RuntimeError:
                pass

    def _unmapped(self, joined: Joined, old: Joined, deadline: float) -> None:
        """Tell the daemon that the slots of a lost connection are not touched any more."""
        try:
            self._on(joined).call(unmapped_message(old), wire.Ok, deadline)
        except KvtierError as exc:
            self.recovery.told(old, joined, exc)
        else:
            self.recovery.told(old, joined)

    def _connect(self, deadline: float) -> Joined:
        """One attempt; raises Away, and on the very first connection what the daemon refuses."""
        talk = self._talk
        if talk is not None:  # another thread may be about to, and what was never heard on it is said first of all
            talk.lose("the connection is lost")
        self.recovery.begin(None if talk is None else talk.joined, time.monotonic())
        try:
            pipe = self._hello(self.recovery.until(deadline, time.monotonic()))
        except (Away, KvtierError) as exc:
            raise self.recovery.failed(exc, time.monotonic()) from exc
        self._talk = Talk(pipe, self._events, self._ended)
        self.recovery.succeeded()
        if self.recovery.closed:  # meanwhile, when there was nothing to disconnect
            self._talk.leave(deadline)
            raise Away("this client is closed")
        return pipe.joined

    def _ended(self) -> None:
        """A connection was lost."""
        self.recovery.lost(time.monotonic())

    def _hello(self, deadline: float) -> Pipe:
        """Say Hello and map the arenas."""
        sock = wait_dial(self.path, deadline)
        try:
            name_senders(sock)
            first = ask(sock, hello_frame(self.who, self.recovery.unmapped()), [], deadline)
            try:
                return Pipe(sock, welcomed(self.who, first))
            finally:
                first.close()
        except OSError as exc:
            sock.close()
            raise Away(f"the connection is lost: {exc}") from exc
        except BaseException:
            sock.close()
            raise

    def look(self) -> None:
        """Notice a daemon that has ended since something was last said to it."""
        talk = self._talk
        if talk is not None and talk.joined.alive and talk.joined.daemon.gone:
            talk.lose("the daemon has ended")

    def events(self) -> list[wire.Message]:
        """Events that have come, in order; reads what is there unless another thread does."""
        talk = self._talk
        if talk is not None and talk.joined.alive:
            try:
                talk.read_aside()
            except BaseException:
                self._cut()
                raise
        events = list[wire.Message]()
        while self._events:
            events.append(self._events.popleft())
        return events

    def leave(self) -> None:
        """Disconnect, so that what was held returns at once; never raises for an absent daemon."""
        deadline, talk = time.monotonic() + self.timeout_s, self._talk
        try:
            if self.recovery.hurry(None if talk is None else talk.joined):
                self.join(deadline)
        except (Away, KvtierError):
            pass
        finally:
            self.recovery.closed = True
        talk = self._talk
        if talk is not None and talk.joined.alive:
            talk.leave(deadline)
