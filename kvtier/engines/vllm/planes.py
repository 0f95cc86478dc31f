"""vLLM's paged KV as pages of kvtier: one strided view per group, and a copy per page in each direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from kvtier.client.layout import Bytes
from kvtier.identity import GroupSpec, Slice
from kvtier.types import bad

NULL_BLOCK: Final = 0
"""vLLM's block that holds nothing: where a window group keeps no KV for a page."""


class Plane:
    """The KV of one group in this process: bytes by block, layer, head, kernel block, token and content.

    Where the layers lie at equal distances in one allocation, as vLLM allocates them, a page is one copy, whatever
    the physical order; else it is a copy per layer.
    """

    def __init__(self, tensors: Sequence[Any], blocks: int, group: GroupSpec, part: Slice | None) -> None:
        """`tensors`: logical [B, H, N, C] of each layer. Raises bad_request where they are not of the group's shape."""
        self.group = group
        self.part = part or Slice(0, group.layers, 0, group.heads)
        views = [_bytes(tensor, blocks) for tensor in tensors]
        shape = (self.part.l1 - self.part.l0, self.part.h1 - self.part.h0)
        cell = views[0][0, 0].numel() * views[0].element_size()
        if (len(views), views[0].shape[1]) != shape or cell != group.cell_bytes:
            raise bad("kv_caches", f"{shape} layers and heads of {group.cell_bytes} bytes", tuple(views[0].shape))
        if len({(view.shape, view.stride()) for view in views}) != 1:
            raise bad("kv_caches", "layers of one shape in a group", {tuple(view.shape) for view in views})
        self._whole = _together(views)
        self._views = views

    def load(self, block: int, page: Bytes) -> None:
        """Copy this process's cells of a whole page into a block."""
        cells = self._cells(page)
        if self._whole is not None:
            self._whole[block].copy_(cells)
            return
        for view, cell in zip(self._views, cells, strict=True):
            view[block].copy_(cell)

    def save(self, block: int, page: Bytes) -> None:
        """Copy a block into this process's cells of a whole page."""
        cells = self._cells(page)
        if self._whole is not None:
            cells.copy_(self._whole[block])
            return
        for view, cell in zip(self._views, cells, strict=True):
            cell.copy_(view[block])

    def _cells(self, page: Bytes) -> Any:
        """This process's cells of a page, in the shape of a block."""
        group, part = self.group, self.part
        flat = torch.from_numpy(page).view(self._views[0].dtype)
        cells = flat.view(group.layers, group.heads, *self._views[0].shape[2:])
        return cells[part.l0 : part.l1, part.h0 : part.h1]


def _bytes(tensor: Any, blocks: int) -> Any:
    """Integers [B, H, R, N, C], with R kernel blocks to a block of vLLM's manager: wide ones, which copy faster."""
    if tensor.ndim != 4:
        raise bad("kv_caches", "views [blocks, heads, tokens, content]", tuple(tensor.shape))
    ratio, rest = divmod(tensor.shape[0], blocks)
    if rest or not ratio:
        raise bad("kv_caches", f"a multiple of {blocks} blocks", tensor.shape[0])
    try:
        words = tensor.view(torch.int64)
    except RuntimeError:  # content of another size
        words = tensor.view(torch.uint8)
    return words.unflatten(0, (blocks, ratio)).transpose(1, 2)


def _together(views: Sequence[Any]) -> Any:
    """[B, L, H, R, N, C] over all layers; None where they do not lie at equal distances in one allocation."""
    first = views[0]
    if len({view.untyped_storage().data_ptr() for view in views}) != 1:
        return None
    steps = set(np.diff([view.storage_offset() for view in views]).tolist())
    if len(steps) > 1 or min(steps, default=1) <= 0:
        return None
    step = steps.pop() if steps else 0
    shape, stride = first.shape, first.stride()
    return torch.as_strided(
        first, (shape[0], len(views), *shape[1:]), (stride[0], step, *stride[1:]), first.storage_offset()
    )
