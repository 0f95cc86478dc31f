"""One process writes each shard of a reservation: no replica writes into slots that were served and given away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.client import Client, page_keys
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import Code, Kind, KvtierError
from storekit import storing

SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 2, 4, 512),))
HALVES = ((Slice(0, 2, 0, 2),), (Slice(0, 2, 2, 4),))


def keys(*pages: int) -> bytes:
    """Page keys of pages that repeat one token."""
    return page_keys(SPEC, np.repeat(np.array(pages, np.int32), SPEC.page_tokens))


def data(byte: int, share: int = 1) -> np.ndarray:
    """An item, or a rank's part of it."""
    return np.full(2 * 4 * 512 // share, byte, np.uint8)


@pytest.fixture
def processes(daemon: Daemon) -> Iterator[Any]:
    """Opens the cache as one more process of an instance."""
    with contextlib.ExitStack() as stack:

        def start(rank: int = -1, slices: tuple[Slice, ...] = (), world: int = 2) -> Any:
            client = stack.enter_context(Client(daemon.socket, instance="replicas", timeout_s=10.0, verify="always"))
            return client.open(SPEC, rank=rank, world=world, slices=slices)

        yield start


def test_a_slow_replica_writes_nothing_into_slots_that_others_have_by_then(processes: Any) -> None:
    """A page is served, goes, and its slot is another prompt's by then: a replica that held it too cannot touch it."""
    fast, slow = processes(0), processes(1)
    mine = fast.match(keys(1)).reserve(0, 1, wait_ms=1000)
    late = slow.adopt(mine.share())
    assert mine.write(0, 0, data(1))
    assert mine.commit() == 1
    fast.reset()
    with fast.match(keys(2)).reserve(0, 1, wait_ms=1000) as other:
        assert other.write(0, 0, data(2))
        assert not late.write(0, 0, data(9))
        assert late.view(0, 0) is None
        late.write_pages(0, 0, data(9)[None])
        assert other.commit() == 1
    out = np.empty_like(data(0))
    with fast.match(keys(2)).acquire() as lease:
        assert lease.read(0, 0, out)
        assert (out == 2).all()


def test_of_replicas_of_a_shard_the_first_writes_what_a_scheduler_reserves(processes: Any) -> None:
    """A scheduler beside four workers, two for each half: one of each pair writes, and the page is whole."""
    scheduler = processes()
    workers = [processes(rank, HALVES[rank // 2], 4) for rank in range(4)]
    held = scheduler.match(keys(1)).reserve(0, 1, wait_ms=1000)
    assert not held.writes
    assert not held.write(0, 0, data(7))
    parts = [worker.adopt(held.share()) for worker in workers]
    assert [part.writes for part in parts] == [True, False, True, False]
    assert [part.write(0, 0, data(n, 2)) for n, part in enumerate(parts)] == [True, False, True, False]
    assert [parts[n].commit() for n in (1, 3, 0, 2)] == [0, 0, 0, 1]
    out = np.empty_like(data(0))
    with scheduler.match(keys(1)).acquire() as lease:
        assert lease.read(0, 0, out)
    assert set(out.reshape(2, 4, 512)[:, :2].flat) == {0}
    assert set(out.reshape(2, 4, 512)[:, 2:].flat) == {2}


def test_who_reserved_writes_its_shard_even_where_it_is_not_the_first(processes: Any) -> None:
    """Replicas that each store what they compute themselves both store it."""
    first, second = processes(0), processes(1)
    for n, (one, other) in enumerate([(second, first), (first, second)]):
        held = one.match(keys(n)).reserve(0, 1, wait_ms=1000)
        assert not other.adopt(held.share()).writes
        assert held.write(0, 0, data(n))
        assert held.commit() == 1


def test_rows_of_a_replica_that_does_not_write_are_not_stored_and_no_fault(processes: Any) -> None:
    """As a worker finds out that was started again: what was reserved before is not its to write."""
    scheduler, first, second = processes(), processes(0), processes(1)
    fd = os.memfd_create("rows")
    os.ftruncate(fd, 4096)
    os.pwrite(fd, data(5).tobytes(), 0)
    with scheduler.match(keys(31)).reserve(0, 1, wait_ms=1000) as held:
        shares = [each.adopt(held.share()) for each in (second, first)]
        assert [each.writes for each in shares] == [False, True]
        regions = [each.client.register("rows", fd, 0, 4096, 1) for each in (second, first)]
        assert regions[0].store(shares[0], [0]) == b"\0"
        assert regions[1].store(shares[1], [0]) == b"\1"
        assert shares[1].commit() == 1
    os.close(fd)
    out = np.empty_like(data(0))
    with first.match(keys(31)).acquire() as lease:
        assert lease.read(0, 0, out)
    assert (out == 5).all()


def test_one_worker_writes_what_its_scheduler_reserves(processes: Any) -> None:
    """Tensor parallelism of one: the scheduler holds whole items too, and writes none."""
    scheduler, worker = processes(), processes(0, world=1)
    held = scheduler.match(keys(1)).reserve(0, 1, wait_ms=1000)
    part = worker.adopt(held.share())
    assert (held.writes, part.writes) == (False, True)
    assert part.write(0, 0, data(1))
    assert held.commit() == 0
    assert part.commit() == 1


def test_a_worker_that_comes_late_does_not_write_what_is_over(daemon: Daemon, processes: Any) -> None:
    """It hears of a reservation after the others have let go of it, when its slots are another engine's."""
    scheduler, first = processes(), processes(0, HALVES[0])
    held = scheduler.match(keys(1, 2)).reserve(0, 2, wait_ms=1000)
    share = held.share()
    first.adopt(share).abort()
    held.abort()
    with Client(daemon.socket, instance="other", verify="always") as other:
        path = other.open(SPEC).match(keys(3, 4))
        with path.reserve(0, 2, wait_ms=1000) as theirs:
            assert [theirs.write(0, page, data(page + 3)) for page in range(2)] == [True, True]
            assert theirs.commit() == 2
        late = processes(1, HALVES[1]).adopt(share)
        assert (late.writes, late.write(0, 0, data(9, 2))) == (False, False)
        with path.acquire() as lease:
            assert [int(lease.view(0, page)[-1]) for page in range(2)] == [3, 4]


def test_a_worker_that_comes_late_writes_what_is_open(daemon: Daemon, processes: Any) -> None:
    """Also where its siblings reserved something after that of which all was stored: that had no slots."""
    with Client(daemon.socket, instance="other") as other:
        assert other.open(SPEC).match(keys(2)).put(0, [data(2)[None]]) == 1
    scheduler, first = processes(), processes(0, HALVES[0])
    held = scheduler.match(keys(1)).reserve(0, 1, wait_ms=1000)
    assert scheduler.match(keys(2)).reserve(0, 1, wait_ms=1000).pages == 1
    part, late = first.adopt(held.share()), processes(1, HALVES[1]).adopt(held.share())
    assert [each.write(0, 0, data(1, 2)) for each in (part, late)] == [True, True]
    assert (part.commit(), late.commit()) == (0, 1)


def test_what_another_instance_holds_is_not_adopted(daemon: Daemon, processes: Any) -> None:
    """Such as by a rank that was given no instance's name: it would go on to write where the others have let go."""
    scheduler = processes()
    processes(0, HALVES[0])
    with Client(daemon.socket, instance="alone") as other:
        rank = other.open(SPEC, rank=1, world=2, slices=HALVES[1])
        held = scheduler.match(keys(1)).reserve(0, 1, wait_ms=1000)
        with pytest.raises(KvtierError, match="instance, alone") as caught:
            rank.adopt(held.share())
        assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, "share")


async def test_what_is_over_tells_the_first_of_a_shard_what_it_may_write() -> None:
    """What is open before that is given up, as it would never be whole."""
    async with storing(None) as store:
        scheduler, *workers = (Engine(store, pid=pid) for pid in range(1, 4))
        await scheduler.open(spec())
        halves = [(Slice(0, 2, rank, rank + 1),) for rank in range(2)]
        await workers[0].open(spec(), slices=halves[0], rank=0, world=2)
        waits, over = await scheduler.reserve(tokens(1)), await scheduler.reserve(tokens(2))
        for engine in (scheduler, workers[0]):
            await engine.call(wire.Abort(over.reservation))
        opened = await workers[1].open(spec(), slices=halves[1], rank=1, world=2)
        assert opened.writes_above >= over.reservation
        assert (await workers[0].call(wire.Commit(waits.reservation, 0, 1))).published == 0
        assert store.parts.host.pools[0].used(0) == 0
        for engine in (scheduler, *workers):
            engine.leave()
        assert idle(store) == []


async def test_an_abort_waits_for_who_writes_and_for_nobody_else() -> None:
    """A scheduler and replicas write nothing: slots of an aborted page return without their word."""
    async with storing(None) as store:
        scheduler, *workers = (Engine(store, pid=pid) for pid in range(1, 6))
        await scheduler.open(spec())
        for rank, worker in enumerate(workers):
            await worker.open(spec(), slices=(Slice(0, 2, rank // 2, rank // 2 + 1),), rank=rank, world=4)
        reserved = await scheduler.reserve(tokens(1))
        assert not reserved.writes
        pool = store.parts.host.pools[0]
        for at, used in ((1, 1), (0, 1), (2, 0)):
            await workers[at].call(wire.Abort(reserved.reservation))
            assert pool.used(0) == used, at
        for engine in (scheduler, *workers):
            engine.leave()
        assert idle(store) == []


async def test_the_next_to_open_writes_for_a_writer_that_is_gone_but_not_what_that_may_still_write() -> None:
    """A lost connection proves nothing: reservations of its time stay its own until its process has ended."""
    async with storing(None) as store:
        scheduler, old, new = Engine(store, pid=1), Engine(store, pid=2), Engine(store, pid=3)
        await scheduler.open(spec())
        await old.open(spec(), rank=0)
        before = await scheduler.reserve(tokens(1))
        store.leave(old.process, clean=False)
        opened = await new.open(spec(), rank=0)
        assert opened.writes_above > before.reservation
        after = await scheduler.reserve(tokens(2))
        assert opened.writes_above < after.reservation
        assert (await new.call(wire.Commit(before.reservation, 0, 1))).published == 0
        new.write(tokens(2), after)
        assert (await new.call(wire.Commit(after.reservation, 0, 1))).published == 1
        await new.call(wire.Abort(before.reservation))
        pool = store.parts.host.pools[0]
        assert pool.used(0) == 2
        store.gone(old.process)
        assert pool.used(0) == 1
        for engine in (scheduler, new):
            engine.leave()
        assert idle(store) == []


async def test_workers_with_and_without_slices_do_not_mix() -> None:
    """Both would write the same cells."""
    async with storing(None) as store:
        for first, second in (((), (Slice(0, 2, 0, 1),)), ((Slice(0, 2, 0, 1),), ())):
            a, b = Engine(store, pid=1), Engine(store, pid=2)
            await a.open(spec(), slices=first, rank=0, world=2)
            with pytest.raises(KvtierError, match="slices") as caught:
                await b.open(spec(), slices=second, rank=1, world=2)
            assert caught.value.code is Code.BAD_REQUEST
            a.leave()
            b.leave()
