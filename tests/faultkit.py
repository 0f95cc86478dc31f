"""What fault tests share: an engine that is to notice nothing, engines that load and flood, small file systems."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import engineproc
from kvtier import wire
from kvtier.client import Client
from kvtier.demo.daemon import COMMAND, Daemon

AT_MOST = 5.0
"""How many times its unloaded value the p99 of a match may be for those whom a fault is none of."""
ENGINES = 200
"""Of one storm."""
ROUND = 300
"""Matches of which a p99 is taken; a round takes half a second."""
PAGES = [7, *range(200, 263)]
"""What the bystander matches."""


def eventually(holds: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait until it holds; what it said."""
    deadline = time.monotonic() + timeout_s
    while not (said := holds()):
        assert time.monotonic() < deadline, "still waiting"
        time.sleep(0.05)
    return said


class Bystander:
    """An engine beside the trouble, in this process; a context manager. Its matches are timed."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = Client(daemon.socket, instance="bystander", timeout_s=10.0, verify="always")
        self.cache = self.client.open(engineproc.SPEC)
        self.unloaded = 0.0
        """Seconds."""

    def __enter__(self) -> Self:
        assert self.put(PAGES) == len(PAGES)
        assert self.cache.flush(20.0)
        self.lease = self.cache.match(engineproc.path_keys(PAGES)).acquire(wait_ms=5000)
        self.p99()  # whatever is done once is done
        self.measure()
        return self

    def measure(self) -> None:
        """Take the p99 of now for the unloaded one: the worst of some rounds, as the machine does other work too."""
        self.unloaded = max(self.p99() for _ in range(5))

    def __exit__(self, *_: object) -> None:
        self.lease.release()
        self.close()

    def close(self) -> None:
        """Leave."""
        self.client.close()

    def put(self, pages: list[int]) -> int:
        """Compute and store a path; pages that are served."""
        keys, stride = engineproc.path_keys(pages), self.cache.spec.stride
        with self.cache.match(keys).reserve(0, len(pages), wait_ms=5000) as held:
            for page in range(held.pages):
                held.write(0, page, engineproc.content(keys[: (page + 1) * stride]).reshape(-1))
            return held.commit()

    def get(self, pages: list[int]) -> int:
        """Lease a path and compare every byte; pages that are served."""
        keys, stride = engineproc.path_keys(pages), self.cache.spec.stride
        out = np.empty(engineproc.SPEC.groups[0].item_bytes, np.uint8)
        with self.cache.match(keys).acquire(wait_ms=5000) as lease:
            for page in range(lease.pages):
                assert lease.read(0, page, out)
                assert np.array_equal(out, engineproc.content(keys[: (page + 1) * stride]).reshape(-1)), "wrong KV"
            return lease.pages

    def p99(self) -> float:
        """Seconds that 99 of 100 matches take at most; they are spread over a while, as an engine's are."""
        keys, took = engineproc.path_keys(PAGES), []
        for _ in range(ROUND):
            begin = time.perf_counter()
            found = self.cache.match(keys).pages
            took.append(time.perf_counter() - begin)
            assert found == len(PAGES), self.client.last_error
            time.sleep(0.001)
        return sorted(took)[ROUND * 99 // 100]

    def notices_nothing(self, rounds: int = 40) -> None:
        """While the fault lasts: matches are as fast as they may be, in the best of some rounds, and reads are right.

        The best, because the machine that runs this has other work, which is no fault of the daemon's.
        """
        slower = float("inf")
        for _ in range(rounds):
            slower = min(slower, self.p99() / self.unloaded)
            if slower <= AT_MOST:
                break
        assert slower <= AT_MOST, f"p99 of a match is {slower:.1f} times its unloaded {self.unloaded * 1e6:.0f} us"
        assert self.get(PAGES) == len(PAGES)


@contextlib.contextmanager
def trouble(daemon: Daemon, what: str, *words: object) -> Iterator[subprocess.Popen]:
    """A process that runs `spin`, `flood` or `storm`, below, and has begun. Its priority is low: cores are no point."""
    command = [sys.executable, __file__, what, str(daemon.socket), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)
            assert process.stdout.readline() == b"begun\n"
            yield process
        finally:
            process.kill()
            process.wait()


def spin(path: str) -> None:
    """Take a core as `flood` does, and ask the daemon for nothing."""
    del path
    print("begun", flush=True)
    while True:
        pass


def flood(path: str) -> None:
    """Match, reserve and abort, and ask for what is refused, without an end."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        keys = engineproc.path_keys(list(range(3000, 3400)))
        first = [wire.Hello(wire.VERSION, "flood"), wire.Open(engineproc.SPEC)]
        for number, message in enumerate(first, 1):
            sock.sendall(wire.request_frame(message, number))
            opened = sock.recv(1 << 16)[wire.HEADER.size :]
        cache = wire.decode_reply(wire.VERBS[wire.Open], opened, wire.Opened).cache
        asked = [wire.Match(cache, keys=keys), wire.Match(cache, keys=keys[:160]), wire.Stat(), wire.Release(1)]
        burst = b"".join(wire.request_frame(asked[n % 4], n + 3) for n in range(200))
        sock.setblocking(False)
        print("begun", flush=True)
        left = memoryview(burst)
        while True:
            with contextlib.suppress(BlockingIOError):
                left = left[sock.send(left) :]
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(1 << 20):
                    return
            left = left if len(left) else memoryview(burst)


def short_life(path: str, number: int) -> None:
    """In a child: attach, hold something, and end in one of the ways in which engines end."""
    rng = random.Random(number)
    client = Client(path, instance=f"storm-{number % 20}", timeout_s=20.0)
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


def storm(path: str, first: int) -> None:
    """Two hundred engines, eight at a time."""
    children: list[int] = []
    for number in range(first, first + ENGINES):
        while len(children) >= 8:
            os.waitpid(children.pop(0), 0)
        child = os.fork()
        if not child:
            try:
                short_life(path, number)
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


@contextlib.contextmanager
def file_system(folder: Path, mib: int) -> Iterator[Path]:
    """An ext4 of its own on a loop device; skips where that may not be had."""
    image, where = folder / "image", folder / "mounted"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True)
    if made.returncode or mount(f"-oloop,errors=remount-ro {image} {where}"):
        pytest.skip("may not mount a loop device here")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def mount(words: str) -> int:
    """The exit code of mount."""
    return subprocess.run(["mount", *words.split()], capture_output=True).returncode


def remount(folder: Path) -> None:
    """Mount the file system of `file_system` anew, repaired, as it is after a restart of the host."""
    subprocess.run(["umount", str(folder / "mounted")], check=True)
    assert subprocess.run(["fsck.ext4", "-fy", str(folder / "image")], capture_output=True).returncode < 4
    assert not mount(f"-oloop,errors=remount-ro {folder / 'image'} {folder / 'mounted'}")


WRITES = "write,writev,pwrite64,pwritev,fdatasync,fsync,ftruncate,fallocate,openat"


@contextlib.contextmanager
def read_only(daemon: Daemon, first: int) -> Iterator[None]:
    """What the daemon writes to disk, or opens there, fails as where it is read-only, from a thread's n-th call on.

    A real one that was in use must be mounted anew. So the calls are made to fail, those inside LMDB too.
    """
    folder, log = daemon.home / "disk", daemon.home / "strace"
    files = ("extents", "catalogue/data.mdb", "catalogue/lock.mdb", "heat.part")
    watch = [word for name in files for word in ("-P", str(folder / name))]
    words = ["strace", "-f", *watch, "-e", f"trace={WRITES}", "-e", f"inject={WRITES}:error=EROFS:when={first}+"]
    with log.open("wb") as said:
        tracer = subprocess.Popen([*words, "-p", str(daemon.pid)], stdin=subprocess.DEVNULL, stderr=said)
    try:
        eventually(lambda: "attached" in log.read_text())
        yield
    finally:
        tracer.terminate()
        tracer.wait()
    assert "INJECTED" in log.read_text()


class Group:
    """A memory cgroup, of either version."""

    def __init__(self, folder: Path, unified: bool) -> None:
        self.folder = folder
        self._limit, self._used, self._events = (
            ("memory.max", "memory.current", "memory.events")
            if unified
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        )
        enter = f'echo $$ > {folder}/cgroup.procs && exec "$@"'
        self.command = ("/bin/sh", "-c", enter, "sh", *COMMAND)
        """Runs kvtierd inside."""

    def limit(self, size: int) -> bool:
        """Whether the limit was taken."""
        with contextlib.suppress(OSError):
            (self.folder / self._limit).write_text(str(size))
            return True
        return False

    def used(self) -> int:
        """Bytes charged to it."""
        return int((self.folder / self._used).read_text())

    def killed(self) -> int:
        """Processes that the kernel killed for its limit."""
        lines = dict(line.split() for line in (self.folder / self._events).read_text().splitlines())
        return int(lines["oom_kill"])


@contextlib.contextmanager
def cgroup(size: int) -> Iterator[Group]:
    """A cgroup with a limit; skips where none may be made."""
    root, name = Path("/sys/fs/cgroup"), f"kvtier-test-{os.getpid()}"
    for folder, unified in ((root / "memory" / name, False), (root / name, True)):
        with contextlib.suppress(OSError):
            folder.mkdir()
            group = Group(folder, unified)
            try:
                if group.limit(size):
                    yield group
                    return
            finally:
                eventually(lambda at=folder: not (at / "cgroup.procs").read_text())
                folder.rmdir()
    pytest.skip("no memory cgroup can be made here")


FAULTY = """
import errno, os, pathlib, sys
from kvtier.tiers.extentfile import Calls
file = pathlib.Path(os.environ.pop("FAULT_FILE"))
def wrap(name):
    real = getattr(Calls, name)
    def call(*args):
        if file.exists() and name in file.read_text():
            raise OSError(errno.EIO, "injected")
        return real(*args)
    setattr(Calls, name, staticmethod(call))
for name in ("pwritev", "preadv", "fdatasync"):
    wrap(name)
from kvtier.daemon import main
main()
"""
"""kvtierd whose calls on the extents fail with EIO while a file has their names."""


def faulty(home: Path) -> tuple[Daemon, Path]:
    """Such a daemon, not started yet, and the file."""
    file, command = home / "fault", (sys.executable, "-c", FAULTY)
    return Daemon(home, host="24MiB", disk="512MiB", env={"FAULT_FILE": str(file)}, command=command), file


if __name__ == "__main__":
    if sys.argv[1] in {"flood", "spin"}:
        {"flood": flood, "spin": spin}[sys.argv[1]](sys.argv[2])
    else:
        print("begun", flush=True)
        storm(sys.argv[2], int(sys.argv[3]))
