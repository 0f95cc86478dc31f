"""A rank of a tensor-parallel engine in a process of its own: KV on a device, moved by its own kernels as lines say.

Arguments: socket, rank (-1: the scheduler, which has no KV), ranks, cpu or gpu. Lines are JSON lists, each answered.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import numpy as np

from enginekv import EngineKv, Shape
from kvtier.client import Client
from kvtier.device.layout import plan
from kvtier.device.shuttle import Shuttle
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import Kind
from storekit import maker

HEADS, TOKENS, PAGES = 4, 16, 6
GROUP = GroupSpec(Kind.FULL, 4, HEADS, TOKENS * 32 * 2)
SPEC = CacheSpec("ranks", b"f" * 16, "bfloat16", TOKENS, (GROUP,))


def keys(number: int) -> bytes:
    """The path of a prompt."""
    return np.arange(number, number + PAGES * TOKENS, dtype="<i4").tobytes()


class Rank:
    """One process; each method is a thing that it can be told."""

    def __init__(self, socket: str, rank: int, world: int, kind: str) -> None:
        self.client = Client(socket, instance="ranks", verify="always", timeout_s=20.0)
        per = HEADS // world
        part = Slice(0, 4, rank * per, (rank + 1) * per)
        self.cache = self.client.open(SPEC, rank=rank, world=world, slices=[part] if rank >= 0 else [])
        if rank < 0:
            return
        self.device = maker(kind)()
        self.stream = self.device.stream()
        self.kv = EngineKv(Shape("LBNHC", 4, 20, per, TOKENS, (16, 16), 2), self.take)
        self.shuttle = Shuttle(self.device, plan(self.kv.layers, TOKENS, GROUP, part), direct=True, stream=self.stream)
        self.ids = np.random.default_rng(rank).permutation(20)[:PAGES]
        self.seed = rank

    def take(self, size: int) -> tuple[int, np.ndarray]:
        self.memory, self.mirror = self.device.take(size), self.device.pin(size)
        return self.memory.address, self.mirror.data

    def fill(self, seed: int) -> None:
        """Compute."""
        self.mirror.data[:] = np.random.default_rng(seed).integers(0, 256, self.memory.bytes, np.uint8)
        self.device.copy(self.memory.address, self.mirror.address, self.memory.bytes, self.stream)
        self.stream.synchronize()

    def blocks(self) -> np.ndarray:
        """What its pages' blocks hold."""
        self.device.copy(self.mirror.address, self.memory.address, self.memory.bytes, self.stream)
        self.stream.synchronize()
        return self.kv.logical()[:, self.ids].copy()

    def map(self) -> Any:
        """Map the daemon's device memory; why not, if not."""
        return self.client.map_device() or self.client.device.reason

    def reserve(self, number: int) -> Any:
        """The scheduler: slots on the device for all ranks."""
        self.held = self.cache.match(keys(number)).reserve(0, PAGES, wait_ms=5000, device=True)
        return [self.held.pages, self.held.on_device(0, 0), base64.b64encode(self.held.share()).decode()]

    def begin(self, number: int) -> Any:
        """The scheduler: slots on the device for pages of which it knows none yet."""
        self.coming = keys(number)
        self.held = self.cache.match(b"").reserve(0, PAGES, wait_ms=5000, device=True, running=True)
        return [self.held.pages, self.held.on_device(0, 0), base64.b64encode(self.held.share()).decode()]

    def full(self, page: int) -> Any:
        """The scheduler: the tokens of a page are all there."""
        stride = self.cache.spec.stride
        self.held.name(self.coming[page * stride : (page + 1) * stride])
        return self.held.commit(page, 1)

    def where(self) -> Any:
        """Addresses of what this process holds."""
        return [self.held.address(0, page) for page in range(self.held.pages)]

    def end(self) -> Any:
        """The request is over; a rank's kernels are."""
        self.held.abort()
        return True

    def decode(self, share: str, page: int, seed: int) -> Any:
        """A rank: compute a page and gather this rank's heads into its slot; how many pages are served then."""
        if not page:
            self.held = self.cache.adopt(base64.b64decode(share))
            self.fill(seed + self.seed)
        slot = np.array([self.held.address(0, page)], np.uint64)
        return self.held.commit(page, 1, after=self.shuttle.store(self.ids[page : page + 1], slot).done)

    def acquire(self, number: int) -> Any:
        """The scheduler: a lease that all ranks read."""
        self.held = self.cache.match(keys(number)).acquire(wait_ms=5000)
        there = all(self.held.on_device(0, page) for page in range(self.held.pages))
        return [self.held.pages, there, base64.b64encode(self.held.share()).decode()]

    def release(self) -> Any:
        """The scheduler: let go."""
        self.held.release()
        return True

    def store(self, share: str, seed: int) -> Any:
        """Compute, and gather this rank's heads into the slots; how many pages are served then."""
        held = self.cache.adopt(base64.b64decode(share))
        self.fill(seed + self.seed)
        slots = np.array([held.address(0, page) for page in range(PAGES)], np.uint64)
        return held.commit(after=self.shuttle.store(self.ids, slots, holder=held).done)

    def load(self, share: str, seed: int, pages: int = PAGES) -> Any:
        """Lose the blocks, and scatter this rank's heads of the lease's pages; whether they are what was computed."""
        lease = self.cache.adopt(base64.b64decode(share))
        self.fill(seed + self.seed)
        want = self.blocks()
        self.fill(99)
        slots = np.array([lease.address(0, page) for page in range(pages)], np.uint64)
        lease.release(after=self.shuttle.load(self.ids[:pages], slots, holder=lease).done)
        return bool(np.array_equal(self.blocks()[:, :pages], want[:, :pages]))


def main() -> None:
    """Do what lines say."""
    socket, rank, world, kind = sys.argv[1:]
    one = Rank(socket, int(rank), int(world), kind)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(one, verb)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
