"""The part of bench_peer.py about stores that a fleet shares: kvtier on Redis and on Mooncake Store, on loopback.

Each is measured beside its own raw client, which checks nothing, and the plain blocking socket: the servers and this
process share the machine, so all of them pay for every copy that a server makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from host_daemon import spec_of
from measure import OURS, Bench, skipped
from peer_socket import plain

from kvtier.client import page_keys
from kvtier.peer.base import Place
from kvtier.peer.depot import Depot
from kvtier.peer.mooncake import MooncakeShelf
from kvtier.peer.mooncake_child import Setup
from kvtier.peer.redis import RedisShelf
from kvtier.peer.secrets import Secrets
from kvtier.peer.shelf import PIECE, Shelf

PLAIN = "blocking socket"
PATIENCE_S = 10.0
MEMORY = 2 << 30
"""All rounds together write less, so that nothing is evicted."""
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]) == 0
print("up", flush=True)
sys.stdin.read()
"""
Put = Callable[[str, memoryview], None]
Get = Callable[[str, memoryview], None]


class Rival(NamedTuple):
    """A client by itself."""

    name: str
    put: Put
    get: Get


class Subject(NamedTuple):
    """A store, with what is measured of it."""

    name: str
    shelf: Callable[[], Shelf]
    rivals: list[Rival]


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int = 0) -> Iterator[None]:
    """A server, once it listens on the port or (0) has printed a line."""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=nowhere if port else pipe, stderr=nowhere) as process:
        try:
            if not port:
                assert process.stdout is not None
                assert process.stdout.readline()
            while port and socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None
                time.sleep(0.02)
            yield
        finally:
            process.kill()


# -- Redis -------------------------------------------------------------------------------------------------------------


class RawRedis:
    """RESP on a blocking socket, in pieces, and nothing else."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, name: str, view: memoryview) -> None:
        """SET every piece, then hear of each."""
        parts = [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
        for n, part in enumerate(parts):
            key = f"{name}:{n}"
            self.sock.sendall(f"*3\r\n$3\r\nSET\r\n${len(key)}\r\n{key}\r\n${len(part)}\r\n".encode())
            self.sock.sendall(part)
            self.sock.sendall(b"\r\n")
        self._exactly(len(b"+OK\r\n") * len(parts))

    def get(self, name: str, view: memoryview) -> None:
        """GET every piece."""
        parts = [view[at : at + PIECE] for at in range(0, len(view), PIECE)]
        keys = [f"{name}:{n}" for n in range(len(parts))]
        self.sock.sendall("".join(f"*2\r\n$3\r\nGET\r\n${len(key)}\r\n{key}\r\n" for key in keys).encode())
        for part in parts:
            self._exactly(len(f"${len(part)}\r\n"))
            got = 0
            while got < len(part):
                got += self.sock.recv_into(part[got:], 0, socket.MSG_WAITALL)
            self._exactly(2)

    def _exactly(self, size: int) -> None:
        assert len(self.sock.recv(size, socket.MSG_WAITALL)) == size


def redis_py(port: int) -> list[Rival]:
    """The usual client, where it is installed."""
    if importlib.util.find_spec("redis") is None:
        skipped("redis-py", "not installed here")
        return []
    import redis

    client = redis.Redis(port=port)

    def put(name: str, view: memoryview) -> None:
        with client.pipeline(transaction=False) as pipe:
            for at in range(0, len(view), PIECE):
                pipe.set(f"{name}:{at}", view[at : at + PIECE])
            assert all(pipe.execute())

    def get(name: str, view: memoryview) -> None:
        with client.pipeline(transaction=False) as pipe:
            for at in range(0, len(view), PIECE):
                pipe.get(f"{name}:{at}")
            for at, value in enumerate(pipe.execute()):
                view[at * PIECE : at * PIECE + len(value)] = value

    return [Rival("redis-py", put, get)]


@contextlib.contextmanager
def redis_subject(home: Path) -> Iterator[Subject | None]:
    """A Redis or Valkey."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        skipped("redis", "no redis-server or valkey-server here")
        yield None
        return
    port = free_port()
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(home)]
    limit = ["--maxmemory", str(MEMORY), "--maxmemory-policy", "allkeys-lru"]
    with running([program, *flags, *limit], port):
        raw = RawRedis(port)
        rivals = [Rival("raw RESP", raw.put, raw.get), *redis_py(port)]
        yield Subject("redis", lambda: RedisShelf([("127.0.0.1", port)], deadline_s=PATIENCE_S), rivals)
        raw.sock.close()


# -- Mooncake ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mooncake_subject(_: Path) -> Iterator[Subject | None]:
    """A Mooncake Store of one node."""
    master = Path(sys.executable).with_name("mooncake_master")
    if importlib.util.find_spec("mooncake") is None or not master.exists():
        skipped("mooncake", "no mooncake-transfer-engine-non-cuda here")
        yield None
        return
    port, metrics = free_port(), free_port()
    where = f"127.0.0.1:{port}"
    flags = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    with running([str(master), *flags], port), running([sys.executable, "-c", NODE, where, str(MEMORY)]):
        setup = Setup(where, "P2PHANDSHAKE", "tcp", "", 1)
        yield Subject("mooncake", lambda: MooncakeShelf(setup, deadline_s=PATIENCE_S), [raw_mooncake(where)])


def raw_mooncake(master: str) -> Rival:
    """Mooncake's own client in this process, on registered memory."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    known: set[int] = set()

    def pointer(view: memoryview) -> int:
        address = int(np.frombuffer(view, np.uint8).ctypes.data)
        if address not in known:
            known.add(address)
            assert store.register_buffer(address, len(view)) == 0
        return address

    def put(name: str, view: memoryview) -> None:
        assert store.put_from(name, pointer(view), len(view)) == 0

    def get(name: str, view: memoryview) -> None:
        assert store.get_into(name, pointer(view), len(view)) == len(view)

    return Rival("raw client", put, get)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Moving:
    """Transfers of pages of one size through a tier."""

    def __init__(self, tier: Depot, page: int, pages: int) -> None:
        self.tier = tier
        self.pages = pages
        self.spec = spec_of(f"s{page}x{pages}", page)
        shared = tier.shared(self.spec, "uid:0", 0)
        assert shared is not None
        self.shared = shared
        rng = np.random.default_rng(page)
        self.places = [Place(0, at, [rng.integers(0, 256, page, np.uint8)]) for at in range(pages)]
        self.sums = [xxhash.xxh3_64_intdigest(place.views[0]) for place in self.places]
        self.count = 0

    def keys(self) -> bytes:
        """Page keys of the latest path."""
        return page_keys(self.spec, np.full(self.spec.page_tokens * self.pages, self.count, np.int32))

    async def put(self) -> None:
        """Offer and send a path that is new there."""
        self.count += 1
        sink = await self.tier.offer(self.tier.shelf.name, self.shared, self.keys(), ())
        assert sink is not None
        at = 0
        while sink.picks:
            end = at + sum(len(pick.pages) // 4 for pick in sink.picks)
            assert await sink.send(self.places[at:end], self.sums[at:end]) == end - at
            await sink.more()
            at = end
        assert at == self.pages

    async def get(self) -> None:
        """Find and fetch it."""
        (source,) = await self.tier.find(self.shared, self.keys(), 0)
        assert None not in await source.fetch(self.places)


async def gbs(call: Callable[[], Awaitable[None]], nbytes: int) -> float:
    """GB/s of one call."""
    begin = time.perf_counter()
    await call()
    return nbytes / (time.perf_counter() - begin) / 1e9


def plain_gbs(call: Callable[..., Any], *args: Any) -> float:
    """The same of a call that blocks; the last argument is the bytes."""
    begin = time.perf_counter()
    call(*args)
    return len(args[-1]) / (time.perf_counter() - begin) / 1e9


async def moving(bench: Bench, subject: Subject, tier: Depot, page: int, pages: int, rounds: int) -> None:
    """Put and get, each beside the raw clients and the socket, turn by turn."""
    ours = Moving(tier, page, pages)
    view = memoryview(np.random.default_rng(1).integers(0, 256, page * pages, np.uint8)).cast("B")
    puts: dict[str, list[float]] = {name: [] for name in (OURS, PLAIN, *(rival.name for rival in subject.rivals))}
    gets: dict[str, list[float]] = {name: [] for name in puts}
    with plain() as other:
        for number in range(bench.rounds(rounds)):
            puts[PLAIN].append(plain_gbs(other.put, view))
            gets[PLAIN].append(plain_gbs(other.get, view))
            for rival in subject.rivals:
                name = f"bench:{page}:{pages}:{number}"
                puts[rival.name].append(plain_gbs(rival.put, name, view))
                gets[rival.name].append(plain_gbs(rival.get, name, view))
            puts[OURS].append(await gbs(ours.put, len(view)))
            gets[OURS].append(await gbs(ours.get, len(view)))
    size = f"{pages} x {page >> 20} MiB" if pages > 1 else f"{page >> 20} MiB"
    for way, samples in (("get", gets), ("put", puts)):
        bench.add(f"{subject.name}: {way} {size}", "GB/s", samples, limit=PLAIN)


async def missing(bench: Bench, subject: Subject, tier: Depot) -> None:
    """How soon a miss is known."""
    ours = Moving(tier, 3 << 20, 1)
    samples = []
    for _ in range(20 if bench.tiny else 200):
        ours.count += 1
        begin = time.perf_counter()
        assert await tier.find(ours.shared, ours.keys(), 0) == []
        samples.append((time.perf_counter() - begin) * 1e3)
    bench.add(f"{subject.name}: miss decided, p50", "ms", {OURS: [sorted(samples)[len(samples) // 2]]})


@contextlib.asynccontextmanager
async def opened(subject: Subject) -> AsyncIterator[Depot]:
    """The tier, once its servers answer."""
    tier = Depot(subject.shelf(), Secrets(os.urandom(32), {"uid:0": os.urandom(32)}), deadline_s=PATIENCE_S)
    tier.start()
    try:
        while not tier.answers():  # noqa: ASYNC110 - other processes answer
            await asyncio.sleep(0.01)
        yield tier
    finally:
        await tier.close()


async def stores(bench: Bench, home: Path) -> None:
    """Every measurement."""
    for subject_of in (redis_subject, mooncake_subject):
        with subject_of(home) as subject:
            if subject is None:
                continue
            async with opened(subject) as tier:
                usual = [(2 << 20, 1, 30), (2 << 20, 8, 12), (32 << 20, 1, 10)]
                for page, pages, rounds in [(1 << 20, 1, 2)] if bench.tiny else usual:
                    await moving(bench, subject, tier, page, pages, rounds)
                await missing(bench, subject, tier)
