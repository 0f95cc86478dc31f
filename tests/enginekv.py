"""An engine's paged KV for the device tests: any physical order, filled with bytes or with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvtier import quant
from kvtier.device.layout import Paged, Plan, kv, plan
from kvtier.identity import GroupSpec
from kvtier.types import Kind

Take = Callable[[int], tuple[int, np.ndarray]]


class Shape(NamedTuple):
    """`order` is the physical order of layers, blocks, heads, tokens (N) and content, as vLLM names its layouts."""

    order: str
    layers: int
    blocks: int
    heads: int
    tokens: int
    dims: tuple[int, ...]
    item: int


class EngineKv:
    """One allocation with all layers."""

    def __init__(self, shape: Shape, take: Take) -> None:
        self.shape = shape
        sizes = dict(zip("LBHNC", (*shape[1:5], sum(shape.dims)), strict=True))
        step, self.strides = shape.item, {}
        for axis in reversed(shape.order):
            self.strides[axis] = step
            step *= sizes[axis]
        self.address, self.bytes = take(step)
        strides = [self.strides[axis] for axis in "BHNC"]
        self.layers: list[Sequence[Paged]] = [
            kv(self.address + layer * self.strides["L"], [sizes[a] for a in "BHNC"], strides, shape.dims, shape.item)
            for layer in range(shape.layers)
        ]

    def plan(self, page_tokens: int, name: str = "none", element: str = "bf16") -> Plan:
        """How its pages move."""
        shape = self.shape
        size = page_tokens * sum(shape.dims) * shape.item
        if name != "none":
            size = quant.cell(quant.codec(name), page_tokens, shape.dims).bytes
        group = GroupSpec(Kind.FULL, shape.layers, shape.heads, size)
        return plan(self.layers, page_tokens, group, codec=name, element=element)

    def logical(self) -> np.ndarray:
        """A view of the bytes as [layers, blocks, heads, tokens, content bytes]."""
        sizes = dict(zip("LBHNC", (*self.shape[1:5], sum(self.shape.dims)), strict=True))
        dims = [sizes[axis] for axis in self.shape.order[:-1]]
        view = self.bytes.reshape(*dims, -1)
        return np.moveaxis(view, [self.shape.order.index(axis) for axis in "LBHN"], range(4))

    def page(self, ids: Sequence[int]) -> np.ndarray:
        """The canonical page of some blocks, by plain numpy: [layers, heads, K rows of all tokens, then V rows]."""
        logical = self.logical()
        rows = np.concatenate([logical[:, block] for block in ids], axis=2)
        cuts = np.cumsum(self.shape.dims)[:-1] * self.shape.item
        parts = [part.reshape(*rows.shape[:2], -1) for part in np.split(rows, cuts, axis=3)]
        return np.concatenate(parts, axis=2).reshape(-1)


def numbers(count: int, seed: int, element: str = "bf16") -> np.ndarray:
    """`count` bytes of KV-like numbers: outlying channels, some zeros, some extremes."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count // 2).astype(np.float32) * np.exp(random.standard_normal(count // 2) * 2)
    values = (values + 4 * np.sin(np.arange(count // 2) % 64)).astype(np.float32)
    values[random.random(len(values)) < 0.02] = 0
    return quant.narrow(values, element).view(np.uint8)
