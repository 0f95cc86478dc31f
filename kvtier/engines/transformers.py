"""Hugging Face transformers on kvtier: `attach(model).generate(...)` prefills only what no engine has prefilled yet.

The longest cached prefix of one sequence, or of a batch padded on the left, is loaded into a dynamic or static cache;
transformers generates from there as always, and whole pages of prompts and answers are given back. Without a daemon it
generates all the same.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch
from transformers import GenerationConfig
from transformers import __version__ as release

from kvtier.client import Cache, Client, Path, page_keys
from kvtier.engines.dynamic import cache_argument, layout_of, new_cache
from kvtier.engines.fingerprint import adapters, fingerprint, version
from kvtier.engines.images import INPUTS, TYPES, Images, forget_positions, placeholder
from kvtier.engines.points import Points
from kvtier.identity import CacheSpec
from kvtier.types import Tier, bad

PAGE_TOKENS: Final = 32
RESERVE_MS: Final = 500
"""How long giving pages back may wait for room to be made."""

ALLOWED: Final = frozenset(vars(GenerationConfig())) | {
    "generation_config", "logits_processor", "stopping_criteria", "streamer", "tokenizer",
}  # fmt: skip
"""Options of `generate` that change which tokens come out, but not what KV a token's prefix has."""

PLAIN: Final = {"num_beams": 1, "num_return_sequences": 1, "token_healing": False}
"""One sequence a row, of the very tokens that were given."""
ALONE: Final = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Guesses at what comes: their tokens pass through the cache too, and some write into layers of the model's own."""
CACHES: Final = frozenset({None, "dynamic", "static"})
PREFILL: Final[dict[str, Any]] = PLAIN | {
    "max_new_tokens": 1, "do_sample": False, "use_cache": True, "cache_implementation": None,
}  # fmt: skip
"""A `generate` that computes its tokens and nothing else: what it chooses next is dropped."""


class Read(NamedTuple):
    """What was read of a path."""

    pages: Any
    """uint8, [pages, item_bytes]."""
    state: Any = None
    """uint8, [item_bytes]: the state after them, where the model keeps one."""


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
        """What `model.generate` gives for token ids ([tokens] or [rows, tokens], padded on the left) or a text.

        Takes the options of GenerationConfig (cache_implementation: dynamic or static), logits_processor,
        stopping_criteria, streamer, and for one sequence its images as the model's processor gives them. Raises
        bad_request for inputs that neither identify (embeddings, padding elsewhere), for several sequences a row and
        beams. The rows of a batch load equally many columns.
        """
        ids = self._ids(input_ids)
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask).to(ids.device)
        given = {name: options.pop(name) for name in (*INPUTS, TYPES) if options.get(name) is not None}
        pads = self._check(ids, mask, options)
        images = self._images(ids, pads, given)
        self._notice_new_weights()
        began = time.perf_counter()
        cache = new_cache(self.model, self._static(ids, options))
        # One token is always left to compute: its logits choose the first new one.
        prompts = [row[pad:-1].cpu().numpy() for row, pad in zip(ids, pads, strict=True)]
        paths = [self.cache.match(self._keys(prompt, images)) for prompt in prompts]
        tiers = tuple((Tier(segment.tier).name.lower(), segment.pages) for p in paths for segment in p.segments)
        columns = self._load(paths, pads, cache, images)
        loaded = time.perf_counter()
        points = self._prefill(ids, mask, cache, pads, columns, [path.known for path in paths])
        if points is not None:
            options["stopping_criteria"] = points.watch(options.get("stopping_criteria"))
        given = {name: given[name] for name in given if name not in INPUTS} | images.rest(columns - pads[0])
        out = self.model.generate(ids, attention_mask=mask, **{self._argument: cache}, **given, **options)
        ended = time.perf_counter()
        rows = getattr(out, "sequences", out)
        stored = self._store_rows(paths, pads, cache, rows, points, images)
        hit = sum(max(0, columns - pad) for pad in pads)
        self.last = Use(ids.numel() - sum(pads), hit, tiers, loaded - began, stored, time.perf_counter() - ended)
        return out

    def reset(self) -> None:
        """Forget all KV of this model, here and in every engine that shares it: the weights have changed.

        They are read again, whole: what comes is shared only with engines that have the very same.
        """
        self.cache.reset()
        self.refingerprint()

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
        """Open the cache of the model as it is now; where that ends early, the next request does it again."""
        self._version: int | None = None
        seen, adapter = version(self.model), adapters(self.model)
        self._argument = cache_argument(self.model)
        self.layout = layout_of(self.model, self._page_tokens)
        states = self.layout.states
        self.spec = CacheSpec(
            model=self._name,
            fingerprint=fingerprint(self.model, exact=exact),
            kv_dtype=str(self.layout.dtype).removeprefix("torch."),
            page_tokens=self._page_tokens,
            groups=(self.layout.group, *([states.group] if states else ())),
            backend=f"transformers {release}" if states else "",
            adapter=adapter,
            salt=self._salt,
            extras=placeholder(self.model.config) is not None,
        )
        self.cache: Cache = self.client.open(self.spec)
        self._version, self._adapter = seen, adapter

    def _notice_new_weights(self) -> None:
        """Never serve KV of weights that are gone."""
        if version(self.model) != self._version or adapters(self.model) != self._adapter:
            self.refingerprint()

    # -- what comes in -------------------------------------------------------------------------------------------

    def _ids(self, prompt: Any) -> Any:
        """Rows of token ids on the model's device."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise bad("input_ids", "token ids (attach was given no tokenizer)", prompt)
            prompt = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        ids = torch.as_tensor(prompt)
        ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
        if ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
            raise bad("input_ids", "rows of at least one token id", tuple(ids.shape))
        return ids.to(self.model.device)

    def _check(self, ids: Any, mask: Any, options: dict[str, Any]) -> list[int]:
        """How many columns of padding each row has; raises bad_request for KV that the token ids do not name."""
        if self.model.training:
            raise bad("model", "evaluation mode (dropout would go into the KV)")
        if tuple(mask.shape) != tuple(ids.shape) or not bool((mask[:, 1:] >= mask[:, :-1]).all() and mask[:, -1].all()):
            raise bad("attention_mask", "ones for every token, padding on the left only")
        for name in options:
            if name not in ALLOWED:
                raise bad(name, "only what token ids identify and options of GenerationConfig")
        for name, value in PLAIN.items():
            if (got := self._option(name, options)) not in (None, value):
                raise bad(name, str(value), got)
        for name in ALONE:
            if got := self._option(name, options):
                raise bad(name, "nothing: what is guessed would be in the KV", got)
        if (got := self._option("use_cache", options)) not in (None, True):
            raise bad("use_cache", "nothing: kvtier brings the cache", got)
        if (got := self._option("cache_implementation", options)) not in CACHES:
            raise bad("cache_implementation", "dynamic or static", got)
        return [int(pad) for pad in (mask == 0).sum(dim=1)]

    def _images(self, ids: Any, pads: list[int], given: dict[str, Any]) -> Images:
        """The images of a request, of which there may be none; raises bad_request where there cannot be any."""
        token = placeholder(self.model.config)
        if token is not None:
            forget_positions(self.model)
        if given:
            what = next(iter(given))
            if token is None:
                raise bad(what, "nothing: the model's configuration names no token for images")
            if len(ids) > 1 and given.keys() - {TYPES}:
                raise bad(what, "one sequence where there are images", len(ids))
            if self.layout.states is not None:
                raise bad(what, "nothing: images and recurrent state are not shared together yet")
        return Images(token, ids[0, pads[0] :], given)

    def _keys(self, tokens: Any, images: Images) -> bytes:
        """Keys of the whole pages of a row of tokens."""
        return page_keys(self.spec, tokens, images.extras(self._page_tokens))

    def _static(self, ids: Any, options: dict[str, Any]) -> int:
        """Tokens that a StaticCache must have room for; 0 where none is asked for. kvtier brings it itself."""
        kind = self._option("cache_implementation", options)
        if kind is not None:
            options["cache_implementation"] = None
        if kind != "static":
            return 0
        new = self._option("max_new_tokens", options)
        return int(ids.shape[1] + new if new is not None else self._option("max_length", options) or ids.shape[1] + 20)

    def _option(self, name: str, options: dict[str, Any]) -> Any:
        """The value of a generation option that will be in effect."""
        default = options.get("generation_config") or self.model.generation_config
        return options.get(name, getattr(default, name, None))

    # -- pages ---------------------------------------------------------------------------------------------------

    def _load(self, paths: list[Path], pads: list[int], cache: Any, images: Images) -> int:
        """Copy the cached prefixes into `cache`; how many columns it has then: as many as every row has.

        Where the model keeps states, that is where every row has a state point.
        """
        states, size = self.layout.states, self._page_tokens
        if states is not None and not Points.possible(size, pads):
            return 0
        rows = [self._read(path) for path in paths]
        ends = [pad + len(row.pages) * size for pad, row in zip(pads, rows, strict=True)]
        while states is not None and max(ends) > min(ends) > max(pads):
            limits = [(min(ends) - pad) // size for pad in pads]
            rows = [self._read(path, limit) for path, limit in zip(paths, limits, strict=True)]
            ends = [pad + len(row.pages) * size for pad, row in zip(pads, rows, strict=True)]
        columns = pads[0] + images.fits(min(ends) - pads[0])
        if columns <= (min(pads) if states is None else max(pads)):
            return 0
        self.layout.load(cache, [row.pages for row in rows], pads, columns)
        if states is not None:
            states.put(cache, [row.state for row in rows])
        return columns

    def _read(self, path: Path, limit: int = -1) -> Read:
        """The cached pages of a path (of the first `limit`), and the state after them.

        One that is lost or wrong ends them; without its state, a page is nothing.
        """
        group, states = self.layout.group, self.layout.states
        nothing = Read(torch.empty((0, group.item_bytes), dtype=torch.uint8))
        if not (path.pages or path.asking) or not limit:
            return nothing
        with path.acquire(limit if limit > 0 or path.asking else path.pages) as lease:
            rows = torch.empty((lease.pages, group.item_bytes), dtype=torch.uint8)
            pages = 0
            while pages < lease.pages and lease.read(0, pages, rows[pages].numpy()):
                pages += 1
            if states is None:
                return Read(rows[:pages])
            state = torch.empty(states.group.item_bytes, dtype=torch.uint8)
            whole = pages and pages == lease.pages and lease.read(1, pages - 1, state.numpy())
        return Read(rows, state) if whole else nothing

    def _prefill(
        self, ids: Any, mask: Any, cache: Any, pads: list[int], loaded: int, known: list[int]
    ) -> Points | None:
        """Where the model keeps states: compute the prompt up to its last state point; all that were taken."""
        states = self.layout.states
        if states is None or not Points.possible(self._page_tokens, pads):
            return None
        points = Points(states, cache, self._page_tokens, pads)
        for column in points.stops(loaded, ids.shape[1], known):
            part = {"attention_mask": mask[:, :column], self._argument: cache}
            self.model.generate(ids[:, :column], **part, **PREFILL)
            points.take(column)
        return points

    def _store_rows(
        self, paths: list[Path], pads: list[int], cache: Any, rows: Any, points: Points | None, images: Images
    ) -> int:
        """Give back the whole pages of every row; how many the daemon did not have."""
        length, stored = int(cache.get_seq_length()), 0  # the last token's KV has not been computed
        if self.layout.holds(cache, len(paths)) and (self.layout.states is None or points is not None):
            for row, (path, pad) in enumerate(zip(paths, pads, strict=True)):
                tokens = rows[row, pad : min(length, len(rows[row]))].cpu().numpy()
                path.extend(self._keys(tokens, images)[len(path.keys) :])
                last = len(tokens) // self._page_tokens
                stored += self._store(path, cache, last, row, pad, points.items(row) if points else {})
        for path in paths:
            path.close()
        return stored

    def _store(self, path: Path, cache: Any, last: int, row: int, pad: int, states: dict[int, Any]) -> int:
        """Give back `last` whole pages of one row, and states by page; how many pages the daemon did not have."""
        stored, first = 0, path.pages
        while first < last:
            wants = [(1, [page for page in states if first <= page < last])] if states else []
            with path.reserve(first, last - first, wants, wait_ms=RESERVE_MS) as held:
                if not held.pages:
                    break
                pages = self.layout.export(cache, first, held.pages, row, pad)
                written = sum(held.write(0, first + i, pages[i].numpy()) for i in range(held.pages))
                for page in range(first, first + held.pages):
                    if page in states:
                        held.write(1, page, states[page].numpy())
                if not held.commit():
                    break
                stored += written
                first += held.pages
        return stored
