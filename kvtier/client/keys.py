"""Page keys of a prompt: raw little-endian int32 tokens, and the digest of what tokens do not say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.identity import EXTRA_BYTES, TOKEN_BYTES, CacheSpec
from kvtier.types import bad

Tokens = Sequence[int] | npt.NDArray[Any]


def page_keys(spec: CacheSpec, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> bytes:
    """Keys of the whole pages of `tokens`; tokens after the last whole page name nothing.

    `extras` gives the 16-byte digest of each page (by number) that holds images, audio or prompt embeds, in caches
    whose spec says extras; other pages carry zeros. Raises bad_request.
    """
    if spec.keyed:
        raise bad("spec.key_bytes", "a token cache", spec.key_bytes)
    if extras and not spec.extras:
        raise bad("extras", "none: the cache's spec does not say extras")
    array = _int32(tokens)
    pages = len(array) // spec.page_tokens
    array = array[: pages * spec.page_tokens]
    if not spec.extras:
        return array.tobytes()
    keys = np.zeros((pages, spec.stride), np.uint8)
    keys[:, :-EXTRA_BYTES] = array.view(np.uint8).reshape(pages, spec.page_tokens * TOKEN_BYTES)
    for page, digest in (extras or {}).items():
        if page < 0 or len(digest) != EXTRA_BYTES:
            raise bad(f"extras[{page}]", f"a page number and {EXTRA_BYTES} bytes", digest)
        if page < pages:
            keys[page, -EXTRA_BYTES:] = np.frombuffer(digest, np.uint8)
    return keys.tobytes()


def _int32(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as contiguous little-endian int32; raises bad_request where one does not fit."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as exc:  # rows of different lengths, tensors of a device
        raise bad("tokens", f"one row of token ids ({exc})") from None
    if array.ndim != 1:
        raise bad("tokens", "one row of token ids", array.shape)
    if not array.size:
        return np.empty(0, "<i4")
    if array.dtype.kind not in "iu":
        raise bad("tokens", "integers", array.dtype.name)
    info = np.iinfo(np.int32)
    if array.dtype.itemsize > TOKEN_BYTES or array.dtype.kind == "u":
        low, high = int(array.min()), int(array.max())
        if low < info.min or high > info.max:
            raise bad("tokens", "ids of 32 bits", low if low < info.min else high)
    return np.ascontiguousarray(array, "<i4")
