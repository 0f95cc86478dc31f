"""Everything at once for minutes, with kills of everything in turn: nothing durable is lost and nothing grows.

$KVTIER_SOAK_S: seconds (default 170; 1800 and more are to make a million requests).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

import soakproc
from faultkit import eventually, humble
from fleetkit import Fleet, Host
from growth import line
from kvtier import wire
from kvtier.client import Client

SECONDS = float(os.environ.get("KVTIER_SOAK_S", "170"))
KILLING = 0.4
"""The part of the time in which the daemon whose growth is looked at is killed too."""
BACK_S = 60.0
"""Within so long the hit ratio is what it was."""
MILLION_S = 1800.0
"""A soak of so long makes a million requests."""
WARM, FILLING = (0.35, 0.02) if SECONDS >= MILLION_S else (0.2, 0.15)
"""What is bounded (ghosts, histories, the allocator's free lists) fills for twenty minutes, ever more slowly.

The part of the time that is waited for it after the last kill, and how much of it is still seen.
"""
NOISE = {
    "blocks": FILLING, "anonymous": FILLING, "resident": FILLING,
    "fds": 0, "threads": 0, "files": 0, "catalogue": 0.1, "extents": 0,
}  # fmt: skip
"""Shares of its level that the least-squares line of a value may rise; none where it is a count."""
CHANCE = 3.0
"""How many standard errors of the line it may rise besides: engines come and go between the samples."""


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
        humble(self.process.pid)

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

    def done(self) -> int:
        """Requests that were answered so far."""
        return sum(int(n) for engine in self.engines for n in engine.lines("#"))

    def footprint(self) -> dict[str, float]:
        """What the first daemon has of the system, and after how many requests."""
        daemon = self.a.daemon
        process, disk = psutil.Process(daemon.pid), self.a.ask(wire.Status())["tiers"]["disk"]
        memory = process.memory_info()
        extents = daemon.home / "disk" / "extents"
        return {
            "requests": self.done(), "blocks": self.a.ask(wire.Metrics())["python_blocks"],
            "anonymous": memory.rss - memory.shared, "resident": memory.rss,
            "fds": process.num_fds(), "threads": process.num_threads(),
            "files": sum(1 for _ in daemon.home.rglob("*")),
            "catalogue": disk["catalogue_bytes"], "extents": extents.stat().st_blocks * 512,
        }  # fmt: skip


def risen(seen: list[dict[str, float]]) -> dict[str, str]:
    """What rose with the requests by more than noise, and how its line and its samples are."""
    requests, out = [each["requests"] for each in seen], {}
    for what, noise in NOISE.items():
        values = [each[what] for each in seen]
        found = line(requests, values)
        print(f"{what}: {found}")
        if found.rise > noise * found.mean + CHANCE * found.error + 1e-3:  # 1e-3: rounding
            out[what] = f"{found}: {values}"
    return out


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
@pytest.mark.alone
@pytest.mark.timeout(SECONDS + 400)
def test_nothing_durable_is_lost_and_nothing_grows_while_everything_is_killed_in_turn(tmp_path: Path) -> None:
    """Engines, a peer and the daemon; bytes right, hits back in a minute, no slope in memory, files or descriptors."""
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
            warm = time.monotonic() + WARM * SECONDS
            seen = [soak.footprint() for _ in until(begin + SECONDS, soak.others()) if time.monotonic() > warm]
        finally:
            for engine in soak.engines:
                engine.kill()
                engine.out.close()
        took = time.monotonic() - begin
        assert [line for engine in soak.engines for line in engine.lines("!")] == []
        done = soak.done()
        print(f"{done} requests in {took:.0f} s, {done - seen[0]['requests']} of them while it was looked at")
        assert risen(seen) == {}
        assert done > (100 * SECONDS if SECONDS < MILLION_S else 1e6)
        eventually(lambda: soak.a.ask(wire.Status())["instances"] == [])
        soak.a.sound()
        soak.b.daemon.kill()
        kept(soak.a, soak.durable(soak.a))
        soak.a.daemon.kill()
        kept(soak.b, soak.durable(soak.b))
