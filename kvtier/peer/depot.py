"""The peer tier on a store that the whole fleet shares: no homes, everybody writes to it and reads from it.

Who computes a page writes it behind, after the commit; who misses it asks within the same request. What the store
does is a hint, as with peers: whatever is missing, late, of another length, of another name or not what was written
is a miss from that page on. A cache's generation, a random number beside its pages, is part of every name: whoever
finds none makes one, so a purge makes one and nothing written before is ever found again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets as random
import time
from typing import Any, Final

from kvtier.identity import CacheSpec
from kvtier.peer.base import Pick, Shared, Sink, Source
from kvtier.peer.direct import MIN_BYTES_S
from kvtier.peer.items import items_of, page_name
from kvtier.peer.reach import Reach, always
from kvtier.peer.secrets import Secrets
from kvtier.peer.shelf import GENERATION_BYTES, HEAD, Mark, Shelf, generation_name, item_name, marks
from kvtier.peer.stored import DepotSink, DepotSource

LACKS_S: Final = 1.0
"""So long the store's no is believed. Others may have given it the pages meanwhile."""
MAX_LACKS: Final = 1 << 16
GENERATION_S: Final = 1.0
"""So long a cache's generation is believed: so late others notice a purge."""
FULL_S: Final = 5.0
"""So long a store that refused to take something is given nothing."""
SLICE: Final = 256
"""Pages that are named without letting the loop go."""

_log = logging.getLogger("kvtier.peer")


class Depot:
    """A PeerTier whose one peer is the store. Owned by the loop thread."""

    def __init__(
        self,
        shelf: Shelf,
        secrets: Secrets,
        *,
        name: str = "this host",
        deadline_s: float = 0.2,
    ) -> None:
        """`deadline_s`: of one question; bytes have their time at 32 MiB/s too."""
        self.shelf = shelf
        self.name = name
        self.deadline_s = deadline_s
        self.counts = shelf.counts
        self._secrets = secrets
        self._lacks: dict[bytes, float] = {}
        self._generations: dict[bytes, tuple[bytes, float]] = {}
        self._emptied: set[bytes] = set()
        """Caches that were purged here and have no new generation in the store yet."""
        self.purges = 0
        """How often some cache was purged here: what was found before counts no more."""
        self._life = 0
        self._full_until = 0.0

    def start(self) -> None:
        """See PeerTier."""
        self.shelf.start()

    def shared(self, spec: CacheSpec, scope: str, epoch: int) -> Shared | None:
        """See PeerTier."""
        return self._secrets.shared(spec, scope, epoch)

    def until(self, nbytes: int = 0) -> float:
        """By when something with so many bytes is over."""
        return time.monotonic() + self.deadline_s + nbytes / MIN_BYTES_S

    # -- generations -----------------------------------------------------------------------------------------------

    async def generation(self, shared: Shared, until: float) -> bytes | None:
        """The cache's generation in the store, made where there is none; None where the store does not say."""
        if shared.id in self._emptied and not await self._renew(shared, until):
            return None
        known = self._generations.get(shared.id)
        if known is not None and known[1] > time.monotonic() and self._life == self.shelf.life:
            return known[0]
        name, purges = generation_name(shared), self.purges
        (found,) = await self.shelf.peek([name], GENERATION_BYTES, until)
        if found == b"":
            await self.shelf.claim(name, random.token_bytes(GENERATION_BYTES), until)
            (found,) = await self.shelf.peek([name], GENERATION_BYTES, until)
        if found is None or len(found) != GENERATION_BYTES or purges != self.purges:
            return None
        if known is not None and known[0] != found:
            self.counts["peer_restarts"] += 1
            _log.warning("the shared store was emptied of a cache: what is known of it is forgotten")
            self._lacks.clear()
        self._life = self.shelf.life
        self._generations[shared.id] = found, time.monotonic() + GENERATION_S
        return found

    async def forget(self, shared: Shared) -> None:
        """See PeerTier: another generation begins, at the latest when the store answers again."""
        self.purges += 1
        self._emptied.add(shared.id)
        await self._renew(shared, self.until())

    async def _renew(self, shared: Shared, until: float) -> bool:
        """End the generation of a purged cache; False where the store does not do it now."""
        self._generations.pop(shared.id, None)
        if await self.shelf.drop([generation_name(shared)], until):
            self._emptied.discard(shared.id)
        else:
            _log.warning("a purge waits for the shared store; until then nothing of that cache is taken from it")
        return shared.id not in self._emptied

    # -- reading ---------------------------------------------------------------------------------------------------

    def worth(self, shared: Shared, keys: bytes, have: int) -> bool:
        """See PeerTier."""
        until = self._lacks.get(page_name(shared, keys, have))
        return self.shelf.up and (until is None or until <= time.monotonic())

    def _note_lack(self, shared: Shared, keys: bytes, have: int) -> None:
        """The store does not have that page."""
        if len(self._lacks) >= MAX_LACKS:
            self._lacks.pop(next(iter(self._lacks)))
        name = page_name(shared, keys, have)
        self._lacks.pop(name, None)
        self._lacks[name] = time.monotonic() + LACKS_S

    async def find(self, shared: Shared, keys: bytes, have: int) -> list[Source]:
        """See PeerTier."""
        found = await self._reach(shared, keys, have)
        if found is not None and found.pages <= have:
            self._note_lack(shared, keys, have)
        return [found] if found is not None and found.pages > have else []

    async def _reach(self, shared: Shared, keys: bytes, have: int) -> DepotSource | None:
        """What there is of a path; None where the store does not say."""
        self.counts["peer_asked"] += 1
        until = self.until()
        named = await _marks(shared, keys)
        generation = await self.generation(shared, until)
        if generation is None:
            return None

        heads: dict[tuple[int, int], bytes] = {}

        async def ask(items: list[tuple[int, int]]) -> list[bool | None]:
            names = [item_name(shared, generation, named[at], g) for g, at in items]
            if not self.shelf.peeks:
                return await self.shelf.has(names, until)
            found = await self.shelf.peek(names, HEAD.size, until)
            heads.update({item: raw for item, raw in zip(items, found, strict=True) if raw})
            return [None if raw is None else raw != b"" for raw in found]

        pages = await Reach(shared.spec, len(named), ask).deepest(have)
        return None if pages is None else DepotSource(self, shared, generation, named, pages, heads)

    async def depth(self, node: str, shared: Shared, keys: bytes) -> int:
        """See PeerTier."""
        found = await self._reach(shared, keys, 0) if node == self.shelf.name else None
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
        until = self.until()
        named = await _marks(shared, b"".join(keys))
        generation = await self.generation(shared, until)
        if generation is None:
            return {}
        found = await self.shelf.has([item_name(shared, generation, mark, group) for mark in named], until)
        return {key: [self.shelf.name] for key, there in zip(keys, found, strict=True) if there}

    async def source(self, node: str, shared: Shared, group: int, keys: bytes) -> Source | None:  # noqa: ARG002
        """See PeerTier."""
        generation = await self.generation(shared, self.until())
        if generation is None:
            return None
        return DepotSource(self, shared, generation, await _marks(shared, keys), len(keys) // shared.spec.stride, {})

    # -- writing ---------------------------------------------------------------------------------------------------

    def known(self, node: str) -> bool:
        """See PeerTier."""
        return node == self.shelf.name

    def homes(self, shared: Shared, keys: bytes) -> list[tuple[str, int]]:
        """See PeerTier: everything goes to the store."""
        return [(self.shelf.name, len(keys) // shared.spec.stride)]

    async def offer(
        self, node: str, shared: Shared, keys: bytes, spare: tuple[Pick, ...], group: int = 0
    ) -> Sink | None:
        """See PeerTier."""
        if node != self.shelf.name or not self.shelf.up or self._full_until > time.monotonic():
            return None
        until = self.until()
        named = await _marks(shared, keys)
        generation = await self.generation(shared, until)
        if generation is None:
            return None
        life, pages = self.shelf.life, len(named)
        full = [group] if shared.spec.keyed else always(shared.spec)
        items = sorted({*((g, at) for g in full for at in range(pages)), *items_of(shared.spec, spare, pages)})
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
