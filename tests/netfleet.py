"""A fleet of hosts that are network namespaces behind a bridge.

Run by test_fleet_net.py as root of namespaces of its own:

    unshare --user --map-root-user --net --mount --fork python netfleet.py SCENARIO FOLDER
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engineproc import SPEC, path_keys
from fleetkit import Fleet, until
from kvtier.peer.lacks import LACKS_S
from kvtier.peer.ring import homes, rungs
from kvtier.peer.secrets import read

CLONE_NEWNET = 0x40000000
RECOVERY_S = 5.0
NAMES = "abc"
PORT = 9478
PATHS = [[100 * n + page for page in range(8)] for n in range(1, 25)]


def run(*words: str) -> None:
    """One command of iproute2."""
    subprocess.run(words, check=True, capture_output=True)


def network() -> None:
    """Three namespaces behind one bridge, 10.9.0.1 to 10.9.0.3."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "link", "set", "br0", "up")
    for number, name in enumerate(NAMES, 1):
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"v{name}", "master", "br0", "up")
        run("ip", "-n", name, "addr", "add", f"10.9.0.{number}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """Processes that are started here are on that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        assert libc.setns(there, CLONE_NEWNET) == 0
        yield
    finally:
        assert libc.setns(home, CLONE_NEWNET) == 0
        os.close(home)
        os.close(there)


class NetFleet(Fleet):
    """The daemons, each in its namespace."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, len(NAMES), replicas=1, address=lambda n: (f"10.9.0.{n + 1}", PORT))
        for host in self.hosts.values():
            host.place = lambda name=host.name: inside(name)


def homed_at(home: Path, name: str) -> list[list[int]]:
    """Prompts whose only home is that host."""
    shared = read(home / "secrets").shared(SPEC, f"uid:{os.getuid()}", 0)
    return [p for p in PATHS if homes(list(NAMES), rungs(shared, path_keys(p))[-1].key, 1) == [name]]


def slow_link(home: Path) -> None:
    """A link too slow for the deadline gives what came in time, right; a faster one gives all; nothing leaks."""
    with NetFleet(home) as hosts:
        first, second, *_ = homed_at(home, "b")
        for path in (first, second):
            assert hosts["b"].put(path) == len(path)
        limit = ("tbf", "burst", "16kb", "latency", "50ms")
        run("ip", "netns", "exec", "b", "tc", "qdisc", "add", "dev", "eth0", "root", *limit, "rate", "1mbit")
        assert hosts["a"].get(first, wait_ms=30_000) < len(first)
        assert hosts["a"].count("peer_failures") >= 1
        run("ip", "netns", "exec", "b", "tc", "qdisc", "change", "dev", "eth0", "root", *limit, "rate", "100mbit")
        until(lambda: "b" in hosts["a"].up(), RECOVERY_S)
        assert hosts["a"].get(second, wait_ms=30_000) == len(second)
        until(lambda: hosts["a"].get(first, wait_ms=30_000) == len(first))
        for name in NAMES:
            hosts[name].emptied()


def partition(home: Path) -> None:
    """A host that is cut off costs one deadline; 5 s after the link is back it serves again, without a restart."""
    with NetFleet(home) as hosts:
        mine = homed_at(home, "b")
        for path in mine:
            assert hosts["b"].put(path) == len(path)
        assert hosts["a"].get(mine[0]) == len(mine[0])
        run("ip", "link", "set", "vb", "down")
        assert [hosts["a"].get(path, wait_ms=30_000) for path in mine[1:]] == [0] * (len(mine) - 1)
        assert hosts["a"].count("peer_failures") <= 1
        for path in mine[1:3]:
            assert hosts["a"].put(path) == len(path), "what its home cannot take is served here all the same"
        run("ip", "link", "set", "vb", "up")
        until(lambda: "b" in hosts["a"].up(), RECOVERY_S)
        time.sleep(LACKS_S)
        assert [hosts["a"].get(path) for path in mine[3:]] == [len(path) for path in mine[3:]]
        assert hosts["a"].count("peer_restarts") == 0
        for name in NAMES:
            hosts[name].emptied()


def half_open(home: Path) -> None:
    """A host that dies while it is cut off leaves connections half open: they hold nobody up once it is back, empty."""
    with NetFleet(home) as hosts:
        mine = homed_at(home, "b")
        for path in mine:
            assert hosts["b"].put(path) == len(path)
        assert hosts["a"].get(mine[0]) == len(mine[0])
        run("ip", "link", "set", "vb", "down")
        hosts["b"].daemon.kill()
        hosts["b"].start()
        run("ip", "link", "set", "vb", "up")
        until(lambda: hosts["a"].count("peer_restarts") == 1 and "b" in hosts["a"].up(), RECOVERY_S)
        assert [hosts["a"].get(path) for path in mine[1:]] == [0] * (len(mine) - 1)
        until(lambda: hosts["b"].put(mine[1]) == len(mine[1]))
        time.sleep(LACKS_S)
        assert hosts["a"].get(mine[1]) == len(mine[1])
        for name in NAMES:
            hosts[name].emptied()


if __name__ == "__main__":
    network()
    if sys.argv[1] != "network":
        globals()[sys.argv[1]](Path(sys.argv[2]))
