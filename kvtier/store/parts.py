"""What the verbs share: tiers, caches, counters and the clock. One of each per daemon, owned by the loop thread."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from kvtier.identity import CacheSpec, cache_id, shape_of
from kvtier.index import Hold, Node, Order
from kvtier.mover import Mover
from kvtier.store.cache import Cache
from kvtier.store.copying import Copying
from kvtier.store.instance import Instance, Process
from kvtier.store.links import Links
from kvtier.store.loads import Loads
from kvtier.store.patience import Patience
from kvtier.store.persist import Persist
from kvtier.store.requests import Requests
from kvtier.store.reserve import Reservation
from kvtier.store.restore import Restore
from kvtier.store.slices import leaves, sliced
from kvtier.store.space import Space
from kvtier.store.vram import DeviceMemory, Vram
from kvtier.store.warmth import Warmth
from kvtier.store.ways import Ways
from kvtier.tiers.arena import Arena
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.types import Code, KvtierError, Tier, bad
from kvtier.waits import drained

if TYPE_CHECKING:
    from kvtier.events.feed import Feed
    from kvtier.store.peers import Peers

MAX_CACHES = 4096
MOST_FORGOTTEN: Final = 64
MOST_NODES: Final = 4096
"""So many caches are forgotten at once for others, of so many nodes together: some milliseconds."""
MAX_EPOCHS = 1 << 16
"""Caches that were reset, remembered while nobody has them open where no disk does it."""
MAX_SCOPES = 64
"""Each has arenas of its own: address space and descriptors that stay."""
log = logging.getLogger("kvtier.store")


class Parts:
    """The tiers and everything that moves pages between them."""

    def __init__(
        self, host: HostTier, disk: DiskTier | None, ways: Ways | None = None, device: DeviceMemory | None = None
    ) -> None:
        self.host = host
        self.disk = disk
        self.ways = ways or Ways()
        self.now = self.ways.now
        """Seconds that order uses."""
        self.counts = self.ways.counts
        self.mover = Mover()
        self.persist = Persist(disk, self.ways)
        self.copying = Copying(self.mover, None if device is None else device.carrier)
        self.space = Space(Tier.HOST, host, self.persist, self.persist, self.copying, self.ways)
        self.loads = Loads(disk, self.mover, self.space, self.counts)
        self.links = Links()
        self.feed: Feed | None = None
        """Announces what is cached, where somebody is to hear it."""
        self.peers: Peers | None = None
        """Other hosts, where some are configured."""
        self.caches: dict[int, Cache] = {}
        self.ids: dict[bytes, Cache] = {}
        self.epochs: dict[bytes, int] = {}
        """Newest epoch of each cache (by base_id), forgotten ones too; disk keeps them across restarts."""
        self.vram = None if device is None else Vram(device, self)
        """The device tier, where one is configured."""
        self.loading = disk is not None
        """Whether the catalogue is still being indexed."""
        self.restore = Restore(self)
        self.warmth = Warmth(self)
        self.numbers = itertools.count(secrets.randbits(40) << 20)
        """Handles, leases, reservations: begun at random, so that one of an earlier daemon is never somebody else's."""
        self.instances: dict[tuple[str, str], Instance] = {}
        """Attached engines by (scope, name)."""
        self.patience = Patience(self.instances)
        self.requests = Requests()
        self.closing: set[asyncio.Task[None]] = set()
        """What is being let go of and takes a while."""
        self.freeing: set[asyncio.Task[None]] = set()
        """Caches that are being emptied, retired ones mostly."""
        self._ended = asyncio.Event()
        self.waiting: set[Reservation] = set()
        """Reservations with complete pages whose parents are not served yet."""

    def arenas(self, scope: str) -> list[Arena]:
        """The host arenas of a trust scope, made on first use; raises over_cap for one scope too many."""
        if scope not in self.host.scopes and len(self.host.scopes) >= MAX_SCOPES:
            raise KvtierError(Code.OVER_CAP, f"{MAX_SCOPES} trust scopes have an arena already", "scope")
        return self.host.arenas(scope)

    @staticmethod
    def deadline(wait_ms: int, field: str = "wait_ms") -> float:
        """Loop time at which a request stops waiting; raises bad_request for one that waits too long."""
        if not 0 <= wait_ms <= 600_000:
            raise bad(field, "0..600000", wait_ms)
        return asyncio.get_running_loop().time() + wait_ms / 1000

    def epoch(self, base: bytes) -> int:
        """The newest epoch known of a cache."""
        known = self.epochs.get(base, 0)
        return max(known, self.disk.epoch(base)) if self.disk is not None else known

    def cache(self, spec: CacheSpec, scope: str, epoch: int) -> Cache:
        """The cache of that identity, made on first use; raises over_cap for an epoch that cannot be remembered."""
        found = self.ids.get(cache_id(spec, scope, epoch))
        if found is not None:
            return found
        if epoch and len(self.epochs) >= MAX_CACHES + MAX_EPOCHS:
            raise KvtierError(Code.OVER_CAP, f"{MAX_EPOCHS} caches were reset since the daemon began", "epoch")
        pool = self.host.pool(scope, shape_of(spec))
        orders: dict[int, Order] = {Tier.HOST: self.space.order_of(pool)}
        if self.disk is not None:
            orders[Tier.DISK] = self.persist.room.order
        cache = Cache(next(self.numbers), spec, scope, epoch, pool, orders, self.ways.heat)
        self.ways.quotas.join(cache)
        self.caches[cache.number] = self.ids[cache.id] = cache
        self.space.caches[cache.index] = self.persist.room.caches[cache.index] = cache
        if self.vram is not None:
            self.vram.join(cache)
        self.epochs[cache.base] = max(epoch, self.epochs.get(cache.base, 0))
        if self.feed is not None and self.feed.tells(spec):
            self.feed.follow(cache.index)
        return cache

    def opened(self, process: Process, number: int) -> Cache:
        """A cache that this process opened; raises unknown."""
        if number not in process.ranks:
            raise KvtierError(Code.UNKNOWN, f"this process has not opened cache {number}", "cache")
        cache = self.caches[number]
        cache.used = self.now()
        return cache

    def leased(self, cache: Cache, *nodes: Node) -> AbstractContextManager[None]:
        """Hold paths for a job of the daemon's own."""
        return self.space.leased(cache, *nodes)

    def unlease(self, cache: Cache, node: Node, hold: Hold = Hold.READ) -> None:
        """Let a path go that an engine held, freeing what was doomed on it."""
        self.space.unlease(cache, node, hold)
        self.patience.stir()

    def admit(self, res: Reservation) -> None:
        """Count a new reservation; one with nothing to fill is over at once."""
        res.instance.hold(res.tier, res.cost)
        res.instance.reservations[res.number] = res
        res.cache.reservations.add(res)
        res.cache.dues[res.tier] += res.cost
        if res.settled and not res.kept:
            res.published = res.pages
            self.end(res)

    def end(self, res: Reservation) -> None:
        """A reservation is over: what is not served goes back to the pool."""
        res.drop(self.unlease)
        self.waiting.discard(res)
        res.cache.reservations.discard(res)
        res.instance.finish(res)

    def retire(self, cache: Cache) -> None:
        """Let nothing of a cache be found any more, and free it; what engines hold goes when they let go of it."""
        cache.retired = cache.index.closed = True
        self._free_soon(self._free(cache))

    def _free_soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it be done beside all else."""
        task = asyncio.get_running_loop().create_task(work)
        self.freeing.add(task)
        task.add_done_callback(self.freeing.discard)

    async def _empty(self, cache: Cache) -> None:
        """Forget a cache that is too large to be emptied in one go, unless somebody opens it meanwhile."""
        async for node in sliced(_leaves(cache)):
            if self._busy(cache) or any(cache.number in p.ranks for i in self.instances.values() for p in i.processes):
                return
            cache.release(cache.index.cut(node).freed, self.disk)
        self.counts["caches_forgotten"] += 1
        self.prune()

    async def _free(self, cache: Cache) -> None:
        """Cut all of a retired cache, in slices; then its pages on disk go, all of them at once."""
        try:
            with self.leased(cache, cache.index.root):
                async for node in sliced(_leaves(cache)):
                    cache.release(cache.index.cut(node).freed, None)
        finally:  # also where the daemon ends before all is cut
            if cache.disk is not None and self.disk is not None:
                self.disk.drop_cache(cache.disk)
                cache.disk = None
        self.prune()

    def prune(self) -> None:
        """Forget caches that hold nothing and that nobody has open (not while the catalogue may yet fill them).

        Their records on disk go, too. Epochs are kept apart, there or here, and stay: an old one must never be served
        again.
        """
        if self.loading:
            return
        used = {number for i in self.instances.values() for number in i.in_use(self.caches)}
        for cache in [c for c in self.caches.values() if c.number not in used]:
            index = cache.index
            if not (index.nodes or self._busy(cache)):
                if cache.disk is not None and self.disk is not None:
                    self.disk.drop_cache(cache.disk)
                self.ways.quotas.leave(cache)
                del self.caches[cache.number], self.ids[cache.id]
                del self.space.caches[index], self.persist.room.caches[index]
                self.persist.room.evictions.forget(index)
                if self.vram is not None:
                    self.vram.space.caches.pop(index, None)
                if self.feed is not None:
                    self.feed.drop(index)
        scopes = {instance.scope for instance in self.instances.values()}
        self.space.forget(self.host.idle({cache.pool for cache in self.caches.values()}, scopes))
        if self.vram is not None:
            self.vram.prune(scopes)
        known = {cache.base for cache in self.caches.values()}
        on_disk = self.disk.epoch if self.disk is not None else lambda _: 0
        # Epoch 0 is shared: who opened a forgotten cache there again would be given peers' KV of the old weights.
        self.epochs = {base: e for base, e in self.epochs.items() if base in known or e > on_disk(base)}

    def room_for(self, spec: CacheSpec, scope: str, epoch: int) -> None:
        """Where one cache more would be too many, forget the longest unused ones; raises over_cap where none can go."""
        if len(self.caches) >= MAX_CACHES and cache_id(spec, scope, epoch) not in self.ids:
            self.prune()
            if len(self.caches) >= MAX_CACHES:
                self._forget()
            if len(self.caches) >= MAX_CACHES:
                raise KvtierError(Code.OVER_CAP, f"{MAX_CACHES} caches are open or hold pages")

    def _forget(self) -> None:
        """Empty the longest unused caches, whatever is in them, that nobody has open or holds anything of.

        What tenants stored who never came back would else keep new ones out for ever, however much room there is.
        """
        used = {number for i in self.instances.values() for number in i.in_use(self.caches)}
        caches = [cache for number, cache in self.caches.items() if number not in used and not self._busy(cache)]
        idle = [cache for cache in caches if cache.index.nodes <= MOST_NODES]
        oldest = min(caches, key=lambda each: each.last_used, default=None)
        if oldest is not None and oldest.index.nodes > MOST_NODES and not self.freeing:
            self._free_soon(self._empty(oldest))
        nodes = gone = 0
        for cache in heapq.nsmallest(MOST_FORGOTTEN, idle, key=lambda each: each.last_used):
            nodes += cache.index.nodes
            if gone and nodes > MOST_NODES:
                break
            for node in _leaves(cache):
                cache.release(cache.index.cut(node).freed, None)
            gone += 1
        if gone:
            if not self.counts["caches_forgotten"]:
                log.warning("there are %d caches: from now on the longest unused make way for others", MAX_CACHES)
            self.counts["caches_forgotten"] += gone
            self.prune()  # their pages on disk go with them

    def _busy(self, cache: Cache) -> bool:
        """Whether something of a cache is held, or on its way."""
        index = cache.index
        return bool(index.doomed or index.root.refs or cache.reservations or self.ways.quotas.writing[cache])

    async def forever(self, process: Process) -> None:
        """Wait until the store closes or a process has ended, whatever happens to the waiting task."""
        waits = [asyncio.ensure_future(ended.wait()) for ended in (self._ended, process.ended)]
        await drained(asyncio.ensure_future(asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)))
        for each in waits:
            each.cancel()

    def check(self) -> list[str]:
        """Broken invariants of the whole store, in words."""
        wrong = self.host.check() + self.ways.quotas.check()
        if self.vram is not None:
            wrong += self.vram.tier.check()
        if self.disk is not None:
            wrong += self.disk.check()
        for cache in self.caches.values():
            wrong += [f"cache {cache.number}: {line}" for line in cache.index.check()]
        return wrong

    def close(self) -> None:
        """Stop the threads, then the tiers."""
        self._ended.set()
        self.links.close()
        self.mover.close()
        if self.copying.carrier is not None:
            self.copying.carrier.close()
        if self.disk is not None:
            self.disk.close()
        self.host.close()


def _leaves(cache: Cache) -> Iterator[Node]:
    """Leaves of all that a cache has, while they are cut."""
    return leaves(list((cache.index.root.children or {}).values()))
