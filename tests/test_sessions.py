"""What returns when one of several sessions of an engine ends: of one process, of several, of unseen ones."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engineproc
from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.client import AsyncClient, Client
from kvtier.demo.daemon import Daemon
from kvtier.identity import GroupSpec, Slice
from kvtier.types import Code, Kind, KvtierError
from storekit import memfd, storing
from test_client import FULL, KEYED, SPEC, content, keys, put, right, spec_of, status, stopped, until
from test_processes import Engine as EngineProcess
from test_processes import ctl, settled

ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-m", "kvtier.daemon")
HALVES = (Slice(0, 1, 0, 4),), (Slice(1, 2, 0, 4),)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon in a pid namespace of its own, as in a container: to it every engine has pid 0."""
    able = subprocess.run([*ALONE[: ALONE.index(sys.executable)], "true"], capture_output=True, text=True, check=False)
    if able.returncode:
        pytest.skip(f"no pid namespace can be made here: {able.stderr}")
    running = Daemon(tmp_path, host="128MiB", disk="0", command=ALONE)
    running.start()
    yield running
    running.kill()


def lose(client: Client) -> None:
    """Lose the connection as after a timeout, and connect again, which says that its slots are unmapped."""
    client.link._talk.lose("lost by the test")
    until(client.ping)


def instance(daemon: Daemon) -> dict[str, Any]:
    """What the only instance holds."""
    (found,) = status(daemon)["instances"]
    return found


# -- who is who ----------------------------------------------------------------------------------------------------


def test_a_client_that_reconnects_takes_nothing_from_another_of_its_process(daemon: Daemon) -> None:
    """A scheduler and its worker in one process: what the worker reads stays when the scheduler was cut off."""
    with Client(daemon.socket, instance="e") as scheduler, Client(daemon.socket, instance="e") as worker:
        theirs, mine = scheduler.open(SPEC), worker.open(SPEC)
        put(theirs, 2, seed=7)
        lease = theirs.match(keys(2)).acquire()
        lose(worker)  # it joins after the lease was given
        adopted = mine.adopt(lease.share())
        lose(scheduler)
        assert lease.lost
        assert not adopted.lost
        assert instance(daemon)["leases"] == 1
        assert right(adopted, 2, seed=7)
        lease.release()
        until(lambda: not instance(daemon)["leases"])


def test_a_client_that_reconnects_last_gets_back_what_others_left(daemon: Daemon) -> None:
    """Once nobody else is there, what was given before it came back is nobody's."""
    with Client(daemon.socket, instance="e") as scheduler:
        cache = scheduler.open(SPEC)
        put(cache, 2)
        lease = cache.match(keys(2)).acquire()
        reserved = cache.match(keys(4, first=1000)).reserve(0, 4)
        view = lease.view(0, 0)
        with Client(daemon.socket, instance="e") as worker:
            worker.open(SPEC)
            lose(scheduler)
        assert reserved.pages == 4
        assert (instance(daemon)["leases"], instance(daemon)["left"]) == (1, 1)
        del view  # from now on nothing of the lost connection is mapped
        until(lambda: scheduler.ping() and not instance(daemon)["left"])
        assert (instance(daemon)["leases"], instance(daemon)["held_bytes"]) == (0, 0)


def test_processes_of_another_pid_namespace_are_told_apart(apart: Daemon) -> None:
    """The kernel says pid 0 of them all: one's reconnect takes nothing from another, what is killed is seen."""
    pages = [1, 2, 3]
    with Client(apart.socket, instance="e", timeout_s=5) as scheduler:
        cache = scheduler.open(engineproc.SPEC)
        other = EngineProcess(apart, "dead")
        assert other("put", pages) == {"published": 3}
        lease = cache.match(engineproc.path_keys(pages)).acquire()
        worker = EngineProcess(apart, "e")
        try:
            assert worker("adopt", base64.b64encode(lease.share()).decode()) == {"pages": 3}
            assert [each["pids"] for each in ctl(apart, "status")["instances"]] == [[0, 0], [0]]
            lose(scheduler)
            assert [each["leases"] for each in ctl(apart, "status")["instances"]] == [1, 0]
            assert worker("read", pages) == {"pages": 3, "right": 3}
            lease.release()
            assert other("reserve", [7, 8, 9])["pages"] == 3
            assert other("acquire", pages)["pages"] == 3
            other.kill()
            settled(apart, {"e": 0})
        finally:
            worker.close()
            other.close()


def test_a_region_is_of_the_client_that_registered_it(daemon: Daemon) -> None:
    """Two clients of one process name their rows alike: each keeps its own, until it leaves."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(daemon.socket, instance="e")) for _ in range(2)]
        regions = []
        for n, client in enumerate(clients):
            fd, rows = memfd(2, FULL.item_bytes, sealed=True)
            stack.callback(os.close, fd)
            rows[0] = content(n, FULL.item_bytes)
            regions.append((client.open(KEYED), client.register("rows", fd, 0, FULL.item_bytes, 2), rows))
        for n, (cache, region, rows) in enumerate(regions):
            assert region.store((cache, bytes([n]) * 16), [0]) == b"\1"
            assert region.load((cache, bytes([n]) * 16), [1]) == b"\1"
            assert np.array_equal(rows[0], rows[1])
        clients[1].close()
        cache, region, rows = regions[0]
        rows[1] = 0
        assert region.load((cache, bytes(16)), [1]) == b"\1"
        lose(clients[0])
        rows[1] = 0
        assert region.load((cache, bytes(16)), [1]) == b"\1"
        assert np.array_equal(rows[0], rows[1])


def test_a_region_of_a_client_that_does_not_say_its_session(daemon: Daemon) -> None:
    """An older client is served where it is the only one of its process, else refused by name."""

    def register(session: int = 0) -> Any:
        fd, _ = memfd(1, 4096, sealed=True)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            message = wire.Register("e", "rows", 0, 4096, 1, session=session)
            socket.send_fds(sock, [wire.request_frame(message, 1)], [fd])
            os.close(fd)
            raw = sock.recv(1 << 16)
        return wire.decode_reply(wire.parse_header(raw[:16]).verb, raw[16:], wire.Registered)

    with Client(daemon.socket, instance="e") as one:
        assert one.ping()
        assert register().mapped
        assert register(one.link.joined.welcome.session).mapped
        with pytest.raises(KvtierError) as caught:
            register(12345)
        assert caught.value.code is Code.UNKNOWN
        with Client(daemon.socket, instance="e") as two:
            assert two.ping()
            with pytest.raises(KvtierError, match="session") as caught:
                register()
            assert caught.value.code is Code.BAD_REQUEST
        until(lambda: len(instance(daemon)["pids"]) == 1)
        assert register().mapped


# -- attempts that gave up -----------------------------------------------------------------------------------------


def test_attempts_to_connect_that_gave_up_leave_no_session(daemon: Daemon) -> None:
    """A daemon that hangs finds many a Hello of an engine that is gone by then: none counts as a process of it."""
    with Client(daemon.socket, instance="e", timeout_s=0.3) as client:
        cache = client.open(SPEC)
        put(cache, 2)
        lease = cache.match(keys(2)).acquire()
        with stopped(daemon.pid):
            for _ in range(5):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(daemon.socket))
                    sock.sendall(wire.request_frame(wire.Hello(wire.VERSION, "e"), 1))
            assert not client.ping()
        until(client.ping)
        assert lease.lost
        until(lambda: (instance(daemon)["leases"], len(instance(daemon)["pids"])) == (0, 1))


def test_what_was_never_heard_is_told_however_slow_the_thread_is_that_lost_the_connection(daemon: Daemon) -> None:
    """Another thread connects again meanwhile: without its word a lease would be held for as long as siblings live."""
    with Client(daemon.socket, instance="e") as sibling, Client(daemon.socket, instance="e", timeout_s=5.0) as client:
        put(sibling.open(SPEC), 2)
        path, talk = client.open(SPEC).match(keys(2)), client.link._talk
        with stopped(daemon.pid):
            client.submit(wire.Acquire(path._handle, 2), wire.Acquired)
            talk._lock.acquire()  # as if the thread came to it late
            threads = [threading.Thread(target=talk.lose, args=("a test",)), threading.Thread(target=client.ping)]
            for thread in threads:
                thread.start()
                until(lambda: not talk.joined.alive)
        time.sleep(0.1)
        talk._lock.release()
        for thread in threads:
            thread.join()
        until(client.ping)
        until(lambda: (instance(daemon)["left"], len(instance(daemon)["pids"])) == (0, 2))
        assert instance(daemon)["leases"] == 0


def test_what_is_given_back_between_two_connections_is_given_back_on_the_next(daemon: Daemon) -> None:
    """Nobody else would, as long as siblings live: each hiccup of the daemon would cost a part of the engine's cap."""
    with Client(daemon.socket, instance="e") as sibling, Client(daemon.socket, instance="e") as client:
        put(sibling.open(SPEC), 2)
        path = client.open(SPEC).match(keys(4))
        held = [path.acquire(), path.reserve(2, 2)]
        client.link._talk.lose("lost by the test")
        held[0].release()
        held[1].abort()
        assert not client.connected
        until(client.ping)
        until(lambda: (instance(daemon)["leases"], instance(daemon)["held_bytes"]) == (0, 0))


def test_what_is_given_back_and_not_read_is_given_back_on_the_next_connection(daemon: Daemon) -> None:
    """The daemon stops reading what is left of a connection when its answers find nobody."""
    with Client(daemon.socket, instance="e") as sibling, Client(daemon.socket, instance="e", timeout_s=5.0) as client:
        put(sibling.open(SPEC), 2)
        keyed, lease = client.open(KEYED), client.open(SPEC).match(keys(2)).acquire()
        with stopped(daemon.pid):
            for _ in range(3):  # as much as the socket takes, and longer than one turn of a connection's
                client.submit(wire.Exists(keyed._number, 0, bytes(16 * wire.MAX_ASKED)), wire.Existence)
            lease.release()
            client.link._talk.lose("lost by the test")
        until(client.ping)
        until(lambda: (instance(daemon)["left"], instance(daemon)["leases"]) == (0, 0))


async def test_what_a_task_was_granted_as_it_was_cancelled_is_given_back_on_the_next_connection(daemon: Daemon) -> None:
    """Also where the connection is lost before that could be said."""
    with Client(daemon.socket, instance="e") as sibling:
        put(sibling.open(SPEC), 2)
        async with AsyncClient(daemon.socket, instance="e", timeout_s=5.0) as client:
            path = await (await client.open(SPEC)).match(keys(2))
            task = asyncio.ensure_future(path.acquire())
            await asyncio.sleep(0)
            (ticket,) = client.link.inbox.tickets.values()
            ticket.waker.add_done_callback(lambda _: (task.cancel(), client.link.lose(ticket.joined, "by the test")))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ticket.reply.lease
            while not await client.ping():
                await asyncio.sleep(0.02)
            until(lambda: instance(daemon)["leases"] == 0)


# -- who writes what -----------------------------------------------------------------------------------------------


def test_slots_of_a_worker_that_joined_after_the_reservation_stay_its_own(daemon: Daemon) -> None:
    """It was told that it writes, and lost its connection before it committed: an abort gives nothing to others."""
    wide = spec_of(GroupSpec(Kind.FULL, 2, 4, 4096))
    with contextlib.ExitStack() as stack:
        scheduler, first, late = (stack.enter_context(Client(daemon.socket, instance="e")) for _ in range(3))
        cache = scheduler.open(wide, world=2)
        first.open(wide, rank=0, world=2, slices=HALVES[0])
        reserved = cache.match(keys(4)).reserve(0, 4)
        part = late.open(wide, rank=1, world=2, slices=HALVES[1]).adopt(reserved.share())
        assert part.writes
        view = part.view(0, 0)
        late.link._talk.lose("lost by the test")
        until(lambda: instance(daemon)["left"] == 1)
        reserved.abort()
        first.close()
        until(lambda: len(instance(daemon)["pids"]) == 2)
        assert instance(daemon)["held_bytes"] == 4 * 32768
        del view
        until(lambda: late.ping() and not instance(daemon)["held_bytes"])


def test_pages_that_only_a_dead_process_could_fill_return_beside_its_siblings(daemon: Daemon) -> None:
    """A worker is killed and started again any number of times while its scheduler lives: the cap is not used up."""
    with Client(daemon.socket, instance="e", timeout_s=5) as scheduler:
        cache = scheduler.open(engineproc.SPEC)
        for n in range(3):
            worker = EngineProcess(daemon, "e")
            try:
                assert worker("reserve", [n, 7, 8])["pages"] == 3
                assert instance(daemon)["held_bytes"]
                worker.kill()
                settled(daemon, {"e": 0})
            finally:
                worker.close()
        assert cache.match(engineproc.path_keys([1, 7, 8])).pending == 0


async def test_what_a_dead_writer_had_written_is_served_once_the_others_have() -> None:
    """Of a page in shards only that is given up which lacks the dead one's; slots stay while others may write them."""
    async with storing(None) as store:
        scheduler, dies, lives = Engine(store, pid=1), Engine(store, pid=2), Engine(store, pid=3)
        await scheduler.open(spec())
        for rank, worker in enumerate((dies, lives)):
            await worker.open(spec(), slices=(Slice(0, 2, rank, rank + 1),), rank=rank, world=2)
        path = tokens(1, 2, 3)
        reserved = await scheduler.reserve(path)
        pool = store.parts.host.pools[0]
        dies.write(path, reserved)
        assert (await dies.call(wire.Commit(reserved.reservation, 0, 1))).published == 0
        dies.leave(clean=False)
        assert pool.used(0) == 3
        lives.write(path, reserved)
        assert (await lives.call(wire.Commit(reserved.reservation, 0, 3))).published == 1
        assert pool.used(0) == 1
        assert (await scheduler.match(path)).pages == 1
        again = Engine(store, pid=4)
        await again.open(spec(), slices=(Slice(0, 2, 0, 1),), rank=0, world=2)
        reserved = await scheduler.reserve(path, start=1)
        for worker in (again, lives):
            worker.write(path, reserved)
            await worker.call(wire.Commit(reserved.reservation, 1, 2))
        await scheduler.get(path)
        for engine in (scheduler, again, lives):
            engine.leave()
        assert idle(store) == []


async def test_pages_reserved_while_their_writer_was_away_are_given_up_when_it_is_back() -> None:
    """Who writes its shard from now on does not write what was reserved before: nobody does."""
    async with storing(None) as store:
        scheduler, other, old = Engine(store, pid=1), Engine(store, pid=2), Engine(store, pid=3)
        await scheduler.open(spec())
        for rank, worker in enumerate((other, old)):
            await worker.open(spec(), slices=(Slice(0, 2, rank, rank + 1),), rank=rank, world=2)
        store.leave(old.process, clean=False)
        reserved = await scheduler.reserve(tokens(1))
        new = Engine(store, pid=3)
        opened = await new.open(spec(), slices=(Slice(0, 2, 1, 2),), rank=1, world=2)
        assert opened.writes_above > reserved.reservation
        pool = store.parts.host.pools[0]
        assert pool.used(0) == 1, "the other worker may write it"
        assert (await other.call(wire.Commit(reserved.reservation, 0, 1))).published == 0
        assert pool.used(0) == 0
        store.gone(old.process, by=new.process)
        for engine in (scheduler, other, new):
            engine.leave()
        assert idle(store) == []


async def test_a_reserve_by_a_process_that_has_not_opened_the_cache_takes_nothing() -> None:
    """A sibling's handle is known to the whole instance; which shard it writes is not."""
    async with storing(None) as store:
        one, two = Engine(store, pid=1), Engine(store, pid=2)
        await one.open(spec())
        handle = (await one.match(tokens(1, 2))).handle
        with pytest.raises(KvtierError) as caught:
            await two.call(wire.Reserve(handle, 0, 2))
        assert caught.value.code is Code.UNKNOWN
        assert store.parts.host.pools[0].used(0) == 0
        for engine in (one, two):
            engine.leave()
        assert idle(store) == []
