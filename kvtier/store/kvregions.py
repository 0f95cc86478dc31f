"""Engines' own paged KV in device memory as source and destination: the daemon gathers and scatters for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.device.base import Buffer, Device
from kvtier.device.layout import Paged, Plan, plan
from kvtier.device.shuttle import MOST_PAGES, Choose, Shuttle, Way
from kvtier.identity import Slice
from kvtier.mover import Urgency
from kvtier.store.cache import Cache
from kvtier.store.carrier import Carrier, Stuck
from kvtier.store.commits import Commits
from kvtier.store.instance import Instance, Lease, Process
from kvtier.store.loads import Missing
from kvtier.store.parts import Parts
from kvtier.store.reserve import OPEN, Reservation
from kvtier.tiers.vram import on_device
from kvtier.types import NO_COPY, Code, KvtierError, Tier, bad
from kvtier.wire import MAX_NAME, Load, Loaded, Ok, Plane, Registered, RegisterKv, Store, Stored

MOST_PLANES = 4096
MOST_REGIONS = 16
MOST_BYTES = 1 << 48
AGAIN_S = 0.1
ELEMENTS = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
Words = npt.NDArray[np.int64]


class KvRegion:
    """One process's paged KV, mapped in the device's thread."""

    def __init__(self, name: str, owner: Process) -> None:
        self.name = name
        self.owner = owner
        self.memory: list[Buffer] = []
        """What is mapped; empty once it is unmapped."""
        self.layers: list[list[Paged]] = []
        self.shuttles: dict[tuple[object, ...], Shuttle] = {}
        """By what makes pages differ (`Job.kind`): each has staging buffers of its own."""
        self.running = 0
        """Loads and stores that use it, from the moment that they looked it up."""
        self.ended = False
        """Nothing new moves there; it is unmapped when the last that uses it lets it go."""

    def shuttle(self, device: Device, job: Job, way: Choose | Way) -> Shuttle:
        """What moves pages of one group; made on first use, in the device's thread. Raises bad_request, no_space.

        `way`: between the engine's blocks and slots in host memory.
        """
        found = self.shuttles.get(job.kind)
        if found is None:
            made = self.plan(job.cache, job.group, job.part)
            if job.host and not made.whole_layers and not device.facts.reaches:
                raise bad("rows", "pages on the device, or a rank with whole layers: no kernel reaches host slots")
            found = self.shuttles[job.kind] = Shuttle(device, made, way=way if job.host else Way.DIRECT)
        return found

    def plan(self, cache: Cache, group: int, part: Slice) -> Plan:
        """How its blocks lie in pages of a group. Raises bad_request."""
        spec = cache.spec
        element = ELEMENTS.get(spec.kv_dtype, "")
        return plan(self.layers, spec.page_tokens, spec.groups[group], part, spec.codec, element)

    def attach(self, device: Device, msg: RegisterKv, fds: Sequence[int]) -> None:
        """Map all stretches; in the device's thread. Where one fails `close` unmaps the others."""
        left, owner = iter(fds), object()
        for what in msg.memory:
            self.memory.append(device.attach(what, -1 if what.handle else next(left), owner))
        self.layers = _layers(msg.planes, self.memory)

    def close(self, _device: Device) -> None:
        """Wait for what is in flight and unmap; in the device's thread. Raises io, and then something stays mapped."""
        for shuttle in self.shuttles.values():
            shuttle.close()
            if shuttle.sick:
                raise KvtierError(Code.IO, f"the device may still use the engine's memory: {shuttle.sick}")
        mapped, self.memory, failed = self.memory, list[Buffer](), list[KvtierError]()
        for memory in mapped:
            try:
                memory.free()
            except KvtierError as exc:
                failed.append(exc)
                self.memory.append(memory)
        if failed:
            raise failed[0]


class Job(NamedTuple):
    """Pages of one group to move: raw slot addresses, and the blocks that they go to or come from."""

    cache: Cache
    group: int
    part: Slice
    slots: npt.NDArray[np.uint64]
    blocks: Words
    host: bool
    """Whether some slot is in host memory, which the device's copies reach and its kernels do not."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What is the same for all pages that one shuttle moves, of whatever cache."""
        spec = self.cache.spec
        return spec.groups[self.group], spec.page_tokens, spec.kv_dtype, spec.codec, self.part, self.host


class KvRegions:
    """Registering, loading and storing; one number space with other regions."""

    def __init__(self, parts: Parts, commits: Commits) -> None:
        self.parts = parts
        self.commits = commits
        self.counts = parts.counts

    @property
    def _carrier(self) -> Carrier:
        vram = self.parts.vram
        if vram is None or vram.state == "sick" or vram.carrier.sick:
            why = "none is configured" if vram is None else vram.carrier.sick
            raise KvtierError(Code.UNKNOWN, f"no device here: {why}", "region")
        return vram.carrier

    async def register(self, owner: Process, msg: RegisterKv, fds: Sequence[int]) -> Registered:
        """Map an engine's KV and read its tokens back. Raises bad_request, over_cap, io with advice."""
        if not 1 <= len(msg.name) <= MAX_NAME:
            raise bad("name", f"1..{MAX_NAME} characters", msg.name)
        _check(msg, len(fds))
        carrier, instance = self._carrier, owner.instance

        def same() -> list[int]:
            return [number for number, r in instance.kv.items() if r.owner is owner and r.name == msg.name]

        if len(instance.kv) - len(same()) >= MOST_REGIONS:
            raise KvtierError(Code.OVER_CAP, f"an instance registers the KV of at most {MOST_REGIONS} processes")
        region = KvRegion(msg.name, owner)
        try:
            await carrier.call(lambda device: region.attach(device, msg, fds))
            for number, (stretch, token) in enumerate(zip(region.memory, msg.tokens, strict=True)):
                await carrier.probe(stretch.address, token, f"stretch {number} of the engine's GPU memory")
        except BaseException:
            if region.memory:  # also where the request was cancelled as it mapped
                await asyncio.shield(self._dropping(region))
            raise
        for old in same():
            self.drop_one(instance, old)
        if owner.left:  # else nobody's end would unmap it
            await asyncio.shield(self._dropping(region))
            raise KvtierError(Code.UNKNOWN, "the session is over", "session")
        number = next(self.parts.numbers)
        instance.kv[number] = region
        return Registered(number, mapped=True)

    def drop_one(self, instance: Instance, number: int) -> asyncio.Task[None]:
        """Let go of one; what moves there ends first."""
        return self._dropping(instance.kv.pop(number))

    async def unregister(self, instance: Instance, number: int) -> Ok:
        """Let go of one that nothing uses; its owner may free the memory when this is over. Raises busy, io."""
        region = instance.kv[number]
        if region.running:
            raise KvtierError(Code.BUSY, "transfers run on it", "region")
        await asyncio.shield(self.drop_one(instance, number))
        if region.memory:
            raise KvtierError(Code.IO, "the engine's memory stays mapped here: the device may still use it")
        return Ok()

    def _dropping(self, region: KvRegion) -> asyncio.Task[None]:
        """Unmap one, whoever stops waiting for it."""
        task = asyncio.get_running_loop().create_task(self._drop(region))
        self.parts.closing.add(task)
        task.add_done_callback(self.parts.closing.discard)
        return task

    def owner_gone(self, owner: Process) -> None:
        """A session is over: what it had registered is unmapped."""
        for number in [number for number, region in owner.instance.kv.items() if region.owner is owner]:
            self.drop_one(owner.instance, number)

    @contextlib.asynccontextmanager
    async def _using(self, region: KvRegion) -> AsyncIterator[None]:
        """Keep a region mapped; the last one to let an ended one go unmaps it."""
        region.running += 1
        try:
            yield
        finally:
            region.running -= 1
            if region.ended and not region.running:
                await self._close(region)

    async def _drop(self, region: KvRegion) -> None:
        """Unmap once nothing moves there."""
        region.ended = True
        if not region.running:
            await self._close(region)

    async def _close(self, region: KvRegion) -> None:
        """Unmap, however long the device is busy. A sick one keeps it mapped: it may still write there."""
        vram = self.parts.vram
        while vram is not None and not vram.carrier.sick:
            try:
                await vram.carrier.call(region.close, Urgency.BACKGROUND)
            except KvtierError as exc:
                if exc.code is Code.BUSY:
                    await asyncio.sleep(AGAIN_S)
                    continue
                self.counts["kv_regions_not_unmapped"] += 1
            return

    async def _move(self, region: KvRegion, job: Job, *, load: bool) -> None:
        """Have the device move pages, at most MOST_PAGES at once.

        Raises bad_request, unknown, no_space, busy, io, Stuck.
        """
        carrier, urgency = self._carrier, Urgency.LOAD if load else Urgency.ENGINE
        shuttle = region.shuttles.get(job.kind)
        if shuttle is None:  # what it lacks for one is this request's misfortune, not the device's
            shuttle = await carrier.call(lambda device: region.shuttle(device, job, carrier.way), urgency)
        go = shuttle.load if load else shuttle.store
        per = len(job.blocks) // max(1, len(job.slots))
        for at in range(0, len(job.slots), MOST_PAGES):
            if region.ended:
                raise KvtierError(Code.UNKNOWN, "the region was unregistered", "region")
            slots = job.slots[at : at + MOST_PAGES]
            blocks = job.blocks[at * per : (at + len(slots)) * per]
            await carrier.transfer(functools.partial(go, blocks, slots), urgency)

    # -- load --------------------------------------------------------------------------------------------------------

    async def load(self, process: Process, msg: Load) -> Loaded:
        """Scatter a lease's pages into blocks, each verified first. Ends only when the device writes there no more."""
        region = process.instance.kv[msg.region]
        async with self._using(region):
            return await self._loaded(process, region, msg)

    async def _loaded(self, process: Process, region: KvRegion, msg: Load) -> Loaded:
        lease = process.instance.leases.get(msg.lease)
        if lease is None:
            raise KvtierError(Code.UNKNOWN, f"no lease {msg.lease} here", "lease")
        cache = lease.cache
        part, blocks, per = self._blocks(process, region, cache, msg.group, msg.rows)
        pages = len(blocks) // per
        if cache.spec.keyed or msg.first < 0 or msg.first + pages > lease.pages:
            raise bad("first", f"pages within the lease's {lease.pages}", msg.first)
        with self.parts.space.leased(cache, *lease.nodes):
            good = await self._verified(lease, msg, pages)
            at = np.flatnonzero(good)
            slots, host = self._slots(lease, msg, at, pages)
            chosen = blocks.reshape(pages, per)[at].reshape(-1)
            if len(at):
                await self._scatter(process, region, Job(cache, msg.group, part, slots, chosen, host))
        self.counts["bytes_to_engine"] += len(at) * cache.item_bytes[msg.group]
        return Loaded(bytes(np.repeat(good, per).astype(np.uint8)))

    async def _scatter(self, process: Process, region: KvRegion, job: Job) -> None:
        """Move to blocks; where the device is stuck there is no word, since nobody can say that it writes no more.

        Only the end of the process: then the memory is nobody's, and stays mapped here.
        """
        try:
            with self.parts.ways.busy.moving("to_engine"):
                await self._move(region, job, load=True)
        except Stuck:
            await self.parts.forever(process)
            raise

    @staticmethod
    def _slots(lease: Lease, msg: Load, at: Words, pages: int) -> tuple[npt.NDArray[np.uint64], bool]:
        """Where some of the pages are, and whether one of them is in host."""
        cache = lease.cache
        handles, _ = cache.readable(lease.nodes[0], msg.group, msg.first, pages, lease.tiers)
        chosen = [handles[n] for n in at]
        slots = np.array([_address(cache, msg.group, handle) for handle in chosen], np.uint64)
        return slots, not all(on_device(handle) for handle in chosen)

    async def _verified(self, lease: Lease, msg: Load, pages: int) -> npt.NDArray[np.bool_]:
        """Per page: whether its bytes are what was stored; what is not is lost where it was."""
        cache, group = lease.cache, msg.group
        handles, sums = cache.readable(lease.nodes[0], group, msg.first, pages, lease.tiers)
        good = np.zeros(pages, bool)
        for tier in lease.tiers:
            at = [n for n, h in enumerate(handles) if h != NO_COPY and on_device(h) == (tier == Tier.DEVICE)]
            if not at:
                continue
            found = await self.parts.copying.checksums(cache, group, [handles[n] for n in at], tier, Urgency.LOAD)
            for n, value in zip(at, found, strict=True):
                good[n] = value == sums[n]
                if not good[n]:
                    lost = Missing(lease.nodes[0], group, msg.first + n, tier, handles[n], sums[n])
                    self.parts.loads.lose(cache, lost, "checksum")
        return good

    # -- store -------------------------------------------------------------------------------------------------------

    async def store(self, process: Process, msg: Store) -> Stored:
        """Gather blocks into a reservation's slots: this process's part of them. A Commit follows."""
        region = process.instance.kv[msg.region]
        async with self._using(region):
            return await self._stored(process, region, msg)

    async def _stored(self, process: Process, region: KvRegion, msg: Store) -> Stored:
        res = process.instance.reservations.get(msg.reservation)
        if res is None:
            raise KvtierError(Code.UNKNOWN, f"no reservation {msg.reservation} here", "reservation")
        cache, first = res.cache, msg.first - res.start
        part, blocks, per = self._blocks(process, region, cache, msg.group, msg.rows)
        pages = len(blocks) // per
        if res.writers.get(process.ranks[cache.number].bit) is not process:
            raise bad("reservation", "one that this process writes")
        if first < 0 or first + pages > res.pages:
            raise bad("first", f"pages within {res.start}..{res.start + res.pages - 1}", msg.first)
        handles = res.handles[msg.group][first : first + pages]
        at = [n for n, h in enumerate(handles) if h != NO_COPY and res.state[first + n] == OPEN]
        done = np.array([handle == NO_COPY for handle in handles])
        slots = np.array([_address(cache, msg.group, handles[n]) for n in at], np.uint64)
        chosen = blocks.reshape(pages, per)[at].reshape(-1)
        job = Job(cache, msg.group, part, slots, chosen, res.tier == Tier.HOST)
        await self._fill(region, res, job, [first + n for n in at])
        done[at] = True
        self.counts["bytes_from_engine"] += len(at) * cache.item_bytes[msg.group]
        return Stored(bytes(np.repeat(done, per).astype(np.uint8)))

    async def _fill(self, region: KvRegion, res: Reservation, job: Job, positions: list[int]) -> None:
        """Move, holding the reservation; slots that a stuck device may still write are nobody's from then on."""
        res.hashing += 1
        res.filling.update(positions)
        try:
            if positions:
                with self.parts.ways.busy.moving("from_engine"):
                    await self._move(region, job, load=False)
        except Stuck:
            res.strand(job.group, positions)
            raise
        finally:
            res.hashing -= 1
            res.filling -= Counter(positions)
            self.commits.settle(res)

    def _blocks(
        self, process: Process, region: KvRegion, cache: Cache, group: int, rows: bytes
    ) -> tuple[Slice, Words, int]:
        """The process's part of the group's items, the blocks, and how many a page has. Raises bad_request, unknown."""
        rank = process.ranks.get(cache.number)
        if rank is None:
            raise KvtierError(Code.UNKNOWN, f"this process has not opened cache {cache.number}", "cache")
        if not 0 <= group < cache.index.groups or cache.shape.slots_per_item[group] > 1:
            raise bad("group", "one whose items lie in one slot", group)
        made = region.plan(cache, group, rank.slices[group])
        if len(rows) % (8 * made.per) or not rows:
            raise bad("rows", f"{made.per} int64 block numbers a page", len(rows))
        return rank.slices[group], np.frombuffer(rows, "<i8"), made.per


def _address(cache: Cache, group: int, handle: int) -> int:
    """Where an item of one slot is, as the device takes it."""
    return cache.spans(Tier.DEVICE if on_device(handle) else Tier.HOST, group, handle)[0].address


def _check(msg: RegisterKv, fds: int) -> None:
    """Raise bad_request for memory or planes that cannot be: nothing outside the stretches is ever touched."""
    for what in msg.memory:
        what.check()
    if not msg.memory or fds != sum(not what.handle for what in msg.memory):
        raise bad("fds", "one descriptor for each stretch without a handle", fds)
    if len(msg.tokens) != len(msg.memory):
        raise bad("tokens", "one for each stretch", len(msg.tokens))
    if not all(1 <= len(token) <= min(64, what.size) for token, what in zip(msg.tokens, msg.memory, strict=True)):
        raise bad("tokens", "1..64 bytes each")
    if not 1 <= len(msg.planes) <= MOST_PLANES:
        raise bad("planes", f"1..{MOST_PLANES}", len(msg.planes))
    for number, plane in enumerate(msg.planes):
        numbers = plane.offset, plane.block_stride, plane.head_stride, plane.token_stride
        counts = plane.blocks, plane.heads, plane.tokens, plane.row
        sane = all(0 <= n < MOST_BYTES for n in numbers) and all(0 < n < MOST_BYTES for n in counts)
        if not sane or not 0 <= plane.memory < len(msg.memory) or _end(plane) > msg.memory[plane.memory].size:
            raise bad(f"planes[{number}]", "rows within their stretch")


def _end(plane: Plane) -> int:
    """The byte after the last row of a plane."""
    last = (plane.blocks - 1) * plane.block_stride + (plane.heads - 1) * plane.head_stride
    return plane.offset + last + (plane.tokens - 1) * plane.token_stride + plane.row


def _layers(planes: Sequence[Plane], memory: list[Buffer]) -> list[list[Paged]]:
    """Planes by layer, at their addresses here."""
    layers: dict[int, list[Paged]] = {}
    for p in planes:
        base = memory[p.memory].address + p.offset
        shape = p.blocks, p.heads, p.tokens, p.row, p.block_stride, p.head_stride, p.token_stride
        layers.setdefault(p.layer, []).append(Paged(base, *shape))
    return [layers[number] for number in sorted(layers)]
