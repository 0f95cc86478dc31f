"""Transfers between the cache and memory of the engine's own, and when the engine may touch that memory again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn, Self, cast

import msgspec

from kvtier import wire
from kvtier.client.caches import OpenCache
from kvtier.client.held import HeldLease, HeldReservation
from kvtier.client.link import FAULTS, Aside, Away, Call, Identity, Join, Joined, Post, Start, Steps, Ticket, Wait
from kvtier.client.whole import Numbers, whole
from kvtier.types import KvtierError, bad

Stretches = Sequence[tuple[wire.Exported, int]]
"""Memory as exported, with the descriptor of what has no handle."""
Source = HeldLease | tuple[OpenCache, bytes]
Target = HeldReservation | tuple[OpenCache, bytes]


class HeldRegion:
    """Memory of the engine's own that the daemon may copy to and from; registered again after a restart."""

    _fds: tuple[int, ...] = ()

    def __init__(self, name: str, message: wire.Register | wire.RegisterKv, fds: Sequence[int]) -> None:
        """Keeps duplicates of the descriptors."""
        self.name = name
        try:
            self._fds = tuple(os.dup(fd) for fd in fds)
        except (OSError, TypeError, OverflowError) as exc:
            raise bad("fd", f"an open file descriptor ({exc})", fds) from None
        self._message = message
        self._open = True
        self._joined: Joined | None = None
        self._number = 0
        self._unsettled = set[Moving]()

    @property
    def fenced(self) -> bool:
        """Whether a transfer that nobody has in hand may still touch a row: leave them all alone."""
        for transfer in tuple(self._unsettled):
            if not transfer.fenced:
                self.unfence(transfer)
        return bool(self._unsettled)

    def fence(self, transfer: Moving) -> None:
        """Remember a transfer until it is known to have ended."""
        self._unsettled.add(transfer)

    def unfence(self, transfer: Moving) -> None:
        """It has ended, or somebody has it in hand."""
        self._unsettled.discard(transfer)

    def entering(self) -> Steps[tuple[Joined, int]]:
        """Be connected, with this region registered there."""
        joined = cast("Joined", (yield Join()))
        if self._joined is not joined:
            if not self._open:
                raise bad("region", "one that is registered", self.name)
            message = msgspec.structs.replace(self._message, session=joined.welcome.session)

            def learn(reply: wire.Registered, _: object) -> None:
                self._number, self._joined = reply.region, joined

            try:
                yield Aside(joined, message, self._fds, wire.Registered, lambda: self._joined is joined, learn)
            except KvtierError as exc:
                if self._joined is not None:  # it was registered before: not the engine's fault
                    raise Away(f"the daemon does not register region {self.name} again: {exc}") from exc
                raise
        return joined, self._number

    def _unregistering(self) -> Steps[bool]:
        """Let the daemon forget the region. Raises Away, and busy while transfers run.

        One that has lost the connection may have it still: it is asked again until it says that nothing moves there.
        """
        known = self._joined
        if known is not None and not (known.inherited or known.daemon.gone):
            joined, number = yield from self.entering()
            if joined is not known and not known.drained:
                raise Away("the daemon may still have the region of a connection that was lost")
            yield Call(joined, wire.Unregister(number), wire.Ok)
        self.close()
        return True

    def close(self) -> None:
        """Close the duplicate descriptors."""
        fds, self._fds = self._fds, ()
        self._joined, self._open = None, False
        for fd in fds:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a copy would close the descriptors of this one, whose numbers are other files' then."""
        raise TypeError("a region can be neither copied nor pickled: register it again")

    def _loading(self, transfer: Moving, source: Source, group: int, first: int, wait_ms: int) -> Steps[None]:
        """Send a Load."""
        joined, region = yield from self.entering()
        raw = transfer.rows.tobytes()
        if isinstance(source, HeldLease):
            source.on(joined)
            message = wire.Load(region, group, raw, lease=source.number, first=first, wait_ms=wait_ms)
        else:
            _, cache = yield from source[0].entering()
            message = wire.Load(region, group, raw, cache=cache, keys=source[1], wait_ms=wait_ms)
        yield from transfer.beginning(joined, message, wire.Loaded)

    def _storing(self, transfer: Moving, target: Target, group: int, first: int, wait_ms: int) -> Steps[None]:
        """Send a Store."""
        joined, region = yield from self.entering()
        raw = transfer.rows.tobytes()
        if isinstance(target, HeldReservation):
            target.on(joined)
            if not target.writes:  # another process does, as `write` has it
                return
            message = wire.Store(region, group, raw, reservation=target.number, first=first, wait_ms=wait_ms)
        else:
            _, cache = yield from target[0].entering()
            message = wire.Store(region, group, raw, cache=cache, keys=target[1], wait_ms=wait_ms)
        yield from transfer.beginning(joined, message, wire.Stored)


def registering(who: Identity, name: str, offset: int, stride: int, rows: int) -> wire.Register:
    """The request that shares rows; raises bad_request."""
    for field, value, least in (("offset", offset, 0), ("stride", stride, 1), ("rows", rows, 1)):
        if not isinstance(value, int) or value < least:
            raise bad(field, f"a whole number of at least {least}", value)
    return wire.Register(who.instance, name, offset, stride, rows, who.scope)


def registering_kv(
    who: Identity, name: str, memory: Stretches, planes: Sequence[wire.Plane], tokens: Sequence[bytes]
) -> tuple[wire.RegisterKv, list[int]]:
    """The request that shares paged KV in device memory, and the descriptors that go along."""
    told, fds = tuple(what for what, _ in memory), [fd for what, fd in memory if not what.handle]
    return wire.RegisterKv(who.instance, name, told, tuple(planes), tuple(tokens), who.scope), fds


class Moving:
    """One Load or Store in flight. Its rows may be touched again only when it is not `fenced` any more."""

    def __init__(self, region: HeldRegion, rows: Numbers) -> None:
        """Raises bad_request."""
        self.rows = whole(rows, "rows", "row numbers", "<i8")
        self.result: bytes | None = bytes(len(self.rows))
        """One byte per row, 1 where it was done; once it is sent, None until the daemon has said so."""
        self.refused = ""
        """Why rows were not done, where the daemon gave a reason."""
        self._region = region
        self._ticket: Ticket[Any] | None = None

    def beginning(self, joined: Joined, message: wire.Message, reply: type[wire.Message]) -> Steps[None]:
        """Send it. Its rows are fenced from before that on, whatever interrupts, until it ends or is `in_hand`."""
        try:
            yield Start(joined, message, reply, self._begun)
        except (Away, KvtierError):  # not sent, or not whole
            self._done(bytes(len(self.rows)))
            raise

    def _begun(self, ticket: Ticket[Any]) -> None:
        """It is about to be sent."""
        self.result, self._ticket = None, ticket
        self._region.fence(self)

    def in_hand(self) -> Self:
        """Who has it waits for it, and looks whether it is `fenced`."""
        self._region.unfence(self)
        return self

    def _done(self, result: bytes) -> None:
        """No byte of it moves any more."""
        self.result = result
        self._region.unfence(self)

    @property
    def _joined(self) -> Joined | None:
        return None if self._ticket is None else self._ticket.joined

    @property
    def lost(self) -> bool:
        """Whether the connection ended before the daemon's word came."""
        return not self._settled() and self._joined is not None and not self._joined.alive

    @property
    def fenced(self) -> bool:
        """Whether the daemon may still touch the rows: no word of it came, and its process has not ended."""
        over = self._joined is not None and (self._joined.daemon.gone or self._joined.drained)
        return not self._settled() and not over

    def _settled(self) -> bool:
        """Whether the daemon's word is there, also where nobody waited for it."""
        if self.result is None and self._ticket is not None and self._ticket.done:
            if self._ticket.reply is not None:
                self._take(self._ticket.reply)
            elif isinstance(self._ticket.error, KvtierError):
                self._refuse(self._ticket.error)
        return self.result is not None

    def _waiting(self) -> Steps[bytes | None]:
        """The result, or None while it is not there or never will be."""
        if not self._settled() and not self.lost:
            try:
                reply = yield Wait(self._ticket)
            except Away:
                self._region.fence(self)
                raise
            except KvtierError as exc:
                self._refuse(exc)
                if exc.code in FAULTS:
                    raise
            else:
                if reply is not None:
                    self._take(reply)
        return self.result

    def _take(self, reply: wire.Loaded | wire.Stored) -> None:
        """The daemon's word."""
        self._done(reply.done)
        self.refused = reply.refused if isinstance(reply, wire.Stored) else ""

    def _refuse(self, exc: KvtierError) -> None:
        """The daemon's word that nothing was done."""
        self._done(bytes(len(self.rows)))
        self.refused = exc.code.value

    def _cancelling(self) -> Steps[bytes | None]:
        """Stop; returns when no byte moves any more, or None when the connection is lost first."""
        if not self._settled() and not self.lost:
            assert self._ticket is not None
            try:
                yield Call(self._ticket.joined, wire.Cancel(self._ticket.request), wire.Ok)
            except Away:
                self._region.fence(self)
                raise
            yield from self._waiting()
        return self.result

    def _forsaking(self) -> Steps[None]:
        """Nobody waits any more: stop, and fence the rows until the daemon's word comes."""
        if not self._settled():
            self._region.fence(self)
            if self._ticket is not None and self._ticket.joined.alive:
                yield Post(self._ticket.joined, wire.Cancel(self._ticket.request))
