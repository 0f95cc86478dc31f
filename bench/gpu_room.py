"""An engine's blocks in GPU memory and slots in pinned memory, for the GPU's bench."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvtier import quant
from kvtier.device.layout import Paged, Plan, kv, plan
from kvtier.device.shuttle import Way
from kvtier.identity import GroupSpec
from kvtier.types import Kind

TOKENS, ITEM = 16, 2


class Form(NamedTuple):
    """The KV of one layer."""

    heads: int
    dim: int

    @property
    def bytes(self) -> int:
        """Of one block of 16 tokens, K and V."""
        return self.heads * TOKENS * 2 * self.dim * ITEM


USUAL = Form(8, 128)
"""64 KiB a block and layer."""


class Room(NamedTuple):
    """An engine's blocks in GPU memory and slots in pinned memory."""

    gpu: Any
    plan: Plan
    layers: list[tuple[Paged, ...]]
    ids: Any
    slots: Any
    kv: Any
    pinned: Any

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return len(self.slots) * self.plan.group.item_bytes

    def free(self) -> None:
        """Give the memory back."""
        self.kv.free()
        self.pinned.free()


def room(
    gpu: Any, layers: int, pages: int, name: str = "none", form: Form = USUAL, take: Callable[[int], Any] | None = None
) -> Room:
    """Pages of one block of `layers` layers each, NHD, scattered over twice as many blocks."""
    blocks = 2 * pages
    memory = (take or gpu.take)(layers * blocks * form.bytes)
    shape, row = (blocks, form.heads, TOKENS, 2 * form.dim), 2 * form.dim * ITEM
    strides = (form.bytes, row, form.heads * row, ITEM)
    dims = (form.dim, form.dim)
    planes = [kv(memory.address + n * blocks * form.bytes, shape, strides, dims, ITEM) for n in range(layers)]
    size = form.bytes // form.heads if name == "none" else quant.cell(quant.codec(name), TOKENS, dims).bytes
    group = GroupSpec(Kind.FULL, layers, form.heads, size)
    made = plan(planes, TOKENS, group, codec=name, element="bf16")
    pinned = gpu.pin(group.item_bytes * pages)
    slots = np.uint64(pinned.address) + np.arange(pages, dtype=np.uint64) * np.uint64(group.item_bytes)
    return Room(gpu, made, planes, np.random.default_rng(0).permutation(blocks)[:pages], slots, memory, pinned)


def gbps(size: int, stream: Any, act: Callable[[], None], times: int = 1) -> float:
    """GB/s of work that is queued on a stream, so many times one after the other, and waited for."""
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        act()
    stream.synchronize()
    return times * size / (time.perf_counter() - start) / 1e9


def ways(gpu: Any) -> list[Way]:
    """How pages can cross the link here."""
    return [way for way in Way if way is not Way.BATCHED or gpu.facts.batches]
