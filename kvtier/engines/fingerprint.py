"""Digest of a torch model: its configuration and its weights' bytes, so that no other weights answer for it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any, Final

import torch
import xxhash

from kvtier.engines.volatile import VOLATILE
from kvtier.types import bad

SAMPLES: Final = 1024
"""Elements of each tensor that the sampled digest reads; smaller tensors are read whole."""
CHUNK: Final = 1 << 24
"""Elements hashed at once by the exact digest."""


def fingerprint(model: Any, *, exact: bool = False) -> bytes:
    """32 bytes over the configuration and every tensor's name, type, shape and bytes: a spread sample, or all of them.

    The sample tells trained weights apart; `exact` also tells weights that differ in a single element. The two never
    give the same digest. Raises bad_request naming a tensor whose bytes cannot be read.
    """
    digest = hashlib.sha256(b"exact" if exact else b"sample")
    settings = {name: value for name, value in model.config.to_dict().items() if name not in VOLATILE}
    _add(digest, json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in tensors(model):
        _add(digest, f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        _add(digest, _bytes_of(name, tensor, exact))
    return digest.digest()


def version(model: Any) -> int:
    """A number that changes when weights are replaced or written in place through autograd-visible operations.

    Writes through `.data` and by other processes' kernels go unseen: whoever makes them calls `reset`.
    """
    return hash(tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for _, t in tensors(model)))  # noqa: SLF001


def adapters(model: Any) -> str:
    """PEFT's adapters in effect, with their scale, in each layer that has any: switching one leaves all weights alone.

    Their names and a digest; empty where there are none. Raises bad_request for prompts that are learnt, which have no
    tokens.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise bad("model", "adapters of weights: a learnt prompt has KV that no token names")
    names: set[str] = set()
    digest = hashlib.sha256()
    for layer, module in model.named_modules():
        if not isinstance(getattr(type(module), "disable_adapters", None), property):
            continue
        active = [] if module.disable_adapters else list(module.active_adapters)
        merged = sorted(getattr(module, "merged_adapters", ()))  # into the weights, through `.data`
        scales = getattr(module, "scaling", {})
        names.update(active, merged)
        _add(digest, repr((layer, [(name, scales.get(name)) for name in active], merged)).encode())
    return f"{','.join(sorted(names))} {digest.hexdigest()[:16]}" if names else ""


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers by name, those that are not saved with the model (rotary tables) included."""
    yield from sorted(model.named_parameters(remove_duplicate=False))
    yield from sorted(model.named_buffers(remove_duplicate=False))


def _add(digest: Any, field: bytes) -> None:
    """Append a length-prefixed field."""
    digest.update(struct.pack("<Q", len(field)) + field)


def _bytes_of(name: str, tensor: Any, exact: bool) -> bytes:
    """A spread sample of a tensor's bytes, or a digest of all of them."""
    if tensor.device.type == "meta":
        raise bad(f"model.{name}", "weights in memory, not on the meta device")
    try:
        row = tensor.detach().reshape(-1)
        if not exact:
            step = max(1, row.numel() // SAMPLES) | 1  # odd, so that it does not walk down one column
            return _raw(row[::step])
        state = xxhash.xxh3_128()
        for at in range(0, row.numel(), CHUNK):
            state.update(_raw(row[at : at + CHUNK]))
        return state.digest()
    except (RuntimeError, NotImplementedError, TypeError) as exc:
        raise bad(f"model.{name}", f"a tensor whose bytes can be read ({exc})") from exc


def _raw(row: Any) -> bytes:
    """Bytes of a row of elements of any type."""
    return bytes(row.contiguous().cpu().view(torch.uint8).numpy().data) if row.numel() else b""
