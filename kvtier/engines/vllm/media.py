"""Images and sound of vLLM's requests: what they are by their bytes, and what turns them into tokens.

vLLM knows an item by a name: its own digest, or what a client says, beside the item (`uuid`) or in place of vLLM's
digest (`mm_hashes` of its generate endpoint). Its caches of embeddings and of KV go by that name. So pages are named by
the bytes that the model is given, and where one name was two things in an engine, it stores nothing of either.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

TURNING: Final = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""Settings that change what a model sees of an item, and that its bytes do not have."""
NAMES: Final = 1 << 18
"""Remembered: more than an engine's caches have items of."""
READ: Final = "kvtier_content"
"""Attribute of an item that was read: vLLM gives the same object again for the next turn of a conversation."""

_log = logging.getLogger("kvtier.vllm")


class Item(NamedTuple):
    """One item of a request."""

    begin: int
    """Its first token."""
    end: int
    content: bytes


class Shown(NamedTuple):
    """What a request shows."""

    names: tuple[str, ...]
    items: Future[tuple[Item, ...] | None]
    """None where the bytes of some are not here."""


NOTHING: Final = Shown((), Future())
NOTHING.items.set_result(())


class Media:
    """What an engine's items are: read by one thread, so that who came first is read first."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, "kvtier-media")
        self._lock = threading.Lock()
        self._unread: Counter[str] = Counter()
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        """By name, what it was first; empty where that is not known, or it was something else later."""
        self._blind = False

    def show(self, request: Any) -> Shown:
        """A request has come: begin to read its items."""
        features = request.mm_features or ()
        if not features:
            return NOTHING
        names = tuple(each.identifier for each in features)
        with self._lock:
            self._unread.update(names)
        return Shown(names, self._reader.submit(self._read, names, list(features), request.lora_request))

    def blind(self) -> None:
        """From now on there may be items that nobody shows."""
        self._blind = True

    def sure(self, shown: Shown) -> bool | None:
        """Whether the KV of a request is surely that of its items and no others; None: not known yet."""
        if not shown.names:
            return True
        with self._lock:
            if any(self._unread[name] for name in shown.names):
                return None
            return not self._blind and all(self._known.get(_short(name)) for name in shown.names)

    def settle(self) -> None:
        """Wait until all that was shown before has been read; for threads."""
        self._reader.submit(int).result()

    def close(self) -> None:
        """End the thread."""
        self._reader.shutdown(cancel_futures=True)

    def _read(self, names: Sequence[str], features: Sequence[Any], lora: Any) -> tuple[Item, ...] | None:
        """A request's items; in the thread."""
        found = [_item_or_none(each) for each in features]
        with self._lock:
            for name, each, item in zip(names, features, found, strict=True):
                # The encoder's own adapter is in the name, but not which files it has.
                own = lora.lora_path if lora is not None and name != each.mm_hash else ""
                content = hashlib.sha256(item.content + own.encode()).digest() if item is not None else b""
                before = self._known.pop(_short(name), content)
                self._known[_short(name)] = content if before == content else b""
                self._unread[name] -= 1
                if not self._unread[name]:
                    del self._unread[name]
                if before != content:
                    _log.warning("what is computed with an item named %.80s is not cached: it is two things", name)
            while len(self._known) > NAMES:
                self._known.popitem(last=False)
        items = tuple(item for item in found if item is not None)
        return items if len(items) == len(found) else None


def item_of(feature: Any) -> Item | None:
    """An item by the bytes that the model is given for it, and for which tokens; None where they are not here."""
    data, place = feature.data, feature.mm_position
    if data is None or "address" in data:  # they lie where only workers read them
        return None
    try:
        read = getattr(data, READ, b"") or _digest([feature.modality, *_fields(data)])
        spread = _digest([place.length, getattr(place, "is_embed", None)])
    except TypeError:
        return None
    if hasattr(data, "__dict__"):
        setattr(data, READ, read)
    return Item(place.offset, place.offset + place.length, hashlib.sha256(read + spread).digest())


def _item_or_none(feature: Any) -> Item | None:
    """The same, whatever is met with: who waits for what was read must hear that it was."""
    try:
        return item_of(feature)
    except Exception as exc:  # noqa: BLE001 - fields are whatever a model's processor made of an item
        _log.warning("an item named %.80s cannot be read: %s: %s", feature.identifier, type(exc).__name__, exc)
        return None


def _fields(data: Any) -> list[Any]:
    """What a model is given for an item, by name; raises TypeError where another process has it."""
    if any(data[name].data is None for name in data):
        raise TypeError
    how = {name: (type(data[name].field).__name__, getattr(data[name].field, "dim", 0)) for name in data}
    return [[name, *how[name], data[name].data] for name in sorted(data)]


def _digest(value: Any) -> bytes:
    """SHA-256 of nested tensors and plain values; raises TypeError for anything else."""
    sha = hashlib.sha256()
    _add(sha, value)
    return sha.digest()


def _add(sha: Any, value: Any) -> None:
    """Digest a value, with its type and size."""
    if isinstance(value, list | tuple):
        sha.update(f"[{len(value)}]".encode())
        for each in value:
            _add(sha, each)
    elif isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            sha.update(flat.view(torch.uint8).numpy().data)
    elif value is None or isinstance(value, bool | int | float | str):
        raw = repr(value).encode()
        sha.update(b"=%d;%b" % (len(raw), raw))
    else:
        raise TypeError(type(value).__name__)


def _short(name: str) -> bytes:
    """What a name is remembered by."""
    return hashlib.sha256(name.encode()).digest()[:16]


def takes_media(config: Any) -> bool:
    """Whether requests to a model may have images or sound."""
    media = getattr(config, "multimodal_config", None)
    return media is not None and not media.language_model_only


def turning(config: Any, folder: Path | None) -> list[str]:
    """What of an engine's settings, and of the processor beside its weights, turns media into tokens."""
    if not takes_media(config):
        return []
    found = {name: getattr(config.multimodal_config, name, None) for name in TURNING}
    files = sorted(folder.glob("*processor_config.json")) if folder is not None and folder.is_dir() else []
    digests = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return [json.dumps(found, sort_keys=True, default=str), *digests]
