"""Emptying slabs: cells of one size make room for another's, and nobody notices but the clock."""

from __future__ import annotations

import errno
import threading

import numpy as np

from kvtier.identity import GroupSpec
from kvtier.tiers.ledger import Ledger
from kvtier.types import Kind
from tests.diskkit import KIB, MIB, Owner, spec, views
from tests.test_disk_faults import Failing

SMALL = spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB), model="small")
LARGE = spec(GroupSpec(Kind.FULL, 1, 1, 7000), model="large")
STATE = spec(GroupSpec(Kind.FULL, 1, 1, 4 * KIB), GroupSpec(Kind.STATE, 1, 1, 50 * KIB), model="state")


def full_of_holes(owner: Owner, keep: int = 2) -> dict[int, int]:
    """A tier of 4 MiB full of small pages of which every other one is freed: no slab is empty. Seed by run."""
    cache = owner.cache(SMALL)
    runs = {owner.write(cache, seed, 16): seed for seed in range(64)}
    owner.tier.free([run << 6 | page for run in runs for page in range(16) if page % keep])
    assert owner.flush() == ""
    return runs


def write_large(owner: Owner, seed: int) -> int:
    """Write pages of another size; wait for room once."""
    cache = owner.cache(LARGE)
    assert not owner.submit(cache, seed, owner.items(cache, seed, 4), keys=owner.keys(cache, seed, 4))
    assert owner.tier.refusal == "no_space"
    assert owner.flush() == ""
    return owner.write(cache, seed, 4)


def still_there(owner: Owner, runs: dict[int, int], keep: int = 2) -> None:
    """What was kept is bit-exact, what was freed is gone."""
    cache = owner.cache(SMALL)
    for run, seed in runs.items():
        assert owner.read(cache, run, seed, 16) == ["gone" if page % keep else "" for page in range(16)]


def test_a_sparse_slab_is_emptied_for_another_size(tmp_path):
    """Free space scattered over slabs of one size becomes a slab of another; nothing is lost, restarts included."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        runs = full_of_holes(owner)
        large = write_large(owner, 100)
        assert owner.tier.stats["slabs_emptied"] == 1
        assert owner.tier.check() == []
        still_there(owner, runs)
        assert owner.read(owner.cache(LARGE), large, 100, 4) == [""] * 4
        used = owner.tier.used_bytes
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        still_there(owner, runs)
        assert owner.read(owner.cache(LARGE), large, 100, 4) == [""] * 4
        assert owner.tier.used_bytes == used


def test_runs_that_a_restart_found_move_too(tmp_path):
    """Cells that were read back from the catalogue are moved like any others, and stay so over the next restart."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        runs = full_of_holes(owner)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        write_large(owner, 100)
        assert owner.tier.stats["slabs_emptied"] == 1
        assert owner.tier.check() == []
        still_there(owner, runs)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        still_there(owner, runs)


def test_all_free_space_can_be_had_in_another_size(tmp_path):
    """Slab after slab: half the tier, scattered as single cells, is used by larger ones in the end."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        runs = full_of_holes(owner)
        cache, stored, refused = owner.cache(LARGE), 0, 0
        while refused < 3:
            seed = 100 + stored
            if owner.submit(cache, seed, owner.items(cache, seed, 8), keys=owner.keys(cache, seed, 8)):
                stored, refused = stored + 1, 0
            else:
                refused += 1
                assert owner.flush() == ""
        owner.wait(lambda: len(owner.results) >= stored)
        assert owner.tier.free_bytes < 256 * KIB
        assert stored * 64 * KIB > 1700 * KIB
        still_there(owner, runs)


def test_items_of_many_cells_move_whole(tmp_path):
    """A state point of many cells, some of them in the slab, is read right while and after it moves."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        cache = owner.cache(STATE)
        runs = [owner.write(cache, seed, 4) for seed in range(4)]
        owner.tier.free([run << 6 | page for run in runs for page in (1, 3)])
        filler = owner.cache(SMALL)
        seed = 50
        while owner.submit(filler, seed, owner.items(filler, seed, 2), keys=owner.keys(filler, seed, 2)):
            seed += 1
        owner.wait(lambda: len([s for s in owner.results if s >= 50]) == seed - 50)
        owner.tier.free([owner.results[s][0] << 6 for s in range(50, seed)])
        owner.flush()
        write_large(owner, 100)
        assert owner.tier.stats["slabs_emptied"] >= 1
        for number, run in enumerate(runs):
            assert owner.read(cache, run, number, [0, 2]) == [""] * 4


def test_reads_that_overlap_a_move_see_their_bytes(tmp_path):
    """Old cells are not given away under a read that began before."""
    calls = Failing()
    real, inside, leave = calls.preadv, threading.Event(), threading.Event()
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        runs = full_of_holes(owner)
        cache = owner.cache(LARGE)
        slow = threading.current_thread()

        def preadv(fd, parts, offset):
            if threading.current_thread() is slow:
                inside.set()
                leave.wait()
            return real(fd, parts, offset)

        calls.preadv = preadv
        got = views(4 * KIB, 4 * KIB)
        run, seed = next(iter(runs.items()))
        said = []
        slow = threading.Thread(target=lambda: said.extend(owner.tier.read([(run << 6, 0, got)])))
        slow.start()
        inside.wait()
        assert not owner.submit(cache, 1, owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
        flushed = []
        owner.tier.flush(flushed.append)
        for _ in range(40):
            owner.step(0.01)
        assert flushed == []
        assert owner.tier.freeing_bytes > 0
        leave.set()
        slow.join()
        owner.wait(lambda: flushed)
        assert said == [""]
        assert np.array_equal(got[0], owner.items(owner.cache(SMALL), seed, 1)[0].views[0])
        still_there(owner, runs)


def test_pages_freed_while_they_move_are_free_in_the_end(tmp_path):
    """A free that overtakes a move leaves neither copy behind."""
    calls = Failing()
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        runs = full_of_holes(owner)
        cache = owner.cache(LARGE)
        calls.gate.clear()
        assert not owner.submit(cache, 1, owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
        owner.step(0.05)
        owner.tier.free([run << 6 | page for run in runs for page in range(16)])
        calls.gate.set()
        assert owner.flush() == ""
        owner.flush()
        assert owner.tier.check() == []
        assert (owner.tier.used_bytes, owner.tier.freeing_bytes) == (0, 0)
        assert owner.tier.free_bytes == 4 * MIB
        owner.write(cache, 100, 4)
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        assert len(owner.runs) == 1


def test_a_move_that_fails_changes_nothing(tmp_path):
    """EIO while copying: the pages stay where they are, and who waits is told all the same."""
    calls = Failing()
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls) as owner:
        runs = full_of_holes(owner)
        calls.errors["pwritev"] = errno.EIO
        cache = owner.cache(LARGE)
        assert not owner.submit(cache, 1, owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
        assert owner.flush() == ""
        assert owner.tier.check() == []
        still_there(owner, runs)
        calls.errors.clear()
        assert not owner.submit(cache, 1, owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
        owner.flush()
        owner.write(cache, 100, 4)


def test_closing_in_the_middle_of_a_move_loses_nothing(tmp_path):
    """Whoever waits hears closing; the next start finds every page."""
    calls = Failing()
    owner = Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB, calls=calls)
    runs = full_of_holes(owner)
    cache = owner.cache(LARGE)
    assert not owner.submit(cache, 1, owner.items(cache, 1, 4), keys=owner.keys(cache, 1, 4))
    said = []
    owner.tier.flush(said.append)
    owner.tier.close()
    assert said == ["closing"]
    with Owner(tmp_path / "d", 4 * MIB) as owner:
        still_there(owner, runs)


def test_a_slab_s_runs_are_looked_for_a_few_at_a_time(tmp_path, monkeypatch):
    """Each of them has cells by the dozen, and engines wait while they are looked at."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=64 * KIB) as owner:
        cache = owner.cache(SMALL)
        for seed in range(300):
            assert owner.submit(cache, seed, owner.items(cache, seed, 1), keys=owner.keys(cache, seed, 1))
        owner.wait(lambda: len(owner.results) == 300)
        owner.tier.free([run << 6 for run, _ in owner.results.values() if run % 2])
        assert owner.flush() == ""
        looks = [0]
        plan, step = Ledger.plan_move, owner.step

        def counted(ledger, run, slab):
            looks[-1] += 1
            return plan(ledger, run, slab)

        def next_step(timeout_s=0.0):
            looks.append(0)
            return step(timeout_s)

        monkeypatch.setattr(Ledger, "plan_move", counted)
        monkeypatch.setattr(owner, "step", next_step)
        said = []
        owner.tier.upkeep.compact(said.append)
        owner.wait(lambda: said)
        assert said == [""]
        assert owner.tier.stats["slabs_emptied"] > 1
        assert max(looks) <= 64


def test_damage_is_not_repaired_by_moving(tmp_path):
    """Bytes that were wrong before are wrong after: the sum is the item's, not the cell's."""
    with Owner(tmp_path / "d", 4 * MIB, slab_bytes=256 * KIB) as owner:
        runs = full_of_holes(owner)
        for run in runs:
            cell = owner.tier._ledger.runs[run].cells[0][0]
            with (tmp_path / "d" / "extents").open("r+b") as file:
                file.seek(cell * 4096)
                file.write(b"damaged")
        write_large(owner, 100)
        for run, seed in runs.items():
            assert owner.read(owner.cache(SMALL), run, seed, [0, 2]) == ["checksum", ""]
