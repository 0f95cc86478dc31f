"""What fault tests share: an engine that is to notice nothing, engines that load and flood, small file systems."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import statistics
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
from kvtier.client import Cache, Client
from kvtier.demo.daemon import COMMAND, Daemon
from kvtier.turns import short_turns

AT_MOST = 5.0
"""How many times its unloaded value the p99 of a match may be for those whom a fault is none of."""
ENGINES = 200
"""Of one storm, at least."""
ROUND = 300
"""Matches of which a p99 is taken; a round takes a fifth of a second."""
ROUNDS, MORE = 5, 25
"""With the fault, and as many without; and at most, where the machine does so much else that five say too little."""
PAGES = [7, *range(200, 263)]
"""What the bystander matches."""


def eventually(holds: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait until it holds; what it said."""
    deadline = time.monotonic() + timeout_s
    while not (said := holds()):
        assert time.monotonic() < deadline, "still waiting"
        time.sleep(0.05)
    return said


Load = Callable[[bool], object]
"""Has what loads the daemon go on (True) or rest."""


@contextlib.contextmanager
def first() -> Iterator[None]:
    """What runs here, and what is started meanwhile, is before all else on the cores: they are not what is tested."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    short_turns()  # for the rest of the process
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


def humble(pid: int) -> None:
    """Give a process what the others leave of one core: whoever wakes has it at once.

    One core, because one that forks and ends without an end holds it in the kernel, where no priority counts.
    """
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))})


def resting(send: Callable[[int], object]) -> Load:
    """A load that signals have rest and go on."""
    return lambda on: send(signal.SIGCONT if on else signal.SIGSTOP)


class Bystander:
    """An engine beside the trouble, in this process; a context manager. Its matches are timed.

    The same engine is attached to a `calm` daemon, which has neither load nor fault: what a match takes there.
    """

    def __init__(self, daemon: Daemon, calm: Daemon) -> None:
        self.client = Client(daemon.socket, instance="bystander", timeout_s=10.0, verify="always")
        self.cache = self.client.open(engineproc.SPEC)
        self.aside = Client(calm.socket, instance="bystander", timeout_s=10.0, verify="always")
        self.calm = self.aside.open(engineproc.SPEC)

    def __enter__(self) -> Self:
        assert store(self.calm, PAGES) == self.put(PAGES) == len(PAGES)
        assert self.cache.flush(20.0)
        self.lease = self.cache.match(engineproc.path_keys(PAGES)).acquire(wait_ms=5000)
        assert self.lease.pages == len(PAGES)
        for cache in (self.calm, self.cache):
            self.p99(cache)  # whatever is done once is done
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.release()
        self.close()

    def close(self) -> None:
        """Leave."""
        self.client.close()
        self.aside.close()

    def put(self, pages: list[int]) -> int:
        """Compute and store a path; pages that are served."""
        return store(self.cache, pages)

    def get(self, pages: list[int]) -> int:
        """Lease a path and compare every byte; pages that are served."""
        keys, stride = engineproc.path_keys(pages), self.cache.spec.stride
        out = np.empty(engineproc.SPEC.groups[0].item_bytes, np.uint8)
        with self.cache.match(keys).acquire(wait_ms=5000) as lease:
            for page in range(lease.pages):
                assert lease.read(0, page, out)
                assert np.array_equal(out, engineproc.content(keys[: (page + 1) * stride]).reshape(-1)), "wrong KV"
            return lease.pages

    def p99(self, cache: Cache) -> float:
        """Seconds that 99 of 100 matches take at most; they are spread over a while, as an engine's are."""
        keys, took = engineproc.path_keys(PAGES), []
        for _ in range(ROUND):
            begin = time.perf_counter()
            found = cache.match(keys).pages
            took.append(time.perf_counter() - begin)
            assert found == len(PAGES), (self.client.last_error, self.aside.last_error)
            time.sleep(0.0005)
        return sorted(took)[ROUND * 99 // 100]

    def notices_nothing(self, load: Load = lambda on: None) -> None:
        """While the fault lasts: matches are as fast as they may be, and reads are right.

        Rounds on the calm daemon, while the load rests, take turns with rounds on this one, while it works: the machine
        does other work too, which slows both. Every round counts: of each kind it is the median of their p99s. (One p99
        of all matches would be that of the hundredth part of the time in which the machine did most of its other work.)
        Five too slow ones are followed by more; what they said is not forgotten.
        """
        without, with_fault = [], []
        for number in range(1, MORE + 1):
            load(False)
            without.append(self.p99(self.calm))
            load(True)
            with_fault.append(self.p99(self.cache))
            slower = statistics.median(with_fault) / statistics.median(without)
            if number >= ROUNDS and slower <= AT_MOST:
                break
        unloaded = statistics.median(without) * 1e6
        print(f"p99 of a match: {slower:.2f} times the unloaded {unloaded:.0f} us, {number} rounds")
        assert slower <= AT_MOST, (without, with_fault)
        assert self.get(PAGES) == len(PAGES)


def store(cache: Cache, pages: list[int]) -> int:
    """Compute and store a path; pages that are served."""
    keys, stride = engineproc.path_keys(pages), cache.spec.stride
    with cache.match(keys).reserve(0, len(pages), wait_ms=5000) as held:
        for page in range(held.pages):
            held.write(0, page, engineproc.content(keys[: (page + 1) * stride]).reshape(-1))
        return held.commit()


class Trouble(subprocess.Popen):
    """A process that runs `flood` or `storm`, below, and its children."""

    def __init__(self, daemon: Daemon, what: str, *words: object) -> None:
        command = [sys.executable, __file__, what, str(daemon.socket), *map(str, words)]
        # A group, not a session: the kernel shares the cores out among sessions, and priorities count inside one.
        super().__init__(command, stdout=subprocess.PIPE, process_group=0)
        humble(self.pid)
        assert self.stdout.readline() == b"begun\n"

    def all(self, number: int) -> None:
        """Signal it and its children."""
        os.killpg(self.pid, number)

    def end(self) -> int:
        """Have it end when it has done what it is to do; its exit code."""
        self.terminate()
        return self.wait()

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.all(signal.SIGKILL)
        super().__exit__(None, None, None)


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
    """Two hundred engines, eight at a time, and more until this is told to end."""
    children: list[int] = []
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    print("begun", flush=True)
    for number in itertools.count(first):
        if told and number >= first + ENGINES:
            break
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
from kvtier.device.host import HostDevice
from kvtier.tiers.extentfile import Calls
file = pathlib.Path(os.environ.pop("FAULT_FILE"))
def wrap(owner, name, kind):
    real = getattr(owner, name)
    def call(*args, **more):
        if file.exists() and name in file.read_text().split():
            raise OSError(errno.EIO, "injected")
        return real(*args, **more)
    setattr(owner, name, kind(call))
for name in ("pwritev", "preadv", "fdatasync"):
    wrap(Calls, name, staticmethod)
wrap(HostDevice, "copies", lambda call: call)
from kvtier.daemon import main
main()
"""
"""kvtierd whose calls on the extents, or copies on the device, fail with EIO while a file has their names."""


def faulty(home: Path, *flags: str) -> tuple[Daemon, Path]:
    """Such a daemon, not started yet, and the file."""
    file, command = home / "fault", (sys.executable, "-c", FAULTY)
    env = {"FAULT_FILE": str(file)}
    return Daemon(home, host="24MiB", disk="512MiB", env=env, command=command, flags=flags), file


if __name__ == "__main__":
    if sys.argv[1] == "flood":
        flood(sys.argv[2])
    else:
        storm(sys.argv[2], int(sys.argv[3]))
