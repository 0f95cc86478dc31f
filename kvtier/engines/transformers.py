"""Hugging Face transformers on kvtier: `attach(model).generate(...)` prefills only what no engine has prefilled yet.

One request at a time of one sequence: the longest cached prefix is loaded into a DynamicCache, transformers generates
from there as always, and whole pages of prompt and answer are given back. Without a daemon it generates all the same.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch
from transformers import GenerationConfig

from kvtier.client import Cache, Client, Path, page_keys
from kvtier.engines.dynamic import cache_argument, layout_of, new_cache
from kvtier.engines.fingerprint import fingerprint, version
from kvtier.identity import CacheSpec
from kvtier.types import Tier, bad

PAGE_TOKENS: Final = 32
RESERVE_MS: Final = 500
"""How long giving pages back may wait for room to be made."""

ALLOWED: Final = frozenset(vars(GenerationConfig())) | {
    "generation_config", "logits_processor", "stopping_criteria", "streamer", "tokenizer",
}  # fmt: skip
"""Options of `generate` that change which tokens come out, but not what KV a token's prefix has."""

ONE_SEQUENCE: Final = {"num_beams": 1, "num_return_sequences": 1}
UNTOUCHED: Final = ("cache_implementation", "prompt_lookup_num_tokens", "use_cache")


class Use(NamedTuple):
    """What kvtier did for one request."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens whose KV was loaded instead of computed."""
    tiers: tuple[tuple[str, int], ...] = ()
    """(tier, pages) from the root on: where the hit lay."""
    load_s: float = 0.0
    """Match, lease and copy into the cache."""
    stored_pages: int = 0
    """Pages committed that nobody had."""
    store_s: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt that was not computed."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def attach(
    model: Any,
    tokenizer: Any = None,
    *,
    client: Client | None = None,
    name: str = "",
    page_tokens: int = PAGE_TOKENS,
    salt: bytes = b"",
) -> Attached:
    """Let a loaded causal language model share its KV; raises bad_request naming what about it cannot be shared.

    `name` is shown to people and must be equal where KV is to be shared (default: the model's path); what decides is
    the fingerprint of configuration and weights. With `tokenizer`, prompts may be text. `salt` keeps users apart.
    """
    return Attached(model, tokenizer, client, name, page_tokens, salt)


class Attached:
    """A model with its KV in kvtier. Not thread-safe. A context manager that lets go of the daemon."""

    def __init__(
        self, model: Any, tokenizer: Any, client: Client | None, name: str, page_tokens: int, salt: bytes
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.client = client or Client()
        self.last = Use()
        """What kvtier did for the latest request."""
        self._owns_client = client is None
        self._name = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        self._page_tokens = page_tokens
        self._salt = salt
        self._identify(exact=False)

    def generate(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        """What `model.generate` gives for one sequence of token ids ([tokens] or [1, tokens]) or a text.

        Takes the options of GenerationConfig and logits_processor, stopping_criteria, streamer. Raises bad_request
        for inputs that token ids do not identify (images, embeddings, padding), for several sequences and beams.
        """
        ids = self._ids(input_ids)
        self._check(ids, attention_mask, options)
        self._notice_new_weights()
        began = time.perf_counter()
        cache = new_cache(self.model)
        # One token is always left to compute: its logits choose the first new one.
        path = self.cache.match(page_keys(self.spec, ids[0, :-1].cpu().numpy()))
        tiers = tuple((Tier(segment.tier).name.lower(), segment.pages) for segment in path.segments)
        pages = self._load(path, cache)
        loaded = time.perf_counter()
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **{self._argument: cache}, **options)
        ended = time.perf_counter()
        stored = self._store(path, cache, getattr(out, "sequences", out)[0])
        path.close()
        hit = pages * self._page_tokens
        self.last = Use(ids.shape[1], hit, tiers, loaded - began, stored, time.perf_counter() - ended)
        return out

    def reset(self) -> None:
        """Forget all KV of this model, here and in every engine that shares it: the weights have changed."""
        self.cache.reset()
        self._version = version(self.model)

    def refingerprint(self) -> bytes:
        """Read every byte of the weights again and share KV only with engines that have the very same; the digest.

        Happens by itself before a request when torch can see that weights were replaced or written in place.
        """
        self._identify(exact=True)
        return self.spec.fingerprint

    def close(self) -> None:
        """Let go of the daemon, where `attach` made the client."""
        if self._owns_client:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- identity ------------------------------------------------------------------------------------------------

    def _identify(self, *, exact: bool) -> None:
        """Open the cache of the model as it is now."""
        self._argument = cache_argument(self.model)
        self.layout = layout_of(self.model, self._page_tokens)
        self._adapter = _adapters(self.model)
        self._version = version(self.model)
        self.spec = CacheSpec(
            model=self._name,
            fingerprint=fingerprint(self.model, exact=exact),
            kv_dtype=str(self.layout.dtype).removeprefix("torch."),
            page_tokens=self._page_tokens,
            groups=(self.layout.group,),
            adapter=self._adapter,
            salt=self._salt,
        )
        self.cache: Cache = self.client.open(self.spec)

    def _notice_new_weights(self) -> None:
        """Never serve KV of weights that are gone."""
        if version(self.model) != self._version or _adapters(self.model) != self._adapter:
            self.refingerprint()

    # -- what comes in -------------------------------------------------------------------------------------------

    def _ids(self, prompt: Any) -> Any:
        """One row of token ids on the model's device."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise bad("input_ids", "token ids (attach was given no tokenizer)", prompt)
            prompt = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = torch.as_tensor(prompt)
        ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1] or ids.is_floating_point():
            raise bad("input_ids", "one sequence of at least one token id", tuple(ids.shape))
        return ids.to(self.model.device)

    def _check(self, ids: Any, mask: Any, options: dict[str, Any]) -> None:
        """Raise bad_request for what would give KV that the token ids do not name."""
        if self.model.training:
            raise bad("model", "evaluation mode (dropout would go into the KV)")
        if mask is not None and (tuple(mask.shape) != tuple(ids.shape) or not bool(mask.bool().all())):
            raise bad("attention_mask", "ones for every token (no padding)")
        for name in options:
            if name not in ALLOWED:
                raise bad(name, "only what token ids identify and options of GenerationConfig")
        for name, value in ONE_SEQUENCE.items():
            if (got := self._option(name, options)) not in (None, value):
                raise bad(name, str(value), got)
        for name in UNTOUCHED:
            if (got := self._option(name, options)) not in (None, True):
                raise bad(name, "nothing: kvtier brings the cache", got)

    def _option(self, name: str, options: dict[str, Any]) -> Any:
        """The value of a generation option that will be in effect."""
        default = options.get("generation_config") or self.model.generation_config
        return options.get(name, getattr(default, name, None))

    # -- pages ---------------------------------------------------------------------------------------------------

    def _load(self, path: Path, cache: Any) -> int:
        """Copy the cached prefix into `cache`; how many pages it was. A page that is lost or wrong ends the prefix."""
        if not (path.pages or path.asking):
            return 0
        with path.acquire(-1 if path.asking else path.pages) as lease:
            rows = torch.empty((lease.pages, self.layout.group.item_bytes), dtype=torch.uint8)
            pages = 0
            while pages < lease.pages and lease.read(0, pages, rows[pages].numpy()):
                pages += 1
        if pages:
            self.layout.load(cache, rows[:pages])
        return pages

    def _store(self, path: Path, cache: Any, tokens: Any) -> int:
        """Give back the whole pages of `cache`; how many the daemon did not have."""
        length = min(cache.get_seq_length(), len(tokens))  # the last token's KV has not been computed
        last = length // self._page_tokens
        if not self.layout.holds(cache):
            return 0
        keys = page_keys(self.spec, tokens[:length].cpu().numpy())
        path.extend(keys[len(path.keys) :])
        stored, first = 0, path.pages
        while first < last:
            with path.reserve(first, last - first, wait_ms=RESERVE_MS) as held:
                if not held.pages:
                    break
                rows = self.layout.export(cache, first, held.pages)
                written = sum(held.write(0, first + i, rows[i].numpy()) for i in range(held.pages))
                if not held.commit():
                    break
                stored += written
                first += held.pages
        return stored


def _adapters(model: Any) -> str:
    """Names of the LoRA adapters in effect; switching one leaves the weights' bytes alone."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return ""
    return ",".join(model.active_adapters())
