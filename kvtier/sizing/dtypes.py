"""Bytes of one head's vector in each KV precision, scales and zero points included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtier.types import bad


def _plain(bits: int) -> Callable[[int], int]:
    return lambda d: -(-d * bits // 8)


def _scaled(bits: int, group: int, scale_bytes: int) -> Callable[[int], int]:
    """`bits` an element and `scale_bytes` for each begun group of `group` elements; group 0: one scale a vector."""
    return lambda d: -(-d * bits // 8) + scale_bytes * (-(-d // group) if group else 1)


DTYPES: Final[dict[str, Callable[[int], int]]] = {
    "fp32": _plain(32),
    "bf16": _plain(16),
    "fp16": _plain(16),
    "fp8": _plain(8),
    "int8": _plain(8),
    "fp8_head": _scaled(8, 0, 4),  # one fp32 scale for each token and head
    "int8_head": _scaled(8, 0, 4),
    "mxfp8": _scaled(8, 32, 1),
    "nvfp4": _scaled(4, 16, 1),
    "int4": _scaled(4, 128, 4),  # fp16 scale and fp16 zero a group
    "int4_g128": _scaled(4, 128, 4),
    "int4_g64": _scaled(4, 64, 4),
    "int4_g32": _scaled(4, 32, 4),
    "q8_0": _scaled(8, 32, 2),
    "q4_0": _scaled(4, 32, 2),
    "fp4_index": _scaled(4, 32, 1),  # sparse attention's index keys
    "fp8_index": _scaled(8, 128, 4),
}
"""Name -> bytes of a vector of d elements."""

LATENT: Final = {"fp8_ds_mla": 656}
"""Whole entries of one token and layer of MLA's latent: 512 fp8, 4 fp32 scales, 64 bf16 of rope."""

KV_DTYPES: Final = [name for name in DTYPES if not name.endswith("_index")] + list(LATENT)
"""What --kv-dtype takes."""


ALIASES: Final = {
    "auto": "",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
"""What engines call the same."""


def parse_dtype(text: str, field: str = "kv-dtype") -> str:
    """The name of a KV precision, '' for the model's own; raises KvtierError for an unknown one."""
    name = ALIASES.get(text, text)
    if name and name not in KV_DTYPES:
        raise bad(field, f"auto or one of {', '.join(KV_DTYPES)}", text)
    return name


def vector_bytes(dtype: str, d: int, field: str = "kv-dtype") -> int:
    """Bytes of one vector of `d` elements; raises KvtierError for an unknown precision."""
    if dtype in LATENT:
        raise bad(field, "another precision, for a model that keeps no latent of 576", dtype)
    if dtype not in DTYPES:
        raise bad(field, f"one of {', '.join(KV_DTYPES)}", dtype)
    return DTYPES[dtype](d)


def ratio_to_bf16(dtype: str, d: int) -> float:
    """Bytes of a vector against bf16: 'KV4' is 0.27-0.31, not 0.25."""
    return vector_bytes(dtype, d) / (2 * d)
