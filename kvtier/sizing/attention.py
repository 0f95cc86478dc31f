"""Readers of softmax-attention models: MHA, GQA, MQA, sliding and chunked layers, NAS, encoders, sparse index keys."""

from __future__ import annotations

from typing import Any, Final

from kvtier.sizing.fields import Fields
from kvtier.sizing.layers import CHUNK, FULL, WINDOW, Precision, owned, schedule
from kvtier.sizing.spec import Component, Rule

STATEFUL: Final = (
    "kv_lora_rank", "linear_num_value_heads", "linear_attn_config", "ssm_state_size", "mamba_d_state",
    "compress_ratios", "attn_type_list", "block_configs", "hybrid_override_pattern", "index_head_dim",
    "sparse_attention_config", "cross_attention_layers", "attn_layer_period",
)  # fmt: skip
"""Fields that mean state which plain attention does not have."""

RULES: Final = {FULL: Rule.LINEAR, WINDOW: Rule.WINDOW, CHUNK: Rule.CHUNK}


def unit_bytes(p: Precision, kv_heads: int, k_dim: int, v_dim: int) -> int:
    """Bytes of one token of one layer."""
    return kv_heads * (p.vector(k_dim) + p.vector(v_dim))


def layer(p: Precision, kind: str, heads: tuple[int, int], dims: tuple[int, int], span: int = 0) -> Component:
    """One attention layer: (query, KV) heads, (key, value) widths, span of a window or chunk."""
    score = heads[0] * sum(dims) // 2
    reach = span if kind != FULL else 0
    rule = RULES[kind]
    return Component(kind, rule, 1, unit_bytes(p, heads[1], *dims), heads[1], span if reach else 0, score, reach)


def plain(f: Fields, p: Precision) -> list[Component]:
    """GQA with full and sliding layers; refuses configs that declare state of another kind."""
    for name in STATEFUL:
        if f.get(name) and not (name == "attn_type_list" and all(kind == 1 for kind in f.get(name))):
            raise f.refuse(name, f"to be absent from a {f.model_type} config (state that plain attention has not)")
    kinds = owned(f, schedule(f))
    span = f.whole("sliding_window") if WINDOW in kinds else 0
    wide = _global_shape(f)
    slides = layer(p, WINDOW, (f.heads, f.kv_heads), (f.head_dim,) * 2, span)
    full = layer(p, FULL, (f.heads, wide[0]), (wide[1],) * 2)
    return [full if kind == FULL else slides for kind in kinds]


def _global_shape(f: Fields) -> tuple[int, int]:
    """(KV heads, head width) of full layers; Gemma 4 gives them their own."""
    if not f.model_type.startswith("gemma4"):
        return f.kv_heads, f.head_dim
    own_heads = f.get("num_global_key_value_heads") and f.get("attention_k_eq_v", True)
    return f.whole("num_global_key_value_heads") if own_heads else f.kv_heads, f.whole("global_head_dim", f.head_dim)


def falcon(f: Fields, p: Precision) -> list[Component]:
    """Multi-query where the config says so, whatever its head count claims."""
    grouped = f.get("new_decoder_architecture", False)
    kv = 1 if f.get("multi_query", True) and not grouped else f.kv_heads
    return [layer(p, FULL, (f.heads, kv), (f.head_dim,) * 2)] * f.layers


def nested(f: Fields, p: Precision) -> list[Component]:
    """MPT and DBRX: KV heads sit in attn_config."""
    kv = f.within("attn_config").whole("kv_n_heads", f.heads)
    return [layer(p, FULL, (f.heads, kv), (f.head_dim,) * 2)] * f.layers


def llama4(f: Fields, p: Precision) -> list[Component]:
    """Three chunked layers for each full one, unless layer_types or no_rope_layers say otherwise."""
    chunk = f.whole("attention_chunk_size")
    rope = f.get("no_rope_layers")
    if f.get("layer_types") is not None:
        kinds = schedule(f, (FULL, CHUNK))
    elif rope:
        kinds = [CHUNK if uses else FULL for uses in f.listing("no_rope_layers", f.layers)]
    else:
        kinds = [FULL if (i + 1) % 4 == 0 else CHUNK for i in range(f.layers)]
    return [layer(p, k, (f.heads, f.kv_heads), (f.head_dim,) * 2, chunk if k == CHUNK else 0) for k in kinds]


def mimo_v2(f: Fields, p: Precision) -> list[Component]:
    """MiMo-V2: sliding layers with their own heads, keys wider than values."""
    if f.get("hybrid_layer_pattern") is not None:
        kinds = [WINDOW if slides else FULL for slides in f.listing("hybrid_layer_pattern", f.layers)[: f.layers]]
    else:
        kinds = schedule(f)
    dims = (f.head_dim, f.whole("v_head_dim", f.head_dim))
    swa_dims = (f.whole("swa_head_dim", dims[0]), f.whole("swa_v_head_dim", dims[1]))
    swa = (f.whole("swa_num_attention_heads", f.heads), f.whole("swa_num_key_value_heads", 2 * f.kv_heads))
    span = f.whole("sliding_window")
    return [
        layer(p, k, swa, swa_dims, span) if k == WINDOW else layer(p, k, (f.heads, f.kv_heads), dims) for k in kinds
    ]


def nas(f: Fields, p: Precision) -> list[Component]:
    """Searched architectures: layers without attention keep nothing."""
    out = []
    for n, block in enumerate(f.listing("block_configs", f.layers)[: f.layers]):
        attn = f.part(f"block_configs[{n}].attention", block.get("attention") or {})
        if attn.get("no_op") or attn.get("replace_with_linear"):
            continue
        group, span = attn.whole("n_heads_in_group"), attn.count("window_length")
        if group > f.heads:
            raise attn.refuse("n_heads_in_group", f"at most the {f.heads} query heads")
        out.append(layer(p, WINDOW if span else FULL, (f.heads, f.heads // group), (f.head_dim,) * 2, span))
    return out


def minimax_m3(f: Fields, p: Precision) -> list[Component]:
    """GQA whose sparse layers also keep one index key a token."""
    full = layer(p, FULL, (f.heads, f.kv_heads), (f.head_dim,) * 2)
    if f.get("layer_types") is not None:  # as transformers writes it
        schedule(f, (FULL,))
        marks = [kind == "minimax_m3_sparse" for kind in f.listing("layer_types", f.layers)[: f.layers]]
        return _indexed(p, full, marks, f.whole("index_head_dim", 128),
                        f.count("index_topk_blocks") * f.count("index_block_size"))  # fmt: skip
    sparse = f.within("sparse_attention_config")
    if not sparse.get("use_sparse_attention"):
        return [full] * f.layers
    where = sparse.get("sparse_attention_freq") or sparse.get("sparse_disable_index_value") or f.get("moe_layer_freq")
    if not isinstance(where, list) or len(where) < f.layers:
        raise f.refuse("sparse_attention_config.sparse_attention_freq", f"a list of {f.layers} entries")
    reach = sparse.count("sparse_topk_blocks") * sparse.count("sparse_block_size")
    return _indexed(p, full, where[: f.layers], sparse.whole("sparse_index_dim", 128), reach)


def _indexed(p: Precision, full: Component, marks: list[Any], dim: int, reach: int) -> list[Component]:
    """One layer for each mark: where it is set, queries look at `reach` keys that an index key of width `dim` chose."""
    index = Component("index-key", Rule.LINEAR, 1, p.index_vector(dim, "bf16"))
    return [part for mark in marks for part in ([full._replace(reach=reach), index] if mark else [full])]


def encoder_decoder(f: Fields, p: Precision) -> list[Component]:
    """Decoder self-attention grows; cross-attention keeps the encoder's positions once a request."""
    layers = f.whole("decoder_layers", f.count("num_decoder_layers") or f.count("num_hidden_layers") or None)
    heads = f.whole("decoder_attention_heads", f.count("num_attention_heads") or None)
    dim = f.count("head_dim") or f.whole("hidden_size") // heads
    positions = p.encoder_tokens or f.whole("max_source_positions", f.count("max_position_embeddings") or 512)
    own = layer(p, FULL, (heads, heads), (dim, dim))
    cross = own._replace(name="cross", rule=Rule.ENCODER, span=positions, reach=positions)
    return [own, cross] * layers


def mllama(f: Fields, p: Precision) -> list[Component]:
    """Llama 3.2 Vision: cross layers keep an image's positions instead of the text's."""
    cross = f.get("cross_attention_layers")
    if not isinstance(cross, list):
        raise f.refuse("cross_attention_layers", "a list of layer numbers")
    own = layer(p, FULL, (f.heads, f.kv_heads), (f.head_dim,) * 2)
    positions = p.encoder_tokens or 4 * 1601  # four tiles of 1601 patches
    image = own._replace(name="cross", rule=Rule.ENCODER, span=positions, reach=positions)
    return [own] * (f.layers - len(cross)) + [image] * len(cross)
