"""Matches of bench_host.py: latency of one client, rate of many."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import host_rivals
import numpy as np
import numpy.typing as npt
from host_daemon import PAGE, PATIENCE_MS, spec_of
from measure import OURS, Bench, Subject, Target, interleave
from rival import Running

from kvtier.client import Cache, Client

RIVALS_TOKENS = 8_192


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
            samples = interleave(subjects, bench.rounds(9))
            if tokens == RIVALS_TOKENS:
                host_rivals.beside(bench, samples, 128 << 10, keys_of, subjects, looked_up)
            echo.close()
            target = Target("value", "<=", 60) if tokens <= 8_192 else None
            bench.add(f"match {tokens:,} tokens, p50", "us", samples, limit="bare socket", target=target)


def looked_up(name: str, rival: Running) -> dict[str, Subject]:
    """A rival's rounds of looking up the keys of 8,192 tokens, which it is given."""
    return {name: lambda: rival.ask("lookup", pages=128, calls=50)}


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
