"""What goes wrong around the daemon, each with its written outcome; more in test_disk_faults, test_processes."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import engineproc
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from test_processes import ctl, settled

ENGINES = 200


def short_life(daemon: Daemon, number: int) -> None:
    """In a child: attach, hold something, and end in one of the ways in which engines end."""
    rng = random.Random(number)
    client = Client(daemon.socket, instance=f"storm-{number % 20}", timeout_s=20.0)
    cache = client.open(engineproc.SPEC)
    path = cache.match(engineproc.path_keys([number % 7, *range(3)]))
    held: list[Any] = [path.acquire(wait_ms=100), path.reserve(0, 4, wait_ms=100)]
    if rng.random() < 0.3:
        held[1].commit()
    how = rng.randrange(3)
    if how == 0:
        client.close()
    elif how == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def footprint(daemon: Daemon) -> dict[str, int]:
    """What the daemon's process holds of the system."""
    process = psutil.Process(daemon.pid)
    return {"fds": process.num_fds(), "threads": process.num_threads(), "maps": len(process.memory_maps(grouped=False))}


def storm(daemon: Daemon, first: int) -> None:
    """Two hundred engines, eight at a time."""
    children: list[int] = []
    for number in range(first, first + ENGINES):
        while len(children) >= 8:
            os.waitpid(children.pop(0), 0)
        child = os.fork()
        if not child:
            try:
                short_life(daemon, number)
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_storms_of_engines_that_come_and_die_leave_the_daemon_as_it_was(daemon: Daemon) -> None:
    """Attached, killed or gone with leases and reservations: all of it returns; descriptors, threads and maps too."""
    storm(daemon, 0)
    settled(daemon, {})
    before = footprint(daemon)
    storm(daemon, ENGINES)
    settled(daemon, {})
    deadline = time.monotonic() + 20.0
    while any(now > before[what] + 8 for what, now in footprint(daemon).items()):
        assert time.monotonic() < deadline, (before, footprint(daemon))
        time.sleep(0.2)
    assert ctl(daemon, "check")["broken"] == []
    with Client(daemon.socket, instance="after", timeout_s=10.0, verify="always") as client:
        cache = client.open(engineproc.SPEC)
        keys = engineproc.path_keys([500, 501])
        with cache.match(keys).reserve(0, 2, wait_ms=5000) as held:
            for page in range(2):
                held.write(0, page, engineproc.content(keys[: (page + 1) * cache.spec.stride]).reshape(-1))
            assert held.commit() == 2
        out = np.empty(engineproc.SPEC.groups[0].item_bytes, np.uint8)
        with cache.match(keys).acquire(wait_ms=5000) as lease:
            assert lease.read(0, 1, out)
            assert np.array_equal(out, engineproc.content(keys).reshape(-1))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_clock_that_jumps_harms_no_lease_no_pin_and_no_deadline(tmp_path: Path) -> None:
    """Deadlines and ages are of the monotonic clock; only what people read is of the wall clock."""
    fake = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if fake is None:
        pytest.skip("libfaketime is not installed")
    stamp = tmp_path / "clock"
    stamp.write_text("+0\n")
    env = {"LD_PRELOAD": str(fake), "FAKETIME_TIMESTAMP_FILE": str(stamp), "FAKETIME_NO_CACHE": "1",
           "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}  # fmt: skip
    (tmp_path / "home").mkdir()
    with (
        Daemon(tmp_path / "home", host="64MiB", disk="128MiB", env=env) as daemon,
        Client(daemon.socket, instance="engine", timeout_s=10.0) as client,
    ):
        cache = client.open(engineproc.SPEC)
        keys = engineproc.path_keys([1, 2])
        with cache.match(keys).reserve(0, 2, wait_ms=5000) as held:
            assert held.commit() == 2
        assert cache.flush(20.0)
        lease = cache.match(keys).acquire(wait_ms=5000)
        for jump in ("-10y", "+20y", "+0"):
            stamp.write_text(jump + "\n")
            started = time.monotonic()
            assert client.ping()
            with cache.match(keys).acquire(wait_ms=5000) as other:
                assert other.pages == 2
            assert cache.flush(20.0)
            assert time.monotonic() - started < 20.0
            status = ctl(daemon, "status")
            assert status["instances"][0]["leases"] == 1
            assert 0 <= status["uptime_s"] < 120
        lease.release()
        assert ctl(daemon, "check")["broken"] == []
        assert daemon.stop() == 0
