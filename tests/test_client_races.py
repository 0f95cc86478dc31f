"""What several threads and tasks of an engine do at once, and what cannot be said, leaves the client as it was."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clientkit import FULL, KEYED, ROWS, SPEC, content, keys, put, right, spec_of, status, stopped
from kvtier import wire
from kvtier.client import AsyncClient, Client, link
from kvtier.demo.daemon import Daemon
from kvtier.identity import GroupSpec
from kvtier.types import Code, Kind, KvtierError
from test_server import World, scene

BIG = spec_of(GroupSpec(Kind.FULL, 1, 1, 4 << 20))


def until(holds: Any) -> None:
    """Ask again until it holds."""
    deadline = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < deadline, "still waiting"
        time.sleep(0.01)


@pytest.fixture
def memory() -> Iterator[int]:
    """An engine's own rows."""
    fd = os.memfd_create("rows", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROWS * FULL.item_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    yield fd
    os.close(fd)


async def test_what_cannot_be_said_is_refused_by_name_and_leaves_nothing_in_flight(standing: Daemon) -> None:
    """However often: an async client counts only requests that were sent."""
    async with AsyncClient(standing.socket) as client:
        cache = await client.open(SPEC)
        path = await cache.match(keys(2))
        wrong: Any = np.int64(1)
        for _ in range(300):
            with pytest.raises(KvtierError) as caught:
                await path.reserve(0, wrong)
            assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, "Reserve.pages")
        assert not client.link.inbox.tickets
        assert await client.ping()


def test_a_cache_that_is_reset_while_another_thread_opens_it_again_is_of_the_new_epoch(standing: Daemon) -> None:
    """The answer about the old epoch comes last: nothing would be found or stored any more."""
    with Client(standing.socket, instance="threads") as client:
        cache = client.open(SPEC)
        put(cache, 2)
        client.link._cut()
        until(client.ping)
        joined = client.link.joined
        assert joined is not None
        opening = cache.entering()  # of the other thread
        next(opening)
        asked = opening.send(joined)
        late = client.link._do(asked, time.monotonic() + 5.0)
        assert isinstance(late, wire.Opened)
        epoch = cache.reset()
        with pytest.raises(StopIteration) as ended:
            opening.send(late)
        assert cache.epoch == epoch > late.epoch
        assert ended.value.value[1] != late.cache
        put(cache, 2, seed=70)
        with cache.match(keys(2)).acquire() as lease:
            assert right(lease, 2, seed=70)


def test_a_commit_of_much_may_take_as_long_as_its_checksums_do(tmp_path: Path) -> None:
    """A prompt that is committed at once is no daemon that hangs: the connection is kept, and all is served."""
    with Daemon(tmp_path, host="384MiB", disk="0") as daemon, Client(daemon.socket) as client:
        cache = client.open(BIG)
        reserved = cache.match(keys(32, BIG)).reserve(0, 32, wait_ms=5000)
        assert reserved.pages == 32, reserved.refused
        client.link.timeout_s = 0.0005
        assert reserved.commit() == 32
        assert client.connected
        client.link.timeout_s = 1.0
        assert daemon.stop() == 0


def test_a_commit_waits_for_no_checksums_that_it_says(standing: Daemon) -> None:
    """Only for those of what was not summed as it was written."""
    with Client(standing.socket) as client:
        cache = client.open(SPEC)
        with cache.match(keys(8, first=500)).reserve(0, 8) as reserved:
            size = FULL.item_bytes
            assert reserved.summing_s(None, None) == pytest.approx(8 * size / 200e6)
            assert reserved.summing_s(6, None) == pytest.approx(2 * size / 200e6)
            data = np.stack([content(n, size) for n in range(4)])
            assert reserved.write_pages(0, 0, data, summed=True)
            assert reserved.summing_s(None, None) == pytest.approx(4 * size / 200e6)
            assert reserved.summing_s(0, 4) == 0


def test_rows_are_free_again_once_the_daemon_says_that_a_lost_connection_has_drained(
    standing: Daemon, memory: int
) -> None:
    """A daemon that was slow once does not take an engine's rows for as long as it lives."""
    with Client(standing.socket, instance="rows", timeout_s=0.2) as client:
        region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
        keyed = client.open(KEYED)
        assert region.store((keyed, b"r" * 16), [0]) == b"\1"
        with stopped(standing.pid):
            transfer = region.start_load((keyed, b"r" * 16), [1])
            assert region.load((keyed, b"r" * 16), [2], wait_ms=100) == b"\0"
            assert (region.fenced, transfer.fenced, transfer.lost) == (True, True, True)
        until(lambda: client.ping() and not region.fenced)
        assert (transfer.fenced, transfer.lost) == (False, True)
        assert region.load((keyed, b"r" * 16), [1]) == b"\1"


def test_a_path_that_two_extend_at_once_goes_on_as_what_it_is(standing: Daemon) -> None:
    """The answer about its beginning comes last: what is stored after it would be found under another prompt's name."""
    with Client(standing.socket, instance="extends") as client:
        cache = client.open(SPEC)
        stride, whole = SPEC.stride, keys(4, first=70000)
        path = cache.match(whole[:stride])
        steps = [path._matching(whole[n * stride : (n + 1) * stride]) for n in (1, 2)]
        asked, joined = [], client.link.joined
        for one in steps:  # both have joined and sent before either hears
            step = next(one)
            while not isinstance(step, link.Call):
                step = one.send(joined)
            asked.append(client.link._do(step, time.monotonic() + 5.0))
        for one, reply in zip(reversed(steps), reversed(asked), strict=True):
            with pytest.raises(StopIteration):
                one.send(reply)
        assert path.extend(whole[3 * stride :]).keys == whole
        with path.reserve(0, 4, wait_ms=1000) as reserved:
            assert reserved.pages == 4
            for page in range(4):
                assert reserved.write(0, page, content(page, FULL.item_bytes))
            assert reserved.commit() == 4
        with cache.match(whole).acquire() as lease:
            assert right(lease, 4)
        assert cache.match(whole[: 2 * stride] + whole[3 * stride :]).pages == 2


def test_a_client_that_closes_after_a_loss_gives_back_what_that_held(standing: Daemon) -> None:
    """On one more connection: its process may live for long, and nobody else would say so."""

    def held() -> bool:
        return any(each["instance"].startswith("closes") for each in status(standing)["instances"])

    with Client(standing.socket, instance="closes") as client:
        path = client.open(SPEC).match(keys(2, first=4000))
        reserved = path.reserve(0, 1, wait_ms=1000)
        assert reserved.pages
        client.link._cut()
        assert held()
    until(lambda: not held())

    async def same() -> None:
        async with AsyncClient(standing.socket, instance="closes too") as client:
            path = await (await client.open(SPEC)).match(keys(2, first=4000))
            assert (await path.reserve(0, 1, wait_ms=1000)).pages
            client.link.lose(client.link.joined, "for a test")
            assert held()
        while held():
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(same(), 5.0))


def test_a_region_that_threads_register_again_at_once_is_theirs(standing: Daemon, memory: int) -> None:
    """All use it at once after a loss, and whoever uses it later: the daemon knows the number that is kept here."""
    with Client(standing.socket, instance="rows", timeout_s=5.0) as client:
        cache = client.open(KEYED)
        region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
        assert region.store((cache, b"u" * 16), [0]) == b"\1"

        def load(row: int) -> bytes:
            return region.load((cache, b"u" * 16), [row])

        with ThreadPoolExecutor(6) as pool:
            for _ in range(5):
                client.link._cut()
                until(client.ping)
                assert [*pool.map(load, range(6)), load(6)] == [b"\1"] * 7


def test_a_region_is_there_until_a_daemon_that_hung_says_that_it_is_not(standing: Daemon, memory: int) -> None:
    """The connection is lost and the daemon lives: an engine that was told yes would free what is mapped there."""
    with Client(standing.socket, instance="hangs", timeout_s=0.2) as client:
        region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
        keyed = client.open(KEYED)
        with stopped(standing.pid):
            assert not client.ping()
            assert not region.unregister()
            assert region.load((keyed, b"h" * 16), [1], wait_ms=50) == b"\0"
            assert not region.unregister()
        until(region.unregister)
        assert client.connected
        assert region.unregister()


async def test_a_region_that_tasks_register_again_at_once_is_theirs(standing: Daemon, memory: int) -> None:
    """The same of an async client."""
    async with AsyncClient(standing.socket, instance="rows", timeout_s=5.0) as client:
        cache = await client.open(KEYED)
        region = await client.register("kv", memory, 0, FULL.item_bytes, ROWS)
        assert await region.store((cache, b"t" * 16), [0]) == b"\1"
        client.link.lose(client.link.joined, "for a test")
        while not await client.ping():
            await asyncio.sleep(0.01)
        loads = [region.load((cache, b"t" * 16), [n]) for n in range(6)]
        assert await asyncio.gather(*loads) == [b"\1"] * 6
        assert await region.load((cache, b"t" * 16), [0]) == b"\1"


async def test_slots_stay_held_for_all_that_a_device_does_however_many_wait_for_it(standing: Daemon) -> None:
    """Two wait for the first of two streams, one of them for a task that was cancelled: neither forgets the second."""
    async with AsyncClient(standing.socket, instance="fences") as client:
        held = await (await (await client.open(SPEC)).match(keys(1, first=900))).reserve(0, 1, wait_ms=1000)
        first, second = threading.Event(), threading.Event()
        for each in (first, second):
            held.busy_until(SimpleNamespace(synchronize=each.wait))
        cancelled = asyncio.create_task(held.abort())
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        again = asyncio.create_task(held.abort(timeout_s=0.2))
        await asyncio.sleep(0.01)
        first.set()
        with pytest.raises(KvtierError, match="slots stay held"):
            await again
        assert held.busy
        second.set()
        await held.abort()
        assert not held.busy


def test_a_path_that_is_given_twice_is_ordered_twice(standing: Daemon) -> None:
    """Each position once, of the same path first whoever waited longest."""
    with Client(standing.socket, instance="order") as client:
        cache = client.open(SPEC)
        one, other = cache.match(keys(2)), cache.match(keys(3, first=100))
        assert client.order([one, other, one], [5000, 3000, 7000]) == [2, 0, 1]
        assert sorted(client.order([one, one, other], [0, 0, 0])) == [0, 1, 2]


def test_a_mapping_that_is_cancelled_as_it_is_shown_is_none(tmp_path: Path) -> None:
    """What the daemon was not shown is not asked for, and may be mapped again."""
    flags = ["--device-which=cpu", "--device-bytes=1MiB"]
    with Daemon(tmp_path, host="64MiB", disk="0", flags=flags) as daemon, Client(daemon.socket) as client:
        cache = client.open(SPEC)
        put(cache, 1)
        steps, got = client.device.mapping(b""), None
        while not isinstance(step := steps.send(got), link.Call):
            got = client.link._do(step, time.monotonic() + 5.0)
        with pytest.raises(asyncio.CancelledError):
            steps.throw(asyncio.CancelledError())
        with cache.match(keys(1)).acquire() as lease:
            assert right(lease, 1)
        assert client.map_device()
        with cache.match(keys(1)).reserve(0, 1) as held, cache.match(keys(1)).acquire() as lease:
            assert held.refused == ""
            assert right(lease, 1)


@pytest.mark.parametrize(
    ("how", "look"),
    [
        ("address", lambda lease: lease.address(0, 0)),
        ("view", lambda lease: lease.view(0, 0)),
        ("block", lambda lease: lease.views(0, 0, 1) or None),
    ],
)
def test_what_another_thread_finds_lost_amid_a_look_is_not_there(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, how: str, look: Any
) -> None:
    """It is a miss, however late that is; not an error of the daemon's."""
    with Client(daemon.socket, instance="engine", timeout_s=5.0) as client:
        cache = client.open(SPEC)
        put(cache, 1)
        lease, talk = cache.match(keys(1)).acquire(), client.link._talk
        find = getattr(talk.joined.arenas, how)

        def late(*where: int) -> Any:
            talk.lose("noticed by another thread")
            assert talk.joined.arenas.unmap() == (how != "address")
            return find(*where)

        monkeypatch.setattr(talk.joined.arenas, how, late)
        assert look(lease) is None
        lease.release()


async def _briefly(_: object, __: wire.Flush) -> wire.Ok:
    await asyncio.sleep(0.05)
    return wire.Ok()


@scene
async def test_a_request_that_takes_long_keeps_no_other_from_being_sent(world: World) -> None:
    """With as many in flight as may be, what is next goes out when some reply has come, not when the oldest has."""
    world.store.verbs[wire.Flush] = _briefly

    def ask() -> bool:
        with Client(world.path, timeout_s=2.0) as client:
            client.submit(wire.Acquire(1, 1), wire.Acquired)  # until the test ends
            for _ in range(link.IN_FLIGHT - 1):
                client.submit(wire.Flush(), wire.Ok)
            return client.ping()

    assert await asyncio.to_thread(ask)


@scene
async def test_a_request_that_takes_long_keeps_no_other_task_from_sending(world: World) -> None:
    """The same of an async client, also for many tasks that wait."""
    world.store.verbs[wire.Flush] = _briefly
    async with AsyncClient(world.path, timeout_s=2.0) as client:
        joined = await client.link.join(asyncio.get_running_loop().time() + 2.0)
        for n in range(link.IN_FLIGHT):
            message, reply = (wire.Flush(), wire.Ok) if n else (wire.Acquire(1, 1), wire.Acquired)
            await client.link.start(joined, message, reply, asyncio.get_running_loop().time() + 2.0)
        assert all(await asyncio.gather(*(client.ping() for _ in range(2 * link.IN_FLIGHT))))
        assert len(client.link.inbox.tickets) == 1
