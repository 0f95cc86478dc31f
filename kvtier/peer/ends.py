"""A connection to a peer that one task uses for one path: what it fetches from there, and what it gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from kvtier.peer import frames
from kvtier.peer.base import Pick, Place, Shared
from kvtier.peer.frames import Refusal
from kvtier.peer.items import echo, items_of, nbytes_of, picks_of, sums_of
from kvtier.peer.node import FAULTS, Node
from kvtier.peer.pipe import Pipe
from kvtier.peer.questions import refused
from kvtier.types import Code, KvtierError, bad

if TYPE_CHECKING:
    from kvtier.peer.direct import Direct


TIMES: Final = 2
"""A home may want an item that often: it may lose some as it takes others, but not for ever."""


class _MismatchError(EOFError):
    """A peer answered something that was not asked."""


class _Held:
    """A connection that one task uses for one path."""

    def __init__(self, tier: Direct, peer: Node, pipe: Pipe, shared: Shared, keys: bytes) -> None:
        self.node = peer.name
        self._tier = tier
        self._peer = peer
        self._pipe: Pipe | None = pipe
        self._shared = shared
        self._keys = keys

    def _open(self) -> Pipe:
        """The connection; raises EOFError once it is closed."""
        if self._pipe is None:
            raise EOFError("this peer failed before")
        return self._pipe

    def _fail(self, exc: BaseException) -> None:
        """Give a failed connection up; raises what is no fault of the peer."""
        if self._pipe is not None:
            self._peer.give(self._pipe, good=refused(exc))
            self._pipe = None
            self._tier.questions.blame(self._peer, exc)
        elif not isinstance(exc, (*FAULTS, KvtierError)):
            raise exc

    def close(self) -> None:
        """See Source and Sink."""
        if self._pipe is not None:
            self._peer.give(self._pipe, good=True)
            self._pipe = None


class DirectSource(_Held):
    """A peer that answered Found."""

    def __init__(
        self,
        tier: Direct,
        peer: Node,
        pipe: Pipe,
        shared: Shared,
        keys: bytes,
        pages: int,
        picks: tuple[Pick, ...] = (),
        load: frames.Load | None = None,
        lacking: Collection[int] = (),
    ) -> None:
        """`load`: comes already, for these picks; unless it is fetched first, the connection is of no use.

        `lacking`: pages (positions of keys) that it does not have.
        """
        super().__init__(tier, peer, pipe, shared, keys)
        self.pages = pages
        self._picks, self._load = picks, load
        self._fresh_until = time.monotonic() + tier.terms.deadline_s / 2
        self._lacking = lacking
        self._echo = echo(shared.id, keys[: pages * shared.spec.stride])

    async def fetch(self, places: Sequence[Place]) -> list[int | None]:
        """See Source."""
        wanted = [at for at, place in enumerate(places) if place.page not in self._lacking]
        order = sorted(wanted, key=lambda at: (places[at].group, places[at].page))
        out: list[int | None] = [None] * len(places)
        if not order:
            return out
        try:
            found = await self._fetch([places[at] for at in order])
        except BaseException as exc:  # noqa: BLE001 - blame raises what is not the peer's fault
            self._fail(exc)
            return out
        for at, value in zip(order, found, strict=True):
            out[at] = value
        return out

    def _unusable(self, picks: tuple[Pick, ...]) -> bool:
        """Whether other items come than these, or the peer hung up: others were fetched from for long.

        What comes already is not waited for long there: after half of that time it is asked for again.
        """
        if self._load is not None:
            return self._picks != picks or time.monotonic() > self._fresh_until
        return not self._shared.spec.keyed and not self._open().stream.quiet

    async def _again(self) -> None:
        """Find on another connection, where nothing comes that was asked for ahead and is not wanted."""
        self.close()
        self._load = None
        keys = self._keys[: self.pages * self._shared.spec.stride]  # it may have more by now
        answer = await self._tier.questions.ask(
            self._peer, self._shared, frames.Find(self._shared.id, keys), frames.Found
        )
        if answer is not None:
            self._pipe, found = answer
            if found.pages < self.pages:
                raise Refusal(Code.UNKNOWN, "some of it is there no more")

    def close(self) -> None:
        """See Source."""
        if self._pipe is not None and self._load is not None:
            self._peer.give(self._pipe, good=False)
            self._pipe = None
        super().close()

    async def _fetch(self, places: list[Place]) -> list[int | None]:
        """Ask for the items and let them arrive; whatever is not exactly what was asked for is a fault."""
        tier, into = self._tier, self._peer.into
        items = [(place.group, place.page) for place in places]
        nbytes = nbytes_of(self._shared.spec, items)
        picks = picks_of(items)
        if self._unusable(picks):
            await self._again()
        pipe, load, self._load = self._open(), self._load, None
        until = time.monotonic() + 2 * pipe.within(nbytes)
        try:
            if load is None:
                fetch = frames.Fetch(picks, tier.packing.pays(into, self._shared.id, len(items)))
                async with asyncio.timeout(2 * pipe.patience(nbytes)):  # it may read its disk first
                    load = await pipe.ask(fetch, frames.Load)
            if (load.picks, load.nbytes, len(load.sums), load.echo) != (picks, nbytes, 8 * len(items), self._echo):
                raise _MismatchError("it announced other pages than were asked for")  # noqa: TRY301 - counted below
            begin = time.monotonic()
            found = await pipe.fill(tier.pool, load, places, until - begin)
            if load.packed:
                tier.packing.unpacked(self._shared.id, nbytes, pipe.wire, pipe.coding_s)
            else:
                into.note(nbytes, time.monotonic() - begin)
        except _MismatchError:
            tier.counts["peer_mismatch"] += 1
            raise
        if None in found:
            tier.counts["peer_checksum"] += found.count(None)
            self._fail(EOFError("pages did not arrive, or were not what was stored"))
        return found


class DirectSink(_Held):
    """A home that answered Wanted."""

    def __init__(
        self, tier: Direct, peer: Node, pipe: Pipe, shared: Shared, keys: bytes, wanted: frames.Wanted
    ) -> None:
        super().__init__(tier, peer, pipe, shared, keys)
        self.picks, self.stored = wanted.picks, wanted.stored
        self._echo = echo(shared.id, keys)
        self._pages = len(keys) // shared.spec.stride
        self._left = TIMES * self._pages * len(shared.spec.groups)
        """Items that it may still want."""

    def close(self) -> None:
        """See Sink. What it reserved and does not get is given back there when the connection ends."""
        if self._pipe is not None and self.picks:
            self._peer.give(self._pipe, good=False)
            self._pipe = None
        super().close()

    async def send(self, places: Sequence[Place], sums: Sequence[int]) -> int:
        """See Sink."""
        pipe, tier = self._open(), self._tier
        items = [(place.group, place.page) for place in places]
        nbytes = nbytes_of(self._shared.spec, items)
        packed = tier.packing.pays(self._peer.out, self._shared.id, len(items))
        load = frames.Load(picks_of(items), sums_of(sums), nbytes, self._echo, packed)
        within, begin = pipe.within(nbytes), time.monotonic()
        try:
            async with asyncio.timeout(2 * within) as limit:
                await pipe.pour(tier.pool, load, places, within)
                if pipe.paced:  # and so is what it has to read yet
                    limit.reschedule(asyncio.get_running_loop().time() + 2 * pipe.patience(nbytes))
                stored = await pipe.receive(frames.Stored)
            _bounded("stored", stored.pages, self._pages)
        except BaseException as exc:
            self._fail(exc)
            raise
        self.picks, self._left = (), self._left - len(items)
        if packed:
            tier.packing.packed(self._shared.id, nbytes, pipe.wire, pipe.coding_s)
        else:
            self._peer.out.note(nbytes, time.monotonic() - begin)
        return stored.pages

    async def more(self) -> None:
        """See Sink."""
        try:
            async with asyncio.timeout(self._tier.terms.deadline_s):
                self.picks = (await self._open().ask(frames.More(), frames.Wanted)).picks
            _bounded("picks", len(items_of(self._shared.spec, self.picks, self._pages)), self._left)
        except BaseException as exc:
            self._fail(exc)
            raise


def _bounded(field: str, number: int, most: int) -> None:
    """Raise bad_request for a number that a peer cannot mean."""
    if not 0 <= number <= most:
        raise bad(field, f"0..{most}", number)
