"""The scrub: rot in host or on disk is found before an engine asks, and repaired where another tier has the bytes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from engines import FULL, STATE, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.metrics import METRICS
from kvtier.store import Store, scrub
from kvtier.store.scrub import Pace, Place
from kvtier.types import Tier
from storekit import drop_host, memfd, quiet, rows, storing, until

KEYS = tokens(*range(1, 9))
FAST = Pace(1e9, 0.0)


async def filled(store: Store) -> Engine:
    """An engine whose path of eight pages is in host and durable on disk."""
    engine = Engine(store)
    await engine.open(spec())
    await engine.put(KEYS)
    await engine.call(wire.Flush())
    return engine


async def sweep(store: Store) -> None:
    """One whole round."""
    async for batch in store.scrub.batches():
        await store.scrub.check(batch)


def rot_host(engine: Engine, page: int) -> None:
    """Flip a bit of a host copy behind the daemon's back."""
    cache = engine.store.parts.caches[engine.opened.cache]
    node, _ = cache.radix.deepest(KEYS)
    handle = cache.gather(node, 0, page, 1, Tier.HOST)[0]
    cache.views(0, handle)[0][7] ^= 1


def rot_disk(folder: Path, page: int) -> None:
    """Flip a bit of a page's bytes in the extent file."""
    flip(folder, content(KEYS[: (page + 1) * 8], 0, 4000).tobytes())


def flip(folder: Path, needle: bytes) -> None:
    """Flip a bit of these bytes wherever a file has them."""
    extents = next(f for f in folder.rglob("*") if f.is_file() and needle in f.read_bytes())
    at = extents.read_bytes().index(needle) + 99
    with extents.open("r+b") as file:
        file.seek(at)
        file.write(bytes([needle[99] ^ 1]))


async def test_a_sound_store_scrubs_clean(tmp_path: Path) -> None:
    """Every copy in both tiers is read, and nothing changes."""
    async with storing(tmp_path) as store:
        engine = await filled(store)
        await sweep(store)
        assert store.parts.counts["scrubbed_bytes"] == 2 * 8 * 4000
        assert await engine.get(KEYS) == 8
        engine.leave()
        assert idle(store) == []


async def test_rot_in_host_is_dropped_and_served_from_disk(tmp_path: Path) -> None:
    """The path stays whole: disk has the right bytes."""
    async with storing(tmp_path) as store:
        engine = await filled(store)
        rot_host(engine, 3)
        await sweep(store)
        assert store.parts.counts["host_checksum"] == 1
        assert await engine.get(KEYS) == 8
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_rot_in_host_that_somebody_reads_is_put_right_where_it_is(tmp_path: Path) -> None:
    """A leased slot is never given away, but nobody is to be given wrong bytes for as long as somebody reads them."""
    async with storing(tmp_path) as store:
        engine = await filled(store)
        lease = await engine.call(wire.Acquire((await engine.match(KEYS)).handle))
        rot_host(engine, 3)
        await sweep(store)
        await until(lambda: not store.parts.loads.mending)
        engine.verify(KEYS, lease.items[0])
        assert await engine.get(KEYS) == 8
        await engine.call(wire.Release(lease.lease))
        await sweep(store)
        assert store.parts.counts["host_checksum"] == store.parts.counts["host_mended"] == 1
        assert store.parts.host.pools[0].used(0) == 8
        engine.leave()
        await quiet(store)
        assert idle(store) == []


@pytest.mark.parametrize("disk", [False, True], ids=["no-disk", "rotten-disk"])
async def test_rot_in_host_that_somebody_reads_and_no_tier_has_right_is_given_to_nobody_else(
    tmp_path: Path, *, disk: bool
) -> None:
    """Whoever holds it keeps its slots; the next request does not find it."""
    async with storing(tmp_path if disk else None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(KEYS)
        if disk:
            await engine.call(wire.Flush())
            rot_disk(tmp_path, 3)
        lease = await engine.call(wire.Acquire((await engine.match(KEYS)).handle))
        rot_host(engine, 3)
        async for batch in store.scrub.batches((Tier.HOST,)):
            await store.scrub.check(batch)
        await until(lambda: not store.parts.loads.mending)
        assert (await engine.match(KEYS)).pages == 3
        assert store.parts.host.pools[0].used(0) == 8
        await engine.call(wire.Release(lease.lease))
        assert store.parts.host.pools[0].used(0) == 3
        assert await engine.get(KEYS) == 3
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_load_that_finds_rot_in_what_its_own_lease_holds_is_right_the_next_time(tmp_path: Path) -> None:
    """Rows of an engine's own memory are copied under its lease, and under that alone."""
    fd, memory = memfd(8, 4096, sealed=True)
    async with storing(tmp_path) as store:
        engine = await filled(store)
        register = wire.Register("engine", "cpu", 0, 4096, 8)
        region = store.register(register, fd, engine.process.peer).region
        lease = await engine.call(wire.Acquire((await engine.match(KEYS)).handle))
        rot_host(engine, 3)
        load = wire.Load(region, 0, rows(*range(8)), lease=lease.lease)
        assert (await engine.call(load)).done == b"\1\1\1\0\1\1\1\1"
        await until(lambda: not store.parts.loads.mending)
        assert (await engine.call(load)).done == b"\1" * 8
        assert np.array_equal(memory[3, :4000], content(KEYS[:32], 0, 4000))
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    os.close(fd)


async def test_rot_on_disk_is_written_again_from_host(tmp_path: Path) -> None:
    """After the sweep a restart serves the whole path."""
    async with storing(tmp_path) as store:
        engine = await filled(store)
        rot_disk(tmp_path, 4)
        await sweep(store)
        assert store.parts.counts["load_checksum"] == 1
        (lost,) = [shown for shown in METRICS if shown.name == "kvtier_lost_copies"]
        assert lost.read(store.report.metrics(wire.Metrics()).data) == {"disk_checksum": 1}
        await engine.call(wire.Flush())
        engine.leave()
        assert idle(store) == []
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert await engine.get(KEYS) == 8


async def test_rot_without_another_copy_is_a_miss_from_there_on(tmp_path: Path) -> None:
    """What depends on the lost page goes with it; what is before stays."""
    async with storing(tmp_path) as store:
        engine = await filled(store)
        drop_host(store)
        rot_disk(tmp_path, 5)
        await sweep(store)
        assert (await engine.match(KEYS)).pages == 5
        assert await engine.get(KEYS) == 5
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_copy_that_two_readers_find_rotten_is_lost_once(tmp_path: Path) -> None:
    """The second one must not count it again: the books would be wrong for good."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, STATE)))
        await engine.put(KEYS, wants=(wire.Want(1, np.array([3, 7], "<i4").tobytes()),))
        await engine.call(wire.Flush())
        cache = store.parts.caches[engine.opened.cache]
        flip(tmp_path, content(KEYS[: 4 * 8], 1, cache.item_bytes[1]).tobytes()[:4096])
        places = [place async for batch in store.scrub.batches((Tier.DISK,)) for place in batch]
        twice = [place for place in places if (place.group, place.page) == (1, 3)]
        await asyncio.gather(store.scrub.check(twice), store.scrub.check(twice))
        assert store.parts.counts["load_checksum"] == 1
        assert store.parts.check() == []
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_copy_that_cannot_be_checked_does_not_end_the_scrub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round goes on with the next one, and others follow."""
    async with storing(tmp_path, scrub=FAST) as store:
        check, failed = store.scrub.check, []

        async def once(batch: list[Place]) -> tuple[int, int]:
            if not failed:
                failed.append(batch)
                raise RuntimeError("injected")
            return await check(batch)

        monkeypatch.setattr(store.scrub, "check", once)
        monkeypatch.setattr(scrub, "REST_S", 0.01)
        await filled(store)
        await until(lambda: failed and store.parts.counts["scrubbed_bytes"], 30.0)


async def test_it_runs_by_itself(tmp_path: Path) -> None:
    """A started store scrubs until it is drained."""
    async with storing(tmp_path, scrub=FAST) as store:
        await filled(store)
        rot_disk(tmp_path, 2)
        async with asyncio.timeout(30):
            while not store.parts.counts["load_checksum"]:
                await asyncio.sleep(0.01)


async def test_a_small_cache_is_not_read_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an idle daemon reads again takes processor time and bandwidth from the engine beside it."""
    monkeypatch.setattr(scrub, "REST_S", 0.0)
    monkeypatch.setattr(scrub, "BATCH_BYTES", 4000)
    async with storing(tmp_path, scrub=Pace(1e9, 1.6)) as store:
        await filled(store)
        before = store.parts.counts["scrubbed_bytes"]
        await asyncio.sleep(0.4)
        assert 0 < store.parts.counts["scrubbed_bytes"] - before <= 8 * 4000  # of 16 copies in 1.6 s


async def test_small_copies_are_read_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job of the mover costs the loop more than reading a small item does, of a keyed cache too."""
    jobs = []
    async with storing(tmp_path) as store:
        engine = await filled(store)
        run = store.parts.mover.run

        async def counted(*args: object, **more: object) -> object:
            jobs.append(args)
            return await run(*args, **more)

        monkeypatch.setattr(store.parts.mover, "run", counted)
        await sweep(store)
        assert store.parts.counts["scrubbed_bytes"] == 2 * 8 * 4000
        assert len(jobs) == 2
        engine.leave()
        assert idle(store) == []
