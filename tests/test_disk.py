"""The disk tier: what was written comes back, restarts included, and every cell is accounted for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtier.identity import GroupSpec
from kvtier.tiers.disk import DiskTier, Item
from kvtier.types import Code, Kind, KvtierError
from tests.diskkit import KIB, MIB, Owner, digest, spec, views

ROOT = Path(__file__).resolve().parent.parent
ODD = GroupSpec(Kind.FULL, 3, 1, 7001)
STATE = GroupSpec(Kind.STATE, 1, 1, 3 * MIB + 13)


def test_pages_come_back_bit_exact(tmp_path):
    """What is read is what was written, in one call for many pages."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        run = owner.write(cache, 1, 16)
        assert owner.read(cache, run, 1, 16) == [""] * 16


def test_a_restart_finds_every_run_as_it_was(tmp_path):
    """Keys, chains, parents, sums and bytes survive a close and an open."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        keys, chains = owner.keys(cache, 1, 5), bytes(range(80))
        run = owner.write(cache, 1, 5, parent=b"x" * 16, depth=7, chains=chains)
        used = owner.tier.used_bytes
    with Owner(tmp_path / "d") as owner:
        ((again, had_keys, had_chains),) = owner.runs
        assert (again.id, again.parent, again.depth, again.pages) == (run, b"x" * 16, 7, 5)
        assert (had_keys, had_chains) == (keys, chains)
        assert owner.tier.used_bytes == used
        assert owner.read(cache, run, 1, 5) == [""] * 5


@pytest.mark.parametrize("direct", [True, False])
def test_odd_lengths_and_items_of_many_slots_come_back(tmp_path, direct):
    """Items that are no multiple of 4 KiB, or lie in many slots and many cells, are whole after a restart."""
    which = spec(ODD, STATE)
    with Owner(tmp_path / "d", 32 * MIB, slab_bytes=2 * MIB, direct=direct) as owner:
        cache = owner.cache(which)
        run = owner.write(cache, 3, 2)
        assert owner.read(cache, run, 3, 2) == [""] * 4
    with Owner(tmp_path / "d", 32 * MIB, direct=direct) as owner:
        assert owner.read(cache, run, 3, 2) == [""] * 4


def test_pages_may_lack_items_of_some_groups(tmp_path):
    """Holes of a window, or states at few pages, are gone when asked for and cost no cells."""
    with Owner(tmp_path / "d", 32 * MIB) as owner:
        cache = owner.cache(spec(ODD, STATE))
        items = [i for i in owner.items(cache, 1, 4) if i.group == 0 or i.page == 3]
        assert owner.submit(cache, "run", items, keys=owner.keys(cache, 1, 4))
        owner.wait(lambda: owner.results)
        run = owner.results["run"][0]
        assert owner.read(cache, run, 1, 4) == ["", "gone", "", "gone", "", "gone", "", ""]
    with Owner(tmp_path / "d", 32 * MIB) as owner:
        assert owner.read(cache, run, 1, 4) == ["", "gone", "", "gone", "", "gone", "", ""]
        assert list(owner.runs[0][0].cells[1][:3]) == [-1, -1, -1]


def test_keyed_caches_need_no_parents(tmp_path):
    """Opaque keys come back as they were."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache(spec(key_bytes=36))
        keys = owner.keys(cache, 5, 3)
        owner.write(cache, 5, 3, parent=b"")
    with Owner(tmp_path / "d") as owner:
        ((run, had, chains),) = owner.runs
        assert (had, chains, run.parent) == (keys, b"", b"")


def test_runs_load_parents_before_children(tmp_path):
    """Depth never falls while loading, in whatever order runs were written."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        for seed, depth in enumerate([0, 300, 4, 1, 70000, 2, 256]):
            owner.write(cache, seed, 1, depth=depth)
    with Owner(tmp_path / "d") as owner:
        assert [run.depth for run, _, _ in owner.runs] == [0, 1, 2, 4, 256, 300, 70000]


def test_freed_pages_stay_freed_and_the_rest_stays(tmp_path):
    """A trimmed run serves its first pages only, after a restart too, and gives its space back exactly."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        run = owner.write(cache, 1, 8)
        other = owner.write(cache, 2, 8)
        owner.tier.free([run << 6 | page for page in range(5, 8)] + [other << 6 | page for page in range(8)])
        assert owner.tier.freeing_bytes == 11 * 16 * KIB
        assert owner.flush() == ""
        assert (owner.tier.freeing_bytes, owner.tier.used_bytes) == (0, 5 * 16 * KIB)
        assert owner.read(cache, run, 1, 8) == [""] * 5 + ["gone"] * 3
    with Owner(tmp_path / "d") as owner:
        assert [r.id for r, _, _ in owner.runs] == [run]
        assert owner.tier.used_bytes == 5 * 16 * KIB
        assert owner.read(cache, run, 1, 8) == [""] * 5 + ["gone"] * 3


def test_capacity_is_a_hard_limit_and_comes_back_in_full(tmp_path):
    """A full tier refuses by name, never grows, and takes as much again after everything was freed."""
    with Owner(tmp_path / "d", 1 * MIB, slab_bytes=64 * KIB) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB)))
        for round_ in range(3):
            runs = [owner.write(cache, seed, 16) for seed in range(16)]
            assert not owner.submit(cache, "more", owner.items(cache, 99, 1), keys=owner.keys(cache, 99, 1))
            assert owner.tier.refusal == Code.NO_SPACE
            assert owner.tier.free_bytes == 0, round_
            assert (tmp_path / "d" / "extents").stat().st_size == 1 * MIB
            owner.tier.free([run << 6 | page for run in runs for page in range(16)])
            assert owner.flush() == ""
            owner.results.clear()
        assert owner.tier.free_bytes == 1 * MIB


def test_cells_are_not_used_again_before_their_free_is_durable(tmp_path):
    """Between free and its sync a full tier still refuses."""
    with Owner(tmp_path / "d", 1 * MIB, slab_bytes=64 * KIB) as owner:
        cache = owner.cache(spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB)))
        runs = [owner.write(cache, seed, 16) for seed in range(16)]
        owner.tier.free([runs[0] << 6 | page for page in range(16)])
        assert not owner.submit(cache, "early", owner.items(cache, 50, 1), keys=owner.keys(cache, 50, 1))
        assert owner.flush() == ""
        owner.write(cache, 50, 16)


def test_a_dropped_cache_leaves_nothing(tmp_path):
    """Its runs go, its number never returns, other caches stay."""
    with Owner(tmp_path / "d") as owner:
        first, second = owner.cache(), owner.cache(spec(model="other"))
        for seed in range(20):
            owner.write(first, seed, 2)
        kept = owner.write(second, 100, 2)
        owner.tier.drop_cache(first)
        with pytest.raises(KvtierError, match="no cache"):
            owner.tier.write(first, b"", 0, b"", b"", [], print)
        owner.wait(lambda: owner.tier.used_bytes == 2 * 16 * KIB)
        owner.flush()
        assert owner.cache() > second
    with Owner(tmp_path / "d") as owner:
        assert [run.id for run, _, _ in owner.runs] == [kept]
        assert owner.tier.used_bytes == 2 * 16 * KIB


def test_a_cache_keeps_its_number(tmp_path):
    """The same id is the same cache, before and after a restart; records carry what the store needs."""
    with Owner(tmp_path / "d") as owner:
        number = owner.cache()
        assert owner.cache() == number
        assert owner.flush() == ""
    with Owner(tmp_path / "d") as owner:
        assert owner.cache() == number
        record = owner.tier.caches()[number]
        assert (record.spec, record.scope, record.epoch, record.item_bytes) == (spec(), "s", 0, (16 * KIB,))


def test_an_epoch_is_durable_before_it_is_said(tmp_path):
    """epoch() changes with the callback, and survives."""
    said = []
    with Owner(tmp_path / "d") as owner:
        owner.tier.set_epoch(b"b" * 32, 5, said.append)
        assert owner.tier.epoch(b"b" * 32) == 0
        owner.wait(lambda: said)
        assert (said, owner.tier.epoch(b"b" * 32)) == ([""], 5)
    with Owner(tmp_path / "d") as owner:
        assert owner.tier.epoch(b"b" * 32) == 5


def test_nothing_is_written_before_loading_ends(tmp_path):
    """Until the last record is read nobody knows which cells are free."""
    with Owner(tmp_path / "d", load=False) as owner:
        cache = owner.cache()
        assert owner.tier.state == "loading"
        assert not owner.submit(cache, "x", owner.items(cache, 1, 1), keys=owner.keys(cache, 1, 1))
        assert owner.tier.refusal == "loading"
        assert list(owner.tier.load()) == []
        assert owner.tier.state == "ready"
        owner.write(cache, 1, 1)


def test_a_full_queue_refuses_by_name(tmp_path):
    """Payload that waits is bounded; what was taken is written all the same."""
    with Owner(tmp_path / "d", queue_bytes=64 * KIB, linger_s=0.2) as owner:
        cache = owner.cache()
        assert owner.submit(cache, 0, owner.items(cache, 0, 4), keys=owner.keys(cache, 0, 4))
        assert owner.tier.queue_full(16 * KIB)
        assert not owner.submit(cache, 1, owner.items(cache, 1, 1), keys=owner.keys(cache, 1, 1))
        assert owner.tier.refusal == Code.BUSY
        owner.wait(lambda: owner.results)
        assert owner.results[0][1] == ""
        assert not owner.tier.queue_full(64 * KIB)


def test_runs_queued_together_share_commits(tmp_path):
    """Group commit: many runs at once cost few commits."""
    with Owner(tmp_path / "d", linger_s=0.1) as owner:
        cache = owner.cache()
        owner.flush()
        before = owner.tier.stats["commits"]
        for seed in range(20):
            assert owner.submit(cache, seed, owner.items(cache, seed, 2), keys=owner.keys(cache, seed, 2))
        owner.wait(lambda: len(owner.results) == 20)
        assert owner.tier.stats["commits"] - before <= 3


@pytest.mark.parametrize(
    "change",
    [
        {"keys": b"123"},
        {"keys": b""},
        {"items": []},
        {"items": [Item(9, 0, 0, [])]},
        {"items": [Item(0, 3, 0, [])]},
        {"items": [Item(0, 0, 0, []), Item(0, 0, 0, [])]},
    ],
)
def test_a_run_that_cannot_be_is_refused(tmp_path, change):
    """Odd keys, no items, items of no page or group, the same item twice."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        call = {"keys": owner.keys(cache, 1, 1), "items": owner.items(cache, 1, 1)} | change
        with pytest.raises(KvtierError) as caught:
            owner.submit(cache, "x", call["items"], keys=call["keys"], chains=b"")
        assert caught.value.code is Code.BAD_REQUEST
        assert owner.tier.used_bytes == 0


def test_an_unknown_handle_is_gone(tmp_path):
    """Reading or freeing what was never stored says so, and does no harm."""
    with Owner(tmp_path / "d") as owner:
        assert owner.tier.read([(77 << 6, 0, views(16 * KIB, 16 * KIB))]) == ["gone"]
        owner.tier.free([77 << 6, 5])


def test_what_cannot_be_aligned_goes_through_scratch(tmp_path):
    """Views at any address are written and read right."""
    with Owner(tmp_path / "d") as owner:
        cache = owner.cache()
        raw = np.random.default_rng(1).integers(0, 256, 16 * KIB + 1, np.uint8)
        parts = [raw[1:]]
        assert owner.submit(cache, 1, [Item(0, 0, digest(parts), parts)], keys=owner.keys(cache, 1, 1))
        owner.wait(lambda: owner.results)
        got = np.zeros(16 * KIB + 3, np.uint8)
        assert owner.tier.read([(owner.results[1][0] << 6, 0, [got[3:]])]) == [""]
        assert np.array_equal(got[3:], raw[1:])


def test_closing_ends_what_waits(tmp_path):
    """After close every callback has come, with success or a name, and calls say closing."""
    owner = Owner(tmp_path / "d")
    cache = owner.cache()
    for seed in range(10):
        owner.submit(cache, seed, owner.items(cache, seed, 2), keys=owner.keys(cache, seed, 2))
    owner.tier.close()
    assert set(owner.results) == set(range(10))
    assert {error for _, error in owner.results.values()} <= {"", "closing"}
    assert not owner.submit(cache, "x", owner.items(cache, 0, 1), keys=owner.keys(cache, 0, 1))
    assert owner.tier.refusal == Code.CLOSING
    assert owner.tier.read([(1 << 6, 0, [])]) == ["closing"]
    said = []
    owner.tier.flush(said.append)
    assert said == ["closing"]
    durable = {run for run, _ in owner.results.values() if run is not None}
    with Owner(tmp_path / "d") as again:
        assert {run.id for run, _, _ in again.runs} == durable


def test_a_second_process_is_told_who_holds_the_folder(tmp_path):
    """Two tiers on one directory: the second is refused with the directory and the holder's pid."""
    code = "import sys; from kvtier.tiers.disk import DiskTier; DiskTier(sys.argv[1], 1 << 20, post=print)"
    with Owner(tmp_path / "d"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "d")], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode != 0
        assert f"{tmp_path / 'd'} is in use by process {os.getpid()}" in done.stderr


def test_everything_is_private(tmp_path):
    """Folders 0700, files 0600, whatever the umask."""
    with Owner(tmp_path / "d") as owner:
        owner.write(owner.cache(), 1, 1)
        modes = {p.relative_to(tmp_path).as_posix(): p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    assert {mode for name, mode in modes.items() if (tmp_path / name).is_dir()} == {0o700}
    assert {mode for name, mode in modes.items() if not (tmp_path / name).is_dir()} == {0o600}


def test_a_tier_too_small_for_anything_is_refused(tmp_path):
    """Capacity below one smallest slab is named."""
    with pytest.raises(KvtierError, match=r"disk\.capacity_bytes"):
        DiskTier(tmp_path / "d", 1000, post=print)
