"""Readers of models with recurrent state: delta nets, Mamba 1 and 2, lightning attention, short convolutions."""

from __future__ import annotations

from typing import Final

from kvtier.sizing.attention import layer
from kvtier.sizing.fields import Fields
from kvtier.sizing.layers import FULL, LINEAR, NONE, Precision, schedule
from kvtier.sizing.spec import Component, Rule
from kvtier.types import bad

STATE_BYTES: Final = 4
"""Recurrent state stays fp32 unless the config says otherwise."""

CONV_BYTES: Final = 2
"""Convolution tails are kept in the model's own precision."""

_WIDTH: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def state(name: str, heads: int, size: int) -> Component:
    """One layer's state of `size` bytes."""
    return Component(name, Rule.STATE, 1, size, heads)


def _state_width(f: Fields) -> int:
    """Bytes of an element of recurrent state."""
    name = f.get("mamba_ssm_dtype") or f.get("mamba_ssm_cache_dtype") or "float32"
    if name not in _WIDTH:
        raise bad(f.prefix + "mamba_ssm_dtype", f"one of {', '.join(_WIDTH)}", name)
    return _WIDTH[name]


def _softmax(f: Fields, p: Precision) -> Component:
    return layer(p, FULL, (f.heads, f.kv_heads), (f.head_dim,) * 2)


def delta_net(f: Fields, p: Precision) -> list[Component]:
    """Gated DeltaNet between full layers (Qwen3-Next, Qwen3.5)."""
    if f.get("layer_types") is not None:
        kinds = schedule(f, (FULL, LINEAR))
    else:
        every = f.whole("full_attention_interval", 4)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(f.layers)]
    keys, values = f.whole("linear_num_key_heads"), f.whole("linear_num_value_heads")
    dk, dv = f.whole("linear_key_head_dim"), f.whole("linear_value_head_dim")
    tail = f.whole("linear_conv_kernel_dim", 4) - 1
    linear = [
        state("delta-state", values, values * dv * dk * _state_width(f)),
        state("delta-conv", keys, (2 * keys * dk + values * dv) * tail * CONV_BYTES),
    ]
    return [_softmax(f, p)] * kinds.count(FULL) + linear * kinds.count(LINEAR)


def _mamba2(f: Fields, heads: int, d: int, n: int, groups: int, kernel: int) -> list[Component]:
    """One Mamba-2 layer."""
    return [
        state("mamba2-state", heads, heads * d * n * _state_width(f)),
        state("mamba2-conv", groups, (heads * d + 2 * groups * n) * (kernel - 1) * CONV_BYTES),
    ]


def nemotron_h(f: Fields, p: Precision) -> list[Component]:
    """Mamba-2, attention and feed-forward blocks by a pattern string or a list."""
    pattern = f.get("hybrid_override_pattern")
    if pattern is not None:
        names = {"M": LINEAR, "*": FULL, "E": NONE, "-": NONE}
        for n, mark in enumerate(pattern):
            if mark not in names:
                raise bad(f"{f.prefix}hybrid_override_pattern[{n}]", "one of M, *, E, -", mark)
        kinds = [names[mark] for mark in pattern]
    else:
        kinds = schedule(f, (FULL, LINEAR, NONE))
    mamba = _mamba2(f, f.whole("mamba_num_heads"), f.whole("mamba_head_dim"), f.whole("ssm_state_size"),
                    f.whole("n_groups"), f.whole("conv_kernel", 4))  # fmt: skip
    return [_softmax(f, p)] * kinds.count(FULL) + mamba * kinds.count(LINEAR)


def _bamba_mamba(f: Fields) -> list[Component]:
    """One Mamba-2 layer in the field names of Bamba and Falcon-H1."""
    heads = f.whole("mamba_n_heads")
    inner = f.count("mamba_d_ssm") or f.whole("mamba_expand", 2) * f.whole("hidden_size")
    d = f.get("mamba_d_head")
    width = d if isinstance(d, int) else inner // heads
    return _mamba2(f, heads, width, f.whole("mamba_d_state"), f.whole("mamba_n_groups", 1), f.whole("mamba_d_conv", 4))


def bamba(f: Fields, p: Precision) -> list[Component]:
    """Mamba-2 with a few attention layers (Bamba, Granite 4)."""
    if f.get("layer_types") is not None:
        full = schedule(f, (FULL, LINEAR)).count(FULL)
    else:
        full = len(f.get("attn_layer_indices") or [])
    return [_softmax(f, p)] * full + _bamba_mamba(f) * (f.layers - full)


def falcon_h1(f: Fields, p: Precision) -> list[Component]:
    """Attention and Mamba-2 side by side in every layer."""
    return [_softmax(f, p), *_bamba_mamba(f)] * f.layers


def _mamba1(inner: int, n: int, kernel: int) -> list[Component]:
    """One Mamba-1 layer; its channels divide by rank, one by one."""
    return [
        state("mamba1-state", inner, inner * n * STATE_BYTES),
        state("mamba1-conv", inner, inner * (kernel - 1) * CONV_BYTES),
    ]


def jamba(f: Fields, p: Precision) -> list[Component]:
    """Mamba-1 with one attention layer a period."""
    period, offset = f.whole("attn_layer_period"), f.count("attn_layer_offset")
    full = sum(i % period == offset for i in range(f.layers))
    inner = f.whole("mamba_expand", 2) * f.whole("hidden_size")
    mamba = _mamba1(inner, f.whole("mamba_d_state"), f.whole("mamba_d_conv", 4))
    return [_softmax(f, p)] * full + mamba * (f.layers - full)


def mamba1(f: Fields, _: Precision) -> list[Component]:
    """Mamba-1 alone."""
    inner = f.count("intermediate_size") or f.whole("expand", 2) * f.whole("hidden_size")
    return _mamba1(inner, f.whole("state_size"), f.whole("conv_kernel", 4)) * f.layers


def mamba2(f: Fields, _: Precision) -> list[Component]:
    """Mamba-2 alone."""
    one = _mamba2(f, f.heads, f.head_dim, f.whole("state_size"), f.whole("n_groups", 8), f.whole("conv_kernel", 4))
    return one * f.layers


def lightning(f: Fields, p: Precision) -> list[Component]:
    """MiniMax-Text-01: lightning attention with a softmax layer now and then."""
    if f.get("attn_type_list") is not None:
        full = sum(f.listing("attn_type_list", f.layers)[: f.layers])
    elif f.get("layer_types") is not None:
        full = schedule(f, (FULL, LINEAR)).count(FULL)
    else:
        raise f.refuse("attn_type_list", f"a list of {f.layers} entries, 1 for softmax")
    size = f.heads * f.head_dim**2 * STATE_BYTES
    return [_softmax(f, p)] * full + [state("lightning-state", f.heads, size)] * (f.layers - full)


def short_conv(f: Fields, p: Precision) -> list[Component]:
    """LFM2: gated short convolutions between attention layers."""
    if f.get("layer_types") is not None:
        full = schedule(f, (FULL, LINEAR)).count(FULL)
    elif f.get("full_attn_idxs") is None:
        raise f.refuse("layer_types", f"the kind of each of {f.layers} layers")
    else:  # of older checkpoints
        numbers = f.listing("full_attn_idxs", 0)
        if not all(n in range(f.layers) for n in numbers):
            raise f.refuse("full_attn_idxs", f"numbers of {f.layers} layers")
        full = len(set(numbers))
    conv = state("conv", 0, f.whole("hidden_size") * f.whole("conv_L_cache") * CONV_BYTES)
    return [_softmax(f, p)] * full + [conv] * (f.layers - full)
