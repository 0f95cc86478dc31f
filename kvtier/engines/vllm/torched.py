"""Copies by torch: where the KV is in the CPU's memory, or on a GPU that our kernels do not reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.client import Lease, Reservation
from kvtier.engines.vllm.copies import Arrived, wanted, whole_items
from kvtier.engines.vllm.messages import Blocks
from kvtier.engines.vllm.planes import NULL_BLOCK, Plane
from kvtier.types import stretches


class TorchCopies:
    """Copies by torch, page by page or many neighbours at once."""

    uuid = b""

    def __init__(self, planes: Sequence[Plane]) -> None:
        self._planes = planes
        self.aside = planes[0].on_cpu
        """A thread of its own copies; on a GPU copies are in the order of the stream that computes."""

    def load(self, lease: Lease, first: int, rows: Blocks, *, later: bool) -> Arrived:
        """Copy now."""
        del later
        done = 0
        for group, row in enumerate(rows):
            for begin, end in stretches(row, NULL_BLOCK):
                at = begin
                for pages in whole_items(lease, group, first + begin, end - begin):
                    pages.flags.writeable = True  # torch takes no other; it is only read
                    self._planes[group].load(row[at : at + len(pages)], pages)
                    at += len(pages)
                if at < end:
                    return Arrived(done, good=False)
                done += end - begin
        return Arrived(done, good=not lease.lost)

    def save(self, held: Reservation, first: int, rows: Blocks) -> Callable[[], int | None]:
        """Copy now, or in the thread where the KV is in the CPU's memory."""

        def copy() -> int | None:
            done = 0
            for group, row in enumerate(rows):
                copied = self._save(held, group, first, row)
                if copied is None:
                    return None
                done += copied
            return done

        if self.aside:
            return copy
        copied = copy()
        return lambda: copied

    def _save(self, held: Reservation, group: int, first: int, row: Sequence[int]) -> int | None:
        """Copy this process's part of every page of a group into its slots; how many, None where one is not there."""
        plane, done = self._planes[group], 0
        for lo, hi in wanted(held, group, first, len(row)):
            if NULL_BLOCK in row[lo:hi]:
                return None
            if held.cache.groups[group].slots_per_item > 1:
                item = np.empty((1, plane.group.item_bytes), np.uint8)
                plane.save(row[lo:hi], item)
                held.write(group, first + lo, plane.mine(item[0]))
            else:
                for at, pages in held.views(group, first + lo, hi - lo):
                    plane.save(row[lo + at : lo + at + len(pages)], pages)
            done += hi - lo
        return None if held.lost else done

    def fence(self) -> None:
        """Nothing: the thread is waited for, or the stream is in order."""

    def close(self) -> None:
        """Nothing is taken."""
