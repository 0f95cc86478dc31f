"""The clients against a real daemon process: right bytes, and a daemon that is away is a miss within the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clientkit import (
    DEADLINE,
    FULL,
    KEYED,
    PAGE,
    RNG,
    ROWS,
    SPEC,
    content,
    keys,
    put,
    right,
    spec_of,
    status,
    stopped,
    until,
)
from kvtier import wire
from kvtier.client import AsyncClient, Away, Client, page_keys
from kvtier.client.layout import Item
from kvtier.demo.daemon import Daemon
from kvtier.identity import GroupSpec, Slice
from kvtier.types import Code, Kind, KvtierError, Presence

WINDOW = GroupSpec(Kind.WINDOW, 1, 2, 1000, window=6)
STATE = GroupSpec(Kind.STATE, 3, 1, 2 << 20)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client of the daemon that verifies every read."""
    with Client(daemon.socket, instance="engine", verify="always", events=True) as one:
        yield one


# -- page keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint32, ">i4", np.int16])
def test_page_keys_are_the_same_for_every_form_of_tokens(kind):
    """Lists and arrays of any integer type give raw little-endian int32 of whole pages."""
    tokens = list(range(11))
    given_tokens = kind(tokens) if kind in (list, tuple) else np.array(tokens, kind)
    assert page_keys(SPEC, given_tokens) == np.arange(8, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    "tokens",
    [[2**31], [-(2**31) - 1], np.array([2**40]), np.array([2**32 - 1], np.uint32), [1.5], [True], [[1]], ["a"]],
)
def test_page_keys_refuse_what_is_no_token(tokens):
    """A token that int32 cannot hold would become another token."""
    with pytest.raises(KvtierError) as caught:
        page_keys(SPEC, tokens)
    assert caught.value.code is Code.BAD_REQUEST


def test_page_keys_carry_the_digest_of_what_tokens_do_not_say():
    """Two images behind the same tokens differ; text pages have zeros; a digest of an unfinished page waits."""
    spec = spec_of(FULL, extras=True)
    tokens = list(range(9))
    plain = page_keys(spec, tokens)
    image = page_keys(spec, tokens, {1: b"i" * 16, 2: b"j" * 16})
    assert len(plain) == len(image) == 2 * spec.stride
    assert plain[16:32] == bytes(16)
    assert image[: spec.stride] == plain[: spec.stride]
    assert image[spec.stride + 16 :] == b"i" * 16
    for wrong in ({0: b"short"}, {-1: b"i" * 16}):
        with pytest.raises(KvtierError):
            page_keys(spec, tokens, wrong)
    with pytest.raises(KvtierError):
        page_keys(SPEC, tokens, {0: b"i" * 16})
    assert page_keys(SPEC, []) == b""


# -- layout --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 60), st.data())
def test_slices_of_an_item_are_the_same_in_one_slot_and_in_many(layers, heads, cell, slot, data):
    """Scatter and gather of a rank's cells equal numpy's indexing, however the item is cut into slots."""
    spec = GroupSpec(Kind.FULL, layers, heads, cell)
    l0, h0 = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, heads - 1))
    part = Slice(l0, data.draw(st.integers(l0 + 1, layers)), h0, data.draw(st.integers(h0 + 1, heads)))
    whole = RNG.integers(0, 256, (layers, heads, cell), dtype=np.uint8)
    slots = [np.zeros(slot, np.uint8) for _ in range(-(-spec.item_bytes // slot))]
    item = Item(spec, slots)
    item.write(whole.reshape(-1))
    got = np.empty(part.cells * cell, np.uint8)
    item.read_slice(part, got)
    assert np.array_equal(got, whole[part.l0 : part.l1, part.h0 : part.h1].reshape(-1))
    fresh = np.ascontiguousarray(255 - whole[part.l0 : part.l1, part.h0 : part.h1])
    item.write_slice(part, fresh)
    whole[part.l0 : part.l1, part.h0 : part.h1] = fresh
    half = spec.item_bytes // 2
    outs = [np.empty(half, np.uint8), np.empty(spec.item_bytes - half, np.uint8)]
    item.read([out for out in outs if out.size])
    assert np.array_equal(np.concatenate(outs), whole.reshape(-1))


# -- pages ---------------------------------------------------------------------------------------------------------


def test_pages_come_back_bit_for_bit(client):
    """What one reservation committed, a match finds, a lease reads in place and copies out."""
    cache = client.open(SPEC)
    put(cache, 5)
    path = cache.match(keys(7))
    assert (path.pages, path.pending) == (5, 0)
    assert sum(segment.pages for segment in path.segments) == 5
    with path.acquire() as lease:
        assert right(lease, 5)
        view = lease.view(0, 3)
        assert np.array_equal(view, content(3, FULL.item_bytes))
        assert not view.flags.writeable
        parts = [np.empty(100, np.uint8), np.empty(FULL.item_bytes - 100, np.uint8)]
        assert lease.read(0, 2, parts)
        assert np.array_equal(np.concatenate(parts), content(2, FULL.item_bytes))
        assert lease.view(0, 5) is None
        assert not lease.read(0, 5, np.empty(FULL.item_bytes, np.uint8))
    assert lease.view(0, 3) is None, "a released lease shows nothing"


def test_every_kind_of_group_comes_back_bit_for_bit(client):
    """Pages of full and window groups, and state points that lie in several slots."""
    spec = spec_of(FULL, WINDOW, STATE)
    cache = client.open(spec)
    assert cache.groups[2].slots_per_item > 1
    path = cache.match(keys(3, spec))
    with path.reserve(0, 3, wants=[(2, [2])], wait_ms=2000) as reserved:
        assert reserved.pages == 3, reserved.refused
        for page in range(3):
            assert reserved.write(0, page, content(page, FULL.item_bytes))
            assert reserved.write(1, page, content(50 + page, WINDOW.item_bytes))
        assert not reserved.write(2, 0, content(99, STATE.item_bytes)), "no state point was asked for there"
        assert reserved.write(2, 2, content(99, STATE.item_bytes))
        with pytest.raises(KvtierError, match="use write"):
            reserved.view(2, 2)
        assert reserved.commit() == 3
    with cache.match(keys(3, spec)).acquire() as lease:
        assert lease.pages == 3
        for group, page, seed in [(0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 1, 51), (1, 2, 52), (2, 2, 99)]:
            out = np.empty(spec.groups[group].item_bytes, np.uint8)
            assert lease.read(group, page, out), (group, page)
            assert np.array_equal(out, content(seed, out.size)), (group, page)


def test_ranks_write_and_read_their_slices_of_one_page(daemon):
    """Two ranks scatter their heads into the canonical page; any other rank layout gathers from it."""
    slices = [Slice(0, 2, 0, 2), Slice(0, 2, 2, 4)]
    whole = content(1, FULL.item_bytes).reshape(2, 4, 4096)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, part in enumerate(slices):
            client = stack.enter_context(Client(daemon.socket, instance="tp2"))
            ranks.append(client.open(SPEC, rank=rank, world=2, slices=[part]))
        share = (reserved := ranks[0].match(keys(1)).reserve(0, 1)).share()
        halves = [reserved, ranks[1].adopt(share)]
        for half, part in zip(halves, slices, strict=True):
            assert half.write(0, 0, np.ascontiguousarray(whole[:, part.h0 : part.h1]))
        assert [half.commit() for half in halves] == [0, 1]
        reader = stack.enter_context(Client(daemon.socket, instance="tp4", verify="always"))
        with reader.open(SPEC).match(keys(1)).acquire() as lease:
            for head in range(4):
                out = np.empty((2, 1, 4096), np.uint8)
                assert lease.shard(0, 0, Slice(0, 2, head, head + 1), out)
                assert np.array_equal(out, whole[:, head : head + 1])


def test_existence_of_many_keys_is_asked_in_as_many_requests_as_it_takes(client):
    """The daemon answers a bounded number of keys at a time, the client any number; leases are bounded by name."""
    cache, many = client.open(KEYED), RNG.bytes(16 * (2 * wire.MAX_ASKED + 1))
    with cache.reserve_keys(0, many[-16:], wait_ms=5000) as held:
        assert held.write(0, 0, content(1, KEYED.groups[0].item_bytes))
        assert held.commit() == 1
    states = cache.exists(0, many)
    assert states == bytes(2 * wire.MAX_ASKED) + bytes([Presence.HOST])
    with pytest.raises(KvtierError, match=f"1..{wire.MAX_KEYS} keys"):
        cache.acquire_keys(0, many)


def test_polls_send_only_new_keys(client):
    """A path grows by its handle; the daemon sees every page once."""
    cache = client.open(SPEC)
    put(cache, 6)
    path = cache.match(keys(2), request="r1")
    assert path.pages == 2
    assert path.extend(keys(4, first=2 * PAGE)).pages == 6
    assert path.extend().pages == 6
    assert path.keys == keys(6)
    path.close()
    assert path.extend().pages == 6, "a closed path matches again from its keys"


def test_a_handle_that_the_daemon_forgot_is_matched_again(client):
    """Engines never see that handles are bounded."""
    cache = client.open(SPEC)
    put(cache, 3)
    path = cache.match(keys(3))
    client.wait(client.submit(wire.Forget(path._handle), wire.Ok))
    with path.acquire() as lease:
        assert lease.pages == 3
    client.wait(client.submit(wire.Forget(path._handle), wire.Ok))
    assert path.extend().pages == 3


def test_a_committed_page_cannot_be_written_again(client):
    """Its bytes never change: write and view say no."""
    cache = client.open(SPEC)
    with cache.match(keys(2)).reserve(0, 2) as reserved:
        reserved.write(0, 0, content(0, FULL.item_bytes))
        assert reserved.commit(0, 1) == 1
        assert not reserved.write(0, 0, content(9, FULL.item_bytes))
        assert reserved.view(0, 0) is None
        view = reserved.view(0, 1)
        view[:] = content(1, FULL.item_bytes)
        assert reserved.commit(1) == 2
    with cache.match(keys(2)).acquire() as lease:
        assert right(lease, 2)


def test_a_reservation_left_by_an_exception_is_given_back(client, daemon):
    """The context manager aborts what was not committed."""
    cache = client.open(SPEC)
    with pytest.raises(ZeroDivisionError), cache.match(keys(4)).reserve(0, 4):
        _ = 1 / 0
    assert client.ping()
    (engine,) = status(daemon)["instances"]
    assert (engine["reservations"], engine["held_bytes"]) == (0, 0)


def test_pages_that_are_stored_already_are_skipped(client):
    """A second engine that reserves the same pages gets no slots for them."""
    cache = client.open(SPEC)
    put(cache, 2)
    with cache.match(keys(3)).reserve(0, 3) as reserved:
        assert reserved.pages == 3
        assert reserved.view(0, 0) is None
        assert not reserved.write(0, 1, content(1, FULL.item_bytes))
        assert reserved.write(0, 2, content(2, FULL.item_bytes))
        assert reserved.commit() == 3
    with cache.match(keys(3)).acquire() as lease:
        assert right(lease, 3)


def test_keyed_pages_are_found_by_their_keys_alone(client):
    """Existence, leases and reservations by opaque key, holes included."""
    cache = client.open(KEYED)
    names = [bytes([n]) * 16 for n in range(4)]
    with cache.reserve_keys(0, names[0] + names[2]) as reserved:
        assert reserved.pages == 2
        for at, seed in enumerate((0, 2)):
            assert reserved.write(0, at, content(seed, FULL.item_bytes))
        assert reserved.commit() == 2
    states = cache.exists(0, b"".join(names))
    assert [state != Presence.MISS for state in states] == [True, False, True, False]
    with cache.acquire_keys(0, b"".join(names)) as lease:
        assert lease.view(0, 1) is None
        assert np.array_equal(lease.view(0, 2), content(2, FULL.item_bytes))


def test_durable_events_and_flush_say_when_pages_are_on_disk(client):
    """Flush returns when everything is durable; the event names the reservation."""
    cache = client.open(SPEC)
    put(cache, 3)
    assert cache.flush(20.0)
    events: list[wire.Message] = []
    until(lambda: events.extend(client.events()) or events)
    assert events[-1].pages == 3


def test_requests_of_several_threads_share_one_connection(client):
    """Each thread gets its own replies, however they interleave."""
    cache = client.open(SPEC)
    put(cache, 8)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for turn in range(60):
            pages = (seed + turn) % 8 + 1
            path = cache.match(keys(pages))
            with path.acquire() as lease:
                if path.pages != pages or not right(lease, pages):
                    wrong.append((seed, turn, path.pages, lease.pages))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_waits_long_holds_up_no_other(client, daemon):
    """While one thread waits for a reply that does not come, others are served over the same connection."""
    cache = client.open(SPEC)
    put(cache, 2)
    full = Client(daemon.socket, instance="filler")
    ticket = client.submit(wire.Flush(0, 1000), wire.Ok)
    waiter = threading.Thread(target=client.wait, args=(ticket, 5.0))
    waiter.start()
    for _ in range(20):
        assert cache.match(keys(2)).pages == 2
    waiter.join()
    full.close()


def test_pipelined_requests_are_answered_by_ticket(client):
    """Tickets may be waited for in any order, and in numbers beyond what is allowed in flight."""
    cache = client.open(SPEC)
    put(cache, 3)
    number = cache._number
    tickets = [client.submit(wire.Match(number, 0, keys(n % 4)), wire.Matched) for n in range(300)]
    for n in reversed(range(300)):
        assert client.wait(tickets[n]).pages == min(3, n % 4)


def test_large_requests_and_replies_pipelined_do_not_wait_for_each_other(client):
    """Both directions full: the client reads while it sends."""
    cache = client.open(KEYED)
    asked = RNG.bytes(16 * wire.MAX_ASKED)
    tickets = [client.submit(wire.Exists(cache._number, 0, asked), wire.Existence) for _ in range(600)]
    assert all(client.wait(ticket, 10.0).states == bytes(wire.MAX_ASKED) for ticket in tickets)


# -- faults of the program -----------------------------------------------------------------------------------------


def test_faults_of_the_program_are_raised(client):
    """What no retry would mend is an exception that names the field."""
    cache = client.open(SPEC)
    for call, field in [
        (lambda: client.open(spec_of(FULL, page_tokens=0)), "spec.page_tokens"),
        (lambda: client.open(SPEC, slices=[Slice(0, 1, 0, 1)] * 2), "slices"),
        (lambda: cache.match(b"abc"), "keys"),
        (lambda: cache.match(keys(1)).reserve(0, 2), "pages"),
        (lambda: cache.exists(0, b"x" * 16), "keys"),
        (lambda: client.open(KEYED).match(keys(4)), "keys"),
        (lambda: client.open(KEYED).exists(9, b"x" * 16), "group"),
    ]:
        with pytest.raises(KvtierError) as caught:
            call()
        assert (caught.value.code, caught.value.field) == (Code.BAD_REQUEST, field)
    with cache.match(keys(1)).reserve(0, 1) as reserved, pytest.raises(KvtierError, match="bytes"):
        reserved.write(0, 0, b"short")


def test_a_refusal_for_want_of_room_is_a_miss(daemon):
    """Over the instance's cap fewer pages come, and the reason is told; nothing is raised."""
    big = spec_of(GroupSpec(Kind.FULL, 1, 1, 4 << 20))
    with Client(daemon.socket, instance="greedy") as client:
        cache = client.open(big)
        with cache.match(keys(40, big)).reserve(0, 40) as reserved:
            assert 0 < reserved.pages < 40
            assert reserved.refused == Code.OVER_CAP
            again = cache.match(keys(40, big)).reserve(0, 40)
            assert again.pages == 0
            assert again.refused


# -- checksums -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "seen"), [("never", 0), ("sample", 1), ("always", 3)])
def test_bytes_that_changed_in_place_are_a_miss(daemon, caplog, verify, seen):
    """Copies are always verified; reads in place as the client was told. A mismatch is counted and logged."""
    with Client(daemon.socket, instance="engine", verify=verify) as client:
        cache = client.open(SPEC)
        put(cache, 3)
        with cache.match(keys(3)).acquire() as lease:
            for page in range(3):
                address = int(lease._tables[0][0].offsets[page, 0])
                lease._joined.arenas.view(address, FULL.item_bytes)[77] ^= 1
            with caplog.at_level(logging.WARNING, "kvtier.client"):
                assert sum(lease.view(0, page) is None for page in range(3)) == seen
                assert client.checks.mismatches == seen
                assert not lease.read(0, 1, np.empty(FULL.item_bytes, np.uint8))
            assert client.checks.mismatches == seen + 1
            assert len(caplog.records) == seen + 1


# -- a daemon that is away -----------------------------------------------------------------------------------------


def use(cache: Any, keyed: Any) -> list[Any]:
    """Every verb that an engine's step may call; what each gives."""
    path = cache.match(keys(2))
    lease, reserved = path.acquire(), path.reserve(0, 2)
    path.prefetch()
    path.hint("waiting", 40.0)
    path.extend()
    answers = [path.pages, lease.pages, reserved.pages, reserved.commit(), lease.view(0, 0), reserved.view(0, 0)]
    lease.release()
    reserved.abort()
    path.close()
    return [*answers, keyed.exists(0, bytes(32)), keyed.acquire_keys(0, bytes(16)).pages, cache.flush(0.0)]


NOTHING = [0, 0, 0, 0, None, None, bytes(2), 0, False]


def test_without_a_daemon_everything_is_a_quick_miss(tmp_path):
    """No verb raises, none waits, and the client says why."""
    with Client(tmp_path / "nobody.sock") as client:
        cache, keyed = client.open(SPEC), client.open(KEYED)
        region = client.register("r", 0, 0, 4096, 4)
        start = time.monotonic()
        for _ in range(50):
            assert use(cache, keyed) == NOTHING
            assert region.load((keyed, bytes(16)), [0]) == b"\0"
            assert region.store((keyed, bytes(16)), [0]) == b"\0"
        assert time.monotonic() - start < DEADLINE, "hundreds of calls, none of which waits for its timeout"
        assert isinstance(client.last_error, Away)
        assert not region.fenced
        assert not client.connected


def test_a_daemon_that_comes_later_is_joined(daemon):
    """An engine that started first is served as soon as the daemon is there."""
    daemon.stop()
    with Client(daemon.socket, instance="early") as client:
        cache = client.open(SPEC)
        assert cache.match(keys(2)).pages == 0
        daemon.start()
        until(client.ping)
        put(cache, 2)
        assert cache.match(keys(2)).pages == 2


def test_a_daemon_killed_is_a_miss_and_restarted_is_used_again(daemon, client):
    """After kill -9: misses, leases that say lost; after the restart the durable pages, on the same objects."""
    cache, keyed = client.open(SPEC), client.open(KEYED)
    put(cache, 4)
    assert cache.flush(20.0)
    path = cache.match(keys(4))
    lease, reserved = path.acquire(), cache.match(keys(5)).reserve(4, 1)
    view = lease.view(0, 0)
    daemon.kill()
    assert use(cache, keyed) == NOTHING
    assert lease.lost
    assert reserved.lost
    assert lease.view(0, 0) is None
    assert not lease.read(0, 0, np.empty(FULL.item_bytes, np.uint8))
    assert not reserved.write(0, 4, content(4, FULL.item_bytes))
    assert np.array_equal(view, content(0, FULL.item_bytes)), "a view in somebody's hands stays memory"
    daemon.start()
    until(lambda: path.extend().pages == 4)
    with path.acquire(wait_ms=5000) as fresh:
        assert right(fresh, 4)
    lease.release()
    reserved.abort()
    assert lease.lost
    del view


def test_a_daemon_that_hangs_costs_one_timeout_and_then_nothing(daemon):
    """A stopped daemon: the first call returns at its deadline, the next at once, attempts stay short."""
    with Client(daemon.socket, instance="engine", timeout_s=0.3) as client:
        cache = client.open(SPEC)
        put(cache, 1)
        with stopped(daemon.pid):
            start = time.monotonic()
            assert cache.match(keys(1)).pages == 0
            first = time.monotonic()
            for _ in range(200):
                assert cache.match(keys(1)).pages == 0
            rest = time.monotonic()
        assert 0.3 <= first - start < 0.3 + DEADLINE
        assert rest - first < 0.1 * 200 * 0.3, "further calls do not wait for the timeout again"
        until(lambda: cache.match(keys(1)).pages == 1)


def test_a_long_wait_is_bounded_by_what_was_asked_and_the_timeout(daemon):
    """acquire(wait_ms) against a hung daemon ends after both."""
    with Client(daemon.socket, instance="engine", timeout_s=0.1) as client:
        path = client.open(SPEC).match(keys(1))
        with stopped(daemon.pid):
            start = time.monotonic()
            assert path.acquire(wait_ms=300).pages == 0
            assert 0.4 <= time.monotonic() - start < 0.4 + DEADLINE


class Nonsense(threading.Thread):
    """Stands in for a daemon at the socket: a right Welcome, then whatever bytes it was given, for each connection."""

    def __init__(self, path: Path, words: list[bytes]) -> None:
        super().__init__()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._words = words

    def run(self) -> None:
        for words in self._words:
            sock, _ = self._listener.accept()
            with sock:
                sock.recv(4096)
                welcome = wire.Welcome(wire.VERSION, "nonsense", "uid", (), 0, 0)
                sock.sendall(wire.frame(wire.VERBS[wire.Hello], 1, welcome))
                sock.recv(4096)
                with contextlib.suppress(OSError):
                    sock.sendall(words)
        self._listener.close()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        wire.HEADER.pack(2**32 - 1, 1, 0, 3, 2),
        wire.HEADER.pack(1, 1, 0, 3, 2) + b"\xc1",
        wire.HEADER.pack(1, 1, 0, 999, 0) + b"\x80",
        wire.HEADER.pack(4, 1, 0, 0, 2) + b"junk",
        wire.frame(wire.ERROR_VERB, 0, wire.Error("busy", "go away")),
        wire.frame(wire.ERROR_VERB, 2, wire.Error("a_later_code", "?")),
    ],
)
def test_a_daemon_that_talks_nonsense_is_a_miss(tmp_path, words):
    """Broken frames, wrong replies and errors of another version end in a miss, never in an exception."""
    server = Nonsense(tmp_path / "s", [words])
    server.start()
    with Client(tmp_path / "s", timeout_s=DEADLINE) as client:
        assert not client.ping()
        assert client.last_error is not None
    server.join()


def test_reset_while_the_daemon_is_away_still_hides_the_old_kv(daemon, client):
    """New weights: what was committed before is never matched again, though the daemon heard nothing of it."""
    cache = client.open(SPEC)
    put(cache, 3)
    assert cache.flush(20.0)
    path = cache.match(keys(3))
    daemon.kill()
    before = cache.epoch
    assert cache.reset() == before + 1
    daemon.start()
    until(client.ping)
    assert cache.match(keys(3)).pages == 0
    assert path.extend().pages == 0
    assert path.acquire().pages == 0
    put(cache, 3, seed=500)
    with cache.match(keys(3)).acquire() as lease:
        assert right(lease, 3, seed=500)


def test_reset_before_the_daemon_was_ever_there_hides_what_it_kept(daemon):
    """An engine that does not know the epoch resets it all the same when the daemon comes."""
    with Client(daemon.socket, instance="one") as client:
        cache = client.open(SPEC)
        cache.reset()
        cache.reset()
        put(cache, 3)
        assert cache.flush(20.0)
    daemon.stop()
    with Client(daemon.socket, instance="two") as client:
        cache = client.open(SPEC)
        cache.reset()
        daemon.start()
        until(client.ping)
        assert cache.match(keys(3)).pages == 0
        assert cache.epoch == 3


def test_what_was_given_before_a_reset_is_not_adopted_after_it(daemon, client):
    """The share says which epoch the KV is of, however late it is made."""
    cache = client.open(SPEC)
    put(cache, 2)
    lease, reserved = cache.match(keys(2)).acquire(), cache.match(keys(3)).reserve(2, 1)
    cache.reset()
    with Client(daemon.socket, instance="engine") as worker:
        for given in (lease, reserved):
            with pytest.raises(KvtierError, match="epoch"):
                worker.open(SPEC).adopt(given.share())


def test_reset_frees_the_old_epoch_for_everyone(daemon, client):
    """The old KV is gone for this engine; an old path is matched again in the new epoch."""
    cache = client.open(SPEC)
    put(cache, 3)
    path = cache.match(keys(3))
    assert cache.reset() == 1
    assert path.extend().pages == 0
    with Client(daemon.socket, instance="other") as other:
        assert other.open(SPEC).match(keys(3)).pages == 0


def test_what_a_lost_connection_held_returns_once_it_is_unmapped(daemon):
    """The process lives on; its lost slots return when no view refers to them, and not before."""
    with Client(daemon.socket, instance="engine", timeout_s=0.2) as client:
        cache = client.open(SPEC)
        lost = cache.match(keys(2)).reserve(0, 2)
        view = lost.view(0, 0)
        with stopped(daemon.pid):
            assert cache.match(keys(1)).pages == 0
        until(client.ping)
        assert lost.lost
        (engine,) = status(daemon)["instances"]
        assert engine["held_bytes"] > 0
        assert engine["left"], "a view is still in somebody's hands"
        del view

        def ended() -> bool:
            client.ping()
            return status(daemon)["instances"][0]["left"] == 0

        until(ended)
        lost.abort()
        until(lambda: client.ping() and status(daemon)["instances"][0]["held_bytes"] == 0)


def test_an_interrupt_while_acquiring_leaves_nothing_held(daemon):
    """Ctrl-C amid an acquire, as in a notebook: the lease that nobody gets returns, and the client goes on."""
    with Client(daemon.socket, instance="engine", timeout_s=DEADLINE) as client:
        cache = client.open(SPEC)
        put(cache, 2)
        path = cache.match(keys(2))
        with stopped(daemon.pid):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            old = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                with pytest.raises(KeyboardInterrupt):
                    path.acquire()
            finally:
                signal.signal(signal.SIGALRM, old)
        until(lambda: cache.match(keys(2)).pages == 2)
        until(lambda: client.ping() and status(daemon)["instances"][0]["held_bytes"] == 0)
        with path.acquire() as lease:
            assert right(lease, 2)


def test_memory_whose_address_is_in_use_is_not_given_away_when_it_is_lost(daemon):
    """A device may work by an address on: the slots return when all that gave one are given back, and not before."""
    with Client(daemon.socket, instance="engine", timeout_s=1.0) as client:
        cache = client.open(SPEC)
        put(cache, 2)
        path = cache.match(keys(5))
        lease, aborted, committed = path.acquire(), path.reserve(2, 1), path.reserve(3, 2)
        assert lease.address(0, 0)
        assert aborted.address(0, 2)
        assert committed.address(0, 3)
        with stopped(daemon.pid):
            assert cache.match(keys(1)).pages == 0
        until(client.ping)
        for held, give_back in ((lease, lease.release), (aborted, aborted.abort), (committed, committed.commit)):
            assert held.lost
            assert held.address(0, 3) is None
            assert status(daemon)["instances"][0]["left"], "an address is still in somebody's hands"
            give_back()
        until(lambda: client.ping() and status(daemon)["instances"][0]["left"] == 0)


def test_a_lost_connection_without_views_leaves_nothing_behind(daemon):
    """The instance starts clean on the next connection: even what this client never heard of is given back."""
    with Client(daemon.socket, instance="engine", timeout_s=0.2) as client:
        cache = client.open(SPEC)
        put(cache, 2)
        path = cache.match(keys(2))
        lease = path.acquire()
        with stopped(daemon.pid):
            assert path.acquire().pages == 0  # granted when the daemon goes on, to nobody
        until(client.ping)
        assert lease.lost
        (engine,) = status(daemon)["instances"]
        assert (engine["leases"], engine["held_bytes"], engine["left"]) == (0, 0, 0)


def test_a_child_of_fork_has_a_connection_of_its_own(daemon, client):
    """The child neither speaks on its parent's connection nor ends it."""
    cache = client.open(SPEC)
    put(cache, 2)
    lease = cache.match(keys(2)).acquire()
    child = os.fork()
    if child == 0:
        ok = cache.match(keys(2)).pages == 2 and lease.lost and lease.view(0, 0) is None
        client.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.match(keys(2)).pages == 2
    assert right(lease, 2)
    lease.release()


def test_close_lets_go_of_everything(daemon):
    """After close the daemon knows of no process and holds nothing for it; later calls are misses."""
    client = Client(daemon.socket, instance="engine")
    cache = client.open(SPEC)
    cache.match(keys(2)).reserve(0, 2)
    client.close()
    assert status(daemon)["instances"] == []
    assert cache.match(keys(2)).pages == 0
    client.close()


def test_clients_leave_no_descriptor_or_thread(daemon, no_leaks):
    """Connecting, losing the daemon, connecting again, transfers and close: nothing stays open."""
    with Client(daemon.socket, instance="engine") as client:
        cache = client.open(SPEC)
        put(cache, 2)
        daemon.kill()
        assert cache.match(keys(2)).pages == 0
        daemon.start()
        until(client.ping)
    client = Client(daemon.socket, instance="engine")
    assert client.ping()
    client.close()


# -- regions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[int]:
    """An engine's own memory: a memfd of some rows."""
    fd = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ROWS * FULL.item_bytes)
    yield fd
    os.close(fd)


def row(fd: int, number: int) -> np.ndarray:
    """Bytes of one row."""
    return np.frombuffer(os.pread(fd, FULL.item_bytes, number * FULL.item_bytes), np.uint8)


def test_regions_are_loaded_and_stored_row_by_row(client, memory):
    """Rows go in under keys and come out of leases and by keys, -1 skipping."""
    region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
    keyed, cache = client.open(KEYED), client.open(SPEC)
    names = b"".join(bytes([n]) * 16 for n in range(3))
    for n in range(3):
        os.pwrite(memory, content(n, FULL.item_bytes).tobytes(), n * FULL.item_bytes)
    assert region.store((keyed, names), [0, 1, 2]) == b"\1\1\1"
    assert region.load((keyed, names + bytes([9]) * 16), [5, -1, 7, 8]) == b"\1\0\1\0"
    assert np.array_equal(row(memory, 5), content(0, FULL.item_bytes))
    assert not row(memory, 6).any()
    put(cache, 3, seed=40)
    with cache.match(keys(3)).acquire() as lease:
        assert region.load(lease, [10, 11], first=1) == b"\1\1"
    assert np.array_equal(row(memory, 10), content(41, FULL.item_bytes))
    assert not region.fenced
    assert region.unregister()


def test_transfers_can_be_waited_for_and_cancelled(client, memory):
    """Wait gives None while it runs; cancel returns when no byte moves any more, with what was done."""
    region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
    keyed = client.open(KEYED)
    transfer = region.start_store((keyed, b"k" * 16), [0])
    until(lambda: transfer.wait(0.05) is not None)
    assert transfer.result == b"\1"
    assert transfer.cancel() == b"\1"
    running = region.start_load((keyed, b"k" * 16), [1])
    assert running.cancel() in {b"\0", b"\1"}
    assert not running.fenced
    assert not running.lost


def test_regions_are_registered_again_after_a_restart(daemon, client, memory):
    """The engine's objects go on as they are."""
    region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
    keyed = client.open(KEYED)
    os.pwrite(memory, content(1, FULL.item_bytes).tobytes(), 0)
    assert region.store((keyed, b"k" * 16), [0]) == b"\1"
    assert keyed.flush(20.0)
    daemon.kill()
    assert region.load((keyed, b"k" * 16), [3]) == b"\0"
    daemon.start()
    until(client.ping)
    assert region.load((keyed, b"k" * 16), [3]) == b"\1"
    assert np.array_equal(row(memory, 3), content(1, FULL.item_bytes))


def test_rows_stay_fenced_until_the_daemon_is_known_to_have_ended(daemon, memory):
    """A transfer whose word never came: the end of the connection lifts no fence, the end of the process does."""
    with Client(daemon.socket, instance="engine", timeout_s=0.2) as client:
        region = client.register("kv", memory, 0, FULL.item_bytes, ROWS)
        keyed = client.open(KEYED)
        assert region.store((keyed, b"k" * 16), [0]) == b"\1"
        with stopped(daemon.pid):
            transfer = region.start_load((keyed, b"k" * 16), [1])
            assert region.load((keyed, b"k" * 16), [2], wait_ms=100) == b"\0"
            assert region.fenced
            assert transfer.lost
            assert transfer.fenced
            assert transfer.cancel() is None
            assert transfer.fenced
            daemon.kill()
        until(lambda: not transfer.fenced)
        assert not region.fenced
        assert transfer.lost


# -- the async client ------------------------------------------------------------------------------------------------


async def test_the_async_client_stores_and_reads_the_same_pages(daemon, client):
    """What one client commits the other reads, and the other way round."""
    cache = client.open(SPEC)
    put(cache, 3)
    async with AsyncClient(daemon.socket, instance="async", verify="always") as other:
        mine = await other.open(SPEC)
        path = await mine.match(keys(5))
        assert path.pages == 3
        async with await path.acquire() as lease:
            assert right(lease, 3)
        async with await path.reserve(3, 2) as reserved:
            for page in (3, 4):
                assert reserved.write(0, page, content(page, FULL.item_bytes))
            assert await reserved.commit() == 5 - 3
        assert await mine.flush(20.0)
        assert await other.ping()
        assert "counters" in await other.stat()
    with cache.match(keys(5)).acquire() as lease:
        assert right(lease, 5)


async def test_async_requests_run_beside_each_other(daemon):
    """Hundreds of matches at once, each with its own answer."""
    async with AsyncClient(daemon.socket, instance="async") as client:
        cache = await client.open(SPEC)
        reserved = await (await cache.match(keys(4))).reserve(0, 4)
        for page in range(4):
            reserved.write(0, page, content(page, FULL.item_bytes))
        assert await reserved.commit() == 4
        paths = await asyncio.gather(*(cache.match(keys(n % 5)) for n in range(400)))
        assert [path.pages for path in paths] == [n % 5 for n in range(400)]


async def test_an_async_client_misses_while_the_daemon_is_away_and_comes_back(daemon):
    """Killed, stopped, restarted: misses within the deadline, never an exception."""
    async with AsyncClient(daemon.socket, instance="async", timeout_s=0.3) as client:
        cache = await client.open(SPEC)
        lease = await (await cache.match(keys(1))).acquire()
        daemon.kill()
        assert (await cache.match(keys(1))).pages == 0
        assert isinstance(client.last_error, Away)
        assert lease.pages == 0
        daemon.start()
        async with asyncio.timeout(DEADLINE):
            while not await client.ping():
                await asyncio.sleep(0.01)
        with stopped(daemon.pid):
            start = time.monotonic()
            assert (await cache.match(keys(1))).pages == 0
            assert (await cache.match(keys(1))).pages == 0
            assert time.monotonic() - start < 0.3 + DEADLINE
        async with asyncio.timeout(DEADLINE):
            while not await client.ping():
                await asyncio.sleep(0.01)


async def test_a_cancelled_acquire_gives_its_lease_back(daemon, client):
    """A task that stops waiting leaves no lease that nobody knows of."""
    put(client.open(SPEC), 2)
    async with AsyncClient(daemon.socket, instance="async") as other:
        path = await (await other.open(SPEC)).match(keys(2))
        with stopped(daemon.pid):
            waiting = asyncio.ensure_future(path.acquire())
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert await other.ping()
        assert await other.ping()
        (engine,) = [each for each in status(daemon)["instances"] if each["instance"] == "async"]
        assert (engine["leases"], engine["held_bytes"]) == (0, 0)


async def test_a_cancelled_load_fences_its_rows_until_the_daemons_word(daemon, memory):
    """The engine's task is gone; the rows are free again only when the load is known to have ended."""
    async with AsyncClient(daemon.socket, instance="async") as client:
        region = await client.register("kv", memory, 0, FULL.item_bytes, ROWS)
        keyed = await client.open(KEYED)
        assert await region.store((keyed, b"k" * 16), [0]) == b"\1"
        with stopped(daemon.pid):
            waiting = asyncio.ensure_future(region.load((keyed, b"k" * 16), [1]))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert region.fenced
        assert await client.ping()
        async with asyncio.timeout(DEADLINE):
            while region.fenced:
                await asyncio.sleep(0.01)
        assert await region.unregister()


async def test_async_processes_of_an_instance_share_what_one_holds(daemon):
    """A lease and a reservation taken by one are read and filled by another."""
    async with AsyncClient(daemon.socket, instance="pair") as one, AsyncClient(daemon.socket, instance="pair") as two:
        mine, theirs = await one.open(SPEC), await two.open(SPEC, rank=0)
        reserved = await (await mine.match(keys(1))).reserve(0, 1)
        filled = await theirs.adopt(reserved.share())
        assert filled.write(0, 0, content(0, FULL.item_bytes))
        assert await filled.commit() == 1
        lease = await (await mine.match(keys(1))).acquire()
        borrowed = await theirs.adopt(lease.share())
        assert right(borrowed, 1)
        await borrowed.release()
        assert right(lease, 1), "it is held by who took it"
        await lease.release()


async def test_async_clients_leave_no_descriptor(daemon, no_leaks):
    """Connecting, losing the daemon and close: nothing stays open."""
    async with AsyncClient(daemon.socket, instance="async") as client:
        await client.open(SPEC)
        daemon.kill()
        assert not await client.ping()
        daemon.start()
    async with AsyncClient(daemon.socket, instance="async") as client:
        assert await client.ping()


def test_the_daemon_a_client_watches_is_the_process_that_serves(daemon, client):
    """The pidfd that lifts fences is the daemon's own."""
    assert client.ping()
    watched = client.link.joined.daemon
    assert watched.pid == daemon.pid
    assert not watched.gone
    daemon.kill()
    poll = select.poll()
    poll.register(watched._pidfd, select.POLLIN)
    assert poll.poll(DEADLINE * 1000)
    assert watched.gone


def test_the_default_socket_is_found_by_the_environment(monkeypatch, tmp_path):
    """$KVTIER_SOCKET, else the runtime folder, else /run."""
    from kvtier.paths import admin_path, socket_path

    assert socket_path({"KVTIER_SOCKET": "/a/b"}) == Path("/a/b")
    assert socket_path({"XDG_RUNTIME_DIR": "/run/user/5"}) == Path("/run/user/5/kvtier/kvtierd.sock")
    assert socket_path({}) == Path("/run/kvtier/kvtierd.sock")
    assert admin_path(Path("/a/b.sock")) == Path("/a/admin.sock")
    monkeypatch.setenv("KVTIER_SOCKET", str(tmp_path / "s"))
    with Client() as client:
        assert client.link.path == tmp_path / "s"
