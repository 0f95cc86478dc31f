"""Engines and the daemon as real processes: killed, stopped, restarted; the rest goes on and no byte is wrong."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engineproc
from kvtier.demo.daemon import Daemon

HERE = Path(__file__).parent
LONG_S = 30.0


class Engine:
    """A subprocess that runs engineproc."""

    def __init__(self, daemon: Daemon, instance: str, rank: int = -1, world: int = 1) -> None:
        command = [sys.executable, str(HERE / "engineproc.py"), str(daemon.socket), instance, str(rank), str(world)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, verb: str, pages: Any) -> None:
        """Ask without waiting."""
        self.process.stdin.write(json.dumps([verb, pages]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the last request came to."""
        return json.loads(self.process.stdout.readline())

    def __call__(self, verb: str, pages: Any = None) -> dict[str, Any]:
        """Ask and wait."""
        self.send(verb, pages or [])
        return self.answer()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; a kill is waited for."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        """End it whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def engines(daemon: Daemon) -> Iterator[Any]:
    """Starts engines, and ends them."""
    started: list[Engine] = []

    def start(*args: Any) -> Engine:
        started.append(Engine(daemon, *args))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def ctl(daemon: Daemon, *words: str) -> dict[str, Any]:
    """What kvtierctl says, as data."""
    command = [sys.executable, "-m", "kvtier.ctl", "--socket", str(daemon.socket.with_name("admin.sock")), *words]
    return json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout)


def settled(daemon: Daemon, expect: dict[str, int]) -> dict[str, Any]:
    """Wait until the daemon's instances hold what is expected: instance name -> held bytes."""
    deadline = time.monotonic() + LONG_S
    while True:
        status = ctl(daemon, "status")
        if {i["instance"]: i["held_bytes"] for i in status["instances"]} == expect:
            return status
        assert time.monotonic() < deadline, status["instances"]
        time.sleep(0.05)


def test_a_scheduler_matches_while_two_workers_read_and_write(engines: Any) -> None:
    """One instance of three processes: the scheduler reserves, each worker fills its heads, all read what is served."""
    scheduler, workers = engines("tp2"), [engines("tp2", rank, 2) for rank in range(2)]
    for worker in workers:
        assert worker("match", [1])["pages"] == 0
    for n in range(5):
        pages = [n, *range(100, 120)]
        share = scheduler("reserve", pages)["share"]
        assert scheduler("match", pages) == {"pages": 0, "pending": 21}
        for worker in workers:
            worker("adopt", share)
            worker.send("fill", pages)
        assert max(worker.answer()["published"] for worker in workers) == 21
        lease = scheduler("acquire", pages)["share"]
        for worker in workers:
            worker("adopt", lease)
            worker.send("read", pages)
        assert [worker.answer() for worker in workers] == [{"pages": 21, "right": 21}] * 2
        assert scheduler("drop") == {}


def test_a_prefill_engine_with_tp4_feeds_a_decode_engine_with_tp8(daemon: Daemon) -> None:
    """Canonical pages written in quarters are read in eighths, in other processes."""
    from kvtier.client import Client

    pages = list(range(10))
    keys = engineproc.path_keys(pages)
    ranks = [engineproc.Process(str(daemon.socket), "prefill", rank, 4) for rank in range(4)]
    path = ranks[0].cache.match(keys)
    reserved = path.reserve(0, len(pages))
    numbers = []
    for rank in ranks:
        share = rank.cache.adopt(reserved.share())
        rank.held.append((path, share))
        numbers.append(rank.fill(pages)["published"])
        share.abort()
    assert numbers == [0, 0, 0, 10]
    for rank in ranks:
        rank.client.close()
    with Client(daemon.socket, instance="decode", timeout_s=5) as client:
        part = engineproc.Slice(0, engineproc.LAYERS, 5, 6)
        cache = client.open(engineproc.SPEC, rank=5, world=8, slices=(part,))
        with cache.match(keys).acquire() as lease:
            assert lease.pages == 10
            for page in range(10):
                expected = engineproc.content(keys[: (page + 1) * engineproc.SPEC.stride])[:, 5:6]
                got = expected.copy()
                got[:] = 0
                assert lease.shard(0, page, part, got)
                assert (got == expected).all()


def test_an_engine_killed_with_leases_and_reservations_leaves_nothing(daemon: Daemon, engines: Any) -> None:
    """Within moments of kill -9 the daemon holds nothing for it, and another engine never notices."""
    other, dead = engines("other"), engines("dead")
    base = list(range(20))
    assert other("put", base) == {"published": 20}
    assert dead("acquire", base)["pages"] == 20
    assert dead("reserve", [7, 7, 7])["pages"] == 3
    held = {i["instance"]: i["held_bytes"] for i in ctl(daemon, "status")["instances"]}
    assert held["dead"] > 0
    dead.kill()
    settled(daemon, {"other": 0})
    assert other("match", [7, 7, 7]) == {"pages": 0, "pending": 0}
    assert other("get", base) == {"pages": 20, "right": 20}
    assert ctl(daemon, "check")["broken"] == []


def test_engines_killed_at_random_moments_never_harm_the_rest(daemon: Daemon, engines: Any) -> None:
    """Ten engines die in mid-request; the survivor's pages stay right and every byte returns."""
    rng = random.Random(5)
    survivor = engines("survivor")
    assert survivor("put", list(range(30))) == {"published": 30}
    for n in range(10):
        victim = engines(f"victim{n}")
        victim("match", [1])
        for k in range(4):
            victim.send(rng.choice(["put", "reserve", "acquire", "get"]), [n % 3, *range(k * 10, k * 10 + 25)])
        time.sleep(rng.random() * 0.05)
        victim.kill()
        assert survivor("get", list(range(30))) == {"pages": 30, "right": 30}
    settled(daemon, {"survivor": 0})
    assert ctl(daemon, "check")["broken"] == []


def test_a_stopped_engine_at_its_cap_starves_nobody(daemon: Daemon, engines: Any) -> None:
    """SIGSTOP on a holder of all it may hold: others store and read as before."""
    stopped, other = engines("stopped"), engines("other")
    while stopped("reserve", [random.randrange(1 << 30) for _ in range(100)])["pages"]:
        pass
    stopped.kill(signal.SIGSTOP)
    for n in range(20):
        pages = [n, *range(1000, 1040)]
        assert other("put", pages) == {"published": 41}
        assert other("get", pages) == {"pages": 41, "right": 41}
    stopped.kill(signal.SIGCONT)
    assert stopped("drop") == {}
    settled(daemon, {"stopped": 0, "other": 0})


def test_what_was_durable_is_there_after_kill_9_of_the_daemon(daemon: Daemon, engines: Any) -> None:
    """The engine goes on without an exception, misses while the daemon is away, and hits when it is back."""
    engine = engines("engine")
    paths = [[n, *range(50, 60)] for n in range(10)]
    for pages in paths:
        assert engine("put", pages) == {"published": 11}
    assert engine("flush") == {"durable": True}
    daemon.kill()
    assert engine("match", paths[0]) == {"pages": 0, "pending": 0}
    assert engine("get", paths[0])["pages"] == 0
    daemon.start()
    deadline = time.monotonic() + LONG_S
    while engine("match", paths[0])["pages"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for pages in paths:
        assert engine("get", pages) == {"pages": 11, "right": 11}
    assert ctl(daemon, "check")["broken"] == []


def test_a_stopped_daemon_is_a_miss_within_the_deadline(daemon: Daemon, engines: Any) -> None:
    """SIGSTOP on the daemon: the engine's calls return empty in bounded time, and work again after SIGCONT."""
    engine = engines("engine")
    assert engine("put", [1, 2, 3]) == {"published": 3}
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert engine("match", [1, 2, 3])["pages"] == 0
        assert engine("get", [1, 2, 3])["pages"] == 0
        assert time.monotonic() - begun < 2 * LONG_S
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    deadline = time.monotonic() + LONG_S
    while engine("match", [1, 2, 3])["pages"] != 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert engine("get", [1, 2, 3]) == {"pages": 3, "right": 3}


def test_a_restarted_engine_of_the_same_name_starts_clean(daemon: Daemon, engines: Any) -> None:
    """The old process's holds are not the new one's; its pages are."""
    first = engines("engine")
    assert first("put", [1, 2, 3]) == {"published": 3}
    first("reserve", [9, 9])
    first.kill()
    second = engines("engine")
    assert second("get", [1, 2, 3]) == {"pages": 3, "right": 3}
    settled(daemon, {"engine": 0})
    assert second("put", [9, 9]) == {"published": 2}


def test_what_was_granted_in_a_reply_that_never_came_returns_beside_siblings(daemon: Daemon, engines: Any) -> None:
    """A scheduler gives up on a daemon that hangs; its workers stay, and still nothing counts against their cap."""
    from kvtier.client import Client

    worker = engines("engine")
    assert worker("put", [1, 2, 3]) == {"published": 3}
    with Client(daemon.socket, instance="engine", timeout_s=0.2) as scheduler:
        cache = scheduler.open(engineproc.SPEC)
        stored, fresh = cache.match(engineproc.path_keys([1, 2, 3])), cache.match(engineproc.path_keys([4, 5]))
        kept = stored.acquire()
        for ask in (stored.acquire, lambda: fresh.reserve(0, 2)):
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                assert ask().pages == 0
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
            deadline = time.monotonic() + LONG_S
            while not scheduler.ping():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        held = {i["instance"]: i["leases"] for i in ctl(daemon, "status")["instances"]}
        assert held == {"engine": 1}, "what it had heard of may be read by the worker"
        kept.release()
        settled(daemon, {"engine": 0})
    assert worker("put", [4, 5]) == {"published": 2}
    assert ctl(daemon, "check")["broken"] == []
