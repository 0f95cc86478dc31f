"""Copies that the daemon launches: between an engine's blocks and slots, and between its own tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_room import gbps
from measure import Row, interleave, make_row

from kvtier.device.shuttle import Shuttle

if TYPE_CHECKING:
    from gpu_daemon import Engine

WAIT_S = 30.0
AWAY = 1 << 22
"""Between the tokens of one path of pages and of the next."""


def rows(one: Engine, gpu: Any, rounds: int, case: str) -> Iterator[Row]:
    """Each direction in each tier, by the daemon, by the client's own shuttle, and one copy of the same bytes."""
    one.map_device()
    for number, (where, device) in enumerate((("host", False), ("device", True))):
        keys = one.put(number * AWAY, device=device)
        yield _store(one, gpu, rounds, case, where)
        yield _load(one, gpu, rounds, case, where, keys)
    yield _shift(one, gpu, rounds, case, up=False)
    yield _shift(one, gpu, rounds, case, up=True)


def _store(one: Engine, gpu: Any, rounds: int, case: str, where: str) -> Row:
    """Blocks into slots that are reserved and given back."""
    at, shuttle = one.at, _shuttle(one, gpu, where)
    path = one.cache.match(one.keys(9 * AWAY))

    def daemons() -> float:
        with path.reserve(0, one.pages, wait_ms=10_000, device=where == "device") as held:
            return timed(at.bytes, lambda: all(one.region.store(held, at.ids)))

    def clients() -> float:
        with path.reserve(0, one.pages, wait_ms=10_000, device=where == "device") as held:
            slots = _slots(one, held, where)
            return timed(at.bytes, lambda: shuttle.store(at.ids, slots, holder=held).wait(WAIT_S) is None)

    return _row(one, gpu, rounds, f"store by the daemon, {case}, slots in {where}", daemons, clients, shuttle)


def _load(one: Engine, gpu: Any, rounds: int, case: str, where: str, keys: bytes) -> Row:
    """Leased slots into blocks; the daemon verifies each page first, as `read_pages` of the client does."""
    at, shuttle = one.at, _shuttle(one, gpu, where)
    lease = one.cache.match(keys).acquire(wait_ms=10_000)
    if lease.pages != one.pages:
        raise RuntimeError(f"{one.pages - lease.pages} pages are gone")

    def daemons() -> float:
        return timed(at.bytes, lambda: all(one.region.load(lease, at.ids)))

    def clients() -> float:
        def load() -> bool:
            if where == "host":
                lease.read_pages(0, 0, at.pinned.data.reshape(one.pages, -1))
            return shuttle.load(at.ids, _slots(one, lease, where), holder=lease).wait(WAIT_S) is None

        return timed(at.bytes, load)

    made = _row(one, gpu, rounds, f"load by the daemon, {case}, slots in {where}", daemons, clients, shuttle)
    lease.release()
    return made


def _shift(one: Engine, gpu: Any, rounds: int, case: str, *, up: bool) -> Row:
    """Pages that the daemon brings up to its device tier once they are read, or down once they are committed there."""
    counter = "bytes_host_to_device" if up else "bytes_device_to_host"
    paths = iter(range(20 + 20 * up, 1 << 10))

    def moved() -> int:
        counters = one.client.stat()["counters"]
        assert isinstance(counters, dict)
        return int(counters.get(counter, 0))

    def daemons() -> float:
        before, keys = moved(), one.put(next(paths) * AWAY, device=not up)
        begun = time.perf_counter() if up else one.committing
        while moved() < before + one.at.bytes:
            if up:
                one.cache.match(keys).acquire(wait_ms=10_000).release()
            if time.perf_counter() > begun + WAIT_S:
                raise RuntimeError(f"{counter}: {moved() - before} of {one.at.bytes}")
        return one.at.bytes / (time.perf_counter() - begun) / 1e9

    way = "up to the device" if up else "down to host"
    return _row(one, gpu, rounds, f"brought {way} by the daemon, {case}", daemons)


def _shuttle(one: Engine, gpu: Any, where: str) -> Shuttle:
    """The client's own way: straight within the device; by staging and the copy engine to and from pinned memory."""
    return Shuttle(gpu, one.at.plan, stage_bytes=32 << 20, direct=where == "device")


def _slots(one: Engine, held: Any, where: str) -> Any:
    """Where the client's own transfer goes: slots on the device; pinned memory in place of the daemon's host memory."""
    if where == "host":
        return one.at.slots
    return np.array([held.address(0, page) for page in range(one.pages)], np.uint64)


def _row(
    one: Engine, gpu: Any, rounds: int, case: str, daemons: Callable[[], float],
    clients: Callable[[], float] | None = None, shuttle: Shuttle | None = None,
) -> Row:  # fmt: skip
    """One case against the client's own way, and one copy of as many bytes across the link."""
    stream, flat = gpu.stream(), gpu.take(one.at.bytes)

    def copy() -> float:
        return gbps(one.at.bytes, stream, lambda: gpu.copy(flat.address, one.at.pinned.address, one.at.bytes, stream))

    subjects = {"kvtier": daemons, "one copy": copy} | ({"client": clients} if clients else {})
    got = interleave(subjects, rounds)
    flat.free()
    if shuttle is not None:
        shuttle.close()
    return make_row("gpu", case, "GB/s", got, limit="one copy")


def timed(size: int, act: Callable[[], bool]) -> float:
    """GB/s of something that must come about."""
    start = time.perf_counter()
    done = act()
    took = time.perf_counter() - start
    if not done:
        raise RuntimeError("not all pages were moved")
    return size / took / 1e9
