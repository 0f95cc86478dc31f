"""How peers talk: packed where the link is slow, no faster than they may, in TLS; and what a secret keeps apart."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
from msgspec.structs import replace

from engineproc import SPEC as LIAR_SPEC
from engineproc import path_keys
from engines import Engine, content, idle, spec, tokens
from fleetkit import free_ports, write_secrets
from kvtier import quant
from kvtier.config import load
from kvtier.identity import GroupSpec
from kvtier.peer import frames, items, node, speed, turns
from kvtier.peer.base import Place, Shared
from kvtier.peer.direct import Direct
from kvtier.peer.fame import MOST, Fame
from kvtier.peer.items import echo, picks_of
from kvtier.peer.members import keys_of
from kvtier.peer.pace import STEP, Bucket
from kvtier.peer.pipe import Pipe
from kvtier.peer.secrets import read
from kvtier.peer.terms import MAX_OPS, MIN_RATE, Terms
from kvtier.peer.tls import Certs
from kvtier.server.home import Home
from kvtier.server.taking import Taking
from kvtier.store import Store
from kvtier.types import Kind, KvtierError
from liar import MUTE, Liar
from storekit import storing, until

PAGE = 64 << 10
SPEC = spec((GroupSpec(Kind.FULL, 1, 1, PAGE),))
PATH = tokens(*range(1, 10))
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@contextlib.asynccontextmanager
async def pair(
    near: Terms, far: Terms, pool: ThreadPoolExecutor | None = None, fame: Fame | None = None
) -> AsyncIterator[tuple[Direct, Store]]:
    """A tier `near`, and the store of its peer `far` (with these threads, and that fame), in this process."""
    nodes = {name: ("127.0.0.1", port) for name, port in zip((near.name, far.name), free_ports(2), strict=True)}
    async with storing(None) as store:
        home = Home(store, far, nodes[far.name], fame or Fame())
        home.pool = pool or home.pool
        home.start()
        tier = Direct(nodes, near)
        tier.start()
        try:
            yield tier, store
            await until(lambda: idle(store) == [])
        finally:
            await tier.close()
            await home.close()


def smooth(page: int) -> np.ndarray:
    """A page of bf16 numbers around one, as KV has them: signs and exponents say little."""
    rng = np.random.default_rng(page)
    return (rng.normal(1.0, 0.1, PAGE // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


async def give(tier: Direct, keys: bytes, pages: int) -> int:
    """Push smooth pages of a path; how many are served there."""
    places = [Place(0, at, [smooth(at)]) for at in range(pages)]
    sink = await tier.offer("far", tier.shared(SPEC, "uid:0", 0), keys, ())
    served = await sink.send(places, [xxhash.xxh3_64_intdigest(place.views[0]) for place in places])
    sink.close()
    return served


async def take(tier: Direct, keys: bytes, pages: int) -> None:
    """Fetch them, and find each bit exact."""
    (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), keys, 0)
    places = [Place(0, at, [np.zeros(PAGE, np.uint8)]) for at in range(pages)]
    assert None not in await source.fetch(places)
    source.close()
    assert all(np.array_equal(place.views[0], smooth(place.page)) for place in places)


@pytest.mark.parametrize("sealed", [False, True])
async def test_on_a_slow_link_pages_travel_packed_and_arrive_bit_exact(tmp_path: Path, monkeypatch, sealed) -> None:
    """After a transfer at 8 MiB/s the next are packed, both ways, under a seal too; each page is what was stored."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    if sealed:
        monkeypatch.setattr(Pipe, "local", property(lambda _: False))
    async with pair(Terms("near", secrets, 5.0, rate=8 << 20), Terms("far", secrets, 5.0, rate=8 << 20)) as (tier, far):
        await until(lambda: tier.status()[0]["up"])
        raw = tokens(50, 51, 52, 53, 54)
        assert await give(tier, raw, 5) == 5
        await take(tier, raw, 5)
        counts, before = far.parts.counts, 5 * PAGE
        await until(lambda: counts["bytes_host_to_peer"] == before)
        assert counts["peer_packed"] == 0, "nothing was known of the link"
        assert await give(tier, PATH, 9) == 9
        await take(tier, PATH, 9)
        await until(lambda: counts["peer_packed"] == 1)
        assert 0 < counts["bytes_host_to_peer"] - before < 0.85 * 9 * PAGE
        assert counts["peer_checksum"] == tier.counts["peer_checksum"] == 0


async def test_a_packed_page_that_is_damaged_or_too_large_is_not_served(tmp_path: Path) -> None:
    """Noise as a frame, a frame of another size, and a length beyond the page's: none is served, nothing leaks."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0)) as (tier, far):
        await until(lambda: tier.status()[0]["up"])
        for wrong in (b"\x10\0\0\0" + b"\x55" * 16, b"\x08\0\0\0\xff\xff\xff\x7f\0\0\0\0", b"\xff\xff\xff\xff"):
            sink = await tier.offer("far", tier.shared(SPEC, "uid:0", 0), PATH, ())
            pipe = sink._pipe
            sums = np.array([xxhash.xxh3_64_intdigest(smooth(0))], "<u8").tobytes()
            pick = (frames.Pick(0, np.array([0], "<i4").tobytes()),)
            await pipe.send(frames.Load(pick, sums, PAGE, sink._echo, packed=True))
            await asyncio.get_running_loop().sock_sendall(pipe.stream.sock, wrong)
            with contextlib.suppress(OSError, EOFError, KvtierError):
                assert (await pipe.receive(frames.Stored)).pages == 0
            sink.close()
            await until(lambda: idle(far) == [])
        engine = Engine(far)
        await engine.open(SPEC)
        assert await engine.get(PATH) == 0
        engine.leave()


async def test_a_prompt_is_as_hot_as_it_is_asked_for_in_any_number_of_pieces(tmp_path: Path, monkeypatch) -> None:
    """Nine pieces of one path, fetched one by one, count as one fetch; the same once more is the second."""
    monkeypatch.setattr(items, "CHUNK_BYTES", PAGE)
    secrets, fame = read(write_secrets(tmp_path / "secrets", ["uid:0"])), Fame()
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0), fame=fame) as (tier, far):
        await until(lambda: tier.status()[0]["up"])
        engine = Engine(far)
        await engine.open(SPEC)
        assert await engine.put(PATH) == 9
        engine.leave()
        for times in (1, 2):
            (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), PATH, 0)
            for at in range(9):
                assert None not in await source.fetch([Place(0, at, [np.zeros(PAGE, np.uint8)])])
            source.close()
            (score,) = fame._scores.values()
            assert times - 1 < score.fetches <= times


async def test_bytes_that_are_sent_before_there_is_a_thread_are_counted(tmp_path: Path, monkeypatch) -> None:
    """A transfer of nine pages, of which one goes at once and the rest in a thread, counts nine."""
    monkeypatch.setattr(turns, "SMALL", PAGE)
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0)) as (tier, far):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        await take(tier, PATH, 9)
        await until(lambda: far.parts.counts["pages_served_peer"] == 9)
        assert far.parts.counts["bytes_host_to_peer"] == 9 * PAGE


async def test_what_others_said_of_a_prompt_is_not_passed_on(tmp_path: Path) -> None:
    """A home that was told of more homes tells who asks it what it counted itself, which is none."""
    secrets, fame = read(write_secrets(tmp_path / "secrets", ["uid:0"])), Fame()
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0), fame=fame) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        key, now = keys_of(tier.shared(SPEC, "uid:0", 0), PATH)[0], time.monotonic()
        fame.tell(key, MOST, now)
        assert fame.more(key, now) == MOST
        await take(tier, PATH, 9)
        assert tier.fame.more(key, time.monotonic()) == 0


async def test_what_was_offered_is_not_taken_for_what_was_asked_about_next(tmp_path: Path) -> None:
    """A path is offered, another one asked about, then pages come under the second one's echo: none is served."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    other, page = tokens(*range(20, 29)), smooth(0)
    sums = np.array([xxhash.xxh3_64_intdigest(page)], "<u8").tobytes()
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0)) as (tier, far):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, other, 9) == 9
        shared = tier.shared(SPEC, "uid:0", 0)
        for turn in (frames.Find(shared.id, other), frames.Offer(shared.id, other, (frames.Pick(7, b""),))):
            sink = await tier.offer("far", shared, PATH, ())
            with contextlib.suppress(KvtierError):
                await sink._pipe.ask(turn, frames.Found)
            await sink._pipe.send(frames.Load(picks_of([(0, 0)]), sums, PAGE, echo(shared.id, other)))
            with contextlib.suppress(OSError, EOFError, KvtierError):
                await asyncio.get_running_loop().sock_sendall(sink._pipe.stream.sock, page.tobytes())
                await sink._pipe.receive(frames.Stored)
            sink.close()
            await until(lambda: idle(far) == [])
            engine = Engine(far)
            await engine.open(SPEC)
            assert await engine.get(PATH) == 0
            engine.leave()


async def test_page_numbers_that_are_none_are_refused_by_name_and_the_connection_goes_on(tmp_path: Path) -> None:
    """Picks of three bytes in a question for pages that are here: bad_request, and the next question is answered."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        sink = await tier.offer("far", tier.shared(SPEC, "uid:0", 0), PATH, ())
        with pytest.raises(frames.Refusal, match="int32"):
            await sink._pipe.ask(frames.Find(sink._shared.id, PATH, (frames.Pick(0, b"abc"),)), frames.Found)
        assert (await sink._pipe.ask(frames.Find(sink._shared.id, PATH), frames.Found)).pages == 9
        sink.close()


async def test_a_question_that_the_socket_does_not_take_at_once_is_asked_whole(tmp_path: Path) -> None:
    """Two hosts, a connection that was used before, and a path longer than a small buffer: it is found in time."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 2.0), Terms("far", secrets, 2.0)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        for pipe in tier._nodes["far"]._idle:
            pipe.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), PATH + tokens(*range(100, 400_000)), 0)
        source.close()
        assert source.pages == 9
        assert tier.counts["peer_failures"] == 0


async def test_a_cancelled_fetch_that_asks_again_is_cancelled(tmp_path: Path, monkeypatch) -> None:
    """It asks once more on another connection, without one of its own: the cancellation is not taken for a miss."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), PATH, 0)
        asked = asyncio.Event()

        async def ask(*_: object) -> None:
            asked.set()
            await asyncio.sleep(3600)

        monkeypatch.setattr(tier.questions, "ask", ask)
        source._load = frames.Load((), b"", 0, b"")  # other pages come than are wanted
        task = asyncio.create_task(source.fetch([Place(0, 0, [np.zeros(PAGE, np.uint8)])]))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_quantized_kv_travels_as_its_small_cells_and_answers_nobody_else(tmp_path: Path) -> None:
    """KV8: a little more than half the bytes, bit exact; its pages and the exact ones never answer for each other."""
    page_tokens, dim = 16, 64
    exact = replace(SPEC, page_tokens=page_tokens, groups=(GroupSpec(Kind.FULL, 1, 1, page_tokens * 2 * dim * 2),))
    size = quant.cell(quant.codec("int8"), page_tokens, (dim, dim)).bytes
    small = replace(exact, codec="int8", groups=(GroupSpec(Kind.FULL, 1, 1, size),))
    assert size < 0.6 * exact.groups[0].item_bytes
    keys = (bytes(range(251)) * 99)[: 4 * exact.stride]
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0)) as (tier, far):
        await until(lambda: tier.status()[0]["up"])
        for cache, other in ((small, exact), (exact, small)):
            path = keys if cache is small else keys[::-1]
            engine = Engine(far)
            await engine.open(cache)
            assert await engine.put(path) == 4
            engine.leave()
            assert await tier.find(tier.shared(other, "uid:0", 0), path, 0) == []
            (source,) = await tier.find(tier.shared(cache, "uid:0", 0), path, 0)
            places = [Place(0, at, [np.zeros(cache.groups[0].item_bytes, np.uint8)]) for at in range(4)]
            assert None not in await source.fetch(places)
            source.close()
            for place in places:
                begin = path[: (place.page + 1) * cache.stride]
                assert np.array_equal(place.views[0], content(begin, 0, cache.groups[0].item_bytes))


@pytest.mark.parametrize("used", [False, True])
async def test_a_home_that_says_nothing_holds_up_no_other_one(tmp_path: Path, *, used: bool) -> None:
    """Where the home that is asked first is mute, another one is asked before the deadline, and serves.

    On a connection that was used before, too; who asks there and is cancelled leaves room for others.
    """
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    ports = dict(zip(("near", "far", "z"), free_ports(3), strict=True))
    nodes = {name: ("127.0.0.1", port) for name, port in ports.items()}
    async with storing(None) as store:
        home = Home(store, Terms("far", secrets, 30.0), nodes["far"], Fame())
        home.start()
        tier = Direct(nodes, Terms("near", secrets, 30.0), replicas=3)
        tier.start()
        shared = tier.shared(SPEC, "uid:0", 0)
        paths = [tokens(n, n + 1) for n in range(1, 99)]
        path = next(p for p in paths if _first(tier, shared, p) == "z")
        try:
            with Liar(secrets, ports["z"], MUTE):
                await until(lambda: all(row["up"] for row in tier.status()))
                assert await give(tier, path, 2) == 2
                if used:
                    (await tier.offer("z", shared, path, ())).close()
                    task = asyncio.create_task(tier.find(shared, path, 0))
                    await until(lambda: tier._nodes["z"]._room._value == MAX_OPS - 1)
                    task.cancel()
                    await asyncio.wait([task])
                    assert tier._nodes["z"]._room._value == MAX_OPS
                    (await tier.offer("z", shared, path, ())).close()
                (source,) = await tier.find(shared, path, 0)
                assert (source.node, source.pages) == ("far", 2)
                source.close()
                assert tier.counts["peer_asked"] == 2
                assert all(row["up"] for row in tier.status()), "nobody has failed: the deadline is not over"
                await tier.close()
        finally:
            await home.close()


def _first(tier: Direct, shared: Shared, path: bytes) -> str:
    """The peer that is asked first."""
    return next(name for name in tier._members.turn(keys_of(shared, path)[0]) if name != "near")


def test_packing_is_chosen_by_the_links_speed() -> None:
    """Slower than the codec: packed, but for one transfer in so many; faster, or where nothing shrinks: as it is."""
    packing, slow, fast = speed.Packing(), speed.Link(), speed.Link()
    assert not packing.pays(slow, b"c", 8)
    slow.note(1 << 20, (1 << 20) / 20e6)
    fast.note(1 << 20, (1 << 20) / 2e9)
    fast.note(100, 10.0)  # says nothing of a link
    assert [packing.pays(slow, b"c", 8) for _ in range(speed.AGAIN * 2)].count(False) == 2
    assert not any(packing.pays(fast, b"c", 8) for _ in range(speed.AGAIN))
    for _ in range(20):
        packing.packed(b"noise", 1 << 20, 1 << 20, 1e-3)
    assert not any(packing.pays(slow, b"noise", 8) for _ in range(speed.AGAIN))


def test_a_bucket_lets_no_more_through_than_its_rate() -> None:
    """The waits of any takes add up to the bytes before each at that rate."""
    bucket, rate = Bucket(1 << 20), 1 << 20
    waits = [bucket.take(1 << 18) for _ in range(9)]
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert 1.5 < waits[-1] <= 8 * (1 << 18) / rate


async def test_what_a_peer_gets_and_gives_is_held_to_the_rate(tmp_path: Path) -> None:
    """Pages of 576 KiB at 8 MiB/s take at least the time that the rate says, each way."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    loop = asyncio.get_running_loop()
    for near, far in ((8 << 20, 0), (0, 8 << 20)):
        async with pair(Terms("near", secrets, 5.0, rate=near), Terms("far", secrets, 5.0, rate=far)) as (tier, _):
            await until(lambda tier=tier: tier.status()[0]["up"])
            begin = loop.time()
            assert await give(tier, PATH, 9) == 9
            await take(tier, PATH, 9)
            assert loop.time() - begin > 2 * 0.9 * 8 * PAGE / (8 << 20)


async def test_both_ends_are_as_patient_as_the_slower_rate_needs(tmp_path: Path) -> None:
    """A rate on either end only: both give as many transfers as may share it the time that they need."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    rate, size = 2 << 20, 9 * PAGE
    for near, far in ((rate, 0), (0, rate), (rate, 2 * rate)):
        terms = Terms("near", secrets, rate=near), Terms("far", secrets, rate=far)
        ends = [Pipe(sock) for sock in socket.socketpair()]
        await asyncio.gather(ends[0].knock(terms[0], "far", sealed=True), ends[1].answer(terms[1], b"life" * 2))
        assert all(end.within(size) > MAX_OPS * size / rate for end in ends)
        for end in ends:
            end.close()


async def test_at_a_rate_a_peer_that_stops_is_a_miss_long_before_its_pages_would_have_been_there(tmp_path) -> None:
    """Half of 60 pages come at 4 MiB/s, then nothing: the fetch ends, not in the time that all of them may take."""
    secrets, keys = read(write_secrets(tmp_path / "secrets", ["uid:0"])), path_keys(list(range(60)))
    nodes = {name: ("127.0.0.1", port) for name, port in zip(("near", "z"), free_ports(2), strict=True)}
    terms = Terms("near", secrets, 0.5, rate=4 << 20)
    with Liar(secrets, nodes["z"][1], "hang"):
        tier = Direct(nodes, terms)
        tier.start()
        try:
            await until(lambda: tier.status()[0]["up"])
            shared = tier.shared(LIAR_SPEC, "uid:0", 0)
            (source,) = await tier.find(shared, keys, 0)
            size = LIAR_SPEC.groups[0].item_bytes
            begin = time.monotonic()
            sums = await source.fetch([Place(0, at, [np.zeros(size, np.uint8)]) for at in range(60)])
            source.close()
            assert time.monotonic() - begin < 0.5 * terms.within(60 * size)
            assert sums[0] is not None
            assert sums[-1] is None
        finally:
            await tier.close()


async def test_at_a_rate_a_home_that_stops_holds_up_no_push_longer_than_a_turn(tmp_path: Path, monkeypatch) -> None:
    """It takes bytes into its socket and says nothing: the push fails, not in the time that all of them may take."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    near, far = (Terms(name, secrets, 0.5, rate=MIN_RATE) for name in ("near", "far"))
    gate = asyncio.Event()

    async def take(*_: object) -> None:
        await gate.wait()
        raise EOFError

    monkeypatch.setattr(Taking, "take", take)
    async with pair(near, far) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            await give(tier, PATH, 9)
        assert time.monotonic() - begin < near.within(9 * PAGE)
        gate.set()


async def test_who_knocks_under_ever_new_names_gets_no_more_than_the_rate(tmp_path: Path) -> None:
    """Four names that are no member's, at once: all of what they fetch takes as long as it would take one of them."""
    secrets, rate = read(write_secrets(tmp_path / "secrets", ["uid:0"])), 2 << 20
    async with pair(Terms("near", secrets, 5.0), Terms("far", secrets, 5.0, rate=rate)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        far = tier._nodes["far"].address
        others = [Direct({name: far, "far": far}, Terms(name, secrets, 5.0)) for name in ("p", "q", "r", "s")]
        for each in others:
            each.start()
        await until(lambda: all(each.answers() for each in others))
        begin = time.monotonic()
        await asyncio.gather(*(take(each, PATH, 9) for each in others))
        assert time.monotonic() - begin > (4 * 9 * PAGE - STEP) / rate
        for each in others:
            await each.close()


async def test_as_many_transfers_as_may_share_the_lowest_rate_all_arrive(tmp_path: Path) -> None:
    """Eight at 1 MiB/s together, each waiting for its turn, with a short deadline: none is taken for a dead one."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    near, far = (Terms(name, secrets, 0.3, rate=MIN_RATE) for name in ("near", "far"))
    async with pair(near, far) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        await asyncio.gather(*(take(tier, PATH, 9) for _ in range(MAX_OPS)))
        assert tier.counts["peer_failures"] == 0


@pytest.mark.parametrize("end", ["near", "far"])
async def test_a_transfer_that_gets_no_thread_brings_nothing_and_nobody_is_blamed(tmp_path: Path, end) -> None:
    """The threads of one end are all taken: a fetch ends, the peer is up, and once they are free again pages come."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    far, gate = ThreadPoolExecutor(1), threading.Event()
    terms = [Terms(name, secrets, 2.0, rate=64 << 20) for name in ("near", "far")]
    async with pair(*terms, pool=far) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        pool = tier.pool if end == "near" else far
        try:
            for _ in range(pool._max_workers):
                pool.submit(gate.wait)
            (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), PATH, 0)
            assert await source.fetch([Place(0, at, [np.zeros(PAGE, np.uint8)]) for at in range(9)]) == [None] * 9
        finally:
            gate.set()
        assert tier.counts["peer_refused"] == 1
        assert tier.counts["peer_failures"] == 0
        await take(tier, PATH, 9)


async def test_the_time_of_a_transfer_begins_when_a_thread_has_its_turn(tmp_path: Path, monkeypatch) -> None:
    """One that waited for others' transfers here has as long as any other: the peer sends no faster for it."""
    monkeypatch.setattr(Pipe, "local", property(lambda _: True))
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    near, far = map(Pipe, socket.socketpair())
    knocked = near.knock(Terms("near", secrets), "far", sealed=False)
    await asyncio.gather(knocked, far.answer(Terms("far", secrets), b"life"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 0.5)
        assert await near.threaded(pool, lambda line: line._until - time.monotonic(), 64 << 20, 1.5) > 1.2
    for pipe in (near, far):
        pipe.close()


@pytest.mark.parametrize(
    ("frame", "altered"),
    [
        (frames.Knock, {"sealed": False}),
        (frames.Knock, {"rate": MIN_RATE}),
        (frames.Knock, {"nonce": bytes(16)}),
        (frames.Knock, {"name": "c"}),
        (frames.Challenge, {"nonce": bytes(16)}),
        (frames.Challenge, {"incarnation": b"other"}),
        (frames.Challenge, {"rate": MIN_RATE}),
    ],
    ids=str,
)
async def test_whatever_was_altered_on_the_way_of_the_first_two_frames_is_found_out(
    tmp_path: Path, monkeypatch, frame: type[frames.Message], altered: dict[str, object]
) -> None:
    """Somebody in between takes the seal away, sets a rate, changes a nonce: who asked goes no further."""
    monkeypatch.setattr(Pipe, "local", property(lambda _: True))
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    sockets = [*socket.socketpair(), *socket.socketpair()]
    near, left, right, far = map(Pipe, sockets)

    async def between() -> None:
        for come, go, kind in ((left, right, frames.Knock), (right, left, frames.Challenge)):
            message = await come.receive(kind)
            await go.send(replace(message, **altered) if kind is frame else message)

    met = await asyncio.gather(
        near.knock(Terms("near", secrets), "far", sealed=True),
        between(),
        far.answer(Terms("far", secrets), b"life"),
        return_exceptions=True,
    )
    for pipe in (near, left, right, far):
        pipe.close()
    assert isinstance(met[0], KvtierError)
    assert "fleet's key" in met[0].message


# -- TLS -------------------------------------------------------------------------------------------------------------


def openssl(*words: str) -> None:
    """One command."""
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def authority(home: Path, name: str = "ca") -> Path:
    """A CA; its files are name.pem and name.key."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(home / f"{name}.key")]
    openssl("req", "-x509", "-days", "2", "-subj", "/CN=ca", "-out", str(home / f"{name}.pem"), *key)
    return home / f"{name}.pem"


def certificate(home: Path, name: str, ca: Path, host: str = "") -> Certs:
    """A certificate made out to `host` (else its name), and its key, signed by that CA."""
    key, ask, cert, names = (home / f"{name}.{end}" for end in ("key", "csr", "crt", "ext"))
    names.write_text(f"subjectAltName=DNS:{host or name}\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-new", "-subj", f"/CN={name}", *curve, "-keyout", str(key), "-out", str(ask))
    signer = ["-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-CAcreateserial"]
    openssl("x509", "-req", "-days", "2", "-in", str(ask), *signer, "-extfile", str(names), "-out", str(cert))
    return Certs(cert, key, ca)


@needs_openssl
async def test_pages_travel_in_tls_without_a_fleets_key(tmp_path: Path, monkeypatch) -> None:
    """With certificates on both ends pages come and go bit exact, off loopback too."""
    path = write_secrets(tmp_path / "secrets", ["uid:0"])
    path.write_text(path.read_text().replace("fleet", "# fleet"))
    secrets = read(path, fleet=False)
    ca = authority(tmp_path)
    near, far = (Terms(name, secrets, 5.0, certificate(tmp_path, name, ca)) for name in ("near", "far"))
    monkeypatch.setattr(Pipe, "local", property(lambda _: False))
    async with pair(near, far) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        await take(tier, PATH, 9)


def met(near: Certs, far: Certs) -> bool:
    """Whether two ends come to terms, in memory."""
    ends = near.channel(server=False), far.channel(server=True)
    over = [False, False]
    try:
        for turn in range(6):
            mine, other = ends[turn % 2], ends[1 - turn % 2]
            over[turn % 2] = over[turn % 2] or mine.shake()
            if raw := mine.pending():
                other.arrived(raw)
    except ssl.SSLError:
        return False
    return all(over) and (ends[0].names(), ends[1].names()) == ({"far"}, {"near"})


@needs_openssl
def test_certificates_are_read_again_when_they_change(tmp_path: Path) -> None:
    """A certificate of another CA in its place is refused from the next connection on; half a file changes nothing."""
    ca, other = authority(tmp_path), authority(tmp_path, "other")
    near, far = certificate(tmp_path, "near", ca), certificate(tmp_path, "far", ca)
    assert met(near, far)
    (tmp_path / "near.crt").write_text("half")
    assert met(near, far)
    certificate(tmp_path, "near", other)
    assert not met(near, far)
    certificate(tmp_path, "near", ca)
    assert met(near, far)


@needs_openssl
async def test_a_wrong_certificate_or_none_gets_nothing(tmp_path: Path) -> None:
    """Another CA's, one made out to another name on either end, and a peer without TLS: none is ever up."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    ca, other = authority(tmp_path), authority(tmp_path, "other")
    good = {name: certificate(tmp_path, name, ca) for name in ("near", "far")}
    wrong = [
        (certificate(tmp_path, "stranger", other, "near"), good["far"]),
        (certificate(tmp_path, "false-near", ca, "far"), good["far"]),
        (good["near"], certificate(tmp_path, "false-far", ca, "near")),
        (None, good["far"]),
        (good["near"], None),
    ]
    for mine, theirs in wrong:
        async with pair(Terms("near", secrets, 1.0, mine), Terms("far", secrets, 1.0, theirs)) as (tier, _):
            await until(lambda tier=tier: tier.status()[0]["why"] not in {"", "not asked yet"})
            assert not tier.answers()


@needs_openssl
async def test_names_need_be_none_of_dns_and_letters_of_either_size_are_one(tmp_path: Path) -> None:
    """A host may be called by its address, with dots at odd places, or at length: its certificate has that name."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    ca = authority(tmp_path)
    for name, shown in (("Far", "far"), ("10.0.0.1", "10.0.0.1"), ("a..b", "a..b"), ("x" * 70, "X" * 70)):
        mine, theirs = certificate(tmp_path, "near", ca), certificate(tmp_path, "far", ca, shown)
        async with pair(Terms("near", secrets, 3.0, mine), Terms(name, secrets, 3.0, theirs)) as (tier, _):
            await until(lambda tier=tier: tier.status()[0]["up"], 5.0)
    theirs = certificate(tmp_path, "far", ca, "*.kv.example")  # which any service of the same CA may have
    async with pair(Terms("near", secrets, 3.0, mine), Terms("far.kv.example", secrets, 3.0, theirs)) as (tier, _):
        await until(lambda: "not made out to its name" in tier.status()[0]["why"], 5.0)


@needs_openssl
async def test_a_peer_that_takes_no_new_connection_is_not_up_because_an_old_one_answers(tmp_path, monkeypatch) -> None:
    """Its certificate was replaced by one that the peer does not take: that is found out once, not each second."""
    monkeypatch.setattr(node, "PING_S", 0.05)
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    ca, other = authority(tmp_path), authority(tmp_path, "other")
    mine, theirs = (certificate(tmp_path, name, ca) for name in ("near", "far"))
    async with pair(Terms("near", secrets, 2.0, mine), Terms("far", secrets, 2.0, theirs)) as (tier, _):
        await until(tier.answers)
        certificate(tmp_path, "near", other)
        for _ in range(20):
            assert await tier.find(tier.shared(SPEC, "uid:0", 0), PATH, 0) == []
            await asyncio.sleep(0.05)
        assert tier.counts["peer_down"] == 1
        certificate(tmp_path, "near", ca)
        await until(tier.answers)


async def test_a_peer_cannot_pass_on_what_another_one_shows_it(tmp_path: Path) -> None:
    """A host that is asked as `c` and passes nonces and proof on to `b`, as if it were the asker, is found out."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    asker = secrets.session((b"n" * 16, b"m" * 16), ("a", "c"))
    relayed = secrets.session((b"n" * 16, b"m" * 16), ("a", "b"))
    shared = secrets.shared(SPEC, "uid:0", 0)
    shown = secrets.proof("uid:0", frames.Session(asker, asker=True).id, shared.id)
    assert shown != secrets.proof("uid:0", frames.Session(relayed, asker=False).id, shared.id)
    (port,) = free_ports(1)
    async with storing(None) as store:
        home = Home(store, Terms("b", secrets, 1.0), ("127.0.0.1", port), Fame())
        home.start()
        try:
            pipe = Pipe(socket.create_connection(("127.0.0.1", port)))
            with pytest.raises(KvtierError, match="not c"):
                await pipe.knock(Terms("a", secrets), "c")
            pipe.close()
        finally:
            await home.close()


async def test_no_secret_is_logged_or_told(tmp_path: Path, caplog) -> None:
    """At the lowest level, with transfers and refusals of every kind: no key, in hex or as bytes, in logs or errors."""
    caplog.set_level("DEBUG")
    mine = read(write_secrets(tmp_path / "mine", ["uid:0"]))
    told = [repr(mine)]
    for theirs in (
        mine,
        read(write_secrets(tmp_path / "fleet", ["uid:0"], fleet="55" * 32)),
        read(write_secrets(tmp_path / "scope", ["uid:0"], secret="66" * 32)),
    ):
        near = Terms("near", mine, 1.0)
        async with pair(near, Terms("far", theirs, 1.0)) as (tier, _):
            await until(lambda tier=tier: tier.status()[0]["why"] != "not asked yet")
            sink = await tier.offer("far", tier.shared(SPEC, "uid:0", 0), PATH, ())
            assert (sink is None) == (theirs is not mine)
            if sink is not None:
                sink.close()
            told += [repr(tier.status()), repr(near), repr(dict(tier.counts))]
    told.append(caplog.text)
    for secret in ("11" * 32, "22" * 32, "55" * 32, "66" * 32):
        shown = {secret, repr(bytes.fromhex(secret))[2:-1]}
        assert not any(each in text for each in shown for text in told)


def test_certificates_come_all_three_or_none_and_a_rate_that_serves() -> None:
    """A lone certificate and a rate of a few bytes a second are refused by name."""
    base = {"peers.nodes": "a=10.0.0.1:9478,b=10.0.0.2:9478", "peers.name": "a", "peers.secrets": "x"}
    for more, field in (({"peers.tls_cert": "x"}, "peers.tls_cert"), ({"peers.rate": "1000"}, "peers.rate")):
        with pytest.raises(KvtierError) as refused:
            load(None, env={}, flags=base | more)
        assert refused.value.field == field


async def test_pages_that_wait_for_room_here_longer_than_the_peer_are_asked_for_again(
    tmp_path: Path, monkeypatch
) -> None:
    """They are on their way with the answer, into small buffers: nobody is blamed, and they come the second time."""
    real = Pipe.__init__

    def narrow(pipe: Pipe, sock: socket.socket, **more: object) -> None:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 32 << 10)
        real(pipe, sock, **more)

    monkeypatch.setattr(Pipe, "__init__", narrow)
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 0.4), Terms("far", secrets, 0.4)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        await take(tier, PATH, 9)
        (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), PATH, 0)
        assert source._load is not None
        await asyncio.sleep(1.2)
        places = [Place(0, at, [np.zeros(PAGE, np.uint8)]) for at in range(9)]
        assert None not in await source.fetch(places)
        source.close()
        assert all(np.array_equal(place.views[0], smooth(place.page)) for place in places)
        assert tier.counts["peer_failures"] == 0


# -- turns -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def crowded(tier: Direct, name: str = "far") -> AsyncIterator[list[Pipe]]:
    """As many requests under way to a peer as may be; those that the test did not end itself end after it."""
    node, until_s = tier._nodes[name], asyncio.get_running_loop().time() + 5.0
    pipes = [(await node.take(until_s))[0] for _ in range(MAX_OPS)]
    try:
        yield pipes
    finally:
        for pipe in pipes:
            node.give(pipe, good=True)


async def test_who_waits_for_its_turn_at_a_peer_has_its_deadline_after_that(tmp_path: Path) -> None:
    """Eight requests are under way for longer than a deadline: the ninth is served after them, not a miss."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 0.4), Terms("far", secrets, 5.0)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        assert await give(tier, PATH, 9) == 9
        async with crowded(tier) as pipes:
            task = asyncio.create_task(take(tier, PATH, 9))
            await asyncio.sleep(0.6)
            tier._nodes["far"].give(pipes.pop(), good=True)
            await task
        assert tier.counts["peer_busy"] == 0


async def test_who_waits_for_its_turn_at_a_peer_that_fails_is_let_go(tmp_path: Path) -> None:
    """The peer hangs: when those that are under way have ended nobody behind them waits for another deadline."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    async with pair(Terms("near", secrets, 60.0), Terms("far", secrets, 60.0)) as (tier, _):
        await until(lambda: tier.status()[0]["up"])
        shared = tier.shared(SPEC, "uid:0", 0)
        async with crowded(tier):
            tasks = [asyncio.create_task(tier.find(shared, tokens(n), 0)) for n in range(20)]
            await until(lambda: len(tier.questions.unasked) == 20)
            tier._nodes["far"].failed(TimeoutError())
        async with asyncio.timeout(10.0):
            assert await asyncio.gather(*tasks) == [[]] * 20
        assert tier._nodes["far"]._room._value == MAX_OPS


@pytest.mark.parametrize("has", [5, 9])
async def test_who_holds_one_peer_up_waits_for_no_turn_at_the_next(tmp_path: Path, has: int) -> None:
    """A home has the path, or a part of it: what it has is served though another home's turn does not come."""
    secrets = read(write_secrets(tmp_path / "secrets", ["uid:0"]))
    ports = dict(zip(("near", "far", "other"), free_ports(3), strict=True))
    nodes = {name: ("127.0.0.1", port) for name, port in ports.items()}
    async with storing(None) as store, storing(None) as empty:
        homes = [
            Home(each, Terms(name, secrets, 30.0), nodes[name], Fame())
            for each, name in ((store, "far"), (empty, "other"))
        ]
        tier = Direct(nodes, Terms("near", secrets, 1.0), replicas=3)
        for each in (*homes, tier):
            each.start()
        try:
            await until(lambda: all(row["up"] for row in tier.status()))
            assert await give(tier, PATH[: has * SPEC.stride], has) == has
            async with crowded(tier, "other"), asyncio.timeout(5.0):
                (source,) = await tier.find(tier.shared(SPEC, "uid:0", 0), PATH, 0)
            assert (source.node, source.pages) == ("far", has)
            source.close()
            await until(lambda: not tier.questions.unasked)
            await tier.close()
        finally:
            for home in homes:
                await home.close()
