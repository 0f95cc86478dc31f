"""Which cache the pages of one host pool belong to: the spec from SGLang's own configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from sglang import __version__ as sglang_version
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import get_device, get_exec, get_model

from kvtier.engines.sglang.device import Sheets
from kvtier.engines.sglang.pools import pieces_of
from kvtier.engines.sglang.settings import fingerprint, refuse
from kvtier.identity import MAX_PAGE_BYTES, CacheSpec, GroupSpec
from kvtier.types import Kind, bad

KEY_BYTES: Final = 32
STATE_BYTES: Final = 4 << 20
"""A page from this size on is kept in several slots."""


def spec_of(config: Any, name: str, memory: Any) -> CacheSpec:
    """The keyed cache of one rank's pages of a host pool; raises bad_request naming what about it cannot be shared."""
    sizes = page_sizes(name, memory)
    shape = ("layout", "head_num", "head_dim", "layer_num", "start_layer", "end_layer", "storage_format_tag")
    said = {
        "pool": [name, type(memory).__name__, sizes],
        "shape": [str(getattr(memory, each, None)) for each in shape],
    }
    tokens = memory.page_size * getattr(memory, "dcp_size", 1)
    return _spec(config, name, tokens, sum(sizes), str(memory.dtype), said)


def linked_spec(config: Any, name: str, memory: Sheets) -> CacheSpec:
    """The same for the KV that SGLang computes with."""
    dtype, said = memory.shapes[0].split()[0], {"pool": [name], "shape": memory.shapes}
    return _spec(config, name, memory.page_size, memory.item_bytes, dtype, said)


def _spec(config: Any, name: str, page_tokens: int, size: int, dtype: str, said: dict[str, Any]) -> CacheSpec:
    """`said`: what tells the pool's layout from others."""
    extra = dict(config.extra_config or {})
    refuse(str(extra.get("fingerprint", "")), str(extra.get("media", "")))
    digest = hashlib.sha256(json.dumps(said | {"rank": ranks(config, name)}, sort_keys=True).encode()).hexdigest()
    model, kernel = get_model(), get_exec().kernel
    return CacheSpec(
        model=Path(config.model_name or model.model_path).name or "model",
        fingerprint=fingerprint(str(extra.get("fingerprint", ""))),
        kv_dtype=f"{model.kv_cache_dtype}/{dtype}".replace("torch.", ""),
        page_tokens=page_tokens,
        groups=(group_of(size),),
        revision=str(model.revision or ""),
        layout=f"sglang {name} {digest}",
        backend=f"sglang {sglang_version} {get_device().device} {kernel.prefill_attention_backend or ''}"
        f"{kernel.attention_backend or ''}{kernel.decode_attention_backend or ''}",
        key_bytes=KEY_BYTES,
    )


def page_sizes(name: str, memory: Any) -> list[int]:
    """Bytes of a page's pieces; raises bad_request where the pool cannot say where a page lies."""
    import torch  # noqa: PLC0415 - comes with SGLang

    try:
        pieces = pieces_of(memory, torch.arange(getattr(memory, "logical_page_size", memory.page_size)))
    except (TypeError, ValueError, NotImplementedError, AttributeError) as exc:
        raise bad(f"host pool {name}", f"one whose pages have addresses ({exc})", type(memory).__name__) from exc
    return [len(piece) for piece in pieces]


def group_of(size: int) -> GroupSpec:
    """A page of so many bytes as SGLang lays it out; big ones (states) need no slot of their own size."""
    kind = Kind.STATE if size > STATE_BYTES else Kind.FULL
    if size > MAX_PAGE_BYTES:
        raise bad("page", f"at most {MAX_PAGE_BYTES} bytes", size)
    return GroupSpec(kind, 1, 1, size)


def ranks(config: Any, name: str) -> list[int]:
    """Which shard of the model's pages this process holds; replicas hold the same."""
    replicated = config.is_mla_model and name != PoolName.MAMBA
    heads = [0, 1] if replicated else [config.tp_rank, config.tp_size]
    split = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
    return [*heads, *split, config.dcp_rank, config.dcp_size]
