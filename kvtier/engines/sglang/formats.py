"""Which cache the pages of one host pool belong to: the spec from SGLang's own configuration."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any, Final

from sglang import __version__ as sglang_version
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.runtime_context import get_device, get_exec, get_lora, get_model, get_spec

from kvtier.engines.dynamic import rope_kind
from kvtier.engines.sglang.device import Sheets
from kvtier.engines.sglang.pools import pieces_of
from kvtier.engines.weights import config_of, local_weights, weights_digest
from kvtier.identity import MAX_PAGE_BYTES, CacheSpec, GroupSpec
from kvtier.types import Kind, bad

KEY_BYTES: Final = 32
MEDIA: Final = frozenset({
    "audio_config", "audio_token_id", "image_token_id", "image_token_index", "video_token_id", "vision_config",
})  # fmt: skip
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
    if get_lora().enable_lora:
        raise bad("enable_lora", "off: page hashes do not say which weights an adapter has")
    extra = dict(config.extra_config or {})
    _refuse_media(str(extra.get("fingerprint", "")), str(extra.get("media", "")))
    digest = hashlib.sha256(json.dumps(said | {"rank": ranks(config, name)}, sort_keys=True).encode()).hexdigest()
    model, kernel = get_model(), get_exec().kernel
    return CacheSpec(
        model=Path(config.model_name or model.model_path).name or "model",
        fingerprint=fingerprint(extra.get("fingerprint", "")),
        kv_dtype=f"{model.kv_cache_dtype}/{dtype}".replace("torch.", ""),
        page_tokens=page_tokens,
        groups=(group_of(size),),
        revision=str(model.revision or ""),
        layout=f"sglang {name} {digest}",
        backend=f"sglang {sglang_version} {get_device().device} {kernel.prefill_attention_backend or ''}"
        f"{kernel.attention_backend or ''}{kernel.decode_attention_backend or ''}",
        key_bytes=KEY_BYTES,
    )


def _refuse_media(said: str, media: str) -> None:
    """Raise bad_request for a model that takes images or sound: SGLang's page hashes know 30 bits of each.

    Among some ten thousand images two are likely to be alike then. The operator may say that no request brings any.
    """
    if media == "never" or said not in {"", "sample", "exact"}:
        return  # who names the fingerprint names what the pages are; there is no configuration on this host then
    settings = config_of(local_weights(get_model().model_path, get_model().revision))
    found = sorted(MEDIA & settings.keys())
    if found:
        raise bad("media", "never, if no request brings images or sound: page hashes know 30 bits of each", found)


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


def fingerprint(said: str) -> bytes:
    """Digest of weights and settings; `fingerprint` in the extra configuration replaces or sharpens it."""
    model, spec = get_model(), get_spec()
    settings = [
        model.quantization, model.load_format, model.dtype, model.json_model_override_args,
        model.quantization_param_path, model.model_impl, spec.speculative_algorithm,
    ]  # fmt: skip
    if str(model.load_format).endswith("dummy"):
        settings.append(get_device().random_seed)
    draft = spec.speculative_draft_model_path
    if draft:
        folder = local_weights(draft, None)
        settings.append(weights_digest(folder, config_of(folder), exact=said == "exact").hex())
    if said not in {"", "sample", "exact"}:
        return hashlib.sha256(json.dumps([said, [str(each) for each in settings]]).encode()).digest()
    folder = local_weights(model.model_path, model.revision)
    config = config_of(folder)
    if rope_kind(config):  # its factors are chosen by the longest sequence
        settings.append(model.context_length)
    return weights_digest(folder, config, *settings, exact=said == "exact")


def engine_name() -> str:
    """A name that all ranks on this host have in common and no other engine ever has: their parent, and its start."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat").read_text()
    started = stat.rsplit(")", 1)[1].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()[:48]}-{parent}-{started}-{boot[:8]}"
