"""An engine as a process of its own: does what lines on its standard input say, answers one line each.

A page of a path holds bytes that follow from the path, so that any process can tell right KV from wrong.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import os
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np

from kvtier.client import Client, page_keys
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import Kind

LAYERS, HEADS, CELL = 2, 8, 4096
KEYED = CacheSpec("k", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, LAYERS, HEADS, CELL),), key_bytes=16)
SPEC = CacheSpec("m", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, LAYERS, HEADS, CELL),))


def path_keys(pages: list[int]) -> bytes:
    """Page keys of pages that repeat one token."""
    return page_keys(SPEC, np.repeat(np.array(pages, np.int32), SPEC.page_tokens))


def content(keys: bytes) -> np.ndarray:
    """The canonical page at the end of a path: layers x heads x cell."""
    seed = int.from_bytes(hashlib.sha256(keys).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, HEADS, CELL), dtype=np.uint8)


def key_of(number: int, n: int) -> bytes:
    """The n-th key of a request of a keyed cache."""
    return hashlib.sha256(b"%d %d" % (number, n)).digest()[:16]


class Process:
    """One rank (or the scheduler, without a rank) of an instance."""

    def __init__(self, socket: str, instance: str, rank: int, world: int) -> None:
        self.client = Client(socket, instance=instance, timeout_s=5.0, verify="always")
        per = HEADS // max(1, world)
        self.slice = Slice(0, LAYERS, rank * per, (rank + 1) * per) if rank >= 0 else None
        slices = (self.slice,) if self.slice else ()
        self.cache = self.client.open(SPEC, rank=rank, world=max(1, world), slices=slices)
        self.held: list[Any] = []
        self.mapped = False
        self.counts: Counter[str] = Counter()
        self.resting = threading.Event()
        self.thread: threading.Thread | None = None

    def map(self, _: list[int]) -> dict[str, Any]:
        """Read and compute in device memory from now on."""
        self.mapped = self.client.map_device()
        return {"mapped": self.mapped}

    def match(self, pages: list[int]) -> dict[str, Any]:
        path = self.cache.match(path_keys(pages))
        return {"pages": path.pages, "pending": path.pending}

    def reserve(self, pages: list[int]) -> dict[str, Any]:
        """Reserve all of a path and keep it."""
        path = self.cache.match(path_keys(pages))
        reserved = path.reserve(0, len(pages), wait_ms=200, device=self.mapped)
        self.held.append((path, reserved))
        share = base64.b64encode(reserved.share()).decode()
        return {"pages": reserved.pages, "refused": str(reserved.refused), "share": share}

    def adopt(self, share: str) -> dict[str, Any]:
        """Take up what another process of the instance holds."""
        held = self.cache.adopt(base64.b64decode(share))
        self.held.append((None, held))
        return {"pages": held.pages}

    def fill(self, pages: list[int]) -> dict[str, Any]:
        """Write this process's part of the last reservation, and commit it."""
        _, reserved = self.held[-1]
        keys, stride = path_keys(pages), SPEC.stride
        for page in range(reserved.pages):
            data = content(keys[: (page + 1) * stride])
            if self.slice:
                data = np.ascontiguousarray(data[:, self.slice.h0 : self.slice.h1])
            reserved.write(0, page, data.reshape(-1))
        return {"published": reserved.commit()}

    def put(self, pages: list[int]) -> dict[str, Any]:
        self.reserve(pages)
        answer = self.fill(pages)
        self.held.pop()
        return answer

    def acquire(self, pages: list[int]) -> dict[str, Any]:
        """Lease a path and keep the lease."""
        path = self.cache.match(path_keys(pages))
        lease = path.acquire(wait_ms=5000)
        self.held.append((path, lease))
        arenas = sorted({int(lease._offsets(0, page)[0][0]) >> 44 for page in range(lease.pages)})
        return {"pages": lease.pages, "arenas": arenas, "share": base64.b64encode(lease.share()).decode()}

    def get(self, pages: list[int]) -> dict[str, Any]:
        """Lease, read, compare every byte, release."""
        with self.cache.match(path_keys(pages)).acquire(wait_ms=5000) as lease:
            self.held.append((None, lease))
            return self.read(pages)

    def read(self, pages: list[int]) -> dict[str, Any]:
        """Compare every byte of the lease that was taken last, and let it go."""
        lease = self.held.pop()[1]
        keys, stride = path_keys(pages), SPEC.stride
        right = 0
        for page in range(lease.pages):
            out = np.empty(LAYERS * HEADS * CELL, np.uint8)
            if not lease.read(0, page, out):
                break
            same = np.array_equal(out.reshape(LAYERS, HEADS, CELL), content(keys[: (page + 1) * stride]))
            right += same
            if not same:
                return {"pages": lease.pages, "right": right, "wrong": page}
        return {"pages": lease.pages, "right": right}

    def stream(self, numbers: list[int]) -> dict[str, Any]:
        """Begin to store and load rows of its own memory under keys, without an end, and answer while they run."""
        size, count = LAYERS * HEADS * CELL, 64 * len(numbers)
        fd = os.memfd_create("rows", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, count * size)
        rows = np.frombuffer(mmap.mmap(fd, count * size), np.uint8).reshape(count, size)
        region = self.client.register("rows", fd, 0, size, count)
        keyed = self.client.open(KEYED)
        for at, number in enumerate(numbers):
            keys = [key_of(number, n) for n in range(32)]
            for n, key in enumerate(keys):
                rows[64 * at + n] = content(key).reshape(-1)
            names = keyed, b"".join(keys)
            self.held.append(region.start_store(names, range(64 * at, 64 * at + 32)))
            self.held.append(region.start_load(names, range(64 * at + 32, 64 * at + 64)))
        return {"running": len(self.held)}

    def churn(self, first: list[int]) -> dict[str, Any]:
        """Begin to store paths and to read older ones again, without an end, and answer while that goes on."""
        self.resting.clear()
        self.thread = threading.Thread(target=self._churn, args=first, daemon=True)
        self.thread.start()
        return {}

    def _churn(self, first: int) -> None:
        n = 0
        while not self.resting.is_set():
            n += 1
            self.counts["stored"] += self.put([first, n, *range(30)])["published"]
            served = self.get([first, max(1, n - 40), *range(30)])
            self.counts["served"] += served["pages"]
            self.counts["wrong"] += served["pages"] - served["right"]

    def so_far(self, _: list[int]) -> dict[str, Any]:
        """Pages stored and served while it churns."""
        return {"stored": 0, "served": 0} | self.counts

    def rest(self, _: list[int]) -> dict[str, Any]:
        """Stop churning; pages stored and served so far, and of these how many were wrong."""
        self.resting.set()
        self.thread.join()
        return {"wrong": 0} | self.counts

    def flush(self, _: list[int]) -> dict[str, Any]:
        return {"durable": self.cache.flush(20.0)}

    def drop(self, _: list[int]) -> dict[str, Any]:
        """Let everything go."""
        for _, each in self.held:
            (each.abort if hasattr(each, "abort") else each.release)()
        self.held.clear()
        return {}


def main() -> None:
    socket, instance, rank, world = sys.argv[1:5]
    process = Process(socket, instance, int(rank), int(world))
    for line in sys.stdin:
        verb, pages = json.loads(line)
        print(json.dumps(getattr(process, verb)(pages)), flush=True)


if __name__ == "__main__":
    main()
