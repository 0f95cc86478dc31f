"""Names of vLLM's chunks: its own keys, and where there are images or sound before a chunk's end, what those are.

vLLM's keys know an item by the name that somebody gave it, and tell a tier nothing of requests but a number. So each
request is noted where vLLM makes what it does tell.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from kvtier.engines.vllm.media import NOTHING, Media, Shown, takes_media

HASH_BYTES: Final = 32
"""Of a key; what follows says which group it is of."""


class Noted(NamedTuple):
    """The request of a context."""

    request: Any


class Naming:
    """Names of an engine's chunks. Thread-safe."""

    def __init__(self, vllm_config: Any) -> None:
        self._media = Media() if takes_media(vllm_config.model_config) else None
        if self._media is not None:
            watch()

    def show(self, context: Any) -> None:
        """A request has come."""
        noted = context.get_state(Noted)
        if self._media is not None and noted is not None:
            context.set_state(self._media.show(noted.request))
            if noted.request.resumable:  # it shows more later
                self._media.blind()

    def ready(self, context: Any) -> bool:
        """Whether names of a request's chunks are there without waiting."""
        shown = self._shown(context)
        return shown is None or shown.items.done()

    def sure(self, context: Any) -> bool:
        """Whether KV of a request is surely that of its items; in a thread, as it waits for what came before."""
        shown = self._shown(context)
        if shown is None or self._media is None or not shown.names:
            return shown is not None
        self._media.settle()
        return bool(self._media.sure(shown)) and shown.items.result() is not None

    def name(self, key: bytes, context: Any) -> bytes | None:
        """What a chunk is called; None where nobody knows what it is of."""
        shown = self._shown(context)
        items = None if shown is None else shown.items.result()
        if not items:
            return None if items is None else bytes(key)
        end = context.get_offload_key_position(key)
        if end is None:
            return None
        before = [(item.begin, item.content) for item in items if item.begin < end]
        if not before:
            return bytes(key)
        raw = msgspec.msgpack.encode([bytes(key[:HASH_BYTES]), before])
        return hashlib.sha256(raw).digest() + bytes(key[HASH_BYTES:])

    def names(self, keys: Iterable[bytes], context: Any) -> list[bytes]:
        """Names of chunks, without those that have none."""
        return [name for key in keys if (name := self.name(key, context)) is not None]

    def close(self) -> None:
        """Let go."""
        if self._media is not None:
            self._media.close()

    def _shown(self, context: Any) -> Shown | None:
        """What a request shows; None where nobody has told."""
        if self._media is None:
            return NOTHING
        shown: Shown | None = context.get_state(Shown)
        return shown


def watch() -> None:
    """Note requests from now on; where this release of vLLM tells of them otherwise, none is known, so none shared."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler  # noqa: PLC0415 - imports this tier

    make = getattr(scheduler, "_create_req_context", None)
    if make is None or hasattr(make, "kvtier"):
        return

    @functools.wraps(make)
    def noted(request: Any) -> Any:
        context = make(request)
        context.set_state(Noted(request))
        return context

    noted.kvtier = True  # type: ignore[attr-defined]
    scheduler._create_req_context = noted  # noqa: SLF001
