"""What went wrong in other KV stores and must hold here: copies in flight, tiers, counting, restarts, wrong inputs."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.heat import Heat
from kvtier.identity import GroupSpec, Slice
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.region import Region
from kvtier.types import Code, Kind, KvtierError, Tier
from storekit import MIB, Failing, drop_host, memfd, quiet, rows, storing, until

PAGE = spec((GroupSpec(Kind.FULL, 1, 1, 32_000),))
KEYED = spec(key_bytes=16)


class Held:
    """Holds a call of worker threads until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        real = getattr(owner, name)

        def held(*args: Any) -> Any:
            self.started.set()
            self.go.wait()
            return real(*args)

        monkeypatch.setattr(owner, name, held)


# -- copies in flight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["evict", "reset", "die"])
async def test_slots_being_read_into_are_nobodys_until_the_read_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """A load back that outlives its engine, its cache or its pages writes into no slot that was given to others."""
    async with storing(tmp_path, host=2 * MIB) as store:
        engine, other = Engine(store, pid=1), Engine(store, "other", pid=2)
        await engine.open(PAGE)
        await other.open(PAGE)
        await engine.put(tokens(*range(20)))
        await quiet(store)
        drop_host(store)
        read = Held(monkeypatch, DiskTier, "read")
        handle = (await engine.match(tokens(*range(20)))).handle
        loading = asyncio.ensure_future(engine.call(wire.Acquire(handle, wait_ms=20_000)))
        try:
            await until(read.started.is_set)
            if meanwhile == "evict":
                drop_host(store)
            elif meanwhile == "reset":
                await other.call(wire.Reset(other.opened.cache))
                await other.open(PAGE)
            else:
                loading.cancel()
                await asyncio.wait([loading])
                engine.leave(clean=False)
            path = tokens(*range(500, 550))
            stored = await other.put(path, wait_ms=300)
            assert stored > 20
        finally:
            read.go.set()
        await asyncio.wait([loading])
        await until(lambda: not store.parts.loads.moving)
        assert await other.get(path) == stored
        if meanwhile == "evict":
            engine.verify(tokens(*range(20)), loading.result().items[0])
        for each in (engine, other):
            if each.process in each.process.instance.processes:
                each.leave()
        store.parts.prune()
        await quiet(store)
        assert idle(store) == []


async def test_a_source_stays_until_the_last_byte_has_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is released while its pages are copied out, and a host that is full, change nothing of the copy."""
    fd, memory = memfd(4, 32768, sealed=True)
    async with storing(None, host=2 * MIB) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        path = tokens(1, 2, 3, 4)
        await engine.put(path)
        region = store.register(wire.Register("engine", "rows", 0, 32768, 4), fd, engine.process.peer).region
        lease = await engine.call(wire.Acquire((await engine.match(path)).handle))
        write = Held(monkeypatch, Region, "write")
        load = asyncio.ensure_future(engine.call(wire.Load(region, 0, rows(0, 1, 2, 3), lease=lease.lease)))
        try:
            await until(write.started.is_set)
            await engine.call(wire.Release(lease.lease))
            for n in range(100, 160):
                await engine.put(tokens(n))
        finally:
            write.go.set()
        assert (await load).done == b"\1" * 4
        for n in range(4):
            assert np.array_equal(memory[n, :32_000], content(path[: (n + 1) * 8], 0, 32_000))
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_a_cancelled_store_reads_no_row_after_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that an engine takes back early reach no key: another request's bytes never stand under this one's."""
    fd, memory = memfd(2, 8192, sealed=True)
    async with storing(None) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        region = store.register(wire.Register("engine", "rows", 0, 8192, 2), fd, engine.process.peer).region
        read = Held(monkeypatch, Region, "read")
        keys = b"a" * 16 + b"b" * 16
        storing_rows = asyncio.ensure_future(engine.call(wire.Store(region, 0, rows(0, 1), cache=number, keys=keys)))
        await until(read.started.is_set)
        storing_rows.cancel()
        await asyncio.sleep(0.02)
        assert not storing_rows.done()
        read.go.set()
        await asyncio.wait([storing_rows])
        memory[:] = 7
        assert (await engine.call(wire.Exists(number, 0, keys))).states == b"\0\0"
        engine.leave()
        assert idle(store) == []
    os.close(fd)


async def test_rows_that_cannot_be_read_are_not_stored() -> None:
    """A failed store is never found by a later question: a file that became shorter than its rows."""
    fd, _ = memfd(4, 8192, sealed=False)
    async with storing(None) as store:
        engine = Engine(store)
        number = (await engine.open(KEYED)).cache
        region = store.register(wire.Register("engine", "rows", 0, 8192, 4), fd, engine.process.peer).region
        os.ftruncate(fd, 2 * 8192)
        keys = b"".join(bytes([n]) * 16 for n in range(4))
        stored = await engine.call(wire.Store(region, 0, rows(0, 1, 2, 3), cache=number, keys=keys))
        assert stored.done == b"\1\1\0\0"
        assert (await engine.call(wire.Exists(number, 0, keys))).states == b"\3\3\0\0"
        engine.leave()
        assert idle(store) == []
    os.close(fd)


# -- tiers -----------------------------------------------------------------------------------------------------------


async def test_pages_evicted_from_host_are_hits_of_disk_and_counted_as_such(tmp_path: Path) -> None:
    """Demoted, not pruned: the next match finds all of them on disk, and every hit is counted by its tier."""
    async with storing(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3, 4))
        await quiet(store)
        assert (await engine.match(tokens(1, 2, 3, 4))).segments == (wire.Segment(Tier.HOST, 4),)
        drop_host(store)
        assert (await engine.match(tokens(1, 2, 3, 4))).segments == (wire.Segment(Tier.DISK, 4),)
        assert store.parts.counts["tokens_hit_host"] == store.parts.counts["tokens_hit_disk"] == 8
        assert await engine.get(tokens(1, 2, 3, 4)) == 4
        assert store.parts.counts["pages_loaded_disk"] == 4


@pytest.mark.parametrize("pages", [40, 200])
async def test_a_prompt_larger_than_host_is_served_as_far_as_host_goes(tmp_path: Path, pages: int) -> None:
    """What both tiers hold makes room first: a host far smaller than disk never stops serving its prefixes."""
    path = tokens(*range(pages))
    async with storing(tmp_path, host=MIB, cap=2.0) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        for end in range(10, pages + 1, 10):
            assert await engine.put(path[: end * 8], end - 10, wait_ms=5000) == 10
        await quiet(store)
        for _ in range(2):
            assert (await engine.match(path)).pages == pages
            assert await engine.get(path, wait_ms=1500) >= min(pages, 20)
            assert await engine.get(tokens(*range(5)), wait_ms=5000) == 5
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def test_a_prompt_that_disk_declines_makes_no_room_of_its_own_pages(tmp_path: Path) -> None:
    """What host alone has of it stays when its next pages find no room: they are of no use without it.

    Of another prompt that goes on from the same pages, all but these go.
    """
    disk = Failing()
    path, other = tokens(*range(200)), tokens(*range(5), *range(1000, 1200))
    async with storing(tmp_path, host=MIB, cap=2.0, calls=disk) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        disk.broken = True
        there = await engine.put(path, wait_ms=500)
        assert 0 < there < 200
        await until(lambda: not store.parts.persist.pending)
        for _ in range(3):
            await engine.put(path, there, wait_ms=100)
            assert (await engine.match(path)).pages == there
        assert await engine.put(other, 5, wait_ms=500) > 0
        assert (await engine.match(path)).pages >= 5
        disk.broken = False


async def test_a_burst_of_many_times_the_host_drops_nothing(tmp_path: Path) -> None:
    """Room is made on demand, not by a clock: eight times the host back to back, each page granted and durable."""
    async with storing(tmp_path, host=MIB, disk=32 * MIB) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        for n in range(64):
            assert await engine.put(tokens(n, n, n, n), wait_ms=10_000) == 4
        await engine.call(wire.Flush(wait_ms=20_000))
        assert [await engine.get(tokens(n, n, n, n)) for n in range(64)] == [4] * 64
        assert not store.parts.counts["pages_lost_unsaved"]


async def test_a_stuck_disk_costs_a_store_its_deadline_and_others_nothing(tmp_path: Path) -> None:
    """With no write ending, who needs room is refused by name; matches and reads go on meanwhile."""
    calls = Failing()
    async with storing(tmp_path, host=MIB, calls=calls, cap=2.0) as store:
        engine = Engine(store)
        await engine.open(PAGE)
        calls.gate.clear()
        try:
            assert await engine.put(tokens(*range(24)), wait_ms=50) == 24
            waiting = asyncio.ensure_future(engine.reserve(tokens(*range(100, 116)), wait_ms=300))
            while not waiting.done():
                assert (await engine.match(tokens(*range(24)))).pages == 24
                await asyncio.sleep(0.01)
            assert (await waiting).refused == Code.NO_SPACE
            assert await engine.get(tokens(*range(24))) == 24
        finally:
            calls.gate.set()
        engine.leave()
        await quiet(store)
        assert idle(store) == []


# -- counting --------------------------------------------------------------------------------------------------------


async def test_one_request_is_one_use_from_its_match_to_its_last_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls, chunks, leases and commits of a request count once together; a second request counts again."""
    uses: list[int] = []
    real = Heat.use
    monkeypatch.setattr(Heat, "use", lambda self, node, now: (uses.append(node.end), real(self, node, now))[1])
    async with storing(None) as store:
        engine = Engine(store)
        await engine.open(spec())
        await engine.put(tokens(1, 2, 3, 4))
        uses.clear()
        path = tokens(1, 2, 3, 4, 5, 6, 7, 8)
        handle = (await engine.match(path[:32])).handle
        for chunk in (path[32:48], path[48:], b"", b""):
            await engine.match(chunk, handle)
        lease = await engine.call(wire.Acquire(handle))
        reserved = await engine.call(wire.Reserve(handle, 4, 4))
        engine.write(path, reserved)
        for page in range(4, 8):
            await engine.call(wire.Commit(reserved.reservation, page, 1))
        await engine.match(b"", handle)
        await engine.call(wire.Release(lease.lease))
        assert uses == [4]
        await engine.match(path)
        assert uses == [4, 8]


# -- restarts --------------------------------------------------------------------------------------------------------


async def test_after_a_restart_the_same_prompts_hit_as_before_and_usage_is_known(tmp_path: Path) -> None:
    """Nothing that was stored is forgotten or left behind: hits, bytes used and the hard cap are those of before."""
    rng = np.random.default_rng(3)
    groups = (FULL, WINDOW, STATE)
    paths = [tokens(0, *rng.integers(0, 3, rng.integers(1, 12))) for _ in range(60)]
    async with storing(tmp_path, disk=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        for path in paths:
            last = np.array([len(path) // 8 - 1], "<i4").tobytes()
            await engine.put(path, wants=(wire.Want(2, last),))
        await quiet(store)
        before = [(await engine.match(path)).pages for path in paths]
        used = store.parts.disk.used_bytes
        assert before == [len(path) // 8 for path in paths]
    async with storing(tmp_path, disk=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        assert [(await engine.match(path)).pages for path in paths] == before
        assert store.parts.disk.used_bytes == used
        assert [await engine.get(path) for path in paths] == before
        assert not store.parts.counts["orphan_pages"]
        await engine.open(PAGE)
        for n in range(200):
            await engine.put(tokens(1000 + n, n, n), wait_ms=2000)
        await quiet(store)
        assert store.parts.disk.used_bytes <= 16 * MIB
        assert next(tmp_path.glob("*extents*")).stat().st_size <= 16 * MIB
        assert store.parts.counts["pages_evicted_disk"] > 0


async def test_what_was_committed_is_there_for_the_very_next_request_of_anybody() -> None:
    """The reply to a commit comes after the pages are served, small or large."""
    async with storing(None, host=8 * MIB) as store:
        for size in (4_000, 900_000):
            writer, reader = Engine(store, "writer", pid=1), Engine(store, "reader", pid=2)
            for engine in (writer, reader):
                await engine.open(spec((GroupSpec(Kind.FULL, 1, 1, size),)))
            for n in range(4):
                reserved = await writer.reserve(tokens(n))
                writer.write(tokens(n), reserved)
                commit = writer.store.verbs[wire.Commit](writer.process, wire.Commit(reserved.reservation, 0, 1))
                committed = await commit if inspect.isawaitable(commit) else commit
                assert committed.published == 1
                assert store.verbs[wire.Match](reader.process, wire.Match(reader.opened.cache, 0, tokens(n))).pages == 1
            writer.leave()
            reader.leave()


# -- wrong inputs ----------------------------------------------------------------------------------------------------

numbers = st.one_of(st.integers(-2, 5), st.sampled_from([-(1 << 63), (1 << 63) - 1, 1 << 31, 1 << 44, 1 << 62]))
raw = st.one_of(st.binary(max_size=40), st.integers(0, 5).map(lambda n: tokens(*range(n))), st.just(rows(0, -1, 9)))
kinds = {
    int: numbers, bytes: raw, bool: st.booleans(),
    str: st.one_of(st.text(max_size=5), st.sampled_from(["continues", "waiting", "dead"])),
    float: st.sampled_from([0.0, -1.0, 0.5, 1e4, 1e300, math.inf, math.nan]),
    tuple[int, ...]: st.lists(numbers, max_size=3).map(tuple),
    tuple[wire.Want, ...]: st.lists(st.builds(wire.Want, numbers, raw), max_size=2).map(tuple),
    tuple[wire.Sums, ...]: st.lists(st.builds(wire.Sums, numbers, raw), max_size=2).map(tuple),
    tuple[wire.Elsewhere, ...]: st.just((wire.Elsewhere("b", spec()),)),
    tuple[Slice, ...]: st.lists(st.builds(Slice, *[numbers] * 4), max_size=2).map(tuple),
}  # fmt: skip
VERBS = (
    wire.Reset, wire.Unregister, wire.Match, wire.Acquire, wire.Release, wire.Forget, wire.Prefetch, wire.Reserve,
    wire.Commit, wire.Abort, wire.Exists, wire.AcquireKeys, wire.ReserveKeys, wire.Load, wire.Store, wire.Flush,
    wire.Hint, wire.Order, wire.Push, wire.Agree,
)  # fmt: skip


def any_message(real: dict[str, list[int]]) -> st.SearchStrategy[wire.Message]:
    """A message of any verb, with numbers that often are real ones."""

    def field(info: msgspec.structs.FieldInfo) -> st.SearchStrategy[Any]:
        if info.name == "wait_ms":
            return st.sampled_from([0, 5, -1, 1 << 40])
        if info.name == "handles":
            return st.lists(st.sampled_from(real["handle"]), min_size=1, max_size=3).map(tuple)
        if info.name in real:
            return st.one_of(st.sampled_from(real[info.name]), numbers)
        return kinds[info.type]

    return st.one_of(
        *(st.builds(verb, **{info.name: field(info) for info in msgspec.structs.fields(verb)}) for verb in VERBS)
    )


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_values_of_fields_give_a_reply_or_a_refusal_by_name(data: st.DataObject) -> None:
    """No combination of flags and numbers is a fault of the daemon, holds it up, or takes anything from another."""
    asyncio.run(_fuzz(data))


async def _fuzz(data: st.DataObject) -> None:
    fd, _ = memfd(8, 32768, sealed=True)
    async with storing(None, host=MIB) as store:
        victim, fuzzer = Engine(store, "victim", pid=1), Engine(store, "fuzzer", pid=2)
        for engine, model in ((victim, "victim"), (fuzzer, "m")):
            await engine.open(spec((FULL, WINDOW, STATE), model=model))
        keyed = (await fuzzer.call(wire.Open(KEYED))).cache
        await victim.put(tokens(0, 1, 2), wants=(wire.Want(2, b"\2\0\0\0"),))
        region = store.register(wire.Register("fuzzer", "rows", 0, 32768, 8), fd, fuzzer.process.peer).region
        foreign = await victim.reserve(tokens(7, 8))
        lease = await victim.call(wire.Acquire((await victim.match(tokens(0, 1, 2))).handle))
        real = {
            "cache": [fuzzer.opened.cache, keyed, victim.opened.cache], "region": [region], "group": [0, 1, 2],
            "first": [0, 1], "start": [0, 1], "pages": [1, 2, -1],
            "handle": [(await fuzzer.match(tokens(*range(5)))).handle],
            "lease": [0, lease.lease], "reservation": [0, foreign.reservation],
        }  # fmt: skip
        for _ in range(data.draw(st.integers(1, 12))):
            message = data.draw(any_message(real))
            try:
                reply = await asyncio.wait_for(fuzzer.call(message), 20)
            except KvtierError as exc:
                assert exc.code not in {Code.INTERNAL, Code.IO} or isinstance(message, wire.Flush), (message, exc)
                continue
            for name, kind in (("lease", wire.Acquired), ("reservation", wire.Reserved), ("handle", wire.Matched)):
                if isinstance(reply, kind):
                    real[name].append(getattr(reply, name))
            assert store.parts.check() == []
        victim.verify(tokens(0, 1, 2), lease.items[0])
        victim.write(tokens(7, 8), foreign)
        assert (await victim.call(wire.Commit(foreign.reservation, 0, 2))).published == 2
        fuzzer.leave()
        victim.leave()
        store.parts.prune()
        assert idle(store) == []
    os.close(fd)
