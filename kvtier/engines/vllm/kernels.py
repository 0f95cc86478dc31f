"""Copies by the device's kernels and copy engine, beside vLLM's own stream.

Between blocks and the daemon's slots in host memory pages go by way of pinned memory of this process: the daemon's is
not pinned, and what a slot holds is verified, or summed, on its way through the CPU. No step waits for the device:
vLLM's stream waits for loads that a step computes with, transfers wait for vLLM's stream, and blocks may be written
again once vLLM's stream has waited for the kernels that read them.
"""

from __future__ import annotations

import itertools
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.client import Lease, Reservation
from kvtier.client.layout import Bytes
from kvtier.device.base import Device, Event, Stream
from kvtier.device.layout import Paged, kv, plan
from kvtier.device.ops import moves
from kvtier.device.shuttle import MOST_PAGES, Choose, Shuttle, Transfer, Way
from kvtier.engines.vllm.copies import wanted, whole_items
from kvtier.engines.vllm.messages import Blocks
from kvtier.engines.vllm.planes import NULL_BLOCK
from kvtier.identity import GroupSpec, Slice
from kvtier.types import Code, Kind, KvtierError, align_up, bad, stretches

CHUNK_BYTES: Final = 8 << 20
"""Pinned memory of one transfer; one page, where that is larger."""
CHUNKS: Final = 8
"""Of each direction: with more in flight than the link takes in a step, a step waits."""
ALIGN: Final = 256
STAGE_BYTES: Final = 4 << 20
"""Of GPU memory, twice for each direction and group."""
DEADLINE_S: Final = 10.0
"""A transfer that takes longer is stuck: its blocks are not sure any more."""

Words = npt.NDArray[Any]
_log = logging.getLogger("kvtier.vllm")


class Chunk(NamedTuple):
    """A stretch of pinned memory."""

    address: int
    data: Bytes


class Group:
    """The blocks of one KV cache group, and what moves this process's part of their pages."""

    def __init__(
        self, device: Device, tensors: Sequence[Any], blocks: int, group: GroupSpec, part: Slice | None,
        way: Choose | Way,
    ) -> None:  # fmt: skip
        """Raises bad_request for layouts that kernels do not know, no_space, io."""
        layers = [[_paged(tensor)] for tensor in tensors]
        self.group = group
        self.part = part or Slice(0, group.layers, 0, group.heads)
        self._per = layers[0][0].blocks // blocks
        """Kernel blocks to a block of vLLM's manager."""
        mine = GroupSpec(Kind.FULL, self.part.l1 - self.part.l0, self.part.h1 - self.part.h0, group.cell_bytes)
        self.bytes = mine.item_bytes
        self.step = align_up(self.bytes, ALIGN)
        tokens = layers[0][0].tokens * self._per
        whole = GroupSpec(Kind.FULL, group.layers, group.heads, group.cell_bytes)
        self.shuttle = Shuttle(device, plan(layers, tokens, mine), stage_bytes=STAGE_BYTES, way=way)
        self.straight = Shuttle(device, plan(layers, tokens, whole, self.part), way=Way.DIRECT)
        """Between blocks and slots in device memory."""
        self.flying: deque[Transfer] = deque()
        """By it."""
        one = np.zeros(1, np.uint64), np.arange(self._per), (0, mine.layers)
        for made in (self.shuttle.plan, self.straight.plan):  # what cannot be compiled is to be known before a step
            device.compile([op for out in (True, False) for op in moves(made, *one, to_slots=out)])

    def ids(self, row: Sequence[int]) -> Words:
        """Kernel blocks of vLLM's."""
        return (np.array(row, np.int64)[:, None] * self._per + np.arange(self._per)).reshape(-1)

    def most(self, chunk: Chunk) -> int:
        """Pages that go at once by way of a chunk."""
        return min(len(chunk.data) // self.step, MOST_PAGES)

    def slots(self, chunk: Chunk, count: int) -> Words:
        """Where they lie in it."""
        return np.uint64(chunk.address) + np.arange(count, dtype=np.uint64) * np.uint64(self.step)

    def rows(self, chunk: Chunk, count: int) -> Bytes:
        """The same for the CPU: this process's part of each page."""
        return chunk.data[: count * self.step].reshape(count, self.step)[:, : self.bytes]

    def put(self, chunk: Chunk, items: Bytes) -> None:
        """Copy this process's part of whole pages there."""
        part, group, rows = self.part, self.group, self.rows(chunk, len(items))
        cells = items.reshape(len(items), group.layers, group.heads, group.cell_bytes)
        shape = (len(items), part.l1 - part.l0, part.h1 - part.h0, group.cell_bytes)
        strides = (self.step, shape[2] * shape[3], shape[3], 1)
        there = np.lib.stride_tricks.as_strided(rows, shape, strides)
        np.copyto(there, cells[:, part.l0 : part.l1, part.h0 : part.h1])

    def room(self) -> Shuttle:
        """What moves pages to and from device memory, waiting for the oldest where many are in flight."""
        while self.flying and (self.flying[0].settled() or len(self.flying) >= CHUNKS):
            self.flying[0].wait(DEADLINE_S)
            self.flying.popleft()
        return self.straight


class Arriving:
    """A load in flight."""

    def __init__(self, lease: Lease, after: Event) -> None:
        self.lease = lease
        self.after = after
        """Blocks may be in use by what vLLM has queued before."""
        self.good = True
        self.pages = 0
        self.flying: list[Transfer] = []

    def here(self) -> bool:
        """Whether all that was queued is done; the lease's slots are not touched any more then."""
        if not all(transfer.settled() for transfer in self.flying):
            return False
        self.lease.release()
        return True


class Leaving:
    """A save in flight, which the thread that ends saves sees to its end."""

    def __init__(self, held: Reservation, after: Event) -> None:
        self.held = held
        self.after = after
        """What is computed until then is saved."""
        self.good = True
        self.pages = 0
        self.flying: list[Transfer] = []
        """Straight into slots; what goes by pinned memory was given to the thread chunk by chunk, before."""

    def ended(self) -> int | None:
        """The pages, once all is over that was given to that thread; None where one is not there."""
        for transfer in self.flying:
            transfer.wait(DEADLINE_S)
        return self.pages if self.good and not self.held.lost else None


class KernelCopies:
    """All groups of a process. The device is called by the thread that steps; saves end in another."""

    aside = False

    def __init__(
        self, device: Device, engine: Callable[[], Stream], tensors: Sequence[Sequence[Any]], blocks: int,
        groups: Sequence[GroupSpec], parts: Sequence[Slice | None], copier: ThreadPoolExecutor,
        way: Choose | Way = Way.STAGED,
    ) -> None:  # fmt: skip
        """`engine`: gives the stream that vLLM computes on. Raises bad_request, no_space, io."""
        self.uuid = device.facts.uuid
        self._engine = engine
        self._copier = copier
        given = zip(tensors, groups, parts, strict=True)
        self._groups = [Group(device, layers, blocks, group, part, way) for layers, group, part in given]
        size = max(CHUNK_BYTES, *(group.step for group in self._groups))
        self._pinned = device.pin(2 * CHUNKS * size)
        starts = range(0, 2 * CHUNKS * size, size)
        chunks = [Chunk(self._pinned.address + at, self._pinned.data[at : at + size]) for at in starts]
        self._up, down = chunks[:CHUNKS], chunks[CHUNKS:]
        self._rising: deque[tuple[Chunk, Transfer]] = deque()
        self._down: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        for chunk in down:
            self._down.put(chunk)
        self._reads: dict[Shuttle, Event] = {}
        """After these no kernel reads blocks any more."""

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, lease: Lease, first: int, rows: Blocks, *, later: bool) -> Arriving:
        """Verify pages, copy them to pinned memory, and queue the rest; from slots on the device, queue it."""
        engine = self._engine()
        load = Arriving(lease, engine.record())
        try:
            load.good = all(self._load(load, at, first, row) for at, row in enumerate(rows))
        except KvtierError as exc:
            _log.warning("a load is given up: %s", exc)
            load.good = False
        if not later:
            for transfer in load.flying:
                if transfer.done is not None:
                    engine.wait(transfer.done)
        return load

    def _load(self, load: Arriving, at: int, first: int, row: Sequence[int]) -> bool:
        """Whether the pages that a group keeps blocks for are all right and on their way."""
        for begin, end, there in _runs(load.lease, at, first, row):
            move = self._load_there if there else self._load_here
            done = begin + move(load, at, first + begin, row[begin:end])
            load.pages += done - begin
            if done < end:
                return False
        return not load.lease.lost

    def _load_here(self, load: Arriving, at: int, page: int, row: Sequence[int]) -> int:
        """Pages from one on by way of pinned memory; how many, until one is not right."""
        group, done = self._groups[at], 0
        for items in whole_items(load.lease, at, page, len(row)):
            left = items
            while len(left):
                chunk = self._rise()
                count = min(group.most(chunk), len(left))
                group.put(chunk, left[:count])
                ids = group.ids(row[done : done + count])
                transfer = group.shuttle.load(ids, group.slots(chunk, count), load.after)
                self._rising.append((chunk, transfer))
                load.flying.append(transfer)
                left, done = left[count:], done + count
        return done

    def _load_there(self, load: Arriving, at: int, page: int, row: Sequence[int]) -> int:
        """Pages from one on straight from slots on the device, which the daemon verified; how many."""
        group, lease = self._groups[at], load.lease
        for done in range(0, len(row), MOST_PAGES):
            blocks = row[done : done + MOST_PAGES]
            slots = [lease.address(at, page + done + n) for n in range(len(blocks))]
            if None in slots:
                return done
            shuttle = group.room()
            transfer = shuttle.load(group.ids(blocks), np.array(slots, np.uint64), load.after, lease)
            group.flying.append(transfer)
            load.flying.append(transfer)
        return len(row)

    def _rise(self) -> Chunk:
        """A chunk for a load: a free one, or that of the oldest, once it is done. Raises io where that is stuck."""
        while self._rising and (self._rising[0][1].settled() or not self._up):
            self._rising[0][1].wait(DEADLINE_S)
            self._up.append(self._rising.popleft()[0])
        return self._up.pop()

    # -- saves ---------------------------------------------------------------------------------------------------

    def save(self, held: Reservation, first: int, rows: Blocks) -> Callable[[], int | None]:
        """Queue the way to pinned memory, or to slots on the device; a thread sees to the rest."""
        save = Leaving(held, self._engine().record())
        try:
            save.good = all(self._save(save, at, first, row) for at, row in enumerate(rows))
        except KvtierError as exc:
            _log.warning("a save is given up: %s", exc)
            save.good = False
        return save.ended

    def _save(self, save: Leaving, at: int, first: int, row: Sequence[int]) -> bool:
        """Whether every page of a group that this process is to write is in a block."""
        if any(save.held.on_device(at, first + n) for n in range(len(row))):
            return self._save_there(save, at, first, row)
        parts = wanted(save.held, at, first, len(row))
        if any(NULL_BLOCK in row[lo:hi] for lo, hi in parts):
            return False
        for lo, hi in parts:
            self._save_here(save, at, first + lo, row[lo:hi])
        return True

    def _save_here(self, save: Leaving, at: int, page: int, row: Sequence[int]) -> None:
        """Pages from one on by way of pinned memory."""
        group, done = self._groups[at], 0
        while done < len(row):
            chunk = self._fall()
            blocks = row[done : done + group.most(chunk)]
            transfer = group.shuttle.store(group.ids(blocks), group.slots(chunk, len(blocks)), save.after)
            self._reading(group.shuttle, transfer)
            self._copier.submit(self._put, save, at, page + done, group.rows(chunk, len(blocks)), chunk, transfer)
            done += len(blocks)

    def _save_there(self, save: Leaving, at: int, first: int, row: Sequence[int]) -> bool:
        """Straight into slots on the device; whether every page that this process is to write is in a block."""
        group, held = self._groups[at], save.held
        found = [(block, held.address(at, first + n)) for n, block in enumerate(row)]
        pages = [(block, slot) for block, slot in found if slot is not None]
        if any(block == NULL_BLOCK for block, _ in pages):
            return False
        for lo in range(0, len(pages), MOST_PAGES):
            blocks, slots = zip(*pages[lo : lo + MOST_PAGES], strict=True)
            shuttle = group.room()
            transfer = shuttle.store(group.ids(blocks), np.array(slots, np.uint64), save.after, held)
            self._reading(shuttle, transfer)
            group.flying.append(transfer)
            save.flying.append(transfer)
        save.pages += len(pages)
        return True

    def _reading(self, shuttle: Shuttle, transfer: Transfer) -> None:
        """Remember until when blocks are read: the last transfer of a shuttle reads last."""
        if transfer.read is not None:
            self._reads[shuttle] = transfer.read

    def _fall(self) -> Chunk:
        """A chunk for a save, once the thread that ends saves has emptied one. Raises busy where it does not."""
        try:
            return self._down.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise KvtierError(Code.BUSY, f"no save ended within {DEADLINE_S:.0f} s") from None

    def _put(self, save: Leaving, at: int, page: int, rows: Bytes, chunk: Chunk, transfer: Transfer) -> None:
        """Copy what has come out into its slots, in the thread that ends saves. A stuck chunk is not used again."""
        try:
            transfer.wait(DEADLINE_S)
            if not save.held.write_pages(at, page, rows, summed=True):
                save.good = False
        except Exception as exc:  # noqa: BLE001 - the thread goes on with the next
            _log.warning("a save is given up: %s", exc)
            save.good = False
        save.pages += len(rows)
        if transfer.settled():
            self._down.put(chunk)

    def fence(self) -> None:
        """Have vLLM's stream wait for the kernels that read blocks."""
        engine = self._engine()
        for event in self._reads.values():
            engine.wait(event)
        self._reads.clear()

    def close(self) -> None:
        """Wait for what is in flight, and give the memory back; what is stuck keeps it."""
        shuttles = [shuttle for group in self._groups for shuttle in (group.shuttle, group.straight)]
        for shuttle in shuttles:
            shuttle.close()
        if not any(shuttle.sick for shuttle in shuttles):
            self._rising.clear()
            self._pinned.free()


def _runs(lease: Lease, group: int, first: int, row: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whether on the device) of positions that follow each other, have a block and lie in one memory."""
    for begin, end in stretches(row, NULL_BLOCK):
        at = begin
        for there, run in itertools.groupby(range(begin, end), lambda n: lease.on_device(group, first + n)):
            count = len(list(run))
            yield at, at + count, there
            at += count


def _paged(tensor: Any) -> Paged:
    """One layer's blocks as kernels take them: rows of K and V together, as the page has them."""
    if tensor.ndim != 4:
        raise bad("kv_caches", "views [blocks, heads, tokens, content]", tuple(tensor.shape))
    item = tensor.element_size()
    strides = [step * item for step in tensor.stride()]
    (paged,) = kv(tensor.data_ptr(), tensor.shape, strides, tensor.shape[3:], item)
    return paged
