"""Gives pages to the homes that they have since a host went away, came back or was started again, in the background.

Also to a store that hosts share, once it answers again.

One path at a time, whatever is here of it; a home that has it already wants nothing. Where a home fails, the path is
given again later. What a home's stand-in got stays there like any page that nobody asks for, until it is evicted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvtier.index import Node
from kvtier.peer.base import Move, PeerTier, Shared
from kvtier.store.cache import Cache
from kvtier.store.parts import Parts
from kvtier.store.pushes import Pushes, path_keys, shared_of
from kvtier.store.slices import sliced
from kvtier.types import Tier

LOOK_S: Final = 1.0
REST_S: Final = 0.01
"""Between slices of the walk."""
MOST_LEFT: Final = 1 << 16
"""Paths that some home did not take; more are not given again."""
TRIES: Final = 64
"""So often a path is given: once a second at most, and none while the one before it fails."""
MOST_WAITING: Final = 64
"""Keys are not queued while more than that wait to be pushed."""

_log = logging.getLogger("kvtier.peers")


class Repairs:
    """Looks for changes and walks what is here. Owned by the loop thread."""

    def __init__(self, parts: Parts, tier: PeerTier, pushes: Pushes) -> None:
        self.parts = parts
        self.tier = tier
        self.tasks: list[asyncio.Task[None]] = []
        self.walking = False
        self._pushes = pushes
        self._left: dict[tuple[Cache, Node], tuple[int, int]] = {}
        """Paths that some home did not take: up to which page, how often that was tried."""

    def start(self) -> None:
        """Look from now on."""
        self.tasks = [asyncio.get_running_loop().create_task(self._run())]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            move = self.tier.moves()
            self.walking = move is not None or bool(self._left)
            try:
                if move is not None:
                    await self._walk(move)
                await self._rest()
            except Exception:  # noqa: BLE001 - the next change is looked for all the same
                _log.exception("giving pages to new homes failed")
            finally:
                self.walking = bool(self._left)

    async def _walk(self, move: Move) -> None:
        """Give what is here to homes that it has since the move."""
        for cache in list(self.parts.caches.values()):
            shared = shared_of(self.tier, cache)
            if shared is None:
                continue
            async for node in sliced(cache.index.walk(), REST_S):
                if not node.dead and node.live and self._ends(cache, node):
                    await self._give(cache, shared, node, move)

    def _ends(self, cache: Cache, node: Node) -> bool:
        """Whether what is to be given of a path ends there."""
        if self.tier.keeps_all:
            return cache.spec.keyed or node.children is None
        return node.tier_leaf(Tier.HOST)

    async def _give(self, cache: Cache, shared: Shared, node: Node, move: Move) -> None:
        """One path or key."""
        if cache.spec.keyed:
            if self.tier.owed(shared, node.edge[1:], move, node.edge[0]):
                while self._pushes.waiting > MOST_WAITING:  # noqa: ASYNC110 - background work has time
                    await asyncio.sleep(REST_S)
                self._pushes.offer(cache, node, 1)
                self.parts.counts["peer_repairs"] += 1
            return
        end = node.depth + node.live
        if self.tier.owed(shared, path_keys(cache, node)[: end * cache.index.stride], move):
            await self._path(cache, node, end)

    async def _rest(self) -> None:
        """Give what was left once more, until one fails: its home is mostly down, and that of those behind it too."""
        while self._left:
            (cache, node), (end, tries) = next(iter(self._left.items()))
            del self._left[cache, node]
            if not await self._path(cache, node, end, tries):
                return
            await asyncio.sleep(0)

    async def _path(self, cache: Cache, node: Node, end: int, tries: int = 0) -> bool:
        """One path; False where some home did not take it, which is then given again."""
        if await self._pushes.repair(cache, node, end):
            self.parts.counts["peer_repairs"] += 1
            return True
        if tries + 1 < TRIES and len(self._left) < MOST_LEFT:
            self._left[cache, node] = end, tries + 1
        else:
            self.parts.counts["peer_push_dropped_home"] += 1
        return False
