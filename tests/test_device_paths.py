"""The way of pages is chosen by measurement: a device whose costs are known, the file that keeps the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.device.base import Facts
from kvtier.device.find import open_device
from kvtier.device.host import HostBuffer, HostDevice
from kvtier.device.paths import COUNTS, SIZES, Memory, Paths, best, cases
from kvtier.device.shuttle import FEW_BLOCKS, Way
from kvtier.mover import Urgency
from kvtier.store.carrier import Carrier
from kvtier.tiers.pool import Span
from kvtier.types import Code, KvtierError
from test_device_streams import PAGES, Story


class Costly(HostDevice):
    """A device on which work takes as long as it is said to: copies 10 us and 50 GB/s, kernels 5 us and what fits."""

    def __init__(
        self,
        reach: float = 20e9,
        few: float = 10e9,
        driver: int = 1,
        *,
        moves: bool = False,
        batches: bool = False,
        reaches: bool = False,
    ) -> None:
        self.facts = Facts("costly", b"costly" + bytes(10), 100, 90, driver, batches, reaches)
        self.now = 0.0
        self.reach, self.few = reach, few
        self.moves = moves
        """Whether bytes are really moved."""
        self.launches: list[int] = []
        self.calls: list[tuple[int, bool]] = []
        """Copies of each call, and whether it was one of the driver's."""
        self.taken: list[tuple[int, int]] = []

    def copies(self, targets: Any, sources: Any, sizes: Any, stream: Any, batched: bool = False) -> None:
        self.calls.append((len(sizes), batched))
        self.now += sum(size / 50e9 for size in sizes) + 10e-6 * (1 if batched else len(sizes))
        if self.moves:
            super().copies(targets, sources, sizes, stream, batched)

    def launch(self, op: Any, stream: Any, blocks: int = 0) -> None:
        self.launches.append(blocks)
        size = op.sheet.row * op.sheet.heads * op.sheet.tokens * op.per * op.planes
        far = not any(low <= int(op.slots[0]) < high for low, high in self.taken)
        rate = 2e12 if not far else self.few if blocks else self.reach
        self.now += 5e-6 + len(op.slots) * size / rate
        if self.moves:
            super().launch(op, stream, blocks)

    def take(self, size: int) -> Any:
        memory = super().take(size)
        place, free = (memory.address, memory.address + size), memory.free
        self.taken.append(place)
        memory.free = lambda: (self.taken.remove(place), free())
        return memory


def test_each_case_goes_the_way_that_was_fastest(tmp_path: Path):
    """Many small pages by kernels that reach the slots, large ones by the copy engine, few and alike by little."""
    device = Costly()
    paths = Paths(device, tmp_path, lambda: device.now)
    for case in cases():
        assert paths.way(*case) is best(paths.seconds[case])
    assert paths.way(True, 1 << 20, 16) is Way.STAGED
    assert paths.way(True, 4096, 1) is Way.FEW
    slow_link = Costly(reach=1e9, few=1e9)
    slow = Paths(slow_link, tmp_path / "slow", lambda: slow_link.now)
    assert slow.way(False, 64 << 10, 256) is Way.STAGED
    fast_link = Costly(reach=400e9, few=40e9)  # a GPU that reaches host memory at full rate
    fast = Paths(fast_link, tmp_path / "fast", lambda: fast_link.now)
    assert fast.way(False, 1 << 20, 16) is Way.DIRECT


def test_sizes_between_go_like_the_next_that_was_measured(tmp_path: Path):
    """Any page size and count has a way, in each direction."""
    device = Costly()
    paths = Paths(device, tmp_path, lambda: device.now)
    assert paths.way(True, 5000, 2) is paths.way(True, SIZES[0], COUNTS[0])
    assert paths.way(False, 8 << 20, 512) is paths.way(False, 1 << 20, 16)


def test_what_was_measured_is_kept_for_the_same_device_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second start measures nothing; another driver measures anew; a damaged file is measured again."""
    monkeypatch.setattr("kvtier.device.paths.SIZES", SIZES[:2])
    device = Costly()
    first = Paths(device, tmp_path, lambda: device.now)
    again = Costly()
    assert Paths(again, tmp_path, lambda: again.now).rows() == first.rows()
    assert not again.launches
    newer = Costly(driver=2)
    Paths(newer, tmp_path, lambda: newer.now)
    assert newer.launches
    kept = first.file.read_text()
    for damage in (
        "",
        kept[:-20],
        kept.replace("staged", "sideways"),
        json.dumps([1]),
        kept.replace('"rows": [[', '"rows": [[['),
    ):
        first.file.write_text(damage)
        other = Costly(driver=2)
        assert Paths(other, tmp_path, lambda other=other: other.now).rows()
        assert other.launches


def test_a_batch_of_copies_is_one_of_the_ways(tmp_path: Path):
    """Where the driver has it: measured like the others, and taken where it is fastest; a new ability measures anew."""
    device = Costly(reach=1e9, few=1e9, batches=True)
    paths = Paths(device, tmp_path, lambda: device.now)
    assert paths.way(False, 64 << 10, 256) is Way.BATCHED
    assert {Way.BATCHED, Way.STAGED} <= set(next(iter(paths.seconds.values())))
    older = Costly(reach=1e9, few=1e9)
    assert Paths(older, tmp_path, lambda: older.now).way(False, 64 << 10, 256) is Way.STAGED
    assert older.launches


def test_a_way_that_the_driver_refuses_is_none(tmp_path: Path):
    """The call is there and fails, as some drivers do: the others are measured, it is tried once and never taken."""

    class Refusing(Costly):
        def copies(self, targets: Any, sources: Any, sizes: Any, stream: Any, batched: bool = False) -> None:
            super().copies(targets, sources, sizes, stream, batched)
            if batched:
                raise KvtierError(Code.IO, "cuMemcpyBatchAsync: invalid argument (1)")

    device = Refusing(batches=True)
    paths = Paths(device, tmp_path, lambda: device.now)
    assert Way.BATCHED not in {paths.way(*case) for case in cases()}
    assert sum(batched for _, batched in device.calls) == 1
    again = Paths(device, tmp_path, lambda: 1 / 0)
    assert again.seconds == paths.seconds


def test_a_device_without_room_for_it_is_left_as_it_was(tmp_path: Path):
    """All memory but a little is the tier's: nothing can be measured, and nothing of the little is kept."""

    class Small(Costly):
        def take(self, size: int) -> Any:
            if self.taken:
                raise KvtierError(Code.NO_SPACE, "out of memory")
            return super().take(size)

    device = Small()
    with pytest.raises(KvtierError, match="out of memory"):
        Paths(device, tmp_path, lambda: device.now)
    assert device.taken == []


def test_a_device_that_fails_has_no_table(tmp_path: Path):
    """What no driver refuses was: nothing is kept, and it is the caller's to hear."""
    device = Costly()
    device.launch = lambda *_: (_ for _ in ()).throw(KvtierError(Code.IO, "an illegal memory access"))
    with pytest.raises(KvtierError, match="illegal"):
        Paths(device, tmp_path, lambda: device.now)
    assert not list(tmp_path.iterdir())


def test_slots_that_are_not_pinned_have_a_table_of_their_own(tmp_path: Path):
    """Kernels are not among the ways, unless they reach all host memory."""
    device, grace = Costly(), Costly(400e9, 300e9, reaches=True)
    pinned = Paths(device, tmp_path, lambda: device.now)
    paged = Paths(device, tmp_path, lambda: device.now, Memory.PAGED)
    assert pinned.file != paged.file
    assert set().union(*paged.seconds.values()) == {Way.STAGED}
    near = Paths(grace, tmp_path, lambda: grace.now, Memory.PAGED)
    assert set().union(*near.seconds.values()) == {Way.STAGED, Way.FEW, Way.DIRECT}


# -- in the daemon -----------------------------------------------------------------------------------------------------

SLOT, SLOTS = 64 << 10, 32


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("load", [False, True])
async def test_the_daemon_copies_slots_by_the_way_that_was_fastest(tmp_path: Path, way: Way, load: bool):
    """Up and down, scattered over both memories: the bytes are right, by one call, many, or kernels of few blocks."""
    rates = {Way.DIRECT: (400e9, 4e9), Way.FEW: (400e9, 395e9)}.get(way, (1e9, 1e9))
    made = [
        Costly(*rates, moves=move, batches=way is Way.BATCHED, reaches=way in {Way.FEW, Way.DIRECT})
        for move in (False, True)
    ]
    Paths(made[0], tmp_path, lambda: made[0].now, Memory.PAGED)
    device, host = made[1], HostBuffer(2 * SLOTS * SLOT)
    carrier = Carrier(lambda: device, 2 * SLOTS * SLOT, folder=tmp_path)
    try:
        there = carrier.shared.memory.data[: 2 * SLOTS * SLOT].reshape(-1, SLOT)
        here = host.data.reshape(-1, SLOT)
        source, target = (here, there) if load else (there, here)
        source[:] = np.random.default_rng(0).integers(0, 256, source.shape, np.uint8)
        target[:] = 0
        at = np.random.default_rng(1).permutation(2 * SLOTS)[:SLOTS]
        to = np.random.default_rng(2).permutation(2 * SLOTS)[:SLOTS]
        pairs = [
            ([Span(source[a].ctypes.data, SLOT)], [Span(target[b].ctypes.data, SLOT)])
            for a, b in zip(at, to, strict=True)
        ]
        await carrier.copy(pairs, Urgency.LOAD)
        assert np.array_equal(target[to], source[at])
        assert not np.delete(target, to, axis=0).any()
        kernels = {Way.DIRECT: [0], Way.FEW: [FEW_BLOCKS]}.get(way, [])
        assert device.launches == kernels
        assert [batched for _, batched in device.calls] == [way is Way.BATCHED] * (not kernels)
    finally:
        carrier.close()


async def test_slots_of_all_sizes_and_directions_go_by_kernels_at_once(tmp_path: Path):
    """One request that brings some up and some down, and items over several slots: one kernel for each kind."""
    tables = Costly(400e9, 4e9, reaches=True)
    Paths(tables, tmp_path, lambda: tables.now, Memory.PAGED)
    device, host = Costly(400e9, 4e9, moves=True, reaches=True), HostBuffer(16 * 8192)
    carrier = Carrier(lambda: device, 16 * 8192, folder=tmp_path)
    try:
        there, here = carrier.shared.memory.data[: 16 * 8192], host.data
        for seed, data in enumerate((there, here)):
            data[:] = np.random.default_rng(seed).integers(0, 256, len(data), np.uint8)
        before = there.copy(), here.copy()
        spans = [(0, 8192), (8192, 4016), (24576, 8192), (32768, 4016)]
        up = [Span(host.address + at, size) for at, size in spans]
        down = [Span(carrier.base + 65536 + at, size) for at, size in spans]
        await carrier.copy(
            [(up, [Span(carrier.base + at, size) for at, size in spans])]
            + [([one], [Span(host.address + 65536 + at, size)]) for one, (at, size) in zip(down, spans, strict=True)],
            Urgency.LOAD,
        )
        for at, size in spans:
            assert np.array_equal(there[at : at + size], before[1][at : at + size])
            assert np.array_equal(here[65536 + at :][:size], before[0][65536 + at :][:size])
        assert np.array_equal(there[65536:], before[0][65536:])
        assert len(device.launches) == 4
    finally:
        carrier.close()


async def test_a_device_without_room_to_measure_is_used_all_the_same(tmp_path: Path):
    """Its memory is the tier's: nothing is left to measure with, and copies go one by one."""

    class Full(Costly):
        def take(self, size: int) -> Any:
            raise KvtierError(Code.NO_SPACE, f"taking {size} bytes: out of memory")

    carrier = Carrier(lambda: Full(moves=True, batches=True), 4096, folder=tmp_path)
    try:
        assert not carrier.sick
        assert carrier.way is Way.STAGED
        assert not list(tmp_path.iterdir())
    finally:
        carrier.close()


def test_a_folder_that_cannot_be_written_costs_only_the_next_start(tmp_path: Path):
    """The table is used all the same."""
    (tmp_path / "file").write_text("")
    device = Costly()
    assert Paths(device, tmp_path / "file" / "below", lambda: device.now).rows()


@pytest.mark.parametrize("way", list(Way))
def test_pages_are_the_same_by_each_way(way: Way):
    """Whatever is chosen, for each transfer anew, the bytes are right and kernels get as few blocks as were said."""
    device = Costly(moves=True)
    asked: list[tuple[bool, int]] = []

    def choose(load: bool, _size: int, pages: int) -> Way:
        asked.append((load, pages))
        return way

    assert not Story(device, way=choose).tell()
    assert {(False, PAGES), (True, PAGES)} <= set(asked)
    assert {blocks > 0 for blocks in device.launches} == {way is Way.FEW}
    assert max(device.launches) == FEW_BLOCKS * (way is Way.FEW)


@pytest.mark.gpu
def test_a_gpu_has_a_way_for_every_case(tmp_path: Path):
    """Measured on the GPU that is here, kept, and read again."""
    device, reason = open_device()
    if reason:
        pytest.skip(reason)
    for memory in Memory:
        paths = Paths(device, tmp_path, memory=memory)
        assert len(paths.rows()) == len(list(cases()))
        assert Paths(device, tmp_path, memory=memory).rows() == paths.rows()
        assert np.isfinite([value for row in paths.seconds.values() for value in row.values()]).all()
