"""Whether weights were changed in this process: SGLang tells its storage nothing of it and keeps what is stored."""

from __future__ import annotations

import functools
from typing import Any, Final

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

from kvtier.types import bad

CHANGING: Final = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Methods of SGLang's that write weights which requests are then computed with."""

_changes = [0]


def count() -> int:
    """How often weights may have changed, or KV of before was dropped since: each counts when it begins and ends."""
    return _changes[0]


def watch() -> None:
    """Count from now on; raises bad_request where this release of SGLang changes weights in other ways.

    A flush counts too, once weights have changed: SGLang keeps KV of the old ones until then, and stores it.
    """
    for kind, name in [*((WeightUpdater, each) for each in CHANGING), (HiCacheController, "reset")]:
        method = getattr(kind, name, None)
        if method is None:
            raise bad("sglang", f"a release with {kind.__name__}.{name}: else changed weights would go unseen")
        if not hasattr(method, "kvtier"):
            setattr(kind, name, _counted(method, kind is WeightUpdater))


def _counted(method: Any, changes: bool) -> Any:
    """The method, with its calls counted; those that do not change weights only after one that did."""

    @functools.wraps(method)
    def counted(*args: Any, **options: Any) -> Any:
        step = int(changes or _changes[0] > 0)
        _changes[0] += step
        try:
            return method(*args, **options)
        finally:
            _changes[0] += step

    counted.kvtier = True  # type: ignore[attr-defined]
    return counted
