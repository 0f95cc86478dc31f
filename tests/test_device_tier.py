"""The device tier over devices that work late, in any legal order, that hang, fail and are too small."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens, write
from gpukit import Broken, hanging
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.store import Store
from kvtier.store.shifts import Shifter
from kvtier.store.vram import DeviceMemory
from kvtier.tiers.vram import DEVICE_ARENA
from kvtier.types import Code, Kind, KvtierError, Tier
from lazydevice import LazyDevice, Site
from storekit import KINDS, MIB, maker, quiet, storing, until
from storekit import Failing as FailingDisk

PAGE = spec((GroupSpec(Kind.FULL, 2, 2, 1000),))
SLOT = 4096
SEEDS = [pytest.param(range(5), id="5"), pytest.param(range(5, 50), id="50", marks=pytest.mark.slow)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The CPU, and the same tests on a GPU."""
    return request.param


@pytest.fixture
def device(kind: str) -> Any:
    """What makes a device of that kind."""
    return maker(kind)


@asynccontextmanager
async def over(device: Any, slots: int, path: Path | None = None, **more: Any) -> AsyncIterator[Store]:
    """A store over a device of so many slots."""
    memory = DeviceMemory(device, slots * SLOT, slab_bytes=4 * SLOT, deadline_s=30.0)
    async with storing(path, device=memory, **{"cap": 1.0} | more) as store:
        yield store


def hasten(store: Store) -> None:
    """Nothing that the device does takes long from now on: what does is stuck."""
    assert store.parts.vram is not None
    store.parts.vram.carrier._deadline_s = 0.2


async def joined(store: Store, name: str = "engine", *, mapped: bool = True, pid: int = 1) -> Engine:
    """An engine that has the cache open, and maps the device or does not."""
    engine = Engine(store, name, pid=pid)
    await engine.open(PAGE)
    engine.mapped = engine.mapped and mapped
    return engine


async def written(engine: Engine, keys: bytes) -> wire.Reserved:
    """Slots that an engine has filled and not committed; from now on it does not ask twice."""
    engine.patient = False
    reserved = await engine.reserve(keys)
    engine.write(keys, reserved)
    return reserved


# -- fences ------------------------------------------------------------------------------------------------------


async def story(path: Path, seed: int, without: Site | None = None) -> tuple[list[str], set[Site]]:
    """Engines compute and read over a few slots, all at once; what came out wrong, and who waited."""
    devices: list[LazyDevice] = []

    def make() -> LazyDevice:
        devices.append(LazyDevice(seed))
        return devices[0]

    pick, wrong = random.Random(seed), []
    prompts = [tokens(n, *range(10 * n, 10 * n + 3)) for n in range(8)]
    async with over(make, 12, path / f"{seed} {without}", host=24 * SLOT) as store:
        engines = [await joined(store, f"e{n}", pid=n + 1) for n in range(3)]
        for engine in engines:
            engine.patient = False
        devices[0].without = without

        async def live(engine: Engine, mine: list[bytes]) -> None:
            for keys in mine:
                await engine.put(keys, wait_ms=5000)
                for again in pick.sample(prompts, 2):
                    try:
                        await engine.get(again)
                    except AssertionError as exc:
                        wrong.append(str(exc))

        await asyncio.gather(*(live(engine, prompts[n::3]) for n, engine in enumerate(engines)))
        await engines[0].still()
        reader = await joined(store, "reader", mapped=False, pid=9)
        for keys in prompts:
            try:
                if await reader.get(keys) != 4:
                    wrong.append("a page was lost")
            except AssertionError as exc:
                wrong.append(str(exc))
        wrong += [name for name in ("device_checksum", "host_checksum") if store.parts.counts[name]]
        for engine in (*engines, reader):
            engine.leave()
        await quiet(store)
        wrong += idle(store)
    return wrong, devices[0].sites


@pytest.mark.parametrize("seeds", SEEDS)
async def test_no_engine_reads_what_is_not_there_yet_in_any_legal_order(tmp_path: Path, seeds: range):
    """Copies up and down are published when the device said so, and slots reused after: right in 50 random orders."""
    assert not {seed: wrong for seed in seeds if (wrong := (await story(tmp_path, seed))[0])}


async def test_every_wait_of_the_tier_is_needed(tmp_path: Path):
    """Without any one wait for an event some order goes wrong."""
    sites = {where for seed in range(2) for where in (await story(tmp_path, seed))[1] if where[0] == "carrier.py"}
    assert sites
    for where in sites:
        assert any([(await story(tmp_path, seed, where))[0] for seed in range(3)]), where


@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_a_page_that_moves_is_held_until_the_device_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without the lease of a move its slots are given away under the device's hands, which some order shows."""

    def careless(self: Shifter, cache: Any, node: Any, pages: int, work: Any) -> Any:
        del cache, node
        self.pages += pages

        async def go() -> None:
            try:
                await work
            finally:
                self.pages -= pages
                self.moved.set()

        task = asyncio.get_running_loop().create_task(go())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    monkeypatch.setattr(Shifter, "start", careless)

    async def fails(seed: int) -> bool:
        try:
            return bool((await story(tmp_path, seed))[0])
        except (AssertionError, KvtierError):
            return True

    for seed in range(2000):  # few orders show it: some hundred are tried as a rule
        if await fails(seed):
            return
    pytest.fail("no order shows it")


# -- room --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])
async def test_a_host_smaller_than_the_device_goes_on(tmp_path: Path, disk: bool, device: Any):
    """Many times both tiers pass through: every request ends, what is served is right, nothing is left held."""
    async with over(device, 32, tmp_path if disk else None, host=8 * SLOT) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        for n in range(40):
            keys = tokens(*range(5 * n, 5 * n + 5))
            assert await engine.put(keys, wait_ms=5000) == 5
            assert await engine.get(keys) == 5
            await other.get(tokens(*range(5 * (n // 2), 5 * (n // 2) + 5)))
        if disk:
            await engine.call(wire.Flush())
            for n in range(40):
                assert await engine.get(tokens(*range(5 * n, 5 * n + 5))) == 5
        assert store.parts.counts["pages_evicted_device"] + store.parts.counts["pages_demoted_device"] > 100
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_who_needs_the_device_waits_while_disk_writes_what_is_there(tmp_path: Path, device: Any):
    """Its pages cannot go before disk has them: no refusal before the deadline, and room when one is written."""
    calls = FailingDisk()
    async with over(device, 4, tmp_path, calls=calls) as store:
        engine = await joined(store)
        calls.gate.clear()
        assert await engine.put(tokens(*range(4))) == 4
        handle = (await engine.match(tokens(50))).handle
        asking = asyncio.ensure_future(engine._call(wire.Reserve(handle, 0, 1, wait_ms=20_000, device=True)))
        for _ in range(100):
            await asyncio.sleep(0)
        refused = asking.done()  # the disk stands still
        calls.gate.set()
        got = await asking
        assert (refused, got.pages, got.refused) == (False, 1, "")
        await engine._call(wire.Abort(got.reservation))
        engine.leave()


async def test_duplicates_go_first_and_cost_no_copy(device: Any):
    """A device full of pages that host has too gives them up at once; what only it has is brought down first."""
    async with over(device, 8) as store:
        engine = await joined(store)
        assert await engine.put(tokens(*range(8))) == 8  # each is copied to host as it is committed
        moved = store.parts.counts["bytes_device_to_host"]
        assert moved == 8 * 4000
        assert await engine.put(tokens(*range(100, 108))) == 8
        assert store.parts.counts["pages_evicted_device"] >= 8
        assert store.parts.counts["bytes_device_to_host"] == 2 * moved
        assert not store.parts.counts["pages_lost_unsaved"]
        assert await engine.get(tokens(*range(8))) == 8


async def test_what_only_the_device_has_is_brought_down_before_it_goes(device: Any):
    """Host forgot its copies; evicted from the device, pages are in host again, whole."""
    async with over(device, 8) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        keys = tokens(*range(8))
        assert await engine.put(keys) == 8
        pool = store.parts.host.pools[0]
        assert store.parts.space.evict(pool, [8])
        cache = next(iter(store.parts.caches.values()))
        assert cache.index.copies == [8, 0, 0, 0]
        assert not store.parts.counts["pages_lost_unsaved"]
        assert await engine.put(tokens(*range(100, 108)), wait_ms=5000) == 8
        assert await other.get(keys) == 8
        assert not store.parts.counts["pages_lost_unsaved"]


async def test_a_lookup_once_does_not_push_out_what_is_used(device: Any):
    """Where the device is full, pages used once stay in host and those used again come up."""
    async with over(device, 4) as store:
        engine, hot, once = await joined(store), tokens(*range(4)), tokens(*range(50, 54))
        assert await engine.put(hot) == 4
        engine.mapped = False
        assert await engine.put(once) == 4
        engine.mapped = True
        assert await engine.get(once) == 4
        assert [s.tier for s in (await engine.match(hot)).segments] == [Tier.DEVICE]
        for _ in range(3):
            assert await engine.get(once) == 4
        assert [s.tier for s in (await engine.match(once)).segments] == [Tier.DEVICE]


async def test_a_holder_of_device_slots_is_capped(device: Any):
    """One engine reserves no more than its share of the device; another has the rest."""
    async with over(device, 16, cap=0.5) as store:
        greedy, other = await joined(store), await joined(store, "other", pid=2)
        handle = (await greedy.match(tokens(*range(16)))).handle
        got = await greedy._call(wire.Reserve(handle, 0, 16, device=True))
        assert (got.pages, got.refused) == (8, Code.OVER_CAP)
        assert await other.put(tokens(*range(50, 56))) == 6
        assert (await other.match(tokens(*range(50, 56)))).segments == (wire.Segment(Tier.DEVICE, 6),)


@pytest.mark.parametrize("who", ["an operator", "an engine"])
async def test_who_holds_pages_in_host_keeps_nobody_from_the_device(device: Any, who: str):
    """All that the device has is pinned, or leased by an engine that maps nothing of it: its copies there go."""
    async with over(device, 16, cap=0.5) as store:
        engine, reader = await joined(store), await joined(store, "reader", mapped=False, pid=2)
        prompts = [tokens(*range(100 * n, 100 * n + 8)) for n in range(2)]
        for keys in prompts:
            assert await engine.put(keys) == 8
        if who == "an operator":
            for keys in prompts:
                await store.admin[wire.Pin](wire.Pin(wire.Prompt(tokens=keys)))
        else:
            held = [await reader.call(wire.Acquire((await reader.match(keys)).handle)) for keys in prompts]
            assert [lease.pages for lease in held] == [8, 8]
        for n in range(50, 54):
            keys = tokens(*range(100 * n, 100 * n + 4))
            assert await engine.put(keys) == 4
            assert (await engine.match(keys)).segments == (wire.Segment(Tier.DEVICE, 4),)
            assert store.parts.check() == []
        for keys in prompts:
            assert (await reader.match(keys)).segments == (wire.Segment(Tier.HOST, 8),)
            assert await engine.get(keys) == 8
        if who == "an operator":
            store.admin[wire.Unpin](wire.Unpin())
        for each in (engine, reader):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_what_is_pinned_and_only_on_the_device_is_not_lost_there(device: Any, monkeypatch: pytest.MonkeyPatch):
    """Host has no room for it yet: it stays where it is, and others go without."""
    monkeypatch.setattr("kvtier.store.shifts.ROOM_S", 0.01)
    async with over(device, 8, host=4 * MIB, cap=1.0) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        for each in (engine, other):
            each.patient = False
        full = await other.reserve(tokens(*range(1000, 2024)))
        assert full.pages == 1024
        keys = tokens(*range(8))
        assert await engine.put(keys) == 8
        await store.admin[wire.Pin](wire.Pin(wire.Prompt(tokens=keys)))
        for n in range(3):
            handle = (await engine.match(tokens(99 + n))).handle
            assert not (await engine._call(wire.Reserve(handle, 0, 1, device=True, wait_ms=50))).pages
        assert (await engine.match(keys)).segments == (wire.Segment(Tier.DEVICE, 8),)
        assert store.parts.check() == []


async def test_another_scope_has_no_part_of_the_device(device: Any):
    """The memory belongs to the scope that mapped it first: others are refused by name and served from host."""
    async with over(device, 8) as store:
        mine = await joined(store)
        theirs = Engine(store, "theirs", uid=7, pid=2)
        with pytest.raises(KvtierError, match="another trust scope"):
            await theirs.map()
        await theirs.open(PAGE)
        assert await theirs.put(tokens(1, 2)) == 2
        assert await mine.put(tokens(1, 2)) == 2
        assert [s.tier for s in (await theirs.match(tokens(1, 2))).segments] == [Tier.HOST]


async def test_engines_that_map_the_device_at_once_all_prove_it(device: Any):
    """Two first MapDevice together: one token, which both find, and who comes later."""
    async with over(device, 8) as store:
        engines = [Engine(store, f"e{n}", pid=n + 1) for n in range(3)]
        await asyncio.gather(*(engine.map() for engine in engines[:2]))
        await engines[2].map()
        assert all(engine.process.device for engine in engines)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stuck", "failing"])
async def test_a_device_that_stops_is_given_up_and_the_store_lives(how: str, kind: str):
    """No answer by the deadline, or an error: sick by name, its copies forgotten, no slot there used again."""
    device: Any = hanging(kind, 0) if how == "stuck" else Broken(maker(kind)())
    async with over(lambda: device, 16) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        kept, lost = tokens(*range(4)), tokens(*range(50, 54))
        assert await engine.put(kept) == 4  # in host, too
        reserved = await written(engine, lost)
        device.stuck = device.down = True
        hasten(store)
        with pytest.raises(KvtierError, match=r"did not move|link is down"):
            await engine.call(wire.Commit(reserved.reservation, 0, 4))
        vram = store.parts.vram
        await until(lambda: vram.state == "sick")
        await vram.close()
        report = store.report.stat(wire.Stat()).data["tiers"]["device"]
        assert report["state"] == "sick"
        assert report["sick"]
        cache = next(iter(store.parts.caches.values()))
        assert cache.index.copies[Tier.DEVICE] == 0
        assert await engine.get(kept) == await other.get(kept) == 4
        assert await engine.put(tokens(*range(80, 84))) == 4
        assert (await engine.match(lost)).pages == 0
        handle = (await engine.match(tokens(7))).handle
        there = await engine._call(wire.Reserve(handle, 0, 1, device=True, running=True))
        assert there.refused == Code.NO_SPACE, "nobody computes in host"
        here = await engine._call(wire.Reserve(handle, 0, 1, device=True))
        arena = int.from_bytes(here.items[0].offsets[:8], "little") >> wire.ARENA_SHIFT
        assert (here.pages, arena < DEVICE_ARENA) == (1, True), "who had mapped it stores in host"
        await engine._call(wire.Abort(here.reservation))
        with pytest.raises(KvtierError, match="no device tier here"):
            await other.map()
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert store.parts.check() == []
    device.stuck = device.down = False


async def test_slots_that_a_stuck_device_may_still_write_are_nobodys(kind: str):
    """A copy to host that is not done by its deadline: the slots stay quarantined, whatever comes later."""
    device = hanging(kind, 3)
    async with over(lambda: device, 8) as store:
        engine = await joined(store)
        keys = tokens(*range(4))
        engine.patient = False
        reserved = await engine.reserve(keys)
        engine.write(keys, reserved)
        vram = store.parts.vram
        sums, vram.carrier.checksums = vram.carrier.checksums, told(keys)
        device.stuck = True
        hasten(store)
        assert (await engine.call(wire.Commit(reserved.reservation, 0, 4))).published == 4
        vram.carrier.checksums = sums
        await until(lambda: vram.state == "sick")
        await vram.close()
        (pool,) = store.parts.host.pools
        states = {state.name: n for state, n in pool.counts()[0].items() if n and state.name != "FREE"}
        assert states == {"QUARANTINED": 4}
        for n in range(20):
            assert await engine.put(tokens(*range(10 * n + 200, 10 * n + 210))) == 10
        assert pool.counts()[0][7] == 4
        assert store.parts.check() == []
    device.stuck = False


def fails(store: Store) -> None:
    """The device is sick, of which nobody was told yet."""
    store.parts.vram.carrier.sick = "it fell off the bus"


async def test_no_slot_of_a_device_that_fails_meanwhile_is_given_out(monkeypatch: pytest.MonkeyPatch, device: Any):
    """It fails as room is made there: who asked is refused, and the slab that was being emptied stays closed."""
    async with over(device, 4) as store:
        engine = await joined(store)
        engine.patient = False
        assert await engine.put(tokens(*range(4))) == 4
        await engine.still()
        vram, (pool,) = store.parts.vram, store.parts.vram.tier.pools
        handle = (await engine.match(tokens(50))).handle
        take = vram.space.take

        async def emptied(*args: Any) -> Any:
            got = await take(*args)
            slab = next(s for s in pool.slabs if s.lo <= got[0][0] < s.hi)
            pool.close_slab(slab)  # as for another pool that has less
            fails(store)
            vram._fall()
            pool.reopen_slab(slab)
            return got

        monkeypatch.setattr(vram.space, "take", emptied)
        got = await engine._call(wire.Reserve(handle, 0, 1, device=True))
        assert (got.pages, got.refused) == (0, Code.NO_SPACE)
        assert not pool.alloc(0, 1)
        await vram.close()
        engine.leave()
        assert idle(store) == []


async def test_what_is_on_a_failed_device_is_stored_again_and_hides_nothing(tmp_path: Path, device: Any):
    """It fails under a reservation: a commit there serves nothing, and what disk has too is read from disk at once."""
    async with over(device, 16, tmp_path) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        kept, lost = tokens(*range(4)), tokens(*range(50, 54))
        assert await engine.put(kept) == 4
        await engine.call(wire.Flush())
        assert store.parts.space.evict(store.parts.host.pools[0], [4])
        engine.patient = False
        reserved = await engine.reserve(lost)
        fails(store)
        assert await other.get(kept) == 4
        vram = store.parts.vram
        vram._fall()
        sums = (wire.Sums(0, np.arange(1, 5, dtype="<u8").tobytes()),)
        assert (await engine.call(wire.Commit(reserved.reservation, 0, 4, sums))).published == 0
        await vram.close()
        assert next(iter(store.parts.caches.values())).index.copies[Tier.DEVICE] == 0
        assert (await engine.match(lost)).pages == 0
        engine.mapped = False
        assert await engine.put(lost) == 4
        assert await other.get(lost) == 4
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


@pytest.mark.parametrize("other", [WINDOW, STATE])
async def test_a_failed_device_costs_no_page_whose_needed_items_are_elsewhere(
    tmp_path: Path, other: GroupSpec, device: Any
):
    """It alone had a window's or a state's item: what disk has of the path goes on being served, as far as it can."""
    wants = (wire.Want(1, np.array([1, 5], "<i4").tobytes()),) if other is STATE else ()
    async with over(device, 64, tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, other)))
        keys = tokens(*range(6))
        assert await engine.put(keys, wants=wants) == 6
        await engine.call(wire.Flush())
        assert store.parts.space.evict(store.parts.host.pools[0], [6, 6])
        cache = next(iter(store.parts.caches.values()))
        index = cache.index
        (node,) = (node for node in index.walk() if node.live)
        assert index.get(node, 5, Tier.DEVICE, 1) != -1
        cache.release([index.forget(node, 5, Tier.DISK, 1)], store.parts.disk)
        vram = store.parts.vram
        fails(store)
        vram._fall()
        await vram.close()
        assert index.copies[Tier.DEVICE] == 0
        assert node.live == 6
        assert not node.dead
        assert await engine.get(keys) == (2 if other is STATE else 5)
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_rotten_copy_on_the_device_hides_no_good_one_on_disk(tmp_path: Path, device: Any):
    """The device's copy is leased, so it stays; who reads from host gets the page from disk in the same request."""
    async with over(device, 16, tmp_path) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        keys = tokens(*range(4))
        assert await engine.put(keys) == 4
        await engine.call(wire.Flush())
        assert store.parts.space.evict(store.parts.host.pools[0], [4])
        held = await engine.call(wire.Acquire((await engine.match(keys)).handle))
        engine.device_bytes(2 * SLOT, SLOT)[10] ^= 1
        engine.send_back()
        assert await other.get(keys) == 4
        assert store.parts.counts["device_checksum"] == 1
        await engine.call(wire.Release(held.lease))
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_load_that_fails_on_the_device_leaves_no_slot_behind(tmp_path: Path, kind: str):
    """Some pages come from the device, which fails, and some from disk: no host slot stays taken for either."""
    device = Broken(maker(kind)())
    async with over(lambda: device, 8, tmp_path) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        keys = tokens(*range(8))
        assert await engine.put(keys) == 8
        await engine.call(wire.Flush())
        vram, (pool,) = store.parts.vram, store.parts.host.pools
        assert vram.space.evict(vram.tier.pools[0], [4])
        assert store.parts.space.evict(pool, [8])
        device.down = True
        await other.get(keys)
        await until(lambda: vram.state == "sick")
        await vram.close()
        assert await other.get(keys) == 8
        for each in (engine, other):
            each.leave()
        await quiet(store)
        states = {state.name for state, n in pool.counts()[0].items() if n}
        assert states <= {"FREE", "CACHED", "QUARANTINED"}


def told(keys: bytes) -> Any:
    """Checksums of pages as their engine knows them, without the device."""
    from kvtier.mover import digest

    async def sums(items: Any, _urgency: Any) -> list[int]:
        return [digest([content(keys[: (n + 1) * 8], 0, 4000)]) for n in range(len(items))]

    return sums


async def test_a_device_without_room_is_no_tier_and_says_why(kind: str, device: Any):
    """Out of memory, or a driver that fails in its own words: absent by name, everything in host."""

    def full() -> Any:
        made = device()
        if kind == "cpu":
            made.share = lambda size: made.take(1 << 60)
            made.take = refused
        else:
            share, made.share = made.share, lambda _: share(1 << 50)  # more than any GPU has
        return made

    def refused(size: int) -> Any:
        raise KvtierError(Code.NO_SPACE, f"taking {size} bytes of GPU memory: out of memory")

    def broken() -> Any:
        raise RuntimeError("the driver is of another age")

    for make, why in ((full, "out of memory"), (broken, "another age")):
        async with over(make, 8) as store:
            assert store.parts.vram.state == "absent"
            assert why in store.report.stat(wire.Stat()).data["tiers"]["device"]["sick"]
            engine = Engine(store)
            with pytest.raises(KvtierError, match=why):
                await engine.map()


async def test_rot_on_the_device_is_found_and_never_served(device: Any):
    """A bit that flips in device memory: whoever reads it from host gets the right bytes or a miss, counted."""
    async with over(device, 8) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        keys = tokens(*range(4))
        assert await engine.put(keys) == 4
        assert store.parts.space.evict(store.parts.host.pools[0], [4])
        engine.device_bytes(2 * SLOT, SLOT)[10] ^= 1
        engine.send_back()
        assert await other.get(keys) == 2
        assert store.parts.counts["device_checksum"] >= 1
        assert (await engine.match(keys)).pages == 2
        engine.leave()
        other.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_killed_engine_gives_its_device_slots_back(device: Any):
    """What it reserved and leased there returns when its process is gone, not before."""
    async with over(device, 8) as store:
        engine, other = await joined(store), await joined(store, "other", pid=2)
        await engine.reserve(tokens(*range(4)))
        engine.store.leave(engine.process, clean=False)
        (pool,) = store.parts.vram.tier.pools
        assert pool.used(0) == 4
        store.gone(engine.process)
        assert pool.used(0) == 0
        assert await other.put(tokens(*range(8))) == 8
        other.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_flush_brings_what_only_the_device_has_to_disk(tmp_path: Path, device: Any):
    """Committed on the device, durable after a flush, served after a restart."""
    keys = tokens(*range(6))
    async with over(device, 8, tmp_path) as store:
        engine = await joined(store)
        engine.patient = False
        assert await engine.put(keys) == 6
        await engine.call(wire.Flush())
        cache = next(iter(store.parts.caches.values()))
        assert cache.index.copies[Tier.DISK] == 6
        assert any(isinstance(event, wire.Durable) and event.pages == 6 for event in engine.events)
    async with storing(tmp_path, host=MIB) as store:
        engine = await joined(store)
        assert await engine.get(keys) == 6


async def test_a_flush_is_not_refused_for_what_is_stored_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any
):
    """It answers for what was there when it began: pages committed on the device as it waits do not fail it."""
    async with over(device, 16, tmp_path) as store:
        engine = await joined(store)
        engine.patient = False
        assert await engine.put(tokens(*range(4))) == 4
        demote = store.parts.vram.demote
        settled, later = demote.settled, []

        async def meanwhile() -> None:
            await settled()
            if not later:
                later.append(await engine.put(tokens(*range(50, 54))))

        monkeypatch.setattr(demote, "settled", meanwhile)
        await engine._call(wire.Flush())
        assert later == [4]
        engine.leave()


async def test_a_flush_does_not_forget_what_was_joined_to_a_new_page_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any
):
    """What only the device had when it began has no room in host: it says so, also where its nodes are one by then."""
    async with over(device, 8, tmp_path, host=0) as store:
        engine = await joined(store)
        engine.patient = False
        assert await engine.put(tokens(*range(2))) == 2
        assert await engine.put(tokens(*range(4)), start=2) == 2
        demote, index = store.parts.vram.demote, next(iter(store.parts.caches.values())).radix
        settled, later = demote.settled, []

        async def meanwhile() -> None:
            await settled()
            if not later:
                await engine.put(tokens(*range(6)), start=4)
                later.append(index.join(next(n for n in index.walk() if not n.children)))

        monkeypatch.setattr(demote, "settled", meanwhile)
        with pytest.raises(KvtierError, match="no room in host"):
            await engine._call(wire.Flush())
        assert later == [2]
        engine.leave()


async def test_host_pages_after_device_pages_become_durable_by_themselves(tmp_path: Path, device: Any):
    """The device had room for the first pages only: those in host are on disk too, without a flush, and are told."""
    async with over(device, 64, tmp_path) as store:
        engine = await joined(store)
        engine.patient = False
        handle = (await engine.match(tokens(*range(14)))).handle
        given = [
            await engine._call(wire.Reserve(handle, first, pages, device=first < 10))
            for first, pages in ((0, 10), (10, 2), (12, 2))
        ]
        for one, first in zip(given, (0, 10, 12), strict=True):
            await engine._call(wire.Commit(one.reservation, first, one.pages))
        cache = next(iter(store.parts.caches.values()))
        await until(lambda: cache.index.copies[Tier.DISK] == 14)
        await until(lambda: sum(isinstance(event, wire.Durable) for event in engine.events) == len(given))
        told = {event.reservation: event.pages for event in engine.events if isinstance(event, wire.Durable)}
        assert told == {one.reservation: one.pages for one in given}
        engine.leave()


async def test_the_device_sums_what_it_can_and_fetches_the_rest(kind: str, device: Any):
    """Items of any size and of several slots have the host's checksums."""
    from kvtier.mover import Urgency, digest
    from kvtier.tiers.pool import Span

    memory = DeviceMemory(device, MIB)
    try:
        base = memory.carrier.shared.memory.address
        data = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
        if kind == "cpu":
            memory.carrier.shared.memory.data[:MIB] = data
        else:
            write(base, data)
        for size in (8, 100, 248, 4000, 5001):
            got = await memory.carrier.checksums([[Span(base + n * 8192, size)] for n in range(3)], Urgency.ENGINE)
            assert got == [digest([data[n * 8192 : n * 8192 + size]]) for n in range(3)]
        spans = [Span(base + 4096, 4096), Span(base, 100)]
        got = await memory.carrier.checksums([spans], Urgency.BACKGROUND)
        assert got == [digest([data[4096:8192], data[:100]])]
    finally:
        memory.carrier.close()


async def test_a_device_without_a_host_tier_is_a_cache_of_its_own(device: Any):
    """Host of size 0: engines compute and read on the device; what it has no room for goes, counted; nothing hangs."""
    async with over(device, 8, host=0) as store:
        engine, other = await joined(store), await joined(store, "other", mapped=False, pid=2)
        for n in range(4):
            keys = tokens(*range(10 * n, 10 * n + 6))
            assert await engine.put(keys) == 6
            assert await engine.get(keys) == 6
            assert await other.get(keys) == 0
        assert store.parts.counts["pages_lost_unsaved"] > 0
        with pytest.raises(KvtierError, match="no room in host"):
            await engine.call(wire.Flush())
        for each in (engine, other):
            each.leave()
        await quiet(store)
        assert idle(store) == []
