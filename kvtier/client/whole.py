"""Rows of whole numbers as programs give them: token ids, rows of memory, page numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.types import bad

Numbers = Sequence[int] | npt.NDArray[Any]


def whole(values: Numbers, field: str, what: str, dtype: str) -> npt.NDArray[Any]:
    """Numbers as one contiguous row of that type of integers; raises bad_request where they are no such row."""
    into = np.iinfo(dtype)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as exc:  # rows of different lengths, tensors of a device
        raise bad(field, f"one row of {what} ({exc})") from None
    if array.ndim != 1:
        raise bad(field, f"one row of {what}", array.shape)
    if not array.size:
        return np.empty(0, dtype)
    if array.dtype.kind not in "iu":
        raise bad(field, f"{what}: integers of at most 64 bits", array.dtype.name)
    if array.dtype.itemsize > np.dtype(dtype).itemsize or array.dtype.kind == "u":
        low, high = int(array.min()), int(array.max())
        if low < into.min or high > into.max:
            raise bad(field, f"{what} of {into.bits} bits", low if low < into.min else high)
    return np.ascontiguousarray(array, dtype)
