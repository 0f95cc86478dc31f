"""Models spread over hosts: each host's daemon keeps a part of every page, and a match is the least of them all.

Window and state groups make it more than a minimum: a part may not be able to resume where another one can. So the
hosts are asked again, of the shorter path, until all name the same page.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvtier import wire
from kvtier.peer.base import PeerTier, Shared
from kvtier.store.cache import Cache
from kvtier.store.instance import Process
from kvtier.store.parts import Parts
from kvtier.types import Code, KvtierError, bad

MAX_PARTS: Final = 64
MAX_ROUNDS: Final = 16
"""Hosts that have not agreed by then agree on nothing."""


class Agreeing:
    """The verb agree."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    async def agree(self, process: Process, msg: wire.Agree) -> wire.Agreed:
        """Pages of a path that every host of the model can serve. Raises bad_request, unknown."""
        path = process.instance.path(msg.handle)
        cache, keys = path.cache, path.keys
        if self.parts.peers is None:
            raise KvtierError(Code.UNKNOWN, "this daemon has no peers", "others")
        tier = self.parts.peers.tier
        others = [self._other(tier, cache, each) for each in msg.others]
        if not 1 <= len(others) <= MAX_PARTS:
            raise bad("others", f"1..{MAX_PARTS} hosts", len(others))
        left = self.parts.deadline(msg.wait_ms) - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left):
                return wire.Agreed(await self._agreed(tier, cache, keys, others))
        except TimeoutError:
            return wire.Agreed(0)

    @staticmethod
    def _other(tier: PeerTier, cache: Cache, other: wire.Elsewhere) -> tuple[str, Shared | None]:
        """A host and the cache that it keeps its part in; None where the cache is shared with nobody."""
        other.spec.check()
        if not tier.known(other.host):
            raise bad("others.host", "a peer's name", other.host)
        if other.spec.stride != cache.spec.stride or other.spec.keyed or cache.spec.keyed:
            raise bad("others.spec", f"a part of the same model, with page keys of {cache.spec.stride} bytes")
        return other.host, None if cache.retired else tier.shared(other.spec, cache.scope, cache.epoch)

    async def _agreed(self, tier: PeerTier, cache: Cache, keys: bytes, others: list[tuple[str, Shared | None]]) -> int:
        """The deepest page that all name, of a path and its beginnings."""
        stride = cache.spec.stride
        pages = cache.radix.match(keys, self.parts.now()).pages
        for _ in range(MAX_ROUNDS):
            if not pages or any(shared is None for _, shared in others):
                return 0
            part = keys[: pages * stride]
            said = await asyncio.gather(*(tier.depth(host, shared, part) for host, shared in others if shared))
            least = min(said)
            found = cache.radix.match(keys[: least * stride], self.parts.now()).pages
            if found == pages:
                return pages
            pages = found
        return 0
