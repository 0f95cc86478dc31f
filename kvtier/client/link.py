"""What a sync and an async client share below their verbs: the steps of a verb, and one joined connection."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from kvtier import wire
from kvtier.client.arenas import Arenas
from kvtier.frames import Frame
from kvtier.handshake import FirstFrame, ended
from kvtier.types import Code, KvtierError

RETRY_S: Final = 0.005
"""Between attempts while the daemon's backlog is full."""
IN_FLIGHT: Final = 128
"""Requests that a client leaves unanswered before it reads; below the server's bound."""
EVENTS: Final = 4096

FAULTS: Final = frozenset({Code.BAD_REQUEST, Code.VERSION, Code.FORBIDDEN})
"""Refusals that say the program is wrong: raised. All others are misses."""

T = TypeVar("T")
R = TypeVar("R", bound=wire.Message)


class Away(Exception):  # noqa: N818 - a state of the daemon, which engines see as a miss
    """The daemon is absent, hung, or lost this connection."""


class Identity(NamedTuple):
    """Who this client is; what Hello says."""

    instance: str
    scope: str
    events: bool


# -- steps of a verb: what a generator yields and its driver does --------------------------------------------------


class Join(NamedTuple):
    """Be connected; gives Joined."""


class Call(NamedTuple):
    """Send and wait; gives the reply. A daemon that does not answer in time has lost this connection."""

    joined: Joined
    message: wire.Message
    reply: type[wire.Message]


class Start(NamedTuple):
    """Send; gives the ticket of the reply."""

    joined: Joined
    message: wire.Message
    reply: type[wire.Message]
    begun: Callable[[Ticket[Any]], None] | None = None
    """Told of the ticket before anything is sent: whatever interrupts that, somebody knows of it."""


class Wait(NamedTuple):
    """Wait for a ticket; gives its reply. When time is up: None if patient, else the connection is given up."""

    ticket: Any
    patient: bool = True


class Post(NamedTuple):
    """Send, and let the reply come when it comes; gives None.

    Nobody waits for it: what gives something back is said again on the next connection where no reply came on this.
    """

    joined: Joined
    message: wire.Message


class Owe(NamedTuple):
    """Post it on the next connection to that run of the daemon: none is there now, or it failed; gives None."""

    run: bytes
    message: wire.Message


class Aside(NamedTuple):
    """Send a message, with descriptors, on a connection of its own, one at a time; gives None.

    `known`: whether another thread has done it meanwhile, so that there is nothing to send. `learn` is told of the
    reply before others have their turn, and how to take the descriptors that came along: what the daemon was told
    last holds, whoever hears its answer first.
    """

    joined: Joined
    message: wire.Message
    fds: tuple[int, ...]
    reply: type[wire.Message]
    known: Callable[[], bool]
    learn: Callable[[Any, Callable[[], list[int]]], None]


class Do(NamedTuple):
    """Copy so many bytes, which takes a while; gives None. Nothing is said meanwhile."""

    work: Callable[[], None]
    nbytes: int


Step = Join | Call | Start | Wait | Post | Owe | Aside | Do
Steps = Generator[Step, Any, T]
"""A verb of the client without its I/O: sync and async drivers run the same steps."""


# -- one connection --------------------------------------------------------------------------------------------------


class Daemon:
    """The process that serves a connection, watched by its pidfd."""

    _pidfd: int | None = None

    def __init__(self, welcome: FirstFrame) -> None:
        """Whoever sent the Welcome. Raises ProcessLookupError where it has ended."""
        self.pid = welcome.sender
        self._pidfd = welcome.take_pidfd()
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the process has ended: nothing it was asked to copy moves any more."""
        if not self._gone and self._pidfd is not None:
            self._gone = ended(self._pidfd)
        return self._gone

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def __del__(self) -> None:
        self.close()


class DeviceArena(NamedTuple):
    """Device memory that is mapped."""

    number: int
    token: bytes
    """What shows the daemon that it is."""


class Joined:
    """One connection that said Hello: its arenas, and whether it still is."""

    def __init__(self, instance: str, welcome: wire.Welcome, arenas: Arenas, daemon: Daemon) -> None:
        self.instance = instance
        self.welcome = welcome
        self.arenas = arenas
        self.daemon = daemon
        self.alive = True
        """Whether what was given on it may be looked at."""
        self.inherited = False
        """Whether it is of a process that forked this one: what was given on it is not this one's to give back."""
        self.drained = False
        """Whether the daemon said to a later one that nothing moves any more which was asked for on this one."""
        self.mapped: DeviceArena | None = None
        """The arena in device memory, once it is mapped."""
        self.device = -1
        """Its number, once the daemon has seen that it is; -1: what the daemon gives is in host."""
        self.unheard: list[int] = []
        """Requests for leases and reservations whose replies never came."""
        self.unsaid: list[wire.Message] = []
        """What gives something back and was not answered: it may not have been read."""
        heirs.add(self)

    def forked(self) -> None:
        """See Heir."""
        self.alive, self.inherited = False, True
        self.arenas.forked()


class Given(NamedTuple, Generic[R]):
    """A lease or reservation: the connection that it was given on, the daemon's words, and the epoch it is of."""

    joined: Joined
    reply: R
    cache_id: bytes


class Heir(Protocol):
    """What a child of fork has of its parent, and must make useless before anything else runs."""

    def forked(self) -> None:
        """This is the child, in which the parent's other threads are not, but the locks that they held."""


heirs: Final[WeakSet[Heir]] = WeakSet()


def _forked() -> None:
    """The connections, and what was given on them, are the parent's alone."""
    for heir in tuple(heirs):
        heir.forked()


os.register_at_fork(after_in_child=_forked)


def dial(path: Path) -> socket.socket | None:
    """A connected non-blocking socket, or None while the daemon's backlog is full; raises Away."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect(str(path))
    except BlockingIOError:
        sock.close()
        return None
    except OSError as exc:
        sock.close()
        raise Away(f"no daemon at {path}: {exc}") from exc
    return sock


def undo(reply: wire.Message | None) -> wire.Message | None:
    """What gives back a reply that nobody waits for any more."""
    if isinstance(reply, wire.Acquired) and reply.lease:
        return wire.Release(reply.lease)
    if isinstance(reply, wire.Reserved) and reply.reservation:
        return wire.Abort(reply.reservation)
    return None


def unmapped_message(old: Joined) -> wire.Unmapped:
    """Says that nothing of a lost connection is touched any more, and what was never heard on it."""
    return wire.Unmapped(old.welcome.session, b"".join(request.to_bytes(8, "little") for request in old.unheard))


def hello_frame(who: Identity, unmapped: list[Joined]) -> bytes:
    """The first frame of a connection; of what was never heard, `unmapped_message` tells."""
    over = tuple(old.welcome.session for old in unmapped if not old.unheard)
    return wire.framed(wire.Hello(wire.VERSION, who.instance, who.scope, who.events, over), 1)


def first_reply(first: FirstFrame, expect: type[R]) -> R:
    """The reply in a whole first frame; raises the error it carries."""
    assert first.header is not None
    return wire.decode_reply(first.header.verb, first.body, expect)


def welcomed(who: Identity, first: FirstFrame) -> Joined:
    """The joined connection that a Welcome stands for; its descriptors stay the caller's. Raises OSError."""
    welcome = first_reply(first, wire.Welcome)
    return Joined(who.instance, welcome, Arenas(welcome.arenas, first.fds), Daemon(first))


class Ticket(Generic[R]):
    """One request in flight."""

    __slots__ = ("done", "error", "expect", "joined", "message", "reply", "request", "waker")

    def __init__(
        self, joined: Joined, request: int, expect: type[R], waker: Any = None, message: wire.Message | None = None
    ) -> None:
        self.joined = joined
        self.request = request
        self.expect = expect
        self.done = False
        self.message = message
        """Where it is posted: who sent it does not wait."""
        self.reply: R | None = None
        self.error: Exception | None = None
        self.waker = waker

    def fail(self, error: Exception) -> None:
        """End without a reply."""
        self.error, self.done = error, True

    def take(self, frame: Frame) -> None:
        """End with what a frame says."""
        try:
            self.reply = wire.decode_reply(frame.verb, frame.body, self.expect)
        except KvtierError as exc:
            self.error = exc
        self.done = True

    def result(self) -> R:
        """The reply; raises the refusal, or Away."""
        if self.error is not None:
            raise self.error
        if self.reply is None:
            raise Away("the connection is lost")
        return self.reply


class Inbox:
    """Replies sorted to their tickets, and events kept. Pure: bytes in, finished tickets out."""

    def __init__(self, events: deque[wire.Message]) -> None:
        self.tickets: dict[int, Ticket[Any]] = {}
        self.events = events
        self._last = 1

    def ticket(
        self, joined: Joined, expect: type[R], waker: Any = None, message: wire.Message | None = None
    ) -> Ticket[R]:
        """A ticket with a request id of its own."""
        self._last += 1
        ticket = self.tickets[self._last] = Ticket(joined, self._last, expect, waker, message)
        return ticket

    def take(self, frame: Frame) -> Ticket[Any] | None:
        """The ticket that a frame finishes; raises KvtierError when the daemon ends the connection by it."""
        ticket = self.tickets.pop(frame.request, None)
        if ticket is not None:
            ticket.take(frame)
        elif frame.verb == wire.ERROR_VERB:
            wire.decode_reply(frame.verb, frame.body, wire.Ok)
        elif not frame.request:
            self.events.append(wire.decode_request(frame.verb, frame.body))
        return ticket

    def fail(self, error: Exception) -> list[Ticket[Any]]:
        """End every ticket: the connection is lost."""
        tickets = list(self.tickets.values())
        self.tickets.clear()
        for ticket in tickets:
            if ticket.expect in {wire.Acquired, wire.Reserved}:
                ticket.joined.unheard.append(ticket.request)
            if isinstance(ticket.message, wire.Release | wire.Abort):
                ticket.joined.unsaid.append(ticket.message)
            ticket.fail(error)
        return tickets
