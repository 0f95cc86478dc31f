"""Page keys of a prompt: raw little-endian int32 tokens, and the digest of what tokens do not say. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvtier.client.whole import Numbers, whole
from kvtier.identity import EXTRA_BYTES, TOKEN_BYTES, CacheSpec
from kvtier.types import bad


def page_keys(spec: CacheSpec, tokens: Numbers, extras: Mapping[int, bytes] | None = None) -> bytes:
    """Keys of the whole pages of `tokens`; tokens after the last whole page name nothing.

    `extras` gives the 16-byte digest of each page (by number) that holds images, audio or prompt embeds, in caches
    whose spec says extras; other pages carry zeros. Raises bad_request.
    """
    if spec.keyed:
        raise bad("spec.key_bytes", "a token cache", spec.key_bytes)
    if extras and not spec.extras:
        raise bad("extras", "none: the cache's spec does not say extras")
    array = whole(tokens, "tokens", "token ids", "<i4")
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
