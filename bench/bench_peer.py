"""How fast pages come from, and go to, another host's daemon over TCP on loopback.

    python bench/bench_peer.py [--json FILE]

The limit is a plain blocking socket that moves the same bytes between two processes: no key, no checksum, no look-up.
A get is a fetch into this process's memory, checked; a put is offered, sent, checked and served by a real daemon. A
miss is decided when both homes of a prompt have said no.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import uvloop
import xxhash
from host_daemon import spec_of
from measure import OURS, Bench, Target
from peer_socket import plain
from peer_stores import stores

from kvtier.client import Client, page_keys
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec
from kvtier.peer.base import Ahead, Place, Shared
from kvtier.peer.direct import Direct
from kvtier.peer.secrets import read
from kvtier.peer.terms import Terms

PLAIN = "blocking socket"
SCOPE = f"uid:{os.getuid()}"
PATIENCE_S = 5.0
CROWD = 64


class Fleet:
    """Two daemons, `b` and `c`, and this process as their peer `a`."""

    def __init__(self, home: Path) -> None:
        ports = []
        for _ in range(3):
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                ports.append(sock.getsockname()[1])
        secrets = home / "secrets"
        secrets.touch(0o600)
        secrets.write_text(f"fleet {'11' * 32}\n{SCOPE} {'22' * 32}\n")
        self.secrets = read(secrets)
        self.nodes = {name: ("127.0.0.1", port) for name, port in zip("abc", ports, strict=True)}
        text = ",".join(f"{name}={host}:{port}" for name, (host, port) in self.nodes.items())
        self.daemons = {}
        for name in "bc":
            (home / name).mkdir()
            flags = [f"--peers-nodes={text}", f"--peers-name={name}", f"--peers-secrets={secrets}"]
            flags += ["--peers-replicas=2", "--peers-deadline-ms=5000"]
            self.daemons[name] = Daemon(home / name, host="512MiB", disk="0", flags=flags)

    @contextlib.asynccontextmanager
    async def tier(self) -> AsyncIterator[Direct]:
        """This process's peer tier, once both daemons answer."""
        tier = Direct(self.nodes, Terms("a", self.secrets, PATIENCE_S))
        tier.start()
        try:
            while not all(row["up"] for row in tier.status()):  # noqa: ASYNC110 - other processes answer
                await asyncio.sleep(0.01)
            yield tier
        finally:
            await tier.close()


def store(socket_path: Path, spec: CacheSpec, keys: bytes) -> None:
    """An engine stores a path of pages of ones."""
    with Client(socket_path, instance="bench", timeout_s=20.0) as client:
        path = client.open(spec).match(keys)
        reserved = path.reserve(0, len(keys) // spec.stride, wait_ms=10_000)
        page = np.ones(spec.groups[0].item_bytes, np.uint8)
        for at in range(reserved.pages):
            reserved.write(0, at, page)
        assert reserved.commit() == len(keys) // spec.stride


def path_of(spec: CacheSpec, first: int, pages: int) -> bytes:
    """Page keys that no other path begins with."""
    return page_keys(spec, np.full(spec.page_tokens * pages, first, np.int32))


class Moving:
    """Transfers of pages of one size: gets from either home, puts to daemon b."""

    def __init__(self, tier: Direct, spec: CacheSpec, pages: int) -> None:
        self.tier = tier
        self.spec = spec
        self.pages = pages
        self.shared: Shared = tier.shared(spec, SCOPE, 0)  # type: ignore[assignment]
        self.keys = path_of(spec, 1, pages)
        self.count = 1
        self.places = [Place(0, at, [np.ones(spec.groups[0].item_bytes, np.uint8)]) for at in range(pages)]
        self.sums = [xxhash.xxh3_64_intdigest(place.views[0]) for place in self.places]

    async def stored(self, homes: Sequence[Daemon]) -> Self:
        """Once engines of both homes have the pages."""
        for daemon in homes:
            await asyncio.to_thread(store, daemon.socket, self.spec, self.keys)  # the loop answers pings meanwhile
        return self

    async def get(self) -> None:
        """Find and fetch."""
        sources = await self.tier.find(self.shared, self.keys, 0)
        assert None not in await sources[0].fetch(self.places)
        for source in sources:
            source.close()

    async def put(self) -> None:
        """Offer and send pages that are new there, as a push does that knows so."""
        self.count += 1
        ahead = Ahead(self.places, self.sums)
        sink = await self.tier.offer("b", self.shared, path_of(self.spec, self.count, self.pages), (), ahead=ahead)
        assert sink is not None
        assert (sink.stored or await sink.send(self.places, self.sums)) == self.pages
        sink.close()

    async def miss(self) -> None:
        """Ask both homes for what neither has."""
        self.count += 1
        assert await self.tier.find(self.shared, path_of(self.spec, 1 << 20 | self.count, 8), 0) == []


async def gbs(call: Callable[[], Awaitable[None]], calls: int, nbytes: int) -> float:
    """GB/s of so many calls one after another."""
    begin = time.perf_counter()
    for _ in range(calls):
        await call()
    return calls * nbytes / (time.perf_counter() - begin) / 1e9


def plain_gbs(call: Callable[[memoryview], None], view: memoryview, calls: int) -> float:
    """The same of a plain socket."""
    begin = time.perf_counter()
    for _ in range(calls):
        call(view)
    return calls * len(view) / (time.perf_counter() - begin) / 1e9


async def moving(
    bench: Bench, tier: Direct, homes: Sequence[Daemon], page: int, pages: int, calls: int, rounds: int
) -> None:
    """Get and put, each beside the plain socket."""
    ours = await Moving(tier, spec_of(f"p{page}x{pages}", page), pages).stored(homes)
    view = memoryview(np.ones(page * pages, np.uint8)).cast("B")
    name = f"{pages} x {page >> 20} MiB" if pages > 1 else f"{page >> 20} MiB"
    with plain() as other:
        for way, call, limit in (("get", ours.get, other.get), ("put", ours.put, other.put)):
            samples: dict[str, list[float]] = {OURS: [], PLAIN: []}
            for _ in range(bench.rounds(rounds)):
                samples[PLAIN].append(plain_gbs(limit, view, calls))
                samples[OURS].append(await gbs(call, calls, len(view)))
            bench.add(f"{way} {name}", "GB/s", samples, limit=PLAIN, target=Target("ratio", ">=", 0.8))


async def timed(call: Callable[[], Awaitable[None]], calls: int) -> list[float]:
    """Milliseconds of each call, one after another."""
    out = []
    for _ in range(calls):
        begin = time.perf_counter()
        await call()
        out.append((time.perf_counter() - begin) * 1e3)
    return out


async def missing(bench: Bench, tier: Direct) -> None:
    """How soon a miss is known."""
    ours = Moving(tier, spec_of("miss", 1 << 20), 1)
    calls = 20 if bench.tiny else 200
    rounds = [sorted(await timed(ours.miss, calls)) for _ in range(bench.rounds(5))]
    samples = {OURS: [statistics.median(one) for one in rounds]}
    bench.add("miss decided over 2 homes, p50", "ms", samples, target=Target("value", "<=", 1.5))
    samples = {OURS: [one[int(len(one) * 0.99)] for one in rounds]}
    bench.add("miss decided over 2 homes, p99", "ms", samples)


async def crowd(bench: Bench, tier: Direct, homes: Sequence[Daemon]) -> None:
    """How late the last of many simultaneous fetches is, against its fair share of the line."""
    spec = spec_of("crowd", 2 << 20)
    many = [Moving(tier, spec, 1) for _ in range(CROWD)]
    await many[0].stored(homes)  # the others ask for the same pages
    samples: dict[str, list[float]] = {OURS: []}
    width: dict[str, list[float]] = {OURS: []}
    alone: dict[str, list[float]] = {OURS: []}
    last: dict[str, list[float]] = {OURS: []}
    for _ in range(bench.rounds(5)):
        single = statistics.median(await timed(many[0].get, 20))
        begin = time.perf_counter()
        late = sorted(await asyncio.gather(*(once(one.get) for one in many)))
        parallel = single * CROWD / ((time.perf_counter() - begin) * 1e3)
        width[OURS].append(parallel)
        alone[OURS].append(single)
        last[OURS].append(late[int(CROWD * 0.99) - 1])
        samples[OURS].append(late[int(CROWD * 0.99) - 1] / (single * CROWD / parallel))
    about = f"p99 of {CROWD} fetches at once / (single median x {CROWD} / parallelism)"
    bench.add(about, "x", samples, target=Target("value", "<=", 4))
    bench.add(f"parallelism of {CROWD} fetches at once", "x", width)
    bench.add("one fetch of 2 MiB, p50", "ms", alone)
    bench.add(f"{CROWD} fetches of 2 MiB at once, p99", "ms", last)


async def once(call: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds of one call."""
    begin = time.perf_counter()
    await call()
    return (time.perf_counter() - begin) * 1e3


async def run(bench: Bench, fleet: Fleet) -> None:
    """Every measurement."""
    async with fleet.tier() as tier:
        homes = list(fleet.daemons.values())
        await missing(bench, tier)
        # Many short rounds, turn by turn: on a busy machine the best of each is what the path itself costs.
        usual = [(2 << 20, 1, 5, 40), (2 << 20, 8, 2, 20), (32 << 20, 1, 1, 20)]
        for page, pages, calls, rounds in [(1 << 20, 1, 4, 2)] if bench.tiny else usual:
            await moving(bench, tier, homes, page, pages, calls, rounds)
        await crowd(bench, tier, homes)


def main() -> None:
    """Run them."""
    bench = Bench("peer", "How fast pages come from, and go to, another host's daemon.")
    with tempfile.TemporaryDirectory() as home:
        fleet = Fleet(Path(home))
        with fleet.daemons["b"], fleet.daemons["c"]:
            uvloop.run(run(bench, fleet))
        uvloop.run(stores(bench, Path(home)))
    bench.finish()


if __name__ == "__main__":
    main()
