"""How warm what is on disk was: written now and then beside the catalogue, so that a restart does not forget it.

A row per node: the handle of its last page on disk, seconds since its last use, and its scores. The file is a hint:
one that is damaged, or rows of pages that are gone, are passed over, and losing it costs nothing but order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from array import array
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.heat import SCORES, Heat
from kvtier.index import Node
from kvtier.index.folded import FoldedNode
from kvtier.mover import Urgency
from kvtier.store.cache import Cache
from kvtier.store.graft import Places
from kvtier.tiers.records import PAGE_BITS, PAGE_MASK, Run
from kvtier.types import NO_COPY, KvtierError, Tier

if TYPE_CHECKING:
    from kvtier.store.parts import Parts

log = logging.getLogger("kvtier.warmth")

MAGIC: Final = b"KVHEAT1\n"
HEAD: Final = struct.Struct("<8sdQ")
ROW: Final = np.dtype([("handle", "<u8"), ("idle", "<f4"), ("scores", "<f4", (SCORES,))])
_SCORES_BYTES: Final = 8 * SCORES
MOST: Final = 1 << 18
"""Rows kept: those used last."""
REST_S: Final = 30.0
SHARE: Final = 100
"""The walk takes at most a hundredth of the loop's time."""
SLICE: Final = 64
"""Nodes looked at before other work on the loop has its turn."""


class Warmth:
    """Saves and restores; belongs to the loop thread."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._rows = _nothing()
        """What was read, until everything is indexed."""

    @property
    def path(self) -> Path | None:
        """The file; None without a disk tier."""
        return None if self.parts.disk is None else self.parts.disk.path / "heat"

    # -- saving --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Save for ever."""
        while True:
            await asyncio.sleep(REST_S)
            await asyncio.sleep(SHARE * await self.save())

    async def save(self) -> float:
        """Write the file; seconds of the loop that it took. A failure is logged and tried again next time."""
        path = self.path
        if path is None or self.parts.loading:
            return 0.0
        raw, spent = await self._collect()
        try:
            await self.parts.mover.run(_write, path, raw, urgency=Urgency.BACKGROUND)
        except (OSError, KvtierError) as error:
            log.warning("the heat of what is on disk is not saved: %s", error)
        return spent

    async def _collect(self) -> tuple[bytearray, float]:
        """A row of every node that has copies on disk: some at a time, as Python's objects take ten times the room."""
        raw = bytearray()
        found: list[tuple[int, float, list[float]]] = []
        spent, begin, seen = 0.0, time.perf_counter(), 0
        now = self.parts.now()
        for cache in list(self.parts.caches.values()):
            for node in cache.index.walk():
                if (handle := _last(cache, node)) != NO_COPY:
                    found.append((handle, now - node.time, Heat.aged(node, now)))
                seen += 1
                if seen % SLICE == 0:
                    raw += np.array(found, ROW).tobytes()
                    found.clear()
                    spent += time.perf_counter() - begin
                    await asyncio.sleep(0)
                    begin = time.perf_counter()
        raw += np.array(found, ROW).tobytes()
        return raw, spent + time.perf_counter() - begin

    # -- restoring -----------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the file, if there is one that is right; engines that ask meanwhile find what it says of no page yet."""
        path = self.path
        if path is None:
            return
        try:
            found = await self.parts.mover.run(_read, path, self.parts.now(), urgency=Urgency.BACKGROUND)
        except (OSError, KvtierError):
            return
        if found is None:
            self.parts.counts["heat_damaged"] += 1
            log.warning("%s is damaged: what is on disk begins cold", path)
        else:
            self._rows = found

    def apply(self, cache: Cache, run: Run, places: Places, whole: Node | None = None) -> None:
        """Warm the nodes that a run was just put into: one, where that has all of it."""
        handles = self._rows.handles
        at = self._rows.of_run.pop(run.id, len(handles))
        while at < len(handles) and handles[at] >> PAGE_BITS == run.id:
            if whole is not None:
                self._warm(whole, at)
            else:
                self._warm_page(cache, run, places, at)
            at += 1

    def _warm_page(self, cache: Cache, run: Run, places: Places, at: int) -> None:
        page = self._rows.handles[at] & PAGE_MASK
        node = _keyed(cache, run) if cache.spec.keyed else places.below(run, page)
        if node is not None and not node.dead:
            self._warm(cache.index.locate(node, 0 if cache.spec.keyed else run.depth + page)[0], at)

    def _warm(self, node: Node, at: int) -> None:
        """Give a node what a row says."""
        used = self._rows.used[at]
        node.time = max(node.time, used) if node.time else used
        if node.heat is None:
            heat = array("d", self._rows.scores[at * _SCORES_BYTES : (at + 1) * _SCORES_BYTES])
            if heat[0] > -inf:
                node.heat = heat
        self.parts.counts["heat_restored"] += 1

    def forget(self) -> None:
        """Everything is indexed."""
        self._rows = _nothing()


def _last(cache: Cache, node: Node) -> int:
    """The handle of a node's last page on disk; NO_COPY where it has none."""
    if not node.count[Tier.DISK]:
        return NO_COPY
    if isinstance(node, FoldedNode):
        return node.last
    for group in range(cache.index.groups):
        for handle in reversed(node.at[Tier.DISK * cache.index.groups + group] or ()):
            if handle != NO_COPY:
                return int(handle)
    return NO_COPY


def _keyed(cache: Cache, run: Run) -> Node | None:
    """The node of a key's run."""
    group = next((g for g, cells in enumerate(run.cells) if cells[0] != NO_COPY), None)
    return None if group is None else cache.keyed.find(cache.keyed.name(group, run.keys))


def _write(path: Path, raw: bytearray) -> None:
    """Replace the file by that of these rows; raises OSError."""
    rows = np.frombuffer(raw, ROW)
    if rows.size > MOST:
        rows = rows[np.argpartition(rows["idle"], MOST)[:MOST]]
    head, body = HEAD.pack(MAGIC, time.time(), rows.size), rows.view(np.uint8).data
    check = xxhash.xxh3_64(head)
    check.update(body)
    part = path.with_name("heat.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(head)
        file.write(body)
        file.write(struct.pack("<Q", check.intdigest()))
        file.flush()
        os.fdatasync(fd)
    part.replace(path)


class _Rows(NamedTuple):
    """What a file says."""

    handles: array[int]
    """In their order."""
    used: array[float]
    """When the node of each was used last, in the time of now."""
    scores: bytes
    """Its scores then."""
    of_run: dict[int, int]
    """By run: the first row of its pages."""


def _nothing() -> _Rows:
    """Of a tier that begins cold."""
    return _Rows(array("Q"), array("d"), b"", {})


def _read(path: Path, now: float) -> _Rows | None:
    """The rows of a file in the order of their handles, None where it is damaged; raises OSError."""
    raw = path.read_bytes()
    rows = _parse(raw)
    if rows is None:
        return None
    then = now - max(0.0, time.time() - HEAD.unpack_from(raw)[1])  # however long loading takes
    rows = rows[np.argsort(rows["handle"])]
    used = array("d", (then - rows["idle"].astype("f8")).tobytes())
    runs, first = np.unique(rows["handle"] >> PAGE_BITS, return_index=True)
    return _Rows(
        array("Q", rows["handle"].tobytes()),
        used,
        Heat.renewed(rows["scores"], then).tobytes(),
        dict(zip(runs.tolist(), first.tolist(), strict=True)),
    )


def _parse(raw: bytes) -> NDArray[np.void] | None:
    """The rows of a file; None where it is not one, or damaged."""
    if len(raw) < HEAD.size + 8 or xxhash.xxh3_64_intdigest(raw[:-8]) != struct.unpack("<Q", raw[-8:])[0]:
        return None
    magic, _, count = HEAD.unpack_from(raw)
    if magic != MAGIC or len(raw) != HEAD.size + count * ROW.itemsize + 8:
        return None
    return np.frombuffer(raw, ROW, count, HEAD.size)
