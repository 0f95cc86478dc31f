"""Nothing that engines do leaves a cycle behind: the daemon runs without the collector, so that a cycle is a leak."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from engines import FULL, STATE, WINDOW, Engine, spec, tokens
from kvtier import wire
from kvtier.server import Server
from kvtier.store import Store
from kvtier.types import KvtierError
from storekit import MIB, drop_host, memfd, quiet, rows, storing, until

KEYED = spec(key_bytes=16)


@contextlib.asynccontextmanager
async def no_cycles() -> AsyncIterator[None]:
    """All that becomes unreachable is freed by counting references alone."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        left = Counter(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if enabled:
            gc.enable()
    assert not left


async def _round(engine: Engine, keyed: Engine, region: int, n: int) -> None:
    """Everything that an engine does to a store, some of it refused or cut short."""
    store, path, key = engine.store, tokens(n, n, *range(4)), n.to_bytes(16, "little")
    await engine.put(path, wants=(wire.Want(2, b"\5\0\0\0"),), wait_ms=2000)
    await keyed.put_keys(key)
    await quiet(store)
    drop_host(store)
    assert await engine.get(path) == 6
    await keyed.call(wire.Load(region, 0, rows(0), cache=keyed.opened.cache, keys=key))
    await keyed.call(wire.Store(region, 0, rows(0), cache=keyed.opened.cache, keys=b"s" * 8 + key[:8]))
    with contextlib.suppress(KvtierError):
        await keyed.call(wire.Unregister(99))
    drop_host(store)
    handle = (await engine.match(path)).handle
    cut_short = asyncio.ensure_future(engine.call(wire.Acquire(handle)))
    await asyncio.sleep(0)
    cut_short.cancel()
    await asyncio.wait([cut_short])
    await engine.call(wire.Prefetch(handle))
    await until(lambda: not store.parts.loads.moving)
    if n % 5 == 0:
        engine.opened = await engine.call(wire.Reset(engine.opened.cache))


async def test_requests_leave_no_cycle(tmp_path: Path) -> None:
    """Reads, writes, loads back, evictions, refusals, cancellations, resets."""
    fd, _ = memfd(4, 8192, sealed=True)
    async with storing(tmp_path, host=MIB) as store:
        engine, keyed = Engine(store), Engine(store, "keyed", pid=2)
        await engine.open(spec((FULL, WINDOW, STATE)))
        await keyed.open(KEYED)
        region = store.register(wire.Register("keyed", "rows", 0, 8192, 4), fd, keyed.process.peer).region
        for n in range(10):
            await _round(engine, keyed, region, n)
        await quiet(store)
        async with no_cycles():
            for n in range(100, 120):
                await _round(engine, keyed, region, n)
            await quiet(store)
    os.close(fd)


VISITORS = """
import socket, sys
from engines import spec, tokens
from kvtier import wire
from kvtier.client import Client

for n in range(int(sys.argv[2])):
    with Client(sys.argv[1], instance=f"engine{n}") as client:
        path = client.open(spec()).match(tokens(1, 2))
        with path.reserve(0, 2) as reserved:
            reserved.commit()
        with path.acquire() as lease:
            assert lease.pages == 2
        client.stat()
    for raw in (b"", b"nonsense" * 8, wire.request_frame(wire.Hello(99, "old"), 1), b"half"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(sys.argv[1])
            sock.sendall(raw)
    sock = socket.socket(socket.AF_UNIX)  # never closed: the process ends with it
    sock.connect(sys.argv[1])
    sock.sendall(wire.request_frame(wire.Hello(wire.VERSION, f"killed{n}"), 1))
    sock.recv(4096)
"""


async def _visited(path: Path, times: int, store: Store, server: Server) -> None:
    """Let another process come and go, until nothing of it is left."""
    roots = [each for each in sys.path if each]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    with subprocess.Popen([sys.executable, "-c", VISITORS, str(path), str(times)], env=env) as visitors:
        await until(lambda: visitors.poll() is not None, 30.0)
        assert visitors.returncode == 0
    await until(lambda: not store.parts.instances and not len(server.sessions) and not server._shared.connections)
    await asyncio.sleep(0.05)


def test_connections_leave_no_cycle(tmp_path: Path) -> None:
    """Engines that come and go or are killed, and connections that are refused or broken off, on the daemon's loop."""

    async def serve() -> None:
        async with storing(None) as store:
            server = Server(store, tmp_path / "kvtierd.sock")
            await server.start()
            await _visited(tmp_path / "kvtierd.sock", 1, store, server)
            async with no_cycles():
                await _visited(tmp_path / "kvtierd.sock", 10, store, server)
            await server.close()

    uvloop.run(serve())
