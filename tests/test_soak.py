"""Everything at once for minutes, with kills of everything in turn: nothing durable is lost and nothing grows.

$KVTIER_SOAK_S: seconds (default 170; 1800 makes some millions of requests).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

import soakproc
from faultkit import eventually
from fleetkit import Fleet, Host
from kvtier import wire
from kvtier.client import Client

SECONDS = float(os.environ.get("KVTIER_SOAK_S", "170"))
KILLING = 0.4
"""The part of the time in which the daemon whose growth is looked at is killed too."""
BACK_S = 60.0
"""Within so long the hit ratio is what it was."""
GROWTH = {"rss": 8 << 20, "fds": 6, "threads": 2, "catalogue": 2 << 20, "extents": 8 << 20}
"""Noise between the halves of the time without kills of the daemon: allocators and write batches, not slopes."""


class Engine:
    """An engine that is killed and started again, and what it said in all its lives."""

    def __init__(self, host: Host, name: str, home: Path) -> None:
        self.host, self.name = host, name
        self.log = home / f"{name}.log"
        self.lives = 0
        self.process: subprocess.Popen | None = None
        self.out: IO[bytes] = self.log.open("ab")

    def start(self) -> None:
        """Another life."""
        self.lives += 1
        seed = f"{sum(self.name.encode())}{self.lives}"
        command = [sys.executable, str(Path(soakproc.__file__)), str(self.host.daemon.socket), self.name, seed]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out)

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.wait()

    def lines(self, kind: str) -> list[str]:
        """What it said of a kind; a line that was cut off by a kill says nothing."""
        return [line[2:].rstrip() for line in self.log.read_text().splitlines(keepends=True)
                if line[0] == kind and line.endswith("\n")]  # fmt: skip


class Soak:
    """Two hosts, two engines on the first and one on the other."""

    def __init__(self, hosts: dict[str, Host], home: Path) -> None:
        self.a, self.b = hosts["a"], hosts["b"]
        self.rng = random.Random(1)
        self.engines = [Engine(self.a, "one", home), Engine(self.a, "two", home), Engine(self.b, "three", home)]
        for engine in self.engines:
            engine.start()

    def durable(self, host: Host) -> set[int]:
        """Prompts that engines of a host were told are durable."""
        return {int(n) for engine in self.engines if engine.host is host for n in engine.lines("+")}

    def restart(self, engine: Engine) -> None:
        """Kill an engine amid whatever it does."""
        engine.kill()
        engine.start()

    def pause(self, pid: int) -> None:
        """Stop a process for a moment."""
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * 2)
        os.kill(pid, signal.SIGCONT)

    def reboot(self, host: Host, *, cleanly: bool = False) -> None:
        """End a daemon and start it again; what was durable is found again within a minute."""
        known = self.durable(host)
        if cleanly:
            assert host.daemon.stop() == 0
        else:
            host.daemon.kill()
        host.start()
        with Client(host.daemon.socket, instance="check", timeout_s=10.0) as client:
            cache = client.open(soakproc.KEPT)
            pages = sum(map(soakproc.count, known))
            eventually(lambda: sum(cache.match(soakproc.prompt(n)).pages for n in known) == pages, BACK_S)

    def others(self) -> list[Callable[[], None]]:
        """Kills and stops of everything but the daemon that is looked at."""
        one, two, three = self.engines
        return [
            lambda: self.restart(one), lambda: self.reboot(self.b), lambda: self.restart(two),
            lambda: self.pause(one.process.pid), lambda: self.restart(three), lambda: self.pause(self.b.daemon.pid),
        ]  # fmt: skip

    def all(self) -> list[Callable[[], None]]:
        """Kills and stops of everything."""
        first = [lambda: self.reboot(self.a), lambda: self.pause(self.a.daemon.pid)]
        return [*first, *self.others(), lambda: self.reboot(self.a, cleanly=True)]

    def footprint(self) -> dict[str, int]:
        """What the first daemon has of the system."""
        process, disk = psutil.Process(self.a.daemon.pid), self.a.ask(wire.Status())["tiers"]["disk"]
        extents = self.a.daemon.home / "disk" / "extents"
        return {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads(),
                "catalogue": disk["catalogue_bytes"], "extents": extents.stat().st_blocks * 512}  # fmt: skip


def until(end: float, turns: list[Callable[[], None]]) -> Iterator[None]:
    """One after the other, again and again, with pauses in which the caller does something."""
    while True:
        for turn in turns:
            if time.monotonic() > end:
                return
            turn()
            for _ in range(3):
                time.sleep(0.5)
                yield


def kept(host: Host, durable: set[int]) -> None:
    """One host alone, after another kill: every durable prompt is served, byte for byte."""
    host.daemon.kill()
    host.start()
    assert len(durable) > 20, "the soak stored next to nothing"
    with Client(host.daemon.socket, instance="last", timeout_s=20.0, verify="always") as client:
        cache = client.open(soakproc.KEPT)
        eventually(lambda: host.ask(wire.Status())["tiers"]["disk"]["state"] == "ready")
        served = {n: soakproc.right(cache, n, 20_000) for n in durable}
        assert served == {n: soakproc.count(n) for n in durable}
    assert host.ask(wire.Status())["tiers"]["disk"]["set_aside"] == 0
    host.sound()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 400)
def test_nothing_durable_is_lost_and_nothing_grows_while_everything_is_killed_in_turn(tmp_path: Path) -> None:
    """Engines, a peer and the daemon; bytes right, hits back in a minute, no slope in memory, files and descriptors."""
    fleet = Fleet(tmp_path, 2, host="12MiB", disk="96MiB")
    for host in fleet.hosts.values():
        quota = f"--quotas=tenant={soakproc.TENANT} host=4MiB disk=16MiB"
        host.daemon.flags += ["--host-slab-bytes=1MiB", quota]
    begin = time.monotonic()
    with fleet as hosts:
        soak = Soak(hosts, tmp_path)
        try:
            for _ in until(begin + KILLING * SECONDS, soak.all()):
                pass
            warm = time.monotonic() + 0.2 * SECONDS
            seen = [soak.footprint() for _ in until(begin + SECONDS, soak.others()) if time.monotonic() > warm]
        finally:
            for engine in soak.engines:
                engine.kill()
                engine.out.close()
        took = time.monotonic() - begin
        assert [line for engine in soak.engines for line in engine.lines("!")] == []
        done = sum(int(n) for engine in soak.engines for n in engine.lines("#"))
        print(f"{done} requests in {took:.0f} s")
        assert done > 100 * SECONDS
        half = len(seen) // 2
        grown = {
            what: statistics.median(each[what] for each in seen[half:])
            - statistics.median(each[what] for each in seen[:half])
            for what in GROWTH
        }
        print(grown, seen[0], seen[-1])
        assert all(grown[what] <= most for what, most in GROWTH.items()), grown
        eventually(lambda: soak.a.ask(wire.Status())["instances"] == [])
        soak.a.sound()
        soak.b.daemon.kill()
        kept(soak.a, soak.durable(soak.a))
        soak.a.daemon.kill()
        kept(soak.b, soak.durable(soak.b))
