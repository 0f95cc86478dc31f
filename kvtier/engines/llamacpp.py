"""llama.cpp on kvtier, by llama-cpp-python: `attach(llm)`, and prompts are computed from their longest cached prefix.

What comes out of `llm.generate`, by whichever way it is called, is as without; what is cached of a prompt is loaded
into the context before the rest is computed, and whole pages of prompts and answers are given back.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import llama_cpp
import numpy as np

from kvtier.client import Cache, Client, Path, page_keys
from kvtier.engines.llamaspec import refuse, spec_of
from kvtier.engines.llamastate import Bytes, State
from kvtier.types import KvtierError, bad

PAGE_TOKENS: Final = 64
LOAD_MS: Final = 3000
STORE_MS: Final = 500
SEQUENCE: Final = 0
"""The one that llama-cpp-python uses."""

_log = logging.getLogger("kvtier.llamacpp")


class Use(NamedTuple):
    """What kvtier did for one request."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Tokens whose KV was loaded instead of computed."""
    stored_pages: int = 0
    """Pages given back that nobody had."""


def attach(
    llm: Any,
    *,
    client: Client | None = None,
    name: str = "",
    page_tokens: int = PAGE_TOKENS,
    salt: bytes = b"",
    exact: bool = False,
) -> Attached:
    """Let a llama_cpp.Llama share its KV; raises bad_request naming what about it cannot be shared.

    All that goes through its `generate` is served: completions, chat, streams. `name` is shown to people and must be
    equal where KV is to be shared (default: the model's own name); what decides is a digest of the file and of what
    else changes the KV: a sample of its bytes, or with `exact` all of them. `salt` keeps users apart.
    """
    return Attached(llm, client, name, page_tokens, salt, exact)


class Attached:
    """Takes the place of `llm.generate` until closed. As thread-safe as Llama: not at all. A context manager."""

    def __init__(self, llm: Any, client: Client | None, name: str, page_tokens: int, salt: bytes, exact: bool) -> None:
        refuse(llm)
        self.llm = llm
        self.last = Use()
        """What kvtier did for the latest request."""
        self._page_tokens = page_tokens
        self._form = self._probe()
        self.spec = spec_of(llm, self._form, page_tokens, name, salt, exact=exact)
        self._owns_client = client is None
        self.client = client or Client(verify="always")
        self.cache: Cache = self.client.open(self.spec)
        self._original = llm.generate
        self._signature = inspect.signature(llm.generate)
        llm.generate = self._generate

    def close(self) -> None:
        """Give `generate` back to the Llama, and let go of the daemon where `attach` made the client."""
        self.llm.generate = self._original
        if self._owns_client:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _generate(self, tokens: Sequence[int], *args: Any, **options: Any) -> Iterator[int]:
        """`Llama.generate`, which computes what comes after the prefix that its context has."""
        tokens = list(tokens)
        said = self._signature.bind(tokens, *args, **options).arguments
        shares = getattr(self.llm, "chat_handler", None) is None  # it brings images, which tokens do not say
        hit = self.load(tokens) if shares and said.get("reset", True) else 0
        self.last = Use(len(tokens), hit)
        try:
            yield from self._original(tokens, *args, **options)
        finally:
            if shares:
                self.last = self.last._replace(stored_pages=self.store())

    # -- load ----------------------------------------------------------------------------------------------------

    def load(self, tokens: Sequence[int]) -> int:
        """Put the longest cached prefix of a prompt into the context, where it is longer than what is there.

        How many tokens were loaded. One token is always left to compute.
        """
        llm, size = self.llm, self._page_tokens
        most = min(len(tokens) - 1, llm.n_ctx() - 1) // size
        there = _common(llm.input_ids[: llm.n_tokens], tokens)
        if most * size <= there:
            return 0
        try:
            pages = self._read(tokens[: most * size])
        except KvtierError:
            _log.exception("loading a prefix")
            return 0
        loaded = len(pages) * size
        if loaded <= there:
            return 0
        state = self._form.build(pages, size)
        llm.n_tokens = 0  # Ctrl-C, which comes when llama.cpp returns, must not leave one's tokens beside another's KV
        if not self._put(state):
            return 0
        llm.input_ids[:loaded] = tokens[:loaded]
        llm.n_tokens, llm._requires_eval = loaded, True  # noqa: SLF001 - as Llama.load_state does
        return loaded

    def _read(self, tokens: Sequence[int]) -> Bytes:
        """The cached pages of a prefix: uint8 [pages, page_bytes]."""
        path = self.cache.match(page_keys(self.spec, tokens))
        try:
            with path.acquire(-1 if path.asking else path.pages, wait_ms=LOAD_MS) as lease:
                rows = np.empty((lease.pages, self.spec.groups[0].item_bytes), np.uint8)
                return rows[: lease.read_pages(0, 0, rows)]
        finally:
            path.close()

    def _put(self, state: Bytes) -> bool:
        """Make it the context's sequence; where llama.cpp does not take it, the context is empty."""
        context = self.llm._ctx.ctx  # noqa: SLF001 - the library offers no other way
        raw = (ctypes.c_uint8 * len(state)).from_buffer(state.data)
        if llama_cpp.llama_state_seq_set_data(context, raw, len(state), SEQUENCE) == len(state):
            return True
        _log.warning("llama.cpp did not take a state of %d bytes: computing", len(state))
        self._empty()
        return False

    def _empty(self) -> None:
        """A context without a token."""
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()  # noqa: SLF001

    # -- store ---------------------------------------------------------------------------------------------------

    def store(self) -> int:
        """Give back the whole pages of the context's sequence; how many the daemon did not have."""
        llm, size = self.llm, self._page_tokens
        pages = llm.n_tokens // size
        if not pages:
            return 0
        try:
            path = self.cache.match(page_keys(self.spec, np.array(llm.input_ids[: pages * size])))
            try:
                return self._give(path, pages) if path.pages < pages and self.client.connected else 0
            finally:
                path.close()
        except KvtierError:
            _log.exception("storing pages")
            return 0

    def _give(self, path: Path, pages: int) -> int:
        """Reserve, write and commit the pages after those that are there."""
        state = State.of(self._get())
        if state.form != self._form or state.tokens < pages * self._page_tokens:
            return 0
        first = began = path.pages
        while first < pages:
            with path.reserve(first, pages - first, wait_ms=STORE_MS) as held:
                if held.pages:
                    held.write_pages(0, first, state.pages(first, held.pages, self._page_tokens), summed=True)
                if not held.commit():
                    break
                first += held.pages
        return first - began

    def _get(self) -> Bytes:
        """The state of the context's sequence."""
        context = self.llm._ctx.ctx  # noqa: SLF001
        size = llama_cpp.llama_state_seq_get_size(context, SEQUENCE)
        out = np.empty(size, np.uint8)
        raw = (ctypes.c_uint8 * size).from_buffer(out)
        return out[: llama_cpp.llama_state_seq_get_data(context, raw, size, SEQUENCE)]

    def _probe(self) -> Any:
        """How this context writes its states, learnt from one token; what it held before is forgotten."""
        self._empty()
        self.llm.eval([max(0, self.llm.token_bos())])
        raw = self._get()
        form = State.of(raw).form
        if not np.array_equal(form.build(State.of(raw).pages(0, 1, 1), 1), raw) or not self._put(raw):
            raise bad("llm", "a release of llama.cpp whose sequence states are known here", llama_cpp.__version__)
        self._empty()
        return form


def _common(a: Any, b: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    count = min(len(a), len(b))
    apart = np.flatnonzero(np.asarray(a[:count]) != np.asarray(b[:count]))
    return int(apart[0]) if len(apart) else count
