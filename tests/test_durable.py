"""What is reported durable is served again after a restart, and nothing else is reported."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from engines import FULL, STATE, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec
from kvtier.policy.quota import Rule
from kvtier.store import Store
from kvtier.store.diskroom import RESERVE_PARTS
from kvtier.store.upkeep import flushed
from kvtier.tiers import health
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import MIB, Failing, drop_host, quiet, storing, until

GROUPS = (FULL, STATE)


def state_at(*pages: int) -> tuple[wire.Want, ...]:
    """State points at these pages."""
    return (wire.Want(1, np.array(pages, "<i4").tobytes()),)


async def test_a_page_is_durable_only_with_all_pages_before_it(tmp_path: Path) -> None:
    """Parents that the disk refused while it was sick are written with, and before, their first durable child."""
    keys = tokens(1, 2, 3, 4)
    disk = Failing()
    crashed = tmp_path / "crashed"
    async with storing(tmp_path / "disk", calls=disk) as store:
        engine = Engine(store)
        await engine.open(spec())
        disk.broken = True
        assert await engine.put(keys[:16]) == 2
        await until(lambda: not store.parts.persist.pending)
        assert engine.events == []
        disk.broken = False
        await until(lambda: not store.parts.disk.sick)
        assert await engine.put(keys, start=2) == 2
        await until(lambda: engine.events)
        shutil.copytree(tmp_path / "disk", crashed)
    async with storing(crashed) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert await engine.get(keys) == 4


async def test_thousands_of_pages_that_a_sick_disk_refused_hold_the_loop_no_longer_than_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next page of a long prompt brings all of them, what is before a branch of it too, at one look."""
    keys, branch = tokens(*range(1, 3001)), tokens(*range(1, 2001), *range(5001, 5003))
    disk = Failing()
    async with storing(tmp_path, host=64 * MIB, disk=64 * MIB, calls=disk) as store:
        engine = Engine(store)
        await engine.open(spec())
        disk.broken = True
        assert await engine.put(keys[: 2999 * 8]) == 2999
        await until(lambda: not store.parts.persist.pending)
        disk.broken = False
        await until(lambda: not store.parts.disk.sick)
        persist, coming, asked = store.parts.persist, store.parts.persist.coming, []
        monkeypatch.setattr(persist, "coming", lambda *where: asked.append(where) or coming(*where))
        assert await engine.put(keys, start=2999) == 1
        assert await engine.put(branch, start=2000) == 2
        offered = [(entry.begin, entry.end) for entry in persist.pending]
        assert len(asked) <= 8
        assert offered == [(0, 3000), (2000, 2002)]
        await engine.call(wire.Flush())
        assert store.parts.check() == []
        engine.leave()
    async with storing(tmp_path, host=64 * MIB, disk=64 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert (await engine.match(keys)).pages == 3000
        assert (await engine.match(branch)).pages == 2002


async def test_pages_after_a_stored_prefix_survive_a_restart(tmp_path: Path) -> None:
    """A reservation that begins with pages on disk already writes a run of the others alone."""
    keys = tokens(*range(1, 101))
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        for pages in (4, 6, 50, 100):
            assert await engine.put(keys[: pages * 8]) == pages
            await engine.call(wire.Flush())
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert await engine.get(keys) == 100
        assert store.parts.counts["orphan_pages"] == 0


async def test_state_points_added_to_stored_pages_survive_a_restart(tmp_path: Path) -> None:
    """A run may hold other groups' items of pages that an earlier run has, with gaps between them."""
    keys = tokens(*range(1, 21))
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(GROUPS))
        await engine.put(keys, wants=state_at(19))
        await engine.call(wire.Flush())
        await engine.put(keys, wants=state_at(3, 11))
        await engine.put(keys[:56] + tokens(77), wants=state_at(5, 7))
        await engine.call(wire.Flush())
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(GROUPS))
        for pages, served in ((20, 20), (19, 12), (11, 6), (5, 4), (3, 0)):
            assert await engine.get(keys[: pages * 8]) == served
        assert await engine.get(keys[:56] + tokens(77)) == 8
        assert store.parts.counts["orphan_pages"] == 0
        engine.leave()
        assert idle(store) == []


async def test_a_state_point_added_while_its_page_is_being_written_is_durable_too(tmp_path: Path) -> None:
    """Two writes of one page in flight: each item ends in one of them, and flush says so."""
    keys = tokens(1, 2, 3)
    disk = Failing()
    async with storing(tmp_path, calls=disk) as store:
        a, b = Engine(store, "a", pid=1), Engine(store, "b", pid=2)
        await a.open(spec(GROUPS))
        await b.open(spec(GROUPS))
        disk.gate.clear()
        await a.put(keys)
        await b.put(keys, wants=state_at(2))
        disk.gate.set()
        await b.call(wire.Flush())
        drop_host(store)
        assert await a.get(keys) == 3
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(GROUPS))
        assert await engine.get(keys) == 3


async def test_a_damaged_state_point_takes_no_page_with_it(tmp_path: Path) -> None:
    """The other groups' bytes in the same run stay what they are."""
    keys = tokens(1, 2, 3, 4)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(GROUPS))
        await engine.put(keys, wants=state_at(1, 3))
        await engine.call(wire.Flush())
        drop_host(store)
        damage(tmp_path, engine, keys, group=1)
        assert await engine.get(keys) == 2
        assert await engine.put(keys, wants=state_at(3)) > 0
        assert await engine.get(keys) == 4
        assert store.parts.counts["pages_cut"] == 0
        engine.leave()
        await quiet(store)
        assert idle(store) == []


def damage(path: Path, engine: Engine, keys: bytes, group: int) -> None:
    """Flip a bit of an item on disk."""
    needle = content(keys, group, engine.opened.groups[group].item_bytes)[:4096].tobytes()
    extents = next(f for f in path.rglob("*") if f.is_file() and needle in f.read_bytes())
    raw = extents.read_bytes()
    with extents.open("r+b") as file:
        file.seek(raw.index(needle) + 123)
        file.write(bytes([needle[123] ^ 1]))


async def test_a_reset_that_is_not_durable_says_so(tmp_path: Path) -> None:
    """A crash could bring the old weights' KV back: the engine hears io, and may ask again."""
    keys = tokens(1, 2)
    disk = Failing()
    async with storing(tmp_path, calls=disk) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(keys)
        await engine.call(wire.Flush())
        catalogue = store.parts.disk._commits._catalogue
        commit, catalogue.commit = catalogue.commit, fail
        with pytest.raises(KvtierError) as caught:
            await engine.call(wire.Reset(engine.opened.cache))
        assert caught.value.code == Code.IO
        assert (await engine.match(keys)).pages == 0
        catalogue.commit = commit
        engine.opened = await engine.call(wire.Reset(engine.opened.cache))
        assert engine.opened.epoch == 1
        assert (await engine.match(keys)).pages == 0
    async with storing(tmp_path) as store:
        engine = Engine(store)
        assert (await engine.open(spec())).epoch == 1


def fail(_changes: object) -> None:
    """A catalogue on a device that takes no writes."""
    raise OSError(5, "injected")


async def test_no_open_with_an_engines_epoch_succeeds_before_it_is_durable(tmp_path: Path) -> None:
    """Neither where the first failed, nor where the first still waits: a crash would bring the old KV back."""
    keys, gate = tokens(1, 2), threading.Event()
    async with storing(tmp_path) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await engine.put(keys)
        await engine.call(wire.Flush())
        catalogue = store.parts.disk._commits._catalogue
        commit, catalogue.commit = catalogue.commit, fail
        for _ in range(2):
            with pytest.raises(KvtierError) as caught:
                await other.open(spec(), epoch=3)
            assert caught.value.code == Code.IO
        catalogue.commit = lambda changes: gate.wait() and commit(changes)
        opens = [asyncio.ensure_future(each.open(spec(), epoch=3)) for each in (engine, other)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in opens)
        gate.set()
        assert [each.epoch for each in await asyncio.gather(*opens)] == [3, 3]
        assert store.parts.disk.epoch(store.parts.caches[other.opened.cache].base) == 3


async def test_flush_answers_for_what_was_committed_before_it(tmp_path: Path) -> None:
    """Others who go on committing neither fail it nor keep it waiting."""
    async with storing(tmp_path, host=8 * MIB) as store:
        engine, busy = Engine(store), Engine(store, "busy", pid=2)
        await engine.open(spec())
        await busy.open(spec())
        going = True

        async def traffic() -> int:
            n = 0
            while going:
                n += 1
                await busy.put(tokens(n, n, n))
                await asyncio.sleep(0)
            return n

        task = asyncio.ensure_future(traffic())
        for n in range(10):
            await engine.put(tokens(100_000 + n, 1, 2))
            await engine.call(wire.Flush())
        going = False
        assert await task > 10
        for n in range(10):
            cache = store.parts.caches[engine.opened.cache]
            node, pages = cache.radix.deepest(tokens(100_000 + n, 1, 2))
            assert pages == 3
            assert -1 not in cache.gather(node, 0, 0, 3, Tier.DISK)


async def test_flush_is_refused_by_name_where_the_disk_cannot_hold_everything(tmp_path: Path) -> None:
    """Pages that were pushed out again within the flush are not called durable."""
    async with storing(tmp_path, host=4 * MIB, disk=MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for n in range(20):
            await engine.put(tokens(*range(100 * n, 100 * n + 30)))
        with pytest.raises(KvtierError) as caught:
            await engine.call(wire.Flush())
        assert caught.value.code == Code.NO_SPACE


async def test_a_flush_writes_once_what_disk_has_no_room_for(tmp_path: Path) -> None:
    """Asked again, nothing is pushed out and in; the pages are counted and named; once there is room they go."""
    large = GroupSpec(Kind.FULL, 1, 1, 32_000)
    async with storing(tmp_path, host=16 * MIB, disk=4 * MIB) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec((large,)))
        await other.open(spec((large,), salt=b"other"))
        await other.put(tokens(*range(1, 41)))
        await quiet(store)
        for n in range(25):
            await engine.put(tokens(*range(100 * n + 1, 100 * n + 11)))

        async def flush() -> tuple[str, int]:
            before = store.parts.disk.stats["bytes_written"]
            try:
                await engine.call(wire.Flush())
            except KvtierError as exc:
                assert exc.code == Code.NO_SPACE
                return exc.message, store.parts.disk.stats["bytes_written"] - before
            return "", store.parts.disk.stats["bytes_written"] - before

        await flush()
        said = [await flush() for _ in range(4)]
        assert sum(written for _, written in said) < MIB, "pushed out again and again"
        cache = store.parts.caches[engine.opened.cache]
        lack = cache.index.held[Tier.HOST][0] - cache.index.held[Tier.DISK][0]
        assert said[-1][0] == f"{lack} pages have no room on disk, of caches {cache.id.hex()[:12]}"
        for n in range(20):
            cut = cache.index.cut(cache.radix.deepest(tokens(*range(100 * n + 1, 100 * n + 11)))[0])
            cache.release(cut.freed, store.parts.disk)
        await store.admin[wire.Purge](wire.Purge(salt=b"other"))
        assert (await flush())[0] == ""
        assert cache.index.held[Tier.DISK][0] == 50


async def test_a_flush_beyond_a_quota_says_so_and_writes_once(tmp_path: Path) -> None:
    """The tenant's pages do not push each other out flush after flush; the code is the quota's."""
    async with storing(tmp_path, host=16 * MIB) as store:
        store.limit([Rule("tenant", b"a".hex(), {Tier.DISK: 40 * 32768})])
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 32_000),), salt=b"a"))
        for n in range(20):
            await engine.put(tokens(*range(100 * n + 1, 100 * n + 11)))
        for _ in range(5):
            with pytest.raises(KvtierError) as caught:
                await engine.call(wire.Flush())
            assert caught.value.code == Code.OVER_CAP
            written = store.parts.disk.stats["bytes_written"]
        with pytest.raises(KvtierError, match="beyond a quota"):
            await engine.call(wire.Flush())
        assert store.parts.disk.stats["bytes_written"] - written < MIB // 2
        store.limit([])
        await engine.call(wire.Flush())
        assert store.parts.caches[engine.opened.cache].index.held[Tier.DISK][0] == 200


async def test_flush_of_a_cache_that_is_reset_meanwhile_succeeds(tmp_path: Path) -> None:
    """What is dropped on purpose need not become durable."""
    disk = Failing()
    async with storing(tmp_path, calls=disk) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        disk.gate.clear()
        await engine.put(tokens(*range(1, 200)))
        flush = asyncio.ensure_future(engine.call(wire.Flush()))
        await asyncio.sleep(0.01)
        reset = asyncio.ensure_future(other.call(wire.Reset(other.opened.cache)))
        await asyncio.sleep(0.01)
        disk.gate.set()
        assert await flush == wire.Ok()
        assert (await reset).epoch == 1
        engine.leave()
        other.leave()
        await quiet(store)
        assert idle(store) == []
        assert store.parts.disk.used_bytes == 0


@contextlib.asynccontextmanager
async def stored_while_sick(folder: Path, keys: bytes) -> AsyncIterator[tuple[Store, Engine, Failing]]:
    """A store whose disk is broken, and an engine that has put a path."""
    disk = Failing()
    async with storing(folder, calls=disk) as store:
        engine = Engine(store)
        await engine.open(spec())
        disk.broken = True
        await engine.put(keys)
        yield store, engine, disk


async def test_flush_after_a_failure_writes_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sick disk fails the flush by name; once it is well again the next one makes everything durable.

    Operators are told that it is sick until a write has worked, not only until one is due.
    """
    keys = tokens(*range(1, 150))
    async with stored_while_sick(tmp_path, keys) as (store, engine, disk):
        with pytest.raises(KvtierError) as caught:
            await engine.call(wire.Flush())
        assert caught.value.code == Code.IO
        disk.broken = False
        monkeypatch.setattr(health, "RETRY_S", 0.0)
        assert not store.parts.disk.sick
        assert store.report.status(wire.Status()).data["tiers"]["disk"]["sick"] == "EIO"
        await engine.call(wire.Flush())
        assert store.report.status(wire.Status()).data["tiers"]["disk"]["sick"] == ""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert await engine.get(keys) == 149


async def test_a_flush_that_ends_on_a_well_disk_has_written_what_a_sick_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun in the last moment in which nothing is offered to a disk that failed: no room is lacking then."""
    async with stored_while_sick(tmp_path, tokens(*range(1, 20))) as (store, engine, disk):
        await until(lambda: not store.parts.persist.pending and store.parts.disk.sick)
        disk.broken = False
        times = iter([time.monotonic()])
        monkeypatch.setattr(health, "monotonic", lambda: next(times, math.inf))
        assert await engine.call(wire.Flush()) == wire.Ok()
        assert store.parts.caches[engine.opened.cache].index.held[Tier.DISK][0] == 19


async def test_runs_whose_pages_are_all_freed_leave_the_catalogue(tmp_path: Path) -> None:
    """Pages of a run that never had an item are not counted as stored for ever."""
    keys = tokens(*range(1, 21))
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(GROUPS))
        await engine.put(keys, wants=state_at(19))
        await engine.call(wire.Flush())
        await engine.put(keys, wants=state_at(3, 11))
        await engine.call(wire.Flush())
        drop_host(store)
        store.parts.persist.room.evict(1 << 40)
        assert store.parts.disk.used_bytes == 0
        assert store.parts.disk.stats["runs"] == 0


async def test_a_full_disk_evicts_no_more_than_it_needs(tmp_path: Path) -> None:
    """While freed cells wait for their sync, further writes push out further pages only as far as the reserve goes."""
    async with storing(tmp_path, host=16 * MIB, disk=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for n in range(200):
            await engine.put(tokens(*range(100 * n, 100 * n + 10)))
        await until(lambda: not store.parts.persist.pending)
        written, capacity = store.parts.counts["pages_written_disk"], 4 * MIB // 4096
        kept = written - store.parts.counts["pages_evicted_disk"]
        assert written >= 1990
        assert kept >= capacity // 2
        await until(lambda: not store.parts.disk.freeing_bytes)
        assert store.parts.disk.free_bytes < 2 * 4 * MIB // RESERVE_PARTS


async def test_a_write_to_a_full_disk_finds_cells_that_were_freed_before(tmp_path: Path) -> None:
    """Room for the next run is made behind each, so that none waits for the commit that frees its cells."""
    async with storing(tmp_path, host=16 * MIB, disk=4 * MIB) as store:
        engine, disk = Engine(store), store.parts.disk
        await engine.open(spec())
        refusals, write = [], disk.write

        def watched(*args: object) -> bool:
            if taken := write(*args):
                return taken
            refusals.append(disk.refusal)
            return False

        disk.write = watched
        for n in range(200):
            assert await engine.put(tokens(*range(100 * n, 100 * n + 10))) == 10
            await until(lambda: not store.parts.persist.pending and not disk.freeing_bytes)
        assert store.parts.counts["pages_evicted_disk"] > 900
        assert refusals == []


async def test_a_write_waits_for_a_slab_that_is_being_emptied(tmp_path: Path) -> None:
    """Where eviction frees nothing, because engines hold it all, scattered free cells are gathered and used."""
    large = spec((GroupSpec(Kind.FULL, 1, 1, 7000),), model="large")
    async with storing(tmp_path / "disk", host=16 * MIB, disk=4 * MIB) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(large)
        for n in range(500):
            await engine.put(tokens(n, 7))
        await engine.call(wire.Flush())
        cache = store.parts.caches[engine.opened.cache]
        for node in list(cache.index.walk()):
            cache.release(cache.index.drop(node, 1, 2, Tier.DISK), store.parts.disk)
        for n in range(500):
            assert (await engine.call(wire.Acquire((await engine.match(tokens(n, 7))).handle))).pages == 2
        await other.put(tokens(1, 2, 3))
        await other.call(wire.Flush(other.opened.cache))
        assert store.parts.disk.stats["slabs_emptied"] > 0
        assert store.parts.counts["pages_evicted_disk"] == 0
        shutil.copytree(tmp_path / "disk", tmp_path / "crashed")
    async with storing(tmp_path / "crashed") as store:
        other = Engine(store)
        await other.open(large)
        assert await other.get(tokens(1, 2, 3)) == 3


async def test_a_comparison_under_traffic_finds_nothing_wrong(tmp_path: Path) -> None:
    """What is written and freed meanwhile differs in catalogue and memory for moments, each time something else."""
    async with storing(tmp_path, host=4 * MIB, disk=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        going = True

        async def churn() -> None:
            n = 0
            while going:
                n += 1
                await engine.put(tokens(*range(100 * n, 100 * n + 10)))
                store.parts.persist.room.evict(64 << 10)
                await asyncio.sleep(0)

        task = asyncio.ensure_future(churn())
        for _ in range(6):
            assert (await store.admin[wire.DiskVerify](wire.DiskVerify())).data["first"] == []
        going = False
        await task


async def test_caches_that_hold_nothing_are_not_kept_on_disk(tmp_path: Path) -> None:
    """A record for each tenant who was ever here would outlive all of them."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        for n in range(5):
            await engine.open(spec(salt=bytes([n])))
            await engine.put(tokens(n))
            await engine.call(wire.Flush())
        drop_host(store)
        store.parts.persist.room.evict(1 << 40)
    async with storing(tmp_path) as store:
        assert store.parts.caches == {}
        assert store.parts.disk.caches() == {}
    async with storing(tmp_path) as store:
        assert store.parts.disk.caches() == {}


async def test_records_of_caches_that_are_forgotten_leave_disk_without_a_restart(tmp_path: Path) -> None:
    """However many salts come and go, as many are on record as hold something; an epoch is never begun again."""
    async with storing(tmp_path) as store:
        stay = Engine(store, "stay", pid=9)
        await stay.open(spec())
        await stay.put(tokens(1, 2))
        for n in range(60):
            engine = Engine(store, pid=2)
            await engine.open(spec(salt=bytes([n])))
            await engine.put(tokens(n, n))
            if n == 7:
                await engine.call(wire.Reset(engine.opened.cache))
            await quiet(store)
            await store.admin[wire.Purge](wire.Purge(salt=bytes([n])))
            engine.leave()
        await quiet(store)
        disk = store.parts.disk
        assert len(disk.caches()) == len(store.parts.caches) == 1
        assert set(disk._ledger.of_cache) == set(disk.caches())
        await flushed(disk)
        assert len(disk._catalogue.caches()[0]) == 1
        engine = Engine(store, pid=2)
        assert (await engine.open(spec(salt=bytes([7])))).epoch == 1
        assert (await engine.match(tokens(7, 7))).pages == 0
        await engine.put(tokens(9, 8))
        assert await stay.get(tokens(1, 2)) == 2
        await quiet(store)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        assert (await engine.open(spec(salt=bytes([7])))).epoch == 1
        assert (await engine.match(tokens(7, 7))).pages == 0
        assert await engine.get(tokens(9, 8)) == 2
        assert len(store.parts.disk.caches()) == 2


async def test_a_cache_that_is_being_written_is_forgotten_when_that_has_ended(tmp_path: Path) -> None:
    """Its engine leaves and its pages are cut in the middle of the write: no record, run or cell is left of it."""
    disk = Failing()
    async with storing(tmp_path, calls=disk) as store:
        engine, other = Engine(store, pid=1), Engine(store, "other", pid=2)
        await engine.open(spec(salt=b"1"))
        await other.open(spec(salt=b"2"))
        disk.gate.clear()
        await engine.put(tokens(1, 2, 3))
        await until(lambda: store.parts.disk.stats["queued_bytes"])
        purged = asyncio.ensure_future(store.admin[wire.Purge](wire.Purge(salt=b"1")))
        await asyncio.sleep(0.01)  # all is cut, and what was is on its way to being durable
        engine.leave()
        assert len(store.parts.caches) == 2
        assert not purged.done()
        disk.gate.set()
        await purged
        await until(lambda: not store.parts.persist.pending)
        other.leave()
        await until(lambda: not store.parts.disk.used_bytes)
        await flushed(store.parts.disk)
        assert store.parts.caches == {}
        assert store.parts.disk._ledger.of_cache == {}
        assert store.parts.disk._catalogue.caches()[0] == {}
        assert idle(store) == []


async def test_a_purge_takes_the_epoch_that_was_just_reset_with_it(tmp_path: Path) -> None:
    """Its runs are freed a few at a time: their bytes are gone from the file before the purge is said to be done."""
    keyed = spec(key_bytes=16, salt=b"t")
    keys = [n.to_bytes(2, "little") * 8 for n in range(450)]
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(keyed)).cache
        reserved = await engine.call(wire.ReserveKeys(number, 0, b"".join(keys)))
        engine.write(b"".join(keys), reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, reserved.pages))
        await quiet(store)
        await engine.call(wire.Reset(number))
        purged = await store.admin[wire.DiskPurge](wire.DiskPurge(salt=b"t"))
        assert purged.data["healthy"]
        left = next(tmp_path.glob("extents")).read_bytes()
        assert not any(content(key, 0, 4000).tobytes()[:512] in left for key in keys)
        assert store.parts.disk.used_bytes == 0
        engine.leave()


BIG_STATE = GroupSpec(Kind.STATE, 1, 1, 300_000)


async def test_large_state_points_survive_a_restart(tmp_path: Path) -> None:
    """Items of several slots, in runs of their own."""
    keys = tokens(1, 2, 3)
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, BIG_STATE)))
        await engine.put(keys)
        await engine.call(wire.Flush())
        await engine.put(keys, wants=state_at(1, 2))
        await engine.call(wire.Flush())
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL, BIG_STATE)))
        assert await engine.get(keys) == 3
        assert await engine.get(keys[:16]) == 2
