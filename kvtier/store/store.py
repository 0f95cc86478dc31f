"""The store as the server sees it: sessions come and go, and each verb is one call. Owned by the loop thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvtier import wire
from kvtier.identity import base_id
from kvtier.peer.base import PeerTier
from kvtier.policy.quota import Rule
from kvtier.store import curves
from kvtier.store.agreeing import Agreeing
from kvtier.store.attached import Attached
from kvtier.store.cache import Cache
from kvtier.store.checkup import Checkup
from kvtier.store.explain import Explain
from kvtier.store.exports import Exports
from kvtier.store.flush import flush, make_durable
from kvtier.store.hints import Hints
from kvtier.store.imports import Imports
from kvtier.store.instance import Process
from kvtier.store.operate import Operate
from kvtier.store.ordering import Ordering
from kvtier.store.parts import Parts
from kvtier.store.peers import Peers
from kvtier.store.pins import Pins
from kvtier.store.report import Report
from kvtier.store.routing import Routing
from kvtier.store.scrub import Pace, Scrub
from kvtier.store.tokens import Tokens
from kvtier.store.upkeep import Upkeep
from kvtier.store.visits import Visits
from kvtier.store.vram import DeviceMemory
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.types import Code, KvtierError, bad

Verb = Callable[[Process, Any], wire.Message | Awaitable[wire.Message]]
AdminVerb = Callable[[Any], wire.Message | Awaitable[wire.Message]]


class Store(Attached):
    """Caches of one host over its tiers.

    `cap` is the share of the host arena that one instance may hold in leases and reservations, so that a stopped
    engine starves nobody. `scrub` is how fast copies are re-read in the background; None: not at all.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        *,
        cap: float = 0.5,
        version: str = "",
        scrub: Pace | None = None,
        ways: Ways | None = None,
        device: DeviceMemory | None = None,
    ) -> None:
        super().__init__(Parts(host, disk, ways, device), cap, version)
        self.tokens = Tokens(self.parts)
        self.pins = Pins(self.parts)
        self.checkup = Checkup(self.parts, self.pins)
        self.report = Report(self.parts, self.checkup, version)
        operate = Operate(self.parts)
        self.scrub = Scrub(self.parts.caches, self.parts.loads, self.parts.space, self.parts.mover, self.parts.counts)
        upkeep = Upkeep(self.parts, operate, self.scrub, self.checkup)
        self.visits = Visits(self.parts)
        exports, imports = Exports(self.parts, self.visits), Imports(self.parts, self.visits)
        self._pace = scrub
        self._background: list[asyncio.Task[None]] = []
        self.verbs: Mapping[type[wire.Message], Verb] = {
            wire.Open: self.open,
            wire.Reset: self.reset,
            wire.Unregister: self.regions.unregister,
            wire.Match: self.tokens.match,
            wire.Acquire: self.tokens.acquire,
            wire.Release: self.tokens.release,
            wire.Forget: self.tokens.forget,
            wire.Order: Ordering(self.parts.mover).order,
            wire.Push: self.push,
            wire.Agree: Agreeing(self.parts).agree,
            wire.Prefetch: self.tokens.prefetch,
            wire.Hint: Hints(self.parts).hint,
            wire.Reserve: self.tokens.reserve,
            wire.Commit: self.commits.commit,
            wire.Abort: self.commits.abort,
            wire.Exists: self.keys.exists,
            wire.AcquireKeys: self.keys.acquire,
            wire.ReserveKeys: self.keys.reserve,
            wire.Load: self.regions.load,
            wire.Store: self.regions.store,
            wire.Flush: self.flush,
            wire.Stat: lambda _, msg: self.report.stat(msg),
            wire.UseDevice: self.use_device,
        }
        self.admin: Mapping[type[wire.Message], AdminVerb] = {
            wire.Status: self.report.status,
            wire.Caches: self.report.caches,
            wire.Tree: self.report.tree,
            wire.Check: self.report.check,
            wire.Metrics: self.report.metrics,
            wire.Curve: lambda msg: curves.answer(self.parts.ways.curves, disk.capacity_bytes if disk else 0, msg),
            wire.Requests: self.report.requests,
            wire.Explain: Explain(self.parts).explain,
            wire.Pin: self.pins.pin,
            wire.Unpin: self.pins.unpin,
            wire.Pins: self.pins.list,
            wire.Warm: operate.warm,
            wire.Evict: operate.evict,
            wire.Remove: operate.remove,
            wire.Purge: operate.purge,
            wire.Route: Routing(self.parts).route,
            wire.Flush: self.flush_all,
            wire.DiskUsage: upkeep.usage,
            wire.DiskScrub: upkeep.read_all,
            wire.DiskVerify: upkeep.verify,
            wire.DiskCompact: upkeep.compact,
            wire.DiskPurge: upkeep.purge,
            wire.Export: exports.begin,
            wire.ExportNext: exports.next,
            wire.ExportEnd: exports.end,
            wire.Import: imports.begin,
            wire.ImportRun: imports.run,
            wire.ImportData: imports.data,
            wire.ImportEnd: imports.end,
        }

    def start(self) -> asyncio.Task[None]:
        """Begin to rebuild the indexes from disk; engines may be served meanwhile. The task ends when all is loaded."""
        loop = asyncio.get_running_loop()
        self.loading = loop.create_task(self.parts.restore.run())
        self._background.append(loop.create_task(self.checkup.run()))
        self._background.append(loop.create_task(self.parts.ways.quotas.run()))
        if self._pace is not None:
            self._background.append(loop.create_task(self.scrub.run(self._pace)))
        if self.parts.disk is not None:
            self._background.append(loop.create_task(self.parts.warmth.run()))
        if self.parts.peers is not None:
            self.parts.peers.start()
        if self.parts.vram is not None:
            self.parts.vram.start()
        return self.loading

    def join_fleet(self, tier: PeerTier) -> None:
        """Bring pages from other hosts and push to them; before `start`."""
        self.parts.peers = Peers(self.parts, self.tokens, self.keys, self.commits, tier, self.cap_bytes)

    def limit(self, quotas: Sequence[Rule]) -> None:
        """Other quotas from now on; what is stored comes under them within moments."""
        self.parts.ways.quotas.set(quotas, self.parts.caches.values())

    async def drain(self, timeout_s: float) -> None:
        """Refuse newcomers, make durable what can be within the time, and close everything."""
        self.closing = True
        self.loading.cancel()
        if self.parts.vram is not None:
            asyncio.get_running_loop().call_later(timeout_s, self.parts.vram.carrier.hurry)
        if self.parts.peers is not None:
            await self.parts.peers.close()
        self.visits.close()
        ending = [*self._background, *self.parts.freeing]
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        if self.parts.disk is not None and not self.parts.loading:
            deadline = asyncio.get_running_loop().time() + timeout_s
            if self.parts.vram is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await self.parts.vram.settle(list(self.parts.caches.values()))
            await flush(self.parts.persist, list(self.parts.caches.values()), deadline)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.parts.warmth.save()
        if self.parts.closing:
            await asyncio.wait(self.parts.closing)
        if self.parts.vram is not None:
            await self.parts.vram.close()
        await self.parts.space.slabs.close()
        self.parts.close()

    # -- caches ----------------------------------------------------------------------------------------------------

    def open(self, process: Process, msg: wire.Open) -> wire.Opened | Awaitable[wire.Opened]:
        """The cache of a spec at its newest epoch, and the process's shard of it."""
        msg.spec.check()
        if not 0 <= msg.epoch < 1 << 62:
            raise bad("epoch", "0..2**62", msg.epoch)
        scope = process.instance.scope
        base = base_id(msg.spec, scope)
        known = self.parts.epoch(base)
        self.parts.room_for(msg.spec, scope, max(known, msg.epoch))
        cache = self.parts.cache(msg.spec, scope, max(known, msg.epoch))
        process.ranks[cache.number] = process.instance.join_shard(cache, msg)
        safe = known if self.parts.disk is None else self.parts.disk.epoch(base)
        return self._open_newer(process, cache) if msg.epoch > safe else self._opened(process, cache)

    async def _open_newer(self, process: Process, cache: Cache) -> wire.Opened:
        """An engine that reset while this daemon was away brings its epoch; so does one that asks again."""
        await self._supersede(cache)
        return self._opened(process, cache)

    def _opened(self, process: Process, cache: Cache) -> wire.Opened:
        sizes = zip(cache.item_bytes, cache.shape.slot_bytes, cache.shape.slots_per_item, strict=True)
        above = process.instance.appoint(process, cache.number, next(self.parts.numbers))
        self.commits.appointed(process.instance, cache)
        return wire.Opened(cache.number, cache.id, cache.epoch, tuple(wire.GroupInfo(*s) for s in sizes), above)

    def _supersede(self, cache: Cache) -> asyncio.Future[None]:
        """Free every older epoch of a cache; the future is done when a crash cannot bring one back, else raises io."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for old in [c for c in self.parts.caches.values() if c.base == cache.base and c.epoch < cache.epoch]:
            if not old.retired:
                self.parts.retire(old)
        if self.parts.disk is None:
            done.set_result(None)
        else:
            self.parts.disk.set_epoch(cache.base, cache.epoch, lambda error: _resolve(done, error))
        return done

    async def reset(self, process: Process, msg: wire.Reset) -> wire.Opened:
        """Weights changed: a new epoch begins, and nothing of the old one is served again, crash or not."""
        old = self.parts.opened(process, msg.cache)
        epoch = self.parts.epoch(old.base) if old.retired else old.epoch + 1
        rank = process.ranks[old.number]
        await self._supersede(self.parts.cache(old.spec, old.scope, epoch))
        cache = self.parts.cache(old.spec, old.scope, self.parts.epoch(old.base))  # a later one, where others reset too
        process.ranks[cache.number] = process.instance.inherit(old.number, cache.number, rank)
        await asyncio.sleep(0)  # where the old one held little, all of that is free by now
        self.parts.prune()
        return self._opened(process, cache)

    def push(self, process: Process, msg: wire.Push) -> wire.Ok:
        """Give a peer a request's pages, as they are committed; raises bad_request, unknown."""
        path = process.instance.path(msg.handle)
        if path.cache.spec.keyed:
            raise bad("handle", "a request of a token cache", msg.handle)
        if self.parts.peers is None:
            raise KvtierError(Code.UNKNOWN, "this daemon has no peers", "to")
        self.parts.peers.pushes.wish(path.cache, path.keys, msg.to)
        return wire.Ok()

    async def flush(self, process: Process, msg: wire.Flush) -> wire.Ok:
        """Wait until what was committed is durable; raises no_space or io where it is not."""
        numbers = [self.parts.opened(process, msg.cache).number] if msg.cache else process.ranks
        return await make_durable(self.parts, [self.parts.caches[number] for number in numbers], msg.wait_ms)

    async def flush_all(self, msg: wire.Flush) -> wire.Ok:
        """The same for every cache."""
        return await make_durable(self.parts, list(self.parts.caches.values()), msg.wait_ms)


def _resolve(done: asyncio.Future[None], error: str) -> None:
    """Let whoever still waits go on."""
    if done.done():
        return
    if error:
        done.set_exception(KvtierError(Code.IO, f"a crash could bring the old epoch back ({error}): ask again"))
    else:
        done.set_result(None)
