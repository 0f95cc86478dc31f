"""The daemon as a process: settings, signals, one daemon a path, and what many or greedy connections cost."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvtier import wire
from kvtier.client import Client, page_keys
from kvtier.config import load, settings, size, strangers, variable
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.turns import TURN_NS, turn_ns
from kvtier.types import Code, Kind, KvtierError

DEADLINE = 20.0
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, 65536),))


def refused(**flags: str) -> KvtierError:
    """What loading the settings raises."""
    with pytest.raises(KvtierError) as caught:
        load(env={}, flags={name.replace("__", "."): value for name, value in flags.items()})
    assert caught.value.code is Code.BAD_REQUEST
    return caught.value


def kvtierd(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the daemon's command to its end."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    command = [sys.executable, "-m", "kvtier.daemon", *flags]
    return subprocess.run(command, env=base | (env or {}), capture_output=True, text=True, timeout=60)


# -- settings --------------------------------------------------------------------------------------------------------


def test_later_sources_win(tmp_path):
    """Defaults, then the file, then the environment, then flags."""
    file = tmp_path / "kvtierd.toml"
    file.write_text('drain_s = 3\n[host]\nbytes = "64MiB"\nslab_bytes = 2097152\n[disk]\nbytes = 0\n')
    env = {"KVTIER_HOST_BYTES": "128MiB", "KVTIER_DISK_BYTES": "1g"}
    config = load(file, env, {"host.bytes": "1MiB"})
    assert (config.host.bytes, config.host.slab_bytes, config.disk.bytes) == (1 << 20, 2 << 20, 1 << 30)
    assert (config.drain_s, config.caps.instance) == (3.0, 0.5)
    assert load(None, {"KVTIER_CONFIG": str(file)}).host.bytes == 64 << 20


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path):
    """A typing error is found, not ignored."""
    file = tmp_path / "kvtierd.toml"
    file.write_text("[host]\nbites = 5\n")
    with pytest.raises(KvtierError, match=r"host\.bites: .* host\.bytes"):
        load(file, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host.bytes", "much"),
        ("host.bytes", "-5"),
        ("host.slab_bytes", "1"),
        ("host.prefault", "perhaps"),
        ("disk.bytes", "-1"),
        ("caps.instance", "0"),
        ("caps.instance", "1.5"),
        ("caps.connections", "0"),
        ("caps.connections", "many"),
        ("drain_s", "-1"),
    ],
)
def test_a_value_that_cannot_be_served_names_its_setting(name, value):
    """Wrong types, sizes and ranges are refused before anything starts."""
    assert refused(**{name.replace(".", "__"): value}).field == name


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """A missing file and broken TOML are errors, not defaults."""
    for text in (None, "[host\n"):
        file = tmp_path / "x.toml"
        if text:
            file.write_text(text)
        with pytest.raises(KvtierError) as caught:
            load(file, {})
        assert caught.value.field == str(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("4096", 4096), ("7B", 7), ("1k", 1024), ("64MiB", 64 << 20), ("64mi", 64 << 20), ("8 GiB", 8 << 30),
        ("2T", 2 << 40), ("8 GB", 8 * 10**9), ("64kb", 64_000),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, value):
    """GiB and G are powers of 1024, GB is 1e9 as in `kvtierctl size`."""
    assert size(text) == value


def test_a_misspelt_variable_is_refused_with_the_nearest_and_a_strange_one_named():
    """Both would be ignored without a word; what Kubernetes says of a service called kvtier is neither."""
    done = kvtierd("--check-config", env={"KVTIER_HOST_BYTE": "64GiB"})
    assert done.returncode == 1
    assert "KVTIER_HOST_BYTE: expected the variable of a setting; the nearest is KVTIER_HOST_BYTES" in done.stderr
    links = ("SERVICE_HOST", "PORT", "SERVICE_PORT_HTTP", "PORT_9477_TCP_ADDR", "HTTPS_SERVICE_HOST", "HTTPS_PORT")
    done = kvtierd("--check-config", env={"KVTIER_FLAVOUR": "b"} | {f"KVTIER_{link}": "1" for link in links})
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["kvtierd: KVTIER_FLAVOUR is no variable of kvtier's, and is ignored"]
    assert not strangers(dict.fromkeys(("KVTIER_CONFIG", "KVTIER_SOCKET", *map(variable, dict(settings()))), "1"))


def test_every_setting_has_a_flag_and_a_variable():
    """What a file can say, the environment and the command line can."""
    text = kvtierd("--help").stdout
    for name, _ in settings():
        assert "--" + name.replace(".", "-").replace("_", "-") in text
        assert variable(name) in text.replace("\n", " ")


def test_check_config_prints_what_is_in_effect_and_starts_nothing(tmp_path):
    """The answer is JSON; a wrong setting ends with code 1 and its name."""
    done = kvtierd("--check-config", "--host-bytes", "1MiB", env={"KVTIER_DISK_BYTES": "0"})
    assert done.returncode == 0
    shown = json.loads(done.stdout)
    assert (shown["host"]["bytes"], shown["disk"]["bytes"]) == (1 << 20, 0)
    done = kvtierd("--check-config", "--caps-instance", "7")
    assert done.returncode == 1
    assert "caps.instance" in done.stderr


def test_a_budget_that_the_host_does_not_have_is_refused_by_name(tmp_path):
    """The daemon does not start to be killed later."""
    done = kvtierd("--host-bytes", "4000T", "--disk-bytes", "0", "--socket-path", str(tmp_path / "s"))
    assert done.returncode == 1
    assert "host.bytes" in done.stderr


# -- the process -----------------------------------------------------------------------------------------------------


def test_a_second_daemon_on_the_path_is_refused_by_name(daemon, tmp_path):
    """It names the one that serves, and touches nothing of it."""
    flags = ["--socket-path", str(daemon.socket), "--host-bytes", "64MiB", "--disk-path", str(tmp_path / "disk")]
    done = kvtierd(*flags)
    assert done.returncode == 1
    assert str(daemon.socket) in done.stderr
    assert str(daemon.pid) in done.stderr
    with Client(daemon.socket) as client:
        assert client.ping()


def test_a_second_daemon_is_refused_while_the_first_hangs(daemon):
    """A stopped daemon still owns its path."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        done = kvtierd("--socket-path", str(daemon.socket), "--host-bytes", "64MiB", "--disk-bytes", "0")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert done.returncode == 1
    assert str(daemon.pid) in done.stderr


def test_the_sockets_of_a_daemon_that_was_killed_are_replaced(daemon):
    """Kill -9 leaves stale sockets; the next daemon takes their place with the right modes."""
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert stat.S_IMODE(daemon.socket.with_name("admin.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_daemon_with_what_was_committed_durable(daemon, number):
    """It drains, removes its sockets, ends with 0; after a restart the pages are there though nobody flushed."""
    with Client(daemon.socket, instance="engine") as client:
        cache = client.open(SPEC)
        with cache.match(page_keys(SPEC, np.arange(40))).reserve(0, 10) as reserved:
            for page in range(10):
                reserved.write(0, page, np.full(65536, page, np.uint8))
            assert reserved.commit() == 10
        os.kill(daemon.pid, number)
        assert daemon._process.wait(DEADLINE) == 0
        assert not daemon.socket.exists()
        daemon.start()
        end = time.monotonic() + DEADLINE
        while not client.ping():
            assert time.monotonic() < end
        with cache.match(page_keys(SPEC, np.arange(40))).acquire(wait_ms=5000) as lease:
            assert lease.pages == 10
            assert (lease.view(0, 9) == 9).all()


def test_sigterm_is_bounded_with_engines_that_do_not_let_go(daemon):
    """Leases, reservations and idle connections do not keep the daemon."""
    with Client(daemon.socket, instance="engine") as client:
        path = client.open(SPEC).match(page_keys(SPEC, np.arange(8)))
        held = path.reserve(0, 2)
        assert held.pages == 2
        assert daemon.stop() == 0
        assert path.extend().pages == 0
        held.abort()


def test_systemd_is_told_when_the_daemon_serves_and_when_it_stops(tmp_path):
    """READY=1 comes when engines can connect, STOPPING=1 when it drains."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notes:
        notes.bind(str(tmp_path / "notify"))
        notes.settimeout(DEADLINE)
        flags = ["--socket-path", str(tmp_path / "s"), "--host-bytes", "16MiB", "--disk-bytes", "0"]
        env = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with subprocess.Popen([sys.executable, "-m", "kvtier.daemon", *flags], env=env, stderr=subprocess.PIPE) as one:
            assert notes.recv(100) == b"READY=1"
            with Client(tmp_path / "s") as client:
                assert client.ping()
            one.terminate()
            assert notes.recv(100) == b"STOPPING=1"
            one.communicate(timeout=DEADLINE)
            assert one.returncode == 0


@pytest.mark.parametrize("how", ["no disk", "no host"])
def test_each_tier_may_be_absent(tmp_path, how):
    """A daemon without disk, or without host memory, serves what it has and says no to the rest."""
    with Daemon(tmp_path, host="0" if how == "no host" else "16MiB", disk="0" if how == "no disk" else "64MiB") as one:
        with Client(one.socket, instance="engine") as client:
            path = client.open(SPEC).match(page_keys(SPEC, np.arange(8)))
            with path.reserve(0, 2) as reserved:
                assert reserved.pages == (0 if how == "no host" else 2)
                assert bool(reserved.refused) == (how == "no host")
        assert one.stop() == 0


# -- many and greedy connections -------------------------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[int]:
    """As many descriptors as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def dialled(daemon: Daemon) -> socket.socket:
    """A connection that said nothing yet."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE)
    sock.connect(str(daemon.socket))
    return sock


def test_a_thousand_idle_connections_cost_nobody_anything(tmp_path, many_files):
    """All of them joined; an engine beside them is served, and they are served when they speak."""
    if many_files < 4096:
        pytest.skip("the system allows too few descriptors")
    hello = wire.request_frame(wire.Hello(1, "idle"), 1)
    with Daemon(tmp_path, host="16MiB", disk="0") as daemon:
        idle = [dialled(daemon) for _ in range(1000)]
        try:
            for sock in idle:
                sock.sendall(hello)
                assert sock.recv(4096)[16:]
            with Client(daemon.socket, instance="engine") as client:
                assert all(client.ping() for _ in range(100))
            used = psutil.Process(daemon.pid).cpu_times().user
            time.sleep(0.5)
            assert psutil.Process(daemon.pid).cpu_times().user - used < 0.25, "idle connections cost no time"
            idle[500].sendall(wire.request_frame(wire.Ping(), 2))
            assert idle[500].recv(4096)
        finally:
            for sock in idle:
                sock.close()
        assert daemon.stop() == 0


def test_a_daemon_without_descriptors_waits_instead_of_spinning(daemon):
    """Where accept fails for want of descriptors: no busy loop, engines go on, newcomers are served later."""
    with Client(daemon.socket, instance="engine") as client:
        assert client.ping()
        process = psutil.Process(daemon.pid)
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (process.num_fds() + 4, hard))
        late = [dialled(daemon) for _ in range(20)]
        try:
            end = time.monotonic() + DEADLINE
            while "cannot accept" not in daemon.log.read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
            used = sum(process.cpu_times()[:2])
            time.sleep(1.0)
            assert sum(process.cpu_times()[:2]) - used < 0.5, "it does not spin"
            assert client.ping()
        finally:
            for sock in late:
                sock.close()
        with Client(daemon.socket, instance="late", timeout_s=DEADLINE) as newcomer:
            assert newcomer.ping()


def test_a_fault_in_the_environment_is_said_without_a_traceback(tmp_path):
    """A socket folder that cannot be made ends with code 1 and one line."""
    file = tmp_path / "file"
    file.write_text("")
    done = kvtierd("--socket-path", str(file / "s"), "--host-bytes", "1MiB", "--disk-bytes", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("kvtierd: socket.path: expected a path in a folder that can be written to")
    assert "Traceback" not in done.stderr


def test_the_state_folder_follows_the_rule(monkeypatch, tmp_path):
    """Below $XDG_STATE_HOME for people; the disk tier is in it."""
    from kvtier import paths

    monkeypatch.setattr(paths, "SYSTEM_STATE", Path("/proc/nowhere"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert paths.state_path({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "kvtier"
    assert paths.state_path({}) == Path.home() / ".local" / "state" / "kvtier"


@pytest.mark.skipif(not turn_ns(), reason="this kernel gives no turns of their own to threads")
def test_the_serving_thread_has_short_turns_and_threads_that_copy_keep_theirs(daemon):
    """Beside busy engines it is woken sooner; whoever copies for long is not interrupted more often."""
    threads = [int(each.name) for each in Path(f"/proc/{daemon.pid}/task").iterdir()]
    turns = {each: turn_ns(each) for each in threads}
    assert turns.pop(daemon.pid) == TURN_NS
    assert turn_ns() in turns.values()
    assert os.getpriority(os.PRIO_PROCESS, daemon.pid) == os.getpriority(os.PRIO_PROCESS, 0)
