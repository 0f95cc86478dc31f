"""Which cache a vLLM engine's KV belongs to: the spec from vLLM's own configuration, and a worker's slice of it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from vllm import __version__ as vllm_version

from kvtier.engines.dynamic import rope_kind
from kvtier.engines.vllm.media import takes_media, turning
from kvtier.engines.vllm.settings import from_modelscope, refuse_elsewhere, settings_of
from kvtier.engines.weights import local_weights, weights_digest
from kvtier.identity import CacheSpec, GroupSpec, Slice
from kvtier.types import Kind, bad

PARALLEL: Final = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")


def spec_of(vllm_config: Any, kv_cache_config: Any, backends: Mapping[str, str], layout: str) -> CacheSpec:
    """The token cache of an engine; raises bad_request naming what about it cannot be shared.

    Items are whole pages of all tensor-parallel ranks, so that engines of other sizes share them. `backends`: by layer.
    """
    refuse_prefixes(vllm_config.model_config)
    parallel = vllm_config.parallel_config
    for name in PARALLEL:
        if getattr(parallel, name, 1) != 1:
            raise bad(f"parallel_config.{name}", "1 (not supported yet)", getattr(parallel, name))
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise bad("cache_config.calculate_kv_scales", "false: such KV depends on what ran before it")
    groups = kv_cache_config.kv_cache_groups
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) != 1:
        raise bad("kv_cache_config", "groups of one block size", sizes)
    replicas, world = ranks_of(vllm_config, kv_cache_config)
    states = states_of(groups)
    if states and replicas > 1:
        raise bad("tensor_parallel_size", "no more ranks than KV heads, for a model with recurrent state", replicas)
    return CacheSpec(
        model=model_name(vllm_config),
        fingerprint=model_fingerprint(vllm_config),
        kv_dtype=f"{cache.cache_dtype}/{vllm_config.model_config.dtype}".replace("torch.", ""),
        page_tokens=sizes.pop(),
        groups=tuple(group_of(number, group, world) for number, group in enumerate(groups)),
        revision=str(vllm_config.model_config.revision or ""),
        layout=layout + states + layers_of(groups, backends),
        backend=f"vllm {vllm_version} {'+'.join(sorted(set(backends.values())))}",
        extras=True,
    )


def refuse_prefixes(config: Any) -> None:
    """Raise bad_request for models that compute with more of a prefix than its KV, or whose KV depends on what follows.

    Loading would give other answers: a mean over all tokens is one over those that were computed.
    """
    if not getattr(config, "is_prefix_caching_supported", True):
        raise bad("model", "one that vLLM caches prefixes of: this one, or its pooling, needs all tokens computed")
    if getattr(config, "is_diffusion", False):
        raise bad("model", "one that generates token by token: KV of diffused tokens depends on those after them")


def layers_of(groups: Any, backends: Mapping[str, str]) -> str:
    """What tells groups of equally many and equally large layers apart: which these are, and what their bytes mean."""
    said = [
        [
            str(getattr(group.kv_cache_spec, "dtype", "")), str(getattr(group.kv_cache_spec, "kv_quant_mode", "")),
            [(name, backends.get(name, "")) for name in group.layer_names],
        ] for group in groups
    ]  # fmt: skip
    return f" layers {hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]}"


def group_of(number: int, group: Any, shards: int) -> GroupSpec:
    """How kvtier keeps a KV cache group of vLLM's; raises bad_request for kinds that it cannot keep."""
    spec = group.kv_cache_spec
    if getattr(spec, "non_causal", False):
        raise bad(f"kv_cache_groups[{number}]", "causal attention: else KV depends on the tokens that follow")
    if not (getattr(group, "enable_kv_transfer", True) and getattr(spec, "prefix_cacheable", True)):
        raise bad(f"kv_cache_groups[{number}]", "KV that vLLM lets others keep", type(spec).__name__)
    match type(spec).__name__:
        case "FullAttentionSpec" | "MLAAttentionSpec" if getattr(spec, "model_version", None) is None:
            kind, window = Kind.FULL, 0
        case "SlidingWindowSpec":
            kind, window = Kind.WINDOW, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        case "ChunkedLocalAttentionSpec":
            kind, window = Kind.WINDOW, spec.attention_chunk_size
        case "MambaSpec" if _stops_at_blocks(spec):
            return GroupSpec(Kind.STATE, len(group.layer_names), shards, spec.state_content_size_bytes)
        case name:
            known = "full, MLA, sliding-window or chunked attention, or state that is aligned to blocks"
            raise bad(f"kv_cache_groups[{number}]", known, name)
    cell = spec.num_states * spec.state_content_size_bytes
    return GroupSpec(kind, len(group.layer_names), spec.num_heads * shards, cell, window)


def _stops_at_blocks(spec: Any) -> bool:
    """Whether a block that is complete holds the recurrent state at its end, and each rank a part of its own.

    With drafts, a step may go over the end of a block without stopping there.
    """
    extra = spec.num_speculative_blocks + spec.num_prefill_checkpoint_blocks
    return spec.mamba_cache_mode == "align" and not extra and not spec.tp_replicated


def states_of(groups: Any) -> str:
    """What tells the states of recurrent layers apart that have equally many bytes; empty where there are none."""
    specs = [group.kv_cache_spec for group in groups if type(group.kv_cache_spec).__name__ == "MambaSpec"]
    if not specs:
        return ""
    said = repr([(spec.shapes, spec.dtypes, str(spec.mamba_type)) for spec in specs])
    return f" states {hashlib.sha256(said.encode()).hexdigest()[:32]}"


def ranks_of(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """(replicas, distinct shards) of the tensor-parallel ranks: neighbours may hold the same heads."""
    replicas = max(1, kv_cache_config.kv_tp_replicas)
    return replicas, vllm_config.parallel_config.tensor_parallel_size // replicas


def changed(spec: CacheSpec, nonce: str) -> CacheSpec:
    """The cache of an engine whose weights have changed since they were read: its own, as nobody knows them.

    Its name is drawn anew each time: an operator may give two engines, or one engine twice, the same name.
    """
    return msgspec.structs.replace(spec, revision=f"{spec.revision[:256]} changed {nonce}")


def slices_of(spec: CacheSpec, shard: int, shards: int) -> tuple[Slice, ...]:
    """The heads of each group that one of so many shards holds; none where it holds whole items."""
    if shards == 1:
        return ()
    return tuple(Slice(0, g.layers, shard * g.heads // shards, (shard + 1) * g.heads // shards) for g in spec.groups)


def model_name(vllm_config: Any) -> str:
    """What people know the model by; engines that are to share must agree on it."""
    return Path(vllm_config.model_config.model).name or "model"


def model_fingerprint(vllm_config: Any) -> bytes:
    """Digest of weights and settings; `fingerprint` in the connector's extra configuration replaces or sharpens it.

    Raises bad_request where weights are not here.
    """
    said = _said(vllm_config)
    config, load = vllm_config.model_config, vllm_config.load_config
    settings = settings_of(vllm_config)
    if str(load.load_format).endswith("dummy"):
        settings.append(config.seed)
    if rope_kind(config.hf_config.to_dict()):  # vLLM chooses its factors by the longest sequence
        settings.append(config.max_model_len)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and (draft.model, draft.revision) == (config.model, config.revision):
        draft = None  # it lies with the model
    if said not in {"", "sample", "exact"}:
        more = [] if draft is None else [draft.model, draft.revision, draft.hf_config.to_json_string()]
        return weights_digest_of_name(said, config, settings + turning(config, None) + more)
    refuse_elsewhere(load)
    where = getattr(load, "download_dir", None)
    if draft is not None:  # its KV is in the pages too
        digest = weights_digest(
            local_model(draft, where), draft.hf_config.to_dict(), draft.dtype, exact=said == "exact"
        )
        settings += [draft.quantization, digest.hex()]
    folder = local_model(config, where)
    if takes_media(config):  # whose processor vLLM has from the hub's own cache, wherever it downloads weights to
        settings += turning(config, Path(local_model(config, None)))
    return weights_digest(folder, config.hf_config.to_dict(), *settings, exact=said == "exact")


def weights_digest_of_name(name: str, config: Any, settings: list[Any]) -> bytes:
    """Where weights cannot be read (an object store): what the operator says that they are."""
    raw = msgspec.json.encode([name, config.hf_config.to_json_string(), [str(setting) for setting in settings]])
    return hashlib.sha256(raw).digest()


def local_model(config: Any, where: str | None) -> str:
    """The folder or file that holds the weights; `where`: the cache of the hub's that vLLM downloads to, if its own."""
    return local_weights(config.model, config.revision, where, modelscope=from_modelscope())


def _said(vllm_config: Any) -> str:
    """`fingerprint` of the connector's extra configuration: sample, exact, or the weights' name."""
    transfer = vllm_config.kv_transfer_config
    return str((transfer.kv_connector_extra_config or {}).get("fingerprint", "")) if transfer else ""


def calling_config() -> Any:
    """The VllmConfig of the engine that is being built, for plug points that are handed none.

    Raises bad_request where no caller has one.
    """
    from vllm.config import VllmConfig, get_current_vllm_config_or_none  # noqa: PLC0415

    frame = sys._getframe()  # noqa: SLF001 - vLLM keeps it in a local variable of Scheduler and EngineCore
    while frame is not None:
        for name in ("vllm_config", "self"):
            found = frame.f_locals.get(name)
            found = getattr(found, "vllm_config", None) if name == "self" else found
            if isinstance(found, VllmConfig):
                return found
        frame = frame.f_back  # type: ignore[assignment]
    if (current := get_current_vllm_config_or_none()) is not None:
        return current
    raise bad("vllm_config", "an engine that builds this tier")
