"""What operators do to the cache: bring prompts to host, evict them, empty caches. In slices, beside the engines."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from kvtier import wire
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.flush import flush
from kvtier.store.parts import Parts
from kvtier.store.prompts import cache_of, held, own, resolve
from kvtier.store.slices import leaves, popped, sliced
from kvtier.store.told import flushed
from kvtier.types import Code, KvtierError, Tier, bad

DURABLE_S: Final = 20.0
"""So long an operator's word waits for the disk."""


class Operate:
    """The operators' verbs that change what is cached."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def warm(self, msg: wire.Warm) -> wire.Info:
        """Load what matches of a prompt into host. Raises bad_request, unknown."""
        deadline = self.parts.deadline(msg.wait_ms)
        what = held(await resolve(self.parts.caches, self.parts.requests, msg.of))
        with self.parts.leased(what.cache, *what.nodes):
            await asyncio.sleep(0)  # each step of many keys is long enough
            wanted = what.missing(self.parts.loads)
            await asyncio.sleep(0)
            await self.parts.loads.bring(what.cache, wanted, deadline)
            left = len(what.missing(self.parts.loads))
            await asyncio.sleep(0)
        return wire.Info({"pages": what.pages, "items": len(wanted), "left": left})

    # -- evict -----------------------------------------------------------------------------------------------------

    async def evict(self, msg: wire.Evict) -> wire.Info:
        """Take a prompt's own pages, and all that continues them, out of a tier in memory or out of every tier.

        From host only what disk has goes (it is written first), from the device only what host or disk has. Raises
        bad_request, unknown, no_space, io.
        """
        if msg.tier not in {"device", "host", "all"}:
            raise bad("tier", "device, host or all", msg.tier)
        self._indexed()
        deadline = self.parts.deadline(msg.wait_ms)
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        cache = prompt.cache
        if msg.tier == "host" and (failed := await flush(self.parts.persist, [cache], deadline)):
            raise failed
        if msg.tier == "all":
            pages, kept = await self._cut(cache, own(prompt))
        else:
            pages, kept = await self._demote(cache, own(prompt), msg.tier)
        return wire.Info({"pages": pages, "held": kept})

    async def _demote(self, cache: Cache, tops: list[Node], name: str) -> tuple[int, int]:
        """Drop a tier's copies of subtrees that a slower one has and nobody holds; (pages dropped, pages held)."""
        gone = kept = 0
        vram, tier = self.parts.vram, Tier[name.upper()]
        space = self.parts.space if tier == Tier.HOST else vram.space if vram is not None else None
        if space is None:
            raise KvtierError(Code.UNKNOWN, "no device tier is configured here", "tier")
        if vram is not None and tier == Tier.DEVICE:
            await vram.settle([cache])
        async for node in sliced(popped(tops)):
            tops += (node.children or {}).values()
            have = node.count[tier]
            if node.dead or not have:
                continue
            if node.holds(tier) or space.unsaved_from(cache.index, node, 0, node.pages) < node.pages:
                kept += node.pages
                continue
            self._note(cache, node, tier)
            cache.release(cache.index.drop(node, 0, node.pages, tier), self.parts.disk)
            gone += node.pages
        self.parts.counts[f"pages_evicted_{name}"] += gone
        return gone, kept

    async def _cut(self, cache: Cache, tops: list[Node]) -> tuple[int, int]:
        """Cut subtrees, leaves first; pages that somebody holds go when they are let go of."""
        pages = kept = 0
        async for node in sliced(leaves(tops)):
            self._note(cache, node, Tier.HOST if node.count[Tier.HOST] else Tier.DISK)
            cut = cache.index.cut(node)
            cache.release(cut.freed, self.parts.disk)
            pages += cut.pages
            kept += cut.doomed
        return pages, kept

    def _note(self, cache: Cache, node: Node, tier: Tier) -> None:
        """Remember that an operator did it."""
        now = time.time(), self.parts.now()
        self.parts.persist.room.evictions.note(cache.index, node, 0, node.pages, tier, "an operator", *now)

    # -- whole caches ----------------------------------------------------------------------------------------------

    async def remove(self, msg: wire.Remove) -> wire.Info:
        """Empty one cache; one that no engine has open is forgotten. Raises bad_request, unknown, io."""
        if not msg.cache:
            raise bad("cache", "the beginning of a cache's id")
        return wire.Info(await self.empty([cache_of(self.parts.caches, msg.cache)]))

    async def purge(self, msg: wire.Purge) -> wire.Info:
        """Empty every cache of a scope, a tenant's salt, an adapter: what is given must all fit.

        Raises bad_request, io.
        """
        return wire.Info(await self.empty(self.fitting(msg.scope, msg.adapter, msg.salt)))

    def fitting(self, scope: str, adapter: str, salt: bytes) -> list[Cache]:
        """The caches that what is given fits; raises bad_request where nothing is given."""
        if not (scope or adapter or salt):
            raise bad("scope", "a scope, an adapter or a salt")
        return [
            cache
            for cache in self.parts.caches.values()
            if (not scope or cache.scope == scope)
            and (not adapter or cache.spec.adapter == adapter)
            and (not salt or cache.spec.salt == salt)
        ]

    def _indexed(self) -> None:
        """Raise busy while pages may still come from the catalogue."""
        if self.parts.loading:
            raise KvtierError(Code.BUSY, "the catalogue is still being indexed")

    async def empty(self, caches: list[Cache]) -> dict[str, Any]:
        """Cut everything that the caches hold now, durably. Raises busy, io."""
        self._indexed()
        pages = kept = 0
        for cache in caches:
            if self.parts.peers is not None:
                await self.parts.peers.forget(cache)  # first, so that nothing comes back
            cut, _ = await self._cut(cache, list((cache.index.root.children or {}).values()))
            if self.parts.peers is not None:
                await self.parts.peers.forget(cache)  # what was on its way there while it was cut
            pages += cut
            kept += sum(node.pages for node in cache.index.doomed)  # also what was cut before, and is held still
            await asyncio.sleep(0)  # caches may be many and small
        self.parts.prune()
        await self._durable()
        return {"caches": [cache.id.hex() for cache in caches], "pages": pages, "held": kept}

    async def _durable(self) -> None:
        """What was cut does not come back after a crash. Raises io."""
        if self.parts.disk is None:
            return
        try:
            async with asyncio.timeout(DURABLE_S):
                await flushed(self.parts.disk)
        except (KvtierError, TimeoutError) as exc:
            text = f"emptied, but a crash could bring it back, ask again: {str(exc) or 'the disk does not answer'}"
            raise KvtierError(Code.IO, text) from None
