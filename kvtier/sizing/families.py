"""Architectures: which function reads which model_type, and the refusal of those that none reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvtier.sizing import attention, latent, recurrent
from kvtier.sizing.fields import Fields
from kvtier.sizing.layers import Precision, merge
from kvtier.sizing.spec import Component, Rule, Spec
from kvtier.types import KvtierError, bad

Reader = Callable[[Fields, Precision], list[Component]]

PLAIN: Final = """
    llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl qwen2_5_vl qwen2_vl_text qwen2_5_vl_text qwen3_vl
    qwen3_vl_text qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe_text phi phi3 phimoe phi4mm glm glm4 glm4_moe glm4v_text
    glm4v_moe_text minimax_m2 mimo olmo olmo2 olmo3 olmoe starcoder2 gpt_neox gpt2 gptj opt stablelm gemma gemma2
    gemma3_text gemma3 gemma3n_text gemma4_text gemma4 cohere cohere2 granite granitemoe internlm2 internlm3 baichuan
    exaone exaone4 smollm3 ernie4_5 ernie4_5_moe seed_oss hunyuan_v1_dense hunyuan_v1_moe hunyuan gpt_oss step3p7
    step3p5 ministral ministral3 apertus arcee nemotron bitnet helium dots1 persimmon
""".split()  # noqa: SIM905 - a list of names reads better as prose

READERS: Final[dict[str, Reader]] = dict.fromkeys(PLAIN, attention.plain) | {
    "falcon": attention.falcon,
    "gpt_bigcode": attention.falcon,
    "mpt": attention.nested,
    "dbrx": attention.nested,
    "chatglm": attention.plain,
    "llama4": attention.llama4,
    "llama4_text": attention.llama4,
    "mimo_v2_flash": attention.mimo_v2,
    "nemotron-nas": attention.nas,
    "minimax_m3": attention.minimax_m3,
    "minimax_m3_vl": attention.minimax_m3,
    "minimax_m3_vl_text": attention.minimax_m3,
    "whisper": attention.encoder_decoder,
    "t5": attention.encoder_decoder,
    "mt5": attention.encoder_decoder,
    "bart": attention.encoder_decoder,
    "mbart": attention.encoder_decoder,
    "mllama": attention.mllama,
    "mllama_text_model": attention.mllama,
    "deepseek_v2": latent.mla,
    "deepseek_v3": latent.mla,
    "kimi_k2": latent.mla,
    "kimi_k25": latent.mla,
    "glm4_moe_lite": latent.mla,
    "minicpm3": latent.mla,
    "longcat_flash": latent.mla,
    "deepseek_v32": latent.mla,
    "glm_moe_dsa": latent.mla,
    "kimi_linear": latent.kimi_linear,
    "kimi_k3": latent.kimi_linear,
    "deepseek_v4": latent.deepseek_v4,
    "deepseek_ref": latent.deepseek_v4,
    "qwen3_next": recurrent.delta_net,
    "qwen3_5": recurrent.delta_net,
    "qwen3_5_text": recurrent.delta_net,
    "qwen3_5_moe": recurrent.delta_net,
    "qwen3_5_moe_text": recurrent.delta_net,
    "nemotron_h": recurrent.nemotron_h,
    "bamba": recurrent.bamba,
    "granitemoehybrid": recurrent.bamba,
    "falcon_h1": recurrent.falcon_h1,
    "jamba": recurrent.jamba,
    "mamba": recurrent.mamba1,
    "falcon_mamba": recurrent.mamba1,
    "mamba2": recurrent.mamba2,
    "minimax": recurrent.lightning,
    "minimax_text_01": recurrent.lightning,
    "lfm2": recurrent.short_conv,
    "lfm2_moe": recurrent.short_conv,
}
"""model_type -> the function that lists its components."""

READERS["longcat_flash"] = latent.longcat


class Reading(NamedTuple):
    """How to read a config."""

    kv_dtype: str = ""
    """'' is the family's own: bf16, or the packed fp8 entry of DeepSeek-V4."""
    index_dtype: str = ""
    draft: bool = False
    assume_full: bool = False
    encoder_tokens: int = 0


AS_IS: Final = Reading()
"""A config as its family reads it."""


def read_config(config: Mapping[str, Any], how: Reading = AS_IS, name: str = "") -> Spec:
    """The components of a Hugging Face config; raises KvtierError naming the field that is not understood."""
    fields = Fields(config)
    precision = Precision(how.kv_dtype, how.index_dtype, how.encoder_tokens)
    reader = READERS.get(fields.model_type)
    bound = False
    notes: tuple[str, ...] = ()
    try:
        if reader is None:
            known = "an architecture known here (--assume-full gives an upper bound)"
            raise bad(fields.prefix + "model_type", known, fields.model_type)
        with fields.understood():
            components = reader(fields, precision)
    except KvtierError:
        if not how.assume_full:
            raise
        components = upper_bound(fields, precision)
        bound = True
        notes = ("upper bound: every layer counted as full attention over all its heads",)
    if how.draft:
        components = [*components, *_draft(fields, components)]
    longest = fields.count("max_position_embeddings")
    used = how.kv_dtype or ("fp8" if reader is latent.deepseek_v4 else "bf16")
    notes += _quantized(config, how.kv_dtype)
    layers = fields.count("num_hidden_layers") or fields.count("decoder_layers") or len(components)
    heads = fields.count("num_attention_heads") or fields.count("decoder_attention_heads")
    return Spec(name or fields.model_type, used, tuple(merge(components)), longest, notes, bound, max(1, layers), heads)


def upper_bound(fields: Fields, p: Precision) -> list[Component]:
    """Every layer as full attention with as many heads as the config names, twice the width where widths differ."""
    dim = max(
        fields.head_dim, *(fields.count(k) for k in ("v_head_dim", "qk_head_dim", "global_head_dim", "swa_head_dim"))
    )
    heads = max(fields.kv_heads, fields.count("swa_num_key_value_heads"), fields.count("num_global_key_value_heads"))
    unit = attention.unit_bytes(p, heads, dim, dim)
    return [Component("assumed-full", Rule.LINEAR, fields.layers, unit, heads, 0, fields.heads * dim)]


def _draft(fields: Fields, components: list[Component]) -> list[Component]:
    """Layers that speculative decoding adds: as many as the config declares, each like a full layer of the model."""
    extra = max(fields.count(k) for k in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"))
    if not extra:
        raise bad("draft", "a config that declares draft layers (num_nextn_predict_layers)", "none")
    full = [c for c in merge(components) if c.rule is Rule.LINEAR]
    return [c._replace(name=f"draft-{c.name}", layers=extra) for c in full]


def _quantized(config: Mapping[str, Any], kv_dtype: str) -> tuple[str, ...]:
    """A note where the checkpoint declares a KV precision and the caller left it open."""
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if kv_dtype or not isinstance(scheme, Mapping):
        return ()
    return (f"the checkpoint declares {scheme.get('num_bits')}-bit KV; engines may follow it: see --kv-dtype",)
