"""Page keys of a vLLM request: its tokens, and a digest of what tokens do not say (LoRA, salt, images, embeds)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import msgspec
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvtier.client import page_keys
from kvtier.engines.vllm.adapters import Adapter, read_adapter, stamp_of
from kvtier.engines.vllm.media import Item, Shown
from kvtier.engines.vllm.messages import Weights
from kvtier.identity import EXTRA_BYTES, CacheSpec

NAMED: Final = frozenset({"lora", "mm"})
"""What begins vLLM's extra keys that only name an adapter or an item."""

_log = logging.getLogger("kvtier.vllm")


class Said(NamedTuple):
    """What a request's KV depends on beside its tokens, as far as it must be looked up."""

    lora: str = ""
    """Name and digest of its adapter."""
    weights: Weights | None = None
    """What workers must have read for it."""
    items: tuple[Item, ...] = ()


class Keys:
    """Makes page keys; remembers what each LoRA adapter was when it was first used."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._adapters: dict[tuple[str, str], Adapter | None] = {}
        """By name and path, as vLLM's own prefix cache goes; None where nobody knows, or it has changed."""
        self._distrusted: set[int] = set()

    def said(self, request: Any, shown: Shown) -> Said | None:
        """What a request's KV depends on; None where nobody here knows, as it is with an adapter that has changed."""
        items = shown.items.result()
        if items is None or request.lora_request is None:
            return None if items is None else Said(items=items)
        lora = request.lora_request
        adapter = self._adapter(lora)
        if adapter is None or lora.lora_int_id in self._distrusted:
            return None
        shape = getattr(lora, "is_3d_lora_weight", False)
        weights = Weights(lora.lora_int_id, adapter.digest)
        return Said(f"{lora.lora_name} {shape} {adapter.digest}", weights, items)

    def distrust(self, numbers: Collection[int]) -> None:
        """Workers compute with other files for these adapters than those that lie here."""
        self._distrusted.update(numbers)

    def of(self, request: Any, said: Said, first: int, pages: int) -> bytes:
        """Keys of pages [first, pages) of the tokens that the request has now."""
        size = self.spec.page_tokens
        tokens = request.all_token_ids[first * size : pages * size]
        return page_keys(self.spec, tokens, self._extras(request, said, first, pages))

    def _extras(self, request: Any, said: Said, first: int, pages: int) -> dict[int, bytes]:
        """Digest of each page (counted from `first`) that has something that tokens do not say."""
        if not (said.lora or request.cache_salt or said.items or request.prompt_embeds is not None):
            return {}
        size, out = self.spec.page_tokens, {}
        for page in range(first, pages):
            begin, end = page * size, (page + 1) * size
            found, _ = generate_block_hash_extra_keys(request, begin, end, 0)
            more = [each for each in found or () if each[0] not in NAMED]
            more += [(each.content, each.begin - begin) for each in said.items if each.begin < end and begin < each.end]
            here = (getattr(request, "prompt_is_token_ids", None) or ())[begin:end]
            if not all(here):  # some of its tokens are embeds
                more += [bytes(here)]
            if more or said.lora:
                raw = msgspec.msgpack.encode([said.lora, more])
                out[page - first] = hashlib.sha256(raw).digest()[:EXTRA_BYTES]
        return out

    def _adapter(self, lora: Any) -> Adapter | None:
        """The files of a LoRA adapter, which are what they were when it was first used."""
        known = lora.lora_name, lora.lora_path
        if known not in self._adapters:
            self._adapters[known] = read_adapter(lora.lora_path)
            if self._adapters[known] is None:
                _log.warning("requests with LoRA %s are not cached: no files of it here", lora.lora_path)
        adapter = self._adapters[known]
        if adapter is not None and stamp_of(lora.lora_path) != adapter.stamp:
            _log.warning("requests with LoRA %s are not cached any more: its files have changed", lora.lora_path)
            self._adapters[known] = adapter = None
        return adapter
