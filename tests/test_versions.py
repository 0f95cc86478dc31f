"""Parts of different versions meet: they serve each other or one says by name why not, and nothing else suffers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engineproc import SPEC, path_keys
from faultkit import eventually
from fleetkit import Fleet
from kvtier import wire
from kvtier.client import Client
from kvtier.demo.daemon import COMMAND, Daemon
from test_processes import ctl

OLDER = "from kvtier import wire; wire.VERSION -= 1; "
NEWER = "from kvtier import wire; wire.VERSION += 1; "
DAEMON = "from kvtier.daemon import main; main()"
ATTACH = """
import sys
from engineproc import SPEC
from kvtier.client import Client
from kvtier.types import KvtierError
try:
    Client(sys.argv[1], instance="older", timeout_s=10.0).open(SPEC)
except KvtierError as exc:
    print(exc.code.value, exc.message)
"""


def test_a_client_one_version_older_is_refused_by_name(daemon: Daemon) -> None:
    """It is told both versions, joins nothing, and engines of the daemon's own version go on."""
    with Client(daemon.socket, instance="same", timeout_s=10.0) as same:
        cache = same.open(SPEC)
        command = [sys.executable, "-c", OLDER + ATTACH, str(daemon.socket)]
        said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
        assert said.stdout.startswith("version expected protocol version"), said.stdout + said.stderr
        assert {str(wire.VERSION), str(wire.VERSION - 1)} <= set(said.stdout.replace(",", "").split())
        with cache.match(path_keys([1])).reserve(0, 1) as held:
            assert held.commit() == 1
        assert [each["instance"] for each in ctl(daemon, "status")["instances"]] == ["same"]


def test_kvtierctl_of_an_older_version_says_so(daemon: Daemon) -> None:
    """Exit code and message name the version instead of a number out of thin air."""
    admin = str(daemon.socket.with_name("admin.sock"))
    command = [sys.executable, "-c", OLDER + "from kvtier.ctl import main; main()", "--socket", admin, "status"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode
    assert "protocol version" in said.stderr
    assert "Traceback" not in said.stderr


def test_engines_outlive_an_upgrade_of_the_daemon_to_another_protocol_and_back(tmp_path: Path) -> None:
    """Attached engines get misses that say why, never an exception; what was durable is served after the way back."""
    with Daemon(tmp_path, host="16MiB", disk="64MiB") as daemon, Client(daemon.socket, timeout_s=10.0) as client:
        cache, keys = client.open(SPEC), path_keys([1, 2])
        with cache.match(keys).reserve(0, 2) as held:
            assert held.commit() == 2
        assert cache.flush(20.0)
        assert daemon.stop() == 0
        command = [sys.executable, "-c", NEWER + DAEMON, f"--socket-path={daemon.socket}", "--host-bytes=16MiB"]
        with subprocess.Popen([*command, "--disk-bytes=0", "--http-port=0"], stderr=subprocess.DEVNULL) as newer:
            try:
                eventually(lambda: not cache.match(keys).pages and "protocol version" in str(client.last_error))
                assert cache.match(keys).acquire().pages == 0
                assert cache.match(keys).reserve(0, 2).pages == 0
                assert not cache.flush(1.0)
            finally:
                newer.terminate()
        daemon.start()
        eventually(lambda: cache.match(keys).pages == 2)


@pytest.mark.slow
def test_hosts_of_another_peer_protocol_are_no_peers(tmp_path: Path) -> None:
    """Daemons of two versions in one fleet: each serves its own engines, and says why not the other's."""
    fleet = Fleet(tmp_path, 2, disk="64MiB")
    fleet.isolated = {"a", "b"}
    other = "from kvtier.peer import frames; frames.VERSION += 1; "
    fleet.hosts["b"].daemon._command = [COMMAND[0], "-c", other + DAEMON]
    with fleet as hosts:
        for host, path in ((hosts["a"], [1, 2]), (hosts["b"], [3, 4])):
            assert host.put(path) == host.get(path) == 2
            eventually(lambda host=host: "peer protocol version" in host.ask(wire.Status())["peers"][0]["why"])
            assert not host.up()
        assert hosts["a"].get([3, 4], wait_ms=2000) == 0
        for host in hosts.values():
            host.sound()
