"""Readers of models that keep a compressed latent: MLA, sparse attention's indexers, Kimi's KDA, DeepSeek-V4."""

from __future__ import annotations

from typing import Final

from kvtier.sizing.dtypes import LATENT, vector_bytes
from kvtier.sizing.fields import Fields
from kvtier.sizing.layers import FULL, LINEAR, Precision, schedule
from kvtier.sizing.recurrent import STATE_BYTES, state
from kvtier.sizing.spec import Component, Rule
from kvtier.types import bad


def latent(f: Fields, p: Precision) -> Component:
    """One MLA layer: one latent for all heads, so nothing for tensor parallelism to divide."""
    width = f.whole("kv_lora_rank") + f.whole("qk_rope_head_dim")
    unit = LATENT[p.kv_dtype] if p.kv_dtype in LATENT else p.vector(width)
    if p.kv_dtype in LATENT and width != 576:
        raise bad("kv-dtype", f"a precision other than {p.kv_dtype}, which is laid out for a latent of 576", width)
    score = f.heads * (f.whole("qk_nope_head_dim", 128) + f.whole("qk_rope_head_dim") + f.whole("v_head_dim", 128)) // 2
    return Component("mla", Rule.LINEAR, 1, unit, 0, 0, score, f.count("index_topk"))


def mla(f: Fields, p: Precision) -> list[Component]:
    """MLA, and with it an index key on each layer that owns an indexer."""
    out = [latent(f, p)] * f.layers
    if f.get("index_head_dim"):
        index = Component("indexer", Rule.LINEAR, 1, p.index_vector(f.whole("index_head_dim"), "fp8_index"))
        out += [index] * _indexers(f)
    return out


def longcat(f: Fields, p: Precision) -> list[Component]:
    """LongCat-Flash: two MLA attentions in each layer."""
    return mla(f, p) * 2


def _indexers(f: Fields) -> int:
    """Layers that own an indexer; the others reuse the choice of the last one that does."""
    types = f.get("indexer_types")
    if types is None:
        return f.layers
    listed = f.listing("indexer_types", f.layers)[: f.layers]
    for n, kind in enumerate(listed):
        if kind not in ("full", "shared"):
            raise bad(f"{f.prefix}indexer_types[{n}]", "full or shared", kind)
    return list(listed).count("full")


def kimi_linear(f: Fields, p: Precision) -> list[Component]:
    """MLA layers between Kimi Delta Attention layers; the config counts layers from 1."""
    own = f.within("linear_attn_config")
    if own.get("full_attn_layers") is not None and own.get("kda_layers") is not None:
        full, linear = len(own.listing("full_attn_layers", 0)), len(own.listing("kda_layers", 0))
        if full + linear != f.layers:
            raise bad(
                f"{f.prefix}linear_attn_config", f"{f.layers} layers in full_attn_layers and kda_layers", full + linear
            )
    else:
        kinds = schedule(f, (FULL, LINEAR))
        full, linear = kinds.count(FULL), kinds.count(LINEAR)
    heads = own.count("num_heads") or f.whole("linear_num_heads")
    d = own.count("head_dim") or f.whole("linear_head_dim")
    kernel = own.count("short_conv_kernel_size") or f.whole("linear_conv_kernel_dim", 4)
    return [latent(f, p)] * full + [
        state("kda-state", heads, heads * d * d * STATE_BYTES),
        state("kda-conv", heads, 3 * heads * d * (kernel - 1) * 2),
    ] * linear


V4_ENTRY: Final = 584
"""fp8 entry of DeepSeek-V4: 448 fp8, 64 bf16 of rope, 8 of scales."""


def deepseek_v4(f: Fields, p: Precision) -> list[Component]:
    """A short window on every layer, plus entries that each stand for 4 or 128 tokens; ratio-4 layers are indexed."""
    width = f.whole("head_dim")
    entry = V4_ENTRY if p.kv_dtype in ("", "fp8") and width == 512 else vector_bytes(p.kv_dtype or "fp8", width)
    window = f.whole("sliding_window")
    score = f.heads * width
    out = []
    for n, ratio in enumerate(_ratios(f)):
        if ratio not in (0, 4, 128):
            raise bad(f"{f.prefix}compress_ratios[{n}]", "0, 4 or 128", ratio)
        out.append(Component("window", Rule.RING, 1, entry, 0, window, score, window))
        if ratio:
            index = p.index_vector(f.whole("index_head_dim"), "fp4_index") if ratio == 4 else 0
            reach = f.count("index_topk") * ratio if ratio == 4 else 0
            out += [
                Component(f"c{ratio}", Rule.EVERY, 1, entry + index, 0, ratio, score, reach),
                Component("compressor", Rule.SCRATCH, 1, _compressor(f, ratio, width)),
            ]
    return out


_KINDS: Final = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _ratios(f: Fields) -> list[int | None]:
    """Tokens an entry stands for, layer by layer; transformers writes layer types in place of ratios."""
    if f.get("compress_ratios") is None and f.get("layer_types") is not None:
        return [_KINDS.get(kind) for kind in f.listing("layer_types", f.layers)[: f.layers]]
    return list(f.listing("compress_ratios", f.layers)[: f.layers])


def _compressor(f: Fields, ratio: int, width: int) -> int:
    """fp32 ring of values and scores that a layer's compressor works in."""
    if ratio == 4:
        return 2 * ratio * 2 * (width + f.whole("index_head_dim")) * STATE_BYTES
    return 2 * ratio * width * STATE_BYTES
