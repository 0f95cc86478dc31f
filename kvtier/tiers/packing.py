"""The job that packs the items of a run before they are written, where that pays."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier import codec
from kvtier.tiers.cells import BLOCK, Layout
from kvtier.tiers.layouts import SHARES
from kvtier.tiers.records import Item, Run, View


class Frame(NamedTuple):
    """A packed item: `size` bytes at the beginning of an aligned buffer that ends in zeros."""

    buffer: View
    size: int


class Packing:
    """Packs what of a run's items is worth it, in a lane; the owner gets each item's frame or None, in order."""

    def __init__(
        self,
        items: Sequence[Item],
        layouts: tuple[Layout, ...],
        post: Callable[..., Any],
        ended: Callable[[list[Frame | None]], None],
        dropped: Callable[[], None],
    ) -> None:
        self._items = items
        self._layouts = layouts
        self._post = post
        self._ended = ended
        self._dropped = dropped

    def run(self) -> None:
        """Pack, and tell the owner."""
        frames: list[Frame | None] = [None] * len(self._items)
        with contextlib.suppress(OSError, MemoryError):  # no memory to pack in: they are written as they are
            frames = [self._pack(item) for item in self._items]
        with contextlib.suppress(RuntimeError):  # the loop is closed: closing the tier ends what waits
            self._post(self._ended, frames)

    def _pack(self, item: Item) -> Frame | None:
        groups = len(self._layouts) // (1 + len(SHARES))
        most = max(self._layouts[virtual].blocks for virtual in range(item.group + groups, len(self._layouts), groups))
        frame = codec.pack(item.views, most * BLOCK) if most else None
        if frame is None:
            return None
        buffer: View = np.frombuffer(mmap.mmap(-1, most * BLOCK), np.uint8)
        buffer[: len(frame)] = np.frombuffer(frame, np.uint8)
        return Frame(buffer, len(frame))

    def drop(self) -> None:
        """The tier closes."""
        self._dropped()


def repacked(run: Run, item: Item, frame: Frame | None) -> Item:
    """What is written for an item: its frame, filled up with zeros, where its cell in the run is a packed one's."""
    if frame is None or run.parts[item.group][item.page * run.layouts[item.group].parts] >= 0:
        return item
    for at in range(item.group + run.groups, len(run.layouts), run.groups):
        if run.parts[at] and run.parts[at][item.page] >= 0:
            return Item(item.page, at, item.sum, [frame.buffer[: run.layouts[at].blocks * BLOCK]])
    return item
