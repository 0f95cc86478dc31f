"""Parameters counted from a config: close enough to plan with, always tagged as assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvtier.sizing.fields import Fields
from kvtier.sizing.spec import Component, Spec


class Feed(NamedTuple):
    """Parameters of one feed-forward layer: all of them, and those that one token uses."""

    total: int
    active: int


def estimate(config: Mapping[str, Any], spec: Spec) -> tuple[float, float]:
    """(all, active) parameters of a decoder; norms, biases and gates are left out (well under 1 %)."""
    f = Fields(config)
    with f.understood():
        return _counted(f, config, spec)


def _counted(f: Fields, config: Mapping[str, Any], spec: Spec) -> tuple[float, float]:
    hidden = f.count("hidden_size")
    if not hidden:
        return 0.0, 0.0
    layers = f.count("num_hidden_layers") or f.count("decoder_layers")
    mixers = sum(_mixer(f, c, hidden) * c.layers for c in spec.components)
    vocabulary = f.count("vocab_size") * hidden
    searched = f.get("block_configs")
    if isinstance(searched, list):
        total = mixers + 2 * vocabulary + sum(_searched_feed(b.get("ffn") or {}, hidden) for b in searched)
        return float(total), float(total - vocabulary)
    embed = vocabulary * (1 if f.get("tie_word_embeddings", config.get("tie_word_embeddings")) else 2)
    dense, sparse = _feed_layers(f, layers)
    feed_dense, feed_sparse = _dense(f, hidden), _experts(f, hidden)
    total = mixers + embed + dense * feed_dense + sparse * feed_sparse.total
    active = mixers + vocabulary + dense * feed_dense + sparse * feed_sparse.active
    return float(total), float(active)


def _mixer(f: Fields, kept: Component, hidden: int) -> int:
    """Weights of one layer's token mixer, found by the name of what it keeps."""
    component = kept.name
    if component in ("mla", "window"):
        return _latent(f, hidden)
    if component == "delta-state":
        inner = f.count("linear_num_value_heads") * f.count("linear_value_head_dim")
        return hidden * (2 * f.count("linear_num_key_heads") * f.count("linear_key_head_dim") + 3 * inner)
    if component == "mamba2-state":
        inner = f.count("mamba_num_heads") * f.count("mamba_head_dim") or 2 * hidden
        return 3 * hidden * inner
    if component in ("mamba1-state", "kda-state", "lightning-state"):
        return 6 * hidden * hidden
    if component in ("full", "window", "chunk", "cross", "assumed-full"):
        heads = f.count("decoder_attention_heads") or f.heads
        width = f.count("head_dim") or hidden // heads
        return hidden * 2 * width * (heads + kept.heads)
    return 0


def _latent(f: Fields, hidden: int) -> int:
    """Weights of one layer of multi-head latent attention; GQA where the config has no latent."""
    rank, out_rank = f.count("kv_lora_rank"), f.count("o_lora_rank")
    if out_rank:  # DeepSeek-V4: low-rank queries, one key that is also the value, grouped low-rank output
        wide = f.heads * f.head_dim
        q_low = f.whole("q_lora_rank")
        return q_low * (hidden + wide) + hidden * f.head_dim + out_rank * (wide + f.whole("o_groups", 1) * hidden)
    if not rank:
        return 2 * hidden * f.head_dim * (f.heads + f.kv_heads)
    rope, nope, v = f.count("qk_rope_head_dim"), f.whole("qk_nope_head_dim", 128), f.whole("v_head_dim", 128)
    q_rank = f.count("q_lora_rank")
    query = f.heads * (nope + rope)
    q = q_rank * (hidden + query) if q_rank else hidden * query
    return q + hidden * (rank + rope) + rank * f.heads * (nope + v) + f.heads * v * hidden


def _searched_feed(ffn: Mapping[str, Any], hidden: int) -> int:
    """Weights of one feed-forward block of a searched architecture."""
    if ffn.get("no_op"):
        return 0
    if ffn.get("replace_with_linear"):
        return hidden * hidden
    return 3 * hidden * int(-(-2 * float(ffn.get("ffn_mult") or 0) * hidden // 3))


def _experts_count(f: Fields) -> int:
    return f.count("num_experts") or f.count("num_local_experts") or f.count("n_routed_experts")


def _feed_layers(f: Fields, layers: int) -> tuple[int, int]:
    """(dense, sparse) feed-forward layers."""
    pattern = f.get("hybrid_override_pattern")
    blocks = f.get("layers_block_type")
    if isinstance(pattern, str):
        return pattern.count("-"), pattern.count("E")
    if isinstance(blocks, list) and "moe" in blocks:
        return blocks.count("mlp"), blocks.count("moe")
    if not _experts_count(f):
        return layers, 0
    listed = f.get("moe_layer_freq") or f.get("mlp_layer_types")
    if isinstance(listed, list):
        sparse = sum(x in (1, "sparse") for x in listed[:layers])
        return layers - sparse, sparse
    step = f.count("interleave_moe_layer_step") or f.count("expert_layer_period") or 1
    sparse = (layers - f.count("first_k_dense_replace")) // step
    return layers - sparse, sparse


def _dense(f: Fields, hidden: int) -> int:
    width = (
        f.get("dense_intermediate_size") or f.get("intermediate_size_mlp") or f.get("intermediate_size") or 4 * hidden
    )
    wide = max(width) if isinstance(width, list) else int(width)
    matrices = (
        2 if f.model_type in ("gpt2", "opt", "gpt_neox", "falcon", "phi", "nemotron_h", "starcoder2", "mpt") else 3
    )
    return matrices * hidden * wide


USED: Final = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk")
SHARED: Final = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
                 "moe_shared_expert_intermediate_size")  # fmt: skip


def _first(f: Fields, names: Sequence[str]) -> int:
    """The first of several names that a config has."""
    return next((n for name in names if (n := f.count(name))), 0)


def _experts(f: Fields, hidden: int) -> Feed:
    """A mixture layer: routed experts, shared experts, router."""
    width = f.count("moe_intermediate_size") or f.count("intermediate_size")
    matrices = 2 if f.model_type == "nemotron_h" else 3
    inner = f.count("moe_latent_size") or f.count("routed_expert_hidden_size") or hidden
    each = matrices * inner * width
    used = _first(f, USED)
    own = _first(f, SHARED)
    if f.model_type == "llama4_text":
        own = width  # one shared expert beside the routed ones, unnamed in the config
    shared = matrices * hidden * (own or (f.count("n_shared_experts") or f.count("num_shared_experts")) * width)
    router = hidden * _experts_count(f)
    return Feed(_experts_count(f) * each + shared + router, used * each + shared + router)
