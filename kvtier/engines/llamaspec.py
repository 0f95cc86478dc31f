"""Which cache a llama.cpp context's KV belongs to: its file, and every setting that changes a byte of KV."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Final

import llama_cpp

from kvtier.engines.llamastate import Format
from kvtier.engines.weights import weights_digest
from kvtier.identity import CacheSpec, GroupSpec
from kvtier.types import Kind, bad

CONTEXT: Final = (
    "type_k", "type_v", "flash_attn_type", "attention_type", "rope_scaling_type", "rope_freq_base", "rope_freq_scale",
    "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx",
)  # fmt: skip
"""Parameters of a context that KV depends on; its length, batches and threads are not among them."""
SPLIT: Final = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")


def refuse(llm: Any) -> None:
    """Raise bad_request naming what about a Llama keeps its KV from being shared."""
    model = llm._model.model  # noqa: SLF001 - the library shows its handles nowhere else
    recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    if recurrent or llama_cpp.llama_model_has_encoder(model):
        raise bad("llm", "a decoder whose state is KV for each token", "recurrent, hybrid or with an encoder")
    if llama_cpp.llama_model_n_swa(model) and not llm.context_params.swa_full:
        raise bad("swa_full", "True: else a model with a sliding window forgets KV that other prompts need")
    if llm.context_params.embeddings:
        raise bad("embedding", "False")
    if llm._logits_all:  # noqa: SLF001
        raise bad("logits_all", "False: a prefix that is loaded has no logits")
    if getattr(llm, "chat_handler", None) is not None:
        raise bad("chat_handler", "None: token ids do not say which images there are")
    for path in [*files(Path(llm.model_path)), *([Path(llm.lora_path)] if llm.lora_path else [])]:
        if replaced(path):
            raise bad("model_path", "the file that was loaded: another lies there now", str(path))


def spec_of(llm: Any, form: Format, page_tokens: int, name: str, salt: bytes, *, exact: bool) -> CacheSpec:
    """The token cache of a context."""
    params = llm.context_params
    version = f"{llama_cpp.__version__} {llama_cpp.LLAMA_STATE_SEQ_VERSION}.{llama_cpp.LLAMA_SESSION_VERSION}"
    return CacheSpec(
        model=name or llm.metadata.get("general.name") or Path(llm.model_path).stem,
        fingerprint=fingerprint(llm, exact=exact),
        kv_dtype=f"ggml {params.type_k}/{params.type_v}",
        page_tokens=page_tokens,
        groups=(GroupSpec(Kind.FULL, 1, 1, page_tokens * form.token_bytes),),
        layout=f"llama.cpp {hashlib.sha256(repr(form).encode()).hexdigest()}",
        backend=f"llama.cpp {version}",
        salt=salt,
    )


def fingerprint(llm: Any, *, exact: bool) -> bytes:
    """Digest of the model's files, its metadata after overrides, its LoRA adapter, and settings of the context."""
    settings: list[Any] = [(name, getattr(llm.context_params, name)) for name in CONTEXT]
    settings += [llm.kv_overrides, _long(llm)]
    if llm.lora_path:
        settings += [llm.lora_scale, weights_digest(llm.lora_path, {}, exact=exact).hex()]
    parts = [weights_digest(str(path), {}, exact=exact).hex() for path in files(Path(llm.model_path))[1:]]
    return weights_digest(llm.model_path, llm.metadata, *settings, *parts, exact=exact)


def files(path: Path) -> list[Path]:
    """The files that a model's first one begins."""
    found = SPLIT.fullmatch(path.name)
    return sorted(path.parent.glob(f"{found[1]}-?????-of-?????.gguf")) if found else [path]


def replaced(path: Path) -> bool:
    """Whether this process has mapped another file than lies there now, whose digest would be taken for its own."""
    name, here = str(path.resolve()), path.stat().st_ino
    mapped = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    return any(
        len(parts) == 6 and parts[5].removesuffix(" (deleted)") == name and int(parts[4]) != here for parts in mapped
    )


def _long(llm: Any) -> bool:
    """Whether the context is longer than the model's own, for which some models have other rope factors."""
    original = llm.context_params.yarn_orig_ctx or llm.metadata.get(
        f"{llm.metadata.get('general.architecture')}.rope.scaling.original_context_length"
    )
    return bool(llm.n_ctx() > int(original or llama_cpp.llama_model_n_ctx_train(llm._model.model)))  # noqa: SLF001
