"""What the disk tier's tests share: an owner's thread that runs completions, and pages with known bytes."""

from __future__ import annotations

import mmap
import queue
import random
import time
from typing import Self

import numpy as np
import xxhash

from kvtier.identity import CacheSpec, GroupSpec, base_id, cache_id, chain_keys
from kvtier.tiers.disk import DiskTier, Item
from kvtier.types import Kind, align_up

KIB, MIB = 1 << 10, 1 << 20
PAGE = GroupSpec(Kind.FULL, 1, 1, 16 * KIB)


def spec(*groups: GroupSpec, model: str = "m", page_tokens: int = 4, **more) -> CacheSpec:
    """A cache of small pages; 16 KiB each where no group is given."""
    return CacheSpec(
        model=model, fingerprint=b"f" * 16, kv_dtype="bf16", page_tokens=page_tokens, groups=groups or (PAGE,), **more
    )


def view(size: int, seed: int | None = None) -> np.ndarray:
    """Bytes at a 4 KiB-aligned address, random where a seed is given."""
    out = np.frombuffer(mmap.mmap(-1, align_up(max(size, 1))), np.uint8)[:size]
    if seed is not None:
        out[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return out


def digest(views) -> int:
    """xxh3-64 over the views, one behind the other."""
    state = xxhash.xxh3_64()
    for part in views:
        state.update(part)
    return state.intdigest()


def views(item_bytes: int, slot_bytes: int, seed: int | None = None) -> list[np.ndarray]:
    """The slots of one item, clipped to its bytes."""
    sizes = [min(slot_bytes, item_bytes - at) for at in range(0, item_bytes, slot_bytes)]
    return [view(size, None if seed is None else seed * 1000 + n) for n, size in enumerate(sizes)]


class Owner:
    """A disk tier and the thread that owns it: `wait` runs posted completions until something holds."""

    def __init__(self, path, capacity: int = 4 * MIB, *, load: bool = True, **more) -> None:
        self.posts: queue.SimpleQueue = queue.SimpleQueue()
        self.tier = DiskTier(path, capacity, post=lambda fn, *args: self.posts.put((fn, args)), **more)
        self.results: dict[object, tuple[int | None, str]] = {}
        self.runs = list(self.load()) if load else []

    def load(self):
        """(run, its keys, its chains) of every stored run."""
        for run in self.tier.load():
            yield run, run.keys, run.chains

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_) -> None:
        self.tier.close()
        if kind is None and self.tier._loaded:
            assert self.tier.check() == []

    def step(self, timeout_s: float = 0.0) -> bool:
        """Run one posted completion; False where none came."""
        try:
            fn, args = self.posts.get(timeout=timeout_s) if timeout_s else self.posts.get_nowait()
        except queue.Empty:
            return False
        fn(*args)
        return True

    def wait(self, until, timeout_s: float = 30.0) -> None:
        """Run completions until it holds."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, f"still waiting; {self.tier.state} {self.tier.sick} {self.tier.stats}"
            self.step(0.05)

    def flush(self) -> str:
        """Wait until all that was asked is durable."""
        said: list[str] = []
        self.tier.flush(said.append)
        self.wait(lambda: said)
        return said[0]

    def cache(self, which: CacheSpec | None = None, scope: str = "s") -> int:
        """The number of a cache."""
        which = which or spec()
        return self.tier.open_cache(cache_id(which, scope, 0), base_id(which, scope), scope, 0, which)

    def submit(self, cache: int, name: object, items, *, keys: bytes, parent=b"p" * 16, depth=0, chains=None) -> bool:
        """Write a run; its outcome will be in `results` under the name."""
        stride = self.tier.caches()[cache].spec.stride
        if chains is None:
            chains = chain_keys(parent, keys, stride) if parent else b""
        return self.tier.write(
            cache, parent, depth, keys, chains, items, lambda run, error: self.results.__setitem__(name, (run, error))
        )

    def write(self, cache: int, seed: int, pages: int = 4, **more) -> int:
        """Write a run of pages made from a seed and wait for it; its id."""
        assert self.submit(cache, seed, self.items(cache, seed, pages), keys=self.keys(cache, seed, pages), **more)
        self.wait(lambda: seed in self.results)
        run, error = self.results[seed]
        assert error == "", error
        return run

    def items(self, cache: int, seed: int, pages: int) -> list[Item]:
        """Items of every group for each page."""
        sizes = self.tier.caches()[cache].item_bytes
        out = []
        for page in range(pages):
            for group, size in enumerate(sizes):
                parts = views(size, 64 * KIB, seed * 4096 + page * 16 + group)
                out.append(Item(page, group, digest(parts), parts))
        return out

    def keys(self, cache: int, seed: int, pages: int) -> bytes:
        """Page keys made from a seed."""
        stride = self.tier.caches()[cache].spec.stride
        rng = random.Random(seed)
        return b"".join(
            b"".join(rng.randrange(150_000).to_bytes(4, "little") for _ in range(-(-stride // 4)))[:stride]
            for _ in range(pages)
        )

    def read(self, cache: int, run: int, seed: int, pages) -> list[str]:
        """Read pages of a run written from a seed; what the tier said, or "differs"."""
        pages = list(range(pages) if isinstance(pages, int) else pages)
        sizes = self.tier.caches()[cache].item_bytes
        want = [i for i in self.items(cache, seed, max(pages) + 1) if i.page in pages]
        got = [views(sizes[i.group], 64 * KIB) for i in want]
        said = self.tier.read([(run << 6 | i.page, i.group, v) for i, v in zip(want, got, strict=True)])
        return [
            error or ("" if all(map(np.array_equal, v, i.views)) else "differs")
            for error, i, v in zip(said, want, got, strict=True)
        ]
