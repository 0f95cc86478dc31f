"""The way of pages is chosen by measurement: a device whose costs are known, the file that keeps the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.device.base import Facts
from kvtier.device.find import open_device
from kvtier.device.host import HostDevice
from kvtier.device.paths import COUNTS, SIZES, Paths, best, cases
from kvtier.device.shuttle import FEW_BLOCKS, Way
from test_device_streams import PAGES, Story


class Costly(HostDevice):
    """A device on which work takes as long as it is said to: copies 10 us and 50 GB/s, kernels 5 us and what fits."""

    def __init__(self, reach: float = 20e9, few: float = 10e9, driver: int = 1, *, moves: bool = False) -> None:
        self.facts = Facts("costly", b"costly" + bytes(10), 100, 90, driver)
        self.now = 0.0
        self.reach, self.few = reach, few
        self.moves = moves
        """Whether bytes are really moved."""
        self.launches: list[int] = []
        self.pinned: list[tuple[int, int]] = []

    def copies(self, targets: Any, sources: Any, sizes: Any, stream: Any) -> None:
        self.now += sum(10e-6 + size / 50e9 for size in sizes)
        if self.moves:
            super().copies(targets, sources, sizes, stream)

    def launch(self, op: Any, stream: Any, blocks: int = 0) -> None:
        self.launches.append(blocks)
        size = op.sheet.row * op.sheet.heads * op.sheet.tokens * op.per * op.planes
        far = any(low <= int(op.slots[0]) < high for low, high in self.pinned)
        rate = 2e12 if not far else self.few if blocks else self.reach
        self.now += 5e-6 + len(op.slots) * size / rate
        if self.moves:
            super().launch(op, stream, blocks)

    def take(self, size: int) -> Any:
        memory = super().take(size)
        low, high = memory.address, memory.address + size
        self.pinned = [one for one in self.pinned if one[1] <= low or high <= one[0]]  # what was there is free again
        return memory

    def pin(self, size: int) -> Any:
        memory = super().pin(size)
        self.pinned.append((memory.address, memory.address + size))
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
    paths = Paths(device, tmp_path)
    assert len(paths.rows()) == len(list(cases()))
    assert Paths(device, tmp_path).rows() == paths.rows()
    assert np.isfinite([value for row in paths.seconds.values() for value in row.values()]).all()
