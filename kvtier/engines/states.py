"""What recurrent layers of a transformers cache keep instead of KV: state points, taken and put back whole.

A state is that of a sequence at one token: it replaces no other, and no part of it means anything alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvtier.identity import GroupSpec
from kvtier.types import Kind

Taken = list[Any]
"""The tensors of a cache's states as they were, of all rows, on their devices."""


class Part(NamedTuple):
    """One tensor of a layer's state."""

    layer: int
    kind: str
    """conv or recurrent."""
    number: int
    """A layer may have several of a kind."""
    shape: tuple[int, ...]
    """Of one row."""
    dtype: Any
    device: Any

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return int(torch.Size(self.shape).numel() * self.dtype.itemsize)

    def tensor(self, cache: Any) -> Any:
        """Where a cache keeps it: [rows, *shape]; None before the first token."""
        return getattr(cache.layers[self.layer], f"{self.kind}_states")[self.number]


class States(NamedTuple):
    """The recurrent state of one model: its parts one after the other are an item of the state group."""

    parts: tuple[Part, ...]

    @property
    def group(self) -> GroupSpec:
        """Its bytes mean what this release of transformers means by them: one cell."""
        return GroupSpec(Kind.STATE, 1, 1, sum(part.nbytes for part in self.parts))

    def take(self, cache: Any) -> Taken:
        """The state that a cache is in now."""
        return [part.tensor(cache).clone() for part in self.parts]

    def pack(self, taken: Taken, row: int) -> Any:
        """The item of one row: uint8, [item_bytes], on the CPU."""
        return torch.cat([tensor[row].contiguous().cpu().view(-1).view(torch.uint8) for tensor in taken])

    def put(self, cache: Any, items: Sequence[Any]) -> None:
        """Bring an empty cache into the state of one item for each row."""
        for at, part in zip(self._starts(), self.parts, strict=True):
            rows = [item[at : at + part.nbytes].clone().view(part.dtype).view(part.shape) for item in items]
            update = getattr(cache, f"update_{part.kind}_state")
            update(torch.stack(rows).to(part.device), part.layer, state_idx=part.number)

    def _starts(self) -> list[int]:
        """Where each part begins in an item."""
        return [sum(part.nbytes for part in self.parts[:number]) for number in range(len(self.parts))]

    def holds(self, cache: Any, rows: int) -> bool:
        """Whether a cache's states are of these shapes and types, as under the autocast mode of the probe."""
        tensors = [part.tensor(cache) for part in self.parts]
        return all(
            tensor is not None and tuple(tensor.shape) == (rows, *part.shape) and tensor.dtype == part.dtype
            for tensor, part in zip(tensors, self.parts, strict=True)
        )


def states_of(cache: Any) -> States | None:
    """The states of a cache that has seen a token; None where it keeps none."""
    parts = [
        Part(number, kind, at, tuple(tensor.shape[1:]), tensor.dtype, tensor.device)
        for number, layer in enumerate(cache.layers)
        for kind in ("conv", "recurrent")
        for at, tensor in getattr(layer, f"{kind}_states", {}).items()
        if tensor is not None
    ]
    return States(tuple(parts)) if parts else None
