"""What a client does about a connection that was lost."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvtier import wire
from kvtier.client.link import Away, Joined, Owe
from kvtier.types import Code, KvtierError

CONNECT_S: Final = 0.05
"""An attempt to connect again costs an engine's step at most this long."""
BACKOFF_S: Final = (0.1, 5.0)


class Recovery:
    """When to connect again, and what is still owed to the connections that were lost. The clock is the caller's."""

    def __init__(self) -> None:
        self.closed = False
        self._ever = False
        self._delay = BACKOFF_S[0]
        self._next = 0.0
        self._lost: list[Joined] = []
        self._owed: deque[Owe] = deque()

    @property
    def owes(self) -> bool:
        """Whether the daemon is still to hear something: of arenas that are unmapped, of what is given back."""
        return bool(self._lost or self._owed)

    def hurry(self, lost: Joined | None) -> bool:
        """Whether a client that closes is still to say something, of `lost` at least; it may try to connect at once."""
        self._next = 0.0
        return not self.closed and (self.owes or (lost is not None and not lost.alive and not lost.daemon.gone))

    def owe(self, what: Owe) -> None:
        """Remember to say something."""
        self._owed.append(what)

    def owed(self, by: Joined) -> wire.Message | None:
        """What is to be said next on a connection; it means nothing to another run of the daemon."""
        while self._owed and self._owed[0].run != by.welcome.run:
            self._owed.popleft()
        return self._owed[0].message if self._owed else None

    def said(self) -> None:
        """That was sent."""
        self._owed.popleft()

    def begin(self, lost: Joined | None, now: float) -> None:
        """An attempt to connect. Raises Away where it is not due."""
        if lost is not None and lost not in self._lost:
            self._lost.append(lost)
            self._owed += [Owe(lost.welcome.run, message) for message in lost.unsaid]
        if self.closed:
            raise Away("this client is closed")
        if now < self._next:
            raise Away("the daemon is away; the next attempt to connect is not due yet")

    def until(self, deadline: float, now: float) -> float:
        """When the attempt ends: only the first one may take its caller's time."""
        return min(deadline, now + CONNECT_S) if self._ever else deadline

    def lost(self, now: float) -> None:
        """A connection was lost, or an attempt failed: wait twice as long as last time."""
        self._next = now + self._delay
        self._delay = min(2 * self._delay, BACKOFF_S[1])

    def failed(self, exc: Away | KvtierError, now: float) -> Away | KvtierError:
        """An attempt failed; what to raise. Only at first a refusal is the program's fault."""
        self.lost(now)
        if self._ever and isinstance(exc, KvtierError):
            return Away(f"the daemon does not take this process again: {exc}")
        return exc

    def succeeded(self) -> None:
        """Connected: start over."""
        self._ever = True
        self._delay, self._next = BACKOFF_S[0], 0.0

    def unmapped(self) -> list[Joined]:
        """Unmap what nothing refers to: lost connections without arenas, of which the daemon has yet to be told."""
        return [old for old in self._lost if old.arenas.unmap()]

    def told(self, old: Joined, by: Joined, refusal: KvtierError | None = None) -> None:
        """The daemon was told; where it is busy with what that connection had in flight, later again."""
        if refusal is None:  # another daemon's word says nothing of what an earlier one does
            old.drained = old.welcome.run == by.welcome.run
        if (refusal is None or refusal.code is not Code.BUSY) and old in self._lost:
            self._lost.remove(old)

    def forget(self) -> None:
        """In a child of fork nothing is owed."""
        self._lost.clear()
        self._owed.clear()
