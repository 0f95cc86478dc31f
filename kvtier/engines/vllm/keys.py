"""Page keys of a vLLM request: its tokens, and a digest of what tokens do not say (LoRA, salt, images, embeds)."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import msgspec
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvtier.client import page_keys
from kvtier.engines.vllm.adapters import adapter_digest
from kvtier.engines.vllm.media import hashed
from kvtier.identity import EXTRA_BYTES, CacheSpec

_log = logging.getLogger("kvtier.vllm")


class Keys:
    """Makes page keys; remembers what each LoRA adapter was when it was first used, which is what vLLM has loaded."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._adapters: dict[tuple[int, str], str | None] = {}

    def know(self, request: Any) -> bool:
        """Whether keys can say all that the request's KV depends on: its adapter is here, its media have digests."""
        return self._adapter(request.lora_request) is not None and hashed(request.mm_features or ())

    def of(self, request: Any, first: int, pages: int) -> bytes:
        """Keys of pages [first, pages) of the tokens that the request has now; only after `know` has said yes."""
        size = self.spec.page_tokens
        tokens = request.all_token_ids[first * size : pages * size]
        return page_keys(self.spec, tokens, self._extras(request, first, pages))

    def _extras(self, request: Any, first: int, pages: int) -> dict[int, bytes]:
        """Digest of each page (counted from `first`) that has something that tokens do not say."""
        lora = request.lora_request and self._adapters[_identity(request.lora_request)]
        if not (lora or request.cache_salt or request.mm_features or request.prompt_embeds is not None):
            return {}
        size, out = self.spec.page_tokens, {}
        for page in range(first, pages):
            found, _ = generate_block_hash_extra_keys(request, page * size, (page + 1) * size, 0)
            if found:
                raw = msgspec.msgpack.encode([lora, found])
                out[page - first] = hashlib.sha256(raw).digest()[:EXTRA_BYTES]
        return out

    def _adapter(self, lora: Any) -> str | None:
        """Name and digest of a LoRA adapter; empty where the request has none, None where nobody knows what it is."""
        if lora is None:
            return ""
        known = _identity(lora)
        if known not in self._adapters or getattr(lora, "load_inplace", False):
            digest = adapter_digest(lora.lora_path)
            if digest is None:
                _log.warning("requests with LoRA %s are not cached: no files of it here", lora.lora_path)
            shape = getattr(lora, "is_3d_lora_weight", False)
            self._adapters[known] = None if digest is None else f"{lora.lora_name} {shape} {digest}"
        return self._adapters[known]


def _identity(lora: Any) -> tuple[int, str]:
    """What vLLM loads an adapter once for."""
    return lora.lora_int_id, lora.lora_path
