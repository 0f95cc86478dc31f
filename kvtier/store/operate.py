"""What operators do to the cache: bring prompts to host, evict them, empty caches. In slices, beside the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from kvtier import wire
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.parts import SLICE_S, Parts
from kvtier.store.persist import flush_error
from kvtier.store.prompts import cache_of, own_subtree, peek, resolve
from kvtier.types import Code, KvtierError, Tier, bad


class Operate:
    """The operators' verbs that change what is cached."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def warm(self, msg: wire.Warm) -> wire.Info:
        """Load what matches of a prompt into host. Raises bad_request, unknown."""
        deadline = self.parts.deadline(msg.wait_ms)
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        cache, found = prompt.cache, peek(prompt)
        if not found.pages:
            return wire.Info({"pages": 0, "items": 0, "left": 0})
        index = cache.radix
        node = index.ending_at(found.node, found.pages)
        index.lease(node)
        try:
            wanted = self.parts.loads.missing(cache, node, index.needed(found.pages))
            await self.parts.loads.bring(cache, wanted, deadline)
            left = 0 if node.dead else len(self.parts.loads.missing(cache, node, index.needed(found.pages)))
        finally:
            self.parts.unlease(cache, node)
        return wire.Info({"pages": found.pages, "items": len(wanted), "left": left})

    # -- evict -----------------------------------------------------------------------------------------------------

    async def evict(self, msg: wire.Evict) -> wire.Info:
        """Take a prompt's own pages, and all that continues them, out of host or out of every tier.

        From host only what disk has goes (it is written first). Raises bad_request, unknown, no_space, io.
        """
        if msg.tier not in {"host", "all"}:
            raise bad("tier", "host or all", msg.tier)
        self._indexed()
        deadline = self.parts.deadline(msg.wait_ms)
        prompt = await resolve(self.parts.caches, self.parts.requests, msg.of)
        cache = prompt.cache
        if msg.tier == "host":
            reason = await self.parts.persist.flush([cache], deadline)
            if reason:
                raise flush_error(reason)
        top = own_subtree(prompt, peek(prompt))
        if top is None:
            return wire.Info({"pages": 0, "held": 0})
        if msg.tier == "all":
            pages, held = await self._cut_all(cache, top)
        else:
            pages, held = await self._demote(cache, top)
        return wire.Info({"pages": pages, "held": held})

    async def _demote(self, cache: Cache, top: Node) -> tuple[int, int]:
        """Drop the host copies of a subtree that disk has and nobody holds; (pages dropped, pages held)."""
        gone = held = 0
        stack = [top]
        async for _ in turns():
            if not stack:
                break
            node = stack.pop()
            stack += (node.children or {}).values()
            have = node.count[Tier.HOST]
            if node.dead or not have:
                continue
            if node.refs or self.parts.space.unsaved_from(cache.index, node, 0, node.pages) < node.pages:
                held += node.pages
                continue
            self._note(cache, node)
            for dropped in cache.index.drop(node, 0, node.pages, Tier.HOST):
                cache.pool.free(dropped.group, dropped.handles)
            gone += node.pages
        self.parts.counts["pages_evicted_host"] += gone
        return gone, held

    async def _cut_all(self, cache: Cache, top: Node) -> tuple[int, int]:
        """Cut a subtree, leaves first; pages that somebody holds go when they are let go of."""
        pages = held = 0
        async for _ in turns():
            if top.dead:
                break
            node = top
            while node.children:
                node = next(iter(node.children.values()))
            self._note(cache, node)
            cut = cache.index.cut(node)
            cache.release(cut.freed, self.parts.disk)
            pages += cut.pages
            held += cut.doomed
        return pages, held

    def _note(self, cache: Cache, node: Node) -> None:
        """Remember that an operator did it."""
        now = time.time(), self.parts.now()
        tier = Tier.HOST if node.count[Tier.HOST] else Tier.DISK
        self.parts.persist.evictions.note(cache.index, node, 0, node.pages, tier, "an operator", *now)

    # -- whole caches ----------------------------------------------------------------------------------------------

    async def remove(self, msg: wire.Remove) -> wire.Info:
        """Empty one cache; one that no engine has open is forgotten. Raises unknown."""
        return wire.Info(await self.empty([cache_of(self.parts.caches, msg.cache, tokens=False)]))

    async def purge(self, msg: wire.Purge) -> wire.Info:
        """Empty every cache of a scope, a tenant's salt, an adapter: what is given must all fit. Raises bad_request."""
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
        """Cut everything that the caches hold now."""
        self._indexed()
        pages = held = 0
        for cache in caches:
            for key in list(cache.index.root.children or {}):
                top = (cache.index.root.children or {}).get(key)
                if top is not None:
                    cut, doomed = await self._cut_all(cache, top)
                    pages, held = pages + cut, held + doomed
        self.parts.prune()
        return {"caches": [cache.id.hex() for cache in caches], "pages": pages, "held": held}


async def turns() -> AsyncIterator[None]:
    """Steps of long work: lets the loop do other things after each slice."""
    until = time.perf_counter() + SLICE_S
    while True:
        yield
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE_S
