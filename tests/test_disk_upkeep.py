"""`kvtierctl disk`: what operators see of the disk tier and do to it, against a real daemon or a real tier."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvtier.client import Client, page_keys
from kvtier.ctl import main
from kvtier.demo.daemon import Daemon
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind
from tests.diskkit import KIB, MIB, Owner, spec
from tests.test_disk_faults import Failing
from tests.test_disk_relocate import LARGE, SMALL, full_of_holes, still_there

PAGE = 16 * KIB
MINE = CacheSpec("mine", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, PAGE),), salt=b"\x01\x02")
OTHER = CacheSpec("other", b"f" * 16, "bf16", 4, (GroupSpec(Kind.FULL, 1, 1, PAGE),))


def page_of(tokens: np.ndarray, page: int) -> np.ndarray:
    """Bytes that nothing else on the disk looks like."""
    return np.random.default_rng([*tokens[: 4 * page + 4].tolist(), 7]).integers(0, 256, PAGE, np.uint8)


def put(cache: Any, spec: CacheSpec, tokens: np.ndarray) -> None:
    """Store a prompt."""
    pages = len(tokens) // 4
    with cache.match(page_keys(spec, tokens)).reserve(0, pages) as reserved:
        for page in range(pages):
            reserved.write(0, page, page_of(tokens, page))
        assert reserved.commit() == pages


def ctl(daemon: Daemon, *words: str) -> Result:
    """Run kvtierctl."""
    where = str(daemon.socket.with_name("admin.sock"))
    return CliRunner().invoke(main, ["--socket", where, *words], env={"COLUMNS": "200"})


def said(result: Result, code: int = 0) -> dict[str, Any]:
    """What --json printed."""
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def two(daemon: Daemon) -> Iterator[tuple[Daemon, np.ndarray, np.ndarray]]:
    """A daemon with two durable caches, and a prompt of each."""
    with Client(daemon.socket, instance="engine") as client:
        mine, other = np.arange(32), np.arange(1000, 1032)
        for spec, tokens in ((MINE, mine), (OTHER, other)):
            put(client.open(spec), spec, tokens)
        assert ctl(daemon, "flush").exit_code == 0
        yield daemon, mine, other


def on_disk(daemon: Daemon, data: bytes) -> bool:
    """Whether some file of the tier has these bytes."""
    return any(data in path.read_bytes() for path in (daemon.home / "disk").rglob("*") if path.is_file())


def test_usage_says_what_each_cache_holds(two):
    """Runs, pages and bytes per cache, sizes of cells, and how scattered the free space is; for people too."""
    daemon, _, _ = two
    data = said(ctl(daemon, "disk", "usage", "--json"))
    assert {row["model"]: (row["pages"], row["disk_bytes"]) for row in data["caches"]} == {
        "mine": (8, 8 * PAGE),
        "other": (8, 8 * PAGE),
    }
    assert data["used_bytes"] == 16 * PAGE
    (cells,) = data["classes"]
    assert (cells["cell_bytes"], cells["taken"]) == (PAGE, 16)
    assert data["scattered_bytes"] == cells["free"] * PAGE
    assert data["file_bytes"] >= data["used_bytes"]
    text = ctl(daemon, "disk", "usage").stdout
    assert "fragmentation" in text
    assert "mine" in text


@pytest.mark.parametrize("by", ["tenant", "cache"])
def test_purge_discards_the_bytes_of_a_tenant_or_a_cache_and_of_nobody_else(two, by):
    """KV and token ids are in no file any more, at once and after a restart; the other cache is served as before."""
    daemon, mine, other = two
    secret, tokens = page_of(mine, 3).tobytes()[:4096], other.astype("<i4").tobytes()
    low = bytes(range(4, 32))  # token ids as the catalogue spells them: their low bytes
    assert on_disk(daemon, secret)
    assert on_disk(daemon, low)
    with Client(daemon.socket, instance="asks") as client:
        named = {"tenant": "0102", "cache": client.open(MINE).cache_id.hex()[:12]}[by]
    data = said(ctl(daemon, "disk", "purge", f"--{by}", named, "--json"))
    assert data["pages"] == 8
    assert data["discarded_bytes"] >= 8 * PAGE
    assert not on_disk(daemon, secret)
    assert not on_disk(daemon, low)
    assert on_disk(daemon, page_of(other, 3).tobytes()[:4096])
    assert said(ctl(daemon, "disk", "verify", "--json"))["wrong"] == 0
    daemon.kill()
    daemon.start()
    with Client(daemon.socket, instance="again", verify="always") as client:
        assert client.open(MINE).match(page_keys(MINE, mine)).pages == 0
        cache = client.open(OTHER)
        with cache.match(page_keys(OTHER, np.frombuffer(tokens, "<i4"))).acquire(wait_ms=5000) as lease:
            out = np.empty(PAGE, np.uint8)
            assert lease.pages == 8
            assert lease.read(0, 3, out)
            assert np.array_equal(out, page_of(other, 3))
        put(client.open(MINE), MINE, mine)
        assert client.open(MINE).match(page_keys(MINE, mine)).pages == 8


def test_purge_says_what_engines_still_hold(two):
    """Leased pages are not discarded, the exit code says so, and a second call after the release does it."""
    daemon, mine, _ = two
    secret = page_of(mine, 3).tobytes()[:4096]
    with Client(daemon.socket, instance="holder") as client:
        cache = client.open(MINE)
        with cache.match(page_keys(MINE, mine)).acquire(wait_ms=5000):
            assert said(ctl(daemon, "disk", "purge", "--tenant", "0102", "--json"), 1)["held"] == 8
            assert on_disk(daemon, secret)
        said(ctl(daemon, "disk", "purge", "--tenant", "0102", "--json"))
    assert not on_disk(daemon, secret)


def test_purge_names_what_it_is_asked_for(two):
    """Nothing given, both given, or a cache that is not there: refused, and nothing is emptied."""
    daemon, _, _ = two
    assert "expected a scope" in ctl(daemon, "disk", "purge").output
    assert "expected a cache" in ctl(daemon, "disk", "purge", "--cache", "a", "--scope", "b").output
    assert "0 caches" in ctl(daemon, "disk", "purge", "--cache", "zz").output
    assert said(ctl(daemon, "disk", "usage", "--json"))["used_bytes"] == 16 * PAGE


def test_scrub_finds_and_drops_what_has_rotted(two):
    """A flipped byte on disk: the copy is lost once, and the good one in host is written again."""
    daemon, mine, _ = two
    extents = daemon.home / "disk" / "extents"
    at = extents.read_bytes().index(page_of(mine, 3).tobytes())
    assert said(ctl(daemon, "disk", "scrub", "--json")) == {
        "copies": 16, "read_bytes": 16 * PAGE, "lost": 0, "healthy": True,
    }  # fmt: skip
    with extents.open("r+b") as file:
        file.seek(at)
        file.write(bytes([page_of(mine, 3)[0] ^ 1]))
        os.fsync(file.fileno())
    assert said(ctl(daemon, "disk", "scrub", "--json"))["lost"] == 1
    assert ctl(daemon, "flush").exit_code == 0
    assert said(ctl(daemon, "disk", "scrub", "--json"))["lost"] == 0
    assert said(ctl(daemon, "disk", "verify", "--json"))["wrong"] == 0


def test_verify_names_what_disagrees(two):
    """A record whose run is not in memory, as after a bug: named, counted, exit code 1."""
    import lmdb

    daemon, _, _ = two
    folder = daemon.home / "disk" / "catalogue"
    assert said(ctl(daemon, "disk", "verify", "--json"))["records"] > 0
    with lmdb.open(str(folder), max_dbs=16) as env, env.begin(write=True) as txn:
        runs = env.open_db(b"runs", txn=txn, create=False)
        key, value = next(iter(txn.cursor(runs)))
        txn.put(bytes(key)[:-1] + b"\xff", bytes(value), db=runs)
    data = said(ctl(daemon, "disk", "verify", "--json"), 1)
    assert data["wrong"] == 1
    assert "is of no run" in data["first"][0]


def test_without_a_disk_tier_the_verbs_say_so(tmp_path):
    """Refused by name."""
    with Daemon(tmp_path, host="128MiB", disk="0") as daemon:
        for word in ("usage", "scrub", "verify", "compact"):
            result = ctl(daemon, "disk", word)
            assert result.exit_code == 1
            assert "disk tier" in result.output


def test_compact_gathers_free_space_and_keeps_every_page(tmp_path):
    """Half of each slab is free: half of the slabs are free afterwards, and what was kept is bit-exact."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        runs = full_of_holes(owner)
        before = owner.tier.upkeep.usage()
        assert before["slabs_in_use"] == 16
        ended: list[str] = []
        owner.tier.upkeep.compact(ended.append)
        owner.wait(lambda: ended)
        after = owner.tier.upkeep.usage()
        assert ended == [""]
        assert after["slabs_in_use"] == 8
        assert after["scattered_bytes"] < before["scattered_bytes"]
        still_there(owner, runs)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        still_there(owner, runs)


def test_compact_shrinks_the_catalogue(tmp_path):
    """What was deleted takes no room in its file any more; all that is left is there after a restart."""
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        cache = owner.cache(SMALL)
        for seed in range(400):
            assert owner.submit(cache, seed, owner.items(cache, seed, 1), keys=owner.keys(cache, seed, 1))
        owner.wait(lambda: len(owner.results) == 400)
        runs = {run: seed for seed, (run, _) in owner.results.items()}
        gone = list(runs)[:-3]
        owner.tier.free([run << 6 for run in gone])
        assert owner.flush() == ""
        before = owner.tier.upkeep.usage()["catalogue_bytes"]
        ended: list[str] = []
        owner.tier.upkeep.compact(ended.append)
        owner.wait(lambda: ended)
        assert owner.tier.upkeep.usage()["catalogue_bytes"] < before / 2
        kept = list(runs)[-3:]
        more = owner.write(cache, 1000, 1)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        for run, seed in [*((run, runs[run]) for run in kept), (more, 1000)]:
            assert owner.read(cache, run, seed, 1) == [""]
        assert len(owner.runs) == 4


def test_a_rewrite_without_room_leaves_no_half_copy_behind(tmp_path):
    """It would keep the last room of a full file system for good. Nor does one that a crash cut off."""
    fresh = tmp_path / "d" / "catalogue" / "fresh"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        cache = owner.cache(SMALL)
        for seed in range(400):
            assert owner.submit(cache, seed, owner.items(cache, seed, 1), keys=owner.keys(cache, seed, 1))
        owner.wait(lambda: len(owner.results) == 400)
        ended: list[str] = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
        try:
            owner.tier.upkeep.compact(ended.append)
            owner.wait(lambda: ended)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert ended == ["no_space"]
        assert not fresh.exists()
        assert owner.write(cache, 1000, 1)
    fresh.mkdir()
    (fresh / "data.mdb").write_bytes(b"half")
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        assert len(owner.runs) == 401
        assert not fresh.exists()


def discard(owner: Owner) -> tuple[str, int]:
    """Discard and wait."""
    ended: list[tuple[str, int]] = []
    owner.tier.upkeep.discard(lambda *said: ended.append(said))
    owner.wait(lambda: ended)
    return ended[0]


def test_discarding_overwrites_where_holes_cannot_be_punched(tmp_path):
    """On a file system without holes the bytes are gone all the same, and only those that were free."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=Failing(punch=errno.EOPNOTSUPP)) as owner:
        runs = full_of_holes(owner)
        gone = owner.items(owner.cache(SMALL), 0, 16)[1].views[0].tobytes()
        assert gone in (tmp_path / "d" / "extents").read_bytes()
        error, size = discard(owner)
        assert (error, size) == ("", owner.tier.free_bytes)
        assert gone not in (tmp_path / "d" / "extents").read_bytes()
        still_there(owner, runs)


def test_a_failed_discard_is_named_and_can_be_asked_again(tmp_path):
    """EIO while punching: the caller hears io, nothing that is stored is harmed, writes go on."""
    calls = Failing(punch=errno.EIO)
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        runs = full_of_holes(owner)
        assert discard(owner)[0] == "io"
        calls.errors.clear()
        assert discard(owner)[0] == ""
        still_there(owner, runs)
        assert owner.tier.check() == []


def blocks(path: Path) -> set[bytes]:
    """What the extents have, in pieces of 4 KiB."""
    data = (path / "d" / "extents").read_bytes()
    return {data[at : at + 4096] for at in range(0, len(data), 4096)}


def test_a_slab_that_is_being_emptied_is_discarded_after_that(tmp_path):
    """Freed bytes in it are gone before anybody is told so; they would outlive the discard where it is passed over."""
    calls, copying, go = Failing(), threading.Event(), threading.Event()
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=128 * KIB, calls=calls) as owner:
        runs = full_of_holes(owner)
        small = owner.cache(SMALL)
        gone = {item.views[0].tobytes() for seed in runs.values() for item in owner.items(small, seed, 16)[1::2]}
        let, punch, preadv = threading.Event(), calls.punch, calls.preadv
        punched: list[int] = []

        def slow_punch(fd, offset, size):
            punched.append(offset // (128 * KIB))
            let.wait()
            punch(fd, offset, size)

        def slow_read(*args):
            copying.set()
            go.wait()
            return preadv(*args)

        calls.punch, calls.preadv = slow_punch, slow_read
        ended: list[tuple[str, int]] = []
        owner.tier.upkeep.discard(lambda *said: ended.append(said))
        owner.wait(lambda: punched)
        large = owner.cache(LARGE)
        assert not owner.submit(large, 1000, owner.items(large, 1000, 4), keys=owner.keys(large, 1000, 4))
        owner.wait(copying.is_set)
        let.set()
        owner.wait(lambda: 31 in punched)
        for _ in range(20):
            owner.step(0.01)
        assert ended == []
        go.set()
        owner.wait(lambda: ended)
        assert ended[0][0] == ""
        assert not gone & blocks(tmp_path)
        calls.punch, calls.preadv = punch, preadv
        still_there(owner, runs)
        assert owner.tier.check() == []


def test_slabs_that_the_file_system_had_no_room_for_are_discarded_too(tmp_path):
    """They take no more pages, but may have freed ones; afterwards they are as much in use as before."""
    calls = Failing()
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        cache = owner.cache(SMALL)
        run = owner.write(cache, 1, 16)
        gone = owner.items(cache, 1, 16)[3].views[0].tobytes()
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        cache = owner.cache(SMALL)
        calls.errors["fallocate"] = errno.ENOSPC
        assert owner.submit(cache, 2, owner.items(cache, 2, 4), keys=owner.keys(cache, 2, 4))
        owner.wait(lambda: 2 in owner.results)
        assert owner.results[2] == (None, "no_space")
        parked = owner.tier.stats["parked_bytes"]
        assert parked > 0
        owner.tier.free([run << 6 | 3])
        assert discard(owner)[0] == ""
        assert gone not in (tmp_path / "d" / "extents").read_bytes()
        assert owner.read(cache, run, 1, [0, 1, 2, 4, 15]) == [""] * 5
        assert owner.tier.stats["parked_bytes"] == parked + 4 * KIB
        assert owner.tier.check() == []


def test_several_discards_at_once_leave_nothing_and_work_as_two(tmp_path):
    """Who asks while one is done is served after it, with all who did, and asks nothing of the disk until then.

    What was freed while the first was done is gone, too.
    """
    calls, let = Failing(), threading.Event()
    punch, punched = calls.punch, list[int]()

    def slow_punch(fd, offset, size):
        punched.append(offset)
        let.wait()
        punch(fd, offset, size)

    calls.punch = slow_punch
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        runs = full_of_holes(owner)
        small = owner.cache(SMALL)
        gone = [owner.items(small, 0, 16)[page].views[0].tobytes() for page in (0, 1)]
        ended: list[tuple[str, int]] = []
        owner.tier.upkeep.discard(lambda *said: ended.append(said))
        owner.wait(lambda: punched)
        first = next(run for run, seed in runs.items() if seed == 0)
        owner.tier.free([first << 6])
        assert owner.flush() == ""
        for _ in range(3):
            owner.tier.upkeep.discard(lambda *said: ended.append(said))
        assert not any(owner.step(0.01) for _ in range(20)), "they go round while they wait"
        assert ended == [], "one of the others is done, and nothing is punched yet"
        let.set()
        owner.wait(lambda: len(ended) == 4)
        assert {error for error, _ in ended} == {""}
        assert not {*gone} & blocks(tmp_path)
        del runs[first]
        still_there(owner, runs)


@pytest.mark.parametrize("item_bytes", [50 * KIB, 3 * 4096], ids=["many cells an item", "a rest behind the last cell"])
def test_what_lay_where_an_item_leaves_room_is_discarded(tmp_path, item_bytes):
    """Cells and slabs of another size leave blocks that hold nothing: not what was stored there before, either."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        cache = owner.cache(SMALL)
        runs = [owner.write(cache, seed, 16) for seed in range(64)]
        gone = {item.views[0].tobytes() for seed in range(64) for item in owner.items(cache, seed, 16)}
        owner.tier.free([run << 6 | page for run in runs for page in range(16)])
        assert owner.flush() == ""
        other = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, item_bytes), model="other"))
        stored = {owner.write(other, seed, 4): seed for seed in range(100, 112)}
        assert discard(owner)[0] == ""
        assert not gone & blocks(tmp_path)
        for run, seed in stored.items():
            assert owner.read(other, run, seed, 4) == [""] * 4


def test_a_catalogue_that_was_set_aside_goes_with_what_is_discarded(tmp_path):
    """It has the token ids of everything that was stored then."""
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        owner.write(owner.cache(SMALL), 1, 4)
    catalogue = tmp_path / "d" / "catalogue" / "data.mdb"
    catalogue.write_bytes(b"\0" * 4096 + catalogue.read_bytes()[4096:])
    (tmp_path / "d" / "lock").write_text("crashed")
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        assert owner.tier.stats["set_aside"] == 1
        assert len(list((tmp_path / "d").glob("catalogue*"))) == 2
        kept = owner.write(owner.cache(SMALL), 2, 4)
        assert discard(owner)[0] == ""
        assert list((tmp_path / "d").glob("catalogue*")) == [tmp_path / "d" / "catalogue"]
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        assert owner.read(owner.cache(SMALL), kept, 2, 4) == [""] * 4


def test_closing_while_a_slab_is_emptied_leaves_nobody_waiting(tmp_path):
    """Who flushes, compacts or discards hears that the tier closes."""
    calls = Failing()
    owner = Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls)
    full_of_holes(owner)
    calls.gate.clear()
    large = owner.cache(LARGE)
    assert not owner.submit(large, 1, owner.items(large, 1, 4), keys=owner.keys(large, 1, 4))
    said: list[str] = []
    owner.tier.upkeep.compact(said.append)
    threading.Timer(0.1, calls.gate.set).start()
    owner.tier.close()
    owner.tier.flush(said.append)
    owner.tier.upkeep.compact(said.append)
    owner.tier.upkeep.discard(lambda error, _: said.append(error))
    while owner.step():
        pass
    assert said == ["closing"] * 4


def test_writes_during_a_discard_are_safe(tmp_path):
    """Pages stored while free space is being discarded are whole: a slab takes none while its gaps are punched."""
    with Owner(tmp_path / "d", 16 * MIB, slab_bytes=256 * KIB) as owner:
        cache = owner.cache(SMALL)
        runs, ended = {}, []
        for seed in range(150):
            runs[owner.write(cache, seed, 4)] = seed
            if seed % 3 == 0:
                gone = next(iter(runs))
                del runs[gone]
                owner.tier.free([gone << 6 | page for page in range(4)])
            if seed % 10 == 0:
                owner.tier.upkeep.discard(lambda *said: ended.append(said))
        owner.wait(lambda: len(ended) == 15)
        assert {error for error, _ in ended} == {""}
        for run, seed in runs.items():
            assert owner.read(cache, run, seed, 4) == [""] * 4


def test_a_rewritten_catalogue_has_its_name_before_anything_in_it_is_durable(tmp_path, monkeypatch):
    """The folder cannot be synced: the caller hears io, and no write is called durable until it could be."""
    from kvtier.tiers import catalogue

    def fail(*_: Path) -> None:
        raise OSError(errno.EIO, "injected")

    with Owner(tmp_path / "d", 4 * MIB) as owner:
        cache = owner.cache(SMALL)
        first = owner.write(cache, 1, 4)
        real = catalogue.sync_names
        monkeypatch.setattr(catalogue, "sync_names", fail)
        ended: list[str] = []
        owner.tier.upkeep.compact(ended.append)
        owner.wait(lambda: ended)
        assert ended == ["io"]
        assert owner.submit(cache, 2, owner.items(cache, 2, 1), keys=owner.keys(cache, 2, 1))
        owner.wait(lambda: 2 in owner.results)
        assert owner.results[2] == (None, "io")
        with contextlib.suppress(OSError):
            monkeypatch.setattr(catalogue, "sync_names", real)
        third = owner.write(cache, 3, 4)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        assert owner.read(cache, first, 1, 4) == [""] * 4
        assert owner.read(cache, third, 3, 4) == [""] * 4
