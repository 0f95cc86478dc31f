"""Faults around a real daemon, each with its outcome in docs/failures.md; another engine's matches stay fast."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import faultkit
from engineproc import SPEC, path_keys
from faultkit import PAGES, Bystander, Trouble, eventually, humble, resting
from fleetkit import Fleet, free_ports, until
from kvtier import wire
from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from test_processes import Engine, ctl, engines, settled
from tests import powercut

__all__ = ["engines"]

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]


def footprint(daemon: Daemon) -> dict[str, int]:
    """What the daemon's process holds of the system."""
    process = psutil.Process(daemon.pid)
    return {"fds": process.num_fds(), "threads": process.num_threads(), "maps": len(process.memory_maps(grouped=False))}


def disk(daemon: Daemon) -> dict[str, Any]:
    """What the daemon says of its disk tier."""
    return ctl(daemon, "status")["tiers"]["disk"]


@pytest.fixture(scope="module", autouse=True)
def ahead_of_others() -> Iterator[None]:
    """Before all else on the cores."""
    with faultkit.first():
        yield


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that nothing happens to."""
    with Daemon(tmp_path_factory.mktemp("calm"), host="64MiB", disk="128MiB") as daemon:
        yield daemon


def busy(daemon: Daemon, name: str = "busy") -> Engine:
    """An engine that stores and reads without an end."""
    engine = Engine(daemon, name)
    humble(engine.process.pid)
    engine("churn", [9])
    return engine


def test_a_disk_that_gives_errors(tmp_path: Path, calm: Daemon) -> None:
    """EIO of every write, then of every read: named, host serves, no wrong byte; mended by itself when it ends."""
    daemon, fault = faultkit.faulty(tmp_path)
    with daemon, Bystander(daemon, calm) as beside:
        engine = busy(daemon)
        try:
            eventually(lambda: disk(daemon)["runs_written"] > 20)
            fault.write_text("pwritev fdatasync")
            eventually(lambda: disk(daemon)["sick"] == "EIO")
            beside.notices_nothing(resting(engine.process.send_signal))
            assert beside.put([1, 2, 3]) == 3
            assert beside.get([1, 2, 3]) == 3
            assert not beside.cache.flush(1.0)
            fault.write_text("preadv")
            beside.notices_nothing(resting(engine.process.send_signal))
            fault.unlink()
            eventually(lambda: not disk(daemon)["sick"])
            eventually(lambda: engine("so_far")["stored"])
            done = engine("rest")
        finally:
            engine.close()
        assert done["wrong"] == 0
        assert beside.cache.flush(30.0)
        assert daemon.broken_invariants() == []
        assert daemon.stop() == 0


def test_a_disk_that_is_full(tmp_path: Path, calm: Daemon) -> None:
    """More was promised than the device has: named, what is new takes the place of what is old, and it grows again."""
    with faultkit.file_system(tmp_path, 320) as where:
        ballast = where / "ballast"
        ballast.write_bytes(bytes(120 << 20))
        flags = [f"--disk-path={where / 'disk'}"]
        with Daemon(tmp_path, host="24MiB", disk="1GiB", flags=flags) as daemon, Bystander(daemon, calm) as beside:
            engine = busy(daemon)
            try:
                short = eventually(lambda: disk(daemon)["parked_bytes"])
                before = disk(daemon)["runs_written"]
                beside.notices_nothing(resting(engine.process.send_signal))
                assert beside.put([1, 2, 3]) == 3
                assert beside.get([1, 2, 3]) == 3
                eventually(lambda: disk(daemon)["runs_written"] > before + 100)
                assert beside.cache.flush(30.0)
                assert disk(daemon)["sick"] == ""
                ballast.unlink()
                eventually(lambda: disk(daemon)["parked_bytes"] < short)
                done = engine("rest")
            finally:
                engine.close()
            assert done["wrong"] == 0
            assert beside.cache.flush(30.0)
            assert daemon.broken_invariants() == []
            assert daemon.stop() == 0


def test_a_file_system_that_turns_read_only(tmp_path: Path, calm: Daemon) -> None:
    """As ext4 does after an error: host and what can be read are served, and after a repair all that was durable."""
    with faultkit.file_system(tmp_path, 128) as where:
        flags = [f"--disk-path={where / 'disk'}"]
        with Daemon(tmp_path, host="24MiB", disk="64MiB", flags=flags) as daemon:
            with Bystander(daemon, calm) as beside:
                engine = busy(daemon)
                try:
                    eventually(lambda: disk(daemon)["runs_written"] > 20)
                    assert not faultkit.mount(f"-oremount,abort {where}")
                    eventually(lambda: disk(daemon)["sick"])
                    beside.notices_nothing(resting(engine.process.send_signal))
                    assert beside.put([1, 2, 3]) == 3
                    assert beside.get([1, 2, 3]) == 3
                    assert engine("rest")["wrong"] == 0
                finally:
                    engine.close()
                assert daemon.broken_invariants() == []
            assert daemon.stop() == 0
            faultkit.remount(tmp_path)
            daemon.start()
            with Client(daemon.socket, instance="after", timeout_s=10.0) as client:
                cache = client.open(SPEC)
                eventually(lambda: cache.match(path_keys(PAGES)).pages == len(PAGES))
            assert disk(daemon)["damaged_runs"] == disk(daemon)["set_aside"] == 0


def test_a_device_that_fails(tmp_path: Path, calm: Daemon) -> None:
    """EIO of a copy: named, taken out for good, host serves who had mapped it, no wrong byte; a restart has it back."""
    (port,) = free_ports(1)
    flags = ["--device-which=cpu", "--device-bytes=16MiB", f"--http-port={port}"]
    daemon, fault = faultkit.faulty(tmp_path, *flags)

    def device(what: str) -> Any:
        return ctl(daemon, "status")["tiers"]["device"][what]

    def alarm() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
            return b"\nkvtier_device_sick 1.0\n" in reply.read()

    with daemon, Bystander(daemon, calm) as beside:
        engine = Engine(daemon, "busy")
        try:
            humble(engine.process.pid)
            assert engine("map") == {"mapped": True}
            engine("churn", [9])
            eventually(lambda: device("used_bytes") > 1 << 20)
            fault.write_text("copies")
            eventually(lambda: device("state") == "sick")
            fault.unlink()
            assert "injected" in device("sick")
            before = engine("so_far")
            eventually(lambda: engine("so_far")["stored"] > before["stored"])
            eventually(alarm)
            stored = disk(daemon)["runs_written"]
            beside.notices_nothing(resting(engine.process.send_signal))
            assert beside.put([1, 2, 3]) == 3
            eventually(lambda: disk(daemon)["runs_written"] > stored)
            eventually(lambda: engine("so_far")["served"] > before["served"])
            done = engine("rest")
        finally:
            engine.close()
        assert done["wrong"] == 0
        assert daemon.broken_invariants() == []
        assert daemon.stop() == 0
        daemon.start()
        assert device("state") == "ready"


@pytest.mark.skipif(not powercut.works(), reason="needs strace, and leave to trace")
@pytest.mark.parametrize("first", [1, 3, 4])
def test_a_file_system_is_read_only_for_a_while(tmp_path: Path, calm: Daemon, first: int) -> None:
    """From any of LMDB's writes on, its meta page's too: named, hits of host and disk go on, and mended by itself."""
    old = [[n, *range(1000, 1063)] for n in range(8)]
    with Daemon(tmp_path, host="24MiB", disk="128MiB") as daemon:
        with Bystander(daemon, calm) as beside:
            assert [beside.put(path) for path in old] == [64] * 8
            assert beside.cache.flush(20.0)
            with faultkit.read_only(daemon, first):
                fresh: list[list[int]] = []
                while not fresh or beside.cache.flush(5.0):
                    fresh.append([2000 + len(fresh), 1, 2])
                    assert beside.put(fresh[-1]) == 3
                eventually(lambda: not beside.cache.flush(5.0) and disk(daemon)["sick"] == "EROFS")
                before = disk(daemon)["bytes_read"]
                assert [beside.get(path) for path in old] == [64] * 8
                assert disk(daemon)["bytes_read"] > before
                assert beside.get(fresh[-1]) == 3
            eventually(lambda: beside.cache.flush(5.0))  # it is sick until a write has worked
            assert not disk(daemon)["sick"]
            assert disk(daemon)["state"] == "ready"
        assert daemon.broken_invariants() == []
        daemon.kill()
        daemon.start()
        with Bystander(daemon, calm) as beside:
            assert [beside.get(path) for path in old + fresh] == [64] * 8 + [3] * len(fresh)


def test_no_descriptor_is_left(daemon: Daemon, calm: Daemon) -> None:
    """Attached engines are served, also what needs disk; newcomers wait, and are served when some return."""
    with Bystander(daemon, calm) as beside:
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        fds = psutil.Process(daemon.pid).num_fds()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (fds + 4, hard))
        late = []
        try:
            for _ in range(20):
                late.append(socket.socket(socket.AF_UNIX))
                late[-1].connect(str(daemon.socket))
            eventually(lambda: "cannot accept" in daemon.log.read_text())
            beside.notices_nothing()
            assert beside.put([1, 2, 3]) == 3
            assert beside.cache.flush(20.0)
        finally:
            for sock in late:
                sock.close()
        with Client(daemon.socket, instance="late", timeout_s=10.0) as newcomer:
            assert newcomer.ping()


def test_an_engine_is_stopped(daemon: Daemon, engines: Any, calm: Daemon) -> None:
    """SIGSTOP of one that holds all it may: it keeps that, and nobody else is short of anything."""
    with Bystander(daemon, calm) as beside:
        stopped = engines("stopped")
        while stopped("reserve", [int.from_bytes(os.urandom(3), "big") for _ in range(100)])["pages"]:
            pass
        stopped.kill(signal.SIGSTOP)
        beside.notices_nothing()
        for n in range(10):
            assert beside.put([n, *range(1000, 1040)]) == 41
        stopped.kill(signal.SIGCONT)
        assert stopped("drop") == {}
    settled(daemon, {"stopped": 0})


def test_a_peer_is_stopped(tmp_path: Path, calm: Daemon) -> None:
    """SIGSTOP of another host's daemon: who asks for its pages misses within the deadline, others wait for nothing."""
    with Fleet(tmp_path, 2, replicas=1, disk="128MiB") as hosts, Bystander(hosts["a"].daemon, calm) as beside:
        path = next(p for n in range(100) if hosts["b"].put(p := [5000 + n, 1, 2]) and hosts["a"].get(p) == 3)
        assert path
        hosts["b"].signal(signal.SIGSTOP)
        engine = busy(hosts["a"].daemon)
        try:
            beside.notices_nothing(resting(engine.process.send_signal))
            assert engine("rest")["wrong"] == 0
        finally:
            engine.close()
        hosts["b"].signal(signal.SIGCONT)
        until(lambda: "b" in hosts["a"].up())
        hosts["a"].sound()


def test_the_daemon_is_stopped(daemon: Daemon, calm: Daemon) -> None:
    """SIGSTOP of it: a miss for every call within its deadline; after SIGCONT all is as before."""
    with Bystander(daemon, calm) as beside:
        impatient = Client(daemon.socket, instance="impatient", timeout_s=0.3)
        cache = impatient.open(beside.cache.spec)
        keys = path_keys(PAGES)
        assert cache.match(keys).pages == len(PAGES)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            assert cache.match(keys).pages == 0
            assert cache.match(keys).acquire().pages == 0
            assert time.monotonic() - begin < 30
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        eventually(lambda: cache.match(keys).pages == len(PAGES))
        beside.notices_nothing()
        impatient.close()
    settled(daemon, {})


def test_a_thousand_connections_are_idle(daemon: Daemon, calm: Daemon) -> None:
    """All of them attached: nobody is slower for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("the system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    idle = [socket.socket(socket.AF_UNIX) for _ in range(1000)]
    try:
        with Bystander(daemon, calm) as beside:
            for sock in idle:
                sock.connect(str(daemon.socket))
                sock.sendall(wire.request_frame(wire.Hello(wire.VERSION, "idle"), 1))
                assert sock.recv(4096)
            beside.notices_nothing()
            for sock in idle:
                sock.sendall(wire.request_frame(wire.Bye(), 2))
                assert sock.recv(4096)
    finally:
        for sock in idle:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    settled(daemon, {})


def test_an_engine_floods(daemon: Daemon, calm: Daemon) -> None:
    """Hundreds of requests in flight, without a pause: its turns are bounded, and others have theirs."""
    with Bystander(daemon, calm) as beside:
        with Trouble(daemon, "flood") as flood:
            beside.notices_nothing(resting(flood.all))
            assert beside.put([1, 2, 3]) == 3
            assert flood.poll() is None
        assert beside.get([1, 2, 3]) == 3
    settled(daemon, {})


def test_storms_of_engines_come_and_die(daemon: Daemon, calm: Daemon) -> None:
    """Two hundred attached, killed or gone with leases: all of it returns; descriptors, threads and maps too."""
    with Trouble(daemon, "storm", 0) as storm:
        assert storm.end() == 0
    settled(daemon, {})
    before = footprint(daemon)
    with Bystander(daemon, calm) as beside:
        with Trouble(daemon, "storm", 0) as storm:
            beside.notices_nothing(resting(storm.all))
            assert storm.end() == 0
        assert beside.put([500, 501]) == beside.get([500, 501]) == 2
    settled(daemon, {})
    eventually(lambda: all(now <= before[what] + 8 for what, now in footprint(daemon).items()))
    assert ctl(daemon, "check")["broken"] == []


def test_the_clock_jumps(tmp_path: Path, calm: Daemon) -> None:
    """By decades, both ways: deadlines, leases and ages are of the monotonic clock; people read the wall clock."""
    fake = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if fake is None:
        pytest.skip("libfaketime is not installed")
    stamp = tmp_path / "clock"
    stamp.write_text("+0\n")
    env = {"LD_PRELOAD": str(fake), "FAKETIME_TIMESTAMP_FILE": str(stamp), "FAKETIME_NO_CACHE": "1",
           "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}  # fmt: skip
    with Daemon(tmp_path, host="64MiB", disk="128MiB", env=env) as daemon, Bystander(daemon, calm) as beside:
        for jump in ("-10y", "+20y", "+0"):
            stamp.write_text(jump + "\n")
            beside.notices_nothing()
            assert beside.cache.flush(20.0)
            status = ctl(daemon, "status")
            said = status["instances"], beside.client.last_error, (tmp_path / "kvtierd.log").read_text()
            assert status["instances"][0]["leases"] == 1, said
            assert 0 <= status["uptime_s"] < 180
        assert ctl(daemon, "check")["broken"] == []


def test_memory_is_short(tmp_path: Path, calm: Daemon) -> None:
    """In a cgroup: host is sized by its limit, more is refused by name, and a full host is no reason to be killed."""
    limit = 256 << 20
    with faultkit.cgroup(limit) as group:
        words = [*group.command, "--disk-bytes=0", f"--socket-path={tmp_path / 's'}", "--host-bytes=200MiB"]
        refused = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1
        assert "host.bytes" in refused.stderr
        assert str(limit) in refused.stderr
        with Daemon(tmp_path, host="-1", disk="0", command=group.command) as daemon:
            assert ctl(daemon, "status")["tiers"]["host"]["budget_bytes"] == limit // 8
        with Daemon(tmp_path, host="128MiB", disk="512MiB", command=group.command) as daemon:
            with Bystander(daemon, calm) as beside:
                engine = busy(daemon)
                try:
                    eventually(lambda: ctl(daemon, "status")["tiers"]["host"]["used_bytes"] == 128 << 20)
                    eventually(lambda: group.used() > 128 << 20)
                    beside.notices_nothing(resting(engine.process.send_signal))
                    assert engine("rest")["wrong"] == 0
                finally:
                    engine.close()
            assert group.killed() == 0
            assert daemon.stop() == 0
