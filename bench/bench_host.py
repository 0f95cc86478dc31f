"""How fast an engine in another process stores, loads and looks up pages through the real daemon.

    python bench/bench_host.py [--rivals] [--json FILE]

Limits: memcpy of the same bytes between buffers of the same sizes, a round trip of the same bytes over a bare Unix
socket. A put with checksum is the whole of it: match, reserve, copy, commit, and the daemon's word; without, the copy
into reserved slots alone. A get is acquire, copy, release.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import host_rivals
import numpy as np
import numpy.typing as npt
import xxhash
from measure import OURS, Bench, Samples, Target, interleave

from kvtier import wire
from kvtier.client import Cache, Client
from kvtier.client import Path as Prompt
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind

PAGE = 64
BATCH = 8 << 20
"""Bytes written between two commits."""
PATIENCE_MS = 20_000
CHECKED, COPY = Target("ratio", ">=", 0.75), Target("ratio", ">=", 0.9)


class Rate(NamedTuple):
    """A size of pages and how many of them one round moves."""

    page_bytes: int
    pages: int

    @property
    def total(self) -> int:
        """Bytes a round."""
        return self.page_bytes * self.pages

    def __str__(self) -> str:
        big = self.page_bytes >> 20
        return f"{big} MiB" if big else f"{self.page_bytes >> 10} KiB"


@contextlib.contextmanager
def kvtierd() -> Iterator[Path]:
    """The socket of a daemon of the bench's own, without a disk tier."""
    with tempfile.TemporaryDirectory() as home, Daemon(Path(home), host="1GiB", disk="0") as daemon:
        yield daemon.socket


def spec_of(name: str, page_bytes: int) -> CacheSpec:
    """A cache with pages of so many bytes."""
    return CacheSpec(name, bytes(16), "bfloat16", PAGE, (GroupSpec(Kind.FULL, 1, 1, page_bytes),))


class Engine:
    """One engine's process: it stores prompts of a round's pages and loads them again."""

    def __init__(self, where: Path, size: Rate, seed: int) -> None:
        self.where, self.size = where, size
        self.random = np.random.default_rng(seed)
        self.client = Client(where, instance=f"bench-{size}", timeout_s=30.0, verify="never")
        self.cache = self.client.open(spec_of(f"m{size.page_bytes}", size.page_bytes))
        shape = (size.pages, size.page_bytes)
        self.source = self.random.integers(0, 256, shape, np.uint8)
        self.target, self.plain = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        self.step = max(1, BATCH // size.page_bytes)
        self.prompt = self.fresh(self.cache)

    def fresh(self, cache: Cache) -> Prompt:
        """A prompt that is not cached."""
        return cache.match(self.random.integers(0, 1 << 30, self.size.pages * PAGE, np.int32).tobytes())

    def speed(self, work: Callable[[], object]) -> float:
        """GB/s of work on a round's bytes."""
        start = time.perf_counter()
        work()
        return self.size.total / (time.perf_counter() - start) / 1e9

    # -- limits ------------------------------------------------------------------------------------------------

    def memcpy(self) -> float:
        """Copy the pages into another buffer, a batch a call."""

        def work() -> None:
            for at in range(0, self.size.pages, self.step):
                np.copyto(self.plain[at : at + self.step], self.source[at : at + self.step])

        return max(self.speed(work), self.speed(work))

    def copy_and_sum(self) -> float:
        """The same, each page summed by this thread."""

        def work() -> None:
            for to, page in zip(self.plain, self.source, strict=True):
                np.copyto(to, page)
                xxhash.xxh3_64_intdigest(to)

        return self.speed(work)

    def copy_beside_sum(self) -> float:
        """The same, batches summed by a second thread."""
        copied = threading.Semaphore(0)
        steps = range(0, self.size.pages, self.step)

        def summing() -> None:
            for at in steps:
                copied.acquire()
                for page in self.plain[at : at + self.step]:
                    xxhash.xxh3_64_intdigest(page)

        def work() -> None:
            beside = threading.Thread(target=summing)
            beside.start()
            for at in steps:
                np.copyto(self.plain[at : at + self.step], self.source[at : at + self.step])
                copied.release()
            beside.join()

        return self.speed(work)

    # -- kvtier ------------------------------------------------------------------------------------------------

    def put(self) -> float:
        """Store a new prompt, each batch committed while the next is copied."""

        def work() -> None:
            self.prompt = self.fresh(self.cache)
            held = self.prompt.reserve(0, self.size.pages, wait_ms=PATIENCE_MS)
            sent = []
            for at in range(0, self.size.pages, self.step):
                count = min(self.step, self.size.pages - at)
                held.write_pages(0, at, self.source[at : at + count])
                sent.append(self.client.submit(wire.Commit(held.number, at, count), wire.Committed))
            done = [self.client.wait(ticket, 30.0) for ticket in sent]
            assert max(each.published for each in done) == self.size.pages

        self.prompt.close()
        return self.speed(work)

    def put_copy(self) -> float:
        """The client's copy into slots that it has reserved."""
        self.prompt.close()
        self.prompt = self.fresh(self.cache)
        held = self.prompt.reserve(0, self.size.pages, wait_ms=PATIENCE_MS)
        speed = self.speed(lambda: held.write_pages(0, 0, self.source))
        assert held.commit() == self.size.pages
        return speed

    def put_first(self) -> float:
        """Reserve and copy by a client that has just connected: nothing of the arena is mapped yet."""
        with Client(self.where, instance="bench-new", timeout_s=30.0) as client:
            prompt = self.fresh(client.open(self.cache.spec))
            speed = self.speed(
                lambda: prompt.reserve(0, self.size.pages, wait_ms=PATIENCE_MS).write_pages(0, 0, self.source)
            )
            prompt.close()
        return speed

    def get(self) -> float:
        """Load the prompt stored last, every page verified."""

        def work() -> None:
            with self.prompt.acquire() as lease:
                assert lease.read_pages(0, 0, self.target) == self.size.pages

        return self.speed(work)

    def get_copy(self) -> float:
        """The same without verifying."""

        def work() -> None:
            with self.prompt.acquire() as lease:
                done = 0
                for rows in lease.views(0, 0, self.size.pages):
                    np.copyto(self.target[done : done + len(rows)], rows)
                    done += len(rows)

        return self.speed(work)

    def in_place(self) -> float:
        """Microseconds to lease the prompt and to have views of its pages where they lie."""
        start = time.perf_counter()
        with self.prompt.acquire() as lease:
            views = lease.views(0, 0, self.size.pages)
        took = time.perf_counter() - start
        assert sum(map(len, views)) == self.size.pages
        return took * 1e6

    def lease(self) -> float:
        """Microseconds to lease the prompt and to give it back."""
        start = time.perf_counter()
        self.prompt.acquire().release()
        return (time.perf_counter() - start) * 1e6

    def close(self) -> None:
        """Compare the bytes that came back last, and leave."""
        self.target[:] = 0
        self.get()
        assert np.array_equal(self.source, self.target)
        self.client.close()


def moving(bench: Bench, size: Rate) -> None:
    """Puts and gets of pages of one size, which have the daemon to themselves."""
    with kvtierd() as where:
        engine = Engine(where, size, bench.seed)
        for _ in range(2 if bench.tiny else 8):
            engine.put()  # until every slot was used once
        with host_rivals.running(bench, size.page_bytes, lambda _, n=size.pages: n) as rivals:
            subjects = {
                "memcpy": engine.memcpy,
                "sum": engine.copy_and_sum,
                "sum beside": engine.copy_beside_sum,
                "put": engine.put,
                "get": engine.get,
                "get copy": engine.get_copy,
                "in place": engine.in_place,
                "lease": engine.lease,
                "put copy": engine.put_copy,
                "first": engine.put_first,
                **host_rivals.moving(rivals, "put", size.total),
                **host_rivals.moving(rivals, "get", size.total),
            }
            samples = interleave(subjects, bench.rounds(9))
        engine.close()
        report(bench, size, samples)


def report(bench: Bench, size: Rate, samples: Samples) -> None:
    """Rows of one size of pages."""

    def pick(name: str, rivals: str = "") -> Samples:
        beside = {key.removeprefix(f"{rivals} "): got for key, got in samples.items() if key.startswith(f"{rivals} ")}
        beside.pop("copy", None)
        return {OURS: samples[name], "memcpy": samples["memcpy"], **beside}

    def add(case: str, name: str, rivals: str = "", target: Target | None = None) -> None:
        bench.add(f"{size} pages: {case}", "GB/s", pick(name, rivals), limit="memcpy", target=target)

    add("(limit) copy + xxh3, one thread", "sum")
    add("(limit) copy + xxh3, two threads", "sum beside")
    add("put", "put", "put", CHECKED)
    add("put, copy alone", "put copy", target=COPY)
    add("put, copy alone, client just connected", "first")
    add("get", "get", "get", CHECKED)
    add("get, not verified", "get copy", target=COPY)
    case = f"{size.pages} x {size}: read in place"
    bench.add(case, "us", {OURS: samples["in place"], "lease": samples["lease"]}, limit="lease")


# -- match -------------------------------------------------------------------------------------------------------


class Echo:
    """A process that answers `size` bytes with 64, over a bare Unix socket."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sock, theirs = socket.socketpair()
        self.process = multiprocessing.get_context("fork").Process(target=self._serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.message = os.urandom(size)

    def _serve(self, sock: socket.socket) -> None:
        self.sock.close()
        buffer, got = bytearray(1 << 20), 0
        while size := sock.recv_into(buffer):
            got += size
            if got >= self.size:
                sock.sendall(bytes(64))
                got = 0

    def trip(self) -> None:
        """One round trip."""
        self.sock.sendall(self.message)
        self.sock.recv(64)

    def close(self) -> None:
        """End it."""
        self.sock.close()
        self.process.join()


def matched(cache: Cache, keys: bytes, calls: int) -> float:
    """Microseconds of the median match; handles are dropped between."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        prompt = cache.match(keys)
        times.append(time.perf_counter() - start)
        assert prompt.pages == len(keys) // cache.spec.stride
        prompt.close()
        cache.client.ping()
    return statistics.median(times) * 1e6


def stored(cache: Cache, tokens: int, seed: int) -> bytes:
    """Keys of a prompt that is cached."""
    keys = np.random.default_rng(seed).integers(0, 1 << 30, tokens // PAGE * PAGE, np.int32).tobytes()
    pages = len(keys) // cache.spec.stride
    with cache.match(keys).reserve(0, pages, wait_ms=PATIENCE_MS) as held:
        assert held.commit() == pages
    return keys


def matching(bench: Bench, where: Path) -> None:
    """Latency of a match from one client, beside rivals' look-ups of the same prompt."""
    with Client(where, instance="bench-match", timeout_s=30.0) as client:
        cache = client.open(spec_of("match", 4096))
        lengths = (1_024, 8_192) if bench.tiny else (1_024, 8_192, 32_768, 200_000)
        cached = stored(cache, lengths[-1], bench.seed)
        for tokens in lengths:
            keys = cached[: tokens // PAGE * cache.spec.stride]
            echo = Echo(len(keys))
            subjects: dict[str, Any] = {
                OURS: lambda k=keys: matched(cache, k, 20 if bench.tiny else 300),
                "bare socket": lambda e=echo: statistics.median(timed(e.trip, 300)),
            }
            with host_rivals.running(bench if tokens == 8_192 else quiet(bench), 128 << 10, keys_of) as rivals:
                for name, rival in rivals.items():
                    subjects[name] = lambda r=rival: r.ask("lookup", pages=128, calls=50)
                samples = interleave(subjects, bench.rounds(9))
            echo.close()
            target = Target("value", "<=", 60) if tokens <= 8_192 else None
            bench.add(f"match {tokens:,} tokens, p50", "us", samples, limit="bare socket", target=target)


def quiet(bench: Bench) -> Bench:
    """The same bench without rivals."""
    import copy

    silent = copy.copy(bench)
    silent.rivals = False
    return silent


def keys_of(rival: Any) -> int:
    """Pages that stand for 8,192 tokens: 64 tokens each, and LMCache's own 256."""
    return 32 if rival.folder == "lmcache" else 128


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


# -- many clients -------------------------------------------------------------------------------------------------


def one_of_many(orders: Connection, where: Path, tokens: int, number: int) -> None:
    """A client in a process of its own: told match or ping and for how long, it tells its latencies."""
    with Client(where, instance=f"bench-many-{number}", timeout_s=30.0) as client:
        cache = client.open(spec_of("match", 4096))
        keys = stored(cache, tokens, number)
        orders.send(None)
        while (order := orders.recv()) is not None:
            what, duration_s = order
            times, end = [], time.perf_counter() + duration_s
            while (start := time.perf_counter()) < end:
                if what == "match":
                    prompt = cache.match(keys)
                    times.append(time.perf_counter() - start)
                    prompt.close()
                else:
                    client.ping()
                    times.append(time.perf_counter() - start)
            orders.send(np.array(times).tobytes())


class Crowd:
    """Clients in processes of their own."""

    def __init__(self, where: Path, clients: int, tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends, self.processes = [], []
        for number in range(clients):
            mine, theirs = context.Pipe()
            self.ends.append(mine)
            self.processes.append(context.Process(target=one_of_many, args=(theirs, where, tokens, number + 1)))
            self.processes[-1].start()
        for end in self.ends:
            end.recv()
        self.late: list[float] = []

    def rate(self, what: str, duration_s: float) -> float:
        """Requests a second of all clients together."""
        start = time.perf_counter()
        for end in self.ends:
            end.send((what, duration_s))
        times: list[npt.NDArray[np.float64]] = [np.frombuffer(end.recv()) for end in self.ends]
        took = time.perf_counter() - start
        if what == "match":
            self.late.append(float(np.quantile(np.concatenate(times), 0.99)) * 1e6)
        return sum(map(len, times)) / took

    def close(self) -> None:
        """End them."""
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join()


def crowd(bench: Bench, where: Path) -> None:
    """Matches of 8K tokens from 8 clients at once."""
    clients, duration_s = (2, 0.1) if bench.tiny else (8, 1.0)
    many = Crowd(where, clients, 8_192)
    subjects = {OURS: lambda: many.rate("match", duration_s), "ping": lambda: many.rate("ping", duration_s / 2)}
    samples = interleave(subjects, bench.rounds(5))
    many.close()
    case = f"{clients} clients, match 8,192 tokens"
    bench.add(case, "match/s", samples, limit="ping", target=Target("value", ">=", 5_000))
    bench.add(f"{case}, p99", "us", {OURS: many.late})


def main() -> None:
    """Run every measurement."""
    bench = Bench("host", "How fast an engine stores, loads and looks up pages through the daemon.")
    with kvtierd() as where:
        matching(bench, where)
        crowd(bench, where)
    usual = [Rate(32 << 10, 4096), Rate(2 << 20, 64), Rate(32 << 20, 4)]
    for size in [Rate(32 << 10, 32), Rate(1 << 20, 2)] if bench.tiny else usual:
        moving(bench, size)
    bench.finish()


if __name__ == "__main__":
    main()
