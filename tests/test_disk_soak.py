"""Many operations: memory, descriptors, threads and files stay as they are."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading

import psutil
import pytest

from kvtier.identity import GroupSpec
from kvtier.types import Kind
from tests.diskkit import KIB, MIB, Item, Owner, digest, spec, views

SIZES = (4 * KIB, 7 * KIB)
ROUNDS = 6
OPERATIONS = int(os.environ.get("KVTIER_SOAK", "15000")) // ROUNDS
"""Writes and frees a round; the variable says how many in all."""


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
            files = sum(path.stat().st_blocks for path in (tmp_path / "d").rglob("*")) * 512
            gc.collect()
            counts = process.num_fds(), threading.active_count(), files
            seen.append((sys.getallocatedblocks(), process.memory_info().rss, *counts))
        assert owner.tier.stats["slabs_emptied"] > 0
    blocks, memory, descriptors, threads, files = zip(*seen[1:], strict=True)
    assert max(blocks) - blocks[0] < 5000, blocks  # of Python's allocator: one of them an operation would show
    half = len(memory) // 2  # the C library's heap takes a while to find its size, and gives back when it likes
    assert max(memory[half:]) - memory[half] < 3 * MIB, memory
    assert len(set(descriptors)) == 1, descriptors
    assert len(set(threads)) == 1, threads
    assert max(files) - min(files) < 256 * KIB, files
