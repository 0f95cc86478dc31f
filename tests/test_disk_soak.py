"""Many operations: memory, descriptors, threads and files stay as they are."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from kvtier.identity import GroupSpec
from kvtier.types import Kind
from tests.diskkit import KIB, MIB, Item, Owner, digest, spec, views
from tests.growth import line

SIZES = (4 * KIB, 7 * KIB)
ROUNDS = 12
WARM = ROUNDS // 3
"""Rounds until the tier has been full, and the allocators have what they keep."""
OPERATIONS = int(os.environ.get("KVTIER_SOAK", "15000")) // ROUNDS
"""Writes and frees a round; the variable says how many in all."""


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated() -> int:
    """Bytes that the C library has given out and not got back; what it keeps of the rest is its own affair."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    heap = mallinfo()
    return heap.uordblks + heap.hblkhd


def work(owner: Owner, caches, samples, live: list[int], rng: random.Random) -> None:
    """Writes in a full tier of two sizes of cells, each after as many pages were freed; now and then a read."""

    def done(run, error):
        assert run is not None, error
        live.append(run)

    for at in range(OPERATIONS):
        which = at // 250 % 2
        cache, pages = caches[which], rng.choice([1, 4])
        items = [Item(page, 0, *samples[which]) for page in range(pages)]
        keys = rng.randbytes(16 * pages)
        while not owner.tier.write(cache, b"p" * 16, rng.randrange(50), keys, bytes(16 * pages), items, done):
            if owner.tier.refusal == "no_space" and live:
                gone = [live.pop(rng.randrange(len(live))) for _ in range(min(16, len(live)))]
                owner.tier.free([run << 6 | page for run in gone for page in range(4)])
                assert owner.flush() == "" if at % 7 else True
            owner.step(0.01)
        while owner.step():
            pass
        if live and not at % 10:
            handle = live[-1] << 6
            size = owner.tier.caches()[owner.tier._ledger.runs[live[-1]].cache].item_bytes[0]
            assert owner.tier.read([(handle, 0, views(size, size))]) == [""]
    assert owner.flush() == ""


class Sample(NamedTuple):
    """What the process and the tier take after a round."""

    blocks: float
    """Of Python's allocator."""
    memory: float
    resident: float
    descriptors: float
    threads: float
    extents: float
    catalogue: float


NOISE = Sample(0.02, 0.02, 0.03, 0, 0, 0, 0.15)
"""Shares of its level that the least-squares line of a value may rise or fall in a run; none where it is a count.

The catalogue's file keeps the size that it had at its largest, and gets there in steps.
"""


def sample(process: psutil.Process, folder: Path) -> Sample:
    """As it is now."""
    gc.collect()
    extents, catalogue = ((folder / name).stat().st_blocks * 512 for name in ("extents", "catalogue/data.mdb"))
    return Sample(
        sys.getallocatedblocks(), allocated(), process.memory_info().rss, process.num_fds(),
        threading.active_count(), extents, catalogue,
    )  # fmt: skip


def test_a_leak_is_told_from_noise():
    """Values that only jump rise by no more than the line's error; a leak of as much as they jump is told."""
    rng = random.Random(1)
    operations = [100 * number for number in range(200)]
    jumps = [rng.gauss(1e6, 1e3) for _ in operations]
    still = line(operations, jumps)
    assert abs(still.rise) < 3 * still.error
    leaking = line(operations, [value + 0.1 * at for at, value in zip(operations, jumps, strict=True)])
    assert leaking.rise > 3 * leaking.error
    assert leaking.slope - still.slope == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600 + OPERATIONS // 5)
def test_nothing_grows_with_use(tmp_path):
    """Once the tier has been full: no more memory, descriptors, threads or bytes on disk, however long it goes on."""
    process, seen, rng = psutil.Process(), [], random.Random(1)
    with Owner(tmp_path / "d", 8 * MIB, slab_bytes=512 * KIB, linger_s=0.0) as owner:
        caches = [owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, size), model=str(size))) for size in SIZES]
        samples = [(digest(parts), parts) for parts in (views(size, size, 1) for size in SIZES)]
        live: list[int] = []
        for _ in range(ROUNDS):
            work(owner, caches, samples, live, rng)
            assert owner.tier.check() == []
            seen.append(sample(process, tmp_path / "d"))
        assert owner.tier.stats["slabs_emptied"] > 0
    warm = Sample(*zip(*seen[WARM:], strict=True))
    operations = [OPERATIONS * number for number in range(ROUNDS - WARM)]
    for name, values, noise in zip(Sample._fields, warm, NOISE, strict=True):
        found = line(operations, values)
        assert abs(found.rise) <= noise * found.mean + 1e-3, f"{name}: {found}: {values}"  # 1e-3: rounding
    assert max(warm.memory) - warm.memory[0] < MIB, warm.memory
    assert max(warm.resident) - warm.resident[0] < 24 * MIB, warm.resident  # what is free lies scattered
    assert max(warm.catalogue) - min(warm.catalogue) < 256 * KIB, warm.catalogue
