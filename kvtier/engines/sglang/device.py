"""Pages of the KV that SGLang computes with, on a GPU or on the CPU: copied by torch, whichever device it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.client import Cache
from kvtier.engines.sglang.pools import LOAD_MS, STORE_MS, Pool, names
from kvtier.types import bad


class Sheets:
    """One pool of KV: in each of its buffers, layers of K and of V, a page is a row of bytes."""

    def __init__(self, buffers: Sequence[Any], page_size: int) -> None:
        """`buffers`: [slots, ...] each, the first page for padding. Raises bad_request for others."""
        if not buffers or not all(buffer.is_contiguous() and len(buffer) >= page_size for buffer in buffers):
            raise bad(
                "kv pool", "buffers in which a page's tokens follow each other", [tuple(b.shape) for b in buffers]
            )
        self.page_size = page_size
        self.shapes = [f"{buffer.dtype} {tuple(buffer.shape[1:])}" for buffer in buffers]
        self._device = buffers[0].device
        self._rows = [_rows(buffer, page_size) for buffer in buffers]
        ends = [0]
        for rows in self._rows:
            ends.append(ends[-1] + rows.shape[1] * rows.element_size())
        self._at = [slice(*ends[n : n + 2]) for n in range(len(self._rows))]
        self.item_bytes = ends[-1]

    def room(self, pages: int) -> Any:
        """Host memory for so many pages [pages, item_bytes]."""
        return torch.empty((pages, self.item_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def pages(self, indices: Any, count: int) -> Any:
        """Numbers of the pages that these slots are, on the host; none where they are not whole pages."""
        if indices is None or len(indices) != count * self.page_size:
            return []
        slots = indices.detach().cpu().reshape(count, self.page_size)
        first = slots[:, :1]
        whole = bool((first % self.page_size == 0).all()) and torch.equal(slots, first + torch.arange(self.page_size))
        return first[:, 0] // self.page_size if whole else []

    def out(self, pages: Any, room: Any) -> None:
        """Copy pages to host memory; done when it returns."""
        here = pages.to(self._device)
        there = room if self._device.type == "cpu" else torch.empty_like(room, device=self._device)
        for rows, at in zip(self._rows, self._at, strict=True):
            there[:, at] = rows[here].view(torch.uint8)
        if there is not room:
            room.copy_(there)

    def fill(self, pages: Any, room: Any) -> None:
        """Copy pages in from host memory, which may be used again then; what the stream does next sees them."""
        here, there = pages.to(self._device), room.to(self._device)
        for rows, at in zip(self._rows, self._at, strict=True):
            rows[here] = there[:, at].contiguous().view(rows.dtype)


class DevicePool(Pool):
    """Pages of such a pool under SGLang's hashes: by way of host memory, where they are verified and summed."""

    memory: Sheets

    def _pages(self, indices: Any, count: int) -> Any:
        """The pages' numbers."""
        return self.memory.pages(indices, count)

    def _load(self, cache: Cache, keys: Sequence[str], pages: Any) -> int:
        """Load as many leading pages as are there and may be held at once; how many."""
        with cache.acquire_keys(0, names(keys), wait_ms=LOAD_MS) as lease:
            room = self.memory.room(lease.pages)
            done = lease.read_pages(0, 0, room.numpy())
        self.memory.fill(pages[:done], room[:done])
        return done

    def _store(self, cache: Cache, keys: Sequence[str], pages: Any) -> int:
        """Store as many leading pages as there is room for now; how many."""
        with cache.reserve_keys(0, names(keys), wait_ms=STORE_MS) as held:
            if any(held.wants(0, page) for page in range(held.pages)):
                room = self.memory.room(held.pages)
                self.memory.out(pages[: held.pages], room)
                held.write_pages(0, 0, room.numpy(), summed=True)
            return held.commit()


def _rows(buffer: Any, page_size: int) -> Any:
    """A buffer as [pages, words of a page]: wide words, which copy faster."""
    rows = buffer[: len(buffer) // page_size * page_size].reshape(len(buffer) // page_size, -1)
    try:
        return rows.view(torch.int64)
    except RuntimeError:  # pages of another size
        return rows.view(torch.uint8)
