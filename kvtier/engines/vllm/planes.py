"""vLLM's paged KV as pages of kvtier: one strided view per group, and few copies for many pages in each direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
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

    Where the layers lie at equal distances in one allocation, as vLLM allocates them, all layers are one copy, whatever
    the physical order; else each is one.
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
        self.on_cpu = views[0].device.type == "cpu"
        self._whole = _together(views)
        self._views = views

    def load(self, blocks: Sequence[int], pages: Bytes) -> None:
        """Copy this process's cells of whole pages, rows [blocks, item_bytes], into blocks."""
        for here, there in self._pairs(blocks, pages):
            here.copy_(there)

    def save(self, blocks: Sequence[int], pages: Bytes) -> None:
        """Copy blocks into this process's cells of whole pages, rows [blocks, item_bytes]."""
        for here, there in self._pairs(blocks, pages):
            there.copy_(here)

    def mine(self, page: Bytes) -> Bytes:
        """This process's cells of a whole page, one after the other."""
        group, part = self.group, self.part
        cells = page.reshape(group.layers, group.heads, group.cell_bytes)[part.l0 : part.l1, part.h0 : part.h1]
        return np.ascontiguousarray(cells).reshape(-1)

    def _pairs(self, blocks: Sequence[int], pages: Bytes) -> Iterator[tuple[Any, Any]]:
        """Views of equal shape of blocks and of pages: blocks that follow each other are one copy."""
        group, part = self.group, self.part
        flat = torch.from_numpy(pages).view(self._views[0].dtype)
        cells = flat.unflatten(1, (group.layers, group.heads, *self._views[0].shape[2:]))
        cells = cells[:, part.l0 : part.l1, part.h0 : part.h1]
        cuts = [at for at in range(1, len(blocks)) if blocks[at] != blocks[at - 1] + 1]
        for lo, hi in pairwise([0, *cuts, len(blocks)]):
            rows = slice(blocks[lo], blocks[lo] + hi - lo)
            if self._whole is not None:
                yield self._whole[rows], cells[lo:hi]
            else:
                yield from ((view[rows], cells[lo:hi, layer]) for layer, view in enumerate(self._views))


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
