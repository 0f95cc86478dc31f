"""What goes to a home together with the offer: one round trip where it is wanted, and no harm where it is not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from engines import Engine, idle, spec, tokens
from kvtier import wire
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.peer import frames
from kvtier.peer.base import Ahead, Sink
from kvtier.peer.direct import Direct
from kvtier.peer.items import CHUNK_BYTES, echo, picks_of
from kvtier.peer.items import sums_of as packed_sums
from kvtier.peer.pipe import Pipe
from kvtier.server import taking
from kvtier.server.taking import Taking
from kvtier.types import Code, Kind, KvtierError
from peerkit import SPEC, Pair, direct, page, sums_of
from storekit import storing, until

PATH = tokens(*range(1, 10))
SIZE = SPEC.groups[0].item_bytes
LARGE = spec((GroupSpec(Kind.FULL, 1, 1, 3 << 20),))
KEYED = spec(key_bytes=16)


def items(keys: bytes, pages: range, cache: CacheSpec = SPEC) -> Ahead:
    """Pages of a path as they are sent."""
    places = [page(keys, at, 0, cache) for at in pages]
    return Ahead(places, sums_of(places))


async def offered(pair: Pair, keys: bytes, pages: range, cache: CacheSpec = SPEC) -> Sink:
    """Offer a path with pages of it."""
    sink = await pair.tier.offer(pair.home, pair.shared, keys, (), ahead=items(keys, pages, cache))
    assert sink is not None
    return sink


async def served(pair: Pair, keys: bytes, cache: CacheSpec = SPEC) -> int:
    """Pages that an engine of the home gets, each checked to be right."""
    engine = Engine(pair.far)
    await engine.open(cache)
    found = await engine.get(keys)
    engine.leave()
    return found


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[frames.Load]:
    """Loads that came to a home by themselves."""
    seen: list[frames.Load] = []
    take = Taking.take

    async def noted(self: Taking, load: frames.Load) -> frames.Stored:
        seen.append(load)
        return await take(self, load)

    monkeypatch.setattr(Taking, "take", noted)
    return seen


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("cache", [SPEC, LARGE], ids=["small", "large"])
async def test_what_goes_with_an_offer_is_served_with_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: CacheSpec, *, sealed: bool
) -> None:
    """A home that lacks all of it has it after one question and one answer, on the loop, in threads, under a seal."""
    if sealed:
        monkeypatch.setattr(Pipe, "local", property(lambda _: False))
    keys = tokens(*range(1, 5))
    async with direct(tmp_path, cache=cache, host=64 << 20) as pair:
        sink = await offered(pair, keys, range(4), cache)
        assert (sink.stored, sink.picks) == (4, ())
        sink.close()
        assert await served(pair, keys, cache) == 4
        assert pair.far.parts.counts["pages_taken_peer"] == 4


async def test_a_piece_goes_ahead_and_the_rest_when_it_is_wanted(tmp_path: Path, loads: list[frames.Load]) -> None:
    """Of seven pages of 3 MiB five go with the offer, which is a piece; the answer asks for the others."""
    keys = tokens(*range(1, 8))
    async with direct(tmp_path, cache=LARGE, host=64 << 20) as pair:
        sink = await offered(pair, keys, range(5), LARGE)
        assert (sink.stored, sink.picks) == (5, picks_of([(0, 5), (0, 6)]))
        rest = items(keys, range(5, 7), LARGE)
        assert await sink.send(rest.places, rest.sums) == 2
        sink.close()
        assert len(loads) == 1
        assert await served(pair, keys, LARGE) == 7


async def test_a_home_takes_of_what_comes_only_what_it_lacks(tmp_path: Path) -> None:
    """It has four pages of nine, or all, or needs others first: the rest is passed over, the connection goes on."""
    async with direct(tmp_path) as pair:
        sink = await offered(pair, PATH[: 4 * SPEC.stride], range(4))
        sink.close()
        sink = await offered(pair, PATH, range(9))
        assert (sink.stored, sink.picks) == (5, ())
        sink.close()
        assert pair.far.parts.counts["peer_unwanted"] == 4
        sink = await offered(pair, PATH, range(9))
        assert (sink.stored, sink.picks) == (0, ())
        sink.close()
        assert pair.far.parts.counts["peer_unwanted"] == 13
        pair.tier._nodes[pair.home].lacked = True
        other = tokens(*range(50, 59))
        sink = await offered(pair, other, range(3, 9))
        assert (sink.stored, sink.picks) == (0, picks_of((0, at) for at in range(9)))
        whole = items(other, range(9))
        assert await sink.send(whole.places, whole.sums) == 9
        sink.close()
        assert [await served(pair, keys) for keys in (PATH, other)] == [9, 9]
        assert pair.tier.counts["peer_failures"] == 0
        assert pair.tier.status()[0]["idle"] == 1, "all of it went on one connection"


async def test_after_an_offer_in_vain_nothing_goes_along_until_something_is_wanted(
    tmp_path: Path, loads: list[frames.Load]
) -> None:
    """A home that had it all is asked first next time; since it lacks that, the one after goes with its pages again."""
    paths = [tokens(*range(first, first + 3)) for first in (10, 20, 30)]
    async with direct(tmp_path) as pair:
        for _ in range(2):
            (await offered(pair, paths[0], range(3))).close()
        sink = await offered(pair, paths[1], range(3))
        assert (sink.stored, len(sink.picks)) == (0, 1)
        rest = items(paths[1], range(3))
        assert await sink.send(rest.places, rest.sums) == 3
        sink.close()
        sink = await offered(pair, paths[2], range(3))
        assert sink.stored == 3
        sink.close()
        assert len(loads) == 1


@pytest.mark.parametrize("why", [Code.CLOSING, Code.FORBIDDEN, Code.NO_SPACE])
async def test_a_home_that_refuses_reads_what_came_and_goes_on(tmp_path: Path, why: Code) -> None:
    """It drains, was reset, or is full of what an engine holds: it says so, and the connection is used again."""
    async with direct(tmp_path) as pair:
        far = pair.far
        engines = [Engine(far, f"full-{n}", pid=n) for n in range(1, 4)]
        for engine in engines:
            await engine.open(SPEC)
        if why is Code.CLOSING:
            far.closing = True
        elif why is Code.FORBIDDEN:
            await engines[0].call(wire.Reset(engines[0].opened.cache))
        else:
            for n, engine in enumerate(engines, 1):
                await engine.reserve(tokens(*range(10_000 * n, 10_000 * n + 600)))
        ahead = items(PATH, range(9))
        assert await pair.tier.offer(pair.home, pair.shared, PATH, (), ahead=ahead) is None
        assert pair.tier.counts["peer_refused"] == 1
        assert far.parts.counts["peer_unwanted"] == 9
        assert pair.tier.status()[0]["idle"] == 1
        far.closing = False
        assert await pair.tier.find(pair.shared, PATH, 0) == []
        assert pair.tier.counts["peer_failures"] == 0
        for engine in engines:
            engine.leave()


async def test_wrong_bytes_in_an_offer_are_not_served_from_there_on(tmp_path: Path) -> None:
    """The fourth of nine pages is not what its checksum says: three are served, and the rest is asked for again."""
    ahead = items(PATH, range(9))
    ahead.places[3].views[0][17] ^= 1
    async with direct(tmp_path) as pair:
        sink = await pair.tier.offer(pair.home, pair.shared, PATH, (), ahead=ahead)
        assert (sink.stored, sink.picks) == (3, picks_of((0, at) for at in range(3, 9)))
        sink.close()
        assert pair.far.parts.counts["peer_checksum"] == 1
        assert await served(pair, PATH) == 3


LIES = {
    "more bytes": lambda load: replace(load, nbytes=CHUNK_BYTES + 1),
    "other bytes": lambda load: replace(load, nbytes=load.nbytes - 1),
    "packed": lambda load: replace(load, packed=True),
    "less than nothing": lambda load: replace(load, nbytes=-1),
    "other sums": lambda load: replace(load, sums=load.sums[8:]),
    "another path": lambda load: replace(load, echo=bytes(16)),
    "no such pages": lambda load: replace(load, picks=picks_of([(0, 9)])),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("lie", LIES)
async def test_who_lies_about_what_comes_with_an_offer_is_hung_up_on_or_ignored(
    tmp_path: Path, lie: str, *, known: bool
) -> None:
    """Whether the cache is known or refused: nothing is served, no slot stays taken, others are served."""
    ahead = items(PATH, range(1))
    async with direct(tmp_path) as pair:
        sink = await pair.tier.offer(pair.home, pair.shared, PATH, ())
        pipe, cache = sink._pipe, pair.shared.id if known else bytes(32)
        load = frames.Load(picks_of([(0, 0)]), packed_sums(ahead.sums), SIZE, echo(pair.shared.id, PATH))
        await pipe.send(frames.Offer(cache, PATH, load=LIES[lie](load)))
        with contextlib.suppress(OSError, EOFError, KvtierError):
            await pipe.stream.send(ahead.places[0].views[0].tobytes())
            assert not (await pipe.receive(frames.Wanted)).stored
        pipe.close()
        sink.close()
        await until(lambda: idle(pair.far) == [])
        assert await served(pair, PATH) == 0
        (await offered(pair, PATH, range(9))).close()
        assert await served(pair, PATH) == 9


async def test_memory_for_what_is_not_wanted_is_bounded() -> None:
    """A piece that nobody wants goes through a quarter MiB."""
    place = taking.scrap(0, 0, CHUNK_BYTES - 5)
    assert sum(len(view) for view in place.views) == CHUNK_BYTES - 5
    assert {view.ctypes.data for view in place.views} == {place.views[0].ctypes.data}
    assert len(place.views[0]) == taking.SCRAP


@pytest.mark.parametrize("cache", [SPEC, KEYED], ids=["path", "keys"])
async def test_what_an_engine_commits_reaches_its_home_in_one_question(
    tmp_path: Path, loads: list[frames.Load], cache: CacheSpec
) -> None:
    """Pages, or keys, that were just computed go with the offer; those of a prompt that goes on, too."""
    async with direct(tmp_path, cache=cache) as pair, storing(None) as near:
        tier = Direct({"near": ("127.0.0.1", 1), "far": pair.tier._nodes["far"].address}, pair.tier.terms, replicas=2)
        near.join_fleet(tier)
        near.parts.peers.start()
        engine = Engine(near)
        await engine.open(cache)
        await until(tier.answers)
        if cache.keyed:
            reply = await engine.call(wire.ReserveKeys(engine.opened.cache, 0, bytes(16) + b"1" * 16))
            await engine.call(wire.Commit(reply.reservation, 0, 2))
            total = 2
        else:
            assert await engine.put(PATH[: 4 * SPEC.stride]) == 4
            await until(lambda: pair.far.parts.counts["pages_taken_peer"] == 4)
            assert await engine.put(PATH, 4) == 5
            total = 9
        await until(lambda: pair.far.parts.counts["pages_taken_peer"] == total)
        await until(lambda: near.parts.counts["pages_pushed_peer"] == total)
        assert loads == []
        assert pair.far.parts.counts["peer_unwanted"] == 0
        engine.leave()
