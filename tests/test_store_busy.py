"""Many engines at once over one small store: no byte is ever wrong, and in the end nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from busykit import FLEET, Busy
from engines import idle
from kvtier.store import Store
from storekit import Failing, quiet, storing, until

QUICK, MORE = range(20), range(20, 220)


class Faulty(Failing):
    """A disk whose reads fail too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def preadv(self, *args: Any) -> int:
        """Read, or fail as a device does."""
        if self.broken:
            raise OSError(errno.EIO, "injected")
        return os.preadv(*args)


async def _watch(store: Store, calls: Faulty | None) -> None:
    """Every invariant, while everything moves; a disk that fails does so now and then."""
    while True:
        assert store.parts.check() == []
        if calls is not None:
            calls.broken = calls.rng.random() < 0.2
        await asyncio.sleep(0.005)


async def _busy(path: Path, seed: int, steps: int) -> None:
    """Engines of four caches live beside each other; afterwards the store must be as if nobody had been there."""
    disk = (256 << 10, 1 << 20, 64 << 20)[seed % 3]
    calls = Faulty(seed) if seed % 4 == 3 else None
    async with storing(path, host=(1 << 20, 512 << 10)[seed % 2], disk=disk, calls=calls) as store:
        fleet = [Busy(store, number, seed) for number in range(len(FLEET))]
        watch = asyncio.ensure_future(_watch(store, calls))
        await asyncio.gather(*(engine.live(steps) for engine in fleet))
        assert not watch.done(), await watch
        watch.cancel()
        if calls is not None:
            calls.broken = False
        await quiet(store)
        await until(lambda: not store.parts.loads.moving)
        assert idle(store) == []
        assert not any(store.parts.mover.waiting.values())
        assert not store.parts.waiting


@pytest.mark.parametrize("seed", QUICK)
async def test_engines_at_once_see_no_wrong_byte_and_leave_nothing(tmp_path: Path, seed: int) -> None:
    """Requests, cancellations, resets, farewells and deaths at random over a full host: all returns, all is right."""
    await _busy(tmp_path, seed, 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
async def test_engines_at_once_for_longer_see_no_wrong_byte_and_leave_nothing(tmp_path: Path, seed: int) -> None:
    """The same, more of it."""
    await _busy(tmp_path, seed, 40)
