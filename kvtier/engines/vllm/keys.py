"""Page keys of a vLLM request: its tokens, and a digest of what tokens do not say (LoRA, salt, images, embeds)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvtier.client import page_keys
from kvtier.engines.weights import sample, weight_files
from kvtier.identity import EXTRA_BYTES, CacheSpec


class Keys:
    """Makes page keys; remembers what each LoRA adapter was when it was first used, which is what vLLM has loaded."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._adapters: dict[tuple[int, str], str] = {}

    def of(self, request: Any, first: int, pages: int) -> bytes:
        """Keys of pages [first, pages) of the tokens that the request has now."""
        size = self.spec.page_tokens
        tokens = request.all_token_ids[first * size : pages * size]
        return page_keys(self.spec, tokens, self._extras(request, first, pages))

    def _extras(self, request: Any, first: int, pages: int) -> dict[int, bytes]:
        """Digest of each page (counted from `first`) that has something that tokens do not say."""
        lora = self._adapter(request.lora_request)
        if not (lora or request.cache_salt or request.mm_features or request.prompt_embeds is not None):
            return {}
        size, out = self.spec.page_tokens, {}
        for page in range(first, pages):
            found, _ = generate_block_hash_extra_keys(request, page * size, (page + 1) * size, 0)
            if found:
                raw = msgspec.msgpack.encode([lora, found])
                out[page - first] = hashlib.sha256(raw).digest()[:EXTRA_BYTES]
        return out

    def _adapter(self, lora: Any) -> str:
        """Name and digest of a LoRA adapter; empty where the request has none."""
        if lora is None:
            return ""
        known = (lora.lora_int_id, lora.lora_path)
        if known not in self._adapters or getattr(lora, "load_inplace", False):
            files = [sample(path).hex() for path in weight_files(Path(lora.lora_path))]
            self._adapters[known] = " ".join([lora.lora_name, *files])
        return self._adapters[known]
