"""KV of a transformers DynamicCache as canonical pages and back: which models can, how their cells lie, the copies."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from kvtier.engines.states import States, states_of
from kvtier.identity import GroupSpec
from kvtier.types import Kind, bad

LENGTH_ROPES: Final = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose angles depend on the length of the whole sequence: a prefix's keys would not be reusable."""


WHOLE: Final = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose KV can be kept for every token."""
ATTENDING: Final = frozenset({"DynamicLayer", "LinearAttentionAndFullAttentionLayer"})
RECURRENT: Final = frozenset({"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"})
EMPTY: Final = frozenset({"DummyLayer"})
"""Layers of a cache by the names that releases of transformers give them."""


class Layout(NamedTuple):
    """How the KV of one model lies in pages: cells of [K rows, then V rows] by layer, then head."""

    page_tokens: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: Any
    devices: dict[int, Any]
    """The layers that have KV, and where each keeps it."""
    states: States | None = None
    """What recurrent layers keep besides; None: there are none."""

    @property
    def key_bytes(self) -> int:
        """Bytes of a cell's K rows."""
        return int(self.page_tokens * self.key_dim * self.dtype.itemsize)

    @property
    def group(self) -> GroupSpec:
        """The group of the layers that have KV."""
        value_bytes = int(self.page_tokens * self.value_dim * self.dtype.itemsize)
        return GroupSpec(Kind.FULL, len(self.devices), self.heads, self.key_bytes + value_bytes)

    def load(self, cache: Any, rows: Sequence[Any], pads: Sequence[int], columns: int) -> None:
        """Fill an empty cache's first columns: row i's are `pads[i]` of padding and then tokens of its pages.

        `rows`: uint8, [pages, item_bytes], in CPU memory, enough of them for each row.
        """
        for at, (number, device) in enumerate(self.devices.items()):
            shape = (len(rows), self.heads, columns)
            keys = torch.zeros((*shape, self.key_dim), dtype=self.dtype)
            values = torch.zeros((*shape, self.value_dim), dtype=self.dtype)
            for row, (pages, pad) in enumerate(zip(rows, pads, strict=True)):
                for out, tokens in zip((keys, values), self._tokens(pages, at), strict=True):
                    out[row, :, pad:] = tokens[:, : max(0, columns - pad)]
            cache.update(keys.to(device), values.to(device), number)

    def _tokens(self, pages: Any, layer: int) -> tuple[Any, Any]:
        """K and V of one layer of some pages: [heads, tokens, dim]."""
        count, group = len(pages), self.group
        cells = pages.view(count, group.layers, group.heads, group.cell_bytes)[:, layer].transpose(0, 1)
        keys, values = (part.contiguous().view(self.dtype) for part in cells.tensor_split([self.key_bytes], dim=-1))
        shape = (self.heads, count * self.page_tokens)
        return keys.view(*shape, self.key_dim), values.view(*shape, self.value_dim)

    def export(self, cache: Any, first: int, pages: int, row: int = 0, pad: int = 0) -> Any:
        """Bytes of pages [first, first + pages) of a row after its padding: uint8, [pages, item_bytes], on the CPU."""
        group = self.group
        out = torch.empty((pages, group.layers, group.heads, group.cell_bytes), dtype=torch.uint8)
        span = slice(pad + first * self.page_tokens, pad + (first + pages) * self.page_tokens)
        for cells, number in zip(out.unbind(1), self.devices, strict=True):
            layer, at = cache.layers[number], 0
            for tensor in (layer.keys, layer.values):
                part = tensor[row, :, span].contiguous().view(torch.uint8).reshape(group.heads, pages, -1)
                cells[:, :, at : at + part.shape[-1]].copy_(part.transpose(0, 1))
                at += part.shape[-1]
        return out.view(pages, group.item_bytes)

    def holds(self, cache: Any, rows: int = 1) -> bool:
        """Whether a cache's tensors are of this layout, as under the autocast mode of the probe, and of all tokens."""
        layers = [cache.layers[number] for number in self.devices if number < len(cache.layers)]
        return (
            len(layers) == len(self.devices)
            and all(
                layer.keys.dtype == layer.values.dtype == self.dtype
                and layer.keys.shape[0] == rows
                and layer.keys.shape[2] >= int(cache.get_seq_length())  # a window that rolls holds the last tokens only
                for layer in layers
            )
            and (self.states is None or self.states.holds(cache, rows))
        )


def cache_argument(model: Any) -> str:
    """What this model's release of transformers calls the argument that takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def new_cache(model: Any, static: int = 0) -> Any:
    """An empty cache; `static`: the tokens that a StaticCache is to have room for.

    Layers with a sliding window keep the KV of every token: a prefix may be continued from anywhere.
    """
    if static:
        cache = StaticCache(config=model.config, max_cache_len=static)
        cache.layers = [
            StaticLayer(static) if type(each) is StaticSlidingWindowLayer else each for each in cache.layers
        ]
        return cache
    kinds = list(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    if set(kinds) <= WHOLE:
        return DynamicCache()
    cache = DynamicCache(config=model.config)
    layers = zip(kinds, cache.layers, strict=False)
    cache.layers[: len(kinds)] = [DynamicLayer() if kind in WHOLE else layer for kind, layer in layers]
    return cache


def layout_of(model: Any, page_tokens: int) -> Layout:
    """How the model's KV lies in pages, learnt from one token; raises bad_request naming what cannot be shared yet."""
    _refuse(model.config)
    cache = new_cache(model)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    layers = _attending(cache)
    shapes = {
        (each.keys.shape[1], each.keys.shape[3], each.values.shape[3], each.keys.dtype) for each in layers.values()
    }
    if len(shapes) != 1:
        raise bad("model.layers", "layers with KV, of one shape", shapes or "recurrent state alone")
    heads, key_dim, value_dim, dtype = shapes.pop()
    devices = {number: layer.keys.device for number, layer in layers.items()}
    return Layout(page_tokens, heads, key_dim, value_dim, dtype, devices, states_of(cache))


def _attending(cache: Any) -> dict[int, Any]:
    """The layers of a cache that have KV, by number; raises bad_request for those whose cache cannot be shared."""
    found = {}
    for number, layer in enumerate(cache.layers):
        name = type(layer).__name__
        if name in ATTENDING and layer.is_initialized:
            if layer.keys.shape[:3] != layer.values.shape[:3] or layer.values.dtype != layer.keys.dtype:
                raise bad(f"model.layers[{number}]", "K and V of equal heads and type", tuple(layer.values.shape))
            found[number] = layer
        elif name not in RECURRENT | EMPTY:
            raise bad(f"model.layers[{number}]", "full attention with KV of its own, or recurrent state", name)
    return found


def _refuse(config: Any) -> None:
    """Raise bad_request for models whose KV of a prefix depends on what comes after it."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise bad("model.config.is_encoder_decoder", "a decoder-only model")
    if getattr(text, "use_bidirectional_attention", False):
        raise bad("model.config.use_bidirectional_attention", "causal attention")
    for name in ("rope_parameters", "rope_scaling"):
        kind = rope_kind(getattr(text, name, None))
        if kind in LENGTH_ROPES:
            raise bad(f"model.config.{name}", "rotary embeddings that do not depend on the whole length", kind)


def rope_kind(parameters: Any) -> str:
    """The kind of rotary embedding, or the worst of them where layers differ."""
    if not isinstance(parameters, dict):
        return ""
    kinds = {str(parameters.get("rope_type") or parameters.get("type") or "")}
    kinds |= {rope_kind(value) for value in parameters.values()}
    return next(iter(kinds & LENGTH_ROPES), "")
