"""The store over its real host and disk tiers: what engines put is what they get, whatever happens between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import unittest.mock
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec, Slice
from kvtier.store import Store
from kvtier.store.ways import Ways
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.region import Region
from kvtier.types import Code, Kind, KvtierError, Presence, Tier
from storekit import MIB, drop_host, memfd, quiet, storing, until, used

GROUPS = {
    "full": (FULL,),
    "full+window": (FULL, WINDOW),
    "full+state": (FULL, STATE),
    "window": (WINDOW,),
    "two full, window and state": (FULL, GroupSpec(Kind.FULL, 1, 1, 4096), WINDOW, STATE),
}


def state_wants(groups: tuple[GroupSpec, ...], start: int, pages: int) -> tuple[wire.Want, ...]:
    """State points at the last page, where there is a state group."""
    last = np.array([start + pages - 1], "<i4").tobytes()
    return tuple(wire.Want(n, last) for n, g in enumerate(groups) if g.kind is Kind.STATE)


@pytest.mark.parametrize("name", GROUPS)
async def test_every_group_kind_comes_back_bit_exact_from_host_and_disk(tmp_path: Path, name: str) -> None:
    """Put, get; evict, get from disk; restart, get again: the same bytes each time."""
    groups = GROUPS[name]
    keys = tokens(1, 2, 3, 4, 5, 6, 7)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        assert await engine.put(keys, wants=state_wants(groups, 0, 7)) == 7
        assert await engine.get(keys) == 7
        await engine.call(wire.Flush())
        drop_host(store)
        matched = await engine.match(keys)
        assert [s.tier for s in matched.segments] == [Tier.DISK]
        assert await engine.get(keys) == 7
        engine.leave()
        assert idle(store) == []
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        assert await engine.get(keys) == 7
        assert await engine.put(tokens(1, 2, 9), start=2, wants=state_wants(groups, 2, 1)) == 1
        assert await engine.get(tokens(1, 2, 9)) == 3
        engine.leave()
        await quiet(store)
        assert idle(store) == []


@pytest.mark.parametrize(
    "change",
    [
        {"kv_dtype": "fp8"}, {"layout": "NHD"}, {"adapter": "lora"}, {"salt": b"tenant"}, {"fingerprint": b"g" * 16},
        {"revision": "2"}, {"backend": "flash"}, {"codec": "kivi"}, {"model": "n"}, {"page_tokens": 1},
        {"groups": (GroupSpec(Kind.FULL, 4, 1, 1000),)},
    ],
    ids=str,
)  # fmt: skip
async def test_kv_of_another_identity_never_matches(tmp_path: Path, change: dict[str, object]) -> None:
    """One field of the spec differs: nothing is shared, in memory or after a restart."""
    keys = tokens(1, 2, 3, 4)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(keys)
        await engine.call(wire.Flush())
        await engine.open(spec(**change))
        assert (await engine.match(keys)).pages == 0
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(**change))
        assert (await engine.match(keys)).pages == 0
        await engine.open(spec())
        assert (await engine.match(keys)).pages == 4


async def test_two_scopes_never_share(tmp_path: Path) -> None:
    """Another uid or another label is another cache in another arena."""
    keys = tokens(1, 2)
    async with storing(tmp_path) as store:
        mine, theirs, label = Engine(store), Engine(store, uid=7), Engine(store, scope="blue")
        for engine in (mine, theirs, label):
            await engine.open(spec())
        await mine.put(keys)
        assert (await theirs.match(keys)).pages == (await label.match(keys)).pages == 0
        arenas = {id(store.parts.host.arenas(e.process.instance.scope)[0]) for e in (mine, theirs, label)}
        assert len(arenas) == 3
        with pytest.raises(KvtierError, match="has not opened"):
            await theirs.call(wire.Match(mine.opened.cache, 0, keys))


async def test_two_images_with_the_same_prompt_never_hit_each_other() -> None:
    """The digest of what token ids do not identify is part of the page key."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec(extras=True))
        cat, dog = (tokens(1) + digest * 16 for digest in (b"c", b"d"))
        assert await engine.put(cat) == 1
        assert (await engine.match(dog)).pages == 0
        assert await engine.get(cat) == 1


async def test_reset_frees_the_old_epoch_for_good(tmp_path: Path) -> None:
    """After the reply nothing of the old weights is served: not now, not to others, not after a restart."""
    keys = tokens(1, 2, 3)
    async with storing(tmp_path) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        await engine.put(keys)
        held = await other.call(wire.Acquire((await other.match(keys)).handle))
        await engine.call(wire.Flush())
        old = engine.opened
        engine.opened = await engine.call(wire.Reset(old.cache))
        assert engine.opened.epoch == old.epoch + 1
        assert engine.opened.cache_id != old.cache_id
        assert (await engine.match(keys)).pages == 0
        assert (await other.match(keys)).pages == 0
        other.verify(keys, held.items[0])
        assert await other.put(keys) == 0
        await other.call(wire.Release(held.lease))
        assert await engine.put(keys) == 3
        await engine.call(wire.Flush())
        engine.leave()
        other.leave()
        assert idle(store) == []
        assert len(store.parts.caches) == 1
    async with storing(tmp_path) as store:
        engine = Engine(store)
        assert (await engine.open(spec())).epoch == old.epoch + 1
        assert await engine.get(keys) == 3
        (await engine.open(spec(), epoch=9))
        assert (await engine.match(keys)).pages == 0


async def test_tp4_writes_what_tp8_reads_and_a_page_is_a_hit_only_when_every_shard_is_in() -> None:
    """Canonical pages: heads may be cut differently by writers and readers."""
    groups = (GroupSpec(Kind.FULL, layers=2, heads=8, cell_bytes=512),)
    keys = tokens(1, 2, 3)
    async with storing(None) as store:
        scheduler = Engine(store, pid=10)
        await scheduler.open(spec(groups), slices=(Slice(0, 2, 0, 2),), rank=0, world=4)
        workers = [scheduler]
        for rank in range(1, 4):
            worker = Engine(store, pid=10 + rank)
            await worker.open(spec(groups), slices=(Slice(0, 2, 2 * rank, 2 * rank + 2),), rank=rank, world=4)
            workers.append(worker)
        reserved = await scheduler.reserve(keys)
        for n, worker in enumerate(workers):
            assert (await scheduler.match(keys)).pages == 0
            assert (await scheduler.match(keys)).pending == 3
            worker.write(keys, reserved)
            reply = await worker.call(wire.Commit(reserved.reservation, 0, 3))
            assert reply.published == (3 if n == 3 else 0)
        decode = Engine(store, "decode", pid=50)
        await decode.open(spec(groups), slices=(Slice(0, 2, 5, 6),), rank=5, world=8)
        assert await decode.get(keys) == 3


async def test_replicas_store_one_copy() -> None:
    """Ranks with equal slices (few KV heads, MLA) are one shard: who reserved writes it, the other's word is idle."""
    keys = tokens(1)
    async with storing(None) as store:
        a, b = Engine(store, pid=1), Engine(store, pid=2)
        await a.open(spec(), rank=0, world=2)
        await b.open(spec(), rank=1, world=2)
        reserved = await a.reserve(keys)
        assert (await b.call(wire.Commit(reserved.reservation, 0, 1))).published == 0
        a.write(keys, reserved)
        assert (await a.call(wire.Commit(reserved.reservation, 0, 1))).published == 1
        assert (await b.call(wire.Commit(reserved.reservation, 0, 1))).published == 1
        assert await a.get(keys) == 1


async def test_overlapping_shards_are_refused_by_name() -> None:
    """Two ranks that would write the same cells differently cannot join."""
    async with storing(None) as store:
        a, b = Engine(store, pid=1), Engine(store, pid=2)
        await a.open(spec(), slices=(Slice(0, 2, 0, 1),), rank=0, world=2)
        with pytest.raises(KvtierError, match="slices"):
            await b.open(spec(), slices=(Slice(0, 1, 0, 2),), rank=1, world=2)


async def test_commits_may_come_out_of_order_and_only_the_contiguous_part_is_served() -> None:
    """The rest waits, and is shown as pending."""
    keys = tokens(1, 2, 3, 4)
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        reserved = await engine.reserve(keys)
        engine.write(keys, reserved)
        reply = await engine.call(wire.Commit(reserved.reservation, 2, 2))
        assert (reply.published, reply.waiting) == (0, 2)
        matched = await engine.match(keys)
        assert (matched.pages, matched.pending) == (0, 4)
        reply = await engine.call(wire.Commit(reserved.reservation, 0, 2))
        assert (reply.published, reply.waiting) == (4, 0)
        assert await engine.get(keys) == 4
        engine.leave()
        assert idle(store) == []


async def test_a_reservation_may_follow_pages_that_are_only_reserved() -> None:
    """Children are served the moment their parent's reservation is; without it, they are dropped."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        first = await engine.reserve(tokens(1, 2))
        second = await engine.reserve(tokens(1, 2, 3), start=2)
        engine.write(tokens(1, 2), first)
        engine.write(tokens(1, 2, 3), second)
        reply = await engine.call(wire.Commit(second.reservation, 2, 1))
        assert (reply.published, reply.waiting) == (0, 1)
        await engine.call(wire.Commit(first.reservation, 0, 2))
        assert await engine.get(tokens(1, 2, 3)) == 3
        third = await engine.reserve(tokens(5, 6))
        fourth = await engine.reserve(tokens(5, 6, 7), start=2)
        engine.write(tokens(5, 6, 7), fourth)
        await engine.call(wire.Commit(fourth.reservation, 2, 1))
        await engine.call(wire.Abort(third.reservation))
        assert (await engine.match(tokens(5, 6, 7))).pending == 0
        engine.leave()
        assert idle(store) == []


async def test_two_engines_commit_the_same_page_and_one_wins() -> None:
    """The loser's slots return; both get the page."""
    keys = tokens(1, 2, 3)
    async with storing(None) as store:
        a, b = Engine(store, "a", pid=1), Engine(store, "b", pid=2)
        await a.open(spec())
        await b.open(spec())
        ra, rb = await a.reserve(keys), await b.reserve(keys)
        a.write(keys, ra)
        b.write(keys, rb)
        await a.call(wire.Commit(ra.reservation, 0, 2))
        assert (await b.call(wire.Commit(rb.reservation, 0, 3))).published == 3
        assert (await a.call(wire.Commit(ra.reservation, 2, 1))).published == 3
        assert await a.get(keys) == await b.get(keys) == 3
        pool = store.parts.host.pools[0]
        assert pool.used(0) == 3
        a.leave()
        b.leave()
        assert idle(store) == []


async def test_a_page_already_stored_is_not_asked_for_again() -> None:
    """An offset of -1 tells the engine to skip the copy."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2))
        reserved = await engine.reserve(tokens(1, 2, 3))
        assert (np.frombuffer(reserved.items[0].offsets, "<i8") >= 0).tolist() == [False, False, True]


async def test_a_dead_engine_leaves_nothing_behind() -> None:
    """Leases, reservations and handles of an instance end with its last process; others never notice."""
    keys = tokens(1, 2, 3)
    async with storing(None) as store:
        other = Engine(store, "other", pid=9)
        await other.open(spec())
        await other.put(keys)
        dead, twin = Engine(store, "dead", pid=1), Engine(store, "dead", pid=2)
        await dead.open(spec(), rank=0, world=1)
        await twin.open(spec(), rank=0, world=1)
        await dead.call(wire.Acquire((await dead.match(keys)).handle))
        await dead.reserve(tokens(7, 8))
        dead.leave(clean=False)
        assert store.parts.instances[dead.process.instance.scope, "dead"].leases
        twin.leave(clean=False)
        assert await other.get(keys) == 3
        assert (await other.match(tokens(7, 8))).pending == 0
        other.leave()
        assert idle(store) == []


async def test_slots_of_a_lost_connection_stay_until_its_process_is_gone() -> None:
    """A process that may still write keeps its slots from being given away."""
    async with storing(None) as store:
        engine = Engine(store, pid=1)
        await engine.open(spec())
        await engine.reserve(tokens(1, 2))
        store.leave(engine.process, clean=False)
        assert used(store) == 2
        store.gone(engine.process)
        assert used(store) == 0
        assert idle(store) == []


async def test_an_aborted_page_is_not_given_away_while_a_sibling_process_may_write_it() -> None:
    """Slots return only when every process that holds a shard has said it is done, or is gone."""
    async with storing(None) as store:
        a, b = Engine(store, pid=1), Engine(store, pid=2)
        await a.open(spec(), slices=(Slice(0, 2, 0, 1),), rank=0, world=2)
        await b.open(spec(), slices=(Slice(0, 2, 1, 2),), rank=1, world=2)
        reserved = await a.reserve(tokens(1))
        await a.call(wire.Abort(reserved.reservation))
        assert used(store) == 1
        b.leave(clean=False)
        assert used(store) == 0
        a.leave()
        assert idle(store) == []


async def test_a_holder_at_its_cap_is_refused_and_starves_nobody() -> None:
    """A stopped engine that holds all it may leaves the other half to the rest."""
    async with storing(None, host=2 * MIB) as store:
        greedy, other = Engine(store, "greedy", pid=1), Engine(store, "other", pid=2)
        await greedy.open(spec())
        await other.open(spec())
        reserved = await greedy.reserve(tokens(*range(1000)))
        assert reserved.refused == Code.OVER_CAP
        assert reserved.pages * 4096 <= store.cap_bytes
        again = await greedy.reserve(tokens(*range(5000, 5010)))
        assert (again.pages, again.refused) == (0, Code.OVER_CAP)
        for n in range(50):
            assert await other.put(tokens(*range(10_000 + 20 * n, 10_020 + 20 * n)), wait_ms=200) == 20
        assert await other.get(tokens(*range(10_980, 11_000))) == 20


async def test_a_full_host_evicts_the_coldest_and_keeps_what_is_durable(tmp_path: Path) -> None:
    """Four times the arena goes through it: what was reported durable is served again, bit-exact."""
    async with storing(tmp_path, host=MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        paths = [tokens(*range(100 * n, 100 * n + 32)) for n in range(1, 33)]
        for path in paths:
            assert await engine.put(path, wait_ms=5000) == 32
        await engine.call(wire.Flush())
        for path in paths:
            assert await engine.get(path) == 32
        engine.leave()
        await quiet(store)
        assert idle(store) == []
        assert store.parts.counts["pages_evicted_host"] > 500


async def test_without_disk_a_full_host_forgets_leaves_first() -> None:
    """The oldest tails go, shared prefixes stay, and every get is right."""
    async with storing(None, host=MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        shared = tokens(*range(8))
        for n in range(60):
            assert await engine.put(shared + tokens(*range(1000 + 20 * n, 1012 + 20 * n)), wait_ms=500) > 0
        assert await engine.get(shared) == 8
        assert await engine.get(shared + tokens(*range(1000 + 20 * 59, 1012 + 20 * 59))) == 20
        engine.leave()
        assert idle(store) == []


async def test_a_cache_of_another_shape_gets_memory_from_a_full_one(tmp_path: Path) -> None:
    """Slabs move to the poorer cache: cold pages are evicted, the rest relocated, none is lost or wrong."""
    async with storing(tmp_path, host=2 * MIB) as store:
        full, late = Engine(store, "full", pid=1), Engine(store, "late", pid=2)
        await full.open(spec())
        await late.open(spec((GroupSpec(Kind.FULL, 1, 1, 60_000),), model="big"))
        paths = [tokens(*range(100 * n, 100 * n + 32)) for n in range(1, 20)]
        for path in paths:
            assert await full.put(path, wait_ms=5000) == 32
        await quiet(store)
        assert await late.put(tokens(*range(10)), wait_ms=5000) == 10
        assert await late.get(tokens(*range(10))) == 10
        for path in paths:
            assert await full.get(path) == 32
        full.leave()
        late.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_split_while_pages_are_on_their_way_to_disk_stores_the_right_bytes(tmp_path: Path) -> None:
    """Branches that split a run in flight change nothing of what lands on disk."""
    base = tokens(*range(1, 41))
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        reserved = await engine.reserve(base)
        engine.write(base, reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, 40))
        for at in (30, 17, 5, 1):
            branch = base[: at * 8] + tokens(900 + at, 901 + at)
            assert await engine.put(branch, start=at) == 2
        await engine.call(wire.Flush())
        drop_host(store)
        assert await engine.get(base) == 40
        for at in (30, 17, 5, 1):
            assert await engine.get(base[: at * 8] + tokens(900 + at, 901 + at)) == at + 2
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert await engine.get(base) == 40
        assert await engine.get(base[: 5 * 8] + tokens(905, 906)) == 7


async def test_damaged_bytes_on_disk_are_a_miss_counted_and_cut(tmp_path: Path) -> None:
    """A flipped bit is never served: the match ends before it, and the pages can be stored again."""
    keys = tokens(*range(1, 9))
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(keys)
        await engine.call(wire.Flush())
        drop_host(store)
        needle = content(keys[: 5 * 8], 0, 4000).tobytes()
        extents = next(f for f in tmp_path.rglob("*") if f.is_file() and needle in f.read_bytes())
        raw = extents.read_bytes()
        with extents.open("r+b") as file:
            file.seek(raw.index(needle) + 123)
            file.write(bytes([needle[123] ^ 1]))
        assert await engine.get(keys) == 4
        assert store.parts.counts["load_checksum"] == 1
        assert (await engine.match(keys)).pages == 4
        assert await engine.put(keys, start=4) == 4
        assert await engine.get(keys) == 8
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_many_engines_load_the_same_pages_once(tmp_path: Path) -> None:
    """Concurrent acquires of what is on disk share the loads."""
    keys = tokens(*range(1, 33))
    async with storing(tmp_path) as store:
        engines = [Engine(store, f"e{n}", pid=n) for n in range(8)]
        for engine in engines:
            await engine.open(spec())
        await engines[0].put(keys)
        await engines[0].call(wire.Flush())
        drop_host(store)
        got = await asyncio.gather(*(engine.get(keys) for engine in engines))
        assert got == [32] * 8
        assert store.parts.counts["pages_loaded_disk"] == 32


async def test_prefetch_brings_pages_to_host_without_a_lease(tmp_path: Path) -> None:
    """The next acquire finds everything in host."""
    keys = tokens(*range(1, 9))
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(keys)
        await engine.call(wire.Flush())
        drop_host(store)
        await engine.call(wire.Prefetch((await engine.match(keys)).handle))
        while store.parts.loads.moving:
            await asyncio.sleep(0.01)
        assert [s.tier for s in (await engine.match(keys)).segments] == [Tier.HOST]
        engine.leave()
        assert idle(store) == []


async def test_durable_is_an_event_after_the_commit(tmp_path: Path) -> None:
    """The engine that asked for events hears when its pages are on disk and synced."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3))
        assert engine.events == []
        await engine.call(wire.Flush())
        assert [(e.pages) for e in engine.events if isinstance(e, wire.Durable)] == [3]


async def test_keyed_pages_exist_one_by_one_and_come_back_bit_exact(tmp_path: Path) -> None:
    """Holes, any order, two groups with the same keys, disk, restart."""
    groups = (FULL, GroupSpec(Kind.FULL, 1, 1, 5000))
    cache = spec(groups, key_bytes=32)
    keys = [bytes([n]) * 32 for n in range(10)]
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(cache)).cache
        for group, some in ((0, keys[::2]), (1, keys[::3])):
            reserved = await engine.call(wire.ReserveKeys(number, group, b"".join(some)))
            engine.write(b"".join(some), reserved)
            assert (await engine.call(wire.Commit(reserved.reservation, 0, len(some)))).published == len(some)
        states = (await engine.call(wire.Exists(number, 0, b"".join(keys)))).states
        assert [s == Presence.HOST for s in states] == [n % 2 == 0 for n in range(10)]
        await engine.call(wire.Flush())
        drop_host(store)
        states = (await engine.call(wire.Exists(number, 1, b"".join(keys)))).states
        assert [s == Presence.DISK for s in states] == [n % 3 == 0 for n in range(10)]
        got = await engine.call(wire.AcquireKeys(number, 0, b"".join(keys)))
        engine.verify(b"".join(keys), got.items[0])
        assert (np.frombuffer(got.items[0].offsets, "<i8") >= 0).tolist() == [n % 2 == 0 for n in range(10)]
        await engine.call(wire.Release(got.lease))
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(cache)).cache
        for group, step in ((0, 2), (1, 3)):
            got = await engine.call(wire.AcquireKeys(number, group, b"".join(keys)))
            engine.verify(b"".join(keys), got.items[0])
            assert (np.frombuffer(got.items[0].offsets, "<i8") >= 0).tolist() == [n % step == 0 for n in range(10)]


async def test_a_foreign_handle_lease_or_reservation_is_unknown() -> None:
    """Numbers of another instance are nobody's."""
    async with storing(None) as store:
        a, b = Engine(store, "a", pid=1), Engine(store, "b", pid=2)
        await a.open(spec())
        await b.open(spec())
        await a.put(tokens(1, 2))
        matched = await a.match(tokens(1, 2))
        lease = await a.call(wire.Acquire(matched.handle))
        reserved = await a.reserve(tokens(1, 2, 3))
        for message in (
            wire.Acquire(matched.handle), wire.Release(lease.lease), wire.Commit(reserved.reservation, 2, 1),
            wire.Abort(reserved.reservation), wire.Match(0, matched.handle), wire.Reserve(matched.handle, 0, 1),
            wire.Unregister(1),
        ):  # fmt: skip
            with pytest.raises(KvtierError) as caught:
                await b.call(message)
            assert caught.value.code == Code.UNKNOWN


async def test_polls_send_only_new_tokens_and_count_once() -> None:
    """A handle goes on with its path; a request that polls is one request."""
    keys = tokens(*range(1, 11))
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(keys)
        before = store.parts.caches[engine.opened.cache].counts["requests"]
        first = await engine.match(keys[: 4 * 8])
        again = await engine.match(keys[4 * 8 :], first.handle)
        for _ in range(5):
            assert (await engine.match(b"", first.handle)).pages == 10
        assert (first.pages, again.pages, again.handle) == (4, 10, first.handle)
        assert store.parts.caches[engine.opened.cache].counts["requests"] == before + 1


@pytest.mark.parametrize("sealed", [True, False], ids=["mapped", "by fd"])
async def test_regions_store_and_load_bit_exact(tmp_path: Path, sealed: bool) -> None:
    """An engine's rows go to host and disk and come back into other rows, keyed and by lease."""
    keys = [bytes([n]) * 16 for n in range(6)]
    rows = lambda *at: np.array(at, "<i8").tobytes()  # noqa: E731
    fd, memory = memfd(16, 8192, sealed=sealed)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(spec(key_bytes=16))).cache
        region = store.register(wire.Register("engine", "cpu", 0, 8192, 16), fd, engine.process.peer)
        assert region.mapped == sealed
        for n, key in enumerate(keys):
            memory[n, :4000] = content(key, 0, 4000)
        stored = await engine.call(wire.Store(region.region, 0, rows(*range(6)), cache=number, keys=b"".join(keys)))
        assert stored.done == b"\x01" * 6
        await engine.call(wire.Flush())
        drop_host(store)
        wanted = b"".join(keys) + b"?" * 16
        load = wire.Load(region.region, 0, rows(15, 14, -1, 12, 11, 10, 9), cache=number, keys=wanted)
        assert (await engine.call(load)).done == bytes([1, 1, 0, 1, 1, 1, 0])
        for n, row in ((0, 15), (1, 14), (3, 12), (5, 10)):
            assert np.array_equal(memory[row, :4000], content(keys[n], 0, 4000))
        assert not memory[13].any()
        path = tokens(1, 2, 3)
        await engine.open(spec())
        mapped, engine.mapped = engine.mapped, False  # rows are copied to and from host
        reserved = await engine.reserve(path)
        engine.mapped = mapped
        for n in range(3):
            memory[n, :4000] = content(path[: (n + 1) * 8], 0, 4000)
        into = wire.Store(region.region, 0, rows(0, 1, 2), reservation=reserved.reservation)
        assert (await engine.call(into)).done == b"\x01" * 3
        await engine.call(wire.Commit(reserved.reservation, 0, 3))
        assert await engine.get(path) == 3
        lease = await engine.call(wire.Acquire((await engine.match(path)).handle))
        assert (await engine.call(wire.Load(region.region, 0, rows(7, 8), lease=lease.lease, first=1))).done == b"\1\1"
        assert np.array_equal(memory[8, :4000], content(path, 0, 4000))
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    os.close(fd)


async def test_a_cancelled_load_ends_only_when_no_byte_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delayed copier finishes before the cancellation is answered; its leases are gone then."""
    keys = [bytes([n]) * 16 for n in range(4)]
    fd, memory = memfd(4, 8192, sealed=True)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(spec(key_bytes=16))).cache
        region = store.register(wire.Register("engine", "cpu", 0, 8192, 4), fd, engine.process.peer)
        for n, key in enumerate(keys):
            memory[n, :4000] = content(key, 0, 4000)
        every = np.arange(4, dtype="<i8").tobytes()
        await engine.call(wire.Store(region.region, 0, every, cache=number, keys=b"".join(keys)))
        memory[:] = 0
        started, go = threading.Event(), threading.Event()
        real = Region.write

        def delayed(self: Region, row: int, views: list) -> None:
            started.set()
            go.wait()
            real(self, row, views)

        monkeypatch.setattr(Region, "write", delayed)
        load = asyncio.ensure_future(engine.call(wire.Load(region.region, 0, every, cache=number, keys=b"".join(keys))))
        try:
            while not started.is_set():
                await asyncio.sleep(0.001)
            load.cancel()
            await asyncio.sleep(0.05)
            assert not load.done()
            with pytest.raises(KvtierError) as caught:
                await engine.call(wire.Unregister(region.region))
            assert caught.value.code == Code.BUSY
        finally:
            go.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        before = memory.copy()
        await asyncio.sleep(0.05)
        assert np.array_equal(before, memory)
        await engine.call(wire.Unregister(region.region))
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    os.close(fd)


async def test_an_engine_that_dies_while_its_pages_are_summed_loses_nothing_of_others() -> None:
    """A checksum in flight keeps its slots until it ends; then they return."""
    big = spec((GroupSpec(Kind.FULL, 1, 1, 200_000),))
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(big)
        reserved = await engine.reserve(tokens(1, 2, 3))
        engine.write(tokens(1, 2, 3), reserved)
        commit = asyncio.ensure_future(engine.call(wire.Commit(reserved.reservation, 0, 3)))
        await asyncio.sleep(0)
        engine.leave(clean=False)
        assert store.parts.host.pools[0].used(0) == 3
        await commit
        assert idle(store) == []


async def test_engines_are_served_while_the_catalogue_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages stored again before their records are indexed lose nothing of what hangs below them on disk."""
    monkeypatch.setattr("kvtier.store.restore.SLICE_S", 0.0)
    trunk = tokens(*range(1, 101))
    branches = [trunk[: at * 8] + tokens(900 + at, 901 + at) for at in (3, 50, 70, 99)]
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        for path in (trunk, *branches):
            await engine.put(path, start=(await engine.match(path)).pages)
        await engine.call(wire.Flush())
    loop = asyncio.get_running_loop()
    store = Store(HostTier(4 * MIB, prefault=False), DiskTier(tmp_path, 64 * MIB, post=loop.call_soon_threadsafe))
    loading = store.start()
    engine = Engine(store)
    await engine.open(spec())
    stored = 0
    while not loading.done():
        part = trunk[: (10 + 7 * stored) * 8]
        await engine.put(part, wait_ms=0)
        stored += 1
        assert await engine.get(part, wait_ms=100) >= 0
        await asyncio.sleep(0)
    assert stored > 1
    assert store.parts.check() == []
    for path in (trunk, *branches):
        assert await engine.get(path) == len(path) // 8
    engine.leave()
    await quiet(store)
    assert idle(store) == []
    assert store.parts.counts["orphan_pages"] == 0
    await store.drain(10)


async def test_a_new_shape_beside_a_full_one_grows_to_its_fair_share(tmp_path: Path) -> None:
    """It takes slabs from the richer pool before it evicts what it has just stored."""
    async with storing(tmp_path, host=4 * MIB) as store:
        full, late = Engine(store, "full", pid=1), Engine(store, "late", pid=2)
        await full.open(spec())
        await late.open(spec((GroupSpec(Kind.FULL, 1, 1, 30_000),), model="big"))
        for n in range(1, 40):
            await full.put(tokens(*range(100 * n, 100 * n + 32)), wait_ms=5000)
        await quiet(store)
        for n in range(1, 5):
            assert await late.put(tokens(*range(100 * n, 100 * n + 10)), wait_ms=5000) == 10
        await quiet(store)
        sizes = {pool.shape.slot_bytes[0]: pool.total_bytes for pool in store.parts.host.pools}
        assert sizes[32_768] >= 40 * 32_768
        assert [s.tier for s in (await late.match(tokens(*range(100, 110)))).segments] == [Tier.HOST]
        full.leave()
        late.leave()
        await quiet(store)
        assert idle(store) == []


async def test_many_short_matches_do_not_cut_a_prompt_to_pieces():
    """Each match ends its own node; where nothing else branches or ends there, the pieces are joined again."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 64),)))
        keys = tokens(*range(500))
        await engine.put(keys)
        stride = engine.spec.stride
        order = np.random.default_rng(1).permutation(500)
        for pages in order:
            await engine.match(keys[: (int(pages) + 1) * stride])
        await engine.match(keys)
        index = store.parts.caches[engine.opened.cache].radix
        assert index.nodes < 64
        assert store.parts.check() == []
        assert await engine.get(keys) == 500


async def test_room_is_made_ahead_of_need(tmp_path: Path) -> None:
    """Above the high mark cold pages go before anybody asks for their room, and no further than the low mark."""
    async with storing(tmp_path, host=4 * MIB, ways=Ways("lru", high_water=0.9)) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096),)))
        for n in range(40):
            await engine.put(tokens(*range(100 * n, 100 * n + 32)))
            await quiet(store)
        pool = store.parts.host.pools[0]
        await until(lambda: pool.used(0) <= 0.9 * pool.capacity(0))
        assert store.parts.counts["slices_ahead"] > 0
        assert pool.used(0) >= 0.75 * pool.capacity(0)
        assert store.parts.check() == []


async def test_eviction_goes_on_after_a_policy_raised(tmp_path: Path) -> None:
    """A user's policy fails now and then: the leaf that it was asked about stays in line, and room is made again."""
    async with storing(tmp_path, host=4 * MIB, ways=Ways("lru", high_water=0.9)) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096),)))
        await engine.put(tokens(*range(32)))
        await quiet(store)
        policy = store.parts.space.order_of(store.parts.host.pools[0]).policy
        right, asked = policy.share, itertools.count(1)

        def share(node: Any) -> int:
            if next(asked) % 3 == 0:
                raise ZeroDivisionError
            return right(node)

        policy.share = share
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: None)
        for n in range(1, 60):
            with contextlib.suppress(ZeroDivisionError):
                await engine.put(tokens(*range(100 * n, 100 * n + 32)))
            await quiet(store)
        assert next(asked) > 9
        assert store.parts.counts["pages_evicted_host"] > 500
        policy.share = right
        pool = store.parts.host.pools[0]
        assert store.parts.space.evict(pool, [pool.capacity(0)])
        assert pool.used(0) == 0
        assert store.parts.check() == []


async def test_disk_gives_up_a_leaf_that_a_policy_raised_about_later(tmp_path: Path, monkeypatch) -> None:
    """The leaf stays in line there, too."""
    async with storing(tmp_path, host=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096),)))
        await engine.put(tokens(*range(32)))
        await quiet(store)
        persist, error = store.parts.persist, ZeroDivisionError()
        with monkeypatch.context() as patch:
            patch.setattr(persist.room.order.policy, "share", unittest.mock.Mock(side_effect=error))
            with pytest.raises(ZeroDivisionError):
                persist.room.evict(1)
        assert store.parts.check() == []
        assert persist.room.evict(1 << 40)
        assert not any(cache.index.copies[Tier.DISK] for cache in store.parts.caches.values())


async def test_a_host_smaller_than_what_is_used_goes_on(tmp_path: Path) -> None:
    """Far more prompts than host holds are each served whole, again and again, from disk."""
    async with storing(tmp_path, host=MIB) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 65536),)))
        prompts = [tokens(*range(100 * n, 100 * n + 6)) for n in range(12)]
        for keys in prompts:
            assert await engine.put(keys, wait_ms=20_000) == 6
        await quiet(store)
        for _ in range(3):
            for keys in prompts:
                assert await engine.get(keys, wait_ms=20_000) == 6
        assert store.parts.counts["pages_loaded_disk"] >= 3 * 6 * 8
        assert store.parts.check() == []
