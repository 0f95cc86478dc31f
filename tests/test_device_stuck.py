"""Transfers to and from engines' own KV on a device that hangs: no word that is not true, no slot that is not safe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from engines import Engine, Peer, spec, tokens
from gpukit import Broken, Kv, hanging
from kvtier import wire
from kvtier.device.host import HostDevice
from kvtier.identity import GroupSpec
from kvtier.mover import Urgency
from kvtier.store import Store
from kvtier.store.carrier import Carrier, Stuck
from kvtier.tiers.pool import Span
from kvtier.tiers.slab import SlotState
from kvtier.types import Code, Kind, KvtierError
from lazydevice import LazyDevice
from storekit import KINDS, maker, until, until_sync
from test_device_tier import hasten, joined, over, told, written

CELL = 1024
PAGE = spec((GroupSpec(Kind.FULL, 2, 2, CELL),))
ROW = CELL // 4  # K and V of two tokens
PAGES = 4
KEYS = tokens(*range(PAGES))
PLANES = tuple(
    wire.Plane(0, layer, 16384 * layer + ROW * which, 8, 2, 2, ROW, 8 * ROW, 4 * ROW, 2 * ROW)
    for layer in range(2)
    for which in range(2)
)


class Owner:
    """An engine with KV of its own in device memory."""

    def __init__(self, store: Store, device: Any = None) -> None:
        self.store = store
        self.kv = Kv(device, 32768)

    async def open(self) -> Engine:
        """Attach, open the cache, register the KV."""
        self.engine = Engine(self.store)
        await self.engine.open(PAGE)
        self.engine.mapped = False
        self.kv.fill(np.random.default_rng(0).integers(0, 256, 32768, np.uint8))
        self.region = await self.register()
        return self.engine

    async def register(self) -> int:
        """Register the KV, again or for the first time."""
        message = wire.RegisterKv("engine", "kv", (self.kv.exported,), PLANES, (self.kv.look()[:16].tobytes(),))
        return (await self.store.register_kv(message, self.kv.fds, Peer())).region

    async def put(self, keys: bytes, blocks: list[int]) -> wire.Committed:
        """Compute pages in blocks and have them stored."""
        reserved = await self.engine.reserve(keys)
        await self.engine.call(wire.Store(self.region, 0, rows(blocks), reservation=reserved.reservation))
        return await self.engine.call(wire.Commit(reserved.reservation, 0, len(blocks)))

    async def leased(self, keys: bytes) -> int:
        """Store blocks 0 to 3 as the pages of a path, and lease them."""
        assert (await self.put(keys, [0, 1, 2, 3])).published == PAGES
        return (await self.engine.call(wire.Acquire((await self.engine.match(keys)).handle))).lease

    async def load(self, lease: int) -> wire.Loaded:
        """Load them into blocks 4 to 7."""
        return await self.engine.call(wire.Load(self.region, 0, rows([4, 5, 6, 7]), lease=lease))


@contextlib.asynccontextmanager
async def leasing(device: Any) -> AsyncIterator[tuple[Store, Owner, int]]:
    """A store on the device, an engine there, and its lease of what it stored of its blocks."""
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        await owner.open()
        yield store, owner, await owner.leased(KEYS)


def rows(blocks: list[int]) -> bytes:
    return np.array(blocks, "<i8").tobytes()


async def test_pages_of_an_engines_blocks_come_back_in_any_legal_order():
    """On devices that work late: what was stored of blocks is in other blocks after a load, whole."""
    for seed in range(10):
        device = LazyDevice(seed)
        async with over(lambda device=device: device, 8) as store:
            owner = Owner(store)
            engine = await owner.open()
            before = owner.kv.look()
            lease = await owner.leased(KEYS)
            assert (await owner.load(lease)).done == b"\1" * PAGES
            for layer in range(2):
                base = 16384 * layer
                blocks = owner.kv.look()[base : base + 8 * 8 * ROW].reshape(8, 8 * ROW)
                assert np.array_equal(blocks[4:], before[base : base + 4 * 8 * ROW].reshape(4, 8 * ROW))
            await engine.call(wire.Release(lease))
            engine.leave()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The CPU, and the same on a GPU."""
    return request.param


async def test_a_load_that_is_stuck_is_never_answered(kind: str):
    """No word comes, not even after a cancel, since the device may still write there; the pages stay held."""
    device = hanging(kind, 1)
    async with leasing(device) as (store, owner, lease):
        engine = owner.engine
        await engine.still()
        waits, forever = asyncio.Event(), store.parts.forever

        async def noted(process: Any) -> None:
            waits.set()
            await forever(process)

        store.parts.forever = noted
        device.stuck = True
        hasten(store)
        loading = asyncio.ensure_future(owner.load(lease))
        async with asyncio.timeout(20):
            await waits.wait()
        await until(lambda: store.parts.vram.state == "sick")
        loading.cancel()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not loading.done()
        assert (await engine.match(KEYS)).pages == PAGES
    assert isinstance(await settled(loading), KvtierError | asyncio.CancelledError)
    device.stuck = False


async def test_a_load_that_is_stuck_ends_with_its_process(kind: str):
    """Then nobody has the memory that the device may still write: what the engine held returns."""
    device = hanging(kind, 1)
    async with leasing(device) as (store, owner, lease):
        engine = owner.engine
        await engine.still()
        device.stuck = True
        hasten(store)
        loading = asyncio.ensure_future(owner.load(lease))
        await until(lambda: store.parts.vram.state == "sick")
        loading.cancel()
        await asyncio.sleep(0.01)
        assert not loading.done()
        store.ended(engine.process)
        async with asyncio.timeout(20):
            assert isinstance(await settled(loading), KvtierError | asyncio.CancelledError)
        engine.leave(clean=False)
        assert not store.parts.instances
        (cache,) = store.parts.caches.values()
        assert not cache.index.root.refs
    device.stuck = False


async def settled(task: Any) -> BaseException | None:
    """How a task ended."""
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def test_slots_of_a_store_that_is_stuck_are_nobodys(kind: str):
    """The device may still write what it was to gather: the slots are quarantined, the pages are never served."""
    device = hanging(kind, 2)
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        engine = await owner.open()
        await owner.put(tokens(90), [7])  # makes the shuttle, which moves nothing itself
        reserved = await engine.reserve(KEYS)
        device.stuck = True
        hasten(store)
        with pytest.raises(KvtierError, match=r"did not move|did not return"):  # unpinned copies are waited for
            await engine.call(wire.Store(owner.region, 0, rows([0, 1, 2, 3]), reservation=reserved.reservation))
        await engine.call(wire.Abort(reserved.reservation))
        (pool,) = store.parts.host.pools
        assert pool.counts()[0][SlotState.QUARANTINED] == PAGES
        assert (await engine.match(KEYS)).pages == 0
        assert engine.process.instance.held_bytes == 0
        for n in range(30):
            await engine.put(tokens(*range(10 * n + 50, 10 * n + 60)))
        assert pool.counts()[0][SlotState.QUARANTINED] == PAGES
        assert store.parts.check() == []
        engine.leave()
    device.stuck = False


async def test_memory_of_a_killed_engine_is_unmapped_only_when_nothing_moves_there(kind: str):
    """Its process is gone in the middle of a load: the mapping goes when the device is done, not before."""
    device = hanging(kind, 3)
    freed: list[int] = []
    async with leasing(device) as (store, owner, lease):
        engine = owner.engine
        (region,) = engine.process.instance.kv.values()
        free = region.memory[0].free
        region.memory[0].free = lambda: (freed.append(region.running), free())
        device.stuck = True  # for a while
        loading = asyncio.ensure_future(owner.load(lease))
        await until(lambda: region.running and store.parts.vram.carrier.waiting)
        engine.leave(clean=False)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not freed
        assert not engine.process.instance.kv
        device.stuck = False
        await loading
        await until(lambda: freed)
        assert freed == [0]
        assert store.parts.check() == []


@pytest.mark.parametrize("how", ["unregistered", "registered again"])
async def test_memory_stays_mapped_while_a_load_verifies_its_pages(
    how: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Between its checks and its transfer a load has its region: busy to unregister; replaced, nothing moves there."""
    device = hanging(kind, 4)
    async with leasing(device) as (store, owner, lease):
        engine = owner.engine
        (region,) = engine.process.instance.kv.values()
        freed, free, gate, sums = [], region.memory[0].free, asyncio.Event(), store.parts.copying.checksums
        region.memory[0].free = lambda: (freed.append(region.running), free())

        async def held(*args: Any) -> list[int]:
            await gate.wait()
            return await sums(*args)

        monkeypatch.setattr(store.parts.copying, "checksums", held)
        loading = asyncio.ensure_future(owner.load(lease))
        await until(lambda: region.running)
        if how == "unregistered":
            with pytest.raises(KvtierError, match="transfers run"):
                await engine.call(wire.Unregister(owner.region))
        else:
            await owner.register()
            await until(lambda: region.ended)
        gate.set()
        if how == "unregistered":
            assert (await loading).done == b"\1" * PAGES
            await engine.call(wire.Unregister(owner.region))
        else:
            with pytest.raises(KvtierError, match="unregistered"):
                await loading
        await until(lambda: freed)
        assert freed == [0]
        engine.leave()


async def test_memory_of_two_registrations_is_never_taken_for_the_same():
    """Chunks of two engines may have one number: each registration says that it is another one, its stretches not."""
    owners: list[object] = []

    class Noting(LazyDevice):
        def attach(self, what: Any, fd: int, owner: object) -> Any:
            owners.append(owner)
            return super().attach(what, fd, owner)

    async with over(lambda: Noting(6), 8) as store:
        shared = LazyDevice(0).share(32768)
        for name in ("a", "b"):
            message = wire.RegisterKv(name, "kv", (shared.exported,) * 2, PLANES, (bytes(16),) * 2)
            await Engine(store, name).open(PAGE)
            await store.register_kv(message, [shared.fd, shared.fd], Peer())
        os.close(shared.fd)
    assert owners[0] is owners[1] is not owners[2] is owners[3]


class Clock:
    """A clock that stands still but for what takes time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Compiling(HostDevice):
    """A device whose copies are begun late, and are done at the second look."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def stream(self, *, urgent: bool = False) -> Any:
        stream = super().stream(urgent=urgent)
        stream.record = Second
        return stream

    def copies(self, *args: Any) -> None:
        self.clock.now += 100.0
        super().copies(*args)


class Second:
    """An event that is reached when it is asked for again."""

    done = False
    asked = False

    def synchronize(self, timeout_s: float | None = None) -> bool:
        self.asked, before = True, self.asked
        return before


async def test_the_time_to_begin_is_not_the_time_to_move(monkeypatch: pytest.MonkeyPatch):
    """A kernel that is compiled first, longer than the deadline: the batch still has all of its time."""
    clock = Clock()
    monkeypatch.setattr("kvtier.store.carrier.time", clock)
    carrier = Carrier(lambda: Compiling(clock), 4096, deadline_s=10.0)
    try:
        assert carrier.shared is not None
        await carrier.write(Span(carrier.shared.memory.address, 16), b"t" * 16)
        assert carrier.shared.memory.data[:16].tobytes() == b"t" * 16
        assert not carrier.sick
    finally:
        carrier.close()


async def test_a_transfer_without_room_for_its_buffers_costs_only_itself(kind: str):
    """GPU memory ran out: that request is refused, what it took is given back, the tier goes on."""
    real = hanging(kind, 5)
    device = Broken(real)
    async with over(lambda: device, 8) as store:
        owner = Owner(store, real)
        engine = await owner.open()
        device.room = 2
        keys = tokens(*range(PAGES))
        with pytest.raises(KvtierError, match="out of memory"):
            await owner.put(keys, [0, 1, 2, 3])
        assert device.room == 2
        assert store.parts.vram.state == "ready"
        device.room = 4
        again = await engine.reserve(keys)
        await engine.call(wire.Store(owner.region, 0, rows([0, 1, 2, 3]), reservation=again.reservation))
        assert (await engine.call(wire.Commit(again.reservation, 0, PAGES))).published == PAGES
        await engine.open(msgspec.structs.replace(PAGE, model="another"))
        assert (await owner.put(keys, [0, 1, 2, 3])).published == PAGES  # by the same buffers
        engine.leave()


# -- a driver whose calls do not come back -----------------------------------------------------------------------------


async def test_a_copy_that_never_returns_is_given_up_and_the_store_lives(kind: str):
    """The thread hangs in the driver: the tier is sick, slots it may write are nobody's, host serves."""
    device = Broken(maker(kind)())
    try:
        async with over(lambda: device, 16) as store:
            engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
            kept, lost = tokens(*range(4)), tokens(*range(50, 54))
            assert await engine.put(kept) == 4  # in host, too
            reserved = await written(engine, lost)
            vram = store.parts.vram
            vram.carrier.checksums = told(lost)
            device.gate.clear()
            hasten(store)
            assert (await engine.call(wire.Commit(reserved.reservation, 0, 4))).published == 4
            await until(lambda: vram.state == "sick")
            await vram.close()
            assert "did not return" in store.report.stat(wire.Stat()).data["tiers"]["device"]["sick"]
            (pool,) = store.parts.host.pools
            assert pool.counts()[0][SlotState.QUARANTINED] == 4
            assert await engine.get(kept) == await other.get(kept) == 4
            assert (await engine.match(lost)).pages == 0
            assert await engine.put(lost) == 4
            assert store.parts.check() == []
            for each in (engine, other):
                each.leave()
        assert vram.carrier._thread.is_alive()
    finally:
        device.gate.set()


@pytest.mark.parametrize("where", ["begin", "end"])
async def test_whoever_waits_for_a_driver_that_hangs_is_let_go_once(where: str, kind: str):
    """In `begin` or `end`: Stuck for what flew, io for what had not begun, also cancelled; it is told once."""
    carrier, told_sick = Carrier(maker(kind), 4096, deadline_s=0.05), []
    gate, inside = threading.Event(), threading.Event()
    carrier.on_sick = lambda: told_sick.append(carrier.sick)

    def hangs(*_: Any) -> None:
        inside.set()
        gate.wait()

    def nothing(*_: Any) -> None:
        pass

    begin, end = (hangs, nothing) if where == "begin" else (nothing, hangs)
    try:
        flying = asyncio.ensure_future(carrier.do(begin, end, Urgency.LOAD))
        await until(inside.is_set)
        cancelled, queued = [asyncio.ensure_future(carrier.do(nothing, nothing, Urgency.LOAD)) for _ in range(2)]
        await asyncio.sleep(0)
        cancelled.cancel()
        said = await asyncio.wait_for(asyncio.gather(flying, cancelled, queued, return_exceptions=True), 20)
    finally:
        gate.set()
    assert [type(each) for each in said] == [Stuck, asyncio.CancelledError, KvtierError]
    until_sync(lambda: not carrier._thread.is_alive())
    assert told_sick == [carrier.sick]
    assert "did not return" in carrier.sick
    carrier.close()


# -- what is waited for goes first -------------------------------------------------------------------------------------


async def test_loads_that_are_waited_for_overtake_what_moves_in_the_background(kind: str):
    """Twenty background moves wait for the device when loads come: they are begun next, and on the urgent stream."""
    order: list[tuple[int, bool]] = []
    gate, inside = threading.Event(), threading.Event()

    def noting() -> Any:
        device = maker(kind)()
        copies, stream, urgent = device.copies, device.stream, []

        def streams(**more: Any) -> Any:
            made = stream(**more)
            urgent.extend([made] * more.get("urgent", False))
            return made

        def noted(targets: Any, sources: Any, sizes: Any, where: Any, *more: Any) -> None:
            order.append((int(sizes[0]), any(where is one for one in urgent)))
            inside.set()
            gate.wait(20)
            copies(targets, sources, sizes, where, *more)

        device.copies, device.stream = noted, streams
        return device

    carrier = Carrier(noting, 1 << 16)
    try:
        here = np.zeros(4096, np.uint8)

        def move(size: int, urgency: Urgency) -> Any:
            pair = [Span(here.ctypes.data, size)], [Span(carrier.base + size, size)]
            return asyncio.ensure_future(carrier.copy([pair], urgency))

        moving = [move(1, Urgency.BACKGROUND)]
        await until(inside.is_set)
        moving += [move(size, Urgency.BACKGROUND) for size in range(2, 22)]
        await asyncio.sleep(0)
        moving += [move(100, Urgency.LOAD), move(101, Urgency.ENGINE), move(102, Urgency.LOAD)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(*moving), 20)
    finally:
        gate.set()
        carrier.close()
    assert order == [
        (1, False), *((size, True) for size in (100, 101, 102)), *((size, False) for size in range(2, 22))
    ]  # fmt: skip


async def test_an_end_that_fails_leaves_nobody_waiting(kind: str):
    """The device's error while a result is fetched is the word for who waits for it, too."""

    def fails(_carrier: Carrier) -> None:
        raise KvtierError(Code.IO, "the link is down")

    carrier = Carrier(maker(kind), 4096)
    with pytest.raises(Stuck, match="link is down"):
        await asyncio.wait_for(carrier.do(lambda *_: None, fails, Urgency.LOAD), 20)
    carrier.close()


async def test_a_region_that_is_not_done_is_not_waited_for_for_ever(kind: str):
    """Its shuttle's work hangs: letting go of it ends in bounded time, and its memory stays mapped."""
    device = hanging(kind, 7)
    async with over(lambda: device, 8) as store:
        owner = Owner(store, device)
        engine = await owner.open()
        await owner.put(KEYS, [0, 1, 2, 3])
        (region,) = engine.process.instance.kv.values()
        (shuttle,) = region.shuttles.values()
        device.stuck = True
        with pytest.raises(KvtierError, match="did not end"):
            shuttle.close(0.01)
        assert shuttle.sick
        device.stuck = False
        engine.leave()
