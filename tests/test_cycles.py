"""What came and went is freed by its last reference: the daemon keeps the collector of cycles off."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines import FULL, spec
from fleetkit import DEADLINE_MS, Fleet, Host, until
from kvtier import wire
from kvtier.client import Client

SIDE = Path(__file__).parent / "gc_side"
ROOT = Path(__file__).parent.parent
OURS = ("kvtier.", "asyncio.", "socket.", "builtins.coroutine", "builtins.frame", "builtins.generator")
"""Names of what would be ours; libraries leave a few cycles of their own, once."""


class Watched:
    """A host whose daemon says what of it is garbage."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.file = host.daemon.home / "cycles.json"
        host.daemon._env |= {"CYCLES": str(self.file), "PYTHONPATH": f"{SIDE}:{ROOT}"}

    def garbage(self) -> dict[str, int]:
        """Types of objects that only a collection would free, since the last call."""
        self.file.unlink(missing_ok=True)
        self.file.with_suffix(".ask").touch()
        until(self.file.exists)
        return {name: count for name, count in json.loads(self.file.read_text()).items() if name.startswith(OURS)}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, 2, disk="64MiB")


@pytest.fixture
def watched(fleet: Fleet) -> Watched:
    return Watched(fleet.hosts["a"])


def dying(host: Host, code: str) -> None:
    """An engine that ends by kill -9 amid something."""
    head = "import os, signal; from engines import *; from kvtier.client import Client\n"
    tail = "\nos.kill(os.getpid(), signal.SIGKILL)"
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{ROOT}"}
    command = [sys.executable, "-c", f"{head}{code}{tail}", str(host.daemon.socket)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL


def test_peers_that_come_go_and_stall_leave_nothing_for_the_collector(fleet: Fleet, watched: Watched) -> None:
    """Connections of theirs and to them, fetches, pushes, deadlines that ran out."""
    with fleet as hosts:
        a, b = hosts["a"], hosts["b"]
        watched.garbage()
        for n in range(3):
            a.put([10 * n, 1, 2])
            b.put([10 * n + 5, 1, 2])
            until(lambda: a.settled() and b.settled())
            b.signal(signal.SIGSTOP)
            a.get([1000 + n, 2])
            time.sleep(3 * DEADLINE_MS / 1000)
            b.signal(signal.SIGCONT)
            until(lambda: a.up() == {"b"})
            b.daemon.kill()
            b.client.close()
            b.client = None
            b.start()
            until(lambda: a.up() == {"b"} and b.up() == {"a"})
            assert b.get([10 * n, 1, 2]) == 3
        assert watched.garbage() == {}


def test_engines_that_come_and_go_leave_nothing_for_the_collector(fleet: Fleet, watched: Watched) -> None:
    """By Bye or kill -9, alone or as ranks, with leases and reservations; strangers; operators."""
    with fleet as hosts:
        a = hosts["a"]
        watched.garbage()
        for n in range(3):
            with Client(a.daemon.socket, instance="whole", timeout_s=10.0) as client:
                cache = client.open(spec(groups=(FULL,)))
                cache.match(b"12345678" * 4).reserve(0, 4, wait_ms=100)
            with (
                Client(a.daemon.socket, instance="ranks", timeout_s=10.0) as one,
                Client(a.daemon.socket, instance="ranks", timeout_s=10.0) as two,
            ):
                ranks = [each.open(spec(model="ranks"), rank=rank, world=2) for rank, each in enumerate((one, two))]
                ranks[0].match(b"12345678" * 4).reserve(0, 4, wait_ms=100)
                ranks[1].reset()
            dying(
                a,
                "import sys; c = Client(sys.argv[1], instance='dies', timeout_s=10.0).open(spec(), rank=0, world=1)\n"
                f"c.match(bytes({n + 1} for _ in range(16))).reserve(0, 2, wait_ms=100)",
            )
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(a.daemon.socket))
                stranger.sendall(os.urandom(64))
            a.ctl("status")
            a.ctl("caches")
            a.ctl("check")
            a.ask(wire.Purge(scope=f"uid:{os.getuid()}"))
            a.ask(wire.Metrics())
        until(lambda: a.ask(wire.Status())["instances"] == [])
        assert watched.garbage() == {}
