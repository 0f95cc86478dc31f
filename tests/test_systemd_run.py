"""The service under a real systemd: readiness, sockets, reload, a hung loop that the watchdog ends, kill -9."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from systemdkit import Systemd, UnableError, lacking
from test_systemd import FOLDER, units

__all__ = ["units"]
DEADLINE = 30.0
HERE = Path(kvtier.__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs a checkout"),
    pytest.mark.skipif(bool(lacking()), reason=f"a real systemd: {lacking()}"),
]

DAEMON = """
import asyncio, signal, time
from kvtier import daemon
real = daemon.Companions
def hang():
    while True:
        time.sleep(0.001)
def late(*args):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hang)
    return real(*args)
daemon.Companions = late
daemon.main()
"""
"""kvtierd whose loop hangs on SIGUSR1, while its threads and its HTTP process go on."""

ENGINE = """
import sys
import numpy as np
from kvtier.client import Client, page_keys
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
spec = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 4096),))
with Client("/run/kvtier/kvtierd.sock", instance="e", timeout_s=20) as client:
    cache = client.open(spec)
    path = cache.match(page_keys(spec, np.arange(40)))
    if sys.argv[1] == "put":
        with path.reserve(0, 10) as reserved:
            for page in range(10):
                reserved.write(0, page, np.full(4096, page, np.uint8))
            assert reserved.commit() == 10
        assert cache.flush()
    else:
        with path.acquire() as lease:
            assert all((lease.view(0, page) == page).all() for page in range(lease.pages))
            print(lease.pages)
"""


class Host:
    """Systemd with kvtier's units."""

    def __init__(self, systemd: Systemd, port: int, engine: Path) -> None:
        self.systemd = systemd
        self.port = port
        self._engine = str(engine)

    def engine(self, what: str) -> str:
        """Run an engine that stores a prompt, or reads it and says how many pages there were."""
        return self.systemd.run("env", f"PYTHONPATH={HERE}", sys.executable, self._engine, what).strip()

    def health(self) -> int:
        """Status of /healthz; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=DEADLINE) as reply:
                return reply.status
        except urllib.error.HTTPError as exc:
            with exc:
                assert json.loads(exc.read())["faults"]
                return exc.code
        except OSError:
            return 0

    def main(self) -> int:
        """Process of the service; 0 while there is none."""
        return int(self.systemd.show("kvtierd.service", "MainPID"))

    def until(self, holds: object) -> None:
        """Wait; the journal is part of the failure."""
        assert callable(holds)
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end, self.systemd.ctl("status", "kvtierd.service", check=False)
            time.sleep(0.05)


@pytest.fixture
def host(units: Path, tmp_path: Path) -> Iterator[Host]:
    """Units as they ship, but for what is installed where and how long a hang may last."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    (tmp_path / "daemon.py").write_text(DAEMON)
    (tmp_path / "engine.py").write_text(ENGINE)
    flags = f"--host-bytes=64MiB --disk-bytes=128MiB --http-port={port}"
    (units / "kvtierd").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/daemon.py {flags} "$@"\n')
    dropin = units / "kvtierd.service.d" / "test.conf"
    dropin.parent.mkdir()
    bound = " ".join(dict.fromkeys(map(str, (tmp_path, HERE, Path(sys.prefix), Path(sys.base_prefix)))))
    dropin.write_text(
        f"[Service]\nWatchdogSec=3\nConfigurationDirectory=\nProtectHome=read-only\nBindReadOnlyPaths={bound}\n"
        f"Environment=PYTHONPATH={HERE}\n"
    )
    try:
        with Systemd(tmp_path, units) as systemd:
            yield Host(systemd, port, tmp_path / "engine.py")
    except UnableError as exc:
        pytest.skip(f"systemd does not come up in namespaces here: {exc}")


def test_a_hung_loop_turns_healthz_red_and_the_watchdog_starts_the_service_anew(host):
    """Red within two seconds, ended and started again by systemd, and what was durable is served."""
    host.systemd.ctl("start", "kvtierd.service")
    host.engine("put")
    host.until(lambda: host.health() == 200)
    first = host.main()
    host.systemd.ctl("kill", "--kill-whom=main", "--signal=USR1", "kvtierd.service")
    start = time.monotonic()
    while host.health() != 503:
        assert time.monotonic() - start < 2.0
    assert time.monotonic() - start < 2.0
    host.until(lambda: host.main() not in {0, first})
    assert host.systemd.show("kvtierd.service", "NRestarts") == "1"
    host.until(lambda: host.health() == 200)
    host.until(lambda: host.engine("get") == "10")
    host.systemd.ctl("stop", "kvtierd.service")
    assert host.systemd.show("kvtierd.service", "Result") == "success"


def test_sockets_start_the_service_and_outlast_it(host):
    """The first engine starts it; one that comes after a kill -9 waits for the next life; reload and stop are clean."""
    host.systemd.ctl("start", "kvtierd.socket", "kvtierd-admin.socket")
    modes = host.systemd.run("stat", "-c", "%a", "/run/kvtier/kvtierd.sock", "/run/kvtier/admin.sock").split()
    assert modes == ["660", "600"]
    assert host.main() == 0
    host.engine("put")
    first = host.main()
    assert first
    host.systemd.ctl("kill", "--kill-whom=main", "--signal=KILL", "kvtierd.service")
    host.until(lambda: host.engine("get") == "10")
    assert host.main() not in {0, first}
    host.systemd.ctl("reload", "kvtierd.service")
    check = ["env", f"PYTHONPATH={HERE}", "KVTIER_SOCKET=/run/kvtier/kvtierd.sock", sys.executable, "-m", "kvtier.ctl"]
    assert json.loads(host.systemd.run(*check, "check", "--json"))["healthy"]
    host.systemd.ctl("stop", "kvtierd.service")
    assert host.systemd.show("kvtierd.service", "Result") == "success"
    assert host.systemd.show("kvtierd.socket", "ActiveState") == "active"
