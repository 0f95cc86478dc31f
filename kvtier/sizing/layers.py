"""What all architecture readers share: precision, the schedule of layer kinds, merging equal layers."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtier.sizing.dtypes import vector_bytes
from kvtier.sizing.fields import Fields
from kvtier.sizing.spec import Component
from kvtier.types import bad


class Precision(NamedTuple):
    """Precisions of KV and of sparse attention's index keys; '' is the family's own."""

    kv_dtype: str = ""
    index_dtype: str = ""
    encoder_tokens: int = 0

    def vector(self, d: int) -> int:
        """Bytes of one key or value of `d` elements."""
        return vector_bytes(self.kv_dtype or "bf16", d)

    def index_vector(self, d: int, own: str) -> int:
        """Bytes of one index key; `own` is the family's precision."""
        return vector_bytes(
            {"fp8": "fp8_index", "fp4": "fp4_index"}.get(self.index_dtype, self.index_dtype) or own, d, "index-dtype"
        )


FULL: Final = "full"
WINDOW: Final = "window"
CHUNK: Final = "chunk"
LINEAR: Final = "linear"
NONE: Final = "none"

KINDS: Final = {
    "full_attention": FULL, "attention": FULL, "full": FULL, "global": FULL, "global_attention": FULL,
    "deepseek_sparse_attention": FULL, "minimax_m3_sparse": FULL,
    "sliding_attention": WINDOW, "sliding_window": WINDOW, "local": WINDOW, "local_attention": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": LINEAR, "mamba": LINEAR, "conv": LINEAR,
    "moe": NONE, "mlp": NONE,
}  # fmt: skip
"""Layer types of configs -> what they keep."""

PATTERN: Final = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "gemma4_text": 6, "gemma4": 6,
                  "cohere2": 4}  # fmt: skip
"""Every how-many-th layer is a full one where a config does not say."""

WHOLLY_SLIDING: Final = ("mistral", "mixtral", "ministral", "ministral3", "phi3", "phimoe", "starcoder2")
"""Types for which a sliding_window alone means that all layers slide."""


def schedule(f: Fields, kinds: tuple[str, ...] = (FULL, WINDOW)) -> list[str]:
    """The kind of each layer; explicit lists win over patterns, patterns over the habits of a model type."""
    layers = _listed(f)
    if layers is None:
        layers = _by_habit(f)
    for n, kind in enumerate(layers):
        if kind not in kinds:
            raise bad(f"{f.prefix}layer_types[{n}]", f"one of {', '.join(kinds)} for {f.model_type}", kind)
    return layers


def _listed(f: Fields) -> list[str] | None:
    """The schedule that the config spells out."""
    types = f.get("layer_types")
    if types is None:
        return None
    n = f.layers if f.get("num_hidden_layers") else len(types)
    out = []
    for i, name in enumerate(f.listing("layer_types", n)[:n]):
        if name not in KINDS:
            raise bad(f"{f.prefix}layer_types[{i}]", f"one of {', '.join(KINDS)}", name)
        out.append(KINDS[name])
    return out


def _by_habit(f: Fields) -> list[str]:
    """The schedule that the model type implies."""
    n = f.layers
    window = f.get("sliding_window")
    pattern = f.get("sliding_window_pattern", PATTERN.get(f.model_type))
    if f.model_type == "gpt_oss":
        return [FULL if i % 2 else WINDOW for i in range(n)]
    if isinstance(pattern, str):  # 'LLLG' of EXAONE 4
        return [FULL if pattern[i % len(pattern)] == "G" else WINDOW for i in range(n)]
    if pattern is not None and window:
        every = f.whole("sliding_window_pattern", pattern)
        return [WINDOW if (i + 1) % every else FULL for i in range(n)]
    if not window or not _slides(f):
        return [FULL] * n
    first = f.count("max_window_layers") if f.get("use_sliding_window") is not None else 0
    return [WINDOW if i >= first else FULL for i in range(n)]


def _slides(f: Fields) -> bool:
    """Whether a sliding_window without a schedule is in force: the field alone proves nothing."""
    declared = f.get("use_sliding_window")
    if declared is not None:
        return bool(declared)
    if f.model_type not in WHOLLY_SLIDING:
        return False
    return f.whole("sliding_window") < (f.count("max_position_embeddings") or 1 << 62)


def owned(f: Fields, kinds: list[str]) -> list[str]:
    """The layers that own KV: the last num_kv_shared_layers read an earlier layer's; CLA shares within groups."""
    shared = f.count("num_kv_shared_layers")
    if shared >= len(kinds):
        raise f.refuse("num_kv_shared_layers", f"fewer than the {len(kinds)} layers")
    kept = kinds[: len(kinds) - shared]
    if f.get("use_cla"):
        return kept[:: f.whole("cla_share_factor", 2)]
    return kept


def merge(components: list[Component]) -> list[Component]:
    """Equal layers as one component, in the order of first appearance."""
    counts: dict[Component, int] = {}
    for c in components:
        key = c._replace(layers=0)
        counts[key] = counts.get(key, 0) + c.layers
    return [key._replace(layers=n) for key, n in counts.items() if n]
