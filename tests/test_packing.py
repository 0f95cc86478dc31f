"""Compressed items on disk: bit-exact, in smaller cells only where that pays, and like any other in all else."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import codec
from kvtier.identity import GroupSpec
from kvtier.tiers.cells import BLOCK, layout_of
from kvtier.tiers.disk import Item
from kvtier.tiers.layouts import packed_group, packed_layouts
from kvtier.types import Kind
from tests.diskkit import KIB, MIB, Owner, digest, spec, view

PAGE = 64 * KIB
ONE = spec(GroupSpec(Kind.FULL, 1, 1, PAGE), model="one")
TWO = spec(GroupSpec(Kind.FULL, 1, 1, PAGE), GroupSpec(Kind.STATE, 1, 1, 500_001), model="two")


def numbers(seed: int, size: int = PAGE, spread: float = 1.0) -> np.ndarray:
    """Bytes of sixteen-bit floats as KV has them: the upper halves of normal 32-bit ones."""
    values = np.random.default_rng(seed).normal(0, spread, size // 2).astype("<f4")
    out = view(size)
    out[: size // 2 * 2] = (values.view("<u4") >> 16).astype("<u2").view(np.uint8)
    return out


def noise(seed: int, size: int = PAGE) -> np.ndarray:
    """Bytes that nothing compresses."""
    return view(size, seed)


def even(seed: int, size: int = PAGE) -> np.ndarray:
    """Bytes that shrink to almost nothing."""
    out = view(size)
    out[:] = seed % 251
    return out


KINDS = (numbers, noise, even)


def items_of(seed: int, pages: int, sizes: tuple[int, ...] = (PAGE,)) -> list[Item]:
    """Pages of the three kinds in turn."""
    out = []
    for page in range(pages):
        for group, size in enumerate(sizes):
            data = KINDS[(seed + page + group) % 3](seed * 100 + page * 10 + group, size)
            out.append(Item(page, group, digest([data]), [data]))
    return out


def put(owner: Owner, cache: int, seed: int, pages: int = 6) -> int:
    """Write a run and wait for it."""
    sizes = owner.tier.caches()[cache].item_bytes
    assert owner.submit(cache, seed, items_of(seed, pages, sizes), keys=owner.keys(cache, seed, pages))
    owner.wait(lambda: seed in owner.results)
    run, error = owner.results[seed]
    assert error == ""
    return run


def same(owner: Owner, cache: int, run: int, seed: int, pages: list[int]) -> list[str]:
    """What reading says of pages of a run; "differs" for wrong bytes."""
    sizes = owner.tier.caches()[cache].item_bytes
    want = [item for item in items_of(seed, max(pages) + 1, sizes) if item.page in pages]
    got = [view(sizes[item.group]) for item in want]
    said = owner.tier.read([(run << 6 | item.page, item.group, [out]) for item, out in zip(want, got, strict=True)])
    pairs = zip(said, want, got, strict=True)
    return [error or ("" if np.array_equal(out, item.views[0]) else "differs") for error, item, out in pairs]


@given(st.binary(max_size=5000), st.integers(1, 4), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_what_is_packed_comes_back(raw, cuts, repeat):
    """Any bytes, in any number of views, even or odd; or they are not packed."""
    data = np.frombuffer(raw * repeat, np.uint8)
    if not data.size:
        return
    views = np.array_split(data, min(cuts, data.size))
    frame = codec.pack(views, data.size)
    if frame is None:
        return
    assert len(frame) <= data.size
    out = [np.empty(part.size, np.uint8) for part in views]
    codec.unpack(np.frombuffer(frame + bytes(100), np.uint8), out)
    assert all(map(np.array_equal, out, views))


@given(st.binary(min_size=4, max_size=300), st.integers(0, 5000))
@settings(max_examples=150, deadline=None)
def test_a_damaged_frame_is_named(raw, size):
    """Whatever is in a frame, it is unpacked to that many bytes or refused; nothing else is raised."""
    with contextlib.suppress(codec.Unpackable):
        codec.unpack(np.frombuffer(raw, np.uint8), [np.empty(size, np.uint8)])


def test_packed_cells_are_at_most_four_sizes_a_group():
    """The full one and up to three smaller ones; an item of many cells, or of one block, has only its own."""
    layouts = tuple(layout_of(size, 64 << 20) for size in (PAGE, 4096, 100 << 20, 3 * BLOCK))
    packed = packed_layouts(layouts)
    groups = len(layouts)
    assert packed[:groups] == layouts
    sizes = [[each.blocks for each in packed[group::groups] if each.blocks] for group in range(groups)]
    assert sizes[0] == [16, 13, 11, 8]
    assert sizes[1] == [1]
    assert len(sizes[2]) == 1
    assert sizes[3] == [3, 2]
    assert packed_group(packed, 0, 11 * BLOCK) == 2 * groups
    assert packed_group(packed, 0, 11 * BLOCK + 1) == groups
    assert packed_group(packed, 0, 14 * BLOCK) == 0


def test_packed_pages_take_less_room_and_are_bit_exact(tmp_path):
    """Beside pages that do not shrink, after a restart, and with packing off again."""
    with Owner(tmp_path / "d", 32 * MIB, compress=True) as owner:
        cache = owner.cache(ONE)
        runs = {put(owner, cache, seed): seed for seed in range(6)}
        full = 36 * PAGE
        assert owner.tier.used_bytes < 0.8 * full
        assert owner.tier.stats["packed_bytes_saved"] == full - owner.tier.used_bytes
        assert owner.tier.check() == []
        for run, seed in runs.items():
            assert same(owner, cache, run, seed, list(range(6))) == [""] * 6
        used = owner.tier.used_bytes
    for compress in (False, True):
        with Owner(tmp_path / "d", 32 * MIB, compress=compress) as owner:
            cache = owner.cache(ONE)
            assert owner.tier.used_bytes == used
            for run, seed in runs.items():
                assert same(owner, cache, run, seed, list(range(6))) == [""] * 6
            more = put(owner, cache, 50)
            assert same(owner, cache, more, 50, list(range(6))) == [""] * 6
            owner.tier.forget(more)
            assert owner.flush() == ""


def test_sixteen_bit_numbers_are_worth_packing(tmp_path):
    """Floats as KV has them take the next smaller cells; noise takes its full ones."""
    with Owner(tmp_path / "d", 32 * MIB, compress=True) as owner:
        cache = owner.cache(ONE)
        run = put(owner, cache, 0, 3)
        stored = owner.tier._ledger.runs[run]
        blocks = [owner.tier._ledger.find(run << 6 | page, 0).cell_bytes // BLOCK for page in range(3)]
        assert blocks == [13, 16, 8]
        assert len(stored.layouts) == 4


def test_groups_of_many_cells_stay_as_they_are(tmp_path):
    """A state point over several cells beside packed pages."""
    with Owner(tmp_path / "d", 16 * MIB, slab_bytes=MIB, compress=True) as owner:
        cache = owner.cache(TWO)
        runs = {put(owner, cache, seed, 4): seed for seed in range(3)}
        for run, seed in runs.items():
            assert same(owner, cache, run, seed, [0, 1, 2, 3]) == [""] * 8
    with Owner(tmp_path / "d", 16 * MIB) as owner:
        for run, seed in runs.items():
            assert same(owner, owner.cache(TWO), run, seed, [0, 1, 2, 3]) == [""] * 8


def test_packed_pages_are_freed_and_moved_like_others(tmp_path):
    """Trimming, emptying slabs, discarding what was freed: what is left stays bit-exact, cells add up."""
    with Owner(tmp_path / "d", 16 * MIB, slab_bytes=MIB, compress=True) as owner:
        cache = owner.cache(ONE)
        runs = {put(owner, cache, seed): seed for seed in range(30)}
        assert owner.tier.stats["packed_bytes_saved"] > 0
        owner.tier.free([run << 6 | page for run in runs for page in (3, 4, 5)])
        for run in list(runs)[::2]:
            owner.tier.forget(run)
            del runs[run]
        assert owner.flush() == ""
        ended = []
        owner.tier.upkeep.compact(ended.append)
        owner.wait(lambda: ended)
        owner.tier.upkeep.discard(lambda *said: ended.append(said))
        owner.wait(lambda: len(ended) == 2)
        assert owner.tier.stats["slabs_emptied"] > 0
        assert owner.tier.check() == []
        for run, seed in runs.items():
            assert same(owner, cache, run, seed, [0, 1, 2]) == [""] * 3
        owner.wait(lambda: owner.flush() == "")
        after, wrong = b"", []
        after, _, wrong = owner.tier.upkeep.compare(after)
        assert wrong == []
        used = owner.tier.used_bytes
    with Owner(tmp_path / "d", 16 * MIB) as owner:
        assert owner.tier.used_bytes == used
        for run, seed in runs.items():
            assert same(owner, owner.cache(ONE), run, seed, [0, 1, 2]) == [""] * 3


@pytest.mark.parametrize("at", [0, 2, 5, 500])
def test_a_flip_in_a_packed_page_is_a_miss(tmp_path, at):
    """In its length (which may do no harm), in its data: never other bytes, and its neighbours are right."""
    with Owner(tmp_path / "d", 16 * MIB, compress=True) as owner:
        cache = owner.cache(ONE)
        run = put(owner, cache, 0, 3)
        place = owner.tier._ledger.find(run << 6 | 2, 0)
        assert place.packed
        with (tmp_path / "d" / "extents").open("r+b") as file:
            file.seek(place.cells[0] * BLOCK + at % 30)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x41]))
        said = same(owner, cache, run, 0, [0, 1, 2])
        assert said[:2] == ["", ""]
        assert said[2] == "checksum" or (at < 4 and said[2] == "")


def test_a_full_tier_packs_within_its_bounds(tmp_path):
    """Room is taken for full cells first, so packing fails no write; what it saves is used by later ones."""
    with Owner(tmp_path / "d", 16 * MIB, slab_bytes=MIB, compress=True) as owner:
        cache, seed, refused = owner.cache(ONE), 0, 0
        while refused < 3:
            items = [Item(page, 0, digest([data]), [data]) for page in range(2) for data in [even(seed * 2 + page)]]
            if owner.submit(cache, seed, items, keys=owner.keys(cache, seed, 2)):
                seed, refused = seed + 1, 0
                owner.wait(lambda many=seed: len(owner.results) == many)
            else:
                refused += 1
                assert owner.flush() == ""
            owner.step(0.01)
        owner.wait(lambda: len(owner.results) == seed)
        assert {error for _, error in owner.results.values()} == {""}
        assert seed * 2 * PAGE > 1.4 * owner.tier.capacity_bytes
        assert owner.tier.check() == []


def test_closing_while_runs_are_being_packed(tmp_path):
    """Nobody hangs: each write is durable or refused as closing."""
    owner = Owner(tmp_path / "d", 32 * MIB, compress=True)
    cache = owner.cache(ONE)
    for seed in range(20):
        assert owner.submit(cache, seed, items_of(seed, 4), keys=owner.keys(cache, seed, 4))
    owner.tier.close()
    while owner.step():
        pass
    assert {error for _, error in owner.results.values()} <= {"", "closing"}
    assert len(owner.results) == 20
    with Owner(tmp_path / "d", 32 * MIB) as again:
        for seed, (run, error) in owner.results.items():
            if not error:
                assert same(again, again.cache(ONE), run, seed, [0, 1, 2, 3]) == [""] * 4
