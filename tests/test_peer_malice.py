"""Hosts that hold the fleet's key and mean ill, and strangers in crowds: what they cost is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from engines import Engine, idle, spec, tokens
from fleetkit import free_ports, write_secrets
from kvtier import wire
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.peer import direct as direct_tier
from kvtier.peer import frames, patience
from kvtier.peer.base import Pick
from kvtier.peer.direct import Direct
from kvtier.peer.fame import Fame
from kvtier.peer.items import items_of, span_of
from kvtier.peer.pipe import Pipe
from kvtier.peer.secrets import read
from kvtier.peer.terms import Terms
from kvtier.server import home, visit
from kvtier.server.home import Home
from kvtier.store import Store
from kvtier.store.peers import Guest
from kvtier.types import Kind, KvtierError
from peerkit import SPEC, blank, direct, right
from storekit import storing, until

PATH = tokens(*range(1, 10))
KEYED = spec(key_bytes=16)
Stored = Callable[[int], int]
"""How many pages a home says it serves of so many that were sent."""


async def _want(pipe: Pipe, terms: Terms, said: Stored) -> None:
    """Want all of whatever is offered, and again when it was sent."""
    wanted, cache = frames.Wanted(), SPEC
    await pipe.answer(terms, b"greed" * 2)
    while True:
        message = await pipe.receive(frames.Message)
        load = message if isinstance(message, frames.Load) else getattr(message, "load", None)
        if load is not None:
            await pipe.stream.exactly(load.nbytes)
        if isinstance(message, frames.Use):
            cache = message.spec
        if isinstance(message, frames.Offer):
            wanted = frames.Wanted(span_of(1, range(len(message.keys) // cache.stride)))
        if isinstance(message, frames.Load):
            await pipe.send(frames.Stored(said(len(message.sums) // 8)))
        elif isinstance(message, frames.Find):
            await pipe.send(frames.Found(0))
        else:
            await pipe.send(wanted if isinstance(message, frames.Offer | frames.More) else frames.Done())


@contextlib.asynccontextmanager
async def greedy(tmp_path: Path, said: Stored) -> AsyncIterator[Store]:
    """A store whose one peer wants all of a path, takes it, says how much that was, and wants all of it again."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "far"), free_ports(2), strict=True)}
    loop, listener = asyncio.get_running_loop(), socket.create_server(nodes["far"])
    listener.setblocking(False)

    async def serve(sock: socket.socket) -> None:
        pipe = Pipe(sock)
        with contextlib.suppress(OSError, EOFError, KvtierError), contextlib.closing(pipe):
            await _want(pipe, Terms("far", secrets), said)

    async def accept() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(serve((await loop.sock_accept(listener))[0]))

    accepting = asyncio.create_task(accept())
    async with storing(None) as near:
        near.join_fleet(Direct(nodes, Terms("near", secrets, 5.0)))
        near.parts.peers.start()
        await until(near.parts.peers.tier.answers)
        yield near
    accepting.cancel()
    await asyncio.gather(accepting, return_exceptions=True)
    listener.close()


@pytest.mark.parametrize("cache", [SPEC, KEYED], ids=["path", "keys"])
async def test_a_home_that_wants_the_same_pages_for_ever_gets_them_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: CacheSpec
) -> None:
    """It takes all of them and asks for all of them again: the push ends, and what it held is let go of."""
    monkeypatch.setattr("kvtier.store.pushes.RETRY_S", 0.01)
    async with greedy(tmp_path, lambda sent: sent) as near:
        engine = Engine(near)
        await engine.open(cache)
        if cache.keyed:
            reply = await engine.call(wire.ReserveKeys(engine.opened.cache, 0, bytes(16) + b"1" * 16))
            await engine.call(wire.Commit(reply.reservation, 0, 2))
        else:
            assert await engine.put(PATH) == 9
        await until(lambda: near.parts.peers.pushes.waiting == 0, 5.0)
        assert near.parts.counts["pages_pushed_peer"] < 100
        assert near.parts.counts["peer_push_dropped_home"] > 0
        engine.leave()
        assert idle(near) == []


@pytest.mark.parametrize("more", [1 << 63, 1, -1 << 40])
async def test_a_home_that_says_it_serves_more_than_it_got_or_less_than_nothing_is_not_believed(
    tmp_path: Path, more: int
) -> None:
    """What was pushed is what was sent, and the counters can be told to whoever asks."""
    async with greedy(tmp_path, lambda sent: sent + more - (more == 1 << 63)) as near:
        engine = Engine(near)
        await engine.open(SPEC)
        assert await engine.put(PATH) == 9
        assert await engine.put(tokens(*range(20, 29))) == 9
        await until(lambda: near.parts.peers.tier.counts["peer_failures"], 5.0)
        assert near.parts.counts["pages_pushed_peer"] == 0
        msgspec.msgpack.encode(dict(near.parts.counts))
        engine.leave()


def test_a_frame_of_more_picks_than_there_are_groups_is_refused_before_they_are_made() -> None:
    """Sixteen MiB of empty picks, or of page numbers, would hold the loop up for seconds."""
    empty = msgspec.msgpack.encode(Pick(0, b""))
    for tag in (7, 9, 11, 13):
        fields = {"t": tag, "cache": b"c" * 32, "keys": b"k"} if tag in {7, 11} else {"t": tag}
        name = "spare" if tag == 11 else "picks"
        head = msgspec.msgpack.encode(fields)
        picks = b"\xdd" + struct.pack(">I", 17) + empty * 17
        many = bytes([head[0] + 1]) + head[1:] + msgspec.msgpack.encode(name) + picks
        with pytest.raises(KvtierError, match="length"):
            frames.decode(many)
    with pytest.raises(KvtierError, match="at most"):
        items_of(SPEC, (Pick(0, bytes(4 * frames.MAX_ITEMS + 4)),), 1 << 30)


async def test_what_a_home_reserved_is_given_back_as_soon_as_nobody_sends_it(tmp_path: Path, monkeypatch) -> None:
    """Pages that left host before their turn are not sent: engines there see nothing pending for want of them."""
    monkeypatch.setattr(visit, "TAKE_S", 3600.0)
    async with direct(tmp_path) as pair:
        sink = await pair.tier.offer("far", pair.shared, PATH, ())
        assert sink.picks
        sink.close()
        await until(lambda: idle(pair.far) == [], 5.0)
        assert pair.tier.answers()
        assert pair.tier.counts["peer_failures"] == 0


async def test_strangers_that_fill_all_places_keep_no_member_out(tmp_path: Path, monkeypatch) -> None:
    """As many as may connect without a key, and as many again, say nothing: a member is served all the same."""
    monkeypatch.setattr(visit, "KNOCK_S", 3600.0)
    monkeypatch.setattr(home, "MAX_NEW", 16)
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    (port,) = free_ports(1)
    async with storing(None) as store:
        served = Home(store, Terms("b", secrets, 1.0), ("127.0.0.1", port), Fame())
        served.start()
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(32)]
        await until(lambda: len(served._tasks) >= 16)
        pipe = Pipe(socket.create_connection(("127.0.0.1", port)))
        try:
            async with asyncio.timeout(5.0):
                await pipe.knock(Terms("a", secrets), "b")
                await pipe.ask(frames.Ping(), frames.Done)
            more = [socket.create_connection(("127.0.0.1", port)) for _ in range(32)]
            await until(lambda: len(served._tasks) <= 17)
            await pipe.ask(frames.Ping(), frames.Done)
            for each in more:
                each.close()
        finally:
            pipe.close()
            await served.close()
            for each in strangers:
                each.close()


async def test_an_item_whose_checksum_is_zero_is_not_taken_and_nothing_of_it_stays() -> None:
    """Zero is what is not known yet: a peer's is a miss, large or small, and its slots return."""
    for cell in (1000, 4 << 20):
        cache_spec = spec((GroupSpec(Kind.FULL, 1, 1, cell),))
        async with storing(None, 64 << 20) as store:
            guest = Guest(store.parts, "peers", store.cap_bytes)
            cache = store.parts.cache(cache_spec, "uid:0", 0)
            res, _ = await guest.reserve(store.tokens, cache, tokens(1, 2), 0, {})
            assert guest.commit(store.commits, res, {(0, 0): 0, (0, 1): 5}) == 0
            assert idle(store) == []
            guest.end(store.commits)


async def test_a_source_that_hung_up_while_others_were_fetched_from_is_asked_again(tmp_path: Path, monkeypatch) -> None:
    """Found, and idle for longer than a home bears, as while a long prompt comes from another one: it is not blamed."""
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    monkeypatch.setattr(visit, "IDLE_S", 0.05)
    monkeypatch.setattr(direct_tier, "AHEAD_BYTES", 0)
    async with direct(tmp_path) as pair:
        engine = Engine(pair.far)
        await engine.open(SPEC)
        assert await engine.put(PATH) == 9
        engine.leave()
        (source,) = await pair.tier.find(pair.shared, PATH, 0)
        await until(lambda: not source._pipe.stream.quiet)
        places = blank(range(9))
        assert None not in await source.fetch(places)
        assert all(right(place, PATH) for place in places)
        source.close()
        assert pair.tier.counts["peer_failures"] == 0
