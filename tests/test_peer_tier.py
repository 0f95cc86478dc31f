"""What every peer tier must do, whatever carries the bytes: one suite, run on each implementation over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
import xxhash

from engines import FULL, STATE, WINDOW, Engine, content, idle, spec, tokens
from kvtier import wire
from kvtier.device.host import HostDevice
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.peer import items
from kvtier.peer.base import Place
from kvtier.peer.depot import Depot
from kvtier.peer.items import picks_of
from kvtier.peer.shelf import item_name, marks
from kvtier.store import Store, keypeers, pushes
from kvtier.store.peers import Guest
from kvtier.store.vram import DeviceMemory
from kvtier.types import Kind, Presence, Tier
from peerkit import SPEC, TIERS, Pair, blank, direct, right
from storekit import MIB, Failing, quiet, storing, until

ALL = spec((FULL, WINDOW, STATE))
PATH = tokens(*range(1, 10))
SIZE = SPEC.groups[0].item_bytes


async def computed(pair: Pair, keys: bytes, cache: CacheSpec = SPEC) -> None:
    """An engine on the other host computes and stores a path."""
    engine = Engine(pair.far)
    await engine.open(cache)
    assert await engine.put(keys) == len(keys) // cache.stride
    engine.leave()
    await pair.settled()


@TIERS
async def test_pages_are_fetched_in_any_pieces_and_order_and_not_at_all(tmp_path: Path, tier) -> None:
    """The first pages, others, all again, or none: what is fetched is right, and the peer answers on."""
    async with tier(tmp_path) as pair:
        await computed(pair, PATH)
        for pieces in ([range(9)], [range(3, 5), range(9)], [range(9), range(2)], [range(1)], []):
            (source,) = await pair.tier.find(pair.shared, PATH + tokens(77), 0)
            for pages in pieces:
                places = blank(pages)
                assert None not in await source.fetch(places)
                assert all(right(place, PATH) for place in places)
            source.close()
        assert pair.tier.status()[0]["up"]


@TIERS
async def test_a_path_is_found_and_fetched_bit_exact(tmp_path: Path, tier) -> None:
    """Find says how many pages a peer has, fetch brings exactly those that were asked for, in any order."""
    async with tier(tmp_path) as pair:
        await computed(pair, PATH)
        (source,) = await pair.tier.find(pair.shared, PATH + tokens(77), 0)
        assert source.pages == 9
        places = blank(range(8, 1, -2))
        sums = await source.fetch(places)
        source.close()
        assert None not in sums
        assert all(right(place, PATH) for place in places)


@TIERS
async def test_a_peer_that_has_no_more_is_no_source_and_is_not_asked_again_at_once(tmp_path: Path, tier) -> None:
    """A no is remembered for that page of that path, and for nothing else."""
    async with tier(tmp_path) as pair:
        await computed(pair, PATH[: 3 * SPEC.stride])
        assert pair.tier.worth(pair.shared, PATH, 3)
        assert await pair.tier.find(pair.shared, PATH, 3) == []
        assert not pair.tier.worth(pair.shared, PATH, 3)
        assert pair.tier.worth(pair.shared, PATH, 2)
        assert pair.tier.worth(pair.shared, tokens(*range(1, 4), 99), 3)


@TIERS
async def test_what_went_away_between_find_and_fetch_is_none_and_nothing_is_written(tmp_path: Path, tier) -> None:
    """A source whose pages are gone gives None for each, and the peer may be asked again."""
    async with tier(tmp_path) as pair:
        await computed(pair, PATH)
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        pair.lose()
        places = blank(range(8))  # not all, which may have been asked for ahead
        assert await source.fetch(places) == [None] * 8
        source.close()
        assert not any(place.views[0].any() for place in places)
        assert pair.tier.status()[0]["up"]


async def test_a_peer_that_has_more_by_now_gives_what_it_said_it_had(tmp_path: Path, monkeypatch) -> None:
    """Between Find and a Fetch of other pages than were asked for ahead the path grew: the pages come, nobody fails."""
    monkeypatch.setattr(items, "CHUNK_BYTES", 2 * SIZE)
    async with direct(tmp_path) as pair:
        await computed(pair, PATH[: 4 * SPEC.stride])
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        engine = Engine(pair.far)
        await engine.open(SPEC)
        assert await engine.put(PATH, 4) == 5
        engine.leave()
        places = blank(range(1, 4))
        assert None not in await source.fetch(places)
        source.close()
        assert source.pages == 4
        assert all(right(place, PATH) for place in places)
        assert pair.tier.counts["peer_mismatch"] == 0


async def test_pages_that_only_the_peers_disk_has_are_served(tmp_path: Path) -> None:
    """A peer (of `direct`) loads what it no longer has in host before it sends it."""
    async with direct(tmp_path, tmp_path / "disk") as pair:
        await computed(pair, PATH)
        await quiet(pair.far)
        for pool in pair.far.parts.host.pools:
            pair.far.parts.space.evict(pool, [1 << 30])
        (cache,) = pair.far.parts.caches.values()
        assert sum(node.count[Tier.HOST] for node in cache.index.walk()) == 0
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        places = blank(range(9))
        assert None not in await source.fetch(places)
        source.close()
        assert all(right(place, PATH) for place in places)


@TIERS
async def test_a_home_takes_what_it_lacks_and_serves_it_to_its_engines(tmp_path: Path, tier) -> None:
    """Offer says what is missing there; what is sent is served there; offered again, nothing is wanted."""
    async with tier(tmp_path) as pair:
        await computed(pair, PATH[: 4 * SPEC.stride])
        (home,) = pair.tier.homes(pair.shared, PATH)
        assert home == (pair.home, 9)
        sink = await pair.tier.offer(pair.home, pair.shared, PATH, ())
        assert sink.picks == picks_of((0, page) for page in range(4, 9))
        places = [Place(0, at, [content(PATH[: (at + 1) * SPEC.stride], 0, SIZE)]) for at in range(4, 9)]
        sums = [xxhash.xxh3_64_intdigest(place.views[0]) for place in places]
        assert await sink.send(places, sums) == 5
        await sink.more()
        assert sink.picks == ()
        sink.close()
        engine = Engine(pair.far)
        await engine.open(SPEC)
        assert await engine.get(PATH) == 9
        engine.leave()


@TIERS
async def test_a_home_serves_nothing_from_a_page_on_that_came_wrong(tmp_path: Path, tier) -> None:
    """A pushed page whose bytes are not those of its checksum is dropped with what follows; its slots return."""
    async with tier(tmp_path) as pair:
        sink = await pair.tier.offer(pair.home, pair.shared, PATH, ())
        places = [Place(0, at, [content(PATH[: (at + 1) * SPEC.stride], 0, SIZE)]) for at in range(9)]
        sums = [xxhash.xxh3_64_intdigest(place.views[0]) for place in places]
        places[3].views[0][17] ^= 1
        with contextlib.suppress(OSError, EOFError):
            await sink.send(places, sums)
        sink.close()
        engine = Engine(pair.far)
        await engine.open(SPEC)
        assert await engine.get(PATH) == 3
        await until(lambda: pair.far.parts.counts["peer_checksum"] == 1)
        engine.leave()


@TIERS
async def test_a_cancelled_fetch_leaves_the_places_alone(tmp_path: Path, tier) -> None:
    """Once a cancelled fetch has ended, no byte of the places changes any more, and the peer is let go."""
    async with tier(tmp_path) as pair:
        await computed(pair, PATH)
        for delay in (0.0, 0.001, 0.003):
            (source,) = await pair.tier.find(pair.shared, PATH, 0)
            places = blank(range(9))
            task = asyncio.ensure_future(source.fetch(places))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            source.close()
            before = [place.views[0].copy() for place in places]
            await asyncio.sleep(0.02)
            assert all(np.array_equal(a, place.views[0]) for a, place in zip(before, places, strict=True))
        await until(lambda: pair.tier.status()[0]["up"])


@TIERS
async def test_windows_and_states_come_with_the_boundary_that_needs_them(tmp_path: Path, tier) -> None:
    """Two stores with full, window and state groups: what one computed, the other resumes at the same boundary."""
    async with tier(tmp_path, cache=ALL) as pair, storing(None) as near:
        engine = Engine(pair.far)
        await engine.open(ALL)
        state = np.array([8], "<i4").tobytes()
        reserved = await engine.reserve(PATH, wants=(wire.Want(2, state),))
        engine.write(PATH, reserved)
        await engine.call(wire.Commit(reserved.reservation, 0, 9))
        assert await engine.get(PATH) == 9
        engine.leave()
        await pair.settled()
        near.join_fleet(pair.tier)
        mine = Engine(near)
        await mine.open(ALL)
        assert await mine.get(PATH + tokens(50)) == 9
        mine.leave()
        await until(lambda: not near.parts.peers.busy)
        assert idle(near) == []
        near.parts.peers = None  # the tier is closed by whoever made it


@TIERS
async def test_a_window_of_more_than_a_piece_comes_with_its_last_piece(tmp_path: Path, tier) -> None:
    """80 items of 256 KiB are needed at once, more than a home sends in one go: all of the path is served."""
    wide = spec((GroupSpec(Kind.FULL, 1, 1, 1024), GroupSpec(Kind.WINDOW, 1, 1, 256 << 10, window=4 * 80)))
    path = tokens(*range(1, 91))
    async with tier(tmp_path, cache=wide, host=64 << 20) as pair, storing(None, host=64 << 20) as near:
        await computed(pair, path, wide)
        near.join_fleet(pair.tier)
        mine = Engine(near)
        await mine.open(wide)
        assert await mine.get(path, wait_ms=20_000) == 90
        mine.leave()
        await until(lambda: not near.parts.peers.busy)
        near.parts.peers = None  # the tier is closed by whoever made it


async def test_pages_that_were_computed_on_a_device_are_pushed_once_host_has_them(tmp_path: Path, monkeypatch) -> None:
    """A push that begins while pages are still on their way down waits for them; none is dropped."""
    memory = DeviceMemory(HostDevice, 1 << 20, slab_bytes=64 << 10, deadline_s=30.0)
    async with direct(tmp_path) as pair, storing(None, device=memory, cap=1.0) as near:
        down = near.parts.vram.demote._down

        async def late(*args: object) -> bool:
            await asyncio.sleep(0.2)
            return await down(*args)

        monkeypatch.setattr(near.parts.vram.demote, "_down", late)
        near.join_fleet(pair.tier)
        near.parts.peers.start()
        mine = Engine(near)
        await mine.open(SPEC)
        assert await mine.put(PATH) == 9
        mine.leave()
        await until(lambda: not near.parts.peers.busy)
        assert near.parts.counts["pages_pushed_peer"] == 9
        assert near.parts.counts["peer_push_dropped_gone"] == 0
        theirs = Engine(pair.far)
        await theirs.open(SPEC)
        assert await theirs.get(PATH) == 9
        theirs.leave()


KEYED = spec(key_bytes=16)


def keys_of(*numbers: int) -> bytes:
    """Opaque keys."""
    return b"".join(n.to_bytes(16, "little") for n in numbers)


@TIERS
async def test_keys_are_found_by_their_homes_and_fetched_by_position(tmp_path: Path, tier) -> None:
    """Holders names the peers that have a key, source fetches those that are wanted of a list of keys."""
    async with tier(tmp_path, cache=KEYED) as pair:
        engine = Engine(pair.far)
        await engine.open(KEYED)
        await engine.put_keys(keys_of(1, 2, 3))
        engine.leave()
        await pair.settled()
        asked = [keys_of(n) for n in (3, 4, 1)]
        assert await pair.tier.holders(pair.shared, 0, asked) == {keys_of(3): [pair.home], keys_of(1): [pair.home]}
        source = await pair.tier.source(pair.home, pair.shared, 0, keys_of(3, 4, 1))
        places = [Place(0, at, [np.zeros(SIZE, np.uint8)]) for at in (2, 0)]
        assert None not in await source.fetch(places)
        source.close()
        for place, n in zip(places, (1, 3), strict=True):
            assert np.array_equal(place.views[0], content(keys_of(n), 0, SIZE))


@pytest.mark.parametrize("keyed", [False, True])
async def test_what_peers_have_waits_for_room_until_what_it_displaces_is_written(
    tmp_path: Path, *, keyed: bool
) -> None:
    """Host is full of pages that a slow disk is to save first: a peer's come after them, within the engine's time."""
    cache, disk = KEYED if keyed else SPEC, Failing()
    path = keys_of(*range(60)) if keyed else tokens(*range(1, 61))
    async with direct(tmp_path, cache=cache) as pair, storing(tmp_path / "near", MIB, calls=disk) as near:
        there, engine = Engine(pair.far), Engine(near)
        await there.open(cache)
        await (there.put_keys(path) if keyed else there.put(path))
        await engine.open(cache)
        disk.gate.clear()
        for n in range(1, 5):
            more = keys_of(*range(100 * n, 100 * n + 64)) if keyed else tokens(*range(100 * n, 100 * n + 64))
            await (engine.put_keys(more) if keyed else engine.put(more))
        assert near.parts.host.free_bytes == 0
        near.join_fleet(pair.tier)
        asyncio.get_running_loop().call_later(0.3, disk.gate.set)
        if keyed:
            exists = wire.Exists(engine.opened.cache, 0, path)
            await engine.call(exists)
            await until(lambda: not near.parts.peers.busy)
            got = await engine.call(wire.AcquireKeys(engine.opened.cache, 0, path, wait_ms=5000))
            assert (np.frombuffer(got.items[0].offsets, "<i8") >= 0).all()
            engine.verify(path, got.items[0])
            await engine.call(wire.Release(got.lease))
        else:
            assert await engine.get(path) == 60
        there.leave()
        engine.leave()
        await until(lambda: not near.parts.peers.busy)


@TIERS
async def test_engines_see_and_get_keys_of_peers_and_push_their_own(tmp_path: Path, tier) -> None:
    """Exists says pending while peers are asked, then peer or miss; acquire brings the bytes; new keys are pushed."""
    async with tier(tmp_path, cache=KEYED) as pair, storing(None) as near:
        engine = Engine(pair.far)
        await engine.open(KEYED)
        await engine.put_keys(keys_of(1, 2, 3))
        await pair.settled()
        near.join_fleet(pair.tier)
        near.parts.peers.start()
        mine = Engine(near)
        await mine.open(KEYED)
        exists = wire.Exists(mine.opened.cache, 0, keys_of(1, 2, 9))
        assert (await mine.call(exists)).states == bytes([Presence.PENDING] * 3)
        await until(lambda: not near.parts.peers.busy)
        assert (await mine.call(exists)).states == bytes([Presence.PEER, Presence.PEER, Presence.MISS])
        got = await mine.call(wire.AcquireKeys(mine.opened.cache, 0, keys_of(1, 2, 9)))
        assert np.frombuffer(got.items[0].offsets, "<i8").tolist()[2] == -1
        mine.verify(keys_of(1, 2, 9), got.items[0])
        assert (await mine.call(exists)).states[:2] == bytes([Presence.HOST] * 2)
        await mine.call(wire.Release(got.lease))
        await mine.put_keys(keys_of(20, 21))
        await until(lambda: not near.parts.peers.busy)
        there = wire.Exists(engine.opened.cache, 0, keys_of(20, 21))
        await engine.call(there)
        await pair.settled()
        assert set((await engine.call(there)).states) <= {Presence.HOST, Presence.PEER}
        pushed = await engine.call(wire.AcquireKeys(engine.opened.cache, 0, keys_of(20, 21)))
        engine.verify(keys_of(20, 21), pushed.items[0])
        await engine.call(wire.Release(pushed.lease))
        engine.leave()
        mine.leave()
        assert idle(near) == []


async def test_hosts_of_one_model_agree_on_a_page_where_each_can_resume(tmp_path: Path) -> None:
    """States after 4 and 9 pages here, after 3 and 4 there: of 9 pages both can resume after 4, of 3 after none."""

    async def states(store: Store, *pages: int) -> Engine:
        engine = Engine(store)
        await engine.open(ALL)
        for number, page in enumerate(pages):
            start = 0 if not number else pages[number - 1] + 1
            part = PATH[: (page + 1) * ALL.stride]
            want = wire.Want(2, np.array([page], "<i4").tobytes())
            assert await engine.put(part, start, wants=(want,)) == page + 1 - start
        return engine

    async with direct(tmp_path, cache=ALL) as pair, storing(None) as near:
        (await states(pair.far, 2, 3)).leave()
        mine = await states(near, 3, 8)  # before it has peers: nothing is pushed
        near.join_fleet(pair.tier)
        others = (wire.Elsewhere("far", ALL),)
        for keys, agreed in ((PATH, 4), (PATH[: 3 * ALL.stride], 0)):
            matched = await mine.call(wire.Match(mine.opened.cache, 0, keys))
            assert (await mine.call(wire.Agree(matched.handle, others, 5000))).pages == agreed
        mine.leave()
        await until(lambda: not near.parts.peers.busy)
        near.parts.peers = None  # the tier is closed by whoever made it


async def test_what_peers_brought_once_is_forgotten_with_its_cache():
    """The guest that reserves for them keeps shards of caches that are here, whatever came and went."""
    async with storing(None) as store:
        guest = Guest(store.parts, "peers", store.cap_bytes)
        for n in range(20):
            cache = store.parts.cache(spec(salt=b"%d" % n), "uid:0", 0)
            res, _ = await guest.reserve(store.tokens, cache, tokens(1, 2), 0, {})
            assert guest.commit(store.commits, res, {}) == 0
            store.parts.prune()
        assert len(guest.process.ranks) == 1


@TIERS
async def test_a_key_that_left_a_peer_costs_itself_and_not_those_asked_for_with_it(
    tmp_path: Path, monkeypatch, tier
) -> None:
    """A peer said it has six keys; two go, in the first piece and the last: the four others come from there."""
    monkeypatch.setattr(keypeers, "CHUNK_BYTES", 2 * SIZE)
    async with tier(tmp_path, cache=KEYED) as pair, storing(None) as near:
        engine = Engine(pair.far)
        await engine.open(KEYED)
        names = [keys_of(n) for n in range(6)]
        await engine.put_keys(b"".join(names))
        await pair.settled()
        near.join_fleet(pair.tier)
        near.parts.peers.start()
        mine = Engine(near)
        await mine.open(KEYED)
        exists = wire.Exists(mine.opened.cache, 0, b"".join(names))
        await mine.call(exists)
        await until(lambda: not near.parts.peers.busy)
        assert (await mine.call(exists)).states == bytes([Presence.PEER] * 6)
        await lose_keys(pair, engine, [names[1], names[5]])
        got = await mine.call(wire.AcquireKeys(mine.opened.cache, 0, b"".join(names), 20_000))
        there = np.frombuffer(got.items[0].offsets, "<i8") != -1
        assert there.tolist() == [True, False, True, True, True, False]
        mine.verify(b"".join(names), got.items[0])
        await mine.call(wire.Release(got.lease))
        assert pair.tier.status()[0]["up"]
        engine.leave()
        mine.leave()
        assert idle(near) == []


async def lose_keys(pair: Pair, engine: Engine, names: list[bytes]) -> None:
    """Keys go where a pair's tier reaches them, unannounced."""
    if isinstance(pair.tier, Depot):
        generation = await pair.tier.generations.of(pair.shared, pair.tier.until())
        heads = [item_name(pair.shared, generation, mark, 0) for mark in marks(pair.shared, b"".join(names))]
        assert await pair.tier.shelf.drop(heads, pair.tier.until())
        return
    cache = pair.far.parts.caches[engine.opened.cache]
    for name in names:
        node = cache.keyed.find(cache.keyed.name(0, name))
        cache.release(cache.index.cut(node).freed, None)


async def test_a_key_that_left_host_before_its_turn_holds_up_no_other_ones_push(tmp_path: Path) -> None:
    """Of three keys that wait to be pushed one is on disk alone by now: its home gets the others, and it is counted."""
    async with direct(tmp_path, cache=KEYED) as pair, storing(tmp_path / "disk") as near:
        near.join_fleet(pair.tier)
        mine = Engine(near)
        await mine.open(KEYED)
        await mine.put_keys(keys_of(1, 2, 3))
        await quiet(near)
        cache = near.parts.caches[mine.opened.cache]
        node = cache.keyed.find(cache.keyed.name(0, keys_of(2)))
        cache.release(cache.index.drop(node, 0, 1, Tier.HOST), near.parts.disk)
        near.parts.peers.start()
        await until(lambda: near.parts.peers.pushes.waiting == 0)
        asked = [keys_of(n) for n in (1, 2, 3)]
        assert set(await pair.tier.holders(pair.shared, 0, asked)) == {keys_of(1), keys_of(3)}
        assert near.parts.counts["pages_pushed_peer"] == 2
        assert near.parts.counts["peer_push_dropped_gone"] == 1
        mine.leave()


@pytest.mark.parametrize("lacked", [True, False])
@TIERS
async def test_what_host_still_has_of_a_piece_is_pushed(tmp_path: Path, monkeypatch, tier, *, lacked: bool) -> None:
    """Of nine pages that wait to be pushed, with the offer or after it, the last three are on disk alone by now."""
    monkeypatch.setattr("kvtier.peer.lacks.LACKS_S", 0.0)
    async with tier(tmp_path) as pair, storing(tmp_path / "disk") as near:
        for peer in getattr(pair.tier, "_nodes", {}).values():
            peer.lacked = lacked
        near.join_fleet(pair.tier)
        mine = Engine(near)
        await mine.open(SPEC)
        assert await mine.put(PATH) == 9
        await quiet(near)
        cache = near.parts.caches[mine.opened.cache]
        node, _ = cache.radix.deepest(PATH)
        cache.release(cache.index.drop(node, 6, 9, Tier.HOST), near.parts.disk)
        near.parts.peers.start()
        await until(lambda: near.parts.peers.pushes.waiting == 0)
        assert near.parts.counts["pages_pushed_peer"] == 6
        assert near.parts.counts["peer_push_dropped_gone"] == 1
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        assert source.pages == 6
        places = blank(range(6))
        assert None not in await source.fetch(places)
        assert all(right(place, PATH) for place in places)
        source.close()
        mine.leave()


@pytest.mark.parametrize("named", [1 << 16, 100])
async def test_a_path_of_many_pieces_whose_state_is_at_its_end_is_pushed_whole(
    tmp_path: Path, monkeypatch, named: int
) -> None:
    """After a piece its home can resume nowhere yet: the next one follows, however few windows are named."""
    for module in (items, pushes):
        monkeypatch.setattr(module, "MAX_ITEMS", named, raising=False)
    monkeypatch.setattr(items, "RUN_PAGES", 16)
    path = tokens(*range(1, 81))
    async with direct(tmp_path, cache=ALL) as pair, storing(None) as near:
        near.join_fleet(pair.tier)
        near.parts.peers.start()
        mine = Engine(near)
        await mine.open(ALL)
        reserved = await mine.reserve(path, wants=(wire.Want(2, np.array([79], "<i4").tobytes()),))
        mine.write(path, reserved)
        await mine.call(wire.Commit(reserved.reservation, 0, 80))
        assert await mine.get(path) == 80
        await until(lambda: not near.parts.peers.busy, 60.0)
        theirs = Engine(pair.far)
        await theirs.open(ALL)
        assert await theirs.get(path) == 80
        for engine in (mine, theirs):
            engine.leave()
