"""Puts and gets of bench_host.py: pages of several sizes through the daemon's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import host_rivals
import numpy as np
import xxhash
from host_daemon import PAGE, PATIENCE_MS, kvtierd, spec_of
from measure import OURS, Bench, Samples, Subject, Target, interleave
from rival import Running

from kvtier.client import Cache, Client
from kvtier.client import Path as Prompt

BATCH = 4 << 20
"""Bytes written between two commits."""
CHECKED, COPY = Target("ratio", ">=", 0.75), Target("ratio", ">=", 0.9)


class Rate(NamedTuple):
    """A size of pages and how many of them one round moves."""

    page_bytes: int
    pages: int

    @property
    def total(self) -> int:
        """Bytes a round."""
        return self.page_bytes * self.pages

    def asked(self, name: str, rival: Running) -> dict[str, Subject]:
        """A rival's rounds in GB/s."""
        return {f"{op} {name}": lambda op=op: self.total / rival.ask(op) / 1e9 for op in ("put", "get")}

    def __str__(self) -> str:
        big = self.page_bytes >> 20
        return f"{big} MiB" if big else f"{self.page_bytes >> 10} KiB"


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

    def keys(self) -> bytes:
        """A prompt that nobody has stored."""
        return self.random.integers(0, 1 << 30, self.size.pages * PAGE, np.int32).tobytes()

    def fresh(self, cache: Cache) -> Prompt:
        """Its path."""
        return cache.match(self.keys())

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

        return self.speed(work)

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
        """Store a new prompt: match, reserve, copy with checksums, commit, and the daemon's word."""
        keys = self.keys()

        def work() -> None:
            self.prompt = self.cache.match(keys)
            assert self.prompt.put(0, [self.source], PATIENCE_MS) == self.size.pages

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
                    for at in range(0, len(rows), self.step):  # a batch a call, as the limit does
                        part = rows[at : at + self.step]
                        np.copyto(self.target[done : done + len(part)], part)
                        done += len(part)

        return self.speed(work)

    def in_place(self) -> float:
        """Microseconds to lease the prompt and view its pages where they lie, when not for the first time."""
        self.prompt.acquire().release()
        start = time.perf_counter()
        with self.prompt.acquire() as lease:
            views = lease.views(0, 0, self.size.pages)
        took = time.perf_counter() - start
        assert sum(map(len, views)) == self.size.pages
        return took * 1e6

    def lease(self) -> float:
        """Microseconds to lease the prompt and to give it back, when not for the first time."""
        self.prompt.acquire().release()
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
        beside = {"memcpy": engine.memcpy, "put": engine.put, "get": engine.get}
        alone = {
            "sum": engine.copy_and_sum,
            "sum beside": engine.copy_beside_sum,
            "get copy": engine.get_copy,
            "in place": engine.in_place,
            "lease": engine.lease,
            "put copy": engine.put_copy,
            "first": engine.put_first,
        }
        samples = interleave({**beside, **alone}, bench.rounds(9))
        host_rivals.beside(bench, samples, size.page_bytes, lambda _: size.pages, beside, size.asked)
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
