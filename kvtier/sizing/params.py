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
    f = _fields(config)
    with f.understood():
        return _counted(f, config, spec)


def mixture(config: Mapping[str, Any]) -> bool:
    """Whether a token uses some of a layer's experts only; embeddings that no token multiplies with make none."""
    return _experts_count(_fields(config)) > 1


def _fields(config: Mapping[str, Any]) -> Fields:
    """The config's fields, those of DBRX's ffn_config among them."""
    f = Fields(config)
    feed = f.get("ffn_config")
    if isinstance(feed, Mapping):
        f.flat = {**feed, **f.flat}
    return f


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
    tied = f.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    embed = vocabulary * (1 if tied is None or tied else 2)  # a file says so only where they are not
    embed += f.count("vocab_size_per_layer_input") * f.count("hidden_size_per_layer_input") * layers
    dense, sparse = _feed_layers(f, layers)
    feed_dense = _dense(f, hidden)
    feed_sparse = _experts(f, hidden) if sparse else Feed(0, 0)
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
        inner = f.count("mamba_num_heads") * f.count("mamba_head_dim") or f.count("mamba_d_ssm") or 2 * hidden
        return 3 * hidden * inner
    if component in ("mamba1-state", "kda-state", "lightning-state"):
        return 6 * hidden * hidden
    if component == "conv":
        return 4 * hidden * hidden
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
    return _first(f, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))


def _feed_layers(f: Fields, layers: int) -> tuple[int, int]:
    """(dense, sparse) feed-forward layers."""
    if f.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return 0, 0
    if f.model_type == "longcat_flash":  # two dense ones beside each mixture
        return 2 * layers, layers
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
        sparse = sum(x in (1, "sparse", "moe", "hash_moe") for x in listed[:layers])
        return layers - sparse, sparse
    step = _first(f, ("interleave_moe_layer_step", "expert_layer_period", "moe_layer_interval")) or 1
    sparse = (layers - _first(f, ("first_k_dense_replace", "moe_layer_start_index"))) // step
    return layers - sparse, sparse


def _dense(f: Fields, hidden: int) -> int:
    named = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size")
    width = _first(f, named) or 4 * hidden
    if f.get("block_auto_adjust_ff_dim"):
        width = 2 * width // 3
    return (2 if f.model_type in UNGATED else 3) * hidden * width


UNGATED: Final = ("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "mpt", "falcon", "phi", "persimmon", "starcoder2",
                  "nemotron", "nemotron_h", "apertus", "arcee", "whisper", "bart", "mbart")  # fmt: skip
"""Model types whose feed-forward layers have two matrices."""

USED: Final = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk",
               "moe_k", "moe_top_k")  # fmt: skip
SHARED: Final = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
                 "moe_shared_expert_intermediate_size")  # fmt: skip


def _first(f: Fields, names: Sequence[str]) -> int:
    """The first of several names that a config has; the largest where it lists a number for each layer."""
    for name in names:
        value = f.get(name)
        listed = isinstance(value, list) and all(isinstance(n, int) for n in value)
        if found := max(value, default=0) if listed else f.count(name):
            return found
    return 0


def _experts(f: Fields, hidden: int) -> Feed:
    """A mixture layer: routed experts, shared experts, router."""
    width = _first(f, ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size"))
    matrices = 2 if f.model_type == "nemotron_h" else 3
    inner = f.count("moe_latent_size") or f.count("routed_expert_hidden_size") or hidden
    each = matrices * inner * width
    used = _first(f, USED)
    own = _first(f, SHARED)
    if f.model_type == "llama4_text":
        own = width  # one shared expert beside the routed ones, unnamed in the config
    beside = _first(f, ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"))
    shared = matrices * hidden * (own or beside * width)
    router = hidden * _experts_count(f)
    return Feed(_experts_count(f) * each + shared + router, used * each + shared + router)
