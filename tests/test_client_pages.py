"""Many pages a call: the same bytes as page by page, whatever lies between the slots."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from clientkit import status
from kvtier import wire
from kvtier.client import Client, putting
from kvtier.client.arenas import runs
from kvtier.client.copying import PAST_BYTES
from kvtier.client.held import HeldReservation
from kvtier.client.slots import SAMPLE, Checks
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import Code, Kind, KvtierError

PAGE = 4
SMALL = GroupSpec(Kind.FULL, 2, 4, 1000)
LARGE = GroupSpec(Kind.FULL, 2, 4, 200_000)
STATE = GroupSpec(Kind.STATE, 3, 1, 2 << 20)
PAGES = 2 * PAST_BYTES // 8192 + 3
"""More than two spans of SMALL's slots."""


def spec_of(*groups: GroupSpec) -> CacheSpec:
    """A cache of small pages."""
    return CacheSpec(model="m", fingerprint=b"f" * 16, kv_dtype="bf16", page_tokens=PAGE, groups=groups)


def keys(pages: int, first: int = 0) -> bytes:
    """Keys of a path of distinct pages."""
    return np.arange(first, first + pages * PAGE, dtype="<i4").tobytes()


def content(pages: int, seed: int = 0, size: int = SMALL.item_bytes) -> np.ndarray:
    """Random rows, one a page."""
    return np.random.default_rng(seed).integers(0, 256, (pages, size), dtype=np.uint8)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client that verifies what it looks at in place."""
    with Client(daemon.socket, instance="engine", verify="always", timeout_s=10.0) as one:
        yield one


@pytest.fixture
def cache(client: Client):
    """A cache of one group of pages of one slot."""
    return client.open(spec_of(SMALL))


def stored(cache, pages: int, first: int = 0, seed: int = 0) -> np.ndarray:
    """The content of a path that is cached now."""
    data = content(pages, seed)
    with cache.match(keys(pages, first)).reserve(0, pages, wait_ms=5000) as held:
        assert held.pages == pages, held.refused
        assert held.write_pages(0, 0, data)
        assert held.commit() == pages
    return data


def shown(lease, first: int, pages: int) -> np.ndarray:
    """What `views` shows, put together."""
    rows = lease.views(0, first, pages)
    return np.concatenate(rows) if rows else np.empty((0, SMALL.item_bytes), np.uint8)


def spoil(lease, page: int) -> None:
    """Change a byte of a page in the daemon's memory."""
    address = int(lease._tables[0][0].offsets[page, 0])
    lease._joined.arenas.view(address, SMALL.item_bytes)[77] ^= 1


def test_pages_written_together_are_read_together_and_one_by_one(cache):
    """Bytes come back bit for bit by every way of reading, from any page on."""
    data = stored(cache, PAGES)
    with cache.match(keys(PAGES)).acquire() as lease:
        out = np.zeros_like(data)
        assert lease.read_pages(0, 0, out) == PAGES
        assert np.array_equal(out, data)
        assert np.array_equal(shown(lease, 0, PAGES), data)
        row = np.empty(SMALL.item_bytes, np.uint8)
        assert all(lease.read(0, page, row) and np.array_equal(row, data[page]) for page in (0, 1, PAGES - 1))
        some = np.zeros((5, SMALL.item_bytes), np.uint8)
        assert lease.read_pages(0, PAGES - 5, some) == 5
        assert np.array_equal(some, data[-5:])
        assert np.array_equal(shown(lease, PAGES - 5, 5), data[-5:])


def test_pages_whose_slots_lie_apart_are_right_too(client, daemon):
    """Slots of a path that was stored turn by turn among others' are in many runs."""
    cache = client.open(spec_of(SMALL))
    data = content(12, seed=9)
    for page in range(12):
        path = cache.match(keys(12))
        with path.reserve(page, 1, wait_ms=5000) as held:
            assert held.write_pages(0, page, data[page : page + 1])
            assert held.commit() == 1
        stored(cache, 1 + page % 3, first=1000 * (page + 1))
    with cache.match(keys(12)).acquire() as lease:
        offsets = lease._tables[0][0].offsets[:, 0]
        assert len(runs(offsets, cache.groups[0].slot_bytes)) > 3
        out = np.zeros_like(data)
        assert lease.read_pages(0, 0, out) == 12
        assert np.array_equal(out, data)
        assert np.array_equal(shown(lease, 0, 12), data)


def test_reading_ends_before_the_first_page_that_is_wrong(cache):
    """Rows after a mismatch are not called right, and it is counted."""
    data = stored(cache, 20)
    with cache.match(keys(20)).acquire() as lease:
        spoil(lease, 7)
        out = np.zeros_like(data)
        assert lease.read_pages(0, 0, out) == 7
        assert np.array_equal(out[:7], data[:7])
        assert len(shown(lease, 0, 20)) == 7
        assert lease.read_pages(0, 8, out[:12]) == 12
        assert cache.client.checks.mismatches == 2


def test_a_slice_that_is_copied_out_is_verified_each_time(daemon):
    """As a whole item is: no setting of what is looked at in place makes a wrong one right."""
    with Client(daemon.socket, instance="engine", verify="never") as client:
        cache = client.open(spec_of(SMALL))
        stored(cache, 3)
        whole, out = Slice(0, SMALL.layers, 0, SMALL.heads), np.empty(SMALL.item_bytes, np.uint8)
        with cache.match(keys(3)).acquire() as lease:
            spoil(lease, 1)
            assert [lease.shard(0, page, whole, out) for page in range(3)] == [True, False, True]


def test_reading_ends_where_the_lease_does(cache):
    """Pages that are not leased are no hit; views cannot be written; nothing is there after release."""
    data = stored(cache, 6)
    lease = cache.match(keys(6)).acquire()
    out = np.zeros((9, SMALL.item_bytes), np.uint8)
    assert lease.read_pages(0, 0, out) == 6
    assert lease.read_pages(0, 6, out) == 0
    assert lease.read_pages(0, 4, out) == 2
    assert np.array_equal(out[:2], data[4:])
    with pytest.raises(ValueError, match="read-only"):
        lease.views(0, 0, 6)[0][0, 0] = 1
    lease.release()
    assert lease.read_pages(0, 0, out) == 0
    assert lease.views(0, 0, 6) == []


def test_a_lost_connection_gives_nothing_and_takes_nothing(daemon, cache):
    """After the daemon died no byte of its slots is touched."""
    stored(cache, 4)
    lease = cache.match(keys(4)).acquire()
    held = cache.match(keys(4, first=500)).reserve(0, 4)
    assert held.pages == 4
    daemon.kill()
    assert not cache.client.ping()
    assert lease.read_pages(0, 0, np.zeros((4, SMALL.item_bytes), np.uint8)) == 0
    assert lease.views(0, 0, 4) == []
    assert not held.write_pages(0, 0, content(4))


def test_committed_pages_and_pages_of_others_are_not_written(cache):
    """A committed page's bytes never change; pages outside the reservation are refused; stored ones are skipped."""
    data = stored(cache, 4)
    with cache.match(keys(6)).reserve(0, 6) as held:
        assert held.write_pages(0, 0, content(6, seed=5))  # the first four are stored: skipped
        assert held.commit(4, 2) == 6
        assert not held.write_pages(0, 4, content(2))
        assert not held.write_pages(0, 5, content(2))
        assert not held.write_pages(0, -1, content(1))
    with cache.match(keys(6)).acquire() as lease:
        assert np.array_equal(shown(lease, 0, 6), np.concatenate((data, content(6, seed=5)[4:])))


def test_a_refused_commit_leaves_the_pages_to_write_and_to_give_back(daemon, cache):
    """Nothing of them is committed: neither for the right commit that follows, nor when they are aborted."""
    data = content(2, 0)
    with cache.match(keys(2)).reserve(0, 2) as held:
        with pytest.raises(KvtierError):
            held.commit(0, 3)
        assert held.write_pages(0, 0, data)
        assert held.commit() == 2
    with cache.match(keys(4)).reserve(2, 2) as held, pytest.raises(KvtierError):
        held.commit(2, 3)
    assert cache.client.ping()
    (engine,) = status(daemon)["instances"]
    assert engine["held_bytes"] == 0


def test_slots_are_written_in_place_where_they_are_wanted(daemon, cache):
    """Rows for what is neither stored nor committed, each at its position; what is written there is what is read."""
    old, new = stored(cache, 3), content(6, seed=9)
    path = cache.match(keys(6))
    with path.reserve(0, 6, wait_ms=5000) as held:
        assert [held.wants(0, page) for page in range(7)] == [False] * 3 + [True] * 3 + [False]
        for at, rows in held.views(0, 0, 6):
            assert at >= 3
            rows[:] = new[at : at + len(rows)]
        assert held.commit(0, 4) == 4
        assert [held.wants(0, page) for page in range(6)] == [False] * 4 + [True] * 2
        assert held.views(0, 3, 3) == []  # one of them is committed
        assert sum(len(rows) for _, rows in held.views(0, 4, 2)) == 2
        assert held.commit() == 6
    with path.extend().acquire() as lease:
        assert np.array_equal(shown(lease, 0, 6), np.concatenate([old, new[3:]]))
    with Client(daemon.socket, instance="many slots") as client:
        states = client.open(spec_of(SMALL, STATE))
        with states.match(keys(2)).reserve(0, 2, [(1, [1])], wait_ms=5000) as held:
            assert [held.wants(1, page) for page in range(2)] == [False, True]
            with pytest.raises(KvtierError, match="use write"):
                held.views(1, 1, 1)


def test_items_of_several_slots_come_back_whole(daemon):
    """State points are written and read as rows too; there is no view of what lies in several places."""
    with Client(daemon.socket, instance="whole", timeout_s=10.0) as client:
        cache = client.open(spec_of(SMALL, STATE))
        state = content(1, seed=3, size=STATE.item_bytes)
        with cache.match(keys(2)).reserve(0, 2, wants=[(1, [1])], wait_ms=5000) as held:
            assert held.write_pages(0, 0, content(2))
            assert held.write_pages(1, 1, state)
            assert held.commit() == 2
        with cache.match(keys(2)).acquire() as lease:
            out = np.zeros_like(state)
            assert lease.read_pages(1, 1, out) == 1
            assert np.array_equal(out, state)
            with pytest.raises(KvtierError) as caught:
                lease.views(1, 1, 1)
            assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("group", [SMALL, LARGE])
def test_checksums_taken_while_writing_are_those_that_readers_verify(daemon, group):
    """The daemon takes the writer's word for summed pages, takes the others itself, and both verify."""
    with Client(daemon.socket, instance="summed", timeout_s=10.0, verify="always") as client:
        cache, data = client.open(spec_of(group)), content(6, size=group.item_bytes)
        with cache.match(keys(6)).reserve(0, 6, wait_ms=5000) as held:
            assert held.write_pages(0, 0, data[:3], summed=True)
            assert held.write_pages(0, 3, data[3:5])
            held.view(0, 5)[:] = data[5]
            known = held.committing(0, 6).sums
            assert np.frombuffer(known[0].sums, "<u8").astype(bool).tolist() == [True] * 3 + [False] * 3
            assert held.commit() == 6
        with cache.match(keys(6)).acquire() as lease:
            out = np.zeros_like(data)
            assert lease.read_pages(0, 0, out) == 6
            assert np.array_equal(out, data)


def test_a_page_written_again_is_summed_again(cache):
    """What was known of bytes that changed is forgotten."""
    first, second = content(2, seed=1), content(2, seed=2)
    with cache.match(keys(2)).reserve(0, 2, wait_ms=5000) as held:
        assert held.write_pages(0, 0, first, summed=True)
        assert held.write(0, 0, second[0])
        held.view(0, 1)[:] = second[1]
        assert held.commit() == 2
    with cache.match(keys(2)).acquire() as lease:
        assert np.array_equal(shown(lease, 0, 2), second)


def test_a_wrong_checksum_makes_a_miss_and_one_of_a_slice_is_refused(daemon, cache):
    """Whoever commits can only spoil its own pages; a rank that holds a part cannot know the whole's sum."""
    data = content(1)
    with cache.match(keys(1)).reserve(0, 1, wait_ms=5000) as held:
        assert held.write_pages(0, 0, data)
        wrong = wire.Commit(held.number, 0, 1, (wire.Sums(0, b"\1" * 8),))
        for off in (wire.Sums(1, b"\1" * 8), wire.Sums(0, b"\1" * 7), wire.Sums(0, b"\1" * 16)):
            with pytest.raises(KvtierError, match="sums"):
                cache.client.wait(cache.client.submit(wire.Commit(held.number, 0, 1, (off,)), wire.Committed))
        assert cache.client.wait(cache.client.submit(wrong, wire.Committed)).published == 1
    with cache.match(keys(1)).acquire() as lease:
        assert lease.read_pages(0, 0, np.zeros_like(data)) == 0
    with Client(daemon.socket, instance="half", timeout_s=10.0) as client:
        half = client.open(spec_of(SMALL), rank=0, world=2, slices=[Slice(0, 2, 0, 2)])
        with half.match(keys(1, first=900)).reserve(0, 1, wait_ms=5000) as held:
            sent = client.submit(wire.Commit(held.number, 0, 1, (wire.Sums(0, b"\1" * 8),)), wire.Committed)
            with pytest.raises(KvtierError, match="slices"):
                client.wait(sent)


def test_ranks_write_rows_of_their_slices(daemon):
    """Each rank's rows go to its heads of every page."""
    slices = [Slice(0, 2, 0, 1), Slice(0, 2, 1, 4)]
    whole = content(3).reshape(3, 2, 4, 1000)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(daemon.socket, instance="tp2", timeout_s=10.0)) for _ in slices]
        ranks = [c.open(spec_of(SMALL), rank=n, world=2, slices=[slices[n]]) for n, c in enumerate(clients)]
        first = ranks[0].match(keys(3)).reserve(0, 3, wait_ms=5000)
        for half, part in zip((first, ranks[1].adopt(first.share())), slices, strict=True):
            rows = np.ascontiguousarray(whole[:, :, part.h0 : part.h1]).reshape(3, -1)
            assert half.write_pages(0, 0, rows)
            half.commit()
        with ranks[0].match(keys(3)).acquire() as lease:
            assert np.array_equal(shown(lease, 0, 3), whole.reshape(3, -1))


def test_rows_that_are_no_items_are_refused(cache):
    """A wrong width, one row alone, another type: the program's fault, and nothing is written."""
    with cache.match(keys(1)).reserve(0, 1) as held:
        for rows in (content(1, size=10), content(1)[0], content(1).astype(np.int8)):
            with pytest.raises(KvtierError) as caught:
                held.write_pages(0, 0, rows)
            assert caught.value.code is Code.BAD_REQUEST


def test_reserved_slots_are_mapped_before_they_are_written(client):
    """Writing a fresh reservation takes no fault a page of memory, of which it has thousands."""
    cache = client.open(spec_of(GroupSpec(Kind.FULL, 1, 1, 1 << 20)))
    data = content(16, size=1 << 20)
    with cache.match(keys(16)).reserve(0, 16, wait_ms=5000) as held:
        assert held.pages == 16
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert held.write_pages(0, 0, data)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 16 * 256 // 4


@pytest.mark.parametrize(("verify", "every"), [("never", 0), ("sample", SAMPLE), ("always", 1)])
def test_reads_are_sampled_alike_one_by_one_and_together(verify, every):
    """Which reads are verified does not depend on how many are asked for at once."""
    singly, together = Checks(verify), Checks(verify)
    alone = [at for at in range(100) if singly.due()]
    starts = itertools.accumulate([7, 1, 0, 33, 16, 43], initial=0)
    joint = [
        start + at for start, count in zip(starts, [7, 1, 0, 33, 16, 43], strict=False) for at in together.due(count)
    ]
    assert alone == joint == (list(range(0, 100, every)) if every else [])


def test_large_pages_are_verified_too(client):
    """A page of more than one piece comes back whole, or not at all."""
    size = 2 * PAST_BYTES + 4096
    cache = client.open(spec_of(GroupSpec(Kind.FULL, 1, 1, size)))
    data, out = content(3, size=size), np.zeros((3, size), np.uint8)
    with cache.match(keys(3)).reserve(0, 3, wait_ms=5000) as held:
        assert held.write_pages(0, 0, data)
        assert held.commit() == 3
    with cache.match(keys(3)).acquire() as lease:
        assert lease.read_pages(0, 0, out) == 3
        assert np.array_equal(out, data)
        spoil(lease, 1)
        assert lease.read_pages(0, 0, out) == 1


def test_runs_are_of_slots_that_follow_each_other():
    """A gap, a step back or an absent slot ends a run."""
    assert runs(np.array([], np.int64), 8) == []
    assert runs(np.array([-1, -1]), 8) == []
    assert runs(np.array([8, 16, 24]), 8) == [(0, 8, 3)]
    assert runs(np.array([8, 16, -1, 32, 24, 40, 48]), 8) == [(0, 8, 2), (3, 32, 1), (4, 24, 1), (5, 40, 2)]
    assert runs(np.array([-8, 0]), 8) == [(1, 0, 1)]


def test_a_lease_of_a_restarted_daemon_is_never_read_in_the_old_ones_memory(daemon):
    """A process that has not noticed the restart adopts it: the right bytes or none, though it verifies nothing."""
    names = {"instance": "tp", "verify": "never", "timeout_s": 10.0}
    with Client(daemon.socket, **names) as one, Client(daemon.socket, **names) as two:
        scheduler, worker = one.open(spec_of(SMALL)), two.open(spec_of(SMALL))
        for seed in range(3):
            stored(scheduler, 5, first=1000 * seed, seed=seed)
        out = np.zeros((5, SMALL.item_bytes), np.uint8)
        with scheduler.match(keys(5)).acquire() as lease:
            assert worker.adopt(lease.share()).read_pages(0, 0, out) == 5
            old = lease.share()
        daemon.kill()
        daemon.start()
        deadline = time.monotonic() + 20
        while not one.ping():
            assert time.monotonic() < deadline
        read, seed = 0, 10
        while not read:
            assert time.monotonic() < deadline
            data = stored(scheduler, 5, first=1000 * seed, seed=seed)
            with scheduler.match(keys(5, 1000 * seed)).acquire() as lease:
                out[:] = 0
                read = worker.adopt(lease.share()).read_pages(0, 0, out)
                assert np.array_equal(out[:read], data[:read])
            seed += 1
        assert worker.adopt(old).read_pages(0, 0, out) == 0


# -- putting many pages at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3 * SMALL.item_bytes, 1 << 30])
def test_a_prompt_that_is_put_at_once_is_there_bit_for_bit(client, monkeypatch, batch):
    """Whatever the batches; pages that were cached before stay as they are; a later part goes below the first."""
    monkeypatch.setattr(putting, "FIRST_BYTES", batch)
    monkeypatch.setattr(putting, "BATCH_BYTES", batch)
    cache = client.open(spec_of(SMALL, LARGE))
    small, large = content(40), content(40, 1, LARGE.item_bytes)
    assert cache.match(keys(40)).put(0, [small[:7], large[:7]], 5000) == 7
    assert cache.match(keys(40)).put(0, [content(30, 5), np.concatenate([large[:7], large[7:30]])], 5000) == 30
    path = cache.match(keys(40))
    assert path.put(30, [small[30:], large[30:]], 5000) == 10
    with path.extend().acquire() as lease:
        out = np.zeros_like(large)
        assert lease.read_pages(1, 0, out) == lease.pages == 40
        assert np.array_equal(out, large)
        out = np.zeros_like(small)
        assert lease.read_pages(0, 0, out) == 40
        assert np.array_equal(out[:7], small[:7])
        assert np.array_equal(out[7:30], content(30, 5)[7:])
        assert np.array_equal(out[30:], small[30:])


def test_a_put_that_finds_no_room_stores_the_beginning_and_holds_nothing(client, daemon):
    """More than an instance may hold: the first pages are served, and the rest is given back at once."""
    cache = client.open(spec_of(LARGE))
    pages = 2 * 128 * 1024 * 1024 // LARGE.item_bytes
    rows = np.broadcast_to(content(1, 3, LARGE.item_bytes), (pages, LARGE.item_bytes))
    path = cache.match(keys(pages))
    served = path.put(0, [rows])
    assert 0 < served < pages
    assert path.extend().pages <= served
    assert stored(client.open(spec_of(SMALL)), 20) is not None
    path.close()
    assert daemon.broken_invariants() == []


def test_a_put_of_what_is_no_page_says_so_and_one_without_a_daemon_stores_nothing(client, daemon):
    """Other groups, other widths, rows of unequal number; window groups, which need what is wanted named."""
    cache = client.open(spec_of(SMALL, SMALL))
    path = cache.match(keys(4))
    for data in ([content(4)], [content(4), content(3)], [content(4), content(4, size=7)]):
        with pytest.raises(KvtierError, match="data"):
            path.put(0, data)
    with pytest.raises(KvtierError, match="full groups"):
        client.open(spec_of(SMALL, STATE)).match(keys(4)).put(0, [content(4), content(4)])
    assert path.put(0, [content(0), content(0)]) == 0
    daemon.kill()
    assert path.put(0, [content(4), content(4)]) == 0
    daemon.start()
    deadline = time.monotonic() + 20
    while path.put(0, [content(4), content(4)]) < 4:
        assert time.monotonic() < deadline


def test_a_put_whose_daemon_answers_too_late_holds_nothing(client, daemon, monkeypatch):
    """The daemon is stopped between two requests for room: when it goes on, what it gave in vain returns."""
    cache = client.open(spec_of(LARGE))
    other = Client(daemon.socket, instance="engine", timeout_s=0.5)
    with other:
        mine = other.open(spec_of(LARGE))
        path = mine.match(keys(64))
        real, calls = HeldReservation.write_pages, itertools.count()

        def stopping(self, *args, **more):
            if next(calls) == 1:
                os.kill(daemon.pid, signal.SIGSTOP)
            return real(self, *args, **more)

        monkeypatch.setattr(HeldReservation, "write_pages", stopping)
        try:
            assert path.put(0, [content(64, 1, LARGE.item_bytes)]) == 0
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while cache.match(keys(64)).put(0, [content(64, 2, LARGE.item_bytes)], 1000) < 64:
        assert time.monotonic() < deadline
