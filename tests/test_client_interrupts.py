"""Interrupts, cancelled tasks and forks: whatever comes amid a call, it goes on and no slots are harmed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clientkit import (
    DEADLINE,
    FULL,
    ROWS,
    SPEC,
    content,
    in_child,
    in_thread,
    interrupted,
    keys,
    put,
    right,
    spec_of,
    status,
    stopped,
    until,
)
from kvtier import wire
from kvtier.client import AsyncClient, Client, copying, held, link, page_keys, recovery
from kvtier.client.aio import AsyncCache
from kvtier.demo.daemon import Daemon
from kvtier.identity import GroupSpec
from kvtier.types import Kind

MIB = 1 << 20
BIG = spec_of(GroupSpec(Kind.FULL, 1, 1, MIB))
LONG = page_keys(SPEC, np.arange(10**6, 3 * 10**6))
"""More than a socket takes at once."""


def big_keys(pages: int, first: int = 0) -> bytes:
    """Keys of pages of 1 MiB."""
    return page_keys(BIG, np.arange(first, first + pages * BIG.page_tokens))


def engine(daemon: Any, name: str = "engine") -> tuple[int, int]:
    """Leases and bytes that an instance holds."""
    for each in status(daemon)["instances"]:
        if each["instance"] == name:
            return each["leases"], each["held_bytes"]
    return 0, 0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lost a connection may connect again at once."""
    monkeypatch.setattr(recovery, "BACKOFF_S", (0.0, 0.0))


@pytest.fixture
def rows() -> Iterator[tuple[int, np.ndarray]]:
    """An engine's own memory: a memfd of some rows, and its bytes."""
    fd = os.memfd_create("region")
    os.ftruncate(fd, ROWS * FULL.item_bytes)
    yield fd, np.frombuffer(mmap.mmap(fd, ROWS * FULL.item_bytes), np.uint8).reshape(ROWS, -1)
    os.close(fd)


# -- interrupts ------------------------------------------------------------------------------------------------------


def goes_on(daemon: Any, reconnects: bool) -> None:
    """Interrupt pings at one moment after the other: every thread must be served afterwards."""
    client = Client(daemon.socket, instance="engine", timeout_s=0.5)
    for number in itertools.count(1):
        assert client.ping()
        if reconnects:
            client.link._cut()
        if not interrupted(number, client.ping):
            break
        until(lambda: in_thread(client.ping))
        until(client.ping)
    assert number > 20
    until(lambda: client.ping() and processes(daemon) == (1, 0))
    client.close()


def processes(daemon: Any) -> tuple[int, int]:
    """How many an instance has that is the only one, and how many of them lost their connection."""
    (found,) = status(daemon)["instances"]
    return len(found["pids"]), found["left"]


def test_a_client_goes_on_after_an_interrupt_at_any_moment_of_a_request(daemon, at_once, no_leaks):
    """No lock and no flag stays as the interrupt found it, nor a descriptor."""
    goes_on(daemon, reconnects=False)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a socket that is left to the collector
def test_a_client_goes_on_after_an_interrupt_at_any_moment_of_connecting(daemon, at_once):
    """The thread that connects lets the others connect."""
    goes_on(daemon, reconnects=True)


def test_a_client_goes_on_when_a_thread_waits_while_another_is_interrupted(daemon, at_once):
    """The thread that reads for both is interrupted."""
    with Client(daemon.socket, instance="engine", timeout_s=DEADLINE) as client:
        cache = client.open(SPEC)
        with stopped(daemon.pid):
            waiting = threading.Thread(target=lambda: cache.match(keys(1)))
            old = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                threading.Timer(0.1, waiting.start).start()
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with pytest.raises(KeyboardInterrupt):
                    client.ping()
            finally:
                signal.signal(signal.SIGALRM, old)
        waiting.join(DEADLINE)
        assert not waiting.is_alive()
        until(client.ping)


def test_a_handler_that_calls_the_client_amid_its_connecting_gets_a_miss(daemon, at_once):
    """It neither waits for what it interrupts nor makes a second connection."""
    client, answers = Client(daemon.socket, instance="engine", timeout_s=0.5), list[bool]()
    old = signal.signal(signal.SIGALRM, lambda *_: answers.append(client.ping()))
    try:
        with stopped(daemon.pid):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert not client.ping()
        assert answers == [False]
    finally:
        signal.signal(signal.SIGALRM, old)
    until(client.ping)
    client.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a socket that is left to the collector
def test_rows_of_an_interrupted_load_stay_fenced_while_the_daemon_may_write_them(daemon, at_once, rows):
    """At any moment: rows that are not fenced afterwards are not written any more."""
    fd, memory = rows
    with Client(daemon.socket, instance="writer") as writer:
        put(writer.open(SPEC), ROWS)
    fenced = set()
    for number in itertools.count(1, 3):
        with Client(daemon.socket, instance="engine", timeout_s=0.1) as client:
            cache = client.open(SPEC)
            until(lambda: client.ping() and cache.match(keys(ROWS)).pages == ROWS)  # noqa: B023 - called here
            lease, region = cache.match(keys(ROWS)).acquire(), client.register("kv", fd, 0, FULL.item_bytes, ROWS)
            assert client.connected
            with stopped(daemon.pid):
                caught = interrupted(number, lambda: region.load(lease, range(ROWS), wait_ms=10))  # noqa: B023
                at_first = region.fenced
                memory[:] = 77
            if not caught:
                break
            until(client.ping)
            assert at_first or (memory == 77).all(), number
            fenced.add(at_first)
    assert fenced == {True, False}


def test_an_interrupted_put_gives_its_room_back(daemon, monkeypatch):
    """Amid the copy of a later batch: nothing of it stays held, and the connection is as it was."""
    copied = itertools.count()

    def copy(pairs: Any, *, summed: bool) -> list[int]:
        if next(copied) == 2:
            raise KeyboardInterrupt
        return copying.copy_rows(pairs, summed=summed)

    monkeypatch.setattr(held, "copy_rows", copy)
    with Client(daemon.socket, instance="engine", timeout_s=DEADLINE) as client:
        path = client.open(BIG).match(big_keys(64))
        joined = client.link.joined
        with pytest.raises(KeyboardInterrupt):
            path.put(0, [np.ones((64, MIB), np.uint8)])
        assert client.link.joined is joined
        until(lambda: client.ping() and engine(daemon) == (0, 0))


async def test_a_put_of_an_async_client_is_there_bit_for_bit_and_holds_the_loop_for_no_copy(daemon, monkeypatch):
    """Two batches, one after the other's room; without a daemon it stores nothing."""
    here, threads = threading.get_ident(), set()

    def copy(pairs: Any, *, summed: bool) -> list[int]:
        threads.add(threading.get_ident())
        return copying.copy_rows(pairs, summed=summed)

    monkeypatch.setattr(held, "copy_rows", copy)
    rows = np.random.default_rng(0).integers(0, 256, (40, MIB), dtype=np.uint8)
    async with AsyncClient(daemon.socket, instance="engine", timeout_s=DEADLINE) as client:
        cache = await client.open(BIG)
        path = await cache.match(big_keys(40))
        assert await path.put(0, [rows]) == 40, path.refused
        assert here not in threads
        async with await (await path.extend()).acquire() as lease:
            out = np.zeros_like(rows)
            assert lease.read_pages(0, 0, out) == lease.pages == 40
        assert np.array_equal(out, rows)
        daemon.kill()
        assert await path.put(0, [rows]) == 0


@pytest.mark.parametrize("times", [1, 2])
async def test_a_put_that_is_cancelled_gives_its_room_back_when_nothing_is_copied_any_more(daemon, monkeypatch, times):
    """Amid the copy of a later batch, however often: the connection is as it was, and nothing stays held."""
    copied, begun, go_on, over = itertools.count(), threading.Event(), threading.Event(), threading.Event()

    def copy(pairs: Any, *, summed: bool) -> list[int]:
        if next(copied) == 2:
            begun.set()
            assert go_on.wait(DEADLINE)
            over.set()
        return copying.copy_rows(pairs, summed=summed)

    monkeypatch.setattr(held, "copy_rows", copy)
    async with AsyncClient(daemon.socket, instance="engine", timeout_s=DEADLINE) as client:
        path = await (await client.open(BIG)).match(big_keys(64))
        joined = client.link.joined
        task = asyncio.create_task(path.put(0, [np.ones((64, MIB), np.uint8)]))
        await asyncio.to_thread(begun.wait, DEADLINE)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.05)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert over.is_set()
        assert client.link.joined is joined
        await client.ping()
        await asyncio.to_thread(until, lambda: engine(daemon) == (0, 0))


# -- the end of a client ---------------------------------------------------------------------------------------------


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with room for twice what the tests write, so that slots that are free are given out again soon."""
    with Daemon(tmp_path, host="64MiB", disk="0") as one:
        yield one


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Copies with sums wait: the first event says that one began, the second lets them go on."""
    begun, go_on, copy = threading.Event(), threading.Event(), copying._summed

    def slow(target: copying.Bytes, source: copying.Bytes) -> list[int]:
        begun.set()
        assert go_on.wait(30)
        return copy(target, source)

    monkeypatch.setattr(copying, "_summed", slow)
    yield begun, go_on
    go_on.set()


@pytest.fixture
def others(tight: Daemon) -> Iterator[Any]:
    """The same cache as another engine has it, from before on: the memory stays the same."""
    with Client(tight.socket, instance="other") as other:
        yield other.open(BIG)


def stays(others: Any, pages: int, go_on: threading.Event, writing: Any) -> bool:
    """Whether another engine's pages stay as it wrote them while a closed client's copy goes on and ends."""
    mine = others.match(big_keys(pages, 10**6)).reserve(0, pages)
    assert mine.pages == pages
    for page in range(pages):
        mine.view(0, page)[:] = 0xBB
    go_on.set()
    writing()
    return all((mine.view(0, page) == 0xBB).all() for page in range(pages))


def test_slots_that_a_thread_still_writes_when_its_client_closes_are_given_to_nobody(tight, others, slow_copy):
    """close() ends the connection, but only the end of the process says that nothing is touched any more."""
    begun, go_on = slow_copy
    client = Client(tight.socket, instance="engine")
    reserved, wrote = client.open(BIG).match(big_keys(32)).reserve(0, 32), list[bool]()
    data = np.full((32, MIB), 0xAA, np.uint8)
    writer = threading.Thread(target=lambda: wrote.append(reserved.write_pages(0, 0, data, summed=True)))
    writer.start()
    assert begun.wait(DEADLINE)
    client.close()
    assert writer.is_alive()
    assert stays(others, 32, go_on, writer.join)
    assert wrote == [False]


async def test_slots_that_are_still_written_when_an_async_client_closes_are_given_to_nobody(tight, others, slow_copy):
    """The same, where another thread copies for a task."""
    begun, go_on = slow_copy
    client = AsyncClient(tight.socket, instance="engine")
    reserved = await (await (await client.open(BIG)).match(big_keys(32))).reserve(0, 32)
    data = np.full((32, MIB), 0xAA, np.uint8)
    loop = asyncio.get_running_loop()
    writing = loop.run_in_executor(None, lambda: reserved.write_pages(0, 0, data, summed=True))
    assert await asyncio.to_thread(begun.wait, DEADLINE)
    await client.close()

    async def ended() -> None:
        assert not await writing

    assert await asyncio.to_thread(
        stays, others, 32, go_on, lambda: asyncio.run_coroutine_threadsafe(ended(), loop).result()
    )


# -- children of fork ------------------------------------------------------------------------------------------------


def test_a_child_of_fork_gives_nothing_of_its_parents_back(daemon):
    """It leaves the with-blocks that it began in, closes the client, and its own connection is another one."""
    with Client(daemon.socket, instance="engine") as client:
        cache = client.open(SPEC)
        put(cache, 2)
        lease, reserved = cache.match(keys(2)).acquire(), cache.match(keys(4)).reserve(2, 2)
        before = engine(daemon)

        def leaves() -> bool:
            with client:
                with lease, reserved:
                    missed = not lease.read(0, 0, np.empty(FULL.item_bytes, np.uint8)) and lease.view(0, 0) is None
                return missed and not reserved.write(0, 2, content(2, FULL.item_bytes)) and client.ping()

        assert in_child(leaves) == 0
        assert client.ping()
        assert engine(daemon) == before
        assert not lease.lost
        assert right(lease, 2)
        lease.release()
        for page in (2, 3):
            assert reserved.write(0, page, content(page, FULL.item_bytes))
        assert reserved.commit() == 2


def test_arenas_of_a_child_of_fork_are_not_unmapped_with_what_it_has_of_its_parent(daemon):
    """The parent's lease goes when the child reads by its own, which may lie at the same addresses."""
    with Client(daemon.socket, instance="engine") as client:
        cache = client.open(SPEC)
        put(cache, 2)
        leases = [cache.match(keys(2)).acquire()]

        def reads() -> bool:
            mine = cache.match(keys(2)).acquire()
            leases.clear()
            gc.collect()
            return right(mine, 2)

        assert in_child(reads) == 0
        assert right(leases[0], 2)


async def test_a_child_of_fork_has_nothing_of_an_async_client(daemon):
    """Nor does what the child makes of it reach the parent's loop."""
    async with AsyncClient(daemon.socket, instance="engine") as client:
        with Client(daemon.socket, instance="writer") as writer:
            put(writer.open(SPEC), 2)
        lease = await (await (await client.open(SPEC)).match(keys(2))).acquire()

        def leaves() -> bool:
            return lease.lost and not client.connected and lease.view(0, 0) is None

        assert in_child(leaves) == 0
        assert await client.ping()
        assert right(lease, 2)
        await lease.release()


# -- cancelled tasks and deadlines -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def full_socket(daemon: Any, cache: AsyncCache) -> Any:
    """The daemon is stopped, and what is sent meanwhile waits on this side."""
    with stopped(daemon.pid):
        long = asyncio.ensure_future(cache.match(LONG))
        await asyncio.sleep(0.02)
        assert not cache.client.link._stream.writable.is_set()
        yield
    await long


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task that waits for the socket."""
    await asyncio.sleep(0.02)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_is_granted_to_a_task_that_is_cancelled_as_it_sends_is_given_back(daemon):
    """The request was on its way already, behind a large one."""
    with Client(daemon.socket, instance="writer") as writer:
        put(writer.open(SPEC), 2)
    async with AsyncClient(daemon.socket, instance="engine", timeout_s=20.0) as client:
        cache = await client.open(SPEC)
        path = await cache.match(keys(4))
        async with full_socket(daemon, cache):
            await cancelled(asyncio.ensure_future(path.acquire()))
            await cancelled(asyncio.ensure_future(path.reserve(2, 2)))
        for _ in range(2):
            assert await client.ping()
        assert engine(daemon) == (0, 0)


async def test_what_is_given_back_while_many_requests_wait_is_said_whatever_becomes_of_its_task(daemon):
    """A `with` that ends by one cancellation is ended by another; nobody would say it later."""
    with Client(daemon.socket, instance="writer") as writer:
        put(writer.open(SPEC), 2)
    async with AsyncClient(daemon.socket, instance="engine", timeout_s=20.0) as client:
        path = await (await client.open(SPEC)).match(keys(4))
        held = [await path.acquire(), await path.reserve(2, 2)]
        with stopped(daemon.pid):
            waiting = [asyncio.ensure_future(client.ping()) for _ in range(link.IN_FLIGHT)]
            await asyncio.sleep(0.02)
            giving_back = [asyncio.ensure_future(held[0].release()), asyncio.ensure_future(held[1].abort())]
            await asyncio.sleep(0.02)
            for each in giving_back:
                each.cancel()
            await asyncio.gather(*giving_back, return_exceptions=True)
        assert all(await asyncio.gather(*waiting))
        assert await client.ping()
        assert engine(daemon) == (0, 0)


def test_a_client_that_is_closed_while_a_thread_connects_stays_closed(daemon):
    """Its connection ends as soon as it is there; nothing is asked for on it."""
    client = Client(daemon.socket, instance="engine", timeout_s=DEADLINE)
    with stopped(daemon.pid):
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(client.ping()))
        thread.start()
        until(lambda: client.link._dialer)
        client.close()
    thread.join(DEADLINE)
    assert found == [False]
    assert not client.connected
    until(lambda: not status(daemon)["instances"])


async def test_an_async_client_that_is_closed_while_a_task_connects_stays_closed(daemon):
    """The same."""
    client = AsyncClient(daemon.socket, instance="engine", timeout_s=DEADLINE)
    with stopped(daemon.pid):
        pinging = asyncio.ensure_future(client.ping())
        await asyncio.sleep(0.02)
        await client.close()
    assert not await pinging
    assert not client.connected
    await asyncio.sleep(0)
    until(lambda: not status(daemon)["instances"])


def test_what_is_given_back_to_a_daemon_that_hangs_is_given_back_when_it_goes_on(daemon):
    """Beside as many requests as a client leaves unanswered, of which none ends in time."""
    with Client(daemon.socket, instance="engine", timeout_s=0.3) as client:
        cache = client.open(SPEC)
        put(cache, 2)
        path = cache.match(keys(4))
        held = [path.acquire(), path.reserve(2, 2)]
        with stopped(daemon.pid):
            waiting = [client.submit(wire.Ping(), wire.Ok) for _ in range(link.IN_FLIGHT)]
            held[0].release()
            held[1].abort()
        assert [client.wait(each, DEADLINE) for each in waiting] == [wire.Ok()] * link.IN_FLIGHT
        assert client.connected
        assert engine(daemon) == (0, 0)


async def test_a_task_that_is_cancelled_as_it_connects_leaves_no_session(daemon, monkeypatch):
    """The daemon had welcomed it: a process that it seemed to have would keep what is lost later from returning."""
    async with AsyncClient(daemon.socket, instance="engine", timeout_s=20.0) as client:
        welcomed = asyncio.Event()

        async def slowly(*_: Any, **__: Any) -> None:
            welcomed.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_unix_connection", slowly)
            pinging = asyncio.ensure_future(client.ping())
            await welcomed.wait()
            pinging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pinging
        assert await client.ping()
        assert processes(daemon) == (1, 0)


async def test_rows_of_a_load_that_is_cancelled_as_it_is_sent_stay_fenced_until_its_end(daemon, rows):
    """The daemon writes them when it comes to it; only then are they the engine's again."""
    with Client(daemon.socket, instance="writer") as writer:
        put(writer.open(SPEC), 2)
    async with AsyncClient(daemon.socket, instance="engine", timeout_s=20.0) as client:
        cache = await client.open(SPEC)
        region = await client.register("kv", rows[0], 0, FULL.item_bytes, ROWS)
        lease = await (await cache.match(keys(2))).acquire()
        async with full_socket(daemon, cache):
            await cancelled(asyncio.ensure_future(region.load(lease, [0, 1])))
            assert region.fenced
        async with asyncio.timeout(DEADLINE):
            while region.fenced:
                await asyncio.sleep(0.01)
        assert np.array_equal(rows[1][1], content(1, FULL.item_bytes))


async def test_a_call_ends_in_time_while_another_connects_for_longer(daemon):
    """A flush may wait a minute for its first connection; a ping beside it only as long as it was given."""
    client = AsyncClient(daemon.socket, instance="engine", timeout_s=0.2)
    with stopped(daemon.pid):
        flushing = asyncio.ensure_future(AsyncCache(client, SPEC, -1, 1, (), 0).flush(60.0))
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE):
            assert not await client.ping()
        assert not flushing.done()
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
    await client.close()
