"""How fast the disk tier stores pages durably, brings them back cold, goes on at full capacity, and starts again.

    python bench/bench_disk.py [--json FILE]

Limits: O_DIRECT calls of the same bytes in the same sizes with as many in flight, and one fdatasync after writes. It
runs in the temporary directory: set TMPDIR to the device that matters.
"""

from __future__ import annotations

import mmap
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash
from disk_rivals import beside
from disk_start import start_up
from measure import OURS, Bench, Target, interleave

from kvtier.identity import CacheSpec, GroupSpec, base_id, cache_id
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.extentfile import IO_BYTES
from kvtier.tiers.records import (
    Item,
)
from kvtier.types import Kind

IN_FLIGHT = 4
RUN = 16
PAGE_TOKENS = 64
SLAB = 64 << 20
READERS = 2
"""Threads that ask, as many as the daemon's mover has at least; each makes one of its calls itself."""
READ_BYTES = 8 << 20
"""Asked for in one read, as the mover does."""
READS_IN_FLIGHT = IN_FLIGHT + 1 + READERS
WRITE, CHURN, READ = Target("ratio", ">=", 0.9), Target("ratio", ">=", 0.72), Target("ratio", ">=", 0.9)


def buffer(size: int) -> np.ndarray:
    """Bytes at a 4 KiB-aligned address."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def spec_of(page_bytes: int) -> CacheSpec:
    """A cache with pages of so many bytes."""
    return CacheSpec("bench", bytes(16), "bfloat16", PAGE_TOKENS, (GroupSpec(Kind.FULL, 1, 1, page_bytes),))


class Raw:
    """The device by itself: a file of the same size, threads that share its blocks."""

    def __init__(self, path: Path, source: np.ndarray, total: int) -> None:
        self.path, self.source, self.total = path, source, total
        self.targets = [buffer(IO_BYTES) for _ in range(READS_IN_FLIGHT)]

    def speed(
        self,
        call: Callable[[int, int, int], object],
        in_flight: int = IN_FLIGHT,
        *,
        fresh: bool = False,
        sync: bool = False,
    ) -> float:
        """GB/s of a call (descriptor, offset, thread) over all blocks."""
        if fresh:
            self.path.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        blocks = iter(range(0, self.total, IO_BYTES))
        lock = threading.Lock()

        def work(thread: int) -> None:
            while True:
                with lock:
                    offset = next(blocks, None)
                if offset is None:
                    return
                call(fd, offset, thread)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(in_flight)]
        os.posix_fallocate(fd, 0, self.total)
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if sync:
            os.fdatasync(fd)
        taken = time.perf_counter() - start
        os.close(fd)
        return self.total / taken / 1e9

    def _write(self, fd: int, offset: int, _thread: int) -> None:
        at = offset % self.source.size
        os.pwritev(fd, [self.source[at : at + IO_BYTES]], offset)

    def write(self) -> float:
        """Into a new file."""
        return self.speed(self._write, fresh=True, sync=True)

    def overwrite(self) -> float:
        """Into the file as it is."""
        return self.speed(self._write, sync=True)

    def read(self) -> float:
        """The file as it is, with as many calls in flight as the tier makes when two threads ask."""
        return self.speed(lambda fd, offset, thread: os.preadv(fd, [self.targets[thread]], offset), READS_IN_FLIGHT)


class Tier:
    """The disk tier and the thread that owns it."""

    def __init__(self, home: Path, source: np.ndarray, page: int, total: int) -> None:
        self.home, self.page, self.total = home, page, total
        self.pages = [source[at : at + page] for at in range(0, source.size, page)]
        self.sums = [xxhash.xxh3_64_intdigest(page.data) for page in self.pages]
        self.targets = [[buffer(page) for _ in range(max(READ_BYTES // page, 1))] for _ in range(READERS)]
        self.runs: list[int] = []
        self.open()

    def open(self) -> None:
        """A new, empty tier."""
        shutil.rmtree(self.home, ignore_errors=True)
        self.posts: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.tier = DiskTier(self.home, self.total + SLAB, post=lambda *call: self.posts.put(call), threads=IN_FLIGHT)
        assert not list(self.tier.load())
        spec = spec_of(self.page)
        self.cache = self.tier.open_cache(cache_id(spec, "bench", 0), base_id(spec, "bench"), "bench", 0, spec)
        self.runs = []
        self.flush()

    def step(self) -> None:
        """Run one completion."""
        call, *arguments = self.posts.get()
        call(*arguments)

    def flush(self) -> None:
        """Wait until all is durable."""
        said: list[str] = []
        self.tier.flush(said.append)
        while not said:
            self.step()

    def fill(self, free: Iterator[int]) -> float:
        """GB/s of durable runs; where there is no room, the oldest goes first."""
        wanted = self.total // self.page // RUN
        keys, chains = bytes(RUN * PAGE_TOKENS * 4), bytes(RUN * 16)
        ended: list[int] = []

        def done(run: int | None, error: str) -> None:
            assert run is not None, error
            ended.append(run)

        start = time.perf_counter()
        sent = 0
        while sent < wanted:
            picked = [(sent * RUN + page) % len(self.pages) for page in range(RUN)]
            items = [Item(page, 0, self.sums[at], [self.pages[at]]) for page, at in enumerate(picked)]
            if self.tier.write(self.cache, bytes(16), 0, keys, chains, items, done):
                sent += 1
            elif self.tier.refusal == "no_space" and (run := next(free, None)) is not None:
                self.tier.free([run << 6 | page for page in range(RUN)])
            else:
                self.step()
        while len(ended) < wanted:
            self.step()
        taken = time.perf_counter() - start
        self.runs = ended
        return self.total / taken / 1e9

    def write(self) -> float:
        """Into a new tier."""
        self.tier.close()
        self.open()
        return self.fill(iter(()))

    def churn(self) -> float:
        """Into a full tier: each run takes the place of an older one, which must be durably gone first."""
        return self.fill(iter(self.runs))

    def read(self) -> float:
        """Every page, about in the order in which they were written, verified."""
        handles = [run << 6 | page for run in self.runs for page in range(RUN)]
        count = max(READ_BYTES // self.page, 1)
        batches = iter([handles[at : at + count] for at in range(0, len(handles), count)])
        lock = threading.Lock()

        def work(targets: list[np.ndarray]) -> None:
            while True:
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                assert not any(self.tier.read([(h, 0, [view]) for h, view in zip(batch, targets, strict=False)]))

        threads = [threading.Thread(target=work, args=(targets,)) for targets in self.targets]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.total / (time.perf_counter() - start) / 1e9


def payload(bench: Bench, home: Path, page: int, total: int) -> None:
    """Writes and reads of one size of pages against the device."""
    source = buffer(min(total, 256 << 20))
    source[:] = np.random.default_rng(bench.seed).integers(0, 256, source.size, np.uint8)
    raw, tier = Raw(home / "raw", source, total), Tier(home / "tier", source, page, total)
    rounds = bench.rounds(5)
    name = f"{page >> 10} KiB pages"
    write = interleave({OURS: tier.write, "O_DIRECT": raw.write}, rounds)
    read = interleave({OURS: tier.read, "O_DIRECT": raw.read}, rounds)
    beside(bench, write, read, page, total, (tier.write, tier.read))
    bench.add(f"durable write, {name}", "GB/s", write, limit="O_DIRECT", target=WRITE)
    bench.add(f"cold read, verified, {name}", "GB/s", read, limit="O_DIRECT", target=READ)
    churn = interleave({OURS: tier.churn, "O_DIRECT": raw.overwrite}, rounds)
    bench.add(f"write at full capacity, {name}", "GB/s", churn, limit="O_DIRECT", target=CHURN)
    tier.tier.close()
    shutil.rmtree(tier.home)
    raw.path.unlink()


def main() -> None:
    """Run all cases."""
    bench = Bench("disk", __doc__)
    sys.setswitchinterval(1e-4)  # as the daemon does
    total = (32 << 20) if bench.tiny else (1 << 30)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        for page in (2 << 20, 256 << 10):
            payload(bench, Path(folder), page, total)
        start_up(bench, Path(folder), spec_of(4096), 16_000 if bench.tiny else 1_000_000)
    bench.finish()


if __name__ == "__main__":
    main()
