"""While the catalogue loads, what an engine asks for is looked up at once; nothing durable is lost by it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from diskkit import Owner
from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.identity import GroupSpec, chain_keys
from kvtier.index import RadixIndex
from kvtier.mover import digest
from kvtier.store import Store, restore
from kvtier.store.graft import Places
from kvtier.store.upkeep import flushed
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.host import HostTier
from kvtier.tiers.slab import SlotState
from kvtier.types import NO_COPY, Tier
from peerkit import given, near
from storekit import MIB, drop_host, memfd, quiet, rows, storing

OTHERS = 700
T = TypeVar("T")


@asynccontextmanager
async def starting(path: Path, host: int = 16 * MIB) -> AsyncIterator[Store]:
    """A store whose catalogue has begun to load, one run at a turn of the loop."""
    loop = asyncio.get_running_loop()
    store = Store(
        HostTier(host, slab_bytes=256 << 10, prefault=False), DiskTier(path, 64 * MIB, post=loop.call_soon_threadsafe)
    )
    task = store.start()
    await asyncio.sleep(0)
    try:
        yield store
        await task
    finally:
        await store.drain(10.0)


class Gate:
    """The loader brings one run at a turn of the loop, and waits for `opened` after a number of them."""

    def __init__(self) -> None:
        self.after = 300
        self.opened = asyncio.Event()

    async def paced(self, items: Iterable[T], slice_s: float) -> AsyncIterator[T]:
        """In place of `sliced`; what an engine asks for is not held."""
        for n, item in enumerate(items):
            yield item
            await asyncio.sleep(slice_s)
            if n == self.after and getattr(items, "__name__", "") == "load":
                await self.opened.wait()

    async def loaded(self, store: Store) -> None:
        """Let it end; it had not until now."""
        assert store.parts.loading
        self.opened.set()
        await store.loading


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Every slice is one run."""
    gate = Gate()
    monkeypatch.setattr(restore, "SLICE_S", 0.0)
    monkeypatch.setattr(restore, "sliced", gate.paced)
    return gate


def paths() -> list[bytes]:
    """Prompts with common beginnings, long ones among many short ones."""
    trunk = tokens(*range(1, 201))
    long = [trunk, trunk[:800] + tokens(*range(500, 600)), trunk[:80] + tokens(*range(600, 700))]
    return long + [tokens(9000 + n, 1, 2, n) for n in range(OTHERS)]


async def fill(path: Path, groups: tuple[GroupSpec, ...], wants: tuple[wire.Want, ...] = ()) -> list[int]:
    """Store all paths; what is served of each."""
    async with storing(path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        for n, keys in enumerate(paths()):
            await engine.put(keys, wants=wants if n == 0 else ())
        await quiet(store)
        served = [await engine.get(keys) for keys in paths()]
        assert store.parts.counts["runs_looked_up"] == 0
        engine.leave()
    return served


@pytest.mark.parametrize(
    "groups",
    [(FULL,), *(pytest.param(each, marks=pytest.mark.slow) for each in [(FULL, STATE), (FULL, WINDOW), (WINDOW,)])],
)
async def test_a_prefix_is_served_before_the_catalogue_is_loaded(
    tmp_path: Path, groups: tuple[GroupSpec, ...], gate: Gate
) -> None:
    """At the first request after a start every path is served whole and bit-exact; so is everything later on."""
    states = (wire.Want(1, np.array([9, 69, 199], "<i4").tobytes()),) if STATE in groups else ()
    served = await fill(tmp_path, groups, states)
    async with starting(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        for keys, pages in list(zip(paths(), served, strict=True))[2::-1]:
            assert (await engine.match(keys)).pages == pages
        assert await engine.get(paths()[0]) == served[0]
        assert store.parts.counts["runs_looked_up"] > 0
        await gate.loaded(store)
        assert [await engine.get(keys) for keys in paths()] == served
        assert store.parts.counts["orphan_pages"] == 0
        engine.leave()
        await quiet(store)
        assert idle(store) == []
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec(groups))
        assert [await engine.get(keys) for keys in paths()] == served


async def test_what_an_engine_stores_while_loading_hides_nothing(tmp_path: Path, gate: Gate) -> None:
    """Pages stored again in host lie between those that disk has: runs below them are found, none is dropped."""
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for keys in paths()[3:]:
            await engine.put(keys)
        await quiet(store)
        for pages in (4, 8, 12, 200):
            await engine.put(paths()[0][: pages * 8])
            await quiet(store)
        engine.leave()
    async with starting(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        cache = store.parts.caches[engine.opened.cache]
        assert cache.radix.known(paths()[0]) == 0
        node = cache.radix.extend(paths()[0][:64], 0.0)  # as if an engine had stored eight pages before it ever asked
        handles, sums = cache.pool.alloc(0, 8), []
        for page, handle in enumerate(handles):
            (view,) = cache.views(0, handle)
            view[:] = content(paths()[0][: page * 8 + 8], 0, view.size)
            sums.append(digest([view]))
        cache.pool.mark(0, handles, SlotState.CACHED)
        cache.index.put(node, 0, Tier.HOST, 0, handles, sums)
        cache.index.publish(node, 8)
        found = await engine.match(paths()[0])
        assert found.pages == 200
        await gate.loaded(store)
        assert store.parts.counts["orphan_pages"] == 0
        assert await engine.get(paths()[0]) == 200
        drop_host(store)
        assert await engine.get(paths()[0]) == 200


async def test_keys_are_looked_up_before_the_catalogue_is_loaded(tmp_path: Path, gate: Gate) -> None:
    """Existence and acquisition of opaque keys, of either group."""
    keyed = spec((FULL, FULL), key_bytes=16)
    keys = [b"".join(bytes([n, group]) * 8 for n in range(200)) for group in range(2)]
    gate.after = 2
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(keyed)
        for group in range(2):
            reserved = await engine.call(wire.ReserveKeys(engine.opened.cache, group, keys[group]))
            engine.write(keys[group], reserved)
            await engine.call(wire.Commit(reserved.reservation, 0, reserved.pages))
        await quiet(store)
    async with starting(tmp_path) as store:
        engine = Engine(store)
        await engine.open(keyed)
        some = keys[1][-160:]
        assert set((await engine.call(wire.Exists(engine.opened.cache, 1, some))).states) == {5}
        assert set((await engine.call(wire.Exists(engine.opened.cache, 0, some))).states) == {0}
        got = await engine.call(wire.AcquireKeys(engine.opened.cache, 0, keys[0][-160:]))
        assert got.pages == 10
        for items in got.items:
            engine.verify(keys[0][-160:], items)
        await gate.loaded(store)
        for group in range(2):
            assert set((await engine.call(wire.Exists(engine.opened.cache, group, keys[group]))).states) <= {3, 5}


async def test_keys_are_loaded_and_not_stored_again_before_the_catalogue_is_loaded(tmp_path: Path, gate: Gate) -> None:
    """Who neither asks nor acquires first: rows are filled from disk, and no slot is given for what disk has.

    KV that is computed again may differ in its last bits; one page has one checksum, which would be wrong for either.
    """
    keyed = spec(key_bytes=16)
    keys = [bytes([n]) * 16 for n in range(200)]
    gate.after = 2
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        number = (await engine.open(keyed)).cache
        reserved = await engine.call(wire.ReserveKeys(number, 0, b"".join(keys)))
        engine.write(b"".join(keys), reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, reserved.pages))
        await quiet(store)
    fd, memory = memfd(30, 4096, sealed=True)
    async with starting(tmp_path) as store:
        engine = Engine(store)
        number = (await engine.open(keyed)).cache
        region = store.register(wire.Register("engine", "rows", 0, 4096, 30), fd, engine.process.peer).region
        some = b"".join(keys[-10:])
        load = wire.Load(region, 0, rows(*range(10)), cache=number, keys=some)
        assert (await engine.call(load)).done == b"\1" * 10
        for n, key in enumerate(keys[-10:]):
            assert np.array_equal(memory[n, :4000], content(key, 0, 4000))
        other = b"".join(keys[-20:-10])
        reserved = await engine.call(wire.ReserveKeys(number, 0, other))
        assert (reserved.pages, reserved.items[0].offsets) == (10, b"\xff" * 80)
        memory[:] = 7
        store_rows = wire.Store(region, 0, rows(*range(10)), cache=number, keys=b"".join(keys[-30:-20]))
        assert (await engine.call(store_rows)).done == b"\1" * 10
        await gate.loaded(store)
        load = wire.Load(region, 0, rows(*range(30)), cache=number, keys=b"".join(keys[-30:]))
        assert (await engine.call(load)).done == b"\1" * 30
        for n, key in enumerate(keys[-30:]):
            assert np.array_equal(memory[n, :4000], content(key, 0, 4000))
        engine.leave()
    os.close(fd)


async def test_what_the_catalogue_brings_is_queued_once_it_is_all_there(tmp_path: Path, gate: Gate) -> None:
    """Until then nothing is amiss, and from then on eviction finds the leaves, with no entries of what is none."""
    gate.after = 20
    async with storing(tmp_path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for end in range(8, 201, 8):
            await engine.put(paths()[0][: end * 8])
            await quiet(store)
        engine.leave()
    async with starting(tmp_path) as store:
        (cache,) = store.parts.caches.values()
        while cache.index.nodes <= gate.after:
            assert cache.index.check() == []
            await asyncio.sleep(0)
        await gate.loaded(store)
        assert cache.index.check() == []
        assert len(store.parts.persist.room.order) == 1
        assert store.parts.persist.room.evict(1)


def holed(path: Path, prompts: int) -> None:
    """A catalogue of prompts of four pages: a run without its second page each, and a run of that page alone."""
    with Owner(path, 64 * MIB) as owner:
        number = owner.cache(spec(), "uid:0")
        record, stride = owner.tier.caches()[number], spec().stride
        for n in range(prompts):
            keys = tokens(9000 + n, 1, 2, n)
            root = record.cache_id[:16]
            chains = chain_keys(root, keys, stride)
            items = owner.items(number, n, 4)
            assert owner.submit(number, (n, 0), [*items[:1], *items[2:]], keys=keys, parent=root, chains=chains)
            second = items[1]._replace(page=0)
            assert owner.submit(
                number,
                (n, 1),
                [second],
                keys=keys[stride : 2 * stride],
                parent=chains[:16],
                depth=1,
                chains=chains[16:32],
            )
            owner.wait(lambda n=n: (n, 1) in owner.results)


async def test_what_waits_for_other_runs_is_indexed_in_slices(tmp_path: Path, gate: Gate) -> None:
    """Parts of runs that hang below what others bring come last, in slices too; every page is there at the end."""
    prompts = 60
    holed(tmp_path, prompts)
    async with starting(tmp_path) as store:
        gate.opened.set()
        turns = 0
        while store.parts.loading:
            turns += store.parts.disk.state == "ready"
            await asyncio.sleep(0)
        engine = Engine(store)
        await engine.open(spec())
        for n in range(prompts):
            assert (await engine.match(tokens(9000 + n, 1, 2, n))).pages == 4
        assert turns >= 2 * prompts  # one for each part, and one for each leaf
        assert store.parts.counts["orphan_pages"] == 0
        engine.leave()


async def test_what_goes_on_from_a_part_that_waits_for_other_runs_waits_with_it(tmp_path: Path, gate: Gate) -> None:
    """Its parent comes last, from a run in whose middle another one lies: it is not dropped for want of it."""
    gate.opened.set()
    holed(tmp_path, 20)
    with Owner(tmp_path, 64 * MIB) as owner:
        (number,) = owner.tier.caches()
        for n in range(20):
            parent = chain_keys(owner.tier.caches()[number].cache_id[:16], tokens(9000 + n, 1, 2, n), spec().stride)[
                -16:
            ]
            chains = chain_keys(parent, tokens(7, 8), spec().stride)
            items = owner.items(number, 100 + n, 2)
            assert owner.submit(number, n, items, keys=tokens(7, 8), parent=parent, depth=4, chains=chains)
            owner.wait(lambda n=n: n in owner.results)
    async with starting(tmp_path) as store:
        await store.loading
        engine = Engine(store)
        await engine.open(spec())
        assert {(await engine.match(tokens(9000 + n, 1, 2, n, 7, 8))).pages for n in range(20)} == {6}
        assert store.parts.counts["orphan_pages"] == 0
        engine.leave()


def test_places_of_a_wide_tree_are_looked_into_step_by_step() -> None:
    """A prompt that branches off among many is found, by whoever asks between two steps too."""
    index = RadixIndex(spec(), b"r" * 16, {})
    places = Places(index.root, b"r" * 16)
    chains, nodes = [], []
    for n in range(50):
        keys = tokens(n, 1, 2, 3)
        nodes.append(index.grow(index.root, keys, 0.0))
        chains.append(chain_keys(b"r" * 16, keys, spec().stride))
        places.add(chains[-1], nodes[-1], 0)
    assert places.strange(chains[7][16:32])
    steps = places.looking(2)
    next(steps)
    assert places.find(chains[7][16:32], 2) is nodes[7]
    assert not places.strange(chains[7][16:32])
    assert [places.find(chain[16:32], 2) for chain in chains] == nodes
    assert list(steps) == []


async def test_pages_freed_while_loading_give_their_cells_back(tmp_path: Path, gate: Gate) -> None:
    """What is evicted before the end of loading is free after it, with what depended on it: no cell leaks."""
    await fill(tmp_path, (FULL,))
    async with starting(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        assert (await engine.match(paths()[2])).pages == 110
        (cache,) = store.parts.caches.values()
        for node in list(cache.index.walk()):
            cache.index.requeue(node, Tier.DISK)
        assert store.parts.persist.room.evict(40 * 4096)
        await flushed(store.parts.disk)
        await gate.loaded(store)
        await quiet(store)
        await flushed(store.parts.disk)
        assert store.parts.disk.freeing_bytes == 0
        assert store.parts.check() == []
        engine.leave()
        await quiet(store)
        assert idle(store) == []


async def few(path: Path) -> list[bytes]:
    """Store some short prompts; which."""
    keys = [tokens(9000 + n, 1, 2, n) for n in range(20)]
    async with storing(path, host=16 * MIB) as store:
        engine = Engine(store)
        await engine.open(spec())
        for each in keys:
            await engine.put(each)
        await quiet(store)
        engine.leave()
    return keys


@asynccontextmanager
async def ahead_of(path: Path, gate: Gate) -> AsyncIterator[tuple[Store, Engine, bytes]]:
    """A store that is not loaded yet, an engine there, and a prompt that disk has and nobody has asked for."""
    keys = (await few(path))[-1]
    gate.after = 2
    async with starting(path) as store:
        engine = Engine(store)
        await engine.open(spec())
        yield store, engine, keys


def wrong_sums(store: Store) -> list[int]:
    """Pages in host whose bytes are not those of their checksums."""
    (cache,) = store.parts.caches.values()
    return [
        node.depth + at
        for node in cache.index.walk()
        for at in range(node.pages)
        if (handle := cache.index.get(node, at, Tier.HOST, 0)) != NO_COPY
        and digest(cache.views(0, handle)) != node.sums[0][at]
    ]


async def computed(engine: Engine, path: bytes, reserved: wire.Reserved, **more: bytes) -> int:
    """Commit pages that differ from what disk has, as those that are computed again may; how many are served."""
    engine.tag = b"in its last bits"
    engine.write(path, reserved)
    return (await engine.call(wire.Commit(reserved.reservation, 0, reserved.pages, **more))).published


async def test_what_is_named_as_it_runs_is_not_stored_again_before_the_catalogue_is_loaded(
    tmp_path: Path, gate: Gate
) -> None:
    """Its keys come with the commit, when nobody has looked for them: disk's bytes are those that are served."""
    async with ahead_of(tmp_path, gate) as (store, engine, keys):
        handle = (await engine.match(b"")).handle
        reserved = await engine.call(wire.Reserve(handle, 0, 4, running=True))
        assert await computed(engine, keys, reserved, keys=keys) == 4
        assert wrong_sums(store) == []
        await engine.call(wire.Abort(reserved.reservation))
        engine.tag = b""
        assert await engine.get(keys) == 4
        await gate.loaded(store)
        engine.leave()


async def test_what_was_stored_with_other_bytes_while_loading_keeps_its_checksums(tmp_path: Path, gate: Gate) -> None:
    """An engine that does not wait until its path was looked up: disk's copy gives way to what it stored."""
    async with ahead_of(tmp_path, gate) as (store, engine, keys):
        handle = (await engine.match(b"")).handle
        late = store.verbs[wire.Match](engine.process, wire.Match(0, handle, keys))
        reserved = await engine.call(wire.Reserve(handle, 0, 4))
        assert await computed(engine, keys, reserved) == 4
        await late
        await gate.loaded(store)
        assert wrong_sums(store) == []
        assert await engine.get(keys) == 4
        await quiet(store)
        drop_host(store)
        assert await engine.get(keys) == 4
        await flushed(store.parts.disk)
        assert store.parts.check() == []
        engine.leave()


async def test_a_run_whose_place_is_being_looked_for_is_found_by_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader has it in hand for some turns of the loop: it is no miss, to be computed again, meanwhile."""
    keys = await few(tmp_path)
    held = asyncio.Event()
    look, asked = restore.Restore._look, []

    async def slowly(self: restore.Restore, *where: object) -> None:
        asked.append(where)
        if len(asked) == 1:
            await held.wait()
        await look(self, *where)

    monkeypatch.setattr(restore.Restore, "_look", slowly)
    monkeypatch.setattr(restore, "adopt", lambda *_: None)  # no run is one of those that need no look
    async with starting(tmp_path) as store:
        engine = Engine(store)
        await engine.open(spec())
        while not asked:
            await asyncio.sleep(0)
        assert [(await engine.match(each)).pages for each in keys] == [4] * len(keys)
        held.set()
        await store.loading
        assert store.parts.counts["orphan_pages"] == 0
        engine.leave()


async def test_a_host_takes_nothing_from_peers_that_its_disk_has_before_the_catalogue_is_loaded(
    tmp_path: Path, gate: Gate
) -> None:
    """What they computed may differ in its last bits; one page has one checksum."""
    keys = (await few(tmp_path / "disk"))[-1]
    gate.after = 2
    async with starting(tmp_path / "disk") as store, near(tmp_path, store) as (tier, _):
        assert await given(tier, tier.shared(spec(), "uid:0", 0), keys) == 0
        await gate.loaded(store)
