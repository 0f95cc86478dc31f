"""Gives pages to the homes that they have since a host went away, came back or was started again, in the background.

One path at a time, whatever is here of it; a home that has it already wants nothing. What a home's stand-in got stays
there like any page that nobody asks for, until it is evicted.
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

LOOK_S: Final = 1.0
REST_S: Final = 0.01
"""Between slices of the walk."""
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

    def start(self) -> None:
        """Look from now on."""
        self.tasks = [asyncio.get_running_loop().create_task(self._run())]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            move = self.tier.moves()
            if move is None:
                continue
            self.walking = True
            try:
                await self._walk(move)
            except Exception:  # noqa: BLE001 - the next change is looked for all the same
                _log.exception("giving pages to new homes failed")
            finally:
                self.walking = False

    async def _walk(self, move: Move) -> None:
        """Give what is here to homes that it has since the move."""
        for cache in list(self.parts.caches.values()):
            shared = shared_of(self.tier, cache)
            if shared is None:
                continue
            async for node in sliced(cache.index.walk(), REST_S):
                if not node.dead and node.live and (cache.spec.keyed or node.children is None):
                    await self._give(cache, shared, node, move)

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
            await self._pushes.repair(cache, node, end)
            self.parts.counts["peer_repairs"] += 1
