"""Memory that somebody may still touch is never given away, and memory that nobody touches always returns."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Iterable
from pathlib import Path

import numpy as np
import pytest

from engines import FULL, STATE, Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec, Slice
from kvtier.mover import Mover, Urgency
from kvtier.store import Store, slices
from kvtier.store.peers import Guest
from kvtier.types import Code, Kind, KvtierError
from storekit import MIB, Failing, drop_host, memfd, quiet, rows, storing, until

BIG = GroupSpec(Kind.FULL, 1, 1, 200_000)
HALVES = ((Slice(0, 2, 0, 1),), (Slice(0, 2, 1, 2),))


def used(store: Store, group: int = 0) -> int:
    """Slots of the first pool, if there is one, that are not free."""
    return sum(pool.used(group) for pool in store.parts.host.pools[:1])


class Blocked:
    """Worker threads of the mover that are all busy until told to go on."""

    def __init__(self, store: Store, threads: int = 3) -> None:
        self.go = threading.Event()
        self._jobs = [asyncio.ensure_future(store.parts.mover.run(self.go.wait)) for _ in range(threads)]

    async def end(self) -> None:
        """Let them go on."""
        self.go.set()
        await asyncio.gather(*self._jobs)


async def codes(calls: Iterable[Awaitable[object]]) -> list[str]:
    """The code of each refusal, empty where there was none."""
    out = []
    for call in calls:
        try:
            await call
            out.append("")
        except KvtierError as exc:
            out.append(exc.code)
    return out


# -- cancelled requests ---------------------------------------------------------------------------------------------


async def test_cancelled_work_of_many_parts_ends_only_when_the_last_has_drained() -> None:
    """One part that drained is not the word that the others have: their threads still write."""
    mover = Mover(threads=4)
    gates = [threading.Event() for _ in range(3)]
    work = asyncio.ensure_future(mover.share(threading.Event.wait, gates))
    await until(lambda: mover.running == 3)
    work.cancel()
    for gate in gates:
        assert not work.done()
        gate.set()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await work
    mover.close()


async def test_a_cancelled_commit_is_served_all_the_same() -> None:
    """Complete pages are complete: their checksums end, and nothing is left pending for ever."""
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((BIG,)))
        keys = tokens(1, 2, 3)
        reserved = await engine.reserve(keys)
        engine.write(keys, reserved)
        workers = Blocked(store)
        commit = asyncio.ensure_future(engine.call(wire.Commit(reserved.reservation, 0, 3)))
        await asyncio.sleep(0.01)
        commit.cancel()
        await asyncio.sleep(0.01)
        await workers.end()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert (await engine.call(wire.Commit(reserved.reservation, 0, 3))).published == 3
        assert await engine.get(keys) == 3
        assert not engine.process.instance.reservations
        engine.leave()
        assert idle(store) == []


async def test_pages_that_could_not_be_summed_are_not_said_to_be_as_they_were() -> None:
    """Their slots are free: who was told to try again later would write into what is somebody else's by then."""
    async with storing(None, host=8 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((BIG,)))
        reserved = await engine.reserve(tokens(1, 2, 3))
        store.parts.mover._most = 0
        assert await codes([engine.call(wire.Commit(reserved.reservation, 0, 3))]) == [Code.IO]
        assert used(store) == 0
        assert not engine.process.instance.reservations
        engine.leave()
        assert idle(store) == []


async def test_a_cancelled_reserve_returns_the_slots_it_had_found(tmp_path: Path) -> None:
    """A request that waits for room holds some already; they go back when it goes."""
    disk = Failing()
    async with storing(tmp_path, host=MIB, calls=disk) as store:
        engine, holder = Engine(store), Engine(store, "holder", pid=2)
        await engine.open(spec())
        await holder.open(spec())
        disk.gate.clear()
        assert await holder.put(tokens(*range(100))) == 100
        assert (await holder.reserve(tokens(*range(1000, 1100)))).pages == 100
        before = used(store)
        matched = await engine.match(tokens(*range(5000, 5120)))
        reserve = asyncio.ensure_future(engine.call(wire.Reserve(matched.handle, 0, 120, wait_ms=10_000)))
        await asyncio.sleep(0.02)
        assert not reserve.done()
        assert used(store) > before
        reserve.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserve
        assert used(store) == before
        disk.gate.set()
        engine.leave()
        holder.leave()
        await quiet(store)
        assert idle(store) == []


# -- slots that somebody may still write ------------------------------------------------------------------------------


async def test_slots_of_a_reset_cache_stay_until_their_writer_has_said_so() -> None:
    """An engine that commits in chunks goes on writing after somebody else's reset."""
    keys = tokens(1, 2, 3, 4)
    async with storing(None) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        reserved = await engine.reserve(keys)
        await other.call(wire.Reset(other.opened.cache))
        assert (await engine.call(wire.Commit(reserved.reservation, 0, 2))).published == 0
        assert used(store) == 4
        await engine.call(wire.Commit(reserved.reservation, 2, 2))
        assert used(store) == 0
        engine.leave()
        other.leave()
        assert idle(store) == []


async def test_slots_of_a_reset_cache_stay_while_a_sibling_may_write_them() -> None:
    """One worker has committed its shard; the other's is still being written."""
    async with storing(None) as store:
        a, b = Engine(store, pid=1), Engine(store, pid=2)
        await a.open(spec(), slices=HALVES[0], rank=0, world=2)
        await b.open(spec(), slices=HALVES[1], rank=1, world=2)
        reserved = await a.reserve(tokens(1))
        await a.call(wire.Reset(a.opened.cache))
        await a.call(wire.Commit(reserved.reservation, 0, 1))
        assert used(store) == 1
        await b.call(wire.Commit(reserved.reservation, 0, 1))
        assert used(store) == 0
        a.leave()
        b.leave()
        assert idle(store) == []


async def test_a_worker_that_has_committed_its_shard_need_not_abort_too() -> None:
    """It writes no more; the other's abort is the last word."""
    async with storing(None) as store:
        a, b = Engine(store, pid=1), Engine(store, pid=2)
        await a.open(spec(), slices=HALVES[0], rank=0, world=2)
        await b.open(spec(), slices=HALVES[1], rank=1, world=2)
        reserved = await a.reserve(tokens(1))
        await a.call(wire.Commit(reserved.reservation, 0, 1))
        await b.call(wire.Abort(reserved.reservation))
        assert used(store) == 0
        a.leave()
        b.leave()
        assert idle(store) == []


@pytest.mark.parametrize(("stored", "committed"), [(1, 0), (2, 0), (1, 1), (1, 2), (2, 3)])
async def test_a_reservation_that_begins_with_stored_pages_ends_with_its_abort(stored: int, committed: int) -> None:
    """Its engine has let go of the slots of the others, however many it had committed."""
    async with storing(None) as store:
        engine, path = Engine(store), tokens(1, 2, 3, 4)
        await engine.open(spec())
        await engine.put(path[: stored * len(path) // 4])
        reserved = await engine.reserve(path)
        engine.write(path, reserved)
        if committed:
            await engine.call(wire.Commit(reserved.reservation, 0, committed))
        await engine.call(wire.Abort(reserved.reservation))
        assert (used(store), engine.process.instance.held_bytes) == (max(stored, committed), 0)
        engine.leave()
        assert idle(store) == []


async def test_a_page_whose_parent_was_aborted_keeps_its_slots_while_they_are_written() -> None:
    """Another engine's abort does not end this one's writing."""
    async with storing(None) as store:
        a, b = Engine(store, "a", pid=1), Engine(store, "b", pid=2)
        await a.open(spec())
        await b.open(spec())
        parent = await a.reserve(tokens(1, 2))
        child = await b.reserve(tokens(1, 2, 3, 4), start=2)
        await b.call(wire.Commit(child.reservation, 2, 1))
        await a.call(wire.Abort(parent.reservation))
        assert used(store) == 2
        await b.call(wire.Commit(child.reservation, 3, 1))
        assert used(store) == 0
        a.leave()
        b.leave()
        assert idle(store) == []


async def test_a_page_committed_after_its_parent_was_aborted_waits_for_nobody() -> None:
    """No one can serve it any more: its slots return with the commit."""
    async with storing(None) as store:
        a, b = Engine(store, "a", pid=1), Engine(store, "b", pid=2)
        await a.open(spec())
        await b.open(spec())
        parent = await a.reserve(tokens(1, 2))
        child = await b.reserve(tokens(1, 2, 3), start=2)
        await a.call(wire.Abort(parent.reservation))
        reply = await b.call(wire.Commit(child.reservation, 2, 1))
        assert (reply.published, used(store)) == (0, 0)
        assert (await b.match(tokens(1, 2, 3))).pending == 0
        a.leave()
        b.leave()
        assert idle(store) == []


@pytest.mark.slow
async def test_a_long_chain_of_reservations_is_served_at_once_and_dropped_at_once() -> None:
    """Children committed long before their first parent, in any order, however many follow each other."""
    count = 1200
    path = tokens(*range(count))
    async with storing(None, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for last in (wire.Commit, wire.Abort):
            parts = [await engine.reserve(path[: (n + 1) * 8], start=n) for n in range(count)]
            for n in range(count):
                engine.write(path[: (n + 1) * 8], parts[n])
            for n in range(count - 1, 0, -1):
                assert (await engine.call(wire.Commit(parts[n].reservation, n, 1))).waiting == 1
            first = parts[0].reservation
            await engine.call(wire.Commit(first, 0, 1) if last is wire.Commit else wire.Abort(first))
            assert (await engine.match(path)).pages == (count if last is wire.Commit else 0)
            assert not engine.process.instance.reservations
            assert engine.process.instance.held_bytes == 0
            path = tokens(*range(9000, 9000 + count))
        engine.leave()
        assert idle(store) == []


async def test_a_process_that_reconnects_gets_back_what_its_lost_connection_held() -> None:
    """Unmapped is the word that nothing is touched any more: caps are whole again."""
    async with storing(None) as store:
        old = Engine(store, pid=5)
        await old.open(spec())
        await old.put(tokens(1, 2))
        await old.call(wire.Acquire((await old.match(tokens(1, 2))).handle))
        await old.reserve(tokens(7, 8))
        new = Engine(store, pid=5)
        await new.open(spec())
        kept = await new.call(wire.Acquire((await new.match(tokens(1, 2))).handle))
        store.leave(old.process, clean=False)
        store.gone(old.process, by=new.process)
        assert list(new.process.instance.leases) == [kept.lease]
        assert not new.process.instance.reservations
        assert (await new.match(tokens(7, 8))).pending == 0
        new.leave()
        assert idle(store) == []


async def test_what_a_dead_worker_held_stays_while_its_siblings_may_read_it() -> None:
    """A lease belongs to the instance: another process of it may have been told."""
    async with storing(None) as store:
        a, b = Engine(store, pid=1), Engine(store, pid=2)
        await a.open(spec())
        await b.open(spec())
        await a.put(tokens(1, 2))
        lease = await a.call(wire.Acquire((await a.match(tokens(1, 2))).handle))
        a.leave(clean=False)
        b.verify(tokens(1, 2), lease.items[0])
        await b.call(wire.Release(lease.lease))
        b.leave()
        assert idle(store) == []


# -- nothing is held for nothing -----------------------------------------------------------------------------------


async def test_a_refused_load_holds_nothing() -> None:
    """A field that is wrong leaves no lease behind."""
    fd, _ = memfd(4, 8192, sealed=True)
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2))
        region = store.register(wire.Register("engine", "cpu", 0, 8192, 4), fd, engine.process.peer).region
        lease = await engine.call(wire.Acquire((await engine.match(tokens(1, 2))).handle))
        for first in (-1, 2, 1 << 62):
            with pytest.raises(KvtierError, match="first"):
                await engine.call(wire.Load(region, 0, rows(0, 1), lease=lease.lease, first=first))
        await engine.call(wire.Release(lease.lease))
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_asking_for_what_is_stored_already_holds_nothing() -> None:
    """Reservations without slots and leases without pages end at once, however often they are asked for."""
    key = b"k" * 16
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2))
        for _ in range(10):
            reserved = await engine.reserve(tokens(1, 2))
            assert np.frombuffer(reserved.items[0].offsets, "<i8").tolist() == [-1, -1]
            assert reserved.reservation
        await engine.call(wire.Commit(reserved.reservation, 0, 2))
        number = (await engine.open(spec(key_bytes=16))).cache
        assert (await engine.call(wire.AcquireKeys(number, 0, key * 3))).lease == 0
        put = await engine.call(wire.ReserveKeys(number, 0, key))
        engine.write(key, put)
        await engine.call(wire.Commit(put.reservation, 0, 1))
        for _ in range(10):
            assert (await engine.call(wire.ReserveKeys(number, 0, key))).reservation
        instance = engine.process.instance
        assert (len(instance.reservations), len(instance.leases), instance.held_bytes) == (0, 0, 0)
        engine.leave()
        assert idle(store) == []


async def test_keys_given_twice_in_one_request_are_loaded_once(tmp_path: Path) -> None:
    """Duplicates read the same slot; none of them costs another."""
    keys = b"".join(bytes([n]) * 16 for n in (1, 2, 1, 1, 3))
    distinct = bytes([1]) * 16 + bytes([2]) * 16 + bytes([3]) * 16
    async with storing(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(spec(key_bytes=16))).cache
        put = await engine.call(wire.ReserveKeys(number, 0, keys))
        engine.write(keys, put)
        assert (await engine.call(wire.Commit(put.reservation, 0, 5))).published == 5
        assert used(store) == 3
        await engine.call(wire.Flush())
        drop_host(store)
        got = await engine.call(wire.AcquireKeys(number, 0, keys))
        offsets = np.frombuffer(got.items[0].offsets, "<i8")
        assert (offsets >= 0).all()
        engine.verify(keys, got.items[0])
        assert len(set(offsets.tolist())) == used(store) == 3
        await engine.call(wire.Release(got.lease))
        assert (await engine.call(wire.Exists(number, 0, distinct))).states == b"\3\3\3"
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_nothing_is_stored_in_a_cache_that_was_reset() -> None:
    """Rows that come for an old epoch are refused by name; its memory and its entry go with its last user."""
    fd, memory = memfd(2, 8192, sealed=True)
    async with storing(None, host=MIB) as store:
        engine = Engine(store)
        number = (await engine.open(spec(key_bytes=16))).cache
        memory[:] = 1
        region = store.register(wire.Register("engine", "cpu", 0, 8192, 2), fd, engine.process.peer).region
        other = Engine(store, "other", pid=2)
        await other.open(spec(key_bytes=16))
        await other.call(wire.Reset(other.opened.cache))
        stored = await engine.call(wire.Store(region, 0, rows(0, 1), cache=number, keys=b"a" * 16 + b"b" * 16))
        assert (stored.done, stored.refused) == (b"\0\0", Code.UNKNOWN)
        engine.leave()
        other.leave()
        assert used(store) == 0
        assert idle(store) == []
    os.close(fd)


async def test_a_process_that_holds_a_shard_cannot_store_whole_rows() -> None:
    """A row is a whole item: it would overwrite what the other ranks wrote."""
    fd, _ = memfd(2, 8192, sealed=True)
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec(), slices=HALVES[0], rank=0, world=2)
        region = store.register(wire.Register("engine", "cpu", 0, 8192, 2), fd, engine.process.peer).region
        reserved = await engine.reserve(tokens(1, 2))
        with pytest.raises(KvtierError, match="whole items"):
            await engine.call(wire.Store(region, 0, rows(0, 1), reservation=reserved.reservation))
        number = (await engine.open(spec(key_bytes=16), slices=HALVES[0], rank=0, world=2)).cache
        with pytest.raises(KvtierError, match="whole items"):
            await engine.call(wire.Store(region, 0, rows(0), cache=number, keys=b"a" * 16))
        engine.leave()
        assert idle(store) == []
    os.close(fd)


# -- room -----------------------------------------------------------------------------------------------------------


async def test_a_group_gets_room_from_another_group_of_its_own_cache() -> None:
    """Pages that fill the arena do not keep state points out for ever, nor are all of them lost for one."""
    groups = (FULL, STATE)
    async with storing(None, host=2 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        for n in range(1, 30):
            await engine.put(tokens(*range(100 * n, 100 * n + 20)))
        pool = store.parts.host.pools[0]
        assert pool.used(1) == 0
        last = wire.Want(1, (19).to_bytes(4, "little"))
        keys = tokens(*range(9000, 9020))
        assert await engine.put(keys, wants=(last,), wait_ms=2000) == 20
        assert await engine.get(keys) == 20
        assert pool.used(0) > pool.capacity(0) // 2
        engine.leave()
        assert idle(store) == []


async def test_a_slab_that_was_being_emptied_is_open_again_after_a_cancellation() -> None:
    """Who asked for its room is gone; the slab serves its own pool as before."""
    async with storing(None, host=2 * MIB) as store:
        full, late = Engine(store, "full", pid=1), Engine(store, "late", pid=2)
        await full.open(spec())
        await late.open(spec((GroupSpec(Kind.FULL, 1, 1, 60_000),), model="big"))
        for n in range(1, 30):
            await full.put(tokens(*range(100 * n, 100 * n + 20)))
        gate = threading.Event()
        job = asyncio.ensure_future(store.parts.mover.run(gate.wait, urgency=Urgency.BACKGROUND))
        matched = await late.match(tokens(*range(10)))
        ask = asyncio.ensure_future(late.call(wire.Reserve(matched.handle, 0, 10, wait_ms=5000)))
        pool = full.store.parts.host.pools[0]
        await until(lambda: any(slab.closed for slab in pool.slabs))
        ask.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        await job
        with pytest.raises(asyncio.CancelledError):
            await ask
        assert not any(slab.closed for slab in pool.slabs)
        for n in range(1, 30):
            await full.get(tokens(*range(100 * n, 100 * n + 20)))
        full.leave()
        late.leave()
        assert idle(store) == []


# -- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_handle_that_is_polled_with_more_tokens_stays_within_the_bound() -> None:
    """Paths have a bound however they grow: older ones are forgotten, one that alone is too long is refused."""
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        instance = engine.process.instance
        part = bytes(16 * MIB)
        handles = [(await engine.match(part)).handle for _ in range(12)]
        for handle in handles[8:]:
            for _ in range(3):
                await engine.match(part, handle)
                assert instance.path_bytes == sum(len(p.keys) for p in instance.paths.values()) <= 256 * MIB
        assert handles[0] not in instance.paths
        with pytest.raises(KvtierError) as caught:
            await engine.match(part, handles[-1])
        assert caught.value.code == Code.OVER_CAP


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_cache_that_a_peer_pushes_to_is_not_forgotten_while_it_waits_for_room(
    tmp_path: Path, *, keyed: bool
) -> None:
    """An engine that leaves meanwhile does not take the cache's memory out of the books."""
    disk = Failing()
    async with storing(tmp_path, host=MIB, calls=disk, cap=1.0) as store:
        engine = Engine(store)
        await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, 4096),), page_tokens=1))
        disk.gate.clear()
        assert await engine.put(tokens(*range(256), page_tokens=1)) == 256
        key = {"key_bytes": 16} if keyed else {}
        cache = store.parts.cache(spec((GroupSpec(Kind.FULL, 1, 1, 8192),), page_tokens=1, **key), "uid:0", 0)
        guest = Guest(store.parts, "home", MIB, room_ms=20_000)  # a busy machine takes longer than a push waits
        if keyed:
            waits = asyncio.ensure_future(guest.reserve_keys(store.keys, cache, 0, bytes(range(64))))
        else:
            waits = asyncio.ensure_future(guest.reserve(store.tokens, cache, tokens(1, 2, page_tokens=1), 0, {}))
        await asyncio.sleep(0.01)
        assert not waits.done()  # nothing can go before it is on disk
        Engine(store, "other", pid=2).leave()
        assert store.parts.caches.get(cache.number) is cache
        disk.gate.set()
        assert (await waits).res.pages == (4 if keyed else 2)
        assert store.parts.check() == []
        guest.end(store.commits)
        engine.leave()
        await quiet(store)
        assert cache.number not in store.parts.caches
        assert idle(store) == []


async def test_a_reset_frees_what_is_old_beside_requests_that_find_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have their turn after each slice, however much there is; in the end memory and disk are empty."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(tmp_path) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        for n in range(40):
            await engine.put(tokens(n, 1, 2))
        lease = await other.call(wire.Acquire((await other.match(tokens(39, 1, 2))).handle))
        await engine.call(wire.Flush())
        old = store.parts.caches[engine.opened.cache]
        reset = asyncio.ensure_future(engine.call(wire.Reset(old.number)))
        for _ in range(3):
            await asyncio.sleep(0)
            assert (await other.match(tokens(39, 1, 2))).pages == 0
        assert old.index.nodes > 20
        assert old.disk is not None
        engine.opened = await reset
        other.verify(tokens(39, 1, 2), lease.items[0])
        await other.call(wire.Release(lease.lease))
        for each in (engine, other):
            each.leave()
        await until(lambda: not store.parts.freeing and not store.parts.disk.used_bytes)
        assert idle(store) == []
        assert old.number not in store.parts.caches
        assert not any(pool.used(0) for pool in store.parts.host.pools)


async def test_a_drain_right_after_a_reset_leaves_nothing_of_the_old_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not freed by then is gone from disk all the same, and is not waited for."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        for n in range(200):
            await engine.put(tokens(n))
        await engine.call(wire.Flush())
        old = store.parts.caches[engine.opened.cache]
        store.parts.retire(old)
        await asyncio.sleep(0)
    assert old.index.nodes
    async with storing(tmp_path) as store:
        assert store.parts.disk.caches() == {}


@pytest.mark.parametrize("how", ["reset", "purge", "rot"])
async def test_a_pin_holds_nothing_that_is_not_served_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Old weights, a purged tenant, a lost page: their room returns, and what is left of it stays pinned."""
    monkeypatch.setattr("kvtier.store.pins.LOOK_S", 0.01)
    async with storing(None, host=4 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec((FULL,), salt=b"tenant"))
        keys = tokens(*range(8))
        assert await engine.put(keys) == 8
        await store.admin[wire.Pin](wire.Pin(wire.Prompt(tokens=keys)))
        (cache,) = store.parts.caches.values()
        if how == "reset":
            await engine.call(wire.Reset(cache.number))
        elif how == "purge":
            await store.admin[wire.Purge](wire.Purge(salt=b"tenant"))
        else:
            index = cache.radix
            cache.release(index.cut(index.cut_at(index.deepest(keys)[0], 5)).freed, None)
        await until(lambda: not cache.index.doomed)
        rows = store.admin[wire.Pins](wire.Pins()).data["pins"]
        assert [(row["pages"], row["lost"]) for row in rows] == ([(5, True)] if how == "rot" else [])
        assert sum(store.parts.host.pools[0].used(group) for group in range(1)) == (5 if how == "rot" else 0)
        assert store.parts.check() == []
        store.admin[wire.Unpin](wire.Unpin())
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_resets_leave_no_caches_behind() -> None:
    """An engine that changes its weights every minute for a month uses no more memory than at first."""
    async with storing(None) as store:
        engine, other = Engine(store), Engine(store, "other", pid=2)
        await engine.open(spec())
        await other.open(spec())
        for n in range(50):
            await engine.put(tokens(n))
            engine.opened = await engine.call(wire.Reset(engine.opened.cache))
        assert len(store.parts.caches) <= 2
        assert len(engine.process.ranks) <= 2
        assert len(engine.process.instance.shards) <= 2
        other.opened = await other.call(wire.Reset(other.opened.cache))
        assert other.opened.epoch == engine.opened.epoch
        engine.leave()
        other.leave()
        assert idle(store) == []


@pytest.mark.slow
async def test_caches_and_scopes_are_bounded() -> None:
    """Each costs memory or descriptors: beyond the bound they are refused by name, and empty ones make place."""
    async with storing(None) as store:
        engine = Engine(store)
        for n in range(5000):
            await engine.open(spec(salt=n.to_bytes(4, "little")))
            if n % 1000 == 999:
                engine.leave()
                engine = Engine(store)
        assert len(store.parts.caches) <= 4096
        refused = await codes(engine.open(spec(salt=n.to_bytes(4, "little"))) for n in range(5000))
        assert refused[0] == ""
        assert refused[-1] == Code.OVER_CAP
        engine.leave()
    async with storing(None) as store:
        some = [Engine(store, scope=f"s{n}") for n in range(64)]
        with pytest.raises(KvtierError) as caught:
            Engine(store, scope="one more")
        assert caught.value.code == Code.OVER_CAP
        some[7].leave()
        Engine(store, scope="one more")


async def test_durable_is_told_to_the_process_whose_pages_they_are(tmp_path: Path) -> None:
    """Pages that waited for another engine's are not that engine's business."""
    async with storing(tmp_path) as store:
        a, b = Engine(store, "a", pid=1), Engine(store, "b", pid=2)
        await a.open(spec())
        await b.open(spec())
        parent = await a.reserve(tokens(1))
        child = await b.reserve(tokens(1, 2), start=1)
        a.write(tokens(1), parent)
        b.write(tokens(1, 2), child)
        await b.call(wire.Commit(child.reservation, 1, 1))
        await a.call(wire.Commit(parent.reservation, 0, 1))
        await a.call(wire.Flush())
        assert [e.reservation for e in a.events] == [parent.reservation]
        assert [e.reservation for e in b.events] == [child.reservation]
