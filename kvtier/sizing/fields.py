"""Reading a Hugging Face config: aliases, defaults of a model type, and errors that name the field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvtier.types import bad

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num"),
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "head_dim": ("attention_head_dim", "kv_channels", "d_kv"),
    "layer_types": ("layers_block_type",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "model_max_length", "n_ctx"),
}
"""Other names that checkpoints give the same field."""

DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3n_text": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512,
                     "num_kv_shared_layers": 15, "num_hidden_layers": 35},
    "gemma4_text": {"global_head_dim": 512, "sliding_window": 512},
    "cohere2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "head_dim": 64},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "mixtral": {"num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8},
}  # fmt: skip
"""What the model's own code assumes where its checkpoints leave a field out."""


MOST_LAYERS: Final = 1 << 14


class Fields:
    """The language model's part of a config; every access that fails names the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Unwrap `config`; raises KvtierError where there is no model_type."""
        flat = dict(config)
        where = ""
        for key in ("thinker_config", "text_config", "llm_config", "language_config"):
            inner = flat.get(key)
            if isinstance(inner, Mapping):
                flat = {"model_type": flat.get("model_type")} | dict(inner)
                where += f"{key}."
        self.prefix = where
        self.flat = flat
        kind = flat.get("model_type")
        if not isinstance(kind, str) or not kind:
            raise bad(f"{where}model_type", "the name of an architecture")
        self.model_type = kind
        self.last = "model_type"
        """The field that was asked for last without saying what is right there."""
        self.defaults = DEFAULTS.get(kind, {})

    def get(self, name: str, default: Any = None) -> Any:
        """The field, an alias of it, the model type's default, or `default`; null counts as absent."""
        self.last = name
        return self._find(name, default)

    def _find(self, name: str, default: Any = None) -> Any:
        for key in (name, *ALIASES.get(name, ())):
            value = self.flat.get(key)
            if value is not None:
                return value
        return self.defaults.get(name, default)

    def within(self, name: str) -> Fields:
        """The fields of an object in the config; none where it is absent. Raises KvtierError naming it."""
        return self.part(name, self.get(name, {}))

    def part(self, name: str, inner: Any) -> Fields:
        """The same of an object that was found in it by that name."""
        if not isinstance(inner, Mapping):
            raise bad(self.prefix + name, "an object", inner)
        part = Fields({**inner, "model_type": self.model_type})
        part.prefix = f"{self.prefix}{name}."
        return part

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive integer; raises KvtierError naming the field."""
        value = self._find(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise bad(self.prefix + name, "a positive integer", value)
        return value

    def count(self, name: str) -> int:
        """A non-negative integer, 0 when absent."""
        value = self._find(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise bad(self.prefix + name, "a non-negative integer", value)
        return value

    def listing(self, name: str, length: int) -> Sequence[Any]:
        """A list with at least one entry a layer; raises KvtierError naming the field."""
        value = self.get(name)
        if not isinstance(value, (list, tuple)) or len(value) < length:
            raise bad(self.prefix + name, f"a list of at least {length} entries", value)
        return value

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Values of another kind than their readers know are refused by the name of the field that was read last."""
        try:
            yield
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as exc:
            expected = f"what a {self.model_type} config has there ({exc})"
            raise bad(self.prefix + self.last, expected, self.flat.get(self.last)) from None

    def refuse(self, name: str, expected: str) -> Exception:
        """An error about a field that is there but not understood."""
        return bad(self.prefix + name, expected, self._find(name))

    @property
    def layers(self) -> int:
        """Decoder layers."""
        layers = self.whole("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self.refuse("num_hidden_layers", f"at most {MOST_LAYERS} layers")
        return layers

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.whole("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Key/value heads; as many as query heads where the config is silent."""
        return self.whole("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Width of a head; hidden size over heads where the config is silent."""
        given = self._find("head_dim")
        return self.whole("head_dim") if given is not None else max(1, self.whole("hidden_size") // self.heads)
