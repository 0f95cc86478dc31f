"""Which way pages go between an engine's blocks and slots in host memory: measured once for a GPU and driver, and kept.

What is fastest depends on the direction, the bytes of a page and how many there are, on the machine, and on whether the
slots are pinned: staged pages go by the copy engine at full rate but cost a copy each, or a batch of copies one call of
the driver; kernels that reach the slots themselves win for small pages; with few thread blocks they leave the
processors to the engine.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvtier.device.base import Device
from kvtier.device.host import HostBuffer
from kvtier.device.layout import Paged, plan
from kvtier.device.shuttle import Shuttle, Way
from kvtier.identity import GroupSpec
from kvtier.types import Kind, KvtierError

FORMAT: Final = 2
SIZES: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
"""Bytes of a page that are measured; others are like the next that is."""
COUNTS: Final = (1, 16, 256)
MOST_BYTES: Final = 32 << 20
"""Of one measurement."""
TRIES: Final = 3
NEAR: Final = 1.1
"""A way that is within a tenth of the fastest is as good; of those the one that uses the fewest processors is taken."""
ORDER: Final = (Way.BATCHED, Way.STAGED, Way.FEW, Way.DIRECT)
"""From the fewest processors, of the GPU and of the host, to the most."""

_log = logging.getLogger("kvtier.device")


class Memory(enum.StrEnum):
    """What slots are in."""

    PINNED = "pinned"
    PAGED = "paged"
    """Host memory as it is, such as the daemon's arenas."""


class Case(NamedTuple):
    """What is measured."""

    load: bool
    page_bytes: int
    pages: int


Seconds = dict[Case, dict[Way, float]]


def cases() -> Iterator[Case]:
    """All of them."""
    for load in (False, True):
        for size in SIZES:
            yield from (Case(load, size, count) for count in COUNTS if size * count <= MOST_BYTES)


def best(seconds: dict[Way, float]) -> Way:
    """The fastest way, or one nearly as fast that leaves more of the GPU alone."""
    limit = NEAR * min(seconds.values())
    return next(way for way in ORDER if way in seconds and seconds[way] <= limit)


def ways(device: Device, memory: Memory) -> list[Way]:
    """What a device can do with slots in such memory."""
    reaches = memory is Memory.PINNED or device.facts.reaches
    can = {Way.STAGED: True, Way.BATCHED: device.facts.batches, Way.FEW: reaches, Way.DIRECT: reaches}
    return [way for way in ORDER if can[way]]


def measure(device: Device, clock: Callable[[], float] = time.perf_counter, memory: Memory = Memory.PINNED) -> Seconds:
    """Time every way of every case; a second or two on a GPU. Raises KvtierError where the device fails.

    A way that the driver refuses, as some do batches of copies, is none.
    """
    known = ways(device, memory)
    return {case: _time(device, case, clock, memory, known) for case in cases()}


def _time(device: Device, case: Case, clock: Callable[[], float], kind: Memory, known: list[Way]) -> dict[Way, float]:
    """Seconds of one case by each way, the best of some tries; ways that are refused are taken out of `known`."""
    size, count = case.page_bytes, case.pages
    with contextlib.ExitStack() as taken:
        memory = device.take(size * count)
        taken.callback(memory.free)
        pinned = device.pin(size * count) if kind is Memory.PINNED else HostBuffer(size * count)
        taken.callback(pinned.free)
        paged = Paged(memory.address, count, 1, 16, size // 16, size, size, size // 16)
        made = plan([[paged]], 16, GroupSpec(Kind.FULL, 1, 1, size))
        slots = np.arange(count, dtype=np.uint64)[::-1] * np.uint64(size) + np.uint64(pinned.address)  # no neighbours
        ids, out = np.arange(count), {}
        for way in tuple(known):
            shuttle = Shuttle(device, made, way=way)
            try:
                took = []
                for _ in range(TRIES):
                    begun = clock()
                    (shuttle.load if case.load else shuttle.store)(ids, slots).wait()
                    took.append(clock() - begun)
                out[way] = min(took)
            except KvtierError as exc:
                if way is Way.STAGED:  # it asks least of a driver: the device fails
                    raise
                _log.warning("no pages go %s: %s", way, exc)
                known.remove(way)
            finally:
                shuttle.close()
    return out


class Paths:
    """The table of one device; `way` of it goes to a Shuttle."""

    def __init__(
        self, device: Device, folder: Path, clock: Callable[[], float] = time.perf_counter,
        memory: Memory = Memory.PINNED,
    ) -> None:  # fmt: skip
        """Read from `folder`, or measured and written there. A folder that cannot be written costs the next start."""
        facts = device.facts
        self.file = folder / f"paths-{facts.uuid.hex()}-{memory}.json"
        known = [way.value for way in ways(device, memory)]
        self._names = {"format": FORMAT, "device": facts.name, "driver": facts.driver, "ways": known}
        self.seconds = self._read()
        if not self.seconds:
            self.seconds = measure(device, clock, memory)
            self._write()
        self._best = {case: best(seconds) for case, seconds in self.seconds.items()}
        self._asked: dict[Case, Way] = {}

    def way(self, load: bool, page_bytes: int, pages: int) -> Way:
        """How so many pages go best."""
        asked = Case(load, page_bytes, pages)
        if asked not in self._asked:
            near = min(self._best, key=lambda c: (c.load != load, _far(c.page_bytes, page_bytes), _far(c.pages, pages)))
            self._asked[asked] = self._best[near]
        return self._asked[asked]

    def rows(self) -> list[dict[str, Any]]:
        """The table for people: bytes a second by each way, and which is taken."""
        return [
            {"direction": "load" if case.load else "store", "page_bytes": case.page_bytes, "pages": case.pages}
            | {way.value: round(case.page_bytes * case.pages / took) for way, took in seconds.items()}
            | {"taken": self._best[case].value}
            for case, seconds in self.seconds.items()
        ]

    def _read(self) -> Seconds:
        """What was measured before for this device and driver; nothing where that is not known or not whole."""
        try:
            found = json.loads(self.file.read_text())
            rows = found.pop("rows")
            if found != self._names:
                return {}
            table = {
                Case(bool(a), int(b), int(c)): {Way(w): float(s) for w, s in ways.items()} for a, b, c, ways in rows
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        whole = set(table) == set(cases()) and all(ways and min(ways.values()) > 0 for ways in table.values())
        return table if whole else {}

    def _write(self) -> None:
        """Keep it; whole or not at all."""
        rows = [[*case, {way.value: took for way, took in ways.items()}] for case, ways in self.seconds.items()]
        part = self.file.with_suffix(f".{os.getpid()}")
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text(json.dumps({**self._names, "rows": rows}))
            part.replace(self.file)
        except OSError as exc:
            _log.warning("the measured paths are not kept: %s", exc)


def _far(a: int, b: int) -> float:
    """How many times one is of the other."""
    return max(a, b) / max(1, min(a, b))
