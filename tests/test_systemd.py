"""The units as systemd reads them, and the daemon's side of the bargain: watchdog, readiness, passed sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clientkit import FULL, KEYED, stopped
from kvtier import companions, wire
from kvtier.client import AsyncClient, Client
from kvtier.companions import Companions, passed_sockets, watchdog_s
from kvtier.demo.daemon import Daemon
from kvtier.frames import Frames
from kvtier.types import KvtierError

FOLDER = Path(__file__).resolve().parent.parent / "systemd"
SERVICES = ("kvtierd.service", "kvtierd@one.service")
DEADLINE = 20.0
analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or not FOLDER.is_dir(), reason="needs systemd-analyze and a checkout"
)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, with a program that is there and users that are known."""
    program = tmp_path / "kvtierd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for unit in FOLDER.glob("*.s*"):
        text = unit.read_text().replace("/usr/bin/kvtierd", str(program))
        text = re.sub(r"^(User|Group|SocketUser|SocketGroup)=kvtier$", r"\1=root", text, flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
        if "@" in unit.name:
            (tmp_path / unit.name.replace("@", "@one")).write_text(text)
    return tmp_path


@analyze
def test_systemd_verifies_every_unit(units):
    """No unknown key, no unit that is missing."""
    for unit in (*SERVICES, "kvtierd.socket", "kvtierd-admin.socket"):
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(units / unit)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:"}
        )
        assert done.returncode == 0, done.stderr
        assert not [line for line in done.stderr.splitlines() if "kvtier" in line], done.stderr


@analyze
def test_exposure_is_at_most_four(units):
    """Systemd's own score of what a broken daemon could reach."""
    for unit in SERVICES:
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", "--no-pager", str(units / unit)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-300:] + done.stderr


@pytest.mark.skipif(
    not (shutil.which("systemd-sysusers") and shutil.which("systemd-tmpfiles") and FOLDER.is_dir())
    or os.geteuid() != 0,
    reason="needs systemd-sysusers, systemd-tmpfiles, root and a checkout",
)
def test_users_and_folders_are_made_as_the_units_need_them(tmp_path):
    """In a root of their own: the user that runs the service, and the folders of its sockets and settings."""
    (tmp_path / "etc").mkdir()
    for program, *options in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        conf = FOLDER / f"kvtier.{program.removeprefix('systemd-')}.conf"
        done = subprocess.run([program, f"--root={tmp_path}", *options, str(conf)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    user = next(line for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("kvtier:"))
    run = (tmp_path / "run/kvtier").stat()
    assert (str(run.st_uid), run.st_mode & 0o777) == (user.split(":")[2], 0o755)
    assert (tmp_path / "etc/kvtier").stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs a checkout")
def test_the_template_is_the_service_with_names_of_its_own():
    """Several instances share no folder and no socket, and are hardened alike."""
    one, many = ((FOLDER / name).read_text() for name in ("kvtierd.service", "kvtierd@.service"))
    assert (
        one.split("CapabilityBoundingSet")[1].split("[Install]")[0]
        == many.split("CapabilityBoundingSet")[1].split("[Install]")[0]
    )
    for kind in ("State", "Cache", "Runtime"):
        assert f"{kind}Directory=kvtier-%i\n" in many


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket on which systemd listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(DEADLINE)
        yield sock


def drained(sock: socket.socket) -> list[bytes]:
    """What was said so far."""
    said = []
    while select.select([sock], [], [], 0)[0]:
        said.append(sock.recv(100))
    return said


def test_the_watchdog_is_fed_by_the_serving_loop_and_by_nothing_else(tmp_path, notes):
    """A stopped daemon says nothing within the time that it promised; one that goes on is heard again."""
    env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    with Daemon(tmp_path, host="16MiB", disk="0", env=env) as daemon:
        assert notes.recv(100) == b"READY=1"
        assert notes.recv(100) == b"WATCHDOG=1"
        assert notes.recv(100) == b"WATCHDOG=1"
        os.kill(daemon.pid, signal.SIGSTOP)
        drained(notes)
        time.sleep(0.8)
        assert drained(notes) == []
        os.kill(daemon.pid, signal.SIGCONT)
        assert notes.recv(100) == b"WATCHDOG=1"
        assert daemon.stop() == 0
        assert b"STOPPING=1" in drained(notes)


HANGS = """
import asyncio, sys, time, threading
from kvtier import daemon
real = daemon.Companions
def hang():
    while True:
        time.sleep(0.001)
def late(*args):
    asyncio.get_running_loop().call_later(1.0, hang)
    return real(*args)
daemon.Companions = late
daemon.main()
"""


def test_a_hung_loop_starves_the_watchdog_though_the_process_lives(tmp_path, notes):
    """Its threads go on, so only the round trip through the loop tells."""
    flags = [f"--socket-path={tmp_path / 's'}", "--host-bytes=16MiB", "--disk-bytes=0", "--http-port=0"]
    env = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    with subprocess.Popen([sys.executable, "-c", HANGS, *flags], env=env, stderr=subprocess.PIPE) as one:
        try:
            assert notes.recv(100) == b"READY=1"
            assert notes.recv(100) == b"WATCHDOG=1"
            time.sleep(1.5)
            drained(notes)
            time.sleep(0.8)
            assert drained(notes) == []
            assert one.poll() is None
        finally:
            one.kill()
            one.communicate()


START = (
    "import os, sys; a, b = map(int, sys.argv[1:3]);"
    "os.dup2(a, 103); os.dup2(b, 104); os.dup2(103, 3); os.dup2(104, 4);"
    "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '2', 'LISTEN_FDNAMES': 'engine:admin'};"
    "os.execv(sys.executable, [sys.executable, '-m', 'kvtier.daemon', *sys.argv[3:]])"
)
LISTEN = "import socket, sys; [socket.socket(fileno=int(fd)).listen() for fd in sys.argv[1:]]"


@contextlib.contextmanager
def activated(paths: dict[str, Path], *, outlived: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that is passed its sockets; `outlived`: by a process that has ended since."""
    listening = []
    for path in paths.values():
        listening.append(socket.socket(socket.AF_UNIX))
        listening[-1].bind(str(path))
        listening[-1].listen()
    fds = [sock.fileno() for sock in listening]
    if outlived:
        subprocess.run([sys.executable, "-c", LISTEN, *map(str, fds)], pass_fds=fds, check=True)
    flags = [f"--socket-path={paths['engine']}", "--host-bytes=16MiB", "--disk-bytes=0", "--http-port=0"]
    command = [sys.executable, "-c", START, *map(str, fds), *flags]
    with subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE) as one:
        for sock in listening:
            sock.close()
        try:
            yield one
        finally:
            one.kill()


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Where systemd listens."""
    return {"engine": tmp_path / "kvtierd.sock", "admin": tmp_path / "admin.sock"}


def test_sockets_that_systemd_passes_are_served_and_left_in_place(paths):
    """Engines and operators connect where systemd listens; the files outlive the daemon."""
    with activated(paths) as one:
        with Client(paths["engine"], timeout_s=DEADLINE) as client:
            assert client.ping()
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(paths["admin"]))
            admin.sendall(wire.request_frame(wire.Ping(), 1))
            frames = Frames()
            frames.feed(admin.recv(100))
            assert frames.next().request == 1
        one.terminate()
        one.communicate(timeout=DEADLINE)
        assert one.returncode == 0
    assert all(path.exists() for path in paths.values())


@pytest.mark.parametrize("outlived", [False, True])
def test_the_end_of_a_daemon_is_known_where_systemd_listens(paths, outlived):
    """Not by that of whoever called listen(): rows would be given back while the daemon writes there, or never."""
    memory = os.memfd_create("rows")
    os.ftruncate(memory, 4 * FULL.item_bytes)
    with activated(paths, outlived=outlived) as one, Client(paths["engine"], timeout_s=DEADLINE) as client:
        keyed, region = client.open(KEYED), client.register("kv", memory, 0, FULL.item_bytes, 4)
        assert region.store((keyed, b"r" * 16), [0]) == b"\1"
        client.link.timeout_s = 0.1
        with stopped(one.pid):
            assert region.load((keyed, b"r" * 16), [1], wait_ms=100) == b"\0"
            assert region.fenced
        one.kill()
        one.wait(DEADLINE)
        assert not region.fenced
    os.close(memory)


@pytest.mark.parametrize("outlived", [False, True])
async def test_async_clients_know_the_daemon_where_systemd_listens(paths, outlived):
    """The same."""
    with activated(paths, outlived=outlived) as one:
        async with AsyncClient(paths["engine"], timeout_s=DEADLINE) as client:
            assert await client.ping()
            watched = client.link.joined.daemon
            assert (watched.pid, watched.gone) == (one.pid, False)
            one.kill()
            one.wait(DEADLINE)
            assert watched.gone


def test_what_systemd_says_is_for_one_process_only():
    """Watchdog and sockets that are another process's are left alone; an unknown socket is refused by name."""
    mine = str(os.getpid())
    assert watchdog_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": mine}) == 2.0
    assert watchdog_s({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}) == 0.0
    assert watchdog_s({}) == 0.0
    assert passed_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}
    with pytest.raises(KvtierError, match="engine or admin"):
        passed_sockets({"LISTEN_PID": mine, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "other"})


async def test_an_http_process_that_cannot_be_started_is_started_later(tmp_path, monkeypatch):
    """As where descriptors have run out for a moment: metrics come back, and the daemon ends as it should."""
    program = tmp_path / "python"
    monkeypatch.setattr(companions, "RESTART_S", 0.02)
    monkeypatch.setattr(sys, "executable", str(program))
    both = Companions(1, tmp_path / "engine", tmp_path / "admin")
    await asyncio.sleep(0.1)
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 60\n")
    program.chmod(0o755)
    async with asyncio.timeout(DEADLINE):
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.02)
        await both.stop()
