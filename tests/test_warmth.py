"""What was warm before a restart is warm after it, and goes last; the file that says so is only a hint."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import FULL, Engine, idle, spec, tokens
from kvtier import wire
from kvtier.heat import Heat
from kvtier.store import Store, restore, warmth
from kvtier.tiers.records import Run
from kvtier.types import Tier
from storekit import MIB, drop_host, quiet, storing

PROMPTS = 12


def prompt(n: int) -> bytes:
    """A prompt of ten pages of its own."""
    return tokens(*range(1000 * n, 1000 * n + 10))


async def used(store: Store) -> list[int]:
    """Store prompts and use them in another order; the order of their last use."""
    engine = Engine(store)
    await engine.open(spec())
    for n in range(PROMPTS):
        await engine.put(prompt(n))
    order = random.Random(1).sample(range(PROMPTS), PROMPTS)
    for n in order:
        await asyncio.sleep(0.002)
        assert await engine.get(prompt(n)) == 10
    await quiet(store)
    engine.leave()
    return order


async def leaving(store: Store) -> list[int]:
    """The order in which the prompts leave the disk when room is needed."""
    engine = Engine(store)
    await engine.open(spec())
    drop_host(store)
    index = store.parts.caches[engine.opened.cache].radix
    gone: list[int] = []
    while len(gone) < PROMPTS:
        assert store.parts.persist.room.evict(1)
        for n in range(PROMPTS):
            if n not in gone and not index.known(prompt(n)):
                gone.append(n)
    engine.leave()
    return gone


async def test_what_was_used_last_goes_last_after_a_restart_too(tmp_path: Path) -> None:
    """The order of use is the order of eviction, as if there had been no restart."""
    async with storing(tmp_path, host=16 * MIB) as store:
        order = await used(store)
    async with storing(tmp_path, host=16 * MIB) as store:
        assert store.parts.counts["heat_restored"] == PROMPTS
        index = next(iter(store.parts.caches.values())).index
        by_age = sorted(index.walk(), key=lambda node: node.time)
        assert [int.from_bytes(node.edge[:4], "little") // 1000 for node in by_age] == order
        store.parts.persist.room.order.policy.share = lambda _: 64
        assert await leaving(store) == order
        await quiet(store)
        assert idle(store) == []


async def test_scores_go_on_decaying_while_the_daemon_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour away counts as an hour: long half-lives remember, short ones do not; repeated use shows."""
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for _ in range(5):
            await engine.put(prompt(0))
        await quiet(store)
        (node,) = next(iter(store.parts.caches.values())).index.walk()
        before = [Heat.level(node, n, store.parts.now()) for n in range(6)]
        engine.leave()
    real = warmth.time.time
    monkeypatch.setattr(warmth.time, "time", lambda: real() + 3600.0)
    async with storing(tmp_path, host=16 * MIB) as store:
        (node,) = next(iter(store.parts.caches.values())).index.walk()
        after = [Heat.level(node, n, store.parts.now()) for n in range(6)]
        assert before[5] > 0
        assert after[5] == pytest.approx(before[5] * 2 ** (-3600 / 8192), rel=0.02)
        assert after[0] < 1e-6
        assert store.parts.now() - node.time > 3590


async def test_keys_keep_their_warmth(tmp_path: Path) -> None:
    """Opaque keys too."""
    keyed, keys = spec((FULL, FULL), key_bytes=16), b"".join(bytes([n]) * 16 for n in range(10))
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(keyed)
        await engine.put_keys(keys, 1)
        await engine.call(wire.AcquireKeys(engine.opened.cache, 1, keys[48:64]))
        await quiet(store)
    async with storing(tmp_path, host=16 * MIB) as store:
        nodes = {node.edge[1]: node.time for node in next(iter(store.parts.caches.values())).index.walk()}
        assert max(nodes, key=nodes.get) == 3


async def test_how_long_loading_takes_is_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are put back later are not warmer for it: the order of use is what it was."""
    async with storing(tmp_path, host=16 * MIB) as store:
        await used(store)
        nodes = next(iter(store.parts.caches.values())).index.walk()
        before = [node.edge for node in sorted(nodes, key=lambda node: node.time)]
    real = restore.sliced

    async def slow(items: Iterable[Run], slice_s: float) -> AsyncIterator[Run]:
        async for item in real(items, slice_s=slice_s):
            yield item
            await asyncio.sleep(0.01)

    monkeypatch.setattr(restore, "sliced", slow)
    async with storing(tmp_path, host=16 * MIB) as store:
        nodes = next(iter(store.parts.caches.values())).index.walk()
        assert [node.edge for node in sorted(nodes, key=lambda node: node.time)] == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
async def test_a_damaged_file_is_passed_over(tmp_path: Path, damage: str) -> None:
    """Counted and logged; every page is served, only cold, and the next save is good again."""
    async with storing(tmp_path, host=16 * MIB) as store:
        await used(store)
    raw = bytearray((tmp_path / "heat").read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
    (tmp_path / "heat").write_bytes({"flip": raw, "cut": raw[:100], "empty": b"", "other": bytes(500)}[damage])
    async with storing(tmp_path, host=16 * MIB) as store:
        assert store.parts.counts["heat_damaged"] == 1
        assert store.parts.counts["heat_restored"] == 0
        engine = Engine(store)
        await engine.open(spec())
        assert [await engine.get(prompt(n)) for n in range(PROMPTS)] == [10] * PROMPTS
        engine.leave()
    async with storing(tmp_path, host=16 * MIB) as store:
        assert store.parts.counts["heat_restored"] == PROMPTS


async def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many nodes those used last are kept."""
    monkeypatch.setattr(warmth, "MOST", 5)
    async with storing(tmp_path, host=16 * MIB) as store:
        order = await used(store)
    async with storing(tmp_path, host=16 * MIB) as store:
        assert store.parts.counts["heat_restored"] == 5
        warm = {
            int.from_bytes(node.edge[:4], "little") // 1000
            for node in next(iter(store.parts.caches.values())).index.walk()
            if node.time and node.count[Tier.DISK]
        }
        assert warm == set(order[-5:])


async def test_what_is_saved_is_no_more_than_a_few_nodes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines wait while it is made into rows, and as Python's objects a million nodes take half a gigabyte."""
    monkeypatch.setattr(warmth, "SLICE", 4)
    made: list[int] = []
    array = np.array

    def counted(found: Any, *more: Any, **words: Any) -> Any:
        if warmth.ROW in more:
            made.append(len(found))
        return array(found, *more, **words)

    async with storing(tmp_path, host=16 * MIB) as store:
        await used(store)
        monkeypatch.setattr(np, "array", counted)
        await store.parts.warmth.save()
        assert sum(made) == PROMPTS
        assert max(made) <= 4


async def test_a_start_reads_it_beside_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a million rows take more than a tenth of a second, in which engines come back."""
    async with storing(tmp_path, host=16 * MIB) as store:
        await used(store)
    parse, where = warmth._parse, list[str]()

    def noted(raw: bytes) -> Any:
        where.append(threading.current_thread().name)
        return parse(raw)

    monkeypatch.setattr(warmth, "_parse", noted)
    async with storing(tmp_path, host=16 * MIB) as store:
        assert store.parts.counts["heat_restored"] == PROMPTS
    assert len(where) == 1
    assert where[0].startswith("kvtier-mover")


async def test_it_is_saved_while_the_daemon_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash loses no more than what came after the last save; a folder that takes no file is only logged."""
    monkeypatch.setattr(warmth, "REST_S", 0.02)
    async with storing(tmp_path, host=16 * MIB) as store:
        await used(store)
        (tmp_path / "heat").unlink(missing_ok=True)
        for _ in range(500):
            await asyncio.sleep(0.01)
            if (tmp_path / "heat").exists():
                break
        assert (tmp_path / "heat").stat().st_mode & 0o777 == 0o600
        (tmp_path / "heat").unlink()
        (tmp_path / "heat").mkdir()
        assert await store.parts.warmth.save() > 0
        (tmp_path / "heat").rmdir()
