"""The peer tier on a store that the whole fleet shares: no homes, everybody writes to it and reads from it.

Who computes a page writes it behind, after the commit; who misses it asks within the same request. What the store
does is a hint, as with peers: whatever is missing, late, of another length, of another name or not what was written
is a miss from that page on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from kvtier.identity import CacheSpec
from kvtier.peer.base import NOTHING, Ahead, Move, Pick, Shared, Sink, Source
from kvtier.peer.generations import Book, Generations
from kvtier.peer.items import items_of, page_name
from kvtier.peer.lacks import Lacks
from kvtier.peer.reach import Reach, always
from kvtier.peer.secrets import Secrets
from kvtier.peer.shelf import HEAD, Mark, Shelf, item_name, marks
from kvtier.peer.stored import DepotSink, DepotSource, Life
from kvtier.peer.terms import MAX_OPS, MIN_BYTES_S, TURNS

FULL_S: Final = 5.0
"""So long a store that refused to take something is given nothing."""
SLICE: Final = 256
"""Pages that are named without letting the loop go."""

_log = logging.getLogger("kvtier.peer")


class Depot:
    """A PeerTier whose one peer is the store. Owned by the loop thread."""

    keeps_all = False

    def __init__(
        self,
        shelf: Shelf,
        secrets: Secrets,
        *,
        name: str = "this host",
        deadline_s: float = 0.2,
        book: Book | None = None,
    ) -> None:
        """`deadline_s`: of one question; bytes have their time at 32 MiB/s too. `book`: see Generations."""
        self.shelf = shelf
        self.name = name
        self.deadline_s = deadline_s
        self.counts = shelf.counts
        self.generations = Generations(shelf, book)
        self._secrets = secrets
        self._room = asyncio.Semaphore(MAX_OPS)
        """How much may be under way; each shelf bounds what it does itself, but counts that as time of its servers."""
        self._lacks = Lacks()
        self._full_until = 0.0
        self._missed_since: int | None = None
        """How often servers had answered again when the first thing was given up that the store was to get."""

    def start(self) -> None:
        """See PeerTier."""
        self.shelf.start()

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """See PeerTier."""
        return self._secrets.shared(spec, scope, epoch)

    def until(self, nbytes: int = 0) -> float:
        """By when something with so many bytes is over."""
        return time.monotonic() + self.deadline_s + nbytes / MIN_BYTES_S

    async def enter(self, *, hasty: bool = False) -> bool:
        """Wait until few others are at the store; what is asked has its time (`until`) from then on, until `leave`.

        False: the turn did not come within ten deadlines (`hasty`: one).
        """
        try:
            async with asyncio.timeout(self.deadline_s * (1 if hasty else TURNS)):
                await self._room.acquire()
        except TimeoutError:
            self.counts["peer_busy"] += 1
            return False
        return True

    def leave(self) -> None:
        """Somebody else's turn."""
        self._room.release()

    @contextlib.asynccontextmanager
    async def turn(self, *, hasty: bool = False) -> AsyncIterator[bool]:
        """The same for as long as a block lasts; whether it came."""
        came = await self.enter(hasty=hasty)
        try:
            yield came
        finally:
            if came:
                self.leave()

    async def forget(self, shared: Shared) -> None:
        """See PeerTier."""
        await self.generations.end(shared)

    # -- reading ---------------------------------------------------------------------------------------------------

    def worth(self, shared: Shared, keys: bytes, have: int) -> bool:
        """See PeerTier."""
        return self.shelf.up and page_name(shared, keys, have) not in self._lacks

    async def find(self, shared: Shared, keys: bytes, have: int) -> list[Source]:
        """See PeerTier. The turn is the source's until that is closed: nobody holds slots while others go first."""
        if not await self.enter():
            return []
        found = None
        try:
            found = await self._reach(shared, keys, have)
            if found is not None and found.pages <= have:
                self._lacks.note(page_name(shared, keys, have))
                found = None
        finally:
            if found is None:
                self.leave()
        return [] if found is None else [found]

    async def _reach(self, shared: Shared, keys: bytes, have: int) -> DepotSource | None:
        """What there is of a path; None where the store does not say."""
        self.counts["peer_asked"] += 1
        until = self.until()
        named = await _marks(shared, keys)
        generation = await self.generations.of(shared, until)
        if generation is None:
            return None
        life = Life(generation, self.generations.ended)
        heads: dict[tuple[int, int], bytes] = {}

        async def ask(items: list[tuple[int, int]]) -> list[bool | None]:
            names = [item_name(shared, generation, named[at], g) for g, at in items]
            if not self.shelf.peeks:
                return await self.shelf.has(names, until)
            found = await self.shelf.peek(names, HEAD.size, until)
            heads.update({item: raw for item, raw in zip(items, found, strict=True) if raw})
            return [None if raw is None else raw != b"" for raw in found]

        pages = await Reach(shared.spec, len(named), ask).deepest(have)
        return None if pages is None else DepotSource(self, shared, life, named, pages, heads)

    async def depth(self, node: str, shared: Shared, keys: bytes) -> int:
        """See PeerTier."""
        async with self.turn(hasty=True) as mine:
            found = await self._reach(shared, keys, 0) if mine and node == self.shelf.name else None
        return 0 if found is None else found.pages

    # -- keys ------------------------------------------------------------------------------------------------------

    def answers(self) -> bool:
        """See PeerTier."""
        return self.shelf.up

    def key_homes(self, shared: Shared, group: int, key: bytes) -> list[str]:  # noqa: ARG002 - there is one
        """See PeerTier."""
        return [self.shelf.name]

    async def holders(self, shared: Shared, group: int, keys: list[bytes]) -> dict[bytes, list[str]]:
        """See PeerTier."""
        self.counts["peer_asked"] += 1
        named = await _marks(shared, b"".join(keys))
        async with self.turn() as mine:
            until = self.until()
            generation = await self.generations.of(shared, until) if mine else None
            if generation is None:
                return {}
            found = await self.shelf.has([item_name(shared, generation, mark, group) for mark in named], until)
        return {key: [self.shelf.name] for key, there in zip(keys, found, strict=True) if there}

    async def source(self, node: str, shared: Shared, group: int, keys: bytes) -> Source | None:  # noqa: ARG002
        """See PeerTier."""
        named = await _marks(shared, keys)
        if not await self.enter():
            return None
        generation = None
        try:
            generation = await self.generations.of(shared, self.until())
        finally:
            if generation is None:
                self.leave()
        if generation is None:
            return None
        return DepotSource(self, shared, Life(generation, self.generations.ended), named, len(named), {})

    # -- writing ---------------------------------------------------------------------------------------------------

    def known(self, node: str) -> bool:
        """See PeerTier."""
        return node == self.shelf.name

    def homes(self, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """See PeerTier: everything goes to the store."""
        return [(self.shelf.name, len(keys) // shared.spec.stride)]

    def gave_up(self) -> None:
        """See PeerTier."""
        if self._missed_since is None:
            self._missed_since = self.shelf.returns

    def moves(self) -> Move | None:
        """See PeerTier: the store is home of everything; it may lack some where it did not answer."""
        if self._missed_since is None or self._missed_since == self.shelf.returns:
            return None
        self._missed_since = None
        _log.info("the shared store answers again: what is in host is offered to it")
        return Move((), frozenset({self.shelf.name}))

    def owed(self, shared: Shared, keys: bytes, move: Move, group: int = 0) -> bool:  # noqa: ARG002 - all of it is
        """See PeerTier."""
        return True

    async def offer(
        self,
        node: str,
        shared: Shared,
        keys: bytes,
        spare: tuple[Pick, ...],
        group: int = 0,
        ahead: Ahead = NOTHING,  # noqa: ARG002 - a store is asked first: what is there is not written again
    ) -> Sink | None:
        """See PeerTier."""
        if node != self.shelf.name or not self.shelf.up or self._full_until > time.monotonic():
            return None
        named = await _marks(shared, keys)
        pages = len(named)
        full = [group] if shared.spec.keyed else always(shared.spec)
        items = sorted({*((g, at) for g in full for at in range(pages)), *items_of(shared.spec, spare, pages)})
        async with self.turn() as mine:
            until = self.until()
            generation = await self.generations.of(shared, until) if mine else None
            if generation is None:
                return None
            life = self.shelf.life
            there = await self.shelf.has([item_name(shared, generation, named[at], g) for g, at in items], until)
        lacking = [item for item, has in zip(items, there, strict=True) if has is False]
        if None in there and not lacking:
            return None
        return DepotSink(self, shared, generation, named, lacking, life=life, unknown=there.count(None))

    def refused(self) -> None:
        """It answers and does not take what it is given: give it nothing for a while."""
        self._full_until = time.monotonic() + FULL_S

    # -- routing ---------------------------------------------------------------------------------------------------

    async def weigh(self, shared: Shared, keys: bytes) -> dict[str, dict[str, int]]:  # noqa: ARG002
        """See PeerTier: hosts that share a store do not know each other."""
        return {}

    def preferred(self, shared: Shared, keys: bytes) -> list[str]:  # noqa: ARG002
        """See PeerTier."""
        return [self.name]

    def status(self) -> list[dict[str, Any]]:
        """See PeerTier."""
        return self.shelf.status()

    async def close(self) -> None:
        """See PeerTier."""
        await self.shelf.close()


async def _marks(shared: Shared, keys: bytes) -> list[Mark]:
    """Marks of a path's pages, or of keys, a slice at a time."""
    out: list[Mark] = []
    source = marks(shared, keys)
    while part := list(itertools.islice(source, SLICE)):
        out += part
        await asyncio.sleep(0)
    return out
