"""Whether weights were changed in this process: SGLang tells its storage nothing of it and keeps what is stored."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from kvtier.types import bad

CHANGING: Final = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""Methods of SGLang's that write weights which requests are then computed with: begin undoes what was made of them for
quantized layers, and end makes it again."""


class _Seen:
    """What has happened in this process."""

    watched = False
    count = 0
    stale = False
    """SGLang may have KV of older weights than now: they have changed and it has not flushed since."""


def count() -> int:
    """How often weights may have changed, or KV of older ones was dropped: each counts when it begins and ends."""
    return _Seen.count


def flushed() -> None:
    """SGLang has dropped all of its KV, where nothing of HiCache's says so."""
    _Seen.count += int(_Seen.stale)
    _Seen.stale = False


def watch() -> None:
    """Count from now on; raises bad_request where this release of SGLang changes weights in other ways.

    The first flush after a change counts too: SGLang keeps KV of the old weights until then, and stores it. A storage
    that is attached to an engine that runs begins as after a change: nobody has seen what was before.
    """
    if not _Seen.watched and _runs():
        _Seen.count, _Seen.stale = 1, True
    _Seen.watched = True
    for kind, name in [*((WeightUpdater, each) for each in CHANGING), (HiCacheController, "reset")]:
        method = getattr(kind, name, None)
        if method is None:
            raise bad("sglang", f"a release with {kind.__name__}.{name}: else changed weights would go unseen")
        if not hasattr(method, "kvtier"):
            setattr(kind, name, _counted(method, kind is WeightUpdater))


def _runs() -> bool:
    """Whether the controller that attaches this storage was there before."""
    frame, found = sys._getframe(), False  # noqa: SLF001 - SGLang does not say when it attaches
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), HiCacheController):
            found = True
            if frame.f_code.co_name == "__init__":
                return False
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _counted(method: Any, changes: bool) -> Any:
    """The method, with its calls counted; those that flush only where there may be something to drop."""

    @functools.wraps(method)
    def counted(*args: Any, **options: Any) -> Any:
        step = int(changes or _Seen.stale)
        _Seen.count += step
        _Seen.stale |= changes
        try:
            result = method(*args, **options)
        finally:
            _Seen.count += step
        _Seen.stale = changes
        return result

    counted.kvtier = True  # type: ignore[attr-defined]
    return counted
