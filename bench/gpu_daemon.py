"""What an engine on a GPU sees of a real daemon: how long a hit takes, and what loads do to its own kernels."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gpu_launched
import numpy as np
from gpu_room import TOKENS, USUAL, Form, gbps, room, ways
from measure import Row, Samples, interleave, make_row

from kvtier.client import Client
from kvtier.demo.daemon import Daemon
from kvtier.device.ops import moves
from kvtier.device.shuttle import Shuttle, Transfer, Way
from kvtier.identity import CacheSpec
from kvtier.wire import Plane

SMALL = Form(2, 32)
"""4 KiB a block and layer."""
DECODES = 20
"""Gathers that stand for a decode step: as memory-bound as one."""


class Engine:
    """An engine's KV, which a daemon maps, its client, and pages that it has stored."""

    def __init__(self, daemon: Daemon, gpu: Any, layers: int, pages: int, form: Form) -> None:
        self.client = Client(daemon.socket, instance="bench", verify="always", timeout_s=30.0)
        self.at = room(gpu, layers, pages, form=form, take=lambda size: self._share(gpu, size))
        self.pages = pages
        self.committing = 0.0
        """When the latest commit was asked for."""
        self.cache = self.client.open(CacheSpec("bench", b"f" * 16, "bfloat16", TOKENS, (self.at.plan.group,)))
        base = self.at.kv.address
        planes = [
            Plane(0, n, paged.base - base, *paged[1:]) for n, layer in enumerate(self.at.layers) for paged in layer
        ]
        stream, token = gpu.stream(), self.at.pinned.data[:16]
        token[:] = np.frombuffer(os.urandom(16), np.uint8)
        gpu.copy(self.at.kv.address, self.at.pinned.address, 16, stream)
        stream.synchronize()
        memory = [(self.shared.exported, self.shared.fd)]
        self.region = self.client.register_kv("kv", memory, planes, [token.tobytes()])

    def map_device(self) -> None:
        """Have slots on the device."""
        if not self.client.map_device(self.at.gpu.facts.uuid):
            raise RuntimeError(f"the device tier cannot be mapped: {self.client.device.reason}")

    def _share(self, gpu: Any, size: int) -> Any:
        """The KV, so that the daemon can map it."""
        self.shared = gpu.share(size)
        return self.shared.memory

    def keys(self, number: int) -> bytes:
        """A path of its own."""
        return np.arange(number, number + self.pages * TOKENS, dtype="<i4").tobytes()

    def put(self, number: int, *, device: bool) -> bytes:
        """Store all pages under a path of their own, in host or on the device."""
        keys = self.keys(number)
        with self.cache.match(keys).reserve(0, self.pages, wait_ms=10_000, device=device) as held:
            if held.pages < self.pages or held.on_device(0, 0) != device:
                raise RuntimeError(f"the daemon has no room for {self.pages} pages: {held.refused}")
            self.region.store(held, self.at.ids)
            self.committing = time.perf_counter()
            held.commit()
        return keys

    def close(self) -> None:
        """Let go of everything."""
        self.region.unregister()
        self.client.close()
        self.at.free()
        if self.shared.fd >= 0:
            os.close(self.shared.fd)


@contextmanager
def engine(gpu: Any, layers: int, pages: int, form: Form = USUAL) -> Iterator[Engine]:
    """An engine beside a daemon with room for eight times its pages in host and three times on the device."""
    size = layers * pages * form.bytes
    which = "cuda:0" if gpu.facts.compute else "cpu"
    flags = [f"--device-which={which}", f"--device-bytes={3 * size + (1 << 20)}"]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        daemon = stack.enter_context(Daemon(home, host=str(8 * size + (16 << 20)), disk="0", flags=flags))
        try:
            one = Engine(daemon, gpu, layers, pages, form)
            stack.callback(one.close)
            yield one
        except Exception:
            print(daemon.log.read_text()[-4000:], flush=True)  # it goes with its folder
            raise


def launched(gpu: Any, rounds: int, layers: int, pages: int) -> Iterator[Row]:
    """What the daemon copies."""
    for form in (USUAL, SMALL):
        with engine(gpu, layers, pages, form) as one:
            yield from gpu_launched.rows(one, gpu, rounds, f"blocks of {form.bytes >> 10} KiB")


def engines(gpu: Any, rounds: int, layers: int, pages: int) -> Iterator[Row]:
    """Hits, and decoding beside loads."""
    with engine(gpu, layers, pages) as one:
        here = one.put(0, device=False)
        yield from hits(one, gpu, rounds, "in host", here)
        yield from decode(one, gpu, rounds, here)
        one.map_device()
        there = one.put(1 << 20, device=True)
        yield from hits(one, gpu, rounds, "on the device", there)


def hits(one: Engine, gpu: Any, rounds: int, where: str, keys: bytes) -> list[Row]:
    """From the asking until the first layers, or all, may be read by the engine's stream."""
    at, device = one.at, where != "in host"
    shuttle = Shuttle(gpu, at.plan, stage_bytes=32 << 20, pieces=min(at.plan.layers, 8), direct=device)

    def hit(layer: int) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            with one.cache.match(keys).acquire(wait_ms=10_000) as lease:
                loaded = load(lease)
                loaded.layers[layer].synchronize()
                took = (time.perf_counter() - start) * 1e3
                loaded.wait()
            return took

        return run

    def load(lease: Any) -> Transfer:
        """On the device straight from slots; from host, verified, by way of pinned memory."""
        if device:
            slots = np.array([lease.address(0, page) for page in range(one.pages)], np.uint64)
            return shuttle.load(at.ids, slots, holder=lease)
        pinned = at.pinned.data.reshape(one.pages, -1)
        if lease.read_pages(0, 0, pinned) != one.pages:
            raise RuntimeError("a page is not what was stored")
        return shuttle.load(at.ids, at.slots)

    got = interleave({"kvtier": hit(0), "all layers": hit(-1)}, rounds)
    shuttle.close()
    return [make_row("gpu", f"hit to the first layers, pages {where}", "ms", got, limit="all layers")]


def decode(one: Engine, gpu: Any, rounds: int, keys: bytes) -> Iterator[Row]:
    """What loads do to a memory-bound kernel on the engine's stream, by who launches them and how."""
    at, stream = one.at, gpu.stream(urgent=True)
    there = gpu.take(at.bytes)
    slots = at.slots - np.uint64(at.pinned.address) + np.uint64(there.address)
    ops = moves(at.plan, slots, at.ids, (0, at.plan.layers), to_slots=True) * DECODES
    shuttles = {way.value: Shuttle(gpu, at.plan, stage_bytes=32 << 20, way=way) for way in ways(gpu)}
    shuttles["on the engine's own stream"] = Shuttle(gpu, at.plan, way=Way.DIRECT, stream=stream)
    lease = one.cache.match(keys).acquire(wait_ms=10_000)
    begin: dict[str, Callable[[], Any]] = {
        name: lambda shuttle=shuttle: shuttle.load(at.ids, at.slots).wait for name, shuttle in shuttles.items()
    }
    begin["by the daemon"] = lambda: one.region.start_load(lease, at.ids).finish

    def busy(load: Callable[[], Any] | None) -> Callable[[], float]:
        def run() -> float:
            end = load() if load else None
            took = at.bytes / gbps(at.bytes, stream, lambda: [gpu.launch(op, stream) for op in ops] and None) / 1e6
            if end is not None:
                end()
            return took

        return run

    for name, load in begin.items():
        yield row(name, interleave({"kvtier": busy(load), "alone": busy(None)}, rounds))
    lease.release()
    for shuttle in shuttles.values():
        shuttle.close()
    there.free()


def row(name: str, got: Samples) -> Row:
    """One way to load."""
    return make_row("gpu", f"{DECODES} gathers beside a load {name}", "ms", got, limit="alone")
