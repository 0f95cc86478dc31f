"""The device tier as the store has it: its memory, who reads it, pages up and down, and what happens when it fails."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.device.base import Device
from kvtier.device.ipc import ADVICE
from kvtier.index import Node
from kvtier.store.cache import Cache
from kvtier.store.carrier import DEADLINE_S, Carrier
from kvtier.store.instance import Process
from kvtier.store.loads import Loads
from kvtier.store.shifts import MOST_PAGES, Demote, Promote
from kvtier.store.slices import sliced
from kvtier.store.space import Space
from kvtier.tiers.pool import Span
from kvtier.tiers.vram import DEVICE_ARENA, DeviceTier
from kvtier.types import PAGE_ALIGN, Code, KvtierError, Tier, align_up
from kvtier.wire import DeviceMapped, Ok, UseDevice

if TYPE_CHECKING:
    from kvtier.store.parts import Parts

TOKEN_BYTES = 16
LATE = "the deadline came before what only the device has was in host"
NO_ROOM = "no room in host for what only the device has"
log = logging.getLogger("kvtier.device")


class DeviceMemory:
    """A device, and the memory of it that is the tier's. Made before the store; a device that fails is no tier."""

    def __init__(
        self,
        make: Callable[[], Device],
        budget_bytes: int,
        *,
        slab_bytes: int = 64 << 20,
        deadline_s: float = DEADLINE_S,
        folder: Path | None = None,
    ) -> None:
        """Opens the device and takes its memory: blocks. `sick` of the carrier says why there is none.

        `folder`: for what is measured of a GPU once.
        """
        size = align_up(budget_bytes)
        self.carrier = Carrier(make, size + PAGE_ALIGN, deadline_s=deadline_s, folder=folder)
        shared = self.carrier.shared
        there = shared is not None and not self.carrier.sick
        address = shared.memory.address if there and shared is not None else 0
        self.tier = DeviceTier(address, size if there else 0, slab_bytes)
        self.probe = Span(address + size, TOKEN_BYTES)
        """Where whoever maps the memory finds the token."""


class Vram:
    """The device tier of one store. Owned by the loop thread."""

    def __init__(self, memory: DeviceMemory, parts: Parts) -> None:
        self.memory = memory
        self.tier = memory.tier
        self.carrier = memory.carrier
        self.demote = Demote(parts.space, parts.loads)
        self.space = Space(Tier.DEVICE, self.tier, self.demote, parts.persist, parts.copying, parts.ways)
        self.promote = Promote(self.space, parts.loads)
        self._loads: Loads = parts.loads
        self._caches = parts.caches
        self._disk = parts.disk
        self._token = b""
        self._proving = asyncio.Lock()
        self._failed: asyncio.Task[None] | None = None
        self.state = "ready" if self.tier.budget_bytes else "absent"

    def start(self) -> None:
        """Hear from the device's thread when it fails."""
        loop = asyncio.get_running_loop()
        self.carrier.on_sick = functools.partial(_post, loop, self._fall)
        if self.state == "absent":
            log.warning("no device tier: %s", self.carrier.sick)
        elif self.carrier.sick:  # it failed before anybody could be told
            self._fall()

    # -- who reads -------------------------------------------------------------------------------------------------

    async def map(self, scope: str) -> tuple[DeviceMapped, int]:
        """How to map the memory, and the descriptor that goes along (-1: none). Raises unknown, forbidden, io."""
        shared = self.carrier.shared
        if self.state != "ready" or shared is None:
            raise KvtierError(Code.UNKNOWN, f"no device tier here: {self.carrier.sick or 'it failed'}", "device")
        if not self.tier.space.arenas(scope):
            raise KvtierError(Code.FORBIDDEN, "another trust scope has the device tier until the daemon restarts")
        await self._write_token()
        for cache in self._caches.values():
            self.join(cache)
        self.carrier.told = True
        return DeviceMapped(DEVICE_ARENA, self.tier.budget_bytes, shared.exported), shared.fd

    async def _write_token(self) -> None:
        """Put a number that nobody can guess where only who maps this very memory can read it."""
        async with self._proving:  # a second one would overwrite the first
            if not self._token:
                token = secrets.token_bytes(TOKEN_BYTES)
                await self.carrier.write(self.memory.probe, token)
                self._token = token

    def use(self, process: Process, msg: UseDevice) -> Ok:
        """A process shows that it reads the memory; from now on it may be told of slots there. Raises io, unknown."""
        if self.state != "ready":
            raise KvtierError(Code.UNKNOWN, f"no device tier here: {self.carrier.sick}", "device")
        if process.instance.scope != self.tier.space.owner:
            raise KvtierError(Code.FORBIDDEN, "another trust scope has the device tier")
        if not self._token or not hmac.compare_digest(msg.token, self._token):
            raise KvtierError(
                Code.IO, f"what this process maps is not the daemon's device memory, or shows other bytes; {ADVICE}"
            )
        process.device = True
        return Ok()

    def join(self, cache: Cache) -> None:
        """A cache of the scope that has the memory may have copies there. Keyed caches stay in host."""
        if self.state != "ready" or cache.scope != self.tier.space.owner or cache.spec.keyed:
            return
        if Tier.DEVICE in cache.pools:
            return
        pool = cache.pools[Tier.DEVICE] = self.tier.pool(cache.scope, cache.shape)
        cache.orders[Tier.DEVICE] = self.space.order_of(pool)
        self.space.caches[cache.index] = cache

    def prune(self, scopes: Collection[str]) -> None:
        """Give back pools that no cache has any more."""
        used = {cache.pools[Tier.DEVICE] for cache in self._caches.values() if Tier.DEVICE in cache.pools}
        self.space.forget(self.tier.idle(used, scopes))

    def tiers(self, device: bool) -> tuple[Tier, ...]:
        """Where a reader finds pages in place, fastest first."""
        return (Tier.DEVICE, Tier.HOST) if device and self.state == "ready" else (Tier.HOST,)

    # -- the end of it -----------------------------------------------------------------------------------------------

    def _fall(self) -> None:
        """The device failed: its copies are of no use to the daemon. No slot there is used again."""
        if self.state != "ready":
            return
        self.state = "sick"
        self.tier.sick = self.carrier.sick
        log.error("the device tier is sick: %s", self.carrier.sick)
        for pool in self.tier.pools:
            for slab in pool.slabs:
                if not slab.closed:
                    pool.close_slab(slab)
        self.tier.space.closed = True
        for res in [res for cache in self._caches.values() for res in cache.reservations]:
            if res.tier == Tier.DEVICE:
                res.fail()
        self._failed = asyncio.get_running_loop().create_task(self._forget())

    async def _forget(self) -> None:
        """Drop every copy on the device; what was only there is lost."""
        await self.promote.settled()  # what came up is published even now
        for cache in list(self._caches.values()):
            while await self._forget_some(cache):
                pass

    async def _forget_some(self, cache: Cache) -> bool:
        """Go through a cache once, in slices; False where nothing was left: meanwhile nodes come from splits."""
        found = False
        async for node in sliced(cache.index.walk()):
            if node.dead or not node.count[Tier.DEVICE]:
                continue
            found = True
            lo = self.space.unsaved_from(cache.index, node, 0, node.live, cache.index.anchors)
            if lo < node.live:
                self._lose(cache, node, lo)
            else:
                cache.release(cache.index.drop(node, 0, node.pages, Tier.DEVICE), self._disk)
        return found

    def _lose(self, cache: Cache, node: Node, lo: int) -> None:
        """Cut pages from one on: the device alone had what every page needs."""
        index = cache.radix
        lost = index.cut_at(node, node.depth + lo)
        above = lost.parent
        cut = index.cut(lost)
        cache.release(cut.freed, self._disk)
        self.space.counts["pages_cut"] += cut.pages
        if above is not None and above is not index.root and above.count[Tier.DEVICE] and not above.dead:
            cache.release(index.drop(above, 0, above.pages, Tier.DEVICE), self._disk)

    async def flush(self, caches: Iterable[Cache], deadline: float) -> str:
        """Bring down what only the device has of these caches; '' when all that was there is in host or on disk."""
        try:
            async with asyncio.timeout_at(deadline):
                return "" if await self.settle(caches) else NO_ROOM
        except TimeoutError:
            return LATE

    async def settle(self, caches: Iterable[Cache]) -> bool:
        """Bring to host what only the device has of these caches; whether there was room for all of it."""
        asked: list[tuple[Cache, Node, int, int]] = []
        for cache in caches:
            if Tier.DEVICE not in cache.pools or self.state != "ready":
                continue
            async for node in sliced(cache.index.walk()):
                lo = self.space.unsaved_from(cache.index, node, 0, node.live)
                if not node.dead and lo < node.live:
                    asked.append((cache, node, node.depth + lo, node.depth + node.live))
                    self.demote.save(*asked[-1])
                    if self.demote.pages > MOST_PAGES // 2:
                        await self.demote.settled()
        await self.demote.settled()
        left = ((cache, cache.index.heir(node), first, end) for cache, node, first, end in asked)
        return not any(self.demote.alone(*pages) for pages in left if not pages[1].dead)

    def report(self) -> dict[str, Any]:
        """For status and metrics."""
        tier = self.tier
        return {
            "budget_bytes": tier.budget_bytes,
            "used_bytes": tier.used_bytes,
            "free_bytes": tier.free_bytes,
            "state": self.state,
            "sick": self.carrier.sick,
            "device": self.carrier.name,
            "uuid": self.carrier.uuid.hex(),
            "scope": tier.space.owner,
            "batches_waiting": self.carrier.waiting,
        }

    async def close(self) -> None:
        """Let what moves end."""
        await self.space.slabs.close()
        await self.demote.settled()
        await self.promote.settled()
        if self._failed is not None:
            await self._failed


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Have the loop make a call."""
    loop.call_soon_threadsafe(call)
